"""Order, shapes, nothing lost, and resume from every position."""

import functools
import hashlib
import itertools
import json
import pathlib
import warnings

import grain
import keras
import numpy as np
import pytest

from keras_posttrain.data.batches import pipeline
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.sft import prepare_sft
from tests.support import in_ci

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
NUM_ROWS = 37
CASES = list(itertools.product([False, True], repeat=3))
NAMES = [
    "-".join(
        word
        for word, on in zip(
            ("stream", "packing", "shuffle"), case, strict=True
        )
        if on
    )
    or "plain"
    for case in CASES
]
all_cases = pytest.mark.parametrize(
    "stream, packing, shuffle", CASES, ids=NAMES
)


def make_rows(count=NUM_ROWS, seed=0, longest=30):
    rng = np.random.default_rng(seed)
    return [
        {
            "prompt_ids": rng.integers(1, 99, rng.integers(1, 20)).tolist(),
            "completion_ids": rng.integers(
                1, 99, rng.integers(1, longest)
            ).tolist(),
        }
        for _ in range(count)
    ]


def make_examples(stream=False, rows=None):
    rows = make_rows() if rows is None else rows
    if stream:
        rows = grain.MapDataset.source(rows).to_iter_dataset()
    examples, _ = prepare_sft(
        rows, RowSettings(None, sequence_length=64, vocabulary_size=100)
    )
    return examples


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Several windows in a dataset of a few rows."""
    monkeypatch.setattr(pipeline, "WINDOW", 10)


def make_adapter(stream=False, packing=False, shuffle=True, **kwargs):
    examples = kwargs.pop("examples", None)
    if examples is None:
        examples = make_examples(stream)
    arguments = {"batch_size": 3, "sequence_length": 64, "seed": 5} | kwargs
    return BatchAdapter(
        examples, packing=packing, shuffle=shuffle, **arguments
    )


def take(adapter, count):
    """The next batches, over the ends of epochs."""
    batches = []
    while len(batches) < count:
        for batch in adapter.get_jax_iterator():
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def rows_of(batches):
    return [
        int(i)
        for batch in batches
        for i in batch["sequence_ids"][batch["sequence_mask"] > 0]
    ]


def assert_equal(batches, others):
    assert len(batches) == len(others)
    for ours, theirs in zip(batches, others, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype
            np.testing.assert_array_equal(ours[key], theirs[key], key)


# Order and shapes ----------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_seeds_of_any_size_give_orders_of_their_own(stream):
    orders = [
        rows_of(take(make_adapter(stream, seed=seed), 5))
        for seed in (5, 5 + 64, -1, 5 + 2**31, 5 + 2**32)
    ]
    assert orders[0] not in orders[1:4]
    # Seeds count modulo 2**32.
    assert orders[4] == orders[0]


@all_cases
def test_an_epoch_has_every_row_once(stream, packing, shuffle):
    adapter = make_adapter(stream, packing, shuffle)
    epochs = [list(adapter.get_jax_iterator()) for _ in range(3)]
    for batches in epochs:
        assert sorted(rows_of(batches)) == list(range(NUM_ROWS))
        if not stream:
            assert len(batches) == adapter.num_batches
        # Only the last batch may be partial.
        for batch in batches[:-1]:
            assert (batch["sequence_mask"][:, 0] == 1).all()
    first, second, _ = map(rows_of, epochs)
    assert (first == second) == (not shuffle)
    again = make_adapter(stream, packing, shuffle)
    assert_equal(list(again.get_jax_iterator()), epochs[0])
    other = make_adapter(stream, packing, shuffle, seed=6)
    assert (rows_of(other.get_jax_iterator()) == first) == (not shuffle)


@pytest.mark.parametrize("seed, word", [(5, 5), (-1, 2**32 - 1)])
def test_orders_stay_as_they_are(seed, word):
    """A run may be resumed by a later version: its order is the same."""
    rows = make_rows(24)
    adapter = make_adapter(seed=seed, examples=make_examples(rows=rows))
    for epoch in (1, 2):
        state = np.random.SeedSequence([word, epoch]).generate_state(1)
        order = grain.MapDataset.range(24).shuffle(seed=int(state[0]))
        assert rows_of(adapter.get_jax_iterator()) == list(order)
    # Of a stream, windows of 10.
    adapter = make_adapter(
        True, seed=seed, examples=make_examples(True, rows), batch_size=2
    )
    for epoch in (1, 2):
        order = [
            10 * window + i
            for window, size in enumerate((10, 10, 4))
            for i in np.random.default_rng([word, epoch, window]).permutation(
                size
            )
        ]
        assert rows_of(adapter.get_jax_iterator()) == order


def test_packed_rows_have_an_order_of_their_own():
    """What is packed together is drawn once, the rows' order each epoch."""
    rows = [{"prompt_ids": [1] * 20, "completion_ids": [2] * 12}] * 20
    adapter = make_adapter(
        packing=True, examples=make_examples(rows=rows), batch_size=1
    )
    first, second = (list(adapter.get_jax_iterator()) for _ in range(2))
    pairs = [
        [b["sequence_ids"][0, :2].tolist() for b in epoch]
        for epoch in (first, second)
    ]
    state = np.random.SeedSequence([5, 0]).generate_state(1)
    drawn = list(grain.MapDataset.range(20).shuffle(seed=int(state[0])))
    expected = [drawn[i : i + 2] for i in range(0, 20, 2)]
    assert sorted(pairs[0]) == sorted(pairs[1]) == sorted(expected)
    assert pairs[0] != pairs[1] and expected not in pairs


def test_the_fingerprint_stays_as_it_is():
    """Of the settings that are not given as well."""
    examples = make_examples(rows=make_rows(3))
    adapter = BatchAdapter(examples, batch_size=2, sequence_length=64)
    tokens = b"".join(
        x.token_ids.tobytes() + x.completion_mask.tobytes() for x in examples
    )
    settings = {
        "batch_size": 2,
        "packing": False,
        "shuffle": True,
        "seed": 0,
        "sequence_length": 64,
    }
    assert adapter.fingerprint == settings | {
        "num_examples": 3,
        "tokens": hashlib.blake2b(tokens, digest_size=8).hexdigest(),
    }
    stream = make_examples(stream=True, rows=make_rows(3))
    adapter = BatchAdapter(stream, batch_size=2, sequence_length=64)
    assert adapter.fingerprint == settings
    [*_, last] = adapter.get_jax_iterator()
    assert last["token_ids"].shape == (2, 64)
    assert last["token_ids"][1].tolist() == [0] * 64


@pytest.mark.parametrize("stream", [False, True])
def test_rows_are_packed_a_window_at_a_time(stream):
    """Windows of 10 rows of 20 tokens: three rows of three, and one of one.

    A stream takes what is left over into the next window.
    """
    rows = [{"prompt_ids": [1] * 10, "completion_ids": [2] * 10}] * 20
    adapter = make_adapter(
        packing=True,
        shuffle=False,
        examples=make_examples(stream, rows),
        batch_size=3,
    )
    counts = [
        int(batch["sequence_mask"][row].sum())
        for batch in adapter.get_jax_iterator()
        for row in range(3)
    ]
    if stream:
        assert counts == [3, 3, 3, 3, 3, 3, 2, 0, 0]
    else:
        assert counts == [3, 3, 3, 1, 3, 3, 3, 1, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_process_keeps_its_rows(stream):
    adapter = make_adapter(stream, shuffle=False, batch_size=4)
    whole = list(adapter.get_jax_iterator())
    adapter = make_adapter(stream, shuffle=False, batch_size=4)
    adapter.keep_rows(lambda count: range(1, count, 2))
    for batch, other in zip(adapter.get_jax_iterator(), whole, strict=True):
        assert batch.keys() == other.keys()
        for name, values in batch.items():
            np.testing.assert_array_equal(values, other[name][1::2])


@pytest.mark.parametrize("stream", [False, True])
def test_without_shuffle_rows_keep_their_places(stream):
    adapter = make_adapter(stream, shuffle=False)
    examples = make_examples()
    for b, batch in enumerate(adapter.get_jax_iterator()):
        for i in range(3):
            if b * 3 + i < NUM_ROWS:
                assert batch["sequence_ids"][i, 0] == b * 3 + i
                ids = examples[b * 3 + i].token_ids
                row = batch["token_ids"][i, : len(ids)]
                assert row.tolist() == ids.tolist()
                assert (batch["segment_ids"][i, len(ids) :] == 0).all()


@all_cases
def test_batches_hold_the_examples(stream, packing, shuffle):
    """Every token and weight of every example comes out, once."""
    examples = make_examples()
    adapter = make_adapter(stream, packing, shuffle)
    for batch in adapter.get_jax_iterator():
        for r, s in np.argwhere(batch["sequence_mask"]):
            example = examples[batch["sequence_ids"][r, s]]
            inside = batch["segment_ids"][r] == s + 1
            ids = batch["token_ids"][r, inside]
            assert ids.tolist() == example.token_ids.tolist()
            assert batch["completion_mask"][r, inside].tolist() == (
                example.completion_mask.tolist()
            )
            positions = batch["positions"][r, inside]
            assert positions.tolist() == list(range(len(ids)))
        outside = batch["segment_ids"] == 0
        assert (batch["completion_mask"][outside] == 0).all()
        assert (batch["token_ids"][outside] == 0).all()


def test_unpacked_batches_take_the_smallest_bucket():
    rows = [
        {"prompt_ids": [1], "completion_ids": [2] * n}
        for n in (3, 63, 64, 127, 128, 299, 4, 5)
    ]
    examples, _ = prepare_sft(
        rows, RowSettings(None, sequence_length=300, vocabulary_size=9)
    )
    adapter = BatchAdapter(
        examples, batch_size=1, sequence_length=300, shuffle=False
    )
    lengths = [
        batch["token_ids"].shape[1] for batch in adapter.get_jax_iterator()
    ]
    assert lengths == [64, 64, 128, 128, 256, 300, 64, 64]
    assert {
        batch["sequence_mask"].shape for batch in adapter.get_jax_iterator()
    } == {(1, 1)}


@pytest.mark.parametrize("stream", [False, True])
def test_packed_batches_have_one_shape(stream):
    adapter = make_adapter(stream, packing=True)
    shapes = {
        (batch["token_ids"].shape, batch["sequence_mask"].shape)
        for batch in adapter.get_jax_iterator()
    }
    assert shapes == {((3, 64), (3, 32))}


def test_partial_batches_are_filled_with_rows_of_no_weight():
    examples = make_examples(rows=make_rows(4))
    adapter = make_adapter(
        examples=examples, row_multiple=4, pad_id=7, shuffle=False
    )
    batches = list(adapter.get_jax_iterator())
    assert [len(b["token_ids"]) for b in batches] == [4, 4]
    last = batches[-1]
    assert last["sequence_mask"][:, 0].tolist() == [1, 0, 0, 0]
    assert (last["completion_mask"][1:] == 0).all()
    assert (last["segment_ids"][1:] == 0).all()
    assert (last["token_ids"][1:] == 7).all()
    assert adapter.has_partial_batch is False
    assert adapter.partial_batch_size is None
    assert adapter.batch_size == 3


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_packing_gives_the_reference_batches(name, monkeypatch):
    """The batches of the reference run with packed rows of 32 tokens."""
    monkeypatch.setattr(pipeline, "WINDOW", 2048)
    reference = json.loads((REFERENCE / "packing.json").read_text())
    case = reference[name]
    examples, _ = prepare_sft(
        case["rows"],
        RowSettings(None, sequence_length=32, vocabulary_size=512),
    )
    adapter = BatchAdapter(
        examples, batch_size=2, sequence_length=32, packing=True, shuffle=False
    )
    batches = list(adapter.get_jax_iterator())
    assert len(batches) == len(case["batches"])
    for batch, expected in zip(batches, case["batches"], strict=True):
        real = batch["segment_ids"] > 0
        assert batch["token_ids"][real].tolist() == expected["token_ids"]
        assert batch["positions"][real].tolist() == expected["positions"]
        mask = batch["completion_mask"][real]
        assert mask.tolist() == expected["completion_mask"]


# Position ------------------------------------------------------------------


@all_cases
@pytest.mark.parametrize(
    "skip", in_ci((2, 5, 6, 9, 13), of=[(), (2, 5, 6, 9, 13)])
)
def test_resume_at_every_position(stream, packing, shuffle, skip):
    """Batches after a saved position equal those of the run."""
    adapter = make_adapter(stream, packing, shuffle, skip_steps=skip)
    # The batches of about two epochs, and of the skipped ones.
    total = 14 if packing else 24
    batches, states = [], [json.dumps(adapter.state_after(0))]
    while len(batches) < total:
        for batch in adapter.get_jax_iterator():
            batches.append(batch)
            states.append(json.dumps(adapter.state_after(len(batches))))
            if len(batches) == total:
                break
    for count, state in enumerate(states[:-1]):
        resumed = make_adapter(stream, packing, shuffle, skip_steps=skip)
        resumed.set_state(json.loads(state))
        following = take(resumed, min(total - count, 8))
        assert_equal(following, batches[count : count + 8])
        assert resumed.step_of(1) == adapter.step_of(count + 1)
        # The position continues to count from there.
        state = resumed.state_after(len(following))
        assert json.dumps(state) == states[count + len(following)]


@all_cases
def test_the_position_does_not_depend_on_what_is_pulled_ahead(
    stream, packing, shuffle
):
    adapter = make_adapter(stream, packing, shuffle)
    batches = take(adapter, 5)
    state = adapter.state_after(3)
    resumed = make_adapter(stream, packing, shuffle)
    resumed.set_state(json.loads(json.dumps(state)))
    assert_equal(take(resumed, 2), batches[3:])


@all_cases
def test_a_dropped_iterator_is_begun_again(stream, packing, shuffle):
    """Keras may pull a batch to see its shape, and start over."""
    adapter = make_adapter(stream, packing, shuffle)
    next(iter(adapter.get_jax_iterator()))
    adapter.get_jax_iterator()
    batches = list(adapter.get_jax_iterator())
    assert sorted(rows_of(batches)) == list(range(NUM_ROWS))
    straight = make_adapter(stream, packing, shuffle)
    assert_equal(batches, list(straight.get_jax_iterator()))
    # The last batch of an epoch ends it, also if nobody asks for more.
    assert_equal(take(adapter, 1), take(straight, 1))


def test_a_state_says_where_it_is():
    """15 of 13 batches an epoch: two of the second."""
    state = make_adapter().state_after(15)
    assert state["step"] == 15
    assert state["position"] == {"epoch": 1, "batch": 2}
    # Numbers of NumPy are JSON's as well.
    settings = {"seed": 5, "batch_size": 3, "sequence_length": 64}
    adapter = make_adapter(**{k: np.int64(v) for k, v in settings.items()})
    assert json.dumps(adapter.state_after(15)) == json.dumps(state)


def test_a_stream_forgets_old_positions():
    adapter = make_adapter(stream=True)
    take(adapter, 100)
    with pytest.raises(ValueError, match="data step 3, known: 37 to 100"):
        adapter.state_after(3)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"seed": 6}, "seed=5, data of seed=6"),
        ({"batch_size": 4}, "batch_size=3, data of batch_size=4"),
        ({"shuffle": False}, "shuffle=True, data of shuffle=False"),
        ({"packing": True}, "packing=False, data of packing=True"),
        ({"sequence_length": 65}, "sequence_length=64, data of sequence_len"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_state_of_other_settings_is_refused(change, named, stream):
    state = make_adapter(stream).state_after(0)
    with pytest.raises(ValueError, match=named):
        make_adapter(stream, **change).set_state(state)


def test_a_state_of_other_data_is_refused():
    state = make_adapter().state_after(0)
    fewer = make_adapter(examples=make_examples(rows=make_rows(30)))
    with pytest.raises(ValueError, match="num_examples=37.*num_examples=30"):
        fewer.set_state(state)
    rows = make_rows()
    rows[20]["completion_ids"][0] += 1
    other = make_adapter(examples=make_examples(rows=rows))
    with pytest.raises(ValueError, match="tokens='.*', data of tokens='"):
        other.set_state(state)


def states_of(adapter, total):
    """The next batches, and the position before the first and after each."""
    batches, states = [], [json.dumps(adapter.state_after(0))]
    while len(batches) < total:
        for batch in adapter.get_jax_iterator():
            batches.append(batch)
            states.append(json.dumps(adapter.state_after(len(batches))))
            if len(batches) == total:
                break
    return batches, states


def adapter_of(kind, rows, packing, shuffle, **kwargs):
    """Of a Grain dataset, or of another iterable."""
    if kind == "grain":
        examples = make_examples(stream=True, rows=rows)
    else:
        examples = make_examples(rows=lambda: iter(rows))
    return make_adapter(
        packing=packing, shuffle=shuffle, examples=examples, **kwargs
    )


@pytest.mark.parametrize("kind", ["grain", "iterable"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_of_another_stream_is_refused(packing, shuffle, kind):
    """At every position behind the first, also in later windows and epochs."""
    rows = make_rows()
    of = functools.partial(adapter_of, kind, packing=packing, shuffle=shuffle)
    _, states = states_of(of(rows=rows), 16)
    for state in states[1:]:
        for others in (rows[5:] + rows[:5], make_rows(seed=1), rows[:1]):
            other = of(rows=others)
            other.set_state(json.loads(state))
            place = json.loads(state)["position"]
            if place["window"] or place["batch"]:
                with pytest.raises(ValueError, match="same data and settings"):
                    take(other, 1)
            else:
                # Some streams give another order in each epoch.
                with pytest.warns(match="another order or is another stream"):
                    take(other, 1)
        same = of(rows=rows)
        same.set_state(json.loads(state))
        take(same, 1)
    # Positions of earlier versions do not say what follows.
    state = json.loads(states[4])
    del state["position"]["following"], state["position"]["first"]
    old = of(rows=make_rows(seed=1))
    old.set_state(state)
    take(old, 1)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_that_are_read_ahead_resume_everywhere(packing, shuffle):
    """Batches and positions are those of epochs that are not."""
    make = functools.partial(make_adapter, True, packing, shuffle)
    # A packed epoch has half as many batches.
    total = 14 if packing else 24
    batches, states = states_of(make(), total)
    ahead, found = states_of(make(epochs=4), total)
    assert_equal(ahead, batches)
    assert found == states
    for count, state in enumerate(states[:-1]):
        resumed = make(epochs=4)
        resumed.set_state(json.loads(state))
        following = take(resumed, min(total - count, 14))
        assert_equal(following, batches[count : count + 14])
        state = resumed.state_after(len(following))
        assert json.dumps(state) == states[count + len(following)]


# Skipped steps -------------------------------------------------------------


@all_cases
def test_skipped_steps_leave_out_their_batches(stream, packing, shuffle):
    straight = take(make_adapter(stream, packing, shuffle), 16)
    skip = (1, 3, 4, 8, 12)
    adapter = make_adapter(stream, packing, shuffle, skip_steps=skip)
    batches = take(adapter, 11)
    wanted = [b for i, b in enumerate(straight, 1) if i not in skip]
    assert_equal(batches, wanted)
    assert adapter.skipped == 5
    steps = [adapter.step_of(count) for count in range(1, 12)]
    assert steps == [2, 5, 6, 7, 9, 10, 11, 13, 14, 15, 16]


def test_skipping_the_end_of_an_epoch_ends_it():
    """37 rows in batches of 3: 13 steps an epoch."""
    adapter = make_adapter(shuffle=False, skip_steps=(12, 13))
    assert adapter.num_batches == 13
    batches = list(adapter.get_jax_iterator())
    assert len(batches) == 11
    # The eleventh batch was the epoch's last: the next is the second's.
    assert_equal(take(adapter, 1), batches[:1])
    assert adapter.step_of(12) == 14


def test_an_iterator_gives_the_rest_of_its_epoch():
    adapter = make_adapter()
    adapter.set_state(make_adapter().state_after(15))
    assert len(list(adapter.get_jax_iterator())) == 11
    assert len(list(adapter.get_jax_iterator())) == 13
    adapter = make_adapter(stream=True)
    assert adapter.epoch_size is None and adapter.num_batches > 2**60


# Streams -------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 6, 10, 20, 21])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_of_any_length_end_with_their_last_batch(
    count, packing, shuffle
):
    examples = make_examples(stream=True, rows=make_rows(count))
    adapter = make_adapter(packing=packing, shuffle=shuffle, examples=examples)
    for _ in range(2):
        batches = list(adapter.get_jax_iterator())
        assert sorted(rows_of(batches)) == list(range(count))
        assert all(batch["sequence_mask"].any() for batch in batches)


def test_an_empty_stream_is_an_error():
    rows = grain.MapDataset.source(make_rows(3)).to_iter_dataset()
    rows = rows.filter(lambda row: False)
    examples = make_examples(stream=False, rows=rows)
    adapter = make_adapter(examples=examples)
    with pytest.raises(ValueError, match="a stream with none left"):
        next(adapter.get_jax_iterator())


def test_a_batch_larger_than_a_window_is_filled():
    adapter = make_adapter(stream=True, packing=True, batch_size=12)
    batches = list(adapter.get_jax_iterator())
    assert sorted(rows_of(batches)) == list(range(NUM_ROWS))
    assert (batches[0]["sequence_mask"][:, 0] == 1).all()


# Arguments and Keras -------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"row_multiple": 0}, "row_multiple=0"),
        ({"skip_steps": [0, 3]}, "count data steps from 1"),
        ({"examples": []}, "0 examples"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_adapter(**kwargs)


class Counter(keras.Model):
    """Sees what `fit` is fed, and trains nothing."""

    def __init__(self):
        super().__init__()
        self.built = True
        self.seen = []

    def make_train_function(self, force=False):
        def step(state, iterator):
            self.seen.append(next(iterator))
            return {}, state

        self.train_function = step


def test_keras_feeds_the_batches_in_order():
    adapter = make_adapter()
    model = Counter()
    model.compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(adapter, epochs=2, verbose=0)
    assert_equal(model.seen, take(make_adapter(), 26))
