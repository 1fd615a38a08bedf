"""Quantized checkpoints of Hugging Face are read as they are stored."""

import json
import re

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.hf.checkpoint_files import SINGLE, Reader
from keras_posttrain.models.hf.quantized_files import format_of
from keras_posttrain.models.quantized import QuantizedKernel
from tests.models import quantized_checkpoints as checkpoints
from tests.support import REFERENCE, one_layer, random_rows, spread_adapter

QWEN3 = REFERENCE / "models/qwen3"
FIRST = one_layer(QWEN3)
ROWS = random_rows(4, seed=4)
# Layers whose codes are taken; of the others all.
TAKEN = {"fp8": 0, "gptq-desc_act": 0, "bitsandbytes": 6}
WEIGHTS = {
    "ct_int4": {"num_bits": 4, "type": "int", "strategy": "group",
                "group_size": 32, "symmetric": True},
    "ct_int4_zeros": {"num_bits": 4, "type": "int", "strategy": "group",
                      "group_size": 32, "symmetric": False},
    "ct_int8": {"num_bits": 8, "type": "int", "strategy": "channel",
                "symmetric": True},
    "ct_fp8": {"num_bits": 8, "type": "float", "strategy": "channel",
               "symmetric": True},
}  # fmt: skip
# Written by bitsandbytes 0.50.2 and compressed-tensors 0.20.0, with what they
# read again as `expected`.
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
THEIRS = {
    "bnb_nf4": {**BNB, "bnb_4bit_quant_type": "nf4"},
    "bnb_nf4_double": {**BNB, "bnb_4bit_quant_type": "nf4"},
    "bnb_fp4": {**BNB, "bnb_4bit_quant_type": "fp4"},
    "bnb_int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "ct_int4": "pack-quantized",
    "ct_int4_zeros": "pack-quantized",
    "ct_int8": "int-quantized",
    "ct_int8_packed": "pack-quantized",
    "ct_fp8": "float-quantized",
}


@pytest.mark.parametrize("name", THEIRS)
def test_what_other_tools_write(tmp_path, name):
    config = THEIRS[name]
    if isinstance(config, str):
        group = {
            "targets": ["Linear"],
            "weights": WEIGHTS[name.removesuffix("_packed")],
        }
        config = {
            "quant_method": "compressed-tensors",
            "format": config,
            "config_groups": {"group_0": group},
        }
    source = Reader(REFERENCE, "quantized.safetensors")
    tensors = {
        full.replace(f"{name}__", "m."): source.read(full)
        for full in source.names
        if full.startswith(f"{name}__")
    }
    expected = tensors.pop("m.expected")
    checkpoints.save_float8(tensors, tmp_path / SINGLE)
    found = format_of({"quantization_config": config})
    shape = expected.shape[::-1]
    reader = Reader(tmp_path)
    assert found.is_stored(reader, "m") and not found.is_stored(reader, "n")
    values = found.floats(reader, "m", shape)
    np.testing.assert_allclose(values.T, expected, rtol=1e-6, atol=1e-6)
    if found.storage(reader, "m", shape) is not None:
        values = found.matrix(reader, "m", shape).floats()
        np.testing.assert_allclose(values.T, expected, rtol=1e-6, atol=1e-6)
    ends = {full.removeprefix("m.") for full in reader.names}
    assert ends <= set(found.ends())


def load(path, **kwargs):
    kwargs = {"lora": kpt.LoRA(rank=4), **kwargs}
    task = kpt.SFTTask.from_preset(path, sequence_length=64, **kwargs)
    if task.adapter is not None:
        spread_adapter(task)
    return task


def logps(task):
    return np.concatenate(task.log_probs(ROWS))


def kernels(task):
    return [pair.layer.kernel for pair in task.adapter.pairs]


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_codes_are_not_rounded_again(tmp_path, kind, capsys):
    plain = checkpoints.write(FIRST, tmp_path / "quantized", kind)
    capsys.readouterr()
    task, floats = load(tmp_path / "quantized"), load(plain)
    said = capsys.readouterr().out
    taken = [isinstance(k, QuantizedKernel) for k in kernels(task)]
    assert sum(taken) == TAKEN.get(kind, 7)
    assert ("were read as floats" in said) == (not all(taken))
    for ours, theirs in zip(kernels(task), kernels(floats), strict=True):
        np.testing.assert_allclose(ours.value, theirs.value, atol=1e-7)
    np.testing.assert_allclose(logps(task), logps(floats), atol=1e-5)
    assert not [x for x in task.causal_lm.kpt_repairs if "not used" in x]


def test_a_checkpoint_is_trained_and_exported(tmp_path):
    checkpoints.write(QWEN3, tmp_path / "quantized", "awq")
    task = load(tmp_path / "quantized")
    before = [np.asarray(k.parts["codes"].value) for k in kernels(task)]
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    task.fit(ROWS, batch_size=4, verbose=0)
    for old, kernel in zip(before, kernels(task), strict=True):
        np.testing.assert_array_equal(old, kernel.parts["codes"].value)
    task.export(tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert "quantization_config" not in config
    again = load(tmp_path / "export", lora=None)
    np.testing.assert_allclose(logps(again), logps(task), atol=2e-5)


def test_floats_or_other_codes_of_a_checkpoint(tmp_path, capsys):
    plain = checkpoints.write(QWEN3, tmp_path / "quantized", "gptq")
    task = load(tmp_path / "quantized", quantize="none", lora=None)
    assert "14 layers were read as floats (as was" in capsys.readouterr().out
    want = logps(load(plain, lora=None))
    np.testing.assert_allclose(logps(task), want, atol=1e-5)
    load(tmp_path / "quantized", quantize="nf4")
    assert "rounded again to nf4" in capsys.readouterr().out


def test_a_task_that_is_not_trained(tmp_path):
    checkpoints.write(FIRST, tmp_path / "quantized", "gptq")
    with pytest.raises(ValueError, match="GPTQ.*lora=None"):
        load(tmp_path / "quantized", lora=None)
    task = load(tmp_path / "quantized", lora=None, trainable=False)
    assert not task.trainable_variables and len(logps(task))
    sample = dict(max_tokens=2, stop_token_ids=None, return_token_ids=True)
    assert len(task.generate(["a"], **sample)[0]) == 2
    task.compile()
    with pytest.raises(ValueError, match="nothing to train"):
        task.fit(ROWS, batch_size=2, verbose=0)


def test_random_weights_of_a_quantized_config(tmp_path):
    checkpoints.write(QWEN3, tmp_path / "quantized", "awq")
    (tmp_path / "quantized/model.safetensors").unlink()
    task = load(tmp_path / "quantized", load_weights=False)
    assert all(isinstance(k, QuantizedKernel) for k in kernels(task))
    assert all("zeros" in k.parts for k in kernels(task))


NAME = "model.layers.1.mlp.down_proj"


def drop(tensors):
    del tensors[f"{NAME}.scales"]


def add_bias(tensors):
    tensors[f"{NAME}.bias"] = np.ones(64, "float32")


def other_zeros(tensors):
    tensors[f"{NAME}.qzeros"] = tensors[f"{NAME}.qzeros"] + 1


def other_order(tensors):
    tensors[f"{NAME}.g_idx"] = tensors[f"{NAME}.g_idx"][::-1]


def other_shape(tensors):
    tensors[f"{NAME}.qweight"] = tensors[f"{NAME}.qweight"][1:]


@pytest.mark.parametrize(
    "change, words",
    [
        (drop, "down_proj.scales' of shape (3, 64)"),
        (other_shape, "down_proj.qweight' of shape (12, 64)"),
        (add_bias, "down_proj.bias"),
        (other_zeros, "`sym`"),
        (other_order, "`desc_act`"),
    ],
)
def test_what_does_not_fit_its_config(tmp_path, change, words):
    directory = tmp_path / "quantized"
    checkpoints.write(QWEN3, directory, "gptq", change)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(directory)


def test_a_bias_of_zeros_is_left_out(tmp_path):
    def add_zeros(tensors):
        tensors[f"{NAME}.bias"] = np.zeros(64, "float32")

    checkpoints.write(QWEN3, tmp_path / "quantized", "gptq", add_zeros)
    load(tmp_path / "quantized")


@pytest.mark.parametrize(
    "config, words",
    [
        ({"quant_method": "quanto"}, "quant_method='quanto'"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {"weights": {}}},
            },
            "nvfp4",
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
         "marlin"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_read(config, words):
    with pytest.raises(ValueError, match="unquantized") as error:
        format_of({"quantization_config": config})
    assert words in str(error.value)
