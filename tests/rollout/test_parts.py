"""Samples that are divided among threads: the same ones."""

import dataclasses
import functools
import threading
import time

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain import _tracing
from keras_posttrain.rollout import NativeRollout, Request
from keras_posttrain.rollout.native import decoding, parts, prefix_groups
from keras_posttrain.rollout.native.samples import Samples
from keras_posttrain.rollout.native.schedule import Schedule
from keras_posttrain.rollout.rollout import Expected
from tests.rollout import contract
from tests.rollout.test_prefill_chunk import tokens
from tests.rollout.test_prefix_groups import converted
from tests.support import REFERENCE, in_ci, one_layer


@pytest.fixture
def cores(monkeypatch):
    """`cores(n)`: as on a machine with so many; parts have 2 slots."""
    monkeypatch.setattr(parts, "LEAST_SLOTS", 2)

    def set_cores(number):
        monkeypatch.setattr(parts, "num_cores", lambda: number)

    set_cores(2)
    return set_cores


@pytest.fixture
def threads(monkeypatch):
    """The threads that sampled."""
    found, advance = set(), Schedule.advance

    def recorded(self, *args, **kwargs):
        found.add(threading.current_thread())
        return advance(self, *args, **kwargs)

    monkeypatch.setattr(Schedule, "advance", recorded)
    return found


@functools.cache
def short(model="llama3"):
    return kpt.SFTTask.from_preset(
        one_layer(REFERENCE / "models" / model), sequence_length=256
    )


def engine_of(task, *args, **kwargs):
    engine = NativeRollout(*args, **kwargs)
    engine.set_model(task)
    return engine


def requests(max_tokens=40, **settings):
    """Five prompts of several lengths, with other numbers of samples."""
    counts = [(60, 3), (24, 4), (1, 2), (60, 4), (7, 1)]
    return [
        Request(
            tokens(length, i), n, max_tokens=max_tokens - i, seed=i, **settings
        )
        for i, (length, n) in enumerate(counts)
    ]


def check_same(out, others):
    for found, expected in zip(sum(out, []), sum(others, []), strict=True):
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(
            found.per_token_logps, expected.per_token_logps, atol=2e-5
        )
        if expected.routed_experts is not None:
            np.testing.assert_array_equal(
                found.routed_experts, expected.routed_experts
            )


def check_bitwise(out, others):
    for found, expected in zip(sum(out, []), sum(others, []), strict=True):
        assert found.token_ids == expected.token_ids
        np.testing.assert_array_equal(
            found.per_token_logps, expected.per_token_logps
        )


def check_parts(task, cores, threads, num_slots=128, asked=None):
    """Compares one, two and three parts."""
    asked = asked or requests()
    cores(1)
    expected = engine_of(task, num_slots).generate(asked)
    assert len(threads) == 1
    cores(2)
    # Both threads trace all programs.
    engine = engine_of(task, num_slots)
    out = engine.generate(asked)
    assert len(threads) == 2
    check_same(out, expected)
    check_bitwise(engine.generate(asked), out)
    cores(3)
    check_same(engine.generate(asked), expected)
    assert len(threads) > 3


@pytest.mark.parametrize("num_slots", [128, 6])
@pytest.mark.parametrize(
    "model", in_ci("llama3", of=["llama3", "gemma3_text", "qwen3"])
)
def test_samples_are_those_of_one_part(
    model, num_slots, cores, threads, monkeypatch
):
    """Also where prompts are read once for their samples, and slots few."""
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 0)
    check_parts(short(model), cores, threads, num_slots)


def test_experts_are_recorded(cores, threads, tmp_path):
    task = converted(tmp_path, "mixtral", num_hidden_layers=1)
    asked = requests(return_routed_experts=True)
    check_parts(task, cores, threads, asked=asked)


def test_recurrent_layers(cores, threads, tmp_path):
    check_parts(converted(tmp_path, "qwen3_5_text"), cores, threads)


def test_samples_continue_with_new_weights(cores, threads):
    """Both parts hear of an interruption."""
    path = one_layer(REFERENCE / "models/llama3")
    task = kpt.GRPOTask.from_preset(path, sequence_length=256)
    contract.check_overlap(engine_of(task), task, every=5)
    assert len(threads) > 1


def test_the_cache_keeps_its_budget(cores, threads, monkeypatch):
    """That of all parts at any time, also while one is resized."""
    held = {}

    def recorded(method):
        def call(self, *args):
            before = held.get(id(self), 0)
            method(self, *args)
            size = sum(x.nbytes for x in jax.tree.leaves(self.cache))
            held[id(self)] = most = max(before, size)
            # Each layer exists twice for a while.
            sizes.append(sum(held.values()) + most // len(self.cache))

        return call

    sizes, budget = [], 2**20
    for name in ("allocate", "resize"):
        method = getattr(decoding.SlotDecoder, name)
        monkeypatch.setattr(decoding.SlotDecoder, name, recorded(method))
    asked = [
        Request(tokens(1 + i, i), max_tokens=100 + i, seed=i)
        for i in range(40)
    ]
    engine = engine_of(short(), cache_bytes=budget)
    out = engine.generate(asked)
    assert len(threads) == 2 and budget / 2 < max(sizes) <= budget
    cores(1)
    check_same(out, engine_of(short()).generate(asked))


def test_a_budget_for_few_slots_makes_one_part(cores, threads):
    """No part is without a slot, and what one decoder holds is sampled."""
    decoder = engine_of(short())
    decoder.generate(requests(max_tokens=5))
    threads.clear()
    size = decoder._bytes_while_resized(decoding.bucket(60 + 5 + 32))
    engine = engine_of(short(), cache_bytes=3 * size)
    out = engine.generate(requests(max_tokens=5))
    assert threads == {threading.current_thread()}
    check_same(out, decoder.generate(requests(max_tokens=5)))


def test_progress_counts_every_sample_once(cores, threads):
    """One thread at a time."""
    counts, inside = [], threading.Lock()

    def count(number):
        assert inside.acquire(blocking=False)
        time.sleep(0.02)
        counts.append(number)
        inside.release()

    engine_of(short()).generate(requests(), progress=count)
    assert counts == 14 * [1] and len(threads) == 2


def test_an_error_of_a_part_ends_the_others(cores, threads, monkeypatch):
    """It is raised, nothing is left, and the engine samples again."""
    failed, ended, advance = threading.Event(), [], Schedule.advance

    def advance_and_wait(self, *args, **kwargs):
        found = advance(self, *args, **kwargs)
        if threading.current_thread() is main:
            failed.wait(60)
        return found

    monkeypatch.setattr(Schedule, "advance", advance_and_wait)
    engine, asked = engine_of(short()), requests(max_tokens=150)
    # One ends early; the other one's last sample would end much later.
    asked[1] = dataclasses.replace(asked[1], max_tokens=3)
    main = threading.current_thread()

    def fail(number):
        if threading.current_thread() is not main:
            failed.set()
            raise KeyError("of the other thread")
        ended.append(number)

    with pytest.raises(KeyError, match="of the other thread"):
        engine.generate(asked, progress=fail)
    assert len(threads) == 2 and not ended
    assert not any(thread.is_alive() for thread in threads - {main})
    with pytest.raises(ZeroDivisionError):
        engine.generate(asked, progress=lambda number: 1 / 0)
    assert len(sum(engine.generate(asked), [])) == 14


def test_a_callers_scope_does_not_wait_for_itself(cores, threads):
    """In `using_weights` no other thread can trace a program."""
    task = short()
    values = [[np.array(v.value) for v in task.trainable_variables]]
    values.append([v.value for v in task.non_trainable_variables])
    assert not _tracing.is_held()
    with task.using_weights(*values):
        assert _tracing.is_held()
        out = engine_of(task).generate(requests(max_tokens=8))
    assert threads == {threading.current_thread()}
    check_same(out, engine_of(task).generate(requests(max_tokens=8)))
    assert len(threads) == 2


def test_tokens_are_streamed_in_the_callers_thread(cores, threads):
    streamed = []
    out = engine_of(short()).generate(
        requests(), on_tokens=lambda *args: streamed.append(args)
    )
    assert threads == {threading.current_thread()}
    assert len({args[:2] for args in streamed}) == len(sum(out, []))


def test_how_many_parts_there_are(monkeypatch, eight_devices):
    one, many = decoding.Placement(1), parts.count_parts
    monkeypatch.setattr(parts, "num_cores", lambda: 4)
    assert many(one, 16, 128) == 4
    # Each has at least 16 slots, and whole requests.
    assert [many(one, 64, n) for n in (1, 31, 32, 63, 64)] == [1, 1, 2, 3, 4]
    assert [many(one, n, 128) for n in (1, 2, 3)] == [1, 2, 3]
    monkeypatch.setattr(parts, "num_cores", lambda: 1)
    assert many(one, 16, 128) == 1
    monkeypatch.setattr(parts, "num_cores", lambda: 4)
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    assert many(decoding.Placement(1), 16, 128) == 1


def test_requests_stay_whole_and_parts_are_as_large():
    samples = Samples(requests())
    found = parts.divide(samples, 2)
    assert sorted(map(len, found)) == [6, 8]
    of_parts = [{s.request for s in part} for part in found]
    assert not of_parts[0] & of_parts[1]
    assert found[0].num_stop_ids == samples.num_stop_ids
    assert sorted(sum(map(list, found), []), key=samples.index) == samples


def test_a_run_has_one_number_of_parts(cores, threads):
    """A smaller rollout has the programs of the others."""
    engine = engine_of(short())
    engine.expect(Expected(9, 5, 14, (1, 60)))
    engine.generate(requests()[:1])
    assert threads == {threading.current_thread()}
    engine.generate(requests())
    assert engine._sizes.num_parts == 2 and len(threads) == 2
    # For three of the five prompts, with three samples each.
    assert engine._sizes.slots == (16, 8, 4)
    names = engine.programs
    cores(1)
    engine.generate(requests())
    assert engine.programs == names
    # A session has all slots.
    assert engine._schedule().most_slots(128) == 128


def test_parts_have_caches_of_their_own():
    engine = engine_of(short())
    engine._refresh()
    decoder = engine._decoder
    assert decoder.divided(1) == [decoder]
    decoder.allocate(2, 128)
    first, second = decoder.divided(2)
    assert first.cache is second.cache is None
    first.allocate(1, 128)
    assert second.cache is None and decoder.slots == 2
