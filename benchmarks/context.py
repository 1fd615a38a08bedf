"""Memory and time of a step whose rows are split over devices.

Eight rows of 2,048 tokens, each one document, on eight simulated devices: a
small Llama, all weights, float32, remat="full". With context=n, 8 / n rows
pass through the model at once, n devices each. Memory is the compiler's, of
what is not weights or optimizer state; the devices share the cores of this
machine, so that seconds are those of all devices' work. Layouts take turns.

    python benchmarks/context.py
"""

import functools
import os
import statistics

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_force_host_platform_device_count=8"
)  # fmt: skip

import figures
import keras
import keras_hub
import numpy as np
from long_rows import Clock

import keras_posttrain as kpt

VOCABULARY, LENGTH, DEVICES = 1024, 2048, 8
COUNTS = (1, 2, 4, 8)


def make_task(count):
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(strategy(count)())
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=2,
        hidden_dim=256,
        intermediate_dim=768,
    )
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    task = kpt.SFTTask(model, sequence_length=LENGTH, remat="full")
    rows = DEVICES // count
    task.compile(keras.optimizers.AdamW(1e-5), micro_batch_size=rows)
    return task


def strategy(count):
    return functools.partial(kpt.distribution.fsdp, context=count)


def step(task, count, rows):
    """Trains for one step on all rows; returns its seconds and its loss."""
    keras.distribution.set_distribution(strategy(count)())
    clock = Clock()
    history = task.fit(
        rows, batch_size=len(rows), callbacks=[clock], verbose=0
    ).history
    [seconds] = clock.seconds
    return seconds, history["loss"][0]


def measure(repeats):
    """Returns the figures of each layout; the layouts take turns."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (8, LENGTH))
    rows = [{"token_ids": row.tolist()} for row in ids]
    tasks = {count: make_task(count) for count in COUNTS}
    found = {}
    for count, task in tasks.items():
        plan = task.plan("cpu:8", strategy(count), batch_size=len(rows))
        found[count] = {
            "temporaries": plan.measured.numbers["temporaries"],
            "received": plan.collective_bytes,
            "seconds": [],
            "losses": [],
        }
    for repeat in range(1 + repeats):
        for count, task in tasks.items():
            seconds, loss = step(task, count, rows)
            found[count]["losses"].append(loss)
            # The first step compiles.
            if repeat:
                found[count]["seconds"].append(seconds)
    return found


def table(found):
    lines = [
        "| context | MiB a device, without weights | MiB received a device "
        "and step | s/step | fastest to slowest | loss of the first step |",
        "|---|---|---|---|---|---|",
    ]
    for count, x in found.items():
        seconds = x["seconds"]
        lines.append(
            f"| {count} | {x['temporaries'] / 2**20:.0f} | "
            f"{x['received'] / 2**20:.0f} | {statistics.median(seconds):.1f} "
            f"| {min(seconds):.1f} to {max(seconds):.1f} | "
            f"{x['losses'][0]:.6f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=3).parse_args()
    found = measure(arguments.repeats)
    figures.write(arguments.out, "context", found, table(found))


if __name__ == "__main__":
    main()
