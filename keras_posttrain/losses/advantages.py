"""From rewards to advantages: NumPy on the host, where rewards are few.

Every kind here is called as `kind(rewards, num_generations, weights=None)`.
A reward that is `None` or NaN says that its function did not judge that
completion.
"""

import dataclasses
import math

import numpy as np

SCALES = ("group", "batch", "none")


def reward_matrix(rewards, num_generations):
    """Rewards as an array, checked.

    Args:
        rewards: floats of shape `(sequences,)`, `(sequences, functions)`:
            the completions of one prompt are neighbours. `None` and NaN
            mean not judged.
        num_generations: int, completions a prompt.

    Returns:
        A float64 array of shape `(sequences, functions)`, NaN where not
        judged.

    Raises:
        ValueError: for another shape, an infinite reward, or a number of
            completions that is no multiple of `num_generations`.
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
            f"judged. Received: {array[row, column]} for completion {row} "
            f"by reward function {column}"
        )
    return array


def total_rewards(rewards, num_generations, weights=None):
    """One reward a completion: the weighted sum over reward functions.

    A function that did not judge adds nothing, which is a reward of 0; a
    completion that none judged has NaN.

    Args:
        rewards: floats of shape `(sequences,)` or `(sequences, functions)`.
        num_generations: int, completions a prompt.
        weights: floats of shape `(functions,)`, 1 by default.

    Returns:
        A float64 array of shape `(groups, num_generations)`.
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
    """`values` less their mean along an axis: exactly 0 where all are equal,
    so that rounding never becomes an update. NaN is left out and stays."""
    judged = ~np.isnan(values)
    count = judged.sum(axis, keepdims=True)
    mean = np.nansum(values, axis, keepdims=True) / np.maximum(count, 1)
    return np.where(constant(values, axis), values * 0.0, values - mean)


def standard_deviation(values, axis=None):
    """With Bessel's correction, the axis kept; NaN is left out. Exactly 0
    where all values are equal or there is but one."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum(centred(values, axis) ** 2, axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def constant(values, axis=None):
    """Whether all values but NaN are equal along an axis, which is kept."""
    low = np.where(np.isnan(values), np.inf, values).min(axis, keepdims=True)
    high = np.where(np.isnan(values), -np.inf, values).max(axis, keepdims=True)
    return low >= high


def reward_metrics(rewards, num_generations, weights=None, names=None):
    """What a batch of rewards is like, under TRL's names.

    Args:
        rewards: floats of shape `(sequences,)` or `(sequences, functions)`.
        num_generations: int, completions a prompt.
        weights: floats of shape `(functions,)`, 1 by default.
        names: list of str, the functions' names; `reward_0` and so on by
            default.

    Returns:
        A dict of floats: `rewards/<name>/mean` and `/std` of what each
        function judged (left out where it judged nothing), `reward` and
        `reward_std` of the weighted sums over the batch, and
        `frac_reward_zero_std`, the share of groups whose rewards are all
        equal. (TRL asks the batch instead of the groups where advantages
        are scaled by the batch, and then reports 0.)
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
    judged = ~np.isnan(groups)
    if judged.any():
        metrics["reward"] = float(groups[judged].mean())
        metrics["reward_std"] = standard_deviation(groups).item()
    equal = constant(groups, 1)[:, 0] & judged.any(1)
    metrics["frac_reward_zero_std"] = float(equal.mean())
    return metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advantages:
    """What every kind of advantage is: its settings, and a function.

    Call arguments:
        rewards: floats of shape `(sequences,)` or `(sequences, functions)`,
            the completions of one prompt next to each other; `None` or NaN
            where a function did not judge.
        num_generations: int, completions a prompt.
        weights: floats of shape `(functions,)`, 1 by default.

    Returns:
        A float32 array of shape `(sequences,)`: 0 for a completion that no
        function judged, which takes no part in any mean either.
    """

    # The fewest completions a prompt that give an advantage at all.
    min_generations = 2

    def of_groups(self, groups):
        """Advantages of total rewards `(groups, num_generations)`, of the
        same shape; anything where a reward is NaN."""
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
    """A reward less the mean of its group, over a standard deviation.

    The paper's scale is the group's standard deviation; it says neither
    whether that is Bessel corrected (it is, here and in TRL and Tunix) nor
    what is added to it (1e-4 here and in TRL, 1e-6 in Tunix).

    Args:
        scale: `"group"`; `"batch"`, the standard deviation over all
            completions, which does not blow up nearly equal rewards; or
            `"none"`, as Dr. GRPO has it.
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
    """A reward less the mean of the others of its group (RLOO).

    With a reference, RLOO has its KL term in the reward: `kl` of the call is
    subtracted `beta` times, after the clip. TRL's default `beta` is 0.05.

    Args:
        beta: float, the weight of `kl`.
        reward_clip_range: pair of floats or `None`: total rewards are kept
            within it.
        normalize: bool, whether advantages are then shifted and scaled to
            mean 0 and standard deviation 1 over the batch.
        std_offset: float, added to that standard deviation.

    Call arguments:
        kl: floats of shape `(sequences,)`: of each completion, the sum over
            its tokens of `old_per_token_logps - ref_per_token_logps`, in
            nats. Needed with `beta`.

    Reference:
        - [Ahmadian et al., 2024](https://arxiv.org/abs/2402.14740).
    """

    beta: float = 0.0
    reward_clip_range: tuple | None = None
    normalize: bool = False
    std_offset: float = 1e-4

    def __post_init__(self):
        if self.reward_clip_range is None:
            return
        low, high = self.reward_clip_range
        if low >= high:
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
        # Their mean over the batch is 0 as they are.
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
    """Every reward function normalised by itself, then added up.

    A sum that is normalised afterwards lets the function with the largest
    spread drown the others. Here each is shifted and scaled within the
    group, then they are summed with `weights`, and the sum is shifted and
    scaled over the batch.

    Args:
        std_offset: float, added to the standard deviations.

    Reference:
        - [Liu et al., 2026](https://arxiv.org/abs/2601.05242).
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
        # Each function's sum over a group is 0, and so is the batch's mean.
        return groups / (standard_deviation(groups) + self.std_offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusAdvantages(Advantages):
    """Rewards normalised over the whole batch (REINFORCE++).

    Meant for `PPOLoss`, with the KL term there: `kl_estimator="k2"` is what
    the paper uses with the baseline. Mean and standard deviation are over
    completions; the authors' code takes them over tokens, where long
    completions count for more.

    Args:
        baseline: bool, whether the mean of the group is subtracted first
            ("REINFORCE++-baseline", for several completions a prompt).
        std_offset: float, added to the standard deviation.

    Reference:
        - [Hu et al., 2025](https://arxiv.org/abs/2501.03262).
    """

    baseline: bool = False
    std_offset: float = 1e-8

    @property
    def min_generations(self):
        return 2 if self.baseline else 1

    def of_groups(self, groups):
        # Less the means of groups, the mean of the batch is 0 already.
        advantages = centred(groups, 1 if self.baseline else None)
        return advantages / (standard_deviation(advantages) + self.std_offset)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtKAdvantages(Advantages):
    """What a completion adds to the best of `k`.

    The reward is that of a set of `k` completions, its best one's. Each
    completion's advantage is the mean over all sets of its group that it is
    in, less the mean over all sets, over their standard deviation: all in
    closed form. With rewards 0 and 1 this is pass@k, and the paper's formula.

    A group in which fewer than `k` completions are judged has no advantages.

    Args:
        k: int, the size of a set; at least 2 and at most `num_generations`.

    Reference:
        - [Chen et al., 2025](https://arxiv.org/abs/2508.10751).
    """

    k: int

    def __post_init__(self):
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
        judged = np.flatnonzero(~np.isnan(rewards))
        n, k = len(judged), self.k
        order = judged[np.argsort(rewards[judged], kind="stable")]
        values = rewards[order]
        # Every set has the same best one, where there is a set.
        if n < k or values[k - 1] == values[-1]:
            return advantages
        # The shares of all sets whose best is the i-th from below, and of
        # the sets with one given member: itself, or another one below it.
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
