"""The Hugging Face names, shapes and axes of KerasHub's weights."""

import dataclasses
import math

import keras
import numpy as np

from keras_posttrain.models import device_transfer
from keras_posttrain.models.hf.families import (
    CONVOLUTION,
    FAMILIES,
    attribute,
    family_of,
    is_linear,
    is_norm,
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A box of a variable, as it stands in a Hugging Face tensor.

    Attributes:
        variable: `keras.Variable`.
        axes: tuple that has, for each axis of the tensor, the axes of the
            variable that it combines, the slowest-varying first. An axis
            that is not in it has the size 1 in the box.
        box: tuple of slices, or `None` for the whole variable.
    """

    variable: keras.Variable
    axes: tuple
    box: tuple | None = None

    @property
    def bounds(self):
        """List of `(start, stop)` for each axis of the variable."""
        sizes = self.variable.shape
        if self.box is None:
            return [(0, size) for size in sizes]
        return [x.indices(n)[:2] for x, n in zip(self.box, sizes)]

    @property
    def sizes(self):
        """List of the sizes of the box."""
        return [stop - start for start, stop in self.bounds]

    @property
    def shape(self):
        """Tuple of ints, the shape in the tensor."""
        sizes = self.sizes
        return tuple(math.prod(sizes[a] for a in axes) for axes in self.axes)

    @property
    def _order(self):
        """The variable's axes in the tensor's order, unused ones first."""
        order = [axis for axes in self.axes for axis in axes]
        return [a for a in range(len(self.sizes)) if a not in order] + order

    def take(self, array):
        """Returns the box of an array of the variable's shape."""
        return array if self.box is None else array[self.box]

    def to_hf(self, array):
        """Converts an array from the box's shape to the tensor's."""
        return array.transpose(self._order).reshape(self.shape)

    def read(self, stored, index, start=0, axis=0):
        """Reads a part of the box, and little more of the file.

        Args:
            stored: object that returns a part of the stored tensor for a
                tuple of slices, such as safetensors' `PySafeSlice`.
            index: tuple of slices without steps, one for each axis of the
                variable, within the box.
            start: int, where this part begins in the stored tensor.
            axis: int, the tensor's axis of `start`.
        """
        shape = self.sizes
        index = [slice(*x.indices(n)[:2]) for x, n in zip(index, shape)]
        ranges, places = [], []
        for axes in self.axes:
            sizes = [shape[axis] for axis in axes]
            flat = np.arange(math.prod(sizes)).reshape(sizes)
            flat = flat[tuple(index[axis] for axis in axes)].reshape(-1)
            # If an inner axis is split, the part is not contiguous: the
            # range around it is read and the part taken out of it below.
            ranges.append([int(flat[0]), int(flat[-1]) + 1])
            places.append(flat - flat[0])
        if ranges:
            # A number has none.
            ranges[axis] = [start + bound for bound in ranges[axis]]
        array = stored[tuple(slice(*bounds) for bounds in ranges)]
        for i, wanted in enumerate(places):
            if len(wanted) < array.shape[i]:
                array = array.take(wanted, i)
        order = self._order
        array = array.reshape([index[a].stop - index[a].start for a in order])
        return array.transpose(np.argsort(order))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Weights of a KerasHub model as a tensor of a Hugging Face checkpoint.

    Attributes:
        name: str.
        parts: tuple of `Part`s that the tensor concatenates.
        axis: int, the axis along which it does.
        is_linear: bool, whether it is the weight `(out, in)` of a linear
            layer, or those of all experts, `(experts, in, out)`: what a
            checkpoint may have quantized.
    """

    name: str
    parts: tuple
    axis: int = 0
    is_linear: bool = False

    @property
    def shape(self):
        """Tuple of ints, the tensor's shape in the checkpoint."""
        shape = list(self.parts[0].shape)
        if len(self.parts) > 1:
            sizes = [part.shape[self.axis] for part in self.parts]
            shape[self.axis] = sum(sizes)
        return tuple(shape)

    @property
    def dtype(self):
        return self.parts[0].variable.dtype

    @property
    def starts(self):
        """List of the places along `axis` where the parts begin."""
        sizes = [part.shape[self.axis] for part in self.parts[:-1]]
        return [sum(sizes[:i]) for i in range(len(self.parts))]

    @property
    def variable(self):
        """The variable of a tensor that is one whole variable, or `None`."""
        [part, *others] = self.parts
        return None if others or part.box is not None else part.variable

    def to_hf(self, values):
        """Returns the tensor as a numpy array.

        Args:
            values: function from a variable to its value, an array.
        """
        found = []
        for part in self.parts:
            array = part.take(values(part.variable))
            array = device_transfer.to_host(array)
            found.append(device_transfer.contiguous(part.to_hf(array)))
        if len(found) == 1:
            return found[0]
        return np.concatenate(found, self.axis)


def arrays_of(tensors, values):
    """Yields the names and the arrays of tensors, one at a time.

    A value that consecutive tensors have parts of, such as the kernel of all
    experts with its adapter merged, is computed once.

    Args:
        tensors: iterable of `Tensor`s.
        values: function from a variable to its value, an array.
    """
    last = {}

    def value(variable):
        if id(variable) not in last:
            last.clear()
            last[id(variable)] = values(variable)
        return last[id(variable)]

    for tensor in tensors:
        yield tensor.name, tensor.to_hf(value)


def model_tensors(causal_lm, stored=()):
    """Lists the weights of a model as Hugging Face tensors.

    A tied head is not listed, as it is the embedding. An unknown family or
    quantized weights raise a `ValueError`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        stored: names of a checkpoint's tensors. Experts are listed as they
            are there: all in one tensor, or by default each in its own.
    """
    family = known_family(causal_lm)
    backbone = causal_lm.backbone
    embedding = backbone.token_embedding
    _check_not_quantized(causal_lm)
    found = [_same("model.embed_tokens.weight", embedding.embeddings)]
    for i, layer in enumerate(backbone.transformer_layers):
        prefix = f"model.layers.{i}."
        found += _layer_tensors(layer, family, prefix)
        bank = family.experts and family.experts.bank(layer)
        if bank is not None and family.experts.names is not None:
            found += _expert_tensors(bank, family.experts, prefix, stored)
    found += _per_layer_tensors(backbone)
    found += _states_tensors(backbone)
    found.append(_same("model.norm.weight", backbone.layer_norm.scale))
    if not embedding.tie_weights:
        head = Part(embedding.reverse_embeddings, ((1,), (0,)))
        found.append(Tensor("lm_head.weight", (head,), is_linear=True))
    return found


def _per_layer_tensors(backbone):
    """Lists the weights by which Gemma 4 has inputs for each layer."""
    embedding = getattr(backbone, "per_layer_token_embedding", None)
    if embedding is None:
        return []
    kernel = backbone.per_layer_model_projection.kernel
    return [
        _same("model.embed_tokens_per_layer.weight", embedding.embeddings),
        Tensor(
            "model.per_layer_model_projection.weight",
            (Part(kernel, ((1,), (0,))),),
        ),
        _same(
            "model.per_layer_projection_norm.weight",
            backbone.per_layer_projection_norm.scale,
        ),
    ]


def _states_tensors(backbone):
    """Lists the projections that make and join Gemma 3n's hidden states."""
    makes = getattr(backbone.transformer_layers[0], "make_states", None)
    if makes is None:
        return []
    found = {
        "altup_projections": makes,
        "altup_unembed_projections": backbone.layer_norm.join,
    }
    return [
        Tensor(
            f"model.{name}.{i}.weight",
            (Part(projection.kernel, ((1,), (0,))),),
        )
        for name, layer in found.items()
        for i, projection in enumerate(layer.projections)
    ]


def _layer_tensors(layer, family, prefix):
    parts = {}
    for name, path in family.modules_of(layer).items():
        module = attribute(layer, path)
        if isinstance(module, keras.Variable):
            # Hugging Face stores a number with one axis.
            axes = tuple((i,) for i in range(module.ndim)) or ((),)
            if name == CONVOLUTION:
                axes = ((0,), (), (1,))
            parts[name] = (Part(module, axes),)
            continue
        if is_norm(name):
            parts[f"{name}.weight"] = _same("", module.scale).parts
            continue
        parts[f"{name}.weight"] = (_kernel(name, module.kernel, family),)
        if module.bias is not None:
            parts[f"{name}.bias"] = (_bias(module.bias),)
    for whole, names in family.fused.items():
        for end in ("weight", "bias"):
            inside = [parts.pop(f"{name}.{end}", ()) for name in names]
            if any(inside):
                parts[f"{whole}.{end}"] = sum(inside, ())
    found = [
        Tensor(
            prefix + name,
            own,
            is_linear=is_linear(name.removesuffix(".weight")),
        )
        for name, own in parts.items()
    ]
    for name, path in family.parameters.items():
        [part] = _same("", attribute(layer, path)).parts
        found.append(Tensor(prefix + name, (part,), is_linear=is_linear(name)))
    return found


def _expert_tensors(bank, experts, prefix, stored):
    """Lists the experts of a layer, whose kernels are `(experts, in, out)`."""
    count = bank.num_experts
    stacked = [prefix + name for name in experts.stacked]
    stored = {name.removesuffix(".weight") for name in stored}
    if not experts.names or stacked[0] in stored:
        transposed = ((0,), (2,), (1,))
        gate_up = (
            Part(*_half(bank, where, slice(None), transposed))
            for where in (experts.gate, experts.up)
        )
        down = Part(getattr(bank, experts.down), transposed)
        return [
            Tensor(stacked[0], tuple(gate_up), axis=1),
            Tensor(stacked[1], (down,)),
        ]
    places = {
        "gate": experts.gate,
        "up": experts.up,
        "down": (experts.down, None),
    }
    return [
        Tensor(
            f"{prefix}{experts.names[part].format(i)}.weight",
            (Part(*_half(bank, where, slice(i, i + 1), ((2,), (1,)))),),
            is_linear=True,
        )
        for part, where in places.items()
        for i in range(count)
    ]


def _half(bank, where, rows, axes):
    """Returns the arguments of the `Part` of some experts."""
    name, half = where
    variable = getattr(bank, name)
    columns = slice(None)
    if half is not None:
        size = variable.shape[-1] // 2
        columns = slice(half * size, (half + 1) * size)
    return variable, axes, (rows, slice(None), columns)


def linear_layers(causal_lm):
    """Returns the decoder's linear layers by Hugging Face module name.

    An unknown family raises a `ValueError`.
    """
    family = known_family(causal_lm)
    return {
        f"model.layers.{i}.{name}": attribute(layer, path)
        for i, layer in enumerate(causal_lm.backbone.transformer_layers)
        for name, path in family.modules_of(layer).items()
        if is_linear(name)
    }


def linear_modules(causal_lm):
    """Returns lists of the decoder's linear layers by Hugging Face module.

    A module has several where the checkpoint fuses them.
    """
    family = known_family(causal_lm)
    fused = {part: name for name, own in family.fused.items() for part in own}
    found = {}
    for name, layer in linear_layers(causal_lm).items():
        *prefix, parent, last = name.split(".")
        whole = fused.get(f"{parent}.{last}", f"{parent}.{last}")
        found.setdefault(".".join((*prefix, whole)), []).append(layer)
    return found


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
    axes = tuple((i,) for i in range(variable.ndim))
    return Tensor(name, (Part(variable, axes),))


def _bias(variable):
    return Part(variable, (tuple(range(variable.ndim)),))


def _kernel(name, variable, family):
    """Returns the part of a projection's kernel, `(out, in)`."""
    order = tuple(range(variable.ndim))
    num_inputs = 1
    if name.endswith("o_proj"):
        num_inputs = 2
    elif family.layers.heads_first and "self_attn." in name:
        order = (1, 0, 2)
    return Part(variable, (order[num_inputs:], order[:num_inputs]))
