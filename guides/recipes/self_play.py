"""Self-play: a model learns tic-tac-toe from games against itself.

    python guides/recipes/self_play.py RUN
    python guides/recipes/self_play.py RUN --preset qwen3_0.6b_en

The first line trains a tiny model offline, in two minutes; the second a real
one. Both seats are trained; the score is the share of games that are won
against a player who moves at random. Run it again to resume.
"""

import argparse
import json
import os
import pathlib
import random

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

RULES = "Tic-tac-toe. You are X, the other player O. Name a free cell.\n"
TINY = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 64},
    "rate": 5e-3,
    "compile": {"num_generations": 8, "max_completion_length": 4},
    "fit": {"batch_size": 15, "epochs": 4},
}
REAL = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 512},
    "rate": 3e-5,
    "compile": {"num_generations": 8, "max_completion_length": 8},
    "fit": {"batch_size": 45, "epochs": 40},
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("--preset")
args = parser.parse_args()
out, settings = args.out, REAL if args.preset else TINY
rules = RULES if args.preset else ""
keras.utils.set_random_seed(0)
random.seed(0)
CELLS = list("abcdefghi")
LINES = ("abc", "def", "ghi", "adg", "beh", "cfi", "aei", "ceg")


def show(taken):
    marks = {c: "XO"[who != len(taken) % 2] for c, who in taken.items()}
    cells = [marks.get(cell, cell) for cell in CELLS]
    return "\n".join(" ".join(cells[i : i + 3]) for i in (0, 3, 6))


async def game(player, other, opening):
    taken = {cell: i % 2 for i, cell in enumerate(opening)}
    mover, waiting = player, other
    while len(taken) < 9:
        mover.restart(rules + show(taken))
        cell, who = (await mover()).text.strip(), len(taken) % 2
        if cell not in CELLS or cell in taken:
            return {mover: -1.0, waiting: 0.0}
        taken[cell] = who
        if any(all(taken.get(c) == who for c in line) for line in LINES):
            return {mover: 1.0, waiting: -1.0}
        mover, waiting = waiting, mover
    return {mover: 0.0, waiting: 0.0}


def random_player(messages, seed):
    board = messages[-1]["content"].split()[-9:]
    return random.Random(seed).choice([x for x in board if x in CELLS])


# The tiny model has seen moves at random, most of them of free cells.
moves = []
for _ in range(0 if args.preset else 3000):
    cells = random.sample(CELLS, random.randrange(7))
    taken = {cell: i % 2 for i, cell in enumerate(cells)}
    free = [cell for cell in CELLS if cell not in taken]
    cell = random.choice(CELLS if random.random() < 0.3 else free)
    said = ("user", show(taken)), ("assistant", cell)
    moves.append({"messages": [{"role": r, "content": x} for r, x in said]})
preset = args.preset or kpt.examples.tiny_preset(out / "tiny", moves, epochs=3)
pairs = [a + b for a in CELLS for b in CELLS if a != b]
rows = [{"opening": x} for x in ([""] * 9 + CELLS + pairs)]

task = kpt.GRPOTask.from_preset(preset, **settings["task"])
judge = kpt.GRPOTask.from_task(task)
judge.compile(
    episode=kpt.episodes.Episode(game, opponents={"other": random_player}),
    max_completion_length=8,
)
how = {"num_generations": 20, "temperature": 1.0, "batch_size": 18}
before = judge.evaluate(rows[:18], **how)
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    ),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    advantages=kpt.losses.TurnAdvantages(),
    episode=game,
    **settings["compile"],
)
task.fit(
    rows,
    **settings["fit"],
    packing=True,
    callbacks=[
        kpt.callbacks.Checkpoint(out, every="10min"),
        kpt.callbacks.MetricsLog(out),
        kpt.callbacks.CompletionsLog(out, every=10),
        kpt.callbacks.Report(out),
    ],
)
after = judge.evaluate(rows[:18], **how)
task.save_adapter(out / "adapter")
print(f"won: {before['pass@1']:.0%} -> {after['pass@1']:.0%}")
scores = {"before": before["pass@1"], "after": after["pass@1"]}
(out / "results.json").write_text(json.dumps(scores) + "\n")
