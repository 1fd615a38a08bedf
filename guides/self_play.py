"""
Title: Self-play
Author: The keras_posttrain authors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: A model learns tic-tac-toe from games against itself.
Accelerator: None
"""

"""
## Introduction

To train on a game of two players, one needs an opponent. In self-play it is
the model itself. Nobody has to write a player, and the opponent improves
together with the policy.

Here a tiny model learns tic-tac-toe, twice from the same start. First the
policy plays in both seats and learns from both. Then it plays against a frozen
copy of itself, which is renewed now and then, and learns from its own seat
only. Both are measured against a player that moves at random, which they do
not meet in training.

It runs in about three minutes on two CPU cores. For a real model set
`preset` to one such as `"qwen3_0.6b_en"` or `"hf://Qwen/Qwen3-0.6B"`, and
leave out the rows that the tiny one learns from.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/self_play")
keras.utils.set_random_seed(0)
random.seed(0)

"""
## The board

The cells are named `a` to `i`. A player sees its own marks as `X`, those of
the other as `O`, and a free cell as its name. So both seats look the same, and
what is learned in one is of use in the other. `wins` lists the cells that
complete a line of a player, who is 0 or 1.
"""

CELLS = "abcdefghi"
LINES = ("abc", "def", "ghi", "adg", "beh", "cfi", "aei", "ceg")


class Board:
    def __init__(self, opening=""):
        self.taken = {}
        for cell in opening:
            self.take(cell)

    def take(self, cell):
        self.taken[cell] = self.mover

    @property
    def mover(self):
        return len(self.taken) % 2

    @property
    def free(self):
        return [cell for cell in CELLS if cell not in self.taken]

    def wins(self, player):
        return [
            cell
            for line in LINES
            for cell in line
            if cell in self.free
            and all(self.taken.get(c) == player for c in line if c != cell)
        ]

    def shown(self):
        marks = {c: "XO"[p != self.mover] for c, p in self.taken.items()}
        text = " ".join(marks.get(cell, cell) for cell in CELLS)
        return f"{text[:5]}\n{text[6:11]}\n{text[12:]}"


print(Board("eab").shown())

"""
## Players that are not very good

Reinforcement learning makes actions more probable that are sampled now and
then. So the tiny model first sees 3,000 moves. Three in ten are good: they
win, prevent a loss or take the centre. The others are random: three in five
are free cells, two in five any cell.
"""

moves = []
while len(moves) < 3000:
    board, is_over = Board(), False
    while board.free and not is_over:
        said = cell = random.choice(board.free)
        if random.random() < 0.3:
            centre = [c for c in "e" if c in board.free]
            good = board.wins(board.mover) or board.wins(1 - board.mover)
            said = cell = random.choice(good or centre or board.free)
        elif random.random() < 0.4:
            said = random.choice(CELLS)
        moves.append(
            {
                "messages": [
                    {"role": "user", "content": board.shown()},
                    {"role": "assistant", "content": said},
                ]
            }
        )
        is_over = cell in board.wins(board.mover)
        board.take(cell)

preset = kpt.examples.tiny_preset(folder / "tiny", moves, epochs=3)

"""
## A game is an episode of two chats

Each parameter that is no column of the rows is a player: here `player` and
`other`. The game returns the reward of each. A player that names no free cell
loses, but the other has not won: its reward is 0.

`restart` begins a new context. The board shows all that matters, so no player
needs to remember earlier moves. All moves of a player are still one
trajectory.
"""


async def tic_tac_toe(player, other, opening):
    board = Board(opening)
    mover, waiting = player, other
    player.count("illegal", 0)
    while board.free:
        mover.restart(board.shown())
        reply = await mover()
        if reply.text not in board.free:
            mover.count("illegal")
            return {mover: -1.0, waiting: 0.0}
        if reply.text in board.wins(board.mover):
            return {mover: 1.0, waiting: -1.0}
        board.take(reply.text)
        mover, waiting = waiting, mover
    return {mover: 0.0, waiting: 0.0}


"""
The rows are openings, after which `player` moves. After none `player` has the
first seat, and after one the second. The nine rows without an opening give
both seats the same weight. Openings of two moves make the games differ.
"""

starts = [{"opening": ""}] * 9 + [{"opening": cell} for cell in CELLS]
rows = starts + [{"opening": a + b} for a in CELLS for b in CELLS if a != b]
print(f"{len(rows)} rows")

"""
## The measure

`opponents` says who plays in the policy's place: here a function of messages,
which takes any free cell. With its `seed` equal runs have equal games.
`from_task` makes a second task on the same model, for games against this
player. `pass@1` is the share of games with a reward of 1, which were won. In
half of them the policy has the first seat.
"""


def random_player(messages, seed):
    seen = messages[-1]["content"].split()
    free = [cell for cell in seen if cell in CELLS]
    return random.Random(seed).choice(free)


against_random = kpt.episodes.Episode(
    tic_tac_toe, opponents={"other": random_player}
)
task = kpt.GRPOTask.from_preset(preset, sequence_length=64)
judge = kpt.GRPOTask.from_task(task)
judge.compile(episode=against_random, max_completion_length=4)
how = {"num_generations": 30, "temperature": 1.0, "batch_size": 18}
before = judge.evaluate(starts, **how)
print(f"won against a random player: {before['pass@1']:.0%}")
print(f"lost by naming no free cell: {before['illegal']:.0%}")

"""
## The policy in both seats

Without `opponents` the policy plays both, and both are trained. The eight
games of an opening make two groups, one for each player: a player is compared
with those in the same seat. `TurnAdvantages` does so turn by turn.

Each move is a short context of its own. `packing=True` puts several in a row.
"""

settings = {
    "loss": kpt.losses.GRPOLoss(beta=0.0),
    "advantages": kpt.losses.TurnAdvantages(),
    "max_completion_length": 4,
}
task.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    episode=tic_tac_toe,
    num_generations=8,
    **settings,
)
task.fit(
    rows,
    batch_size=15,
    epochs=5,
    packing=True,
    callbacks=[
        kpt.callbacks.MetricsLog(folder / "both_seats"),
        kpt.callbacks.CompletionsLog(folder / "both_seats", every=15),
    ],
)
both_seats = judge.evaluate(starts, **how)
print(
    f"won against a random player: {before['pass@1']:.0%} -> "
    f"{both_seats['pass@1']:.0%}"
)

"""
The mean reward says little about self-play: what one player wins the other
loses. It rises towards 0 because fewer games end with a cell that is not free.
"""

print(
    f"lost by naming no free cell: {before['illegal']:.0%} -> "
    f"{both_seats['illegal']:.0%}"
)

"""
`play` shows one game as each player saw it, here with the most probable moves.
"""

task.play(opening="", temperature=0)

"""
## A frozen copy as the opponent

A policy that plays its newest self may come to beat only that. `Frozen` is a
copy that stays for some rollouts, here ten. It is not trained: a game gives
one trajectory and not two, so each opening gets more games. Both seats are
still learned, because after an opening of one move the copy has the first.

The mean reward now has a meaning: it is above 0 where the policy is better
than its copy.
"""

task = kpt.GRPOTask.from_preset(preset, sequence_length=64)
task.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    episode=kpt.episodes.Episode(
        tic_tac_toe, opponents={"other": kpt.episodes.Frozen(every=10)}
    ),
    num_generations=12,
    **settings,
)
task.fit(
    rows,
    batch_size=15,
    epochs=5,
    packing=True,
    callbacks=[kpt.callbacks.MetricsLog(folder / "frozen_copy")],
)
judge = kpt.GRPOTask.from_task(task)
judge.compile(episode=against_random, max_completion_length=4)
frozen_copy = judge.evaluate(starts, **how)
print(
    f"won against a random player: {before['pass@1']:.0%} -> "
    f"{frozen_copy['pass@1']:.0%}"
)

results = {
    "both_seats": [before["pass@1"], both_seats["pass@1"]],
    "frozen_copy": [before["pass@1"], frozen_copy["pass@1"]],
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- `task.play(human="other", opening="")`: a game of your own against a policy
  that was trained in both seats.
- `Frozen(every=10, share=0.5)`: the copy plays in half of the games, the
  policy as it is in the others.
- `kpt.losses.RoleAdvantages()` keeps a mean reward for each player, for one
  game a row: `num_generations=1`.
- `multi_turn_game.py`: games of one player.
"""
