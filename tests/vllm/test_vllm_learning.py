"""GRPO with vLLM learns what it learns with the native engine."""

import functools
import importlib.util

import keras
import keras_hub
import pytest

from keras_posttrain.rollout import NativeRollout, VLLMRollout
from tests.support import check_most
from tests.tasks import test_grpo_learning as arithmetic

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
    ),
    # What vLLM's and torch's own files warn of.
    pytest.mark.filterwarnings("ignore"),
]


def tiny_model(seed, num_layers=2):
    """With heads of a size that vLLM's CPU kernels know."""
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.Qwen3Backbone(
        vocabulary_size=16,
        num_layers=num_layers,
        num_query_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        hidden_dim=64,
        intermediate_dim=128,
        tie_word_embeddings=False,
    )
    return keras_hub.models.Qwen3CausalLM(backbone)


@pytest.mark.parametrize("engine", [NativeRollout, VLLMRollout])
def test_it_learns(monkeypatch, engine):
    monkeypatch.setattr(arithmetic, "tiny_model", tiny_model)
    rollout = engine()
    try:
        check_most(
            functools.partial(arithmetic.check, rollout=rollout), (0, 1, 2)
        )
    finally:
        rollout.stop()
