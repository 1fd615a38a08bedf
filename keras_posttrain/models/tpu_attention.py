"""Attention on TPUs by JAX's splash kernel, which stores no scores in memory.

XLA cannot partition the kernel. On a mesh it runs in `jax.shard_map`, each
device with its rows and its heads.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_posttrain.models import sharding
from keras_posttrain.models.rematerialisation import ATTENDED

# Possible sizes of the square blocks of scores. The size must divide the
# length and, for the vector units of a TPU, be a multiple of the smallest.
BLOCKS = (512, 256, 128)
# How many blocks a row must have at least, in each direction, for those that
# no segment shares to be left out: rows are then computed one after the other.
SKIPPED_FROM = 4
# Values of `jax_default_matmul_precision` that use one pass over 16-bit
# numbers.
PRECISIONS = (None, "default", "bfloat16", "fastest")


def is_supported(query, subtree_ends=None):
    """Returns whether the kernel supports these arrays on the devices used.

    There must be no shared prefixes.
    """
    length, head_dim = query.shape[1], query.shape[3]
    # The kernel's compiler rejects products of 16-bit numbers of any other
    # precision.
    precision = jax.config.jax_default_matmul_precision
    return (
        sharding.platform() == "tpu"
        and (precision in PRECISIONS or query.dtype.itemsize > 2)
        and subtree_ends is None
        and length % BLOCKS[-1] == 0
        and head_dim % 64 == 0
    )


def splash_attention(
    query, key, value, segment_ids, *, scale, sliding_window=None,
    soft_cap=None, sinks=None, interpret=False, pieces=None,
):  # fmt: skip
    """Computes `models/attention.py:segment_attention` by a TPU kernel.

    The tokens of a segment are adjacent and in the order of their positions.
    A mask that is causal by column is therefore causal by position. In long
    rows, blocks of scores that no segment shares are neither computed nor
    read. With `interpret`, for tests, the kernel runs without a TPU. With
    `pieces`, a `Pieces`, the arrays are those of
    `attention.py:segment_attention`.
    """
    # The kernel does not scale the scores.
    query = (query * jnp.asarray(scale, "float32")).astype(query.dtype)
    settings = sliding_window, soft_cap, interpret

    def run(kernel, query, key, value, ids, sinks):
        def of_row(query, key, value, *ids):
            shorter = _skipping(kernel, *ids)
            return shorter(query, key, value, _ids(*ids), sinks=sinks)

        heads_first = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        out = jax.vmap(of_row)(*heads_first, *ids)
        return jnp.swapaxes(out, 1, 2).astype(query.dtype)

    if pieces is None:

        def local(query, key, value, segment_ids, sinks):
            kernel = _kernel(query.shape[1:3], *settings)
            ids = (_runs(segment_ids),) * 2
            return run(kernel, query, key, value, ids, sinks)

        return sharding.over_heads(
            local, query, key, value, segment_ids, sinks
        )

    def of_pieces(query, key, value, segment_ids, sinks, kernel):
        key, value = (pieces.gather(x) for x in (key, value))
        _, own_ids = pieces.own(segment_ids)
        ids = own_ids, segment_ids
        return run(kernel, query, key, value, ids, sinks)

    columns = pieces.columns()
    kernel = _kernel((columns.size, query.shape[2]), *settings, columns)
    # Each device gets the mask of its own queries.
    layout = NamedSharding(pieces.mesh, P(None, pieces.axis))
    part = kernel.manual_sharding_spec(layout)
    ids = _runs(pieces.pad(segment_ids))
    return pieces.attend(
        of_pieces, query, key, value, ids, sinks, (kernel, part)
    )


def _runs(segment_ids):
    """Numbers the segments of each row, and its padding, in their order."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(
        jnp.cumsum(changes, axis=1, dtype="int32"), [(0, 0), (1, 0)]
    )


def _skipping(kernel, of_queries, of_keys):
    """Returns a kernel without the blocks that no segment shares.

    `of_queries` and `of_keys` are int arrays `(length,)` of `_runs`.
    """
    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    num_queries = infos[0].data_next.shape[1]
    num_keys = infos[2].data_next.shape[2]
    if num_keys < SKIPPED_FROM:
        return kernel
    first_q, last_q = _bounds(of_queries, num_queries)
    first_k, last_k = _bounds(of_keys, num_keys)
    shared = first_q[:, None] <= last_k
    shared &= first_k <= last_q[:, None]
    infos = [
        _without(info, shared, of_keys_first=i == 2)
        for i, info in enumerate(infos)
    ]
    return type(kernel)(*infos, **kernel.kwargs)


def _bounds(runs, num_blocks):
    """Returns the least and the largest run of each block."""
    blocks = runs.reshape(num_blocks, -1)
    return blocks.min(axis=1), blocks.max(axis=1)


def _without(info, shared, of_keys_first):
    """Returns a `MaskInfo` of the kernel without blocks that are not shared.

    The kernel visits the blocks of `data_next[0]` by rows, which are blocks
    of queries, and computes those where `block_mask` is not 0. `data_next` is
    the block of keys of such a place, and elsewhere that of the next one, as
    it is what the kernel reads. `of_keys_first` is for the gradients of keys:
    columns are visited one after the other, and are blocks of keys, and
    `data_next` is a block of queries.

    Args:
        info: `MaskInfo`, the same for all heads, of a mask without blocks of
            its own: it is a function.
        shared: bool array `(blocks of queries, blocks of keys)`.
    """
    block, mask = info.data_next[0], info.block_mask[0]
    if of_keys_first:
        block, mask, shared = block.T, mask.T, shared.T
    is_kept = jnp.take_along_axis(shared, block.astype("int32"), axis=1)
    mask = jnp.where(is_kept, mask, 0)
    # The place of the next block that is computed, or of the last one.
    places = jnp.arange(mask.size)
    kept = jnp.where(mask.reshape(-1) > 0, places, mask.size)
    following = jax.lax.cummin(kept, reverse=True)
    last = jnp.max(jnp.where(mask.reshape(-1) > 0, places, 0))
    block = block.reshape(-1)[jnp.minimum(following, last)].reshape(mask.shape)
    if of_keys_first:
        block, mask = block.T, mask.T
    return info._replace(data_next=block[None], block_mask=mask[None])


def _ids(of_queries, of_keys):
    # Importing Pallas's TPU kernels is slow, and only needed on TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(of_queries, of_keys)


def _kernel(shape, sliding_window, soft_cap, interpret, columns=None):
    """Makes the kernel for `(length, heads)`.

    `columns` are those of the queries of each device, an array of shape
    `(devices, queries)`; `None` if a device has all in their order.
    """
    # See `_ids`.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, heads = shape
    mask = splash.CausalMask((length, length))
    if sliding_window is not None:
        window = (sliding_window - 1, 0)
        mask = splash.LocalMask((length, length), window, 0)
    queries, shards = length, 1
    if columns is not None:
        shards, queries = columns.shape
        mask.q_sequence = columns.reshape(-1)
    block = next(size for size in BLOCKS if queries % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        mask=splash.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=shards,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
