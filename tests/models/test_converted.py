"""Families without a table: as transformers computes them, or refused."""

import json

import keras_hub
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from keras_posttrain.models.hf.loading import load_causal_lm
from tests.models.tiny_checkpoints import (
    LENGTH,
    SIZES,
    TOKEN_IDS,
    assert_equal_logits,
    make_checkpoint,
    plain_logits,
    cached_logits,
)

EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
FULL, SLIDING = "full_attention", "sliding_attention"
BASES = {
    "gpt2": {
        "drop": tuple(k for k in SIZES if k != "vocab_size"),
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "n_positions": 64,
    },
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {
        **EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        **EXPERTS,
        "num_experts": 4,
        "head_dim": 12,
        "moe_intermediate_size": 24,
    },
    "smollm3": {
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gpt_oss": {
        **EXPERTS,
        "num_local_experts": 4,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "sliding_window": 4,
    },
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL],
        "sliding_window": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 96,
    },
}
QWEN3_5 = {
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", FULL],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
}
BASES["qwen3_5"] = {**QWEN3_5, "tie_word_embeddings": True}
BASES["qwen3_5_moe"] = {
    **QWEN3_5,
    **BASES["qwen2_moe"],
    "tie_word_embeddings": False,
}
BASES["gemma4"] = BASES["gemma4_text"]
NESTED = ("gemma4", "qwen3_5", "qwen3_5_moe")
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "float32")
CODES = np.concatenate([CODES, -CODES])


class MXFP4:
    """Experts in 4 bits, as gpt-oss has them; exact in float32 too."""

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
            floats = CODES[pairs.reshape(*blocks.shape[:3], 32)]
            floats = floats * 2.0 ** (scales[..., None] - 127.0)
            floats = floats.reshape(experts, outputs, inputs)
            value.copy_(torch.tensor(floats.transpose(0, 2, 1)))
            self.tensors[f"{name}_blocks"] = blocks
            self.tensors[f"{name}_scales"] = scales

    def write(self, directory):
        file = directory / "model.safetensors"
        arrays = load_file(file)
        for name in self.tensors:
            arrays.pop(name.rpartition("_")[0], None)
        save_file(arrays | self.tensors, file)
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {"quant_method": "mxfp4"}
        path.write_text(json.dumps(config))


def nest(directory, model_type):
    """Makes a checkpoint of text look like one of a multimodal model."""
    path = directory / "config.json"
    text = json.loads(path.read_text())
    config = {
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
        "image_token_id": 95,
        "architectures": ["ForConditionalGeneration"],
    }
    path.write_text(json.dumps(config))
    file = directory / "model.safetensors"
    arrays = {
        k.replace("model.", "model.language_model."): v
        for k, v in load_file(file).items()
    }
    save_file(arrays, file)


def make(tmp_path, model_type, **fields):
    fields = {**BASES[model_type], **fields}
    if model_type in NESTED:
        inner = f"{model_type}_text"
        found = make_checkpoint(tmp_path / "hf", inner, **fields)
        nest(tmp_path / "hf", model_type)
        return found
    if model_type != "gpt_oss":
        return make_checkpoint(tmp_path / "hf", model_type, **fields)
    experts = MXFP4()
    directory, want = make_checkpoint(
        tmp_path / "hf", model_type, change=experts, **fields
    )
    experts.write(directory)
    return directory, want
