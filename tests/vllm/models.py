"""Helpers of the tests of vLLM: models, tasks, prompts."""

import pathlib
import tempfile

import keras
import keras_hub
import numpy as np

import keras_posttrain as kpt
from keras_posttrain.models.hf.loading import load_causal_lm
from tests.models.tiny_checkpoints import (
    GEMMA4_E2B,
    GEMMA4_EXPERTS,
    make_checkpoint,
)
from tests.support import REFERENCE


def llama(tied):
    """A Llama with heads of a size that vLLM's CPU kernels know."""
    keras.utils.set_random_seed(3)
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=512,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=96,
        tie_word_embeddings=tied,
    )
    return noisy(keras_hub.models.Llama3CausalLM(backbone))


def qwen2():
    keras.utils.set_random_seed(4)
    backbone = keras_hub.models.QwenBackbone(
        vocabulary_size=512,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=96,
        tie_word_embeddings=True,
    )
    return noisy(keras_hub.models.QwenCausalLM(backbone))


def from_transformers(model_type, **fields):
    """A model of a family on the layers of another, with such heads."""
    with tempfile.TemporaryDirectory() as folder:
        directory, _ = make_checkpoint(
            pathlib.Path(folder) / "model",
            model_type,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            **fields,
        )
        return load_causal_lm(directory)


def gemma4(**fields):
    """A Gemma 4 with heads of such sizes."""
    sizes = {
        "head_dim": 32,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 512,
        # Without it the samples of a prompt are equal.
        "final_logit_softcapping": 4.0,
    }
    return from_transformers("gemma4_text", **{**fields, **sizes})


def noisy(causal_lm):
    """Weights so large that their order in a tensor shows in the logits."""
    rng = np.random.default_rng(5)
    for variable in causal_lm.trainable_variables:
        noise = rng.normal(0, 0.1, variable.shape)
        variable.assign_add(noise.astype("float32"))
    return causal_lm


MODELS = {
    "llama": lambda: llama(False),
    "llama_tied": lambda: llama(True),
    "qwen2": qwen2,
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": lambda: from_transformers("granite"),
    "phi3": lambda: from_transformers("phi3"),
    "qwen3_moe": lambda: from_transformers(
        "qwen3_moe", head_dim=32, moe_intermediate_size=32
    ),
    # Values are keys, as in 31B.
    "gemma4": lambda: gemma4(attention_k_eq_v=True),
    "gemma4_e2b": lambda: gemma4(**GEMMA4_E2B),
    "gemma4_moe": lambda: gemma4(
        **{**GEMMA4_EXPERTS, "moe_intermediate_size": 32}
    ),
    # The epsilon that vLLM has.
    "gpt_oss": lambda: from_transformers(
        "gpt_oss", head_dim=32, rms_norm_eps=1e-5
    ),
}
# Those whose adapter is merged.
MERGED = ("gemma4", "gemma4_moe", "gpt_oss", "qwen3_moe")


def make(model, lora=False, task=kpt.GRPOTask, **kwargs):
    settings = {"sequence_length": 64, **kwargs}
    if lora:
        settings["lora"] = kpt.LoRA(rank=4)
    made = MODELS[model]
    if callable(made):
        return task(made(), None, **settings)
    made = task.from_preset(REFERENCE / "models" / made, **settings)
    # Rows and rewards are of token ids.
    made.tokenizer = None
    return made


def odd(completions):
    return [sum(x % 2 for x in ids) / len(ids) for ids in completions]


def compile_grpo(task, engine, learning_rate):
    task.compile(
        optimizer=keras.optimizers.SGD(learning_rate),
        loss=kpt.losses.GRPOLoss(beta=0.0),
        rewards=[odd],
        rollout=engine,
        num_generations=4,
        max_completion_length=6,
        max_grad_norm=None,
    )


def prompts(count):
    rng = np.random.default_rng(0)
    return [
        {"prompt_ids": rng.integers(3, 500, 4 + i % 3).tolist()}
        for i in range(count)
    ]
