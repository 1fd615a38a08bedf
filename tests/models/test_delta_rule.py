"""The gated delta rule: in chunks, packed and in trees, as it is defined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_posttrain.models import delta_rule

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 5
STATE = (HEADS, KEY_DIM, VALUE_DIM)


def inputs(length, rows=2, same_keys=False, seed=0):
    """Queries, keys, values, decays and shares of tokens, float64."""
    rng = np.random.default_rng(seed)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    shape = (rows, length, HEADS)
    query, key = unit(rng.normal(size=(2, *shape, KEY_DIM)))
    if same_keys:
        key[:] = key[:, :1]
    value = rng.normal(size=(*shape, VALUE_DIM))
    # From almost no decay to almost all.
    decay = -np.exp(2 * rng.normal(size=shape) - 2)
    beta = 1 / (1 + np.exp(-2 * rng.normal(size=shape)))
    if same_keys:
        beta[:] = 0.999
    return query, key, value, decay, beta


def defined(query, key, value, decay, beta, state=None):
    """The recurrence of the paper, token by token."""
    rows, length = value.shape[:2]
    state = np.zeros((rows, *STATE)) if state is None else state
    out = np.zeros_like(value)
    for t in range(length):
        q, k, v = query[:, t], key[:, t], value[:, t]
        state = state * np.exp(decay[:, t])[..., None, None]
        held = np.einsum("rhk,rhkv->rhv", k, state)
        new = (v - held) * beta[:, t, :, None]
        state = state + np.einsum("rhk,rhv->rhkv", k, new)
        out[:, t] = np.einsum("rhk,rhkv->rhv", q, state)
    return out, state


def float32(arrays):
    return [jnp.asarray(x, "float32") for x in arrays]


def one_sequence(length, rows=2):
    return jnp.ones((rows, length), "int32")


@pytest.mark.parametrize("same_keys", [False, True])
@pytest.mark.parametrize("length", [1, 20, 32, 100])
def test_chunks_are_the_recurrence(length, same_keys):
    """Equal keys are what a power series of the system does not survive."""
    arrays = inputs(length, same_keys=same_keys)
    before = np.random.default_rng(1).normal(size=(2, *STATE))
    want, want_state = defined(*arrays, before)
    run = jax.jit(delta_rule.delta_rule)
    out, state = run(
        *float32(arrays), one_sequence(length), jnp.float32(before)
    )
    np.testing.assert_allclose(out, want, atol=5e-6)
    np.testing.assert_allclose(state, want_state, atol=5e-6)
    # And token by token.
    state, steps = jnp.float32(before), []
    for t in range(min(length, 20)):
        token = (x[:, t] for x in float32(arrays))
        step, state = delta_rule.delta_step(*token, state)
        steps.append(step)
    np.testing.assert_allclose(
        np.stack(steps, axis=1), want[:, :20], atol=2e-6
    )


def recurrence(arrays, state):
    """As `defined`, but such that it has a gradient."""

    def step(state, token):
        out, state = delta_rule.delta_step(*token, state)
        return state, out

    tokens = [jnp.moveaxis(x, 1, 0) for x in arrays]
    state, out = jax.lax.scan(step, state, tuple(tokens))
    return jnp.moveaxis(out, 0, 1), state


def gradients(run, arrays, seed=2):
    """Those of a random sum of the outputs and the states."""
    shapes = jax.eval_shape(run, *arrays)
    rng = np.random.default_rng(seed)
    weights = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), "float32"), shapes
    )

    def total(*arrays):
        found = jax.tree.map(
            lambda x, w: jnp.sum(x * w), run(*arrays), weights
        )
        return sum(jax.tree.leaves(found))

    return jax.jit(jax.grad(total, argnums=range(len(arrays))))(*arrays)


def test_gradients_are_those_of_the_recurrence():
    state = np.random.default_rng(1).normal(size=(2, *STATE))
    arrays = float32([*inputs(75), state])
    got = gradients(
        lambda *x: delta_rule.delta_rule(*x[:5], one_sequence(75), x[5]),
        arrays,
    )
    want = gradients(lambda *x: recurrence(x[:5], x[5]), arrays)
    for ours, theirs in zip(got, want, strict=True):
        size = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * size)


# Columns where segments begin: in a chunk, at its first token, of one token.
CUTS = [0, 1, 3, 37, 64, 90, 100]
PIECES = list(zip(CUTS, CUTS[1:]))


def packed_ids(rows=2):
    ids = np.zeros((rows, CUTS[-1]), "int32")
    for i, (start, stop) in enumerate(PIECES):
        ids[:, start:stop] = i + 1
    return jnp.asarray(ids)


def test_packed_sequences_are_those_alone():
    arrays = inputs(CUTS[-1])
    out, state = jax.jit(delta_rule.delta_rule)(*float32(arrays), packed_ids())
    for start, stop in PIECES:
        part = [x[:, start:stop] for x in arrays]
        want, last = defined(*part)
        np.testing.assert_allclose(out[:, start:stop], want, atol=5e-6)
    np.testing.assert_allclose(state, last, atol=5e-6)


def test_nothing_crosses_a_border():
    """Other tokens before a sequence do not change a bit of it."""
    arrays = float32(inputs(CUTS[-1]))
    others = float32(inputs(CUTS[-1], seed=5))
    run = jax.jit(delta_rule.delta_rule)
    want = run(*arrays, packed_ids())[0]
    for start, _ in PIECES[1:]:
        # Without decay, as it would reach furthest.
        changed = [
            jnp.concatenate([y[:, :start], x[:, start:]], axis=1)
            for x, y in zip(arrays[:3], others[:3])
        ]
        changed[2] = changed[2].at[:, :start].multiply(1e6)
        decay = arrays[3].at[:, :start].set(0.0)
        mixed = run(*changed, decay, arrays[4], packed_ids())
        np.testing.assert_array_equal(mixed[0][:, start:], want[:, start:])


# Segments 2 and 4 continue the first, 3 the second, 6 the fifth.
PARENTS = [0, 1, 2, 1, 0, 5, 0]


def by_paths(arrays):
    """Outputs and states of a tree, segment by segment."""
    rows = arrays[0].shape[0]
    out, states = [], {0: jnp.zeros((rows, *STATE))}
    for i, (start, stop) in enumerate(PIECES):
        part = [x[:, start:stop] for x in arrays]
        one, states[i + 1] = recurrence(part, states[PARENTS[i]])
        out.append(one)
    ends = [states[i + 1] for i in range(len(PIECES))]
    return jnp.concatenate(out, axis=1), jnp.stack(ends, axis=1)


def in_tree(arrays):
    prefixes = jnp.asarray([PARENTS] * arrays[0].shape[0])
    out, states = delta_rule.tree_delta_rule(*arrays, packed_ids(), prefixes)
    return out, states[:, : len(PIECES)]


def test_a_tree_is_its_paths():
    arrays = float32(inputs(CUTS[-1]))
    got, want = jax.jit(in_tree)(arrays), by_paths(arrays)
    np.testing.assert_allclose(got[0], want[0], atol=5e-6)
    np.testing.assert_allclose(got[1], want[1], atol=5e-6)
    ours = gradients(lambda *x: in_tree(x), arrays)
    theirs = gradients(lambda *x: by_paths(x), arrays)
    for one, other in zip(ours, theirs, strict=True):
        size = np.abs(other).max()
        np.testing.assert_allclose(one, other, atol=1e-5 * size)


def test_padding_of_a_tree_is_zero_and_has_no_gradient():
    arrays = float32(inputs(40, rows=1))
    ids = jnp.asarray([[1] * 17 + [2] * 13 + [0] * 10])
    prefixes = jnp.asarray([[0, 1, 0]])

    def run(*arrays):
        return delta_rule.tree_delta_rule(*arrays, ids, prefixes)

    out, states = run(*arrays)
    assert not np.any(out[:, 30:]) and not np.any(states[:, 2])
    want, _ = defined(*(np.float64(x[:, :30]) for x in arrays))
    np.testing.assert_allclose(out[:, :30], want, atol=5e-6)
    for grad in gradients(run, arrays):
        assert np.all(np.isfinite(grad))
        assert not np.any(grad[:, 30:])


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_the_inverse(size):
    rng = np.random.default_rng(size)
    lower = np.tril(rng.normal(size=(4, size, size)), -1) / 3
    want = np.linalg.inv(np.eye(size) + lower)
    got = delta_rule._inverse(jnp.float32(lower))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    def gradient(invert):
        return jax.grad(lambda x: jnp.sum(jnp.sin(invert(jnp.tril(x, -1)))))(
            jnp.float32(lower)
        )

    ours = gradient(delta_rule._inverse)
    theirs = gradient(lambda x: jnp.linalg.inv(jnp.eye(size) + x))
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
