"""States of recurrent layers in the engine: those of the tokens, always.

A state cannot go back to fewer tokens, and is wrong after one too many.
"""

import concurrent.futures
import random

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import NativeRollout, Request
from keras_posttrain.rollout.native.samples import Samples
from tests.models.tiny_checkpoints import make_checkpoint

VOCABULARY = 96


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    directory, _ = make_checkpoint(folder / "hf", "qwen3_5_text")
    return kpt.SFTTask.from_preset(directory, sequence_length=128)


def engine_of(task, **kwargs):
    engine = NativeRollout(**kwargs)
    engine.set_model(task)
    engine.sync_weights()
    return engine


def tokens(rng, count):
    return rng.choices(range(3, VOCABULARY), k=count)


def check(task, found):
    """Pairs of a prompt and a completion have the trainer's values."""
    rows = [
        {
            "token_ids": [*prompt, *sample.token_ids],
            "completion_mask": [0] * len(prompt) + [1] * len(sample.token_ids),
        }
        for prompt, sample in found
    ]
    for (prompt, sample), logps in zip(found, task.log_probs(rows)):
        np.testing.assert_allclose(
            sample.per_token_logps, logps[len(prompt) :], atol=2e-5
        )


def test_groups_in_few_slots(task):
    """Slots are copied, taken again and idle; prompts of one token begin
    with an empty state, and one of many is computed again."""
    rng = random.Random(0)
    requests = [
        Request(
            tokens(rng, length),
            max_tokens=rng.randint(2, 40),
            num_generations=3,
            seed=i,
        )
        for i, length in enumerate([9, 1, 5, 30, 1, 17])
    ]
    few = engine_of(task, num_slots=4).generate(requests)
    many = engine_of(task, num_slots=32).generate(requests)
    found = [
        (request.token_ids, sample)
        for request, samples in zip(requests, few)
        for sample in samples
    ]
    check(task, found)
    for samples, others in zip(few, many):
        for one, other in zip(samples, others):
            assert list(one.token_ids) == list(other.token_ids)


def test_conversations_wait_while_others_are_sampled(task):
    """A turn goes on from the state that the last one left."""
    engine, found = engine_of(task, num_slots=8), []

    with engine.session() as session:

        def converse(seed):
            rng = random.Random(seed)
            ids = tokens(rng, rng.randint(1, 12))
            for turn in range(3):
                request = Request(
                    ids, max_tokens=rng.randint(1, 9), seed=10 * seed + turn
                )
                [sample] = session.submit(request).result()
                found.append((ids, sample))
                said = tokens(rng, rng.randint(1, 14))
                ids = [*ids, *sample.token_ids, *said]
            session.release(ids)

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(converse, range(6)))
        # Less than every turn from its beginning.
        whole = sum(len(ids) + len(x.token_ids) - 1 for ids, x in found)
        assert session.counts.computed < 0.75 * whole
    check(task, found)


def test_what_goes_back_is_computed_again(task):
    """Two answers to one turn, and one to its first half."""
    rng = random.Random(3)
    first, more = tokens(rng, 8), tokens(rng, 6)
    found = []
    with engine_of(task, num_slots=4).session() as session:
        for ids in (first, [*first, *more], [*first, *more], first, first[:4]):
            request = Request(ids, max_tokens=7, seed=len(found))
            [sample] = session.submit(request).result()
            found.append((ids, sample))
    check(task, found)


def test_beginnings_are_computed_once(task):
    """A state is copied where prompts that come together differ."""
    rng = random.Random(4)
    start = tokens(rng, 65)
    prompts = [[*start, *tokens(rng, n)] for n in (12, 20, 7)]
    samples = Samples(
        [Request(ids, 2, max_tokens=3, seed=0) for ids in prompts]
    )
    engine = engine_of(task)
    engine._refresh()
    schedule = engine._schedule()
    schedule.add(samples)
    while schedule.is_busy:
        schedule.advance(engine._decoder_weights(), 0)
    assert schedule.counts.computed == 65 + 11 + 19 + 6 + 6 * 3
    check(task, [(s.prompt, s.completion(0)) for s in samples])
