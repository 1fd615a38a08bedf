"""Advantages from rewards, computed with NumPy on the host.

Every class is called as `kind(rewards, num_generations, weights=None)`. A
reward is `None` or NaN if its function did not score that completion.
"""

import dataclasses
import math

import numpy as np

from keras_posttrain.losses.loss import check_types

SCALES = ("group", "batch", "none")


def reward_matrix(rewards, num_generations):
    """Converts rewards to float64 `(sequences, functions)`, NaN if not scored.

    They are as `Advantages` takes them. Another shape, an infinite reward, or
    a number of completions that is no multiple of `num_generations` raises a
    `ValueError`.
    """
    # `None` becomes NaN.
    array = np.array(rewards, dtype="float64")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(
            "`rewards` must be of shape (sequences,) or (sequences, "
            f"functions). Received: rewards of shape {array.shape}"
        )
    if num_generations < 1 or len(array) % num_generations:
        raise ValueError(
            "The number of rewards must be a multiple of `num_generations`, "
            "so that every prompt has all its completions. Received: "
            f"{len(array)} rewards, num_generations={num_generations}"
        )
    infinite = np.argwhere(np.isinf(array))
    if len(infinite):
        row, column = infinite[0]
        raise ValueError(
            "A reward must be finite, or None where a completion is not "
            f"scored. Received: {array[row, column]} for completion {row} "
            f"by reward function {column}"
        )
    return array


def total_rewards(rewards, num_generations, weights=None):
    """Computes weighted sums of rewards, float64 `(groups, num_generations)`.

    A function that did not score a completion adds 0; a completion that none
    scored has NaN. For the arguments see `Advantages`.
    """
    matrix = reward_matrix(rewards, num_generations)
    weights = _weights(weights, matrix.shape[1])
    total = np.nansum(matrix * weights, axis=1)
    total[np.isnan(matrix).all(axis=1)] = np.nan
    return total.reshape(-1, num_generations)


def _weights(weights, count):
    weights = np.ones(count) if weights is None else np.asarray(weights, float)
    if weights.shape != (count,) or not np.isfinite(weights).all():
        raise ValueError(
            "`weights` must have one finite number for each of the "
            f"{count} reward functions. Received: weights={weights.tolist()}"
        )
    return weights


def centred(values, axis=None):
    """Subtracts the mean along an axis, ignoring NaN.

    The result is exactly 0 if all values are equal, so that rounding never
    becomes an update.
    """
    scored = ~np.isnan(values)
    count = scored.sum(axis, keepdims=True)
    mean = np.nansum(values, axis, keepdims=True) / np.maximum(count, 1)
    return np.where(constant(values, axis), values * 0.0, values - mean)


def standard_deviation(values, axis=None):
    """Computes the Bessel-corrected deviation, keeping the axis.

    NaN is ignored. The result is exactly 0 for equal values or a single one.
    """
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum(centred(values, axis) ** 2, axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def constant(values, axis=None):
    """Tests if all values but NaN are equal, keeping the axis."""
    low = np.where(np.isnan(values), np.inf, values).min(axis, keepdims=True)
    high = np.where(np.isnan(values), -np.inf, values).max(axis, keepdims=True)
    return low >= high


def reward_metrics(rewards, num_generations, weights=None, names=None):
    """Computes statistics of a batch of rewards, under TRL's names.

    The arguments are those of `Advantages`, and the functions' `names`,
    `reward_0` and so on by default.

    Returns:
        A dict of floats: `rewards/<name>/mean` and `/std` of each function
        (omitted if it scored no completion), `reward` and
        `reward_std` of the weighted sums over the batch, and
        `frac_reward_zero_std`, the share of groups whose rewards are all
        equal. (With advantages scaled by the batch, TRL tests the batch
        instead of the groups and reports 0.)
    """
    matrix = reward_matrix(rewards, num_generations)
    names = names or [f"reward_{i}" for i in range(matrix.shape[1])]
    groups = total_rewards(rewards, num_generations, weights)
    metrics = {}
    columns = {f"rewards/{n}/": c for n, c in zip(names, matrix.T)}
    for prefix, values in columns.items():
        if not np.isnan(values).all():
            metrics[prefix + "mean"] = float(np.nanmean(values))
            metrics[prefix + "std"] = standard_deviation(values).item()
    scored = ~np.isnan(groups)
    if scored.any():
        metrics["reward"] = float(groups[scored].mean())
        metrics["reward_std"] = standard_deviation(groups).item()
    equal = constant(groups, 1)[:, 0] & scored.any(1)
    metrics["frac_reward_zero_std"] = float(equal.mean())
    return metrics


def reward_metric_names(names):
    """Returns what `reward_metrics` reports of functions with these names."""
    return tuple(reward_metrics(np.zeros((1, len(names))), 1, names=names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages:
    """Base class of advantages: settings over a function of rewards.

    Call arguments:
        rewards: floats of shape `(sequences,)` or `(sequences, functions)`,
            the completions of one prompt next to each other; `None` or NaN
            where a function did not score.
        num_generations: int, completions per prompt.
        weights: floats of shape `(functions,)`, 1 by default.

    Returns:
        A float32 array of shape `(sequences,)`: 0 for a completion that no
        function scored, which is excluded from all means.
    """

    # The minimum number of completions per prompt.
    min_generations = 2

    def of_groups(self, groups):
        """Computes advantages of total rewards, `(groups, num_generations)`.

        The result, of that shape, is arbitrary where a reward is NaN.
        """
        raise NotImplementedError

    def __call__(self, rewards, num_generations, weights=None):
        self.check(num_generations)
        groups = total_rewards(rewards, num_generations, weights)
        return self.finish(self.of_groups(groups))

    def check(self, num_generations):
        if num_generations < self.min_generations:
            raise ValueError(
                f"{self!r} compares the completions of a prompt and needs at "
                f"least {self.min_generations} of each. Received: "
                f"num_generations={num_generations}"
            )

    def finish(self, advantages):
        advantages = np.where(np.isnan(advantages), 0.0, advantages)
        return advantages.reshape(-1).astype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupAdvantages(Advantages):
    """A reward minus the mean of its group, over a standard deviation.

    The paper scales by the group's standard deviation. It specifies neither
    Bessel's correction (used here, in TRL and in Tunix) nor the offset that
    is added (1e-4 here and in TRL, 1e-6 in Tunix).

    Args:
        scale: `"group"`; `"batch"`, the standard deviation over all
            completions, which does not amplify nearly equal rewards; or
            `"none"`, as in Dr. GRPO.
        std_offset: float, added to the standard deviation.

    References:
        - [Shao et al., 2024](https://arxiv.org/abs/2402.03300), group.
        - [Liu et al., 2025](https://arxiv.org/abs/2508.08221), batch.
        - [Liu et al., 2025](https://arxiv.org/abs/2503.20783), none.

    Example:

    ```python
    advantages = kpt.losses.GroupAdvantages(scale="none")
    advantages([1.0, 0.0, 0.0, 1.0], num_generations=4)
    # [0.5, -0.5, -0.5, 0.5]
    ```
    """

    scale: str = "group"
    std_offset: float = 1e-4

    def __post_init__(self):
        check_types(self)
        if self.scale not in SCALES:
            raise ValueError(
                f"`scale` must be one of {', '.join(SCALES)}. Received: "
                f"scale={self.scale!r}"
            )

    def of_groups(self, groups):
        advantages = centred(groups, 1)
        if self.scale == "none":
            return advantages
        axis = 1 if self.scale == "group" else None
        std = standard_deviation(groups, axis)
        return advantages / (std + self.std_offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaveOneOutAdvantages(Advantages):
    """A reward minus the mean of the others of its group (RLOO).

    With a reference, RLOO has the KL term in the reward: `beta` times the
    call argument `kl` is subtracted after the clip. TRL's default `beta` is
    0.05.

    Args:
        beta: float, the weight of `kl`.
        reward_clip_range: pair of floats or `None`, the range to clip
            total rewards to.
        normalize: bool, whether to normalise the advantages to mean 0 and
            standard deviation 1 over the batch.
        std_offset: float, added to that standard deviation.

    Call arguments:
        kl: floats of shape `(sequences,)`: of each completion, the sum over
            its tokens of `old_per_token_logps - ref_per_token_logps`, in
            nats. Needed with `beta`.

    Reference:
        - [Ahmadian et al., 2024](https://arxiv.org/abs/2402.14740).

    Example:

    ```python
    advantages = kpt.losses.LeaveOneOutAdvantages()
    advantages([1.0, 0.0, 0.0, 1.0], num_generations=4)
    # [0.6667, -0.6667, -0.6667, 0.6667]
    task.compile(advantages=advantages, rewards=[correct])
    ```
    """

    beta: float = 0.0
    reward_clip_range: tuple | None = None
    normalize: bool = False
    std_offset: float = 1e-4

    def __post_init__(self):
        check_types(self)
        if self.reward_clip_range is None:
            return
        pair = np.asarray(self.reward_clip_range)
        sound = pair.shape == (2,) and pair.dtype.kind in "if"
        if not sound or not pair[0] < pair[1]:
            raise ValueError(
                "`reward_clip_range` must be (low, high) with low < high. "
                f"Received: reward_clip_range={self.reward_clip_range}"
            )

    def __call__(self, rewards, num_generations, weights=None, kl=None):
        self.check(num_generations)
        groups = total_rewards(rewards, num_generations, weights)
        if self.reward_clip_range is not None:
            groups = np.clip(groups, *self.reward_clip_range)
        if self.beta:
            groups = groups - self.beta * _penalty(kl, groups, self.beta)
        return self.finish(self.of_groups(groups))

    def of_groups(self, groups):
        count = (~np.isnan(groups)).sum(1, keepdims=True)
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        advantages = centred(groups, 1) * count / np.maximum(count - 1, 1)
        if not self.normalize:
            return advantages
        # Their mean over the batch is already 0.
        return advantages / (standard_deviation(advantages) + self.std_offset)


def _penalty(kl, groups, beta):
    kl = None if kl is None else np.asarray(kl, dtype="float64")
    if kl is None or kl.size != groups.size:
        received = None if kl is None else f"an array of shape {kl.shape}"
        raise ValueError(
            f"`kl` must have one number for each of the {groups.size} "
            f"completions where beta is not 0. Received: kl={received}, "
            f"beta={beta}"
        )
    return kl.reshape(groups.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDPOAdvantages(Advantages):
    """Rewards normalised per function before they are summed.

    If the sum were normalised instead, the function with the largest spread
    would dominate. Each function is normalised within the group, then the
    functions are summed with `weights`, and the sum is normalised over the
    batch.

    Args:
        std_offset: float, added to the standard deviations.

    Reference:
        - [Liu et al., 2026](https://arxiv.org/abs/2601.05242).

    Example:

    ```python
    advantages = kpt.losses.GDPOAdvantages()
    rewards = [[1.0, 90.0], [0.0, 10.0]]  # two functions
    advantages(rewards, num_generations=2)  # [0.7071, -0.7071]
    task.compile(advantages=advantages, rewards=[correct])
    ```
    """

    std_offset: float = 1e-4

    def __call__(self, rewards, num_generations, weights=None):
        self.check(num_generations)
        matrix = reward_matrix(rewards, num_generations)
        groups = matrix.reshape(-1, num_generations, matrix.shape[1])
        std = standard_deviation(groups, 1)
        scaled = centred(groups, 1) / (std + self.std_offset)
        scaled = total_rewards(
            scaled.reshape(matrix.shape), num_generations, weights
        )
        return self.finish(self.of_groups(scaled))

    def of_groups(self, groups):
        # Each function's sum over a group is 0, so the batch mean is too.
        return groups / (standard_deviation(groups) + self.std_offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusAdvantages(Advantages):
    """Rewards normalised over the whole batch (REINFORCE++).

    Meant for `PPOLoss`, with the KL term there: `kl_estimator="k2"` is what
    the paper uses with the baseline. Mean and standard deviation are over
    completions; the authors' code computes them over tokens, which gives
    long completions more weight.

    Args:
        baseline: bool, whether to subtract the mean of the group first
            ("REINFORCE++-baseline", for several completions a prompt).
        std_offset: float, added to the standard deviation.

    Reference:
        - [Hu et al., 2025](https://arxiv.org/abs/2501.03262).

    Example:

    ```python
    advantages = kpt.losses.ReinforcePlusPlusAdvantages()
    advantages([1.0, 0.0, 0.0, 1.0], num_generations=2)
    # [0.866, -0.866, -0.866, 0.866]
    task.compile(advantages=advantages, rewards=[correct])
    ```
    """

    baseline: bool = False
    std_offset: float = 1e-8

    @property
    def min_generations(self):
        return 2 if self.baseline else 1

    def of_groups(self, groups):
        # After centering by group the batch mean is already 0.
        advantages = centred(groups, 1 if self.baseline else None)
        return advantages / (standard_deviation(advantages) + self.std_offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtKAdvantages(Advantages):
    """The contribution of a completion to the best of `k`.

    The reward of a set of `k` completions is the maximum of their rewards.
    A completion's advantage is the mean over all sets of its group that
    contain it, minus the mean over all sets, divided by their standard
    deviation, in closed form. With rewards 0 and 1 this is pass@k, the
    paper's formula. A group with fewer than `k` scored completions has zero
    advantages.

    Args:
        k: int, the size of a set; at least 2 and at most `num_generations`.

    Reference:
        - [Chen et al., 2025](https://arxiv.org/abs/2508.10751).

    Example:

    ```python
    advantages = kpt.losses.PassAtKAdvantages(k=2)
    advantages([1.0, 0.0, 0.0, 0.0], num_generations=4)
    # [1.0, -0.3333, -0.3333, -0.3333]
    task.compile(advantages=advantages, rewards=[correct])
    ```
    """

    k: int

    def __post_init__(self):
        check_types(self)
        if self.k < 2:
            raise ValueError(
                "`k` must be 2 or more: the best of one is the reward "
                "itself, for which there is `GroupAdvantages`. Received: "
                f"k={self.k}"
            )

    @property
    def min_generations(self):
        return self.k

    def of_groups(self, groups):
        return np.stack([self._of_group(group) for group in groups])

    def _of_group(self, rewards):
        advantages = np.zeros(len(rewards))
        scored = np.flatnonzero(~np.isnan(rewards))
        n, k = len(scored), self.k
        order = scored[np.argsort(rewards[scored], kind="stable")]
        values = rewards[order]
        # All sets, if any, have the same maximum.
        if n < k or values[k - 1] == values[-1]:
            return advantages
        # The shares of all sets whose maximum is the i-th smallest value, and
        # of the sets with one given member: the maximum itself, or another
        # member below it.
        sets, with_one = math.comb(n, k), math.comb(n - 1, k - 1)
        chosen = [math.comb(i, k - 1) for i in range(n)]
        best = np.array([c / sets for c in chosen])
        own = np.array([c / with_one for c in chosen])
        other = [math.comb(max(i - 1, 0), k - 2) / with_one for i in range(n)]
        mean = np.sum(best * values)
        std = np.sqrt(np.sum(best * (values - mean) ** 2))
        above = np.cumsum((other * values)[::-1])[::-1]
        above = np.append(above[1:], 0.0)
        advantages[order] = (own * values + above - mean) / std
        return advantages
