"""Linear layers on flattened tokens."""

import math

import jax.numpy as jnp
import keras


def flatten_tokens(layer):
    """Lets a linear layer multiply matrices where tokens are flattened.

    `models/attention.py` passes tokens as `(tokens, 1, features)`. The
    gradient of a kernel then sums over two axes, for which XLA's CPU backend
    takes three times as long as over one. The layer computes what it did.

    Args:
        layer: a Keras `Dense` or `EinsumDense`, built.
    """
    if getattr(layer, "quantization_mode", None) is not None:
        return
    plain_call = layer.call
    equation = _without_length(getattr(layer, "equation", "btd,do->bto"))
    if equation is None:
        return

    def call(inputs, *args, **kwargs):
        if inputs.ndim < 3 or inputs.shape[1] != 1:
            return plain_call(inputs, *args, **kwargs)
        x = jnp.squeeze(inputs, 1)
        kernel = jnp.asarray(layer.kernel, x.dtype)
        outputs = multiply(equation, x, kernel)
        if layer.bias is not None:
            # The bias has the axes of the output's end.
            outputs = outputs + jnp.asarray(layer.bias, x.dtype)
        if layer.activation is not None:
            outputs = layer.activation(outputs)
        return jnp.expand_dims(outputs, 1)

    layer.call = call


def multiply(equation, x, kernel):
    """`einsum` of tokens and a kernel, as one product of matrices.

    XLA's CPU backend would transpose a kernel that is summed over two axes
    anew at every call.
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
    """The equation less its second axis, or `None` if it does more to it."""
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
    """`flatten_tokens` for every linear layer of a backbone, once."""
    kinds = (keras.layers.Dense, keras.layers.EinsumDense)
    for layer in backbone._flatten_layers():
        if isinstance(layer, kinds) and not hasattr(layer, "kpt_flat"):
            flatten_tokens(layer)
            layer.kpt_flat = True
