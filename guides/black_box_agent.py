"""
Title: Training an agent that knows only an API
Author: The keras_posttrain authors
Date created: 2026/11/23
Last modified: 2026/11/23
Description: An agent written against OpenAI's API is trained unchanged.
Accelerator: None
"""

"""
## Introduction

Many agents exist already: programs that call a model by OpenAI's chat
completions, directly or through a framework. To train one it need not be
written anew. `kpt.episodes.Endpoint` gives it the address of a server on this
machine, which samples from the policy in training, and a key for each episode.
What the agent asks and is answered becomes the trajectory that is trained on.

Here an agent sorts the messages of customers: it asks for the department, then
how urgent it is. A tiny model that mostly guesses learns to get both right.

It runs in about a minute on two CPU cores, and needs `pip install openai`. For
a real model set `preset` to one such as `"qwen3_0.6b_en"` or
`"hf://Qwen/Qwen3-0.6B"`, and leave out the rows that the tiny one learns from.
"""

import itertools
import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import openai

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/black_box_agent"
)
keras.utils.set_random_seed(0)
random.seed(0)

"""
## Messages of customers

The words of a message tell where it belongs.
"""

THINGS = {
    "invoice": "billing",
    "refund": "billing",
    "parcel": "shipping",
    "courier": "shipping",
    "password": "support",
    "screen": "support",
}
TONES = {
    "at once": "urgent",
    "today": "urgent",
    "some day": "later",
    "no hurry": "later",
}
tickets = [
    {
        "text": f"About the {thing}, {tone}.",
        "answer": [THINGS[thing], TONES[tone]],
    }
    for thing, tone in itertools.product(THINGS, TONES)
]
print(tickets[0])

"""
The tiny model sees such conversations first. In one of six the answers are
right; in the others they are guessed.
"""

HOW_URGENT = "How urgent is it?"
chats = []
for ticket in random.choices(tickets, k=600):
    department, urgency = ticket["answer"]
    if random.random() > 1 / 6:
        department = random.choice(list(THINGS.values()))
        urgency = random.choice(list(TONES.values()))
    chats.append(
        [
            {"role": "user", "content": ticket["text"]},
            {"role": "assistant", "content": department},
            {"role": "user", "content": HOW_URGENT},
            {"role": "assistant", "content": urgency},
        ]
    )
rows = [{"messages": chat} for chat in chats]
preset = kpt.examples.tiny_preset(folder / "tiny", rows, epochs=5)

"""
## The agent

It knows nothing of training: a `base_url`, a key, and the columns of the row
that it names. It may be sync or async, use any framework, or start a program
of another language. What it returns is its reward.

The second request repeats the conversation and continues it. It is trained as
one segment, with the tokens that were sampled. A request that is no
continuation, such as one with a summary of the past, begins another segment.
"""


def sort_ticket(base_url, api_key, text, answer):
    messages, found = [], []
    # Thousands of agents would leave as many connections open.
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        for question in (text, HOW_URGENT):
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(
                model="policy", messages=messages
            )
            message = reply.choices[0].message
            messages.append({"role": "assistant", "content": message.content})
            found.append(message.content)
    return sum(a == b for a, b in zip(found, answer)) / 2


"""
## Train

The agent takes the place of an episode. What is sampled, and how, is set in
`compile`: if the agent asks for another temperature, that is counted as
`endpoint/overridden`, and refused with `Endpoint(agent, strict=True)`.
"""

task = kpt.GRPOTask.from_preset(preset, sequence_length=128)
task.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    episode=kpt.episodes.Endpoint(sort_ticket),
    num_generations=8,
    max_completion_length=8,
)
how = {"num_generations": 4, "temperature": 1.0, "batch_size": len(tickets)}
before = task.evaluate(tickets, **how)
task.fit(
    tickets,
    batch_size=12,
    epochs=8,
    callbacks=[
        kpt.callbacks.MetricsLog(folder),
        kpt.callbacks.CompletionsLog(folder, every=8),
    ],
)
after = task.evaluate(tickets, **how)
print(f"both right: {before['pass@1']:.0%} -> {after['pass@1']:.0%}")
print(f"requests of an episode: {after['endpoint/requests']:.1f}")
print(f"of those that fork: {after['endpoint/forks']:.1f}")

"""
`play` shows one episode: what the agent asked, and what it was answered.
"""

task.play(**tickets[0], temperature=0)

results = {"before": before["pass@1"], "after": after["pass@1"]}
(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")

"""
## Next

- Tools that the agent passes to the API are shown to the model by its chat
  template, and its calls come back as `tool_calls`.
- `multi_turn_game.py` and `tool_use.py`: episodes written for training.
"""
