"""What only the configs of Qwen 3.5 have, and where it is in built layers.

Some of its layers have linear attention in the place of attention.
"""

FULL, LINEAR = "full_attention", "linear_attention"
# The names of `Settings.linear` and their fields, all of them numbers.
FIELDS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}
# All fields that only this family reads.
READ = (*FIELDS.values(), "full_attention_interval")
# Of transformers' config class; sizes are not included.
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MIXTURE = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The values that the layers can represent, transformers' default first.
ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "norm_topk_prob": (True,),
}
IGNORED = (
    "mamba_ssm_dtype",
    # Layers for speculative decoding.
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "language_model_only",
)


def read_fields(config, refused):
    """Returns `Settings.linear` of a config with its defaults filled in.

    Args:
        refused: function of a field, its value and what was expected, that
            returns an error.
    """
    found = {}
    for name, field in FIELDS.items():
        value = found[name] = config[field]
        if not isinstance(value, int) or value is True or value < 1:
            raise refused(field, value, "a positive integer")
    if found["width"] < 2:
        # Without a tail.
        raise refused(FIELDS["width"], found["width"], "2 at least")
    if found["value_heads"] % found["key_heads"]:
        raise refused(
            FIELDS["value_heads"],
            found["value_heads"],
            f"a multiple of {FIELDS['key_heads']}={found['key_heads']}",
        )
    layers, every = (
        config["num_hidden_layers"],
        config["full_attention_interval"],
    )
    kinds = config.get("layer_types")
    if kinds is None:
        if not isinstance(every, int) or every < 1:
            raise refused(
                "full_attention_interval", every, "a positive integer"
            )
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    is_known = len(kinds) == layers and not set(kinds) - {FULL, LINEAR}
    if not is_known or FULL not in kinds:
        raise refused(
            "layer_types",
            kinds,
            f"{layers} of {FULL!r} and {LINEAR!r} (as `num_hidden_layers` "
            "and `full_attention_interval` say), the first of them once at "
            "least",
        )
    return {**found, "is_linear": tuple(kind == LINEAR for kind in kinds)}


def to_fields(own):
    """Returns the fields of a config of `Settings.linear`."""
    found = {field: own[name] for name, field in FIELDS.items()}
    kinds = [LINEAR if linear else FULL for linear in own["is_linear"]]
    return {**found, "layer_types": kinds}


def arguments(settings):
    """Returns arguments of the constructor of KerasHub's backbone."""
    own, rope = settings.linear, settings.rope[0]
    found = to_fields(own)
    if settings.experts is not None:
        found["moe_intermediate_dim"] = settings.experts["width"]
        found["shared_expert_intermediate_size"] = settings.experts[
            "shared_width"
        ]
        found["num_experts"] = settings.experts["count"]
        found["top_k"] = settings.experts["top_k"]
    return {
        **found,
        "rope_max_wavelength": rope["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "sliding_window_size": None,
        "tie_word_embeddings": settings.tied,
    }


def read_layers(backbone):
    """Returns `Settings.linear` of a backbone."""
    found = {name: getattr(backbone, field) for name, field in FIELDS.items()}
    kinds = tuple(kind == LINEAR for kind in backbone.layer_types)
    return {**found, "is_linear": kinds}
