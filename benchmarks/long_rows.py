"""The time of a step on long packed rows, against short ones.

Documents of 100 to 200 tokens, 13,000 tokens a step, are trained on in
rows of several lengths: a small Llama, all weights, float32. One document of
16,384 tokens shows what a row takes whose scores cannot be skipped, and rows
without packing what padding takes. Layouts take turns.

    python benchmarks/long_rows.py
"""

import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import figures
import keras
import keras_hub
import numpy as np

import keras_posttrain as kpt

VOCABULARY, TOKENS = 8192, 16_384
# Name to the tokens of a packed row; `None` is a document a row.
LAYOUTS = {
    "one document a row": None,
    "512": 512,
    "1,024": 1024,
    "4,096": 4096,
    "16,384": 16_384,
}


def documents(seed, tokens):
    rng = np.random.default_rng(seed)
    rows = []
    while tokens > 0:
        length = int(min(rng.integers(100, 201), tokens))
        ids = rng.integers(3, VOCABULARY, max(length, 2)).tolist()
        mask = [0] + [1] * (len(ids) - 1)
        rows.append({"token_ids": ids, "completion_mask": mask})
        tokens -= length
    return rows


def make_task(length):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=2,
        hidden_dim=512,
        intermediate_dim=1536,
    )
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
    task = kpt.SFTTask(model, sequence_length=length)
    task.compile(keras.optimizers.AdamW(1e-5))
    return task


class Clock(keras.callbacks.Callback):
    """Times steps, each until its result is there."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])
        self.seconds.append(time.perf_counter() - self.start)


def step(task, rows, packing):
    """Trains for one step on all rows; returns its seconds."""
    clock = Clock()
    task.fit(
        rows,
        batch_size=TOKENS // packing if packing else len(rows),
        packing=packing is not None,
        callbacks=[clock],
        verbose=0,
    )
    [seconds] = clock.seconds
    return seconds


def measure(repeats):
    """Returns the figures of each layout; the layouts take turns."""
    # Packing leaves gaps in short rows.
    rows = documents(0, int(TOKENS * 0.8))
    whole = np.random.default_rng(0).integers(3, VOCABULARY, TOKENS)
    cases = {name: (rows, packing) for name, packing in LAYOUTS.items()}
    cases["16,384, one document"] = [{"token_ids": whole.tolist()}], TOKENS
    tasks = {
        name: make_task(packing or 256) for name, (_, packing) in cases.items()
    }
    found = {
        name: {
            "tokens": sum(len(row["token_ids"]) for row in rows),
            "seconds": [],
        }
        for name, (rows, _) in cases.items()
    }
    for repeat in range(1 + repeats):
        for name, case in cases.items():
            seconds = step(tasks[name], *case)
            # The first step compiles.
            if repeat:
                found[name]["seconds"].append(seconds)
    return found


def table(found):
    base = statistics.median(found["512"]["seconds"])
    base /= found["512"]["tokens"]
    lines = [
        "| tokens of a row | tokens | s/step | fastest to slowest | "
        "time of a token, to rows of 512 |",
        "|---|---|---|---|---|",
    ]
    for name, x in found.items():
        middle = statistics.median(x["seconds"])
        lines.append(
            f"| {name} | {x['tokens']:,} | {middle:.2f} | "
            f"{min(x['seconds']):.2f} to {max(x['seconds']):.2f} | "
            f"{middle / x['tokens'] / base:.2f}x |"
        )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=3).parse_args()
    found = measure(arguments.repeats)
    figures.write(arguments.out, "long_rows", found, table(found))


if __name__ == "__main__":
    main()
