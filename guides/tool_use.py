"""
Title: Learning to use a tool
Author: The keras_posttrain authors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: A model learns from a reward alone when to call a calculator.
Accelerator: None
"""

"""
## Introduction

A model that may call tools must learn when to do it. Nobody has to show it: a
reward for the right answer is enough, because the samples that called the tool
are right more often than those that guessed.

Here a tiny model knows how to call a calculator when it is asked to compute.
Asked a plain question it mostly guesses. GRPO trains it on the plain questions
until it calls the calculator by itself.

It runs in about three minutes on two CPU cores. For a real model set `preset`
to one whose chat template knows tools, such as `"qwen3_0.6b_en"` or
`"hf://Qwen/Qwen3-0.6B"`, and leave out the rows that the tiny one learns from.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tool_use")
keras.utils.set_random_seed(0)

"""
## A tool is a function

Its name, type hints and docstring become the description that the chat
template shows to the model. `kpt.episodes.arithmetic` computes a formula and
runs no code. For Python code there is `kpt.episodes.python`, which runs in a
process of its own, with limits.
"""


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as "3 * 4".
    """
    return str(kpt.episodes.arithmetic(expression))


"""
`Tools` is the episode in which the model may call tools before it answers. A
call that cannot be read, a wrong argument or an exception of the tool is
answered with an error that the model reads. `Limits` bounds what an episode
may use.
"""

tools = kpt.episodes.Tools(
    [calculator], limits=kpt.episodes.Limits(turns=3, tool_seconds=10)
)
print(json.dumps(tools.schemas[0], indent=2))

"""
## A model that knows the format

The tiny model is trained on chats of two kinds. Asked to compute, it calls
the calculator and repeats its result. To a plain question it does so one time
in four, and guesses otherwise. A row with `tools` is a chat in which the model
was shown these tools.
"""

random.seed(0)
questions = [
    {"prompt": f"{a} {sign} {b}", "answer": a + b if sign == "+" else a * b}
    for a in range(2, 8)
    for b in range(2, 8)
    for sign in "+*"
]
random.shuffle(questions)
chats = []
for row in questions * 4:
    call = {"name": "calculator", "arguments": {"expression": row["prompt"]}}
    computed = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {
            "role": "tool",
            "name": "calculator",
            "content": str(row["answer"]),
        },
        {"role": "assistant", "content": str(row["answer"])},
    ]
    guess = str(random.randint(4, 49))
    guessed = [{"role": "assistant", "content": guess}]
    asked = {"role": "user", "content": f"Compute {row['prompt']}"}
    plain = {"role": "user", "content": row["prompt"]}
    chats.append([asked, *computed])
    chats.append([plain, *(computed if random.random() < 0.25 else guessed)])
rows = [{"messages": chat, "tools": tools.schemas} for chat in chats]
print(rows[0]["messages"])

preset = kpt.examples.tiny_preset(folder / "tiny", rows, epochs=6)

"""
## Rewards see the whole conversation

A reward has the messages of each episode, with the calls and what the tool
said. This one compares the last message with the answer.
"""


def correct(completions, answer):
    return [
        float(messages[-1]["content"].strip() == str(a))
        for messages, a in zip(completions, answer)
    ]


"""
## Train

The only difference from GRPO without tools is `episode=`. The tokens that are
trained are those that were sampled; what the tool said is read by the model
and carries no loss. A third of the questions is held out.
"""

held_out, trained = questions[:24], questions[24:]
task = kpt.GRPOTask.from_preset(preset, sequence_length=512)
task.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    rewards=[correct],
    episode=tools,
    num_generations=8,
    max_completion_length=64,
)


"""
`evaluate` runs episodes, too. `tools/calls` is the mean number of calls of an
episode.
"""

before = task.evaluate(
    held_out, num_generations=4, temperature=1.0, batch_size=24
)
print(f"held-out right: {before['reward']:.0%} of samples")
print(f"calls of the calculator: {before['tools/calls']:.2f} an episode")

"""
`share_prefix=True` computes what episodes have in common once: here the prompt
with the description of the tools, for all eight samples of a question.
`CompletionsLog` writes the conversations to a file.
"""

history = task.fit(
    trained,
    batch_size=8,
    epochs=3,
    share_prefix=True,
    callbacks=[
        kpt.callbacks.MetricsLog(folder),
        kpt.callbacks.CompletionsLog(folder, every=9),
    ],
)

after = task.evaluate(
    held_out, num_generations=4, temperature=1.0, batch_size=24
)
print(f"held-out right: {before['reward']:.0%} -> {after['reward']:.0%}")
print(
    f"calls: {before['tools/calls']:.2f} -> {after['tools/calls']:.2f} an "
    "episode"
)

"""
`play` shows one episode, here with the most probable tokens: the call, what
the calculator said, and the answer.
"""

trajectory = task.play(prompt=held_out[0]["prompt"], temperature=0)

results = {
    "before": before["reward"],
    "after": after["reward"],
    "calls_before": before["tools/calls"],
    "calls_after": after["tools/calls"],
}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- An episode whose tool takes longer than `Limits(tool_seconds=...)` is run
  once more, then left out. `kpt.episodes.Isolated(tool)` runs a tool in a
  process that can be ended.
- Tools with a state are methods of a class: `kpt.episodes.Tools(Browser)`
  makes an object for each episode.
- `multi_turn_game.py`: an episode of your own, turn by turn.
- `kpt.episodes.Endpoint`: an agent that is written against OpenAI's API.
"""
