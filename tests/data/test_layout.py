"""Batches have the layout of the design, packed, shared or not."""

import jax
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.assembly import Segment, assemble
from keras_posttrain.data.batches.layout import BatchLayout, Group
from keras_posttrain.data.rows.examples import Example
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
        "shared_by": [2, 1, 1, 0],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(batch.arrays[name], [values])
    assert batch.places[1].tokens == (0, slice(5, 6))


def test_two_groups_share_a_row():
    """A prompt of 2 with completions of 1 and 1, then one of 3 with 2."""
    groups = random_groups([(2, [1, 1]), (3, [2])])
    layout = BatchLayout(
        3, 16, token_budget=10, max_sequences=8, share_prefix=True
    )
    batch = layout(groups)
    expected = {
        "segment_ids": [1, 1, 2, 3, 4, 4, 4, 5, 5, 0],
        "positions": [0, 1, 2, 2, 0, 1, 2, 3, 4, 0],
        "predicted_by": [0, 0, 1, 1, 3, 4, 5, 6, 7, 8],
        "prefix_segments": [0, 1, 1, 0, 4, 0, 0, 0],
        "shared_by": [2, 1, 1, 1, 1, 0, 0, 0],
        "sequence_mask": [0, 1, 1, 0, 1, 0, 0, 0],
        "sequence_ids": [0, 0, 0, 1, 1, 0, 0, 0],
    }
    for name, values in expected.items():
        assert batch.arrays[name].tolist() == [values], name
        assert (batch.arrays[name].dtype == np.int32) == (
            name != "sequence_mask"
        )
    ids = batch.arrays["token_ids"][0]
    assert ids[4:9].tolist() == groups[1].sequences[0].token_ids.tolist()


def trajectory(*parts):
    """A prompt, then sampled text and tool output in turns."""
    ids, mask = [], []
    for i, part in enumerate(parts):
        ids += part
        mask += [float(i % 2)] * len(part)
    return Example(np.array(ids, "int32"), np.array(mask, "float32"), 0)


def test_trajectories_of_several_turns_are_sequences_with_a_mask():
    """Two trajectories of one prompt (5 6), with tool output (20)."""
    first = trajectory([5, 6], [7, 8], [20], [9])
    second = trajectory([5, 6], [10])
    group = Group([first, second], prefix_length=2)
    logps = [np.arange(6) + 1.0, np.array([7.0])]

    apart = BatchLayout(2, 64)([group])
    apart.put_tokens("logps", logps)
    assert apart.arrays["completion_mask"][0, :6].tolist() == [
        0,
        0,
        1,
        1,
        0,
        1,
    ]
    assert apart.arrays["logps"][:, :6].tolist() == [
        [1, 2, 3, 4, 5, 6],
        [0, 0, 7, 0, 0, 0],
    ]

    layout = BatchLayout(2, 64, token_budget=8, share_prefix=True)
    shared = layout([group])
    shared.put_tokens("logps", logps)
    shared.put_sequences("rewards", [0.5, 2.0])
    arrays = {name: values[0] for name, values in shared.arrays.items()}
    assert arrays["token_ids"][:7].tolist() == [5, 6, 7, 8, 20, 9, 10]
    assert arrays["completion_mask"].tolist() == [0, 0, 1, 1, 0, 1, 1, 0]
    assert arrays["positions"][:7].tolist() == [0, 1, 2, 3, 4, 5, 2]
    # Of values for all tokens those of the prefix are left out.
    assert arrays["logps"].tolist() == [0, 0, 3, 4, 5, 6, 7, 0]
    assert arrays["rewards"][:4].tolist() == [0, 0.5, 2, 0]
    assert shared.sequence_sums(shared.arrays["logps"]) == {0: 18.0, 1: 7.0}
    assert shared.rows() == [[0, 1]]


def test_minibatches_cut_groups_and_count_on():
    groups = random_groups([(3, [4, 5, 6]), (2, [100, 8])])
    layout = BatchLayout(2, 128, row_multiple=3)
    batches = layout.minibatches(groups)
    assert [list(b.places) for b in batches] == [[0, 1], [2, 3], [4]]
    assert {b.arrays["token_ids"].shape for b in batches} == {(3, 128)}
    expected = [x for group in groups for x in group.sequences]
    for batch in batches:
        for i, place in batch.places.items():
            assert batch.sequences[i] is expected[i]
            np.testing.assert_array_equal(
                batch.arrays["token_ids"][place.tokens], expected[i].token_ids
            )
    lengths = [
        b.arrays["token_ids"].shape[1]
        for b in layout.minibatches(groups, equal_lengths=False)
    ]
    assert lengths == [64, 128, 64]


def test_packed_sequences_of_a_group_are_stored_once():
    groups = random_groups([(2, [3, 4, 5]), (1, [2])])
    expected = [x for group in groups for x in group.sequences]
    batch = BatchLayout(4, 16, token_budget=16)(groups)
    assert batch.arrays["sequence_mask"].sum() == 4
    # 7 + 6 + 3 tokens are a row of 16.
    assert batch.rows() == [[2, 1, 3], [0]]
    assert list(batch.places) == [0, 1, 2, 3]
    for i, place in batch.places.items():
        assert batch.arrays["token_ids"][place.tokens].tolist() == (
            expected[i].token_ids.tolist()
        )


@pytest.mark.parametrize(
    "share_prefix, rows", [(False, [[0, 1, 2, 3], [4, 5]]), (True, None)]
)
def test_a_packed_row_has_no_more_than_its_slots(share_prefix, rows):
    """Pairs: two without their prompts, one with its own, in 4 slots."""
    groups = random_groups([(1, [1, 1])] * 3)
    layout = BatchLayout(
        6,
        32,
        token_budget=32,
        max_sequences=4,
        together=2,
        share_prefix=share_prefix,
    )
    batch = layout(groups)
    assert batch.arrays["sequence_mask"].shape[1] == 4
    assert batch.rows() == (rows or [[0, 1], [2, 3], [4, 5]])


def test_a_group_is_cut_between_its_pairs():
    """A prompt of 2 and four completions of 4: three of them fit into 14."""
    groups = random_groups([(2, [4] * 4)])
    for together, rows in ((1, [[0, 1, 2], [3]]), (2, [[0, 1], [2, 3]])):
        layout = BatchLayout(
            4, 14, token_budget=14, together=together, share_prefix=True
        )
        assert layout(groups).rows() == rows


def test_minibatches_store_the_prompt_of_neighbours_once():
    groups = random_groups([(5, [1, 1, 1, 1])])
    layout = BatchLayout(2, 8, token_budget=8, share_prefix=True)
    for first, batch in zip((0, 2), layout.minibatches(groups), strict=True):
        assert batch.rows() == [[first, first + 1]]
        assert batch.arrays["segment_ids"].tolist() == [
            [1, 1, 1, 1, 1, 2, 3, 0]
        ]


def test_rows_that_are_packed_already():
    groups = random_groups([(2, [3]), (1, [4]), (2, [1])])
    sequences = [x for group in groups for x in group.sequences]
    layout = BatchLayout(3, 9, token_budget=9, max_sequences=2, row_multiple=2)
    batch = layout.of_rows([sequences[:1], sequences[1:]])
    assert batch.arrays["token_ids"].shape == (4, 9)
    assert batch.rows() == [[0], [1, 2]]
    assert batch.sequences == dict(enumerate(sequences))


def test_rows_are_as_long_as_their_longest_sequence():
    """With a shared prompt, as a group's tokens."""
    groups = random_groups([(10, [50, 50])])
    for share_prefix, length in ((False, 64), (True, 128)):
        layout = BatchLayout(2, 512, share_prefix=share_prefix, together=2)
        assert layout(groups).arrays["token_ids"].shape[1] == length


def test_extras_see_the_batch_and_its_groups():
    groups = random_groups(SIZES)

    def extras(batch, given):
        assert given is groups
        batch.put_sequences("numbers", list(range(9)), np.int32)

    batch = BatchLayout(9, 128, extras=extras)(groups).arrays
    assert batch["numbers"][:, 0].tolist() == list(range(9))
    assert batch["numbers"].dtype == np.int32


LONG = [(150, [30, 21]), (260, [40, 90, 3])]
# Families whose attention differs; Gemma 3 has longer rows.
DIFFERENT = ("gemma2", "llama")


@pytest.mark.parametrize(
    "family, sizes, length",
    [
        pytest.param(
            family,
            SIZES,
            64,
            marks=() if family in DIFFERENT else pytest.mark.full,
        )
        for family in FAMILIES
    ]
    + [("gemma3", LONG, 600)],
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
