"""Rejects models that are known to train or generate incorrectly."""

import inspect

import keras_hub

from keras_posttrain.models.quantized import quantization_of
from keras_posttrain.models.vision import tower_of

DTYPES = ("float32", "bfloat16", "mixed_bfloat16")


def check_dtype(dtype):
    """Rejects dtypes that models are not trained in; `None` is the preset's.

    Gradients in float16 underflow, and losses are not scaled.
    """
    name = getattr(dtype, "name", dtype)
    if dtype is not None and name not in DTYPES:
        raise ValueError(
            f"`dtype` must be one of {DTYPES}, or None for that of the "
            "preset. float16 would need scaled losses; use bfloat16, which "
            f"has the range of float32. Received: dtype={dtype!r}"
        )


def refuse_tower(causal_lm, what):
    """Rejects a model with a vision tower for `what` does not take images."""
    if tower_of(getattr(causal_lm, "backbone", None)) is not None:
        raise ValueError(
            f"{what} takes no model with a vision tower. Load it without "
            "`vision=True`, which gives its text model. Received: a "
            f"{type(causal_lm).__name__} with a vision tower"
        )


def check_kind(causal_lm):
    """Rejects what is not a KerasHub `CausalLM`."""
    if not isinstance(causal_lm, keras_hub.models.CausalLM):
        raise ValueError(
            "A task is made of a KerasHub `CausalLM`; use "
            "`SFTTask.from_preset(...)` for a preset or a directory. "
            f"Received: {type(causal_lm).__name__}"
        )


def check_model(causal_lm, sequence_length):
    """Rejects models and lengths (tokens of a row) that cannot be trained."""
    check_kind(causal_lm)
    check_dtype(causal_lm.backbone.dtype_policy)
    if getattr(causal_lm.backbone, "dropout", 0):
        raise ValueError(
            "KerasHub samples dropout by row, which would make a run depend "
            "on packing and micro-batches. Build the model with dropout=0 "
            "and use `kpt.LoRA(dropout=...)`. "
            f"Received: dropout={causal_lm.backbone.dropout}"
        )
    longest = max_length(causal_lm)
    if longest is not None and sequence_length > longest:
        raise ValueError(
            f"`sequence_length` must be at most {longest}, the positions "
            "this model was trained for (`max_position_embeddings`). "
            f"Received: sequence_length={sequence_length}"
        )


def max_length(causal_lm):
    """Returns the context length of the model's config, or `None`."""
    source = getattr(causal_lm, "kpt_source", None) or {}
    config = source.get("config") or {}
    return config.get("max_position_embeddings")


def check_generate(causal_lm):
    """Rejects models whose `generate` is known to be incorrect."""
    name = type(causal_lm).__name__
    if name.startswith("Qwen3_5"):
        raise ValueError(
            f"KerasHub 0.32's {name}.generate lets padding into its "
            "recurrent state: even its first token differs from the model's "
            "own. `export` the model and sample with another engine."
        )
    if name.startswith("GPTNeoX"):
        raise ValueError(
            f"KerasHub 0.32's {name}.generate gives every new token's query "
            "the position 0: its tokens are not the model's own. `export` "
            "the model and sample with another engine."
        )


def architecture(causal_lm):
    """Returns the numbers of a model's config, to identify it in a run.

    KerasHub keeps the arguments of a backbone as attributes. `get_config`
    has them too, but it serializes the dtype, for which Keras imports
    TensorFlow: seconds and 0.6 GB in every run with checkpoints.
    """
    backbone = causal_lm.backbone
    values = {
        name: getattr(backbone, name, None)
        for name in sorted(inspect.signature(type(backbone)).parameters)
    }
    found = {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and name != "trainable"
    }
    if (quantization := quantization_of(causal_lm)) is not None:
        found["quantization"] = repr(quantization)
    return found
