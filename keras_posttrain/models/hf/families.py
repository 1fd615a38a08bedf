"""The table of model families: Hugging Face's names and KerasHub's layers.

To support a new family, add a `Family` here. All code that reads, checks,
writes or names weights uses this table.
"""

import dataclasses
import re

import keras_hub

from keras_posttrain.models.experts import (
    EXPERT_NAMES,
    EXPERT_NAMES_OF_GEMMA4,
)
from keras_posttrain.models.hf import gemma3n, gemma4, qwen3_5


@dataclasses.dataclass(frozen=True)
class Layers:
    """How the decoder layers of a KerasHub backbone are built.

    Args:
        keras_name: str; `keras_hub.models` has `<keras_name>Backbone` and
            `<keras_name>CausalLM`.
        attention: str, the decoder layer's attribute of its attention layer.
        rotary: str, the attention layer's attribute of its rotary layer.
        heads_first: bool, whether the kernels of query, key and value are
            `(heads, hidden, head_dim)` and not `(hidden, heads, head_dim)`.
        windows: str, how the layers store a sliding window: `"none"`,
            `"gemma"`, `"mistral"`, `"qwen"`, `"qwen3"` or `"gpt_oss"`.
        has_head_dim: bool, whether the size of a head can be set.
        has_tied: bool, whether the constructor can tie the head.
    """

    keras_name: str
    attention: str = "_self_attention_layer"
    rotary: str = "rotary_embedding_layer"
    heads_first: bool = False
    windows: str = "none"
    has_head_dim: bool = True
    has_tied: bool = True

    @property
    def backbone_class(self):
        return getattr(keras_hub.models, f"{self.keras_name}Backbone")

    @property
    def causal_lm_class(self):
        return getattr(keras_hub.models, f"{self.keras_name}CausalLM")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a mixture: names, variables and settings.

    Args:
        fields: dict from a name of `Settings.experts` to the fields of
            `config.json`; the first is written.
        gate, up: pairs of the bank's attribute, a variable `(experts, in,
            out)`, and the half of its last axis, or `None` for all of it.
        names: dict from `"gate"`, `"up"` and `"down"` to Hugging Face's name
            of one expert's matrix, with its number as `{}`; `None` where
            `Family.parameters` has the experts.
        block: str, the decoder layer's attribute of its mixture.
        down: str, the bank's attribute of its variable.
        stacked: tuple of the names of all experts' gates over ups, and of
            their downs, as models of transformers 5 have them.
        dense: dict of the `modules` of a layer without experts, in a family
            that may have some.
        weights: str, the path of the bank of weights in the block, empty if
            it is the block.
        switch: str, the field by which a config has experts, or `None` if
            all of the family have.
    """

    fields: dict
    gate: tuple = ()
    up: tuple = ()
    names: dict | None = None
    block: str = "mlp"
    weights: str = "expert_bank"
    switch: str | None = None
    down: str = "_expert_feedforward_output_dense"
    stacked: tuple = EXPERT_NAMES
    dense: dict = dataclasses.field(default_factory=dict)

    def bank(self, layer):
        """Returns the layer's experts, or `None`."""
        block = attribute(layer, self.block)
        return attribute(block, self.weights) if self.weights else block


@dataclasses.dataclass(frozen=True)
class Family:
    """A Hugging Face model type, and the KerasHub layers that compute it.

    Args:
        architecture: str, the Hugging Face class of the language model.
        layers: `Layers`.
        modules: dict from the name of a module in a Hugging Face decoder
            layer to the path of the attribute in KerasHub's.
        windows: str, how configs say the sliding windows: `"none"`,
            `"gemma"`, `"mistral"` or `"qwen"`.
        defaults: dict of the values of absent fields of `config.json`.
        biases: dict from a field of `config.json` to the modules that have a
            bias where it is true.
        fixed_biases: tuple of the modules that always have one.
        experts: `Experts` or `None`.
        parameters: dict from the name of a tensor in a Hugging Face decoder
            layer to the path of the variable in KerasHub's that equals it.
        fused: dict from a module of the checkpoint to the modules whose
            outputs it concatenates.
        no_rope: bool, whether some layers do not rotate.
        partial_rotary: bool, whether a part of a head may be rotated.
        rope_by_type: bool, whether layers with a window rotate otherwise.
        optional: tuple of the modules that some layers lack.
        fields: tuple of fields that no other family reads.
        post_norms: bool, whether norms are those of the blocks' outputs.
        heads_norms: bool, whether the heads of queries and of keys are
            normalized together.
        multipliers: bool, whether embeddings, residuals, scores and logits
            have factors of their own.
        only: dict of fields and the tuple of values that the layers can
            represent, transformers' default first.
        ignored: tuple of fields that do not affect the forward pass.
        is_strict: bool, whether unknown fields are refused.
        has_width: bool, whether configs have the width of MLPs that are not
            experts.
    """

    model_type: str
    architecture: str
    layers: Layers
    modules: dict
    windows: str
    defaults: dict
    biases: dict = dataclasses.field(default_factory=dict)
    fixed_biases: tuple = ()
    experts: Experts | None = None
    parameters: dict = dataclasses.field(default_factory=dict)
    fused: dict = dataclasses.field(default_factory=dict)
    no_rope: bool = False
    partial_rotary: bool = False
    rope_by_type: bool = False
    optional: tuple = ()
    fields: tuple = ()
    post_norms: bool = False
    heads_norms: bool = False
    multipliers: bool = False
    only: dict = dataclasses.field(default_factory=dict)
    ignored: tuple = ()
    is_strict: bool = False
    has_width: bool = True

    @property
    def is_gemma(self):
        return self.layers.keras_name.startswith("Gemma")

    @property
    def is_gemma4(self):
        """Bool, whether the layers are those of Gemma 4."""
        return self.layers.keras_name == "Gemma4"

    @property
    def is_gemma3n(self):
        return self.model_type == "gemma3n_text"

    @property
    def is_qwen3_5(self):
        return self.layers.keras_name.startswith("Qwen3_5")

    def modules_of(self, layer):
        """Returns the `modules` of a decoder layer."""
        if self.optional:
            return {
                name: path
                for name, path in self.modules.items()
                if name not in self.optional
                or attribute(layer, path) is not None
            }
        if self.experts is None or self.experts.bank(layer) is not None:
            return self.modules
        shared = {
            name: path
            for name, path in self.modules.items()
            if not name.startswith("mlp.")
        }
        return {**shared, **self.experts.dense}

    def with_head_dim(self):
        """Returns the family on layers whose heads may have any size."""
        if self.layers.has_head_dim:
            return self
        return dataclasses.replace(self, layers=LAYERS["Mistral"])


_GEMMA_LAYERS = {
    "attention": "attention", "rotary": "rope_layer", "heads_first": True,
}  # fmt: skip
LAYERS = {
    layers.keras_name: layers
    for layers in (
        Layers("Gemma", **_GEMMA_LAYERS, windows="gemma", has_tied=False),
        Layers("Gemma3", **_GEMMA_LAYERS, windows="gemma", has_tied=False),
        Layers("Gemma4", **_GEMMA_LAYERS, windows="gemma", has_tied=False),
        Layers("Llama3", has_head_dim=False),
        Layers("Mistral", windows="mistral", has_tied=False),
        Layers("Qwen", windows="qwen", has_head_dim=False),
        Layers("Qwen3", windows="qwen3"),
        Layers(
            "Mixtral", windows="mistral", has_head_dim=False, has_tied=False
        ),
        Layers("QwenMoe", windows="qwen", has_head_dim=False),
        Layers("Qwen3Moe", windows="qwen3"),
        Layers(
            "GptOss",
            attention="self_attention_layer",
            windows="gpt_oss",
            has_tied=False,
        ),
        Layers("Qwen3_5"),
        Layers("Qwen3_5Moe"),
    )
}


# The tensor of a convolution, which has an axis of size 1.
CONVOLUTION = "linear_attn.conv1d.weight"
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
# What a token has for each layer; a projection that is not adapted.
_PER_LAYER = {
    "per_layer_input_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_up_proj",
    "post_per_layer_input_norm": "post_per_layer_input_norm",
}
# Hidden states of a token that a layer does not compute, and a path of low
# rank; none of their projections is adapted.
_GEMMA3N = {
    **{
        f"altup.{x}": f"altup.{x}"
        for x in (
            "correct_output_scale", "correction_coefs", "prediction_coefs",
            "modality_router", "router_norm",
        )
    },
    **{
        f"laurel.{x}": f"laurel.{x}"
        for x in ("linear_left", "linear_right", "post_laurel_norm")
    },
}  # fmt: skip
_GEMMA4_EXPERTS = {
    "router.proj": "moe_router.proj",
    "router.scale": "moe_router.per_dim_scale",
    "router.per_expert_scale": "moe_expert_bank.per_expert_scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_moe",
    "post_feedforward_layernorm_1": "post_ffw_norm_dense",
    "post_feedforward_layernorm_2": "post_ffw_norm_moe_path",
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


_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_ATTENTION_BIAS = {"attention_bias": (*_QKV, "self_attn.o_proj")}
_MLP_BIAS = {
    "mlp_bias": tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))
}


def _gemma_like(model_type, name, keras_name, norms, windows, defaults):
    return Family(
        model_type=model_type,
        architecture=f"{name}ForCausalLM",
        layers=LAYERS[keras_name],
        modules={**_GEMMA, **norms},
        windows=windows,
        defaults=defaults,
        biases=_ATTENTION_BIAS,
        rope_by_type=model_type == "gemma3_text",
    )


def _llama_like(
    name, keras_name, *, windows="none", norms=None, biases=None,
    fixed_biases=(), model_type=None, **defaults,
):  # fmt: skip
    return Family(
        model_type=model_type or name.lower(),
        architecture=f"{name}ForCausalLM",
        layers=LAYERS[keras_name],
        modules={**_LLAMA, **(norms or {})},
        windows=windows,
        biases=biases or {},
        fixed_biases=fixed_biases,
        defaults={
            **_COMMON,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            **defaults,
        },
    )


def _olmo(name, windows="none", **defaults):
    """Returns a family of OLMo, on the layers of Qwen 3."""
    family = _llama_like(
        name, "Qwen3", windows=windows, norms=_QWEN3_NORMS,
        biases=_ATTENTION_BIAS, rms_norm_eps=1e-5, pad_token_id=1,
        max_position_embeddings=2048, eos_token_id=50_279, **defaults,
    )  # fmt: skip
    modules = dict(family.modules)
    modules["post_attention_layernorm"] = modules.pop("input_layernorm")
    modules["post_feedforward_layernorm"] = "_feedforward_layernorm"
    return dataclasses.replace(
        family, modules=modules, post_norms=True, heads_norms=True,
        rope_by_type=windows != "none", is_strict=True,
    )  # fmt: skip


# What mixtures have in common: KerasHub's layers compute no other values.
_ROUTING = (
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
)  # fmt: skip
_UNUSED_WINDOWS = ("sliding_window", "max_window_layers")
_NO_WINDOWS = {"use_sliding_window": (False,)}
_ALL_SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_HALVES = {
    "gate": ("_expert_feedforward_gate_dense", 0),
    "up": ("_expert_feedforward_gate_dense", 1),
}
_QWEN_EXPERTS = {
    part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
}
_ROUTED = {
    "count": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "width": ("moe_intermediate_size",),
    "is_normalized": ("norm_topk_prob",),
}


def _mixture(dense, experts, modules, only, ignored=()):
    """Returns a family with experts in the place of its MLPs."""
    dense_modules = {
        name: path
        for name, path in dense.modules.items()
        if not name.startswith("mlp.")
    }
    return dataclasses.replace(
        dense,
        modules={**dense_modules, **modules},
        experts=experts,
        only={"hidden_act": ("silu",), **only},
        ignored=(*_ROUTING, *ignored),
        is_strict=True,
    )


def _attention(names):
    """Returns the modules of an attention layer with these attributes."""
    return {
        module: f"_self_attention_layer.{name}"
        for module, name in zip(
            _ATTENTION_BIAS["attention_bias"], names.split(), strict=True
        )
    }


def _gpt_oss():
    """Returns gpt-oss, whose experts KerasHub has as Hugging Face does."""
    attention, block = "self_attention_layer", "sparse_moe_block"
    experts = [f"{n}{end}" for n in EXPERT_NAMES for end in ("", "_bias")]
    projections = zip(
        _ATTENTION_BIAS["attention_bias"], ("query", "key", "value", "output")
    )
    return Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        layers=LAYERS["GptOss"],
        modules={
            "input_layernorm": "input_layernorm",
            **{name: f"{attention}.{x}_dense" for name, x in projections},
            "post_attention_layernorm": "post_attention_layernorm",
            "mlp.router": f"{block}.router.router_dense",
        },
        parameters={
            "self_attn.sinks": f"{attention}.sinks",
            **{x: f"{block}.{x.removeprefix('mlp.')}" for x in experts},
        },
        # Every second layer attends to all tokens, as in Gemma 2.
        windows="gemma",
        biases=_ATTENTION_BIAS,
        experts=Experts(
            block=block,
            weights="experts",
            fields={
                "count": ("num_local_experts", "num_experts"),
                "top_k": ("num_experts_per_tok",),
                "alpha": ("swiglu_alpha",),
                "limit": ("swiglu_limit",),
            },
        ),
        defaults=_GPT_OSS_DEFAULTS,
        only={"hidden_act": ("silu",), "attention_bias": (True,)},
        ignored=(*_ROUTING, "initial_context_length", "experts_per_token"),
        is_strict=True,
    )


def _qwen3_5(name, model_type, experts=None, modules=(), **defaults):
    """Returns a family of Qwen 3.5, with linear attention in some layers."""
    mlp = ("gate_proj", "up_proj", "down_proj") if experts is None else ()
    attention = {
        **_attention("_query_dense _key_dense _value_dense _output_dense"),
        "self_attn.q_norm": "_self_attention_layer._query_norm",
        "self_attn.k_norm": "_self_attention_layer._key_norm",
    }
    linear = {
        f"linear_attn.{x}": f"_linear_attn.{x}"
        for x in (
            "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "A_log",
            "dt_bias", "norm", "out_proj",
        )
    }  # fmt: skip
    linear[CONVOLUTION] = "_linear_attn.conv1d_weight"
    return Family(
        model_type=model_type,
        architecture=f"{name}ForCausalLM",
        layers=LAYERS[name],
        modules={
            "input_layernorm": "_input_layernorm",
            **attention,
            **linear,
            "post_attention_layernorm": "_post_attention_layernorm",
            **{f"mlp.{x}": _LLAMA[f"mlp.{x}"] for x in mlp},
            **dict(modules),
        },
        optional=(*attention, *linear),
        windows="none",
        experts=experts,
        partial_rotary=True,
        fields=qwen3_5.READ,
        defaults={**qwen3_5.DEFAULTS, **defaults},
        only=qwen3_5.ONLY,
        ignored=qwen3_5.IGNORED if experts is None else (
            *qwen3_5.IGNORED, *_ROUTING, "intermediate_size",
        ),
        is_strict=True,
        has_width=experts is None,
    )  # fmt: skip


_GPT_OSS_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "head_dim": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_ROUTER = "_sparse_feedforward_gate_dense"
_SHARED = "mlp.shared_expert_dense._feedforward"


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
    Family(
        model_type="gemma3n_text",
        architecture="Gemma3nForCausalLM",
        layers=LAYERS["Gemma4"],
        modules={
            **_GEMMA, **_GEMMA2_NORMS, **_GEMMA3_NORMS, **_PER_LAYER,
            **_GEMMA3N,
        },
        optional=("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm"),
        windows="gemma",
        defaults=gemma3n.DEFAULTS,
        fields=gemma3n.READ,
        rope_by_type=True,
        only={
            **dict.fromkeys(gemma3n.UNREAD, (None,)),
            "attention_bias": (False,),
        },
        ignored=gemma3n.IGNORED,
        is_strict=True,
    ),
    Family(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        layers=LAYERS["Gemma4"],
        modules={
            **_GEMMA, **_GEMMA2_NORMS, **_GEMMA3_NORMS, **_PER_LAYER,
            **_GEMMA4_EXPERTS, "layer_scalar": "layer_scalar",
        },
        optional=(
            "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm",
            *_PER_LAYER, *_GEMMA4_EXPERTS,
        ),
        experts=Experts(
            gate=("gate_proj", None), up=("up_proj", None), down="down_proj",
            block="moe_expert_bank", weights="", switch="enable_moe_block",
            names={}, stacked=EXPERT_NAMES_OF_GEMMA4,
            fields={
                "count": ("num_experts",),
                "top_k": ("top_k_experts",),
                "width": ("moe_intermediate_size",),
            },
        ),
        windows="gemma",
        defaults=gemma4.DEFAULTS,
        fields=gemma4.READ,
        rope_by_type=True,
        only={
            **dict.fromkeys(gemma4.UNREAD, (None,)),
            "attention_bias": (False,),
            # Of the tokens of images, and there are none here.
            "use_bidirectional_attention": (None, "vision"),
        },
        is_strict=True,
    ),
    _llama_like(
        "Llama", "Llama3", biases={**_ATTENTION_BIAS, **_MLP_BIAS},
        max_position_embeddings=2048,
    ),
    _llama_like(
        "Mistral", "Mistral", windows="mistral", num_key_value_heads=8,
        max_position_embeddings=131_072, sliding_window=4096,
    ),
    _llama_like(
        "Qwen2", "Qwen", windows="qwen", fixed_biases=_QKV,
        num_key_value_heads=32, **_QWEN_DEFAULTS,
    ),
    _llama_like(
        "Qwen3", "Qwen3", windows="qwen", norms=_QWEN3_NORMS,
        biases=_ATTENTION_BIAS, num_key_value_heads=32, head_dim=128,
        **_QWEN_DEFAULTS,
    ),
    dataclasses.replace(
        _llama_like(
            "SmolLM3", "Mistral", biases={**_ATTENTION_BIAS, **_MLP_BIAS},
            tie_word_embeddings=True, num_key_value_heads=4,
            rope_theta=2_000_000.0, max_position_embeddings=32_768,
            no_rope_layer_interval=4, pad_token_id=128_004,
            bos_token_id=128_000, eos_token_id=128_001,
        ),
        no_rope=True, only=_NO_WINDOWS, ignored=_UNUSED_WINDOWS,
        is_strict=True,
    ),
    dataclasses.replace(
        _llama_like(
            "Granite", "Mistral", biases={**_ATTENTION_BIAS, **_MLP_BIAS},
            max_position_embeddings=2048, embedding_multiplier=1.0,
            logits_scaling=1.0, residual_multiplier=1.0,
            attention_multiplier=1.0, bos_token_id=1, eos_token_id=2,
        ),
        multipliers=True, is_strict=True,
    ),
    dataclasses.replace(
        _llama_like(
            "Phi3", "Mistral", windows="mistral", rms_norm_eps=1e-5,
            max_position_embeddings=4096, sliding_window=None,
            original_max_position_embeddings=4096, pad_token_id=32_000,
            bos_token_id=1, eos_token_id=32_000,
        ),
        fused={
            "self_attn.qkv_proj": _QKV,
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
        partial_rotary=True, is_strict=True,
        ignored=("resid_pdrop", "embd_pdrop"),
    ),
    _olmo("Olmo2"),
    _olmo(
        "Olmo3", "gemma", rope_theta=500_000.0, sliding_window=4096,
        rope_local_base_freq=500_000.0, sliding_window_pattern=4,
    ),
    _mixture(
        _llama_like(
            "Mixtral", "Mixtral", num_key_value_heads=8, rms_norm_eps=1e-5,
            rope_theta=1e6, num_experts_per_tok=2, num_local_experts=8,
        ),
        Experts(
            gate=("_expert_feedforward_gate_dense", None),
            up=("_expert_feedforward_intermediate_dense", None),
            block="_sparse_moe_block",
            names={
                "gate": "block_sparse_moe.experts.{}.w1",
                "up": "block_sparse_moe.experts.{}.w3",
                "down": "block_sparse_moe.experts.{}.w2",
            },
            fields={
                "count": ("num_local_experts", "num_experts"),
                "top_k": ("num_experts_per_tok",),
            },
        ),
        {
            **_attention("query_dense key_dense value_dense output_dense"),
            "block_sparse_moe.gate": f"_sparse_moe_block.{_ROUTER}",
        },
        {"sliding_window": (None,)},
    ),
    _mixture(
        _llama_like(
            "Qwen2Moe", "QwenMoe", model_type="qwen2_moe", fixed_biases=_QKV,
            intermediate_size=5632, num_key_value_heads=16, num_experts=60,
            num_experts_per_tok=4, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, norm_topk_prob=False,
        ),
        Experts(
            **_HALVES, names=_QWEN_EXPERTS, fields={
                **_ROUTED,
                "shared_width": ("shared_expert_intermediate_size",),
            },
        ),
        {
            **_attention("query_dense key_dense value_dense _output_dense"),
            "mlp.gate": f"mlp.{_ROUTER}",
            "mlp.shared_expert.gate_proj": f"{_SHARED}_gate_dense",
            "mlp.shared_expert.up_proj": f"{_SHARED}_intermediate_dense",
            "mlp.shared_expert.down_proj": f"{_SHARED}_output_dense",
            "mlp.shared_expert_gate": "mlp.shared_expert_gate_dense",
        },
        {**_NO_WINDOWS, **_ALL_SPARSE, "qkv_bias": (True,)},
        _UNUSED_WINDOWS,
    ),
    _mixture(
        _llama_like(
            "Qwen3Moe", "Qwen3Moe", model_type="qwen3_moe",
            norms=_QWEN3_NORMS, biases=_ATTENTION_BIAS,
            intermediate_size=6144, num_key_value_heads=4,
            num_experts_per_tok=8, num_experts=128,
            moe_intermediate_size=768, norm_topk_prob=False,
        ),
        Experts(
            **_HALVES, names=_QWEN_EXPERTS, fields=_ROUTED,
            dense={
                "mlp.gate_proj": "mlp._feedforward_gate_dense",
                "mlp.up_proj": "mlp._feedforward_intermediate_dense",
                "mlp.down_proj": "mlp._feedforward_output_dense",
            },
        ),
        {"mlp.gate": f"mlp.{_ROUTER}"},
        _NO_WINDOWS,
        _UNUSED_WINDOWS,
    ),
    _gpt_oss(),
    _qwen3_5("Qwen3_5", "qwen3_5_text"),
    _qwen3_5(
        "Qwen3_5Moe", "qwen3_5_moe_text",
        Experts(
            **_HALVES, names=_QWEN_EXPERTS, fields={
                "count": ("num_experts", "num_local_experts"),
                "top_k": ("num_experts_per_tok",),
                "width": ("moe_intermediate_size",),
                "shared_width": ("shared_expert_intermediate_size",),
            },
        ),
        {
            "mlp.gate": "mlp._router_gate",
            **{
                f"mlp.shared_expert.{x}":
                    f"mlp.shared_expert._feedforward_{y}_dense"
                for x, y in (
                    ("gate_proj", "gate"), ("up_proj", "intermediate"),
                    ("down_proj", "output"),
                )
            },
            "mlp.shared_expert_gate": "mlp._shared_expert_gate",
        },
        **qwen3_5.MIXTURE,
    ),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _ALL}
# The attribute of a model that names its Hugging Face type.
MODEL_TYPE = "kpt_model_type"
# `LlamaBackbone` is the base class of `Llama3Backbone`. A model that was not
# loaded by this package is of the first family on its layers.
_BY_BACKBONE = {
    "Gemma3Backbone": "gemma3_text",
    "Gemma4Backbone": "gemma4_text",
    "LlamaBackbone": "llama",
    "MistralBackbone": "mistral",
    "QwenBackbone": "qwen2",
    "Qwen3Backbone": "qwen3",
    "MixtralBackbone": "mixtral",
    "QwenMoeBackbone": "qwen2_moe",
    "Qwen3MoeBackbone": "qwen3_moe",
    "GptOssBackbone": "gpt_oss",
    "Qwen3_5Backbone": "qwen3_5_text",
    "Qwen3_5MoeBackbone": "qwen3_5_moe_text",
}


def family_of(causal_lm):
    """Returns a model's `Family`; without one it has no LoRA or export."""
    backbone = causal_lm.backbone
    model_type = vars(causal_lm).get(MODEL_TYPE)
    if model_type is not None:
        family = FAMILIES[model_type]
        if type(backbone) is family.layers.backbone_class:
            return family
        return family.with_head_dim()
    if isinstance(backbone, keras_hub.models.GemmaBackbone):
        norms = (backbone.use_post_ffw_norm, backbone.use_post_attention_norm)
        if any(norms) and not all(norms):
            return None
        return FAMILIES["gemma2" if all(norms) else "gemma"]
    for name, model_type in _BY_BACKBONE.items():
        if isinstance(backbone, getattr(keras_hub.models, name)):
            if model_type == "gemma3_text" and not _is_causal_gemma3(backbone):
                return None
            if model_type == "gemma4_text" and not is_gemma4_decoder(backbone):
                return None
            is_qwen3_5 = model_type.startswith("qwen3_5")
            if is_qwen3_5 and not getattr(backbone, "text_only_model", True):
                return None
            family = FAMILIES[model_type]
            is_known = _has_known_layers(backbone, family.experts)
            return family if is_known else None
    return None


def _has_known_layers(backbone, experts):
    """Returns whether all layers have experts, or the family knows others."""
    return (
        experts is None
        or experts.switch is not None
        or bool(experts.dense)
        or all(
            experts.bank(layer) is not None
            for layer in backbone.transformer_layers
        )
    )


def _is_causal_gemma3(backbone):
    return (
        backbone.use_query_key_norm
        and backbone.use_post_ffw_norm
        and backbone.use_post_attention_norm
        and not backbone.is_embedding_model
        and not backbone.use_bidirectional_attention
    )


def is_gemma4_decoder(backbone):
    """Returns whether a backbone is a causal Gemma 4 of text and images.

    Sound is not read. One whose layers all share keys and values is the draft
    of another model.
    """
    return (
        type(backbone) is keras_hub.models.Gemma4Backbone
        and backbone.audio_encoder is None
        and not backbone.use_bidirectional_attention
        and not backbone.is_embedding_model
        and not backbone.transformer_layers[0].is_kv_shared_layer
    )


def attribute(layer, path):
    """Returns a nested attribute by a path such as "attention.query_dense".

    It is `None` where the layer lacks one of them.
    """
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def has_experts(causal_lm):
    """Returns whether a model is a mixture of experts of a known family."""
    family = family_of(causal_lm)
    if family is None or family.experts is None:
        return False
    layers = causal_lm.backbone.transformer_layers
    return any(family.experts.bank(layer) is not None for layer in layers)


def values_are_keys(causal_lm):
    """Returns whether some layers take keys as values, as in Gemma 4."""
    family = family_of(causal_lm)
    if family is None:
        return False
    key, value = "self_attn.k_proj", "self_attn.v_proj"
    names = map(family.modules_of, causal_lm.backbone.transformer_layers)
    return any(key in own and value not in own for own in names)


def is_linear(module):
    """Returns whether the module of this name is a linear layer to adapt."""
    return re.search(r"_proj(_(qkv|z|b|a))?$", module) is not None


def is_norm(module):
    """Returns whether the module of this name is a norm."""
    return re.search(r"norm(_\d)?$", module) is not None
