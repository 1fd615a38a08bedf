"""Builds KerasHub models that compute what their checkpoint says."""

import contextlib
import dataclasses
import functools

import keras_hub

from keras_posttrain._variables import without_values
from keras_posttrain.models import device_transfer
from keras_posttrain.models.hf import directories, layer_patches
from keras_posttrain.models.hf.checkpoint_files import (
    CONFIG,
    Reader,
    read_json,
)
from keras_posttrain.models.hf.config import from_config
from keras_posttrain.models.hf.families import FAMILIES, family_of
from keras_posttrain.models.hf.tensors import model_tensors

# What the names of a checkpoint begin with, before `embed_tokens.weight`:
# a language model, a bare one, and two vintages of a multimodal one.
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def load_causal_lm(preset, *, dtype=None, load_weights=True):
    """Loads a causal language model, with the numbers of its source.

    A Hugging Face directory of a family in `FAMILIES` is read here, not by
    KerasHub's converters, which lose some of its fields. `kpt_repairs` of the
    model lists what had to be set on KerasHub's built layers; `kpt_source`
    has the `path` and `config` it came from, or is `None`.

    Args:
        preset: str or path, see `huggingface.resolve`.
        dtype: str or `keras.DTypePolicy`. Defaults to Keras's default.
        load_weights: bool; `False` leaves the weights random.

    Returns:
        A `keras_hub.models.CausalLM` without a preprocessor.

    Raises:
        ValueError: if the preset is not found, or is a model that KerasHub's
            layers cannot represent.

    Example:

    ```python
    causal_lm = load_causal_lm("path/of/Llama-3.2-1B", dtype="bfloat16")
    causal_lm.kpt_repairs
    # ['rms_norm_eps set to 1e-05 in 33 norms', ...]
    ```
    """
    path = directories.resolve(preset)
    config = None
    if path is not None:
        config = read_json(path / CONFIG)
        config, notes = _text_config(config)
    if config is None or config["model_type"] not in FAMILIES:
        with device_transfer.whole_on_host():
            causal_lm = keras_hub.models.CausalLM.from_preset(
                str(preset if path is None else path),
                dtype=dtype,
                load_weights=load_weights,
                preprocessor=None,
            )
        repair(causal_lm)
        return causal_lm
    family = FAMILIES[config["model_type"]]
    settings, more = from_config(config, family)
    notes += more
    checkpoint = None
    if load_weights:
        checkpoint = Reader(path)
        settings, more = _tied_as_stored(settings, config, checkpoint)
        notes += more
    causal_lm, more = _build(family, settings, dtype, load_weights)
    notes += more
    if load_weights:
        notes += _load_weights(causal_lm, checkpoint)
        causal_lm.compile()
    _remember(causal_lm, {"path": str(path), "config": config}, notes)
    return causal_lm


def _build(family, settings, dtype, load_weights):
    """The model, and a list of what was to be set on its layers.

    Where weights are to be loaded, none are drawn before: that takes longer
    than to read them, and several times their memory. What KerasHub compiles,
    which has variables of its own, is left for then.
    """
    with without_values() if load_weights else contextlib.nullcontext():
        backbone = family.backbone_class(
            **_arguments(settings, family), dtype=dtype
        )
        causal_lm = family.causal_lm_class(
            backbone=backbone, preprocessor=None, compile=not load_weights
        )
        notes = layer_patches.apply_settings(causal_lm, family, settings)
    return causal_lm, notes


def load_saved(path, config, *, dtype=None, load_weights=True):
    """Loads a KerasHub preset by the Hugging Face config saved beside it.

    Args:
        path: path of a directory that `presets.save_to_preset` wrote.
        config: dict, the config kept there.
        dtype, load_weights: as in `load_causal_lm`.

    Returns:
        A `keras_hub.models.CausalLM`.
    """
    family = FAMILIES[config["model_type"]]
    settings, notes = from_config(config, family)
    causal_lm, more = _build(family, settings, dtype, load_weights)
    notes += more
    if load_weights:
        files = sorted(path.glob("model.weights*"))
        # A large model's weights are in several files, with a JSON index.
        index = [f for f in files if f.name == "model.weights.json"]
        with device_transfer.whole_on_host():
            causal_lm.backbone.load_weights(str((index or files)[0]))
        causal_lm.compile()
    _remember(causal_lm, {"path": str(path), "config": config}, notes)
    return causal_lm


def _remember(causal_lm, source, notes):
    # Past Keras's `__setattr__`, which would wrap and track the containers.
    vars(causal_lm).update(kpt_source=source, kpt_repairs=notes)


def _text_config(config):
    """The language model's part of a multimodal Gemma 3 config."""
    if config["model_type"] != "gemma3" or "text_config" not in config:
        return config, []
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
    text = {key: config[key] for key in shared if key in config}
    text.update(config["text_config"], model_type="gemma3_text")
    text.setdefault(
        "tie_word_embeddings", config.get("tie_word_embeddings", True)
    )
    return text, ["vision tower left out: a text model was made of gemma3"]


def _arguments(settings, family):
    """What the backbone's constructor can be told."""
    sizes = settings.sizes
    arguments = {
        "vocabulary_size": sizes["vocab_size"],
        "num_layers": sizes["num_hidden_layers"],
        "num_query_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_key_value_heads"],
        "hidden_dim": sizes["hidden_size"],
        "intermediate_dim": sizes["intermediate_size"],
        "layer_norm_epsilon": settings.epsilon,
    }
    if family.has_head_dim:
        arguments["head_dim"] = sizes["head_dim"]
    window = next((w for w in settings.windows if w is not None), None)
    if family.is_gemma:
        return {**arguments, **_gemma_arguments(settings, family, window)}
    rope = settings.rope[0]
    arguments["rope_max_wavelength"] = rope["rope_theta"]
    if rope["rope_type"] == "llama3" and family.model_type == "llama":
        arguments["rope_frequency_adjustment_factor"] = rope["factor"]
        arguments["rope_low_freq_factor"] = rope["low_freq_factor"]
        arguments["rope_high_freq_factor"] = rope["high_freq_factor"]
        arguments["rope_pretraining_sequence_length"] = rope[
            "original_max_position_embeddings"
        ]
    if rope["rope_type"] == "linear" and family.model_type != "llama":
        arguments["rope_scaling_factor"] = rope["factor"]
    if family.windows == "mistral":
        arguments["sliding_window"] = window
    else:
        arguments["tie_word_embeddings"] = settings.tied
    if family.windows == "qwen" and window is not None:
        arguments["use_sliding_window_attention"] = True
        arguments["sliding_window_size"] = window
    if family.windows == "qwen3":
        arguments["sliding_window_size"] = window
    return arguments


def _gemma_arguments(settings, family, window):
    if family.model_type == "gemma":
        return {"intermediate_dim": 2 * settings.sizes["intermediate_size"]}
    arguments = {
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": settings.attention_soft_cap,
        "final_logit_soft_cap": settings.final_soft_cap,
        "use_sliding_window_attention": window is not None,
        "sliding_window_size": window or 4096,
    }
    if family.model_type == "gemma2":
        # KerasHub's count takes the gate's half in.
        width = settings.sizes["intermediate_size"]
        return {**arguments, "intermediate_dim": 2 * width}
    return {**arguments, "image_size": None}


def _prefix(checkpoint):
    for prefix in PREFIXES:
        if {prefix + EMBEDDING, prefix + "norm.weight"} & checkpoint.names:
            return prefix
    raise ValueError(
        f"A checkpoint must have a tensor '{PREFIXES[0]}{EMBEDDING}'. "
        f"Received: {str(checkpoint.directory)!r} with "
        f"{sorted(checkpoint.names)[:8]} ..."
    )


def _head(checkpoint):
    """The name of the head's tensor, or `None`."""
    for name in (HEAD, f"language_model.{HEAD}"):
        if name in checkpoint.names:
            return name
    return None


def _tied_as_stored(settings, config, checkpoint):
    """Whether the head is tied, by the config and by what was saved."""
    head = _head(checkpoint)
    embedding = _prefix(checkpoint) + EMBEDDING
    if settings.tied and head and embedding in checkpoint.names:
        if _equal(checkpoint, head, embedding):
            return settings, []
        # transformers does the same.
        note = "head not tied: the checkpoint has another one"
        return dataclasses.replace(settings, tied=False), [note]
    causal = any("CausalLM" in x for x in config.get("architectures") or [])
    if not settings.tied and not head and not causal:
        note = (
            "head tied: the checkpoint has none (it is not a language model)"
        )
        return dataclasses.replace(settings, tied=True), [note]
    return settings, []


def _equal(checkpoint, one, other, rows=4096):
    """Whether two tensors are equal, read some rows at a time."""
    if checkpoint.shapes[one] != checkpoint.shapes[other]:
        return False
    with checkpoint.open(one) as first, checkpoint.open(other) as second:
        count = checkpoint.shapes[one][0]
        starts = range(0, count, rows)
        parts = (slice(i, min(i + rows, count)) for i in starts)
        return all((first[part] == second[part]).all() for part in parts)


def _load_weights(causal_lm, checkpoint):
    """Gives every weight its value, each device's slice read for itself.

    All names, shapes and dtypes are checked before: nothing is half loaded.

    Returns:
        A list of str: a line if the checkpoint holds more than was used.
    """
    found = _named(causal_lm, checkpoint)
    for name, tensor in found.items():
        with checkpoint.open(name) as stored:
            read = functools.partial(tensor.read, stored)
            device_transfer.fill(tensor.variable, read)
    rest = checkpoint.names - set(found) - {_head(checkpoint)}
    rest = sorted(x for x in rest if not x.endswith("rotary_emb.inv_freq"))
    if not rest:
        return []
    shown = ", ".join(rest[:4]) + (" ..." if len(rest) > 4 else "")
    return [f"{len(rest)} tensors of the checkpoint not used: {shown}"]


def _named(causal_lm, checkpoint):
    """Every weight by its name in the checkpoint, which is what it needs."""
    prefix = _prefix(checkpoint)
    found = {}
    for tensor in model_tensors(causal_lm):
        name = prefix + tensor.name.removeprefix("model.")
        if tensor.name == HEAD:
            name = _head(checkpoint) or HEAD
        elif tensor.name == "model." + EMBEDDING:
            # A tied pair may be saved under either name.
            name = name if name in checkpoint.names else _head(checkpoint)
        if name not in checkpoint.names:
            raise ValueError(
                f"The checkpoint lacks a tensor that its config calls for. "
                f"Received: {str(checkpoint.directory)!r} without {name!r}"
            )
        if checkpoint.shapes[name] != tensor.shape:
            raise ValueError(
                "The checkpoint has a tensor of another shape than its "
                f"config calls for. Expected {name!r} of shape "
                f"{tensor.shape}. Received: shape {checkpoint.shapes[name]} "
                f"in {str(checkpoint.directory)!r}"
            )
        checkpoint.check_dtype(name)
        found[name] = tensor
    return found


def repair(causal_lm):
    """Sets on a KerasHub model what its backbone was told and lost.

    Some settings of KerasHub's backbones never reach their layers: the norm
    epsilon (Qwen 3's query and key norms; every block of Gemma), Gemma's
    query scale, and Qwen's sliding window on the plain path. A model that
    `load_causal_lm` or this function has seen is left as it is.

    Args:
        causal_lm: a built KerasHub `CausalLM`.

    Returns:
        A list of str, a line for each repair; kept as `kpt_repairs` too.

    Example:

    ```python
    causal_lm = keras_hub.models.CausalLM.from_preset("qwen3_0.6b_en")
    repair(causal_lm)  # ['rms_norm_eps set to 1e-06 in 56 norms']
    ```
    """
    done = getattr(causal_lm, "kpt_repairs", None)
    if done is not None:
        return list(done)
    notes = []
    family = family_of(causal_lm)
    backbone = causal_lm.backbone
    if family is not None:
        epsilon = backbone.layer_norm_epsilon
        notes += layer_patches.set_epsilon(causal_lm, family, epsilon)
        notes += _repair_layers(backbone, family)
    _remember(causal_lm, None, notes)
    return notes


def _repair_layers(backbone, family):
    found = {}
    for layer in backbone.transformer_layers:
        attention = getattr(layer, family.attention)
        if family.is_gemma and not backbone.query_head_dim_normalize:
            scalar = backbone.hidden_dim // backbone.num_query_heads
            if layer_patches.set_query_scalar(attention, scalar):
                found[f"query scale set to {scalar} ** -0.5"] = True
        if layer_patches.set_window(
            layer, family, layer_patches.window_of(layer, family)
        ):
            found["sliding window applied on the plain path"] = True
    return list(found)
