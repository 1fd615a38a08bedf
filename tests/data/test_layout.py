"""Batches have the layout of the design, packed, shared or not."""

import jax
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.assembly import Segment, assemble
from keras_posttrain.data.batches.layout import BatchLayout, Group
from tests.data.support import SIZES, random_groups
from tests.support import FAMILIES, REFERENCE


def segment(ids, mask=None, row=0):
    mask = [0] + [1] * (len(ids) - 1) if mask is None else mask
    return Segment(np.array(ids, np.int32), np.array(mask, np.float32), row)


def test_assemble_lays_out_a_batch():
    rows = [
        [segment([11, 12, 13], row=7), segment([14, 15], [1, 2], row=3)],
        [segment([16, 17], [0, 0.5], row=9)],
    ]
    batch, places = assemble(
        rows, length=6, num_rows=3, max_sequences=2, pad_id=99
    )
    expected = {
        "token_ids": [
            [11, 12, 13, 14, 15, 99],
            [16, 17, 99, 99, 99, 99],
            [99] * 6,
        ],
        "segment_ids": [[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0], [0] * 6],
        "positions": [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6],
        # A segment's first token carries no loss, whatever its row said.
        "completion_mask": [
            [0, 1, 1, 0, 2, 0],
            [0, 0.5, 0, 0, 0, 0],
            [0] * 6,
        ],
        "sequence_mask": [[1, 1], [1, 0], [0, 0]],
        "sequence_ids": [[7, 3], [9, 0], [0, 0]],
    }
    assert [(p.row, p.slot, p.start, p.stop) for p in places] == [
        (0, 0, 0, 3),
        (0, 1, 3, 5),
        (1, 0, 0, 2),
    ]
    assert batch.keys() == expected.keys()
    floats = ("completion_mask", "sequence_mask")
    for key, value in expected.items():
        assert batch[key].tolist() == value, key
        assert batch[key].dtype == (np.float32 if key in floats else np.int32)


def test_assemble_refuses_what_does_not_fit():
    row = [segment([1, 2, 3]), segment([4, 5])]
    with pytest.raises(ValueError, match="2 sequences of 5 tokens, length=4"):
        assemble([row], length=4, num_rows=1, max_sequences=2, pad_id=0)
    with pytest.raises(ValueError, match="max_sequences=1"):
        assemble([row], length=8, num_rows=1, max_sequences=1, pad_id=0)
    with pytest.raises(ValueError, match="2 rows, num_rows=1"):
        assemble([row, row], length=8, num_rows=1, max_sequences=2, pad_id=0)


def test_the_arrays_of_a_row():
    """A prompt of 3, completions of 2 and 1: one row of 8."""
    group = Group.of_completions(
        np.array([5, 6, 7]), [np.array([8, 9]), np.array([4])],
        [np.array([1.0, 0.5]), np.array([1.0])], row=3,
    )  # fmt: skip
    layout = BatchLayout(
        2, 8, token_budget=8, max_sequences=4, share_prefix=True, pad_id=2
    )
    batch = layout([group])
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
        np.testing.assert_array_equal(batch.arrays[name], [values])
    assert batch.places[1].tokens == (0, slice(5, 6))


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
    prompts = [
        group.prefix_length for group in groups for _ in group.sequences
    ]
    layout = BatchLayout(
        len(prompts), length, token_budget=length, share_prefix=True
    )
    batch = layout(groups)
    shared, places = batch.arrays, batch.places
    separate = BatchLayout(len(prompts), length)(groups).arrays

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
    for row, prompt in enumerate(prompts):
        found = logps[places[row].tokens]
        np.testing.assert_allclose(
            found, plain[row, prompt : prompt + len(found)], atol=2e-5
        )
    assert np.abs(plain).sum() > 1
    for left, right in zip(gradients, expected):
        scale = max(np.abs(right).max(), 1.0)
        np.testing.assert_allclose(left, right, atol=2e-5 * scale)
