"""Tiny random mixtures of experts, of KerasHub's classes."""

import keras
import keras_hub

from tests.models.tiny_checkpoints import randomize

SIZES = dict(
    vocabulary_size=96,
    num_layers=2,
    hidden_dim=32,
    num_query_heads=4,
    num_key_value_heads=2,
    intermediate_dim=48,
    num_experts=5,
    top_k=2,
)
OWN = {
    "Mixtral": {"sliding_window": 6},
    "QwenMoe": {
        "moe_intermediate_dim": 24,
        "shared_expert_intermediate_dim": 40,
        "norm_top_k_prob": False,
    },
    "Qwen3Moe": {
        "moe_intermediate_dim": 24,
        "head_dim": 12,
        "norm_top_k_prob": True,
        # The second layer has no experts.
        "mlp_only_layers": [1],
    },
}
MIXTURES = tuple(OWN)


def make_mixture(family, seed=0, **changes):
    """Makes a `CausalLM` of `MIXTURES` with random weights."""
    # KerasHub numbers the names of the blocks of experts.
    distribution = keras.distribution.distribution()
    keras.utils.clear_session(free_memory=False)
    keras.distribution.set_distribution(distribution)
    settings = {**SIZES, **OWN[family], **changes}
    backbone = getattr(keras_hub.models, f"{family}Backbone")(**settings)
    model_class = getattr(keras_hub.models, f"{family}CausalLM")
    return randomize(model_class(backbone, preprocessor=None), seed)
