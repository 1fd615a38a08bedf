"""The projection on the vocabulary, always in chunks of tokens.

Logits of shape `(tokens, vocabulary)` exist for one chunk at a time, forward
and backward, and only for tokens that are asked for. The loops run as often
as there are such tokens, so that a batch with few of them costs little and
recompiles nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

# A chunk holds about this many logits (float32), within the bounds below.
CHUNK_LOGITS = 2**23
CHUNK_BOUNDS = (64, 1024)

# What is computed of the whole distribution of a token, where asked for.
EXTRAS = ("entropies", "collision_entropies")


@dataclasses.dataclass(frozen=True)
class Head:
    """How hidden states become logits: `cap * tanh((h @ W + b) / cap / T)`.

    Args:
        transposed: bool, whether the kernel is `(vocabulary, hidden)`, as a
            tied embedding is, and not `(hidden, vocabulary)`.
        soft_cap: float or `None`, the cap of the final logits.
        temperature: float, logits are divided by it, after the cap.
        chunk_size: int or `None`, tokens per chunk. By default about
            2**23 logits are held at once.
        trainable: bool, whether the kernel's gradient is wanted.
        axis: str or `None`: the axis of the mesh over which the vocabulary
            is split, inside a `jax.shard_map` over it. Each device then has
            the logits of its own part, and a few numbers a token are
            exchanged.
    """

    transposed: bool
    soft_cap: float | None = None
    temperature: float = 1.0
    chunk_size: int | None = None
    trainable: bool = True
    axis: str | None = None

    def summed(self, x):
        """`x`, a sum over a part of the vocabulary, over all of it."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def columns(self, logits, targets):
        """Where the targets are among these logits, also outside of them."""
        if self.axis is None:
            return targets
        return targets - jax.lax.axis_index(self.axis) * logits.shape[-1]

    def chunk(self, vocabulary_size, tokens):
        low, high = CHUNK_BOUNDS
        size = self.chunk_size or int(
            np.clip(CHUNK_LOGITS // vocabulary_size, low, high)
        )
        return min(size, tokens)

    def logits(self, hidden, kernel):
        """float32 logits of `hidden` `(tokens, hidden_dim)`, and the slope
        of the soft cap at each (`None` without one)."""
        axis = 1 if self.transposed else 0
        logits = jax.lax.dot_general(
            hidden,
            kernel,
            (((1,), (axis,)), ((), ())),
            preferred_element_type="float32",
        )
        slope = None
        if self.soft_cap is not None:
            bounded = jnp.tanh(logits / self.soft_cap)
            logits, slope = bounded * self.soft_cap, 1 - bounded**2
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return logits, slope

    def hidden_gradient(self, d_logits, kernel):
        axis = 0 if self.transposed else 1
        return jax.lax.dot_general(
            d_logits.astype(kernel.dtype),
            kernel,
            (((1,), (axis,)), ((), ())),
            preferred_element_type="float32",
        )

    def kernel_gradient(self, d_logits, hidden):
        d_logits = d_logits.astype(hidden.dtype)
        pair = (d_logits, hidden) if self.transposed else (hidden, d_logits)
        return jax.lax.dot_general(
            *pair, (((0,), (0,)), ((), ())), preferred_element_type="float32"
        )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens to project: `count` of them, gathered to the front.

    Attributes:
        index: int32 array of shape `(slots,)`: flat indices of the tokens
            asked for; what lies behind `count` is not read.
        source: int32 array of shape `(slots,)`: flat indices of the hidden
            states that predict them.
        targets: int32 array of shape `(slots,)`: their ids.
        count: int32 scalar.
    """

    index: jax.Array
    source: jax.Array
    targets: jax.Array
    count: jax.Array


jax.tree_util.register_dataclass(
    Tokens, ["index", "source", "targets", "count"], []
)


def select_tokens(token_ids, mask, predicted_by=None):
    """Gathers the tokens of a batch whose `mask` is true.

    Args:
        token_ids: int array of shape `(rows, length)`.
        mask: bool array of shape `(rows, length)`.
        predicted_by: int array of shape `(rows, length)` or `None`: the
            column of the hidden state that predicts the token; by default
            the one before it. The first column has none and is never
            selected.

    Returns:
        `Tokens` with `rows * length` slots.
    """
    rows, length = token_ids.shape
    columns = jnp.arange(length, dtype="int32")[None]
    if predicted_by is None:
        predicted_by = jnp.broadcast_to(columns - 1, mask.shape)
        mask = mask & (columns > 0)
    row_start = jnp.arange(rows, dtype="int32")[:, None] * length
    source = (row_start + predicted_by).reshape(-1)
    mask = mask.reshape(-1)
    slots = mask.size
    place = jnp.where(mask, jnp.cumsum(mask) - 1, slots)
    index = (
        jnp.zeros(slots, "int32")
        .at[place]
        .set(jnp.arange(slots, dtype="int32"), mode="drop")
    )
    return Tokens(
        index=index,
        source=source[index],
        targets=token_ids.reshape(-1)[index],
        count=mask.sum(dtype="int32"),
    )


def _measure(head, hidden, kernel, targets, extras):
    """Log-probabilities and their companions for one chunk."""
    logits, slope = head.logits(hidden, kernel)
    top = jnp.max(logits, axis=-1)
    if head.axis is not None:
        top = jax.lax.pmax(top, head.axis)
    # All is measured from the top: near certainty, differences of large
    # logits would leave nothing but their rounding.
    below = logits - top[:, None]
    weights = jnp.exp(below)
    total = head.summed(jnp.sum(weights, axis=-1))
    targets = head.columns(logits, targets)[:, None]
    at_target = jnp.take_along_axis(logits, targets, 1, mode="clip")
    if head.axis is not None:
        is_here = (targets >= 0) & (targets < logits.shape[-1])
        at_target = head.summed(jnp.where(is_here, at_target, 0.0))
    at_target = at_target[:, 0]
    log_total = jnp.log(total)
    values = {
        "per_token_logps": at_target - top - log_total,
        "correct": (at_target >= top).astype("float32"),
    }
    if "entropies" in extras:
        mean = head.summed(jnp.sum(weights * below, axis=-1)) / total
        values["entropies"] = log_total - mean
    if "collision_entropies" in extras:
        squares = head.summed(jnp.sum(weights * weights, axis=-1))
        values["collision_entropies"] = 2 * log_total - jnp.log(squares)
    return values, (below, log_total, slope)


def _logits_gradient(head, state, targets, cotangent, by_entropy=None):
    """d(sum of cotangent * logp) / d(raw logits) for one chunk.

    `by_entropy`, `(entropies, cotangent)`, adds the sum of the entropies
    times their own cotangent: dH / d(logit) is `-p * (log p + H)`.
    """
    below, log_total, slope = state
    columns = jax.lax.broadcasted_iota("int32", below.shape, 1)
    targets = head.columns(below, targets)[:, None]
    hit = (columns == targets).astype("float32")
    logps = below - log_total[:, None]
    gradient = hit - jnp.exp(logps)
    gradient = gradient * (cotangent / head.temperature)[:, None]
    if by_entropy is not None:
        entropies, cotangent = by_entropy
        surplus = jnp.exp(logps) * (logps + entropies[:, None])
        scale = (cotangent / head.temperature)[:, None]
        gradient = gradient - surplus * scale
    return gradient if slope is None else gradient * slope


def _sweep(
    head,
    hidden,
    kernel,
    tokens,
    weights,
    *,
    cotangent,
    extras,
    by_entropy=None,
):
    """One loop over the chunks.

    `cotangent` is `None` (values alone), `"one"` (the derivative of every
    log-probability by its hidden state), or a function of the chunk's
    log-probabilities and `weights` that gives d(loss)/d(log-probability).
    With such a function, `by_entropy` may hold d(loss)/d(entropy) for each
    slot.
    """
    slots, vocabulary = tokens.index.shape[0], _vocabulary(head, kernel)
    size = head.chunk(vocabulary, slots)
    chunks = -(-slots // size)
    pad = chunks * size - slots
    index, source, targets, weights = (
        jnp.pad(x, (0, pad))
        for x in (tokens.index, tokens.source, tokens.targets, weights)
    )
    if by_entropy is not None:
        by_entropy = jnp.pad(by_entropy, (0, pad))
    names = ["per_token_logps", "correct", *extras]
    # Slots without a token write to a place behind the last, cut off below.
    carry = {name: jnp.zeros(slots + 1, "float32") for name in names}
    if cotangent is not None:
        carry["d_hidden"] = jnp.zeros(hidden.shape, "float32")
    if cotangent == "one":
        carry["d_hidden"] = jnp.zeros((slots + 1, hidden.shape[1]), "float32")
    with_kernel = callable(cotangent) and head.trainable
    if with_kernel:
        carry["d_kernel"] = jnp.zeros(kernel.shape, "float32")

    def body(i, carry):
        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, i * size, size)

        used = i * size + jnp.arange(size) < tokens.count
        out = jnp.where(used, cut(index), slots)
        # Behind the last token h is 0: what another token's hidden state
        # may hold (even a NaN) has no way in.
        h = jnp.where(used[:, None], hidden[cut(source)], 0)
        y = cut(targets)
        values, state = _measure(head, h, kernel, y, extras)
        new = {name: carry[name].at[out].set(values[name]) for name in names}
        if cotangent is None:
            return new
        if cotangent == "one":
            ct = used.astype("float32")
        else:
            ct = cotangent(values["per_token_logps"], cut(weights))
            ct = jnp.where(used, ct, 0.0)
        pair = None
        if by_entropy is not None:
            pair = (
                values["entropies"],
                jnp.where(used, cut(by_entropy), 0.0),
            )
        d_logits = _logits_gradient(head, state, y, ct, pair)
        d_hidden = head.hidden_gradient(d_logits, kernel)
        if cotangent == "one":
            new["d_hidden"] = carry["d_hidden"].at[out].set(d_hidden)
        else:
            new["d_hidden"] = carry["d_hidden"].at[cut(source)].add(d_hidden)
        if with_kernel:
            new["d_kernel"] = carry["d_kernel"] + head.kernel_gradient(
                d_logits, h
            )
        return new

    steps = (tokens.count + size - 1) // size
    carry = jax.lax.fori_loop(0, steps, body, carry)
    values = {name: carry.pop(name)[:slots] for name in names}
    return values, carry


def _vocabulary(head, kernel):
    return kernel.shape[0 if head.transposed else 1]


def token_values(head, hidden, kernel, tokens, *, extras=()):
    """Log-probabilities and their companions, without a gradient.

    Args:
        head: `Head`.
        hidden: float array of shape `(rows * length, hidden_dim)`.
        kernel: float array, `(vocabulary, hidden_dim)` or its transpose.
        tokens: `Tokens`.
        extras: tuple of names of `EXTRAS` that are wanted too.

    Returns:
        A dict of float32 arrays of shape `(rows * length,)`, 0 where no
        token was asked for: `per_token_logps`, `correct` (1 where the token
        is the most probable one), `entropies` (in nats), and
        `collision_entropies`, `-log(sum(p**2))`.
    """
    weights = jnp.zeros(tokens.index.shape, "float32")
    hidden, kernel = jax.lax.stop_gradient((hidden, kernel))
    values, _ = _sweep(
        head, hidden, kernel, tokens, weights, cotangent=None, extras=extras
    )
    return values


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def token_logps(head, hidden, kernel, tokens, probe, extras=()):
    """Log-probabilities and entropies that any loss can differentiate.

    The forward sweep keeps the derivative of each log-probability by its
    hidden state, so that the backward pass of the hidden states needs no
    logits; only a trained head makes them again. So does a loss whose
    gradient goes through the entropies: where they are only reported, they
    cost the backward pass nothing.

    Args:
        head, hidden, kernel, tokens: as in `token_values`.
        probe: float32 array of shape `(slots,)`, zeros.
        extras: as in `token_values`.

    Returns:
        The dict of `token_values`; `per_token_logps` and `entropies` have
        gradients.
    """
    del probe
    return token_values(head, hidden, kernel, tokens, extras=extras)


def _logps_forward(head, hidden, kernel, tokens, probe, extras):
    hidden, kernel, tokens, probe = jax.tree.map(
        lambda x: x.value, (hidden, kernel, tokens, probe)
    )
    values, rest = _sweep(
        head, hidden, kernel, tokens, probe, cotangent="one", extras=extras
    )
    return values, (hidden, kernel, tokens, rest["d_hidden"])


def _logps_backward(head, extras, residuals, cotangents):
    hidden, kernel, tokens, jacobian = residuals
    slots = tokens.index.shape[0]
    used = jnp.arange(slots) < tokens.count

    def by_slot(name):
        """The cotangent of each slot; `None` where no loss reads them."""
        cotangent = cotangents.get(name)
        if cotangent is None or isinstance(cotangent, SymbolicZero):
            return None
        cotangent = head.summed(cotangent)
        return jnp.where(used, cotangent[tokens.index], 0.0)

    by_logps, by_entropy = by_slot("per_token_logps"), by_slot("entropies")
    if by_logps is None:
        by_logps = jnp.zeros(slots, "float32")
    gradients = {}
    if by_entropy is not None or head.trainable:
        _, gradients = _sweep(
            head,
            hidden,
            kernel,
            tokens,
            by_logps,
            cotangent=lambda logps, weights: weights,
            extras=("entropies",) if by_entropy is not None else (),
            by_entropy=by_entropy,
        )
    if by_entropy is None:
        rows = jacobian[tokens.index] * by_logps[:, None]
        zeros = jnp.zeros(hidden.shape, "float32")
        gradients["d_hidden"] = zeros.at[tokens.source].add(rows)
    d_kernel = gradients.get("d_kernel", jnp.zeros(kernel.shape, "float32"))
    return (
        gradients["d_hidden"].astype(hidden.dtype),
        d_kernel.astype(kernel.dtype),
        None,
        jnp.zeros(slots, "float32"),
    )


# Symbolic zeros tell the backward pass which outputs the loss reads.
token_logps.defvjp(_logps_forward, _logps_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def token_loss_sum(
    head, hidden, kernel, tokens, weights, token_loss, extras=()
):
    """The weighted sum of a loss of single tokens, in one sweep.

    Such a loss knows its gradient as soon as it sees the log-probability, so
    the same chunk of logits serves the value, the gradient of the hidden
    states and that of the kernel: three products with the vocabulary in all.

    Args:
        head, hidden, kernel, tokens: as in `token_values`.
        weights: float32 array of shape `(slots,)`, the weight of each
            selected token, in the order of `tokens`.
        token_loss: elementwise function of log-probabilities.
        extras: as in `token_values`.

    Returns:
        `(sum of weights * token_loss, values)`; `values`, the dict of
        `token_values`, has no gradient.
    """
    values = token_values(head, hidden, kernel, tokens, extras=extras)
    return _weighted_sum(values, tokens, weights, token_loss), values


def _weighted_sum(values, tokens, weights, token_loss):
    logps = values["per_token_logps"][tokens.index]
    used = jnp.arange(weights.shape[0]) < tokens.count
    return jnp.sum(jnp.where(used, weights * token_loss(logps), 0.0))


def _loss_forward(head, hidden, kernel, tokens, weights, token_loss, extras):
    def cotangent(logps, weights):
        return jax.grad(lambda x: jnp.sum(weights * token_loss(x)))(logps)

    values, gradients = _sweep(
        head,
        hidden,
        kernel,
        tokens,
        weights,
        cotangent=cotangent,
        extras=extras,
    )
    total = _weighted_sum(values, tokens, weights, token_loss)
    # The arrays themselves tell the backward pass the dtypes it must give.
    gradients["d_hidden"] = gradients["d_hidden"].astype(hidden.dtype)
    if not head.trainable:
        gradients["d_kernel"] = jnp.zeros(kernel.shape, "float32")
    gradients["d_kernel"] = gradients["d_kernel"].astype(kernel.dtype)
    return (total, values), gradients


def _loss_backward(head, token_loss, extras, gradients, cotangents):
    # `shard_map` deals an output's cotangent out over devices that share it,
    # and adds up what they give for what they share, the hidden states.
    scale = head.summed(cotangents[0])
    return (
        (gradients["d_hidden"] * scale).astype(gradients["d_hidden"].dtype),
        (gradients["d_kernel"] * scale).astype(gradients["d_kernel"].dtype),
        None,
        None,
    )


token_loss_sum.defvjp(_loss_forward, _loss_backward)
