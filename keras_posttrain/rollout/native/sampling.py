"""Samples the next token: pure functions of logits and random keys."""

import collections
import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.rollout.request import content_of

# Lower temperatures sample as this one does; its inverse is finite.
LEAST_TEMPERATURE = 1e-30
INT_MAX = np.iinfo(np.int32).max


def sample_key(seed, prompt_ids, generation, content=b""):
    """Computes the random key of a sample from its identity alone.

    `generation` is its index among the samples of its prompt, `content` the
    digest of the prompt's images. The key is a uint32 array of shape `(2,)`,
    the data of a threefry key.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{int(seed)} {int(generation)} ".encode())
    digest.update(np.asarray(prompt_ids, "<i8").tobytes())
    digest.update(content)
    return np.frombuffer(digest.digest(), "<u4").astype("uint32")


def sample_keys(requests):
    """Computes a list of the keys of each request's samples.

    Requests with equal prompts, images included, and seeds count as one
    prompt with more samples, so that their samples differ. Tokens that were
    sampled before an interruption do not count as part of the prompt: with the
    same weights, a sample that is resumed gets the tokens it would have had.
    """
    seen, keys = collections.Counter(), []
    for r in requests:
        prompt = r.token_ids[: len(r.token_ids) - r.drawn]
        first, content = r.first_sample, content_of(r.images)
        if first is None:
            key = r.seed, prompt, content
            first = seen[key]
            seen[key] += r.num_generations
        keys.append(
            [
                sample_key(r.seed, prompt, first + g, content)
                for g in range(r.num_generations)
            ]
        )
    return keys


def sample(
    logits,
    keys,
    positions,
    temperature,
    *,
    top_k=None,
    top_p=None,
    min_p=None,
    noise=None,
):
    """Samples one token for each row.

    The token is the argmax of logits plus Gumbel noise, taken first over
    blocks of the vocabulary and then within a block. This samples exactly
    from the distribution, with about twice the square root of the vocabulary
    in noise values instead of one for each token. A row depends only on its
    own arguments. Rounding that differs by batch shape can only swap the two
    best tokens, and so hardly ever changes a sample; with an inverse CDF it
    could at every boundary between tokens.

    Truncation keeps the `top_k` most probable tokens, of these the fewest
    with a total probability of `top_p`, and of these the ones at least
    `min_p` times as probable as the best. Tokens that tie with the last one
    kept are kept too. If all three are `None` the program is faster.

    Args:
        logits: float32 array of shape `(rows, vocabulary)`, not yet divided
            by the temperature.
        keys: uint32 array of shape `(rows, 2)`, see `sample_key`.
        positions: int32 array of shape `(rows,)`, the position of the new
            token in its sequence.
        temperature: float32 array of shape `(rows,)`. At 0 the most probable
            token is taken (the lowest id of a tie), and truncation has no
            effect.
        top_k, top_p, min_p: arrays of shape `(rows,)`, int32, float32 and
            float32, or `None`. A row has no limit if they are the size of
            the vocabulary or more, 1 and 0.
        noise: float32 array, `token_noise` of these keys and positions, if
            it is computed already.

    Returns:
        `(token_ids, logps)` of shape `(rows,)`, int32 and float32. `logps`
        are those of the distribution before truncation at `temperature`, or
        at 1 if that is 0. They are NaN if the largest logit of the row is not
        finite.
    """
    greedy = temperature <= 0
    scale = jnp.maximum(temperature, LEAST_TEMPERATURE)
    scale = jnp.where(greedy, 1.0, scale)[:, None]
    rows, vocabulary = logits.shape
    blocks, size = block_shape(vocabulary)
    padding = ((0, 0), (0, blocks * size - vocabulary))
    by_block = jnp.pad(logits, padding, constant_values=-jnp.inf)
    by_block = by_block.reshape(rows, blocks, size)
    best = by_block.max(-1)
    top = best.max(-1, keepdims=True)

    def weights(x):
        at_top, by = top, 1.0 / scale
        if x.ndim == 3:
            at_top, by = top[:, None], by[:, None]
        return jnp.exp((x - at_top) * by)

    block_weights = all_weights = weights(by_block).sum(-1)
    least = None
    if not (top_k is None and top_p is None and min_p is None):
        least = _least_kept(
            by_block, top, scale, weights, greedy, top_k, top_p, min_p
        )
        kept = by_block >= least[:, None]
        block_weights = jnp.where(kept, weights(by_block), 0.0).sum(-1)

    if noise is None:
        noise = token_noise(keys, positions, vocabulary)
    block_scores = jnp.log(block_weights) + noise[:, :blocks]
    block = jnp.where(greedy, _first(best == top), _best(block_scores))
    inside = jnp.take_along_axis(by_block, block[:, None, None], axis=1)[:, 0]
    scores = (inside - top) / scale + noise[:, blocks:]
    if least is not None:
        scores = jnp.where(inside >= least, scores, -jnp.inf)
    place = jnp.where(greedy, _first(inside == top), _best(scores))
    chosen = jnp.take_along_axis(inside, place[:, None], axis=1)
    logps = (chosen - top) / scale - jnp.log(
        all_weights.sum(-1, keepdims=True)
    )
    token_ids = jnp.minimum(block * size + place, vocabulary - 1)
    return token_ids.astype("int32"), logps[:, 0]


@functools.lru_cache
def block_shape(vocabulary):
    """Returns the number and the size of the blocks of a vocabulary.

    Both are near its square root. Their product is the vocabulary if it has
    suitable divisors; otherwise the last block is padded.
    """
    root = math.isqrt(vocabulary)
    for size in range(root, max(root // 8, 1), -1):
        if vocabulary % size == 0:
            return size, vocabulary // size
    size = -(-(root + 1) // 16) * 16
    return -(-vocabulary // size), size


def token_noise(keys, positions, vocabulary):
    """Samples the Gumbel noise of `sample`.

    Args:
        keys: as in `sample`.
        positions: int32 array of shape `(rows, ...)`.
        vocabulary: int, the logits of a row.

    Returns:
        A float32 array of the shape of `positions` and one more axis.
    """
    count = sum(block_shape(vocabulary))
    # The generator is explicit: JAX's default can be configured.
    keys = jax.random.wrap_key_data(keys, impl="threefry2x32")

    def draw(key, position):
        return jax.random.bits(
            jax.random.fold_in(key, position), (count,), "uint32"
        )

    # All 32 bits are used: the smallest numbers give the largest noise, and
    # must be finely spaced.
    for _ in range(positions.ndim - 1):
        draw = jax.vmap(draw, (None, 0))
    bits = jax.vmap(draw)(keys, positions).astype("float32")
    uniform = (bits + 0.5) * 2.0**-32
    exponential = -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
    return -jnp.log(exponential)


def _first(hits):
    """Returns the first true column of each row, or 0."""
    columns = jnp.arange(hits.shape[1], dtype="int32")
    first = jnp.min(jnp.where(hits, columns, hits.shape[1]), axis=1)
    return jnp.where(first < hits.shape[1], first, 0)


def _best(scores):
    """Returns the argmax of each row, twice as fast as `argmax` on a CPU."""
    return _first(scores == scores.max(axis=1, keepdims=True))


# --- Truncation --------------------------------------------------------------


def _least_kept(x, top, scale, weights, greedy, top_k, top_p, min_p):
    """Returns the least logit that may be sampled, `(rows, 1)`.

    All three rules keep the tokens from some logit upwards. It is found
    without sorting, by a binary search over the bits of a float, which have
    the order of the floats.
    """

    def total(t, weight):
        kept = jnp.where(x >= t[..., None], weight, 0.0)
        return kept.sum(axis=(1, 2))[:, None]

    def search(holds, limited):
        # For rows without a limit there is nothing to search.
        limited = limited & ~greedy[:, None]
        return _greatest(holds, least, jnp.where(limited, top, least))

    least = jnp.full_like(top, -jnp.inf)
    if top_k is not None:
        k = top_k[:, None]
        # Counted in float32, which is exact up to 2**24 and faster than ints.
        least = search(lambda t: total(t, 1.0) >= k, k < x[0].size)
    if top_p is not None:
        p = top_p[:, None]
        need = p * total(least, weights(x))
        # At 1 all tokens stay, even those too improbable to change the sum.
        least = search(lambda t: total(t, weights(x)) >= need, p < 1)
    if min_p is not None:
        floor = top + scale * jnp.log(min_p[:, None])
        least = jnp.maximum(least, floor)
    # The best token stays, whatever the rounding.
    return jnp.minimum(least, top)


def _greatest(holds, low, high):
    """Returns the greatest float in `[low, high]` for which `holds` is true.

    It must be true for `low`, and false from some float upwards.
    """

    def body(state):
        low, high = state
        # The mean, rounded up, of two ints whose sum may overflow.
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        yes = holds(_from_order(middle))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle - 1)

    def unsure(state):
        low, high = state
        return jnp.any(low < high)

    low, high = _to_order(low), _to_order(high)
    low, _ = jax.lax.while_loop(unsure, body, (low, high))
    return _from_order(low)


def _to_order(x):
    """Maps float32 to int32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ INT_MAX, bits)


def _from_order(bits):
    bits = jnp.where(bits < 0, bits ^ INT_MAX, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
