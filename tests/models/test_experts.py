"""Experts that compute only their tokens, against all of them computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_posttrain.models.experts import (
    Expert,
    choose_experts,
    compute_chosen_experts,
    used_tokens,
)
from keras_posttrain.models.grouped_matmul import (
    block_size,
    combine,
    dispatch,
    grouped_matmul,
    sort_by_expert,
    tpu_kernel_gradient,
)
from tests.models.mixtures import MIXTURES, make_mixture
from tests.support import cases_in_ci, in_ci

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 50, 16, 12, 6, 3
BLOCKS = (1, 4)
by_block = pytest.mark.parametrize("block", BLOCKS)


def example(dtype="float32", fused=True, seed=0):
    """`x`, the router's kernel and those of the experts."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        value = rng.normal(size=shape, scale=shape[-2] ** -0.5)
        return jnp.asarray(value, dtype)

    x = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), dtype)
    widths = (2 * WIDTH,) if fused else (WIDTH, WIDTH)
    kernels = {
        "expand": [normal(EXPERTS, HIDDEN, width) for width in widths],
        "contract": normal(EXPERTS, WIDTH, HIDDEN),
    }
    # Wide logits: some experts get no token, and one gets most.
    router = 2 * normal(HIDDEN, EXPERTS)
    return x, router, kernels


def all_experts(x, router, kernels, normalize):
    """The definition: every expert for every token, then a weighted sum."""
    probs = jax.nn.softmax(x @ router, axis=-1)
    threshold = jnp.sort(probs, axis=-1)[:, -TOP_K][:, None]
    chosen = jnp.where(probs >= threshold, probs, 0.0)
    if normalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    up = jnp.concatenate(
        [jnp.einsum("th,ehw->etw", x, k) for k in kernels["expand"]], -1
    )
    gate, up = jnp.split(up, 2, axis=-1)
    hidden = jax.nn.silu(gate) * up
    out = jnp.einsum("etw,ewh->eth", hidden, kernels["contract"])
    return jnp.einsum("eth,te->th", out, chosen)


def ours(x, router, kernels, normalize, block, **kwargs):
    expert = Expert(TOP_K, normalize, jax.nn.silu)
    return expert(x, x @ router, kernels, block=block, **kwargs)


def assert_close(got, want, bound):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(y, "float32") for y in (a, b))
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize(
    "normalize, fused", [(True, True), (False, False)], ids=["one", "two"]
)
@by_block
def test_values_and_gradients_of_all_experts(block, normalize, fused):
    """Of the inputs, the router and all kernels."""
    arrays = example(fused=fused)
    weight = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN))

    def loss(function, *arrays):
        out = function(*arrays)
        return jnp.sum(out * weight), out

    found = [
        jax.jit(
            jax.value_and_grad(
                lambda *a, f=f: loss(f, *a), argnums=(0, 1, 2), has_aux=True
            )
        )(*arrays)
        for f in (
            lambda *a: ours(*a, normalize, block),
            lambda *a: all_experts(*a, normalize),
        )
    ]
    # The sum itself is of terms that cancel.
    got, want = ((out, grads) for (_, out), grads in found)
    assert_close(got, want, 2e-6)


@pytest.mark.parametrize("block", in_ci(4, of=BLOCKS))
def test_bfloat16_is_as_exact_as_all_experts(block):
    """Both against float32: rounding may not grow."""
    exact = example()
    arrays = example("bfloat16")
    exact = jax.tree.map(lambda a: a.astype("float32"), arrays)
    logits = exact[0] @ exact[1]

    def error(out, want):
        return float(jnp.abs(out.astype("float32") - want).max())

    def gradients(arrays, function):
        return jax.grad(
            lambda x, k: jnp.sum(function(x, k).astype("float32") ** 2),
            argnums=(0, 1),
        )(arrays[0], arrays[2])

    # The choice is the same, so that the rest can be compared.
    expert = Expert(TOP_K, True, jax.nn.silu)
    want = expert(exact[0], logits, exact[2], block=block)
    got = expert(arrays[0], logits, arrays[2], block=block)
    assert error(got, want) < 0.02 * float(jnp.abs(want).max())
    found = gradients(arrays, lambda x, k: expert(x, logits, k, block=block))
    wanted = gradients(exact, lambda x, k: expert(x, logits, k, block=block))
    assert {g.dtype for g in jax.tree.leaves(found)} == {jnp.bfloat16.dtype}
    assert_close(found, wanted, 0.03)


def test_choices_are_float32():
    """In bfloat16 both probabilities would be 0.5, and the first be best."""
    logits = jnp.asarray([[1.0, 1.0 + 2**-7, -9.0]], "bfloat16")
    weights, found = choose_experts(logits, 1, False)
    assert weights.dtype == "float32" and found[0, 0] == 1
    np.testing.assert_allclose(
        weights[0, 0], jax.nn.sigmoid(2.0**-7), rtol=1e-3
    )


@by_block
def test_all_tokens_may_choose_one_expert(block):
    """Nothing is dropped, however uneven the choices are."""
    x, _, kernels = example()
    logits = jnp.tile(jnp.asarray([9.0, 0, 0, 8.0, 0, 7.0]), (TOKENS, 1))
    expert = Expert(TOP_K, True, jax.nn.silu)
    got = expert(x, logits, kernels, block=block)
    one = expert(x[-1:], logits[-1:], kernels, block=block)
    np.testing.assert_allclose(got[-1:], one, atol=1e-6)
    assert (jnp.abs(got).max(axis=1) > 0).all()


@by_block
def test_unused_tokens_are_not_computed(block):
    """They have no slot, get 0, and change no other token: not even NaN."""
    x, router, kernels = example()
    used = jnp.arange(TOKENS) % 3 > 0
    broken = jnp.where(used[:, None], x, jnp.nan)

    def loss(x, kernels):
        logits = jnp.nan_to_num(x @ router)
        expert = Expert(TOP_K, True, jax.nn.silu)
        out = expert(x, logits, kernels, used, block=block)
        return jnp.sum(out**2), out

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, got), (_, got_kernels) = run(broken, kernels)
    (_, want), (_, want_kernels) = run(x, kernels)
    np.testing.assert_array_equal(got[~used], 0)
    np.testing.assert_array_equal(got, want)
    assert_close(got_kernels, want_kernels, 1e-6)
    _, experts = choose_experts(x @ router, TOP_K, True)
    experts = jnp.where(used[:, None], experts, EXPERTS)
    slots = sort_by_expert(experts, EXPERTS, block)
    count = int((slots.token < TOKENS).sum())
    assert count == TOP_K * int(used.sum())


@by_block
def test_slots_are_sorted_and_whole(block):
    rng = np.random.default_rng(3)
    experts = jnp.asarray(rng.integers(0, EXPERTS + 1, (TOKENS, TOP_K)))
    slots = sort_by_expert(experts, EXPERTS, block)
    assert (slots.sizes % block == 0).all()
    assert int(slots.sizes.sum()) <= slots.token.size
    for token, choice in np.ndindex(TOKENS, TOP_K):
        expert, slot = experts[token, choice], slots.of_choice[token, choice]
        if expert == EXPERTS:
            assert slot >= slots.token.size
            continue
        assert slots.token[slot] == token
        start = slots.starts[expert]
        assert start <= slot < start + slots.sizes[expert]


@by_block
def test_gradients_of_each_part(block):
    """Against those that JAX derives from the plainest forms."""
    rng = np.random.default_rng(4)
    experts = jnp.asarray(rng.integers(0, EXPERTS + 1, (TOKENS, TOP_K)))
    slots = sort_by_expert(experts, EXPERTS, block)
    x, _, kernels = example()
    kernel = kernels["expand"][0]
    weights = jnp.asarray(rng.normal(size=(TOKENS, TOP_K)), "float32")

    def by_parts(x, kernel, weights):
        out = grouped_matmul(dispatch(x, slots), kernel, slots)
        return jnp.sin(combine(out, weights, slots)).sum()

    def plainly(x, kernel, weights):
        padded = jnp.append(kernel, jnp.zeros_like(kernel[:1]), 0)
        out = jnp.einsum("th,tkho->tko", x, padded[experts])
        return jnp.sin(jnp.einsum("tko,tk->to", out, weights)).sum()

    arguments = (x, kernel, weights)
    found = jax.grad(by_parts, (0, 1, 2))(*arguments)
    want = jax.grad(plainly, (0, 1, 2))(*arguments)
    used = experts < EXPERTS
    np.testing.assert_array_equal(found[2] * ~used, 0)
    assert_close(found[:2], want[:2], 2e-6)
    assert_close(found[2] * used, want[2] * used, 2e-6)


@pytest.mark.parametrize("rows", [256, 150])
def test_the_gradient_that_tpus_compute(rows):
    """Interpreted; the last rows belong to no expert, and one has none."""
    sizes = jnp.asarray([70, 0, 40, 31], "int32")
    rng = np.random.default_rng(5)
    left = jnp.asarray(rng.normal(size=(rows, 24)), "float32")
    right = jnp.asarray(rng.normal(size=(rows, 16)), "float32")
    right = right.at[int(sizes.sum()) :].set(jnp.nan)
    got = tpu_kernel_gradient(left, right, sizes, "float32", interpret=True)
    ends = np.cumsum(sizes)
    for expert, (first, last) in enumerate(zip(ends - sizes, ends)):
        want = left[first:last].T @ right[first:last]
        np.testing.assert_allclose(got[expert], want, atol=2e-5)


def test_blocks_are_a_quarter_of_an_experts_choices():
    """Of 8 and 128 rows at least and at most."""
    assert block_size(4, 128) == 8
    assert block_size(4096 * 8, 128) == 64
    assert block_size(2**20, 4) == 128


@pytest.mark.parametrize(
    "family, dtype",
    cases_in_ci(
        *((family, "float32") for family in MIXTURES),
        ("QwenMoe", "mixed_bfloat16"),
        of=[
            (family, dtype)
            for family in MIXTURES
            for dtype in ("float32", "mixed_bfloat16")
        ],
    ),
)
def test_kerashubs_layer_has_the_same_values_and_gradients(family, dtype):
    """In the block of each family, with respect to its input and weights."""
    causal_lm = make_mixture(family, dtype=dtype)
    layer = causal_lm.backbone.transformer_layers[0]
    name = "mlp" if hasattr(layer, "mlp") else "_sparse_moe_block"
    block = getattr(layer, name)
    x = jax.random.normal(jax.random.key(0), (2, 40, 32))
    weight = jax.random.normal(jax.random.key(1), x.shape)
    values = [v.value for v in block.trainable_variables]

    @jax.jit
    def loss(values, x):
        (out, logits), _ = block.stateless_call(values, [], x)
        return jnp.sum(weight * out.astype("float32")), (out, logits)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    want = run(values, x)
    jax.clear_caches()
    compute_chosen_experts(layer)
    got = run(values, x)
    if dtype == "float32":
        # The sum itself is of terms that cancel.
        assert_close((got[0][1], got[1]), (want[0][1], want[1]), 3e-6)
    else:
        # KerasHub chooses in bfloat16: compare where the choice is sure.
        probs = jax.nn.softmax(want[0][1][1].astype("float32"), axis=-1)
        best = jnp.sort(probs, axis=-1)[:, ::-1]
        top = block.top_k
        sure = (best[:, top - 1] - best[:, top]).reshape(2, 40) > 0.02
        assert sure.sum() > 20
        out, other = (y[0][1][0][sure].astype("float32") for y in (got, want))
        assert out.dtype == other.dtype
        np.testing.assert_allclose(
            out, other, atol=0.04 * float(jnp.abs(other).max())
        )


def test_used_tokens_end_with_their_scope():
    causal_lm = make_mixture("Mixtral")
    layer = causal_lm.backbone.transformer_layers[0]
    compute_chosen_experts(layer)
    x = jax.random.normal(jax.random.key(0), (1, 4, 32))
    with used_tokens(jnp.asarray([1, 1, 0, 1], bool)):
        out, _ = layer._sparse_moe_block(x)
    whole, _ = layer._sparse_moe_block(x)
    np.testing.assert_array_equal(out[0, 2], 0)
    assert (whole[0, 2] != 0).any()
    np.testing.assert_allclose(out[0, :2], whole[0, :2], atol=1e-6)
