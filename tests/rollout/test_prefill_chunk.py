"""Prompts that are computed in pieces: the same numbers in less memory."""

import functools
import re

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import attention, block_attention
from keras_posttrain.rollout import NativeRollout, Request
from tests.models.tiny_checkpoints import make_checkpoint
from tests.support import REFERENCE

CHUNK = 64


def engine_of(task, *args, **kwargs):
    engine = NativeRollout(*args, **kwargs)
    engine.set_model(task)
    engine.sync_weights()
    return engine


@functools.cache
def reference(model):
    return kpt.SFTTask.from_preset(
        REFERENCE / "models" / model, sequence_length=320
    )


def tokens(count, seed):
    return np.random.default_rng(seed).integers(3, 90, count).tolist()


def requests():
    """Short and long prompts, groups, and two with the same beginning."""
    shared = tokens(100, 9)
    prompts = [
        (tokens(9, 0), 1),
        (tokens(CHUNK + 1, 1), 3),
        (tokens(CHUNK + 2, 2), 1),
        (tokens(230, 3), 3),
        ([*shared, *tokens(40, 4)], 1),
        ([*shared, *tokens(160, 5)], 2),
    ]
    return [
        Request(ids, count, max_tokens=5, seed=i)
        for i, (ids, count) in enumerate(prompts)
    ]


def check_same(found, expected):
    for group, others in zip(found, expected, strict=True):
        for ours, theirs in zip(group, others, strict=True):
            assert ours.token_ids == theirs.token_ids
            np.testing.assert_allclose(
                ours.per_token_logps, theirs.per_token_logps, atol=2e-5
            )


def check_sizes(engine, devices=1):
    """No program computed more tokens than those of a piece a device."""
    found = "\n".join(engine.programs)
    sizes = re.findall(r"prefill of (\d+) x (\d+) tokens", found)
    pieces = re.findall(r"extension of (\d+) slots by (\d+) tokens", found)
    assert (str(devices), str(CHUNK)) in pieces
    for rows, length in [*sizes, *pieces]:
        assert int(rows) * int(length) <= CHUNK * devices


@functools.cache
def whole(task):
    engine = engine_of(task)
    found = engine.generate(requests())
    # Prompts with the same beginning alone.
    assert "slots by 64 tokens" not in "\n".join(engine.programs)
    return found


# The attention of pieces that are long is computed in blocks.
@pytest.mark.parametrize(
    "num_slots, in_blocks",
    [
        (3, True),
        pytest.param(3, False, marks=pytest.mark.full),
        pytest.param(128, True, marks=pytest.mark.full),
    ],
)
def test_windows(monkeypatch, num_slots, in_blocks):
    task = reference("gemma3_text")
    expected = whole(task)
    if in_blocks:
        monkeypatch.setattr(attention, "KEEP_SCORES", 0)
    engine = engine_of(task, num_slots, prefill_chunk=CHUNK)
    check_same(engine.generate(requests()), expected)
    check_sizes(engine)


def test_states_are_handed_from_piece_to_piece(tmp_path):
    directory, _ = make_checkpoint(
        tmp_path / "hf", "qwen3_5_text", max_position_embeddings=320
    )
    task = kpt.SFTTask.from_preset(directory, sequence_length=320)
    engine = engine_of(task, prefill_chunk=CHUNK)
    check_same(engine.generate(requests()), whole(task))
    check_sizes(engine)


def test_what_continues_a_conversation():
    """A tool says more than a piece, to several conversations at once."""
    task = reference("llama3")
    engine = engine_of(task, prefill_chunk=CHUNK)
    starts = [Request(tokens(20 + i, i), max_tokens=3, seed=i) for i in (1, 2)]
    with engine.session() as session:
        turns = [session.submit(x) for x in starts]
        longer = [
            [*x.token_ids, *turn.result()[0].token_ids, *tokens(150 + i, i)]
            for i, (x, turn) in enumerate(zip(starts, turns))
        ]
        more = [Request(ids, max_tokens=5, seed=7) for ids in longer]
        found = [session.submit(x) for x in more]
        found = [turn.result() for turn in found]
    check_same(found, engine_of(task).generate(more))
    check_sizes(engine)


def test_eight_devices(eight_devices, monkeypatch):
    found = whole(reference("llama3"))
    monkeypatch.setattr(attention, "KEEP_SCORES", 0)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(4, 2)
    )
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/llama3", sequence_length=320
    )
    engine = engine_of(task, prefill_chunk=CHUNK)
    check_same(engine.generate(requests()), found)
    check_sizes(engine, devices=4)


def memory(engine, length):
    """Bytes of programs that compute a prompt, next to the cache's bytes."""
    engine._refresh()
    lowered = []
    decoder = engine._decoder.lowering(lowered)
    decoder.allocate(8, 2048)
    lowered.clear()
    weights = engine._decoder_weights()
    decoder.prefill(weights, [tuple(range(length))], [[0]])
    found = [x.compile().memory_analysis() for x in lowered]
    return [
        x.temp_size_in_bytes + x.output_size_in_bytes - x.alias_size_in_bytes
        for x in found
    ], 8 * decoder.slot_bytes(2048)


def test_memory_does_not_grow_with_the_prompt(monkeypatch):
    # As in a model with more heads.
    monkeypatch.setattr(attention, "KEEP_SCORES", 2**20)
    task = reference("llama3")
    engine = engine_of(task, prefill_chunk=128)
    short, cache = memory(engine, 500)
    long, _ = memory(engine, 1900)
    # The programs are the same: a first piece, its slot, and whole pieces.
    assert long == short and len(long) == 3
    # The cache is not copied.
    assert long[2] < cache / 4
    at_once, _ = memory(engine_of(task, prefill_chunk=2048), 1900)
    assert max(long) < max(at_once) / 4


@pytest.mark.parametrize("window", [None, 150])
def test_attention_of_a_piece_in_blocks(window):
    """Against all scores, of sequences of several lengths."""
    rng = np.random.default_rng(0)
    width, columns, heads, kv_heads, dim = 256, 700, 4, 2, 8
    lengths = np.array([0, 131, 444])
    q = rng.normal(size=(3, width, heads, dim)).astype("float32")
    k, v = rng.normal(size=(2, 3, columns, kv_heads, dim)).astype("float32")
    sinks = rng.normal(size=heads).astype("float32")
    positions = (lengths[:, None] + np.arange(width)).astype("int32")

    def scores(q, k, of_queries, of_keys):
        return attention._masked_scores(
            q, k, *of_queries[:2], *of_keys, scale=0.3,
            sliding_window=window, soft_cap=2.0,
        )  # fmt: skip

    found = jax.jit(
        lambda *arrays: block_attention.continued_attention(
            *arrays, window, scores
        )
    )(q, k, v, positions, sinks)
    keys, values = (np.repeat(x, heads // kv_heads, 2) for x in (k, v))
    s = 2 * np.tanh(0.3 * np.einsum("sqhd,skhd->shqk", q, keys) / 2)
    ahead = positions[:, :, None] - np.arange(columns)
    seen = (ahead >= 0) & (ahead < (window or columns))
    weights = np.where(seen[:, None], np.exp(s), 0)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    want = np.einsum("shqk,skhd->sqhd", weights / total, values)
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("size", [0, 32, 100, 128.0, True, "auto", None])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="power of two and at least 64"):
        NativeRollout(prefill_chunk=size)
