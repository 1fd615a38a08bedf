"""Attention on TPUs by JAX's splash kernel, which stores no scores in memory.

XLA cannot partition the kernel. On a mesh it runs in `jax.shard_map`, each
device with its rows and its heads.
"""

import functools

import jax
import jax.numpy as jnp

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
    soft_cap=None, sinks=None, interpret=False,
):  # fmt: skip
    """Computes `models/attention.py:segment_attention` by a TPU kernel.

    The tokens of a segment are adjacent and in the order of their positions.
    A mask that is causal by column is therefore causal by position. With
    `interpret`, for tests, the kernel runs without a TPU.
    """
    # The kernel does not scale the scores.
    query = (query * jnp.asarray(scale, "float32")).astype(query.dtype)

    def local(query, key, value, segment_ids, sinks):
        kernel = _kernel(query.shape, sliding_window, soft_cap, interpret)
        heads_first = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        out = jax.vmap(functools.partial(kernel, sinks=sinks))(
            *heads_first, _ids(segment_ids)
        )
        return jnp.swapaxes(out, 1, 2).astype(query.dtype)

    return sharding.over_heads(local, query, key, value, segment_ids, sinks)


def _ids(segment_ids):
    # Importing Pallas's TPU kernels is slow, and only needed on TPUs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(segment_ids, segment_ids)


def _kernel(shape, sliding_window, soft_cap, interpret):
    # See `_ids`.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, _ = shape
    mask = splash.CausalMask((length, length))
    if sliding_window is not None:
        window = (sliding_window - 1, 0)
        mask = splash.LocalMask((length, length), window, 0)
    block = next(size for size in BLOCKS if length % size == 0)
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
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
