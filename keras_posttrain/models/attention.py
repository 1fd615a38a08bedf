"""Attention over rows of several sequences, by KerasHub's own layers.

Inside `attention_scope` the attention layers of Gemma 1 to 3, Llama, Mistral
and Qwen 2 to 3 rotate queries and keys at the positions given per token and
leave the attention itself to us. This uses the hook that KerasHub 0.32 has
for vLLM, a private module; no other file uses it.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from keras_hub.src.vllm.context import vllm_context_scope

from keras_posttrain.models import tpu_attention

# Queries are processed in blocks of this many tokens. The scores of a block
# have the shape (rows, heads, block, keys) and are recomputed in the backward
# pass, so that memory grows linearly with the length, not quadratically.
BLOCK = 256
# Scores of at most this many bytes are stored for the backward pass instead.
KEEP_SCORES = 2**25
# Up to this many blocks are unrolled, so that each reads only the keys before
# it. Longer rows scan over groups of blocks.
MAX_GROUPS = 8


@contextlib.contextmanager
def attention_scope(
    segment_ids, positions, prefix_ids=None, *, kept=None, capture=None
):
    """Makes decoder layers called inside attend within segments.

    These layers take tokens of shape `(rows * length, 1, hidden)`. The int
    arrays have the shape `(rows, length)`.

    Args:
        segment_ids: a token attends to itself and to earlier tokens of the
            same segment. 0 is padding.
        positions: the position of each token in its sequence.
        prefix_ids: the segment that a token's own segment continues, which
            the token also attends to; -1 where there is none. Positions
            continue those of that segment.
        kept: list or `None`: each layer appends its keys and values, arrays
            of shape `(rows * length, kv_heads, head_dim)`, for a cache.
        capture: `ActivationCapture` or `None`; `attentions` is filled.
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
        if capture is not None and layer in capture.attention_layers:
            capture.attentions[layer] = attention_weights(
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
    """Computes causal grouped-query attention within each segment.

    The result has the shape and dtype of `query`.

    Args:
        query: float array of shape `(rows, length, heads, head_dim)`.
        key, value: float arrays of shape
            `(rows, length, kv_heads, head_dim)`.
        segment_ids, positions, prefix_ids: as in `attention_scope`.
        scale: float, multiplied with the scores.
        sliding_window: int or `None`; a token sees this many tokens, itself
            included.
        soft_cap: float or `None`; scores `s` become `cap * tanh(s / cap)`.
    """
    if tpu_attention.is_supported(query, prefix_ids):
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
        # The tokens of a segment are adjacent, so that a window of positions
        # is also a window of columns. Only a shared prefix may be further
        # back.
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
    """Computes the attention weights of `segment_attention`.

    They are float32 of shape `(rows, heads, length, length)`, a row for each
    query: 0 where the query does not see the key, and for padding.
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
    # The heads that share a key become rows of one matrix product. On a CPU
    # this is twice as fast as an einsum over five axes.
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
    """Computes scores of shape `(rows, kv_heads, group, queries, keys)`.

    `q` has the shape `(rows, kv_heads, group * queries, head_dim)`.
    """
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
    # Padding is segment 0 at position 0. It attends to itself, so that every
    # query has at least one visible key.
    return jnp.where(visible[:, None, None], scores, -1e30)


# --- Decoding ----------------------------------------------------------------


@dataclasses.dataclass
class KeyValues:
    """The keys and values of one layer, for many sequences.

    Keys have the shape `(slots, kv_heads, head_dim, tokens)`, values
    `(slots, kv_heads, tokens, head_dim)`. The product of one query with the
    keys then reads memory in order, which is five times as fast on a CPU.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def zeros(cls, slots, tokens, kv_heads, head_dim, dtype):
        """Returns an empty cache."""
        return cls(
            jnp.zeros((slots, kv_heads, head_dim, tokens), dtype),
            jnp.zeros((slots, kv_heads, tokens, head_dim), dtype),
        )

    def write(self, column, keys, values):
        """Writes `(slots, kv_heads, head_dim)` arrays to one column."""
        update = jax.lax.dynamic_update_slice_in_dim
        return KeyValues(
            update(self.keys, keys[..., None], column, 3),
            update(self.values, values[:, :, None], column, 2),
        )

    def append(self, lengths, other):
        """Writes the tokens of `other` after each slot's first `lengths`."""

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
        """Writes prompts to some slots, starting at the first column.

        Both arrays are `(prompts, tokens, kv_heads, head_dim)`. A prompt
        whose slot is out of range is ignored.
        """
        tokens = keys.shape[1]
        keys = keys.transpose(0, 2, 3, 1).astype(self.keys.dtype)
        values = values.transpose(0, 2, 1, 3).astype(self.values.dtype)
        return KeyValues(
            self.keys.at[slots, :, :, :tokens].set(keys, mode="drop"),
            self.values.at[slots, :, :tokens].set(values, mode="drop"),
        )

    def resize(self, index, tokens):
        """Selects the slots of `index` and sets their number of columns."""

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
    """Makes decoder layers called inside attend to a cache of tokens.

    These layers take the next token of each sequence, `(slots, 1, hidden)`.

    Args:
        lengths: int array of shape `(slots,)`, the tokens of `past` that
            belong to each sequence.
        step: int scalar, the number of tokens in `recent`.
        past: list of `KeyValues`, one for each layer; not changed.
        recent: list of `KeyValues`, one for each layer, of the tokens after
            those of `past`. A token is written to the same column in all
            slots, which is cheap, and not to the end of each sequence. The
            list's items are replaced by ones with the new token.
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
    """Averages values by the softmax of scores that come in parts."""
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
