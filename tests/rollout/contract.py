"""The contract of every rollout engine; each engine's tests call this."""

import threading

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import Request
from keras_posttrain.rollout.interrupted import generate_whole

PROMPTS = [[5, 17, 101], [9], [33, 8, 250, 71, 12, 90, 14, 200, 3]]


def check_engine(engine, task, tolerance=2e-5):
    """Runs an engine, bound to `task`, through the contract.

    Args:
        engine: `Rollout` that `set_model(task)` was called on.
        task: a task whose weights may be changed.
        tolerance: float, the most that its log-probabilities may be off.
    """
    completions_are_whole(engine)
    log_probs_are_the_policys(engine, task, tolerance)
    greedy_takes_the_best(engine)
    samples_are_keyed(engine)
    stop_tokens_end(engine)
    tokens_are_streamed(engine)
    new_weights_are_used(engine, task, tolerance)
    bad_input_is_refused(engine)


def sampled(engine, **settings):
    settings = {"max_tokens": 6, "seed": 1, **settings}
    return engine.generate([Request(p, **settings) for p in PROMPTS])


def ids(out):
    return [[c.token_ids for c in samples] for samples in out]


def completions_are_whole(engine):
    requests = [
        Request(PROMPTS[0], num_generations=3, max_tokens=4, seed=0),
        Request(PROMPTS[1], max_tokens=7, temperature=0.5, seed=0),
    ]
    out = engine.generate(requests)
    assert [len(samples) for samples in out] == [3, 1]
    for request, samples in zip(requests, out):
        for c in samples:
            assert len(c.token_ids) == request.max_tokens
            assert all(type(x) is int for x in c.token_ids)
            assert c.per_token_logps.shape == (request.max_tokens,)
            assert c.per_token_logps.dtype == np.float32
            assert c.finish_reason == "length"
            assert c.weight_version == engine.weight_version
    assert engine.generate([]) == []


def check_log_probs(engine, out, temperature, tolerance, expected=None):
    """Completions of PROMPTS have the log-probs that `score` gives them."""
    sequences = [
        [*p, *c.token_ids] for p, samples in zip(PROMPTS, out) for c in samples
    ]
    if expected is None:
        scores = engine.score(sequences, temperature=temperature)
        expected = [s.per_token_logps for s in scores]
    completions = [c for samples in out for c in samples]
    for row, c in zip(expected, completions):
        found, count = c.per_token_logps, len(c.token_ids)
        limit = tolerance * max(1, 1 / (temperature or 1))
        np.testing.assert_allclose(found, row[-count:], rtol=0, atol=limit)


def rows_of(out):
    """Completions of PROMPTS as rows, all of whose tokens count."""
    sequences = [
        [*p, *c.token_ids] for p, samples in zip(PROMPTS, out) for c in samples
    ]
    return [
        {"token_ids": ids, "completion_mask": [1] * len(ids)}
        for ids in sequences
    ]


def log_probs_are_the_policys(engine, task, tolerance):
    for temperature in (0.0, 0.3, 1.0, 1.7):
        out = sampled(engine, temperature=temperature, num_generations=2)
        check_log_probs(engine, out, temperature, tolerance)
        if temperature in (0.0, 1.0):
            expected = task.log_probs(rows_of(out))
            check_log_probs(engine, out, temperature, tolerance, expected)
    # Truncation does not change the log-probabilities of the tokens.
    out = sampled(engine, top_k=3, top_p=0.9, min_p=0.01)
    check_log_probs(engine, out, 1.0, tolerance)


def greedy_takes_the_best(engine):
    out = sampled(engine, temperature=0)
    for p, [c] in zip(PROMPTS, out):
        [score] = engine.score([[*p, *c.token_ids]], top_k=2)
        best = score.top_ids[len(p) :, 0]
        assert c.token_ids == best.tolist()
        assert (score.top_logps[:, 0] >= score.top_logps[:, 1]).all()
        np.testing.assert_allclose(
            score.top_logps[len(p) :, 0],
            score.per_token_logps[len(p) :],
            atol=1e-5,
        )


def samples_are_keyed(engine):
    several = ids(sampled(engine, num_generations=4))
    assert several == ids(sampled(engine, num_generations=4))
    assert several != ids(sampled(engine, num_generations=4, seed=2))
    for samples in several:
        assert len({tuple(x) for x in samples}) > 1
    # Without a seed each call is another.
    assert ids(sampled(engine, seed=None)) != ids(sampled(engine, seed=None))


def stop_tokens_end(engine):
    free = sampled(engine, temperature=0)
    for i, [c] in enumerate(free):
        stop = c.token_ids[3]
        first = c.token_ids.index(stop)
        request = Request(
            PROMPTS[i],
            max_tokens=6,
            temperature=0,
            stop_token_ids=[stop, PROMPTS[i][0]],
        )
        [[cut]] = engine.generate([request])
        assert cut.token_ids == c.token_ids[: first + 1]
        assert cut.finish_reason == "stop"
        assert len(cut.per_token_logps) == first + 1


def tokens_are_streamed(engine):
    streamed = {}

    def on_tokens(request, generation, token_ids):
        streamed.setdefault((request, generation), []).extend(token_ids)

    requests = [Request(p, 2, max_tokens=20, seed=3) for p in PROMPTS]
    out = engine.generate(requests, on_tokens=on_tokens)
    for i, samples in enumerate(out):
        for g, c in enumerate(samples):
            assert streamed[i, g] == c.token_ids


def new_weights_are_used(engine, task, tolerance):
    before = sampled(engine, temperature=0)
    version = engine.weight_version
    for variable in task.trainable_variables:
        noise = np.random.default_rng(0).normal(0, 0.3, variable.shape)
        variable.assign_add(noise.astype("float32"))
    assert engine.sync_weights() == engine.weight_version == version + 1
    after = sampled(engine, temperature=0)
    assert ids(before) != ids(after)
    assert after[0][0].weight_version == version + 1
    check_log_probs(engine, after, 0, tolerance)


class NowAndThen(threading.Event):
    """Set at every so many-th look."""

    def __init__(self, every):
        super().__init__()
        self.every, self.looks = every, 0

    def is_set(self):
        self.looks += 1
        return self.looks % self.every == 0


def check_overlap(engine, task, tolerance=2e-5, every=3):
    """Interrupts an engine again and again, and changes the weights.

    Each token's log-probability must be that of the weights that drew it.

    Args:
        engine: `Rollout` that `set_model(task)` was called on, not started.
        task: a task with room for 256 tokens whose weights may be changed.
        tolerance: as in `check_engine`.
        every: int, how many looks at `is_interrupted` it takes.
    """
    engine.overlaps = True
    engine.start()
    engine.sync_weights()
    engine._interruption = NowAndThen(every)
    kept = {engine.weight_version: values_of(task)}

    def update():
        # The trainer's arrays are given away and replaced.
        for variable in task.trainable_variables:
            rng = np.random.default_rng(len(kept))
            noise = rng.normal(0, 0.02, variable.shape)
            old = variable.value
            variable.assign(old + noise.astype("float32"))
            old.delete()
        engine.sync_weights()
        kept[engine.weight_version] = values_of(task)

    requests = [
        Request(p, 3, max_tokens=200, seed=i) for i, p in enumerate(PROMPTS)
    ]
    out = generate_whole(engine, requests, update)
    assert len(kept) > 2
    completions = [c for samples in out for c in samples]
    assert [len(samples) for samples in out] == [3, 3, 3]
    for c in completions:
        assert len(c.token_ids) == len(c.token_versions) == 200
        assert c.finish_reason == "length"
        assert (np.diff(c.token_versions) >= 0).all()
        assert c.weight_version == c.token_versions[-1]
    assert max(len(set(c.token_versions.tolist())) for c in completions) > 1
    rows, seen = rows_of(out), 0
    for version, values in kept.items():
        for variable, value in zip(task.trainable_variables, values):
            variable.assign(value)
        for c, logps in zip(completions, task.log_probs(rows)):
            sampled = c.token_versions == version
            expected = np.asarray(logps)[-len(c.token_ids) :][sampled]
            np.testing.assert_allclose(
                c.per_token_logps[sampled], expected, rtol=0, atol=tolerance
            )
            seen += sampled.sum()
    assert seen == 9 * 200
    engine.stop()
    engine.overlaps = False


def values_of(task):
    return [np.array(v.value) for v in task.trainable_variables]


def bad_input_is_refused(engine):
    good = Request(PROMPTS[0], max_tokens=2)
    for fields, parts in [
        ({"token_ids": []}, ["request 1 is empty"]),
        ({"token_ids": [1, 10**6]}, ["id 1000000 at place 1", "request 1"]),
        ({"num_generations": 0}, ["num_generations=0", "request 1"]),
        ({"max_tokens": 0}, ["max_tokens=0", "request 1"]),
        ({"temperature": -1.0}, ["temperature=-1.0", "request 1"]),
        ({"temperature": float("nan")}, ["temperature=nan", "request 1"]),
        ({"top_k": 0}, ["top_k=0", "request 1"]),
        ({"top_p": 0.0}, ["top_p=0.0", "request 1"]),
        ({"min_p": 1.5}, ["min_p=1.5", "request 1"]),
        ({"stop_token_ids": [3, 10**6]}, ["[1000000]", "request 1"]),
        ({"max_tokens": 10**6}, ["max_tokens=1000000", "context of"]),
    ]:
        bad = Request(**{"token_ids": [4], "max_tokens": 2, **fields})
        with pytest.raises(ValueError) as error:
            engine.generate([good, bad])
        for part in parts:
            assert part in str(error.value)
    with pytest.raises(ValueError, match="put it in a list"):
        engine.generate(good)
    with pytest.raises(ValueError, match="sequence 0 is empty"):
        engine.score([[]])
    with pytest.raises(ValueError, match="top_k=0"):
        engine.score([[1, 2]], top_k=0)
    unbound = type(engine)()
    with pytest.raises(ValueError, match="has no model yet"):
        unbound.generate([good])
    assert isinstance(engine, kpt.rollout.Rollout)
