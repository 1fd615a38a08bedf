"""Hugging Face directories load with Hugging Face's own numbers."""

import json

import jax
import keras_hub
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from keras_posttrain.models import presets
from keras_posttrain.models.hf.config import from_config
from keras_posttrain.models.hf.families import FAMILIES
from keras_posttrain.models.hf.loading import load_causal_lm, repair
from keras_posttrain.models.hf.rope import set_sequence_length
from tests.models.tiny_checkpoints import (
    BASES,
    GEMMA3N_E2B,
    GEMMA4_E2B,
    GEMMA4_EXPERTS,
    SIZES,
    TOKEN_IDS,
    assert_all_ways_equal,
    assert_equal_logits,
    cached_logits,
    make_checkpoint,
    packed_logits,
    plain_logits,
    randomize,
)
from tests.support import in_ci

FORWARD = [
    "llama3",
    "llama3_tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "qwen3_ref",
    "gemma2_ref",
    "llama3_ref",
    "llama3_eps1e5",
    "qwen3_near",
]


@pytest.mark.parametrize("name", FORWARD)
def test_reference_forward(name, reference, load_reference):
    cases = {case["name"]: case for case in load_reference("forward")["cases"]}
    inputs, expected = cases[name]["inputs"], cases[name]["expected"]
    causal_lm = load_causal_lm(reference / inputs["model"])
    token_ids = np.array(inputs["token_ids"])
    mask = np.array(inputs["attention_mask"])
    hidden = causal_lm.backbone({"token_ids": token_ids, "padding_mask": mask})
    logits = causal_lm.backbone.token_embedding(hidden, reverse=True)
    logps = np.array(jax.nn.log_softmax(logits))
    next_logps = np.take_along_axis(logps[:, :-1], token_ids[:, 1:, None], -1)
    entropies = -np.sum(np.exp(logps) * logps, axis=-1)
    # Only the tokens of each row: the lists leave the padding out.
    for row in range(len(token_ids)):
        for got, key in (
            (next_logps[row, :, 0], "next_token_logprobs"),
            (entropies[row], "entropy"),
            (logps[row].argmax(-1), "argmax"),
        ):
            want = expected[key][row]
            np.testing.assert_allclose(got[: len(want)], want, atol=2e-5)
    rows, columns = np.array(cases[name]["settings"]["logit_positions"]).T
    got = np.array(logits)[rows, columns, :8]
    np.testing.assert_allclose(got, expected["logits_first8"], atol=2e-5)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 900.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.5, 2.0, 4.0, 9.0],
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
NEW = {"drop": ("rope_theta", "rope_scaling")}
ROPES = {
    "theta_old": {"rope_theta": 500.0},
    "theta_new": {
        **NEW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "linear_type": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "linear_new": {
        **NEW,
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 3.0,
            "rope_theta": 900.0,
        },
    },
    "llama3_old": {"rope_theta": 900.0, "rope_scaling": LLAMA3},
    "llama3_new": {**NEW, "rope_parameters": {**LLAMA3, "rope_theta": 700.0}},
    "llama3_no_length": {
        "rope_scaling": {
            k: v
            for k, v in LLAMA3.items()
            if k != "original_max_position_embeddings"
        }
    },
    "llama3_length_outside": {
        "rope_scaling": LLAMA3,
        "original_max_position_embeddings": 24,
    },
    "yarn_old": {"rope_theta": 900.0, "rope_scaling": YARN},
    "yarn_new": {
        **NEW,
        "rope_parameters": {
            **YARN,
            "rope_theta": 300.0,
            "beta_fast": 8,
            "beta_slow": 2,
            "truncate": False,
        },
    },
    "yarn_attention_factor": {
        "rope_scaling": {**YARN, "attention_factor": 1.3}
    },
    "yarn_mscale": {
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
    },
}
# Every style once by the plain call, in the family whose rotary layer is of a
# class of its own; some in each other family, run in every way. All for all
# are the full product below.
ROPE_CASES = [
    ("llama", "llama3_old"),
    ("gemma", "linear_type"),
    ("gemma", "yarn_new"),
    ("gemma2", "llama3_new"),
    ("mistral", "yarn_old"),
    ("qwen2", "yarn_old"),
    ("qwen3", "yarn_mscale"),
]


def check(tmp_path, model_type, fields, once=False):
    """Loads a checkpoint and compares every way of running it.

    With `once` as a task runs it alone.
    """
    directory, want = make_checkpoint(tmp_path / "hf", model_type, **fields)
    causal_lm = load_causal_lm(directory)
    set_sequence_length(causal_lm, TOKEN_IDS.shape[1])
    if once:
        assert_equal_logits(packed_logits(causal_lm), want)
    else:
        assert_all_ways_equal(causal_lm, want)
    return causal_lm


@pytest.mark.parametrize("name", ROPES)
def test_rope_style(tmp_path, name):
    directory, want = make_checkpoint(tmp_path / "hf", "llama", **ROPES[name])
    assert_equal_logits(plain_logits(load_causal_lm(directory)), want)


@pytest.mark.parametrize("model_type, name", ROPE_CASES)
def test_rope(tmp_path, model_type, name):
    check(tmp_path, model_type, ROPES[name])


# Gemma 3 and 4 have their own below; transformers refuses all but LongRoPE for
# Phi 3, and takes the size of a head for YaRN from the config.
ROPE_PRODUCT = [
    (model_type, name)
    for model_type in sorted(BASES)
    for name in ROPES
    if model_type not in ("gemma3_text", "gemma3n_text", "gemma4_text")
    and (model_type != "phi3" or name.startswith("theta"))
]


@pytest.mark.full
@pytest.mark.parametrize("model_type, name", ROPE_PRODUCT)
def test_rope_product(tmp_path, model_type, name):
    fields = {"head_dim": 8} if model_type == "mixtral" else {}
    check(tmp_path, model_type, {**ROPES[name], **fields})


PATTERN = ["full_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPES = {
    "defaults": {},
    "old": {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "new": {
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 5000.0},
            "sliding_attention": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 300.0,
            },
        },
    },
    "both": {
        "rope_theta": 5000.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default"},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}


@pytest.mark.parametrize("name", GEMMA3_ROPES)
def test_gemma3_rope(tmp_path, name):
    fields = {"layer_types": PATTERN, **GEMMA3_ROPES[name]}
    check(tmp_path, "gemma3_text", fields)


GPT_OSS_DEFAULTS = {
    "drop": ("rms_norm_eps", "head_dim", "output_router_logits"),
    "rope_scaling": None,
    "initial_context_length": 4096,
}
VARIANTS = {
    "gemma_eps": ("gemma", {"rms_norm_eps": 1e-2}),
    "gemma_legacy_activation": ("gemma", {"hidden_act": "gelu"}),
    "gemma_untied": ("gemma", {"tie_word_embeddings": False}),
    "gemma_one_kv_head": ("gemma", {"num_key_value_heads": 1}),
    "gemma_all_kv_heads": ("gemma", {"num_key_value_heads": 4}),
    "gemma2_eps": ("gemma2", {"rms_norm_eps": 1e-2}),
    "gemma2_scalar": ("gemma2", {"query_pre_attn_scalar": 29}),
    "gemma2_scalar_of_heads": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma2_no_caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2_pattern": ("gemma2", {"layer_types": PATTERN}),
    "gemma2_window": ("gemma2", {"sliding_window": 3}),
    "gemma2_untied": ("gemma2", {"tie_word_embeddings": False}),
    "gemma3_eps": ("gemma3_text", {"rms_norm_eps": 1e-2}),
    "gemma3_scalar": ("gemma3_text", {"query_pre_attn_scalar": 29}),
    "gemma3_cap": ("gemma3_text", {"final_logit_softcapping": 5.0}),
    "gemma3_unused_cap": ("gemma3_text", {"attn_logit_softcapping": 3.0}),
    "gemma3_old_pattern": ("gemma3_text", {"sliding_window_pattern": 2}),
    "gemma3_all_full": (
        "gemma3_text",
        {"layer_types": ["full_attention"] * 3},
    ),
    "gemma3_untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "llama_eps": ("llama", {"rms_norm_eps": 1e-2}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_no_kv_heads": ("llama", {"drop": ("num_key_value_heads",)}),
    "llama_activation": ("llama", {"hidden_act": "gelu"}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 12}),
    "llama_dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "llama_short": ("llama", {"rope_parameters": LONGROPE, **NEW}),
    "llama_long": (
        "llama",
        {
            "rope_parameters": {
                **LONGROPE,
                "original_max_position_embeddings": 8,
            },
            **NEW,
        },
    ),
    "gemma_biases": ("gemma", {"attention_bias": True}),
    "gemma2_biases": ("gemma2", {"attention_bias": True}),
    "gemma3_biases": ("gemma3_text", {"attention_bias": True}),
    "gemma3n_e2b": ("gemma3n_text", {**GEMMA3N_E2B, "as_saved": True}),
    "gemma3n_active": (
        "gemma3n_text",
        {
            "altup_active_idx": 1,
            "laurel_rank": 3,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 3,
            "layer_types": PATTERN,
            "num_kv_shared_layers": 1,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_local_base_freq": 300.0,
            "activation_sparsity_pattern": [0.0, 0.95, 0.3],
            "intermediate_size": [48] * 3,
        },
    ),
    # Without full attention, one state only, which is not scaled.
    "gemma3n_one_state": (
        "gemma3n_text",
        {
            "altup_num_inputs": 1,
            "altup_correct_scale": False,
            "layer_types": ["sliding_attention"] * 2,
            "num_kv_shared_layers": 1,
            "tie_word_embeddings": False,
            "drop": ("activation_sparsity_pattern",),
        },
    ),
    "gemma4_as_saved": (
        "gemma4_text",
        {"as_saved": True, "rms_norm_eps": 1e-2},
    ),
    # transformers has fewer heads only where keys are values.
    "gemma4_ungated": (
        "gemma4_text",
        {
            "num_global_key_value_heads": 1,
            "drop": ("layer_types", "global_head_dim"),
        },
    ),
    "gemma4_keys_are_values": (
        "gemma4_text",
        {"attention_k_eq_v": True, "tie_word_embeddings": False},
    ),
    "gemma4_cap": (
        "gemma4_text",
        {
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0}
                | {"rope_theta": 300.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 4000.0,
                    "partial_rotary_factor": 0.45,
                    "factor": 3.0,
                },
            },
        },
    ),
    "gemma4_e2b": ("gemma4_text", GEMMA4_E2B),
    "qwen3_5_as_saved": (
        "qwen3_5_text",
        {
            "as_saved": True,
            "drop": ("layer_types",),
            "full_attention_interval": 2,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_5_tied": (
        "qwen3_5_text",
        {
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 2,
            "linear_num_value_heads": 2,
            "num_key_value_heads": 4,
        },
    ),
    # As 3.5 is run for longer texts; the sections are those of images.
    "qwen3_5_yarn": (
        "qwen3_5_text",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            }
        },
    ),
    "qwen3_5_attention": (
        "qwen3_5_text",
        {
            "layer_types": ["full_attention"] * 2,
            "rope_theta": 500.0,
            "partial_rotary_factor": 1.0,
            "head_dim": 12,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"tie_word_embeddings": False}),
    "qwen3_5_moe_as_saved": (
        "qwen3_5_moe_text",
        {"as_saved": True, "linear_conv_kernel_dim": 3},
    ),
    "gemma4_experts_as_saved": (
        "gemma4_text",
        {**GEMMA4_EXPERTS, "as_saved": True},
    ),
    "mistral_eps": ("mistral", {"rms_norm_eps": 1e-2}),
    "mistral_window": ("mistral", {"sliding_window": 4}),
    "mistral_tied": ("mistral", {"tie_word_embeddings": True}),
    # transformers takes its Ministral for it.
    "mistral_layer_types": (
        "mistral",
        {"sliding_window": 4, "layer_types": PATTERN[:2]},
    ),
    "mistral_even_heads": ("mistral", {"drop": ("head_dim",)}),
    "qwen2_eps": ("qwen2", {"rms_norm_eps": 1e-2}),
    "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2_unused_window": ("qwen2", {"sliding_window": 4}),
    "qwen2_window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen2_layer_types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "num_hidden_layers": 3,
            "layer_types": PATTERN,
        },
    ),
    "qwen2_head_dim": (
        "qwen2",
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen3_biases": ("qwen3", {"attention_bias": True}),
    "qwen3_eps": ("qwen3", {"rms_norm_eps": 1e-2}),
    "qwen3_untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3_window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
        },
    ),
    "qwen3_layer_types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "num_hidden_layers": 3,
            "layer_types": PATTERN,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral_as_saved": ("mixtral", {"as_saved": True}),
    "mixtral_defaults": (
        "mixtral",
        {"drop": ("rms_norm_eps", "output_router_logits")},
    ),
    "mixtral_null": ("mixtral", {"rope_scaling": None, "head_dim": None}),
    "mixtral_eps": (
        "mixtral",
        {"rms_norm_eps": 1e-2, "output_router_logits": True},
    ),
    "mixtral_tied": ("mixtral", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_moe_as_saved": ("qwen2_moe", {"as_saved": True}),
    "qwen2_moe_eps": (
        "qwen2_moe",
        {"rms_norm_eps": 1e-2, "sliding_window": 4},
    ),
    "qwen3_moe": ("qwen3_moe", {"attention_bias": True}),
    "qwen3_moe_as_saved": ("qwen3_moe", {"as_saved": True}),
    "qwen3_moe_tied": (
        "qwen3_moe",
        {"tie_word_embeddings": True, "norm_topk_prob": True},
    ),
    "qwen3_moe_dense_layers": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_step": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen3_moe_yarn": ("qwen3_moe", {"rope_scaling": YARN}),
    "qwen3_moe_new_name": (
        "qwen3_moe",
        {"drop": ("num_experts",), "num_local_experts": 4},
    ),
    # Its window is shorter than the rows.
    "gpt_oss": ("gpt_oss", GPT_OSS_DEFAULTS),
    "gpt_oss_as_saved": ("gpt_oss", {"as_saved": True, **GPT_OSS_DEFAULTS}),
    "gpt_oss_layer_types": (
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "layer_types": [*PATTERN[:2], PATTERN[1]],
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "head_dim": 8,
        },
    ),
    "gpt_oss_experts": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.8,
            "swiglu_alpha": 0.9,
            "sliding_window": 1,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3_as_saved": ("smollm3", {"as_saved": True}),
    "smollm3_untied": (
        "smollm3",
        {"tie_word_embeddings": False, "no_rope_layers": [1, 0, 0, 1, 1]},
    ),
    "smollm3_interval": (
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "rms_norm_eps": 1e-2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3_yarn": ("smollm3", {"rope_scaling": YARN}),
    "granite": ("granite", {}),
    "granite_as_saved": ("granite", {"as_saved": True}),
    "granite_tied": (
        "granite",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "olmo2_as_saved": ("olmo2", {"as_saved": True}),
    "olmo2_tied": (
        "olmo2",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
    ),
    "olmo3": ("olmo3", {}),
    "olmo3_as_saved": ("olmo3", {"as_saved": True}),
    "olmo3_yarn": (
        "olmo3",
        {"rope_scaling": YARN, "layer_types": [*PATTERN, *PATTERN[1:]]},
    ),
    "phi3": ("phi3", {}),
    "phi3_as_saved": ("phi3", {"as_saved": True}),
    "phi3_tied": (
        "phi3",
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "phi3_window": ("phi3", {"sliding_window": 4}),
    "phi3_partial": ("phi3", {"partial_rotary_factor": 0.5}),
    # As Phi-4-mini has it.
    "phi3_long": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5],
                "long_factor": [1.5, 4.0],
            },
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 8,
        },
    ),
    "phi3_short": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [1.5, 2.0, 3.0, 9.0],
            },
            "original_max_position_embeddings": 32,
        },
    ),
}


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("layers", [1, 6, 7, 12, 14])
def test_gemmas_have_transformers_types_of_layers(model_type, layers):
    """Every fifth or sixth is global, in Gemma 4 the last, and of Gemma 3n
    the first ten are sparse, if a config names none."""
    fields = {**SIZES, **BASES[model_type], "num_hidden_layers": layers}
    del fields["layer_types"]
    fields.pop("activation_sparsity_pattern", None)
    family = FAMILIES[model_type]
    settings, _ = from_config({"model_type": model_type, **fields}, family)
    want = transformers.AutoConfig.for_model(model_type, **fields)
    kinds = {5: "sliding_attention", None: "full_attention"}
    assert [kinds[w] for w in settings.windows] == want.layer_types
    if settings.gemma3n is not None:
        sparsity = list(settings.gemma3n["sparsity"])
        assert sparsity == want.activation_sparsity_pattern


# `make test-full` runs these: CI has other variants with the same fields.
LATER = {
    "gemma4_ungated", "mixtral",
    "mixtral_eps", "mixtral_tied", "qwen2_moe", "qwen2_moe_eps",
    "qwen3_5_attention", "qwen3_5_moe", "qwen3_5_tied", "qwen3_5_yarn",
    "qwen3_moe", "qwen3_moe_tied", "qwen3_moe_yarn", "smollm3_yarn",
}  # fmt: skip


# Names by which the settings of another variant are read, and norms, products
# and heads, which are the same code however a model is run.
ONCE = {
    name
    for name in VARIANTS
    if name.endswith(("_eps", "tied", "_activation", "_biases", "_as_saved"))
} - {
    # The variants of their families that are run in every way.
    "gemma4_as_saved", "gemma4_experts_as_saved", "mixtral_as_saved",
    "qwen2_moe_as_saved", "qwen3_moe_as_saved", "qwen3_5_as_saved",
    "qwen3_5_moe_as_saved", "qwen3_5_tied",
}  # fmt: skip
ONCE |= {
    "gpt_oss", "mixtral_defaults", "mixtral_null", "qwen3_moe_dense_layers",
    "qwen3_moe_new_name", "qwen3_moe_step",
}  # fmt: skip


@pytest.mark.parametrize("name", in_ci(*VARIANTS.keys() - LATER, of=VARIANTS))
def test_variant(tmp_path, name):
    check(tmp_path, *VARIANTS[name], once=name in ONCE)


@pytest.mark.parametrize(
    "model_type, fields", [("gemma3n_text", {}), ("gemma4_text", GEMMA4_E2B)]
)
def test_the_epsilon_of_e4b(tmp_path, model_type, fields):
    """Norms of small inputs multiply rounding, also in transformers."""
    fields = {**fields, "rms_norm_eps": 1e-6}
    directory, want = make_checkpoint(tmp_path / "hf", model_type, **fields)
    causal_lm = load_causal_lm(directory)
    want = jax.nn.log_softmax(want)
    for logits in (plain_logits, packed_logits, cached_logits):
        got = jax.nn.log_softmax(logits(causal_lm))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_repairs_are_reported(tmp_path):
    causal_lm = check(
        tmp_path,
        "gemma2",
        {
            "rms_norm_eps": 1e-2,
            "query_pre_attn_scalar": 29,
            "rope_theta": 99.0,
            "layer_types": PATTERN,
            "tie_word_embeddings": False,
            "a_field_of_tomorrow": 3,
        },
    )
    notes = " | ".join(causal_lm.kpt_repairs)
    for part in (
        "rms_norm_eps set to 0.01 in 12 norms",
        "query_pre_attn_scalar set to 29",
        "'rope_theta': 99.0",
        "sliding_window set to (None, 5, None)",
        "tie_word_embeddings set to False",
        "not read: a_field_of_tomorrow",
    ):
        assert part in notes, notes
    assert repair(causal_lm) == causal_lm.kpt_repairs
    assert causal_lm.kpt_source["config"]["query_pre_attn_scalar"] == 29


REFUSED = {
    "dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic"}},
        "factor=None",
    ),
    "longrope": (
        "qwen2",
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        "short_factor=None",
    ),
    "longrope_pairs": (
        "phi3",
        {
            "rope_scaling": {
                "type": "su",
                "short_factor": [1.0] * 3,
                "long_factor": [1.0] * 4,
            }
        },
        "factors of lengths [3, 4]",
    ),
    "unknown_rope": (
        "llama",
        {"rope_scaling": {"rope_type": "spiral"}},
        "rope_type='spiral'",
    ),
    "partial_of_phi3": (
        "phi3",
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor=1.5",
    ),
    "gemma3n_widths": (
        "gemma3n_text",
        {"intermediate_size": [48, 64]},
        r"intermediate_size=[48, 64]",
    ),
    "gemma3n_active": (
        "gemma3n_text",
        {"altup_active_idx": 3},
        "less than `altup_num_inputs`, which is 3",
    ),
    "gemma3n_sparsity": (
        "gemma3n_text",
        {"activation_sparsity_pattern": [0.5]},
        "2 numbers from 0 to below 1",
    ),
    "gemma3n_donors": (
        "gemma3n_text",
        {"num_kv_shared_layers": 1},
        "num_kv_shared_layers=1",
    ),
    "gemma3n_inputs": (
        "gemma3n_text",
        {"hidden_size_per_layer_input": 0},
        "hidden_size_per_layer_input=0",
    ),
    "gemma3n_cap": (
        "gemma3n_text",
        {"final_logit_softcapping": None},
        "final_logit_softcapping=None",
    ),
    "gemma3n_unread": (
        "gemma3n_text",
        {"attn_logit_softcapping": 3.0},
        "softcapping=3.0",
    ),
    "gemma4_last": (
        "gemma4_text",
        {"layer_types": PATTERN[:2]},
        "at last",
    ),
    "gemma4_donors": (
        "gemma4_text",
        {"num_kv_shared_layers": 1},
        "num_kv_shared_layers=1",
    ),
    "gemma4_all_share": (
        "gemma4_text",
        {"num_kv_shared_layers": 2},
        "num_kv_shared_layers=2",
    ),
    "gemma4_bidirectional": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "'all'",
    ),
    "gemma4_second_embedding": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 95},
        "vocab_size_per_layer_input=95",
    ),
    "gemma4_layers": (
        "gemma4_text",
        {"per_layer_config": {"0": {"head_dim": 4}}},
        "per_layer_config=",
    ),
    "gemma4_heads": (
        "gemma4_text",
        {"per_layer_config": {"1": {"num_key_value_heads": 1}}},
        "per_layer_config=",
    ),
    "gemma4_unread": (
        "gemma4_text",
        {"attn_logit_softcapping": 3.0},
        "softcapping=3.0",
    ),
    "gemma4_rope": (
        "gemma4_text",
        {"rope_parameters": {"full_attention": YARN}},
        "rope_parameters=",
    ),
    "gemma4_old_rope": (
        "gemma4_text",
        {"rope_scaling": YARN},
        "rope_scaling=",
    ),
    "gemma4_experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}
        | {"moe_intermediate_size": 8},
        "top_k_experts=5, num_experts=4",
    ),
    "qwen3_5_layers": (
        "qwen3_5_text",
        {"layer_types": ["linear_attention"] * 2},
        "the first of them once",
    ),
    "qwen3_5_windows": (
        "qwen3_5_text",
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types=",
    ),
    "qwen3_5_interval": (
        "qwen3_5_text",
        {"layer_types": None, "full_attention_interval": 0},
        "full_attention_interval=0",
    ),
    "qwen3_5_heads": (
        "qwen3_5_text",
        {"linear_num_value_heads": 3},
        "linear_num_value_heads=3",
    ),
    "qwen3_5_width": (
        "qwen3_5_text",
        {"linear_conv_kernel_dim": 1},
        "linear_conv_kernel_dim=1",
    ),
    "qwen3_5_gate": (
        "qwen3_5_text",
        {"attn_output_gate": False},
        "attn_output_gate=False",
    ),
    "qwen3_5_biases": (
        "qwen3_5_text",
        {"attention_bias": True},
        "attention_bias=True",
    ),
    "qwen3_5_activation": (
        "qwen3_5_text",
        {"hidden_act": "gelu"},
        "hidden_act='gelu'",
    ),
    "qwen3_5_tomorrow": (
        "qwen3_5_text",
        {"a_field_of_tomorrow": 3},
        "a_field_of_tomorrow=3",
    ),
    "qwen3_5_moe_chosen": (
        "qwen3_5_moe_text",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok=5, num_experts=4",
    ),
    "mixtral_window": ("mixtral", {"sliding_window": 4}, "sliding_window=4"),
    "mixtral_head_dim": (
        "mixtral",
        {"head_dim": 16},
        "head_dim=16, hidden_size=32",
    ),
    "mixtral_activation": (
        "mixtral",
        {"hidden_act": "gelu"},
        "hidden_act='gelu'",
    ),
    "mixtral_experts": (
        "mixtral",
        {"num_experts": 8},
        "'num_local_experts': 4, 'num_experts': 8",
    ),
    "too_many_chosen": (
        "mixtral",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok=5, num_local_experts=4",
    ),
    "no_width": (
        "qwen3_moe",
        {"moe_intermediate_size": 0},
        "moe_intermediate_size=0",
    ),
    "qwen2_moe_bias": ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False"),
    "qwen2_moe_step": (
        "qwen2_moe",
        {"decoder_sparse_step": 2},
        "decoder_sparse_step=2",
    ),
    "qwen3_moe_head_dim": ("qwen3_moe", {"head_dim": 7}, "head_dim=7"),
    "qwen3_moe_window": (
        "qwen3_moe",
        {"use_sliding_window": True},
        "use_sliding_window=True",
    ),
    "qwen3_moe_tomorrow": (
        "qwen3_moe",
        {"a_field_of_tomorrow": 3},
        "a_field_of_tomorrow=3",
    ),
    "gpt_oss_bias": (
        "gpt_oss",
        {"attention_bias": False},
        "attention_bias=False",
    ),
    "gpt_oss_no_window": (
        "gpt_oss",
        {"sliding_window": None},
        "sliding_window=None",
    ),
    "gpt_oss_limit": ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0"),
    "gpt_oss_experts": (
        "gpt_oss",
        {"num_experts": 8},
        "'num_local_experts': 4, 'num_experts': 8",
    ),
    "a_field_of_tomorrow": (
        "granite",
        {"a_field_of_tomorrow": 3},
        "a_field_of_tomorrow=3",
    ),
    "no_rope_layers": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1]},
        "no_rope_layers=[1, 0, 1]",
    ),
    "smollm3_window": (
        "smollm3",
        {"use_sliding_window": True},
        "use_sliding_window=True",
    ),
    "smollm3_layer_types": (
        "smollm3",
        {"layer_types": ["sliding_attention"] * 2},
        "layer_types=",
    ),
    "rope_field": (
        "llama",
        {"rope_scaling": {"rope_type": "linear"}},
        "factor=None",
    ),
    "partial": (
        "llama",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5",
    ),
    "attention_bias": (
        "mistral",
        {"attention_bias": True},
        "attention_bias=True",
    ),
    "mlp_bias": ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
    "quantized": (
        "qwen3",
        {"quantization_config": {"quant_method": "hqq"}},
        "quant_method='hqq'",
    ),
    "bidirectional": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True",
    ),
    "activation": (
        "llama",
        {"hidden_act": "quick_gelu"},
        "hidden_act='quick_gelu'",
    ),
    "gemma_activation": (
        "gemma2",
        {"hidden_activation": "silu"},
        "hidden_activation='silu'",
    ),
    "layer_types": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["chunked_attention"]},
        "layer_types=",
    ),
    "size": ("llama", {"hidden_size": None}, "hidden_size=None"),
    "no_heads": (
        "gemma",
        {"num_attention_heads": 0},
        "num_attention_heads=0",
    ),
    "groups": ("mistral", {"num_key_value_heads": 3}, "key_value_heads=3"),
    # Of transformers' 32, as the field is left out.
    "default_groups": (
        "qwen2",
        {"num_key_value_heads": ...},
        "num_key_value_heads=32",
    ),
    "odd_head_dim": ("qwen3", {"head_dim": 7}, "head_dim=7"),
    "odd_quotient": ("llama", {"hidden_size": 36}, "head_dim=9"),
    "mistral_layer_types": (
        "mistral",
        {"layer_types": ["sliding_attention"] * 2},
        "sliding_window=None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_represented(tmp_path, name):
    model_type, fields, message = REFUSED[name]
    config = {"model_type": model_type, **BASES[model_type]}
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = {**config, **sizes, **fields}
    config = {k: v for k, v in config.items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Received") as error:
        load_causal_lm(tmp_path, load_weights=False)
    assert message in str(error.value)


def edit(directory, change):
    """Rewrites `model.safetensors` after `change(arrays)`."""
    path = directory / "model.safetensors"
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, metadata={"format": "pt"})


def test_missing_and_misshapen_tensors(tmp_path):
    directory, _ = make_checkpoint(tmp_path / "hf", "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    edit(directory, lambda arrays: arrays.update({name: np.ones((48, 31))}))
    with pytest.raises(ValueError, match=r"shape \(48, 31\)"):
        load_causal_lm(directory)
    edit(directory, lambda arrays: arrays.pop(name))
    with pytest.raises(ValueError, match=name):
        load_causal_lm(directory)
    edit(directory, lambda arrays: arrays.update({name: np.ones((48, 32))}))
    edit(directory, lambda arrays: arrays.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight"):
        load_causal_lm(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        load_causal_lm(directory)


def damaged(content):
    """Contents that a download or Git may leave in place of a file's."""
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    return content[: len(content) // 2], b"", pointer


def test_a_damaged_file_of_weights_is_named(tmp_path):
    directory, _ = make_checkpoint(tmp_path / "hf", "llama")
    path = directory / "model.safetensors"
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        expected = f"complete safetensors file.*{path}' of {len(content):,} b"
        with pytest.raises(ValueError, match=expected):
            load_causal_lm(directory)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("is_ours", [True, False])
def test_damaged_weights_of_a_preset_are_named(tmp_path, is_ours):
    directory, _ = make_checkpoint(tmp_path / "hf", "llama")
    causal_lm, preset = load_causal_lm(directory), tmp_path / "preset"
    if is_ours:
        presets.save_to_preset(causal_lm, preset)
    else:
        causal_lm.save_to_preset(preset)
    path = preset / "model.weights.h5"
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        expected = rf"complete HDF5 files.*{preset}'.*{len(content)}\}} bytes"
        with pytest.raises(ValueError, match=expected):
            presets.load_causal_lm(preset)
    path.unlink()
    error = ValueError if is_ours else FileNotFoundError
    with pytest.raises(error, match="model.weights"):
        presets.load_causal_lm(preset)


@pytest.mark.parametrize(
    "weight_map, text",
    [
        ({"a": "../other/model.safetensors"}, "in its own directory.*'../oth"),
        ({"a": "/etc/passwd"}, "in its own directory.*'/etc/passwd' for 'a'"),
        ({"a": ".."}, "in its own directory"),
        ({"a": 3}, "in its own directory.*3 for 'a'"),
        (["model.safetensors"], "a dict of tensors and files.*weight_map="),
        ({}, "a dict of tensors and files.*weight_map={}"),
    ],
)
def test_an_index_that_points_elsewhere(tmp_path, weight_map, text):
    directory, _ = make_checkpoint(tmp_path / "hf", "llama")
    (tmp_path / "other").mkdir()
    path = directory / "model.safetensors"
    path.rename(tmp_path / "other" / path.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{path.name}.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=text):
        load_causal_lm(directory)


def test_integer_weights_are_refused(tmp_path):
    directory, _ = make_checkpoint(tmp_path / "hf", "llama")
    name = "model.norm.weight"
    edit(
        directory,
        lambda arrays: arrays.update({name: np.ones(32, "int8")}),
    )
    with pytest.raises(ValueError, match="int8"):
        load_causal_lm(directory)


def test_head_is_tied_as_stored(tmp_path):
    """A head in the checkpoint is loaded, whatever the config says."""
    directory, want = make_checkpoint(tmp_path / "hf", "llama")
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (directory / "config.json").write_text(json.dumps(config))
    causal_lm = load_causal_lm(directory)
    assert_equal_logits(plain_logits(causal_lm), want)
    assert any("head not tied" in note for note in causal_lm.kpt_repairs)


def test_a_reward_model_gives_its_backbone(reference):
    causal_lm = load_causal_lm(reference / "models/qwen3_reward")
    assert any("score.weight" in note for note in causal_lm.kpt_repairs)


def test_a_bare_model_and_a_tied_head_alone(tmp_path):
    """Names without `model.`, and an embedding saved as the head."""
    directory, want = make_checkpoint(tmp_path / "hf", "qwen2")

    def rename(arrays):
        for name in list(arrays):
            new = name.removeprefix("model.")
            arrays[new] = arrays.pop(name)
        arrays["lm_head.weight"] = arrays.pop("embed_tokens.weight")

    edit(directory, rename)
    assert_equal_logits(plain_logits(load_causal_lm(directory)), want)


@pytest.mark.parametrize(
    "name, prefix",
    [
        ("gemma3", "language_model.model."),
        ("gemma3n", "model.language_model."),
        ("gemma4", "model.language_model."),
        ("qwen3_5", "model.language_model."),
    ],
)
def test_text_model_of_a_multimodal_model(tmp_path, name, prefix):
    directory, want = make_checkpoint(tmp_path / "hf", f"{name}_text")
    text = json.loads((directory / "config.json").read_text())
    config = {
        "model_type": name,
        "architectures": ["ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "audio_config": None,
        "image_token_id": 95,
    }
    (directory / "config.json").write_text(json.dumps(config))

    def rename(arrays):
        for old in list(arrays):
            new = old.replace("model.", prefix, 1)
            arrays[new] = arrays.pop(old)
        arrays["vision_tower.x"] = np.ones(3, "float32")

    edit(directory, rename)
    causal_lm = load_causal_lm(directory)
    assert_equal_logits(packed_logits(causal_lm), want)
    notes = " | ".join(causal_lm.kpt_repairs)
    assert "vision tower left out" in notes
    assert "vision_tower.x" in notes


def test_dtype(tmp_path):
    directory, want = make_checkpoint(tmp_path / "hf", "llama")
    causal_lm = load_causal_lm(directory, dtype="bfloat16")
    kernel = causal_lm.backbone.token_embedding.embeddings
    assert kernel.dtype == "bfloat16"
    stored = load_file(directory / "model.safetensors")
    stored = stored["model.embed_tokens.weight"].astype(kernel.value.dtype)
    assert (np.array(kernel.value) == stored).all()
    assert np.abs(plain_logits(causal_lm) - want).max() < 0.2 * np.std(want)
    causal_lm = load_causal_lm(directory, dtype="mixed_bfloat16")
    assert causal_lm.backbone.token_embedding.embeddings.dtype == "float32"


def test_without_weights(tmp_path):
    directory, _ = make_checkpoint(tmp_path / "hf", "llama")
    (directory / "model.safetensors").unlink()
    causal_lm = load_causal_lm(directory, load_weights=False)
    assert plain_logits(causal_lm).shape == (*TOKEN_IDS.shape, 96)


KERAS_SIZES = {
    "vocabulary_size": 96,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 48,
}


def test_repair_of_kerashub_models():
    """Settings that KerasHub's backbones take and their layers never see."""
    models = keras_hub.models
    qwen3 = models.Qwen3CausalLM(
        models.Qwen3Backbone(
            **KERAS_SIZES, head_dim=12, sliding_window_size=4
        ),
        preprocessor=None,
    )
    randomize(qwen3)
    assert np.abs(plain_logits(qwen3) - packed_logits(qwen3)).max() > 1e-2
    notes = repair(qwen3)
    assert "rms_norm_eps set to 1e-06 in 4 norms" in notes
    assert "sliding window applied in the attention mask" in notes
    assert repair(qwen3) == notes == qwen3.kpt_repairs
    assert_all_ways_equal(qwen3, plain_logits(qwen3))
    gemma = models.GemmaCausalLM(
        models.GemmaBackbone(
            **KERAS_SIZES,
            head_dim=12,
            layer_norm_epsilon=1e-3,
            query_head_dim_normalize=False,
            use_post_ffw_norm=True,
            use_post_attention_norm=True,
        ),
        preprocessor=None,
    )
    notes = repair(gemma)
    assert "query scale set to 8 ** -0.5" in notes
    assert "rms_norm_eps set to 0.001 in 8 norms" in notes
    llama = models.LlamaCausalLM(
        models.LlamaBackbone(**KERAS_SIZES), preprocessor=None
    )
    assert repair(llama) == []


# Keras reads the learning rate of the optimizer it saves.
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_a_preset_of_kerashub(tmp_path):
    models = keras_hub.models
    original = models.QwenCausalLM(
        models.QwenBackbone(**KERAS_SIZES), preprocessor=None
    )
    randomize(original)
    original.save_to_preset(tmp_path / "preset")
    loaded = load_causal_lm(tmp_path / "preset", dtype="float32")
    assert_equal_logits(plain_logits(loaded), plain_logits(original))
    assert loaded.kpt_repairs == []
    assert loaded.kpt_source is None
