"""Helpers of the tests of episodes."""

import functools

import numpy as np

from keras_posttrain.training.run_state import RunState


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
