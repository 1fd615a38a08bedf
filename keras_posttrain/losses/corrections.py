"""Token masks and importance corrections of policy losses."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from keras_posttrain.losses import importance, reductions
from keras_posttrain.losses.loss import check_types

CORRECTION_MODES = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)


@dataclasses.dataclass(frozen=True)
class TopEntropyMask:
    """Trains only the tokens with the highest entropies.

    The tokens whose entropy is among the highest `quantile` of the full
    batch keep their loss; the others have none. High entropies mark the
    decisions at which a chain of thought forks. The threshold is a quantile
    of the batch, not of a micro-batch, so a loss with this mask is
    `batch_coupled`. The mask affects neither the divisor of the loss nor its
    KL term. The entropy bonus is the mean entropy of the tokens it keeps, as
    in TRL.

    Args:
        quantile: float, the share of tokens to train. The paper's
            is 0.2.

    Reference:
        - [Wang et al., 2025](https://arxiv.org/abs/2506.01939).

    Example:

    ```python
    mask = kpt.losses.TopEntropyMask(quantile=0.25)
    loss = kpt.losses.GRPOLoss(beta=0.0, masks=(mask,))
    value, metrics = loss(policy_batch, policy_outputs)
    metrics["mask_ratio/top_entropy"]  # 0.75
    ```
    """

    quantile: float = 0.2

    name = "top_entropy"
    batch_coupled = True
    limits_entropy_bonus = True

    def __post_init__(self):
        check_types(self)
        if not 0 < self.quantile <= 1:
            raise ValueError(
                "`quantile` is the share of tokens that is trained: more "
                f"than 0, 1 at most. Received: quantile={self.quantile}"
            )

    def keep(self, tokens):
        """Selects the tokens that have a loss, bool `(rows, length)`."""
        entropies = jax.lax.stop_gradient(tokens.entropies)
        threshold = masked_quantile(
            entropies, tokens.mask != 0, 1 - self.quantile
        )
        return entropies >= threshold


@dataclasses.dataclass(frozen=True)
class OffPolicyMask:
    """Masks sequences that are far off-policy.

    A sequence with a negative advantage has no loss if the log-probabilities
    of its tokens decreased on average by more than `threshold` since they
    were sampled. They are compared with those of the engine, or with the old
    policy's if the batch has none from an engine.

    Args:
        threshold: float, in nats per token. The paper gives no value.

    Reference:
        - [DeepSeek-AI, 2025](https://arxiv.org/abs/2512.02556), section 3.1.

    Example:

    ```python
    mask = kpt.losses.OffPolicyMask(threshold=0.1)
    loss = kpt.losses.GRPOLoss(beta=0.0, masks=(mask,))
    value, metrics = loss(policy_batch, policy_outputs)
    metrics["mask_ratio/off_policy"]  # 0.5
    ```
    """

    threshold: float

    name = "off_policy"
    batch_coupled = False
    by_sequence = True

    def __post_init__(self):
        check_types(self)
        if self.threshold < 0:
            raise ValueError(
                "`threshold` must be 0 or more, in nats a token. Received: "
                f"threshold={self.threshold}"
            )

    def keep(self, tokens):
        """Selects the tokens that have a loss, bool `(rows, length)`."""
        sampled = tokens.rollout_logps
        sampled = tokens.old_logps if sampled is None else sampled
        fall = sampled - jax.lax.stop_gradient(tokens.logps)
        fall = tokens.spread(tokens.sequence_mean(fall))
        return (tokens.advantages >= 0) | (fall <= self.threshold)


def masked_quantile(values, mask, quantile):
    """Computes a quantile of the values selected by a mask.

    It is a scalar with linear interpolation, NaN where nothing is selected.
    """
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf).reshape(-1))
    last = jnp.maximum(mask.sum() - 1, 0)
    place = jnp.asarray(quantile, "float32") * last.astype("float32")
    low = jnp.floor(place).astype("int32")
    high = jnp.minimum(low + 1, last)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclasses.dataclass(frozen=True)
class ImportanceCorrection:
    """Importance weights for an engine that differs from the trainer.

    A rollout engine's kernels, precision or weight version make its
    log-probabilities differ from the trainer's. Each token's loss is
    multiplied by the ratio of its probability under the trainer's old policy
    to that under the engine. Ratios are computed in log space; the batch
    must have `rollout_per_token_logps`.

    The default is the truncated ratio of each token: it bounds the variance
    and keeps every token. The ratio of a sequence is the product of its
    tokens' ratios. It is exact but quickly far from 1: 0.012 nats per token
    over 100 tokens give 3.3. TRL's default is `"sequence_mask"` with a
    `max_ratio` of 3, which at that difference masks every long completion.

    Args:
        mode: `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or
            `"sequence_mask"`: the level of the ratio, and whether to
            truncate a ratio that is out of bounds or to mask its loss.
        max_ratio: float or `None`, the upper bound; 2 as in the paper.
        min_ratio: float or `None`, the lower bound.

    References:
        - [Yao et al., 2025](https://fengyao.notion.site/off-policy-rl),
          truncated importance sampling.
        - [Liu et al., 2025](https://richardli.xyz/rl-collapse), the masked
          and the sequence-level kinds.

    Example:

    ```python
    loss = kpt.losses.GRPOLoss(
        correction=kpt.losses.ImportanceCorrection("token_truncate")
    )
    ```
    """

    mode: str = "token_truncate"
    max_ratio: float | None = 2.0
    min_ratio: float | None = None

    def __post_init__(self):
        check_types(self)
        if self.mode not in CORRECTION_MODES:
            raise ValueError(
                f"`mode` must be one of {', '.join(CORRECTION_MODES)}. "
                f"Received: mode={self.mode!r}"
            )
        low = 0.0 if self.min_ratio is None else self.min_ratio
        high = float("inf") if self.max_ratio is None else self.max_ratio
        if low < 0 or low > 1 or high < 1:
            raise ValueError(
                "A ratio of 1 (no difference) must be between `min_ratio` "
                "and `max_ratio`, and `min_ratio` must not be negative. "
                f"Received: min_ratio={self.min_ratio}, "
                f"max_ratio={self.max_ratio}"
            )

    @property
    def by_sequence(self):
        return self.mode.startswith("sequence")

    def log_ratios(self, tokens):
        """Computes the logs of the weights before truncation or masking."""
        return rollout_log_ratios(tokens, self.by_sequence)

    def weights(self, tokens):
        """Computes the constant weight of each token, `(rows, length)`."""
        log_ratios = self.log_ratios(tokens)
        low = math.log(self.min_ratio) if self.min_ratio else -math.inf
        high = math.inf if self.max_ratio is None else math.log(self.max_ratio)
        if self.mode.endswith("truncate"):
            return jnp.exp(jnp.clip(log_ratios, low, high))
        inside = (log_ratios >= low) & (log_ratios <= high)
        return jnp.where(inside, jnp.exp(log_ratios), 0.0)

    def sequence_log_weights(self, tokens):
        """Computes the log of each sequence's weight, `(rows, num_sequences)`.

        It is bounded below where a weight is 0.
        """
        logs = jnp.log(jnp.maximum(self.weights(tokens), 1e-8))
        if self.by_sequence:
            return tokens.sequence_mean(logs)
        return tokens.sequence_sum(logs)


def rollout_log_ratios(tokens, by_sequence=False):
    """Computes `log(old policy / engine)` of each token, `(rows, length)`.

    With `by_sequence`, each token has the sum of its sequence.
    """
    if tokens.rollout_logps is None:
        raise ValueError(
            "The batch has no `rollout_per_token_logps`, the "
            "log-probabilities that the engine sampled with, which a "
            "`correction` needs. Use an engine that reports them, or "
            "correction=None."
        )
    ratios = tokens.old_logps - tokens.rollout_logps
    if by_sequence:
        ratios = tokens.spread(tokens.sequence_sum(ratios))
    return jnp.where(tokens.mask != 0, importance.bounded(ratios), 0.0)


def sampling_metrics(tokens, correction=None):
    """Measures the difference of the engine and the trainer's old policy.

    The metrics are mean and maximum difference of log-probabilities in nats,
    of tokens for which the engine reported one; the effective sample size of
    the ratios (of tokens, or of sequences for a correction by sequences) as a
    share of 1, before they are truncated, which would hide a mismatch; and
    with a correction the minimum, mean and maximum weight.
    """
    used = tokens.mask != 0
    gap = jnp.abs(tokens.old_logps - tokens.rollout_logps)
    by_sequence = correction is not None and correction.by_sequence
    ratios = jnp.exp(rollout_log_ratios(tokens, by_sequence))
    metrics = {
        "sampling/sampling_logp_difference/mean": (
            "mean",
            reductions.token_sum(gap, tokens.rollout_mask),
            tokens.rollout_mask.sum(),
        ),
        "sampling/sampling_logp_difference/max": (
            "max",
            jnp.max(jnp.where(used, gap, -jnp.inf)),
        ),
        "sampling/effective_sample_size": _effective_share(
            tokens, ratios, by_sequence
        ),
    }
    if correction is None:
        return metrics
    weights = correction.weights(tokens)
    counted, values = _counted(tokens, weights, by_sequence)
    prefix = "sampling/importance_sampling_ratio/"
    mean = ("mean", values.sum(), counted.sum())
    metrics[prefix + "mean"] = mean
    metrics[prefix + "min"] = (
        "min",
        jnp.min(jnp.where(used, weights, jnp.inf)),
    )
    metrics[prefix + "max"] = (
        "max",
        jnp.max(jnp.where(used, weights, -jnp.inf)),
    )
    return metrics


def _effective_share(tokens, ratios, by_sequence):
    counted, ratios = _counted(tokens, ratios, by_sequence)
    squares = jnp.sum(ratios**2)
    return ("effective_share", ratios.sum(), squares, counted.sum())


def _counted(tokens, values, by_sequence):
    """Returns the mask of tokens or non-empty sequences and their values."""
    counted = tokens.mask != 0
    if by_sequence:
        counted = tokens.sequence_sum(jnp.ones_like(tokens.mask)) > 0
        values = tokens.sequence_mean(values)
    return counted.astype("float32"), jnp.where(counted, values, 0.0)
