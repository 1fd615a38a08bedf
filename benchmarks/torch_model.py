"""A workload's model in transformers, with tokenizer and LoRA."""

import tempfile

import torch
import workloads
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)


def build(model, seed=0, quantize=None):
    """Returns the model; `quantize` is `None`, `"int8"` or `"nf4"`."""
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
    state = {k: torch.from_numpy(v) for k, v in model.weights(seed).items()}
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    net.load_state_dict(state)
    if quantize is None:
        return net
    settings = {
        "int8": {"load_in_8bit": True},
        "nf4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": torch.float32,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            device_map="cpu",
            quantization_config=BitsAndBytesConfig(**settings[quantize]),
        )


def tokenizer(vocab, chat=False):
    """Returns a tokenizer in which the word `t17` is token 17.

    `chat` says whether with a chat template.
    """
    words = workloads.words(vocab, chat)
    core = Tokenizer(models.WordLevel(words, unk_token="t3"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if chat:
        core.add_special_tokens([workloads.END_OF_TURN])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=workloads.CHAT_TEMPLATE if chat else None,
    )


def lora():
    """Returns PEFT's settings for all linear layers."""
    from peft import (
        LoraConfig,
    )  # not installed where only transformers is measured

    return LoraConfig(
        r=workloads.LORA_RANK,
        lora_alpha=workloads.LORA_ALPHA,
        target_modules=list(workloads.LINEARS),
        task_type="CAUSAL_LM",
    )
