"""What only the configs of Gemma 4 have, and where it is in built layers.

Its layers with a window and those without differ: in the size of heads, the
number of heads of keys and values, and whether values are keys.
"""

FULL, SLIDING = "full_attention", "sliding_attention"
# The names of `Settings.gemma4` and their fields.
FIELDS = {
    "global_head_dim": "global_head_dim",
    "global_key_value_heads": "num_global_key_value_heads",
    "shared_layers": "num_kv_shared_layers",
    "is_double_wide": "use_double_wide_mlp",
    "input_size": "hidden_size_per_layer_input",
    "input_vocabulary": "vocab_size_per_layer_input",
}
# All fields that only this family reads.
READ = (
    *FIELDS.values(),
    "attention_k_eq_v",
    "enable_moe_block",
    "per_layer_config",
    "top_k_experts",
)
# Fields that other families read and transformers ignores in this one.
UNREAD = (
    "attn_logit_softcapping",
    "max_window_layers",
    "mlp_bias",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_theta",
    "sliding_window_pattern",
    "use_sliding_window",
)
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
# Of transformers' config class; sizes are not included.
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_parameters": ROPE,
    "attention_k_eq_v": False,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "per_layer_config": None,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


_WHOLE_NUMBERS = (
    "global_head_dim",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "vocab_size_per_layer_input",
)


def read_fields(config, windows, refused):
    """Returns `Settings.gemma4` of a config with its defaults filled in.

    Args:
        windows: of `Settings`.
        refused: function of a field, its value and what was expected, that
            returns an error.
    """
    for field in _WHOLE_NUMBERS:
        value = config[field]
        if not isinstance(value, int) or value < 0:
            raise refused(field, value, "an integer from 0")
    rows, inputs = "vocab_size_per_layer_input", "hidden_size_per_layer_input"
    if config[inputs] and config[rows] < config["vocab_size"]:
        # Ids beyond would be NaN; transformers raises an error for them.
        raise refused(rows, config[rows], "`vocab_size` at least")
    if windows[-1] is not None:
        kinds = config.get("layer_types")
        raise refused("layer_types", kinds, f"{FULL!r} at last")
    own = _global_sizes(config, windows, refused)
    count = config["num_kv_shared_layers"]
    first = len(windows) - count
    kinds = [window is None for window in windows]
    if not 0 <= count < len(windows) or set(kinds) - set(kinds[:first]):
        raise refused(
            "num_kv_shared_layers",
            count,
            "a layer of each type in `layer_types` before those that share",
        )
    same = config["attention_k_eq_v"]
    return {
        "global_head_dim": own["head_dim"],
        "global_key_value_heads": own["num_key_value_heads"] if same else None,
        "shared_layers": count,
        "is_double_wide": bool(config["use_double_wide_mlp"]),
        "input_size": config["hidden_size_per_layer_input"],
        "input_vocabulary": config["vocab_size_per_layer_input"],
    }


def _global_sizes(config, windows, refused):
    """Returns the sizes of layers that attend to all tokens.

    transformers 5 saves them in `per_layer_config`, where that of a layer
    has precedence over the fields of the config.
    """
    heads = config["num_key_value_heads"]
    own = {
        "head_dim": config["global_head_dim"],
        "num_key_value_heads": config["num_global_key_value_heads"] or heads,
    }
    if config["per_layer_config"] is None:
        return own
    own = {name: config[name] for name in own}
    table = {int(i): x for i, x in config["per_layer_config"].items()}
    full = [i for i, window in enumerate(windows) if window is None]
    first = table.get(full[-1], {})
    found = {**own, **first}
    same = dict.fromkeys(full, first) if first else {}
    known = table == same and set(found) == set(own)
    if not config["attention_k_eq_v"]:
        known = known and found["num_key_value_heads"] == heads
    if not known:
        raise refused(
            "per_layer_config",
            config["per_layer_config"],
            f"the same {sorted(own)} in each layer of {FULL!r}",
        )
    return found


def check_rope(config, refused):
    """Raises if `rope_parameters` lacks a type of layer."""
    found = config["rope_parameters"]
    for kind in (FULL, SLIDING):
        own = found.get(kind)
        if own is None or own.get("rope_theta") is None:
            raise refused("rope_parameters", found, f"such as {ROPE}")


def rope_fields(found):
    """Returns `rope_parameters` of a dict from the type of layer to its own.

    transformers warns about a factor that it computes with.
    """
    found = {kind: dict(own) for kind, own in {**ROPE, **found}.items()}
    for own in found.values():
        if own["rope_type"] == "proportional" and own.get("factor") == 1:
            del own["factor"]
    return found


def to_fields(own):
    """Returns the fields of a config of `Settings.gemma4`."""
    found = {FIELDS[name]: value for name, value in own.items()}
    found["attention_k_eq_v"] = own["global_key_value_heads"] is not None
    return found


def arguments(own, windows, experts):
    """Returns arguments of the constructor of KerasHub's backbone.

    They are those of `Settings.gemma4`, `windows` and `experts`.
    """
    found = {}
    if experts is not None:
        found = {
            "enable_moe_block": True,
            "num_experts": experts["count"],
            "num_experts_per_token": experts["top_k"],
            "expert_intermediate_dim": experts["width"],
        }
    return {
        **found,
        "image_size": None,
        "layer_types": [FULL if w is None else SLIDING for w in windows],
        "global_head_dim": own["global_head_dim"],
        "num_global_key_value_heads": own["global_key_value_heads"],
        "num_kv_shared_layers": own["shared_layers"],
        "use_double_wide_mlp": own["is_double_wide"],
        "hidden_size_per_layer_input": own["input_size"],
        "vocab_size_per_layer_input": own["input_vocabulary"],
    }


def rope_arguments(rope, windows):
    """Returns what the constructor can say of `Settings.rope`."""
    of_kind = {window is None: own for window, own in zip(windows, rope)}
    found = {}
    if True in of_kind:
        own = of_kind[True]
        found["global_rope_wavelength"] = own["rope_theta"]
        partial = own.get("partial_rotary_factor", 1.0)
        found["global_rope_partial_rotary_factor"] = partial
    if False in of_kind:
        found["local_rope_wavelength"] = of_kind[False]["rope_theta"]
    return found


def read_layers(backbone):
    """Returns `Settings.gemma4` that the built layers compute with."""
    if not backbone.use_sliding_window_attention:
        if set(backbone.layer_types) != {FULL}:
            raise ValueError(
                "A Hugging Face config of Gemma 4 cannot express local layers "
                "without a window, so the model cannot be exported. Received: "
                "use_sliding_window_attention=False with layer_types="
                f"{backbone.layer_types}"
            )
    table = getattr(backbone, "per_layer_token_embedding", None)
    return {
        "global_head_dim": backbone.global_head_dim or backbone.head_dim,
        "global_key_value_heads": backbone.num_global_key_value_heads,
        "shared_layers": backbone.num_kv_shared_layers,
        "is_double_wide": bool(backbone.use_double_wide_mlp),
        "input_size": backbone.hidden_size_per_layer_input,
        "input_vocabulary": (
            backbone.vocabulary_size if table is None else table.input_dim
        ),
    }
