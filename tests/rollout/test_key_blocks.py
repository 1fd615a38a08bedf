"""Caches with keys in blocks give the samples of those with one block."""

import jax
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import attention, key_values
from keras_posttrain.rollout import Request
from tests.models.tiny_checkpoints import make_checkpoint
from tests.rollout import test_drafts, test_prefill_chunk
from tests.rollout.test_prefill_chunk import check_same, engine_of, tokens


def blocks(engine):
    """The blocks of keys of each layer, 1 without; 256 tokens a slot."""
    cache = jax.eval_shape(lambda: engine._decoder._zeros(2, 256))
    keys = [layer.keys for layer in cache]
    return [x.shape[2] if x.ndim == 5 else 1 for x in keys]


def put_in_blocks(monkeypatch):
    """Blocks for short sequences too, as on a CPU from 384 tokens on."""
    monkeypatch.setattr(key_values, "LEAST_IN_BLOCKS", 1)


def check_prompts(monkeypatch, task):
    """Groups, in slots that grow; prompts as a whole and in pieces."""
    plain = engine_of(task)
    expected = plain.generate(test_prefill_chunk.requests())
    assert set(blocks(plain)) == {1}
    put_in_blocks(monkeypatch)
    for settings in ({}, {"prefill_chunk": test_prefill_chunk.CHUNK}):
        engine = engine_of(task, **settings)
        check_same(engine.generate(test_prefill_chunk.requests()), expected)
        assert max(blocks(engine)) == 4


@pytest.mark.parametrize(
    "tokens, shape",
    [(320, (8, 320)), (384, (6, 8, 64)), (400, (8, 400)), (448, (7, 8, 64))],
)
def test_keys_of_384_tokens_and_more_are_in_blocks_of_64(tokens, shape):
    """Those of a number of tokens that 64 does not divide are not."""
    cache = key_values.KeyValues.zeros(2, tokens, 3, 8, "float32")
    assert cache.keys.shape == (2, 3, *shape)
    assert cache.values.shape == (2, 3, tokens, 8)


def test_soft_caps_and_windows(monkeypatch):
    check_prompts(monkeypatch, test_prefill_chunk.reference("gemma2"))


def test_sinks(monkeypatch, tmp_path):
    directory, _ = make_checkpoint(
        tmp_path / "hf",
        "gpt_oss",
        num_hidden_layers=2,
        max_position_embeddings=320,
    )
    task = kpt.SFTTask.from_preset(directory, sequence_length=320)
    check_prompts(monkeypatch, task)


@pytest.mark.parametrize(
    "name, value",
    [("FEW_QUERIES", 128), ("FEW_QUERIES", 1), ("KEEP_SCORES", 0)],
)
def test_conversations(monkeypatch, name, value):
    """What continues them sees keys in blocks, joined ones, and blocks of
    scores."""
    task = test_prefill_chunk.reference("llama3")
    starts = [Request(tokens(80 + i, i), max_tokens=3, seed=i) for i in (1, 2)]

    def turns():
        with engine_of(task).session() as session:
            found = [session.submit(x).result() for x in starts]
            more = [
                [*x.token_ids, *samples[0].token_ids, *tokens(20 + i, i)]
                for i, (x, samples) in enumerate(zip(starts, found))
            ]
            more = [Request(ids, max_tokens=5, seed=7) for ids in more]
            return [session.submit(x).result() for x in more]

    expected = turns()
    put_in_blocks(monkeypatch)
    monkeypatch.setattr(attention, name, value)
    check_same(turns(), expected)


def test_drafts_of_several_tokens(monkeypatch):
    task = test_drafts.shared()
    expected = test_drafts.plain_engine(task).generate(test_drafts.requests())
    put_in_blocks(monkeypatch)
    test_drafts.draft_always(monkeypatch)
    engine = test_drafts.engine_of(task)
    found = engine.generate(test_drafts.requests())
    # Low temperatures multiply what rounding changes.
    test_drafts.check_equal(found, expected, atol=1e-3)
    assert "tokens a pass" in "\n".join(engine.programs)
    assert max(blocks(engine)) == 4
