"""Attention on TPUs by JAX's splash kernel, which stores no scores in memory.

XLA cannot partition the kernel. On a mesh it runs in `jax.shard_map`, each
device with its rows and its heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_posttrain.models import sharding
from keras_posttrain.models.rematerialisation import ATTENDED

# Possible sizes of the square blocks of scores. The size must divide the
# length and, for the vector units of a TPU, be a multiple of the smallest.
BLOCKS = (512, 256, 128)
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
    A mask that is causal by column is therefore causal by position. With
    `interpret`, for tests, the kernel runs without a TPU. With `pieces`, a
    `Pieces`, the arrays are those of `attention.py:segment_attention`.
    """
    # The kernel does not scale the scores.
    query = (query * jnp.asarray(scale, "float32")).astype(query.dtype)
    settings = sliding_window, soft_cap, interpret

    def run(kernel, query, key, value, ids, sinks):
        heads_first = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        out = jax.vmap(functools.partial(kernel, sinks=sinks))(
            *heads_first, _ids(*ids)
        )
        return jnp.swapaxes(out, 1, 2).astype(query.dtype)

    if pieces is None:

        def local(query, key, value, segment_ids, sinks):
            kernel = _kernel(query.shape[1:3], *settings)
            ids = segment_ids, segment_ids
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
    ids = pieces.pad(segment_ids)
    return pieces.attend(
        of_pieces, query, key, value, ids, sinks, (kernel, part)
    )


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
