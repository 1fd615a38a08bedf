"""The vision tower of Gemma 3: its config, its tensors, its image processor.

Hugging Face's classes are `SiglipVisionModel` and the projector of
`Gemma3ForConditionalGeneration`.
"""

import math

import keras
import keras_hub

from keras_posttrain.models.hf import vision_files

OUTER = "Gemma3ForConditionalGeneration"
# The defaults of transformers' `SiglipVisionConfig` and `Gemma3Config`.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "vision_use_head": True,
}
_TOKENS = {
    "image_token_index": 262_144,
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
}
_NAMES = {
    "image_token_index": ("<image_soft_token>", "<img>"),
    "boi_token_index": ("<start_of_image>",),
    "eoi_token_index": ("<end_of_image>",),
}
# The only values that the layers, and the pictures of rows, can have. The
# head is not part of Gemma 3.
_ONLY = {
    "model_type": "siglip_vision_model",
    "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
}
_ONLY_PROCESSOR = {
    "do_resize": True,
    "resample": 2,
    "do_rescale": True,
    "do_normalize": True,
    "do_pan_and_scan": False,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_MODULES = {
    "self_attn.q_proj": "attn.query_proj",
    "self_attn.k_proj": "attn.key_proj",
    "self_attn.v_proj": "attn.value_proj",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp_dense_1",
    "mlp.fc2": "mlp_dense_2",
    "layer_norm1": "layer_norm_1",
    "layer_norm2": "layer_norm_2",
}


def build(config, dtype):
    """Builds the tower of a config of `Gemma3ForConditionalGeneration`.

    Raises:
        ValueError: KerasHub's layers cannot represent it.
    """
    found = _DEFAULTS | config["vision_config"]
    vision_files.check_only(found, _ONLY)
    side = found["image_size"] // found["patch_size"]
    tokens = math.isqrt(tokens_of(config))
    if tokens**2 != tokens_of(config) or side % tokens:
        raise vision_files.refused(
            "mm_tokens_per_image",
            tokens_of(config),
            f"the square of a divisor of {side}, the patches of a side",
        )
    tower = keras_hub.models.Gemma3VisionEncoder(
        image_size=found["image_size"],
        patch_size=found["patch_size"],
        num_heads=found["num_attention_heads"],
        hidden_dim=found["hidden_size"],
        num_layers=found["num_hidden_layers"],
        intermediate_dim=found["intermediate_size"],
        output_dim=config["text_config"]["hidden_size"],
        pool_size=side // tokens,
        layer_norm_epsilon=found["layer_norm_eps"],
        # In bfloat16 KerasHub computes images in float32.
        dtype="float32"
        if vision_files.name_of(dtype) == "bfloat16"
        else dtype,
    )
    repair_tower(tower)
    return tower


def backbone_arguments(config):
    """Returns no arguments: the text model's are all of the backbone's."""
    return {}


def repair_tower(tower):
    """Sets the epsilon of norms, which KerasHub 0.32 does not pass on.

    Returns a list of notes, empty where all norms had it.
    """
    encoder = tower.get_layer("image_encoder")
    norms = [encoder.encoder_layer_norm]
    for layer in encoder.resblocks:
        norms += [layer.layer_norm_1, layer.layer_norm_2]
    epsilon = tower.layer_norm_epsilon
    wrong = [norm for norm in norms if norm.epsilon != epsilon]
    for norm in wrong:
        norm.epsilon = epsilon
    return [f"layer_norm_epsilon set to {epsilon} in the tower"] * bool(wrong)


def tokens_of(config):
    """Returns the number of tokens of an image."""
    return config.get("mm_tokens_per_image", 256)


def with_processor(directory, config):
    """Returns a model's config, checked against the processor's.

    Raises:
        ValueError: images would be prepared otherwise than a directory says.
    """
    size = (_DEFAULTS | config["vision_config"])["image_size"]
    vision_files.check_processor(
        directory,
        {**_ONLY_PROCESSOR, "size": {"height": size, "width": size}},
        f"Images are resized to {size} x {size} pixels, bilinearly, and "
        "normalized to [-1, 1], as published models of Gemma 3 want them",
    )
    return config


def tensors(tower):
    """Lists the weights of the vision tower as Hugging Face tensors.

    Their names are those of published checkpoints.
    """
    encoder = tower.get_layer("image_encoder")
    output = tower.get_layer("vision_output_encoder")
    embeddings = encoder.vision_embeddings
    patches = embeddings.patch_embedding
    prefix = "vision_tower.vision_model."
    found = [
        vision_files.tensor(
            f"{prefix}embeddings.patch_embedding.weight",
            patches.kernel,
            (3, 2, 0, 1),
        ),
        vision_files.tensor(
            f"{prefix}embeddings.patch_embedding.bias", patches.bias
        ),
        vision_files.tensor(
            f"{prefix}embeddings.position_embedding.weight",
            embeddings.position_embedding.embeddings,
        ),
    ]
    for i, block in enumerate(encoder.resblocks):
        for name, path in _MODULES.items():
            layer = block
            for part in path.split("."):
                layer = getattr(layer, part)
            name = f"{prefix}encoder.layers.{i}.{name}"
            found += _layer_tensors(name, layer)
    found += _layer_tensors(
        f"{prefix}post_layernorm", encoder.encoder_layer_norm
    )
    projector = "multi_modal_projector.mm_"
    return [
        *found,
        vision_files.tensor(
            f"{projector}soft_emb_norm.weight",
            output.vision_soft_embedding_norm.scale,
        ),
        vision_files.tensor(
            f"{projector}input_projection_weight",
            output.vision_input_projection.kernel,
        ),
    ]


def _layer_tensors(name, layer):
    if isinstance(layer, keras.layers.LayerNormalization):
        weight, bias = (
            vision_files.tensor(f"{name}.weight", layer.gamma),
            layer.beta,
        )
    else:
        weight = vision_files.tensor(f"{name}.weight", layer.kernel, (1, 0))
        bias = layer.bias
    return [weight, vision_files.tensor(f"{name}.bias", bias)]


def stored_name(name, stored):
    """Returns the name that a checkpoint has for one of `tensors`.

    transformers 5 saves the tower without `vision_model`, and its models have
    it inside `model`.
    """
    short = name.replace("vision_model.", "")
    for found in (name, short, f"model.{name}", f"model.{short}"):
        if found in stored:
            return found
    return name


def outer_name(name):
    """Returns the name in a multimodal checkpoint of a text model's tensor."""
    return f"language_model.{name}"


def outer_config(backbone, source, text_config, known):
    """Builds the config of a model with a tower around its text model's.

    Args:
        backbone: that of the model.
        source: dict, the config that the model was loaded with, or empty.
        text_config: dict.
        known: dict from control tokens of the tokenizer to their ids, for a
            model that was not loaded from a Hugging Face directory.
    """
    tower = backbone.vision_encoder
    ids = vision_files.token_ids(known, _NAMES, _TOKENS)
    shared = vision_files.shared_fields(source, text_config)
    return {
        "architectures": [OUTER],
        "model_type": "gemma3",
        **{field: source.get(field, i) for field, i in ids.items()},
        **shared,
        "mm_tokens_per_image": tower.num_vision_tokens_per_image,
        "text_config": text_config,
        "vision_config": {
            **_ONLY,
            "hidden_size": tower.hidden_dim,
            "intermediate_size": tower.intermediate_dim,
            "num_hidden_layers": tower.num_layers,
            "num_attention_heads": tower.num_heads,
            "image_size": tower.image_size,
            "patch_size": tower.patch_size,
            "layer_norm_eps": tower.layer_norm_epsilon,
            "vision_use_head": False,
        },
    }


def processor_configs(tower):
    """Returns the files of a processor, dicts by name."""
    size = {"height": tower.image_size, "width": tower.image_size}
    return {
        vision_files.PROCESSOR: {
            **_ONLY_PROCESSOR,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": tower.num_vision_tokens_per_image,
            "rescale_factor": 1 / 255,
            "size": size,
        },
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": tower.num_vision_tokens_per_image,
        },
    }
