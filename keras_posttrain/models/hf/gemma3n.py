"""What only the configs of Gemma 3n have, and where it is in built layers.

Its layers are those of Gemma 4 with heads of one size; see
`models/gemma3n.py` for what they have in addition.
"""

# The names of `Settings.gemma3n` and their fields.
FIELDS = {
    "states": "altup_num_inputs",
    "active": "altup_active_idx",
    "is_scaled": "altup_correct_scale",
    "rank": "laurel_rank",
    "sparsity": "activation_sparsity_pattern",
}
# The names of `Settings.gemma4` that this family has too.
SHARED = {
    "shared_layers": "num_kv_shared_layers",
    "input_size": "hidden_size_per_layer_input",
    "input_vocabulary": "vocab_size_per_layer_input",
}
# All fields that no other dense family reads.
READ = (*FIELDS.values(), *SHARED.values())
# Fields that transformers does not read, in checkpoints of Google. The clip is
# of coefficients that become larger than 120 in training.
IGNORED = (
    "altup_coef_clip",
    "altup_lr_multiplier",
    "frac_shared_layers",
    "query_pre_attn_scalar",
)
# Fields that other families read and transformers ignores in this one.
UNREAD = (
    "attn_logit_softcapping",
    "max_window_layers",
    "mlp_bias",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "sliding_window_pattern",
    "use_sliding_window",
)
# Of transformers' config class; sizes are not included.
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "num_kv_shared_layers": 15,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# In models of more layers than these, they are sparse by default.
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_LEAST = {
    "altup_active_idx": 0,
    "altup_num_inputs": 1,
    "hidden_size_per_layer_input": 1,
    "laurel_rank": 1,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 1,
}


def completed(config, refused):
    """Returns a config whose `intermediate_size` is a number.

    Args:
        refused: as of `read_fields`.
    """
    field = "final_logit_softcapping"
    if config.get(field, DEFAULTS[field]) is None:
        # It would be taken for absent.
        raise refused(field, None, "a number")
    field = "intermediate_size"
    width = config.get(field)
    if not isinstance(width, (list, tuple)):
        return config
    if len(set(width)) != 1 or len(width) != config["num_hidden_layers"]:
        expected = "the same number for each of `num_hidden_layers` layers"
        raise refused(field, width, expected)
    return {**config, field: width[0]}


def read_fields(config, windows, refused):
    """Returns `Settings.gemma4` and `.gemma3n` of a config with its defaults.

    Args:
        windows: of `Settings`.
        refused: function of a field, its value and what was expected, that
            returns an error.
    """
    for field, least in _LEAST.items():
        value = config[field]
        if not isinstance(value, int) or value < least:
            raise refused(field, value, f"an integer from {least}")
    states, active = (config[FIELDS[x]] for x in ("states", "active"))
    if active >= states:
        expected = f"less than `altup_num_inputs`, which is {states}"
        raise refused(FIELDS["active"], active, expected)
    _check_shared(config[SHARED["shared_layers"]], windows, refused)
    own = {name: config[field] for name, field in SHARED.items()}
    own["global_head_dim"] = config["head_dim"]
    own.update(global_key_value_heads=None, is_double_wide=False)
    return own, {
        "states": states,
        "active": active,
        "is_scaled": bool(config[FIELDS["is_scaled"]]),
        "rank": config[FIELDS["rank"]],
        "sparsity": _sparsity(config, len(windows), refused),
    }


def _check_shared(count, windows, refused):
    first = len(windows) - count
    kinds = [window is None for window in windows]
    if count >= len(windows) or (count and set(kinds) - set(kinds[:first])):
        raise refused(
            SHARED["shared_layers"],
            count,
            "a layer of each type in `layer_types` before those that share",
        )


def _sparsity(config, layers, refused):
    field = FIELDS["sparsity"]
    found = config.get(field)
    if found is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        found = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    is_list = isinstance(found, (list, tuple)) and len(found) == layers
    if not is_list or not all(0 <= x < 1 for x in found):
        raise refused(field, found, f"{layers} numbers from 0 to below 1")
    return tuple(map(float, found))


def to_fields(settings):
    """Returns the fields of a config that only this family has."""
    found = {FIELDS[name]: x for name, x in settings.gemma3n.items()}
    found |= {field: settings.gemma4[name] for name, field in SHARED.items()}
    field, layers = "intermediate_size", len(settings.windows)
    return {
        **found,
        FIELDS["sparsity"]: list(settings.gemma3n["sparsity"]),
        # As transformers writes it.
        field: [settings.sizes[field]] * layers,
    }


def read_layers(backbone):
    """Returns `Settings.gemma3n` that the built layers compute with."""
    layers = backbone.transformer_layers
    altup = layers[0].altup
    return {
        "states": altup.count,
        "active": altup.active,
        "is_scaled": altup.is_scaled,
        "rank": layers[0].laurel.rank,
        "sparsity": tuple(layer.sparsity for layer in layers),
    }
