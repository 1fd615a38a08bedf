"""Completions that share a prompt are what they are in rows of their own."""

import jax
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.packing import assemble
from keras_posttrain.data.batches.shared_prefix import (
    Group,
    assemble_groups,
    pack_groups,
)
from keras_posttrain.data.rows.examples import Example
from tests.support import FAMILIES, REFERENCE


def random_groups(sizes, seed=0):
    """Groups of `(prompt length, [completion lengths])`."""
    rng = np.random.default_rng(seed)
    groups = []
    for row, (prompt, lengths) in enumerate(sizes):
        groups.append(
            Group(
                rng.integers(3, 500, prompt).astype("int32"),
                [rng.integers(3, 500, n).astype("int32") for n in lengths],
                [rng.integers(0, 2, n).astype("float32") for n in lengths],
                row,
            )
        )
    return groups


SIZES = [(30, [5, 9, 1, 12]), (1, [7, 3]), (12, [20, 21]), (40, [2])]


def test_rows_hold_each_completion_once():
    groups = random_groups(SIZES)
    rows = pack_groups(groups, 64)
    pieces = [piece for row in rows for piece in row]
    assert sorted((g, i) for g, cs in pieces for i in cs) == [
        (g, i) for g, (_, cs) in enumerate(SIZES) for i in range(len(cs))
    ]
    # None is cut that fits; each row keeps to its tokens.
    assert sorted(g for g, _ in pieces) == [0, 1, 2, 3]
    for row in rows:
        assert sum(len(groups[g]) for g, _ in row) <= 64


def test_a_group_over_the_capacity_is_cut():
    groups = random_groups([(10, [8] * 6)])
    rows = pack_groups(groups, 30)
    assert [[cs for _, cs in row] for row in rows] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    rows = pack_groups(groups, 40, together=2)
    assert [[cs for _, cs in row] for row in rows] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
    ]
    with pytest.raises(ValueError) as error:
        pack_groups(groups, 25, together=2)
    for part in ("prompt of 10 tokens", "16 tokens", "capacity=25"):
        assert part in str(error.value)


def test_the_arrays_of_a_row():
    """A prompt of 3, completions of 2 and 1: one row of 8."""
    group = Group(
        np.array([5, 6, 7]), [np.array([8, 9]), np.array([4])],
        [np.array([1.0, 0.5]), np.array([1.0])], row=3,
    )  # fmt: skip
    batch, places = assemble_groups(
        [[(0, [0, 1])]], [group], length=8, num_rows=1, max_sequences=4,
        pad_id=2,
    )  # fmt: skip
    expected = {
        "token_ids": [5, 6, 7, 8, 9, 4, 2, 2],
        "segment_ids": [1, 1, 1, 2, 2, 3, 0, 0],
        "positions": [0, 1, 2, 3, 4, 3, 0, 0],
        "completion_mask": [0, 0, 0, 1, 0.5, 1, 0, 0],
        "predicted_by": [0, 0, 1, 2, 3, 2, 5, 6],
        "sequence_mask": [0, 1, 1, 0],
        "sequence_ids": [3, 3, 3, 0],
        "prefix_segments": [0, 1, 1, 0],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], [values])
    assert places[0, 1].tokens == (0, slice(5, 6))


LONG = [(150, [30, 21]), (260, [40, 90, 3])]


@pytest.mark.parametrize(
    "family, sizes, length",
    [(family, SIZES, 64) for family in FAMILIES] + [("gemma3", LONG, 600)],
)
def test_shared_equals_separate(family, sizes, length):
    """Log-probabilities and gradients, to float32 rounding."""
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / FAMILIES[family], sequence_length=64
    )
    groups = random_groups(sizes, seed=1)
    rows = pack_groups(groups, length)
    shared, places = assemble_groups(
        rows, groups, length=length, num_rows=len(rows), max_sequences=8,
        pad_id=0,
    )  # fmt: skip
    examples, keys = [], []
    for g, group in enumerate(groups):
        for i, (ids, mask) in enumerate(zip(group.completions, group.masks)):
            keys.append((g, i))
            examples.append(
                Example(
                    np.concatenate([group.prompt, ids]),
                    np.concatenate([0 * group.prompt, mask]),
                    g,
                )
            )
    separate = assemble(
        [[e] for e in examples],
        length=length, num_rows=len(examples), max_sequences=1, pad_id=0,
    )  # fmt: skip

    @jax.jit
    def run(trainable, batch):
        frozen = [v.value for v in task.non_trainable_variables]

        def total(trainable):
            with task.using_weights(trainable, frozen):
                logps = task.policy.token_outputs(
                    batch, batch["completion_mask"] > 0
                )["per_token_logps"]
            return (logps * batch["completion_mask"]).sum(), logps

        return jax.grad(total, has_aux=True)(trainable)

    trainable = [v.value for v in task.trainable_variables]
    gradients, logps = run(trainable, shared)
    expected, plain = run(trainable, separate)
    logps, plain = np.asarray(logps), np.asarray(plain)
    for row, key in enumerate(keys):
        prompt = len(groups[key[0]].prompt)
        found = logps[places[key].tokens]
        np.testing.assert_allclose(
            found, plain[row, prompt : prompt + len(found)], atol=2e-5
        )
    assert np.abs(plain).sum() > 1
    for left, right in zip(gradients, expected):
        scale = max(np.abs(right).max(), 1.0)
        np.testing.assert_allclose(left, right, atol=2e-5 * scale)
