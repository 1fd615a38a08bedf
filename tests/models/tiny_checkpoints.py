"""Tiny random Hugging Face checkpoints, and every way to run a model."""

import json

import jax
import keras_hub
import numpy as np
import torch
import transformers

from keras_posttrain.models import qwen3_5
from keras_posttrain.models.key_values import KeyValues
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.recurrence import RecurrentState

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
# Fields of the family's configs in addition to the sizes.
BASES = {
    "gemma": {"head_dim": 12, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "sliding_window": 5,
        "num_hidden_layers": 3,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "sliding_window": 5,
        "num_hidden_layers": 3,
    },
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 96,
        "pad_token_id": 0,
    },
    "llama": {"tie_word_embeddings": False},
    "mistral": {"head_dim": 12, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "smollm3": {
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "olmo3": {"pad_token_id": 0, "num_hidden_layers": 5, "sliding_window": 4},
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
    "gpt_oss": {
        **EXPERTS,
        "num_local_experts": 4,
        "head_dim": 12,
        "sliding_window": 4,
    },
}
# With a small epsilon the norms multiply rounding: in float32 transformers
# differs from its own float64 by 3e-5, and with experts by 8e-4.
QWEN3_5 = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 1e-2,
}
BASES["qwen3_5_text"] = QWEN3_5
BASES["qwen3_5_moe_text"] = {
    **QWEN3_5,
    **BASES["qwen2_moe"],
    "tie_word_embeddings": True,
}
# A Gemma 4 with inputs for each layer, and layers that share keys and values
# with others: as E2B has them, and with fewer heads as 26B-A4B has.
GEMMA4_E2B = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    # With fewer features or a small epsilon the norms of these inputs multiply
    # rounding: in float32 transformers differs by 4e-5 from its own float64.
    "hidden_size_per_layer_input": 16,
    "rms_norm_eps": 1e-2,
    "use_double_wide_mlp": True,
}
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
# Two layers with everything that Gemma 3n has but shared keys and values. The
# last ids have no row in the embedding for each layer.
BASES["gemma3n_text"] = {
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 90,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.95, 0.0],
    # Where hardly a feature of an MLP is left, its norm multiplies rounding.
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
}
# As E2B and E4B are.
GEMMA3N_E2B = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "altup_num_inputs": 4,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0],
}
LENGTH = 14
TOKEN_IDS = np.random.default_rng(0).integers(0, 96, (2, LENGTH))


def make_checkpoint(
    directory, model_type, drop=(), as_saved=False, change=None, **fields
):
    """Writes a random checkpoint whose `config.json` is exactly this.

    Args:
        directory: path to make.
        model_type: str.
        drop: names of fields to leave out.
        as_saved: bool, keeps the `config.json` that transformers writes.
        change: function that changes the weights of the model.
        **fields: fields of the config, over `SIZES` and `BASES`.

    Returns:
        The directory, and the logits that transformers has for `TOKEN_IDS`.
    """
    base = BASES.get(model_type, {})
    config = {"model_type": model_type, **SIZES, **base, **fields}
    config = {k: v for k, v in config.items() if k not in drop}
    # Of these the scale of a norm is one more than its weight.
    from_zero = model_type in ("gemma", "gemma2", "gemma3_text")
    from_zero |= model_type.startswith("qwen3_5")
    directory.mkdir(parents=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(sum(map(ord, str(sorted(config.items())))))
    model = transformers.AutoModelForCausalLM.from_config(read)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(std=0.1 if "norm" in name else 0.25)
            # Qwen 3.5 has both.
            is_scale = name.endswith("linear_attn.norm.weight")
            if is_scale or ("norm" in name and not from_zero):
                value.add_(1.0)
        for name, value in model.named_buffers():
            if name.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5)
        if change is not None:
            change(model)
    model.save_pretrained(directory)
    config["architectures"] = [type(model).__name__]
    if not as_saved:
        path.write_text(json.dumps(config))
    return directory, transformers_logits(directory)


def transformers_logits(directory):
    """Logits of `TOKEN_IDS` by transformers, from the files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        return model(torch.tensor(TOKEN_IDS)).logits.numpy()


def compiled(causal_lm, function):
    """Compiles a pass of a model whose layers make programs at every call.

    To compile one pass of another is more work than the pass.
    """
    backbone = causal_lm.backbone
    has_programs = qwen3_5.is_text(backbone)
    has_programs |= bool(getattr(backbone, "num_experts", None))
    return jax.jit(lambda *x: function(*x)) if has_programs else function


def plain_logits(causal_lm):
    """By the backbone's own `call`."""
    inputs = {
        "token_ids": TOKEN_IDS,
        "padding_mask": np.ones_like(TOKEN_IDS),
        "position_ids": np.tile(np.arange(LENGTH), (len(TOKEN_IDS), 1)),
    }
    wanted = causal_lm.backbone.input
    run = compiled(causal_lm, causal_lm.backbone)
    hidden = run({k: inputs[k] for k in inputs if k in wanted})
    return np.array(causal_lm.backbone.token_embedding(hidden, reverse=True))


def cached_logits(causal_lm, packed=None):
    """By the cache of `generate`: all at once, then the last token again.

    `packed` are the `packed_logits`, if they are known.
    """
    if qwen3_5.is_text(causal_lm.backbone):
        return logits_by_states(causal_lm, packed)
    embedding = causal_lm.backbone.token_embedding
    more = ()
    gemma = (keras_hub.models.Gemma3Backbone, keras_hub.models.Gemma4Backbone)
    if isinstance(causal_lm.backbone, gemma):
        more = (None, None, np.ones_like(TOKEN_IDS), None)
    build = compiled(causal_lm, causal_lm._build_cache)
    hidden, cache = build(TOKEN_IDS, *more)
    first = np.array(embedding(hidden, reverse=True))

    def step(cache, index):
        token = jax.lax.dynamic_slice_in_dim(TOKEN_IDS, index, 1, axis=1)
        return causal_lm.call_with_cache(token, cache, index)[0]

    first[:, -1:] = compiled(causal_lm, step)(cache, LENGTH - 1)
    return first


def logits_by_states(causal_lm, packed=None):
    """By the built-in engine's cache, as KerasHub's is not correct.

    A part is a prompt, another is computed behind it, and the rest token by
    token.
    """
    policy, first, more = Policy(causal_lm), 5, 4
    rows, length = TOKEN_IDS.shape
    batch = {
        "token_ids": TOKEN_IDS[:, :first],
        "segment_ids": np.ones((rows, first), "int32"),
        "positions": np.tile(np.arange(first), (rows, 1)),
    }

    @jax.jit
    def run():
        kept = policy.prefill(batch, 1)
        lengths = np.full(rows, first)
        slots = np.arange(rows)
        cache = []
        for x, y in kept:
            if x.ndim == 3:
                empty = KeyValues.zeros(rows, length, *x.shape[1:], x.dtype)
                pair = (z.reshape(rows, first, *z.shape[1:]) for z in (x, y))
                cache.append(empty.fill(slots, *pair))
            else:
                cache.append(RecurrentState(x, y))
        # One token more than there are, as in rows of unequal lengths.
        ids = TOKEN_IDS[:, first : first + more + 1]
        counts = np.full(rows, more)
        places = first + np.tile(np.arange(more + 1), (rows, 1))
        cache = policy.extend(ids, places, cache, slots, counts)
        lengths = lengths + more
        recent = [x.begun(lengths, length) for x in cache]
        out = []
        for step in range(length - first - more):
            token = TOKEN_IDS[:, first + more + step]
            logits, recent = policy.decode(token, lengths, step, cache, recent)
            out.append(logits)
        return jax.numpy.stack(out, axis=1)

    found = packed_logits(causal_lm) if packed is None else packed.copy()
    found[:, first + more :] = run()
    return found


def packed_logits(causal_lm):
    """Under the attention hook: both rows in one, as two segments."""
    rows, length = TOKEN_IDS.shape
    batch = {
        "token_ids": TOKEN_IDS.reshape(1, -1),
        "segment_ids": np.repeat([[1, 2]], length, axis=1),
        "positions": np.tile(np.arange(length), rows)[None],
    }
    run = compiled(causal_lm, Policy(causal_lm).hidden_states)
    logits = causal_lm.backbone.token_embedding(run(batch), reverse=True)
    return np.array(logits).reshape(rows, length, -1)


def assert_equal_logits(got, want, bound=2e-5):
    """Within the bound, or that share of the logits' size."""
    size = max(1.0, float(np.std(want)))
    np.testing.assert_allclose(got, want, rtol=0, atol=bound * size)


def assert_all_ways_equal(causal_lm, want):
    """Whichever way the model is run, the logits are these."""
    # KerasHub's own code of Qwen 3.5 takes minutes; a policy replaces it.
    Policy(causal_lm)
    assert_equal_logits(plain_logits(causal_lm), want)
    packed = packed_logits(causal_lm)
    assert_equal_logits(packed, want)
    assert_equal_logits(cached_logits(causal_lm, packed), want)


def randomize(causal_lm, seed=0):
    """Weights of the size that `make_checkpoint` gives."""
    rng = np.random.default_rng(seed)
    for variable in causal_lm.backbone.variables:
        value = rng.normal(size=variable.shape, scale=0.25)
        if "norm" in variable.path:
            value = np.array(variable.value) + 0.4 * value
        variable.assign(value)
    return causal_lm
