"""KerasHub windows the layers of gpt-oss that transformers does not."""

import keras_hub
import transformers

config = transformers.GptOssConfig(num_hidden_layers=4, sliding_window=8)
expected = [
    8 if kind == "sliding_attention" else None for kind in config.layer_types
]
backbone = keras_hub.models.GptOssBackbone(
    vocabulary_size=32,
    num_layers=4,
    num_query_heads=2,
    num_key_value_heads=1,
    hidden_dim=32,
    intermediate_dim=32,
    num_experts=2,
    top_k=1,
    head_dim=16,
    sliding_window=8,
)
found = [
    layer.self_attention_layer.sliding_window
    for layer in backbone.transformer_layers
]
print(f"expected {expected}, found {found}")
