"""Faster linear layers on flattened tokens, for XLA's CPU backend."""

import contextlib
import contextvars
import math
import re

import jax
import jax.numpy as jnp
import keras

KINDS = (keras.layers.Dense, keras.layers.EinsumDense)


class Products:
    """How linear layers compute, see `products_by`."""

    def multiply(self, layer, equation, inputs, kernel):
        """Computes `multiply` of a layer's inputs and kernel.

        Args:
            layer: `Dense` or `EinsumDense`.
            equation: str, without the length axis.
            inputs: array of shape `(tokens, 1, ...)`.
            kernel: array.
        """
        return multiply(equation, jnp.squeeze(inputs, 1), kernel)

    def low_rank(self, layer, x, a, b, scale):
        """Computes the low-rank part of an adapted layer's outputs.

        Args:
            layer: `Dense` or `EinsumDense`.
            x: array of shape `(tokens, in)`.
            a, b: arrays of shape `(rank, in)` and `(rank, out)`.
            scale: float.
        """
        low = jax.lax.dot_general(x, a, (((1,), (1,)), ((), ())))
        return (low * scale) @ b


_PLAIN = Products()
_PRODUCTS = contextvars.ContextVar("products", default=_PLAIN)


@contextlib.contextmanager
def products_by(products):
    """Uses other `Products` inside, for layers of `flatten_tokens`."""
    token = _PRODUCTS.set(products)
    try:
        yield
    finally:
        _PRODUCTS.reset(token)


def low_rank(*arguments):
    """Computes `Products.low_rank` of the present scope."""
    return _PRODUCTS.get().low_rank(*arguments)


class MatrixAxes:
    """How the axes of a linear layer's kernel map to those of a matrix.

    Args:
        layer: a built `Dense` or `EinsumDense`.
        shape: tuple of ints, the kernel's, if the layer does not have one.

    Attributes:
        kernel_shape: tuple of ints.
        in_shape, out_shape: lists of ints, sizes of the kernel's axes that
            are summed over and kept; the rows and columns of the matrix.
        to_kernel: list of ints, the place of each axis of the kernel in
            `in_shape + out_shape`.
    """

    def __init__(self, layer, shape=None):
        equation = equation_of(layer)
        if "..." in equation:
            raise ValueError(
                "The equation of a linear layer must name its axes. "
                f"Received: layer {layer.path!r} with {equation!r}"
            )
        inputs, kernel, output = re.split("[,]|->", equation)
        rows = [x for x in inputs if x in kernel]
        columns = [x for x in output if x in kernel]
        self.kernel_shape = tuple(shape or layer.kernel.shape)
        size = dict(zip(kernel, self.kernel_shape))
        self.in_shape = [size[x] for x in rows]
        self.out_shape = [size[x] for x in columns]
        flat = "".join(rows + columns)
        self.to_kernel = [flat.index(x) for x in kernel]

    @property
    def in_size(self):
        return math.prod(self.in_shape)

    @property
    def out_size(self):
        return math.prod(self.out_shape)

    def to_kernel_axes(self, matrix):
        """Converts a matrix `(in, out)` to the kernel's shape."""
        whole = matrix.reshape(*self.in_shape, *self.out_shape)
        return whole.transpose(self.to_kernel)

    def to_matrix(self, kernel):
        """Converts a kernel to a matrix `(in, out)`."""
        order = sorted(range(kernel.ndim), key=self.to_kernel.__getitem__)
        return kernel.transpose(order).reshape(self.in_size, self.out_size)

    def of_matrix(self, axes):
        """Returns the mesh axis of rows and of columns, or `None`s.

        `axes` has a mesh axis or `None` for each axis of the kernel. An axis
        of the matrix may combine several; it is split if one of them is.
        """
        found = [None] * len(self.to_kernel)
        for axis, place in zip(axes, self.to_kernel):
            found[place] = axis
        count = len(self.in_shape)
        rows = next(filter(None, found[:count]), None)
        return rows, next(filter(None, found[count:]), None)


def flatten_tokens(layer):
    """Makes a linear layer drop the length axis of flattened tokens.

    `models/attention.py` passes tokens as `(tokens, 1, features)`. The
    gradient of a kernel then sums over two axes, which is slow on XLA's CPU
    backend. The outputs of the layer are the same. A training step of two
    layers of Qwen 3 or Gemma takes 1.11 to 1.17 times the CPU time without
    this (4 rows of 256 tokens, 512 features, all weights trained); under
    LoRA, which needs no gradient of the kernels, there is no difference.
    The layer's `call` is replaced. Returns whether this was possible.
    """
    if getattr(layer, "quantization_mode", None) is not None:
        return False
    plain_call = layer.call
    equation = _without_length(getattr(layer, "equation", "btd,do->bto"))
    if equation is None:
        return False

    def call(inputs, *args, **kwargs):
        if inputs.ndim < 3 or inputs.shape[1] != 1:
            return plain_call(inputs, *args, **kwargs)
        kernel = jnp.asarray(layer.kernel, inputs.dtype)
        outputs = _PRODUCTS.get().multiply(layer, equation, inputs, kernel)
        if layer.bias is not None:
            # The bias has the shape of the output's last axes.
            outputs = outputs + jnp.asarray(layer.bias, outputs.dtype)
        if layer.activation is not None:
            outputs = layer.activation(outputs)
        return jnp.expand_dims(outputs, 1)

    layer.call = call
    return True


def sublayers(layer):
    """Returns a layer and all layers inside it.

    Keras has no public way to list the layers inside a layer that is not a
    `keras.Model`; this is the one use of its private method.
    """
    return layer._flatten_layers()


@contextlib.contextmanager
def replaced_calls(calls):
    """Replaces the `call` of layers inside.

    `calls` is an iterable of pairs of a layer and what replaces its `call`.
    """
    with contextlib.ExitStack() as stack:
        for layer, call in calls:
            own = vars(layer)
            if "call" in own:
                stack.callback(own.__setitem__, "call", own["call"])
            else:
                stack.callback(own.pop, "call")
            own["call"] = call
        yield


def multiply(equation, x, kernel):
    """Computes an einsum of tokens and a kernel as one matrix product.

    For a kernel that is summed over two axes, the einsum of XLA's CPU backend
    would transpose the kernel at every call.
    """
    inputs, rest = equation.split(",")
    axes, output = rest.split("->")
    summed, kept = inputs[1:], output[1:]
    if axes != summed + kept:
        return jnp.einsum(equation, x, kernel)
    shape = kernel.shape[len(summed) :]
    size = math.prod(kernel.shape[: len(summed)])
    out = x.reshape(-1, size) @ kernel.reshape(size, -1)
    return out.reshape(-1, *shape)


def _without_length(equation):
    """Removes the length axis; returns `None` if that is not possible."""
    inputs, rest = equation.split(",")
    kernel, output = rest.split("->")
    length = inputs[1]
    if length in kernel or output[:2] != inputs[:2]:
        return None
    return ",".join(
        [
            inputs.replace(length, ""),
            f"{kernel}->" + output.replace(length, ""),
        ]
    )


def flatten_linear_layers(backbone):
    """Applies `flatten_tokens` to the linear layers of a backbone, once."""
    for layer in sublayers(backbone):
        if is_linear(layer) and not hasattr(layer, "kpt_flat"):
            layer.kpt_flat = flatten_tokens(layer)


def is_flat(layer):
    """Returns whether a layer's products are those of `products_by`."""
    return getattr(layer, "kpt_flat", False)


def is_linear(layer):
    """Returns whether a layer is a matrix product."""
    return isinstance(layer, KINDS)


def equation_of(layer):
    """Returns the einsum of a matrix product."""
    return getattr(layer, "equation", "bd,do->bo")
