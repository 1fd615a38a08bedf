"""What policy-gradient losses share: what a token's loss is, what the sum of
them is divided by, and what is added to it."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import corrections, importance, reductions
from keras_posttrain.losses.loss import Loss

LEVELS = ("token", "sequence")
SAMPLING_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/effective_sample_size",
)
CORRECTION_METRICS = (
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)
CLIP_METRICS = (
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """What the policy-gradient losses share; the base of one of your own.

    A subclass defines `surrogate`, the loss of each token, and may define
    `token_weights` and `count`: the loss is the sum of weights times tokens'
    losses over the whole batch, divided by the count of the whole batch. As
    it is here, that is the mean over all tokens of all completions.

    `masks` then leave tokens out, `correction` weighs them, and a KL term is
    added: in this order, so that neither touches the KL term. An entropy
    bonus, the mean over all tokens, is subtracted last.

    Args:
        beta: float, the weight of the KL divergence from the reference. At 0
            no reference is asked for.
        kl_estimator: `"k1"`, `"k2"`, `"k3"`, or `"k3_corrected"`: k3 times
            the ratio of the policy to the old policy, gradient and all,
            which makes its gradient that of the divergence itself
            (DeepSeek-V3.2; TRL's `use_bias_correction_kl`, its default).
        entropy_coef: float, the weight of the entropy bonus.
        masks: tuple of `TopEntropyMask`, `OffPolicyMask` or others with
            `name`, `batch_coupled` and `keep`.
        correction: `ImportanceCorrection` or `None`, for rollouts by an
            engine whose log-probabilities differ from the trainer's.

    Call arguments:
        batch: dict of arrays: `segment_ids` and `completion_mask`
            `(rows, length)`; `sequence_mask` `(rows, num_sequences)`;
            `advantages` of either shape; `old_per_token_logps`
            `(rows, length)`, without which samples count as the present
            policy's own; `rollout_per_token_logps` where there is a
            correction.
        outputs: dict of arrays of shape `(rows, length)`:
            `per_token_logps`, `entropies`, and with `beta`
            `ref_per_token_logps`, here or in the batch.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars.

    Example:

    ```python
    class ExponentialLoss(kpt.losses.PolicyLoss):
        def surrogate(self, tokens, log_ratios):
            return -jnp.exp(log_ratios) * tokens.advantages, {}
    ```
    """

    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    masks: tuple = ()
    correction: corrections.ImportanceCorrection | None = None

    # What `surrogate` reports.
    own_metrics = ()

    def __post_init__(self):
        check(self, "beta", self.beta >= 0, "0 or more")
        check(self, "entropy_coef", self.entropy_coef >= 0, "0 or more")
        known = self.kl_estimator in importance.KL_ESTIMATORS
        names = ", ".join(map(repr, importance.KL_ESTIMATORS))
        check(self, "kl_estimator", known, f"one of {names}")
        # A list would make the settings unhashable.
        object.__setattr__(self, "masks", tuple(self.masks))

    @property
    def metric_names(self):
        names = ["entropy", *self.own_metrics]
        names += ["kl"] * (self.beta != 0)
        names += ["policy_loss", "entropy_coef"] * (self.entropy_coef != 0)
        names += [f"mask_ratio/{mask.name}" for mask in self.masks]
        names += SAMPLING_METRICS
        names += CORRECTION_METRICS * (self.correction is not None)
        return tuple(names)

    @property
    def needs(self):
        reference = ("ref_per_token_logps",) if self.beta else ()
        return ("per_token_logps", "entropies", *reference)

    @property
    def batch_coupled(self):
        return any(mask.batch_coupled for mask in self.masks)

    def surrogate(self, tokens, log_ratios):
        """The loss of each token, before masks, correction and KL.

        Args:
            tokens: `PolicyTokens`.
            log_ratios: float array of shape `(rows, length)`, from
                `self.log_ratios`.

        Returns:
            `(losses, metrics)`: a float array of shape `(rows, length)`, and
            a dict of metrics as `Loss.total` reports them.
        """
        raise NotImplementedError

    def log_ratios(self, tokens):
        """`log(policy / old policy)` as the loss means it."""
        return importance.token_log_ratios(tokens)

    def correction_weights(self, tokens):
        return self.correction.weights(tokens)

    def token_weights(self, tokens):
        """The weight of each token in the sum, `(rows, length)`."""
        return tokens.mask

    def count(self, batch):
        """What the sum is divided by, from masks alone."""
        return batch["completion_mask"].astype("float32").sum()

    def normalizers(self, batch):
        normalizers = {"policy": self.count(batch)}
        if self.entropy_coef:
            mask = batch["completion_mask"].astype("float32")
            normalizers["entropy"] = mask.sum()
        return normalizers

    def total(self, batch, outputs):
        tokens = importance.PolicyTokens.of(batch, outputs)
        log_ratios = self.log_ratios(tokens)
        losses, metrics = self.surrogate(tokens, log_ratios)
        for mask in self.masks:
            keep = mask.keep(tokens)
            losses = jnp.where(keep, losses, 0.0)
            metrics[f"mask_ratio/{mask.name}"] = tokens.mean_metric(1.0 - keep)
        if self.correction is not None:
            losses = losses * self.correction_weights(tokens)
        if tokens.rollout_logps is not None:
            metrics |= corrections.sampling_metrics(tokens, self.correction)
        if self.beta:
            kl = self._kl(tokens, log_ratios)
            losses = losses + self.beta * kl
            metrics["kl"] = tokens.mean_metric(kl)
        policy = reductions.token_sum(losses, self.token_weights(tokens))
        terms = {"policy": policy}
        if tokens.entropies is not None:
            metrics["entropy"] = tokens.mean_metric(tokens.entropies)
        if self.entropy_coef:
            terms["entropy"] = -self.entropy_coef * metrics["entropy"][1]
            metrics["policy_loss"] = ("mean", policy, self.count(batch))
            one = jnp.ones(())
            metrics["entropy_coef"] = ("mean", self.entropy_coef * one, one)
        return terms, metrics

    def _kl(self, tokens, log_ratios):
        if tokens.ref_logps is None:
            raise ValueError(
                "There are no `ref_per_token_logps`, the log-probabilities "
                "under the reference policy, which the KL term needs. Give "
                f"them, or use beta=0. Received: beta={self.beta}"
            )
        kl = importance.kl_estimate(
            tokens.logps, tokens.ref_logps, self.kl_estimator
        )
        if self.kl_estimator == "k3_corrected":
            kl = kl * jnp.exp(log_ratios)
        return kl


def check(loss, name, sound, wanted):
    if not sound:
        raise ValueError(
            f"`{name}` of {type(loss).__name__} must be {wanted}. Received: "
            f"{name}={getattr(loss, name)!r}"
        )


class SequenceMean:
    """The mean over sequences of the mean over each one's tokens."""

    def token_weights(self, tokens):
        length = tokens.sequence_sum(jnp.ones_like(tokens.mask))
        return tokens.mask * tokens.spread(reductions.ratio(1.0, length))

    def count(self, batch):
        return batch["sequence_mask"].astype("float32").sum()


class SequenceSum:
    """The mean over sequences of the sum over each one's tokens."""

    def count(self, batch):
        return batch["sequence_mask"].astype("float32").sum()


class SequenceRatio:
    """A sequence's tokens share the geometric mean of their ratios."""

    def log_ratios(self, tokens):
        return importance.sequence_log_ratios(tokens)

    @property
    def by_sequence(self):
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelledLoss(PolicyLoss):
    """A policy loss that goes by the ratios of tokens or of sequences.

    Args:
        importance_sampling_level: `"token"`, or `"sequence"`: the tokens of
            a sequence share the geometric mean of their ratios.
    """

    importance_sampling_level: str = "token"

    def __post_init__(self):
        super().__post_init__()
        level = self.importance_sampling_level
        wanted = '"token" or "sequence"'
        check(self, "importance_sampling_level", level in LEVELS, wanted)

    @property
    def by_sequence(self):
        return self.importance_sampling_level == "sequence"

    def log_ratios(self, tokens):
        if self.by_sequence:
            return importance.sequence_log_ratios(tokens)
        return importance.token_log_ratios(tokens)


def clipped_surrogate(
    log_ratios, advantages, epsilon, epsilon_high=None, delta=None
):
    """PPO's clipped objective, negated, of each token.

    `-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)` with
    the ratio `r`: no gain from moving further than the clip. `delta` bounds
    what a negative advantage can cost ("dual clip").

    Args:
        log_ratios: float array of any shape.
        advantages: float array of the same shape.
        epsilon: float.
        epsilon_high: float or `None`, as `epsilon`.
        delta: float or `None`, no bound.

    Returns:
        A float array of the same shape.

    References:
        - [Schulman et al., 2017](https://arxiv.org/abs/1707.06347), the clip.
        - [Ye et al., 2019](https://arxiv.org/abs/1912.09729), the dual clip.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    ratios = jnp.exp(log_ratios)
    clipped = jnp.clip(ratios, 1 - epsilon, 1 + high)
    if delta is not None:
        ratios = jnp.minimum(ratios, delta)
    return -jnp.minimum(ratios * advantages, clipped * advantages)


def clip_metrics(tokens, log_ratios, low, high, by_sequence):
    """The shares of tokens whose gradient a clip took away.

    Args:
        tokens: `PolicyTokens`.
        log_ratios: float array of shape `(rows, length)`.
        low, high: floats, the bounds of the ratio.
        by_sequence: bool, whether shares are of sequences, not tokens.

    Returns:
        A dict of metrics: the shares below (where the advantage is negative)
        and above (where it is positive), and the least and the largest share
        of any one sequence.
    """
    ratios = jnp.exp(jax.lax.stop_gradient(log_ratios))
    below = ((ratios < low) & (tokens.advantages < 0)).astype("float32")
    above = ((ratios > high) & (tokens.advantages > 0)).astype("float32")

    def mean(values):
        if by_sequence:
            return tokens.sequence_metric(tokens.sequence_mean(values))
        return tokens.mean_metric(values)

    filled = tokens.sequence_sum(jnp.ones_like(tokens.mask)) > 0
    least = jnp.where(filled, tokens.sequence_mean(below), jnp.inf)
    largest = jnp.where(filled, tokens.sequence_mean(above), -jnp.inf)
    return {
        "clip_ratio/low_mean": mean(below),
        "clip_ratio/low_min": ("min", least.min()),
        "clip_ratio/high_mean": mean(above),
        "clip_ratio/high_max": ("max", largest.max()),
        "clip_ratio/region_mean": mean(below + above),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """A policy loss with PPO's clip.

    Args:
        epsilon: float, how far the ratio may fall below 1.
        epsilon_high: float or `None`, how far it may rise above; by default
            as far as `epsilon`.
        delta: float or `None`: above this ratio a negative advantage costs
            no more ("dual clip"; the paper's is 3).
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    own_metrics = CLIP_METRICS
    by_sequence = False

    def __post_init__(self):
        super().__post_init__()
        check(self, "epsilon", 0 < self.epsilon < 1, "between 0 and 1")
        high = self.epsilon_high is None or self.epsilon_high > 0
        check(self, "epsilon_high", high, "more than 0, or None")
        delta = self.delta is None or self.delta > 1
        check(self, "delta", delta, "more than 1, or None")

    def surrogate(self, tokens, log_ratios):
        losses = clipped_surrogate(
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
            self.by_sequence,
        )
        return losses, metrics
