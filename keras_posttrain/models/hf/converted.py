"""Model types that KerasHub's converters load, and what these can represent.

A converter reads some fields of `config.json` and ignores the others without
a word. The table below has, for each model type, the fields whose values
KerasHub computes with as transformers does, and the values that the others
must have. It is compared with transformers in `tests/models/
test_converted.py`; a config outside of it is an error.
"""

import dataclasses
import typing

from keras_posttrain.models.hf.config import HARMLESS, check_groups
from keras_posttrain.models.hf.families import FAMILIES


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model type that is loaded by KerasHub's converter.

    Args:
        sizes: tuple of names of fields that must be ints.
        read: dict of fields that KerasHub computes with, and the values that
            transformers has where they are absent.
        only: dict of fields and the tuple of values that KerasHub can
            represent, transformers' default first.
        ignored: tuple of fields that do not affect the forward pass.
        complete: function from the config, with defaults, to fields
            that KerasHub's converter requires.
    """

    sizes: tuple
    read: dict
    only: dict
    complete: typing.Callable
    ignored: tuple = ()


def for_converter(config):
    """Returns a config as KerasHub's converters read it.

    Absent fields are filled in, and those of transformers 5 are written as
    KerasHub reads them. If KerasHub would not compute what transformers does,
    a `ValueError` names the field and its value.
    """
    model_type = config["model_type"]
    if model_type not in CONVERTED:
        raise ValueError(
            "Models of this type were not compared with transformers, so "
            "their log-probabilities could be wrong. Supported are "
            f"{sorted([*FAMILIES, *CONVERTED])}. Received: "
            f"model_type={model_type!r}. If you have compared it yourself, "
            "load it with `keras_hub.models.CausalLM.from_preset` and pass "
            "that model to the task."
        )
    checked = _checked(config, CONVERTED[model_type], model_type)
    return {"architectures": [""], **checked}


def _checked(config, family, model_type):
    """Returns a config with the fields that the converter requires."""
    heads, groups = config.get("num_attention_heads"), "num_key_value_heads"
    if config.get(groups, heads) is None:
        config = {**config, groups: heads}
    config = {k: v for k, v in config.items() if v is not None}
    for name in family.sizes:
        value = config.get(name, family.read.get(name))
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"`config.json` of model_type={model_type!r} must have a "
                f"positive integer `{name}`. Received: {name}={value!r}"
            )
    known = {*family.sizes, *family.read, *family.only, *family.ignored}
    _check_known(config, known | _ROPE | {"model_type"}, model_type)
    for field, values in family.only.items():
        value = config.get(field, values[0])
        if value not in values and (value or values[0]):
            raise _refused(model_type, field, value, _one_of(values))
    defaults = {field: values[0] for field, values in family.only.items()}
    config = {**defaults, **family.read, **config}
    if groups in config:
        check_groups(model_type, heads, config[groups])
    return {**config, **family.complete(config, model_type)}


def _check_known(config, known, model_type):
    for field, value in config.items():
        if field in known or field in HARMLESS or not value:
            continue
        raise _refused(model_type, field, value, "not to be set")


def _one_of(values):
    return " or ".join(map(repr, values))


def _refused(model_type, field, value, expected):
    return ValueError(
        f"KerasHub's model of model_type={model_type!r} is not known to "
        f"compute what transformers does with `{field}` in `config.json`: "
        "its log-probabilities could be wrong without a word. Expected "
        f"{expected}. Received: {field}={value!r}. Use another checkpoint; "
        "if the field does not affect the outputs, remove it. If you have "
        "compared the model yourself, load it with `keras_hub.models."
        "CausalLM.from_preset` and pass it to the task."
    )


_ROPE = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}


def _gpt2(config, model_type):
    width = 4 * config["n_embd"]
    if config["n_inner"] not in (None, width):
        raise _refused(
            model_type, "n_inner", config["n_inner"], f"None or {width}"
        )
    # Dropout affects only training, where this library has its own.
    return {"resid_pdrop": 0.0}


CONVERTED = {
    "gpt2": Converted(
        sizes=("vocab_size", "n_layer", "n_head", "n_embd", "n_positions"),
        read={"n_inner": None, "resid_pdrop": 0.1},
        only={
            "activation_function": ("gelu_new",),
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
        complete=_gpt2,
        ignored=(
            "attn_pdrop",
            "embd_pdrop",
            "gradient_checkpointing",
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
            "task_specific_params",
        ),
    ),
}
