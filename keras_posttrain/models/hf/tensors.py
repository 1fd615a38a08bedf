"""The Hugging Face names, shapes and axes of KerasHub's weights."""

import dataclasses
import math

import keras
import numpy as np

from keras_posttrain.models.hf.families import FAMILIES, attribute, family_of


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


def model_tensors(causal_lm):
    """Every weight of a model with its Hugging Face name and shape.

    A tied head has no entry of its own.

    Args:
        causal_lm: a built KerasHub `CausalLM` of a family in `FAMILIES`.

    Returns:
        A list of `Tensor`.

    Raises:
        ValueError: if the family has no table, or weights are quantized.
    """
    family = known_family(causal_lm)
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
    family = known_family(causal_lm)
    return {
        f"model.layers.{i}.{name}": attribute(layer, path)
        for i, layer in enumerate(causal_lm.backbone.transformer_layers)
        for name, path in family.modules.items()
        if name.endswith("_proj")
    }


def known_family(causal_lm):
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
