"""What the size of a model costs: to load, to start, a step, and to export.

Qwen3 models of some sizes are loaded from a Hugging Face directory, trained
with all weights for some steps of 8 x 64 tokens, and exported. Each size is a
process of its own, with a cache of compiled programs that is empty. Memory is
the most that was resident, less what the imports take, as a multiple of the
weights in float32: weights, gradients and two moments are 4, and compiling
takes the same for all sizes.

    python benchmarks/model_sizes.py
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import figures

os.environ.setdefault("KERAS_BACKEND", "jax")

# Layers and hidden sizes.
SIZES = ((2, 256), (4, 512), (8, 768))
STEPS, BATCH_SIZE, LENGTH = 12, 8, 64


def most_memory():
    """Returns the most resident memory so far in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(folder, layers, hidden):
    """Writes a model, in a process that does not measure it."""
    # Only that process needs it.
    import keras_posttrain as kpt

    rows = [f"{i} and {i} make {2 * i}" for i in range(100)]
    kpt.examples.tiny_preset(
        folder, rows, num_layers=layers, hidden_dim=hidden
    )


def run(preset, folder):
    """Returns the figures of one size."""
    # Memory is counted from here on.
    import jax
    import keras

    from keras_posttrain import SFTTask

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.ends = []

        def on_train_batch_end(self, batch, logs=None):
            jax.block_until_ready(self.model.run.state.logs)
            self.ends.append(time.perf_counter())

    before, start = most_memory(), time.perf_counter()
    task = SFTTask.from_preset(preset, sequence_length=LENGTH)
    loaded = time.perf_counter()
    weights = sum(v.value.nbytes for v in task.weights)
    after_loading = most_memory()
    task.compile(keras.optimizers.AdamW(1e-4))
    rows = [{"token_ids": [5 + i % 50] * LENGTH} for i in range(STEPS)]
    clock = Clock()
    fit = time.perf_counter()
    task.fit(
        [row for row in rows for _ in range(BATCH_SIZE)],
        batch_size=BATCH_SIZE,
        shuffle=False,
        callbacks=[clock],
        verbose=0,
    )
    after_training, end = most_memory(), time.perf_counter()
    task.export(folder)
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:])]
    return {
        "weights": weights // 4,
        "load s": loaded - start,
        "load, memory": (after_loading - before) / weights,
        "first step s": clock.ends[0] - fit,
        "step s": statistics.median(steps),
        "training, memory": (after_training - before) / weights,
        "export s": time.perf_counter() - end,
        "all, memory": (most_memory() - before) / weights,
    }


def table(found):
    columns = list(found[0])
    lines = [
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for row in found:
        first, *rest = row.values()
        cells = [f"{first:,}", *(f"{x:.2f}" for x in rest)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = figures.parser(__doc__)
    # What one process does.
    parser.add_argument("--write", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--preset", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.folder, *arguments.write)
        return
    if arguments.preset:
        print(json.dumps(run(arguments.preset, arguments.folder)))
        return
    found = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            preset = os.path.join(folder, "preset")
            this = [sys.executable, __file__, "--folder"]
            subprocess.run(
                [*this, preset, "--write", *map(str, size)], check=True
            )
            done = subprocess.run(
                [*this, os.path.join(folder, "export"), "--preset", preset],
                env=os.environ | {"XDG_CACHE_HOME": folder},
                stdout=subprocess.PIPE,
                check=True,
            )
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], file=sys.stderr, flush=True)
    figures.write(arguments.out, "model_sizes", found, table(found))


if __name__ == "__main__":
    main()
