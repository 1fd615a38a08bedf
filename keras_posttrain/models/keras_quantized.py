"""Models that Keras has quantized: their layers become those used here.

`causal_lm.quantize("int8")`, and presets saved after it, have layers that
Keras runs by another method than `call`, without an adapter. Their codes are
put in a `QuantizedKernel` where they are on a grid of `models/quantized.py`.
"""

import dataclasses

import keras
import numpy as np

from keras_posttrain import _console, _variables
from keras_posttrain.models import device_transfer, quantized
from keras_posttrain.models.hf.families import FAMILIES, family_of
from keras_posttrain.models.hf.tensors import linear_layers
from keras_posttrain.models.linear import MatrixAxes, sublayers
from keras_posttrain.models.quantized import Quantization, Storage

# The names of what Keras stores of a linear layer, and of an embedding.
_LINEAR = (
    "_kernel",
    "quantized_kernel",
    "kernel_scale",
    "kernel_zero",
    "g_idx",
    "awq_scales",
)
_EMBEDDING = (
    "_embeddings",
    "embeddings_scale",
    "embeddings_zero",
    "g_idx",
    "reverse_embeddings",
    "reverse_embeddings_scale",
    "reverse_embeddings_zero",
)


def take_over(causal_lm, quantization=None):
    """Replaces the layers that Keras has quantized, one after the other.

    The model is changed. Linear layers of the decoder keep their codes where
    these are on a grid of ours, and become floats elsewhere; embedding and
    head become floats. Their inputs, which Keras rounds to int8 too by
    default, are not rounded afterwards. Lines say what was done.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        quantization: `None` to keep codes, `"none"` to make floats of them,
            or a `Quantization` to round the linear layers again.

    Returns:
        Bool, whether the model has codes now that Keras had made.

    Raises:
        ValueError: for what cannot be read, such as float8; nothing is
            changed then.
    """
    found = _found(causal_lm)
    if not found:
        return False
    names = _check(causal_lm, found)
    modes = ", ".join(sorted({_mode(layer) for layer in found}))
    done, has_codes = {}, False
    for layer in found:
        name = names.get(id(layer))
        if name is None:
            what = _embedding_as_floats(layer)
        else:
            what, stored = _replace(name, layer, quantization)
            has_codes |= stored
        done.setdefault(what, []).append(layer.path)
    _set_plain_policies(causal_lm)
    if has_codes:
        causal_lm.trainable = False
        own = isinstance(quantization, Quantization)
        kind = quantization if own else f"Keras {modes}"
        vars(causal_lm)["kpt_quantization"] = kind
    for what, paths in done.items():
        more = f" and {len(paths) - 1} more" if paths[1:] else ""
        _console.say(f"Quantized by Keras ({modes}): {what}: {paths[0]}{more}")
    return has_codes


def is_quantized(causal_lm):
    """Returns whether the model has layers that Keras has quantized."""
    return bool(_found(causal_lm))


def _found(causal_lm):
    return [x for x in sublayers(causal_lm.backbone) if _mode(x)]


def _mode(layer):
    return getattr(layer, "quantization_mode", None)


def _check(causal_lm, found):
    """Checks what Keras has quantized; returns names of linear layers."""
    if family_of(causal_lm) is None:
        raise ValueError(
            "Of models that Keras has quantized, text models of "
            f"{sorted(FAMILIES)} can be read. Received: backbone of class "
            f"{type(causal_lm.backbone).__name__} with "
            f"quantization_mode={_mode(found[0])!r}. Load the model without "
            "`quantize`."
        )
    linear = linear_layers(causal_lm)
    names = {id(layer): name for name, layer in linear.items()}
    for layer in found:
        mode = _mode(layer)
        name = names.get(id(layer), layer.path)
        received = f"Received: layer {name!r} with quantization_mode={mode!r}"
        known = id(layer) in names
        known |= layer is causal_lm.backbone.token_embedding
        if not known or mode not in _READERS:
            raise ValueError(
                f"Of Keras's modes {list(_READERS)} can be read, in linear "
                "layers of the decoder and in the embedding. Load the model "
                "without `quantize`; `from_preset` has an argument "
                f"`quantize`. {received}"
            )
        if getattr(layer, "lora_enabled", False):
            raise ValueError(
                "Keras's own LoRA is enabled on this model; it trains other "
                "matrices, which no other library reads. Load the model again "
                f"and pass `lora=kpt.LoRA(...)` alone. {received}"
            )
        if hasattr(layer.call, "adapter"):
            raise ValueError(
                "The model was quantized after a task had put an adapter on "
                "it, which Keras does not call any more. Load the model "
                "again, and quantize it before a task is made of it. "
                f"{received}"
            )
    return names


# Linear layers


@dataclasses.dataclass(frozen=True)
class Grid:
    """A weight as Keras stores it: `(codes - zeros) * scales / divisors`.

    Attributes:
        kind: `"int8"` or `"int4"`.
        codes: int8 array `(rows, columns)`.
        scales: float32 array `(groups, columns)`.
        groups: int array `(rows,)`, the group of each row.
        zeros: int8 array `(groups, columns)`, or `None` for 0.
        divisors: float32 array `(rows,)`, or `None` for 1.
        is_matrix: bool, whether rows and columns are those of the layer's
            matrix, and not the kernel's axes in their order.
    """

    kind: str
    codes: np.ndarray
    scales: np.ndarray
    groups: np.ndarray
    zeros: np.ndarray | None = None
    divisors: np.ndarray | None = None
    is_matrix: bool = True

    @property
    def storage(self):
        """`Storage` of the codes; right where `why_floats` is `None`."""
        rows = len(self.codes) // len(self.scales)
        has_zeros = self.zeros is not None
        return Storage(self.kind, rows, False, has_zeros, "float32")

    def why_floats(self):
        """Returns why the grid is none of ours, or `None`."""
        rows, size = len(self.codes), self.storage.rows
        if not self.is_matrix:
            return "the groups are not rows of the matrix"
        if self.divisors is not None:
            return "each row has a divisor"
        if rows % size or self.kind == "int4" and size % 2:
            return "the groups do not divide the rows"
        if (self.groups != np.arange(rows) // size).any():
            return "rows far apart share a group"
        return None

    def floats(self, axes):
        """Computes the kernel, float32, for its `MatrixAxes`."""
        values = self.codes.astype("float32")
        if self.zeros is not None:
            values -= self.zeros.astype("float32")[self.groups]
        values *= self.scales[self.groups]
        if self.divisors is not None:
            values /= self.divisors[:, None]
        if self.is_matrix:
            return axes.to_kernel_axes(values)
        return values.reshape(axes.kernel_shape)


def _replace(name, layer, quantization):
    """Replaces what Keras stores of a linear layer.

    Returns:
        What was done, for a message, and whether the layer has codes.
    """
    mode = _mode(layer)
    axes = MatrixAxes(layer, _kernel_shape(layer))
    grid, values = _READERS[mode](layer, axes), None
    if grid is None:
        values = _host(layer._kernel)
    _strip(layer, _LINEAR)
    _add_weight(layer, "_kernel", "kernel", axes.kernel_shape)
    why = "quantize='none'" if grid else "Keras has not calibrated them"
    if grid and quantization is None:
        why = grid.why_floats()
        if why is None:
            kernel = quantized.store_as_codes(name, layer, grid.storage)
            kernel.fill_codes(grid.codes, grid.scales, grid.zeros)
            rounds = mode == "int8" and layer.inputs_quantizer
            return _KEPT + _INPUTS * bool(rounds), True
    values = grid.floats(axes) if grid else values
    if isinstance(quantization, Quantization):
        storage = quantization.storage(axes.in_size, name)
        kernel = quantized.store_as_codes(name, layer, storage)
        kernel.fill(values.__getitem__)
        return f"rounded again, to {quantization.kind}", True
    device_transfer.fill(layer._kernel, values.__getitem__)
    return f"read as floats, since {why}", False


_KEPT = "codes are kept"
_INPUTS = "; the layers' inputs, which Keras rounds too, are not rounded"


def _kernel_shape(layer):
    """Returns the shape of a kernel before Keras quantized it."""
    if _mode(layer) == "int8":
        return tuple(layer._kernel.shape)
    if isinstance(layer, keras.layers.EinsumDense):
        return tuple(layer.original_kernel_shape)
    if _mode(layer) == "int4":
        return layer._orig_input_dim, layer._orig_output_dim
    return tuple(layer.kernel_shape)


def _read_int8(layer, axes):
    scale = layer.kernel_scale.value
    if isinstance(layer, keras.layers.EinsumDense):
        scale = layer._adjust_scale_for_dequant(scale)
    # Keras divides by it. It has the kernel's axes, one number along each
    # that is summed over.
    scale = 1 / device_transfer.to_host(scale).astype("float32")
    scale = axes.to_matrix(np.broadcast_to(scale, axes.kernel_shape))[:1]
    codes = axes.to_matrix(_host(layer._kernel))
    return Grid("int8", codes, scale, np.zeros(len(codes), int))


def _read_int4(layer, axes):
    columns = layer.kernel_scale.shape[-1]
    codes = _unpacked(layer._kernel, columns, -1, "int8")
    scales = _host(layer.kernel_scale).astype("float32")
    is_matrix = _is_matrix(codes, axes)
    if scales.ndim == 1:
        # Without groups Keras divides by it.
        scales, groups = 1 / scales[None], np.zeros(len(codes), int)
        return Grid("int4", codes, scales, groups, is_matrix=is_matrix)
    zeros = _host(layer.kernel_zero)
    groups = _host(layer.g_idx).astype(int)
    zeros = zeros if zeros.any() else None
    return Grid("int4", codes, scales, groups, zeros, is_matrix=is_matrix)


def _read_calibrated(layer, axes):
    """Reads GPTQ and AWQ, which are stored as `(columns, rows)`, from 0 on.

    Returns `None` for a layer that Keras has not calibrated.
    """
    if not getattr(layer, f"is_{_mode(layer)}_calibrated", False):
        return None
    stored, columns = layer.quantized_kernel, layer.kernel_scale.shape[0]
    if stored.shape[0] == columns:
        codes = _host(stored)
    else:
        codes = _unpacked(stored, columns, 0, "uint8")
    codes, zeros = codes.T, _host(layer.kernel_zero).T
    bits = 4 if max(codes.max(), zeros.max()) < 16 else 8
    middle = 2 ** (bits - 1)
    codes, zeros = (
        (x.astype("int16") - middle).astype("int8") for x in (codes, zeros)
    )
    divisors = None
    if hasattr(layer, "awq_scales"):
        divisors = _host(layer.awq_scales).astype("float32")
        divisors = divisors if (divisors != 1).any() else None
    return Grid(
        f"int{bits}",
        codes,
        _host(layer.kernel_scale).astype("float32").T,
        _host(layer.g_idx).astype(int),
        zeros if zeros.any() else None,
        divisors,
        _is_matrix(codes, axes),
    )


_READERS = {
    "int8": _read_int8,
    "int4": _read_int4,
    "gptq": _read_calibrated,
    "awq": _read_calibrated,
}


def _is_matrix(codes, axes):
    """Returns whether the flattened rows of a kernel are the matrix's."""
    in_order = axes.to_kernel == sorted(axes.to_kernel)
    return in_order and codes.shape == (axes.in_size, axes.out_size)


# The embedding


def _embedding_as_floats(layer):
    """Makes floats of an embedding and its head; returns what was done."""
    tables = {"_embeddings": _table(layer, "embeddings")}
    if not getattr(layer, "tie_weights", True):
        # It has one column for each token.
        head = _table(layer, "reverse_embeddings")
        tables["reverse_embeddings"] = head
    _strip(layer, _EMBEDDING)
    for attribute, values in tables.items():
        name = attribute.removeprefix("_")
        _add_weight(layer, attribute, name, values.shape)
        device_transfer.fill(getattr(layer, attribute), values.__getitem__)
    return "read as floats, since embedding and head are not quantized here"


def _table(layer, name):
    """Computes one of the two tables of a quantized embedding, float32.

    `embeddings` has a scale for each row, or for groups of columns; of
    `reverse_embeddings` all is transposed.
    """
    is_head = name == "reverse_embeddings"
    codes = layer.reverse_embeddings if is_head else layer._embeddings
    if _mode(layer) == "int4":
        axis = 0 if is_head else -1
        codes = _unpacked(codes, layer.output_dim, axis, "int8")
    else:
        codes = _host(codes)
    scale = _host(getattr(layer, f"{name}_scale")).astype("float32")
    values = (codes.T if is_head else codes).astype("float32")
    if scale.ndim == 1:
        values /= scale[:, None]
    else:
        zero = _host(getattr(layer, f"{name}_zero")).astype("float32")
        if is_head:
            scale, zero = scale.T, zero.T
        groups = _host(layer.g_idx).astype(int)
        values -= zero[:, groups]
        values *= scale[:, groups]
    return values.T if is_head else values


# Variables and dtypes


def _host(variable):
    return device_transfer.to_host(variable.value)


def _unpacked(variable, size, axis, dtype):
    codes = keras.quantizers.unpack_int4(
        variable.value, size, axis=axis, dtype=dtype
    )
    return device_transfer.to_host(codes)


def _strip(layer, parts):
    """Removes what Keras made when it quantized a layer."""
    for part in parts:
        if isinstance(vars(layer).get(part), keras.Variable):
            _variables.remove(layer, part)
    layer._is_quantized = False
    layer._dtype_policy = _plain_policy(layer)


def _add_weight(layer, attribute, name, shape):
    """Adds a variable of floats to a layer, whose value is to be set."""
    layer._tracker.unlock()
    with _variables.without_values():
        setattr(layer, attribute, layer.add_weight(name=name, shape=shape))
    layer._tracker.lock()


def _plain_policy(layer):
    computed, stored = layer.compute_dtype, layer.variable_dtype
    name = computed if computed == stored else f"mixed_{computed}"
    return keras.DTypePolicy(name)


def _set_plain_policies(causal_lm):
    """Replaces maps of dtypes, which a quantized preset is loaded with."""
    for layer in (*sublayers(causal_lm), *sublayers(causal_lm.backbone)):
        if isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap):
            layer._dtype_policy = _plain_policy(layer)
