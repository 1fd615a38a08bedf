"""Streams in several processes: each makes examples of a share of the rows.

The processes are threads here, which exchange as processes do; two of them
train on a stream in `distribution/test_processes.py`.
"""

import concurrent.futures
import functools
import threading

import grain
import pytest

from keras_posttrain.data.batches.lookahead import read_ahead
from keras_posttrain.data.rows.preparation import Preparation
from keras_posttrain.data.rows.prompts import prepare_columns
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.sharing import Share
from tests.data.row_kinds import KINDS, assert_same, settings

COUNT, WINDOW = 90, 16


class Exchange:
    """Makes the `Share`s of several threads."""

    def __init__(self, count):
        self.count, self.given = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def share(self, index):
        def exchange(data):
            self.given[index] = data
            self.barrier.wait()
            found = list(self.given)
            self.barrier.wait()
            return found

        def compare(read):
            try:
                found = read()
            except ValueError as error:
                found = error
            found = exchange(found)
            for k, each in enumerate(found):
                if isinstance(each, ValueError):
                    raise ValueError(f"In process {k}: {each}") from each
            if any(each != found[0] for each in found):
                raise ValueError(f"Not the same stream: {found}")

        return Share(index, self.count, exchange, compare)


@pytest.fixture
def prepared(monkeypatch):
    """The rows that each thread prepares, by the `Preparation`."""
    found, prepare = {}, Preparation._prepare

    def note(self, index, row, report):
        found.setdefault(self, []).append(index)
        return prepare(self, index, row, report)

    monkeypatch.setattr(Preparation, "_prepare", note)
    return found


def read(streams, count=2, epochs=1, state=None):
    """Returns what each of several threads gets of its own stream.

    `streams` is a function of an index to `(examples, report)`. A result is
    `(examples, states)`, or the error.
    """
    exchange = Exchange(count)

    def run(index):
        examples, report = streams(index)
        share = exchange.share(index) if count > 1 else None
        ahead = read_ahead(examples, state, epochs, share, WINDOW)
        found, states = [], []
        try:
            for _ in range(epochs):
                while new := ahead.take(WINDOW):
                    found += new
                    states.append(ahead.state)
                ahead.next_epoch()
        except ValueError as error:
            return error
        finally:
            ahead.close()
        return (found, report), states

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("kind", KINDS)
def test_examples_and_reports_are_those_of_one_process(kind, prepared):
    function, make = KINDS[kind]
    given = settings(sequence_length=40, truncation="drop")

    def streams(index):
        rows = [make(i) for i in range(COUNT)]
        return function(grain.MapDataset.source(rows).to_iter_dataset(), given)

    [(expected, _)] = read(streams, 1)
    assert sorted(*prepared.values()) == list(range(COUNT))
    prepared.clear()
    for found, _ in read(streams):
        assert_same(found, expected)
    first, second = prepared.values()
    assert sorted(first + second) == list(range(COUNT))
    assert len(first) == len(second) == COUNT // 2


def mixed(index):
    """Texts, some too long, some filtered out, some empty."""
    rows = [{"text": "a word " * (i % 30 + 1)} for i in range(COUNT)]
    rows = grain.MapDataset.source(rows)
    rows = rows.filter(lambda row: len(row["text"]) % 5 > 0)
    given = settings(sequence_length=48, truncation="drop")
    return prepare_sft(rows.to_iter_dataset(), given)


def test_rows_that_are_left_out_and_further_epochs():
    [(expected, _)] = read(mixed, 1, epochs=2)
    examples, report = expected
    assert report.kept == len(examples) / 2 and report.dropped
    for found, _ in read(mixed, 3, epochs=2):
        assert_same(found, expected)


def test_positions_are_those_of_one_process():
    """Also of runs with another number of processes."""
    [((examples, _), states)] = read(mixed, 1)
    (_, shared), _ = read(mixed, 2)
    for count, state in [(1, shared[1]), (2, states[1]), (3, shared[1])]:
        for (rest, _), _ in read(mixed, count, state=state):
            assert [x.row for x in rest] == [
                x.row for x in examples[2 * WINDOW :]
            ]


def test_what_each_process_prepares_itself(prepared):
    """Rows that are not tokenized, and those that cannot be sent."""

    def columns(index):
        rows = [{"question": str(i), "answer": i} for i in range(COUNT)]
        rows = grain.MapDataset.source(rows).to_iter_dataset()
        return prepare_columns(rows, settings(None))

    def unsendable(index):
        rows = [{"text": "a b", "unread": lambda: None}] * COUNT
        rows = grain.MapDataset.source(rows).to_iter_dataset()
        return prepare_sft(rows, settings())

    for streams in columns, unsendable:
        [(expected, _)] = read(streams, 1)
        prepared.clear()
        for found, _ in read(streams):
            assert len(found[0]) == len(expected[0])
            assert found[1] == expected[1]
        assert [len(x) for x in prepared.values()] == [COUNT, COUNT]


def test_examples_of_a_users_own_are_compared():
    """A task's `prepare` may return any stream of examples."""

    def streams(index, change=0):
        rows = [{"token_ids": [3, 4, 5]} for _ in range(COUNT)]
        examples, report = prepare_sft(rows, settings(None))
        examples[COUNT // 2].token_ids[1] += index * change
        return grain.MapDataset.source(examples).to_iter_dataset(), report

    [(expected, states)] = read(streams, 1)
    for found, others in read(streams):
        assert_same(found, expected)
        assert others == states
    for error in read(functools.partial(streams, change=1)):
        assert "Not the same stream" in str(error)


def test_an_error_of_a_row_comes_in_all():
    def streams(index):
        rows = [{"token_ids": [3, 4]} for _ in range(COUNT)]
        rows[41] = {"token_ids": [3, 10_000]}
        rows = grain.MapDataset.source(rows).to_iter_dataset()
        return prepare_sft(rows, settings(None))

    first, second = read(streams)
    assert str(first) == str(second)
    assert "In process 1: " in str(first) and "row 41" in str(first)


def test_rows_of_two_kinds_are_an_error_in_all():
    """Rows that each process alone would take."""

    def streams(index):
        rows = [{"text": "a b"}, {"prompt": "a", "completion": "b"}]
        rows = grain.MapDataset.source(rows * COUNT).to_iter_dataset()
        return prepare_sft(rows, settings())

    for error in read(streams):
        assert isinstance(error, ValueError)
        assert "row 0" in str(error) and "row 1" in str(error)


def test_other_rows_are_refused():
    def streams(index):
        rows = [{"token_ids": [3, 4 + (i == 50 + index)]} for i in range(60)]
        rows = grain.MapDataset.source(rows).to_iter_dataset()
        return prepare_sft(rows, settings(None))

    for error in read(streams):
        assert "Not the same stream" in str(error)
