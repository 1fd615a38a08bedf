"""Streams are read ahead of the step that takes their rows."""

import gc
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
from keras_posttrain.data.rows.streams import KEPT, RowStream

COUNT = 5000
SETTINGS = RowSettings(None, sequence_length=16, vocabulary_size=100)


class Rows:
    """An iterable that counts the rows that were read, and may fail."""

    def __init__(self, count=COUNT, fails_at=None):
        self.count, self.fails_at, self.read = count, fails_at, 0

    def __call__(self):
        for i in range(self.count):
            if i == self.fails_at:
                raise OSError("the connection was lost")
            self.read = i + 1
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


def test_prompts_are_read_ahead():
    rows = Rows()

    def prompts():
        for row in rows():
            yield {"prompt_ids": row["prompt_ids"]}

    stream, _ = prepare_prompts(
        prompts, SETTINGS, max_prompt_length=8, limit="as the test says"
    )
    order = PromptStream(stream, batch_size=4)
    order.take(4)
    wait_until(lambda: rows.read == COUNT)
    order.next_epoch()
    assert not threads()
