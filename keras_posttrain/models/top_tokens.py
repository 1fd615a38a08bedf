"""Top-k tokens at selected positions, in chunks of tokens."""

import jax
import jax.numpy as jnp


def top_tokens(head, hidden, kernel, tokens, k):
    """Computes the `k` most probable tokens and their log-probabilities.

    Returns a dict of `top_ids` (int32) and `top_logps` (float32) of shape
    `(rows * length, k)`, best first, 0 for tokens not selected.
    """
    slots = tokens.index.shape[0]
    size = head.chunk(head.vocabulary_size(kernel), slots)
    pad = -slots % size
    index, source = (
        jnp.pad(x, (0, pad)) for x in (tokens.index, tokens.source)
    )
    # Unused slots write to one more element at the end, removed below.
    out = (
        jnp.zeros((slots + 1, k), "int32"),
        jnp.zeros((slots + 1, k), "float32"),
    )

    def body(start, size, out):
        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        used = start + jnp.arange(size) < tokens.count
        logits = head.logits_in_tiles(hidden[cut(source)], kernel)
        best, ids = jax.lax.top_k(logits, k)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        place = jnp.where(used, cut(index), slots)
        return (
            out[0].at[place].set(ids.astype("int32")),
            out[1].at[place].set(best - total),
        )

    ids, logps = head.over_chunks(kernel, size, tokens.count, body, out)
    return {"top_ids": ids[:slots], "top_logps": logps[:slots]}
