"""Compares a student's distributions with its teachers' for some tokens."""

import functools

import jax
import jax.numpy as jnp

from keras_posttrain.losses.divergence import with_tail

# Optional values in addition to the divergence.
COMPANIONS = ("per_token_logps", "agrees", "teacher_per_token_logps")

# Tokens that are compared at a time on a CPU.
BLOCK = 8


class _Distribution:
    """Logits of a chunk with their normalizers at a temperature.

    Logits are taken relative to the largest: for a nearly certain token the
    difference of two large logits would be mostly rounding error.
    """

    def __init__(self, logits, temperature):
        self.logits, self.temperature = logits, temperature
        self.top = jnp.max(logits, axis=-1, keepdims=True)
        self.log_total = self._log_total(temperature)

    def _scaled(self, logits, temperature):
        below = logits - self.top
        return below if temperature == 1.0 else below / temperature

    def _log_total(self, temperature):
        weights = jnp.exp(self._scaled(self.logits, temperature))
        return jnp.log(jnp.sum(weights, axis=-1, keepdims=True))

    @functools.cached_property
    def log_total_at_1(self):
        if self.temperature == 1.0:
            return self.log_total
        return self._log_total(1.0)

    def logps(self, logits=None):
        """Returns log-probabilities of these logits, by default of all."""
        logits = self.logits if logits is None else logits
        return self._scaled(logits, self.temperature) - self.log_total

    def logps_at_1(self, logits=None):
        logits = self.logits if logits is None else logits
        return logits - self.top - self.log_total_at_1

    def of(self, targets):
        """Returns each target's log-probability at temperature 1."""
        chosen = _at(self.logits, targets[:, None])
        return self.logps_at_1(chosen)[:, 0]


def map_blocks(function, rows):
    """Applies `function` to the rows of a chunk, on a CPU in small blocks.

    The function reads the logits about ten times; those of a small block
    stay in the CPU's cache. All arrays have a leading `tokens` axis.
    """
    size, block = rows[0].shape[0], BLOCK
    if jax.default_backend() != "cpu" or size % block or size == block:
        return function(rows)
    cut = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), rows)
    found = jax.lax.map(function, cut)
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), found)


def compare(soft_cap, settings, names, gradients, rows):
    """Compares a student with its teachers on some tokens.

    Args:
        soft_cap: float or `None`, the cap of the student's logits.
        settings: `(divergence, temperature, tail, needs)`, as in
            `models/divergence_head.py:divergence_sum`.
        names: names of the values to return.
        rows: `(logits, teachers, targets, weights, shares)`: the student's
            logits; for each teacher its logits, or `(ids, logps)` of its
            top tokens; the token ids; the pair of weights of divergences and
            of log-probabilities (or `None`); and the weight of each teacher.
            The leading axis is the tokens.

    Returns:
        `(values, gradient)`: a dict of `names` and `sum`, float32 arrays of
        shape `(tokens,)`; and d(sum) / d(logits before the cap), or `None`.
    """
    logits, theirs, targets, weights, shares = rows
    divergence, temperature, tail, needs = settings
    student = _Distribution(logits, temperature)
    found, parts = [], []
    for rows_of_one, share in zip(theirs, shares):
        of_kind = _with_top if isinstance(rows_of_one, tuple) else _with_full
        ids, chosen, function, of_one = of_kind(
            student, rows_of_one, targets, settings
        )
        if not gradients:
            found.append({**of_one, "divergences": function(chosen)})
            continue
        value, pull = jax.vjp(function, chosen)
        found.append({**of_one, "divergences": value})
        cotangent = weights[0] * share
        (part,) = pull(cotangent)
        # Tokens without a weight may have infinite or NaN gradients.
        part = jnp.where(cotangent[:, None] != 0, part, 0.0)
        parts.append((ids, part))
    values = _values(student, found, shares, names, targets, weights)
    if not gradients:
        return values, None
    gradient = _gradient(student, parts, targets, weights[1])
    if soft_cap is not None:
        gradient = gradient * (1 - (logits / soft_cap) ** 2)
    return values, gradient


def _with_full(student, logits, targets, settings):
    divergence, temperature, _, needs = settings
    teacher = _Distribution(logits, temperature)
    found = {}
    if "agrees" in needs:
        # A single pass over the logits; an argmax would be a separate loop.
        at_best = jnp.where(logits >= teacher.top, student.logits, -jnp.inf)
        agrees = jnp.max(at_best, axis=-1) >= student.top[:, 0]
        found["agrees"] = agrees.astype("float32")
    if "teacher_per_token_logps" in needs:
        found["teacher_per_token_logps"] = teacher.of(targets)

    def function(chosen):
        return divergence(chosen, teacher.logps())

    return None, student.logps(), function, found


def _with_top(student, rows, targets, settings):
    divergence, _, tail, needs = settings
    ids, logps = rows
    found = {}
    if "agrees" in needs:
        best = _at(ids, jnp.argmax(logps, axis=-1)[:, None])
        agrees = _at(student.logits, best) >= student.top
        found["agrees"] = agrees[:, 0].astype("float32")

    def function(chosen):
        if tail:
            return divergence(with_tail(chosen), with_tail(logps))
        return divergence(chosen, logps)

    return ids, student.logps(_at(student.logits, ids)), function, found


def _gradient(student, parts, targets, by_logp):
    """Computes d(sum) / d(logits).

    Args:
        parts: list of `(ids, by_logps)`, cotangents of the log-probabilities
            at the temperature: of the tokens `ids`, or of all if `ids` is
            `None`.
        by_logp: float32 array of shape `(tokens,)` or `None`, the cotangent
            of the targets' log-probabilities.
    """
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for _, part in parts)
    gradient = -jnp.exp(student.logps()) * total
    for ids, part in parts:
        if ids is None:
            gradient = gradient + part
    gradient = gradient / student.temperature
    if by_logp is not None:
        columns = jax.lax.broadcasted_iota("int32", gradient.shape, 1)
        hit = (columns == targets[:, None]).astype("float32")
        surplus = hit - jnp.exp(student.logps_at_1())
        gradient = gradient + by_logp[:, None] * surplus
    rows = jnp.arange(gradient.shape[0])[:, None]
    for ids, part in parts:
        if ids is not None:
            gradient = gradient.at[rows, ids].add(part / student.temperature)
    return gradient


def _at(values, ids):
    return jnp.take_along_axis(values, ids, axis=-1)


def _values(student, found, shares, names, targets, weights):
    """Returns the values of some tokens and their terms of the sum."""

    def weighted(name):
        return sum(
            jnp.where(share != 0, share * of_one[name], 0.0)
            for of_one, share in zip(found, shares)
        )

    values = {"divergences": weighted("divergences")}
    total_share = sum(shares)
    for name in ("agrees", "teacher_per_token_logps"):
        if name in names:
            mean = weighted(name) / jnp.where(
                total_share == 0, 1.0, total_share
            )
            values[name] = jnp.where(total_share == 0, 0.0, mean)
    by_divergence, by_logp = weights
    total = jnp.where(
        by_divergence != 0, by_divergence * values["divergences"], 0.0
    )
    if by_logp is not None or "per_token_logps" in names:
        values["per_token_logps"] = student.of(targets)
    if by_logp is not None:
        total = total + by_logp * values["per_token_logps"]
    return {**values, "sum": total}
