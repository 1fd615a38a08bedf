"""The pure functions under the losses: values by hand, and what holds for all
of them."""

import ast
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses import reference_free

losses = kpt.losses
pytestmark = pytest.mark.usefixtures("strict_ranks")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


# Policy gradients


def test_sft_and_dft_by_hand():
    """p = 1/2 and 1/4: -log p is log 2 and 2 log 2; -p log p is log(2) / 2
    for both. The gradient of DFT holds p constant: -1/2 and -1/4."""
    logps = jnp.log(jnp.array([0.5, 0.25]))
    assert_close(losses.sft_loss(logps), [np.log(2), 2 * np.log(2)])
    assert_close(losses.dft_loss(logps), [np.log(2) / 2] * 2)
    slope = jax.grad(lambda x: losses.dft_loss(x).sum())(logps)
    assert_close(slope, [-0.5, -0.25])


def test_ppo_by_hand():
    """Ratios 3/2 and 1/2. Clips at 1.2 and 0.8: A = 1 gives -1.2 and -0.5,
    A = -1 gives 1.5 and 0.8. A high clip of 0.3 gives -1.3 for the first, a
    low clip of 0.1 gives 0.9 for the last, and delta = 1.4 cuts 1.5."""
    log_ratios = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5]))
    advantages = jnp.array([1.0, 1.0, -1.0, -1.0])
    got = losses.ppo_loss(log_ratios, advantages)
    assert_close(got, [-1.2, -0.5, 1.5, 0.8])
    got = losses.ppo_loss(log_ratios, advantages, 0.1, 0.3, 1.4)
    assert_close(got, [-1.3, -0.5, 1.4, 0.9])


def test_grpo_by_hand():
    """p = 3/4 and 1/4, old 1/2, A = 1 and -1: ratios 3/2 and 1/2, PPO's part
    -1.2 and 0.8. The reference is 3/8 and 1/2: d = log(1/2) and log(2), k3 =
    e^d - d - 1 = 1/2 + log(2) - 1 and 2 - log(2) - 1; k1 = -d; k2 = d^2 / 2,
    and k3 corrected is k3 times the ratio. `beta` is 0.04 by default."""
    logps = jnp.log(jnp.array([0.75, 0.25]))
    old, ref = jnp.log(jnp.full(2, 0.5)), jnp.log(jnp.array([0.375, 0.5]))
    advantages = jnp.array([1.0, -1.0])
    policy, log2 = np.array([-1.2, 0.8]), np.log(2)
    k3 = np.array([log2 - 0.5, 1 - log2])
    arrays = (logps, old, advantages, ref)
    assert_close(losses.grpo_loss(*arrays), policy + 0.04 * k3)
    for estimator, kl in (
        ("k1", np.array([log2, -log2])),
        ("k2", np.full(2, log2**2 / 2)),
        ("k3", k3),
        ("k3_corrected", k3 * [1.5, 0.5]),
    ):
        got = losses.grpo_loss(*arrays, beta=0.5, kl_estimator=estimator)
        assert_close(got, policy + 0.5 * kl)
    got = losses.grpo_loss(logps, old, advantages, beta=0.0)
    assert_close(got, policy)
    got = losses.grpo_loss(
        logps,
        old,
        -advantages,
        beta=0,
        epsilon=0.4,
        epsilon_high=0.1,
        delta=1.2,
    )
    assert_close(got, [1.2, -0.5])
    got = losses.grpo_loss(
        logps, old, advantages, beta=0, epsilon=0.4, epsilon_high=0.1
    )
    assert_close(got, [-1.1, 0.6])


# Row 1: two sequences, of 2 tokens and of 1, a prompt token and padding.
SEGMENTS = np.array([[1, 1, 1, 2, 0]])
MASK = np.array([[0.0, 1.0, 1.0, 1.0, 0.0]])


def test_gspo_by_hand():
    """Ratios 4 and 1 in the first sequence: sqrt(4) = 2 for both tokens. One
    token of ratio 1/2 in the second. A = -1 and 2: 2, 2 and -1 with the low
    clip at 0.9997. With clips of 0.2: A = 1 gives -1.2 and A = -1 gives 0.8.
    Masked values, NaN included, do not matter."""
    old = jnp.zeros((1, 5))
    logps = jnp.log(jnp.array([[7.0, 4.0, 1.0, 0.5, np.nan]]))
    kept = np.s_[0, 1:4]
    advantages = jnp.array([[-1.0, 2.0]])
    got = losses.gspo_loss(logps, old, advantages, MASK, SEGMENTS)
    assert_close(got[kept], [2, 2, -1])
    got = losses.gspo_loss(
        logps, old, -advantages, MASK, SEGMENTS, 0.2, None, None
    )
    assert_close(got[kept], [-1.2, -1.2, 1.6])
    got = losses.gspo_loss(logps, old, -advantages, MASK, SEGMENTS)
    assert_close(got[kept], [-1.0004, -1.0004, 2 * 0.9997])
    got = losses.gspo_loss(
        logps, old, advantages, MASK, SEGMENTS, 0.2, None, 1.5
    )
    assert_close(got[kept], [1.5, 1.5, -1])

    def total(logps):
        empty = losses.gspo_loss(logps, old, advantages, MASK * 0, SEGMENTS)
        return jnp.sum(empty * MASK)

    np.testing.assert_array_equal(jax.grad(total)(logps), np.zeros((1, 5)))


def test_cispo_by_hand():
    """Ratios 8 and 1/2 with logps -1 and -2, A = 1 and -3: the weights are 5
    and 1/2, the losses 5 and -3; the gradient is -weight * A: -5 and 1.5,
    none through the ratios."""
    logps, advantages = jnp.array([-1.0, -2.0]), jnp.array([1.0, -3.0])
    log_ratios = jnp.log(jnp.array([8.0, 0.5]))
    assert_close(losses.cispo_loss(logps, log_ratios, advantages), [5, -3])
    got = losses.cispo_loss(logps, log_ratios, advantages, max_ratio=2.0)
    assert_close(got, [2, -3])
    slopes = jax.grad(
        lambda *x: losses.cispo_loss(*x, advantages).sum(), argnums=(0, 1)
    )(logps, log_ratios)
    assert_close(slopes, [[-5, 1.5], [0, 0]])


def test_sapo_by_hand():
    """r = 2 with A = 1, t = 1: -4 sigmoid(1); with A = -1, t = 1.05:
    4 sigmoid(1.05) / 1.05. A = 0 has no loss. t = 2 and 0.5 likewise. The
    slope of the on-policy gate is 1."""
    log_ratios = jnp.log(jnp.array([2.0, 2.0, 2.0]))
    advantages = jnp.array([1.0, -1.0, 0.0])
    got = losses.sapo_loss(log_ratios, advantages)
    assert_close(got, [-4 * sigmoid(1), 4 * sigmoid(1.05) / 1.05, 0])
    got = losses.sapo_loss(log_ratios, advantages, 2.0, 0.5)
    assert_close(got, [-4 * sigmoid(2) / 2, 4 * sigmoid(0.5) / 0.5, 0])
    slope = jax.grad(lambda x: losses.sapo_loss(x, advantages).sum())
    assert_close(slope(jnp.zeros(3)), [-1, 1, 0])


def test_vespo_by_hand():
    """w = 3: with A = 1/2, w^2 e^(3 (1 - 3)) = 9 e^-6, with A = -2, w^3
    e^(2 (1 - 3)) = 27 e^-4; times -A log p of 1/2 and -6. A = 0 has no loss.
    With k = l = 1 and k = 0, l = 1/2: 3 e^-2 and e^-1 instead. No gradient
    passes through w."""
    logps, log_w = jnp.array([-1.0, -3.0, -1.0]), jnp.log(jnp.full(3, 3.0))
    advantages = jnp.array([0.5, -2.0, 0.0])
    got = losses.vespo_loss(logps, log_w, advantages)
    assert_close(got, [4.5 * np.exp(-6), -162 * np.exp(-4), 0])
    got = losses.vespo_loss(logps, log_w, advantages, 1.0, 1.0, 0.0, 0.5)
    assert_close(got, [1.5 * np.exp(-2), -6 * np.exp(-1), 0])
    slope = jax.grad(lambda w: losses.vespo_loss(logps, w, advantages).sum())
    np.testing.assert_array_equal(slope(log_w), [0, 0, 0])


def test_reinforce_by_hand():
    """A = 2 and -1, logps -1 and -3: 2 and -3."""
    got = losses.reinforce_loss(np.array([-1.0, -3.0]), np.array([2.0, -1.0]))
    np.testing.assert_array_equal(got, [2, -3])


def test_value_by_hand():
    """v = 0.5, old 0, R = 1, clip 0.2: the clipped error 0.8^2 / 2 = 0.32 is
    larger than 0.5^2 / 2 = 0.125. v = 0.1 is not clipped: 0.405. v = -2 with
    R = 1: 4.5 is larger than the clipped 0.72. v = -0.5 with R = -1 is the
    first case on the other side."""
    values = np.array([0.5, 0.1, -2.0, -0.5])
    arrays = (values, np.zeros(4), np.array([1.0, 1.0, 1.0, -1.0]))
    got = losses.value_loss(*arrays)
    assert_close(got, [0.32, 0.405, 4.5, 0.32])
    got = losses.value_loss(*arrays, clip=None)
    assert_close(got, [0.125, 0.405, 4.5, 0.125])
    got = losses.value_loss(*arrays, clip=0.4)
    assert_close(got, [0.18, 0.405, 4.5, 0.18])


# Preferences: log-ratios 3 and 1 in the first pair, -4 and -2 in the second.

CHOSEN, REJECTED = np.array([3.0, -4.0]), np.array([1.0, -2.0])


@pytest.mark.parametrize(
    "function, settings, want",
    [
        ("dpo_loss", {}, [-log_sigmoid(0.2), -log_sigmoid(-0.2)]),
        ("dpo_loss", {"beta": 0.5}, [-log_sigmoid(1.0), -log_sigmoid(-1.0)]),
        (
            "dpo_loss",
            {"beta": 0.5, "label_smoothing": 0.25},
            [
                -0.75 * log_sigmoid(1.0) - 0.25 * log_sigmoid(-1.0),
                -0.75 * log_sigmoid(-1.0) - 0.25 * log_sigmoid(1.0),
            ],
        ),
        (
            "dpo_loss",
            {"beta": 0.5, "divergence": losses.ForwardKL()},
            [
                -log_sigmoid(0.5 * (np.exp(-1) - np.exp(-3))),
                -log_sigmoid(0.5 * (np.exp(2) - np.exp(4))),
            ],
        ),
        ("ipo_loss", {}, [9, 49]),
        ("ipo_loss", {"beta": 0.5}, [1, 9]),
        ("hinge_loss", {}, [0.8, 1.2]),
        ("hinge_loss", {"beta": 1.0}, [0, 3]),
        (
            "robust_dpo_loss",
            {"beta": 0.5, "label_smoothing": 0.25},
            [
                (-0.75 * log_sigmoid(1.0) + 0.25 * log_sigmoid(-1.0)) / 0.5,
                (-0.75 * log_sigmoid(-1.0) + 0.25 * log_sigmoid(1.0)) / 0.5,
            ],
        ),
        (
            "robust_dpo_loss",
            {},
            [
                (-0.9 * log_sigmoid(0.2) + 0.1 * log_sigmoid(-0.2)) / 0.8,
                (-0.9 * log_sigmoid(-0.2) + 0.1 * log_sigmoid(0.2)) / 0.8,
            ],
        ),
        (
            "exo_pair_loss",
            {"beta": 0.5, "label_smoothing": 0.25},
            [
                sigmoid(m) * np.log(sigmoid(m) / 0.75)
                + sigmoid(-m) * np.log(sigmoid(-m) / 0.25)
                for m in (1.0, -1.0)
            ],
        ),
        (
            "exo_pair_loss",
            {},
            [
                sigmoid(m) * np.log(sigmoid(m) / 0.999)
                + sigmoid(-m) * np.log(sigmoid(-m) / 0.001)
                for m in (0.2, -0.2)
            ],
        ),
        (
            "nca_pair_loss",
            {"beta": 0.5},
            [
                -log_sigmoid(c) - log_sigmoid(-c) / 2 - log_sigmoid(-r) / 2
                for c, r in ((1.5, 0.5), (-2.0, -1.0))
            ],
        ),
        (
            "nca_pair_loss",
            {},
            [
                -log_sigmoid(c) - log_sigmoid(-c) / 2 - log_sigmoid(-r) / 2
                for c, r in ((0.3, 0.1), (-0.4, -0.2))
            ],
        ),
        (
            "bco_pair_loss",
            {"beta": 0.5},
            [
                -log_sigmoid(c) - log_sigmoid(-r)
                for c, r in ((1.5, 0.5), (-2.0, -1.0))
            ],
        ),
        (
            "bco_pair_loss",
            {},
            [
                -log_sigmoid(c) - log_sigmoid(-r)
                for c, r in ((0.3, 0.1), (-0.4, -0.2))
            ],
        ),
        ("sppo_hard_loss", {}, [40, 90]),
        ("sppo_hard_loss", {"beta": 0.5}, [8, 26]),
        (
            "apo_zero_loss",
            {"beta": 0.5},
            [sigmoid(-c) + sigmoid(r) for c, r in ((1.5, 0.5), (-2.0, -1.0))],
        ),
        (
            "apo_zero_loss",
            {},
            [sigmoid(-c) + sigmoid(r) for c, r in ((0.3, 0.1), (-0.4, -0.2))],
        ),
        (
            "apo_down_loss",
            {"beta": 0.5},
            [
                sigmoid(c) + sigmoid(r - c)
                for c, r in ((1.5, 0.5), (-2.0, -1.0))
            ],
        ),
        (
            "apo_down_loss",
            {},
            [
                sigmoid(c) + sigmoid(r - c)
                for c, r in ((0.3, 0.1), (-0.4, -0.2))
            ],
        ),
        (
            "discopop_loss",
            {"beta": 0.5, "tau": 1.0},
            [
                sigmoid(-m) * -log_sigmoid(m) + sigmoid(m) * np.exp(-m)
                for m in (1.0, -1.0)
            ],
        ),
        (
            "discopop_loss",
            {},
            [
                sigmoid(-20 * m) * -log_sigmoid(m)
                + sigmoid(20 * m) * np.exp(-m)
                for m in (0.2, -0.2)
            ],
        ),
        ("cpo_loss", {}, [-log_sigmoid(0.2), -log_sigmoid(-0.2)]),
        (
            "cpo_loss",
            {"beta": 0.5, "label_smoothing": 0.25},
            [
                -0.75 * log_sigmoid(1.0) - 0.25 * log_sigmoid(-1.0),
                -0.75 * log_sigmoid(-1.0) - 0.25 * log_sigmoid(1.0),
            ],
        ),
        ("simpo_loss", {}, [-log_sigmoid(3.5), -log_sigmoid(-4.5)]),
        (
            "simpo_loss",
            {"beta": 0.5, "gamma": 0.25, "label_smoothing": 0.25},
            [
                -0.75 * log_sigmoid(m) - 0.25 * log_sigmoid(-m)
                for m in (0.75, -1.25)
            ],
        ),
        (
            "simpo_loss",
            {"alpha": 0.5, "gamma": 0.0},
            [
                -log_sigmoid(4 * (np.exp(-0.5) - np.exp(-1.5))),
                -log_sigmoid(4 * (np.exp(1) - np.exp(2))),
            ],
        ),
    ],
)
def test_preferences_by_hand(function, settings, want):
    """Differences of log-ratios are 2 and -2: margins 1 and -1 with `beta`
    0.5, and 0.2 and -0.2 with 0.1. IPO: (2 - 5)^2 and (-2 - 5)^2 with
    `beta` 0.1, (2 - 1)^2 and (-2 - 1)^2 with 0.5. SPPO: (3 - 5)^2 + (1 + 5)^2
    and (-4 - 5)^2 + (-2 + 5)^2; 4 + 4 and (-4 - 1)^2 + (-2 + 1)^2. SimPO:
    2 * 2 - 0.5 and 2 * -2 - 0.5; 0.5 * 2 - 0.25; AlphaPO's rewards are
    2 (1 - e^(-x / 2)) / 0.5. The other rows write the formula with the
    rewards c = beta * (3, -4) and r = beta * (1, -2)."""
    got = getattr(losses, function)(CHOSEN, REJECTED, **settings)
    assert_close(got, want)


@pytest.mark.parametrize(
    "function",
    ["dpo_loss", "hinge_loss", "robust_dpo_loss", "exo_pair_loss",
     "discopop_loss"],
)  # fmt: skip
def test_a_divergence_replaces_log_ratios_by_scores(function):
    """The scores of the forward KL are -e^-x: with them in place of
    log-ratios, and no divergence, the loss is the same."""
    function = getattr(losses, function)
    got = function(CHOSEN, REJECTED, divergence=losses.ForwardKL())
    assert_close(got, function(-np.exp(-CHOSEN), -np.exp(-REJECTED)))


def test_aot_by_hand():
    """Sorted, (1, 3, 4) less (-1, 2, 2) are 2, 1 and 2: the ranks in the order
    of the used slots. The slot without a pair has no loss and takes no
    rank, whatever is in it."""
    better = np.array([3.0, -50.0, 1.0, 4.0])
    worse = np.array([2.0, 90.0, -1.0, 2.0])
    mask = np.array([1.0, 0.0, 1.0, 1.0])
    ranks = np.array([2.0, 0.0, 1.0, 2.0])
    got = losses.aot_loss(better, worse, mask, beta=0.5)
    assert_close(got, np.where(mask, -log_sigmoid(0.5 * ranks), 0))
    got = losses.aot_loss(better, worse, mask, 1.0, 0.25)
    want = -0.75 * log_sigmoid(ranks) - 0.25 * log_sigmoid(-ranks)
    assert_close(got, np.where(mask, want, 0))
    assert_close(
        losses.aot_loss(better, worse, mask),
        np.where(mask, -log_sigmoid(0.1 * ranks), 0),
    )
    kept = mask != 0
    sliced = losses.aot_loss(better[kept], worse[kept], np.ones(3), 0.5)
    assert_close(losses.aot_loss(better, worse, mask, 0.5)[kept], sliced)
    slope = jax.grad(lambda x: losses.aot_loss(x, worse, mask * 0).sum())
    np.testing.assert_array_equal(slope(better), np.zeros(4))


def test_rewards_of_simpo_by_hand():
    """Mean log-probability -2: 2 * -2; AlphaPO with 1/2: 2 (1 - e) / (1/2)."""
    assert_close(reference_free.simpo_reward(-2.0, 2.0, 0.0), -4)
    want = 4 * (1 - np.e)
    assert_close(reference_free.simpo_reward(-2.0, 2.0, 0.5), want)


def test_orpo_by_hand():
    """p = 1/2 and 1/4: odds 1 and 1/3, odds ratio 3: -log(3 / 4). A
    probability of 1 has finite odds, and no gradient."""
    arrays = (jnp.log(0.5), jnp.log(0.25))
    assert_close(losses.orpo_loss(*arrays, beta=1.0), np.log(4 / 3))
    assert_close(losses.orpo_loss(*arrays), 0.1 * np.log(4 / 3))
    value, slope = jax.value_and_grad(losses.orpo_loss)(0.0, -1.0)
    assert np.isfinite(value)
    assert slope == 0


def test_kto_by_hand():
    """Log-ratio 3, baseline 1, beta 0.5: 1 - sigmoid(1) for a desirable
    completion, 1 - sigmoid(-1) for an undesirable one. The default `beta` is
    0.1. APO-zero has no baseline: 1 - sigmoid(1.5) and sigmoid(1.5)."""
    ratios, labels = np.array([3.0, 3.0]), np.array([1, 0])
    got = losses.kto_loss(ratios, labels, 1.0, beta=0.5)
    assert_close(got, [sigmoid(-1), sigmoid(1)])
    got = losses.kto_loss(ratios, labels, 1.0)
    assert_close(got, [sigmoid(-0.2), sigmoid(0.2)])
    got = losses.apo_zero_unpaired_loss(ratios, labels, beta=0.5)
    assert_close(got, [sigmoid(-1.5), sigmoid(1.5)])
    got = losses.apo_zero_unpaired_loss(ratios, labels)
    assert_close(got, [sigmoid(-0.3), sigmoid(0.3)])


def test_bradley_terry_by_hand():
    """Scores 2 and 1: -log sigmoid(1); with a margin of 3, -log sigmoid(-2);
    centered with 0.1, 0.1 * (2 + 1)^2 more."""
    assert_close(losses.bradley_terry_loss(2.0, 1.0), -log_sigmoid(1))
    got = losses.bradley_terry_loss(2.0, 1.0, 3.0, center=0.1)
    assert_close(got, -log_sigmoid(-2) + 0.9)


# Distillation


@pytest.mark.parametrize(
    "function, settings, want",
    [
        ("forward_kl_loss", {}, 0.75 * np.log(1.5) + 0.25 * np.log(0.5)),
        ("reverse_kl_loss", {}, 0.5 * np.log(2 / 3) + 0.5 * np.log(2)),
        (
            "jsd_loss",
            {},
            0.5 * (0.75 * np.log(1.2) + 0.25 * np.log(2 / 3))
            + 0.5 * (0.5 * np.log(0.8) + 0.5 * np.log(4 / 3)),
        ),
        (
            "jsd_loss",
            {"beta": 0.2, "scaled": True},
            (0.75 * np.log(0.75 / 0.55) + 0.25 * np.log(0.25 / 0.45)) / 0.8
            + (0.5 * np.log(0.5 / 0.55) + 0.5 * np.log(0.5 / 0.45)) / 0.2,
        ),
        (
            "skew_kl_loss",
            {},
            0.75 * np.log(0.75 / 0.525) + 0.25 * np.log(0.25 / 0.475),
        ),
        (
            "skew_kl_loss",
            {"skew": 0.2, "reverse": True},
            0.5 * np.log(0.5 / 0.7) + 0.5 * np.log(0.5 / 0.3),
        ),
        ("total_variation_loss", {}, 0.25),
        ("uld_loss", {}, 0.5),
    ],
)
def test_divergences_by_hand(function, settings, want):
    """Teacher (3/4, 1/4), student (1/2, 1/2). Mixtures: Jensen-Shannon with
    half of each (5/8, 3/8), with 0.2 of the teacher (.55, .45); skewed,
    .1 * 3/4 + .9 * 1/2 = .525, reverse .2 * 1/2 + .8 * 3/4 = .7. Total
    variation (1/4 + 1/4) / 2; sorted, 1/4 + 1/4."""
    student, teacher = np.log([[0.5, 0.5]]), np.log([[0.75, 0.25]])
    got = getattr(losses, function)(student, teacher, **settings)
    assert_close(got, [want])


@pytest.mark.parametrize(
    "function, settings",
    [
        ("forward_kl_loss", {}),
        ("reverse_kl_loss", {}),
        ("jsd_loss", {"beta": 0.3}),
        ("jsd_loss", {"beta": 0.7, "scaled": True}),
        ("skew_kl_loss", {"skew": 0.2}),
        ("skew_kl_loss", {"skew": 0.7}),
        ("skew_kl_loss", {"skew": 0.2, "reverse": True}),
        ("skew_kl_loss", {"skew": 0.7, "reverse": True}),
        ("total_variation_loss", {}),
        ("uld_loss", {}),
    ],
)
def test_slopes_of_divergences_are_those_of_their_values(function, settings):
    """Central differences, with outcomes left out: probabilities that sum to
    0.8 and 0.85. One is much less probable for the student than for the
    teacher, one much more. The teacher has no gradient."""
    student = jnp.log(jnp.array([0.005, 0.34, 0.45, 0.005]))
    teacher = jnp.log(jnp.array([0.4, 0.3, 0.05, 0.1]))

    def value(student, teacher=teacher):
        return getattr(losses, function)(student, teacher, **settings)

    step = 0.01
    want = [
        (value(student + step * one) - value(student - step * one)) / step / 2
        for one in jnp.eye(4)
    ]
    np.testing.assert_allclose(jax.grad(value)(student), want, atol=2e-4)
    slope = jax.grad(value, argnums=1)(student, teacher)
    np.testing.assert_array_equal(slope, np.zeros(4))
    if "kl" in function:
        # The minimum is at equality, with outcomes left out as well.
        np.testing.assert_allclose(value(teacher), 0, atol=1e-6)


def test_hidden_states_by_hand():
    """Two layers, (1, 2, 2) and (0, 0, 3) against zeros: (1 + 4 + 4) / 3 and
    9 / 3, their mean 3. Cosines of (3, 4) and (1, 0): 0.6, of equal vectors
    1: (0.4 + 0) / 2. A vector of zeros has a distance of 1 and no gradient."""
    student = np.array([[1.0, 2.0, 2.0], [0.0, 0.0, 3.0]])
    got = losses.hidden_state_loss(student[None, None], np.zeros((1, 1, 2, 3)))
    assert_close(got, [[3]])
    student = np.array([[3.0, 4.0], [5.0, 5.0]])
    teacher = np.array([[1.0, 0.0], [5.0, 5.0]])
    assert_close(losses.hidden_state_loss(student, teacher, "cosine"), 0.2)
    value, slope = jax.value_and_grad(losses.hidden_state_loss)(
        jnp.zeros((2, 2)), teacher, "cosine"
    )
    assert value == 1
    np.testing.assert_array_equal(slope, np.zeros((2, 2)))


def test_attention_by_hand():
    """One query with two heads over two keys (of which this batch of two
    tokens makes two queries): (1, 0) against (0.5, 0.5) is 0.5 in squares,
    equal heads are 0: the mean over heads is 0.25. The cosine of (1, 0) and
    (0.6, 0.8) is 0.6: (0.4 + 0) / 2. Half of it with a second, equal layer."""
    student = np.array([[[[1.0, 0.0, 0.3, 0.7]], [[1.0, 0.0, 1.0, 0.0]]]])
    teacher = np.array([[[[0.5, 0.5, 0.3, 0.7]], [[0.6, 0.8, 1.0, 0.0]]]])
    got = losses.attention_loss(student, teacher)
    assert_close(got, [[0.25, (0.16 + 0.64) / 2]])
    got = losses.attention_loss(student, teacher, "cosine")
    assert_close(got[0, 1], 0.2)
    layers = np.concatenate([student, teacher], axis=2)
    got = losses.attention_loss(layers, np.repeat(teacher, 2, axis=2))
    assert_close(got, [[0.125, (0.16 + 0.64) / 4]])


# What holds for all

FUNCTIONS = sorted(
    name
    for name in losses.__all__
    if inspect.isfunction(getattr(losses, name)) and name.endswith("_loss")
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_run_and_end_with_the_value_they_state(name):
    """Each docstring names shapes, and its example runs."""
    text = inspect.getdoc(getattr(losses, name))
    assert "Args:" in text and "Returns:" in text
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    lines = [x for x in example.splitlines() if not x.startswith("#")]
    *body, last = statements(lines)
    scope = {"np": np, "kpt": kpt}
    exec("\n".join(body), scope)
    assert np.isfinite(eval(last, scope)).all()


def statements(lines):
    """The statements of an example, the last as one expression."""
    tree = ast.parse("\n".join(lines))
    return [ast.unparse(node) for node in tree.body]


def elementwise_arguments(function):
    """Random arrays for the leading arguments without a default."""
    rng = np.random.default_rng(0)
    required = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty
    ]
    return [-rng.uniform(0.1, 2.0, 6) for _ in required]


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in FUNCTIONS
        if n not in ("gspo_loss", "attention_loss")
        # Of tokens by experts.
        and not n.startswith("router_")
    ],
)
def test_jit_equals_no_jit(name):
    function = getattr(losses, name)
    arguments = elementwise_arguments(function)
    settings = {"beta": 0.0} if name == "grpo_loss" else {}

    def call(*arrays):
        return function(*arrays, **settings)

    if "kl" in name or name in ("jsd_loss", "uld_loss", "hidden_state_loss"):
        arguments = [x[None] for x in arguments]
    want = call(*arguments)
    assert_close(jax.jit(call)(*arguments), want)


@pytest.mark.parametrize(
    "kind, function, columns",
    [
        (losses.GRPOLoss(beta=0.1), losses.grpo_loss, 2),
        (losses.DAPOLoss(beta=0.1), losses.grpo_loss, 5),
        (losses.BNPOLoss(beta=0.1), losses.grpo_loss, 5),
        (
            losses.DrGRPOLoss(beta=0.1, max_completion_length=7),
            losses.grpo_loss,
            14,
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_means_of_grpo_and_its_relatives(kind, function, columns):
    """Completions of 3 tokens and of 2: GRPO is the mean of their means, DAPO
    and BNPO divide the sum by 5, Dr. GRPO by 2 * 7."""
    rng = np.random.default_rng(1)
    mask = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    logps, old, ref = rng.uniform(-2, -0.1, (3, 2, 3)).astype("float32")
    advantages = np.array([[1.0], [-0.5]], "float32")
    high = {"epsilon_high": kind.epsilon_high}
    tokens = function(
        logps, old, np.broadcast_to(advantages, (2, 3)), ref, beta=0.1, **high
    )
    kept = tokens * mask
    if isinstance(kind, losses.GRPOLoss):
        kept = kept / mask.sum(1, keepdims=True)
    batch = {
        "segment_ids": np.ones((2, 3), "int32"),
        "sequence_mask": np.ones((2, 1)),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }
    value, _ = kind(batch, {"per_token_logps": logps})
    assert_close(value, kept.sum() / columns)


def test_chains_of_classes_are_short():
    """At most four classes of the package, each class itself included."""
    for name in losses.__all__:
        value = getattr(losses, name)
        if isinstance(value, type):
            own = [c for c in value.__mro__ if "posttrain" in c.__module__]
            assert len(own) <= 4, own
