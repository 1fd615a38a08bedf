"""Sampling with one and with several vLLM servers, one core each.

    .venv-vllm/bin/python benchmarks/replicas.py       # `make vllm` made it

Each server has one thread on a core of its own: the figures show what it gains
to spread requests, and not what the threads of one server gain. The requests
are those of a GRPO rollout: `--prompts` prompts, of which each second one
begins like the one before, eight samples each. Tokens per second are medians
of `--passes`; so is the time of a sync of all weights, with the probe of each
server. Tables are written to `results/replicas.md` and figures to
`results/replicas.json`.
"""

import argparse
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
SAMPLES, TOKENS, PROMPT = 8, 64, 128


def make_task():
    import keras_posttrain as kpt  # sets the backend

    # isort: split
    import keras
    import keras_hub
    from sync import SIZES

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        **SIZES["14m"], tie_word_embeddings=False
    )
    causal_lm = keras_hub.models.Llama3CausalLM(backbone)
    return kpt.SFTTask(causal_lm, None, sequence_length=256)


def start(folder, core, key):
    """Starts a server on a core; returns its process and its address."""
    from keras_posttrain.rollout.vllm import worker

    socket = folder / f"socket-{core}"
    options = (
        f"--model {folder}/model --uds {socket} --load-format dummy --dtype "
        "float32 --max-model-len 257 --enforce-eager "
        f"--no-enable-chunked-prefill --kv-cache-memory-bytes {2**29} "
        "--uvicorn-log-level error"
    )
    process = subprocess.Popen(
        ["taskset", "-c", f"{core}", sys.executable, worker.__file__]
        + options.split(),
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_API_KEY": key,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_PLUGINS": "",
        },
        start_new_session=True,
    )
    return process, f"unix:{socket}"


def requests(count):
    import numpy as np

    from keras_posttrain.rollout import Request

    rng = np.random.default_rng(0)
    ids = rng.integers(3, 16000, (count, PROMPT))
    ids[1::2, : PROMPT // 2] = ids[: count - count % 2 : 2, : PROMPT // 2]
    return [
        Request(x, num_generations=SAMPLES, max_tokens=TOKENS, seed=i)
        for i, x in enumerate(ids.tolist())
    ]


def measure(task, urls, key, options):
    import keras_posttrain as kpt

    engine = kpt.rollout.VLLMRollout(urls=urls, api_key=key)
    engine.set_model(task)
    syncs, speeds = [], []
    try:
        for _ in range(1 + options.passes):
            engine.sync_weights()
            syncs.append(engine.metrics()["vllm/sync_seconds"])
            begin = time.perf_counter()
            out = engine.generate(requests(options.prompts))
            seconds = time.perf_counter() - begin
            tokens = sum(len(c.token_ids) for cs in out for c in cs)
            speeds.append(tokens / seconds)
    finally:
        engine.stop()
    return {
        "tokens_per_s": statistics.median(speeds[1:]),
        "sync_s": statistics.median(syncs[1:]),
    }


def markdown(records, options):
    one = records[0]["tokens_per_s"]
    lines = [
        f"{options.prompts} prompts of {PROMPT} tokens, {SAMPLES} samples of "
        f"{TOKENS} tokens each; a Llama of 14 million weights in float32; one "
        f"thread a server, medians of {options.passes}.",
        "",
        "| servers | new tokens/s | of one server | sync, s |",
        "|---|---|---|---|",
    ]
    for r in records:
        ratio = r["tokens_per_s"] / one
        lines.append(
            f"| {r['servers']} | {r['tokens_per_s']:,.0f} | {ratio:.2f}x | "
            f"{r['sync_s']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results")
    options = parser.parse_args()
    # One for each server.
    cores = sorted(os.sched_getaffinity(0))
    key, task, records = secrets.token_hex(16), make_task(), []
    from keras_posttrain.rollout.vllm import weights

    with tempfile.TemporaryDirectory() as folder:
        folder, started = pathlib.Path(folder), []
        weights.write_config(task.causal_lm, folder / "model", "float32")
        try:
            for count in sorted({1, 2, len(cores)}):
                while len(started) < count:
                    core = cores[len(started)]
                    started.append(start(folder, core, key))
                urls = [url for _, url in started]
                figures = measure(task, urls, key, options)
                records.append({"servers": count, **figures})
                print(json.dumps(records[-1]), flush=True)
        finally:
            for process, _ in started:
                process.terminate()
                process.wait()
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(records, options)
    (options.out / "replicas.md").write_text(text)
    (options.out / "replicas.json").write_text(json.dumps(records) + "\n")
    print(text)


if __name__ == "__main__":
    main()
