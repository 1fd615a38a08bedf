"""Sums over tokens, sequences and segments: the only place that knows how a
row of several sequences is reduced."""

import jax.numpy as jnp


def token_sum(values, mask):
    """Sums `values * mask` over all tokens, ignoring `values` where it is 0.

    Args:
        values: float array of shape `(rows, length)`. May be anything, not a
            number included, where `mask` is 0.
        mask: float array of shape `(rows, length)`, the weight of each token.

    Returns:
        A float32 scalar.
    """
    mask = mask.astype("float32")
    values = jnp.where(mask != 0, values.astype("float32"), 0.0)
    return jnp.sum(values * mask)


def segment_sum(values, segment_ids, num_sequences):
    """Sums over the tokens of each sequence of a row.

    Args:
        values: float array of shape `(rows, length)`.
        segment_ids: int array of shape `(rows, length)`: `1 ... num_sequences`
            for the tokens of a sequence, 0 at padding.
        num_sequences: int, the most sequences a row may hold.

    Returns:
        A float array of shape `(rows, num_sequences)`.
    """
    ids = jnp.arange(1, num_sequences + 1)
    member = segment_ids[:, :, None] == ids[None, None, :]
    return jnp.sum(jnp.where(member, values[:, :, None], 0.0), axis=1)


def ratio(numerator, denominator):
    """`numerator / denominator`, and 0 where the denominator is 0."""
    safe = jnp.where(denominator == 0, 1.0, denominator)
    return jnp.where(denominator == 0, 0.0, numerator / safe)


def metric_value(metric):
    """The value of one metric as `Loss.total` reports it.

    Args:
        metric: `("mean", numerator, denominator)`, `("sum", value)`,
            `("min", value)` or `("max", value)`.

    Returns:
        A float32 scalar.
    """
    if metric[0] == "mean":
        return ratio(metric[1], metric[2])
    return metric[1]


def merge_metrics(stacked):
    """Combines the metrics of several sets of rows into those of all.

    Args:
        stacked: dict of metrics as `Loss.total` reports them, each value
            with a leading axis over the sets.

    Returns:
        The dict of metrics of all rows together.
    """
    reduce = {"mean": jnp.sum, "sum": jnp.sum, "min": jnp.min, "max": jnp.max}
    return {
        name: (kind, *(reduce[kind](v, axis=0) for v in values))
        for name, (kind, *values) in stacked.items()
    }
