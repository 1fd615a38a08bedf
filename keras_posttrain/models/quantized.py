"""Frozen linear layers whose weights are stored in eight or four bits."""

import dataclasses
import functools
import math
import numbers
from concurrent import futures

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import _console
from keras_posttrain._cores import num_cores
from keras_posttrain.models import device_transfer, sharding
from keras_posttrain.models.hf.families import has_experts
from keras_posttrain.models.hf.tensors import linear_layers
from keras_posttrain.models.linear import MatrixAxes

KINDS = ("int8", "int4", "nf4")
# Rows of a kernel that share a scale, if `group_size` does not say.
GROUP_SIZE = 64
# Numbers of a kernel that a thread quantizes at once, in the CPU's caches.
PART = 2**18
# The values of NF4 (Dettmers et al., 2023, appendix E): quantiles of the
# normal distribution, scaled to [-1, 1].
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the linear layers of a frozen base are stored.

    The kernels of the decoder's linear layers become codes and scales;
    embedding, head, norms and biases stay as they are. A kernel is the matrix
    `(in, out)`, in which `group_size` rows of a column share a scale. Codes
    are not changed by training: a LoRA adapter is trained on top.

    Args:
        kind: `"int8"`, 255 equal steps; `"int4"`, 16 equal steps; or
            `"nf4"`, 16 steps for weights that are distributed normally, as
            in QLoRA.
        group_size: int, or `None` for the largest size up to 64 that divides
            the rows of each kernel; for `"int8"` all rows.
        double: bool, whether the scales of 4 bit are stored in 8 bits.

    Example:

    ```python
    task = kpt.SFTTask.from_preset(
        "llama3_8b_en", lora=kpt.LoRA(rank=16), quantize="int4"
    )
    ```

    Reference:
        - [Dettmers et al., 2023](https://arxiv.org/abs/2305.14314), QLoRA.
    """

    kind: str = "int4"
    group_size: int | None = None
    double: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"`kind` must be one of {KINDS}. Received: kind={self.kind!r}"
            )
        size = self.group_size
        is_int = isinstance(size, numbers.Integral)
        is_int = is_int and not isinstance(size, bool)
        if size is not None and (not is_int or size < 2 or size % 2):
            raise ValueError(
                "`group_size` must be a positive even int, the rows of a "
                "kernel that share a scale (32, 64 and 128 are usual), or "
                f"None. Received: group_size={size!r}"
            )
        if not isinstance(self.double, bool):
            raise ValueError(
                "`double` must be True or False. Received: "
                f"double={self.double!r}"
            )
        if self.double and self.kind == "int8":
            raise ValueError(
                "`double` stores the scales of 'int4' and 'nf4' in 8 bits. "
                "Received: double=True, kind='int8'"
            )

    def rows(self, size, name):
        """Returns the rows of a group of a kernel with `size` rows."""
        if self.group_size is not None:
            if size % self.group_size:
                raise ValueError(
                    "`group_size` must divide the rows of every kernel. "
                    f"Received: group_size={self.group_size} and {name!r} "
                    f"with {size} rows"
                )
            return int(self.group_size)
        if self.kind == "int8":
            return size
        sizes = range(2, min(GROUP_SIZE, size) + 1, 2)
        fits = [n for n in sizes if size % n == 0]
        if not fits:
            raise ValueError(
                "A kernel in 4 bits must have an even number of rows. "
                f"Received: {name!r} with {size} rows"
            )
        return fits[-1]

    def storage(self, size, name):
        """Returns the `Storage` of a kernel with `size` rows."""
        return Storage(self.kind, self.rows(size, name), self.double)


@dataclasses.dataclass(frozen=True)
class Storage:
    """How one kernel is stored.

    Attributes:
        kind, double: as of `Quantization`.
        rows: int, of a group.
        zeros: bool, whether each group has a code that stands for 0.
        scale_dtype: string or `None`, the dtype of the scales: by default
            float32 for one group and bfloat16 for several.
    """

    kind: str
    rows: int
    double: bool = False
    zeros: bool = False
    scale_dtype: str | None = None

    @property
    def bits(self):
        return 8 if self.kind == "int8" else 4

    def arrays(self, into, out):
        """Returns the shape and the dtype of each array, by its name."""
        groups = into // self.rows
        dtype = self.scale_dtype or ("float32" if groups == 1 else "bfloat16")
        found = {
            "codes": ((groups, self.rows, out), "int8"),
            "scale": ((groups, out), "int8" if self.double else dtype),
        }
        if self.double:
            found["scale_range"] = (groups, 2), "float32"
        if self.zeros:
            found["zeros"] = (groups, out), "int8"
        return found


def as_quantization(value):
    """Returns the `Quantization` of the argument `quantize`.

    It may also be `None`, for what a checkpoint has, or `"none"` for floats.
    """
    if isinstance(value, Quantization):
        return value
    if isinstance(value, str) and value in KINDS:
        return Quantization(value)
    if value is None or isinstance(value, str) and value == "none":
        return value
    raise ValueError(
        f"`quantize` must be one of {KINDS}, a `kpt.Quantization`, 'none' or "
        f"None. Received: quantize={value!r}"
    )


def check_trained(is_trained, what):
    """Raises a `ValueError` where quantized weights would be trained."""
    if is_trained:
        raise ValueError(
            "Quantized weights are not trained: train an adapter on them, "
            "with `lora=kpt.LoRA(rank=16)`. `trainable=False` makes a task "
            "that only samples and evaluates, and quantize='none' reads "
            f"floats. Received: {what} and lora=None"
        )


class PackedCodes(keras.Variable):
    """Codes from -8 to 7, an array `(groups, rows, out)` in four bits each.

    On a TPU they are JAX's int4, which its compiler reads within a product.
    Elsewhere that takes a byte a code, so two share a byte of uint8: the code
    of the first half of a group's rows is in the low bits, and 8 is added.
    Shape and dtype are those on the devices of Keras's distribution, so that
    a plan for a TPU on another machine has a TPU's.
    """

    def __init__(self, initializer, shape, dtype, **kwargs):
        self._codes_shape = tuple(shape)
        super().__init__(initializer, shape=self.shape, dtype=dtype, **kwargs)

    @property
    def is_packed(self):
        distribution = keras.distribution.distribution()
        if distribution is None:
            return jax.default_backend() != "tpu"
        devices = distribution.device_mesh.backend_mesh.devices
        return devices.flat[0].platform != "tpu"

    @property
    def shape(self):
        groups, rows, out = self._codes_shape
        return (groups, rows // 2 if self.is_packed else rows, out)

    @property
    def dtype(self):
        # Keras knows no int4.
        return "uint8" if self.is_packed else "int8"

    @property
    def stored_dtype(self):
        """String, the dtype of the array."""
        return "uint8" if self.is_packed else "int4"

    def stored(self, codes):
        """Converts int8 codes `(groups, rows, out)` to what is assigned."""
        if not self.is_packed:
            return codes
        low, high = np.split((codes + np.int8(8)).astype("uint8"), 2, axis=1)
        return low | (high << 4)

    def _convert_to_tensor(self, value, dtype=None):
        return jnp.asarray(value, self.stored_dtype)


class QuantizedKernel:
    """The kernel of a layer as codes and scales.

    It stands where the layer had its `keras.Variable`, and has those of its
    properties that are read. `value` computes the kernel as floats.

    Attributes:
        parts: dict of `keras.Variable`s. `codes` has the shape `(groups,
            rows, out)`, in int8 for 8 bits and as `PackedCodes` for 4, and
            `scale` the shape `(groups, out)`. With double quantization it is
            int8, and `scale_range`, float32 of the shape `(groups, 2)`, has
            the middle and the step of a group's. `zeros`, int8 `(groups,
            out)`, is there if another code than the middle stands for 0.
    """

    def __init__(self, name, layer, storage):
        kernel = layer.kernel
        self.name, self.storage = name, storage
        self.path, self.dtype = kernel.path, kernel.dtype
        self.shape, self.ndim = tuple(kernel.shape), len(kernel.shape)
        # Where a variable of this path would lie.
        self._layout = None
        self.axes = MatrixAxes(layer)
        kinds = {"codes": PackedCodes} if storage.bits == 4 else {}
        self.parts = {
            part: kinds.get(part, keras.Variable)(
                "zeros",
                shape=shape,
                dtype=dtype,
                trainable=False,
                autocast=False,
                name=f"{part}_{self.name}".replace(".", "_"),
                layout=layout,
            )
            for (part, (shape, dtype)), layout in zip(
                self._arrays().items(), self.layouts()
            )
        }

    @property
    def variables(self):
        return list(self.parts.values())

    def _arrays(self):
        return self.storage.arrays(self.axes.in_size, self.axes.out_size)

    def layouts(self):
        """Returns the layouts of `variables`, split as the kernel would be.

        They are `None` without a distribution.
        """
        shapes = {name: shape for name, (shape, _) in self._arrays().items()}
        layout = sharding.layout_of(self)
        if layout is None:
            return [None] * len(shapes)
        into, out = self.axes.of_matrix(layout.axes)
        mesh = layout.device_mesh
        sizes = dict(zip(mesh.axis_names, mesh.shape))

        def fitting(size, axis):
            is_even = axis is not None and size % sizes[axis] == 0
            return axis if is_even else None

        found = []
        for shape in shapes.values():
            axes = [None] * len(shape)
            axes[0] = fitting(shape[0], into)
            if len(shape) == 3 and axes[0] is None:
                # Without groups the rows are split.
                axes[1] = fitting(shape[1], into)
            if shape[-1] == self.axes.out_size:
                axes[-1] = fitting(shape[-1], out)
            found.append(keras.distribution.TensorLayout(axes, mesh))
        return found

    @property
    def itemsize(self):
        """Float, the bytes of a code."""
        return self.storage.bits / 8

    # As a variable

    @property
    def value(self):
        """The kernel as floats, an array of its shape and dtype."""
        matrix = dequantize(self._values(), self.storage, "float32")
        matrix = matrix.reshape(self.axes.in_size, self.axes.out_size)
        kernel = self.axes.to_kernel_axes(matrix).astype(self.dtype)
        layout = sharding.layout_of(self)
        if layout is not None:
            kernel = jax.device_put(kernel, layout.backend_layout)
        return kernel

    def assign(self, value):
        raise ValueError(
            "A quantized kernel cannot be changed: rounding it again would "
            "lose what was added. Save the adapter, or `export` the model, "
            f"which adds it to the floats. Received: {self.name!r}"
        )

    def fill(self, read):
        """Quantizes a kernel: `read` is as of `device_transfer.fill`."""
        whole = np.asarray(read(tuple(slice(0, n) for n in self.shape)))
        self._fill(quantize(self.axes.to_matrix(whole), self.storage))

    def fill_codes(self, codes, scales, zeros=None):
        """Takes codes as they are.

        Args:
            codes: int8 array `(in, out)`: whole numbers, or indices of `NF4`.
            scales: float array `(groups, out)`.
            zeros: int8 array `(groups, out)` if the storage has such.
        """
        codes = codes.reshape(-1, self.storage.rows, codes.shape[1])
        if self.storage.kind == "nf4":
            codes = codes - np.int8(8)
        arrays = {"codes": codes, "scale": scales}
        if zeros is not None:
            arrays["zeros"] = zeros
        self._fill(arrays)

    def _fill(self, arrays):
        for part, variable in self.parts.items():
            array = arrays[part]
            if isinstance(variable, PackedCodes):
                array = variable.stored(array)
            device_transfer.fill(variable, array.__getitem__)

    def _values(self):
        return {part: v.value for part, v in self.parts.items()}

    # Products

    def multiply(self, x):
        """Computes the product of tokens `(tokens, in)` and the kernel."""
        return _multiply(self.storage, x, self._values())


def values_of(mapping):
    """Returns a scope in which variables have the arrays of a mapping.

    Args:
        mapping: list of pairs of a variable and an array. Keras would convert
            codes of int4 to int8, a copy of the model that is twice as large.
    """
    own = [pair for pair in mapping if isinstance(pair[0], PackedCodes)]
    rest = [pair for pair in mapping if not isinstance(pair[0], PackedCodes)]
    scope = keras.StatelessScope(state_mapping=rest)
    for pair in own:
        scope.add_update(pair)
    return scope


def compiler_options(*models):
    """Returns the options that programs of quantized models are compiled with.

    On several TPUs the compiler would gather weights while it computes, for
    which it copies those of all layers and holds many gathered ones. A step of
    Qwen3-32B in four bits on four v5e then takes 21 GiB a chip instead of 10
    (`benchmarks/scale.py`). Codes are soon gathered.

    Args:
        *models: KerasHub `CausalLM`s that a program reads, such as a policy
            and its teacher.

    Returns:
        A dict, or `None` for other devices and where no model is quantized.
    """
    mesh, _, _ = sharding.data_axis()
    is_tpu = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    if not is_tpu or not any(map(kernels, models)):
        return None
    return {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}


# The gates of linear attention stay floats: they are small, and errors in them
# add up in the states.
GATES = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")


def quantize_layers(causal_lm, quantization, storage_of=None):
    """Stores the kernels of the decoder's linear layers as codes.

    A kernel that has a value is rounded; one without, as in
    `without_values`, is to be filled. The floats are freed.

    Args:
        causal_lm: a KerasHub `CausalLM` of a known family.
        quantization: `Quantization`, or the name of a checkpoint's format.
        storage_of: function of the number of a kernel's rows and its layer's
            name to its `Storage`, or to `None` for floats; by default that of
            `quantization`.
    """
    if storage_of is None:

        def storage_of(rows, name):
            if name.endswith(GATES):
                return None
            return quantization.storage(rows, name)

    causal_lm.trainable = False
    for name, layer in linear_layers(causal_lm).items():
        if isinstance(layer.kernel, QuantizedKernel):
            continue
        storage = storage_of(MatrixAxes(layer).in_size, name)
        if storage is not None:
            store_as_codes(name, layer, storage)
    vars(causal_lm)["kpt_quantization"] = quantization
    if has_experts(causal_lm):
        _console.say(
            f"quantize={quantization}: the experts of the mixture stay "
            "floats; attention and shared experts are quantized."
        )


def store_as_codes(name, layer, storage):
    """Stores the kernel of a layer as codes; see `quantize_layers`.

    Args:
        name: str, the layer's Hugging Face name.
        layer: a built `Dense` or `EinsumDense`.
        storage: `Storage`.

    Returns:
        The layer's `QuantizedKernel`.
    """
    old, is_loaded = layer.kernel, _has_value(layer.kernel)
    kernel = QuantizedKernel(name, layer, storage)
    # Keras's own quantization replaces variables of a built layer by these
    # methods, too; it has no public way.
    layer._untrack_variable(old)
    layer._tracker.unlock()
    layer.kpt_variables = kernel.variables
    layer._tracker.lock()
    layer._kernel = kernel
    layer.call = functools.partial(_call, layer, kernel)
    # It needs no other call for flattened tokens.
    layer.kpt_flat = False
    if is_loaded:
        kernel.fill(device_transfer.to_host(old.value).__getitem__)
        old._value = None
    return kernel


def kernels(causal_lm):
    """Returns the list of a model's `QuantizedKernel`s."""
    if quantization_of(causal_lm) is None:
        return []
    found = [layer.kernel for layer in linear_layers(causal_lm).values()]
    return [kernel for kernel in found if isinstance(kernel, QuantizedKernel)]


def _has_value(variable):
    return isinstance(getattr(variable, "_value", None), jax.Array)


def check_not_quantized(causal_lm, what):
    """Raises a `ValueError` where `what` would need the kernels as floats."""
    found = quantization_of(causal_lm)
    if found is not None:
        raise ValueError(
            f"{what} is not possible with quantized kernels: rounding again "
            "would lose what was trained. Save the adapter with "
            "`save_adapter`, or write floats with `export`. Received: a "
            f"model with {found}"
        )


def quantization_of(causal_lm):
    """Returns the `Quantization` of a model, or `None`.

    That of a quantized checkpoint is the name of its format.
    """
    return getattr(causal_lm, "kpt_quantization", None)


def _call(layer, kernel, inputs, *args, **kwargs):
    axes = kernel.axes
    batch = inputs.shape[: inputs.ndim - len(axes.in_shape)]
    outputs = kernel.multiply(jnp.reshape(inputs, (-1, axes.in_size)))
    outputs = outputs.reshape(*batch, *axes.out_shape)
    if layer.bias is not None:
        outputs = outputs + jnp.asarray(layer.bias, outputs.dtype)
    if layer.activation is not None:
        outputs = layer.activation(outputs)
    return outputs


# Numbers


def quantize(matrix, storage):
    """Quantizes a matrix `(in, out)` of floats, in parts by several threads.

    Returns:
        A dict of numpy arrays as of `QuantizedKernel.parts`, the codes as
        int8.
    """
    rows, (size, out) = storage.rows, matrix.shape
    dtype = jnp.dtype(storage.arrays(size, out)["scale"][1])
    # The columns of a group share nothing but the range of their scales.
    by_columns = size == rows and not storage.double
    if by_columns:
        step = max(1, PART // size)
        parts = (matrix[:, i : i + step] for i in range(0, out, step))
    else:
        step = rows * max(1, PART // (rows * out))
        parts = (matrix[i : i + step] for i in range(0, size, step))
    with futures.ThreadPoolExecutor(min(8, num_cores())) as pool:
        found = list(pool.map(lambda x: _quantize(x, storage, dtype), parts))
    axis = -1 if by_columns else 0
    return {
        name: np.concatenate([part[name] for part in found], axis)
        for name in found[0]
    }


def _quantize(matrix, storage, dtype):
    """Quantizes some groups, or columns of one, with scales of `dtype`."""
    rows = storage.rows
    groups, out = len(matrix) // rows, matrix.shape[1]
    matrix = device_transfer.contiguous(matrix).astype("float32", copy=False)
    grouped = matrix.reshape(groups, rows, out)
    lowest = grouped.min(axis=1)
    largest = np.maximum(grouped.max(axis=1), -lowest)
    if storage.kind == "int4":
        # Codes go from -8 to 7: the largest weight of a group becomes -8,
        # whatever its sign, as in llama.cpp's Q4_0.
        scale = np.where(-lowest == largest, largest, -largest) / 8
    else:
        scale = largest / (127 if storage.kind == "int8" else 1)
    scale[scale == 0] = 1.0
    found = {}
    if storage.double:
        middle = (scale.max(1) + scale.min(1)) / 2
        step = (scale.max(1) - scale.min(1)) / 254
        step[step == 0] = 1.0
        stored = np.round((scale - middle[:, None]) / step[:, None])
        found["scale"] = stored.astype("int8")
        ends = np.stack([middle, step], 1).astype("float32")
        found["scale_range"] = ends
        scale = stored * ends[:, 1:] + ends[:, :1]
    else:
        found["scale"] = scale.astype(dtype)
        scale = found["scale"].astype("float32")
    # Rounded to 8 bits, a scale may be 0.
    ratios = grouped / np.where(scale == 0, 1, scale)[:, None]
    if storage.kind == "nf4":
        values = np.array(NF4, "float32")
        codes = np.full(ratios.shape, -8, "int8")
        # Faster than `numpy.searchsorted`.
        for between in (values[1:] + values[:-1]) / 2:
            codes += (ratios > between).view("int8")
    else:
        limits = (-8, 7) if storage.kind == "int4" else (-127, 127)
        np.clip(np.round(ratios, out=ratios), *limits, out=ratios)
        codes = ratios.astype("int8")
    if storage.zeros:
        found["zeros"] = np.zeros((groups, out), "int8")
    return {"codes": codes, **found}


def dequantize(arrays, storage, dtype):
    """Computes the floats of codes, an array `(groups, rows, out)`.

    Args:
        arrays: dict as of `QuantizedKernel.parts`.
    """
    codes = arrays["codes"]
    scale = arrays["scale"].astype("float32")
    if storage.double:
        ends = arrays["scale_range"]
        scale = scale * ends[:, 1:] + ends[:, :1]
    if codes.dtype == "uint8":
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=1)
        codes = codes.astype("int8") - 8
    if storage.kind == "nf4":
        values = _nf4(codes.astype("int8") + 8)
    else:
        values = codes.astype("float32")
    if storage.zeros:
        values = values - arrays["zeros"].astype("float32")[:, None]
    return (values * scale[:, None]).astype(dtype)


def _nf4(codes):
    # A tree of selects: XLA does not fuse a lookup into a product.
    level = [jnp.float32(x) for x in NF4]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        pairs = zip(level[::2], level[1::2])
        level = [jnp.where(is_set, high, low) for low, high in pairs]
    return level[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(storage, x, arrays):
    # The groups are an axis of what is stored: so XLA computes the floats
    # within the product, and never holds them all.
    kernel = dequantize(arrays, storage, x.dtype)
    groups, rows, _ = kernel.shape
    x = x.reshape(-1, groups, rows)
    return jnp.einsum("tkg,kgm->tm", x, kernel)


def _multiply_forward(storage, x, arrays):
    return _multiply(storage, x, arrays), arrays


def _multiply_backward(storage, arrays, gradient):
    kernel = dequantize(arrays, storage, gradient.dtype)
    found = jnp.einsum("tm,kgm->tkg", gradient, kernel)
    size = math.prod(kernel.shape[:2])
    return found.reshape(-1, size), None


_multiply.defvjp(_multiply_forward, _multiply_backward)
