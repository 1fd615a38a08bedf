"""Sessions: turns join and leave, and nothing is computed twice."""

import concurrent.futures
import random
import time

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import NativeRollout, Request
from keras_posttrain.rollout.native.samples import Samples
from keras_posttrain.rollout.native.schedule import Prefixes
from keras_posttrain.rollout.session import Session
from tests.support import FAMILIES, REFERENCE, one_layer

TURNS, SAMPLED = 3, 5
SYSTEM = list(range(40, 60))


def make(model="llama3", whole=False, **kwargs):
    directory = REFERENCE / "models" / model
    if model == "llama3" and not whole:
        directory = one_layer(directory)
    return kpt.SFTTask.from_preset(directory, sequence_length=256, **kwargs)


def engine_of(task, *args, **kwargs):
    engine = NativeRollout(*args, **kwargs)
    engine.set_model(task)
    engine.sync_weights()
    return engine


def converse(session, seed, turns=TURNS, delay=0.0):
    """A conversation: `(tokens, mask, log-probs)` of all of it."""
    rng = random.Random(seed)
    ids = [*SYSTEM, *rng.choices(range(3, 500), k=rng.randint(1, 20))]
    mask, logps = [0] * len(ids), [0.0] * len(ids)
    for turn in range(turns):
        request = Request(ids, max_tokens=SAMPLED, seed=100 * seed + turn)
        [completion] = session.submit(request).result()
        # What a tool says takes its time.
        time.sleep(delay * rng.random())
        said = rng.choices(range(3, 500), k=rng.randint(1, 70))
        last = turn == turns - 1
        said = [] if last else said
        ids = [*ids, *completion.token_ids, *said]
        mask += [1] * len(completion.token_ids) + [0] * len(said)
        logps += [*completion.per_token_logps, *[0.0] * len(said)]
    session.release(ids)
    return ids, np.array(mask), np.array(logps)


def converse_at_once(engine, count, concurrency=64, delay=0.0, **kwargs):
    """`count` conversations, and the counts of the session."""
    with engine.session() as session:

        def work(seed):
            return converse(session, seed, delay=delay, **kwargs)

        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            found = list(pool.map(work, range(count)))
    return found, getattr(session, "counts", None)


def distinct_tokens(conversations):
    """The nodes of their prefix tree, each conversation's last token aside."""
    seen = set()
    for ids, _, _ in conversations:
        seen.update(tuple(ids[: n + 1]) for n in range(len(ids) - 1))
    return len(seen)


def check_log_probs(task, conversations, atol=1e-5):
    rows = [
        {"token_ids": ids, "completion_mask": mask.tolist()}
        for ids, mask, _ in conversations
    ]
    for want, (_, mask, logps) in zip(task.log_probs(rows), conversations):
        np.testing.assert_allclose(logps * mask, want * mask, atol=atol)


# Episodes of every family are in `episodes/test_families.py`.
@pytest.mark.parametrize(
    "model",
    ["gemma3_text"]
    + [
        pytest.param(model, marks=pytest.mark.full)
        for model in FAMILIES.values()
        if model != "gemma3_text"
    ],
)
def test_every_turn_has_the_trainers_log_probs(model):
    task = make(model)
    found, counts = converse_at_once(engine_of(task), 6)
    check_log_probs(task, found)
    assert counts.computed == distinct_tokens(found)
    assert counts.recomputed == 0


def test_an_adapter_is_sampled_with():
    task = make(lora=kpt.LoRA(rank=4))
    for merge in (True, False):
        engine = engine_of(task, merge_adapter=merge)
        check_log_probs(task, converse_at_once(engine, 3)[0])


def test_concurrency_and_delays_change_no_token():
    task = make()
    engine = engine_of(task)
    want = [x[0] for x in converse_at_once(engine, 8, concurrency=1)[0]]
    for concurrency, delay in ((8, 0.0), (3, 0.02), (8, 0.05)):
        found, counts = converse_at_once(engine, 8, concurrency, delay)
        assert [x[0] for x in found] == want
        assert counts.computed == distinct_tokens(found)


def test_a_slot_that_is_copied_and_given_away_at_once():
    """A prompt copies the beginning of a slot, and another of its length
    takes that slot."""
    engine = engine_of(make(), 2)
    engine._refresh()
    schedule, weights = engine._schedule(), engine._decoder_weights()
    first, other = list(range(40, 60)), list(range(70, 81))
    found = []
    for prompts in ([first], [[*first[:10], 7], other]):
        requests = [Request(ids, max_tokens=4, seed=1) for ids in prompts]
        schedule.add(Samples(requests))
        while schedule.is_busy:
            found += schedule.advance(weights, 0, keep=True)
    assert len(found) == 3 and schedule.counts.computed == 19 + 10 + 3 * 4
    scores = engine.score([[*s.prompt, *s.token_ids] for s in found])
    for sample, score in zip(found, scores):
        want = score.per_token_logps[len(sample.prompt) :]
        np.testing.assert_allclose(sample.logps, want, atol=2e-5)


def test_which_slot_is_given_away():
    """An empty one; else none that may continue; the one used longest ago."""
    engine, rng = engine_of(make()), np.random.default_rng(0)
    engine._refresh()
    schedule, slots = engine._schedule(), 6
    schedule.held = np.full((slots, 4), 9, np.int32)
    for _ in range(50):
        schedule.lengths = rng.integers(0, 3, slots)
        schedule.kept = rng.integers(0, 2, slots) > 0
        schedule.used = rng.permutation(slots)
        free = rng.choice(slots, rng.integers(1, slots + 1), replace=False)
        facts = [*zip(schedule.lengths > 0, schedule.kept, schedule.used)]
        want = min(free.tolist(), key=lambda i: facts[i])
        other = np.array([5, 6, 7], np.int32)
        found = schedule._choose(set(free.tolist()), other, None, {})
        assert found == (want, None, 0)


def test_too_few_slots_compute_again_and_count_it():
    task = make()
    want, _ = converse_at_once(engine_of(task), 6)
    found, counts = converse_at_once(engine_of(task, 2), 6, delay=0.02)
    assert [x[0] for x in found] == [x[0] for x in want]
    assert counts.recomputed > 0
    assert counts.computed == distinct_tokens(found) + counts.recomputed
    check_log_probs(task, found)


def test_the_work_of_a_turn_does_not_grow():
    """`k` turns cost `O(k)` tokens."""
    engine = engine_of(make())
    costs = {}
    for turns in (2, 4, 8):
        with engine.session() as session:
            ids, _, _ = converse(session, 0, turns)
        costs[turns] = session.counts.computed
        assert costs[turns] == len(ids) - 1


def test_branches_of_a_conversation_share_it():
    engine = engine_of(make())
    ids = [*SYSTEM, *range(100, 150)]
    with engine.session() as session:
        [first] = session.submit(Request(ids, max_tokens=4, seed=0)).result()
        ids = [*ids, *first.token_ids]
        futures = [
            session.submit(Request([*ids, 7 + i], max_tokens=4, seed=i))
            for i in range(5)
        ]
        found = [
            ([*ids, 7 + i, *f.result()[0].token_ids], None, None)
            for i, f in enumerate(futures)
        ]
    assert session.counts.computed == distinct_tokens(found)


def test_several_samples_of_a_request():
    # Of one layer, two samples begin with the same token.
    engine = engine_of(make(whole=True))
    request = Request(SYSTEM, num_generations=4, max_tokens=6, seed=3)
    [want] = engine.generate([request])
    with engine.session() as session:
        found = session.submit(request).result()
    assert [c.token_ids for c in found] == [c.token_ids for c in want]
    distinct = distinct_tokens(
        [([*SYSTEM, *c.token_ids], None, None) for c in found]
    )
    # Each sample begins with the prompt's last token.
    assert session.counts.computed == distinct + 3


def test_any_engine_has_a_session_by_generate():
    task = make()
    engine = engine_of(task)
    want, _ = converse_at_once(engine, 4)
    engine.session = lambda: Session(engine)
    found, _ = converse_at_once(engine, 4)
    assert [x[0] for x in found] == [x[0] for x in want]
    check_log_probs(task, found)


def test_errors_reach_who_waits():
    engine = engine_of(make())
    with engine.session() as session:
        with pytest.raises(ValueError, match="Token ids must be in"):
            session.submit(Request([10**6]))
    with pytest.raises(RuntimeError, match="session"):
        session.submit(Request([5]))
    engine = engine_of(make(), cache_bytes=1)
    with engine.session() as session:
        future = session.submit(Request([5, 6]))
        with pytest.raises(ValueError, match="does not hold one sequence"):
            future.result()
        with pytest.raises(RuntimeError, match="session"):
            session.submit(Request([5]))


def test_the_longest_prefix_is_found_among_sorted_sequences():
    rng = np.random.default_rng(0)
    prefixes, added = Prefixes(), []
    for _ in range(300):
        tokens = rng.integers(0, 300, rng.integers(1, 9)) // 100
        tokens[0] *= 257  # more than one byte
        shared = [0]
        for other in added:
            pairs = zip(tokens, other)
            differ = [i for i, (a, b) in enumerate(pairs) if a != b]
            shared.append(min([*differ, len(tokens), len(other)]))
        assert prefixes.longest(tokens) == max(shared)
        prefixes.add(tokens)
        added.append(tokens)
    assert len(prefixes) == 300
