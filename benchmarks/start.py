"""What a script waits for until its first step.

Processes that have their files and compiled programs in caches import Keras,
then this package, and train a tiny model. Each part is the median over
processes, and the imports are also given as a share of Keras's own in the
same processes. Deeper models show what each layer adds to the first step.

    python benchmarks/start.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import figures

ROWS = [
    {"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(16)
]
IMPORTS = ("import keras", "import keras_posttrain", "kpt.SFTTask")
LAYERS = (2, 16, 32)


def write(folder, layers):
    """Writes a model, in a process that does not measure it."""
    # Only that process needs it.
    import keras_posttrain as kpt

    kpt.examples.tiny_preset(folder, ROWS, num_layers=layers, hidden_dim=64)


def run(preset):
    """Returns the seconds of each part of a start."""
    # The imports are what is measured.
    times = [time.perf_counter()]
    import keras

    times.append(time.perf_counter())
    import keras_posttrain as kpt

    times.append(time.perf_counter())
    task_class = kpt.SFTTask
    times.append(time.perf_counter())
    task = task_class.from_preset(preset, sequence_length=32)
    task.compile(keras.optimizers.AdamW(1e-3))
    times.append(time.perf_counter())
    task.fit(ROWS, batch_size=len(ROWS), verbose=0)
    times.append(time.perf_counter())
    parts = (*IMPORTS, "load and compile", "first step")
    found = {name: b - a for name, a, b in zip(parts, times, times[1:])}
    return found | {"all": times[-1] - times[0]}


def median(runs, part):
    """Returns the median of a part; the first run filled the caches."""
    return statistics.median(run[part] for run in runs[1:])


def table(found):
    """Returns the medians as Markdown.

    `found` has the runs of each number of layers.
    """
    lines = ["| part | s | of Keras's import |", "|---|---|---|"]
    runs = found[min(found)]
    for name in runs[0]:
        share = median(runs, name) / median(runs, IMPORTS[0])
        share = f"{share:.1%}" if name in IMPORTS else ""
        lines.append(f"| {name} | {median(runs, name):.3f} | {share} |")
    lines += ["", "| layers | first step s | all s |", "|---|---|---|"]
    for layers, runs in found.items():
        parts = [f"{median(runs, x):.2f}" for x in ("first step", "all")]
        lines.append(f"| {layers} | {' | '.join(parts)} |")
    return "\n".join(lines) + "\n"


def measure(layers, repeats, folder):
    """Returns the parts of `repeats` runs after one that fills the caches."""
    preset = os.path.join(folder, f"preset_{layers}")
    environment = os.environ | {
        "KERAS_BACKEND": "jax",
        "XDG_CACHE_HOME": folder,
    }
    this = [sys.executable, __file__, "--preset", preset]
    subprocess.run(
        [*this, "--write", str(layers)], check=True, env=environment
    )
    runs = []
    for repeat in range(repeats + 1):
        done = subprocess.run(
            this, env=environment, stdout=subprocess.PIPE, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(layers, repeat, runs[-1], file=sys.stderr, flush=True)
    return runs


def main():
    parser = figures.parser(__doc__, repeats=7)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    # What one process does.
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--preset", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.preset, arguments.write)
        return
    if arguments.preset:
        print(json.dumps(run(arguments.preset)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {
            layers: measure(layers, arguments.repeats, folder)
            for layers in arguments.layers
        }
    figures.write(arguments.out, "start", found, table(found))


if __name__ == "__main__":
    main()
