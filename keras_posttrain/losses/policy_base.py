"""The base class of policy-gradient losses."""

import dataclasses

import jax.numpy as jnp

from keras_posttrain.losses import corrections, importance, reductions
from keras_posttrain.losses.loss import Loss, check, check_types

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """Base class of policy-gradient losses, public for custom ones.

    A subclass defines `surrogate`, the loss of each token. The loss is

    `sum(token_weights * losses) / count`

    with both sums over the full batch. By default that is the mean over all
    tokens of all completions; `token_weights` and `count` define another
    mean.

    `masks` first leave tokens out of the surrogate, `correction` weights it,
    then the KL term is added, so that masks and correction do not affect the
    KL term. The entropy bonus is subtracted last: the mean entropy of all
    tokens, or of those that a `TopEntropyMask` keeps.

    Args:
        beta: float, the weight of the KL divergence from the reference. At 0
            the loss needs no reference.
        kl_estimator: `"k1"`, `"k2"`, `"k3"` (see `kl_estimate`), or
            `"k3_corrected"`: k3 times the differentiable ratio of the policy
            to the old policy, which makes its gradient that of the
            divergence itself (DeepSeek-V3.2; TRL's
            `use_bias_correction_kl`, its default).
        entropy_coef: float, the weight of the entropy bonus.
        masks: tuple of `TopEntropyMask`, `OffPolicyMask` or others with
            `name`, `batch_coupled` and `keep`, and `by_sequence` if what
            they keep depends on more than a token.
        correction: `ImportanceCorrection` or `None`, for rollout engines
            whose log-probabilities differ from the trainer's.

    Call arguments:
        batch: dict of arrays: `segment_ids` and `completion_mask`
            `(rows, length)`; `sequence_mask` `(rows, num_sequences)`, the
            weight of each slot in means over sequences;
            `advantages` of either shape; `old_per_token_logps`
            `(rows, length)`, without which the samples count as on-policy;
            `rollout_per_token_logps` if there is a correction.
        outputs: dict of arrays of shape `(rows, length)`:
            `per_token_logps`, `entropies`, and with `beta`
            `ref_per_token_logps`, here or in the batch.

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

    # The names of the metrics that `surrogate` reports.
    own_metrics = ()
    # "token", or "sequence": the tokens of a sequence share the geometric
    # mean of their ratios. A subclass sets it, or declares it as a field.
    importance_sampling_level = "token"

    def __post_init__(self):
        check_types(self)
        check(self, "beta", self.beta >= 0, "0 or more")
        check(self, "entropy_coef", self.entropy_coef >= 0, "0 or more")
        known = self.kl_estimator in importance.KL_ESTIMATORS
        names = ", ".join(map(repr, importance.KL_ESTIMATORS))
        check(self, "kl_estimator", known, f"one of {names}")
        level = self.importance_sampling_level
        wanted = '"token" or "sequence"'
        check(self, "importance_sampling_level", level in LEVELS, wanted)
        # A list would make the settings unhashable.
        valid = not isinstance(self.masks, str) and all(
            callable(getattr(mask, "keep", None)) for mask in self.masks
        )
        wanted = "a tuple of masks, such as (TopEntropyMask(),)"
        check(self, "masks", valid, wanted)
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

    @property
    def by_sequence(self):
        parts = (*self.masks, self.correction)
        return self.importance_sampling_level == "sequence" or any(
            getattr(part, "by_sequence", False) for part in parts
        )

    def surrogate(self, tokens, log_ratios):
        """Computes the loss of each token before masks, correction and KL.

        Args:
            tokens: `PolicyTokens`.
            log_ratios: float array of shape `(rows, length)`, from
                `self.log_ratios`.

        Returns:
            `(losses, metrics)`: an array of the same shape, and metrics in
            the form of `Loss.total`.
        """
        raise NotImplementedError

    def log_ratios(self, tokens):
        """Computes `log(policy / old policy)`, `(rows, length)`."""
        if self.importance_sampling_level == "sequence":
            return importance.sequence_log_ratios(tokens)
        return importance.token_log_ratios(tokens)

    def correction_weights(self, tokens):
        """Computes the factor of each token's loss from `correction`."""
        return self.correction.weights(tokens)

    def token_weights(self, tokens):
        """Returns the weight of each token in the sum, `(rows, length)`."""
        return tokens.mask

    def count(self, batch):
        """Computes the divisor of the sum from masks alone, a scalar."""
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
        bonus = tokens.mask
        for mask in self.masks:
            keep = mask.keep(tokens)
            if getattr(mask, "limits_entropy_bonus", False):
                bonus = bonus * keep
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
            # `normalizers`, from masks alone, has the number of all tokens.
            share = reductions.ratio(bonus.sum(), tokens.mask.sum())
            total = reductions.token_sum(tokens.entropies, bonus)
            total = reductions.ratio(total, share)
            terms["entropy"] = -self.entropy_coef * total
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


def sequence_count(batch):
    """Counts the sequences of a batch, a float32 scalar.

    The segments of one trajectory count as one.
    """
    return batch["sequence_mask"].astype("float32").sum()
