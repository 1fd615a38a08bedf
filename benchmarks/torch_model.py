"""A workload's model in transformers."""

import torch
import workloads
from transformers import LlamaConfig, LlamaForCausalLM


def build(model):
    config = LlamaConfig(
        vocab_size=model.vocab,
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        rms_norm_eps=model.norm_eps,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": model.rope_theta,
        },
        tie_word_embeddings=model.tied,
        max_position_embeddings=2048,
        pad_token_id=workloads.PAD,
        bos_token_id=workloads.BOS,
        eos_token_id=workloads.EOS,
        attn_implementation="sdpa",
        dtype="float32",
    )
    net = LlamaForCausalLM(config).float()
    state = {k: torch.from_numpy(v) for k, v in model.weights().items()}
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    net.load_state_dict(state)
    return net
