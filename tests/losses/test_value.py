"""PPO's value side against hand-made numbers and literal ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses import (
    generalized_advantages,
    token_rewards,
    whiten,
)
from tests.support import load_json


def array(*rows):
    return np.array(rows, "float32")


# Advantages


def test_advantages_by_hand(strict_ranks):
    """Rewards 0, 0, 1 and values 0.5, 0.6, 0.7, gamma 1, lambda 0.95.

    From the end: 1 - 0.7 = 0.3; 0.7 - 0.6 + 0.95 * 0.3 = 0.385;
    0.6 - 0.5 + 0.95 * 0.385 = 0.46575. Returns add the values: 0.96575,
    0.985, 1. The fourth token is padding.
    """
    mask = array([1, 1, 1, 0])
    advantages, returns = generalized_advantages(
        array([0, 0, 1, 0]),
        array([0.5, 0.6, 0.7, 0.9]),
        mask,
        gamma=1.0,
        gae_lambda=0.95,
    )
    np.testing.assert_allclose(advantages, [[0.46575, 0.385, 0.3, 0]], 1e-6)
    np.testing.assert_allclose(returns, [[0.96575, 0.985, 1, 0]], rtol=1e-6)
    white = whiten(advantages, mask)
    np.testing.assert_allclose(
        white, [[0.99134, 0.01709, -1.00844, 0]], atol=1e-5
    )


def test_advantages_are_the_literal_ones():
    """Three patterns of masks, the last with gaps within the completion."""
    case = load_json("tunix_literals.json")["gae"]
    mask = np.array(case["mask"], "float32")
    advantages, returns = jax.jit(generalized_advantages)(
        np.array(case["rewards"], "float32"),
        np.array(case["values"], "float32"),
        mask,
        gamma=case["gamma"],
        gae_lambda=case["lam"],
    )
    on = mask != 0
    np.testing.assert_allclose(
        np.array(returns)[on], np.array(case["returns"])[on], rtol=2e-5
    )
    np.testing.assert_allclose(
        np.array(whiten(advantages, mask))[on],
        np.array(case["advantages"])[on],
        rtol=2e-5,
        atol=2e-6,
    )
    assert not np.array(advantages)[~on].any()
    assert not np.array(returns)[~on].any()


def plain_gae(rewards, values, gamma, gae_lambda):
    """The definition, of one sequence without masked tokens."""
    values = [*values, 0.0]
    deltas = [
        r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)
    ]
    return [
        sum(
            (gamma * gae_lambda) ** k * delta
            for k, delta in enumerate(deltas[t:])
        )
        for t in range(len(deltas))
    ]


def test_masked_tokens_are_as_if_they_were_not_there():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 4, 12)).astype("float32")
    mask = (rng.random((4, 12)) < 0.6).astype("float32")
    # What is masked may be anything.
    rewards[mask == 0] = np.nan
    values[mask == 0] = np.inf
    advantages, returns = generalized_advantages(
        rewards, values, mask, gamma=0.9, gae_lambda=0.8
    )
    for row in range(4):
        on = mask[row] != 0
        expected = plain_gae(rewards[row, on], values[row, on], 0.9, 0.8)
        np.testing.assert_allclose(advantages[row, on], expected, rtol=1e-4)
        np.testing.assert_allclose(
            returns[row, on], expected + values[row, on], rtol=1e-4, atol=1e-5
        )
        assert not np.array(advantages)[row, ~on].any()


def test_packed_sequences_do_not_see_each_other():
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(2, 3, 5)).astype("float32")
    mask = array([0, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 0, 1, 0])
    alone = generalized_advantages(rewards, values, mask, gamma=0.9)
    ids = np.repeat([[1, 2, 3, 0]], 5, axis=1).reshape(1, 4, 5)

    def pack(x):
        padding = np.full((1, 5), 9, "float32") * (x is not mask)
        return np.concatenate([x, padding]).reshape(1, 20)

    packed = generalized_advantages(
        pack(rewards), pack(values), pack(mask), ids.reshape(1, 20), gamma=0.9
    )
    for one, other in zip(alone, packed):
        got = np.array(other).reshape(4, 5)
        np.testing.assert_allclose(got[:3], one, rtol=1e-6)
        assert not got[3].any()


def test_lambda_1_gives_whole_returns_and_0_differences():
    rewards, values = array([1, 2, 4]), array([3, 5, 6])
    mask = array([1, 1, 1])
    _, returns = generalized_advantages(
        rewards, values, mask, gamma=0.5, gae_lambda=1.0
    )
    np.testing.assert_allclose(returns, [[1 + 1 + 1, 2 + 2, 4]])
    advantages, _ = generalized_advantages(
        rewards, values, mask, gamma=0.5, gae_lambda=0.0
    )
    np.testing.assert_allclose(
        advantages, [[1 + 2.5 - 3, 2 + 3 - 5, 4 - 6]], atol=1e-6
    )


# Rewards of tokens


def test_fractional_rewards_stay_fractional(strict_ranks):
    """Two sequences in a row, then one; the KL counts 0.1 a token."""
    ids = np.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]])
    mask = array([0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 0, 0])
    got = token_rewards(array([0.5, 1.7], [-0.25, np.nan]), mask, ids)
    assert got.dtype == "float32"
    np.testing.assert_allclose(
        got, [[0, 0, 0.5, 0, 1.7, 0, 0], [0, 0, 0, 0, -0.25, 0, 0]]
    )
    kl = np.full(mask.shape, 2.0, "float32")
    kl[mask == 0] = np.nan
    got = token_rewards(
        array([0.5, 1.7], [-0.25, 0]), mask, ids, kl=kl, beta=0.1
    )
    np.testing.assert_allclose(
        got,
        [[0, -0.2, 0.3, 0, 1.5, 0, 0], [0, 0, -0.2, 0, -0.45, 0, 0]],
        atol=1e-6,
    )


def test_whole_rewards_are_floats_too():
    got = token_rewards(np.array([[1]]), np.array([[0, 1]]), np.ones((1, 2)))
    assert got.dtype == "float32" and got.tolist() == [[0, 1]]
    half = token_rewards(
        jnp.array([[0.5]], "bfloat16"), np.array([[0, 1]]), np.ones((1, 2))
    )
    assert half.dtype == "float32" and half.tolist() == [[0, 0.5]]


# Whitening


def test_whitening_is_over_the_mask_alone():
    """1, 3, 8 have mean 4 and variance (9 + 1 + 16) / 2 = 13."""
    values, mask = (
        array([1, np.nan, 3], [8, np.inf, 0]),
        array([1, 0, 1], [1, 0, 0]),
    )
    white = whiten(values, mask)
    np.testing.assert_allclose(
        white, array([-3, 0, -1], [4, 0, 0]) / 13**0.5, rtol=1e-6
    )
    kept = whiten(values, mask, shift_mean=False)
    np.testing.assert_allclose(kept, (white + 4) * mask, rtol=1e-6)


@pytest.mark.parametrize("mask", [[0, 0], [1, 0], [1, 1]])
def test_whitening_of_little_is_finite(mask):
    mask = array(mask)
    values = array([2.5, 2.5])
    assert not np.array(whiten(values, mask)).any()
    gradient = jax.grad(lambda x: whiten(x, mask).sum())(values)
    assert np.isfinite(gradient).all()


def test_whitening_in_parts_is_another_thing():
    """Why it is a step of its own: it must see the whole batch."""
    values, mask = array([0, 1], [5, 9]), array([1, 1], [1, 1])
    parts = [whiten(values[i : i + 1], mask[i : i + 1]) for i in (0, 1)]
    whole = whiten(values, mask)
    assert np.abs(np.concatenate(parts) - np.array(whole)).max() > 0.5


# The loss


BATCH = {
    "completion_mask": array([0, 1, 1, 1], [0, 1, 0, 0]),
    "returns": array([0, 1, 1, 0], [0, 2, 0, 0]),
    "old_values": array([0, 0, 0.5, 0.5], [0, 2, 0, 0]),
}
VALUES = array([9, 0.5, 0.6, 1.0], [9, 2.1, 9, 9])


def test_the_clipped_loss_by_hand(strict_ranks):
    """With clip 0.2, the four tokens:

    - 0 to 0.5 towards 1: clipped to 0.2, (0.2 - 1)^2 = 0.64 over 0.25
    - 0.5 to 0.6: within, 0.4^2 = 0.16
    - 0.5 to 1 away from 0: clipped 0.7^2 = 0.49, but 1 is larger
    - 2 to 2.1 of 2: 0.01

    Half the mean: (0.64 + 0.16 + 1 + 0.01) / 8 = 0.22625. One of four
    tokens is clipped. Without: (0.25 + 0.16 + 1 + 0.01) / 8 = 0.1775.
    """
    loss = kpt.losses.ValueLoss(clip=0.2)
    value, metrics = loss(BATCH, {"values": VALUES})
    np.testing.assert_allclose(value, 0.22625, rtol=1e-6)
    np.testing.assert_allclose(metrics["value/loss"], 0.22625, rtol=1e-6)
    np.testing.assert_allclose(metrics["value/clip_ratio"], 0.25)
    np.testing.assert_allclose(metrics["value/mean"], 4.2 / 4, rtol=1e-6)
    np.testing.assert_allclose(metrics["value/return_mean"], 1)
    assert tuple(metrics) == loss.metric_names
    value, metrics = kpt.losses.ValueLoss(clip=None, coefficient=0.1)(
        BATCH, {"values": VALUES}
    )
    np.testing.assert_allclose(value, 0.01775, rtol=1e-6)
    np.testing.assert_allclose(metrics["value/loss"], 0.1775, rtol=1e-6)
    assert metrics["value/clip_ratio"] == 0


def test_no_gradient_where_the_clipped_error_is_the_larger():
    loss = kpt.losses.ValueLoss(clip=0.2)

    def value(x, function=loss):
        return function(BATCH, {"values": x})[0]

    gradient = jax.grad(value)(VALUES)
    expected = array([0, 0, -0.4, 1], [0, 0.1, 0, 0]) / 4
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    np.testing.assert_allclose(
        jax.jit(jax.grad(value))(VALUES), gradient, rtol=1e-6
    )


def test_values_that_have_not_moved_have_the_plain_loss():
    batch = {**BATCH, "old_values": VALUES}
    free = kpt.losses.ValueLoss(clip=None)

    def value(x, batch, loss):
        return loss(batch, {"values": x})[0]

    clip = kpt.losses.ValueLoss()
    expected = jax.value_and_grad(value)(VALUES, batch, free)
    absent = {k: v for k, v in BATCH.items() if k != "old_values"}
    for given in (batch, absent):
        got = jax.value_and_grad(value)(VALUES, given, clip)
        np.testing.assert_allclose(got[0], expected[0])
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


def test_rows_add_up_and_masked_is_sliced():
    loss = kpt.losses.ValueLoss(clip=0.2)
    whole, _ = loss.total(BATCH, {"values": VALUES})
    parts = 0.0
    for i in range(2):
        rows = {k: v[i : i + 1] for k, v in BATCH.items()}
        terms, _ = loss.total(rows, {"values": VALUES[i : i + 1]})
        parts += terms["value"]
    np.testing.assert_allclose(parts, whole["value"], rtol=1e-6)
    on = BATCH["completion_mask"] != 0
    sliced = {k: v[on][None] for k, v in BATCH.items()}
    np.testing.assert_allclose(
        loss(sliced, {"values": VALUES[on][None]})[0],
        loss(BATCH, {"values": VALUES})[0],
        rtol=1e-6,
    )


def test_what_is_masked_may_be_no_number():
    loss = kpt.losses.ValueLoss()
    for mask in (BATCH["completion_mask"], np.zeros((2, 4), "float32")):
        off = mask == 0
        batch = {k: np.where(off, np.nan, v) for k, v in BATCH.items()}
        batch["completion_mask"] = mask
        values = np.where(off, np.nan, VALUES)
        value, gradient = jax.value_and_grad(
            lambda x, b: loss(b, {"values": x})[0]
        )(values, batch)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        assert not np.array(gradient)[off].any()
    assert value == 0


def test_the_contract():
    loss = kpt.losses.ValueLoss()
    assert loss.needs == ("values",) and not loss.batch_coupled
    assert not np.array(loss.logps_mask(BATCH)).any()


def test_bad_settings_and_shapes():
    for clip in (0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="`clip` must be above 0"):
            kpt.losses.ValueLoss(clip=clip)
    with pytest.raises(ValueError, match="`coefficient` must be"):
        kpt.losses.ValueLoss(coefficient=0)
    one, two = array([1, 2]), array([1, 2, 3])
    with pytest.raises(ValueError, match=r"values.shape=\(1, 2\), mask.sha"):
        generalized_advantages(two, one, two)
    with pytest.raises(ValueError, match=r"rewards.shape=\(2,\)"):
        token_rewards(one[0], two, two)
    with pytest.raises(ValueError, match="must have the same shape"):
        whiten(one, two)
