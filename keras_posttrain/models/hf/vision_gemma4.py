"""The vision tower of Gemma 4: its config, its tensors, its image processor.

Hugging Face's classes are `Gemma4VisionModel` and the embedder of
`Gemma4ForConditionalGeneration`.
"""

import math

import keras_hub

from keras_posttrain.models.gemma4_tower import MAX_TOKENS, max_tokens
from keras_posttrain.models.hf import vision_files

OUTER = "Gemma4ForConditionalGeneration"
# The defaults of transformers' `Gemma4VisionConfig` and `Gemma4Config`.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "use_clipped_linears": False,
    "standardize": False,
}
# As published. transformers 5.23 calls the type of this tower "axial" too.
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_ROPE_TYPES = ("default", "axial")
_TOKENS = {
    "image_token_id": 258_880,
    "boi_token_id": 255_999,
    "eoi_token_id": 258_882,
    "audio_token_id": 258_881,
    "boa_token_id": 256_000,
    "eoa_token_index": 258_883,
    "video_token_id": 258_884,
}
_NAMES = {
    "image_token_id": ("<|image|>",),
    "boi_token_id": ("<|image>",),
    "eoi_token_id": ("<image|>",),
    "audio_token_id": ("<|audio|>",),
    "boa_token_id": ("<|audio>",),
    "eoa_token_index": ("<audio|>",),
    "video_token_id": ("<|video|>",),
}
# The only values that the layers can have.
_ONLY = {
    "model_type": "gemma4_vision",
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_ONLY_PROCESSOR = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,
}
# A field of the model's config, the most tokens of an image.
_LIMIT = "vision_soft_tokens_per_image"
_NORMS = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
}
# The layers, and the axes of their kernels that make the outputs and the
# inputs of a matrix.
_LINEAR = {
    "self_attn.q_proj": ("attention.query_dense", ((0, 2), (1,))),
    "self_attn.k_proj": ("attention.key_dense", ((0, 2), (1,))),
    "self_attn.v_proj": ("attention.value_dense", ((0, 2), (1,))),
    "self_attn.o_proj": ("attention.output_dense", ((2,), (0, 1))),
    "mlp.gate_proj": ("gating_ffw", ((1,), (0,))),
    "mlp.up_proj": ("gating_ffw_2", ((1,), (0,))),
    "mlp.down_proj": ("ffw_linear", ((1,), (0,))),
}
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def build(config, dtype):
    """Builds the tower of a config of `Gemma4ForConditionalGeneration`.

    It computes in float32 whatever the `dtype`, as KerasHub has it.

    Raises:
        ValueError: KerasHub's layers cannot represent it.
    """
    found = _DEFAULTS | config["vision_config"]
    vision_files.check_only(found, _ONLY)
    rope = {**_ROPE, **(found.get("rope_parameters") or {})}
    if rope["rope_type"] not in _ROPE_TYPES:
        raise vision_files.refused(
            "vision_config.rope_parameters", rope, f"such as {_ROPE}"
        )
    head_dim, heads = found["head_dim"], found["num_attention_heads"]
    if head_dim * heads != found["hidden_size"] or head_dim % 4:
        raise vision_files.refused(
            "vision_config.head_dim",
            head_dim,
            f"a multiple of 4 that the {heads} heads make hidden_size="
            f"{found['hidden_size']} of",
        )
    limit, pool = config.get(_LIMIT, MAX_TOKENS), found["pooling_kernel_size"]
    if limit * pool > found["position_embedding_size"]:
        raise vision_files.refused(
            "vision_config.position_embedding_size",
            found["position_embedding_size"],
            f"{limit * pool} at least, the patches of the longest image",
        )
    tower = keras_hub.models.Gemma4VisionEncoder(
        image_size=_side(limit) * pool * found["patch_size"],
        patch_size=found["patch_size"],
        num_heads=heads,
        hidden_dim=found["hidden_size"],
        num_layers=found["num_hidden_layers"],
        intermediate_dim=found["intermediate_size"],
        head_dim=head_dim,
        output_dim=config["text_config"]["hidden_size"],
        num_key_value_heads=found["num_key_value_heads"],
        pool_size=pool,
        position_embedding_size=found["position_embedding_size"],
        rope_max_wavelength=rope["rope_theta"],
        layer_norm_epsilon=found["rms_norm_eps"],
        use_clipped_linears=found["use_clipped_linears"],
        standardize=found["standardize"],
        dtype="float32",
    )
    tower.kpt_max_tokens = limit
    return tower


def _side(count):
    """Returns the tokens of a side of a square of `count` at least.

    KerasHub describes a tower by the size of square images.
    """
    return math.isqrt(count - 1) + 1


def backbone_arguments(config):
    """Returns arguments of the backbone in addition to its text model's."""
    attention = config["text_config"].get("use_bidirectional_attention")
    return {"use_vision_bidirectional_attention": attention == "vision"}


def repair_tower(tower):
    """Returns no notes: KerasHub passes all settings on."""
    return []


def with_processor(directory, config):
    """Returns a model's config with the most tokens that its processor makes.

    Raises:
        ValueError: images would be prepared otherwise than a directory says.
    """
    vision = _DEFAULTS | config["vision_config"]
    sizes = {n: vision[n] for n in ("patch_size", "pooling_kernel_size")}
    found = vision_files.check_processor(
        directory,
        {**_ONLY_PROCESSOR, **sizes},
        "Images keep their shape and are resized bicubically, as the "
        "published processor of Gemma 4 does, to the patches of the model",
    )
    limit = found.get("max_soft_tokens") or config.get(_LIMIT, MAX_TOKENS)
    return {**config, _LIMIT: limit}


def tensors(tower):
    """Lists the weights of the vision tower as Hugging Face tensors.

    Their names are those of published checkpoints.
    """
    encoder = tower.get_layer("image_encoder")
    output = tower.get_layer("vision_output_encoder")
    patches, prefix = encoder.patch_embedder, "model.vision_tower."
    found = [
        vision_files.tensor(
            f"{prefix}patch_embedder.input_proj.weight",
            patches.input_proj.kernel,
            (1, 0),
        ),
        vision_files.tensor(
            f"{prefix}patch_embedder.position_embedding_table",
            patches.position_embedding_table,
        ),
        vision_files.tensor(
            "model.embed_vision.embedding_projection.weight",
            output.vision_input_projection.kernel,
            (1, 0),
        ),
    ]
    if tower.standardize:
        for name in ("std_bias", "std_scale"):
            variable = getattr(output, name)
            found.append(vision_files.tensor(prefix + name, variable))
    for i, block in enumerate(encoder.encoder_blocks):
        found += _block_tensors(f"{prefix}encoder.layers.{i}.", block)
    return found


def _block_tensors(prefix, block):
    found = [
        vision_files.tensor(
            f"{prefix}{name}.weight", _attribute(block, path).scale
        )
        for name, path in _NORMS.items()
    ]
    for name, (path, order) in _LINEAR.items():
        layer = _attribute(block, path)
        found.append(
            vision_files.tensor(
                f"{prefix}{name}.linear.weight", layer.dense.kernel, order
            )
        )
        if layer.use_clipped_linears:
            found += [
                vision_files.tensor(
                    f"{prefix}{name}.{bound}", getattr(layer, bound)
                )
                for bound in _BOUNDS
            ]
    return found


def _attribute(layer, path):
    for part in path.split("."):
        layer = getattr(layer, part)
    return layer


def stored_name(name, stored):
    """Returns the name that a checkpoint has for one of `tensors`."""
    short = name.removeprefix("model.")
    return short if short in stored else name


def outer_name(name):
    """Returns the name in a multimodal checkpoint of a text model's tensor."""
    return name.replace("model.", "model.language_model.", 1)


def outer_config(backbone, source, text_config, known):
    """Builds the config of a model with a tower around its text model's.

    The arguments are those of `vision_gemma3.outer_config`.
    """
    tower = backbone.vision_encoder
    attends = backbone.use_vision_bidirectional_attention
    ids = vision_files.token_ids(known, _NAMES, _TOKENS)
    return {
        "architectures": [OUTER],
        "model_type": "gemma4",
        **{field: source.get(field, i) for field, i in ids.items()},
        **vision_files.shared_fields(source, text_config),
        _LIMIT: max_tokens(tower),
        "audio_config": None,
        "text_config": {
            **text_config,
            "use_bidirectional_attention": "vision" if attends else None,
        },
        "vision_config": {
            **_ONLY,
            "hidden_size": tower.hidden_dim,
            "intermediate_size": tower.intermediate_dim,
            "num_hidden_layers": tower.num_layers,
            "num_attention_heads": tower.num_heads,
            "num_key_value_heads": tower.num_key_value_heads,
            "head_dim": tower.head_dim,
            "patch_size": tower.patch_size,
            "pooling_kernel_size": tower.pool_size,
            "position_embedding_size": tower.position_embedding_size,
            "rms_norm_eps": tower.layer_norm_epsilon,
            "rope_parameters": {
                **_ROPE,
                "rope_theta": tower.rope_max_wavelength,
            },
            "use_clipped_linears": tower.use_clipped_linears,
            "standardize": tower.standardize,
        },
    }


def processor_configs(tower):
    """Returns the files of a processor, dicts by name."""
    images = {
        **_ONLY_PROCESSOR,
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": tower.patch_size,
        "pooling_kernel_size": tower.pool_size,
        "max_soft_tokens": max_tokens(tower),
        "image_seq_length": max_tokens(tower),
    }
    return {
        vision_files.PROCESSOR: {
            **images,
            "processor_class": "Gemma4Processor",
        },
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "image_seq_length": max_tokens(tower),
            "image_processor": images,
        },
    }
