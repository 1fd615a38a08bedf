"""Attention over rows of several sequences, by KerasHub's own layers.

Inside `attention_scope` the attention layers of Gemma 1 to 3, Llama, Mistral
and Qwen 2 to 3 rotate queries and keys at the positions given per token and
leave the attention itself to us. This uses the hook that KerasHub 0.32 has
for vLLM, a private module; no other file uses it. The layers of mixtures of
experts, of Gemma 4 and of Qwen 3.5 lack the hook: `add_hook`,
`add_hook_of_gemma4` and `add_hook_of_qwen3_5` give it to them. Those of
gpt-oss also have a sink for each head, a score whose key has no value: it
takes a part of the softmax and adds nothing to the output.

What computes it depends on the device: kernels of `tpu_attention.py` and
`gpu_attention.py` where they can, else blocks of scores.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp

# Before its module: in Python 3.11 two threads that import a package and a
# module of it at once can wait for each other.
import keras_hub  # noqa: F401
from jax.ad_checkpoint import checkpoint_name
from keras_hub.src.vllm.context import get_vllm_context, vllm_context_scope

from keras_posttrain.models import (
    block_attention,
    gpu_attention,
    tpu_attention,
)
from keras_posttrain.models.context import Pieces
from keras_posttrain.models.key_values import KeyValues, joined_keys
from keras_posttrain.models.prefix_key_values import PrefixKeyValues
from keras_posttrain.models.rematerialisation import ATTENDED

# Queries are processed in blocks of this many tokens. The scores of a block
# have the shape (rows, heads, block, keys) and are recomputed in the backward
# pass, so that memory grows linearly with the length, not quadratically.
BLOCK = 256
# Scores of at most this many bytes are stored for the backward pass instead.
KEEP_SCORES = 2**25
# Up to this many blocks are unrolled, so that each reads only the keys before
# it. Longer rows scan over groups of blocks.
MAX_GROUPS = 8
# Keys in blocks are joined for more queries than these, which would be copied
# for each block.
FEW_QUERIES = 128


@contextlib.contextmanager
def attention_scope(
    segment_ids,
    positions,
    subtree_ends=None,
    *,
    images=None,
    kept=None,
    windows=None,
    capture=None,
    numbers=None,
    calls=None,
    pieces=None,
    chooser=None,
    is_packed=True,
):
    """Makes decoder layers called inside attend within segments.

    These layers take tokens of shape `(rows * length, 1, hidden)`. The int
    arrays have the shape `(rows, length)`.

    Args:
        segment_ids: a token attends to itself and to earlier tokens of the
            same segment. 0 is padding.
        positions: the position of each token in its sequence.
        subtree_ends: the last segment that continues a token's own segment,
            directly or not, from `subtree_ends` below; `None` where no
            segment continues another. A token also attends to the tokens of
            all segments that its own one continues.
        images: `ImageBlocks` or `None`. A token of an image also attends to
            the later tokens of that image, in the layers that see them.
        kept: list or `None`: each layer appends its keys and values, arrays
            of shape `(rows * length, kv_heads, head_dim)`, for a cache. A
            layer that uses those of another one appends none.
        windows: list or `None`: gets the sliding window of the layers that
            read each pair of `kept`, the longest of them, or `None`.
        capture: `ActivationCapture` or `None`; `attentions` is filled.
        numbers: list of ints, those of the decoder layers that attend;
            `None` if all do.
        calls: `equal_layers.Calls` of these layers, or `None` if each of
            them is traced.
        pieces: `Pieces` of the rows, of which the layers take the tokens, or
            `None` for those of the rows.
        chooser: `gpu_attention.Chooser` of what computes the attention, or
            `None` for an automatic choice.
        is_packed: bool, whether a row may hold several sequences.
    """
    if pieces is None:
        pieces = Pieces(*segment_ids.shape)
    rows, length = pieces.shape
    layers = itertools.count() if numbers is None else iter(numbers)
    chooser, chosen = chooser or gpu_attention.Chooser(), {}

    def attend(
        cache, q, k, v, scale, head_dim, num_heads, num_kv_heads,
        sliding_window=None, soft_cap=None, sinks=None, donor=None,
    ):  # fmt: skip
        shape = (rows, length, -1, head_dim)
        if kept is not None and donor is None:
            flat = (rows * length, num_kv_heads, head_dim)
            kept.append((k.reshape(flat), v.reshape(flat)))
        if windows is not None:
            _add_window(windows, sliding_window, donor)
        q, k, v = (x.reshape(shape) for x in (q, k, v))
        tokens = (segment_ids, positions, subtree_ends)
        settings = {
            "scale": float(scale),
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "sinks": sinks,
            "images": images and images.seen_by(sliding_window),
        }
        layer = next(layers) if calls is None else calls.traced
        if capture is not None and layer in capture.attention_layers:
            capture.attentions[layer] = attention_weights(
                q, k, *tokens, **settings
            )
        case = gpu_attention.Case.of(
            (q, k, v), settings, is_packed=is_packed,
            is_split=pieces.count > 1, shares_prompts=subtree_ends is not None,
        )  # fmt: skip
        chosen[layer] = chooser.kernel(case, layer)
        kernel, _ = chosen[layer]
        out = segment_attention(
            q, k, v, *tokens, **settings, pieces=pieces, kernel=kernel
        )
        return cache, out.reshape(rows * length, num_heads * head_dim)

    places = pieces.cut(positions).reshape(-1)
    with vllm_context_scope(paged_attention_func=attend, positions=places):
        yield
    called = chosen if calls is None else calls.numbers
    chooser.say([chosen[i] for i in called if i in chosen], is_packed)


def _add_window(windows, window, donor):
    """Records the window of a layer that reads its or a donor's cache."""
    if donor is None:
        windows.append(window)
    elif None not in (window, windows[donor]):
        windows[donor] = max(window, windows[donor])
    else:
        windows[donor] = None


def attention_layer(layer):
    """Returns the attention layer of a mixture's decoder layer."""
    return _part(layer, "self_attention_layer")


def add_hook(attention):
    """Gives an attention layer of a mixture of experts the hook, once.

    KerasHub's Mixtral, Qwen2-MoE and Qwen3-MoE have layers like those of
    Mistral, Qwen 2 and Qwen 3, but without the hook; gpt-oss has layers of its
    own. The layer's `call` is replaced; outside the scopes of this file it
    does what it did before.
    """
    if hasattr(attention, "kpt_hooked"):
        return
    attention.kpt_hooked = True
    plain_call = attention.call

    def call(
        hidden_states,
        attention_mask=None,
        cache=None,
        cache_update_index=None,
        training=None,
    ):
        context = get_vllm_context()
        if context is None or context.paged_attention_func is None:
            return plain_call(
                hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                cache_update_index=cache_update_index,
                training=training,
            )
        return _hooked_call(attention, hidden_states, context)

    attention.call = call


def _hooked_call(attention, x, context):
    query, key, value = (
        _part(attention, f"{name}_dense")(x)
        for name in ("query", "key", "value")
    )
    if hasattr(attention, "_query_dense_layer_norm"):
        query = attention._query_dense_layer_norm(query)
        key = attention._key_dense_layer_norm(key)
    places = context.positions.reshape(-1, 1)
    rotate = attention.rotary_embedding_layer
    query, key = (rotate(y, positions=places) for y in (query, key))
    more = {}
    if hasattr(attention, "sinks"):
        more["sinks"] = attention.sinks.value
    _, out = context.paged_attention_func(
        None,
        query,
        key,
        value,
        attention._inv_norm_factor,
        query.shape[-1],
        query.shape[-2],
        key.shape[-2],
        sliding_window=hooked_window(attention),
        **more,
    )
    return _part(attention, "output_dense")(out.reshape(query.shape))


def add_hook_of_gemma4(attention, donor):
    """Gives an attention layer of Gemma 4 the hook.

    Inside the scopes of this file its `call` also returns the keys, rotated,
    and the values, both of shape `(tokens, 1, kv_heads, head_dim)`; outside
    it does what it did before. `donor` is the number of the layer whose pair
    it gets as `shared_kv`, or `None`. All layers without a donor come first.
    """
    plain_call = attention.call

    def call(x, shared_kv=None, **kwargs):
        context = get_vllm_context()
        if context is None or context.paged_attention_func is None:
            return plain_call(x, shared_kv=shared_kv, **kwargs)
        return _call_of_gemma4(attention, x, shared_kv, donor, context)

    attention.call = call


def _call_of_gemma4(attention, x, shared_kv, donor, context):
    places = context.positions.reshape(-1, 1)

    def rotated(y):
        return attention._apply_rope(y, 0, positions=places)

    query = rotated(attention.query_norm(attention.query_dense(x)))
    if donor is None:
        key = value = attention.key_dense(x)
        if not attention.attention_k_eq_v:
            value = attention.value_dense(x)
        key = rotated(attention.key_norm(key))
        value = attention.value_norm(value)
    else:
        key, value = shared_kv
    window = None
    if attention.use_sliding_window_attention:
        window = attention.sliding_window_size
    _, out = context.paged_attention_func(
        None,
        query,
        key,
        value,
        1.0,
        query.shape[-1],
        query.shape[-2],
        key.shape[-2],
        sliding_window=window,
        soft_cap=attention.logit_soft_cap,
        donor=donor,
    )
    return attention.output_dense(out.reshape(query.shape)), (key, value)


def add_hook_of_qwen3_5(attention):
    """Gives an attention layer of Qwen 3.5 the hook.

    Outside of the scopes of this file its `call` does what it did before.
    """
    plain_call = attention.call

    def call(hidden_states, **kwargs):
        context = get_vllm_context()
        if context is None or context.paged_attention_func is None:
            return plain_call(hidden_states, **kwargs)
        return _call_of_qwen3_5(attention, hidden_states, context)

    attention.call = call


def _call_of_qwen3_5(attention, x, context):
    places = context.positions.reshape(-1, 1)
    turned = attention.rotary_dim

    def rotated(y):
        rotate = attention.rotary_embedding_layer
        part = rotate(y[..., :turned], positions=places)
        return jnp.concatenate([part, y[..., turned:]], axis=-1)

    query, gate = jnp.split(attention._query_dense(x), 2, axis=-1)
    query = rotated(attention._query_norm(query))
    key = rotated(attention._key_norm(attention._key_dense(x)))
    _, out = context.paged_attention_func(
        None,
        query,
        key,
        attention._value_dense(x),
        attention._inv_norm_factor,
        query.shape[-1],
        query.shape[-2],
        key.shape[-2],
    )
    out = out.reshape(query.shape) * jax.nn.sigmoid(gate)
    return attention._output_dense(out)


def hooked_window(attention):
    """Returns the sliding window of a layer of `add_hook`, or `None`."""
    if not getattr(attention, "use_sliding_window_attention", True):
        return None
    for name in ("_sliding_window", "sliding_window", "sliding_window_size"):
        if hasattr(attention, name):
            return getattr(attention, name) or None
    return None


def _part(layer, name):
    """Returns a sublayer whose attribute may begin with an underscore."""
    return getattr(layer, f"_{name}", None) or getattr(layer, name)


def subtree_ends(prefix_segments, segment_ids):
    """Computes the last segment that continues that of each token.

    The segments of a row are numbered in pre-order: each one comes before
    those that continue it, and these are adjacent. A token of segment `s` then
    sees segment `a` if `a <= s <= subtree_end(a)`.

    Args:
        prefix_segments: int array of shape `(rows, num_sequences)`, the
            segment that each one continues, 0 where there is none.
        segment_ids: int array of shape `(rows, length)`.

    Returns:
        An int32 array of shape `(rows, length)`, 0 at padding.
    """
    slots = prefix_segments.shape[1]
    ids = jnp.arange(1, slots + 1, dtype="int32")
    # The first later segment that continues neither the segment nor one of
    # its subtree.
    beyond = (ids[None, :] > ids[:, None]) & (
        prefix_segments[:, None, :] < ids[:, None]
    )
    ends = jnp.min(jnp.where(beyond, ids - 1, slots), axis=2)
    slot = jnp.maximum(segment_ids - 1, 0)
    of_token = jnp.take_along_axis(ends, slot, axis=1)
    return jnp.where(segment_ids > 0, of_token, 0)


def segment_attention(
    query, key, value, segment_ids, positions, subtree_ends=None, *, scale,
    sliding_window=None, soft_cap=None, sinks=None, images=None, pieces=None,
    kernel=None,
):  # fmt: skip
    """Computes causal grouped-query attention within each segment.

    The result has the shape and dtype of `query`.

    Args:
        query: float array of shape `(rows, length, heads, head_dim)`.
        key, value: float arrays of shape
            `(rows, length, kv_heads, head_dim)`.
        segment_ids, positions, subtree_ends: as in `attention_scope`.
        scale: float, multiplied with the scores.
        sliding_window: int or `None`; a token sees this many tokens, itself
            included.
        soft_cap: float or `None`; scores `s` become `cap * tanh(s / cap)`.
        sinks: float array of shape `(heads,)` or `None`, one more score in
            the softmax of each head; neither scaled nor capped.
        images: as in `attention_scope`.
        pieces: `Pieces` of the rows or `None`. With several of a row,
            `query`, `key` and `value` are of pieces,
            `(*pieces.shape, heads, head_dim)`, and no images are supported.
        kernel: one of `gpu_attention.KERNELS`, or `None` for what other
            devices than CUDA GPUs have.
    """
    if kernel in (gpu_attention.CUDNN, gpu_attention.PALLAS):
        return gpu_attention.attend(
            kernel, query, key, value, segment_ids, scale=scale,
            window=sliding_window,
        )  # fmt: skip
    if pieces is not None and pieces.count == 1:
        pieces = None
    is_free = kernel is None and images is None
    if is_free and tpu_attention.is_supported(query, subtree_ends):
        # The kernel names its outputs and statistics itself.
        return tpu_attention.splash_attention(
            query,
            key,
            value,
            segment_ids,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            pieces=pieces,
        )
    rows, length, heads, head_dim = query.shape
    many = 4 * rows * heads * length**2 > KEEP_SCORES
    if pieces is not None or (
        many
        and images is None
        and block_attention.is_used(length, subtree_ends is not None)
    ):

        def scores(q, k, of_queries, of_keys):
            return _masked_scores(
                q, k, *of_queries[:2], *of_keys, scale=scale,
                sliding_window=sliding_window, soft_cap=soft_cap,
            )  # fmt: skip

        return block_attention.segment_attention(
            query, key, value, segment_ids, positions, subtree_ends, sinks,
            sliding_window, scores, pieces,
        )  # fmt: skip
    kv_heads = key.shape[2]
    query = query.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    attend = functools.partial(
        _attend_block,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=None if sinks is None else _by_group(sinks, kv_heads),
    )
    if many:
        attend = jax.checkpoint(attend)
    image_ids = None if images is None else images.ids
    group = max(-(-length // MAX_GROUPS), BLOCK)
    group = -(-group // BLOCK) * BLOCK if length > BLOCK else length
    out = []
    for start in range(0, length, group):
        stop = min(start + group, length)
        # The tokens of a segment are adjacent, so that a window of positions
        # is also a window of columns. Only a shared prefix may be further
        # back.
        first = 0
        if sliding_window is not None and subtree_ends is None:
            first = max(0, start - sliding_window + 1)
        # An image may go on behind the queries.
        last = stop if images is None else min(stop + images.size - 1, length)
        keys = slice(first, last)
        k, v = key[:, keys], value[:, keys]
        seen = (segment_ids, positions, subtree_ends, image_ids)
        seen = [None if x is None else x[:, keys] for x in seen]

        def block(q, ids, places, pictures=None, k=k, v=v, seen=seen):
            return attend(q, k, v, ids, places, *seen, pictures)

        part = (query, segment_ids, positions, image_ids)
        part = tuple(x[:, start:stop] for x in part if x is not None)
        size = stop - start
        if size > BLOCK and size % BLOCK == 0:
            cut = jax.tree.map(lambda x: _split(x, BLOCK), part)
            blocks = jax.lax.map(lambda xs: block(*xs), cut)
            out.append(jnp.moveaxis(blocks, 0, 1).reshape(part[0].shape))
        else:
            out.append(block(*part))
    out = jnp.concatenate(out, axis=1) if len(out) > 1 else out[0]
    out = checkpoint_name(out, ATTENDED)
    return out.reshape(rows, length, heads, head_dim)


def _by_group(sinks, kv_heads):
    """Returns sinks as `(kv_heads, group, 1, 1)`, float32 as scores are."""
    return sinks.astype("float32").reshape(kv_heads, -1, 1, 1)


def attention_weights(
    query, key, segment_ids, positions, subtree_ends=None, *, sinks=None,
    images=None, **settings,
):  # fmt: skip
    """Computes the attention weights of `segment_attention`.

    They are float32 of shape `(rows, heads, length, length)`, a row for each
    query: 0 where the query does not see the key, and for padding. With sinks
    a row adds up to less than 1.
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
        subtree_ends,
        *(() if images is None else (images.ids, images.ids)),
        **settings,
    ).reshape(rows, heads, length, length)
    if sinks is not None:
        sinks = sinks.astype("float32")[:, None, None]
        sinks = jnp.broadcast_to(sinks, (rows, heads, length, 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    used = (segment_ids > 0)[:, None, :, None]
    return jnp.where(used, weights, 0.0)


def _split(x, size):
    rows, length = x.shape[:2]
    x = x.reshape(rows, length // size, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _attend_block(
    q, k, v, q_segments, q_positions, k_segments, k_positions, k_ends=None,
    k_images=None, q_images=None, *, scale, sliding_window, soft_cap,
    sinks=None,
):  # fmt: skip
    rows, length, kv_heads, group, head_dim = q.shape
    # The heads that share a key become rows of one matrix product. On a CPU
    # this is twice as fast as an einsum over five axes.
    q = jnp.moveaxis(q, 1, 3).reshape(rows, kv_heads, -1, head_dim)
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    scores = _masked_scores(
        q, k, q_segments, q_positions, k_segments, k_positions, k_ends,
        k_images, q_images, scale=scale, sliding_window=sliding_window,
        soft_cap=soft_cap,
    )  # fmt: skip
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    # The softmax does not depend on it.
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    out = jax.lax.dot_general(
        weights.astype(v.dtype).reshape(*q.shape[:3], -1),
        v,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type="float32",
    ).reshape(rows, kv_heads, group, length, head_dim)
    return jnp.moveaxis(out / total, 3, 1).astype(v.dtype)


def _masked_scores(
    q, k, q_segments, q_positions, k_segments, k_positions, k_ends,
    k_images=None, q_images=None, *, scale, sliding_window, soft_cap,
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
    q_segments, k_segments = q_segments[:, :, None], k_segments[:, None, :]
    if k_ends is None:
        same = q_segments == k_segments
    else:
        after = q_segments >= k_segments
        same = after & (q_segments <= k_ends[:, None, :])
    ahead = q_positions[:, :, None] - k_positions[:, None, :]
    seen = ahead >= 0
    if k_images is not None:
        of_image = q_images[:, :, None] == k_images[:, None, :]
        seen |= of_image & (k_images > 0)[:, None, :]
    visible = same & seen
    if sliding_window is not None:
        visible &= ahead < sliding_window
    # Padding is segment 0 at position 0. It attends to itself, so that every
    # query has at least one visible key.
    return jnp.where(visible[:, None, None], scores, -1e30)


# --- Decoding ----------------------------------------------------------------


def _with_keys(caches):
    """Returns the numbers of the caches of keys and values."""
    kinds = KeyValues, PrefixKeyValues
    return [i for i, x in enumerate(caches) if isinstance(x, kinds)]


@contextlib.contextmanager
def extending_scope(positions, slots, counts, caches, place):
    """Makes decoder layers called inside attend to a cache of tokens.

    These layers take the next tokens of each sequence,
    `(sequences * tokens, 1, hidden)`.

    Args:
        positions: int array of shape `(sequences, tokens)`. The first one of
            a sequence is the number of its tokens in the caches.
        slots, counts: int arrays of shape `(sequences,)`, as of
            `KeyValues.extend`.
        caches: list of caches, one for each layer that has its own. Those of
            recurrent layers are left out. The list's items are replaced by
            ones with the new tokens.
        place: function that lays out a cache in a program.
    """
    layers, before = iter(_with_keys(caches)), {}
    sequences, width = positions.shape
    places = jnp.arange(width)

    def attend(
        cache, q, k, v, scale, head_dim, num_heads, num_kv_heads,
        sliding_window=None, soft_cap=None, sinks=None, donor=None,
    ):  # fmt: skip
        q, k, v = (x.reshape(sequences, -1, y, head_dim) for x, y in (
            (q, num_heads), (k, num_kv_heads), (v, num_kv_heads)
        ))  # fmt: skip
        layer = next(layers) if donor is None else donor
        if donor is None:
            if caches[layer].wraps:
                # These tokens overwrite others that they attend to.
                before[layer] = place(caches[layer].select(slots))
            more = caches[layer].extend(slots, positions[:, 0], counts, k, v)
            caches[layer] = place(more)
        # Other caches are written to before they are read: in their place,
        # without a copy.
        old = before.get(layer)
        if old is None:
            old = place(caches[layer].select(slots))
        # Keys as they will be read again.
        k, v = (x.astype(old.keys.dtype) for x in (k, v))
        row = 4 * num_heads * width * (old.num_columns + width)
        if row > KEEP_SCORES:
            out = _continued(
                q, old, k, v, positions, sinks, scale=float(scale),
                sliding_window=sliding_window, soft_cap=soft_cap,
            )  # fmt: skip
            return cache, out.astype(v.dtype).reshape(sequences * width, -1)
        of_rows = None
        if sinks is not None:
            # For each row of the product below.
            of_rows = _by_group(sinks, num_kv_heads)[..., 0]
            of_rows = jnp.repeat(of_rows, width, axis=1)

        def sequence(args):
            q, k, v, keys, values, held, length = args
            at = (length + places)[:, None]
            seen = jnp.broadcast_to(held >= 0, (width, held.size))
            since = places <= places[:, None]
            if sliding_window is not None:
                seen &= at - held < sliding_window
                since &= places[:, None] - places < sliding_window
            # The heads that share a key are rows of one product.
            query = jnp.moveaxis(q, 0, 1).reshape(
                1, num_kv_heads, -1, head_dim
            )
            group = num_heads // num_kv_heads
            parts = (
                (keys[None], values[None], jnp.tile(seen, (group, 1))),
                (
                    k.transpose(1, 2, 0)[None],
                    v.transpose(1, 0, 2)[None],
                    jnp.tile(since, (group, 1)),
                ),
            )
            scores = [
                _scores(query, keys, mask, float(scale), soft_cap)
                for keys, _, mask in parts
            ]
            values = [values for _, values, _ in parts]
            out = _weigh(scores, values, of_rows)[0]
            out = out.reshape(num_heads, width, head_dim)
            return jnp.moveaxis(out, 0, 1).astype(v.dtype)

        lengths = positions[:, 0]
        held = old.positions(lengths)
        out = jax.lax.map(
            sequence,
            (q, k, v, old.keys, old.values, held, lengths),
            batch_size=min(sequences, KEEP_SCORES // row),
        )
        return cache, out.reshape(sequences * width, -1)

    with vllm_context_scope(
        paged_attention_func=attend, positions=positions.reshape(-1)
    ):
        yield


def _continued(query, own, key, value, positions, sinks, **settings):
    """Computes attention of tokens to their sequences' caches by blocks.

    `own` has a slot for each sequence, with the tokens of `query` in it
    unless it wraps; `key` and `value` are theirs. `settings` are those of
    `_masked_scores`.
    """

    def scores(q, k, of_queries, of_keys):
        return _masked_scores(q, k, *of_queries[:2], *of_keys, **settings)

    begins = None
    if own.wraps:
        # Columns count from the oldest token that the cache has room for.
        lengths, room = positions[:, 0], own.num_columns
        own = own.in_order(lengths)
        begins = jnp.maximum(room - lengths, 0)
        positions = positions - lengths[:, None] + room
    keys = jnp.transpose(joined_keys(own.keys), (0, 3, 1, 2))
    values = jnp.moveaxis(own.values, 2, 1)
    if begins is not None:
        keys = jnp.concatenate([keys, key], axis=1)
        values = jnp.concatenate([values, value], axis=1)
    return block_attention.continued_attention(
        query.astype(keys.dtype), keys, values, positions, sinks,
        settings["sliding_window"], scores, begins,
    )  # fmt: skip


@contextlib.contextmanager
def decoding_scope(lengths, step, past, recent):
    """Makes decoder layers called inside attend to a cache of tokens.

    These layers take the next token of each sequence, `(slots, 1, hidden)`.

    Args:
        lengths: int array of shape `(slots,)`, the tokens of `past` that
            belong to each sequence.
        step: int scalar, the number of tokens in `recent`.
        past: list of caches or `PrefixKeyValues`, one for each layer; not
            changed. Those of recurrent layers are left out.
        recent: list of caches, one for each layer, of the tokens after
            those of `past`. A token is written to the same column in all
            slots, which is cheap, and not to the end of each sequence. The
            list's items are replaced by ones with the new token.
    """
    layers = iter(_with_keys(past))

    def attend(
        cache, q, k, v, scale, head_dim, num_heads, num_kv_heads,
        sliding_window=None, soft_cap=None, sinks=None, donor=None,
    ):  # fmt: skip
        slots = lengths.shape[0]
        layer = next(layers) if donor is None else donor
        old, new = past[layer], recent[layer]
        if donor is None:
            shape = (slots, num_kv_heads, head_dim)
            pair = (x.reshape(shape).astype(new.keys.dtype) for x in (k, v))
            new = recent[layer] = new.write(step, *pair)
        query = q.reshape(slots, num_kv_heads, -1, head_dim)
        since = jnp.arange(new.num_columns)
        at = (lengths + step)[:, None]
        visible = jnp.broadcast_to(since <= step, (slots, since.size))
        if sliding_window is not None:
            visible &= step - since < sliding_window
        parts, of_prefix = [(new, visible)], None
        if isinstance(old, PrefixKeyValues):
            of_prefix = _of_prefix(
                query, old, at, float(scale), soft_cap, sliding_window
            )
        held = old if of_prefix is None else old.own
        if held is not None:
            where = old.positions(lengths)
            visible = where >= 0
            if sliding_window is not None:
                visible &= at - where < sliding_window
            parts.insert(0, (held, visible))
        scores = [
            _scores(
                query, part.keys, seen[:, None, None], float(scale), soft_cap
            )
            for part, seen in parts
        ]
        if sinks is not None:
            sinks = _by_group(sinks, num_kv_heads)[..., 0]
        values = [part.values for part, _ in parts]
        out = _weigh(scores, values, sinks, of_prefix)
        return cache, out.astype(v.dtype).reshape(slots, -1)

    with vllm_context_scope(
        paged_attention_func=attend, positions=lengths + step
    ):
        yield


@contextlib.contextmanager
def verifying_scope(lengths, positions, column, placed, past, recent):
    """Makes decoder layers called inside attend as in `decoding_scope`, for
    several tokens of each sequence at once.

    These layers take the next tokens of each sequence,
    `(slots * tokens, 1, hidden)`.

    Args:
        lengths, past: as of `decoding_scope`.
        positions: int array of shape `(slots, tokens)`.
        column: int scalar, that of `recent` which gets the first of them.
        placed: int array of shape `(slots, columns)`, the position of the
            token in each column of `recent`, these tokens included; -1 in
            columns that no token sees.
        recent: as of `decoding_scope`; its columns may be in another order.
    """
    layers = iter(_with_keys(past))
    slots, width = positions.shape
    at = positions[:, :, None]

    def attend(
        cache, q, k, v, scale, head_dim, num_heads, num_kv_heads,
        sliding_window=None, soft_cap=None, sinks=None, donor=None,
    ):  # fmt: skip
        layer = next(layers) if donor is None else donor
        old, group = past[layer], num_heads // num_kv_heads
        if donor is None:
            shape = (slots, width, num_kv_heads, head_dim)
            pair = (x.reshape(shape).astype(old.keys.dtype) for x in (k, v))
            recent[layer] = recent[layer].write_block(column, *pair)
        # The heads that share a key are rows of one product.
        query = q.reshape(slots, width, num_kv_heads, group, head_dim)
        query = query.transpose(0, 2, 3, 1, 4)
        query = query.reshape(slots, num_kv_heads, -1, head_dim)
        parts, scores = (old, recent[layer]), []
        held = old.positions(lengths)
        for part, where in zip(parts, (held, placed)):
            where = where[:, None]
            seen = (where >= 0) & (where <= at)
            if sliding_window is not None:
                seen &= at - where < sliding_window
            seen = jnp.tile(seen, (1, group, 1))[:, None]
            scores.append(
                _scores(query, part.keys, seen, float(scale), soft_cap)
            )
        if sinks is not None:
            sinks = _by_group(sinks, num_kv_heads)[..., 0]
            sinks = jnp.repeat(sinks, width, axis=1)
        out = _weigh(scores, [part.values for part in parts], sinks)
        out = out.reshape(slots, num_kv_heads, group, width, head_dim)
        out = out.transpose(0, 3, 1, 2, 4).astype(v.dtype)
        return cache, out.reshape(slots * width, -1)

    with vllm_context_scope(
        paged_attention_func=attend, positions=positions.reshape(-1)
    ):
        yield


def _scores(query, keys, visible, scale, soft_cap):
    """Computes the scores of queries with the keys of a cache.

    Args:
        query: array of shape `(slots, kv_heads, queries, head_dim)`.
        keys: those of a `KeyValues`.
        visible: bool array that broadcasts to
            `(slots, kv_heads, queries, tokens)`.

    Returns:
        A float32 array of shape `(slots, kv_heads, queries, tokens)`, or
        `(slots, kv_heads, blocks, queries, block)` of few queries with keys
        in blocks.
    """
    query = query.astype(keys.dtype)
    if query.shape[2] > FEW_QUERIES:
        keys = joined_keys(keys)
    if keys.ndim == 5:
        slots, heads, blocks, _, block = keys.shape
        shape = (slots, heads, blocks, *query.shape[2:])
        query = jnp.broadcast_to(query[:, :, None], shape)
        visible = visible.reshape(*visible.shape[:-1], blocks, block)
        visible = jnp.moveaxis(visible, -2, -3)
    scores = _products(query, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return jnp.where(visible, scores, -1e30)


def _of_prefix(query, past, at, scale, soft_cap, window):
    """Attends to the tokens that slots share with their groups.

    Args:
        query: as of `_scores`.
        past: `PrefixKeyValues`.
        at: int array of shape `(slots, 1)`, the positions of queries.
        window: int or `None`, the tokens that a token sees.

    Returns:
        Tuple `(top, total, sum)` as of `_weigh`.
    """
    groups, prefixes = past.groups, past.prefixes
    columns = jnp.arange(prefixes.num_columns)
    seen = columns < groups.shared[:, None]
    if window is not None:
        seen &= at - columns < window
    seen = jnp.repeat(seen[:, None, None], query.shape[2], axis=2)
    scores = _scores(
        groups.of_groups(query),
        prefixes.keys,
        groups.of_groups(seen),
        scale,
        soft_cap,
    )
    top = jnp.max(scores, axis=3)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=3)
    out = _products(weights.astype(prefixes.values.dtype), prefixes.values)
    top, total, out = (groups.of_slots(x) for x in (top, total, out))
    # Without a group a slot has got what is another one's.
    is_alone = (groups.shared == 0)[:, None, None]
    return jnp.where(is_alone, -1e30, top), total, out


def _weigh(scores, values, sinks=None, before=None):
    """Averages values by the softmax of scores that come in parts.

    Args:
        scores: list of those of `_scores`.
        values: list of arrays of shape `(slots, kv_heads, tokens, head_dim)`.
        sinks: array of shape `(kv_heads, queries, 1)`, or `None`.
        before: tuple of arrays, or `None`: of more tokens the largest score,
            the sum of the exponentials of scores less that one, both of shape
            `(slots, kv_heads, queries)`, and the sum of values by them.

    Returns:
        An array of shape `(slots, kv_heads, queries, head_dim)`.
    """

    def of_tokens(s):
        return (2, 4) if s.ndim == 5 else 3

    tops = [jnp.max(s, axis=of_tokens(s)) for s in scores]
    if sinks is not None:
        sinks = sinks[..., 0]
        tops.append(sinks)
    if before is not None:
        tops.append(before[0])
    top = functools.reduce(jnp.maximum, tops)
    weights = [jnp.exp(s - jnp.expand_dims(top, of_tokens(s))) for s in scores]
    total = sum(jnp.sum(w, axis=of_tokens(w)) for w in weights)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    out = 0
    if before is not None:
        share = jnp.exp(before[0] - top)
        total = total + share * before[1]
        out = share[..., None] * before[2]
    for w, v in zip(weights, values):
        w = w.astype(v.dtype)
        if w.ndim == 5:
            v = v.reshape(*v.shape[:2], w.shape[2], w.shape[4], v.shape[3])
            out += jnp.sum(_products(w, v), axis=2)
        else:
            out += _products(w, v)
    return out / total[..., None]


def _products(x, y):
    """Multiplies matrices in the last two axes."""
    leading = tuple(range(x.ndim - 2))
    axes = ((x.ndim - 1,), (y.ndim - 2,)), (leading, leading)
    return jax.lax.dot_general(x, y, axes, preferred_element_type="float32")
