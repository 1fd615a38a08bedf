"""Whether a long run keeps its memory and compiles nothing more.

A tiny Llama is trained for many steps: fine-tuning, GRPO whose samples have 4
to 400 tokens, and GRPO with rollouts that overlap. After each step the
resident memory of the process and the number of compilations are read. Each
run is a process of its own.

    python benchmarks/steady.py
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import figures

os.environ.setdefault("KERAS_BACKEND", "jax")

STEPS = {"fine-tuning": 1000, "GRPO": 500, "GRPO, max_staleness=1": 300}
VOCABULARY, STOP = 512, 5
AT = (5, 20, 50, 100, 200)


def memory():
    """Returns the resident memory of this process in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024


def run(name, steps):
    """Trains, and returns the figures of each step."""
    # Each run has a process of its own.
    import jax
    import keras
    import keras_hub
    import numpy as np

    import keras_posttrain as kpt
    from keras_posttrain import _spans

    compiled, found = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiled.append(seconds) if event == _spans.COMPILED else None
        )
    )

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append((memory(), len(compiled)))

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=128,
    )
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    rng = np.random.default_rng(0)

    def ids(shortest, longest):
        size = rng.integers(shortest, longest)
        return rng.integers(STOP + 8, VOCABULARY, size).tolist()

    if name == "fine-tuning":
        task = kpt.SFTTask(model, sequence_length=64)
        task.compile(keras.optimizers.AdamW(1e-4))
        rows = [{"token_ids": ids(8, 64)} for _ in range(4 * steps)]
        more = {}
    else:
        task = kpt.GRPOTask(model, sequence_length=512)
        task.compile(
            keras.optimizers.AdamW(1e-6),
            rewards=[lambda completions: [len(c) % 3.0 for c in completions]],
            num_generations=4,
            max_completion_length=400,
            # A sample ends at each token with a chance of about 1 in 64.
            stop_token_ids=list(range(STOP, STOP + 8)),
        )
        rows = [{"prompt_ids": ids(4, 64)} for _ in range(4 * steps)]
        more = {"max_staleness": 1} if "staleness" in name else {}
    start = time.perf_counter()
    task.fit(rows, batch_size=4, callbacks=[Reader()], verbose=0, **more)
    seconds = time.perf_counter() - start
    memories, counts = zip(*found)
    quarter = memories[len(memories) // 4]
    return {
        "steps": len(found),
        "seconds": seconds,
        "MiB after a quarter": quarter,
        "MiB at the end": memories[-1],
        "most MiB after a quarter": max(memories[len(memories) // 4 :]),
        "compilations": {str(n): counts[n - 1] for n in AT if n <= len(found)}
        | {"end": counts[-1]},
    }


def table(found):
    lines = [
        "| run | steps | s | MiB after a quarter | at the end | growth | "
        "compilations by step " + ", ".join(map(str, AT)) + ", end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in found.items():
        before, after = x["MiB after a quarter"], x["MiB at the end"]
        counts = ", ".join(map(str, x["compilations"].values()))
        lines.append(
            f"| {name} | {x['steps']} | {x['seconds']:.0f} | {before:,.0f} | "
            f"{after:,.0f} | {after / before - 1:+.1%} | {counts} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = figures.parser(__doc__)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the steps"
    )
    arguments = parser.parse_args()
    if arguments.run:
        steps = int(STEPS[arguments.run] * arguments.share)
        print(json.dumps(run(arguments.run, steps)))
        return
    found = {}
    for name in STEPS:
        command = [sys.executable, __file__, "--run", name]
        command += ["--share", str(arguments.share)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    figures.write(arguments.out, "steady", found, table(found))


if __name__ == "__main__":
    main()
