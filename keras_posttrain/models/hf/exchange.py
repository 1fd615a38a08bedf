"""Hugging Face's names, shapes and files for KerasHub's models, both ways."""

import copy
import dataclasses
import difflib
import math
import os
import pathlib

import keras
import keras_hub
import numpy as np

from keras_posttrain.models import device_transfer
from keras_posttrain.models.hf import checkpoint_files, layer_patches
from keras_posttrain.models.hf import config as settings
from keras_posttrain.models.hf.checkpoint_files import (
    read_json,
    replaced_directory,
    write_json,
)
from keras_posttrain.models.hf.families import FAMILIES, attribute, family_of

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# Says in `config.json` that a directory may be written over.
MARK = "exported_by"
# Not every safetensors file: some repositories hold the weights twice.
PATTERNS = [
    "*.json",
    "*.jinja",
    "model*.safetensors",
    "*.txt",
    "tokenizer.model",
]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A weight under its Hugging Face name.

    Args:
        name: str, the tensor's name in a Hugging Face checkpoint.
        variable: `keras.Variable`, where KerasHub keeps it.
        axes: tuple of tuples of ints: for each axis in Hugging Face's order,
            the axes of the variable that it is made of, the slowest first.
    """

    name: str
    variable: keras.Variable
    axes: tuple

    @property
    def shape(self):
        """Tuple of ints, Hugging Face's."""
        sizes = self.variable.shape
        return tuple(math.prod(sizes[a] for a in axes) for axes in self.axes)

    @property
    def _order(self):
        return [axis for axes in self.axes for axis in axes]

    def to_hf(self, array):
        """An array of KerasHub's shape in that of Hugging Face."""
        return array.transpose(self._order).reshape(self.shape)

    def read(self, stored, index):
        """A part of the variable's value, and not much more, from a file.

        Args:
            stored: what gives parts of the file's tensor by tuples of slices.
            index: tuple of slices without steps, one for each axis of the
                variable.

        Returns:
            A numpy array.
        """
        shape = self.variable.shape
        index = [slice(*x.indices(n)[:2]) for x, n in zip(index, shape)]
        ranges, places = [], []
        for axes in self.axes:
            sizes = [shape[axis] for axis in axes]
            flat = np.arange(math.prod(sizes)).reshape(sizes)
            flat = flat[tuple(index[axis] for axis in axes)].reshape(-1)
            # Where an inner axis is split, what is wanted has gaps.
            ranges.append(slice(int(flat[0]), int(flat[-1]) + 1))
            places.append(flat - flat[0])
        array = stored[tuple(ranges)]
        for axis, wanted in enumerate(places):
            if len(wanted) < array.shape[axis]:
                array = array.take(wanted, axis)
        order = self._order
        array = array.reshape([index[a].stop - index[a].start for a in order])
        return array.transpose(np.argsort(order))


def resolve(preset):
    """The directory of a Hugging Face checkpoint, or `None` for KerasHub's.

    Args:
        preset: str or path: a directory, `hf://owner/name` (downloaded),
            `kaggle://...` or the name of a KerasHub preset.

    Returns:
        A `pathlib.Path` where `config.json` is Hugging Face's (it has a
        `model_type`); `None` where KerasHub's own `from_preset` applies.

    Raises:
        ValueError: if there is no such directory or preset.

    Example:

    ```python
    huggingface.resolve("path/of/Qwen3-0.6B")  # PosixPath('path/of/...')
    huggingface.resolve("qwen3_0.6b_en")  # None
    ```
    """
    preset = os.fspath(preset)
    if preset.startswith("hf://"):
        return _download(preset)
    if "://" in preset or preset in keras_hub.models.CausalLM.presets:
        return None
    path = pathlib.Path(preset).expanduser()
    if not path.is_dir():
        names = keras_hub.models.CausalLM.presets
        close = difflib.get_close_matches(preset, names, n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?"
        raise ValueError(
            "A preset must be the path of an existing directory (Hugging "
            "Face's or KerasHub's), 'hf://owner/name', 'kaggle://...' or a "
            "name out of `keras_hub.models.CausalLM.presets`. "
            f"Received: preset={preset!r}.{hint if close else ''}"
        )
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"The directory of a model must hold `{CONFIG}`. Received: "
            f"preset={preset!r}, with {sorted(p.name for p in path.iterdir())}"
        )
    return path if "model_type" in read_json(path / CONFIG) else None


def _download(preset):
    from huggingface_hub import hf_hub_download, snapshot_download

    repository = preset.removeprefix("hf://").strip("/")
    if repository.count("/") != 1:
        raise ValueError(
            "A preset on the Hugging Face Hub must be 'hf://owner/name'. "
            f"Received: preset={preset!r}"
        )
    # The config first: it tells whether the rest is KerasHub's to fetch.
    config = pathlib.Path(hf_hub_download(repository, CONFIG))
    if "model_type" not in read_json(config):
        return None
    return pathlib.Path(snapshot_download(repository, allow_patterns=PATTERNS))


def tensors(causal_lm):
    """Every weight of a model with its Hugging Face name and shape.

    A tied head has no entry of its own.

    Args:
        causal_lm: a built KerasHub `CausalLM` of a family in `FAMILIES`.

    Returns:
        A list of `Tensor`.

    Raises:
        ValueError: if the family has no table, or weights are quantized.
    """
    family = _known_family(causal_lm)
    backbone = causal_lm.backbone
    embedding = backbone.token_embedding
    _refuse_quantized(causal_lm)
    found = [_same("model.embed_tokens.weight", embedding.embeddings)]
    for i, layer in enumerate(backbone.transformer_layers):
        for name, path in family.modules.items():
            module = attribute(layer, path)
            name = f"model.layers.{i}.{name}"
            if name.endswith("norm"):
                found.append(_same(f"{name}.weight", module.scale))
                continue
            found.append(_kernel(name, module.kernel, family))
            if module.bias is not None:
                found.append(_bias(f"{name}.bias", module.bias))
    found.append(_same("model.norm.weight", backbone.layer_norm.scale))
    if not embedding.tie_weights:
        head = embedding.reverse_embeddings
        found.append(Tensor("lm_head.weight", head, ((1,), (0,))))
    return found


def linear_layers(causal_lm):
    """The linear layers of the decoder under their Hugging Face names.

    Args:
        causal_lm: a built KerasHub `CausalLM` of a family in `FAMILIES`.

    Returns:
        A dict from names such as `"model.layers.0.self_attn.q_proj"` to the
        KerasHub `Dense` or `EinsumDense` layers.

    Raises:
        ValueError: if the family has no table.
    """
    family = _known_family(causal_lm)
    return {
        f"model.layers.{i}.{name}": attribute(layer, path)
        for i, layer in enumerate(causal_lm.backbone.transformer_layers)
        for name, path in family.modules.items()
        if name.endswith("_proj")
    }


def _known_family(causal_lm):
    family = family_of(causal_lm)
    if family is None:
        raise ValueError(
            "The Hugging Face names of this model's weights are not known "
            "(LoRA, PEFT files, export and weight sync go by them). Known "
            f"are text models of {sorted(FAMILIES)}. Received: backbone of "
            f"class {type(causal_lm.backbone).__name__}"
        )
    return family


def _refuse_quantized(causal_lm):
    for layer in causal_lm.backbone._flatten_layers():
        mode = getattr(layer, "quantization_mode", None)
        if mode is not None:
            raise ValueError(
                "Quantized weights have no Hugging Face tensors. Load the "
                "model without `quantize`. Received: layer "
                f"{layer.path!r} with quantization_mode={mode!r}"
            )


def _same(name, variable):
    return Tensor(name, variable, tuple((i,) for i in range(variable.ndim)))


def _bias(name, variable):
    return Tensor(name, variable, (tuple(range(variable.ndim)),))


def _kernel(name, variable, family):
    """The matrix of a projection: Hugging Face's is `(out, in)`."""
    order = tuple(range(variable.ndim))
    num_inputs = 1
    if name.endswith("o_proj"):
        num_inputs = 2
    elif family.heads_first and ".self_attn." in name:
        order = (1, 0, 2)
    axes = (order[num_inputs:], order[:num_inputs])
    return Tensor(f"{name}.weight", variable, axes)


def hf_config(causal_lm, *, dtype=None, tokenizer=None):
    """The Hugging Face `config.json` of a model as it is.

    Args:
        causal_lm: a built KerasHub `CausalLM` of a family in `FAMILIES`. If
            it was read from a Hugging Face directory, the fields that decide
            no number (token ids, lengths) are those of that config.
        dtype: str, the dtype of the weights. Defaults to the embedding's.
        tokenizer: an object whose `bos_token_id`, `eos_token_id` and
            `pad_token_id`, where it has them, are written for a model that
            brought no config of its own.

    Returns:
        A dict.

    Raises:
        ValueError: if the family has no table, or its config has no field for
            something that the model does.
    """
    family = _known_family(causal_lm)
    found = layer_patches.read_settings(causal_lm, family)
    own = settings.to_config(found, family)
    source = getattr(causal_lm, "kpt_source", None)
    if source:
        base = {
            key: value
            for key, value in copy.deepcopy(dict(source["config"])).items()
            if key not in settings.READ and key not in _STALE
        }
        lengths = ("max_position_embeddings", "sliding_window")
        for key in lengths:
            if key in source["config"]:
                base[key] = source["config"][key]
    else:
        base = _token_ids(family, tokenizer)
    if base.get("max_position_embeddings") is None:
        base["max_position_embeddings"] = _length(found, family)
    if family.windows.startswith("qwen") and own["sliding_window"] is None:
        # Unused, but KerasHub and others look it up.
        own.pop("sliding_window")
        base.setdefault("sliding_window", None)
    dtype = dtype or causal_lm.backbone.token_embedding.variable_dtype
    names = {"torch_dtype": dtype, "dtype": dtype}
    return {**base, **own, **names, "use_cache": True}


# Left out of an export: what they say is no longer so, or said otherwise.
_STALE = {
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "auto_map",
    "_name_or_path",
    "transformers_version",
    MARK,
}


def _token_ids(family, tokenizer):
    ids = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name, None)
        if value is None:
            value = family.defaults.get(name)
        ids[name] = value
    return ids


def _length(found, family):
    """A length limit for a model whose source states none."""
    rope = found.rope[-1]
    if rope["rope_type"] == "llama3":
        return 131_072
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        return int(original * rope["factor"])
    return max(family.defaults["max_position_embeddings"], 8192)


def export(
    causal_lm,
    directory,
    *,
    dtype=None,
    max_shard_bytes=5 * 2**30,
    values=None,
    tokenizer=None,
):
    """Writes a model as a Hugging Face directory.

    transformers, vLLM and `from_preset` read it. It is written beside its
    place and moved there when complete, so a crash leaves nothing half done.
    Tensors come from the devices one at a time. Of several processes all must
    call it, and the first one writes.

    Args:
        causal_lm: a built KerasHub `CausalLM` of a family in `FAMILIES`.
        directory: path to write to: absent, empty, or an earlier export,
            which is replaced.
        dtype: str, `"float32"`, `"bfloat16"` or `"float16"`. Defaults to the
            dtype of each variable.
        max_shard_bytes: int; checkpoints above it are split into files of at
            most that size.
        values: function from a `keras.Variable` to the array to write for
            it, such as a kernel with its adapter merged. Defaults to the
            variable's value.
        tokenizer: an object with `save(directory)`, to write the tokenizer's
            files.

    Raises:
        ValueError: if the directory holds something else, or the model has no
            Hugging Face form.

    Example:

    ```python
    causal_lm = load_causal_lm("qwen3_0.6b_en")
    huggingface.export(causal_lm, "model/", dtype="bfloat16")
    ```
    """
    directory = pathlib.Path(directory)
    if dtype not in (None, *checkpoint_files.FLOATS):
        raise ValueError(
            f"`dtype` must be one of {list(checkpoint_files.FLOATS)} or "
            f"`None`. Received: dtype={dtype!r}"
        )
    device_transfer.on_first(lambda: _check_replaceable(directory))
    table = {tensor.name: tensor for tensor in tensors(causal_lm)}
    config = hf_config(causal_lm, dtype=dtype, tokenizer=tokenizer)
    config[MARK] = "keras_posttrain"
    shapes = {name: tensor.shape for name, tensor in table.items()}
    dtypes = {n: dtype or t.variable.dtype for n, t in table.items()}
    shards = checkpoint_files.plan_shards(shapes, dtypes, max_shard_bytes)

    def value(name):
        tensor = table[name]
        array = values(tensor.variable) if values else tensor.variable.value
        return device_transfer.contiguous(
            tensor.to_hf(device_transfer.to_host(array))
        )

    arrays = (value(name) for names in shards.values() for name in names)

    def write():
        with replaced_directory(directory) as temporary:
            checkpoint_files.write_tensors(
                temporary, shards, shapes, dtypes, arrays
            )
            if tokenizer is not None:
                tokenizer.save(temporary)
            write_json(temporary / CONFIG, config)
            generation = _generation_config(causal_lm, config)
            write_json(temporary / GENERATION_CONFIG, generation)

    device_transfer.on_first(write, arrays)


def _check_replaceable(directory):
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(
            "`directory` must not be a file. Received: "
            f"directory={str(directory)!r}"
        )
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return
    config = directory / CONFIG
    if not config.is_file() or MARK not in read_json(config):
        raise ValueError(
            "`directory` must be absent, empty or an earlier export, which "
            "is replaced. Choose another, or remove it first. Received: "
            f"directory={str(directory)!r}, with {names}"
        )


def _generation_config(causal_lm, config):
    source = getattr(causal_lm, "kpt_source", None)
    if source:
        path = pathlib.Path(source["path"]) / GENERATION_CONFIG
        if path.is_file():
            return read_json(path)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {k: config[k] for k in ids if config.get(k) is not None}
    return {"_from_model_config": True, **found}
