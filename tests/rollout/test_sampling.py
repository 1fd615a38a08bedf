"""Sampling of tokens: their distribution, and what it depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_posttrain.rollout.native import sampling
from keras_posttrain.rollout.native.sampling import (
    block_shape,
    sample,
    sample_key,
)

draw = jax.jit(sample)


def ones(rows, value=1.0, dtype="float32"):
    return np.full(rows, value, dtype)


def keys_of(rows, seed=0):
    return np.stack([sample_key(seed, [3, 1, 4], i) for i in range(rows)])


def draws(logits, count, temperature=1.0, seed=0, **truncation):
    """`count` tokens, one key a few thousand places."""
    rows = 1000
    truncation = {
        name: ones(rows, value, "int32" if name == "top_k" else "float32")
        for name, value in truncation.items()
    }
    logits = jnp.broadcast_to(logits, (rows, len(logits)))
    keys = keys_of(rows, seed)
    found = []
    for position in range(count // rows):
        found.append(
            draw(
                logits,
                keys,
                ones(rows, position, "int32"),
                ones(rows, temperature),
                **truncation,
            )[0]
        )
    return np.concatenate(found)


def truncated(logits, temperature, top_k=None, top_p=None, min_p=None):
    """The same distribution by sorting, in float64."""
    x = np.asarray(logits, "float64") / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order if top_k is None else order[:top_k]
    if top_p is not None:
        share = np.cumsum(p[kept]) / p[kept].sum()
        kept = kept[: int(np.argmax(share >= top_p)) + 1]
    if min_p is not None:
        kept = kept[p[kept] >= min_p * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


LOGITS = np.random.default_rng(5).normal(0, 1.5, 23).astype("float32")
TRUNCATIONS = [
    {},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_tokens_have_the_distribution_of_the_softmax(temperature, truncation):
    """Pearson's statistic of n draws over c cells is about c - 1, with a
    standard deviation of sqrt(2 (c - 1)); 5 of those are a failure."""
    count = 40_000
    want = truncated(LOGITS, temperature, **truncation)
    found = draws(LOGITS, count, temperature, **truncation)
    seen = np.bincount(found, minlength=len(LOGITS))
    cells = want > 0
    assert seen[~cells].sum() == 0
    expected = count * want[cells]
    statistic = ((seen[cells] - expected) ** 2 / expected).sum()
    freedom = cells.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    # The test can fail: the distribution at another temperature does not fit.
    other = count * truncated(LOGITS, 1.2 * temperature, **truncation)[cells]
    if (other > 0).all():
        assert ((seen[cells] - other) ** 2 / other).sum() > statistic + 50


def test_blocks_of_a_large_vocabulary():
    """The first level draws blocks as often as their tokens together."""
    logits = np.random.default_rng(1).normal(0, 2, 1009).astype("float32")
    found = draws(logits, 40_000)
    _, size = block_shape(1009)
    want = np.bincount(np.arange(1009) // size, truncated(logits, 1.0))
    seen = np.bincount(found // size, minlength=len(want))
    expected = 40_000 * want
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert statistic < len(want) - 1 + 5 * np.sqrt(2 * (len(want) - 1))


@pytest.mark.parametrize("vocabulary", [1, 2, 30, 500, 511, 1009, 50257])
def test_log_probs_are_of_the_whole_distribution(vocabulary):
    rows = 16
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (rows, vocabulary)).astype("float32")
    temperature = np.tile(np.float32([0, 0.3, 1, 2.5]), rows // 4)
    for truncation in ({}, {"top_k": ones(rows, 3, "int32")}):
        ids, logps = draw(
            logits,
            keys_of(rows),
            np.arange(rows, dtype="int32"),
            temperature,
            **truncation,
        )
        assert ids.dtype == "int32" and logps.dtype == "float32"
        scale = np.where(temperature == 0, 1, temperature)[:, None]
        want = np.asarray(logits, "float64") / scale
        want -= np.log(np.exp(want - want.max(1, keepdims=True)).sum(1))[
            :, None
        ] + want.max(1, keepdims=True)
        want = want[np.arange(rows), ids]
        np.testing.assert_allclose(logps, want, rtol=1e-6, atol=1e-6)
        greedy = temperature == 0
        assert (np.asarray(ids) == logits.argmax(1))[greedy].all()


def test_greedy_takes_the_least_id_among_equals():
    logits = np.zeros((3, 100), "float32")
    logits[0, [17, 3, 99]] = 5.0
    logits[1, [99, 64]] = 1e-3
    ids, logps = draw(
        logits,
        keys_of(3),
        np.arange(3, dtype="int32"),
        np.zeros(3, "float32"),
        top_k=ones(3, 1, "int32"),
    )
    assert ids.tolist() == [3, 64, 0]
    assert logps[2] == pytest.approx(-np.log(100))


@pytest.mark.parametrize("truncation", TRUNCATIONS[::4], ids=str)
def test_a_row_is_the_same_in_any_company(truncation):
    rows, vocabulary = 128, 500
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (rows, vocabulary)).astype("float32")
    keys = keys_of(rows)
    positions = rng.integers(0, 1000, rows).astype("int32")
    temperature = rng.choice([0, 0.5, 1.0], rows).astype("float32")
    more = {
        name: ones(rows, value, "int32" if name == "top_k" else "float32")
        for name, value in truncation.items()
    }
    ids, logps = draw(logits, keys, positions, temperature, **more)
    for index in (rng.permutation(rows), [5], [127], [3, 4, 5]):
        index = np.asarray(index)
        again, other = draw(
            logits[index],
            keys[index],
            positions[index],
            temperature[index],
            **{name: value[index] for name, value in more.items()},
        )
        np.testing.assert_array_equal(again, np.asarray(ids)[index])
        np.testing.assert_allclose(other, logps[index], atol=1e-6)


def test_rows_without_a_limit_are_as_if_there_were_none():
    rows, vocabulary = 64, 300
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 4, (rows, vocabulary)).astype("float32")
    args = logits, keys_of(rows), np.arange(rows, dtype="int32"), ones(rows)
    plain = draw(*args)
    limits = {
        "top_k": ones(rows, vocabulary, "int32"),
        "top_p": ones(rows, 1.0),
        "min_p": ones(rows, 0.0),
    }
    limits["top_k"][0] = 1
    limits["top_p"][1] = 1e-6
    limits["min_p"][2] = 1.0
    limited = draw(*args, **limits)
    assert np.asarray(limited[0])[:3].tolist() == (
        logits[:3].argmax(1).tolist()
    )
    for a, b in zip(plain, limited):
        np.testing.assert_array_equal(a[3:], b[3:])


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e6, 1e30])
def test_truncated_tokens_are_never_sampled(temperature):
    """Also at temperatures at which the weights of different logits are the
    same float32, or none but the best has one."""
    logits = np.linspace(0, 1, 97).astype("float32")
    best = np.argsort(-logits)
    for top_k in (1, 5):
        found = draws(logits, 20_000, temperature, top_k=top_k)
        assert set(found.tolist()) <= set(best[:top_k].tolist())
    if temperature >= 1:
        assert len(set(found.tolist())) == 5
    found = draws(logits, 5000, temperature, top_p=1e-9)
    assert set(found.tolist()) == {int(best[0])}


def test_tokens_without_weight_are_never_sampled():
    """In 100,000 draws; the first and the last tokens have none."""
    logits = np.full(511, -np.inf, "float32")
    logits[[40, 41, 300]] = [0.0, 3.0, -2.0]
    logits[-1] = -200.0
    found = draws(logits, 100_000)
    assert set(found.tolist()) == {40, 41, 300}


def test_noise_of_several_positions_is_that_of_each():
    keys = keys_of(3)
    positions = np.array([[0, 5], [7, 1], [2, 2]], "int32")
    found = sampling.token_noise(keys, positions, 511)
    assert found.shape == (3, 2, sum(sampling.block_shape(511)))
    for column in range(2):
        one = sampling.token_noise(keys, positions[:, column], 511)
        np.testing.assert_allclose(found[:, column], one, rtol=1e-5)
    given = {"temperature": ones(3), "noise": found[:, 1]}
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 511)))
    ids, logps = sampling.sample(logits, None, None, **given)
    want = sampling.sample(logits, keys, positions[:, 1], ones(3))
    assert ids.tolist() == want[0].tolist()
    np.testing.assert_allclose(logps, want[1], rtol=1e-5)


@pytest.mark.parametrize("bits", [0, 2**31, 2**32 - 1])
def test_the_ends_of_the_noise(bits, monkeypatch):
    """The least and the greatest number that a generator gives."""
    monkeypatch.setattr(
        jax.random,
        "bits",
        lambda key, shape, dtype: jnp.full(shape, bits, dtype),
    )
    noise = sampling.token_noise(keys_of(4), np.zeros(4, "int32"), 3)
    # -log(-log1p(-x)) of x = 2**-33, 0.5 and 1 - 2**-24.
    expected = {0: 22.873, 2**31: 0.3665, 2**32 - 1: -2.8115}
    np.testing.assert_allclose(noise, expected[bits], atol=1e-3)
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 5, (256, 511)).astype("float32")
    logits[:, rng.permutation(511)[:250]] = -np.inf
    logits[:, [0, -1]] = -np.inf
    limit = {"top_k": ones(256, 40, "int32")}
    for more in ({}, limit):
        ids, logps = sampling.sample(
            jnp.asarray(logits),
            keys_of(256),
            np.arange(256, dtype="int32"),
            ones(256),
            **more,
        )
        assert np.isfinite(logps).all()
    rank = (logits > logits[np.arange(256), ids][:, None]).sum(1)
    assert rank.max() < 40


def test_ties_with_the_last_one_kept_are_kept():
    logits = np.float32([1, 2, 3, 2, 0, 2])
    assert set(draws(logits, 2000, top_k=2).tolist()) == {1, 2, 3, 5}
    # e^3 = 20.1, e^2 = 7.4: the best has 0.45 of all, a nucleus of 0.5
    # needs one of three equals.
    assert set(draws(logits, 2000, top_p=0.5).tolist()) == {1, 2, 3, 5}
    assert set(draws(logits, 2000, top_p=0.4).tolist()) == {2}


def test_logits_that_are_not_numbers_show():
    logits = np.zeros((4, 50), "float32")
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[3, 9] = np.inf
    for more in ({}, {"top_p": ones(4, 0.5)}):
        ids, logps = draw(
            logits, keys_of(4), np.arange(4, dtype="int32"), ones(4), **more
        )
        assert np.isnan(logps).tolist() == [False, True, True, True]
        assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 50)).all()


def test_a_vocabulary_of_262144():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (2, 262144)).astype("float32")
    ids, logps = draw(
        logits,
        keys_of(2),
        np.arange(2, dtype="int32"),
        ones(2),
        top_k=ones(2, 1000, "int32"),
    )
    rank = (logits > logits[[0, 1], ids][:, None]).sum(1)
    assert (rank < 1000).all()
    want = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(2), ids]
    np.testing.assert_allclose(logps, want, rtol=1e-6)


def test_keys():
    """A fixed value: samples of a seed outlive a new version."""
    key = sample_key(0, [5, 6], 1)
    assert key.dtype == "uint32" and key.shape == (2,)
    assert key.tolist() == sample_key(0, (5, 6), np.int64(1)).tolist()
    assert key.tolist() == sample_key(0, np.array([5, 6]), 1).tolist()
    others = [
        sample_key(1, [5, 6], 1),
        sample_key(0, [5, 6], 2),
        sample_key(0, [6, 5], 1),
        sample_key(0, [5, 6, 0], 1),
        sample_key(10, [5, 6], 1),
        sample_key(-1, [5, 6], 1),
        sample_key(2**70, [5, 6], 1),
    ]
    assert len({tuple(k.tolist()) for k in [key, *others]}) == 8
    assert key.tolist() == [272723408, 2867951861]


def test_the_default_generator_changes_no_token():
    logits = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    args = logits, keys_of(8), np.arange(8, dtype="int32"), ones(8)
    want = sample(*args)[0].tolist()
    with jax.default_prng_impl("rbg"):
        assert sample(*args)[0].tolist() == want


def test_shapes_are_strict():
    """Nothing is broadcast by accident, and 64 bits change nothing."""
    args = (
        np.random.default_rng(0).normal(size=(8, 64)).astype("float32"),
        keys_of(8),
        np.arange(8, dtype="int32"),
        ones(8),
    )
    more = {
        "top_k": ones(8, 9, "int32"),
        "top_p": ones(8, 0.9),
        "min_p": ones(8, 0.01),
    }
    want = sample(*args, **more)
    with jax.numpy_rank_promotion("raise"):
        found = jax.jit(sample)(*args, **more)
    np.testing.assert_array_equal(found[0], want[0])
    with jax.enable_x64(True):
        found = jax.jit(sample)(*args, **more)
    np.testing.assert_array_equal(found[0], want[0])
    assert found[0].dtype == "int32" and found[1].dtype == "float32"
