"""Advantages of turns and roles: by hand, and against exact gradients."""

import json

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses.turn_advantages import (
    RoleAdvantages,
    TurnAdvantages,
)


def equal(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.dtype == "float32"
        np.testing.assert_allclose(a, np.array(b, "float32"), rtol=1e-6)


def test_two_trajectories_by_hand():
    """Returns (1.5, 1) and (.5, 0): the differences."""
    equal(TurnAdvantages()([[0.5, 1], [0.5]], 2), [[1, 1], [-1]])
    # Half of the second turn's: (1, 1) against .5 and 0.
    equal(TurnAdvantages(gamma=0.5)([[0.5, 1], [0.5]], 2), [[0.5, 1], [-0.5]])


def test_three_trajectories_of_two_groups_by_hand():
    """Returns (3, 2, 2), (1), (0, 1): at turn 1 the others of the first have
    mean .5, of the second 1.5, of the third 2; at turn 2 of the first
    (0 + 1) / 2, of the third (2 + 0) / 2; at turn 3 nobody else is left."""
    group = [[1, 0, 2], [1], [-1, 1]]
    want = [[2.5, 1.5, 2], [-0.5], [-2, 0]]
    equal(TurnAdvantages()(group * 2, 3), want * 2)
    # The groups have nothing to do with each other.
    equal(
        TurnAdvantages()([*group, [9], [9], [9]], 3), [*want, [0]] + [[0]] * 2
    )


def test_one_turn_each_is_leave_one_out():
    rewards = np.random.default_rng(0).random(12)
    want = kpt.losses.LeaveOneOutAdvantages()(rewards, 4)
    got = TurnAdvantages()(rewards[:, None].tolist(), 4)
    np.testing.assert_array_equal(np.concatenate(got), want)


def test_a_trajectory_that_is_left_out_changes_no_other():
    kept = [[0.1, 0.9], [0.4], [0.3, 0.2, 0.5]]
    want = TurnAdvantages()(kept, 3)
    for failed, zeros in (
        (None, []),
        ([0.7, None], [0, 0]),
        ([np.nan], [0]),
    ):
        rows = [kept[0], failed, *kept[1:]]
        got = TurnAdvantages()(rows, 4)
        equal(got, [want[0], zeros, *want[1:]])
    # Nobody to compare with, and nobody at all.
    equal(TurnAdvantages()([[1.0, 2.0], None], 2), [[0, 0], []])
    equal(TurnAdvantages()([None, None], 2), [[], []])
    equal(TurnAdvantages()([[], []], 2), [[], []])
    assert TurnAdvantages()([], 2) == []


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_equal_returns_change_nothing_at_all(scale):
    """Exactly 0: the mean of ten 0.1 is not 0.1."""
    got = TurnAdvantages(scale=scale, gamma=0.9)([[0.1, 1 / 3]] * 10, 10)
    np.testing.assert_array_equal(got, np.zeros((10, 2)))
    # Equal in all but the last turn.
    got = TurnAdvantages(scale=scale)([[0.1, 0], [0.1, 1], [0.1, 1]], 3)
    assert all(np.isfinite(row).all() and row.any() for row in got)


def test_scales():
    """Groups (1), (-1) and (3), (-3, 0): mean squares of 1, of 18 / 3, and of
    20 / 5."""
    rewards = [[1], [0], [3], [0, 0]]
    kind = {
        s: TurnAdvantages(scale=s, std_offset=0) for s in ("group", "batch")
    }
    side = 3 / 6**0.5
    equal(kind["group"](rewards, 2), [[1], [-1], [side], [-side, 0]])
    equal(kind["batch"](rewards, 2), [[0.5], [-0.5], [1.5], [-1.5, 0]])


# The two-step problem: stop for a reward, or earn another one and choose.

STOP_REWARD, GO_REWARD = 0.3, -0.4
CHOICE_REWARDS = np.array([1.0, 0.2, 2.0])
FIRST = np.array([0.2, -0.1])
SECOND = np.array([0.3, 0.0, -0.5])


def softmax(logits):
    weights = np.exp(logits)
    return weights / weights.sum()


def exact_gradient():
    """The gradient of the expected reward by the five logits.

    By a logit of step 1: p_a (value_a - mean of the values); by a logit of
    step 2 the same, times the probability of going on.
    """
    first, second = softmax(FIRST), softmax(SECOND)
    chosen = second @ CHOICE_REWARDS
    values = np.array([STOP_REWARD, GO_REWARD + chosen])
    return np.concatenate(
        [
            first * (values - first @ values),
            first[1] * second * (CHOICE_REWARDS - chosen),
        ]
    )


def estimates(advantages, groups=100_000, size=4):
    """Samples groups, and returns each one's estimate, `(groups, 5)`."""
    rng = np.random.default_rng(0)
    first, second = softmax(FIRST), softmax(SECOND)
    go = rng.random(groups * size) < first[1]
    choice = rng.choice(3, groups * size, p=second)
    rewards = [
        [GO_REWARD, float(CHOICE_REWARDS[c])] if g else [STOP_REWARD]
        for g, c in zip(go, choice)
    ]
    rows = advantages(rewards, size)
    one = np.array([row[0] for row in rows])[:, None]
    two = np.array([row[-1] if len(row) == 2 else 0 for row in rows])[:, None]
    # The gradient of a log-probability is the one-hot vector minus p.
    scores = [np.eye(2)[go.astype(int)] - first, np.eye(3)[choice] - second]
    gradients = np.concatenate([one * scores[0], two * scores[1]], axis=1)
    return gradients.reshape(groups, size, 5).mean(1)


def deviations(found, exact):
    """How many standard errors the mean estimate is off, for each logit."""
    error = found.std(0, ddof=1) / len(found) ** 0.5
    return np.abs(found.mean(0) - exact) / error


def test_unbiased_where_the_policy_chooses_when_to_stop():
    found = estimates(TurnAdvantages())
    assert (deviations(found, exact_gradient()) < 3).all()


def centred_by_turn(values, size):
    """Subtracts the mean over the group's members that reached each turn."""
    rows = []
    for start in range(0, len(values), size):
        group = values[start : start + size]
        means = [
            np.mean([v[t] for v in group if len(v) > t])
            for t in range(max(map(len, group)))
        ]
        rows += [np.subtract(v, means[: len(v)]) for v in group]
    return rows


def rewards_normalised_per_turn(rewards, size):
    """Centres the rewards of each turn index, then sums to returns."""
    rows = centred_by_turn(rewards, size)
    return [np.cumsum(row[::-1])[::-1] for row in rows]


def returns_normalised_per_turn(rewards, size):
    """Sums to returns, then centres those of each turn index."""
    returns = [np.cumsum(row[::-1])[::-1] for row in rewards]
    return centred_by_turn(returns, size)


@pytest.mark.parametrize(
    "kind", [rewards_normalised_per_turn, returns_normalised_per_turn]
)
def test_means_over_those_that_reached_a_turn_are_biased(kind):
    found, exact = estimates(kind, groups=20_000), exact_gradient()
    assert deviations(found, exact).max() > 10
    # Nor is it the gradient times a number, such as (n - 1) / n.
    number = (found.mean(0) @ exact) / (exact @ exact)
    assert deviations(found, number * exact).max() > 10


# Roles


def test_roles_by_hand():
    """Half-way means: x has .5, then .75; o has -.5."""
    kind = RoleAdvantages(decay=0.5)
    state = {}
    got, new = kind([1, -1, 1], ["x", "o", "x"], state)
    np.testing.assert_array_equal(got, [1, -1, 0.5])
    assert got.dtype == "float32"
    assert new == {"x": 0.75, "o": -0.5} and state == {}
    got, newer = kind([0.75, None, np.nan, 0], ["x", "o", "x", "z"], new)
    np.testing.assert_array_equal(got, np.zeros(4))
    assert newer == {**new, "z": 0}


def test_roles_continue_from_a_stored_state():
    rng = np.random.default_rng(0)
    rewards, roles = rng.random(40), rng.choice(["x", "o"], 40).tolist()
    kind = RoleAdvantages()
    want, end = kind(rewards, roles, {})
    first, state = kind(rewards[:15], roles[:15], {})
    state = json.loads(json.dumps(state))
    second, state = kind(rewards[15:], roles[15:], state)
    np.testing.assert_array_equal(np.concatenate([first, second]), want)
    assert state == end


def test_roles_forget_a_role_s_own_luck():
    """x wins nine games of ten: a win says little of it, much of o."""
    rng = np.random.default_rng(0)
    wins = np.where(rng.random(2000) < 0.9, 1.0, -1.0)
    rewards = np.stack([wins, -wins], 1).ravel()
    got, state = RoleAdvantages()(rewards, ["x", "o"] * 2000, {})
    assert abs(state["x"] - 0.8) < 0.3 and state["o"] == -state["x"]
    by_x = got[0::2][1000:]
    assert abs(by_x.mean()) < 0.1
    assert abs(by_x[wins[1000:] > 0].mean() - 0.2) < 0.1


# Errors


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: TurnAdvantages(gamma=1.5), "`gamma`.*from 0 to 1.*gamma=1.5"),
        (lambda: TurnAdvantages(gamma="x"), "gamma='x'"),
        (lambda: TurnAdvantages(scale="std"), "scale='std'"),
        (lambda: RoleAdvantages(decay=1), "decay=1"),
        (lambda: TurnAdvantages()([[1.0]], 1), "num_generations=1"),
        (lambda: TurnAdvantages()([[1.0]] * 3, 2), "3 trajectories, num_gen"),
        (lambda: TurnAdvantages()([1.0, 0.0], 2), "1.0 for trajectory 0.*Use"),
        (
            lambda: TurnAdvantages()([[1.0], [0, np.inf]], 2),
            r"\[0, inf\] for trajectory 1",
        ),
        (lambda: RoleAdvantages()([1, 2], ["x"], {}), "1 roles, 2 rewards"),
        (lambda: RoleAdvantages()([np.inf], ["x"], {}), "inf for completion"),
    ],
)
def test_what_makes_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()
