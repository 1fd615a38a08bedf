"""Quantized Hugging Face checkpoints: weights as codes, or as floats.

A format stores the weight of a linear layer `m` as tensors such as
`m.qweight` and `m.scales`, which `quantization_config` in `config.json`
describes. A `Format` reads them as the matrix `(in, out)` of the layer. Where
its grid is one of `models/quantized.py`, the codes are taken as they are.
MXFP4 is of the experts of gpt-oss, all of a layer in one tensor.
"""

import dataclasses
import json
import math
import re

import jax.numpy as jnp
import numpy as np

from keras_posttrain.models.quantized import NF4, Storage


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight as codes: `(codes - zeros) * scales`, by groups of rows.

    Attributes:
        storage: `Storage`.
        codes: int8 array `(in, out)`; of `"nf4"` indices of `NF4`.
        scales: float array `(groups, out)`.
        zeros: int8 array `(groups, out)`, or `None` for 0.
    """

    storage: Storage
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None

    def floats(self):
        """Computes the weight, float32 `(in, out)`."""
        groups, out = self.scales.shape
        if self.storage.kind == "nf4":
            values = np.array(NF4, "float32")[self.codes]
        else:
            values = self.codes.astype("float32")
        values = values.reshape(groups, -1, out)
        if self.zeros is not None:
            values -= self.zeros.astype("float32")[:, None]
        values *= self.scales.astype("float32")[:, None]
        return values.reshape(-1, out)


class Format:
    """A format of quantized checkpoints.

    Args:
        config: dict, the `quantization_config`.

    Attributes:
        name: str, for messages.
        marker: str, the end of the name of a tensor that only a quantized
            layer has.
    """

    name = marker = None

    def __init__(self, config):
        self.config = config

    def is_stored(self, checkpoint, module):
        """Returns whether a layer is quantized; without files, whether any.

        `checkpoint` is a `Reader` or `None`.
        """
        return checkpoint is None or f"{module}.{self.marker}" in (
            checkpoint.names
        )

    def storage(self, checkpoint, module, shape):
        """Returns the `Storage` of a layer's codes, or `None` for floats.

        `shape` is that of the matrix, `(in, out)`.
        """
        return None

    def why_floats(self, module):
        """Returns why a weight cannot be taken as codes."""
        return "its grid is none of ours"

    def ends(self):
        """Returns the ends of the names of a layer's tensors."""
        raise NotImplementedError

    def names(self, module):
        """Returns the names of a layer's tensors, as a list."""
        return [f"{module}.{end}" for end in self.ends()]

    def matrix(self, checkpoint, module, shape):
        """Reads a layer as a `Matrix`; only where it has a `storage`."""
        raise NotImplementedError

    def floats(self, checkpoint, module, shape):
        """Reads a layer as float32 `(in, out)`."""
        return self.matrix(checkpoint, module, shape).floats()

    # Help for those that inherit

    def _need(self, field, value, known):
        if value not in known:
            raise ValueError(
                f"A checkpoint of {self.name} can be read with {field} of "
                f"{list(known)}. Received: {field}={value!r}. Use the "
                "unquantized checkpoint"
            )
        return value

    def _read(self, checkpoint, module, end, shape):
        return self._read_tensor(checkpoint, f"{module}.{end}", shape)

    def _read_tensor(self, checkpoint, name, shape):
        if checkpoint.shapes.get(name) != tuple(shape):
            raise ValueError(
                f"A quantized layer lacks a tensor of {self.name}. Expected: "
                f"{name!r} of shape {tuple(shape)}. Received: shape "
                f"{checkpoint.shapes.get(name)} in "
                f"{str(checkpoint.directory)!r}"
            )
        return checkpoint.read(name)

    def _scale_dtype(self, checkpoint, module, end):
        if checkpoint is None:
            return "float16"
        return checkpoint.dtypes.get(f"{module}.{end}", "float16")

    def _integers(self, rows, dtype, zeros):
        """Returns the `Storage` of whole numbers."""
        kind = {4: "int4", 8: "int8"}[self.bits]
        return Storage(kind, rows, zeros=zeros, scale_dtype=dtype)


class GPTQ(Format):
    """GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel write it.

    `qweight` packs rows, `qzeros` packs columns; `qzeros` holds the zero
    less 1 except in `"gptq_v2"`.
    """

    name, marker = "GPTQ", "qweight"

    def __init__(self, config):
        super().__init__(config)
        self.bits = self._need("bits", config.get("bits"), (4, 8))
        self._group = config.get("group_size", 128)
        layout = config.get("checkpoint_format") or "gptq"
        self._need("checkpoint_format", layout, ("gptq", "gptq_v2"))
        self._offset = 1 if layout == "gptq" else 0
        self._sym = config.get("sym", True)
        self._reordered = bool(config.get("desc_act"))

    def storage(self, checkpoint, module, shape):
        if self._reordered:
            return None
        dtype = self._scale_dtype(checkpoint, module, "scales")
        return self._integers(self._rows(shape), dtype, not self._sym)

    def why_floats(self, module):
        return "`desc_act` puts rows far apart into one group"

    def ends(self):
        return "qweight", "qzeros", "scales", "g_idx"

    def matrix(self, checkpoint, module, shape):
        codes, scales, zeros, group = self._parts(checkpoint, module, shape)
        storage = self.storage(checkpoint, module, shape)
        if (group != np.arange(shape[0]) // storage.rows).any():
            raise ValueError(
                "Without `desc_act` the rows of a group are adjacent. "
                f"Received: another order in '{module}.g_idx' of "
                f"{str(checkpoint.directory)!r}. Set `desc_act` to true in "
                "`quantization_config`"
            )
        if not storage.zeros:
            if zeros.any():
                raise ValueError(
                    "With `sym` all zeros of GPTQ are the middle. Received: "
                    f"others in '{module}.qzeros' of "
                    f"{str(checkpoint.directory)!r}. Set `sym` to false in "
                    "`quantization_config`"
                )
            zeros = None
        return Matrix(storage, codes, scales, zeros)

    def floats(self, checkpoint, module, shape):
        codes, scales, zeros, group = self._parts(checkpoint, module, shape)
        values = codes.astype("float32") - zeros.astype("float32")[group]
        return values * scales.astype("float32")[group]

    def _rows(self, shape):
        return shape[0] if self._group in (-1, None) else self._group

    def _parts(self, checkpoint, module, shape):
        into, out = shape
        rows, count = self._rows(shape), 32 // self.bits
        groups = -(-into // rows)
        read = lambda end, *shape: self._read(checkpoint, module, end, shape)  # noqa: E731
        codes = unpacked(read("qweight", into // count, out), self.bits, 0)
        zeros = unpacked(read("qzeros", groups, out // count), self.bits, 1)
        scales = read("scales", groups, out)
        group = np.arange(into) // rows
        if f"{module}.g_idx" in checkpoint.names:
            group = read("g_idx", into)
        middle = 2 ** (self.bits - 1)
        codes = (codes.astype("int16") - middle).astype("int8")
        zeros = zeros.astype("int16") + self._offset - middle
        return codes, scales, zeros.astype("int8"), group


class AWQ(Format):
    """AWQ (Lin et al., 2023), as AutoAWQ writes it for its GEMM kernels.

    `qweight` and `qzeros` pack eight columns in the order of `_ORDER`.
    """

    name, marker, bits = "AWQ", "qweight", 4
    _ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, config):
        super().__init__(config)
        self._need("bits", config.get("bits"), (4,))
        version = str(config.get("version") or "gemm").lower()
        self._need("version", version, ("gemm",))
        self._group = config.get("group_size", 128)
        self._has_zeros = bool(config.get("zero_point", True))

    def storage(self, checkpoint, module, shape):
        dtype = self._scale_dtype(checkpoint, module, "scales")
        return self._integers(self._rows(shape), dtype, self._has_zeros)

    def ends(self):
        return "qweight", "qzeros", "scales"

    def matrix(self, checkpoint, module, shape):
        into, out = shape
        storage = self.storage(checkpoint, module, shape)
        groups = into // storage.rows
        codes = self._read(checkpoint, module, "qweight", (into, out // 8))
        scales = self._read(checkpoint, module, "scales", (groups, out))
        zeros = None
        if self._has_zeros:
            packed = (groups, out // 8)
            zeros = self._read(checkpoint, module, "qzeros", packed)
            zeros = self._columns(zeros)
        return Matrix(storage, self._columns(codes), scales, zeros)

    def _rows(self, shape):
        return shape[0] if self._group in (-1, None) else self._group

    def _columns(self, packed):
        found = unpacked(packed, 4, 1).reshape(len(packed), -1, 8)
        found = found[:, :, np.argsort(self._ORDER)]
        return found.reshape(len(packed), -1).astype("int8") - np.int8(8)


class BitsAndBytes(Format):
    """bitsandbytes' 4 bits (NF4, FP4) and LLM.int8().

    Codes of 4 bits lie two in a byte, the first in the high bits, along the
    flattened weight `(out, in)`; each block of it has an `absmax`, which may
    be quantized itself.
    """

    name = "bitsandbytes"

    def __init__(self, config):
        super().__init__(config)
        self.bits = 8 if config.get("load_in_8bit") else 4
        self._type = config.get("bnb_4bit_quant_type", "fp4")
        if self.bits == 4:
            self._need("bnb_4bit_quant_type", self._type, ("nf4", "fp4"))
            self._state = f"weight.quant_state.bitsandbytes__{self._type}"
        self.marker = "SCB" if self.bits == 8 else "weight.absmax"

    def storage(self, checkpoint, module, shape):
        if self.bits == 8:
            return Storage("int8", shape[0], scale_dtype="float32")
        rows = 64
        if checkpoint is not None:
            rows = self._quant_state(checkpoint, module)["blocksize"]
        if self._type != "nf4" or shape[0] % rows:
            return None
        return Storage("nf4", rows, scale_dtype="float32")

    def why_floats(self, module):
        if self._type == "nf4":
            return "the rows are no multiple of the blocks"
        return "FP4 is no grid of ours"

    def ends(self):
        if self.bits == 8:
            return "weight", "SCB", "weight_format"
        return (
            "weight",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            self._state,
        )

    def matrix(self, checkpoint, module, shape):
        into, out = shape
        storage = self.storage(checkpoint, module, shape)
        if self.bits == 8:
            codes = self._read(checkpoint, module, "weight", (out, into))
            scales = self._read(checkpoint, module, "SCB", (out,))
            scales = scales.astype("float32") / np.float32(127)
            return Matrix(storage, codes.T, scales[None])
        codes, scales, table = self._blocks(checkpoint, module, shape)
        if not np.array_equal(table, np.array(NF4, "float32")):
            raise ValueError(
                "The values of NF4 are not those of bitsandbytes. Received: "
                f"'{module}.weight.quant_map' = {table.tolist()} in "
                f"{str(checkpoint.directory)!r}"
            )
        codes = codes.reshape(out, into).T
        return Matrix(storage, codes, scales.reshape(out, -1).T)

    def floats(self, checkpoint, module, shape):
        if self.bits == 8:
            return super().floats(checkpoint, module, shape)
        codes, scales, table = self._blocks(checkpoint, module, shape)
        blocksize = self._quant_state(checkpoint, module)["blocksize"]
        values = table[codes]
        values *= np.repeat(scales, blocksize)[: len(values)]
        return values.reshape(shape[1], shape[0]).T

    def _quant_state(self, checkpoint, module):
        stored = checkpoint.read(f"{module}.{self._state}")
        return json.loads(stored.tobytes())

    def _blocks(self, checkpoint, module, shape):
        """Returns flat codes, the scale of each block, and the table."""
        state = self._quant_state(checkpoint, module)
        size = math.prod(shape)
        stored = self._read(checkpoint, module, "weight", (size // 2, 1))
        codes = np.stack([stored[:, 0] >> 4, stored[:, 0] & 15], axis=1)
        count = -(-size // state["blocksize"])
        scales = self._read(checkpoint, module, "weight.absmax", (count,))
        if "nested_offset" in state:
            name = f"{module}.weight.nested_"
            table = checkpoint.read(f"{name}quant_map")
            steps = checkpoint.read(f"{name}absmax").astype("float32")
            steps = np.repeat(steps, state["nested_blocksize"])[:count]
            scales = table.astype("float32")[scales] * steps
            scales += np.float32(state["nested_offset"])
        table = checkpoint.read(f"{module}.weight.quant_map")
        return (
            codes.reshape(-1),
            scales.astype("float32"),
            table.astype("float32"),
        )


class Float8(Format):
    """FP8 in blocks, as DeepSeek-V3 and Qwen3 have it."""

    name, marker = "FP8", "weight_scale_inv"

    def ends(self):
        return "weight", "weight_scale_inv", "activation_scale"

    def why_floats(self, module):
        return "FP8 is no grid of ours"

    def floats(self, checkpoint, module, shape):
        rows, columns = self.config.get("weight_block_size") or shape[::-1]
        into, out = shape
        blocks = -(-out // rows), -(-into // columns)
        scales = self._read(checkpoint, module, "weight_scale_inv", blocks)
        values = self._read(checkpoint, module, "weight", (out, into))
        return _scaled(values, scales, rows, columns).T


class CompressedTensors(Format):
    """compressed-tensors, as LLM Compressor writes it.

    `config_groups` says for which layers which scheme holds.
    """

    name = "compressed-tensors"
    _FORMATS = (
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
    )

    def __init__(self, config):
        super().__init__(config)
        self._groups = list((config.get("config_groups") or {}).values())
        for group in self._groups:
            weights = group.get("weights") or {}
            layout = self._layout(group)
            self._need("format", layout, self._FORMATS)
            kind = weights.get("type"), weights.get("num_bits")
            known = ("int", 4), ("int", 8), ("float", 8)
            self._need("type and num_bits of weights", kind, known)
        sparsity = (config.get("sparsity_config") or {}).get("format")
        self._need("sparsity_config format", sparsity, (None, "dense"))

    def _layout(self, group):
        return group.get("format") or self.config.get("format")

    def _group(self, module):
        """Returns the scheme of a layer, or `None`."""
        if any(_names(module, x) for x in self.config.get("ignore") or ()):
            return None
        for group in self._groups:
            targets = group.get("targets") or ()
            if any(x == "Linear" or _names(module, x) for x in targets):
                return group
        return None

    def is_stored(self, checkpoint, module):
        group = self._group(module)
        if group is None or checkpoint is None:
            return group is not None
        return f"{module}.weight_scale" in checkpoint.names

    def storage(self, checkpoint, module, shape):
        weights = self._group(module)["weights"]
        reordered = weights.get("actorder") in ("group", True)
        if weights["type"] != "int" or reordered:
            return None
        if weights.get("strategy") not in ("group", "channel"):
            return None
        kind = {4: "int4", 8: "int8"}[weights["num_bits"]]
        dtype = self._scale_dtype(checkpoint, module, "weight_scale")
        zeros = not weights.get("symmetric", True)
        rows = self._rows(weights, shape)
        return Storage(kind, rows, zeros=zeros, scale_dtype=dtype)

    def why_floats(self, module):
        weights = self._group(module)["weights"]
        if weights["type"] != "int":
            return "FP8 is no grid of ours"
        return "rows far apart share a scale"

    def ends(self):
        return (
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
        )

    def matrix(self, checkpoint, module, shape):
        codes, scales, zeros, _ = self._parts(checkpoint, module, shape)
        storage = self.storage(checkpoint, module, shape)
        return Matrix(storage, codes, scales, zeros)

    def floats(self, checkpoint, module, shape):
        weights = self._group(module)["weights"]
        into, out = shape
        if weights["type"] == "int":
            codes, scales, zeros, group = self._parts(
                checkpoint, module, shape
            )
            values = codes.astype("float32")
            if zeros is not None:
                values -= zeros.astype("float32")[group]
            return values * scales.astype("float32")[group]
        values = self._read(checkpoint, module, "weight", (out, into))
        scales = checkpoint.read(f"{module}.weight_scale").astype("float32")
        rows, columns = weights.get("block_structure") or (1, 1)
        if weights.get("strategy") != "block":
            # Of the tensor, or of each output.
            scales = np.broadcast_to(scales.reshape(-1, 1), (out, 1))
            rows, columns = 1, into
        return _scaled(values, scales, rows, columns).T

    def _rows(self, weights, shape):
        size = weights.get("group_size")
        is_group = weights.get("strategy") == "group"
        return size if is_group and size not in (-1, None) else shape[0]

    def _parts(self, checkpoint, module, shape):
        into, out = shape
        group = self._group(module)
        weights = group["weights"]
        bits = weights["num_bits"]
        rows = self._rows(weights, shape)
        groups = into // rows
        if self._layout(group) == "pack-quantized":
            width = -(-into * bits // 32)
            packed = self._read(
                checkpoint, module, "weight_packed", (out, width)
            )
            codes = unpacked(packed, bits, 1)[:, :into].astype("int16")
            codes -= 2 ** (bits - 1)
        else:
            codes = self._read(checkpoint, module, "weight", (out, into))
        scales = checkpoint.read(f"{module}.weight_scale")
        scales = np.broadcast_to(scales.reshape(-1, groups), (out, groups)).T
        zeros = None
        if not weights.get("symmetric", True):
            zeros = checkpoint.read(f"{module}.weight_zero_point")
            if zeros.dtype == np.int32:
                zeros = unpacked(zeros, bits, 0)[:out].astype("int16")
                zeros -= 2 ** (bits - 1)
            zeros = zeros.reshape(out, groups).T.astype("int8")
        order = np.arange(into) // rows
        if f"{module}.weight_g_idx" in checkpoint.names:
            order = self._read(checkpoint, module, "weight_g_idx", (into,))
        return codes.T.astype("int8"), scales, zeros, order


class MXFP4(Format):
    """MXFP4 of the Open Compute Project, as gpt-oss has it for its experts.

    Blocks of 32 inputs of an expert share a scale, a power of 2; a byte holds
    two numbers, the first in the low bits. These have two significant bits at
    most, so that bfloat16 holds them exactly.
    """

    name = "MXFP4"
    _VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def is_stored(self, checkpoint, module):
        # Attention is not quantized.
        return checkpoint is not None and f"{module}_blocks" in (
            checkpoint.names
        )

    def why_floats(self, module):
        return "codes are kept of linear layers, not of experts"

    def names(self, module):
        return [f"{module}_blocks", f"{module}_scales"]

    def floats(self, checkpoint, module, shape):
        """Reads all experts of a layer, bfloat16 `(out, in, experts)`."""
        out, into, experts = shape
        groups, (blocks, scales) = -(-into // 32), self.names(module)
        size = (experts, out, groups)
        codes = self._read_tensor(checkpoint, blocks, (*size, 16))
        exponents = self._read_tensor(checkpoint, scales, size)
        values = np.array(self._VALUES, "float32")
        values = np.concatenate([values, -values])
        # Both numbers of each byte, which are looked up together.
        byte = np.arange(256)
        pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
        pairs = pairs.view("uint64")[:, 0]
        found = np.empty((experts, out, into), jnp.bfloat16)
        # One expert at a time, to save memory.
        for i in range(experts):
            powers = exponents[i].astype("int32") - 127
            numbers = pairs.take(codes[i]).view("float32")
            numbers *= np.ldexp(np.float32(1), powers)[..., None]
            found[i] = numbers.reshape(out, -1)[:, :into]
        return found.transpose(1, 2, 0)


FORMATS = {
    "gptq": GPTQ,
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "fp8": Float8,
    "compressed-tensors": CompressedTensors,
    "mxfp4": MXFP4,
}


def format_of(config):
    """Returns the `Format` of a `config.json`, or `None` for floats.

    A format that cannot be read raises a `ValueError` that names it.
    """
    given = config.get("quantization_config")
    if given is None:
        given = config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method")
    if method is None and (
        given.get("load_in_4bit") or given.get("load_in_8bit")
    ):
        method = "bitsandbytes"
    if method not in FORMATS:
        raise ValueError(
            f"Quantized checkpoints of {sorted(FORMATS)} can be read. "
            f"Received: quantization_config with quant_method={method!r}. "
            "Use the unquantized checkpoint"
        )
    return FORMATS[method](given)


def unpacked(packed, bits, axis):
    """Splits int32s into numbers of 4 or 8 bits along an axis, lowest first.

    Returns:
        A uint8 array, `32 // bits` times as long in `axis`.
    """
    shifts = np.arange(0, 32, bits, dtype="uint32")
    parts = np.expand_dims(packed.view("uint32"), axis + 1)
    sizes = [1] * parts.ndim
    sizes[axis + 1] = len(shifts)
    parts = (parts >> shifts.reshape(sizes)) & (2**bits - 1)
    shape = list(packed.shape)
    shape[axis] *= len(shifts)
    return parts.astype("uint8").reshape(shape)


def _scaled(values, scales, rows, columns):
    """Multiplies a weight `(out, in)` by the scales of its blocks."""
    values = values.astype("float32")
    scales = scales.astype("float32")
    for axis, size in enumerate((rows, columns)):
        scales = np.repeat(scales, size, axis)
    return values * scales[: values.shape[0], : values.shape[1]]


def _names(module, target):
    """Returns whether a name or a pattern `re:...` is that of a layer."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")
