"""Sequences that share prefixes as a tree, and trajectories of segments."""

import jax
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import BatchLayout, Group
from keras_posttrain.data.batches.packing import pack_groups
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.planning.formulas import token_pairs
from tests.data.support import random_groups, random_trajectories
from tests.support import FAMILIES, FAMILY_CASES, REFERENCE


def example(*parts, row=0):
    """Tokens without loss, then tokens with loss, in turns."""
    mask = [float(i % 2) for i, part in enumerate(parts) for _ in part]
    ids = [x for part in parts for x in part]
    return Example(np.array(ids, "int32"), np.array(mask, "float32"), row)


def shared(groups, capacity=64, slots=16, **settings):
    layout = BatchLayout(
        32,
        capacity,
        token_budget=capacity,
        max_sequences=slots,
        share_prefix=True,
        **settings,
    )
    return layout(groups)


def test_the_arrays_of_a_tree():
    """A chat (5 6 -> 7 8, 9 -> 10) that forks behind 9 (-> 11), restarts
    with 5 (12 -> 13), and another one that samples 7 too and then 14."""
    group = Group(
        [
            example([5, 6], [7, 8], [9], [10]),
            example([5, 12], [13]),
            example([5, 6, 7, 8, 9], [11]),
            example([5, 6], [7, 14]),
        ],
        prefix_length=None,
        units=[0, 0, 1, 2],
    )
    batch = shared([group], capacity=14, slots=8)
    arrays = {name: x[0].tolist() for name, x in batch.arrays.items()}
    # In pre-order: 5; 6; 7 8 9; 10; 11; 7 14; 12 13.
    assert arrays["token_ids"][:11] == [5, 6, 7, 8, 9, 10, 11, 7, 14, 12, 13]
    assert arrays["segment_ids"] == [1, 2, 3, 3, 3, 4, 5, 6, 6, 7, 7, 0, 0, 0]
    assert arrays["prefix_segments"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert arrays["shared_by"] == [4, 3, 2, 1, 1, 1, 1, 0]
    assert arrays["positions"][:11] == [0, 1, 2, 3, 4, 5, 5, 2, 3, 1, 2]
    assert arrays["predicted_by"][:11] == [0, 0, 1, 2, 3, 4, 4, 1, 7, 0, 9]
    assert arrays["completion_mask"] == [0] * 2 + [1, 1, 0] + [1] * 4 + [
        0, 1, 0, 0, 0
    ]  # fmt: skip
    # Four loss tokens of the first: two in 7 8 9, one in 10, one in 12 13.
    np.testing.assert_allclose(
        arrays["sequence_mask"], [0, 0, 0.5, 0.25, 1, 1, 0.25, 0]
    )
    columns = [[(x.start, x.stop) for x in p] for p in batch.parts.values()]
    assert columns == [[(2, 5), (5, 6)], [(9, 11)], [(6, 7)], [(7, 9)]]
    assert batch.chains().tolist() == [
        [2, 3, 5, 10],
        [6, -1, -1, -1],
        [7, 8, -1, -1],
        [-1] * 4,
    ]


def test_a_sequence_without_tokens_of_its_own_has_a_slot():
    """The second is the beginning of the first and never sampled."""
    group = Group([example([5, 6], [7]), example([5, 6])], None)
    batch = shared([group], slots=4)
    assert batch.arrays["sequence_mask"].tolist() == [[0, 1, 1, 0]]
    place = batch.places[1]
    assert (place.start, place.stop) == (3, 3)
    batch.put_tokens("x", [np.arange(3), np.arange(2)])
    assert batch.arrays["x"].sum() == 2


def test_a_unit_without_loss_tokens_counts_once():
    group = Group(
        [example([5]), example([6]), example([7], [8])], None, [4, 4, 2]
    )
    batch = BatchLayout(2, 64)([group])
    assert batch.arrays["sequence_mask"][:3].tolist() == [[1], [0], [1]]
    # Two rows of a batch of two become as many as a packed batch has.
    assert len(batch.arrays["token_ids"]) == 3
    assert batch.units == {0: 0, 1: 0, 2: 1}


def test_units_are_adjacent():
    three = [example([5], [i]) for i in range(3)]
    for units in ([0, 1, 0], [0, 1]):
        with pytest.raises(ValueError, match="must be adjacent. Received: un"):
            BatchLayout(3, 64)([Group(three, None, units)])


def test_minibatches_hold_whole_trajectories():
    groups = [random_trajectories(seed, units=3) for seed in range(3)]
    layout = BatchLayout(
        2, 128, token_budget=128, max_sequences=16, share_prefix=True
    )
    batches = layout.minibatches(groups)
    assert [sorted(set(b.units.values())) for b in batches] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8],
    ]  # fmt: skip
    given = [x for group in groups for x in group.sequences]
    assert [i for b in batches for i in b.parts] == list(range(len(given)))
    for batch in batches:
        assert all(given[i] is x for i, x in batch.sequences.items())
        batch.put_units("y", np.arange(10.0, 19.0))
        for i, place in batch.places.items():
            found = batch.arrays["y"][place.row, place.slot]
            assert found == 10 + batch.units[i]


def loss_tokens(sequence):
    places = np.flatnonzero(sequence.completion_mask)
    return places[places > 0]


def paths(arrays):
    """The tokens up to and with each stored one, by row and column."""
    found = {}
    for r, segments in enumerate(arrays["segment_ids"]):
        for c, s in enumerate(segments):
            path, at, column = [], s, c
            while at:
                columns = np.flatnonzero(segments == at)
                columns = columns[columns <= column]
                path = arrays["token_ids"][r, columns].tolist() + path
                at = arrays["prefix_segments"][r, at - 1]
                column = columns[0]
            found[r, c] = path
    return found


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("capacity, slots", [(400, 64), (60, 8)])
@pytest.mark.parametrize("vocabulary", [5, 500])
@pytest.mark.parametrize("seed", range(4))
def test_every_loss_token_is_stored_once(
    seed, vocabulary, capacity, slots, by_sequence
):
    groups = [
        random_trajectories(4 * seed + i, vocabulary=vocabulary)
        for i in range(3)
    ]
    if by_sequence:
        groups = [Group(group.sequences, None) for group in groups]
    given = [x for group in groups for x in group.sequences]
    batch = shared(groups, capacity, slots, by_sequence=by_sequence)
    arrays = batch.arrays
    numbers = [
        1e3 * i + np.arange(len(x.token_ids)) for i, x in enumerate(given)
    ]
    batch.put_tokens("x", numbers)
    stored = paths(arrays)
    lost = arrays["completion_mask"] != 0
    found = sorted(arrays["x"][lost].tolist())
    want = [numbers[i][loss_tokens(x)] for i, x in enumerate(given)]
    assert found == np.concatenate(want).tolist()
    for r, c in zip(*np.nonzero(lost)):
        i, at = divmod(int(arrays["x"][r, c]), 1000)
        assert stored[r, c] == given[i].token_ids[: at + 1].tolist()
        assert arrays["positions"][r, c] == at
        before = arrays["predicted_by"][r, c]
        assert stored[r, before] == given[i].token_ids[:at].tolist()
        assert arrays["completion_mask"][r, c] == given[i].completion_mask[at]
    # Every sequence can be read from a row, and the slots of a unit weigh 1.
    rows = {(r, *path) for (r, _), path in stored.items()}
    for i, x in enumerate(given):
        row = batch.places[i].row
        assert (row, *x.token_ids.tolist()) in rows
    total = {}
    for i, places in batch.parts.items():
        for place in places:
            share = arrays["sequence_mask"][place.row, place.slot]
            total[batch.units[i]] = total.get(batch.units[i], 0) + share
        assert not by_sequence or len(places) == 1
    np.testing.assert_allclose(list(total.values()), 1, rtol=1e-6)
    assert arrays["sequence_mask"].sum() == pytest.approx(len(total))


def test_no_token_is_stored_twice():
    """Without loss that two have, a row holds each prefix once."""
    for seed in range(8):
        group = random_trajectories(seed, vocabulary=6)
        silent = [
            Example(x.token_ids, 0 * x.completion_mask, 0)
            for x in group.sequences
        ]
        want = {
            tuple(x.token_ids[: n + 1])
            for x in silent
            for n in range(len(x.token_ids))
        }
        batch = shared([Group(silent, None)], 400, 64)
        assert (batch.arrays["segment_ids"] > 0).sum() == len(want)


def test_a_prompt_and_its_completions_are_a_tree_of_two_levels():
    sizes = [(30, [5, 9, 1, 12]), (12, [20, 21])]
    groups = random_groups(sizes)
    found = [Group(group.sequences, None) for group in groups]
    ours, theirs = shared(found), shared(groups)
    assert ours.parts == theirs.parts
    for name, array in theirs.arrays.items():
        np.testing.assert_array_equal(ours.arrays[name], array, err_msg=name)


def test_groups_are_cut_by_the_size_of_their_trees():
    """Four tails of 4 on a prompt of 8, of which two share 6 more."""
    rng = np.random.default_rng(0)
    prompt, trunk = rng.integers(3, 500, 8), rng.integers(3, 500, 6)
    starts = [prompt, [*prompt, *trunk], [*prompt, *trunk], prompt]
    group = Group([example(x, [i] * 4) for i, x in enumerate(starts)], None)
    assert group.shared_size() == (8 + 6 + 4 * 4, 6)
    assert pack_groups([group], 30) == [[(0, [0, 1, 2, 3])]]
    assert pack_groups([group], 29) == [[(0, [0, 1, 2])], [(0, [3])]]
    # A prefix of three without the fork, or five slots with it.
    assert pack_groups([group], 64, max_sequences=5) == [
        [(0, [0, 1, 2])],
        [(0, [3])],
    ]
    with pytest.raises(ValueError, match="18 tokens of completion 1 in row"):
        pack_groups([group], 17)


def test_a_loss_of_sequences_refuses_segments():
    group = Group(
        [example([5], [6], row=8), example([7], [8], row=8)], None, [0, 0]
    )
    layout = BatchLayout(2, 64, by_sequence=True)
    with pytest.raises(ValueError, match="of 2 segments in row 8 of the data"):
        layout([group])
    losses = kpt.losses
    mask = losses.OffPolicyMask(0.1)
    correction = losses.ImportanceCorrection("sequence_mask")
    for loss in (
        losses.GSPOLoss(),
        losses.GSPOTokenLoss(),
        losses.LUSPOLoss(),
        losses.VESPOLoss(),
        losses.ReinforceLoss(epsilon=0.2),
        losses.GRPOLoss(importance_sampling_level="sequence"),
        losses.DAPOLoss(masks=(mask,)),
        losses.SumLoss([losses.PPOLoss(correction=correction)]),
    ):
        assert loss.by_sequence, loss
    for loss in (
        losses.GRPOLoss(correction=losses.ImportanceCorrection()),
        losses.DrGRPOLoss(masks=(losses.TopEntropyMask(),)),
        losses.ReinforceLoss(),
        losses.SumLoss([losses.CISPOLoss(), losses.ValueLoss()]),
    ):
        assert not loss.by_sequence, loss


@pytest.mark.parametrize("model", FAMILY_CASES)
def test_a_tree_equals_its_paths(model):
    """Log-probabilities and gradients, to float32 rounding."""
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / model, sequence_length=64
    )
    groups = [random_trajectories(seed) for seed in range(5)]
    together = shared(groups, 256, 32)
    tokens = sum(len(x.token_ids) for g in groups for x in g.sequences)
    assert (together.arrays["segment_ids"] > 0).sum() < 0.7 * tokens
    depths = [0]
    for prefix in together.arrays["prefix_segments"][0]:
        depths.append(depths[prefix] + 1)
    assert max(depths) >= 4
    apart = BatchLayout(64, 64)(groups)

    @jax.jit
    def run(trainable, batch):
        frozen = [v.value for v in task.non_trainable_variables]

        def total(trainable):
            with task.using_weights(trainable, frozen):
                logps = task.policy.token_outputs(
                    batch, batch["completion_mask"] > 0
                )["per_token_logps"]
            mask = batch["completion_mask"]
            return (logps * mask).sum() / mask.sum(), logps

        return jax.grad(total, has_aux=True)(trainable)

    trainable = [v.value for v in task.trainable_variables]
    (got, logps), (want, plain) = (
        run(trainable, batch.arrays) for batch in (together, apart)
    )
    values = [
        np.asarray(plain)[place.tokens] for place in apart.places.values()
    ]
    together.put_tokens("plain", values)
    mask = together.arrays["completion_mask"] > 0
    assert mask.sum() == (apart.arrays["completion_mask"] > 0).sum()
    plain = together.arrays["plain"][mask]
    assert np.abs(plain).mean() > 1
    np.testing.assert_allclose(np.asarray(logps)[mask], plain, atol=1e-5)
    for left, right in zip(got, want):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_a_tree_has_the_pairs_of_its_paths():
    """A path of 3 + 2 + 4 tokens, and one of 3 + 2 + 1: 9^2 + (6^2 - 5^2)."""
    starts = [[5, 6, 7], [8, 9]]
    first = example([*starts[0], *starts[1]], [1, 2, 3, 4])
    second = example([*starts[0], *starts[1]], [11])
    third = example(starts[0])
    tree = shared([Group([first, second, third], None)]).arrays
    assert token_pairs(tree) == 81 + 36 - 25
    assert token_pairs(BatchLayout(1, 64)([first]).arrays) == 81


def test_prefill_of_a_tree_keeps_the_keys_of_its_paths():
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / FAMILIES["gemma3"], sequence_length=64
    )
    group = random_trajectories(3)
    together, apart = shared([group], 256, 32), BatchLayout(64, 64)([group])
    prefill = jax.jit(task.policy.prefill)
    inputs = ("token_ids", "segment_ids", "positions", "prefix_segments")
    found, want = (
        prefill({k: b.arrays[k] for k in inputs if k in b.arrays})
        for b in (together, apart)
    )
    length = together.arrays["token_ids"].shape[1]
    own = apart.arrays["token_ids"].shape[1]
    moved = 0
    for i, places in together.parts.items():
        for place in places:
            count = place.stop - place.start
            start = own * apart.places[i].row + place.position
            here = slice(place.row * length + place.start, None)
            for ours, theirs in zip(
                jax.tree.leaves(found), jax.tree.leaves(want)
            ):
                left = ours[here][:count]
                right = theirs[start : start + count]
                np.testing.assert_allclose(left, right, atol=1e-5)
            moved += count * (place.position > 0)
    assert moved > 10
