"""KerasHub does not read a Qwen3-MoE config that transformers 5 saved."""

import tempfile

import keras_hub
import transformers

config = transformers.Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    num_key_value_heads=2,
)
with tempfile.TemporaryDirectory() as folder:
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    try:
        keras_hub.models.CausalLM.from_preset(folder, preprocessor=None)
        found = "it loads"
    except KeyError as error:
        found = f"KeyError: {error}"
print(f"expected that it loads, found {found}")
