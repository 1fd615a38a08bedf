"""What Gemma 3n alone has; `test_families.py` and others have the rest."""

import jax
import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest
import torch
import transformers

from keras_posttrain.models.activation_capture import ActivationCapture
from keras_posttrain.models.gemma3n import Projections
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.policy import Policy
from tests.models.tiny_checkpoints import TOKEN_IDS, make_checkpoint


def test_what_is_captured_is_the_first_state(tmp_path):
    directory, _ = make_checkpoint(tmp_path / "hf", "gemma3n_text")
    policy = Policy(load_causal_lm(directory))
    assert policy.state_dim == 3 * 32
    rows, length = TOKEN_IDS.shape
    batch = {
        "token_ids": TOKEN_IDS,
        "segment_ids": np.ones_like(TOKEN_IDS),
        "positions": np.tile(np.arange(length), (rows, 1)),
    }
    capture = ActivationCapture(hidden_layers=(0,), attention_layers=(1,))
    policy.hidden_states(batch, capture=capture)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        want = model(
            torch.tensor(TOKEN_IDS),
            output_hidden_states=True,
            output_attentions=True,
        )
    # transformers has all states, before those of the later layers.
    states = want.hidden_states[1].numpy()
    assert states.shape[0] == 3
    np.testing.assert_allclose(capture.hidden[0], states[0], atol=2e-5)
    np.testing.assert_allclose(
        capture.attentions[1], want.attentions[1], atol=2e-5
    )


@pytest.mark.parametrize("is_last", [False, True])
def test_the_gradient_of_padding_is_finite(is_last):
    """The embedding of padding may be 0, and then all of its states are."""
    layer = Projections(2, is_last)
    layer.build((None, None, 4))
    zeros = jnp.zeros((1, 1, 2, 4) if is_last else (1, 1, 4))
    found = jax.grad(lambda x: layer(x).sum())(zeros)
    assert np.isfinite(found).all()


def test_kerashubs_own_class_is_refused():
    backbone = keras_hub.models.Gemma3nBackbone(
        text_vocab_size=20,
        text_hidden_size=8,
        num_hidden_layers=1,
        pad_token_id=0,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=[8],
        hidden_activation="gelu_approximate",
        layer_types=["full_attention"],
        sliding_window=4,
        rope_theta=10_000.0,
        max_position_embeddings=16,
        vocab_size_per_layer_input=20,
        hidden_size_per_layer_input=2,
        altup_num_inputs=2,
        laurel_rank=1,
    )
    causal_lm = keras_hub.models.Gemma3nCausalLM(
        backbone=backbone, preprocessor=None
    )
    with pytest.raises(ValueError, match="from Hugging Face directories only"):
        Policy(causal_lm)
