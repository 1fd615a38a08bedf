"""The losses of routers: transformers' numbers, and sums of parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import (
    load_balancing_loss_func,
)

import keras_posttrain as kpt
from keras_posttrain.losses import reductions
from keras_posttrain.losses.router import routing_sums

losses = kpt.losses
pytestmark = pytest.mark.usefixtures("strict_ranks")

LAYERS, ROWS, LENGTH, EXPERTS, TOP_K = 3, 2, 9, 6, 2
LOGITS = np.random.default_rng(0).normal(
    size=(LAYERS, ROWS * LENGTH, EXPERTS), scale=2
)
LOGITS = LOGITS.astype("float32")
MASK = (np.arange(LENGTH) < [[LENGTH], [4]]).astype("float32")


def theirs(logits, mask):
    return float(
        load_balancing_loss_func(
            tuple(map(torch.tensor, logits)),
            EXPERTS,
            TOP_K,
            None if mask is None else torch.tensor(mask),
        )
    )


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_balance_equals_transformers(mask):
    """Of all layers together, and of each layer alone."""
    flat = None if mask is None else mask.reshape(-1)
    got = losses.router_balance_loss(LOGITS, TOP_K, flat, per_layer=False)
    np.testing.assert_allclose(got, theirs(LOGITS, mask), rtol=2e-6)
    got = losses.router_balance_loss(LOGITS, TOP_K, flat)
    want = np.mean([theirs(layer[None], mask) for layer in LOGITS])
    np.testing.assert_allclose(got, want, rtol=2e-6)
    (first, *_) = LOGITS
    np.testing.assert_allclose(
        losses.router_balance_loss(first, TOP_K, flat),
        theirs(first[None], mask),
        rtol=2e-6,
    )


def test_layers_together_hide_what_each_layer_lacks():
    """Two layers send all tokens to one of two experts each, with
    probabilities s = e^4 / (1 + e^4) and 1 - s. Each has f = (1, 0), and the
    loss 2 s; of both together f and p are (1/2, 1/2), and the loss is 1."""
    logits = np.zeros((2, 5, 2), "float32")
    logits[0, :, 0] = logits[1, :, 1] = 4.0
    each = losses.router_balance_loss(logits, 1)
    np.testing.assert_allclose(each, 2 / (1 + np.exp(-4.0)), rtol=1e-6)
    together = losses.router_balance_loss(logits, 1, per_layer=False)
    np.testing.assert_allclose(together, 1.0, rtol=1e-6)


def test_z_is_the_mean_square_of_the_normalizer():
    wide = LOGITS.astype("float64")
    squares = np.log(np.exp(wide).sum(axis=-1)) ** 2
    np.testing.assert_allclose(
        losses.router_z_loss(LOGITS), squares.mean(), rtol=1e-6
    )
    kept = squares[:, MASK.reshape(-1) != 0]
    np.testing.assert_allclose(
        losses.router_z_loss(LOGITS, MASK.reshape(-1)), kept.mean(), rtol=1e-6
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: losses.router_balance_loss(x, TOP_K, mask),
        losses.router_z_loss,
    ],
    ids=["balance", "z"],
)
def test_a_mask_is_a_slice(function):
    """In values and gradients, with NaN at padding; an empty mask gives 0."""
    mask = MASK.reshape(-1)
    kept = mask != 0
    broken = np.where(kept[:, None], LOGITS, np.nan)
    value, slope = jax.jit(jax.value_and_grad(function))(broken, mask)
    sliced = LOGITS[:, kept]
    want, wanted = jax.value_and_grad(function)(sliced, mask[kept])
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(slope[:, kept], wanted, atol=1e-7)
    np.testing.assert_array_equal(slope[:, ~kept], 0)
    value, slope = jax.value_and_grad(function)(LOGITS, 0 * mask)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


def test_only_probabilities_have_a_gradient():
    """N * sum_e f_e p_e with constant f, whose derivative by the logits of a
    token is N / T * p_e * (f_e - sum_j f_j p_j)."""
    layer = LOGITS[0].astype("float64")
    probs = np.exp(layer) / np.exp(layer).sum(axis=-1, keepdims=True)
    best = np.argsort(-layer, axis=-1)[:, :TOP_K]
    shares = np.bincount(best.reshape(-1), minlength=EXPERTS) / len(layer)
    inner = shares - (probs @ shares)[:, None]
    want = EXPERTS / len(layer) * probs * inner
    got = jax.grad(losses.router_balance_loss)(LOGITS[0], TOP_K)
    np.testing.assert_allclose(got, want, atol=1e-7)


@pytest.mark.parametrize("per_layer", [True, False])
def test_parts_add_up_to_the_whole(per_layer):
    """Losses, gradients and metrics of parts, given the batch's counts; a
    token that counts twice is two tokens."""
    loss = losses.RouterLoss(0.7, 0.2, per_layer)
    weights = np.append(MASK.reshape(-1), [1.0, 1.0]).astype("float32")
    logits = np.concatenate([LOGITS, LOGITS[:, :2]], axis=1)
    weights_once = MASK.reshape(-1).copy()
    weights_once[:2] = 2.0

    def sums(logits, weights):
        _, experts = jax.lax.top_k(jnp.asarray(logits), TOP_K)
        return routing_sums(jnp.asarray(logits), experts, weights)

    whole = sums(logits, weights)
    want, metrics = loss.total(whole, whole.counts, whole.tokens)
    values = {k: reductions.metric_value(m) for k, m in metrics.items()}
    balance = losses.router_balance_loss(logits, TOP_K, weights, per_layer)
    z = losses.router_z_loss(logits, weights)
    np.testing.assert_allclose(want, 0.7 * balance + 0.2 * z, rtol=1e-6)
    np.testing.assert_allclose(values["router_balance_loss"], balance)
    np.testing.assert_allclose(values["router_z_loss"], z, rtol=1e-6)

    def share(part, weights):
        found, metrics = loss.total(
            sums(part, weights), whole.counts, whole.tokens
        )
        return found, metrics

    parts, kinds = [], {}
    for at in (slice(0, 7), slice(7, None)):
        found, own = share(LOGITS[:, at], weights_once[at])
        kinds = {name: kind for name, (kind, *_) in own.items()}
        parts.append((found, {k: m[1:] for k, m in own.items()}))
    np.testing.assert_allclose(sum(x for x, _ in parts), want, rtol=1e-6)
    merged = reductions.merge_metrics(
        {
            name: (kind, *map(np.stack, zip(*(m[name] for _, m in parts))))
            for name, kind in kinds.items()
        }
    )
    for name, metric in merged.items():
        np.testing.assert_allclose(
            reductions.metric_value(metric), values[name], rtol=1e-6
        )


def test_load_by_hand():
    """Of 4 experts and 4 tokens with one expert each: in the first layer 3
    choose expert 0 and 1 expert 1: 3 / 1; in the second all have one. Two of
    eight experts have no token."""
    logits = np.zeros((2, 4, 4), "float32")
    logits[0, [0, 1, 2, 3], [0, 0, 0, 1]] = 1.0
    logits[1, [0, 1, 2, 3], [3, 1, 0, 2]] = 1.0
    _, experts = jax.lax.top_k(jnp.asarray(logits), 1)
    sums = routing_sums(jnp.asarray(logits), experts)
    _, metrics = losses.RouterLoss().total(sums, sums.counts, sums.tokens)
    values = {k: reductions.metric_value(m) for k, m in metrics.items()}
    assert values["expert_load_max"] == 3.0
    assert values["expert_unused_ratio"] == 0.25
