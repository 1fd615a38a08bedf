"""Writes models as Hugging Face directories."""

import copy
import pathlib

from keras_posttrain.data.chat.tokenizer_files import (
    TOKENIZER_FILES,
    own_file,
)
from keras_posttrain.models import device_transfer
from keras_posttrain.models.hf import checkpoint_files, layer_patches
from keras_posttrain.models.hf.checkpoint_files import (
    CONFIG,
    read_json,
    replaced_directory,
    write_json,
)
from keras_posttrain.models.hf.config import READ, to_config
from keras_posttrain.models.hf.tensors import (
    arrays_of,
    known_family,
    model_tensors,
)
from keras_posttrain.models.hf.vision_files import PROCESSOR_FILES
from keras_posttrain.models.hf.vision_tower import (
    outer_config,
    outer_name,
    processor_configs,
    tower_tensors,
)
from keras_posttrain.models.vision import tower_of

GENERATION_CONFIG = "generation_config.json"
# A field of `config.json` that marks an export, which may be overwritten.
MARK = "exported_by"


def hf_config(causal_lm, *, dtype=None, tokenizer=None):
    """Builds the Hugging Face `config.json` of a model.

    If the model was loaded from a Hugging Face directory, fields that do not
    affect the forward pass (token ids, lengths) are copied from that
    directory's config; otherwise token ids are the attributes `bos_token_id`,
    `eos_token_id` and `pad_token_id` of `tokenizer`. `dtype` names the dtype
    of the weights, by default the embedding's.

    An unknown family, or a setting of the model for which its config has no
    field, raises a `ValueError`.
    """
    family = known_family(causal_lm)
    found = layer_patches.read_settings(causal_lm, family)
    own = to_config(found, family)
    source = getattr(causal_lm, "kpt_source", None)
    if source:
        base = {
            key: value
            for key, value in copy.deepcopy(dict(source["config"])).items()
            if key not in READ and key not in {*_STALE, *family.fields}
        }
        lengths = ("max_position_embeddings", "sliding_window")
        for key in lengths:
            if key in source["config"]:
                base[key] = source["config"][key]
    else:
        base = _token_ids(family, tokenizer)
    if base.get("max_position_embeddings") is None:
        base["max_position_embeddings"] = _length(found, family)
    if family.windows == "qwen" and own["sliding_window"] is None:
        # The field is unused, but KerasHub and other readers require it.
        own.pop("sliding_window")
        base.setdefault("sliding_window", None)
    dtype = dtype or causal_lm.backbone.token_embedding.variable_dtype
    names = {"torch_dtype": dtype, "dtype": dtype}
    return {**base, **own, **names, "use_cache": True}


# Fields of the original config that are left out of an export, as they are
# outdated or written in another way.
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
    """Returns a context length for a model without a source config."""
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

    transformers, vLLM and `from_preset` can load it. It is written to a
    temporary folder next to `directory` and renamed when complete, so that a
    crash leaves no partial export. Tensors are fetched from the devices one
    at a time. With several processes all of them must call this; the first
    one writes.

    Args:
        directory: path to write to. It must not exist, be empty, or be an
            earlier export, which is replaced.
        dtype: str, `"float32"`, `"bfloat16"` or `"float16"`. Defaults to the
            dtype of each variable.
        max_shard_bytes: int, the most bytes of a file of several tensors.
        values: function from a `keras.Variable` to the array to write for
            it, such as a kernel with its adapter merged.
        tokenizer: an object with `save(directory)`.

    Raises:
        ValueError: if the directory has other content, or the model cannot
            be represented.
    """
    directory = pathlib.Path(directory)
    if dtype not in (None, *checkpoint_files.FLOATS):
        raise ValueError(
            f"`dtype` must be one of {list(checkpoint_files.FLOATS)} or "
            f"`None`. Received: dtype={dtype!r}"
        )
    device_transfer.on_first(lambda: _check_replaceable(directory))
    _check_links(causal_lm, tokenizer)
    table = {tensor.name: tensor for tensor in model_tensors(causal_lm)}
    config = hf_config(causal_lm, dtype=dtype, tokenizer=tokenizer)
    files = {}
    if tower_of(causal_lm.backbone) is not None:
        table = {
            **{
                outer_name(causal_lm, n): tensor for n, tensor in table.items()
            },
            **{x.name: x for x in tower_tensors(causal_lm)},
        }
        config = outer_config(causal_lm, config, tokenizer)
        files = _processor_files(causal_lm)
    config[MARK] = "keras_posttrain"
    shapes = {name: tensor.shape for name, tensor in table.items()}
    dtypes = {n: dtype or t.dtype for n, t in table.items()}
    shards = checkpoint_files.plan_shards(shapes, dtypes, max_shard_bytes)
    order = [name for names in shards.values() for name in names]
    found = arrays_of(
        (table[n] for n in order), values or (lambda variable: variable.value)
    )
    arrays = (array for _, array in found)

    def write():
        with replaced_directory(directory) as temporary:
            checkpoint_files.write_tensors(
                temporary, shards, shapes, dtypes, arrays
            )
            if tokenizer is not None:
                tokenizer.save(temporary)
            for name, content in files.items():
                write_json(temporary / name, content)
            write_json(temporary / CONFIG, config)
            generation = _generation_config(causal_lm, config)
            write_json(temporary / GENERATION_CONFIG, generation)

    device_transfer.on_first(write, arrays)


def _processor_files(causal_lm):
    """Returns those of the model's source, or new ones: dicts by name."""
    found = {}
    if source := getattr(causal_lm, "kpt_source", None):
        files = [pathlib.Path(source["path"]) / n for n in PROCESSOR_FILES]
        found = {x.name: read_json(x) for x in files if x.is_file()}
    return found or processor_configs(causal_lm)


def _check_links(causal_lm, tokenizer):
    """Raises if a file whose content is exported is a link to another."""
    source = getattr(causal_lm, "kpt_source", None)
    places = [
        (
            source and source["path"],
            (CONFIG, GENERATION_CONFIG, *PROCESSOR_FILES),
        ),
        (getattr(tokenizer, "source", None), TOKENIZER_FILES),
    ]
    for directory, names in places:
        for name in names if directory else ():
            own_file(pathlib.Path(directory), name)


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
