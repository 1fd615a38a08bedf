"""What a script waits for until its first step.

Processes that have their files and compiled programs in caches import Keras,
then this package, and train a tiny model. Each part is the median over
processes, and the imports are also given as a share of Keras's own in the
same processes.

    python benchmarks/start.py
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

RESULTS = pathlib.Path(__file__).parent / "results"
ROWS = [
    {"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(16)
]
IMPORTS = ("import keras", "import keras_posttrain", "kpt.SFTTask")


def write(folder):
    """Writes the model, in a process that does not measure it."""
    # Only that process needs it.
    import keras_posttrain as kpt

    kpt.examples.tiny_preset(folder, ROWS, num_layers=2, hidden_dim=64)


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


def table(runs):
    """Returns the medians as Markdown."""
    lines = ["| part | s | of Keras's import |", "|---|---|---|"]
    keras = statistics.median(run[IMPORTS[0]] for run in runs)
    for name in runs[0]:
        seconds = statistics.median(run[name] for run in runs)
        share = f"{seconds / keras:.1%}" if name in IMPORTS else ""
        lines.append(f"| {name} | {seconds:.3f} | {share} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    # What one process does.
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--preset", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write)
        return
    if arguments.preset:
        print(json.dumps(run(arguments.preset)))
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
        # The first run fills the caches.
        for repeat in range(arguments.repeats + 1):
            done = subprocess.run(
                [*this, "--preset", preset],
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            print(repeat, runs[-1], file=sys.stderr, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(runs, indent=1)
    (arguments.out / "start.json").write_text(text + "\n")
    (arguments.out / "start.md").write_text(table(runs[1:]))
    print(table(runs[1:]))


if __name__ == "__main__":
    main()
