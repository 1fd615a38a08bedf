"""Presets: a model and its tokenizer, in and out."""

import pathlib
import tempfile

import keras_hub
import numpy as np

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

# What KerasHub's preset has no place for lies in this folder beside it: the
# model's config in Hugging Face's terms, and the tokenizer's own files.
OWN_FOLDER = "keras_posttrain"


def _own_folder(preset):
    folder = pathlib.Path(str(preset)) / OWN_FOLDER
    return folder if folder.is_dir() else None


def load_causal_lm(preset, *, dtype=None, load_weights=True):
    """`loading.load_causal_lm`, and what `save_to_preset` wrote."""
    own = _own_folder(preset)
    kwargs = {"dtype": dtype, "load_weights": load_weights}
    if own is not None and (own / CONFIG).exists():
        config = read_json(own / CONFIG)
        return loading.load_saved(own.parent, config, **kwargs)
    return loading.load_causal_lm(preset, **kwargs)


def load_tokenizer(preset):
    """The tokenizer of a preset.

    Args:
        preset: as in KerasHub's `from_preset`.

    Returns:
        `Tokenizer`: the directory's own `tokenizer.json` where there is one,
        else KerasHub's tokenizer in its form; `None` where a Hugging Face
        directory or a saved preset has no tokenizer.
    """
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


def save_to_preset(causal_lm, directory, adapter=None, tokenizer=None):
    """Writes a KerasHub preset that loads here with equal numbers.

    Tensors come from the devices, and kernels are merged, one at a time. Of
    several processes all must call it, and the first one writes.

    KerasHub loads the preset too; settings that its config has no field for
    (`causal_lm.kpt_repairs` lists them) are lost on it there, and kept here
    by a folder of our own.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        directory: str or path, new or empty.
        adapter: `Adapter` to merge, or `None`.
        tokenizer: `Tokenizer` or `None`.
    """
    directory = pathlib.Path(directory)
    device_transfer.on_first(lambda: _check_new(directory))
    values = adapter.merged_values() if adapter else lambda v: v.value
    order = _order_of_saving(causal_lm)
    arrays = (device_transfer.to_host(values(variable)) for variable in order)

    def write():
        with device_transfer.Values(lambda variable: next(arrays)):
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
            write_json(own / CONFIG, config)

    device_transfer.on_first(write, arrays)


def _check_new(directory):
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(
            "A preset is written to a new or empty directory. "
            f"Received: {str(directory)!r}, which has files"
        )


def _order_of_saving(causal_lm):
    """The variables in the order in which KerasHub asks for their values."""
    order = []

    def value(variable):
        order.append(variable)
        return np.zeros((), variable.dtype)

    with (
        tempfile.TemporaryDirectory() as unused,
        device_transfer.Values(value),
    ):
        causal_lm.save_to_preset(unused)
    return order


def _keep_tied(backbone, directory):
    """Writes what `LlamaBackbone.get_config` of KerasHub 0.32 leaves out."""
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
