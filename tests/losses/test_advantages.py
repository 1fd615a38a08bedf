"""Advantages: reference cases, closed forms against enumeration, and
completions without a reward."""

import itertools

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses.advantages import reward_metrics, total_rewards
from tests.support import load_json

losses = kpt.losses
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
CASES = load_json("advantages.json")["cases"]
KINDS = [
    losses.GroupAdvantages(),
    losses.GroupAdvantages(scale="batch"),
    losses.GroupAdvantages(scale="none"),
    losses.LeaveOneOutAdvantages(),
    losses.LeaveOneOutAdvantages(normalize=True),
    losses.GDPOAdvantages(),
    losses.ReinforcePlusPlusAdvantages(),
    losses.ReinforcePlusPlusAdvantages(baseline=True),
    losses.PassAtKAdvantages(k=2),
]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=repr)


def reference_advantages(case):
    settings, rewards = case["settings"], case["inputs"]["rewards"]
    weights, call = settings.get("reward_weights"), {}
    if "normalize_advantages" in settings:
        kind = losses.LeaveOneOutAdvantages(
            beta=settings["beta"],
            normalize=settings["normalize_advantages"],
            reward_clip_range=settings.get("reward_clip_range"),
        )
        old, ref = (
            np.array(case["inputs"][f"{name}_per_token_logps"])
            for name in ("old", "ref")
        )
        call["kl"] = (old - ref).sum(1)
    elif "multi_objective_aggregation" in settings:
        kind = losses.GDPOAdvantages()
    else:
        kind = losses.GroupAdvantages(scale=settings["scale_rewards"])
    return kind(rewards, settings["num_generations"], weights, **call)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference(case):
    want = case["expected"]
    got = reference_advantages(case)
    np.testing.assert_allclose(got, want["advantages"], **CLOSE)
    assert got.dtype == "float32"
    settings = case["settings"]
    metrics = reward_metrics(
        case["inputs"]["rewards"],
        settings["num_generations"],
        settings.get("reward_weights"),
    )
    wanted = dict(want["metrics"])
    if settings.get("scale_rewards") == "batch":
        # The reference asks the batch, not its groups.
        del wanted["frac_reward_zero_std"]
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, err_msg=name, **CLOSE)


def test_two_groups_by_hand():
    """(1, 0, 0, 1) and (1, 1, 1, 0): means .5 and .75; Bessel's standard
    deviations sqrt(1/3) and .5, of all eight .517549."""
    rewards = [1, 0, 0, 1, 1, 1, 1, 0]
    signs = np.array([1, -1, -1, 1])
    for scale, first, second in (
        ("group", 0.5 / (3**-0.5 + 1e-4), [0.25 / 0.5001, -0.75 / 0.5001]),
        ("batch", 0.5 / 0.517649, [0.25 / 0.517649, -0.75 / 0.517649]),
        ("none", 0.5, [0.25, -0.75]),
    ):
        got = losses.GroupAdvantages(scale=scale)(rewards, 4)
        np.testing.assert_allclose(got[:4], first * signs, rtol=1e-5)
        np.testing.assert_allclose(got[6:], second, rtol=1e-5)
    got = losses.LeaveOneOutAdvantages()(rewards, 4)
    np.testing.assert_allclose(got[:4], signs * 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(got[4:], [1 / 3, 1 / 3, 1 / 3, -1], rtol=1e-6)


def test_groups_of_three():
    """Another library's numbers, which adds 1e-6 where this adds 1e-4."""
    rewards = [
        0.57450044,
        0.09968603,
        0.7419659,
        0.8941783,
        0.59656656,
        0.45325184,
    ]
    got = losses.GroupAdvantages(std_offset=1e-6)(rewards, 3)
    want = [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]
    np.testing.assert_allclose(got, want, rtol=2e-5)
    got = losses.GroupAdvantages(scale="none")(rewards, 3)
    want = [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747]
    np.testing.assert_allclose(got, want, rtol=2e-5)
    got = losses.LeaveOneOutAdvantages()(range(1, 7), 3)
    np.testing.assert_allclose(got, [-1.5, 0, 1.5] * 2, atol=1e-7)


def test_two_functions_summed_before_or_after_they_are_normalised():
    rewards = [[1, 0.2], [0, 0.4], [0, 0.6], [1, 0.8]]
    weights = (0.7, 0.3)
    got = losses.GroupAdvantages()(rewards, 4, weights)
    want = [0.631679, -0.923223, -0.777451, 1.068996]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    got = losses.GDPOAdvantages()(rewards, 4, weights)
    want = [0.338375, -0.948442, -0.643408, 1.253475]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_reward_in_the_kl_and_a_clip_before_it():
    """Rewards 5 and 1, kept within (0, 2), less .1 times 10 and 0: 1 and 1;
    without the clip 4 and 1, hence 3 and -3."""
    kind = losses.LeaveOneOutAdvantages(beta=0.1, reward_clip_range=(0, 2))
    np.testing.assert_array_equal(kind([5, 1], 2, kl=[10, 0]), [0, 0])
    kind = losses.LeaveOneOutAdvantages(beta=0.1)
    np.testing.assert_allclose(kind([5, 1], 2, kl=[10, 0]), [3, -3])


def test_reinforce_plus_plus():
    """(0, 1) and (1, 4): mean 1.5, squares 2.25, .25, .25, 6.25 over 3: 3.
    With the baseline (-.5, .5, -1.5, 1.5): 5 / 3."""
    rewards = [0, 1, 1, 4]
    got = losses.ReinforcePlusPlusAdvantages()(rewards, 2)
    want = np.array([-1.5, -0.5, -0.5, 2.5]) / 3**0.5
    np.testing.assert_allclose(got, want, rtol=1e-6)
    got = losses.ReinforcePlusPlusAdvantages(baseline=True)(rewards, 2)
    want = np.array([-0.5, 0.5, -1.5, 1.5]) / (5 / 3) ** 0.5
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # One completion a prompt is enough without the baseline.
    got = losses.ReinforcePlusPlusAdvantages()([0, 2], 1)
    np.testing.assert_allclose(got, [-(0.5**0.5), 0.5**0.5], rtol=1e-6)


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_pass_at_k_is_the_mean_over_all_sets(k, seed):
    """Includes ties: rewards are sampled from four values."""
    rewards = np.random.default_rng(seed).integers(0, 4, 7) / 3
    sets = list(itertools.combinations(range(7), k))
    best = np.array([rewards[list(s)].max() for s in sets])
    std = best.std() or 1.0
    want = [
        (best[[i in s for s in sets]].mean() - best.mean()) / std
        for i in range(7)
    ]
    got = losses.PassAtKAdvantages(k=k)(rewards, 7)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_pass_at_k_of_binary_rewards():
    """2 of 4 right, k = 2: of 6 pairs one fails, mean 5/6, std sqrt(5)/6. A
    right one always passes: (1/6) / (sqrt(5)/6) = 1/sqrt(5). A wrong one
    passes with 2 of 3 others: (2/3 - 5/6) * 6/sqrt(5) = -1/sqrt(5)."""
    got = losses.PassAtKAdvantages(k=2)([1, 0, 0, 1], 4)
    np.testing.assert_allclose(got * 5**0.5, [1, -1, -1, 1], rtol=1e-6)
    # k = 3: no set of three fails, so there is nothing to learn.
    got = losses.PassAtKAdvantages(k=3)([1, 0, 0, 1], 4)
    np.testing.assert_array_equal(got, np.zeros(4))


# What holds for every kind


@by_kind
def test_equal_rewards_change_nothing_at_all(kind):
    """Exactly 0: rounding over a tiny standard deviation would be an
    update. The mean of ten 0.1 is not 0.1."""
    for value in (0.1, 1 / 3, -7e5):
        got = kind([value] * 10, 5)
        np.testing.assert_array_equal(got, np.zeros(10))


@pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if k != losses.ReinforcePlusPlusAdvantages()],
    ids=repr,
)
def test_a_group_of_equal_rewards_next_to_another(kind):
    got = kind([0.1] * 3 + [0.1, 0.5, 0.3], 3)
    np.testing.assert_array_equal(got[:3], np.zeros(3))
    assert (got[3:] != 0).any()


@by_kind
def test_a_completion_without_a_reward_has_no_advantage(kind):
    """A group of four with one missing reward equals the group of the other
    three; in a group without rewards all advantages are 0."""
    got = kind([0.2, None, 0.9, 0.4] + [None] * 4, 4)
    want = kind([0.2, 0.9, 0.4], 3)
    np.testing.assert_allclose(got[[0, 2, 3]], want, rtol=1e-6)
    np.testing.assert_array_equal(got[[1, 4, 5, 6, 7]], np.zeros(5))
    nan = kind([0.2, np.nan, 0.9, 0.4] + [np.nan] * 4, 4)
    np.testing.assert_array_equal(got, nan)


@by_kind
def test_fractions_and_shapes(kind):
    rewards = np.random.default_rng(0).random(8)
    got = kind(rewards, 4)
    assert got.shape == (8,) and got.dtype == "float32"
    np.testing.assert_array_equal(got, kind(rewards[:, None], 4))
    np.testing.assert_array_equal(got, kind(list(rewards), 4, [1.0]))
    # The groups' order does not matter.
    turned = kind(np.concatenate([rewards[4:], rewards[:4]]), 4)
    np.testing.assert_allclose(np.roll(turned, 4), got, rtol=1e-5)
    assert hash(kind) == hash(kind)


def test_a_weight_of_zero_takes_a_function_out():
    rewards = [[1, 9], [0, 4], [0, None], [1, 2]]
    got = losses.GroupAdvantages()(rewards, 4, [1, 0])
    np.testing.assert_array_equal(
        got, losses.GroupAdvantages()([1, 0, 0, 1], 4)
    )
    totals = total_rewards([[1, None], [None, None]], 2, [0.5, 2])
    np.testing.assert_array_equal(totals, [[0.5, np.nan]])


def test_reward_metrics():
    """Groups (1, 1), (0, 2) and (None, None): one of three is all equal."""
    rewards = [[1, None], [1, None], [0, None], [2, None]] + [[None] * 2] * 2
    got = reward_metrics(rewards, 2, names=["right", "other"])
    want = {
        "rewards/right/mean": 1.0,
        "rewards/right/std": (2 / 3) ** 0.5,
        "reward": 1.0,
        "reward_std": (2 / 3) ** 0.5,
        "frac_reward_zero_std": 1 / 3,
    }
    assert got == pytest.approx(want)
    assert reward_metrics([None] * 2, 2) == {"frac_reward_zero_std": 0.0}


# Errors


@by_kind
def test_one_completion_has_no_others_to_compare_with(kind):
    if kind == losses.ReinforcePlusPlusAdvantages():
        return  # compares with the batch
    with pytest.raises(ValueError, match="num_generations=1") as error:
        kind([1.0, 0.0], 1)
    assert type(kind).__name__ in str(error.value)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda kind: kind([1, 0, 1], 2), "3 rewards, num_generations=2"),
        (lambda kind: kind([[[1]], [[0]]], 2), r"shape \(2, 1, 1\)"),
        (lambda kind: kind([[1, 2], [0, np.inf]], 2), "completion 1 by rew"),
        (lambda kind: kind([[1, 2], [0, 1]], 2, [1]), r"weights=\[1.0\]"),
        (lambda kind: kind([1, 0], 2, [np.nan]), r"weights=\[nan\]"),
    ],
)
def test_rewards_that_do_not_fit(call, words):
    for kind in (losses.GroupAdvantages(), losses.GDPOAdvantages()):
        with pytest.raises(ValueError, match=words):
            call(kind)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: losses.GroupAdvantages(scale="std"), "scale='std'"),
        (lambda: losses.PassAtKAdvantages(k=1), "k=1"),
        (
            lambda: losses.LeaveOneOutAdvantages(reward_clip_range=(1, 0)),
            r"reward_clip_range=\(1, 0\)",
        ),
        (lambda: losses.PassAtKAdvantages(k=3)([1, 0], 2), "at least 3"),
        (
            lambda: losses.LeaveOneOutAdvantages(beta=0.1)([1, 0], 2),
            "kl=None, beta=0.1",
        ),
        (
            lambda: losses.LeaveOneOutAdvantages(beta=0.1)([1, 0], 2, kl=[1]),
            r"array of shape \(1,\)",
        ),
    ],
)
def test_settings_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()
