"""Training steps on trajectories that share prefixes as a tree.

    python benchmarks/branches.py

A GRPO update on trajectories of four turns, each in eight branches: with
every token stored once, with the prompt alone stored once, and with each
trajectory on its own, packed in all three. Branches come apart in the last
turn, or two at each of three turns. Model and adapter are those of `grpo.py`.
The table is written to `results/branches.md` and the figures to a `.json`
file of that name. It fails if the layouts' losses or gradients differ.
"""

import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import BatchLayout, Group
from keras_posttrain.data.rows.examples import Example

# isort: split
import figures
import preset
import workloads

BRANCHES, TURNS = 8, 4
PROMPT, TOOL, SAMPLED = 128, 64, 64  # tokens
LONGEST = PROMPT + TURNS * (TOOL + SAMPLED)
# The branches that have the tokens of a turn in common, by turn.
FORKS = {"at the last turn": (8, 8, 8, 1), "at three turns": (8, 4, 2, 1)}
LAYOUTS = ("tree", "prompt", "separate")
CHECKS = ("loss", "grad_norm")


def tree(rng, vocab, together):
    """Makes eight trajectories; the first to have a sampled token trains it.

    `together` is a value of `FORKS`.
    """
    prompt = rng.integers(workloads.FIRST, vocab, PROMPT)
    ids = [[prompt] for _ in range(BRANCHES)]
    masks = [[np.zeros(PROMPT)] for _ in range(BRANCHES)]
    trained = np.repeat([0.0, 1.0], [TOOL, SAMPLED])
    for count in together:
        for i in range(BRANCHES):
            if i % count == 0:
                turn = rng.integers(workloads.FIRST, vocab, TOOL + SAMPLED)
            ids[i].append(turn)
            masks[i].append(trained * (i % count == 0))
    sequences = [
        Example(
            np.concatenate(x).astype("int32"),
            np.concatenate(mask).astype("float32"),
            row=0,
        )
        for x, mask in zip(ids, masks)
    ]
    return Group(sequences, prefix_length=None)


def make_batch(groups, layout):
    """Returns the arrays of a batch in one of `LAYOUTS`, and its tokens."""
    count = len(groups) * BRANCHES
    if layout == "prompt":
        groups = [Group(g.sequences, PROMPT) for g in groups]
    capacity = PROMPT + (TOOL + SAMPLED) * (
        sum(BRANCHES // n for n in FORKS["at three turns"])
    )
    batch = BatchLayout(
        count,
        LONGEST,
        token_budget=capacity,
        share_prefix=layout != "separate",
    )(groups)
    advantages = np.random.default_rng(1).normal(size=count)
    batch.put_units("advantages", advantages)
    return batch.arrays, int((batch.arrays["segment_ids"] > 0).sum())


def make_task(folder, model):
    keras.utils.set_random_seed(0)
    preset.write(model, pathlib.Path(folder))
    task = kpt.GRPOTask.from_preset(
        folder,
        lora=kpt.LoRA(rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA),
        sequence_length=LONGEST,
    )
    task.compile(
        keras.optimizers.AdamW(workloads.LEARNING_RATE),
        loss=kpt.losses.GRPOLoss(beta=0.0),
        rewards=[lambda completion_ids: [0.0] * len(completion_ids)],
        max_completion_length=LONGEST - PROMPT,
        stop_token_ids=None,
    )
    return task


def measure(task, groups, repeats):
    """Returns the figures of each layout; the layouts take turns."""
    values = {
        "trainable": task.trainable_variables,
        "frozen": task.non_trainable_variables,
        "optimizer": task.optimizer.variables,
        "metrics": task.metrics_variables,
    }
    state = {k: [v.value for v in x] for k, x in values.items()}
    state |= {"step": np.int32(1), "seed": np.int32(0)}
    step = jax.jit(lambda state, batch: task.train_step(state, batch))
    found, seconds = {}, {name: [] for name in LAYOUTS}
    for repeat in range(1 + repeats):
        for name in LAYOUTS:
            batch, tokens = make_batch(groups, name)
            start = time.perf_counter()
            logs, _ = jax.block_until_ready(step(state, batch))
            # The first step compiles.
            if repeat:
                seconds[name].append(time.perf_counter() - start)
            found[name] = {
                "tokens": tokens,
                "size": " x ".join(map(str, batch["token_ids"].shape)),
                **{key: float(logs[key]) for key in CHECKS},
            }
    for name, times in seconds.items():
        found[name]["seconds"] = statistics.median(times)
        found[name]["fastest"], found[name]["slowest"] = min(times), max(times)
    return found


def check(found):
    """Raises unless all layouts have the same loss and gradient."""
    for key in CHECKS:
        values = [x[key] for x in found.values()]
        np.testing.assert_allclose(values, values[0], rtol=1e-4, atol=1e-6)


def table(records):
    """Returns a Markdown table; speed-ups are over separate trajectories."""
    head = (
        "branches fork | stored once | tokens | rows x tokens | s/step | "
        "fastest to slowest | speed-up"
    )
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    stored = {"tree": "all", "prompt": "prompt", "separate": "none"}
    for fork, found in records.items():
        for name, x in found.items():
            ratio = found["separate"]["seconds"] / x["seconds"]
            lines.append(
                f"| {fork} | {stored[name]} | {x['tokens']} | {x['size']} | "
                f"{x['seconds']:.2f} | {x['fastest']:.2f} to "
                f"{x['slowest']:.2f} | {ratio:.2f}x |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = figures.parser(__doc__, repeats=5)
    parser.add_argument("--trees", type=int, default=1, help="of a step")
    arguments = parser.parse_args()
    model, records = workloads.RL["w5"].model, {}
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(folder, model)
        for fork, together in FORKS.items():
            rng = np.random.default_rng(0)
            groups = [
                tree(rng, model.vocab, together)
                for _ in range(arguments.trees)
            ]
            records[fork] = measure(task, groups, arguments.repeats)
            check(records[fork])
    figures.write(arguments.out, "branches", records, table(records))


if __name__ == "__main__":
    main()
