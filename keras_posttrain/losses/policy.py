"""Policy-gradient losses: from advantages and log-probabilities to one
number."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from keras_posttrain.losses import importance
from keras_posttrain.losses.policy_loss import (
    CLIP_METRICS,
    ClippedLoss,
    LevelledLoss,
    PolicyLoss,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    check,
    clip_metrics,
    clipped_surrogate,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOLoss(SequenceMean, LevelledLoss, ClippedLoss):
    """Group relative policy optimisation.

    PPO's clipped objective with one advantage a completion, plus a KL term;
    the mean over a completion's tokens, then over completions. Meant for
    `GroupAdvantages()`.

    The defaults are the paper's: `beta` 0.04 with the k3 estimator (it does
    not give `epsilon`; 0.2 is everybody's). TRL calls this
    `loss_type="grpo"`; its own defaults are `beta=0`, the mean over all
    tokens (`DAPOLoss(epsilon_high=0.2)` here) and, where there is a KL term,
    `"k3_corrected"`. Tunix estimates the KL with k1, whose expected gradient
    as a term of a loss is 0.

    Args:
        epsilon: float, how far the ratio may fall below 1.
        epsilon_high: float or `None`, how far above; as `epsilon`.
        delta: float or `None`, the dual clip.
        importance_sampling_level: `"token"` or `"sequence"`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Shao et al., 2024](https://arxiv.org/abs/2402.03300).

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
    value, metrics = loss(batch, outputs)  # -(1 + 1.2) / 4 + (1 + 0.8) / 4
    ```
    """

    beta: float = 0.04


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPOLoss(LevelledLoss, ClippedLoss):
    """GRPO without its length bias ("done right").

    The sum over all tokens is divided by a constant, the number of
    completions times the longest length allowed, so that a token weighs the
    same in a short and in a long completion. Meant for
    `GroupAdvantages(scale="none")`. The paper uses no KL term.

    TRL and Tunix agree with it but for the constant: Tunix takes the width
    of the padded batch.

    Args:
        max_completion_length: int or `None`, in tokens: the most that a
            completion may have. `None` leaves it to the task, which knows
            it; a loss that is called by itself needs it.
        epsilon, epsilon_high, delta, importance_sampling_level: see
            `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Liu et al., 2025](https://arxiv.org/abs/2503.20783).
    """

    max_completion_length: int | None = None

    def __post_init__(self):
        super().__post_init__()
        length = self.max_completion_length
        sound = length is None or length > 0
        check(self, "max_completion_length", sound, "more than 0, or None")

    def count(self, batch):
        if self.max_completion_length is None:
            raise ValueError(
                "`DrGRPOLoss` divides by the most tokens that a completion "
                "may have. Give it: DrGRPOLoss(max_completion_length=...). "
                "Received: max_completion_length=None"
            )
        sequences = batch["sequence_mask"].astype("float32").sum()
        return sequences * self.max_completion_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPOLoss(LevelledLoss, ClippedLoss):
    """Decoupled clip and dynamic sampling policy optimisation.

    GRPO with more room above 1 than below ("clip higher"), the mean over all
    tokens of the batch, and no KL term. The defaults are the paper's. Its
    other parts live elsewhere: dynamic sampling in the task, the soft
    overlong punishment among the rewards.

    TRL divides by the mean token count of the steps that share a rollout
    instead of this step's own, so that there a step of long completions
    weighs more. This divides by the count of the step.

    Args:
        epsilon, epsilon_high, delta, importance_sampling_level: see
            `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Yu et al., 2025](https://arxiv.org/abs/2503.14476).
    """

    epsilon_high: float | None = 0.28


@dataclasses.dataclass(frozen=True, kw_only=True)
class BNPOLoss(LevelledLoss, ClippedLoss):
    """The clipped objective of `loss_type="bnpo"` in TRL.

    The mean over all tokens of the batch. TRL takes it over each micro-batch
    and then over micro-batches, so that its result depends on how a batch is
    cut; this one's does not, and with one clip for both sides it is
    `DAPOLoss(epsilon_high=None)`. What the paper adds, a normalisation of
    binary rewards by a Beta distribution, belongs to advantages and is in
    neither.

    Args:
        epsilon, epsilon_high, delta, importance_sampling_level: see
            `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Xiao et al., 2025](https://arxiv.org/abs/2506.02864).
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOLoss(ClippedLoss):
    """Proximal policy optimisation: the clipped policy objective.

    The mean over all tokens, with an advantage for each token, as
    generalised advantage estimation gives it (`(rows, length)`). `epsilon`
    0.2 is the paper's. The value function has a loss of its own.

    Args:
        epsilon, epsilon_high, delta: see `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Schulman et al., 2017](https://arxiv.org/abs/1707.06347).
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPOLoss(SequenceMean, SequenceRatio, ClippedLoss):
    """Group sequence policy optimisation.

    The ratio of a whole completion, as the geometric mean of its tokens'
    ratios, is clipped, and with it the completion. Such ratios stay near 1,
    hence the narrow clip: 3e-4 and 4e-4, the paper's, which uses no KL term.
    Tunix keeps 0.2, at which hardly anything is clipped.

    Args:
        epsilon, epsilon_high, delta: see `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Zheng et al., 2025](https://arxiv.org/abs/2507.18071).
    """

    epsilon: float = 3e-4
    epsilon_high: float | None = 4e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPOTokenLoss(GSPOLoss):
    """GSPO whose tokens may have advantages of their own.

    The value of a token's ratio is its completion's, its gradient is the
    token's own. With one advantage a completion it is `GSPOLoss`, value and
    gradient.

    Args:
        epsilon, epsilon_high, delta: see `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Zheng et al., 2025](https://arxiv.org/abs/2507.18071), section 4.3.
    """

    def log_ratios(self, tokens):
        constant = jax.lax.stop_gradient
        value = constant(importance.sequence_log_ratios(tokens))
        return value + tokens.logps - constant(tokens.logps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LUSPOLoss(SequenceSum, SequenceRatio, ClippedLoss):
    """Length-unbiased sequence policy optimisation.

    GSPO with each completion's loss multiplied by its length, so that a
    token weighs the same in a short and in a long one. The clip is the
    paper's, 2e-3 and 2.5e-3. TRL also runs it with ratios of tokens, for
    which it is not defined; with a KL term its sum includes padding.

    Args:
        epsilon, epsilon_high, delta: see `GRPOLoss`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Liu et al., 2026](https://arxiv.org/abs/2602.05261).
    """

    epsilon: float = 2e-3
    epsilon_high: float | None = 2.5e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPOLoss(LevelledLoss):
    """Clipped importance sampling policy optimisation.

    REINFORCE with the ratio as a constant weight that is cut off at
    `max_ratio`: no token loses its gradient, rare ones that a reflection
    turns on least of all. The mean over all tokens, and no KL term.

    The paper writes the bound as 1 + epsilon_high and does not give it.
    ScaleRL uses 4 to 8; 5 is TRL's recommendation. In TRL `epsilon_high` is
    the bound itself and falls back on `epsilon`, 0.2, which makes every
    weight 0.2; here the bound has its own name and must be above 1.

    Args:
        max_ratio: float, the largest weight.
        importance_sampling_level: `"token"` or `"sequence"`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    References:
        - [MiniMax, 2025](https://arxiv.org/abs/2506.13585).
        - [Khatri et al., 2025](https://arxiv.org/abs/2510.13786), ScaleRL.
    """

    max_ratio: float = 5.0

    own_metrics = ("cispo_clip_ratio",)

    def __post_init__(self):
        super().__post_init__()
        wanted = "more than 1 (the bound of the ratio itself)"
        check(self, "max_ratio", self.max_ratio > 1, wanted)

    def surrogate(self, tokens, log_ratios):
        ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
        weights = jnp.minimum(ratios, self.max_ratio)
        losses = -weights * tokens.advantages * tokens.logps
        clipped = (ratios > self.max_ratio) & (tokens.advantages > 0)
        clipped = clipped.astype("float32")
        metric = (
            tokens.sequence_metric(tokens.sequence_mean(clipped))
            if self.by_sequence
            else tokens.mean_metric(clipped)
        )
        return losses, {"cispo_clip_ratio": metric}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SAPOLoss(SequenceMean, LevelledLoss):
    """Soft adaptive policy optimisation.

    A sigmoid gate of the ratio `r` instead of a clip:
    `-4 sigmoid(t (r - 1)) / t * A`, whose slope is 1 on-policy and fades out
    on both sides, faster for negative advantages. Aggregated as GRPO. The
    temperatures are the paper's, which uses no KL term.

    Args:
        positive_temperature: float, `t` where the advantage is positive.
        negative_temperature: float, `t` elsewhere.
        importance_sampling_level: `"token"` or `"sequence"`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Gao et al., 2025](https://arxiv.org/abs/2511.20347).
    """

    positive_temperature: float = 1.0
    negative_temperature: float = 1.05

    def __post_init__(self):
        super().__post_init__()
        for name in ("positive_temperature", "negative_temperature"):
            check(self, name, getattr(self, name) > 0, "more than 0")

    def surrogate(self, tokens, log_ratios):
        temperature = jnp.where(
            tokens.advantages > 0,
            self.positive_temperature,
            self.negative_temperature,
        )
        gate = jax.nn.sigmoid(temperature * jnp.expm1(log_ratios))
        return -4.0 * gate / temperature * tokens.advantages, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VESPOLoss(PolicyLoss):
    """Variational sequence-level soft policy optimisation.

    REINFORCE, each completion weighted by a constant `w**k exp(l (1 - w))`
    of the ratio `w` of its whole probability: 1 on-policy, fading out
    smoothly on both sides. The mean over all tokens, and no KL term.
    `correction` enters the ratio, not the loss: `w` is then the ratio of the
    policy to the engine that sampled. The defaults are the paper's.

    Args:
        k_positive, lambda_positive: floats, `k` and `l` where the advantage
            is 0 or more.
        k_negative, lambda_negative: floats, where it is negative.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.

    Reference:
        - [Shen et al., 2026](https://arxiv.org/abs/2602.10693).
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

    def surrogate(self, tokens, log_ratios):
        log_w = tokens.sequence_sum(jax.lax.stop_gradient(log_ratios))
        if self.correction is not None:
            log_w = log_w + self.correction.sequence_log_weights(tokens)
        log_w = tokens.spread(jnp.clip(log_w, math.log(1e-8), 20.0))
        positive = tokens.advantages >= 0
        k = jnp.where(positive, self.k_positive, self.k_negative)
        rate = jnp.where(positive, self.lambda_positive, self.lambda_negative)
        phi = jnp.exp(k * log_w - rate * jnp.expm1(log_w))
        # A completion without tokens has not moved: its weight is 1.
        filled = tokens.sequence_sum(jnp.ones_like(tokens.mask)) > 0
        mean = jnp.where(filled, tokens.sequence_mean(phi), 1.0)
        metrics = {"vespo/phi_seq_mean": tokens.sequence_metric(mean)}
        return -phi * tokens.advantages * tokens.logps, metrics

    def correction_weights(self, tokens):
        return jnp.ones_like(tokens.mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """REINFORCE: advantage times log-probability of the whole completion.

    The mean over completions of the sum over tokens. With
    `LeaveOneOutAdvantages()` it is RLOO. It takes the samples for the
    policy's own: for several updates a rollout give `epsilon`, which clips
    the ratio of the whole completion's probability as TRL's `RLOOTrainer`
    does (with 0.2; on-policy the gradient is the same).

    Args:
        epsilon: float or `None`, no ratio and no clip.
        epsilon_high: float or `None`, as `epsilon`.
        beta, kl_estimator, entropy_coef, masks, correction: see `PolicyLoss`.
            RLOO has its KL term in the reward instead: see
            `LeaveOneOutAdvantages`.

    References:
        - [Williams, 1992](https://doi.org/10.1007/BF00992696).
        - [Ahmadian et al., 2024](https://arxiv.org/abs/2402.14740), RLOO.
    """

    epsilon: float | None = None
    epsilon_high: float | None = None

    def __post_init__(self):
        super().__post_init__()
        sound = self.epsilon is None or 0 < self.epsilon < 1
        check(self, "epsilon", sound, "between 0 and 1, or None")
        high = self.epsilon_high
        sound = high is None or (self.epsilon is not None and high > 0)
        wanted = "more than 0 and go with an `epsilon`, or None"
        check(self, "epsilon_high", sound, wanted)

    @property
    def own_metrics(self):
        return () if self.epsilon is None else CLIP_METRICS

    def surrogate(self, tokens, log_ratios):
        if self.epsilon is None:
            return -tokens.advantages * tokens.logps, {}
        ratios = tokens.logps - tokens.old_logps
        ratios = importance.bounded(tokens.sequence_sum(ratios))
        ratios = tokens.spread(ratios)
        high = self.epsilon_high
        high = self.epsilon if high is None else high
        losses = clipped_surrogate(
            ratios, tokens.advantages, self.epsilon, high
        )
        # The ratio already has all tokens in it: each token has its share of
        # the completion's one loss.
        length = tokens.spread(tokens.sequence_sum(jnp.ones_like(tokens.mask)))
        metrics = clip_metrics(
            tokens, ratios, 1 - self.epsilon, 1 + high, True
        )
        return losses / jnp.maximum(length, 1.0), metrics

    def count(self, batch):
        return batch["sequence_mask"].astype("float32").sum()
