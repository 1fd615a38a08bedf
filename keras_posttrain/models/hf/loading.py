"""Loads KerasHub models from Hugging Face checkpoints without loss."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import tempfile

import keras
import keras_hub
import numpy as np
from safetensors import SafetensorError

from keras_posttrain import _console
from keras_posttrain._variables import shapes_only, without_values
from keras_posttrain.models import (
    device_transfer,
    keras_quantized,
    quantized,
)
from keras_posttrain.models.hf import (
    directories,
    gemma4,
    layer_patches,
    quantized_files,
    qwen3_5,
    vision_tower,
)
from keras_posttrain.models.hf.checkpoint_files import (
    CONFIG,
    Reader,
    read_json,
    write_json,
)
from keras_posttrain.models.hf.config import from_config
from keras_posttrain.models.hf.converted import for_converter
from keras_posttrain.models.hf.families import (
    FAMILIES,
    MODEL_TYPE,
    family_of,
)
from keras_posttrain.models.hf.rope import parameters_of
from keras_posttrain.models.hf.tensors import linear_layers, model_tensors
from keras_posttrain.models.linear import MatrixAxes
from keras_posttrain.models.vision import tower_of

# Prefixes of tensor names, before `embed_tokens.weight`: of a language model,
# of one without a head, and of multimodal models, new and old.
PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
# Fields of a config that say how weights are stored.
_QUANTIZED = ("quantization_config", "compression_config")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def load_causal_lm(
    preset,
    *,
    dtype=None,
    load_weights=True,
    quantization=None,
    is_trained=False,
    vision=False,
):
    """Loads a causal language model that computes what its source does.

    A Hugging Face directory of a family in `FAMILIES` is read here and not by
    KerasHub's converters, which ignore some fields of the config. The model's
    attribute `kpt_repairs` lists the settings that had to be corrected on
    KerasHub's built layers. `kpt_source` is a dict with the `path` and
    `config` of the source, or `None`. There is no preprocessor.

    `preset` is that of `directories.resolve`. Without `load_weights`, weights
    are random. With a `Quantization` each linear layer's kernel is quantized
    as it is read. Those of a quantized checkpoint stay as they are stored if
    `quantization` is `None`; `"none"` makes floats of them. A `ValueError` is
    raised if KerasHub's layers cannot represent the model, or if its weights
    would be quantized and are to be trained (`is_trained`). With `vision` a
    Hugging Face directory of Gemma 3 or 4 is loaded with its vision tower; a
    KerasHub preset always has the tower that it was saved with.
    """
    path = directories.resolve(preset)
    config = outer = None
    if path is not None:
        config = read_json(path / CONFIG)
        config, outer, notes = _text_config(config, vision)
    if isinstance(quantization, quantized.Quantization):
        quantized.check_trained(is_trained, f"quantize={quantization}")
    if config is None:
        causal_lm = _from_preset(preset, dtype, load_weights)
        if keras_quantized.take_over(causal_lm, quantization):
            quantized.check_trained(
                is_trained, "a preset that Keras quantized"
            )
        repair(causal_lm)
        _check_tower(causal_lm, vision, preset)
        return _quantized(causal_lm, quantization)
    if outer is None and vision:
        raise _no_tower(preset, config["model_type"])
    if config["model_type"] not in FAMILIES:
        causal_lm = _convert(path, config, dtype, load_weights)
        return _quantized(causal_lm, quantization)
    family = FAMILIES[config["model_type"]]
    stored = quantized_files.format_of(config)
    floats = {k: v for k, v in config.items() if k not in _QUANTIZED}
    settings, more = from_config(floats, family)
    notes += more
    checkpoint = None
    if load_weights:
        checkpoint = Reader(path)
        settings, more = _tied_as_stored(settings, config, checkpoint)
        notes += more
    if outer is not None:
        outer = vision_tower.with_processor(path, outer)
        notes += vision_tower.left_out(outer)
    causal_lm, more = _build(family, settings, dtype, load_weights, outer)
    notes += more
    with _without_values(load_weights):
        if stored is not None and quantization is None:
            if _keep_codes(causal_lm, stored, checkpoint):
                quantized.check_trained(
                    is_trained, f"a checkpoint of {stored.name}"
                )
        else:
            _quantized(causal_lm, quantization)
    if load_weights:
        notes += _load_weights(causal_lm, checkpoint, stored)
        causal_lm.compile()
    _remember(causal_lm, {"path": str(path), "config": config}, notes)
    return causal_lm


def _keep_codes(causal_lm, stored, checkpoint):
    """Makes layers for the codes of a checkpoint; returns whether it has any.

    Args:
        stored: `Format`.
        checkpoint: `Reader` or `None`.
    """
    prefix = "model." if checkpoint is None else _prefix(checkpoint)
    layers = linear_layers(causal_lm)
    kept = {}
    for name, layer in layers.items():
        module = prefix + name.removeprefix("model.")
        if stored.is_stored(checkpoint, module):
            axes = MatrixAxes(layer)
            shape = axes.in_size, axes.out_size
            found = stored.storage(checkpoint, module, shape)
            if found is not None:
                kept[name] = found
    if kept:
        quantized.quantize_layers(
            causal_lm, stored.name, lambda rows, name: kept.get(name)
        )
    return bool(kept)


def _quantized(causal_lm, quantization):
    """Quantizes the weights that a model has."""
    if isinstance(quantization, quantized.Quantization):
        quantized.quantize_layers(causal_lm, quantization)
    return causal_lm


def _from_preset(preset, dtype, load_weights):
    try:
        return _from_keras_hub(preset, dtype, load_weights)
    except ValueError as error:
        if dtype is None or "could not be loaded" not in str(error):
            raise
        raise ValueError(
            "KerasHub cannot read the weights of this preset in another "
            "dtype. One that Keras has quantized keeps its own: leave `dtype` "
            f"out. Received: preset={str(preset)!r}, dtype={dtype!r}"
        ) from error


def keeps_dtype(preset):
    """Returns whether a preset is loaded in no other dtype than its own.

    Keras has quantized such a preset. It is built without values.
    """
    if directories.resolve(preset) is not None:
        return False
    with shapes_only():
        causal_lm = _from_keras_hub(preset, None, load_weights=False)
    return keras_quantized.is_quantized(causal_lm)


def _from_keras_hub(preset, dtype, load_weights):
    with (
        device_transfer.host_as_default(),
        _without_drafts(),
        _names_damaged(preset),
    ):
        return keras_hub.models.CausalLM.from_preset(
            str(preset),
            dtype=dtype,
            load_weights=load_weights,
            preprocessor=None,
        )


@contextlib.contextmanager
def _names_damaged(preset):
    """Makes errors about HDF5 files of weights name a preset's folder."""
    try:
        yield
    except OSError as error:
        folder = pathlib.Path(str(preset))
        # Others are that a file is missing or may not be read, or that a
        # download has failed.
        if type(error) is not OSError or not folder.is_dir():
            raise
        sizes = {f.name: f.stat().st_size for f in folder.glob("*.h5")}
        raise ValueError(
            "The weights of a preset must be complete HDF5 files. If copying "
            "or downloading them was cut short, or left pointers of Git LFS, "
            f"do it again. Received: {str(folder)!r} with files of {sizes} "
            f"bytes, {error}"
        ) from error


@contextlib.contextmanager
def _without_drafts():
    """Hides Gemma 4's draft model from KerasHub's choice of a class.

    It has the backbone of `Gemma4CausalLM`, and KerasHub 0.32 takes the first
    class of a backbone in a `set`, whose order differs between processes.
    """
    known = keras.saving.get_custom_objects()
    draft = getattr(keras_hub.models, "Gemma4AssistantCausalLM", None)
    hidden = [name for name, value in known.items() if value is draft]
    for name in hidden:
        del known[name]
    try:
        yield
    finally:
        known.update(dict.fromkeys(hidden, draft))


def _convert(path, config, dtype, load_weights):
    """Loads a model of a family without a table by KerasHub's converter.

    KerasHub is given links to the files, and the config as it reads it.
    """
    config = for_converter(config)
    checkpoint = Reader(path) if load_weights else None
    if load_weights:
        _check_head(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for file in path.iterdir():
            if file.name != CONFIG:
                (folder / file.name).symlink_to(file.resolve())
        write_json(folder / CONFIG, config)
        try:
            causal_lm = _from_keras_hub(folder, dtype, load_weights)
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"KerasHub cannot read this checkpoint of model_type="
                f"{config['model_type']!r}. Received: {str(path)!r}, "
                f"{type(error).__name__}: {error}"
            ) from error
    if load_weights:
        _check_all_read(causal_lm, checkpoint)
    repair(causal_lm)
    return causal_lm


def _check_all_read(causal_lm, checkpoint):
    """Raises if a checkpoint has more or fewer numbers than the model."""
    stored = sum(
        math.prod(shape)
        for name, shape in checkpoint.shapes.items()
        if not name.endswith(_NOT_WEIGHTS)
    )
    head = _head(checkpoint)
    if head and causal_lm.backbone.token_embedding.tie_weights:
        stored -= math.prod(checkpoint.shapes[head])
    built = sum(
        math.prod(variable.shape)
        for variable in causal_lm.backbone.variables
        if not variable.path.endswith(("inv_freq", "seed_generator_state"))
    )
    if stored != built:
        raise ValueError(
            f"KerasHub's {type(causal_lm.backbone).__name__} does not have "
            "the weights of this checkpoint, so that some were not read. "
            f"Expected {built} numbers. Received: {stored} in "
            f"{str(checkpoint.directory)!r}"
        )


# Buffers, which the model computes.
_NOT_WEIGHTS = ("inv_freq", ".attn.bias", ".attn.masked_bias")


def _without_values(load_weights):
    return without_values() if load_weights else contextlib.nullcontext()


def _check_tower(causal_lm, vision, preset):
    """Raises where `vision` is wanted of a model without a tower."""
    if vision and tower_of(causal_lm.backbone) is None:
        raise _no_tower(preset, type(causal_lm.backbone).__name__)


def _no_tower(preset, kind):
    return ValueError(
        "`vision=True` needs a preset with a vision tower that this library "
        "runs, a multimodal Gemma 3 or 4. Received: "
        f"preset={str(preset)!r}, which is {kind!r}. Leave `vision` out to "
        "train on text."
    )


def _build(family, settings, dtype, load_weights, outer=None):
    """Builds a model; returns it and notes on the settings corrected.

    `outer` is the config of a multimodal model whose tower is built too.

    If weights will be loaded, none are initialized before: this would take
    longer than reading them and several times their memory. The model is then
    compiled after loading, as KerasHub's `compile` creates variables.
    """
    family = _on_layers(family, settings)
    with _without_values(load_weights):
        layers = family.layers
        arguments = _arguments(settings, family)
        if outer is not None:
            arguments |= vision_tower.arguments(outer, dtype)
        backbone = layers.backbone_class(**arguments, dtype=dtype)
        causal_lm = layers.causal_lm_class(
            backbone=backbone, preprocessor=None, compile=not load_weights
        )
        vars(causal_lm)[MODEL_TYPE] = family.model_type
        vars(causal_lm)["kpt_outer_config"] = outer
        notes = layer_patches.apply_settings(causal_lm, family, settings)
    return causal_lm, notes


def _on_layers(family, settings):
    """Returns the family on layers that have heads of the wanted size."""
    sizes = settings.sizes
    even = sizes["num_attention_heads"] * sizes["head_dim"]
    return family if even == sizes["hidden_size"] else family.with_head_dim()


def load_saved(
    path,
    config,
    *,
    dtype=None,
    load_weights=True,
    quantization=None,
    is_trained=False,
    vision=False,
):
    """Loads what `presets.save_to_preset` wrote, with its `config`."""
    if isinstance(quantization, quantized.Quantization):
        quantized.check_trained(is_trained, f"quantize={quantization}")
    config, outer, _ = _text_config(config, vision=True)
    family = FAMILIES[config["model_type"]]
    settings, notes = from_config(config, family)
    causal_lm, more = _build(family, settings, dtype, load_weights, outer)
    notes += more
    if load_weights:
        files = sorted(path.glob("model.weights*"))
        # The weights of a large model are in several files with a JSON index.
        index = [f for f in files if f.name == "model.weights.json"]
        if not files:
            raise ValueError(
                "A preset must hold `model.weights.h5`, or several such files "
                f"and `model.weights.json`. Received: {str(path)!r}, with "
                f"{sorted(p.name for p in path.iterdir())}"
            )
        with device_transfer.host_as_default(), _names_damaged(path):
            causal_lm.backbone.load_weights(str((index or files)[0]))
        causal_lm.compile()
    _remember(causal_lm, {"path": str(path), "config": config}, notes)
    _check_tower(causal_lm, vision, path)
    return _quantized(causal_lm, quantization)


def _remember(causal_lm, source, notes):
    # Keras's `__setattr__` would wrap and track the containers.
    vars(causal_lm).update(kpt_source=source, kpt_repairs=notes)


# The text models of multimodal ones.
TEXT = {
    name: f"{name}_text"
    for name in ("gemma3", "gemma3n", "gemma4", "qwen3_5", "qwen3_5_moe")
}


def _text_config(config, vision):
    """Extracts the language model from a multimodal config.

    Returns:
        `(config, outer, notes)`: the config of the text model; the given one
        where its vision tower is to be loaded (`vision`), else `None`; and
        notes.
    """
    model_type = config["model_type"]
    if model_type not in TEXT or "text_config" not in config:
        return config, None, []
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
    text = {key: config[key] for key in shared if key in config}
    text.update(config["text_config"], model_type=TEXT[model_type])
    tie = "tie_word_embeddings"
    default = FAMILIES[TEXT[model_type]].defaults[tie]
    text.setdefault(tie, config.get(tie, default))
    if config.get(tie, text[tie]) != text[tie] and not default:
        raise ValueError(
            f"`{tie}` of model_type={model_type!r} must be that of its "
            f"`text_config`, {text[tie]}; set both to what the checkpoint "
            f"has. Received: {tie}={config[tie]!r}"
        )
    has_tower = config.get("vision_config") is not None
    if vision and vision_tower.is_known(model_type) and has_tower:
        return text, config, []
    note = f"vision tower left out: {model_type} loaded as a text model"
    return text, None, [note]


def _arguments(settings, family):
    """Returns the arguments of the backbone's constructor."""
    sizes = settings.sizes
    arguments = {
        "vocabulary_size": sizes["vocab_size"],
        "num_layers": sizes["num_hidden_layers"],
        "num_query_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_key_value_heads"],
        "hidden_dim": sizes["hidden_size"],
        "layer_norm_epsilon": settings.epsilon,
    }
    layers = family.layers
    if family.has_width:
        arguments["intermediate_dim"] = sizes["intermediate_size"]
    if layers.has_head_dim:
        arguments["head_dim"] = sizes["head_dim"]
    if family.is_qwen3_5:
        return {**arguments, **qwen3_5.arguments(settings)}
    window = next((w for w in settings.windows if w is not None), None)
    if family.is_gemma:
        return {**arguments, **_gemma_arguments(settings, family, window)}
    rope = settings.rope[0]
    arguments["rope_max_wavelength"] = rope["rope_theta"]
    if layers.keras_name == "Llama3":
        if rope["rope_type"] == "llama3":
            arguments["rope_frequency_adjustment_factor"] = rope["factor"]
            arguments["rope_low_freq_factor"] = rope["low_freq_factor"]
            arguments["rope_high_freq_factor"] = rope["high_freq_factor"]
            arguments["rope_pretraining_sequence_length"] = rope[
                "original_max_position_embeddings"
            ]
    elif rope["rope_type"] == "linear":
        arguments["rope_scaling_factor"] = rope["factor"]
    if layers.windows == "gpt_oss":
        # Without a window no layer has this one.
        arguments["sliding_window"] = window or 128
        arguments["rope_scaling_factor"] = rope.get("factor", 1.0)
    if layers.windows == "mistral":
        arguments["sliding_window"] = window
    if layers.has_tied:
        arguments["tie_word_embeddings"] = settings.tied
    if layers.windows == "qwen" and window is not None:
        arguments["use_sliding_window_attention"] = True
        arguments["sliding_window_size"] = window
    if layers.windows == "qwen3":
        arguments["sliding_window_size"] = window
    return {**arguments, **_mixture_arguments(settings.experts)}


def _mixture_arguments(experts):
    if experts is None:
        return {}
    found = {"num_experts": experts["count"], "top_k": experts["top_k"]}
    if "is_normalized" in experts:
        found["norm_top_k_prob"] = bool(experts["is_normalized"])
        found["moe_intermediate_dim"] = experts["width"]
        found["mlp_only_layers"] = list(experts["dense_layers"])
    if "shared_width" in experts:
        found["shared_expert_intermediate_dim"] = experts["shared_width"]
    return found


def _gemma_arguments(settings, family, window):
    if family.model_type == "gemma":
        return {"intermediate_dim": 2 * settings.sizes["intermediate_size"]}
    if family.is_gemma4:
        return {
            **gemma4.arguments(
                settings.gemma4, settings.windows, settings.experts
            ),
            **gemma4.rope_arguments(settings.rope, settings.windows),
            "final_logit_soft_cap": settings.final_soft_cap,
            "use_sliding_window_attention": window is not None,
            "sliding_window_size": window or 512,
        }
    arguments = {
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": settings.attention_soft_cap,
        "final_logit_soft_cap": settings.final_soft_cap,
        "use_sliding_window_attention": window is not None,
        "sliding_window_size": window or 4096,
    }
    if family.model_type == "gemma2":
        # KerasHub counts the features of the gate too.
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
    """Returns the name of the head's tensor, or `None`."""
    for name in (HEAD, f"language_model.{HEAD}"):
        if name in checkpoint.names:
            return name
    return None


def _tied_as_stored(settings, config, checkpoint):
    """Returns settings tied as the checkpoint is, and notes."""
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


def _check_head(checkpoint):
    """Raises if a converter would not read the head of a checkpoint."""
    head = _head(checkpoint)
    if head:
        ends = (EMBEDDING, "wte.weight")
        embeddings = [n for n in checkpoint.names if n.endswith(ends)]
        if not any(_equal(checkpoint, head, name) for name in embeddings):
            raise ValueError(
                "The config ties the head to the embedding, and the "
                "checkpoint has another head, which KerasHub's converter "
                f"does not read. Received: {str(checkpoint.directory)!r} "
                f"with {head!r}"
            )


def _equal(checkpoint, one, other, rows=4096):
    """Returns whether two tensors are equal, reading them in chunks."""
    if checkpoint.shapes[one] != checkpoint.shapes[other]:
        return False
    first, second = checkpoint.view(one), checkpoint.view(other)
    parts = (slice(i, i + rows) for i in range(0, len(first), rows))
    return all((first[part] == second[part]).all() for part in parts)


def _load_weights(causal_lm, checkpoint, stored=None):
    """Loads every weight, reading the slice of each device separately.

    Names, shapes and dtypes are checked first, so that an error leaves no
    partly loaded model; those of the `Format` that `stored` is are checked as
    they are read. Returns notes on tensors that were not used.
    """
    found, modules = _named(causal_lm, checkpoint, stored)
    _fill(_readers(found, checkpoint.view))
    used = {name for module in modules for name in stored.names(module)}
    if modules:
        _load_quantized(checkpoint, stored, modules)
        _check_no_biases(checkpoint, modules, found)
    rest = checkpoint.names - set(found) - used - {_head(checkpoint)}
    rest = sorted(x for x in rest if not x.endswith("rotary_emb.inv_freq"))
    if not rest:
        return []
    shown = ", ".join(rest[:4]) + (" ..." if len(rest) > 4 else "")
    return [f"{len(rest)} tensors of the checkpoint not used: {shown}"]


def _readers(tensors, view):
    """Yields each variable, and a function that reads a part of it.

    Args:
        tensors: dict of `Tensor`s by name.
        view: function from a name to the tensor's array.
    """
    pieces = {}
    for name, tensor in tensors.items():
        for part, start in zip(tensor.parts, tensor.starts):
            piece = name, part, start, tensor.axis
            pieces.setdefault(id(part.variable), []).append(piece)
    for own in pieces.values():
        [(_, part, _, _), *_] = own
        yield (
            part.variable,
            functools.partial(_read, own, view, part.variable.shape),
        )


def _read(pieces, view, shape, index):
    """Reads a part of a variable that several tensors may have."""
    wanted = [x.indices(n)[:2] for x, n in zip(index, shape)]
    found = None
    for name, part, start, axis in pieces:
        both = [
            (max(a, c), min(b, d))
            for (a, b), (c, d) in zip(wanted, part.bounds)
        ]
        if any(a >= b for a, b in both):
            continue
        first = [a for a, _ in part.bounds]
        inner = [slice(a - i, b - i) for (a, b), i in zip(both, first)]
        array = part.read(view(name), tuple(inner), start, axis)
        if both == wanted:
            return array
        if found is None:
            found = np.empty([b - a for a, b in wanted], array.dtype)
        outer = [slice(a - w, b - w) for (a, b), (w, _) in zip(both, wanted)]
        found[tuple(outer)] = array
    return found


def _fill(readers):
    """Fills variables, and then quantized kernels, by what reads them.

    The largest tensors are those of the vocabulary, which are not quantized:
    they are read while the others have no memory yet.
    """
    kernels, plain = [], []
    for variable, read in readers:
        is_kernel = isinstance(variable, quantized.QuantizedKernel)
        (kernels if is_kernel else plain).append((variable, read))
    device_transfer.fill_all(plain)
    for kernel, read in kernels:
        kernel.fill(read)


def _load_quantized(checkpoint, stored, modules):
    """Loads quantized layers, and says which of them became floats.

    Args:
        stored: `Format`.
        modules: dict of `Tensor`s by the layers' names in the checkpoint.
    """
    floats, reasons = {}, {}
    for module, tensor in modules.items():
        kernel, shape = tensor.variable, tensor.shape[::-1]
        kept = isinstance(kernel, quantized.QuantizedKernel)
        own = stored.storage(checkpoint, module, shape)
        if kept and own == kernel.storage:
            found = stored.matrix(checkpoint, module, shape)
            kernel.fill_codes(found.codes, found.scales, found.zeros)
            continue
        floats[module] = tensor
        why = "as was asked for"
        if kept:
            why = f"rounded again to {kernel.storage.kind}"
        elif kernel is None:
            why = "codes are kept of whole linear layers, not of experts"
        elif own is None:
            why = stored.why_floats(module)
        reasons.setdefault(why, []).append(module)

    @functools.lru_cache(1)
    def values(module):
        shape = modules[module].shape[::-1]
        return stored.floats(checkpoint, module, shape).T

    for reader in _readers(floats, values):
        # One at a time, as those of one tensor follow each other.
        _fill([reader])
    for why, names in reasons.items():
        kind = "floats" if "again" not in why else "other codes"
        _console.say(
            f"{stored.name}: {len(names)} layers were read as {kind} ({why}), "
            f"{names[0]} first"
        )


def _check_no_biases(checkpoint, modules, found):
    """Raises where a layer has a bias that the model has no place for."""
    for module in modules:
        name = f"{module}.bias"
        if name in checkpoint.names and name not in found:
            # Some tools write zeros.
            if np.any(checkpoint.read(name)):
                raise ValueError(
                    "The checkpoint has a bias that its model does not have. "
                    f"Received: {name!r} in {str(checkpoint.directory)!r}"
                )


def _named(causal_lm, checkpoint, stored=None):
    """Maps names in the checkpoint to the model's tensors; checks them.

    Returns:
        Two dicts of `Tensor`s: those of floats by their names, and those of
        quantized layers by the names of the layers.
    """
    prefix = _prefix(checkpoint)
    found, modules = {}, {}
    tensors = model_tensors(causal_lm, _as_models(checkpoint, prefix))
    towers = vision_tower.tower_tensors(causal_lm)
    of_towers = {tensor.name for tensor in towers}
    for tensor in [*tensors, *towers]:
        name = prefix + tensor.name.removeprefix("model.")
        if tensor.name in of_towers:
            stored_names = checkpoint.names
            name = vision_tower.stored_name(
                causal_lm, tensor.name, stored_names
            )
        elif tensor.name == HEAD:
            name = _head(checkpoint) or HEAD
        elif tensor.name == "model." + EMBEDDING:
            # A tied pair may be saved under either name.
            name = name if name in checkpoint.names else _head(checkpoint)
        module = name.removesuffix(".weight")
        if stored is not None and tensor.is_linear:
            if stored.is_stored(checkpoint, module):
                modules[module] = tensor
                continue
        if name not in checkpoint.names:
            raise ValueError(
                f"The checkpoint lacks a tensor that its config requires. "
                f"Received: {str(checkpoint.directory)!r} without {name!r}"
            )
        if checkpoint.shapes[name] != tensor.shape:
            raise ValueError(
                "The checkpoint has a tensor of another shape than its "
                f"config requires. Expected {name!r} of shape "
                f"{tensor.shape}. Received: shape {checkpoint.shapes[name]} "
                f"in {str(checkpoint.directory)!r}"
            )
        checkpoint.check_dtype(name)
        found[name] = tensor
    return found, modules


def _as_models(checkpoint, prefix):
    """Returns the names in a checkpoint with the prefix of a model's."""
    return {"model." + name.removeprefix(prefix) for name in checkpoint.names}


def repair(causal_lm):
    """Applies settings of a KerasHub backbone that its layers ignore.

    Some settings of KerasHub's backbones are not passed on to their layers:
    the norm epsilon (in Qwen 3's query and key norms and in all blocks of
    Gemma), Gemma's query scale, and Qwen's sliding window without KerasHub's
    vLLM hook. The windows of gpt-oss are in the wrong layers. A model from
    `load_causal_lm`, or one that was repaired before, is not changed. Returns
    a line for each repair; also in `kpt_repairs`.

    Layers that Keras has quantized are replaced; see `keras_quantized.py`.
    """
    keras_quantized.take_over(causal_lm)
    done = getattr(causal_lm, "kpt_repairs", None)
    if done is not None:
        return list(done)
    notes = []
    family = family_of(causal_lm)
    backbone = causal_lm.backbone
    if family is not None:
        layer_patches.set_paths(backbone, family)
        epsilon = backbone.layer_norm_epsilon
        notes += layer_patches.set_epsilon(causal_lm, family, epsilon)
        notes += _repair_layers(backbone, family)
    notes += vision_tower.repair_tower(causal_lm)
    _remember(causal_lm, None, notes)
    return notes


def _repair_layers(backbone, family):
    found = {}
    windows = layer_patches.windows_of(backbone, family)
    for layer, window in zip(backbone.transformer_layers, windows):
        was_right = layer_patches.window_of(layer, family) == window
        attention = layer_patches.attention_of(layer, family)
        if attention is None:
            continue
        scaled = family.is_gemma and not family.is_gemma4
        if scaled and not backbone.query_head_dim_normalize:
            scalar = backbone.hidden_dim // backbone.num_query_heads
            if layer_patches.set_query_scalar(attention, scalar):
                found[f"query scale set to {scalar} ** -0.5"] = True
        if layer_patches.set_window(layer, family, window):
            note = f"sliding_window set to {tuple(windows)}"
            if was_right:
                note = "sliding window applied in the attention mask"
            found[note] = True
        rotary = getattr(attention, family.layers.rotary)
        if getattr(rotary, "rope_type", None) == "yarn":
            parameters = parameters_of(rotary)
            layer_patches.set_rope(attention, family, parameters)
            found["factor of the rotation computed in float32"] = True
    return list(found)
