"""What a checkpoint takes of a run: waiting, memory, processor time.

    python benchmarks/saves.py
    python benchmarks/saves.py --hidden-dim 256     # a smaller model

All weights of a model are trained with AdamW, so that a checkpoint holds three
floats a weight. Compared in one process are saves by
`kpt.callbacks.Checkpoint`, its local ones too, and by Orbax's
`CheckpointManager` with its defaults, of copies of the arrays, since the next
step takes over their memory.
Printed are medians of `--saves` saves after a first one: the time before
training continues, the next step over the median step, the peak of resident
memory over that before the save, and the processor time of all. Tables and
figures are written to `results/saves.*`.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import threading
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import orbax.checkpoint as ocp

import keras_posttrain as kpt

HERE = pathlib.Path(__file__).resolve().parent
MIB = 2**20
STEPS_APART = 4


class Memory:
    """The highest resident memory since `begin`, in bytes."""

    def __init__(self):
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self):
        self.peak = now = resident()
        return now

    def _watch(self):
        while True:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)


def resident():
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Saves(keras.callbacks.Callback):
    """Measures each save, made by `save(task)`, and the step after it.

    `wait()` waits for the rest of a save.
    """

    def __init__(self, memory, save, wait):
        super().__init__()
        self.memory, self.save, self.wait = memory, save, wait
        self.steps, self.found = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        # The step is complete when its loss is.
        float(logs["loss"])
        took = time.perf_counter() - self.began
        if self.found and "next_step" not in self.found[-1]:
            before = self.found[-1]
            before["next_step"] = took / statistics.median(self.steps)
            self.wait()
            before["peak_bytes"] = self.memory.peak - before.pop("resident")
            before["cpu_seconds"] = time.process_time() - before.pop("cpu")
        elif batch > 1:
            self.steps.append(took)
        if batch and batch % STEPS_APART == 0:
            row = {"resident": self.memory.begin(), "cpu": time.process_time()}
            began = time.perf_counter()
            # Through `model`, as the variables are empty in an epoch.
            self.save(self.model)
            row["blocked_seconds"] = time.perf_counter() - began
            self.found.append(row)


class Ours(kpt.callbacks.Checkpoint):
    """Saves only where `Saves` asks for it."""

    def _is_due(self):
        return False


def measure(task, rows, steps, memory, kind, folder):
    """Returns a list of what each save took."""
    if kind.startswith("ours"):
        saver = Ours(
            folder,
            every=10**9,
            local_directory=folder / "local",
            local_every=10**9,
        )
        is_local = kind == "ours, local"
        saves = Saves(
            memory,
            lambda task: saver._save(None, not is_local, is_local),
            lambda: (
                saver._local.wait()
                if is_local
                else saver._manager.wait_until_finished()
            ),
        )
        callbacks = [saver, saves]
    else:
        manager = ocp.CheckpointManager(
            folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

        def save(task):
            arrays, _ = task.run.training_state()
            arrays = {
                group: {k: np.array(v) for k, v in values.items()}
                for group, values in arrays.items()
            }
            manager.save(task.step, args=ocp.args.StandardSave(arrays))

        saves = Saves(memory, save, manager.wait_until_finished)
        callbacks = [saves]
    task.fit(
        rows[:steps], batch_size=1, shuffle=False, verbose=0,
        callbacks=callbacks,
    )  # fmt: skip
    # The first save makes threads and pools.
    return saves.found[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden-dim", type=int, default=768)
    parser.add_argument("--num-layers", type=int, default=14)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--out", default=HERE / "results", type=pathlib.Path)
    settings = parser.parse_args()
    memory, found = Memory(), {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        rows = [{"text": f"{i} and {i + 1} make {2 * i + 1}."} for i in range(
            STEPS_APART * (settings.saves + 2)
        )]  # fmt: skip
        kpt.examples.tiny_preset(
            folder / "preset",
            rows,
            hidden_dim=settings.hidden_dim,
            num_layers=settings.num_layers,
        )
        task = kpt.SFTTask.from_preset(folder / "preset", sequence_length=64)
        task.compile(keras.optimizers.AdamW(1e-5))
        for kind in ("orbax", "ours", "ours, local"):
            found[kind] = measure(
                task, rows, len(rows), memory, kind, folder / kind
            )
        arrays, _ = task.run.training_state()
        state = sum(x.nbytes for g in arrays.values() for x in g.values())
    weights = sum(int(np.prod(v.shape)) for v in task.trainable_variables)
    report(settings.out, found, state, weights)


def report(out, found, state, weights):
    medians = {
        kind: {k: statistics.median(row[k] for row in rows) for k in rows[0]}
        for kind, rows in found.items()
    }
    lines = [
        f"{weights / 1e6:.0f} million weights, a state of "
        f"{state / MIB:.0f} MiB; medians of {len(found['ours'])} saves.",
        "",
        "| | blocked, s | next step, x | peak, x the state | CPU s |",
        "|---|---|---|---|---|",
    ]
    for kind, row in medians.items():
        lines.append(
            f"| {kind} | {row['blocked_seconds']:.2f} | "
            f"{row['next_step']:.2f} | {row['peak_bytes'] / state:.2f} | "
            f"{row['cpu_seconds']:.2f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "saves.md").write_text(text)
    figures = {"weights": weights, "state_bytes": state, "saves": found}
    (out / "saves.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
