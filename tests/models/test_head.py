"""The chunked projection, against the full log-softmax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_posttrain.models.head import (
    CHUNK_BOUNDS,
    EXTRAS,
    TILE,
    Head,
    select_tokens,
    token_logps,
    token_loss_sum,
    token_values,
)
from tests.support import cases_in_ci, in_ci

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 13, 8, 29
SLOTS = ROWS * LENGTH
HEADS = {
    "plain": Head(transposed=False),
    "soft cap": Head(transposed=True, soft_cap=2.5),
    "temperature": Head(transposed=False, soft_cap=4.0, temperature=1.6),
}
by_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
CHUNKS = (1, 6, None)
# Columns of a product: four tiles, the last of which begins within the third.
TILES = {6: 8}
by_chunk = pytest.mark.parametrize("chunk_size", in_ci(6, None, of=CHUNKS))
# In CI each head in chunks, and the one with everything as a whole too.
by_head_and_chunk = pytest.mark.parametrize(
    "head, chunk_size",
    [
        pytest.param(
            head,
            size,
            id=f"{size}-{name}",
            marks=()
            if size == 6 or (size is None and name == "temperature")
            else pytest.mark.full,
        )
        for size in CHUNKS
        for name, head in HEADS.items()
    ],
)


def example(head, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    shape = (VOCABULARY, WIDTH) if head.transposed else (WIDTH, VOCABULARY)
    hidden = rng.normal(size=(SLOTS, WIDTH))
    kernel = rng.normal(size=shape)
    token_ids = rng.integers(0, VOCABULARY, (ROWS, LENGTH))
    mask = rng.random((ROWS, LENGTH)) < 0.5
    return (
        jnp.asarray(hidden, dtype),
        jnp.asarray(kernel, dtype),
        jnp.asarray(token_ids, "int32"),
        jnp.asarray(mask),
    )


@functools.partial(jax.jit, static_argnums=0)
def full_values(head, hidden, kernel, token_ids, mask, predicted_by=None):
    """Computes the expected values from all logits at once."""
    rows, length = token_ids.shape
    hidden = hidden.reshape(rows, length, -1).astype("float32")
    if predicted_by is None:
        mask = mask.at[:, 0].set(False)
        predicted_by = jnp.broadcast_to(jnp.arange(length) - 1, mask.shape)
    hidden = jnp.take_along_axis(hidden, predicted_by[..., None], axis=1)
    kernel = kernel.astype("float32")
    logits = hidden @ (kernel.T if head.transposed else kernel)
    if head.soft_cap is not None:
        logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
    logps = jax.nn.log_softmax(logits / head.temperature)
    chosen = jnp.take_along_axis(logps, token_ids[..., None], axis=-1)[..., 0]
    values = {
        "per_token_logps": chosen,
        "correct": (jnp.argmax(logps, -1) == token_ids).astype("float32"),
        "entropies": -jnp.sum(jnp.exp(logps) * logps, -1),
        "collision_entropies": -jnp.log(jnp.sum(jnp.exp(2 * logps), -1)),
    }
    return {k: jnp.where(mask, v, 0).reshape(-1) for k, v in values.items()}


def dynamic(logps):
    return -jax.lax.stop_gradient(jnp.exp(logps)) * logps


def full_loss(head, token_ids, mask, weights, token_loss, predicted_by=None):
    def loss(hidden, kernel):
        values = full_values(
            head, hidden, kernel, token_ids, mask, predicted_by
        )
        kept = mask if predicted_by is not None else mask.at[:, 0].set(False)
        terms = weights * token_loss(values["per_token_logps"])
        return jnp.sum(jnp.where(kept.reshape(-1), terms, 0))

    return loss


def chunked_loss(head, token_ids, mask, weights, token_loss, **kwargs):
    """The general path: any function of the log-probabilities."""

    def loss(hidden, kernel):
        tokens = select_tokens(token_ids, mask, **kwargs)
        probe = jnp.zeros(tokens.index.shape)
        values = token_logps(head, hidden, kernel, tokens, probe)
        return jnp.sum(weights * token_loss(values["per_token_logps"]))

    return loss


def fused_loss(head, token_ids, mask, weights, token_loss, **kwargs):
    """The one-sweep path."""

    def loss(hidden, kernel):
        tokens = select_tokens(token_ids, mask, **kwargs)
        total, _ = token_loss_sum(
            head, hidden, kernel, tokens, weights[tokens.index], token_loss
        )
        return total

    return loss


def random_weights(seed=3):
    weights = np.random.default_rng(seed).normal(size=SLOTS)
    return jnp.asarray(weights, "float32")


def chunked(head, size):
    return dataclasses.replace(head, chunk_size=size, tile=TILES.get(size))


select = jax.jit(select_tokens)
all_values = jax.jit(
    lambda head, *arrays: token_values(head, *arrays, extras=EXTRAS),
    static_argnums=0,
)


def assert_same_gradients(got, want, atol=2e-6):
    (value, gradients), (full_value, full_gradients) = got, want
    np.testing.assert_allclose(value, full_value, rtol=2e-5, atol=atol)
    for name, a, b in zip(("hidden", "kernel"), gradients, full_gradients):
        np.testing.assert_allclose(
            a, b, rtol=2e-5, atol=atol, err_msg=f"gradient of the {name}"
        )


def both(loss):
    """The value, and the gradients of the hidden states and the kernel."""
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@by_head_and_chunk
def test_values_equal_the_full_log_softmax(head, chunk_size):
    hidden, kernel, ids, mask = example(head)
    want = full_values(head, hidden, kernel, ids, mask)
    tokens = select(ids, mask)
    head = chunked(head, chunk_size)
    got = all_values(head, hidden, kernel, tokens)
    assert set(got) == set(want)
    for name in want:
        assert got[name].dtype == "float32"
        np.testing.assert_allclose(
            got[name], want[name], rtol=2e-5, atol=2e-6, err_msg=name
        )


@by_head_and_chunk
def test_gradients_equal_those_of_the_full_log_softmax(head, chunk_size):
    hidden, kernel, ids, mask = example(head)
    arguments = (ids, mask, random_weights(), dynamic)
    want = both(full_loss(head, *arguments))(hidden, kernel)
    for path in (fused_loss, chunked_loss):
        loss = path(chunked(head, chunk_size), *arguments)
        assert_same_gradients(both(loss)(hidden, kernel), want)


def test_a_loss_that_couples_tokens_has_its_gradient():
    head = chunked(HEADS["temperature"], 7)
    hidden, kernel, ids, mask = example(head)

    def coupled(values):
        return jnp.sum(values["per_token_logps"]) ** 2

    def loss(hidden, kernel):
        tokens = select(ids, mask)
        probe = jnp.zeros(SLOTS)
        return coupled(token_logps(head, hidden, kernel, tokens, probe))

    def full(hidden, kernel):
        return coupled(full_values(head, hidden, kernel, ids, mask))

    assert_same_gradients(
        both(loss)(hidden, kernel), both(full)(hidden, kernel), atol=2e-3
    )


@by_head
def test_the_losss_own_cotangent_scales_the_gradient(head):
    hidden, kernel, ids, mask = example(head)
    arguments = (head, ids, mask, random_weights(), jnp.negative)
    plain = both(fused_loss(*arguments))(hidden, kernel)

    def tripled(hidden, kernel):
        return 3 * fused_loss(*arguments)(hidden, kernel)

    got = both(tripled)(hidden, kernel)
    assert_same_gradients(got, jax.tree.map(lambda x: 3 * x, plain), 1e-5)


@pytest.mark.parametrize("kind", ["none", "all", "one", "last"])
def test_any_number_of_tokens(kind):
    head = chunked(HEADS["soft cap"], 4)
    hidden, kernel, ids, mask = example(head)
    mask = jnp.full_like(mask, kind == "all")
    if kind in ("one", "last"):
        at = (1, 4) if kind == "one" else (ROWS - 1, LENGTH - 1)
        mask = mask.at[at].set(True)
    tokens = select(ids, mask)
    count = {"none": 0, "all": ROWS * (LENGTH - 1)}.get(kind, 1)
    assert int(tokens.count) == count, "the first column is never selected"
    want = full_values(head, hidden, kernel, ids, mask)
    got = all_values(head, hidden, kernel, tokens)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=3e-6)
    arguments = (ids, mask, random_weights(), jnp.negative)
    want = both(full_loss(head, *arguments))(hidden, kernel)
    for path in (fused_loss, chunked_loss):
        got = both(path(head, *arguments))(hidden, kernel)
        assert_same_gradients(got, want)
        if kind == "none":
            assert all((g == 0).all() for g in got[1])


def test_predicted_by_names_the_hidden_state():
    """Two completions of one prompt stored once: columns 0-3 the prompt,
    4-7 and 8-12 the completions, each of whose first tokens the prompt's
    last hidden state predicts. Its gradient is the sum of both."""
    head = chunked(HEADS["soft cap"], 3)
    hidden, kernel, ids, _ = example(head)
    columns = np.arange(LENGTH) - 1
    columns[[0, 4, 8]] = [0, 3, 3]
    predicted_by = jnp.asarray(np.tile(columns, (ROWS, 1)), "int32")
    mask = jnp.asarray(np.tile(np.arange(LENGTH) >= 4, (ROWS, 1)))
    tokens = select(ids, mask, predicted_by)
    want = full_values(head, hidden, kernel, ids, mask, predicted_by)
    got = all_values(head, hidden, kernel, tokens)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=3e-6)
    arguments = (ids, mask, random_weights(), jnp.negative)
    want = both(full_loss(head, *arguments, predicted_by))(hidden, kernel)
    for path in (fused_loss, chunked_loss):
        loss = path(head, *arguments, predicted_by=predicted_by)
        assert_same_gradients(both(loss)(hidden, kernel), want)
    hidden_gradient = want[1][0].reshape(ROWS, LENGTH, WIDTH)
    assert (hidden_gradient[:, 7] == 0).all(), "it predicts nothing"


@by_head
def test_a_frozen_head_has_no_gradient_and_the_same_hidden_one(head):
    hidden, kernel, ids, mask = example(head)
    arguments = (ids, mask, random_weights(), jnp.negative)
    frozen = Head(
        head.transposed, head.soft_cap, head.temperature, 6, trainable=False
    )
    value, (wanted, _) = both(full_loss(head, *arguments))(hidden, kernel)
    for path in (fused_loss, chunked_loss):
        got = both(path(frozen, *arguments))(hidden, kernel)
        zeros = np.zeros(kernel.shape, "float32")
        assert_same_gradients(got, (value, (wanted, zeros)))


@by_head
def test_bfloat16_stays_within_its_rounding(head):
    """Products of bfloat16 are summed in float32: the values agree with the
    float32 ones of the same rounded arrays; gradients are rounded once or
    twice, each time by at most 2**-8 of the largest term."""
    hidden, kernel, ids, mask = example(head, dtype="bfloat16")
    want = full_values(head, hidden, kernel, ids, mask)
    tokens = select(ids, mask)
    got = all_values(chunked(head, 6), hidden, kernel, tokens)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5)
    arguments = (ids, mask, random_weights(), jnp.negative)
    exact = (hidden.astype("float32"), kernel.astype("float32"))
    _, want = both(full_loss(head, *arguments))(*exact)
    for path in (fused_loss, chunked_loss):
        _, got = both(path(chunked(head, 6), *arguments))(hidden, kernel)
        for a, b in zip(got, want):
            assert a.dtype == "bfloat16"
            error = np.abs(a.astype("float32") - b).max()
            assert error <= 2**-6 * np.abs(b).max()


@by_chunk
def test_what_is_not_selected_is_not_looked_at(chunk_size):
    """NaN in the hidden states of tokens without loss, the last one of all
    included, reaches no value and no gradient, as it would through any
    projection."""
    head = chunked(HEADS["temperature"], chunk_size)
    hidden, kernel, ids, mask = example(head)
    mask = mask.at[0, :2].set(False).at[-1, -1].set(False)
    arguments = (ids, mask, random_weights(), jnp.negative)
    tokens = select(ids, mask)
    used = np.zeros(SLOTS, bool)
    used[np.asarray(tokens.source)[: int(tokens.count)]] = True
    assert 0 < used.sum() < SLOTS and not used[-1]
    spoilt = jnp.where(used[:, None], hidden, jnp.nan)
    want = all_values(head, hidden, kernel, tokens)
    got = all_values(head, spoilt, kernel, tokens)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    for path in (fused_loss, chunked_loss):
        loss = both(path(head, *arguments))
        want, got = loss(hidden, kernel), loss(spoilt, kernel)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def projections(head, mask, path):
    """Counts the calls back from inside the compiled loop."""
    calls = []
    hidden, kernel, ids, _ = example(head)

    class Counting(Head):
        def logits(self, hidden, kernel):
            jax.debug.callback(lambda: calls.append(1))
            return super().logits(hidden, kernel)

    head = Counting(**vars(head))
    loss = path(head, ids, mask, random_weights(), jnp.negative)
    jax.block_until_ready(both(loss)(hidden, kernel))
    jax.effects_barrier()
    return len(calls)


@pytest.mark.parametrize(
    "count, chunks",
    cases_in_ci((0, 0), (5, 2), (36, 9), of=[(0, 0), (4, 1), (5, 2), (36, 9)]),
)
def test_the_loop_runs_as_often_as_there_are_tokens(count, chunks):
    """Chunks of 4: ceil(count / 4) projections forward. The fused path makes
    none backward, the general one those of a trained head again."""
    mask = np.zeros((ROWS, LENGTH), bool)
    places = np.argwhere(np.ones((ROWS, LENGTH - 1)))[:count]
    mask[places[:, 0], places[:, 1] + 1] = True
    mask = jnp.asarray(mask)
    head = chunked(HEADS["soft cap"], 4)
    frozen = Head(transposed=True, chunk_size=4, trainable=False)
    assert projections(head, mask, fused_loss) == chunks
    assert projections(head, mask, chunked_loss) == 2 * chunks
    assert projections(frozen, mask, chunked_loss) == chunks


@pytest.mark.parametrize(
    "count, sizes", [(0, []), (2, [2]), (4, [4]), (6, [4, 2]), (7, [4, 4])]
)
def test_a_last_chunk_of_half_the_size(count, sizes):
    """Chunks of 4, or of 2 for the last tokens, in one of four tiles each."""
    calls = []

    class Counting(Head):
        def logits(self, hidden, kernel):
            size = len(hidden)
            jax.debug.callback(lambda: calls.append(size))
            return super().logits(hidden, kernel)

    head = Counting(transposed=True, chunk_size=4, tile=8)
    hidden, kernel, ids, _ = example(head)
    mask = jnp.zeros((ROWS, LENGTH), bool).at[0, 1 : 1 + count].set(True)
    loss = fused_loss(head, ids, mask, random_weights(), jnp.negative)
    got = both(loss)(hidden, kernel)
    jax.effects_barrier()
    assert calls == [size for size in sizes for _ in range(4)]
    want = both(full_loss(head, ids, mask, random_weights(), jnp.negative))
    assert_same_gradients(got, want(hidden, kernel))


def test_half_a_chunk_that_is_not_needed_is_not_computed():
    """XLA moves what is the same in each iteration before a loop, also where
    that has none: only the two loops over chunks are not inside another."""
    head = Head(transposed=True, chunk_size=4, tile=8)
    hidden, kernel, ids, mask = example(head)

    def loss(hidden, kernel, mask):
        loss = fused_loss(head, ids, mask, random_weights(), jnp.negative)
        return loss(hidden, kernel)

    program = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = program.lower(hidden, kernel, mask).compile().as_text()
    assert text[text.index("ENTRY") :].count(" while(") == 2


def shapes_in(jaxpr):
    """Shapes of every array of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        for variable in (*eqn.invars, *eqn.outvars):
            yield getattr(variable.aval, "shape", ())
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=is_jaxpr
        ):
            if is_jaxpr(value):
                yield from shapes_in(getattr(value, "jaxpr", value))


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def largest_of_vocabulary(function, *arguments):
    """Elements of the largest array with an axis of the vocabulary, save
    those shaped like the kernel."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    shapes = [s for s in shapes_in(jaxpr) if VOCABULARY in s]
    return max((int(np.prod(s)) for s in shapes), default=0)


@by_head
@pytest.mark.parametrize("trainable", [True, False])
def test_logits_never_exist_at_full_length(head, trainable):
    hidden, kernel, ids, mask = example(head)
    mask = jnp.ones_like(mask)
    head = Head(head.transposed, head.soft_cap, head.temperature, 4, trainable)
    arguments = (ids, mask, random_weights(), jnp.negative)
    full = largest_of_vocabulary(
        both(full_loss(head, *arguments)), hidden, kernel
    )
    assert full >= SLOTS * VOCABULARY, "the inspection sees logits"
    kernel_size = WIDTH * VOCABULARY
    for path in (fused_loss, chunked_loss):
        found = largest_of_vocabulary(
            both(path(head, *arguments)), hidden, kernel
        )
        assert 0 < found <= kernel_size
    tokens = select(ids, mask)
    found = largest_of_vocabulary(
        lambda h, k: token_values(head, h, k, tokens, extras=EXTRAS),
        hidden,
        kernel,
    )
    assert 0 < found <= kernel_size


@by_head
def test_values_keep_no_logits_but_those_of_a_tile(head):
    """Without gradients, nothing has a row of the vocabulary for a token."""
    hidden, kernel, ids, mask = example(head)
    tokens = select(ids, mask)
    head = chunked(head, 6)
    whole = {(6, VOCABULARY), (head.tiles(VOCABULARY), 6, head.tile)}

    def keeps(function):
        jaxpr = jax.make_jaxpr(function)(hidden, kernel).jaxpr
        return bool(whole & set(shapes_in(jaxpr)))

    assert not keeps(
        lambda h, k: token_values(head, h, k, tokens, extras=EXTRAS)
    )
    loss = fused_loss(head, ids, mask, random_weights(), jnp.negative)
    assert keeps(both(loss)), "the inspection sees logits"


@by_head
def test_a_vocabulary_split_over_devices_in_tiles(head):
    """Two devices with 14 columns each, in three tiles that overlap, have the
    values of one, and parts of its gradients."""
    axis = 0 if head.transposed else 1
    hidden, kernel, ids, mask = example(head)
    kernel, ids = jnp.split(kernel, [28], axis)[0], ids % 28
    arguments = (ids, mask, random_weights(), dynamic)
    want = both(full_loss(head, *arguments))(hidden, kernel)
    values = full_values(head, hidden, kernel, ids, mask)
    tokens = select(ids, mask)
    part = dataclasses.replace(head, chunk_size=6, tile=6, axis="model")

    def on_device(kernel):
        # The backward pass adds up the cotangents of both devices.
        def loss(hidden, kernel):
            return fused_loss(part, *arguments)(hidden, kernel) / 2

        found = token_values(part, hidden, kernel, tokens, extras=EXTRAS)
        return found, both(loss)(hidden, kernel)

    parts = jnp.stack(jnp.split(kernel, 2, axis))
    found, (sums, (by_hidden, by_kernel)) = jax.jit(
        jax.vmap(on_device, axis_name="model")
    )(parts)
    for name, value in values.items():
        for of_device in found[name]:
            np.testing.assert_allclose(
                of_device, value, rtol=2e-5, atol=2e-6, err_msg=name
            )
    got = by_hidden.sum(axis=0), jnp.concatenate(by_kernel, axis)
    assert_same_gradients((sums.sum(), got), want)


def tiles_of(columns):
    """The tiles of a vocabulary on a CPU."""
    found = []
    kernel = jax.ShapeDtypeStruct((columns, 1), "float32")
    with jax.disable_jit():
        Head(transposed=True).over_tiles(
            kernel, lambda tile, _: found.append(tile), None
        )
    return found


@pytest.mark.parametrize(
    "columns, count", [(29, 1), (4_096, 1), (32_000, 10), (262_144, 85)]
)
def test_tiles_on_a_cpu(columns, count):
    """Each column is new in one tile. Rows of a tile are no power of two
    apart, which XLA's products read slowly."""
    tiles = tiles_of(columns)
    assert len(tiles) == count
    new = [range(int(t.first), int(t.start) + t.size) for t in tiles]
    assert [c for part in new for c in part] == [*range(columns)]
    assert count == 1 or all(t.size % 16 == 8 for t in tiles)
    assert max(t.size for t in tiles) < 1.5 * TILE


def test_jit_equals_no_jit_and_ranks_are_strict(strict_ranks):
    head = chunked(HEADS["temperature"], 40)
    hidden, kernel, ids, mask = example(head)
    for path in (fused_loss, chunked_loss):
        loss = both(path(head, ids, mask, random_weights(), dynamic))
        jitted = loss(hidden, kernel)
        with jax.disable_jit():
            assert_same_gradients(jitted, loss(hidden, kernel))


def entropy_loss(read, head, token_ids, mask):
    """`read(log-probabilities, entropies)` through the chunks."""

    def loss(hidden, kernel):
        tokens = select_tokens(token_ids, mask)
        probe = jnp.zeros(tokens.index.shape)
        values = token_logps(head, hidden, kernel, tokens, probe, EXTRAS)
        return read(values["per_token_logps"], values["entropies"])

    return loss


def full_entropy_loss(read, head, token_ids, mask):
    def loss(hidden, kernel):
        values = full_values(head, hidden, kernel, token_ids, mask)
        return read(values["per_token_logps"], values["entropies"])

    return loss


def with_bonus(logps, entropies):
    return jnp.sum(random_weights() * logps) - jnp.sum(entropies**2)


def entropies_alone(logps, entropies):
    return jnp.sum(random_weights() * entropies)


def reported(logps, entropies):
    return jnp.sum(random_weights() * logps)


@by_head_and_chunk
def test_entropies_have_the_gradient_of_the_full_softmax(head, chunk_size):
    """dH / d(logit) = -p (log p + H), through temperature and soft cap."""
    hidden, kernel, ids, mask = example(head)
    for read in (with_bonus, entropies_alone):
        want = both(full_entropy_loss(read, head, ids, mask))(hidden, kernel)
        assert all((jnp.abs(g) > 1e-3).any() for g in want[1])
        for trainable in (True, False):
            cut = dataclasses.replace(
                chunked(head, chunk_size), trainable=trainable
            )
            got = both(entropy_loss(read, cut, ids, mask))(hidden, kernel)
            value, (by_hidden, by_kernel) = want
            if not trainable:
                by_kernel = np.zeros(kernel.shape, "float32")
            assert_same_gradients(got, (value, (by_hidden, by_kernel)), 1e-5)


def test_the_entropy_of_two_tokens_by_hand():
    """Logits (0, log 3) give p = (1/4, 3/4), H = log 4 - 3/4 log 3, and
    dH / d(logits) = -p (log p + H) = (3/16 log 3, -3/16 log 3), the hidden
    state being 1 and the logits its products with the kernel."""
    head = Head(transposed=False)
    kernel = jnp.asarray([[0.0, np.log(3.0)]], "float32")
    loss = entropy_loss(
        lambda logps, entropies: jnp.sum(entropies),
        head,
        jnp.zeros((1, 2), "int32"),
        jnp.asarray([[False, True]]),
    )
    value, (by_hidden, by_kernel) = both(loss)(jnp.ones((2, 1)), kernel)
    log3 = np.log(3.0)
    np.testing.assert_allclose(value, np.log(4) - 0.75 * log3, rtol=1e-6)
    want = 3 / 16 * log3 * np.array([[1, -1]])
    np.testing.assert_allclose(by_kernel, want, rtol=1e-5)
    np.testing.assert_allclose(
        by_hidden, [[-3 / 16 * log3**2], [0]], rtol=1e-5
    )


@pytest.mark.parametrize("inside", [False, True], ids=["flat", "jit in grad"])
def test_entropies_that_are_only_reported_cost_nothing(inside):
    """Of 5 tokens in chunks of 4: two projections forward; backward two for
    a trained head, and for a frozen one only where entropies are trained."""
    mask = jnp.zeros((ROWS, LENGTH), bool).at[0, 3:8].set(True)

    def count(read, trainable):
        def path(head, ids, mask, *_):
            loss = entropy_loss(read, head, ids, mask)
            return jax.jit(loss) if inside else loss

        head = Head(transposed=True, chunk_size=4, trainable=trainable)
        return projections(head, mask, path)

    assert count(reported, True) == 4
    assert count(reported, False) == 2
    assert count(with_bonus, True) == 4
    assert count(with_bonus, False) == 4


def test_gradients_of_entropies_hold_at_the_edges(strict_ranks):
    """Hidden states that predict nothing may be NaN; logits may be in the
    tens of thousands; no token at all gives zeros; eager is jit; and no
    array of logits has the full length."""
    head = chunked(HEADS["temperature"], 4)
    hidden, kernel, ids, mask = example(head)
    mask = mask.at[0, :2].set(False).at[-1, -1].set(False)
    tokens = select(ids, mask)
    used = np.zeros(SLOTS, bool)
    used[np.asarray(tokens.source)[: int(tokens.count)]] = True
    loss = entropy_loss(with_bonus, head, ids, mask)
    want = both(loss)(hidden, kernel)
    spoilt = jnp.where(used[:, None], hidden, jnp.nan)
    jax.tree.map(
        np.testing.assert_array_equal, both(loss)(spoilt, kernel), want
    )
    with jax.disable_jit():
        assert_same_gradients(both(loss)(hidden, kernel), want)
    _, gradients = both(
        entropy_loss(with_bonus, chunked(HEADS["plain"], 4), ids, mask)
    )(hidden * 1e4, kernel)
    assert all(np.isfinite(g).all() for g in gradients)
    empty = entropy_loss(with_bonus, head, ids, jnp.zeros_like(mask))
    assert all((g == 0).all() for g in both(empty)(hidden, kernel)[1])
    found = largest_of_vocabulary(both(loss), hidden, kernel)
    assert 0 < found <= WIDTH * VOCABULARY


def test_large_logits_do_not_overflow():
    head = chunked(HEADS["plain"], 6)
    hidden, kernel, ids, mask = example(head)
    hidden = hidden * 1e4
    want = full_values(head, hidden, kernel, ids, mask)
    tokens = select(ids, mask)
    got = all_values(head, hidden, kernel, tokens)
    np.testing.assert_allclose(
        got["per_token_logps"], want["per_token_logps"], rtol=1e-5, atol=0.02
    )
    assert np.isfinite(got["entropies"]).all()


def test_the_chunk_is_bounded():
    low, high = CHUNK_BOUNDS
    head = Head(transposed=True)
    assert head.chunk(512, 10**6) == high
    assert head.chunk(10**7, 10**6) == low
    assert low < head.chunk(4_000, 10**6) < high
    # Without logits of all columns there is room for more tokens.
    assert low < head.chunk(10**7, 10**6, keep=False) < high
    assert head.chunk(512, 24) == 24
    assert chunked(head, 7).chunk(512, 24) == 7
