"""Streams are read ahead of the step that takes their rows."""

import collections
import gc
import itertools
import threading
import time

import pytest

from keras_posttrain.data.batches import lookahead
from keras_posttrain.data.batches.lookahead import Lookahead
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.batches.prompt_stream import PromptStream
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.prompts import prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.sharing import Share
from keras_posttrain.data.rows.stream_shares import SharedRow
from keras_posttrain.data.rows.streams import KEPT, RowStream

COUNT = 5000
SETTINGS = RowSettings(None, sequence_length=16, vocabulary_size=100)


class Rows:
    """An iterable that counts the rows that were read, and may fail."""

    def __init__(self, count=COUNT, fails_at=None):
        self.count, self.fails_at, self.read = count, fails_at, 0
        # Over all epochs, and how many of them were begun.
        self.total = self.begun = 0

    def __call__(self):
        self.begun += 1
        for i in range(self.count):
            if i == self.fails_at:
                raise OSError("the connection was lost")
            self.read = i + 1
            self.total += 1
            yield {"token_ids": [i % 90 + 1, 2, 3], "prompt_ids": [i % 90 + 1]}


def wait_until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def threads():
    return [x for x in threading.enumerate() if x.name == lookahead.NAME]


def adapter(rows, **given):
    def without_prompts():
        for row in rows():
            yield {"token_ids": row["token_ids"]}

    examples, report = prepare_sft(without_prompts, SETTINGS)
    given = {"batch_size": 8, "sequence_length": 16, **given}
    return BatchAdapter(examples, **given), report


def test_the_next_window_is_read_while_steps_run():
    rows = Rows(8000)
    data, _ = adapter(rows)
    batches = data.get_jax_iterator()
    next(batches)
    # The first window has 2,048 rows; the next one is there before it ends.
    wait_until(lambda: rows.read >= 2048 + lookahead.AHEAD)
    time.sleep(0.05)
    assert rows.read <= 2048 + lookahead.AHEAD + 2
    assert sum(1 for _ in batches) == 8000 // 8 - 1
    assert rows.read == 8000 and not threads()


def token_ids(batches):
    return [batch["token_ids"].tolist() for batch in batches]


def test_the_next_epoch_is_read_while_steps_run():
    """Its first window is there before the last step of the epoch before."""
    rows = Rows(3000)
    data, report = adapter(rows, epochs=2)
    batches = data.get_jax_iterator()
    found = token_ids(itertools.islice(batches, 3000 // 8 - 1))
    wait_until(lambda: rows.total == 3000 + 3000)
    found += token_ids(batches)
    assert rows.begun == 2 and report.rows == 3000
    # A third epoch is not read ahead: two were asked for.
    found += token_ids(iterate(data))
    assert rows.begun == 2 and not threads()
    plain, _ = adapter(Rows(3000))
    assert found == token_ids(iterate(plain)) + token_ids(iterate(plain))


def test_an_epoch_ahead_is_read_as_far_as_there_is_room():
    rows = Rows(6000)
    data, _ = adapter(rows, epochs=9)
    batches = iterate(data)
    next(batches)
    wait_until(lambda: rows.total >= 2048 + lookahead.AHEAD)
    time.sleep(0.05)
    assert rows.total <= 2048 + lookahead.AHEAD + 2
    data.close()
    # Of epochs that fit in altogether, the two that follow.
    rows = Rows(10)
    data, _ = adapter(rows, epochs=9)
    next(iterate(data))
    wait_until(lambda: rows.total == 30)
    time.sleep(0.05)
    assert rows.total == 30 and rows.begun == 3
    data.close()


def test_an_epoch_that_was_read_ahead_is_begun_again():
    """Keras may pull a batch to see its shape, and start over."""
    data, _ = adapter(Rows(20), epochs=3)
    plain, _ = adapter(Rows(20))
    for _ in range(3):
        next(iterate(data))
        next(iterate(data))
        assert token_ids(iterate(data)) == token_ids(iterate(plain))


def test_an_error_of_the_next_epoch_comes_there():
    class Fails(Rows):
        def __call__(self):
            self.fails_at = 5 if self.begun else None
            yield from super().__call__()

    rows = Fails(20)
    data, _ = adapter(rows, epochs=2)
    batches = iterate(data)
    next(batches)
    wait_until(lambda: rows.total == 25 and not threads())
    assert len(list(batches)) == 2
    with pytest.raises(OSError, match="the connection was lost"):
        next(iterate(data))


def alone(parts):
    """The `Share` of one process, and what it compares."""
    return Share(0, 1, lambda x: [x], lambda read: parts.append(read()))


def compared(rows, **given):
    """The parts of a stream that are compared, and its batches."""
    parts = []
    data, _ = adapter(rows, **given)
    data.share_rows(alone(parts))
    return data, parts


def test_rows_are_compared_a_window_at_a_time():
    """Before they are given, and with their end."""
    data, parts = compared(Rows(3000))
    batches = iterate(data)
    first = next(batches)
    assert [(x["before"], x["rows"]) for x in parts] == [(0, 2049)]
    found = [first["token_ids"].tolist()] + token_ids(batches)
    assert [x["rows"] for x in parts] == [2049, 951]
    assert [x["ends"] for x in parts] == [False, True]
    plain, _ = adapter(Rows(3000))
    assert found == token_ids(iterate(plain))
    # Another row of a part has another hash.
    data, others = compared(Rows(3001))
    collections.deque(iterate(data), 0)
    assert others[0] == parts[0] and others[1] != parts[1]


def test_windows_of_a_batch_are_compared_more_at_once_later():
    data, parts = compared(Rows(9000), shuffle=False)
    batches = iterate(data)
    next(batches)
    assert [x["rows"] for x in parts] == [9]
    collections.deque(batches, 0)
    sizes = [9, 16, 32, 64, 128, 256, 512, 1024, 2048, 2048, 2048]
    assert [x["rows"] for x in parts] == [*sizes, 9000 - sum(sizes)]


def test_positions_are_those_of_what_was_taken():
    straight = [b["token_ids"].tolist() for b in iterate(adapter(Rows())[0])]
    data, _ = adapter(Rows())
    batches = data.get_jax_iterator()
    for _ in range(300):
        next(batches)
    state = data.state_after(300)
    data.close()
    again, _ = adapter(Rows())
    again.set_state(state)
    rest = [b["token_ids"].tolist() for b in iterate(again)]
    assert rest == straight[300:]


def iterate(data):
    return data.get_jax_iterator()


def test_an_error_comes_where_its_row_is_taken():
    data, _ = adapter(Rows(fails_at=2048 + 800))
    batches = data.get_jax_iterator()
    for _ in range(2048 // 8):
        next(batches)
    with pytest.raises(OSError, match="the connection was lost"):
        next(batches)
    assert not threads()


@pytest.mark.parametrize("how", ["close", "again", "drop"])
def test_a_stream_that_is_left_is_read_no_further(how):
    rows = Rows(10**9)
    data, report = adapter(rows)
    next(iterate(data))
    [thread] = threads()
    if how == "close":
        data.close()
        read = rows.read
        time.sleep(0.05)
        assert rows.read == read and not threads()
    elif how == "drop":
        del data
        gc.collect()
        wait_until(lambda: not threads())
    else:
        next(iterate(data))
        assert not thread.is_alive() and len(threads()) == 1
        data.close()
    # What was read twice is counted once.
    assert report.rows <= 2048 + lookahead.AHEAD + 2


def test_a_generator_can_still_be_begun_again():
    generator = Rows(KEPT - 1)()
    examples, _ = prepare_sft(
        ({"token_ids": row["token_ids"]} for row in generator), SETTINGS
    )
    for _ in range(2):
        assert len(list(examples)) == KEPT - 1
    ahead = Lookahead(iter(RowStream(Rows(), lambda row: row)))
    ahead.take(KEPT - 2)
    assert not threads()
    ahead.take(2)
    assert threads()
    ahead.close()


def test_examples_with_images_are_few(monkeypatch):
    class Images:
        pixels = type("Pixels", (), {"nbytes": 1000})

    monkeypatch.setattr(lookahead, "MAX_BYTES", 10_000)
    rows = Rows()
    stream = RowStream(rows, lambda row: type("E", (), {"images": Images})())
    ahead = Lookahead(iter(stream))
    ahead.take(KEPT + 100)
    wait_until(lambda: rows.read >= KEPT + 110)
    time.sleep(0.05)
    assert rows.read <= KEPT + 113
    assert len(ahead.take(2000)) == 2000
    ahead.close()
    # As few of them are compared at once.
    read = []

    class Shared:
        def compare(self, rows):
            read.append(rows()["rows"])

        def complete(self, rows):
            return enumerate(rows)

    stream = RowStream(rows, lambda row: SharedRow(0, row, None, b"", 1000))
    ahead = Lookahead(iter(stream), shared=Shared(), window=8)
    ahead.take(8 * 8)
    assert read == [9] + 6 * [10]
    ahead.close()


def prompts_of(rows, **given):
    def prompts():
        for row in rows():
            yield {"prompt_ids": row["prompt_ids"]}

    stream, _ = prepare_prompts(
        prompts, SETTINGS, max_prompt_length=8, limit="as the test says"
    )
    return PromptStream(stream, batch_size=4, **given)


def test_prompts_are_read_ahead():
    rows = Rows()
    order = prompts_of(rows)
    order.take(4)
    wait_until(lambda: rows.read == COUNT)
    order.next_epoch()
    assert not threads()


@pytest.mark.parametrize("shuffle", [False, True])
def test_prompts_of_the_next_epoch_are_read_ahead(shuffle):
    rows = Rows(3000)
    order = prompts_of(rows, shuffle=shuffle, epochs=2)
    plain = prompts_of(Rows(3000), shuffle=shuffle)
    found = order.take(2999)
    wait_until(lambda: rows.total == 6000)
    for _ in range(2):
        while more := order.take(8):
            found += more
        order.use(order.taken)
        assert order.left == 0
        order.next_epoch()
        taken = plain.take(3000)
        assert [x.row for x in found] == [x.row for x in taken]
        plain.next_epoch()
        found = []
    assert rows.begun == 2 and not threads()


def test_prompts_are_compared():
    parts = []
    order = prompts_of(Rows(3000), share=alone(parts))
    order.take(8)
    assert [x["rows"] for x in parts] == [2049]
    order.take(2992)
    assert [(x["rows"], x["ends"]) for x in parts[1:]] == [(951, True)]


def test_prompts_are_read_no_further_once_closed():
    order = prompts_of(Rows(10**9), epochs=2)
    taken = order.take(4)
    order.use(2)
    assert threads()
    order.close()
    assert not threads()
    # Its position is still known, and those that follow.
    assert order.state()["position"]["taken"] == 2
    again = prompts_of(Rows(10**9))
    again.set_state(order.state())
    assert [x.row for x in again.take(2)] == [x.row for x in taken[2:]]
    again.close()
