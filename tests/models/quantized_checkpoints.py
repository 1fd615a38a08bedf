"""Writes checkpoints in the quantized formats of other tools."""

import json
import shutil

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import load_file, save, save_file

from keras_posttrain.models.quantized import NF4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes, bits, axis):
    """Packs unsigned codes into int32s along an axis, the first lowest."""
    codes = np.moveaxis(codes.astype("uint32"), axis, -1)
    count = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, count)
    words = (parts << (np.arange(count, dtype="uint32") * bits)).sum(-1)
    return np.moveaxis(words.astype("uint32").view("int32"), -1, axis)


def rounded(weight, bits, group, sym, order=None):
    """Rounds a weight `(out, in)`; returns codes, zeros and scales.

    They are unsigned, of the shapes `(in, out)` and `(groups, out)`; `order`
    has the group of each row.
    """
    matrix = weight.T.astype("float64")
    into, out = matrix.shape
    order = np.arange(into) // group if order is None else order
    groups, most = into // group, 2**bits - 1
    low, high = np.zeros((2, groups, out))
    for g in range(groups):
        rows = matrix[order == g]
        low[g], high[g] = rows.min(0), rows.max(0)
    if sym:
        largest = np.maximum(-low, high)
        scales = (2 * largest / most).astype("float16")
        zeros = np.full((groups, out), 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).astype("float16")
        zeros = np.clip(np.round(-low / scales), 1, most)
    codes = np.round(matrix / scales[order] + zeros[order])
    return np.clip(codes, 0, most), zeros, scales


def gptq(weight, *, bits=4, group=32, sym=True, v2=False, desc_act=False):
    """Returns the tensors of a layer, and the weight they stand for."""
    into = weight.shape[1]
    order = np.arange(into) // group
    if desc_act:
        order = np.random.default_rng(0).permutation(order)
    codes, zeros, scales = rounded(weight, bits, group, sym, order)
    floats = (codes - zeros[order]) * scales[order]
    return {
        "qweight": pack(codes, bits, 0),
        "qzeros": pack(zeros - (0 if v2 else 1), bits, 1),
        "scales": scales,
        "g_idx": order.astype("int32"),
    }, floats.T


def awq(weight, *, group=32):
    codes, zeros, scales = rounded(weight, 4, group, False)
    order = np.arange(len(codes)) // group
    floats = (codes - zeros[order]) * scales[order]

    def packed(x):
        x = x.reshape(len(x), -1, 8)[:, :, list(AWQ_ORDER)]
        return pack(x.reshape(len(x), -1), 4, 1)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros)}
    return {**tensors, "scales": scales}, floats.T


def bitsandbytes(weight):
    """NF4 without double quantization."""
    flat = weight.astype("float32").reshape(-1, 64)
    absmax = np.abs(flat).max(1)
    table = np.array(NF4, "float32")
    between = (table[1:] + table[:-1]) / 2
    codes = np.searchsorted(between, flat / absmax[:, None]).astype("uint8")
    floats = (table[codes] * absmax[:, None]).reshape(weight.shape)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32",
             "shape": list(weight.shape)}  # fmt: skip
    pairs = codes.reshape(-1, 2)
    return {
        "weight": (pairs[:, :1] << 4) | pairs[:, 1:],
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
            json.dumps(state).encode(), "uint8"
        ),
    }, floats


def compressed(weight, *, group=32):
    codes, _, scales = rounded(weight, 4, group, True)
    signed = codes - 8
    order = np.arange(len(codes)) // group
    return {
        "weight_packed": pack(codes.T, 4, 1),
        "weight_scale": np.ascontiguousarray(scales.T),
        "weight_shape": np.array(weight.shape),
    }, (signed * scales[order]).T


def float8(weight, *, block=(48, 64)):
    out, into = weight.shape
    blocks = [-(-n // b) for n, b in zip(weight.shape, block)]
    scales = np.zeros(blocks, "float32")
    spread = np.zeros(weight.shape, "float32")
    for i, j in np.ndindex(*blocks):
        part = (slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]))  # fmt: skip
        scales[i, j] = np.abs(weight[part]).max() / 448
        spread[part] = scales[i, j]
    codes = (weight / spread).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale_inv": scales}
    return tensors, codes.astype("float32") * spread


GROUP = {"num_bits": 4, "type": "int", "symmetric": True,
         "strategy": "group", "group_size": 32}  # fmt: skip
# The config and the function of each format.
KINDS = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True,
         "desc_act": False, "checkpoint_format": "gptq"},
        gptq,
    ),
    "gptq-zeros": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        lambda w: gptq(w, sym=False),
    ),
    "gptq-8": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True,
         "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, bits=8, v2=True),
    ),
    "gptq-desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True,
         "desc_act": True},
        lambda w: gptq(w, desc_act=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32,
         "zero_point": True, "version": "gemm"},
        awq,
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True,
         "bnb_4bit_quant_type": "nf4"},
        bitsandbytes,
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "ignore": ["lm_head"],
         "config_groups": {"group_0": {"targets": ["Linear"],
                                       "weights": GROUP}}},
        compressed,
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [48, 64]},
        float8,
    ),
}  # fmt: skip


def write(source, directory, kind, change=None):
    """Writes a checkpoint with its decoder's linear layers quantized.

    Args:
        source: path of a Hugging Face directory of float32.
        kind: a key of `KINDS`.
        change: function of the dict of tensors, to spoil it.

    Returns:
        Path of a directory with the same model in floats.
    """
    config, quantized = KINDS[kind]
    floats = directory.with_name(f"{directory.name}_floats")
    for folder in (directory, floats):
        shutil.copytree(source, folder)
    tensors, plain = {}, {}
    for name, array in load_file(source / "model.safetensors").items():
        tensors[name] = plain[name] = array
        if name.endswith("_proj.weight"):
            del tensors[name]
            module = name.removesuffix(".weight")
            found, values = quantized(array)
            plain[name] = np.ascontiguousarray(values, "float32")
            for end, part in found.items():
                tensors[f"{module}.{end}"] = np.ascontiguousarray(part)
    if change is not None:
        change(tensors)
    save_float8(tensors, directory / "model.safetensors")
    save_file(plain, floats / "model.safetensors")
    path = directory / "config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps({**given, "quantization_config": config}))
    return floats


def save_float8(tensors, path):
    """Saves tensors, which safetensors cannot if they are in FP8."""
    eight = ml_dtypes.float8_e4m3fn
    raw = {
        name: x.view("uint8") if x.dtype == eight else x
        for name, x in tensors.items()
    }
    data = save(raw)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, x in tensors.items():
        if x.dtype == eight:
            header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + data[8 + length :]
    )


class MXFP4:
    """Experts in 4 bits, as gpt-oss has them; exact in bfloat16 too.

    Called with a model of transformers, it sets their weights.
    """

    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "float32")
    values = np.concatenate([values, -values])

    def __init__(self):
        self.tensors = {}

    def __call__(self, model):
        rng = np.random.default_rng(1)
        for name, value in model.named_parameters():
            if not name.endswith(("gate_up_proj", "down_proj")):
                continue
            experts, inputs, outputs = value.shape
            blocks = rng.integers(
                0, 256, (experts, outputs, inputs // 32, 16), "uint8"
            )
            scales = rng.integers(123, 126, blocks.shape[:3], "uint8")
            pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
            floats = self.values[pairs.reshape(*blocks.shape[:3], 32)]
            floats = floats * 2.0 ** (scales[..., None] - 127.0)
            floats = floats.reshape(experts, outputs, inputs)
            value.copy_(torch.tensor(floats.transpose(0, 2, 1)))
            self.tensors[f"{name}_blocks"] = blocks
            self.tensors[f"{name}_scales"] = scales

    def write(self, directory):
        """Replaces the weights in the directory's files by the codes."""
        file = directory / "model.safetensors"
        arrays = load_file(file)
        for name in self.tensors:
            arrays.pop(name.rpartition("_")[0], None)
        save_file(arrays | self.tensors, file)
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        }
        path.write_text(json.dumps(config))
