"""Rotary embeddings with the frequencies of a Hugging Face config."""

import math

import keras
import numpy as np
from keras import ops

from keras_posttrain.models.linear import sublayers

# The fields of each type of `rope_scaling`, in addition to `rope_theta`.
FIELDS = {
    # A layer that does not rotate.
    "none": (),
    "default": (),
    "linear": ("factor",),
    # It differs from "default" only beyond `max_position_embeddings`, which
    # no task takes.
    "dynamic": ("factor",),
    # A part of the pairs of a head turns, the others not at all. Each pair
    # has the frequency that it would have if all did.
    "proportional": ("partial_rotary_factor", "factor"),
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
    # Two sets of frequencies, see `RotaryEmbedding.is_long`.
    "longrope": (
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "attention_factor",
    ),
}
# Older names in configs of Phi 3.
SAME = {"su": "longrope"}


def rope_parameters(config, layer_type=None, partial_rotary=False):
    """Reads the parameters of a layer's rotary embedding from a config.

    Configs store them in `rope_scaling` and `rope_theta` (up to
    transformers 4) or in `rope_parameters` (transformers 5), which has an
    entry for each type of layer if these differ. Defaults of the config must
    be filled in.

    Returns a dict of `rope_type`, `rope_theta`, the fields of that type, and
    `partial_rotary_factor` where a part of each head is rotated. If a field
    is missing or cannot be represented, it raises a `ValueError`.

    Args:
        layer_type: `"full_attention"` or `"sliding_attention"` in a family
            with two types of layers (Gemma 3), else `None`.
        partial_rotary: bool, whether models of this type rotate a part of a
            head where `partial_rotary_factor` says so.
    """
    if layer_type is None:
        found = _shared(config)
    else:
        found = _by_layer_type(config, layer_type)
    rope_type = SAME.get(found["rope_type"], found["rope_type"])
    if rope_type not in set(FIELDS) - {"none"}:
        raise ValueError(
            "The config's `rope_scaling` (or `rope_parameters`) has a type "
            "whose formula is not known here. Supported are "
            f"{sorted(set(FIELDS) - {'none'})}. "
            f"Received: rope_type={rope_type!r}"
        )
    partial = found.get("partial_rotary_factor")
    if partial is None:
        partial = config.get("partial_rotary_factor")
    is_whole = partial in (None, 1, 1.0)
    if rope_type == "proportional":
        _complete_proportional(found, partial)
        is_whole = True
    if not is_whole and not (partial_rotary and 0 < partial < 1):
        raise ValueError(
            "Models of this type rotate whole heads in transformers; a part "
            "of a head cannot be represented. "
            f"Received: partial_rotary_factor={partial}"
        )
    if rope_type == "yarn":
        _complete_yarn(found, config)
    if rope_type == "longrope":
        _complete_longrope(found, config)
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
    if not is_whole:
        known["partial_rotary_factor"] = float(partial)
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


def _complete_proportional(found, partial):
    found["partial_rotary_factor"] = 1.0 if partial is None else float(partial)
    found["factor"] = float(found.get("factor") or 1.0)
    if not 0 <= found["partial_rotary_factor"] <= 1:
        raise ValueError(
            "`partial_rotary_factor` must be a number from 0 to 1. "
            f"Received: partial_rotary_factor={partial}"
        )


def _complete_longrope(found, config):
    """Fills in the factor of cosines and sines (Ding et al., 2024)."""
    original = found["original_max_position_embeddings"]
    if found.get("attention_factor") is None and original:
        factor = found.get("factor")
        if factor is None:
            factor = config["max_position_embeddings"] / original
        scale = 1.0
        if factor > 1:
            scale = math.sqrt(1 + math.log(factor) / math.log(original))
        found["attention_factor"] = scale


def rotated_size(parameters, head_dim):
    """Returns the features of a head that are rotated."""
    partial = parameters.get("partial_rotary_factor", 1.0)
    if parameters["rope_type"] == "proportional":
        # Some of them by an angle of 0.
        partial = 1.0
    size = int(head_dim * partial)
    factors = [
        parameters[name]
        for name in ("short_factor", "long_factor")
        if name in parameters
    ]
    if size % 2 or any(len(x) != size // 2 for x in factors):
        raise ValueError(
            "A rotation needs an even number of features, and `short_factor` "
            "and `long_factor` a number for each pair of them. Received: "
            f"head_dim={head_dim}, partial_rotary_factor={partial}, factors "
            f"of lengths {[len(x) for x in factors]}"
        )
    return size


def inverse_frequencies(parameters, head_dim, is_long=False):
    """Computes the radians per position of each pair of features.

    Returns the float32 frequencies, of half as many as are rotated, and the
    factor of the cosines and sines. With `is_long` they are those of
    `"longrope"` for long sequences.
    """
    head_dim = rotated_size(parameters, head_dim)
    theta = parameters["rope_theta"]
    exponents = np.arange(0, head_dim, 2, dtype="float32") / head_dim
    wavelengths = np.power(np.float32(theta), exponents)
    frequencies = np.float32(1) / wavelengths
    rope_type = parameters["rope_type"]
    if rope_type == "none":
        frequencies = np.zeros_like(frequencies)
    elif rope_type == "linear":
        frequencies = frequencies / np.float32(parameters["factor"])
    elif rope_type == "proportional":
        turned = int(parameters["partial_rotary_factor"] * head_dim // 2)
        frequencies = frequencies / np.float32(parameters["factor"])
        frequencies[turned:] = 0
    elif rope_type == "llama3":
        frequencies = _llama3(parameters, frequencies)
    elif rope_type == "yarn":
        frequencies = _yarn(parameters, wavelengths, head_dim)
    elif rope_type == "longrope":
        factors = parameters["long_factor" if is_long else "short_factor"]
        frequencies = np.float32(1) / (np.float32(factors) * wavelengths)
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

    `"longrope"` has frequencies for sequences of up to
    `original_max_position_embeddings` and others for longer ones.
    transformers chooses by the longest sequence of a batch, so that a
    sequence would depend on those next to it, and its keys on when they were
    computed. Here `set_length` chooses once, by the length that the task
    takes, as vLLM does.

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
        self.rotated_size = rotated_size(parameters, head_dim)
        self.is_long = None
        self._choose(is_long=False)
        self.built = True

    def _choose(self, is_long):
        self.frequencies, self.attention_factor = inverse_frequencies(
            self.parameters, self.head_dim, is_long
        )

    def set_length(self, length):
        """Chooses the frequencies by the longest sequence, in tokens.

        A second choice that differs from the first raises a `ValueError`.
        """
        if self.parameters["rope_type"] != "longrope":
            return
        original = self.parameters["original_max_position_embeddings"]
        is_long = length > original
        if self.is_long not in (None, is_long):
            raise ValueError(
                f"This model rotates sequences of more than {original} tokens "
                "in another way than shorter ones, and what uses it together "
                f"must be on one side. Received: sequence_length={length}, "
                f"and the model was made for "
                f"{'longer' if self.is_long else 'shorter'} ones. Load it "
                "again with this `sequence_length`."
            )
        self.is_long = is_long
        self._choose(is_long)

    def call(self, inputs, start_index=0, positions=None):
        if self.parameters["rope_type"] == "none":
            return inputs
        if self.rotated_size < self.head_dim:
            size = self.rotated_size
            turned = self._rotate(inputs[..., :size], start_index, positions)
            return ops.concatenate([turned, inputs[..., size:]], axis=-1)
        return self._rotate(inputs, start_index, positions)

    def _rotate(self, inputs, start_index, positions):
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


def set_sequence_length(causal_lm, length):
    """Chooses the rotation of a model by the longest sequence, in tokens."""
    vars(causal_lm)["kpt_sequence_length"] = length
    for layer in getattr(causal_lm.backbone, "transformer_layers", ()):
        for rotary in sublayers(layer):
            if isinstance(rotary, RotaryEmbedding):
                rotary.set_length(length)


def sequence_length_of(causal_lm):
    """Returns the length of `set_sequence_length`, by default 0."""
    return vars(causal_lm).get("kpt_sequence_length", 0)


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
    if layer.rope_type == "yarn":
        return _keras_hub_yarn(layer, theta)
    if layer.rope_type != "linear":
        raise ValueError(
            "Only KerasHub rotary layers with rope_type='linear' or 'yarn' "
            f"can be described. Received: rope_type={layer.rope_type!r}"
        )
    if layer.scaling_factor != 1:
        found["rope_type"] = "linear"
        found["factor"] = float(layer.scaling_factor)
    return found


def _keras_hub_yarn(layer, theta):
    found = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(layer.scaling_factor),
        "original_max_position_embeddings": (
            layer.original_max_position_embeddings
        ),
        "beta_fast": layer.beta_fast,
        "beta_slow": layer.beta_slow,
        "truncate": layer.truncate,
    }
    _complete_yarn(found, {})
    return found
