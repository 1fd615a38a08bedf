"""Attention over long rows that skips blocks of scores no segment shares.

The scores are computed in square blocks, and a block of queries begins with
the first block of keys that one of them sees. A row of many documents then
takes time in proportion to its tokens, not to their square. The softmax is
summed up over blocks, and the backward pass computes the scores again
([Dao, 2023](https://arxiv.org/abs/2307.08691)). Neither pass stores more than
a block of scores.

How many blocks are skipped is known only when a program runs. On a mesh it
runs in `jax.shard_map`, so that each device skips those of its own rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from keras_posttrain.models import sharding
from keras_posttrain.models.context import UNIT
from keras_posttrain.models.rematerialisation import ATTENDED

# Queries of a block, and keys, on a CPU and on a GPU. On a CPU rows of short
# documents took up to 1.7 times as long in blocks of 256.
BLOCKS = {"cpu": 128, "gpu": 512}
# The least length of a row. On a GPU the host reads after each block whether
# another one follows, and short rows are faster as a whole; that was not
# measured.
LEAST = {"cpu": 256, "gpu": 4096}
# The name of the loops over blocks of keys, for plans.
LOOP = "kpt_key_blocks"


def most_trips(length):
    """Returns the mean iterations of these loops for rows of one document."""
    return (1 - -length // BLOCKS.get(sharding.platform(), length)) / 2


def is_used(length, shares_prefixes):
    """Returns whether rows of so many tokens are computed block by block.

    In a row of one prompt with its completions few blocks can be skipped: on a
    CPU it took 1.05 to 1.3 times as long as without blocks, and rows of two to
    eight prompts 0.75 to 0.27 times.
    """
    least = LEAST.get(sharding.platform(), length + 1)
    return length >= (4 * least if shares_prefixes else least)


def segment_attention(
    query, key, value, segment_ids, positions, subtree_ends, sinks, window,
    scores, pieces=None,
):  # fmt: skip
    """Computes `models/attention.py:segment_attention` block by block.

    `scores` is a function of a block of queries, `(rows, kv_heads, group *
    block, head_dim)`, one of keys, `(rows, kv_heads, block, head_dim)`, and of
    the tokens of both, to masked scores, `(rows, kv_heads, group, block,
    block)`. Tokens are tuples `(segment_ids, positions, subtree_ends)`.
    `pieces` are as in `attention.py:segment_attention`.
    """
    tokens = segment_ids, positions, subtree_ends
    if pieces is not None:
        return _of_pieces(
            pieces, query, key, value, tokens, sinks, window, scores
        )
    length, heads = query.shape[1:3]
    block = BLOCKS[sharding.platform()]
    more = -length % block

    def local(query, key, value, tokens, sinks):
        def padded(x):
            pad = [(0, more if i == 1 else 0) for i in range(x.ndim)]
            return jnp.pad(x, pad) if more else x

        query, key, value, tokens = jax.tree.map(
            padded, (query, key, value, tokens)
        )
        first = first_blocks(tokens[0], tokens[2], window, block)
        own = jnp.arange(first.shape[0], dtype="int32")
        out = attend(
            scores, query, key, value, tokens, tokens, sinks, first, own
        )
        return out[:, :length]

    return sharding.over_heads(local, query, key, value, tokens, sinks)


def _of_pieces(pieces, query, key, value, tokens, sinks, window, scores):
    block = block_of(pieces.chunk)

    def local(query, key, value, tokens, sinks):
        key, value = (pieces.gather(x) for x in (key, value))
        columns, own_tokens = pieces.own(tokens)
        first = first_blocks(tokens[0], tokens[2], window, block)
        own = columns[::block] // block
        return attend(
            scores, query, key, value, own_tokens, tokens, sinks,
            first[own], own,
        )  # fmt: skip

    tokens = jax.tree.map(pieces.pad, tokens)
    return pieces.attend(local, query, key, value, tokens, sinks)


def continued_attention(
    query, key, value, positions, sinks, window, scores, begins=None
):
    """Computes attention of a piece of each sequence, block by block.

    Blocks of keys behind the queries are skipped, so that time follows the
    tokens of a sequence and not the columns that there is room for.

    Args:
        query: array of shape `(sequences, tokens, heads, head_dim)`.
        key, value: arrays of shape
            `(sequences, columns, kv_heads, head_dim)`. A sequence's token is
            in the column of its position, those of `query` too.
        positions: int32 array of shape `(sequences, tokens)`, adjacent ones.
        sinks, window, scores: as of `segment_attention`.
        begins: int32 array of shape `(sequences,)`, the first column of each
            sequence that is used, or `None` for 0.

    Returns:
        An array like `query`.
    """
    block = block_of(query.shape[1])
    more = ((0, 0), (0, -key.shape[1] % block), (0, 0), (0, 0))
    key, value = (jnp.pad(x, more) for x in (key, value))
    last = key.shape[1] // block - 1

    def local(query, key, value, tokens, sinks):
        positions, begins = tokens
        columns = jnp.arange(key.shape[1], dtype="int32")
        columns = jnp.broadcast_to(columns, (query.shape[0], columns.size))
        start = jnp.min(positions[:, ::block], axis=0)
        if window is None:
            start = jnp.zeros_like(start)
        else:
            start = jnp.maximum(start - window + 1, 0)
        end = jnp.max(positions[:, block - 1 :: block], axis=0)
        of_queries = jnp.ones_like(positions), positions, None
        used = jnp.ones_like(columns)
        if begins is not None:
            used = (columns >= begins[:, None]).astype(used.dtype)
        of_keys = used, columns, None
        return attend(
            scores, query, key, value, of_queries, of_keys, sinks,
            jnp.minimum(start // block, last), jnp.minimum(end // block, last),
        )  # fmt: skip

    tokens = positions, begins
    return sharding.over_heads(local, query, key, value, tokens, sinks)


def block_of(chunk):
    """Returns the tokens of a block, which divide those of a chunk.

    `chunk` is that of `Pieces`.
    """
    if chunk <= UNIT:
        return chunk
    block = BLOCKS.get(sharding.platform(), max(BLOCKS.values()))
    while chunk % block:
        block //= 2
    return block


def attend(scores, query, key, value, of_queries, of_keys, sinks, first, own):
    """Computes attention of some blocks of queries to blocks of keys.

    Args:
        scores: as of `segment_attention`.
        query: array of shape `(rows, queries, heads, head_dim)`.
        key, value: arrays of shape `(rows, keys, kv_heads, head_dim)`.
        of_queries, of_keys: tuples of arrays `(rows, queries)` and
            `(rows, keys)`, the tokens of both.
        sinks: array of shape `(heads,)` or `None`.
        first, own: int32 arrays of shape `(blocks,)`: the first block of keys
            that each block of queries sees, and the last, which has the same
            tokens as the queries. The number of blocks divides `queries`.

    Returns:
        An array like `query`.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(rows, -1, kv_heads, heads // kv_heads, head_dim)
    if sinks is not None:
        sinks = sinks.astype("float32").reshape(kv_heads, -1, 1, 1)
    out = _attend(
        scores,
        jnp.moveaxis(query, 1, 3),
        jnp.moveaxis(key, 1, 2),
        jnp.moveaxis(value, 1, 2),
        (of_queries, of_keys),
        sinks,
        (first, own),
    )
    return jnp.moveaxis(out, 3, 1).reshape(rows, length, heads, head_dim)


def first_blocks(segment_ids, subtree_ends, window, block):
    """Finds the first block of keys that each block of queries sees.

    Args:
        segment_ids, subtree_ends: as in `attention_scope`.
        window: int or `None`, that of `segment_attention`.
        block: int, tokens of a block; it divides the length.

    Returns:
        An int32 array of shape `(length // block,)`, the least of all rows.
    """
    length = segment_ids.shape[1]
    columns = jnp.arange(length, dtype="int32")
    own = columns // block
    is_token = segment_ids > 0
    if subtree_ends is None:
        # The tokens of a segment are adjacent.
        before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
        begins = jnp.where(segment_ids != before, columns, 0)
        start = jax.lax.cummax(begins, axis=1)
        start = jnp.where(is_token, start, columns)[:, ::block]
        if window is not None:
            start = jnp.maximum(start, columns[::block] - window + 1)
    else:
        # A key is seen up to the last token of the segments that continue its
        # own one; segments are in the order of their numbers.
        places = jnp.where(is_token, columns, 0)
        last = jax.vmap(
            lambda x, ids: jax.ops.segment_max(x, ids, length + 1)
        )(places, segment_ids)
        last = jax.lax.cummax(jnp.maximum(last, 0), axis=1)
        reach = jnp.take_along_axis(last, subtree_ends, axis=1)
        reach = jnp.where(is_token, reach, columns)
        seen = reach[:, None, :] >= columns[::block][:, None]
        start = jnp.argmax(seen, axis=2).astype("int32")
    return jnp.minimum(jnp.min(start, axis=0) // block, own[::block])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scores, q, k, v, tokens, sinks, blocks):
    """Computes attention block by block.

    Args:
        scores: as of `segment_attention`.
        q: array of shape `(rows, kv_heads, group, queries, head_dim)`.
        k, v: arrays of shape `(rows, kv_heads, keys, head_dim)`.
        tokens: pair `(of_queries, of_keys)`, as of `attend`.
        sinks: float32 array of shape `(kv_heads, group, 1, 1)` or `None`.
        blocks: pair `(first, own)`, as of `attend`.

    Returns:
        An array like `q`.
    """
    return _forward(scores, q, k, v, tokens, sinks, blocks)[0]


def _cut(x, i, axis, block):
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _dot(x, y, dimensions):
    batch = ((0, 1), (0, 1))
    return jax.lax.dot_general(
        x, y, (dimensions, batch), preferred_element_type="float32"
    )


def _blocks(q, k, v, tokens, block):
    """Returns functions that cut out a block of queries, and one of keys."""

    def of_tokens(i, side):
        return jax.tree.map(lambda x: _cut(x, i, 1, block), tokens[side])

    def queries(i, x=q):
        x = _cut(x, i, 3, block)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def keys(i):
        return _cut(k, i, 2, block), _cut(v, i, 2, block)

    return of_tokens, queries, keys


def _forward(scores, q, k, v, tokens, sinks, blocks):
    rows, kv_heads, group, length, head_dim = q.shape
    first, own_blocks = blocks
    block = length // first.shape[0]
    of_tokens, queries, keys = _blocks(q, k, v, tokens, block)
    shape = (rows, kv_heads, group, block)

    def of_block(i):
        query, own = queries(i), of_tokens(i, 0)

        def body(j, carry):
            top, total, out = carry
            key, value = keys(j)
            s = scores(query, key, own, of_tokens(j, 1))
            higher = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
            weights = jnp.exp(s - higher)
            less = jnp.exp(top - higher)
            part = _dot(
                weights.astype(v.dtype).reshape(rows, kv_heads, -1, block),
                value,
                ((3,), (2,)),
            ).reshape(*shape, head_dim)
            total = total * less + jnp.sum(weights, axis=-1, keepdims=True)
            return higher, total, out * less + part

        top = jnp.full((*shape, 1), -1e30, "float32")
        total = jnp.zeros((*shape, 1), "float32")
        if sinks is not None:
            top, total = jnp.broadcast_to(sinks, top.shape), total + 1
        out = jnp.zeros((*shape, head_dim), "float32")
        with jax.named_scope(LOOP):
            top, total, out = jax.lax.fori_loop(
                first[i], own_blocks[i] + 1, body, (top, total, out)
            )
        return (out / total).astype(v.dtype), (top + jnp.log(total))[..., 0]

    out, logsumexp = jax.lax.map(of_block, jnp.arange(first.shape[0]))
    out = jnp.moveaxis(out, 0, 3).reshape(q.shape)
    logsumexp = jnp.moveaxis(logsumexp, 0, 3).reshape(q.shape[:-1])
    return out, logsumexp


def _attend_forward(scores, q, k, v, tokens, sinks, blocks):
    found = _forward(scores, q, k, v, tokens, sinks, blocks)
    out, logsumexp = (checkpoint_name(x, ATTENDED) for x in found)
    return out, (q, k, v, tokens, sinks, blocks, out, logsumexp)


def _attend_backward(scores, kept, gradient):
    q, k, v, tokens, sinks, blocks, out, logsumexp = kept
    rows, kv_heads, group, length, head_dim = q.shape
    first, own_blocks = blocks
    block = length // first.shape[0]
    of_tokens, queries, keys = _blocks(q, k, v, tokens, block)
    delta = jnp.sum(
        gradient.astype("float32") * out.astype("float32"), axis=-1
    )

    def of_block(sums, i):
        query, own = queries(i), of_tokens(i, 0)
        up = queries(i, gradient)
        total = _cut(logsumexp, i, 3, block)[..., None]
        mean = _cut(delta, i, 3, block)[..., None]

        def body(j, carry):
            dq, dk, dv = carry
            key, value = keys(j)
            of_keys = of_tokens(j, 1)
            s, pull = jax.vjp(
                lambda x, y: scores(x, y, own, of_keys), query, key
            )
            weights = jnp.exp(s - total)
            flat = weights.astype(v.dtype).reshape(rows, kv_heads, -1, block)
            d_value = _dot(flat, up, ((2,), (2,)))
            d_weights = _dot(up, value, ((3,), (3,))).reshape(s.shape)
            d_query, d_key = pull(weights * (d_weights - mean))

            def add(x, part):
                old = _cut(x, j, 2, block)
                return jax.lax.dynamic_update_slice_in_dim(
                    x, old + part.astype("float32"), j * block, 2
                )

            return (
                dq + d_query.astype("float32"),
                add(dk, d_key),
                add(dv, d_value),
            )

        dq = jnp.zeros(query.shape, "float32")
        with jax.named_scope(LOOP):
            dq, *sums = jax.lax.fori_loop(
                first[i], own_blocks[i] + 1, body, (dq, *sums)
            )
        dq = dq.reshape(rows, kv_heads, group, block, head_dim)
        return tuple(sums), dq.astype(q.dtype)

    zeros = jnp.zeros(k.shape, "float32")
    (dk, dv), dq = jax.lax.scan(
        of_block, (zeros, zeros), jnp.arange(first.shape[0])
    )
    dq = jnp.moveaxis(dq, 0, 3).reshape(q.shape)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp(sinks[..., 0] - logsumexp)
        d_sinks = -jnp.sum(share * delta, axis=(0, 3))[..., None, None]
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, d_sinks, None


_attend.defvjp(_attend_forward, _attend_backward)
