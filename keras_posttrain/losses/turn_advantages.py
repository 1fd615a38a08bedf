"""Advantages of episodes: one a turn, or with a baseline for each role."""

import dataclasses

import numpy as np

from keras_posttrain.losses.advantages import (
    SCALES,
    Advantages,
    LeaveOneOutAdvantages,
    total_rewards,
)
from keras_posttrain.losses.loss import check, check_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnAdvantages(Advantages):
    """The return from a turn on, minus the mean of the others' at that turn.

    With `r_iu` the reward that trajectory `i` earned at turn `u`, and `n`
    members of the group that were scored:

    ```
    G_it = sum over u >= t of gamma^(u - t) r_iu      (0 once i has ended)
    A_it = G_it - (sum over j != i of G_jt) / (n - 1)
    ```

    With one turn each this is `LeaveOneOutAdvantages`. The baseline depends
    on the other trajectories and on `t` alone, not on what trajectory `i`
    does from turn `t` on. Its product with the gradient of the log-probability
    therefore has mean 0, also if the policy chooses when to stop, and the
    gradient is unbiased (with `scale="none"` and `gamma=1`).

    Rewards that are normalised per turn index, over the trajectories that
    reached that turn, and then summed do not have this property: how many
    means are subtracted depends on when the trajectory itself stopped, so
    that stopping early is rewarded or punished by itself.

    Args:
        gamma: float from 0 to 1, the discount of a turn.
        scale: `"none"`; or `"group"` or `"batch"`, which divides by the root
            mean square of the advantages of all turns of the group or of the
            batch. Dividing by what was sampled adds a small bias.
        std_offset: float, added to the root mean square.

    Call arguments:
        turn_rewards: list of lists of floats, the rewards of each
            trajectory's turns, the members of a group next to each other.
            The reward of the whole trajectory is added to its last turn.
            `None`, or a list with a `None` or NaN, leaves a trajectory out.
        num_generations: int, trajectories per group.

    Returns:
        List of float32 arrays, one number for each turn. A trajectory that
        is left out has zeros, none if it was `None`, and is in no mean.

    References:
        - [Ahmadian et al., 2024](https://arxiv.org/abs/2402.14740), the
          leave-one-out baseline.
        - [A report of the bias](https://github.com/verl-project/verl/issues/7244),
          a GitHub thread.

    Example:

    ```python
    advantages = kpt.losses.TurnAdvantages()
    advantages([[0.0, 1.0], [0.5]], num_generations=2)
    # [[0.5, 1.0], [-0.5]]
    ```
    """

    gamma: float = 1.0
    scale: str = "none"
    std_offset: float = 1e-4

    def __post_init__(self):
        check_types(self)
        check(self, "gamma", 0 <= self.gamma <= 1, "from 0 to 1")
        check(self, "scale", self.scale in SCALES, f"one of {SCALES}")

    def __call__(self, turn_rewards, num_generations):
        self.check(num_generations)
        rewards, reached = _turn_matrix(turn_rewards, num_generations)
        for turn in range(rewards.shape[1] - 2, -1, -1):
            rewards[:, turn] += self.gamma * rewards[:, turn + 1]
        # One row for each group and turn.
        shape = (-1, num_generations, rewards.shape[1])
        returns = rewards.reshape(shape).swapaxes(1, 2)
        values = LeaveOneOutAdvantages().of_groups(
            returns.reshape(-1, num_generations)
        )
        values = values.reshape(returns.shape).swapaxes(1, 2)
        reached = reached.reshape(values.shape)
        values = np.where(reached & ~np.isnan(values), values, 0.0)
        if self.scale != "none":
            axis = (1, 2) if self.scale == "group" else None
            squares = (values**2).sum(axis, keepdims=True)
            count = np.maximum(reached.sum(axis, keepdims=True), 1)
            values /= np.sqrt(squares / count) + self.std_offset
        rows = values.reshape(rewards.shape).astype("float32")
        return [r[: len(t or ())] for r, t in zip(rows, turn_rewards)]


def _turn_matrix(turn_rewards, num_generations):
    """Pads rewards of turns, float64 and bool `(trajectories, turns)`.

    The second array marks the turns of trajectories that are scored. The
    first is 0 after the last turn, and NaN for a trajectory that is left out.
    """
    if num_generations < 1 or len(turn_rewards) % num_generations:
        raise ValueError(
            "The number of trajectories must be a multiple of "
            "`num_generations`, so that every group has all its members. "
            f"Received: {len(turn_rewards)} trajectories, "
            f"num_generations={num_generations}"
        )
    lengths = [len(_turns(i, t)) for i, t in enumerate(turn_rewards)]
    rewards = np.zeros((len(lengths), max([1, *lengths])))
    reached = np.zeros(rewards.shape, bool)
    for i, turns in enumerate(turn_rewards):
        # `None` becomes NaN.
        row = np.array(turns, "float64") if turns is not None else np.nan
        if np.isnan(row).any():
            rewards[i] = np.nan
            continue
        if np.isinf(row).any():
            raise ValueError(
                "A reward must be finite, or None for a trajectory that is "
                f"left out. Received: {turns} for trajectory {i}"
            )
        rewards[i, : len(row)] = row
        reached[i, : len(row)] = True
    return rewards, reached


def _turns(index, turns):
    if turns is not None and np.ndim(turns) != 1:
        raise ValueError(
            "`turn_rewards` must have a list for each trajectory, with one "
            f"reward a turn. Received: {turns!r} for trajectory {index}. Use "
            "`LeaveOneOutAdvantages` for one reward a completion."
        )
    return () if turns is None else turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleAdvantages(Advantages):
    """A reward minus a moving mean of the rewards of its role.

    For `num_generations=1`, and for games whose players' rewards sum to 0,
    where the mean over all players is 0 and says nothing. The first player
    may win more often than the second: each role, such as the name of a
    player, has a mean of its own. For each row in order:

    ```
    A = reward - mean[role]
    mean[role] = decay * mean[role] + (1 - decay) * reward
    ```

    The mean starts at 0. It contains earlier rewards only, so that the
    gradient is unbiased. One that contained the row's own would only scale
    all advantages by `decay`.

    Args:
        decay: float from 0 to 1 (not 1), the weight of the past. The paper's
            value is 0.95.

    Call arguments:
        rewards: floats of shape `(sequences,)` or `(sequences, functions)`;
            `None` or NaN leaves a row out, which also keeps the mean.
        roles: list of strings, the role of each row.
        state: dict of role to float, the means so far, `{}` at the start. It
            is not changed, and what JSON can hold.
        weights: floats of shape `(functions,)`, 1 by default.

    Returns:
        Tuple of a float32 array of shape `(sequences,)`, 0 for rows that are
        left out, and the new state.

    Reference:
        - [Liu et al., 2025](https://arxiv.org/abs/2506.24119).

    Example:

    ```python
    advantages = kpt.losses.RoleAdvantages(decay=0.5)
    advantages([1.0, -1.0, 1.0], ["x", "o", "x"], {})
    # [1.0, -1.0, 0.5], {"x": 0.75, "o": -0.5}
    ```
    """

    decay: float = 0.95
    min_generations = 1

    def __post_init__(self):
        check_types(self)
        check(self, "decay", 0 <= self.decay < 1, "from 0 to below 1")

    def __call__(self, rewards, roles, state, weights=None):
        totals = total_rewards(rewards, 1, weights)[:, 0]
        if len(roles) != len(totals):
            raise ValueError(
                "`roles` must have one role for each reward. Received: "
                f"{len(roles)} roles, {len(totals)} rewards"
            )
        advantages, means = np.full(len(totals), np.nan), dict(state)
        for i, (reward, role) in enumerate(zip(totals.tolist(), roles)):
            if not np.isnan(reward):
                mean = means.get(role, 0.0)
                advantages[i] = reward - mean
                # Exactly the mean if the reward is.
                means[role] = mean + (1 - self.decay) * (reward - mean)
        return self.finish(advantages), means
