"""Mixtures: shares, ends, names, and resuming in their middle."""

import collections
import json

import grain
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.sft import prepare_sft


def rows(token, count):
    """Rows that can be told apart."""
    return [
        {"prompt_ids": [token], "completion_ids": [i + 10, 2]}
        for i in range(count)
    ]


def stream(*args):
    return grain.MapDataset.source(rows(*args)).to_iter_dataset()


def prepare(dataset):
    settings = RowSettings(None, sequence_length=8, vocabulary_size=500)
    return prepare_sft(dataset, settings)


def taken(mixture):
    """`{token: places of the rows that were taken}`."""
    found = collections.defaultdict(list)
    for row in mixture:
        found[row["prompt_ids"][0]].append(row["completion_ids"][0] - 10)
    return found


def test_without_weights_every_row_is_there_once():
    mixture = kpt.data.mix({"a": rows(1, 5), "b": rows(2, 9)})
    found = taken(mixture)
    assert sorted(found[1]) == list(range(5))
    assert sorted(found[2]) == list(range(9))


@pytest.mark.parametrize("kind", [rows, stream])
def test_shares_hold_everywhere_until_the_first_ends(kind):
    """Shares 3 to 1: 90 rows of `a` last for 120."""
    mixture = kpt.data.mix(
        {"a": kind(1, 90), "b": rows(2, 90)}, weights={"a": 3, "b": 1}
    )
    names = [row.source for row in mixture]
    assert abs(len(names) - 120) <= 1
    for start in range(0, 116, 4):
        assert names[start : start + 4].count("a") == 3
    found = taken(mixture)
    assert sorted(found[1]) == list(range(90))
    assert len(set(found[2])) == len(found[2])
    # Not the first 30 of `b`, but any of them, by the seed.
    assert found[2] != list(range(len(found[2])))
    again = kpt.data.mix(
        {"a": kind(1, 90), "b": rows(2, 90)},
        weights={"a": 3, "b": 1},
        seed=2**40,
    )
    assert taken(again)[2] != found[2]


def test_repeated_until_every_row_was_read():
    mixture = kpt.data.mix(
        {"a": rows(1, 4), "b": rows(2, 30)},
        weights={"a": 0.5, "b": 0.5},
        repeat=True,
    )
    found = taken(mixture)
    assert len(mixture) == 60
    assert sorted(found[2]) == list(range(30))
    assert sorted(found[1][:4]) == sorted(found[1][4:8]) == list(range(4))
    orders = {tuple(found[1][i : i + 4]) for i in range(0, 28, 4)}
    assert len(orders) > 1


def test_each_dataset_has_a_row_type_and_is_counted():
    masked = [{"token_ids": [1, 2], "completion_mask": [0, 1]}] * 3
    mixture = kpt.data.mix({"pairs": rows(1, 2), "masked": masked})
    examples, report = prepare(mixture)
    assert len(examples) == 5
    assert report.sources == {"pairs": 2, "masked": 3}
    assert "; mixed of 2 pairs, 3 masked" in str(report)
    masked = [*masked, rows(1, 1)[0]]
    with pytest.raises(ValueError, match="from 'masked' has.*kpt.data.mix"):
        prepare(kpt.data.mix({"masked": masked}))
    inner = kpt.data.mix({"x": rows(1, 2), "y": rows(2, 2)})
    _, report = prepare(kpt.data.mix({"in": inner, "z": rows(3, 1)}))
    assert report.sources == {"in/x": 2, "in/y": 2, "z": 1}


@pytest.mark.parametrize("kind", [rows, stream])
def test_a_mixture_goes_on_where_it_was(kind):
    def adapter():
        mixture = kpt.data.mix(
            {"a": kind(1, 40), "b": rows(2, 40)}, weights={"a": 2, "b": 1}
        )
        return BatchAdapter(
            prepare(mixture)[0], batch_size=4, sequence_length=8, seed=3
        )

    first = adapter()
    batches = list(first.get_jax_iterator())
    resumed = adapter()
    partly = adapter()
    iterator = partly.get_jax_iterator()
    for _ in range(5):
        next(iterator)
    resumed.set_state(json.loads(json.dumps(partly.state_after(5))))
    rest = list(resumed.get_jax_iterator())
    assert len(rest) == len(batches) - 5
    for ours, theirs in zip(rest, batches[5:], strict=True):
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize(
    "args, parts",
    [
        (([rows(1, 2)],), ["must be a dict of datasets", "type list"]),
        (({},), ["must be a dict of datasets"]),
        (({"a": rows(1, 2), "b": []},), ["datasets['b']", "at least one row"]),
        (({"a": 3},), ["datasets['a']", "type int"]),
        (
            ({"a": rows(1, 2)}, {"b": 1.0}),
            ["a number for each dataset", "['a']"],
        ),
        (({"a": rows(1, 2)}, [1.0]), ["a number for each dataset"]),
        (({"a": rows(1, 2)}, {"a": 0}), ["weights['a']=0", "positive"]),
        (({"a": rows(1, 2)}, {"a": float("nan")}), ["weights['a']=nan"]),
        (({"a": stream(1, 2)},), ["needs `weights`", "['a']"]),
        (
            ({"a": grain.MapDataset.source(rows(1, 2)).repeat()},),
            ["datasets['a']", "must have an end"],
        ),
    ],
)
def test_what_cannot_be_mixed_is_named(args, parts):
    with pytest.raises(ValueError) as error:
        kpt.data.mix(*args)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("seed", [None, 0.5, True])
def test_a_seed_is_an_int(seed):
    with pytest.raises(ValueError, match="`seed` must be an int"):
        kpt.data.mix({"a": rows(1, 2)}, seed=seed)
