"""When the first step of a model of 1.2 billion weights has been made.

A Llama of the shape of Llama-3.2-1B with random weights, in float32, is loaded
from a Hugging Face directory, as floats or quantized, and trained by LoRA on
one row of 64 tokens a step. Files and compiled programs are in caches: the
first process of each kind fills them and is not counted. Imports count, and a
later step shows what of the first one is arithmetic.

    python benchmarks/first_step.py
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import figures

LENGTH, STEPS = 64, 4
KINDS = ("none", "int8", "int4", "nf4")
SHAPE = {
    "vocab": 128_256,
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "intermediate": 8192,
    "tied": True,
}


def write(folder):
    """Writes the model, in a process that does not measure it."""
    # Only that process needs them.
    import preset
    import workloads

    os.makedirs(folder)
    preset.write(workloads.Model(**SHAPE), pathlib.Path(folder))


def run(folder, kind):
    """Returns the seconds of each part, and those of a later step."""
    times = [time.perf_counter()]
    # The imports are measured too.
    import jax
    import keras

    import keras_posttrain as kpt

    task_class = kpt.SFTTask
    times.append(time.perf_counter())

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_train_batch_end(self, batch, logs=None):
            jax.block_until_ready(self.model.run.state.logs)
            self.ends.append(time.perf_counter())

    task = task_class.from_preset(
        folder,
        sequence_length=LENGTH,
        lora=kpt.LoRA(rank=16),
        quantize=kind,
    )
    times.append(time.perf_counter())
    task.compile(keras.optimizers.AdamW(1e-4))
    rows = [{"token_ids": [5 + i] * LENGTH} for i in range(STEPS)]
    clock = Clock()
    task.fit(rows, batch_size=1, callbacks=[clock], verbose=0)
    times.append(clock.ends[0])
    parts = ("imports", "load", "compile and first step")
    found = {name: b - a for name, a, b in zip(parts, times, times[1:])}
    later = [b - a for a, b in zip(clock.ends, clock.ends[1:])]
    return {
        "kind": kind,
        **found,
        "all": times[-1] - times[0],
        "a later step": statistics.median(later),
    }


def table(runs):
    parts = [name for name in runs[0] if name != "kind"]
    lines = [
        f"| `quantize` | {' | '.join(f'{part}, s' for part in parts)} |",
        "|---" * (1 + len(parts)) + "|",
    ]
    for kind in KINDS:
        _, *counted = [run for run in runs if run["kind"] == kind]
        cells = []
        for part in parts:
            seconds = [run[part] for run in counted]
            cells.append(
                f"{statistics.median(seconds):.2f} "
                f"({min(seconds):.2f} to {max(seconds):.2f})"
            )
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = figures.parser(__doc__, repeats=3)
    # What one process does.
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--preset", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
        return
    if arguments.preset:
        print(json.dumps(run(arguments.preset, arguments.kind)))
        return
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        preset = os.path.join(folder, "preset")
        environment = os.environ | {
            "KERAS_BACKEND": "jax",
            "XDG_CACHE_HOME": folder,
        }
        this = [sys.executable, __file__]
        subprocess.run([*this, "--write", preset], check=True, env=environment)
        for kind in KINDS * (arguments.repeats + 1):
            done = subprocess.run(
                [*this, "--preset", preset, "--kind", kind],
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(runs[-1], file=sys.stderr, flush=True)
    figures.write(arguments.out, "first_step", runs, table(runs))


if __name__ == "__main__":
    main()
