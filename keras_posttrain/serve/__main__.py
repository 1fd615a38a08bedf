"""`python -m keras_posttrain.serve`: a server of the Tinker API."""

import argparse
import signal
import sys
import threading

from keras_posttrain import _console
from keras_posttrain.models.lora import LoRA
from keras_posttrain.serve.server import TinkerServer
from keras_posttrain.tasks.sft_task import SFTTask

# LoRA's alpha on Thinking Machines' own server.
ALPHA = 32
REFUSED = 2


def parser():
    found = argparse.ArgumentParser(
        prog="python -m keras_posttrain.serve",
        description="Serves the Tinker API on this machine's loopback "
        "address, for the tinker client and the Tinker cookbook.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--preset", required=True, metavar="PRESET",
        help="KerasHub's, hf://..., or a Hugging Face directory")  # fmt: skip
    add("--name", help="how clients call the model (the preset)")
    add("--tokenizer", metavar="ID",
        help="what clients give to transformers for the tokenizer (the "
        "preset)")  # fmt: skip
    add("--lora-rank", type=int, default=32, metavar="N",
        help="the most that clients may ask for (32)")  # fmt: skip
    add("--sequence-length", type=int, default=2048, metavar="N",
        help="the most tokens of a sequence (2048)")  # fmt: skip
    add("--micro-batch-size", type=int, default=8, metavar="N",
        help="sequences that pass through the model at once (8)")  # fmt: skip
    add("--dtype", metavar="DTYPE", help="such as bfloat16")
    add("--quantize", metavar="KIND", help="int8, int4 or nf4")
    add("--remat", choices=("none", "full"), default="none",
        help="full: less memory, more work")  # fmt: skip
    add("--state", default="tinker-state", metavar="DIR",
        help="folder of the checkpoints (tinker-state)")  # fmt: skip
    add("--key", help="the API key of clients, tml-... (a new one)")
    add("--port", type=int, default=0, metavar="N", help="(a free one)")
    add("--max-models", type=int, default=16, metavar="N",
        help="adapters in training at once (16)")  # fmt: skip
    return found


def main(arguments=None):
    """Serves until it is interrupted, and returns the exit status."""
    given = parser().parse_args(arguments)
    try:
        task = SFTTask.from_preset(
            given.preset,
            lora=LoRA(rank=given.lora_rank, alpha=ALPHA),
            sequence_length=given.sequence_length,
            dtype=given.dtype,
            quantize=given.quantize,
            remat=given.remat,
        )
        server = TinkerServer(
            task,
            given.state,
            name=given.name,
            tokenizer=given.tokenizer,
            key=given.key,
            port=given.port,
            micro_batch_size=given.micro_batch_size,
            max_models=given.max_models,
        )
    except (ValueError, OSError) as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return REFUSED
    ended = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: ended.set())
    with server:
        _console.say(
            f"export TINKER_BASE_URL={server.url}\n"
            f"export TINKER_API_KEY={server.key}"
        )
        sys.stdout.flush()
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
