"""`mlp_only_layers` of KerasHub's QwenMoeBackbone is all layers or none."""

import keras_hub

for dense in ([0], [1]):
    backbone = keras_hub.models.QwenMoeBackbone(
        vocabulary_size=32,
        num_layers=3,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=16,
        moe_intermediate_dim=8,
        shared_expert_intermediate_dim=8,
        num_experts=2,
        top_k=1,
        mlp_only_layers=dense,
    )
    found = [
        i
        for i, layer in enumerate(backbone.transformer_layers)
        if not hasattr(layer.mlp, "expert_bank")
    ]
    print(f"expected {dense} without experts, found {found}")
