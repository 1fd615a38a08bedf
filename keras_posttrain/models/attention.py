"""Attention over rows of several sequences, by KerasHub's own layers.

Inside `attention_scope` the attention layers of Gemma 1 to 3, Llama, Mistral
and Qwen 2 to 3 rotate queries and keys at the positions given per token and
leave the attention itself to us. The seam is the one KerasHub 0.32 serves
vLLM through; this is the only file that touches it.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from keras_hub.src.vllm.context import vllm_context_scope

from keras_posttrain.models import tpu_attention

# Queries are taken in blocks of this many tokens: the scores of a block are
# (rows, heads, block, keys), and are made again in the backward pass, so
# that memory grows with the length and not with its square.
BLOCK = 256
# Scores of at most this many bytes are kept for the backward pass instead.
KEEP_SCORES = 2**25
# Blocks are unrolled while there are few of them, so that each sees only the
# keys before it; longer rows scan over groups of blocks.
MAX_GROUPS = 8


@contextlib.contextmanager
def attention_scope(
    segment_ids, positions, prefix_ids=None, *, kept=None, taps=None
):
    """Runs decoder layers on flattened tokens, attending within segments.

    Decoder layers called inside take tokens as `(rows * length, 1, hidden)`.

    Args:
        segment_ids: int array of shape `(rows, length)`; a token attends to
            itself and to earlier tokens of the same segment. 0 is padding.
        positions: int array of shape `(rows, length)`, each token's place in
            its own sequence.
        prefix_ids: int array of shape `(rows, length)` or `None`: the segment
            that a token's own goes on from, which it sees as well; -1 where
            there is none. Positions go on from that segment's.
        kept: list or `None`: each layer appends its keys and values, arrays
            of shape `(rows * length, kv_heads, head_dim)`, for a cache.
        taps: `Taps` or `None`, whose `attentions` are filled.
    """
    rows, length = segment_ids.shape
    layers = itertools.count()

    def attend(
        cache, q, k, v, scale, head_dim, num_heads, num_kv_heads,
        sliding_window=None, soft_cap=None,
    ):  # fmt: skip
        shape = (rows, length, -1, head_dim)
        if kept is not None:
            flat = (rows * length, num_kv_heads, head_dim)
            kept.append((k.reshape(flat), v.reshape(flat)))
        q, k, v = (x.reshape(shape) for x in (q, k, v))
        tokens = (segment_ids, positions, prefix_ids)
        settings = {
            "scale": float(scale),
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
        }
        layer = next(layers)
        if taps is not None and layer in taps.attention_layers:
            taps.attentions[layer] = attention_weights(
                q, k, *tokens, **settings
            )
        out = segment_attention(q, k, v, *tokens, **settings)
        return cache, out.reshape(rows * length, num_heads * head_dim)

    with vllm_context_scope(
        paged_attention_func=attend, positions=positions.reshape(-1)
    ):
        yield


def segment_attention(
    query, key, value, segment_ids, positions, prefix_ids=None, *, scale,
    sliding_window=None, soft_cap=None,
):  # fmt: skip
    """Causal grouped-query attention within the segments of each row.

    Args:
        query: float array of shape `(rows, length, heads, head_dim)`.
        key, value: float arrays of shape
            `(rows, length, kv_heads, head_dim)`.
        segment_ids, positions, prefix_ids: int arrays of shape
            `(rows, length)`, as in `attention_scope`.
        scale: float, multiplied with the scores.
        sliding_window: int or `None`; a token sees this many tokens, itself
            included.
        soft_cap: float or `None`; scores `s` become `cap * tanh(s / cap)`.

    Returns:
        An array of the shape and dtype of `query`.
    """
    if tpu_attention.fits(query, prefix_ids):
        return tpu_attention.splash_attention(
            query,
            key,
            value,
            segment_ids,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    attend = functools.partial(
        _attend_block,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    if 4 * rows * heads * length**2 > KEEP_SCORES:
        attend = jax.checkpoint(attend)
    group = max(-(-length // MAX_GROUPS), BLOCK)
    group = -(-group // BLOCK) * BLOCK if length > BLOCK else length
    out = []
    for start in range(0, length, group):
        stop = min(start + group, length)
        # Segments are runs of neighbours, so that a window of positions is
        # also one of columns; a shared prefix may lie further back.
        first = 0
        if sliding_window is not None and prefix_ids is None:
            first = max(0, start - sliding_window + 1)
        keys = slice(first, stop)
        k, v = key[:, keys], value[:, keys]
        seen = (segment_ids[:, keys], positions[:, keys])

        def block(q, ids, places, prefixes=None, k=k, v=v, seen=seen):
            return attend(q, k, v, ids, places, *seen, prefixes)

        part = [query, segment_ids, positions]
        if prefix_ids is not None:
            part.append(prefix_ids)
        part = tuple(x[:, start:stop] for x in part)
        size = stop - start
        if size > BLOCK and size % BLOCK == 0:
            cut = jax.tree.map(lambda x: _split(x, BLOCK), part)
            blocks = jax.lax.map(lambda xs: block(*xs), cut)
            out.append(jnp.moveaxis(blocks, 0, 1).reshape(part[0].shape))
        else:
            out.append(block(*part))
    out = jnp.concatenate(out, axis=1) if len(out) > 1 else out[0]
    return out.reshape(rows, length, heads, head_dim)


def attention_weights(
    query, key, segment_ids, positions, prefix_ids=None, **settings
):
    """What `segment_attention` weighs the values with, all at once.

    Args:
        query, key, segment_ids, positions, prefix_ids, **settings: as in
            `segment_attention`.

    Returns:
        A float32 array of shape `(rows, heads, length, length)`, a row a
        query: 0 for what a token does not see, and all 0 at padding.
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    tokens = (segment_ids, positions)
    scores = _masked_scores(
        jnp.moveaxis(query, 1, 3).reshape(rows, kv_heads, -1, head_dim),
        jnp.moveaxis(key, 1, 2),
        *tokens,
        *tokens,
        prefix_ids,
        **settings,
    ).reshape(rows, heads, length, length)
    used = (segment_ids > 0)[:, None, :, None]
    return jnp.where(used, jax.nn.softmax(scores, axis=-1), 0.0)


def _split(x, size):
    rows, length = x.shape[:2]
    x = x.reshape(rows, length // size, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _attend_block(
    q, k, v, q_segments, q_positions, k_segments, k_positions, q_prefixes, *,
    scale, sliding_window, soft_cap,
):  # fmt: skip
    rows, length, kv_heads, group, head_dim = q.shape
    # The heads that share a key are rows of one product: few large products
    # run twice as fast on a CPU as an einsum over five axes.
    q = jnp.moveaxis(q, 1, 3).reshape(rows, kv_heads, -1, head_dim)
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    scores = _masked_scores(
        q, k, q_segments, q_positions, k_segments, k_positions, q_prefixes,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jax.lax.dot_general(
        weights.astype(v.dtype).reshape(*q.shape[:3], -1),
        v,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type="float32",
    ).reshape(rows, kv_heads, group, length, head_dim)
    return jnp.moveaxis(out / total, 3, 1).astype(v.dtype)


def _masked_scores(
    q, k, q_segments, q_positions, k_segments, k_positions, q_prefixes, *,
    scale, sliding_window, soft_cap,
):  # fmt: skip
    """`(rows, kv_heads, group, queries, keys)`, of queries by head."""
    rows, kv_heads = q.shape[:2]
    scores = jax.lax.dot_general(
        q,
        k,
        (((3,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type="float32",
    ).reshape(rows, kv_heads, -1, q_positions.shape[1], k.shape[2])
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    same = q_segments[:, :, None] == k_segments[:, None, :]
    if q_prefixes is not None:
        same |= q_prefixes[:, :, None] == k_segments[:, None, :]
    ahead = q_positions[:, :, None] - k_positions[:, None, :]
    visible = same & (ahead >= 0)
    if sliding_window is not None:
        visible &= ahead < sliding_window
    # Padding is a segment of its own (0) at position 0: it sees itself, so
    # that no row of scores is empty.
    return jnp.where(visible[:, None, None], scores, -1e30)


# --- Decoding ----------------------------------------------------------------


@dataclasses.dataclass
class KeyValues:
    """Keys and values of one layer, for many sequences at once.

    Keys lie with the head dimension before the tokens: a product of one query
    with them then runs along memory, five times as fast on a CPU.

    Attributes:
        keys: array of shape `(slots, kv_heads, head_dim, tokens)`.
        values: array of shape `(slots, kv_heads, tokens, head_dim)`.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def zeros(cls, slots, tokens, kv_heads, head_dim, dtype):
        return cls(
            jnp.zeros((slots, kv_heads, head_dim, tokens), dtype),
            jnp.zeros((slots, kv_heads, tokens, head_dim), dtype),
        )

    def write(self, column, keys, values):
        """With `(slots, kv_heads, head_dim)` written at one column."""
        update = jax.lax.dynamic_update_slice_in_dim
        return KeyValues(
            update(self.keys, keys[..., None], column, 3),
            update(self.values, values[:, :, None], column, 2),
        )

    def append(self, lengths, other):
        """With the tokens of `other` behind each slot's first `lengths`."""

        def slot(keys, values, more_keys, more_values, at):
            update = jax.lax.dynamic_update_slice_in_dim
            return (
                update(keys, more_keys, at, 2),
                update(values, more_values, at, 1),
            )

        return KeyValues(
            *jax.vmap(slot)(
                self.keys, self.values, other.keys, other.values, lengths
            )
        )

    def fill(self, slots, keys, values):
        """With prompts in some slots, from their first column on.

        Args:
            slots: int array of shape `(prompts,)`; one that there is not is
                passed by.
            keys, values: arrays of shape
                `(prompts, tokens, kv_heads, head_dim)`.
        """
        tokens = keys.shape[1]
        keys = keys.transpose(0, 2, 3, 1).astype(self.keys.dtype)
        values = values.transpose(0, 2, 1, 3).astype(self.values.dtype)
        return KeyValues(
            self.keys.at[slots, :, :, :tokens].set(keys, mode="drop"),
            self.values.at[slots, :, :tokens].set(values, mode="drop"),
        )

    def resize(self, index, tokens):
        """The slots of `index`, with room for `tokens`."""

        def fit(x, axis):
            x = jnp.take(x, index, axis=0)
            more = tokens - x.shape[axis]
            if more <= 0:
                return jax.lax.slice_in_dim(x, 0, tokens, axis=axis)
            pad = [(0, more if i == axis else 0) for i in range(x.ndim)]
            return jnp.pad(x, pad)

        return KeyValues(fit(self.keys, 3), fit(self.values, 2))


jax.tree_util.register_dataclass(KeyValues, ["keys", "values"], [])


@contextlib.contextmanager
def decoding_scope(lengths, step, past, recent):
    """Runs decoder layers on the next token of each of many sequences.

    Decoder layers called inside take tokens as `(slots, 1, hidden)`.

    Args:
        lengths: int array of shape `(slots,)`, the tokens of `past` that
            belong to each sequence.
        step: int scalar, how many tokens each has had since.
        past: list of `KeyValues`, one a layer; not changed.
        recent: list of `KeyValues`, one a layer, of the tokens since: a token
            is written at the same column for all slots, which costs nothing,
            and not at the end of each. Replaced in place by those with the
            new token.
    """
    layers = iter(range(len(past)))

    def attend(
        cache, q, k, v, scale, head_dim, num_heads, num_kv_heads,
        sliding_window=None, soft_cap=None,
    ):  # fmt: skip
        layer, slots = next(layers), lengths.shape[0]
        old = past[layer]
        shape = (slots, num_kv_heads, head_dim)
        dtype = old.keys.dtype
        new = recent[layer] = recent[layer].write(
            step,
            k.reshape(shape).astype(dtype),
            v.reshape(shape).astype(dtype),
        )
        query = q.reshape(slots, num_kv_heads, -1, head_dim)
        columns = jnp.arange(old.keys.shape[3])
        since = jnp.arange(new.keys.shape[3])
        at = (lengths + step)[:, None]
        visible = columns < lengths[:, None]
        visible_since = jnp.broadcast_to(since <= step, (slots, since.size))
        if sliding_window is not None:
            visible &= at - columns < sliding_window
            visible_since &= step - since < sliding_window
        parts = [(old, visible), (new, visible_since)]
        scores = [
            _scores(query, part.keys, seen, float(scale), soft_cap)
            for part, seen in parts
        ]
        out = _weigh(scores, [part.values for part, _ in parts])
        return cache, out.astype(v.dtype).reshape(slots, -1)

    with vllm_context_scope(
        paged_attention_func=attend, positions=lengths + step
    ):
        yield


def _scores(query, keys, visible, scale, soft_cap):
    scores = jax.lax.dot_general(
        query.astype(keys.dtype),
        keys,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type="float32",
    )
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return jnp.where(visible[:, None, None], scores, -1e30)


def _weigh(scores, values):
    """The mean of values by the softmax of scores, over several parts."""
    tops = [jnp.max(s, axis=-1, keepdims=True) for s in scores]
    top = functools.reduce(jnp.maximum, tops)
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    out = sum(
        jax.lax.dot_general(
            w.astype(v.dtype),
            v,
            (((3,), (2,)), ((0, 1), (0, 1))),
            preferred_element_type="float32",
        )
        for w, v in zip(weights, values)
    )
    return out / total
