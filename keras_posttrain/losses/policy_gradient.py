"""Policy-gradient losses: pure functions and the classes over them.

A function gives the loss of each token. Its class adds what `PolicyLoss`
offers (masks, a correction, a KL term, an entropy bonus) and defines the mean
over tokens and completions.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from keras_posttrain.losses import importance
from keras_posttrain.losses.loss import check
from keras_posttrain.losses.policy_base import PolicyLoss, sequence_count

CLIP_METRICS = (
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
)


def ppo_loss(
    log_ratios, advantages, epsilon=0.2, epsilon_high=None, delta=None
):
    """Computes PPO's clipped policy loss of each token.

    `-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)` with
    `r = exp(log_ratios)`: moving the ratio beyond the clip gains nothing.

    Args:
        log_ratios: float array of any shape, such as `(rows, length)`:
            `log(policy / old policy)` of each token.
        advantages: float array of the same shape.
        epsilon: float, how far the ratio may fall below 1.
        epsilon_high: float, how far the ratio may rise above 1, or `None`
            for the value of `epsilon`.
        delta: float above 1, the ratio at which the loss of a negative
            advantage stops growing ("dual clip"; the paper's is 3), or
            `None` for no bound.

    Returns:
        A float array of the same shape.

    References:
        - [Schulman et al., 2017](https://arxiv.org/abs/1707.06347), the clip.
        - [Ye et al., 2019](https://arxiv.org/abs/1912.09729), the dual clip.

    Example:

    ```python
    log_ratios = np.log([1.5, 0.5])
    kpt.losses.ppo_loss(log_ratios, np.array([1.0, 1.0]))  # [-1.2, -0.5]
    ```
    """
    high = epsilon if epsilon_high is None else epsilon_high
    ratios = jnp.exp(log_ratios)
    clipped = jnp.clip(ratios, 1 - epsilon, 1 + high)
    if delta is not None:
        ratios = jnp.minimum(ratios, delta)
    return -jnp.minimum(ratios * advantages, clipped * advantages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """Base class of the policy losses with PPO's clip, as in `PPOLoss`."""

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    own_metrics = CLIP_METRICS

    def __post_init__(self):
        super().__post_init__()
        check(self, "epsilon", 0 < self.epsilon < 1, "between 0 and 1")
        high = self.epsilon_high is None or self.epsilon_high > 0
        check(self, "epsilon_high", high, "more than 0, or None")
        delta = self.delta is None or self.delta > 1
        check(self, "delta", delta, "more than 1, or None")

    def surrogate(self, tokens, log_ratios):
        losses = ppo_loss(
            log_ratios,
            tokens.advantages,
            self.epsilon,
            self.epsilon_high,
            self.delta,
        )
        high = self.epsilon_high
        metrics = clip_metrics(
            tokens,
            log_ratios,
            1 - self.epsilon,
            1 + (self.epsilon if high is None else high),
            self.importance_sampling_level == "sequence",
        )
        return losses, metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOLoss(ClippedLoss):
    """Proximal policy optimisation: the clipped policy objective.

    `ppo_loss` of each token, averaged over all tokens, with one advantage
    per token (`(rows, length)`) as `generalized_advantages` computes it.
    `epsilon` 0.2 is the paper's. The value function has a separate loss,
    `ValueLoss`.

    Args:
        epsilon, epsilon_high, delta: see `ppo_loss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Example:

    ```python
    loss = kpt.losses.PPOLoss(epsilon=0.2)
    loss(policy_batch, policy_outputs)[0]  # -0.1
    task.compile(loss=loss, rewards=[correct])
    ```
    """


def grpo_loss(
    logps,
    old_logps,
    advantages,
    ref_logps=None,
    *,
    beta=0.04,
    kl_estimator="k3",
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
):
    """Computes GRPO's loss of each token: PPO's clip plus a KL term.

    `ppo_loss(log(policy / old policy), A) + beta * KL(policy || reference)`.
    The classes divide the sum over tokens differently: `GRPOLoss` averages
    over each completion's tokens, then over completions; `DAPOLoss` and
    `BNPOLoss` over all tokens; `DrGRPOLoss` divides by a constant.

    Args:
        logps: float array of any shape, such as `(rows, length)`:
            log-probabilities of the sampled tokens under the policy, in
            nats.
        old_logps: float array of the same shape, under the policy that
            sampled.
        advantages: float array of the same shape: each token has the
            advantage of its completion.
        ref_logps: float array of the same shape, under the reference policy.
            Needed unless `beta` is 0.
        beta: float, the weight of the KL term.
        kl_estimator: `"k1"`, `"k2"`, `"k3"` or `"k3_corrected"`: see
            `PolicyLoss`.
        epsilon, epsilon_high, delta: see `ppo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Shao et al., 2024](https://arxiv.org/abs/2402.03300).

    Example:

    ```python
    logps = np.log([0.75, 0.25])
    old_logps = np.log([0.5, 0.5])
    advantages = np.array([1.0, 1.0])
    kpt.losses.grpo_loss(logps, old_logps, advantages, beta=0.0)
    # [-1.2, -0.5]
    ```
    """
    log_ratios = importance.bounded(logps - old_logps)
    losses = ppo_loss(log_ratios, advantages, epsilon, epsilon_high, delta)
    if beta:
        kl = importance.kl_estimate(logps, ref_logps, kl_estimator)
        if kl_estimator == "k3_corrected":
            kl = kl * jnp.exp(log_ratios)
        losses = losses + beta * kl
    return losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOLoss(ClippedLoss):
    """Group relative policy optimisation.

    `grpo_loss` of each token, averaged over the tokens of each completion,
    then over completions. Meant for `GroupAdvantages()`, one advantage per
    completion.

    The defaults are the paper's: `beta` 0.04 with the k3 estimator. The
    paper does not give `epsilon`; 0.2 is PPO's and the usual choice. TRL
    calls this `loss_type="grpo"`; its own defaults are `beta=0`, the mean
    over all tokens (`DAPOLoss(epsilon_high=0.2)` here) and, with a KL term,
    `"k3_corrected"`. Tunix estimates the KL with k1, whose expected gradient
    as a term of a loss is 0.

    Args:
        epsilon, epsilon_high, delta: see `ppo_loss`.
        importance_sampling_level: `"token"`, or `"sequence"`: the tokens of
            a sequence share the geometric mean of their ratios.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Example:

    ```python
    loss = kpt.losses.GRPOLoss(epsilon=0.2, beta=0.0)
    batch = {
        "segment_ids": np.array([[1, 1, 1], [1, 1, 1]]),
        "sequence_mask": np.ones((2, 1)),
        "completion_mask": np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        "advantages": np.array([[1.0], [-1.0]]),
        "old_per_token_logps": np.log([[1.0, 0.5, 0.5], [1.0, 0.5, 0.5]]),
    }
    outputs = {
        "per_token_logps": np.log([[1.0, 0.5, 0.75], [1.0, 0.5, 0.25]]),
    }
    value, metrics = loss(batch, outputs)
    # value is -(1 + 1.2) / 4 + (1 + 0.8) / 4
    ```
    """

    beta: float = 0.04
    importance_sampling_level: str = "token"

    def token_weights(self, tokens):
        return tokens.sequence_mean_weights()

    def count(self, batch):
        return sequence_count(batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPOLoss(ClippedLoss):
    """GRPO without its length bias ("done right").

    `grpo_loss` of each token, summed over all tokens and divided by the
    number of completions times `max_completion_length`, so that a token has
    the same weight in short and long completions. Meant for
    `GroupAdvantages(scale="none")`. The paper uses no KL term.

    TRL computes the same. Tunix divides by the width of the padded batch
    instead of `max_completion_length`. For the other arguments see
    `GRPOLoss`.

    Args:
        max_completion_length: int or `None`, the maximum number of tokens
            of a completion. With `None` the task sets it; a loss that is
            called without a task needs it.

    Reference:
        - [Liu et al., 2025](https://arxiv.org/abs/2503.20783).

    Example:

    ```python
    loss = kpt.losses.DrGRPOLoss(max_completion_length=4)
    loss(policy_batch, policy_outputs)[0]  # -0.05
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    importance_sampling_level: str = "token"
    max_completion_length: int | None = None

    def __post_init__(self):
        super().__post_init__()
        length = self.max_completion_length
        valid = length is None or length > 0
        check(self, "max_completion_length", valid, "more than 0, or None")

    def count(self, batch):
        if self.max_completion_length is None:
            raise ValueError(
                "`DrGRPOLoss` divides by the maximum number of tokens of a "
                "completion. Give it: DrGRPOLoss(max_completion_length=...). "
                "Received: max_completion_length=None"
            )
        return sequence_count(batch) * self.max_completion_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPOLoss(ClippedLoss):
    """Decoupled clip and dynamic sampling policy optimisation.

    `grpo_loss` of each token with a wider clip above 1 than below ("clip
    higher") and no KL term, averaged over all tokens of the batch. The
    defaults are the paper's. Its other parts are placed elsewhere: dynamic
    sampling in the task (`max_resamples`), the soft overlong punishment in
    the rewards. For the arguments see `GRPOLoss`.

    TRL divides by the mean token count of the steps that share a rollout, so
    that a step of long completions has more weight there. This loss divides
    by the token count of the step.

    Reference:
        - [Yu et al., 2025](https://arxiv.org/abs/2503.14476).

    Example:

    ```python
    loss = kpt.losses.DAPOLoss(epsilon=0.2, epsilon_high=0.28)
    loss(policy_batch, policy_outputs)[0]  # -0.12
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    epsilon_high: float | None = 0.28
    importance_sampling_level: str = "token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BNPOLoss(ClippedLoss):
    """The clipped objective of `loss_type="bnpo"` in TRL.

    `grpo_loss` of each token, averaged over all tokens of the batch: the
    same as `DAPOLoss(epsilon_high=None)`. TRL averages within each
    micro-batch and then over micro-batches, so that its result depends on
    how a batch is split; the result of this loss does not. The paper's
    normalisation of binary rewards by a Beta distribution is part of the
    advantages and of neither implementation. For the arguments see
    `GRPOLoss`.

    Reference:
        - [Xiao et al., 2025](https://arxiv.org/abs/2506.02864).

    Example:

    ```python
    loss = kpt.losses.BNPOLoss(epsilon=0.2)
    loss(policy_batch, policy_outputs)[0]  # -0.1
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    importance_sampling_level: str = "token"


def gspo_loss(
    logps,
    old_logps,
    advantages,
    mask,
    segment_ids,
    epsilon=3e-4,
    epsilon_high=4e-4,
    delta=None,
):
    """Computes the loss of each token with one ratio per sequence.

    `ppo_loss(s, A)` where `s` is the mean of `logps - old_logps` over the
    tokens of the sequence, the log of the geometric mean of their ratios.

    Args:
        logps: float array of shape `(rows, length)`: log-probabilities of
            the sampled tokens under the policy, in nats.
        old_logps: float array of the same shape, under the policy that
            sampled.
        advantages: float array of shape `(rows, num_sequences)`.
        mask: float array of shape `(rows, length)`, 1 for the tokens of
            completions and 0 for others.
        segment_ids: int array of shape `(rows, length)`:
            `1 ... num_sequences` for the tokens of a sequence, 0 at padding.
        epsilon, epsilon_high, delta: see `ppo_loss`.

    Returns:
        A float array of shape `(rows, length)`. Values where `mask` is 0
        have no meaning.

    Reference:
        - [Zheng et al., 2025](https://arxiv.org/abs/2507.18071).

    Example:

    ```python
    kpt.losses.gspo_loss(
        np.log([[0.5, 1.0]]),
        np.log([[0.5, 0.25]]),
        np.array([[-1.0]]),
        np.ones((1, 2)),
        np.ones((1, 2), "int32"),
    )  # [[2.0, 2.0]], the square root of 1 * 4
    ```
    """
    batch = {
        "completion_mask": mask,
        "segment_ids": segment_ids,
        "sequence_mask": jnp.ones(advantages.shape),
        "advantages": advantages,
        "old_per_token_logps": old_logps,
    }
    tokens = importance.PolicyTokens.of(batch, {"per_token_logps": logps})
    log_ratios = importance.sequence_log_ratios(tokens)
    return ppo_loss(
        log_ratios, tokens.advantages, epsilon, epsilon_high, delta
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPOLoss(ClippedLoss):
    """Group sequence policy optimisation.

    `gspo_loss`: the ratio of a completion is the geometric mean of its
    tokens' ratios, so that a completion is clipped as one. Averaged over the
    tokens of each completion, then over completions. Such ratios stay close
    to 1, hence the narrow clip of the paper, 3e-4 and 4e-4. The paper uses
    no KL term. Tunix keeps 0.2, which clips almost nothing. For the arguments
    see `PPOLoss`.

    Example:

    ```python
    loss = kpt.losses.GSPOLoss(epsilon=3e-4, epsilon_high=4e-4)
    loss(policy_batch, policy_outputs)[0]  # -0.0003
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    epsilon: float = 3e-4
    epsilon_high: float | None = 4e-4

    importance_sampling_level = "sequence"

    def token_weights(self, tokens):
        return tokens.sequence_mean_weights()

    def count(self, batch):
        return sequence_count(batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPOTokenLoss(ClippedLoss):
    """GSPO with an advantage for each token.

    The value of a token's ratio is that of its completion; its gradient is
    that of the token alone. With one advantage per completion, value and
    gradient equal those of `GSPOLoss`. For the arguments see `PPOLoss`.

    Reference:
        - [Zheng et al., 2025](https://arxiv.org/abs/2507.18071), section 4.3.

    Example:

    ```python
    loss = kpt.losses.GSPOTokenLoss(epsilon=3e-4, epsilon_high=4e-4)
    loss(policy_batch, policy_outputs)[0]  # -0.0003
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    epsilon: float = 3e-4
    epsilon_high: float | None = 4e-4

    importance_sampling_level = "sequence"

    def log_ratios(self, tokens):
        constant = jax.lax.stop_gradient
        value = constant(importance.sequence_log_ratios(tokens))
        return value + tokens.logps - constant(tokens.logps)

    def token_weights(self, tokens):
        return tokens.sequence_mean_weights()

    def count(self, batch):
        return sequence_count(batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LUSPOLoss(ClippedLoss):
    """Length-unbiased sequence policy optimisation.

    `gspo_loss` of each token, summed over the tokens of each completion,
    averaged over completions, so that a token has the same weight in short
    and long completions. The clip is the paper's, 2e-3 and 2.5e-3. TRL also
    accepts token-level ratios, for which the method is not defined; with a
    KL term TRL's sum includes padding. For the arguments see `PPOLoss`.

    Reference:
        - [Liu et al., 2026](https://arxiv.org/abs/2602.05261).

    Example:

    ```python
    loss = kpt.losses.LUSPOLoss(epsilon=0.002)
    loss(policy_batch, policy_outputs)[0]  # -0.0045
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    epsilon: float = 2e-3
    epsilon_high: float | None = 2.5e-3

    importance_sampling_level = "sequence"

    def count(self, batch):
        return sequence_count(batch)


def cispo_loss(logps, log_ratios, advantages, max_ratio=5.0):
    """Computes REINFORCE's loss of each token with a truncated weight.

    `-min(r, max_ratio) A log p` with the constant `r = exp(log_ratios)`. No
    token loses its gradient, unlike with PPO's clip.

    Args:
        logps: float array of any shape, such as `(rows, length)`:
            log-probabilities of the sampled tokens under the policy.
        log_ratios: float array of the same shape, `log(policy / old
            policy)`. No gradient passes through it.
        advantages: float array of the same shape.
        max_ratio: float, the upper bound of the weight.

    Returns:
        A float array of the same shape.

    Reference:
        - [MiniMax, 2025](https://arxiv.org/abs/2506.13585).

    Example:

    ```python
    kpt.losses.cispo_loss(
        np.array([-1.0]), np.log([8.0]), np.array([1.0])
    )  # [5.0]
    ```
    """
    ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
    return -jnp.minimum(ratios, max_ratio) * advantages * logps


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """Clipped importance sampling policy optimisation.

    `cispo_loss` of each token, averaged over all tokens. The paper uses no
    KL term.

    The paper writes the bound as 1 + epsilon_high and does not give it.
    ScaleRL ([Khatri et al., 2025](https://arxiv.org/abs/2510.13786)) uses 4
    to 8; 5 is TRL's recommendation. In TRL `epsilon_high` is the bound itself
    and defaults to `epsilon`, 0.2, which makes every weight 0.2; here the
    bound is a separate setting that must be above 1.

    Args:
        max_ratio: float, the largest weight.
        importance_sampling_level: see `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Example:

    ```python
    loss = kpt.losses.CISPOLoss(max_ratio=5.0)
    loss(policy_batch, policy_outputs)[0]  # -0.0654
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    importance_sampling_level: str = "token"
    max_ratio: float = 5.0

    own_metrics = ("cispo_clip_ratio",)

    def __post_init__(self):
        super().__post_init__()
        wanted = "more than 1 (the bound of the ratio itself)"
        check(self, "max_ratio", self.max_ratio > 1, wanted)

    def surrogate(self, tokens, log_ratios):
        losses = cispo_loss(
            tokens.logps, log_ratios, tokens.advantages, self.max_ratio
        )
        ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
        clipped = (ratios > self.max_ratio) & (tokens.advantages > 0)
        by_sequence = self.importance_sampling_level == "sequence"
        share = _mean_metric(tokens, clipped.astype("float32"), by_sequence)
        return losses, {"cispo_clip_ratio": share}


def sapo_loss(
    log_ratios, advantages, positive_temperature=1.0, negative_temperature=1.05
):
    """Computes a policy loss of each token with a soft gate, not a clip.

    `-4 sigmoid(t (r - 1)) / t * A` with `r = exp(log_ratios)`. Its slope in
    `r` is `-A` on-policy and decays on both sides, faster for larger `t`.

    Args:
        log_ratios, advantages: see `ppo_loss`.
        positive_temperature: float, `t` where the advantage is positive.
        negative_temperature: float, `t` elsewhere.

    Returns:
        A float array of the same shape.

    Reference:
        - [Gao et al., 2025](https://arxiv.org/abs/2511.20347).

    Example:

    ```python
    kpt.losses.sapo_loss(np.zeros(1), np.ones(1))  # [-2.0]
    ```
    """
    temperature = jnp.where(
        advantages > 0, positive_temperature, negative_temperature
    )
    gate = jax.nn.sigmoid(temperature * jnp.expm1(log_ratios))
    return -4.0 * gate / temperature * advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """Soft adaptive policy optimisation.

    `sapo_loss` of each token, averaged over the tokens of each completion,
    then over completions. The temperatures are the paper's, which uses no KL
    term.

    Args:
        positive_temperature, negative_temperature: see `sapo_loss`.
        importance_sampling_level: see `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Example:

    ```python
    loss = kpt.losses.SAPOLoss()
    loss(policy_batch, policy_outputs)[0]  # -0.2923
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    importance_sampling_level: str = "token"
    positive_temperature: float = 1.0
    negative_temperature: float = 1.05

    def __post_init__(self):
        super().__post_init__()
        for name in ("positive_temperature", "negative_temperature"):
            check(self, name, getattr(self, name) > 0, "more than 0")

    def surrogate(self, tokens, log_ratios):
        losses = sapo_loss(
            log_ratios,
            tokens.advantages,
            self.positive_temperature,
            self.negative_temperature,
        )
        return losses, {}

    def token_weights(self, tokens):
        return tokens.sequence_mean_weights()

    def count(self, batch):
        return sequence_count(batch)


def vespo_weights(
    log_w, advantages, k_positive, lambda_positive, k_negative, lambda_negative
):
    """Computes `w**k exp(l (1 - w))`, the weights of `vespo_loss`."""
    positive = advantages >= 0
    k = jnp.where(positive, k_positive, k_negative)
    rate = jnp.where(positive, lambda_positive, lambda_negative)
    return jnp.exp(k * log_w - rate * jnp.expm1(log_w))


def vespo_loss(
    logps,
    log_w,
    advantages,
    k_positive=2.0,
    lambda_positive=3.0,
    k_negative=3.0,
    lambda_negative=2.0,
):
    """Computes REINFORCE's loss of each token with a smooth sequence weight.

    `-phi(w) A log p` with the constant `phi(w) = w**k exp(l (1 - w))` of the
    ratio `w` of the sequence's joint probability under the policy and the
    old policy. `phi` is 1 on-policy and decays smoothly on both sides.

    Args:
        logps, advantages: see `cispo_loss`.
        log_w: float array of the same shape: each token has the sum of the
            log-ratios of its sequence. No gradient passes through it.
        k_positive, lambda_positive: floats, `k` and `l` where the advantage
            is 0 or more.
        k_negative, lambda_negative: floats, where it is negative.

    Returns:
        A float array of the same shape.

    Reference:
        - [Shen et al., 2026](https://arxiv.org/abs/2602.10693).

    Example:

    ```python
    kpt.losses.vespo_loss(
        np.array([-1.0]), np.log([2.0]), np.array([1.0])
    )  # [0.1991], 2**2 * exp(-3)
    ```
    """
    settings = (k_positive, lambda_positive, k_negative, lambda_negative)
    log_w = jax.lax.stop_gradient(log_w)
    phi = vespo_weights(log_w, advantages, *settings)
    return -phi * advantages * logps


@dataclasses.dataclass(frozen=True, kw_only=True)
class VESPOLoss(PolicyLoss):
    """Variational sequence-level soft policy optimisation.

    `vespo_loss` of each token, averaged over all tokens. `correction` is
    part of the ratio `w`, not a factor of the loss: `w` is then the ratio of
    the policy to the engine that sampled. The defaults are the paper's,
    which uses no KL term.

    Args:
        k_positive, lambda_positive, k_negative, lambda_negative: see
            `vespo_loss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Example:

    ```python
    loss = kpt.losses.VESPOLoss()
    loss(policy_batch, policy_outputs)[0]  # -0.0535
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    own_metrics = ("vespo/phi_seq_mean",)

    def __post_init__(self):
        super().__post_init__()
        for side in ("positive", "negative"):
            for name in (f"k_{side}", f"lambda_{side}"):
                check(self, name, getattr(self, name) >= 0, "0 or more")

    @property
    def by_sequence(self):
        return True

    def surrogate(self, tokens, log_ratios):
        log_w = tokens.sequence_sum(jax.lax.stop_gradient(log_ratios))
        if self.correction is not None:
            log_w = log_w + self.correction.sequence_log_weights(tokens)
        log_w = tokens.spread(jnp.clip(log_w, math.log(1e-8), 20.0))
        settings = (
            self.k_positive,
            self.lambda_positive,
            self.k_negative,
            self.lambda_negative,
        )
        losses = vespo_loss(tokens.logps, log_w, tokens.advantages, *settings)
        phi = vespo_weights(log_w, tokens.advantages, *settings)
        # The weight of a completion without tokens is 1: it is on-policy.
        filled = tokens.sequence_sum(jnp.ones_like(tokens.mask)) > 0
        mean = jnp.where(filled, tokens.sequence_mean(phi), 1.0)
        return losses, {"vespo/phi_seq_mean": tokens.sequence_metric(mean)}

    def correction_weights(self, tokens):
        return jnp.ones_like(tokens.mask)


def reinforce_loss(logps, advantages):
    """Computes REINFORCE's loss of each token, `-A log p`.

    Args:
        logps, advantages: see `cispo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Williams, 1992](https://doi.org/10.1007/BF00992696).

    Example:

    ```python
    kpt.losses.reinforce_loss(np.array([-1.0]), np.array([2.0]))  # [2.0]
    ```
    """
    return -advantages * logps


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """REINFORCE: advantage times log-probability of the completion.

    `reinforce_loss` of each token, summed over the tokens of each
    completion, averaged over completions. With `LeaveOneOutAdvantages()` it
    is RLOO. It assumes on-policy samples. For several updates per rollout
    give `epsilon`: then each completion has one `ppo_loss` of the ratio of
    its joint probability, as in TRL's `RLOOTrainer` (with 0.2; on-policy the
    gradient is the same).

    Args:
        epsilon: float, or `None` for no ratio and no clip.
        epsilon_high: float, or `None` for the value of `epsilon`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.
            RLOO has the KL term in the reward instead: see
            `LeaveOneOutAdvantages`.

    References:
        - [Williams, 1992](https://doi.org/10.1007/BF00992696).
        - [Ahmadian et al., 2024](https://arxiv.org/abs/2402.14740), RLOO.

    Example:

    ```python
    loss = kpt.losses.ReinforceLoss()
    loss(policy_batch, policy_outputs)[0]  # -0.5493
    task.compile(loss=loss, rewards=[correct])
    ```
    """

    epsilon: float | None = None
    epsilon_high: float | None = None

    def __post_init__(self):
        super().__post_init__()
        valid = self.epsilon is None or 0 < self.epsilon < 1
        check(self, "epsilon", valid, "between 0 and 1, or None")
        high = self.epsilon_high
        valid = high is None or (self.epsilon is not None and high > 0)
        wanted = "more than 0 and go with an `epsilon`, or None"
        check(self, "epsilon_high", valid, wanted)

    @property
    def own_metrics(self):
        return () if self.epsilon is None else CLIP_METRICS

    @property
    def by_sequence(self):
        return super().by_sequence or self.epsilon is not None

    def surrogate(self, tokens, log_ratios):
        if self.epsilon is None:
            return reinforce_loss(tokens.logps, tokens.advantages), {}
        ratios = tokens.logps - tokens.old_logps
        ratios = importance.bounded(tokens.sequence_sum(ratios))
        ratios = tokens.spread(ratios)
        high = self.epsilon_high
        high = self.epsilon if high is None else high
        losses = ppo_loss(ratios, tokens.advantages, self.epsilon, high)
        # The ratio is that of all tokens: each token gets an equal share of
        # the completion's single loss.
        length = tokens.spread(tokens.sequence_sum(jnp.ones_like(tokens.mask)))
        metrics = clip_metrics(
            tokens, ratios, 1 - self.epsilon, 1 + high, True
        )
        return losses / jnp.maximum(length, 1.0), metrics

    def count(self, batch):
        return sequence_count(batch)


def clip_metrics(tokens, log_ratios, low, high, by_sequence):
    """Computes the shares of tokens whose gradient a clip removed.

    These are the shares with ratios below `low` and a negative advantage and
    above `high` and a positive one, and the minimum and maximum of these
    shares over single sequences, or segments of trajectories that have
    several. `by_sequence` counts sequences instead.
    """
    ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
    below = ((ratios < low) & (tokens.advantages < 0)).astype("float32")
    above = ((ratios > high) & (tokens.advantages > 0)).astype("float32")
    filled = tokens.sequence_sum(jnp.ones_like(tokens.mask)) > 0
    least = jnp.where(filled, tokens.sequence_mean(below), jnp.inf)
    largest = jnp.where(filled, tokens.sequence_mean(above), -jnp.inf)
    return {
        "clip_ratio/low_mean": _mean_metric(tokens, below, by_sequence),
        "clip_ratio/low_min": ("min", least.min()),
        "clip_ratio/high_mean": _mean_metric(tokens, above, by_sequence),
        "clip_ratio/high_max": ("max", largest.max()),
        "clip_ratio/region_mean": _mean_metric(
            tokens, below + above, by_sequence
        ),
    }


def _mean_metric(tokens, values, by_sequence):
    if by_sequence:
        return tokens.sequence_metric(tokens.sequence_mean(values))
    return tokens.mean_metric(values)
