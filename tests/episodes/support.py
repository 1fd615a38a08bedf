"""Helpers of the tests of episodes."""

import functools

import keras
import numpy as np

import keras_posttrain as kpt
from keras_posttrain.training.run_state import RunState


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as "3 * 4".
    """
    return str(kpt.episodes.arithmetic(expression))


TOOLS = kpt.episodes.Tools([calculator], limits=kpt.episodes.Limits(turns=3))
CALL = {"name": "calculator", "arguments": {"expression": "3 * 4"}}
CHAT = [
    {"role": "user", "content": "What is 3 * 4?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": CALL}],
    },
    {"role": "tool", "name": "calculator", "content": "12"},
    {"role": "assistant", "content": "It is 12."},
]
QUESTIONS = [{"question": q} for q in ("one", "two", "three", "four")]


def learn_by_heart(directory):
    """Writes a model of one layer that knows a call and some answers."""
    rows = [{"messages": CHAT, "tools": TOOLS.schemas}]
    rows += [
        {
            "messages": [
                {"role": "user", "content": q["question"]},
                {"role": "assistant", "content": f"{q['question']}!"},
            ]
        }
        for q in QUESTIONS
    ]
    preset = kpt.examples.tiny_preset(directory / "new", rows, num_layers=1)
    task = kpt.SFTTask.from_preset(preset, sequence_length=512)
    task.compile(keras.optimizers.AdamW(1e-2))
    # All rows are one. The loss ends below 0.001.
    task.fit(rows, batch_size=1, epochs=40, packing=True, verbose=0)
    task.export(directory / "tiny")
    return directory / "tiny"


class Batches:
    """Keeps the batches that a task trains on."""

    def __init__(self, task):
        found = self.found = []

        class Keeping(task.collector):
            def build(self, round):
                collection = super().build(round)
                found.extend(collection.batches)
                return collection

        task.collector = Keeping


@functools.cache
def _made(kind, preset, sequence_length, lora):
    task = kind.from_preset(preset, sequence_length=sequence_length, lora=lora)
    return task, [np.array(v.value) for v in task.variables]


def compiled(kind, preset, sequence_length, *args, lora=None, **settings):
    """A compiled task with its first weights.

    It is one task for all tests, so that its engine keeps its programs; what
    is trained is compiled each time.
    """
    task, values = _made(kind, preset, sequence_length, lora)
    for variable, value in zip(task.variables, values):
        variable.assign(value)
    task.run_state, task.collector = RunState(), kind.collector
    engine = task.rollout or "auto"
    task.compile(*args, rollout=engine, **settings)
    return task
