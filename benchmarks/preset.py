"""A workload's model as a Hugging Face directory."""

import json

import workloads
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers


def write(model, folder, seed=0, chat=False):
    """Writes the model to a directory that all libraries can load.

    `chat` says whether with a chat template.
    """
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": 4096,
        "pad_token_id": workloads.PAD,
        "bos_token_id": workloads.BOS,
        "eos_token_id": workloads.EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        model.weights(seed), folder / "model.safetensors", {"format": "pt"}
    )
    words = workloads.words(model.vocab, chat)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    if chat:
        tokenizer.add_special_tokens([workloads.END_OF_TURN])
        template = folder / "chat_template.jinja"
        template.write_text(workloads.CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
