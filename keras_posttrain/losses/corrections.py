"""Which tokens a policy loss leaves out, and how it makes up for an engine
that samples with slightly other weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from keras_posttrain.losses import importance

CORRECTION_MODES = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)


@dataclasses.dataclass(frozen=True)
class TopEntropyMask:
    """Trains only the tokens at which the policy is least certain.

    The tokens whose entropy is among the highest `quantile` of the whole
    batch keep their loss, the others have none: the choices at which a
    chain of thought forks. The threshold is a quantile of the batch, not of
    a micro-batch, so a loss with this mask is `batch_coupled`. Counts that
    the loss is divided by stay as they are, and so does its KL term.

    Args:
        quantile: float, the share of tokens that is trained. The paper's
            is 0.2.

    Reference:
        - [Wang et al., 2025](https://arxiv.org/abs/2506.01939).
    """

    quantile: float = 0.2

    name = "top_entropy"
    batch_coupled = True

    def __post_init__(self):
        if not 0 < self.quantile <= 1:
            raise ValueError(
                "`quantile` is the share of tokens that is trained: more "
                f"than 0, 1 at most. Received: quantile={self.quantile}"
            )

    def keep(self, tokens):
        """bool `(rows, length)`: the tokens that have a loss."""
        entropies = jax.lax.stop_gradient(tokens.entropies)
        threshold = masked_quantile(
            entropies, tokens.mask != 0, 1 - self.quantile
        )
        return entropies >= threshold


@dataclasses.dataclass(frozen=True)
class OffPolicyMask:
    """Leaves out sequences that the policy has moved away from.

    A sequence with a negative advantage has no loss where its tokens'
    log-probabilities fell, in the mean, by more than `threshold` since they
    were sampled. They are compared with what the engine reported, or with
    the old policy's where the batch has nothing from an engine.

    Args:
        threshold: float, in nats a token. The paper gives no value.

    Reference:
        - [DeepSeek-AI, 2025](https://arxiv.org/abs/2512.02556), section 3.1.
    """

    threshold: float

    name = "off_policy"
    batch_coupled = False

    def __post_init__(self):
        if self.threshold < 0:
            raise ValueError(
                "`threshold` must be 0 or more, in nats a token. Received: "
                f"threshold={self.threshold}"
            )

    def keep(self, tokens):
        """bool `(rows, length)`: the tokens that have a loss."""
        sampled = tokens.rollout_logps
        sampled = tokens.old_logps if sampled is None else sampled
        fall = sampled - jax.lax.stop_gradient(tokens.logps)
        fall = tokens.spread(tokens.sequence_mean(fall))
        return (tokens.advantages >= 0) | (fall <= self.threshold)


def masked_quantile(values, mask, quantile):
    """A quantile of the values that a mask selects.

    Args:
        values: float array of any shape.
        mask: bool array of the same shape.
        quantile: float between 0 and 1; linear between two values.

    Returns:
        A float scalar, NaN where nothing is selected.
    """
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf).reshape(-1))
    last = jnp.maximum(mask.sum() - 1, 0)
    place = jnp.asarray(quantile, "float32") * last.astype("float32")
    low = jnp.floor(place).astype("int32")
    high = jnp.minimum(low + 1, last)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclasses.dataclass(frozen=True)
class ImportanceCorrection:
    """Corrects for an engine that samples with slightly other weights.

    A rollout engine's kernels, precision or weight version make its
    log-probabilities differ from the trainer's. Each token's loss is
    multiplied by how much more probable the trainer's old policy finds what
    was sampled than the engine did. All is computed in log space; the batch
    must have `rollout_per_token_logps`.

    A token's own ratio, truncated, is the default: it bounds the variance
    and keeps every token. A sequence's ratio is the product of its tokens',
    exact but soon far from 1: 0.012 nats a token over 100 tokens make 3.3.
    TRL's default is `"sequence_mask"` with a `max_ratio` of 3, which at that
    difference masks every long completion.

    Args:
        mode: `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or
            `"sequence_mask"`: whose ratio counts, and whether one that is
            out of bounds is set to the bound or its loss left out.
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
        if self.mode not in CORRECTION_MODES:
            raise ValueError(
                f"`mode` must be one of {', '.join(CORRECTION_MODES)}. "
                f"Received: mode={self.mode!r}"
            )
        low = 0.0 if self.min_ratio is None else self.min_ratio
        high = float("inf") if self.max_ratio is None else self.max_ratio
        if low < 0 or low > 1 or high < 1:
            raise ValueError(
                "A ratio of 1 (no difference) must lie between `min_ratio` "
                "and `max_ratio`, and `min_ratio` must not be negative. "
                f"Received: min_ratio={self.min_ratio}, "
                f"max_ratio={self.max_ratio}"
            )

    @property
    def by_sequence(self):
        return self.mode.startswith("sequence")

    def log_ratios(self, tokens):
        """What the weights are made of, without the bounds, in logs."""
        return rollout_log_ratios(tokens, self.by_sequence)

    def weights(self, tokens):
        """The weight of each token's loss, `(rows, length)`, constant."""
        log_ratios = self.log_ratios(tokens)
        low = math.log(self.min_ratio) if self.min_ratio else -math.inf
        high = math.inf if self.max_ratio is None else math.log(self.max_ratio)
        if self.mode.endswith("truncate"):
            return jnp.exp(jnp.clip(log_ratios, low, high))
        inside = (log_ratios >= low) & (log_ratios <= high)
        return jnp.where(inside, jnp.exp(log_ratios), 0.0)

    def sequence_log_weights(self, tokens):
        """The log of each sequence's whole weight, `(rows, sequences)`,
        bounded below where a weight is 0."""
        logs = jnp.log(jnp.maximum(self.weights(tokens), 1e-8))
        if self.by_sequence:
            return tokens.sequence_mean(logs)
        return tokens.sequence_sum(logs)


def rollout_log_ratios(tokens, by_sequence=False):
    """`log(old policy / engine)`, `(rows, length)`, of each token or, for
    all of its tokens, of each sequence."""
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
    """How far the engine that sampled is from the trainer's old policy.

    Args:
        tokens: `PolicyTokens`.
        correction: `ImportanceCorrection` or `None`.

    Returns:
        A dict of metrics: mean and largest difference of log-probabilities
        in nats; the effective sample size of the ratios (of tokens, or of
        sequences where the correction goes by them) as a share of 1, before
        they are bounded, since bounds would hide the trouble; and with a
        correction the least, mean and largest weight.
    """
    used = tokens.mask != 0
    gap = jnp.abs(tokens.old_logps - tokens.rollout_logps)
    by_sequence = correction is not None and correction.by_sequence
    ratios = jnp.exp(rollout_log_ratios(tokens, by_sequence))
    metrics = {
        "sampling/sampling_logp_difference/mean": tokens.mean_metric(gap),
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
    """What counts, tokens or sequences that have some, as 0 and 1, and the
    values of those."""
    counted = tokens.mask != 0
    if by_sequence:
        counted = tokens.sequence_sum(jnp.ones_like(tokens.mask)) > 0
        values = tokens.sequence_mean(values)
    return counted.astype("float32"), jnp.where(counted, values, 0.0)
