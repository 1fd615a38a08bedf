"""Drawing the next token: pure functions of logits and random keys."""

import collections
import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np

# A temperature below this draws like it; its inverse is still finite.
LEAST_TEMPERATURE = 1e-30
INT_MAX = np.iinfo(np.int32).max


def sample_key(seed, prompt_ids, generation):
    """The key of a sample's randomness, the same wherever it is drawn.

    Args:
        seed: int.
        prompt_ids: ints, the token ids of the prompt.
        generation: int, the sample's number among those of its prompt.

    Returns:
        uint32 array of shape `(2,)`, the data of a threefry key.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{int(seed)} {int(generation)} ".encode())
    digest.update(np.asarray(prompt_ids, "<i8").tobytes())
    return np.frombuffer(digest.digest(), "<u4").astype("uint32")


def sample_keys(requests):
    """The keys of all samples.

    Equal prompts of equal seed are so many samples of one prompt: they do
    not draw the same. What was drawn before is no part of the prompt: with
    the same weights a sample that goes on is the one it would have been.

    Args:
        requests: list of `Request`s that have seeds.

    Returns:
        A list with, for each request, a list of `num_generations` keys.
    """
    seen, keys = collections.Counter(), []
    for r in requests:
        prompt = r.token_ids[: len(r.token_ids) - r.drawn]
        first = r.first_sample
        if first is None:
            first = seen[r.seed, prompt]
            seen[r.seed, prompt] += r.num_generations
        keys.append(
            [
                sample_key(r.seed, prompt, first + g)
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
):
    """Draws one token a row.

    The draw is the greatest of Gumbel-perturbed logits, first of blocks of
    the vocabulary and then within one: exact, at the cost of noise for twice
    the root of the vocabulary and not for all of it. What a row draws
    depends on its own arguments alone; and as only the two foremost can
    change places, the rounding of another batch shape hardly ever changes a
    token (an inverse CDF has a boundary at every token for it to cross).

    Truncation keeps the `top_k` most probable tokens, of these the fewest
    with a share of `top_p`, and of these the ones at least `min_p` times as
    probable as the best. Tokens that tie with the last one kept are kept
    too. Where all three are `None` the program is cheaper.

    Args:
        logits: float32 array of shape `(rows, vocabulary)`, not yet divided
            by the temperature.
        keys: uint32 array of shape `(rows, 2)`, see `sample_key`.
        positions: int32 array of shape `(rows,)`, the place of the new token
            in its sequence.
        temperature: float32 array of shape `(rows,)`; at 0 the most probable
            token is taken, the one of least id among equals, and truncation
            does nothing.
        top_k: int32 array of shape `(rows,)`, the vocabulary or more for no
            limit; or `None`.
        top_p: float32 array of shape `(rows,)`, 1 for no limit; or `None`.
        min_p: float32 array of shape `(rows,)`, 0 for no limit; or `None`.

    Returns:
        `(token_ids, logps)` of shape `(rows,)`, int32 and float32. `logps`
        are those of the whole distribution at `temperature`, of temperature
        1 at 0, and NaN where the row's logits are not finite at their
        greatest.

    Example:
    ```python
    logits = np.log(np.array([[0.7, 0.2, 0.1]], "float32"))
    keys = sample_key(0, [5, 6], 0)[None]
    token_ids, logps = sample(
        logits, keys, np.array([2]), np.ones(1, "float32")
    )
    ```
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

    noise = _gumbel(keys, positions, blocks + size)
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
    """The number and the size of the blocks of a vocabulary.

    Both are near its square root, and fill it exactly where its divisors
    allow; the last block is padded otherwise.
    """
    root = math.isqrt(vocabulary)
    for size in range(root, max(root // 8, 1), -1):
        if vocabulary % size == 0:
            return size, vocabulary // size
    size = -(-(root + 1) // 16) * 16
    return -(-vocabulary // size), size


def _gumbel(keys, positions, count):
    """Standard Gumbel noise `(rows, count)`, by key and the token's place."""
    # Named, so that the process's default generator changes no token.
    keys = jax.random.wrap_key_data(keys, impl="threefry2x32")

    def draw(key, position):
        return jax.random.bits(
            jax.random.fold_in(key, position), (count,), "uint32"
        )

    # All 32 bits: small numbers, whose noise is great, are the fine ones.
    bits = jax.vmap(draw)(keys, positions).astype("float32")
    uniform = (bits + 0.5) * 2.0**-32
    exponential = -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
    return -jnp.log(exponential)


def _first(hits):
    """The first true column of each row, 0 where there is none."""
    columns = jnp.arange(hits.shape[1], dtype="int32")
    first = jnp.min(jnp.where(hits, columns, hits.shape[1]), axis=1)
    return jnp.where(first < hits.shape[1], first, 0)


def _best(scores):
    """The column of the greatest score of each row, the first of equals."""
    # Twice as fast as argmax on a CPU.
    return _first(scores == scores.max(axis=1, keepdims=True))


# --- Truncation --------------------------------------------------------------


def _least_kept(x, top, scale, weights, greedy, top_k, top_p, min_p):
    """The least logit that may be drawn, `(rows, 1)`.

    All three rules keep the tokens from some logit on. To find it takes no
    sort: its bits are searched, as floats have the order of their bits.
    """

    def total(t, weight):
        kept = jnp.where(x >= t[..., None], weight, 0.0)
        return kept.sum(axis=(1, 2))[:, None]

    def search(holds, limited):
        # There is nothing to search for in rows without a limit.
        limited = limited & ~greedy[:, None]
        return _greatest(holds, least, jnp.where(limited, top, least))

    least = jnp.full_like(top, -jnp.inf)
    if top_k is not None:
        k = top_k[:, None]
        # A float32 counts to 2**24, and sums of them are the faster ones.
        least = search(lambda t: total(t, 1.0) >= k, k < x[0].size)
    if top_p is not None:
        p = top_p[:, None]
        need = p * total(least, weights(x))
        # At 1 all stay, also those too small for the sum to feel.
        least = search(lambda t: total(t, weights(x)) >= need, p < 1)
    if min_p is not None:
        floor = top + scale * jnp.log(min_p[:, None])
        least = jnp.maximum(least, floor)
    # Whatever rounding does, the best stays.
    return jnp.minimum(least, top)


def _greatest(holds, low, high):
    """The greatest float in `[low, high]` for which `holds` is true.

    It must be true of `low`, and false from some float on.
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
    """int32 in the order of float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ INT_MAX, bits)


def _from_order(bits):
    bits = jnp.where(bits < 0, bits ^ INT_MAX, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
