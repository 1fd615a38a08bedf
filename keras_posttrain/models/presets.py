"""Loads and saves presets: a model and its tokenizer."""

import os
import pathlib
import shutil
import tempfile

import keras_hub
import numpy as np

from keras_posttrain.data.chat import tokenizer_files
from keras_posttrain.data.chat.tokenizer import Tokenizer
from keras_posttrain.models import device_transfer
from keras_posttrain.models.hf import directories, loading
from keras_posttrain.models.hf.checkpoint_files import (
    CONFIG,
    read_json,
    write_json,
)
from keras_posttrain.models.hf.export import hf_config
from keras_posttrain.models.hf.families import family_of
from keras_posttrain.models.hf.vision_tower import outer_config
from keras_posttrain.models.quantized import check_not_quantized
from keras_posttrain.models.vision import tower_of

# This folder inside a preset holds what KerasHub's format has no place for:
# the model's Hugging Face config and the tokenizer's files.
OWN_FOLDER = "keras_posttrain"


def _own_folder(preset):
    folder = pathlib.Path(str(preset)) / OWN_FOLDER
    return folder if folder.is_dir() else None


def load_causal_lm(
    preset,
    *,
    dtype=None,
    load_weights=True,
    quantization=None,
    is_trained=False,
    vision=False,
):
    """Loads what `hf/loading.py` does, and what `save_to_preset` wrote."""
    preset = directories.on_this_machine(preset)
    own = _own_folder(preset)
    kwargs = {
        "dtype": dtype,
        "load_weights": load_weights,
        "quantization": quantization,
        "is_trained": is_trained,
        "vision": vision,
    }
    if own is not None and (own / CONFIG).exists():
        config = read_json(own / CONFIG)
        return loading.load_saved(own.parent, config, **kwargs)
    return loading.load_causal_lm(preset, **kwargs)


def load_companion(preset, dtype, **kwargs):
    """Loads a reference, teacher or value model in the policy's `dtype`.

    A preset that Keras has quantized keeps its own. `kwargs` are those of
    `load_causal_lm`.
    """
    preset = directories.on_this_machine(preset)
    if _own_folder(preset) is None and loading.keeps_dtype(preset):
        dtype = None
    return load_causal_lm(preset, dtype=dtype, **kwargs)


def load_tokenizer(preset):
    """Loads a preset's `Tokenizer` or converts KerasHub's; `None` without."""
    preset = directories.on_this_machine(preset)
    own = _own_folder(preset)
    directory = own or directories.resolve(preset)
    if directory is not None:
        files = ("tokenizer.json", "tokenizer.model")
        if not any((directory / f).exists() for f in files):
            return None
        return Tokenizer.from_directory(directory)
    return Tokenizer.from_keras_hub(
        keras_hub.models.Tokenizer.from_preset(str(preset))
    )


def as_tokenizer(value, name="tokenizer"):
    """Returns the `Tokenizer` for what a user passed as one, or `None`.

    Args:
        value: `None`, a `Tokenizer`, a tokenizer of `transformers` or of
            KerasHub, the path of a directory with tokenizer files, or a
            preset.
        name: str, the name of the argument.
    """
    if value is None or isinstance(value, Tokenizer):
        return value
    if isinstance(value, keras_hub.tokenizers.Tokenizer):
        return Tokenizer.from_keras_hub(value)
    is_object = not isinstance(value, type)
    if is_object and hasattr(value, "save_pretrained"):
        with tempfile.TemporaryDirectory() as folder:
            value.save_pretrained(folder)
            # The ids that end a completion are the model's.
            source = pathlib.Path(str(getattr(value, "name_or_path", "")))
            for file in ("generation_config.json", CONFIG):
                if (source / file).is_file():
                    shutil.copy(source / file, folder)
            backend, names, template, stops = tokenizer_files.read(folder)
        return Tokenizer(backend, names, template, stops)
    error = None
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        try:
            value = directories.on_this_machine(value)
            path = pathlib.Path(value).expanduser()
            # A model's directory has a config too.
            alone = path.is_dir() and not (path / CONFIG).is_file()
            load = Tokenizer.from_directory if alone else load_tokenizer
            found = load(path if alone else value)
            if found is not None:
                return found
        except ValueError as e:
            error = e
    raise ValueError(
        f"`{name}` must be a `kpt.Tokenizer`, a tokenizer of `transformers` "
        "or KerasHub, the path of a directory with `tokenizer.json` or "
        f"`tokenizer.model`, or a preset. Received: {name}={value!r}"
        + (f" ({error})" if error else "")
    ) from error


def save_to_preset(causal_lm, directory, adapter=None, tokenizer=None):
    """Writes a KerasHub preset that this library loads without loss.

    An adapter is merged. Tensors are fetched from the devices one at a time.
    With several processes all of them must call this; the first one writes.
    A directory that is not empty raises a `ValueError`.

    KerasHub can load the preset too, but its config has no field for some
    settings (`causal_lm.kpt_repairs` lists them). They are stored in a
    separate folder that only this library reads.
    """
    directory = pathlib.Path(directory)
    check_not_quantized(causal_lm, "`save_to_preset`")
    device_transfer.on_first(lambda: _check_new(directory))
    values = adapter.merged_values() if adapter else lambda v: v.value
    order = _order_of_saving(causal_lm)
    arrays = (device_transfer.to_host(values(variable)) for variable in order)

    def write():
        with device_transfer.ValueScope(lambda variable: next(arrays)):
            causal_lm.save_to_preset(str(directory))
        _keep_tied(causal_lm.backbone, directory)
        own = directory / OWN_FOLDER
        own.mkdir(exist_ok=True)
        if tokenizer is not None:
            tokenizer.save(own)
            stop = {"eos_token_id": list(tokenizer.stop_token_ids)}
            write_json(own / "generation_config.json", stop)
        if family_of(causal_lm) is not None:
            config = hf_config(causal_lm)
            if tower_of(causal_lm.backbone) is not None:
                config = outer_config(causal_lm, config, tokenizer)
            write_json(own / CONFIG, config)

    device_transfer.on_first(write, arrays)


def _check_new(directory):
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(
            "A preset is written to a new or empty directory. "
            f"Received: {str(directory)!r}, which has files"
        )


def _order_of_saving(causal_lm):
    """Returns the variables in the order in which KerasHub saves them."""
    order = []

    def value(variable):
        order.append(variable)
        return np.zeros((), variable.dtype)

    with (
        tempfile.TemporaryDirectory() as unused,
        device_transfer.ValueScope(value),
    ):
        causal_lm.save_to_preset(unused)
    return order


def _keep_tied(backbone, directory):
    """Adds `tie_word_embeddings`, which KerasHub 0.32 omits for a Llama."""
    if not isinstance(backbone, keras_hub.models.LlamaBackbone):
        return
    tied = backbone.token_embedding.tie_weights
    for name in ("config.json", "task.json"):
        config = read_json(directory / name)
        inner = config["config"]
        if name == "task.json":
            inner = inner["backbone"]["config"]
        inner.setdefault("tie_word_embeddings", tied)
        write_json(directory / name, config)
