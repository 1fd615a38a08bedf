"""The projection on the vocabulary, in chunks of tokens.

Logits of shape `(tokens, vocabulary)` exist for one chunk at a time, forward
and backward, and only for selected tokens. The number of iterations depends
on the number of selected tokens, so that a batch with few of them is cheap
and does not recompile.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from keras_posttrain.models import sharding

# On a CPU a chunk has about this many float32 logits in memory, and a number
# of tokens within these bounds, in steps of the smaller. Products of fewer
# tokens spend their time on copies of the kernel.
CHUNK_LOGITS = 2**21
CHUNK_BOUNDS = (256, 1024)
# An accelerator reads the kernel from memory for each chunk. Its products take
# longer than that only with hundreds of tokens: 240 on a v5e, 570 on a v6e,
# and twice that where the kernel is trained. The logits of a chunk take this
# share of the memory, in steps of the smaller bound: for a vocabulary of
# 128,256 they are 1,024 tokens on a v5e and 1,920 on a v6e.
MEMORY_SHARE = 1 / 32
ACCELERATOR_BOUNDS = (128, 2048)
# On a CPU a chunk is multiplied with about this many columns of the kernel at
# a time: XLA's products copy their operands there, and the copies and the
# gradient of so many columns stay in the processor's caches.
TILE = 3072

# Less than any logit; its differences from logits are finite.
LOWEST = -1e30

# Optional values that depend on the full distribution of a token.
EXTRAS = ("entropies", "collision_entropies")


@dataclasses.dataclass(frozen=True)
class Head:
    """Settings of the projection: `cap * tanh(h @ W / cap) / temperature`.

    Args:
        transposed: bool, whether the kernel has the shape
            `(vocabulary, hidden)`, as a tied embedding, and not
            `(hidden, vocabulary)`.
        chunk_size: int or `None`, tokens per chunk. By default a chunk has
            256 to 1,024 tokens on a CPU, and on an accelerator those whose
            logits a share of its memory holds.
        trainable: bool, whether the kernel gets a gradient.
        tile: int or `None`, columns of logits in each product of
            `logits_in_tiles` and `gradients`. By default about 3,072 on a
            CPU, and all of them on an accelerator.
        axis: str or `None`: the axis of the mesh over which the vocabulary
            is split, inside a `jax.shard_map` over it. Each device then
            computes the logits of its part of the vocabulary, and devices
            exchange a few numbers per token.
    """

    transposed: bool
    soft_cap: float | None = None
    temperature: float = 1.0
    chunk_size: int | None = None
    trainable: bool = True
    tile: int | None = None
    axis: str | None = None

    def summed(self, x):
        """Adds up `x`, sums over a part of the vocabulary, over devices."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def columns(self, kernel, targets):
        """Finds targets' columns; out of range if another device has them."""
        if self.axis is None:
            return targets
        here = self.vocabulary_size(kernel)
        return targets - jax.lax.axis_index(self.axis) * here

    def vocabulary_size(self, kernel):
        """Returns the number of logits that a kernel produces."""
        return kernel.shape[0 if self.transposed else 1]

    def chunk(self, vocabulary_size, tokens, keep=True):
        """Returns the tokens of a chunk, at most `tokens`.

        If `keep` is false, logits exist for one tile at a time.
        """
        columns = vocabulary_size if keep else self.tile_size(vocabulary_size)
        return min(self.chunk_size or _default_chunk(columns), tokens)

    def logits(self, hidden, kernel):
        """Computes the logits, float32 of shape `(tokens, vocabulary)`."""
        axis = 1 if self.transposed else 0
        logits = jax.lax.dot_general(
            hidden,
            kernel,
            (((1,), (axis,)), ((), ())),
            preferred_element_type="float32",
        )
        if self.soft_cap is not None:
            logits = jnp.tanh(logits / self.soft_cap) * self.soft_cap
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return logits

    def logits_in_tiles(self, hidden, kernel):
        """Computes `logits` of a chunk in tiles, without gradients."""

        def add(tile, logits):
            part = self.tile_logits(tile, hidden, kernel)
            return tile.put(logits, part, axis=1)

        shape = (hidden.shape[0], self.vocabulary_size(kernel))
        return self.over_tiles(kernel, add, jnp.zeros(shape, "float32"))

    def tile_logits(self, tile, hidden, kernel):
        """Computes the columns of `tile` of the logits."""
        return self.logits(hidden, tile.take(kernel, self._vocabulary_axis))

    def gradients(self, d_logits, hidden, kernel, d_kernel=None):
        """Computes the gradients of a chunk, a tile at a time.

        Args:
            d_logits: function from a `Tile` to the gradient of its columns
                of the product of `hidden` and `kernel`, a float32 array of
                shape `(tokens, tile.size)`.
            hidden, kernel: as in `logits`.
            d_kernel: float32 array of the kernel's shape or `None`: the sum
                of the gradients of other chunks.

        Returns:
            The float32 gradient of the hidden states, and the sum
            `d_kernel`, to which this chunk is added.
        """

        def add(tile, carry):
            by_hidden, by_kernel = carry
            part = tile.without_others(d_logits(tile)).astype(kernel.dtype)
            by_hidden = by_hidden + self._hidden_gradient(
                part, tile.take(kernel, self._vocabulary_axis)
            )
            if by_kernel is not None:
                axis = self._vocabulary_axis
                new = self._kernel_gradient(part.astype(hidden.dtype), across)
                new = new + tile.take(by_kernel, axis)
                by_kernel = tile.put(by_kernel, new, axis)
            return by_hidden, by_kernel

        # Products on a CPU are slower where they read the first operand along
        # its columns. It is transposed once for all tiles.
        across = hidden if self.transposed else hidden.T
        zeros = jnp.zeros(hidden.shape, "float32")
        return self.over_tiles(kernel, add, (zeros, d_kernel))

    def _hidden_gradient(self, d_logits, kernel):
        axis = self._vocabulary_axis
        return jax.lax.dot_general(
            d_logits,
            kernel,
            (((1,), (axis,)), ((), ())),
            preferred_element_type="float32",
        )

    def _kernel_gradient(self, d_logits, hidden):
        if self.transposed:
            pair, axes = (d_logits, hidden), ((0,), (0,))
        else:
            pair, axes = (hidden, d_logits), ((1,), (0,))
        return jax.lax.dot_general(
            *pair, (axes, ((), ())), preferred_element_type="float32"
        )

    @property
    def _vocabulary_axis(self):
        return 0 if self.transposed else 1

    def tile_size(self, columns):
        """Returns the columns of a tile where there are so many."""
        return min(self.tile or _default_tile(columns), columns)

    def over_chunks(self, kernel, size, count, function, carry):
        """Loops `carry = function(start, size, carry)` over chunks of tokens.

        If the vocabulary has tiles, the last chunk has half the size where
        `count`, an int32 scalar, leaves no more tokens to it. With few
        columns, unused rows cost less than a second loop to compile.
        """
        columns = self.vocabulary_size(kernel)
        if self.tile_size(columns) == columns or size % 2:
            chunks, small = (count + size - 1) // size, 0
        else:
            small = size // 2
            chunks = (count + small - 1) // size
        carry = jax.lax.fori_loop(
            0, chunks, lambda i, carry: function(i * size, size, carry), carry
        )
        if not small:
            return carry
        # At most one: `start` is a function of `i` because XLA would compute
        # what is the same in each iteration also where there is none.
        start = chunks * size
        return jax.lax.fori_loop(
            0,
            (start < count).astype("int32"),
            lambda i, carry: function(start + i, small, carry),
            carry,
        )

    def over_tiles(self, kernel, function, carry):
        """Loops `carry = function(tile, carry)` over the vocabulary."""
        columns = self.vocabulary_size(kernel)
        size = self.tile_size(columns)
        if size == columns:
            return function(Tile(0, 0, 0, columns), carry)

        def body(i, carry):
            # All tiles have one size: the last begins within the one before.
            start = jnp.minimum(i * size, columns - size)
            first = i * size if columns % size else start
            return function(Tile(i, start, first, size), carry)

        return jax.lax.fori_loop(0, self.tiles(columns), body, carry)

    def tiles(self, columns):
        """Returns the number of tiles of so many columns."""
        return -(-columns // self.tile_size(columns))


@dataclasses.dataclass(frozen=True)
class Tile:
    """Successive columns of logits: `size` of them, from column `start` on.

    Columns before the column `first` belong to another tile too. `number`
    counts tiles from 0.
    """

    number: jax.Array | int
    start: jax.Array | int
    first: jax.Array | int
    size: int

    @property
    def columns(self):
        """The columns, an int32 array of shape `(size,)`."""
        return self.start + jnp.arange(self.size, dtype="int32")

    def take(self, x, axis):
        """Takes the part of an array whose `axis` is the vocabulary."""
        if self.size == x.shape[axis]:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x, part, axis):
        """Replaces the part of an array whose `axis` is the vocabulary."""
        if self.size == x.shape[axis]:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, axis)

    def without_others(self, part):
        """Sets columns of another tile in `part`, `(tokens, size)`, to 0."""
        if self.start is self.first:
            return part
        return jnp.where(self.columns >= self.first, part, 0.0)


def _default_tile(columns):
    tiles = round(columns / TILE)
    if sharding.platform() != "cpu" or tiles <= 1:
        return columns
    size = -(-columns // tiles)
    # An odd multiple of 8: a product that reads down the columns of a tile
    # takes up to half as long again where rows are a power of two apart.
    return size + (8 - size) % 16


def _default_chunk(columns):
    """Returns the tokens of a chunk with so many columns of logits."""
    memory = sharding.device_memory()
    if sharding.platform() == "cpu" or memory is None:
        (low, high), size = CHUNK_BOUNDS, CHUNK_LOGITS // columns
    else:
        low, high = ACCELERATOR_BOUNDS
        size = int(MEMORY_SHARE * memory / (4 * columns))
    return int(np.clip(size - size % low, low, high))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens to project, moved to the first `count` of all slots.

    The int32 arrays of shape `(slots,)` have, for each token, its flat index,
    the flat index `source` of the hidden state that predicts it, and its id
    in `targets`.
    """

    index: jax.Array
    source: jax.Array
    targets: jax.Array
    count: jax.Array


jax.tree_util.register_dataclass(
    Tokens, ["index", "source", "targets", "count"], []
)


def select_tokens(token_ids, mask, predicted_by=None):
    """Selects the tokens of a batch whose `mask` is true.

    All arrays have the shape `(rows, length)`; there are `rows * length`
    slots. `predicted_by` has the column of the hidden state that predicts
    each token. By default it is the column before the token, and the first
    column is never selected.
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


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a chunk keeps of its tokens' distributions for their gradients.

    Attributes:
        logits: float32 array of shape `(tiles, slots, tile.size)` or `None`;
            a chunk has the first of the slots. With `tops` it has
            `exp(logits - top)`, which need not be computed again.
        tops: float32 array of shape `(tiles, slots)` or `None`, for each
            tile the largest logit of the tiles up to it.
    """

    logits: jax.Array | None
    tops: jax.Array | None

    @classmethod
    def of(cls, head, kernel, size, is_relative):
        """Makes the arrays for chunks of at most `size` tokens."""
        columns = head.vocabulary_size(kernel)
        tiles = head.tiles(columns)
        logits = jnp.zeros((tiles, size, head.tile_size(columns)), "float32")
        tops = jnp.zeros((tiles, size), "float32") if is_relative else None
        return cls(logits, tops)

    def put(self, tile, logits, weights, top):
        """Keeps a tile of a chunk's logits, or of their exponentials."""

        def put(x, part):
            start = (tile.number,) + (0,) * part.ndim
            return jax.lax.dynamic_update_slice(x, part[None], start)

        if self.logits is None:
            return self
        if self.tops is None:
            return Kept(put(self.logits, logits), None)
        return Kept(put(self.logits, weights), put(self.tops, top))

    def of_tile(self, tile, tokens):
        """Returns what is kept of a tile for so many tokens of a chunk."""
        return self.logits[tile.number, :tokens]

    def probabilities(self, tile, top, log_total):
        """Returns a tile's probabilities, and their logarithms or `None`.

        `top` and `log_total` are those of the chunk's tokens, `(tokens,)`.
        """
        size = top.shape[0]
        part = self.of_tile(tile, size)
        if self.tops is None:
            logps = (part - top[:, None]) - log_total[:, None]
            return jnp.exp(logps), logps
        scale = jnp.exp((self.tops[tile.number, :size] - top) - log_total)
        return part * scale[:, None], None


jax.tree_util.register_dataclass(Kept, ["logits", "tops"], [])


def _measure(head, hidden, kernel, targets, extras, kept):
    """Computes the values of one chunk, and the state of its gradient.

    `kept` is a `Kept`; what an earlier chunk has put there is replaced.
    """
    size = hidden.shape[0]
    targets = head.columns(kernel, targets)
    zeros = jnp.zeros(size, "float32")
    sums = {name: zeros for name in ("weights", *extras)}

    def add(tile, carry):
        top, sums, at_target, kept = carry
        part = head.tile_logits(tile, hidden, kernel)
        column = targets - tile.start
        is_here = (column >= 0) & (column < tile.size)
        here = jnp.take_along_axis(part, column[:, None], 1, mode="clip")
        at_target = jnp.where(is_here, here[:, 0], at_target)
        # Columns of another tile are no larger than the largest of all.
        new_top = jnp.maximum(top, jnp.max(part, axis=-1))
        sums = _relative_to(new_top, top, sums)
        # Logits are taken relative to the largest: for a nearly certain
        # token the difference of two large logits would be mostly rounding
        # error.
        below = part - new_top[:, None]
        weights = tile.without_others(jnp.exp(below))
        terms = {
            "weights": weights,
            "entropies": weights * below,
            "collision_entropies": weights * weights,
        }
        sums = {k: x + jnp.sum(terms[k], axis=-1) for k, x in sums.items()}
        kept = kept.put(tile, part, weights, new_top)
        return new_top, sums, at_target, kept

    first = (jnp.full(size, LOWEST), sums, zeros, kept)
    top, sums, at_target, kept = head.over_tiles(kernel, add, first)
    if head.axis is not None:
        highest = jax.lax.pmax(top, head.axis)
        sums = head.summed(_relative_to(highest, top, sums))
        top, at_target = highest, head.summed(at_target)
    log_total = jnp.log(sums["weights"])
    values = {
        "per_token_logps": at_target - top - log_total,
        "correct": (at_target >= top).astype("float32"),
    }
    if "entropies" in extras:
        values["entropies"] = log_total - sums["entropies"] / sums["weights"]
    if "collision_entropies" in extras:
        squares = jnp.log(sums["collision_entropies"])
        values["collision_entropies"] = 2 * log_total - squares
    return values, (kept, top, log_total)


def _relative_to(new_top, top, sums):
    """Converts sums over logits relative to `top` to those of `new_top`."""
    change = top - new_top
    factor = jnp.exp(change)
    new = {"weights": sums["weights"] * factor}
    if "entropies" in sums:
        new["entropies"] = factor * (
            sums["entropies"] + change * sums["weights"]
        )
    if "collision_entropies" in sums:
        new["collision_entropies"] = sums["collision_entropies"] * factor**2
    return new


def _logits_gradient(head, state, targets, cotangent, by_entropy, tile):
    """Computes d(sum of cotangent * logp) / d(raw logits) for one tile.

    With `by_entropy`, a pair `(entropies, cotangent)`, the gradient of the
    sum of entropies times their cotangent is added: dH / d(logit) is
    `-p * (log p + H)`.
    """
    kept, top, log_total = state
    weights, logps = kept.probabilities(tile, top, log_total)
    hit = (tile.columns[None] == targets[:, None]).astype("float32")
    gradient = hit - weights
    gradient = gradient * (cotangent / head.temperature)[:, None]
    if by_entropy is not None:
        entropies, cotangent = by_entropy
        surplus = weights * (logps + entropies[:, None])
        scale = (cotangent / head.temperature)[:, None]
        gradient = gradient - surplus * scale
    if head.soft_cap is not None:
        logits = kept.of_tile(tile, targets.shape[0])
        bounded = logits * (head.temperature / head.soft_cap)
        gradient = gradient * (1 - bounded**2)
    return gradient


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
    """Loops over the chunks once; returns dicts of values and gradients.

    Args:
        head, hidden, kernel, tokens, extras: as in `token_values`.
        weights: float32 array of shape `(slots,)`, passed to `cotangent`.
        cotangent: `None` to compute values only; `"one"` for the derivative
            of each log-probability with respect to its hidden state; or a
            function from the chunk's log-probabilities and `weights` to
            d(loss)/d(log-probability).
        by_entropy: with such a function, d(loss)/d(entropy) of each slot, or
            `None`.
    """
    slots = tokens.index.shape[0]
    keep = cotangent is not None
    size = head.chunk(head.vocabulary_size(kernel), slots, keep)
    chunks = -(-slots // size)
    pad = chunks * size - slots
    index, source, targets, weights = (
        jnp.pad(x, (0, pad))
        for x in (tokens.index, tokens.source, tokens.targets, weights)
    )
    if by_entropy is not None:
        by_entropy = jnp.pad(by_entropy, (0, pad))
    names = ["per_token_logps", "correct", *extras]
    # Unused slots write to one more element at the end, removed below.
    carry = {name: jnp.zeros(slots + 1, "float32") for name in names}
    # With tiles all chunks use the same arrays, which are then cleared once.
    is_tiled = head.tiles(head.vocabulary_size(kernel)) > 1
    is_relative = is_tiled and head.soft_cap is None and by_entropy is None

    def keep_of(size):
        if not keep:
            return Kept(None, None)
        return Kept.of(head, kernel, size, is_relative)

    if is_tiled:
        carry["kept"] = keep_of(size)
    if keep:
        carry["d_hidden"] = jnp.zeros(hidden.shape, "float32")
    if cotangent == "one":
        carry["d_hidden"] = jnp.zeros((slots + 1, hidden.shape[1]), "float32")
    with_kernel = callable(cotangent) and head.trainable
    if with_kernel:
        carry["d_kernel"] = jnp.zeros(kernel.shape, "float32")

    def body(start, size, carry):
        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        used = start + jnp.arange(size) < tokens.count
        out = jnp.where(used, cut(index), slots)
        # Unused slots get h = 0, so that the hidden state of another token,
        # which may be NaN, has no effect.
        h = jnp.where(used[:, None], hidden[cut(source)], 0)
        y = cut(targets)
        kept = carry["kept"] if is_tiled else keep_of(size)
        values, state = _measure(head, h, kernel, y, extras, kept)
        new = {name: carry[name].at[out].set(values[name]) for name in names}
        if is_tiled:
            new["kept"] = state[0]
        if not keep:
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
        d_logits = functools.partial(
            _logits_gradient, head, state, head.columns(kernel, y), ct, pair
        )
        d_hidden, d_kernel = head.gradients(
            d_logits, h, kernel, carry.get("d_kernel")
        )
        if cotangent == "one":
            new["d_hidden"] = carry["d_hidden"].at[out].set(d_hidden)
        else:
            new["d_hidden"] = carry["d_hidden"].at[cut(source)].add(d_hidden)
        if with_kernel:
            new["d_kernel"] = d_kernel
        return new

    with jax.named_scope("head"):
        carry = head.over_chunks(kernel, size, tokens.count, body, carry)
    carry.pop("kept", None)
    values = {name: carry.pop(name)[:slots] for name in names}
    return values, carry


def token_values(head, hidden, kernel, tokens, *, extras=()):
    """Computes log-probabilities and the values in `extras`, no gradients.

    Args:
        hidden: float array of shape `(rows * length, hidden_dim)`.
        kernel: float array, `(vocabulary, hidden_dim)` or its transpose.
        extras: names out of `EXTRAS`.

    Returns:
        A dict of float32 arrays of shape `(rows * length,)`, 0 for tokens
        that were not selected: `per_token_logps`, `correct` (1 where the
        token is the most probable one), `entropies` (in nats), and
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
    """Computes `token_values` with gradients of logps and entropies.

    The forward pass stores the derivative of each log-probability with
    respect to its hidden state, so that the backward pass of the hidden
    states needs no logits. They are recomputed only if the head is trained
    or the loss has a gradient through the entropies. Entropies that are only
    reported make the backward pass no slower. `probe` has the shape
    `(slots,)` and is zero.
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
        """Returns the cotangent of each slot; `None` if no loss uses it."""
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


# Symbolic zeros show the backward pass which outputs the loss uses.
token_logps.defvjp(_logps_forward, _logps_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def token_loss_sum(
    head, hidden, kernel, tokens, weights, token_loss, extras=()
):
    """Sums a weighted elementwise loss of log-probabilities in one pass.

    The gradient of such a loss is known as soon as the log-probability is.
    The same chunk of logits therefore serves the value, the gradient of the
    hidden states and that of the kernel: three matrix products with the
    vocabulary in total.

    The float32 `weights`, `(slots,)`, are in the order of `tokens`. Returns
    the sum and the dict of `token_values`, which has no gradient.
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
    # The backward pass returns gradients in the dtypes of these arrays.
    gradients["d_hidden"] = gradients["d_hidden"].astype(hidden.dtype)
    if not head.trainable:
        gradients["d_kernel"] = jnp.zeros(kernel.shape, "float32")
    gradients["d_kernel"] = gradients["d_kernel"].astype(kernel.dtype)
    return (total, values), gradients


def _loss_backward(head, token_loss, extras, gradients, cotangents):
    # `shard_map` divides the cotangent of a replicated output among the
    # devices, and adds up their gradients of a replicated input, the hidden
    # states.
    scale = head.summed(cotangents[0])
    return (
        (gradients["d_hidden"] * scale).astype(gradients["d_hidden"].dtype),
        (gradients["d_kernel"] * scale).astype(gradients["d_kernel"].dtype),
        None,
        None,
    )


token_loss_sum.defvjp(_loss_forward, _loss_backward)
