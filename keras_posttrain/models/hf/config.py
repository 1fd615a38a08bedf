"""Converts Hugging Face configs to and from model settings."""

import dataclasses
import functools

from keras_posttrain.models.hf import gemma3n, gemma4, qwen3_5
from keras_posttrain.models.hf.gemma4 import FULL, SLIDING
from keras_posttrain.models.hf.rope import rope_parameters

# Fields that must have one of these values, because KerasHub's layers support
# no others.
REQUIRED = {
    "use_bidirectional_attention": (
        (False, None),
        "only causal attention can be trained as a language model here",
    ),
    "quantization_config": (
        (None,),
        "its weights are quantized; use the unquantized checkpoint",
    ),
}
# Fields that `from_config` reads, for all families or some.
READ = set(REQUIRED) | {
    "model_type",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "tie_word_embeddings",
    # Of some families.
    "no_rope_layers",
    "no_rope_layer_interval",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
    "swiglu_alpha",
    "swiglu_limit",
}
# The factors of `Settings.multipliers` and their fields.
MULTIPLIERS = {
    "embedding": "embedding_multiplier",
    "residual": "residual_multiplier",
    "scores": "attention_multiplier",
    "logits": "logits_scaling",
}
# Fields that do not affect the forward pass. Dropout affects only training,
# where this library has its own setting.
HARMLESS = {
    "_attn_implementation",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "exported_by",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_mrope",
}
# The tanh approximation of GELU. Old Gemma checkpoints call it "gelu".
GEMMA_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")
ACTIVATIONS = ("silu", "swish", "gelu", "relu", *GEMMA_ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a model that determine its outputs, besides weights.

    Args:
        sizes: dict of ints: `vocab_size`, `num_hidden_layers`,
            `num_attention_heads`, `num_key_value_heads`, `head_dim`,
            `hidden_size`, `intermediate_size`.
        epsilon: float, added to the mean square in every norm.
        activation: str, Hugging Face's name of the gate's activation.
        rope: a dict for each layer, see `rope.rope_parameters`.
        windows: for each layer the number of tokens a token attends to,
            including itself, or `None`.
        query_scalar: number; scores are divided by its square root.
        attention_soft_cap: float or `None`, the cap of attention scores.
        final_soft_cap: float or `None`, the cap of logits.
        tied: bool, whether the head is the embedding.
        biases: tuple of the modules of a decoder layer that have a bias.
        experts: dict of a mixture's `count`, `top_k`, `width`, the tuple of
            the `dense_layers`, which have none, and of what its family has
            of `shared_width`, `is_normalized`, and `alpha` and `limit` of its
            activation; or `None`.
        multipliers: dict of the factors of `MULTIPLIERS`: those of the
            embeddings, of what each block adds, and of the scores; the
            logits are divided by the last. `None` in most families.
        gemma4: dict of what only Gemma 4 and 3n have: `global_head_dim`, of
            layers without a window; `global_key_value_heads` of these,
            `None` where values are not keys; `shared_layers`, how many of
            the last layers use the keys and values of others;
            `is_double_wide`, whether their MLPs are; `input_size` and
            `input_vocabulary` of the embedding for each layer, which has
            none if the size is 0. `None` in other families.
        gemma3n: dict of what only Gemma 3n has: the hidden `states` of a
            token, the `active` one, `is_scaled`, the `rank` of the path next
            to the attention, and a tuple of each layer's `sparsity`. `None`
            in other families.
        linear: dict of what only Qwen 3.5 has: for each layer in
            `is_linear` whether it has linear attention; of these
            `key_heads`, `value_heads`, their sizes `key_dim` and
            `value_dim`, and the `width` of the convolution. `None` in other
            families.
    """

    sizes: dict
    epsilon: float
    activation: str
    rope: tuple
    windows: tuple
    query_scalar: float
    attention_soft_cap: float | None
    final_soft_cap: float | None
    tied: bool
    biases: tuple = ()
    experts: dict | None = None
    multipliers: dict | None = None
    gemma4: dict | None = None
    gemma3n: dict | None = None
    linear: dict | None = None


def from_config(config, family):
    """Reads a Hugging Face config of a family.

    Returns `Settings`, and a list of notes on the fields that were ignored.
    If KerasHub's layers cannot represent the model, a `ValueError` names the
    field and its value.
    """
    notes = _check_known(config, family)
    _check_required(config, family)
    config = _completed(config, family)
    biases = _biases(config, family)
    sizes = _sizes(config, family)
    layers = sizes["num_hidden_layers"]
    windows = _windows(config, family, layers)
    kinds = [FULL if window is None else SLIDING for window in windows]
    own, own_of_3n = _gemma4(config, family, sizes, windows)
    per_type = family.rope_by_type
    rope = {
        kind: rope_parameters(
            config, kind if per_type else None, family.partial_rotary
        )
        for kind in set(kinds)
    }
    gemma2 = family.model_type in ("gemma2", "gemma3_text")
    scalar = config["query_pre_attn_scalar"] if gemma2 else sizes["head_dim"]
    cap = config["attn_logit_softcapping"] if gemma2 else None
    if cap is not None and per_type:
        # transformers reads this field but does not use it.
        notes.append(f"attn_logit_softcapping={cap} not applied in Gemma 3")
        cap = None
    settings = Settings(
        sizes=sizes,
        epsilon=_epsilon(config),
        activation=_activation(config, family),
        rope=_unrotated([rope[kind] for kind in kinds], config, family),
        windows=windows,
        query_scalar=1 if family.is_gemma4 else scalar,
        attention_soft_cap=cap,
        final_soft_cap=config.get("final_logit_softcapping")
        if "final_logit_softcapping" in family.defaults
        else None,
        tied=bool(config["tie_word_embeddings"]),
        biases=biases,
        experts=_experts(config, family),
        multipliers=_multipliers(config, family),
        gemma4=own,
        gemma3n=own_of_3n,
        linear=_linear(config, family),
    )
    return settings, notes


def _check_required(config, family):
    """Raises if no layers of KerasHub compute what the config says."""
    for field, (values, reason) in REQUIRED.items():
        values = (*values, *family.only.get(field, ()))
        if config.get(field) not in values:
            raise ValueError(
                f"A config of model_type={family.model_type!r} with "
                f"`{field}` set cannot be represented: {reason}. "
                f"Received: {field}={config[field]!r}"
            )


def _gemma4(config, family, sizes, windows):
    """Returns `Settings.gemma4` and `Settings.gemma3n`.

    A `ValueError` is raised if they cannot be represented.
    """
    if not family.is_gemma4:
        return None, None
    why = functools.partial(refused, family)
    if family.is_gemma3n:
        return gemma3n.read_fields(config, windows, why)
    own = gemma4.read_fields(config, windows, why)
    heads, groups = sizes["num_attention_heads"], own["global_key_value_heads"]
    check_head_dim(family.model_type, own["global_head_dim"])
    check_groups(family.model_type, heads, groups or heads)
    gemma4.check_rope(config, why)
    return own, None


def _linear(config, family):
    """Returns `Settings.linear`; raises if it cannot be represented."""
    if not family.is_qwen3_5:
        return None
    return qwen3_5.read_fields(config, functools.partial(refused, family))


def _check_known(config, family):
    """Returns notes on fields that are not read, or refuses them."""
    known = READ | HARMLESS | {*family.only, *family.fields, *family.ignored}
    unknown = sorted(set(config) - known)
    if family.is_strict:
        for field in unknown:
            if config[field]:
                raise refused(family, field, config[field], "not to be set")
        unknown = []
    for field, values in family.only.items():
        value = config.get(field)
        if value not in (None, *values) and (value or values[0]):
            raise refused(family, field, value, " or ".join(map(repr, values)))
    if not unknown:
        return []
    return [f"fields of config.json not read: {', '.join(unknown)}"]


def refused(family, field, value, expected):
    """Returns the error for a field that the layers cannot represent."""
    return ValueError(
        f"A config of model_type={family.model_type!r} with this `{field}` "
        f"was not compared with transformers: its log-probabilities could be "
        f"wrong. Expected {expected}. Received: {field}={value!r}. Use "
        "another checkpoint; if the field does not affect the outputs, "
        "remove it."
    )


def _completed(config, family):
    """Returns a config with the family's defaults for absent fields."""
    defaults = dict(family.defaults)
    if family.is_gemma3n:
        why = functools.partial(refused, family)
        config = gemma3n.completed(config, why)
    if family.is_gemma4:
        config = {k: v for k, v in config.items() if v is not None}
    for names in family.experts.fields.values() if family.experts else ():
        if any(config.get(name) is not None for name in names):
            for name in names:
                defaults.pop(name, None)
    if "rope_scaling" in defaults:
        # It is the default of both, also where they are null.
        rope = ("rope_scaling", "rope_parameters")
        if any(config.get(name) for name in rope):
            del defaults["rope_scaling"]
        config = {k: v for k, v in config.items() if k not in rope or v}
    return {**defaults, **config}


def _biases(config, family):
    """Returns the modules that have a bias, as `Settings.biases`."""
    found = list(family.fixed_biases)
    for field in ("attention_bias", "mlp_bias"):
        if not config.get(field):
            continue
        if field not in family.biases:
            raise ValueError(
                f"A config of model_type={family.model_type!r} with "
                f"`{field}` set cannot be represented: models of this type "
                f"have no such biases. Received: {field}={config[field]!r}"
            )
        found += family.biases[field]
    return tuple(found)


def _unrotated(rope, config, family):
    """Returns the rotation of each layer, none where there is none."""
    if not family.no_rope:
        return tuple(rope)
    rotated = config.get("no_rope_layers")
    if rotated is None:
        # Despite the name, 1 is for a layer that rotates.
        every = config["no_rope_layer_interval"]
        rotated = [int((i + 1) % every != 0) for i in range(len(rope))]
    if len(rotated) != len(rope):
        raise refused(
            family, "no_rope_layers", rotated, f"{len(rope)} numbers"
        )
    none = {"rope_type": "none", "rope_theta": rope[0]["rope_theta"]}
    return tuple(
        parameters if turned else none
        for parameters, turned in zip(rope, rotated, strict=True)
    )


def _experts(config, family):
    if family.experts is None:
        return None
    if family.experts.switch and not config.get(family.experts.switch):
        return None
    found = {}
    for name, fields in family.experts.fields.items():
        given = {
            field: config[field]
            for field in fields
            if config.get(field) is not None
        }
        if len(set(given.values())) != 1:
            raise ValueError(
                f"`config.json` of model_type={family.model_type!r} must "
                f"have one `{fields[0]}`. Received: {given or None}"
            )
        value = found[name] = next(iter(given.values()))
        if name in ("alpha", "limit"):
            _check_positive(fields[0], value, (int, float), "number")
        elif name != "is_normalized":
            _check_positive(fields[0], value, int, "integer")
    if found["top_k"] > found["count"]:
        top, count = (family.experts.fields[x][0] for x in ("top_k", "count"))
        raise ValueError(
            f"`{top}` must be at most the number of experts. Received: "
            f"{top}={found['top_k']}, {count}={found['count']}"
        )
    found.setdefault("width", config.get("intermediate_size"))
    step = config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    found["dense_layers"] = tuple(
        i
        for i in range(config["num_hidden_layers"])
        if i in dense or (i + 1) % step
    )
    return found


def _check_positive(field, value, types, kind):
    if not isinstance(value, types) or not value > 0:
        raise ValueError(
            f"`{field}` of `config.json` must be a positive {kind}. "
            f"Received: {field}={value!r}"
        )


def _multipliers(config, family):
    if not family.multipliers:
        return None
    return {name: float(config[f]) for name, f in MULTIPLIERS.items()}


def _epsilon(config):
    value = config["rms_norm_eps"]
    is_number = isinstance(value, (int, float))
    if not is_number or not 0 < value < 1:
        raise ValueError(
            "`rms_norm_eps` of `config.json` must be a number from 0 to 1. "
            f"Received: rms_norm_eps={value!r}"
        )
    return float(value)


def _sizes(config, family):
    names = (
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        *(("intermediate_size",) if family.has_width else ()),
    )
    optional = ("num_key_value_heads", "head_dim")
    given = [name for name in optional if config.get(name) is not None]
    for name in (*names, *given):
        value = config.get(name)
        if not isinstance(value, int) or value is True or value < 1:
            raise ValueError(
                f"`config.json` of model_type={family.model_type!r} must have "
                f"a positive integer `{name}`. Received: {name}={value!r}"
            )
    sizes = {name: config[name] for name in names}
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    check_groups(family.model_type, heads, sizes["num_key_value_heads"])
    even = sizes["hidden_size"] // heads
    sizes["head_dim"] = config.get("head_dim") or even
    if sizes["head_dim"] != even and family.experts is not None:
        _check_head_dim_of_mixture(sizes, family)
    check_head_dim(family.model_type, sizes["head_dim"])
    return sizes


def _check_head_dim_of_mixture(sizes, family):
    if not family.layers.has_head_dim:
        raise ValueError(
            f"KerasHub's {family.layers.keras_name} attention divides "
            "`hidden_size` evenly into heads; another `head_dim` cannot be "
            f"represented. Received: head_dim={sizes['head_dim']}, "
            f"hidden_size={sizes['hidden_size']}, "
            f"num_attention_heads={sizes['num_attention_heads']}"
        )


def check_groups(model_type, heads, groups):
    """Raises if heads of queries cannot share those of keys and values."""
    if groups < 1 or heads % groups:
        raise ValueError(
            "`num_attention_heads` must be a multiple of "
            "`num_key_value_heads` (an absent one has transformers' "
            f"default). Received: model_type={model_type!r} with "
            f"num_attention_heads={heads}, num_key_value_heads={groups}"
        )


def check_head_dim(model_type, head_dim):
    """Raises if the features of a head cannot be rotated in pairs."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            "Rotary embeddings need heads with an even number of features. "
            f"Received: model_type={model_type!r} with head_dim={head_dim}"
        )


def _activation(config, family):
    first = family.model_type == "gemma"
    later_gemma = family.is_gemma and not first
    field = "hidden_activation" if later_gemma else "hidden_act"
    value = config[field]
    known = GEMMA_ACTIVATIONS if family.is_gemma else ACTIVATIONS
    if first and value == "gelu":
        value = GEMMA_ACTIVATIONS[0]
    if value not in known:
        raise ValueError(
            f"A config of model_type={family.model_type!r} must have a "
            f"`{field}` in {list(known)}. Received: {field}={value!r}"
        )
    return {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}.get(value, value)


def _windows(config, family, num_layers):
    """Returns the attention window of each layer; `None` for no limit."""
    if family.windows == "none":
        kinds = config.get("layer_types")
        if family.is_qwen3_5:
            kinds = None
        if family.is_strict and kinds not in (None, [FULL] * num_layers):
            raise refused(
                family, "layer_types", kinds, f"{num_layers} of {FULL!r}"
            )
        return (None,) * num_layers
    size = config["sliding_window"]
    kinds = config.get("layer_types")
    if family.windows == "mistral":
        if kinds is None:
            return (size,) * num_layers
    elif family.windows != "gemma" and not config["use_sliding_window"]:
        size = None
    if kinds is None:
        kinds = _pattern(config, family, num_layers, size)
    if len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"`layer_types` must name {num_layers} layers (as "
            f"`num_hidden_layers` says), each {FULL!r} or {SLIDING!r}. "
            f"Received: layer_types={kinds}"
        )
    needs_size = family.windows in ("gemma", "mistral")
    if SLIDING in kinds and needs_size and not size:
        raise ValueError(
            "`sliding_window` must be set where `layer_types` has "
            f"{SLIDING!r}. Received: sliding_window={size}"
        )
    return tuple(size if kind == SLIDING else None for kind in kinds)


def _pattern(config, family, num_layers, size):
    layers = range(num_layers)
    if family.windows == "gemma":
        # Every second layer is global; in Gemma 3 every n-th.
        every = 2
        if "sliding_window_pattern" in family.defaults:
            every = config["sliding_window_pattern"]
        kinds = [SLIDING if (i + 1) % every else FULL for i in layers]
        if family.is_gemma4 and not family.is_gemma3n:
            kinds[-1] = FULL
        return kinds
    first = config["max_window_layers"]
    return [SLIDING if size and i >= first else FULL for i in layers]


def to_config(settings, family):
    """Converts `Settings` to the fields of a Hugging Face config.

    Rotary embeddings are written as in transformers 5 and 4, so that all
    readers find them. A setting without a field raises a `ValueError`.
    """
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **settings.sizes,
        "rms_norm_eps": settings.epsilon,
        "tie_word_embeddings": settings.tied,
        "attention_dropout": 0.0,
    }
    if family.model_type in _NO_HEAD_DIM:
        heads = config["num_attention_heads"]
        if config["head_dim"] * heads == config["hidden_size"]:
            del config["head_dim"]
    config.update(_bias_fields(settings, family))
    config.update(_expert_fields(settings, family))
    for name, value in (settings.multipliers or {}).items():
        config[MULTIPLIERS[name]] = value
    field = "hidden_activation" if family.is_gemma else "hidden_act"
    config[field] = settings.activation
    if family.model_type == "gemma":
        config["hidden_act"] = settings.activation
    config.update(_scale_and_caps(settings, family))
    config.update(_window_fields(settings.windows, family))
    config.update(_rope_fields(settings, family))
    if family.is_gemma3n:
        config.update(gemma3n.to_fields(settings))
    elif family.is_gemma4:
        if settings.windows[-1] is not None:
            what, received = "a window in the last layer", settings.windows
            raise _not_expressible(family, what, f"windows={received}")
        config.update(gemma4.to_fields(settings.gemma4))
    if family.is_qwen3_5:
        config.update(qwen3_5.to_fields(settings.linear))
    return config


# Configs that have this field only where it is not the quotient.
_NO_HEAD_DIM = (
    "qwen2", "qwen2_moe", "granite", "phi3", "smollm3", "olmo2", "olmo3",
)  # fmt: skip


def _bias_fields(settings, family):
    rest = set(settings.biases) ^ set(family.fixed_biases)
    fields = {}
    for field, modules in family.biases.items():
        fields[field] = set(modules) <= rest
        if fields[field]:
            rest -= set(modules)
    if rest:
        raise _not_expressible(
            family, "these biases", f"biases={settings.biases}"
        )
    return fields


def _expert_fields(settings, family):
    if family.experts is None:
        return {}
    switch, fields = family.experts.switch, family.experts.fields
    if settings.experts is None:
        return {switch: False}
    found = {switch: True} if switch else {}
    found |= {
        fields[name][0]: value
        for name, value in settings.experts.items()
        if name in fields
    }
    if family.experts.dense:
        dense = list(settings.experts["dense_layers"])
        found.update(mlp_only_layers=dense, decoder_sparse_step=1)
    return found


def _not_expressible(family, what, received):
    return ValueError(
        f"A Hugging Face config of model_type={family.model_type!r} cannot "
        f"express {what}, so the model cannot be exported. "
        f"Received: {received}"
    )


def _scale_and_caps(settings, family):
    later_gemma = family.model_type in ("gemma2", "gemma3_text")
    cap = settings.attention_soft_cap
    if cap is not None and family.model_type != "gemma2":
        received = f"attention_logit_soft_cap={cap}"
        raise _not_expressible(family, "a cap of attention scores", received)
    scalar, final = settings.query_scalar, settings.final_soft_cap
    if family.is_gemma4:
        final = None if final is None else float(final)
        return {"final_logit_softcapping": final}
    if later_gemma:
        # transformers requires an int and floats.
        return {
            "query_pre_attn_scalar": int(scalar)
            if scalar % 1 == 0
            else scalar,
            "attn_logit_softcapping": None if cap is None else float(cap),
            "final_logit_softcapping": None if final is None else float(final),
        }
    if scalar != settings.sizes["head_dim"]:
        raise _not_expressible(
            family, "this scale of queries", f"query_scalar={scalar}"
        )
    if final is not None:
        received = f"final_logit_soft_cap={final}"
        raise _not_expressible(family, "a cap of logits", received)
    return {}


def _window_fields(windows, family):
    sizes = {w for w in windows if w is not None}
    if len(sizes) > 1:
        raise _not_expressible(
            family, "windows of several sizes", f"{windows}"
        )
    size = sizes.pop() if sizes else None
    if family.windows == "none":
        if size is not None:
            raise _not_expressible(family, "attention windows", f"{windows}")
        return {}
    if family.windows == "mistral":
        if size is None or None not in windows:
            return {"sliding_window": size}
    kinds = [FULL if w is None else SLIDING for w in windows]
    fields = {"layer_types": kinds}
    if family.windows == "gemma":
        # Only used by layers with a window, but readers require a number.
        fields["sliding_window"] = size or 4096
        return fields
    if family.windows == "mistral":
        return {**fields, "sliding_window": size}
    first = kinds.index(SLIDING) if size else len(windows)
    return {
        **fields,
        "sliding_window": size,
        "use_sliding_window": size is not None,
        "max_window_layers": first,
    }


def _rope_fields(settings, family):
    kinds = [FULL if w is None else SLIDING for w in settings.windows]
    if not family.rope_by_type:
        kinds = [FULL] * len(kinds)
    found, fields = {}, {}
    if family.no_rope:
        fields["no_rope_layers"] = [
            int(x["rope_type"] != "none") for x in settings.rope
        ]
    for kind, parameters in zip(kinds, settings.rope, strict=True):
        if parameters["rope_type"] == "none" and family.no_rope:
            continue
        if found.setdefault(kind, parameters) != parameters:
            raise _not_expressible(
                family,
                f"different rotary embeddings for layers of {kind!r}",
                f"rope={settings.rope}",
            )
    if family.is_gemma4 and not family.is_gemma3n:
        return {"rope_parameters": gemma4.rope_fields(found)}
    if FULL in found:
        fields["rope_theta"] = found[FULL]["rope_theta"]
        scaling = {k: v for k, v in found[FULL].items() if k != "rope_theta"}
        partial = scaling.get("partial_rotary_factor")
        if partial is not None:
            fields["partial_rotary_factor"] = partial
        if scaling["rope_type"] != "default":
            fields["rope_scaling"] = scaling
        if "short_factor" in scaling:
            original = scaling["original_max_position_embeddings"]
            fields["original_max_position_embeddings"] = original
    if not family.rope_by_type:
        return {**fields, "rope_parameters": found.get(FULL)}
    for kind, field in (
        (FULL, "rope_theta"),
        (SLIDING, "rope_local_base_freq"),
    ):
        theta = family.defaults[field]
        found.setdefault(kind, {"rope_type": "default", "rope_theta": theta})
    fields.setdefault("rope_theta", found[FULL]["rope_theta"])
    if family.is_gemma:
        fields["rope_local_base_freq"] = found[SLIDING]["rope_theta"]
    return {**fields, "rope_parameters": found}
