"""Rows whose tokens are split over devices: attention, log-probabilities."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import context, tpu_attention
from keras_posttrain.models.attention import segment_attention, subtree_ends
from keras_posttrain.models.hf import loading
from keras_posttrain.models.policy import Policy
from tests.models.test_attention import (
    SETTINGS,
    batch_of,
    example,
    layout,
    naive_jax,
    random_tree,
    with_sinks,
)
from tests.support import REFERENCE

pytestmark = pytest.mark.usefixtures("eight_devices")


def split(count):
    """Splits the tokens of a row over so many of eight devices."""
    keras.distribution.set_distribution(kpt.distribution.fsdp(context=count))


def visible_of(segments, positions, settings):
    length = segments.shape[1]
    visible = segments[:, :, None] == segments[:, None, :]
    visible = visible & np.tril(np.ones((length, length), bool))
    ahead = positions[:, :, None] - positions[:, None, :]
    return visible & (ahead < settings.get("sliding_window", length))


def check(count, arrays, segments, positions, visible, settings, ends=None):
    """Values and gradients of pieces against the definition."""
    arrays, rest = with_sinks(arrays, settings)
    used = (segments > 0)[..., None, None]
    cotangent = used * np.random.default_rng(1).normal(size=arrays[0].shape)
    split(count)
    pieces = context.pieces_of(segments.shape)
    assert pieces.count == count

    def ours(q, k, v, sinks):
        out = segment_attention(
            *map(pieces.cut, (q, k, v)), segments, positions, ends, scale=0.3,
            sinks=sinks, pieces=pieces, **rest,
        )  # fmt: skip
        out = pieces.join(out)
        return jnp.sum(out * cotangent), out

    def theirs(q, k, v, sinks):
        cap = settings.get("soft_cap")
        out = naive_jax(q, k, v, visible, 0.3, cap, sinks)
        return jnp.sum(out * cotangent), out

    (got, out), (want, expected) = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
        for f in (ours, theirs)
    )
    np.testing.assert_allclose(out * used, expected * used, atol=2e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize(
    "count, documents, settings",
    [
        # One document; chunks of 20 tokens.
        (8, [[320]], "plain"),
        # Borders of devices are borders of documents, and are not.
        (4, [[40, 80, 40, 160], [33, 7, 101, 150]], "window"),
        (8, [[20, 59, 61, 100, 80]], "soft cap"),
        # Chunks of two blocks, the last of them of padding alone.
        (2, [[300, 200], [513], [128, 256], [1] * 9], "both"),
        (4, [[9, 30], [17]], "sinks"),
    ],
)
def test_attention_of_pieces_is_its_definition(count, documents, settings):
    settings = SETTINGS[settings]
    length = max(map(sum, documents))
    rows = [layout(length, lengths) for lengths in documents]
    segments, positions = (np.stack(x) for x in zip(*rows))
    arrays, *_ = example(length, rows=len(rows))
    visible = visible_of(segments, positions, settings)
    check(count, arrays, segments, positions, visible, settings)


def test_attention_of_a_tree_in_pieces():
    prefixes, segments, positions, visible = random_tree(200, 0)
    arrays, *_ = example(200, rows=1)
    ends = subtree_ends(prefixes, segments)
    check(8, arrays, segments, positions, visible, {}, ends)


@pytest.mark.parametrize("window", [None, 50])
def test_kernel_of_tpus_for_pieces(window):
    """The kernel, interpreted: values and gradients are those of rows."""
    arrays, segments, positions = example(512, head_dim=64)
    used = (segments > 0)[..., None, None]
    weights = np.random.default_rng(1).normal(size=arrays[0].shape) * used
    settings = {"scale": 0.1, "sliding_window": window}

    def gradients(attend):
        def total(*arrays):
            return jnp.sum(weights * attend(*arrays))

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*arrays)

    want = gradients(
        lambda *x: segment_attention(*x, segments, positions, **settings)
    )
    split(4)
    pieces = context.pieces_of(segments.shape)

    def ours(*x):
        return pieces.join(
            tpu_attention.splash_attention(
                *map(pieces.cut, x), jnp.asarray(segments), pieces=pieces,
                interpret=True, **settings,
            )
        )  # fmt: skip

    for a, b in zip(*map(jax.tree.leaves, (gradients(ours), want))):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_pieces_have_the_same_number_of_scores():
    """Sixteen chunks: 0 and 15, 1 and 14, ... see 17 of them each."""
    split(8)
    pieces = context.pieces_of((1, 64))
    assert pieces.chunk == 4
    assert ((pieces.columns() + 1).sum(axis=1) == 4 * 65).all()
    # Chunks of more than 64 tokens are made of blocks of 64.
    assert context.pieces_of((1, 2000)).padded_length == 16 * 128


@pytest.mark.parametrize("shares", [False, True])
def test_tokens_are_where_their_predictors_are(shares):
    """Rows come back, and each hidden state is the token's own."""
    split(4)
    rng = np.random.default_rng(0)
    batch = {"token_ids": rng.integers(3, 90, (2, 45)).astype("int32")}
    columns = np.broadcast_to(np.arange(45, dtype="int32"), (2, 45))
    sources = columns - 1
    if shares:
        trees = [random_tree(45, seed) for seed in (0, 1)]
        size = max(prefixes.shape[1] for prefixes, *_ in trees)
        batch["prefix_segments"] = np.zeros((2, size), "int32")
        for name, at in (("segment_ids", 1), ("positions", 2)):
            batch[name] = np.concatenate([tree[at] for tree in trees])
        visible = np.concatenate([tree[3] for tree in trees])
        # The last of those that a token sees before itself.
        visible = visible & (columns[:, None, :] < columns[:, :, None])
        sources = np.where(visible, columns[:, None, :], 0).max(axis=2)
        batch["predicted_by"] = sources.astype("int32")
        assert (sources != columns - 1).sum() > 4
    targets = context.Targets.of(batch)

    def run(hidden):
        found = targets.hidden(targets.pieces.cut(hidden))
        numbers = targets.cut(jnp.asarray(columns + 100))
        return targets.join(found), targets.join(numbers)

    hidden = np.stack([columns, columns * 2], axis=2).astype("float32")
    found, numbers = jax.jit(run)(hidden)
    used = np.broadcast_to(columns > 0, columns.shape)
    if shares:
        used = batch["positions"] > 0
    np.testing.assert_array_equal(found[used][:, 0], sources[used])
    np.testing.assert_array_equal(found[used][:, 1], 2 * sources[used])
    np.testing.assert_array_equal(numbers[used], columns[used] + 100)


@functools.cache
def model(family):
    return loading.load_causal_lm(REFERENCE / "models" / family)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_log_probabilities_at_borders(family):
    """Documents that end where devices do, and that do not.

    Values and gradients of all weights are those of one device.
    """
    causal_lm = model(family)
    rng = np.random.default_rng(3)
    documents = [[16, 8, 40], [5, 27, 31], [64], [1, 2, 3, 58]]
    rows = [[rng.integers(3, 90, n) for n in row] for row in documents]
    batch = batch_of(rows, 64)
    weights = rng.normal(size=(4, 64)).astype("float32")
    variables = causal_lm.backbone.trainable_variables
    policy = Policy(causal_lm)

    def loss(values):
        mapping = list(zip(variables, values))
        with keras.StatelessScope(state_mapping=mapping):
            mask = batch["segment_ids"] > 0
            logps = policy.token_outputs(batch, mask)["per_token_logps"]
        return jnp.sum(weights * logps), logps

    values = [v.value for v in variables]
    run = jax.value_and_grad(loss, has_aux=True)
    want = jax.jit(run)(values)
    split(2)
    got = jax.jit(lambda x: run(x))(values)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # Gemma's gradients are up to a hundred.
        atol = 2e-6 * max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol)
