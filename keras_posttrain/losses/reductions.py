"""Sums over tokens and sequences, and the arithmetic of metrics.

All reductions of rows that hold several sequences are in this file.
"""

import jax.numpy as jnp


def token_sum(values, mask):
    """Sums `values * mask` over all tokens, ignoring values that are masked.

    Both are `(rows, length)`; values may be anything, NaN included, where the
    mask is 0.
    """
    mask = mask.astype("float32")
    values = jnp.where(mask != 0, values.astype("float32"), 0.0)
    return jnp.sum(values * mask)


def segment_sum(values, segment_ids, num_sequences):
    """Sums over the tokens of each sequence, to `(rows, num_sequences)`.

    `values` and `segment_ids` are `(rows, length)`; the ids are
    `1 ... num_sequences` for the tokens of a sequence, 0 at padding.
    """
    ids = jnp.arange(1, num_sequences + 1)
    member = segment_ids[:, :, None] == ids[None, None, :]
    return jnp.sum(jnp.where(member, values[:, :, None], 0.0), axis=1)


def segment_places(values, segment_ids, num_sequences):
    """Computes the cumulative sum within each sequence, `(rows, length)`.

    That of a mask numbers the tokens of each sequence from 1. It is 0 at
    padding. The arguments are as in `segment_sum`.
    """
    ids = jnp.arange(1, num_sequences + 1)
    member = segment_ids[:, :, None] == ids[None, None, :]
    running = jnp.cumsum(jnp.where(member, values[:, :, None], 0.0), axis=1)
    return jnp.sum(jnp.where(member, running, 0.0), axis=2)


def spread(values, segment_ids):
    """Gives each token the value `(rows, num_sequences)` of its sequence.

    The result is `(rows, length)`, 0 at padding.
    """
    slot = jnp.maximum(segment_ids - 1, 0)
    values = jnp.take_along_axis(values, slot, axis=1)
    return jnp.where(segment_ids > 0, values, 0.0)


def ratio(numerator, denominator):
    """Divides, with 0 where the denominator is 0."""
    safe = jnp.where(denominator == 0, 1.0, denominator)
    return jnp.where(denominator == 0, 0.0, numerator / safe)


def metric_value(metric):
    """Computes the value of a metric, a float32 scalar.

    It is 0 for an empty reduction (an infinite minimum, a count of 0).

    Args:
        metric: `("mean", numerator, denominator)`, `("sum", value)`,
            `("min", value)`, `("max", value)`, or `("effective_share", sum
            of weights, sum of their squares, count)`: Kish's effective
            sample size over the count, 1 if all weights are equal; or
            `("difference", numerator, denominator, numerator,
            denominator)`: the first mean minus the second, 0 if either
            denominator is 0; or `(function, sum, ...)`: a function of sums,
            arrays of any shape.
    """
    kind, *values = metric
    if callable(kind):
        return kind(*values)
    if kind == "mean":
        return ratio(*values)
    if kind == "effective_share":
        total, squares, count = values
        return ratio(ratio(total, squares) * total, count)
    if kind == "difference":
        first, second = ratio(*values[:2]), ratio(*values[2:])
        both = (values[1] != 0) & (values[3] != 0)
        return jnp.where(both, first - second, 0.0)
    if kind == "min":
        return jnp.where(jnp.isposinf(values[0]), 0.0, values[0])
    if kind == "max":
        return jnp.where(jnp.isneginf(values[0]), 0.0, values[0])
    return values[0]


def merge_metrics(stacked):
    """Combines the metrics of several sets of rows.

    They are in the form of `Loss.total`, each value with a leading axis over
    the sets.
    """
    reduce = {"min": jnp.min, "max": jnp.max}
    return {
        name: (kind, *(reduce.get(kind, jnp.sum)(v, axis=0) for v in values))
        for name, (kind, *values) in stacked.items()
    }
