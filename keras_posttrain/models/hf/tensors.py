"""The Hugging Face names, shapes and axes of KerasHub's weights."""

import dataclasses
import math

import keras
import numpy as np

from keras_posttrain.models.hf.families import FAMILIES, attribute, family_of


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A weight of a KerasHub model as a tensor of a Hugging Face checkpoint.

    `axes` has, for each axis of the tensor, the axes of the variable that it
    combines, the slowest-varying first.
    """

    name: str
    variable: keras.Variable
    axes: tuple

    @property
    def shape(self):
        """Tuple of ints, the tensor's shape in the checkpoint."""
        sizes = self.variable.shape
        return tuple(math.prod(sizes[a] for a in axes) for axes in self.axes)

    @property
    def is_linear(self):
        """Bool, whether it is the weight `(out, in)` of a linear layer."""
        return self.name.endswith(("_proj.weight", "lm_head.weight"))

    @property
    def _order(self):
        return [axis for axes in self.axes for axis in axes]

    def to_hf(self, array):
        """Converts an array from the variable's shape to the tensor's."""
        return array.transpose(self._order).reshape(self.shape)

    def read(self, stored, index):
        """Reads a part of the variable's value, and little more of the file.

        Args:
            stored: object that returns a part of the stored tensor for a
                tuple of slices, such as safetensors' `PySafeSlice`.
            index: tuple of slices without steps, one for each axis of the
                variable.
        """
        shape = self.variable.shape
        index = [slice(*x.indices(n)[:2]) for x, n in zip(index, shape)]
        ranges, places = [], []
        for axes in self.axes:
            sizes = [shape[axis] for axis in axes]
            flat = np.arange(math.prod(sizes)).reshape(sizes)
            flat = flat[tuple(index[axis] for axis in axes)].reshape(-1)
            # If an inner axis is split, the part is not contiguous: the
            # range around it is read and the part taken out of it below.
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
    """Lists the weights of a model as Hugging Face tensors.

    A tied head is not listed, as it is the embedding. An unknown family or
    quantized weights raise a `ValueError`.
    """
    family = known_family(causal_lm)
    backbone = causal_lm.backbone
    embedding = backbone.token_embedding
    _check_not_quantized(causal_lm)
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
    """Returns the decoder's linear layers by Hugging Face module name.

    An unknown family raises a `ValueError`.
    """
    family = known_family(causal_lm)
    return {
        f"model.layers.{i}.{name}": attribute(layer, path)
        for i, layer in enumerate(causal_lm.backbone.transformer_layers)
        for name, path in family.modules.items()
        if name.endswith("_proj")
    }


def known_family(causal_lm):
    """Returns the `Family` of a model; raises a `ValueError` without one."""
    family = family_of(causal_lm)
    if family is None:
        raise ValueError(
            "The Hugging Face names of this model's weights are not known "
            "(LoRA, PEFT files, export and weight sync need them). Supported "
            f"are text models of {sorted(FAMILIES)}. Received: backbone of "
            f"class {type(causal_lm.backbone).__name__}"
        )
    return family


def _check_not_quantized(causal_lm):
    layers = [causal_lm.backbone.token_embedding]
    layers += linear_layers(causal_lm).values()
    for layer in layers:
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
    """Returns the tensor of a projection's kernel, `(out, in)`."""
    order = tuple(range(variable.ndim))
    num_inputs = 1
    if name.endswith("o_proj"):
        num_inputs = 2
    elif family.heads_first and ".self_attn." in name:
        order = (1, 0, 2)
    axes = (order[num_inputs:], order[:num_inputs])
    return Tensor(f"{name}.weight", variable, axes)
