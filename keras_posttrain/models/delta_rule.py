r"""The gated delta rule: linear attention with a state that is corrected.

For each head there is a state `S`, a float32 matrix `(key_dim, value_dim)`.
A token with key `k`, value `v` and query `q` decays it, replaces by a share
`beta` what it holds under the key, and reads it:

    S = exp(g) S;  S = S + beta k (v - k^T S)^T;  out = q^T S

A row is computed in chunks of tokens
([Yang et al., 2024](https://arxiv.org/abs/2412.06464)). Within a chunk the
corrections are the solution of a triangular system, so that most of the work
is products of matrices; only the states between chunks follow one another.

A state begins at zero with each sequence of a row. It is not made to decay:
what crosses the border of two sequences is multiplied by 0.
"""

import functools

import jax
import jax.numpy as jnp

# Tokens of a chunk. On a CPU 32 are the fastest for rows of 128 to 1024
# tokens: 64 take 1.2 to 1.8 times as long. A chunk of a tree has tokens of one
# segment only, so that longer ones would also be emptier.
CHUNK = 32
# Products of float32 values are not rounded to fewer bits.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def normalized(x):
    """Divides float32 keys or queries by their lengths."""
    x = x.astype("float32")
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def delta_step(query, key, value, decay, beta, state):
    """Computes one token of each sequence.

    Args:
        query, key: float32 arrays of shape `(sequences, heads, key_dim)`.
        value: float32 array of shape `(sequences, heads, value_dim)`.
        decay, beta: float32 arrays of shape `(sequences, heads)`; `decay` is
            the logarithm `g`.
        state: float32 array of shape
            `(sequences, heads, key_dim, value_dim)`.

    Returns:
        `(out, state)`, of the shapes of `value` and of `state`.
    """
    state = state * jnp.exp(decay)[..., None, None]
    held = _einsum("shk,shkv->shv", key, state)
    new = (value - held) * beta[..., None]
    state = state + key[..., None] * new[..., None, :]
    return _einsum("shk,shkv->shv", query, state), state


def delta_rule(query, key, value, decay, beta, segment_ids, state=None):
    """Computes rows of sequences, each of which begins with a new state.

    Args:
        query, key: float32 arrays of shape `(rows, length, heads, key_dim)`.
        value: float32 array of shape `(rows, length, heads, value_dim)`.
        decay, beta: float32 arrays of shape `(rows, length, heads)`. A token
            whose `decay` and `beta` are 0 leaves the state as it is.
        segment_ids: int array of shape `(rows, length)`; adjacent tokens of
            the same number are a sequence.
        state: float32 array of shape `(rows, heads, key_dim, value_dim)` or
            `None`, what the first sequence of each row begins with.

    Returns:
        `(out, state)`: an array like `value`, and the states after the last
        tokens.
    """
    rows, length, heads, key_dim = key.shape
    if state is None:
        state = jnp.zeros((rows, heads, key_dim, value.shape[-1]), "float32")
    size = min(CHUNK, length)
    more = -length % size
    # The last sequence continues, so that its state is the last one.
    ids = jnp.pad(segment_ids, ((0, 0), (0, more)), mode="edge")
    before = jnp.pad(ids[:, size - 1 : -1 : size], ((0, 0), (1, 0)))
    before = before.at[:, 0].set(ids[:, 0])
    tokens = [_zeros_behind(x, more) for x in (query, key, value, decay, beta)]
    chunks = _in_chunks(
        *(_cut(x, size) for x in (*tokens, ids)), before.swapaxes(0, 1)
    )

    def step(state, chunk):
        out, state = _next_state(state, chunk)
        return state, out

    state, out = jax.lax.scan(step, state, chunks)
    return _joined(out)[:, :length], state


def tree_delta_rule(
    query, key, value, decay, beta, segment_ids, prefix_segments
):
    """Computes rows whose sequences may continue others.

    The first token of a segment finds the state after the last one of the
    segment that it continues.

    Args:
        prefix_segments: int array of shape `(rows, num_sequences)`, as in
            `attention.py:subtree_ends`. Segments are numbered from 1 in the
            order of their tokens, and their numbers are at most
            `num_sequences`.

    The other arguments are those of `delta_rule`. Tokens of segment 0 are
    padding.

    Returns:
        `(out, states)`: an array like `value`, 0 at padding, and a float32
        array of shape `(rows, num_sequences, heads, key_dim, value_dim)`,
        the states after each segment.
    """
    rows, length, heads, key_dim = key.shape
    places, segments, is_first = _tree_chunks(
        segment_ids, prefix_segments.shape[1], min(CHUNK, length)
    )
    begins = jnp.pad(prefix_segments, ((0, 0), (1, 0)))
    begins = jnp.take_along_axis(begins, segments, axis=1)
    begins = jnp.where(is_first, begins, segments)
    tokens = [_take(x, places) for x in (query, key, value, decay, beta)]
    ids = jnp.zeros_like(places.swapaxes(0, 1))
    chunks = _in_chunks(
        *(jnp.moveaxis(x, 1, 0) for x in tokens), ids, ids[..., 0]
    )
    # The first state is that before the others, and stays zero.
    count = prefix_segments.shape[1] + 1
    shape = (rows, count, heads, key_dim, value.shape[-1])
    states = jnp.zeros(shape, "float32")

    def step(states, chunk):
        chunk, begin, segment = chunk
        state = jax.vmap(lambda x, i: x[i])(states, begin)
        out, state = _next_state(state, chunk)
        write = jax.vmap(lambda x, i, new: x.at[i].set(new))
        return write(states, segment, state), out

    order = begins.swapaxes(0, 1), segments.swapaxes(0, 1)
    states, out = jax.lax.scan(step, states, (chunks, *order))
    back = jnp.full((rows, length), -1, "int32")
    row = jnp.arange(rows)[:, None]
    flat = places.reshape(rows, -1)
    numbers = jnp.broadcast_to(jnp.arange(flat.shape[1]), flat.shape)
    back = back.at[row, flat].set(numbers, mode="drop")
    return _take(_joined(out), back), states[:, 1:]


def _tree_chunks(segment_ids, slots, size):
    """Divides rows into chunks of tokens of one segment each.

    Returns:
        Three arrays: the columns of each chunk's tokens, int of shape
        `(rows, chunks, size)`, beyond the row where there is none; the
        segments of chunks, 0 for unused ones, and whether they are the
        first ones of their segments, both of shape `(rows, chunks)`.
    """
    length = segment_ids.shape[1]
    numbers = jnp.arange(1, slots + 1)
    counts = jnp.sum(segment_ids[:, None] == numbers[:, None], axis=2)
    firsts = jnp.sum(
        (segment_ids[:, None] < numbers[:, None]) & (segment_ids[:, None] > 0),
        axis=2,
    )
    ends = jnp.cumsum(-(-counts // size), axis=1)
    # At most one chunk of a segment is not full.
    most = (length + min(slots, length) * (size - 1)) // size
    chunk = jnp.arange(most)
    before = jnp.sum(ends[:, None] <= chunk[:, None], axis=2)
    is_used = before < slots
    slot = jnp.minimum(before, slots - 1)

    def of_segment(x):
        return jnp.take_along_axis(x, slot, axis=1)

    starts = jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
    number = chunk - of_segment(starts)
    offset = number[:, :, None] * size + jnp.arange(size)
    inside = (offset < of_segment(counts)[:, :, None]) & is_used[..., None]
    places = of_segment(firsts)[:, :, None] + offset
    places = jnp.where(inside, places, length)
    return places, jnp.where(is_used, slot + 1, 0), number == 0


def _take(x, places):
    """Takes the tokens at places of each row, 0 where there is none."""
    places = jnp.where(places < 0, x.shape[1], places)
    take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)
    return jax.vmap(take)(x, places)


def _zeros_behind(x, more):
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))


def _cut(x, size):
    """Cuts rows into chunks: `(chunks, rows, size, ...)`."""
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _joined(out):
    """Undoes `_cut` for outputs `(chunks, rows, heads, size, value_dim)`."""
    out = out.transpose(1, 0, 3, 2, 4)
    return out.reshape(out.shape[0], -1, *out.shape[3:])


def _in_chunks(query, key, value, decay, beta, ids, before):
    """Computes what does not depend on the states before the chunks.

    The arrays have the shapes of `delta_rule`, with two axes of chunks and
    rows in the place of the rows. `before`, of shape `(chunks, rows)`, has
    the sequences that the states before the chunks belong to.
    """
    q, k, v = (jnp.swapaxes(x, 2, 3) for x in (query, key, value))
    decay, beta = (jnp.swapaxes(x, 2, 3) for x in (decay, beta))
    size = ids.shape[-1]
    causal = jnp.tril(jnp.ones((size, size), bool))
    sees = causal & (ids[..., :, None] == ids[..., None, :])
    # The sum of the logarithms from the first token of its sequence on.
    total = _einsum("crij,crhj->crhi", sees.astype("float32"), decay)
    sees = sees[:, :, None]
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(sees, between, -jnp.inf))
    products = _einsum("crhid,crhjd->crhij", k, k) * between
    inverse = _inverse(
        jnp.where(jnp.eye(size, dtype=bool), 0, products * beta[..., None])
    )
    # Tokens of the sequence before the chunk, and of its last one.
    goes_on = (ids == before[..., None])[:, :, None]
    to_end = (ids == ids[..., -1:])[:, :, None]
    # The decay from the state before the chunk to each token, and on to the
    # state behind it.
    from_before = jnp.where(goes_on, jnp.exp(total), 0)
    rest = jnp.where(to_end, total[..., -1:] - total, -jnp.inf)
    read = k * (beta * from_before)[..., None]
    return {
        "new": _einsum("crhij,crhjv->crhiv", inverse, v * beta[..., None]),
        "held": _einsum("crhij,crhjd->crhid", inverse, read),
        "scores": _einsum("crhid,crhjd->crhij", q, k) * between,
        "query": q * from_before[..., None],
        "key": k * jnp.exp(rest)[..., None],
        "decay": from_before[..., -1],
    }


def _next_state(state, chunk):
    """Returns a chunk's outputs `(rows, heads, size, value_dim)`, and the
    state `(rows, heads, key_dim, value_dim)` behind it."""
    held = _einsum("rhid,rhdv->rhiv", chunk["held"], state)
    new = chunk["new"] - held
    out = _einsum("rhid,rhdv->rhiv", chunk["query"], state)
    out = out + _einsum("rhij,rhjv->rhiv", chunk["scores"], new)
    added = _einsum("rhid,rhiv->rhdv", chunk["key"], new)
    return out, state * chunk["decay"][..., None, None] + added


@jax.custom_vjp
def _inverse(lower):
    """Inverts `I + lower` for strictly lower triangular matrices.

    The inverse of a block is made of those of its two halves. All numbers in
    it are products of decayed `I - beta k k^T` between two keys, at most 1,
    so that nothing grows; a power series of `lower` would for equal keys.
    """
    size = lower.shape[-1]
    places = jnp.arange(size)

    def step(found, half):
        row, column = places[:, None] // half, places // half
        corner = jnp.where((row % 2 == 1) & (column == row - 1), lower, 0)
        corner = _einsum("...ij,...jk->...ik", found, corner)
        return found - _einsum("...ij,...jk->...ik", corner, found), None

    unit = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    halves = 2 ** jnp.arange((size - 1).bit_length())
    return jax.lax.scan(step, unit, halves)[0]


def _inverse_forward(lower):
    inverse = _inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse, grad):
    grad = _einsum(
        "...ji,...jk,...lk->...il", inverse, grad, inverse, optimize=True
    )
    size = inverse.shape[-1]
    return (jnp.where(jnp.tri(size, k=-1, dtype=bool), -grad, 0),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
