"""The table of model families: Hugging Face's names and KerasHub's layers.

To support a new family, add a `Family` here. All code that reads, checks,
writes or names weights uses this table.
"""

import dataclasses

import keras_hub


@dataclasses.dataclass(frozen=True)
class Family:
    """The KerasHub layers of one Hugging Face model type.

    Args:
        architecture: str, the Hugging Face class of the language model.
        keras_name: str; `keras_hub.models` has `<keras_name>Backbone` and
            `<keras_name>CausalLM`.
        modules: dict from the name of a module in a Hugging Face decoder
            layer to the path of the attribute in KerasHub's.
        attention: str, the decoder layer's attribute of its attention layer.
        rotary: str, the attention layer's attribute of its rotary layer.
        heads_first: bool, whether the kernels of query, key and value are
            `(heads, hidden, head_dim)` and not `(hidden, heads, head_dim)`.
        windows: str, how the layers store a sliding window: `"none"`,
            `"gemma"`, `"mistral"`, `"qwen"` or `"qwen3"`.
        has_head_dim: bool, whether the size of a head can be set.
        defaults: dict of the values of absent fields of `config.json`.
    """

    model_type: str
    architecture: str
    keras_name: str
    modules: dict
    attention: str
    rotary: str
    heads_first: bool
    windows: str
    has_head_dim: bool
    defaults: dict

    @property
    def is_gemma(self):
        return self.keras_name.startswith("Gemma")

    @property
    def backbone_class(self):
        return getattr(keras_hub.models, f"{self.keras_name}Backbone")

    @property
    def causal_lm_class(self):
        return getattr(keras_hub.models, f"{self.keras_name}CausalLM")


_GEMMA = {
    "input_layernorm": "pre_attention_norm",
    "self_attn.q_proj": "attention.query_dense",
    "self_attn.k_proj": "attention.key_dense",
    "self_attn.v_proj": "attention.value_dense",
    "self_attn.o_proj": "attention.output_dense",
    "mlp.gate_proj": "gating_ffw",
    "mlp.up_proj": "gating_ffw_2",
    "mlp.down_proj": "ffw_linear",
}
_GEMMA1_NORMS = {"post_attention_layernorm": "pre_ffw_norm"}
_GEMMA2_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA3_NORMS = {
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
}
_LLAMA = {
    "input_layernorm": "_self_attention_layernorm",
    "self_attn.q_proj": "_self_attention_layer._query_dense",
    "self_attn.k_proj": "_self_attention_layer._key_dense",
    "self_attn.v_proj": "_self_attention_layer._value_dense",
    "self_attn.o_proj": "_self_attention_layer._output_dense",
    "post_attention_layernorm": "_feedforward_layernorm",
    "mlp.gate_proj": "_feedforward_gate_dense",
    "mlp.up_proj": "_feedforward_intermediate_dense",
    "mlp.down_proj": "_feedforward_output_dense",
}
_QWEN3_NORMS = {
    "self_attn.q_norm": "_self_attention_layer._query_dense_layer_norm",
    "self_attn.k_norm": "_self_attention_layer._key_dense_layer_norm",
}

# The defaults of transformers' config classes. Sizes are not included: a
# checkpoint without them is an error.
_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_GEMMA_DEFAULTS = {
    **_COMMON,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA2_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_GEMMA3_DEFAULTS = {
    **_GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _gemma_like(model_type, name, keras_name, norms, windows, defaults):
    return Family(
        model_type=model_type,
        architecture=f"{name}ForCausalLM",
        keras_name=keras_name,
        modules={**_GEMMA, **norms},
        attention="attention",
        rotary="rope_layer",
        heads_first=True,
        windows=windows,
        has_head_dim=True,
        defaults=defaults,
    )


def _llama_like(
    name, keras_name, *, windows, norms=None, has_head_dim=True, **defaults
):
    return Family(
        model_type=name.lower(),
        architecture=f"{name}ForCausalLM",
        keras_name=keras_name,
        modules={**_LLAMA, **(norms or {})},
        attention="_self_attention_layer",
        rotary="rotary_embedding_layer",
        heads_first=False,
        windows=windows,
        has_head_dim=has_head_dim,
        defaults={
            **_COMMON,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            **defaults,
        },
    )


_ALL = (
    _gemma_like(
        "gemma", "Gemma", "Gemma", _GEMMA1_NORMS, "none",
        {
            **_GEMMA_DEFAULTS,
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 16,
        },
    ),
    _gemma_like(
        "gemma2", "Gemma2", "Gemma", _GEMMA2_NORMS, "gemma", _GEMMA2_DEFAULTS
    ),
    _gemma_like(
        "gemma3_text", "Gemma3", "Gemma3", {**_GEMMA2_NORMS, **_GEMMA3_NORMS},
        "gemma", _GEMMA3_DEFAULTS,
    ),
    _llama_like(
        "Llama", "Llama3", windows="none", has_head_dim=False,
        max_position_embeddings=2048,
    ),
    _llama_like(
        "Mistral", "Mistral", windows="mistral", num_key_value_heads=8,
        max_position_embeddings=131_072, sliding_window=4096,
    ),
    _llama_like(
        "Qwen2", "Qwen", windows="qwen", has_head_dim=False,
        num_key_value_heads=32, **_QWEN_DEFAULTS,
    ),
    _llama_like(
        "Qwen3", "Qwen3", windows="qwen3", norms=_QWEN3_NORMS,
        num_key_value_heads=32, head_dim=128, **_QWEN_DEFAULTS,
    ),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _ALL}
# `LlamaBackbone` is the base class of `Llama3Backbone`.
_BY_BACKBONE = {
    "Gemma3Backbone": "gemma3_text",
    "LlamaBackbone": "llama",
    "MistralBackbone": "mistral",
    "QwenBackbone": "qwen2",
    "Qwen3Backbone": "qwen3",
}


def family_of(causal_lm):
    """Returns a model's `Family`; without one it has no LoRA or export."""
    backbone = causal_lm.backbone
    if isinstance(backbone, keras_hub.models.GemmaBackbone):
        norms = (backbone.use_post_ffw_norm, backbone.use_post_attention_norm)
        if any(norms) and not all(norms):
            return None
        return FAMILIES["gemma2" if all(norms) else "gemma"]
    for name, model_type in _BY_BACKBONE.items():
        if isinstance(backbone, getattr(keras_hub.models, name)):
            if model_type == "gemma3_text" and not _is_gemma3_text(backbone):
                return None
            return FAMILIES[model_type]
    return None


def _is_gemma3_text(backbone):
    return (
        backbone.text_only_model
        and backbone.use_query_key_norm
        and backbone.use_post_ffw_norm
        and backbone.use_post_attention_norm
        and not backbone.is_embedding_model
        and not backbone.use_bidirectional_attention
    )


def attribute(layer, path):
    """Returns a nested attribute by a path such as "attention.query_dense"."""
    for name in path.split("."):
        layer = getattr(layer, name)
    return layer
