"""Inputs of policy losses, importance ratios and KL estimates."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions

# Log-ratios are kept within this bound, so that no exponential overflows:
# exp(20) is about 5e8, far beyond every clip.
LOG_RATIO_BOUND = 20.0

KL_ESTIMATORS = ("k1", "k2", "k3", "k3_corrected")


@dataclasses.dataclass(frozen=True)
class PolicyTokens:
    """The arrays of a batch that a policy loss reads, in float32.

    Arrays of tokens are of shape `(rows, length)` and 0 outside `mask`,
    whatever the batch holds there, so that prompts and padding never reach a
    gradient. Only `logps` and `entropies` have one.

    Attributes:
        mask: the completion mask.
        segment_ids: int array of shape `(rows, length)`.
        sequence_mask: float array of shape `(rows, num_sequences)`. The
            slots of a trajectory of several segments add up to 1, each with
            its share of the trajectory's loss tokens.
        logps: log-probabilities under the policy in training.
        old_logps: the same under the policy that sampled, as the trainer
            computes it. If the batch has none, `logps` without a gradient.
        advantages: those of the tokens.
        entropies, ref_logps: of the policy and under the reference policy, or
            `None`.
        rollout_logps: as `logps`, as reported by the engine that sampled, or
            `None`. Where the engine reported NaN, the value of `old_logps`.
        rollout_mask: float array, 1 for tokens with a log-probability from
            the engine, or `None`.
    """

    mask: jax.Array
    segment_ids: jax.Array
    sequence_mask: jax.Array
    logps: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    entropies: jax.Array | None = None
    ref_logps: jax.Array | None = None
    rollout_logps: jax.Array | None = None
    rollout_mask: jax.Array | None = None

    @classmethod
    def of(cls, batch, outputs):
        """Reads a batch and the outputs of the model on it.

        `advantages` are of shape `(rows, num_sequences)`, or `(rows, length)`
        where tokens have their own; `ref_per_token_logps` may be in either
        dict.
        """
        mask = batch["completion_mask"].astype("float32")
        segment_ids = batch["segment_ids"]

        def read(values):
            values = jnp.asarray(values, "float32")
            return jnp.where(mask != 0, values, 0.0)

        def constant(name):
            found = outputs.get(name, batch.get(name))
            return (
                None if found is None else jax.lax.stop_gradient(read(found))
            )

        logps = read(outputs["per_token_logps"])
        old = constant("old_per_token_logps")
        old = jax.lax.stop_gradient(logps) if old is None else old
        rollout = constant("rollout_per_token_logps")
        reported = None
        if rollout is not None:
            reported = jnp.where(jnp.isnan(rollout), 0.0, mask)
            rollout = jnp.where(jnp.isnan(rollout), old, rollout)
        entropies = outputs.get("entropies")
        return cls(
            mask=mask,
            segment_ids=segment_ids,
            sequence_mask=batch["sequence_mask"].astype("float32"),
            logps=logps,
            old_logps=old,
            advantages=jax.lax.stop_gradient(read(_advantages(batch))),
            entropies=None if entropies is None else read(entropies),
            ref_logps=constant("ref_per_token_logps"),
            rollout_logps=rollout,
            rollout_mask=reported,
        )

    def sequence_sum(self, values):
        """Sums over each sequence's tokens to `(rows, num_sequences)`."""
        return reductions.segment_sum(
            values * self.mask, self.segment_ids, self.sequence_mask.shape[1]
        )

    def sequence_mean(self, values):
        """Averages over each sequence's tokens; 0 for an empty sequence."""
        count = self.sequence_sum(jnp.ones_like(self.mask))
        return reductions.ratio(self.sequence_sum(values), count)

    def sequence_mean_weights(self):
        """Returns the mask divided by the length of each token's sequence.

        With these weights a sum over tokens is a sum of sequence means. Of a
        trajectory of several segments it is the mean over all of them.
        """
        length = self.sequence_sum(jnp.ones_like(self.mask))
        shares = reductions.ratio(self.sequence_mask, length)
        return self.mask * self.spread(shares)

    def spread(self, values):
        """Gives each token the value of its sequence, `(rows, length)`."""
        return reductions.spread(values, self.segment_ids)

    def mean_metric(self, values):
        """Returns the metric of the mean of `values` over all tokens."""
        total = reductions.token_sum(values, self.mask)
        return ("mean", total, self.mask.sum())

    def sequence_metric(self, values):
        """Returns the metric of the mean of `values` over all sequences."""
        mask = self.sequence_mask
        values = jnp.where(mask != 0, values * mask, 0.0)
        return ("mean", values.sum(), mask.sum())


def _advantages(batch):
    advantages, per_sequence = batch["advantages"], batch["sequence_mask"]
    if advantages.shape == per_sequence.shape:
        return reductions.spread(advantages, batch["segment_ids"])
    if advantages.shape == batch["completion_mask"].shape:
        return advantages
    raise ValueError(
        "`advantages` must have the shape of `sequence_mask`, "
        f"{per_sequence.shape}, or, one for each token, that of "
        f"`completion_mask`, {batch['completion_mask'].shape}. "
        f"Received: advantages of shape {advantages.shape}"
    )


def bounded(log_ratios):
    """Clips `log_ratios` to `LOG_RATIO_BOUND` on both sides of 0."""
    return jnp.clip(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_log_ratios(tokens):
    """Computes `log(policy / old policy)` of each token, `(rows, length)`."""
    return bounded(tokens.logps - tokens.old_logps)


def sequence_log_ratios(tokens):
    """Averages the log-ratios of each sequence's tokens, `(rows, length)`.

    The result is the log of the geometric mean of the tokens' ratios. All
    tokens of a sequence have the same value.
    """
    ratios = tokens.logps - tokens.old_logps
    return bounded(tokens.spread(tokens.sequence_mean(ratios)))


def kl_estimate(logps, ref_logps, estimator="k3"):
    """Estimates KL(policy || reference) from each sampled token.

    With `d = ref_logps - logps`, `"k1"` is `-d`, `"k2"` is `d**2 / 2` and
    `"k3"` is `exp(d) - d - 1`. Their expected value is the divergence (for
    k2 approximately), but as terms of a loss they differ. The expected
    gradient of k1 is 0, so it does not regularise. The expected gradient of
    k2 is that of the divergence. The expected gradient of k3 is that of the
    reversed divergence, KL(reference || policy).

    Args:
        logps: float array of any shape, log-probabilities of the sampled
            tokens under the policy, in nats.
        ref_logps: float array of the same shape, under the reference.
        estimator: `"k1"`, `"k2"` or `"k3"`. `"k3_corrected"` gives the same
            values as `"k3"`: its factor, the ratio to the old policy, is
            applied by the caller.

    Returns:
        A float array of the same shape, in nats.

    Reference:
        - [Schulman, 2020](http://joschu.net/blog/kl-approx.html).

    Example:

    ```python
    kpt.losses.kl_estimate(np.log(0.5), np.log(0.25), "k1")  # log(2)
    ```
    """
    difference = ref_logps - logps
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    difference = bounded(difference)
    return jnp.expm1(difference) - difference
