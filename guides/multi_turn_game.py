"""
Title: Games over several turns
Author: The keras_posttrain authors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: A model learns to guess a number, and to push a box in Sokoban.
Accelerator: None
"""

"""
## Introduction

In a game the model acts, sees what follows, and acts again. What makes an
action good shows only later. Such training needs no framework for
environments: an episode is an async function of a chat, which says something,
awaits the model's turn, and returns the reward.

Here a tiny model learns two games. It guesses a number by the hints "higher"
and "lower", which an episode of five lines plays. Then it pushes boxes in
[Sokoban](https://en.wikipedia.org/wiki/Sokoban), as in
[GRL](https://github.com/lmgame-org/GRL), which a class with `reset` and `step`
plays.

It runs in about three minutes on two CPU cores. For a real model set `preset`
to one such as `"qwen3_0.6b_en"` or `"hf://Qwen/Qwen3-0.6B"`, and leave out the
rows that the tiny one learns from.
"""

import collections
import itertools
import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/multi_turn_game"
)
keras.utils.set_random_seed(0)
random.seed(0)

"""
## Players that are not very good

Reinforcement learning makes actions more probable that are sampled now and
then. So the tiny model first sees 800 games. In one of five the player heeds
the hints, and says the middle of what is left; in the others it often says the
same number again.
"""

games = []
for _ in range(800):
    secret, low, high, said = random.randint(1, 9), 1, 9, None
    heeds, messages = random.random() < 0.2, []
    hint = "Guess from 1 to 9."
    for _ in range(4):
        if heeds:
            said = (low + high) // 2
        elif said is None or random.random() < 0.3:
            said = random.randint(1, 9)
        messages.append({"role": "user", "content": hint})
        messages.append({"role": "assistant", "content": str(said)})
        if said == secret:
            break
        hint = "higher" if said < secret else "lower"
        if hint == "higher":
            low = max(low, said + 1)
        else:
            high = min(high, said - 1)
    games.append({"messages": messages})

preset = kpt.examples.tiny_preset(folder / "tiny_guess", games, epochs=3)

"""
## An episode is a function

`await chat(hint)` says the hint to the model and samples its turn. Parameters
that are columns of the rows, here `secret`, get their values. All episodes of
a step run at once.
"""


async def guess(chat, secret):
    hint = "Guess from 1 to 9."
    for _ in range(4):
        reply = await chat(hint)
        if reply.text == str(secret):
            return 1.0
        is_low = reply.text.isdigit() and int(reply.text) < secret
        hint = "higher" if is_low else "lower"
    return 0.0


"""
## Credit for each turn

GRPO compares the 16 games of one secret number by their rewards, and gives all
turns of a game the same advantage. `TurnAdvantages` compares turn by turn what
was earned from there on, with the other games that came as far.
"""

task = kpt.GRPOTask.from_preset(preset, sequence_length=256)
task.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    episode=guess,
    advantages=kpt.losses.TurnAdvantages(),
    num_generations=16,
    max_completion_length=4,
)
rows = [{"secret": number} for number in range(1, 10)]
how = {"num_generations": 10, "temperature": 1.0, "batch_size": 9}
before = task.evaluate(rows, **how)
task.fit(
    rows,
    batch_size=9,
    epochs=20,
    callbacks=[
        kpt.callbacks.MetricsLog(folder / "guess"),
        kpt.callbacks.CompletionsLog(folder / "guess", every=20),
    ],
)
after = task.evaluate(rows, **how)
print(
    f"guessed in four turns: {before['reward']:.0%} -> {after['reward']:.0%}"
)

"""
`play` shows one game. Its moves are in the trajectory that it returns, with
the tokens and the reward of each turn.
"""

task.play(secret=7, temperature=0)

"""
## Sokoban

`P` is the player, `B` the box, `G` where it belongs. A class plays: `reset`
gets the columns of the row and returns what the model sees first, `step` gets
the model's text and returns what it sees next, a reward, and whether the game
has ended. Environments with the methods of Gymnasium, TextArena, SkyRL or
OpenEnv serve as they are.
"""

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
CELLS = list(itertools.product(range(3), range(3)))


class Sokoban:
    def reset(self, board):
        self.player, self.box, self.goal = board
        return self.shown()

    def step(self, text):
        self.move(text.strip())
        done = self.box == self.goal
        return self.shown(), float(done), done

    def move(self, word):
        down, right = MOVES.get(word, (0, 0))
        to, behind = (
            (self.player[0] + n * down, self.player[1] + n * right)
            for n in (1, 2)
        )
        if to in CELLS and (to != self.box or behind in CELLS):
            self.box = behind if to == self.box else self.box
            self.player = to

    def shown(self):
        marks = {self.goal: "G", self.box: "B", self.player: "P"}
        text = "".join(marks.get(cell, ".") for cell in CELLS)
        return f"{text[:3]}\n{text[3:6]}\n{text[6:]}"


"""
The shortest ways to push the box home are found by trying all moves, breadth
first. Boards that take at most four moves are played.
"""

ways = {}
for board in itertools.permutations(CELLS, 3):
    queue, seen = collections.deque([(board, ())]), {board}
    while queue and board not in ways:
        state, moves = queue.popleft()
        for word in MOVES if len(moves) < 4 else ():
            game = Sokoban()
            game.reset(state)
            game.move(word)
            found = game.player, game.box, game.goal
            if game.box == game.goal:
                ways[board] = (*moves, word)
                break
            if found not in seen:
                seen.add(found)
                queue.append((found, (*moves, word)))
print(f"{len(ways)} boards; the first: {next(iter(ways.items()))}")

"""
Again the model first sees games of players, of whom three in ten know the
way. The others move at random.
"""

games = []
for _ in range(1500):
    board = random.choice(list(ways))
    knows, messages, game = random.random() < 0.3, [], Sokoban()
    seen, done = game.reset(board), False
    for turn in range(5):
        word = random.choice(list(MOVES))
        if knows:
            word = ways[board][turn]
        messages.append({"role": "user", "content": seen})
        messages.append({"role": "assistant", "content": word})
        seen, _, done = game.step(word)
        if done:
            break
    games.append({"messages": messages})

preset = kpt.examples.tiny_preset(folder / "tiny_sokoban", games, epochs=3)

"""
`Limits(turns=5)` ends a game after five moves. An episode that a limit has
ended keeps its rewards, here 0.
"""

task = kpt.GRPOTask.from_preset(preset, sequence_length=256)
task.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    episode=kpt.episodes.Episode(
        kpt.episodes.Gym(Sokoban), limits=kpt.episodes.Limits(turns=5)
    ),
    num_generations=8,
    max_completion_length=4,
)
rows = [{"board": board} for board in ways]
how = {"num_generations": 4, "temperature": 1.0, "batch_size": len(rows)}
pushed_before = task.evaluate(rows, **how)
task.fit(rows, batch_size=14, epochs=5)
pushed_after = task.evaluate(rows, **how)
print(
    f"boxes pushed home: {pushed_before['reward']:.0%} -> "
    f"{pushed_after['reward']:.0%}"
)
task.play(board=random.choice(list(ways)), temperature=0)

results = {
    "guess": [before["reward"], after["reward"]],
    "sokoban": [pushed_before["reward"], pushed_after["reward"]],
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- `tool_use.py`: a model that calls functions.
- An agent of your own with memory: `chat.restart(messages)` begins a new
  context, `chat.fork()` a branch; all of it is trained as one trajectory.
"""
