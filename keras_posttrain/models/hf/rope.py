"""Rotary embeddings with the frequencies of a Hugging Face config."""

import math

import keras
import numpy as np
from keras import ops

# The fields of each type of `rope_scaling`, in addition to `rope_theta`.
FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
    ),
}
REASONS = {
    "dynamic": "its frequencies change with the length of the sequence",
    "longrope": "it has two sets of frequencies, chosen by the length",
}


def rope_parameters(config, layer_type=None):
    """Reads the parameters of a layer's rotary embedding from a config.

    Configs store them in `rope_scaling` and `rope_theta` (up to
    transformers 4) or in `rope_parameters` (transformers 5), which has an
    entry for each type of layer if these differ. Defaults of the config must
    be filled in.

    Returns a dict of `rope_type`, `rope_theta` and the fields of that type. If
    one of them is missing, or the rotation depends on more than the position,
    it raises a `ValueError`.

    Args:
        layer_type: `"full_attention"` or `"sliding_attention"` in a family
            with two types of layers (Gemma 3), else `None`.
    """
    if layer_type is None:
        found = _shared(config)
    else:
        found = _by_layer_type(config, layer_type)
    rope_type = found["rope_type"]
    if rope_type not in FIELDS:
        reason = REASONS.get(rope_type, "its formula is not known here")
        raise ValueError(
            "The config's `rope_scaling` (or `rope_parameters`) has a type "
            f"that cannot be represented: {reason}. Supported are "
            f"{sorted(FIELDS)}. Received: rope_type={rope_type!r}"
        )
    partial = found.get("partial_rotary_factor")
    if partial is None:
        partial = config.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ValueError(
            "KerasHub's layers rotate whole heads; a part of a head cannot "
            f"be represented. Received: partial_rotary_factor={partial}"
        )
    if rope_type == "yarn":
        _complete_yarn(found, config)
    known = {
        "rope_type": rope_type,
        "rope_theta": float(found["rope_theta"]),
    }
    for field in FIELDS[rope_type]:
        if found.get(field) is None:
            raise ValueError(
                f"`rope_scaling` of type {rope_type!r} needs `{field}`. "
                f"Received: {field}=None in {found}"
            )
        known[field] = found[field]
    return known


def _shared(config):
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    found = dict(found)
    nested = {"full_attention", "sliding_attention"} & set(found)
    if nested:
        raise ValueError(
            f"Layers of model_type={config.get('model_type')!r} share one "
            "rotation, so `rope_parameters` must not have an entry for each "
            f"type of layer. Received: rope_parameters={found}"
        )
    if found.get("rope_theta") is None:
        found["rope_theta"] = config.get("rope_theta") or 10_000.0
    found.setdefault("rope_type", found.get("type", "default"))
    # As in transformers, a field of the config has precedence over the one in
    # the dict.
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = found.get("original_max_position_embeddings")
    if original is None:
        original = config.get("max_position_embeddings")
    found["original_max_position_embeddings"] = original
    return found


def _by_layer_type(config, layer_type):
    found = (config.get("rope_parameters") or {}).get(layer_type)
    found = dict(found or {"rope_type": "default"})
    if layer_type == "full_attention":
        # In the format of transformers 4 only the global layers are scaled.
        found.update(config.get("rope_scaling") or {})
        theta = config.get("rope_theta") or 1_000_000.0
    else:
        theta = config.get("rope_local_base_freq") or 10_000.0
    if found.get("rope_theta") is None:
        found["rope_theta"] = theta
    found.setdefault("rope_type", found.get("type", "default"))
    if found.get("original_max_position_embeddings") is None:
        found["original_max_position_embeddings"] = config.get(
            "max_position_embeddings"
        )
    # transformers looks for this field outside the entry, so that it has no
    # effect there.
    found.pop("truncate", None)
    return found


def _complete_yarn(found, config):
    original = found["original_max_position_embeddings"]
    if found.get("factor") is None and original:
        found["factor"] = config["max_position_embeddings"] / original
    found["beta_fast"] = found.get("beta_fast") or 32
    found["beta_slow"] = found.get("beta_slow") or 1
    found["truncate"] = found.get("truncate", True)
    if found.get("attention_factor") is None and found.get("factor"):

        def temperature(scale):
            if found["factor"] <= 1:
                return 1.0
            return 0.1 * scale * math.log(found["factor"]) + 1.0

        above, below = found.get("mscale"), found.get("mscale_all_dim")
        if above and below:
            factor = temperature(above) / temperature(below)
        else:
            factor = temperature(1.0)
        found["attention_factor"] = float(factor)


def inverse_frequencies(parameters, head_dim):
    """Computes the radians per position of each pair of features.

    Returns the float32 frequencies, `(head_dim // 2,)`, and the factor of the
    cosines and sines.
    """
    theta = parameters["rope_theta"]
    exponents = np.arange(0, head_dim, 2, dtype="float32") / head_dim
    wavelengths = np.power(np.float32(theta), exponents)
    frequencies = np.float32(1) / wavelengths
    rope_type = parameters["rope_type"]
    if rope_type == "linear":
        frequencies = frequencies / np.float32(parameters["factor"])
    elif rope_type == "llama3":
        frequencies = _llama3(parameters, frequencies)
    elif rope_type == "yarn":
        frequencies = _yarn(parameters, wavelengths, head_dim)
    factor = parameters.get("attention_factor", 1.0)
    return frequencies.astype("float32"), float(factor)


def _llama3(parameters, frequencies):
    """Stretches long waves by `factor` and keeps short ones."""
    factor = np.float32(parameters["factor"])
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelengths = np.float32(2 * math.pi) / frequencies
    stretched = frequencies / factor
    share = (np.float32(original) / wavelengths - low) / (high - low)
    between = (1 - share) * stretched + share * frequencies
    out = np.where(wavelengths > original / low, stretched, between)
    return np.where(wavelengths < original / high, frequencies, out)


def _yarn(parameters, wavelengths, head_dim):
    """Stretches waves with few turns within the original length."""
    theta = parameters["rope_theta"]
    original = parameters["original_max_position_embeddings"]

    def pair_of(turns):
        ratio = original / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    first = pair_of(parameters["beta_fast"])
    last = pair_of(parameters["beta_slow"])
    if parameters["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(head_dim // 2, dtype="float32")
    ramp = np.clip((pairs - first) / (last - first), 0, 1).astype("float32")
    factor = np.float32(parameters["factor"])
    kept = np.float32(1) / wavelengths
    stretched = np.float32(1) / (factor * wavelengths)
    return stretched * ramp + kept * (1 - ramp)


class RotaryEmbedding(keras.layers.Layer):
    """Rotates the two halves of each head by its token's position.

    This replaces the rotary layers of KerasHub's attention layers, which do
    not support all types of `rope_scaling`. It has no variables. Angles are
    float32, whatever the dtype of the inputs. `parameters` are those of
    `rope_parameters`.

    Call arguments:
        inputs: float tensor of shape `(batch, length, heads, head_dim)` or
            `(batch, length, head_dim)`.
        start_index: int or int scalar tensor, the position of the first
            token. Ignored if `positions` are given.
        positions: int tensor of shape `(length,)` or `(batch, length)`.
    """

    def __init__(self, head_dim, parameters, **kwargs):
        super().__init__(**kwargs)
        self.head_dim = head_dim
        self.parameters = dict(parameters)
        frequencies, factor = inverse_frequencies(parameters, head_dim)
        self.frequencies = frequencies
        self.attention_factor = factor
        self.built = True

    def call(self, inputs, start_index=0, positions=None):
        if positions is None:
            positions = ops.arange(ops.shape(inputs)[1], dtype="float32")
            positions = positions + ops.cast(start_index, "float32")
        positions = ops.cast(positions, "float32")
        if len(positions.shape) == 1:
            positions = ops.expand_dims(positions, 0)
        angles = ops.expand_dims(positions, -1) * self.frequencies
        if len(inputs.shape) == 4:
            angles = ops.expand_dims(angles, 2)
        cos = ops.cast(ops.cos(angles) * self.attention_factor, inputs.dtype)
        sin = ops.cast(ops.sin(angles) * self.attention_factor, inputs.dtype)
        first, second = ops.split(inputs, 2, axis=-1)
        # Stacked and reshaped as in KerasHub, because XLA's partitioner has
        # had bugs with a concatenation here.
        rotated = ops.stack(
            (first * cos - second * sin, second * cos + first * sin), axis=-2
        )
        return ops.reshape(rotated, ops.shape(inputs))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        config = super().get_config()
        config["head_dim"] = self.head_dim
        config["parameters"] = dict(self.parameters)
        return config


def parameters_of(layer):
    """Returns the `rope_parameters` of our rotary layer or of KerasHub's."""
    if isinstance(layer, RotaryEmbedding):
        return dict(layer.parameters)
    theta = float(layer.max_wavelength)
    found = {"rope_type": "default", "rope_theta": theta}
    if hasattr(layer, "low_freq_factor"):
        # Llama's layer, which does not use its `position_scaling_factor`.
        if layer.low_freq_factor is not None:
            found = {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": layer.frequency_adjustment_factor,
                "low_freq_factor": layer.low_freq_factor,
                "high_freq_factor": layer.high_freq_factor,
                "original_max_position_embeddings": (
                    layer.pretraining_sequence_length
                ),
            }
        return found
    if layer.rope_type != "linear":
        raise ValueError(
            "Only KerasHub rotary layers with rope_type='linear' can be "
            f"described. Received: rope_type={layer.rope_type!r}"
        )
    if layer.scaling_factor != 1:
        found["rope_type"] = "linear"
        found["factor"] = float(layer.scaling_factor)
    return found
