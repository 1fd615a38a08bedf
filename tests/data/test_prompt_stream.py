"""The order of the prompts of a stream, and resuming anywhere in it."""

import json
import threading

import grain
import pytest

from keras_posttrain.data import mix
from keras_posttrain.data.batches import prompt_stream
from keras_posttrain.data.batches.prompt_stream import (
    PromptStream,
    prompt_order,
)
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.prompts import PromptOrder, prepare_prompts

COUNT = 11


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(prompt_stream, "WINDOW", 4)


def make_prompts(count=COUNT, stream=True):
    rows = [{"prompt_ids": [i + 3, 5]} for i in range(count)]
    if stream:
        rows = grain.MapDataset.source(rows).to_iter_dataset()
    return prepare(rows)


def prepare(rows):
    settings = RowSettings(None, sequence_length=64, vocabulary_size=100)
    prompts, _ = prepare_prompts(
        rows, settings, max_prompt_length=8, limit="a test"
    )
    return prompts


def make_order(count=COUNT, shuffle=True, **kwargs):
    settings = {"batch_size": 3, "seed": 5} | kwargs
    return prompt_order(make_prompts(count), shuffle=shuffle, **settings)


def epoch_of(order, size=3):
    """The rows of the rest of an epoch, each used at once."""
    rows = []
    while taken := order.take(size):
        rows.append([prompt.row for prompt in taken])
        order.use(order.taken)
    return rows


def test_a_list_has_random_access():
    prompts = make_prompts(stream=False)
    assert isinstance(prompt_order(prompts, batch_size=3), PromptOrder)
    assert isinstance(make_order(), PromptStream)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, COUNT])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_prompt_is_there_once_in_each_epoch(count, shuffle):
    order, seen = make_order(count, shuffle), []
    for _ in range(2):
        rows = sum(epoch_of(order), [])
        assert sorted(rows) == list(range(count))
        assert order.left == 0
        # Only windows are shuffled.
        for first in range(0, count, 4):
            part = list(range(first, min(first + 4, count)))
            assert sorted(rows[first : first + 4]) == part
        seen.append(rows)
        order.next_epoch()
        assert order.left == 1
    assert (seen[0] == list(range(count))) or shuffle
    if count == COUNT:
        assert (seen[0] != seen[1]) == shuffle
    assert seen[0] == sum(epoch_of(make_order(count, shuffle)), [])


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("used", range(COUNT + 1))
@pytest.mark.parametrize("shuffle", [False, True])
def test_it_goes_on_from_every_position(used, shuffle, ahead):
    """What was taken and not used is taken again."""
    straight, order = make_order(shuffle=shuffle), make_order(shuffle=shuffle)
    rows = sum(epoch_of(straight), [])
    straight.next_epoch()
    rows += sum(epoch_of(straight), [])
    order.take(used)
    order.take(ahead)
    order.use(used)
    state = json.loads(json.dumps(order.state()))
    resumed = make_order(shuffle=shuffle)
    resumed.set_state(state)
    assert json.loads(json.dumps(resumed.state())) == state
    assert resumed.epoch == (used == COUNT)
    rest = sum(epoch_of(resumed), [])
    if used < COUNT:
        resumed.next_epoch()
        rest += sum(epoch_of(resumed), [])
    assert rest == rows[used:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_that_are_read_ahead(shuffle):
    """Prompts and positions are those of epochs that are not."""

    def three_epochs(order):
        rows, states = [], []
        while True:
            while taken := order.take(3):
                states.append(json.dumps(order.state()))
                rows.append([prompt.row for prompt in taken])
                order.use(order.taken)
            states.append(json.dumps(order.state()))
            if order.epoch == 2:
                return rows, states
            order.next_epoch()

    rows, states = three_epochs(make_order(shuffle=shuffle))
    found = three_epochs(make_order(shuffle=shuffle, epochs=3))
    assert found == (rows, states)
    resumed = make_order(shuffle=shuffle, epochs=3)
    # The first state of the second epoch, of four rollouts each.
    resumed.set_state(json.loads(states[5]))
    assert three_epochs(resumed) == (rows[4:], states[5:])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_in_another_stream_is_refused(shuffle):
    """Behind the first, also in later windows and in the next epoch."""

    def of(rows):
        prompts = prepare(lambda: iter(rows))
        return prompt_order(prompts, batch_size=3, seed=5, shuffle=shuffle)

    rows = [{"prompt_ids": [i + 3, 5]} for i in range(COUNT)]
    order, states = of(rows), []
    while order.take(1):
        order.use(order.taken)
        states.append(json.loads(json.dumps(order.state())))
    assert len(states) == COUNT
    equal = [{"prompt_ids": [4, 6]}] * COUNT
    for others in (rows[5:] + rows[:5], rows[1:], equal):
        for state in states:
            other = of(others)
            other.set_state(state)
            if not (state["position"]["window"] or state["position"]["taken"]):
                # Some streams give another order in each epoch.
                with pytest.warns(match="another order or is another stream"):
                    assert other.take(1)
                continue
            with pytest.raises(ValueError, match="same data and settings"):
                other.take(1)
            # What could not be used is refused again.
            with pytest.raises(ValueError, match="same data and settings"):
                other.take(1)
    # States of earlier versions do not say what follows.
    other.set_state({k: states[3][k] for k in ("position", "data")})
    assert len(other.take(1)) == 1
    # Of a dataset of another kind.
    grain_order = make_order(shuffle=shuffle)
    grain_order.set_state(states[4])
    with pytest.raises(ValueError, match="has no position {'parent'"):
        grain_order.take(1)


def test_positions_of_a_resumed_run():
    """Saved, resumed, and saved again in a later window."""
    rows = sum(epoch_of(make_order()), [])
    order, done = make_order(), 0
    for count in (2, 3, 1, 4):
        assert [p.row for p in order.take(count)] == rows[done : done + count]
        order.use(order.taken)
        done += count
        state = json.loads(json.dumps(order.state()))
        order = make_order()
        order.set_state(state)
    assert [p.row for p in order.take(5)] == rows[done:]
    order.use(order.taken)
    assert order.left == 0


def test_a_mixture_of_streams_goes_on():
    def make():
        def rows(token):
            return [{"prompt_ids": [token, i + 3]} for i in range(8)]

        mixture = mix(
            {"a": lambda: iter(rows(1)), "b": rows(2)}, {"a": 2, "b": 1}
        )
        return prompt_order(prepare(mixture), batch_size=3, seed=5)

    straight = [p.token_ids for p in make().take(20)]
    assert len(straight) > 8
    for used in range(len(straight)):
        order = make()
        order.take(used + 2)
        order.use(used)
        state = json.loads(json.dumps(order.state()))
        resumed = make()
        resumed.set_state(state)
        assert [p.token_ids for p in resumed.take(20)] == straight[used:]


def test_a_position_while_a_window_is_read():
    """Rollouts are sampled in a thread, and checkpoints made in another."""
    may_read, reading = threading.Event(), threading.Event()

    def rows():
        for i in range(10):
            if i == 6:
                reading.set()
                may_read.wait()
            yield {"prompt_ids": [i + 3, 5]}

    order = prompt_order(prepare(rows), batch_size=4, seed=5)
    order.take(4)
    order.use(4)
    thread = threading.Thread(target=order.take, args=(4,))
    thread.start()
    reading.wait()
    threading.Timer(0.2, may_read.set).start()
    assert order.left > 0
    place = order.state()["position"]
    thread.join()
    assert place == {
        "epoch": 0,
        "window": 1,
        "taken": 0,
        "stream": place["stream"],
    }
    resumed = prompt_order(prepare(rows), batch_size=4, seed=5)
    resumed.set_state({"position": place, "data": order.fingerprint})
    assert sorted(p.row for p in resumed.take(4)) == [4, 5, 6, 7]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_a_window_loses_none_of_its_prompts(error):
    """A run that ends within a window is saved before that window."""
    fails = [True]

    def rows():
        for i in range(10):
            if i == 6 and fails:
                raise error
            yield {"prompt_ids": [i + 3, 5]}

    order = prompt_order(prepare(rows), batch_size=4, seed=5)
    order.take(4)
    order.use(4)
    with pytest.raises(error):
        order.take(4)
    assert order.left > 0
    state = json.loads(json.dumps(order.state()))
    fails.clear()
    resumed = prompt_order(prepare(rows), batch_size=4, seed=5)
    resumed.set_state(state)
    for either in (resumed, order):
        assert sorted(p.row for p in either.take(4)) == [4, 5, 6, 7]


def test_what_was_used_is_not_kept():
    order = make_order()
    order.take(9)
    order.use(8)
    assert [len(w.prompts) for w in order._windows] == [0, 0, 3]
    assert [p.row for p in order.take(5)] != []


def test_another_stream_or_none_is_refused():
    state = make_order().state()
    with pytest.raises(ValueError, match="seed=5, data of seed=6"):
        make_order(seed=6).set_state(state)
    prompts = make_prompts(stream=False)
    with pytest.raises(ValueError, match="num_prompts"):
        PromptOrder(prompts, batch_size=3, seed=5).set_state(state)
    with pytest.raises(ValueError, match="a stream with none"):
        make_order(0).take(1)
