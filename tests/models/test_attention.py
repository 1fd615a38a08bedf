"""Attention within segments, alone and under KerasHub's layers."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import keras_posttrain as kpt
from keras_posttrain.distribution import topology
from keras_posttrain.models import attention, block_attention, tpu_attention
from keras_posttrain.models.attention import (
    BLOCK,
    segment_attention,
    subtree_ends,
)
from keras_posttrain.models.hf import loading
from keras_posttrain.models.policy import Policy
from tests.models.tiny_checkpoints import make_checkpoint
from tests.support import FAMILIES, REFERENCE, in_ci


def naive(
    query, key, value, segments, positions, scale, window, cap, sinks=None
):
    """The definition, in float64, with all scores at once."""
    q, k, v = (np.asarray(x, "float64") for x in (query, key, value))
    share = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, share, axis=2) for x in (k, v))
    scores = np.einsum("rqhd,rkhd->rhqk", q, k) * scale
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    # A row's columns are in order, so that causal is by column.
    length = q.shape[1]
    column = np.arange(length)
    visible = segments[:, :, None] == segments[:, None, :]
    visible = visible & (column[:, None] >= column[None, :])
    if window is not None:
        ahead = positions[:, :, None] - positions[:, None, :]
        visible = visible & (ahead < window)
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.asarray(sinks, "float64")[:, None, None] - top)
    weights /= total
    return np.einsum("rhqk,rkhd->rqhd", weights, v)


def layout(length, lengths):
    """Segment ids and positions of one row; the rest is padding."""
    segments, positions = np.zeros((2, length), "int32")
    start = 0
    for i, n in enumerate(lengths):
        segments[start : start + n] = i + 1
        positions[start : start + n] = np.arange(n)
        start += n
    return segments, positions


def example(length, rows=2, heads=4, kv_heads=2, head_dim=8, seed=0):
    """Row 0 holds three sequences and padding, other rows a single one."""
    rng = np.random.default_rng(seed)
    parts = [length // 3, length // 2 - length // 3, length // 4]
    several = layout(length, [n for n in parts if n] or [length])
    layouts = [several] + [layout(length, [length])] * (rows - 1)
    segments, positions = (np.stack(x) for x in zip(*layouts))
    arrays = [
        rng.normal(size=(rows, length, n, head_dim)).astype("float32")
        for n in (heads, kv_heads, kv_heads)
    ]
    return arrays, segments, positions


SETTINGS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "soft cap": {"soft_cap": 1.5},
    "both": {"sliding_window": 300, "soft_cap": 1.5},
    # Above and below the scores of their heads.
    "sinks": {
        "sliding_window": 5,
        "sinks": jnp.asarray([-9.0, 0.5, 2.0, 30.0]),
    },
}


@pytest.fixture
def blocks(request, monkeypatch):
    """Whether rows of 64 tokens and more skip blocks, however few scores."""
    least = {"cpu": 64 if request.param else 2**30}
    monkeypatch.setattr(block_attention, "LEAST", least)
    monkeypatch.setattr(attention, "KEEP_SCORES", 0)


BOTH = pytest.mark.parametrize(
    "blocks", [False, True], ids=["all", "skipped"], indirect=True
)


@BOTH
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("length", [1, 7, BLOCK, 300, 520])
def test_attention_is_its_definition(length, settings, blocks):
    arrays, segments, positions = example(length)
    attend = jax.jit(
        functools.partial(segment_attention, scale=0.3, **settings)
    )
    got = attend(*arrays, segments, positions)
    want = naive(
        *arrays,
        segments,
        positions,
        0.3,
        settings.get("sliding_window"),
        settings.get("soft_cap"),
        settings.get("sinks"),
    )
    assert got.shape == want.shape and got.dtype == "float32"
    assert np.isfinite(got).all()
    used = segments > 0
    np.testing.assert_allclose(got[used], want[used], atol=2e-6)


@BOTH
@pytest.mark.parametrize("window", [None, 700])
def test_a_long_row_scans_over_blocks(window, blocks):
    """4,096 tokens are 8 groups of 2 blocks."""
    arrays, segments, positions = example(
        4096, rows=1, heads=2, kv_heads=1, head_dim=4
    )
    attend = jax.jit(
        functools.partial(segment_attention, scale=0.5, sliding_window=window)
    )
    got = attend(*arrays, segments, positions)
    want = naive(*arrays, segments, positions, 0.5, window, None)
    used = segments > 0
    np.testing.assert_allclose(got[used], want[used], atol=2e-6)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 1), (4, 4), (6, 2)])
def test_heads_share_keys_in_order(heads, kv_heads):
    arrays, segments, positions = example(9, heads=heads, kv_heads=kv_heads)
    got = segment_attention(*arrays, segments, positions, scale=1.0)
    want = naive(*arrays, segments, positions, 1.0, None, None)
    used = segments > 0
    np.testing.assert_allclose(got[used], want[used], atol=2e-6)


def naive_jax(query, key, value, visible, scale, cap, sinks=None):
    share = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, share, axis=2) for x in (key, value))
    scores = jnp.einsum("rqhd,rkhd->rhqk", query, key) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible[:, None], scores, -1e30)
    if sinks is not None:
        shape = (*scores.shape[:-1], 1)
        column = jnp.broadcast_to(sinks[:, None, None], shape)
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]]
    return jnp.einsum("rhqk,rkhd->rqhd", weights, value)


@BOTH
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("length", in_ci(7, 520, of=(7, 300, 520)))
def test_gradients_are_those_of_the_definition(length, settings, blocks):
    arrays, segments, positions = example(length)
    arrays, rest = with_sinks(arrays, settings)
    column = np.arange(length)
    visible = segments[:, :, None] == segments[:, None, :]
    visible = visible & (column[:, None] >= column)
    if "sliding_window" in settings:
        ahead = positions[:, :, None] - positions[:, None, :]
        visible &= ahead < settings["sliding_window"]
    # Padding's own outputs are nobody's.
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=arrays[0].shape)
    cotangent = np.where(segments[..., None, None] > 0, cotangent, 0)

    def ours(q, k, v, sinks):
        out = segment_attention(
            q, k, v, segments, positions, scale=0.3, sinks=sinks, **rest
        )
        return jnp.sum(out * cotangent)

    def theirs(q, k, v, sinks):
        cap = settings.get("soft_cap")
        out = naive_jax(q, k, v, visible, 0.3, cap, sinks)
        return jnp.sum(out * cotangent)

    got = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3)))(*arrays)
    want = jax.jit(jax.grad(theirs, argnums=(0, 1, 2, 3)))(*arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def with_sinks(arrays, settings):
    """The arrays that have gradients, and the other settings."""
    rest = {k: v for k, v in settings.items() if k != "sinks"}
    return [*arrays, settings.get("sinks")], rest


def random_tree(length, seed):
    """A row of segments that continue others, and who sees whom."""
    rng = np.random.default_rng(seed)
    segments, positions = np.zeros((2, length), "int32")
    visible = np.eye(length, dtype=bool)
    # The columns of each segment's path; 0 is no segment.
    prefixes, paths, chain, start = [], [[]], [0], 0
    while start < length - 5:
        size = int(min(rng.integers(1, length // 8), length - 5 - start))
        # In pre-order a segment continues the last one or one before that.
        chain = chain[: rng.integers(1, len(chain) + 1)]
        path = paths[chain[-1]] + list(range(start, start + size))
        prefixes.append(chain[-1])
        chain.append(len(prefixes))
        paths.append(path)
        segments[start : start + size] = len(prefixes)
        for column in range(start, start + size):
            positions[column] = path.index(column)
            visible[column, path[: positions[column] + 1]] = True
        start += size
    return np.array([prefixes]), segments[None], positions[None], visible[None]


@BOTH
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("length", [40, 520])
def test_a_token_sees_the_segments_that_its_own_one_continues(
    length, settings, blocks
):
    """Values and gradients, with more unused slots than segments."""
    arrays, *_ = example(length, rows=1)
    prefixes, segments, positions, visible = random_tree(length, length)
    assert prefixes.max() > 1 and (prefixes == 0).sum() > 1
    slots = np.pad(prefixes, ((0, 0), (0, 3)))
    ends = subtree_ends(slots, segments)
    if "sliding_window" in settings:
        ahead = positions[:, :, None] - positions[:, None, :]
        visible = visible & (ahead < settings["sliding_window"])
    cotangent = np.random.default_rng(1).normal(size=arrays[0].shape)
    cotangent = np.where(segments[..., None, None] > 0, cotangent, 0)

    arrays, rest = with_sinks(arrays, settings)

    def ours(q, k, v, sinks):
        out = segment_attention(
            q, k, v, segments, positions, ends, scale=0.3, sinks=sinks, **rest
        )
        return jnp.sum(out * cotangent), out

    def theirs(q, k, v, sinks):
        cap = settings.get("soft_cap")
        out = naive_jax(q, k, v, visible, 0.3, cap, sinks)
        return jnp.sum(out * cotangent), out

    got, want = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)
        for f in (ours, theirs)
    )
    used = segments[..., None, None] > 0
    np.testing.assert_allclose(got[1] * used, want[1] * used, atol=2e-6)
    for a, b in zip(*map(jax.tree.leaves, (got[0], want[0])), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def visible_of_tree(length, seed):
    prefixes, segments, _, visible = random_tree(length, seed)
    return segments, subtree_ends(prefixes, segments), visible[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["tree", "documents", "window"])
def test_the_first_block_is_that_of_the_first_key(kind, seed):
    length, block, window = 512, 16, 20 if kind == "window" else None
    segments, ends, visible = visible_of_tree(length, seed)
    if kind != "tree":
        same = segments[0][:, None] == segments[0]
        visible = np.tril(same & (segments[0] > 0)) | np.eye(
            length, dtype=bool
        )
        if window is not None:
            visible &= ~np.tril(np.ones_like(visible), -window)
        ends = None
    first = block_attention.first_blocks(segments, ends, window, block)
    keys = visible.reshape(-1, block, length).any(axis=1).argmax(axis=1)
    if kind == "tree":
        # A branch that a later one does not see lies between.
        assert (first <= keys // block).all() and first.any()
    else:
        np.testing.assert_array_equal(first, keys // block)


@pytest.mark.parametrize("blocks", [True], indirect=True)
def test_blocks_that_no_segment_shares_are_skipped(blocks):
    """What is not read has no effect, not even if it is not a number."""
    segments, positions = (x[None] for x in layout(1024, [128, 128, 256, 384]))
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 1024, 2, 8)).astype("float32")
    spoilt = k.copy(), v.copy()
    for x in spoilt:
        x[:, :128] = np.nan

    def out(k, v):
        return segment_attention(q, k, v, segments, positions, scale=1.0)

    expected, found = out(k, v), out(*spoilt)
    np.testing.assert_array_equal(found[:, 128:896], expected[:, 128:896])
    assert np.isnan(found[:, :128]).all()


@pytest.mark.parametrize("blocks", [True], indirect=True)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_devices_skip_blocks_of_their_own_rows(
    eight_devices, blocks, kv_heads
):
    arrays, segments, positions = example(520, rows=4, kv_heads=kv_heads)
    sinks = SETTINGS["sinks"]["sinks"]

    def run(q, k, v, sinks):
        def loss(*arrays):
            *arrays, sinks = arrays
            out = segment_attention(
                *arrays, segments, positions, scale=0.3, sinks=sinks
            )
            return jnp.sum(
                jnp.where(segments[..., None, None] > 0, out, 0) ** 2
            )

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sinks)

    expected = jax.jit(run)(*arrays, sinks)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(data=4, model=2)
    )
    found = jax.jit(lambda *x: run(*x))(*arrays, sinks)
    for one, other in zip(*map(jax.tree.leaves, (expected, found))):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


def test_padding_neither_sees_nor_is_seen():
    arrays, segments, positions = example(12)
    used = segments[..., None, None] > 0
    spoilt = [np.where(used, x, 1e6).astype("float32") for x in arrays]
    want = segment_attention(*arrays, segments, positions, scale=1.0)
    got = segment_attention(*spoilt, segments, positions, scale=1.0)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[segments > 0], want[segments > 0])


def test_bfloat16_scores_are_float32():
    arrays, segments, positions = example(40)
    half = [jnp.asarray(x, "bfloat16") for x in arrays]
    got = segment_attention(*half, segments, positions, scale=0.3)
    want = naive(*half, segments, positions, 0.3, None, None)
    assert got.dtype == "bfloat16"
    used = segments > 0
    error = np.abs(np.asarray(got, "float64") - want)[used].max()
    assert error < 2**-7 * np.abs(want).max()


@BOTH
def test_memory_grows_with_the_length_and_not_its_square(blocks):
    def temporaries(length):
        arrays, segments, positions = example(
            length, rows=1, heads=2, kv_heads=1, head_dim=4
        )

        def loss(*arrays):
            out = segment_attention(*arrays, segments, positions, scale=0.5)
            return jnp.sum(out**2)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        program = gradient.lower(*arrays).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = temporaries(4096), temporaries(8192)
    scores = 4 * 2 * 8192**2
    assert long < 3 * short and long < scores / 4


# Under KerasHub's layers

HOOK = (
    "KerasHub's attention layers no longer do under its vLLM context what "
    "they do in a plain call: the hook that models/attention.py uses "
    "has moved. Largest difference: "
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The family's causal language model, loaded once."""

    @functools.cache
    def load(family):
        if family == "gemma":
            path = tmp_path_factory.mktemp("gemma") / "model"
            make_checkpoint(path, "gemma")
        else:
            path = REFERENCE / "models" / FAMILIES[family]
        return loading.load_causal_lm(path)

    return load


EVERY = ("gemma", *sorted(FAMILIES))
by_family = pytest.mark.parametrize("family", EVERY)
LENGTH = 24


def sequences(lengths=(21, LENGTH), seed=5):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 90, n).astype("int32") for n in lengths]


def batch_of(rows, length):
    """Each row is a list of sequences."""
    token_ids = np.zeros((len(rows), length), "int32")
    for ids, row in zip(token_ids, rows):
        joined = np.concatenate(row)
        ids[: len(joined)] = joined
    layouts = [layout(length, [len(s) for s in row]) for row in rows]
    segments, positions = (np.stack(x) for x in zip(*layouts))
    return {
        "token_ids": token_ids,
        "segment_ids": segments,
        "positions": positions,
    }


def forward(policy, batch):
    return jax.jit(policy.hidden_states)(batch)


def assert_close(got, want):
    # Random weights let some families' states grow.
    size = max(1.0, float(np.std(want)))
    difference = float(np.abs(np.asarray(got) - np.asarray(want)).max())
    assert difference <= 1e-5 * size, HOOK + str(difference)


@by_family
def test_unpacked_hidden_states_are_kerashubs_own(models, family):
    causal_lm = models(family)
    policy = Policy(causal_lm)
    assert policy.packable
    batch = batch_of([[s] for s in sequences()], LENGTH)
    used = batch["segment_ids"] > 0
    want = jax.jit(causal_lm.backbone)(
        {
            "token_ids": batch["token_ids"],
            "padding_mask": used.astype("int32"),
        }
    )
    got = forward(policy, batch)
    assert got.shape == want.shape
    assert_close(got[used], want[used])


# `test_loading.py` compares packed rows of all families.
@pytest.mark.parametrize("family", in_ci("gemma3", "qwen3", of=EVERY))
def test_packed_documents_are_what_they_are_alone(models, family):
    policy = Policy(models(family))
    parts = sequences((9, 14, 1))
    packed = forward(policy, batch_of([parts, parts[::-1]], LENGTH))
    alone = forward(policy, batch_of([[p] for p in parts], LENGTH))
    starts = ((0, 9, 23), (15, 1, 0))
    for row, places in zip(packed, starts):
        for part, single, start in zip(parts, alone, places):
            n = len(part)
            assert_close(row[start : start + n], single[:n])


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_remat_changes_no_hidden_state(models, family):
    causal_lm = models(family)
    batch = batch_of([sequences((9, 14))], LENGTH)
    want = forward(Policy(causal_lm), batch)
    got = forward(Policy(causal_lm, remat="full"), batch)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", in_ci("gemma2", "qwen3", of=EVERY))
def test_no_family_changes_where_blocks_are_skipped(
    models, family, monkeypatch
):
    """Hidden states and gradients, whatever layers keep."""
    parts = sequences((9, 140, 60, 80), seed=2)
    batch = batch_of([parts, parts[::-1]], 300)
    used = batch["segment_ids"][..., None] > 0
    causal_lm = models(family)
    trained = causal_lm.trainable_variables
    frozen = [v.value for v in causal_lm.non_trainable_variables]

    def run(remat):
        policy = Policy(causal_lm, remat=remat)

        def loss(values):
            pairs = zip(causal_lm.non_trainable_variables, frozen)
            pairs = [*zip(trained, values), *pairs]
            with keras.StatelessScope(pairs):
                hidden = policy.hidden_states(batch)
            return jnp.sum(jnp.where(used, hidden, 0) ** 2), hidden

        values = [v.value for v in trained]
        return jax.jit(jax.grad(loss, has_aux=True))(values)

    monkeypatch.setattr(attention, "KEEP_SCORES", 0)
    found = run("none"), run("selective")
    monkeypatch.setattr(block_attention, "LEAST", {})
    gradients, hidden = run("none")
    for other_gradients, other in found:
        assert_close(other[used[..., 0]], hidden[used[..., 0]])
        for one, two in zip(gradients, other_gradients):
            scale = np.abs(one).max()
            np.testing.assert_allclose(two, one, atol=2e-5 * scale)


def test_a_window_reaches_as_far_as_it_says():
    """A window of 3 sees the token itself and 2 before it: a change of token
    0 is seen at 2 and not at 3."""
    arrays, segments, positions = example(6, rows=2)
    changed = [x.copy() for x in arrays]
    changed[2][1, 0] += 1
    before, after = (
        segment_attention(*x, segments, positions, scale=1.0, sliding_window=3)
        for x in (arrays, changed)
    )
    moved = np.abs(np.asarray(after - before))[1].max(axis=(1, 2)) > 0
    np.testing.assert_array_equal(moved, [1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 50}, {"soft_cap": 5.0}, SETTINGS["sinks"]],
    ids=["plain", "window", "soft cap", "sinks"],
)
def test_kernel_of_tpus(settings):
    """The kernel itself, interpreted: values and gradients are XLA's."""
    arrays, segments, positions = example(256, head_dim=64)
    used = (segments > 0)[..., None, None]
    weights = np.random.default_rng(1).normal(size=arrays[0].shape) * used

    arrays, rest = with_sinks(arrays, settings)

    def gradients(attend):
        def total(q, k, v, sinks):
            out = attend(q, k, v, scale=0.1, sinks=sinks, **rest)
            return jnp.sum(weights * out)

        return jax.value_and_grad(total, (0, 1, 2, 3))(*arrays)

    want = gradients(
        lambda *x, **kw: segment_attention(*x, segments, positions, **kw)
    )
    got = gradients(
        lambda *x, **kw: tpu_attention.splash_attention(
            *x, jnp.asarray(segments), interpret=True, **kw
        )
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_kernel_of_tpus_leaves_out_what_no_segment_shares(monkeypatch):
    """Values and gradients are XLA's, and other blocks may be no numbers."""
    monkeypatch.setattr(tpu_attention, "BLOCKS", (128,))
    length, bad = 768, slice(256, 512)
    arrays, *_ = example(length, head_dim=64)
    # Segments that begin and end within blocks; one that has two blocks of
    # its own, and padding. The second row has one segment.
    ends = [100, 256, 512, 530, 700, length]
    segments = np.searchsorted(ends, np.arange(length), side="right") + 1
    segments = np.stack([np.where(segments < 6, segments, 0)] * 2)
    segments[1] = 1
    positions = np.tile(np.arange(length), (2, 1))
    used = (segments > 0)[..., None, None]
    weights = np.random.default_rng(1).normal(size=arrays[0].shape) * used

    def gradients(attend):
        def total(weights, *x):
            out = attend(*x)
            return jnp.sum(weights * out), out

        return jax.jit(jax.value_and_grad(total, (1, 2, 3), has_aux=True))

    def ours(window, *x):
        return tpu_attention.splash_attention(
            *x, jnp.asarray(segments), scale=0.1, sliding_window=window,
            interpret=True,
        )  # fmt: skip

    def xlas(window, *x):
        return segment_attention(
            *x, segments, positions, scale=0.1, sliding_window=window
        )

    of_window = {}
    for window in (None, 200):
        of_window[window], plain = (
            gradients(functools.partial(f, window)) for f in (ours, xlas)
        )
        ((got, _), got_gradients), ((want, _), want_gradients) = (
            f(weights, *arrays) for f in (of_window[window], plain)
        )
        for a, b in zip((got, *got_gradients), (want, *want_gradients)):
            np.testing.assert_allclose(a, b, atol=2e-4)
    # What other segments have in the blocks of the third one is not read.
    poisoned = [np.array(x) for x in arrays]
    for x in poisoned:
        x[0, bad] = np.nan
    weights[0, bad] = 0
    (_, out), found = of_window[None](weights, *poisoned)
    assert np.isnan(out[0, bad]).all() and np.isfinite(out[1]).all()
    for x in (out, *found):
        assert np.isfinite(np.delete(np.asarray(x[0]), bad, axis=0)).all()


def test_the_tpus_compiler_takes_the_kernel(monkeypatch):
    """Forward and backward, with blocks left out and windows."""
    pytest.importorskip("libtpu")
    monkeypatch.setattr(tpu_attention, "BLOCKS", (128,))
    chips = np.array(topology.get("v5e:1x1").devices)
    layout = NamedSharding(Mesh(chips, "x"), P())
    shape = jax.ShapeDtypeStruct
    query = shape((2, 512, 4, 64), "bfloat16", sharding=layout)
    key = shape((2, 512, 2, 64), "bfloat16", sharding=layout)
    segments = shape((2, 512), "int32", sharding=layout)

    def gradients(query, key, segments):
        def total(query, key):
            outs = [
                tpu_attention.splash_attention(
                    query, key, key, segments, scale=0.1, sliding_window=window
                )
                for window in (None, 130)
            ]
            return sum(jnp.sum(out.astype("float32")) for out in outs)

        return jax.grad(total, (0, 1))(query, key)

    with jax.default_matmul_precision("bfloat16"):
        program = jax.jit(gradients).lower(query, key, segments).compile()
    assert program.as_text().count("tpu_custom_call") >= 6


def test_kernel_of_tpus_is_for_tpus_alone():
    (query, _, _), *_ = example(256, head_dim=64)
    assert not tpu_attention.is_supported(query)
