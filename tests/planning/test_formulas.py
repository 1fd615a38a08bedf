"""What a plan counts by formulas."""

import keras_hub
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.policy import Policy
from keras_posttrain.planning import formulas

HUB = keras_hub.models
SIZES = {
    "vocabulary_size": 96,
    "num_layers": 3,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 48,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


@pytest.mark.parametrize(
    "kind, more, layers, head_dim",
    [
        ("Llama3", {}, 3, 8),
        ("Qwen3", {"head_dim": 16}, 3, 16),
        ("Gemma", {"head_dim": 16}, 3, 16),
        # Its kernels of queries have gates too.
        ("Qwen3_5", {"head_dim": 16, **HYBRID}, 2, 16),
    ],
)
def test_the_width_of_attention(kind, more, layers, head_dim):
    """Heads times their features, over the layers that attend."""
    with kpt.distribution.shapes_only():
        backbone = getattr(HUB, f"{kind}Backbone")(**SIZES, **more)
        causal_lm = getattr(HUB, f"{kind}CausalLM")(backbone)
    policy = Policy(causal_lm)
    *_, width = formulas._token_flops(policy, backbone.variables, set())
    assert width == layers * 4 * head_dim
