"""Qwen 3.5 by KerasHub's classes: its own numbers, and what is refused."""

import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import quantized
from keras_posttrain.models.activation_capture import ActivationCapture
from keras_posttrain.models.hf.export import export
from keras_posttrain.models.hf.families import family_of
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.quantized import QuantizedKernel
from keras_posttrain.rollout.vllm import settings
from tests.models.tiny_checkpoints import (
    TOKEN_IDS,
    assert_equal_logits,
    packed_logits,
    plain_logits,
    randomize,
    transformers_logits,
)

MODELS = keras_hub.models


def make_model():
    backbone = MODELS.Qwen3_5Backbone(
        vocabulary_size=96,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        hidden_dim=32,
        intermediate_dim=48,
        layer_types=["linear_attention", "full_attention"],
        partial_rotary_factor=0.5,
        layer_norm_epsilon=1e-2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    )
    return randomize(MODELS.Qwen3_5CausalLM(backbone, preprocessor=None))


# KerasHub unrolls its recurrence. Keras reads the learning rate of the
# optimizer it saves.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_preset_has_kerashubs_numbers(tmp_path):
    causal_lm = make_model()
    # Before its layers are changed.
    want = plain_logits(causal_lm)
    assert_equal_logits(packed_logits(causal_lm), want, 5e-5)
    # As Keras calls them outside of a task.
    assert_equal_logits(plain_logits(causal_lm), want, 5e-5)
    causal_lm.save_to_preset(tmp_path / "preset")
    again = load_causal_lm(tmp_path / "preset", dtype="float32")
    assert Policy(again).packable
    assert_equal_logits(packed_logits(again), want, 5e-5)
    export(again, tmp_path / "hf")
    assert_equal_logits(transformers_logits(tmp_path / "hf"), want, 5e-5)


def test_layers_without_attention_have_no_weights_to_match():
    policy = Policy(make_model())
    assert policy.attending == [1]
    batch = {
        "token_ids": TOKEN_IDS,
        "segment_ids": np.ones_like(TOKEN_IDS),
        "positions": np.zeros_like(TOKEN_IDS),
    }
    with pytest.raises(ValueError, match="Use \\[1\\], or match hidden"):
        policy.hidden_states(batch, capture=ActivationCapture((), (0, 1)))
    capture = ActivationCapture((), (1,))
    policy.hidden_states(batch, capture=capture)
    assert list(capture.attentions) == [1]


def test_gates_of_states_stay_floats():
    causal_lm = make_model()
    quantized.quantize_layers(causal_lm, kpt.Quantization("int8"))
    layer = causal_lm.backbone.transformer_layers[0]._linear_attn
    for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
        assert isinstance(getattr(layer, name).kernel, QuantizedKernel)
    for name in ("in_proj_a", "in_proj_b"):
        assert not isinstance(getattr(layer, name).kernel, QuantizedKernel)


def test_vllm_is_refused_by_name():
    with pytest.raises(ValueError, match="model_type='qwen3_5_text'"):
        settings.check_family(family_of(make_model()))
