"""A workload's model in KerasHub."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras_hub
import numpy as np

LAYERS = {
    "q_proj": "self_attention/query",
    "k_proj": "self_attention/key",
    "v_proj": "self_attention/value",
    "o_proj": "self_attention/attention_output",
    "gate_proj": "feedforward_gate_dense",
    "up_proj": "feedforward_intermediate_dense",
    "down_proj": "feedforward_output_dense",
}
NORMS = {
    "input_layernorm": "self_attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}


def place(name):
    """Returns the KerasHub variable path for a Hugging Face tensor name."""
    fixed = {
        "model.embed_tokens.weight": "token_embedding/embeddings",
        "model.norm.weight": "sequence_output_layernorm/scale",
        "lm_head.weight": "token_embedding/reverse_embeddings",
    }
    if name in fixed:
        return fixed[name]
    _, _, i, *_, last, _ = name.split(".")
    if last in NORMS:
        return f"transformer_layer_{i}/{NORMS[last]}/scale"
    return f"transformer_layer_{i}/{LAYERS[last]}/kernel"


def build(model):
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=model.vocab,
        num_layers=model.layers,
        num_query_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        hidden_dim=model.hidden,
        intermediate_dim=model.intermediate,
        rope_max_wavelength=model.rope_theta,
        layer_norm_epsilon=model.norm_eps,
        tie_word_embeddings=model.tied,
        dtype="float32",
    )
    variables = {v.path: v for v in backbone.weights}
    for name, value in model.weights().items():
        variable = variables.pop(place(name))
        # Kernels are (in, out), with a separate axis for heads.
        if not name.endswith("embed_tokens.weight"):
            value = value.T.reshape(variable.shape)
        variable.assign(np.ascontiguousarray(value))
    if variables:
        raise ValueError(f"Weights not set: {sorted(variables)}.")
    return keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
