"""The vision towers of Hugging Face checkpoints, of all families.

`vision_gemma3` and `vision_gemma4` have the same functions: a family is an
entry of `_BY_TYPE` and of `_BY_TOWER`.
"""

import keras_hub

from keras_posttrain.models.hf import vision_gemma3, vision_gemma4
from keras_posttrain.models.vision import tower_of

_BY_TYPE = {"gemma3": vision_gemma3, "gemma4": vision_gemma4}
_BY_TOWER = {
    keras_hub.models.Gemma3VisionEncoder: vision_gemma3,
    keras_hub.models.Gemma4VisionEncoder: vision_gemma4,
}


def is_known(model_type):
    """Returns whether multimodal models of a type load with their tower."""
    return model_type in _BY_TYPE


def _family(causal_lm):
    return _BY_TOWER[type(tower_of(causal_lm.backbone))]


def with_processor(directory, config):
    """Returns a multimodal config with what the processor's files add.

    Args:
        directory: path of the model.
        config: dict, its config.

    Raises:
        ValueError: images would be prepared otherwise than these files say.
    """
    return _BY_TYPE[config["model_type"]].with_processor(directory, config)


def arguments(config, dtype):
    """Returns arguments of the backbone's constructor: tower and image size.

    Args:
        config: dict, that of the multimodal model, of `with_processor`.
        dtype: that of the text model.

    Raises:
        ValueError: KerasHub's layers cannot represent the tower.
    """
    family = _BY_TYPE[config["model_type"]]
    tower = family.build(config, dtype)
    return {
        "vision_encoder": tower,
        "image_size": tower.image_size,
        **family.backbone_arguments(config),
    }


def left_out(config):
    """Returns notes on the parts of a multimodal model that are not loaded."""
    if config.get("audio_config") is None:
        return []
    return ["sound tower left out: rows have text and images"]


def repair_tower(causal_lm):
    """Repairs settings of a tower that KerasHub does not pass on.

    Returns a list of notes, empty where there is nothing to repair.
    """
    tower = tower_of(causal_lm.backbone)
    return [] if tower is None else _family(causal_lm).repair_tower(tower)


def tower_tensors(causal_lm):
    """Lists the weights of the vision tower as Hugging Face tensors.

    Their names are those of published checkpoints. Empty without a tower.
    """
    tower = tower_of(causal_lm.backbone)
    return [] if tower is None else _family(causal_lm).tensors(tower)


def stored_name(causal_lm, name, stored):
    """Returns the name that a checkpoint has for one of `tower_tensors`."""
    return _family(causal_lm).stored_name(name, stored)


def outer_name(causal_lm, name):
    """Returns the name in a multimodal checkpoint of a text model's tensor."""
    return _family(causal_lm).outer_name(name)


def outer_config(causal_lm, text_config, tokenizer=None):
    """Builds the config of a model with a tower around its text model's.

    `tokenizer` names the tokens of images where the model was not loaded from
    a Hugging Face directory.
    """
    return _family(causal_lm).outer_config(
        causal_lm.backbone,
        getattr(causal_lm, "kpt_outer_config", None) or {},
        text_config,
        getattr(tokenizer, "control_tokens", {}),
    )


def processor_configs(causal_lm):
    """Returns the files of a processor, dicts by name."""
    tower = tower_of(causal_lm.backbone)
    return _family(causal_lm).processor_configs(tower)
