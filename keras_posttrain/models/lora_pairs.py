"""What a low-rank adapter adds to: a layer, fused layers, or experts.

`Pair` has the interface; the others are used in its place.
"""

import functools

import keras

from keras_posttrain.models import sharding
from keras_posttrain.models.linear import MatrixAxes


class Pair:
    """An adapted layer: how its kernel's axes map to those of a matrix.

    `layer` is a built `Dense` or `EinsumDense`, `name` Hugging Face's name.
    """

    # The axes of A and B, for each axis of PEFT's tensors.
    peft_axes = {"A": ((1,), (0,)), "B": ((1,), (0,))}

    def __init__(self, name, layer):
        self.name, self.layer = name, layer
        self.axes = MatrixAxes(layer)
        self.plain_call = layer.call
        self.base = self.number = None

    @property
    def in_size(self):
        return self.axes.in_size

    @property
    def out_size(self):
        return self.axes.out_size

    @property
    def layers(self):
        """List of the layers whose `call` is replaced."""
        return [self.layer]

    @property
    def kernels(self):
        """List of the variables that the adapter adds to."""
        return [self.layer.kernel]

    @property
    def variables(self):
        return self.layer.variables

    def factor_shapes(self, rank):
        """Returns the shapes of A and B."""
        return (self.in_size, rank), (rank, self.out_size)

    def factor_layouts(self):
        """Returns the layouts of A and B."""
        return sharding.factor_layouts(self)

    def columns(self, kernel, b):
        """Returns the part of B that belongs to one of `kernels`."""
        return b

    def kernel_axes(self, kernel):
        """Returns the shape of `A @ B`, split, and the order of its axes."""
        shape = (*self.axes.in_shape, *self.axes.out_shape)
        return shape, tuple(self.axes.to_kernel)

    def attach(self, adapter, index):
        """Makes the layer add the low-rank part."""
        self.number = index
        self.layer.call = adapter.adapted_call(self)

    def detach(self):
        """Undoes `attach`."""
        self.layer.call = self.plain_call


class FusedPair:
    """Linear layers of one input that are one module in the checkpoint.

    Has the interface of `Pair`. The layers share A; B has their columns one
    after the other, as the module's outputs are. Phi-3's `qkv_proj` is one.
    """

    peft_axes = Pair.peft_axes

    def __init__(self, name, layers):
        self.name = name
        self.pairs = [Pair(name, layer) for layer in layers]
        self.base = None

    @property
    def in_size(self):
        return self.pairs[0].in_size

    @property
    def out_size(self):
        return sum(pair.out_size for pair in self.pairs)

    @property
    def layers(self):
        return [pair.layer for pair in self.pairs]

    @property
    def kernels(self):
        return [layer.kernel for layer in self.layers]

    @property
    def variables(self):
        return [v for layer in self.layers for v in layer.variables]

    def factor_shapes(self, rank):
        return (self.in_size, rank), (rank, self.out_size)

    def factor_layouts(self):
        a, b = sharding.factor_layouts(self.pairs[0])
        if b is None:
            return None, None
        # The layers' columns begin anywhere in it.
        return a, keras.distribution.TensorLayout((None, None), b.device_mesh)

    def _slices(self):
        first = 0
        for pair in self.pairs:
            yield pair, slice(first, first + pair.out_size)
            first += pair.out_size

    def columns(self, kernel, b):
        for pair, part in self._slices():
            if pair.layer.kernel is kernel:
                return b[:, part]
        raise KeyError(kernel.path)

    def kernel_axes(self, kernel):
        for pair in self.pairs:
            if pair.layer.kernel is kernel:
                return pair.kernel_axes(kernel)
        raise KeyError(kernel.path)

    def attach(self, adapter, index):
        for pair, part in self._slices():
            pair.number = index
            pair.layer.call = adapter.adapted_call(pair, part)

    def detach(self):
        for pair in self.pairs:
            pair.detach()


class ExpertPair:
    """The kernels of all experts of a layer, each with its own A and B.

    Has the interface of `Pair`, of an `ExpertKernels`. A has the shape
    `(experts, in, rank)`, B `(experts, rank, out)`. PEFT stores them with the
    experts in the axis of the rank, of A the slowest and of B the fastest.
    """

    peft_axes = {"A": ((0, 2), (1,)), "B": ((2,), (1, 0))}

    def __init__(self, stack):
        self.stack, self.name = stack, stack.name
        self.base = None

    @property
    def layers(self):
        return []

    @property
    def in_size(self):
        return self.stack.kernels[0].shape[1]

    @property
    def out_size(self):
        return sum(kernel.shape[2] for kernel in self.stack.kernels)

    @property
    def kernels(self):
        return self.stack.kernels

    @property
    def variables(self):
        return self.stack.kernels

    def factor_shapes(self, rank):
        count = self.stack.kernels[0].shape[0]
        return (count, self.in_size, rank), (count, rank, self.out_size)

    def factor_layouts(self):
        return sharding.expert_factor_layouts(self.stack.kernels[0])

    def columns(self, kernel, b):
        first = 0
        for each in self.stack.kernels:
            if each is kernel:
                return b[..., first : first + each.shape[2]]
            first += each.shape[2]
        raise KeyError(kernel.path)

    def kernel_axes(self, kernel):
        return tuple(kernel.shape), (0, 1, 2)

    def attach(self, adapter, index):
        self.stack.factors.append(
            functools.partial(adapter.expert_factors, index)
        )

    def detach(self):
        self.stack.factors.pop()
