"""What the files of multimodal models of all families have in common."""

from keras_posttrain.models.hf.checkpoint_files import read_json
from keras_posttrain.models.hf.tensors import Part, Tensor

PROCESSOR = "preprocessor_config.json"
# The files of a processor in addition to those of its tokenizer.
PROCESSOR_FILES = (PROCESSOR, "processor_config.json")


def name_of(dtype):
    """Returns the name of a dtype or of a dtype policy."""
    return getattr(dtype, "name", dtype)


def refused(name, value, expected):
    """Returns the error of a field that a tower cannot have."""
    return ValueError(
        f"The vision tower of this checkpoint cannot be represented: "
        f"`{name}` must be {expected}. Received: {name}={value!r}. Load the "
        "model without `vision=True` to train on text."
    )


def check_only(config, only):
    """Raises where a field of `vision_config` has another value.

    Args:
        config: dict, with its defaults filled in.
        only: dict from fields to their values.
    """
    for name, value in only.items():
        if config.get(name, value) != value:
            raise refused(f"vision_config.{name}", config[name], repr(value))


def processor_of(directory):
    """Reads the config of a directory's image processor, `{}` without one."""
    found = {}
    for name in PROCESSOR_FILES:
        path = directory / name
        if not found and path.is_file():
            found = read_json(path)
            # transformers 5 saves one file.
            if name != PROCESSOR:
                found = found.get("image_processor", {})
    return found


def check_processor(directory, expected, how):
    """Raises where a processor prepares images in another way.

    Args:
        directory: path of the model.
        expected: dict from the processor's fields to their values.
        how: string, how images are prepared here.

    Returns:
        The processor's config, a dict.
    """
    found = processor_of(directory)
    for name, value in expected.items():
        given = found.get(name)
        # A setting that is missing has transformers' default.
        if given is not None and given != value:
            raise ValueError(
                f"{how}: `{name}` must be {value!r}. Received: "
                f"{name}={given!r} in {str(directory)!r}."
            )
    return found


def tensor(name, variable, order=None):
    """Returns the `Tensor` of a variable whose axes have another order.

    Args:
        order: tuple with the variable's axis, or a tuple of those combined,
            for each axis of the tensor.
    """
    order = range(variable.ndim) if order is None else order
    axes = tuple(x if isinstance(x, tuple) else (x,) for x in order)
    return Tensor(name, (Part(variable, axes),))


def token_ids(known, names, defaults):
    """Returns the ids of a config's tokens, a dict by field.

    Args:
        known: dict from control tokens to ids.
        names: dict from fields to the names of their token.
        defaults: dict from fields to the ids of published models.
    """
    return {
        field: next(
            (known[x] for x in names[field] if x in known), defaults[field]
        )
        for field in names
    }


def shared_fields(source, text_config):
    """Returns the fields that a multimodal config has from others.

    Args:
        source: dict, the config that the model was loaded with, or empty.
        text_config: dict.
    """
    shared = ("dtype", "torch_dtype", "tie_word_embeddings")
    found = {k: text_config[k] for k in shared if k in text_config}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in source:
            found[name] = source[name]
    return found
