"""Steps on trajectories of several segments: equal in every layout."""

import dataclasses
import functools

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import BatchLayout, Group
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.training.micro_batches import MicroBatches
from keras_posttrain.training.step import global_norm
from tests.data.support import random_trajectories
from tests.tasks.test_grpo import MODEL, odd

SHARED = {"token_budget": 96, "max_sequences": 16, "share_prefix": True}
LAYOUTS = {
    "rows": ({}, None),
    "packed": ({"token_budget": 64}, None),
    "shared": (SHARED, None),
    "shared in micro-batches": ({**SHARED, "token_budget": 56}, 1),
}


def cut_trajectories(cut):
    """Trajectories in up to `cut` segments, each with all tokens before it.

    They fork, as those of `random_trajectories`.
    """
    sequences, units = [], []
    whole = random_trajectories(7, units=6).sequences[:6]
    for unit, x in enumerate(whole):
        mask = x.completion_mask.copy()
        mask[0] = 0.0
        ends = np.append(np.flatnonzero(np.diff(mask) < 0) + 1, len(mask))
        last = 0
        for some in np.array_split(ends, min(cut, len(ends))):
            own = mask[: some[-1]].copy()
            own[:last] = 0.0
            last = some[-1]
            sequences.append(Example(x.token_ids[:last], own, unit))
            units.append(unit)
    return Group(sequences, None, units)


@functools.cache
def make_task(kind):
    keras.utils.set_random_seed(0)
    task = getattr(kpt, f"{kind}Task").from_preset(MODEL, sequence_length=64)
    task.tokenizer = None
    settings = (
        {"loss": kpt.losses.GRPOLoss(beta=0.0)} if kind == "GRPO" else {}
    )
    task.compile(
        keras.optimizers.SGD(0.1),
        rewards=[odd],
        max_completion_length=6,
        max_grad_norm=None,
        **settings,
    )
    if kind == "PPO":
        head = task.value_model.kernel
        head.assign(np.random.default_rng(0).normal(0, 0.05, head.shape))
    return task


def run(task, cut, layout):
    """Loss, logs and gradients of the trainer's step."""
    settings, micro = LAYOUTS[layout]
    batch = BatchLayout(6, 64, **settings)([cut_trajectories(cut)])
    rng = np.random.default_rng(1)
    tables = rng.normal(-6, 0.5, (6, 64)), rng.normal(0, 1, (2, 6, 64))
    group = batch.sequences
    for name, table in (
        ("old_per_token_logps", tables[0]),
        ("returns", tables[1][0]),
        ("old_values", tables[1][1]),
    ):
        # Equal in the segments of a trajectory.
        batch.put_tokens(
            name,
            {i: table[x.row, : len(x.token_ids)] for i, x in group.items()},
        )
    batch.put_units("advantages", np.array([1.0, -0.5, 2.0, 0.3, -1.2, 0.7]))
    step = dataclasses.replace(
        task.make_step(), micro_batches=MicroBatches(micro), has_signal=None
    )
    state = {
        "trainable": [v.value for v in task.trainable_variables],
        "frozen": [v.value for v in task.non_trainable_variables],
    }
    return jax.jit(step.loss_and_gradients)(state, batch.arrays)


CASES = [
    (3, "rows"),
    (2, "packed"),
    (3, "shared"),
    (3, "shared in micro-batches"),
]


@pytest.mark.parametrize(
    "kind, cases",
    [
        ("GRPO", CASES),
        ("PPO", CASES[-1:]),
        pytest.param("PPO", CASES[:-1], marks=pytest.mark.full),
    ],
)
def test_steps_do_not_depend_on_segments_or_layout(kind, cases):
    """To float32 rounding: losses to 1e-6, gradients to some 1e-6 of their
    norm. A log-prob of -6 has a resolution of 5e-7, and the ratio to the old
    one turns that into a share of the gradient; without old log-probs the
    largest difference of an element is 6e-7. `tests/losses/test_segments.py`
    has closer bounds."""
    task = make_task(kind)
    gradients, logs = run(task, 1, "rows")
    norm = float(global_norm(gradients))
    assert norm > 0.1
    for cut, layout in cases:
        found, more = run(task, cut, layout)
        where = f"{cut} segments, {layout}"
        for name in ("loss", "loss_weight", "entropy"):
            np.testing.assert_allclose(
                more[name], logs[name], rtol=1e-6, atol=1e-6, err_msg=where
            )
        gap = global_norm([a - b for a, b in zip(found, gradients)])
        assert gap <= 5e-6 * norm, where
