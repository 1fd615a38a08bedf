"""The layout of each variable of each family, on simulated meshes."""

import functools
import re

import keras_hub
import numpy as np
import pytest

from keras_posttrain.distribution import layouts
from keras_posttrain.models.hf.families import FAMILIES
from keras_posttrain.models.hf.layer_patches import set_hidden_states

MODELS = keras_hub.models
SIZES = dict(
    vocabulary_size=96,
    num_layers=1,
    num_query_heads=8,
    num_key_value_heads=4,
    hidden_dim=32,
    intermediate_dim=48,
)
MIXTURE = dict(num_experts=8, top_k=2, moe_intermediate_dim=16)
SHARED = dict(shared_expert_intermediate_dim=16, norm_top_k_prob=True)
# A layer with attention and one with linear attention.
LINEAR = dict(
    head_dim=8,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)


def gemma3n():
    """Built as a Hugging Face directory is, on the layers of Gemma 4."""
    backbone = MODELS.Gemma4Backbone(
        **SIZES, head_dim=8, image_size=None, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
    )  # fmt: skip
    own = {"states": 8, "active": 0, "is_scaled": True, "rank": 16}
    set_hidden_states(backbone, {**own, "sparsity": (0.5,)})
    return backbone


BACKBONES = {
    "gemma": lambda: MODELS.GemmaBackbone(**SIZES, head_dim=8),
    "gemma2": lambda: MODELS.GemmaBackbone(
        **SIZES,
        head_dim=8,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
    ),
    "gemma3": lambda: MODELS.Gemma3Backbone(
        **SIZES, head_dim=8, image_size=None
    ),
    "llama2": lambda: MODELS.LlamaBackbone(**SIZES),
    "llama3": lambda: MODELS.Llama3Backbone(**SIZES),
    "mistral": lambda: MODELS.MistralBackbone(**SIZES),
    "qwen2": lambda: MODELS.QwenBackbone(**SIZES),
    "qwen3": lambda: MODELS.Qwen3Backbone(**SIZES, head_dim=8),
    "mixtral": lambda: MODELS.MixtralBackbone(**SIZES, num_experts=8),
    "qwen_moe": lambda: MODELS.QwenMoeBackbone(**SIZES, **MIXTURE, **SHARED),
    "qwen3_moe": lambda: MODELS.Qwen3MoeBackbone(
        **SIZES, **MIXTURE, head_dim=8, norm_top_k_prob=True
    ),
    "gpt_oss": lambda: MODELS.GptOssBackbone(
        **SIZES, num_experts=8, head_dim=8
    ),
    "gemma3n": gemma3n,
    "gemma4": lambda: MODELS.Gemma4Backbone(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        image_size=None,
        hidden_size_per_layer_input=8,
        enable_moe_block=True,
        num_experts=8,
        num_experts_per_token=2,
        expert_intermediate_dim=16,
    ),
    "qwen3_5": lambda: MODELS.Qwen3_5Backbone(
        **{**SIZES, "num_layers": 2}, **LINEAR
    ),
    "qwen3_5_moe": lambda: MODELS.Qwen3_5MoeBackbone(
        **{k: SIZES[k] for k in SIZES if k != "intermediate_dim"}
        | {"num_layers": 2},
        **MIXTURE,
        **LINEAR,
        shared_expert_intermediate_size=16,
    ),
}
# The axis over "model" of four devices, by what the variable is.
ON_MODEL = {
    r"decoder_block_0/attention/(query|key|value)/kernel": 0,
    r"self_attention/(query|key|value)/kernel": 1,
    r"self_attention/(query|key|value)/bias": 0,
    r"attention_output/kernel": 0,
    r"(ffw_gating|ffw_gating_2)/kernel": 1,
    r"/feedforward_(gate|intermediate)_dense/kernel": 1,
    r"(ffw_linear|feedforward_output_dense)/kernel": 0,
    r"experts/expert_feedforward_\w+_dense": 0,
    r"block(_\d+)?/sparse_feedforward_gate_dense/kernel": 1,
    r"experts/(gate_up|down)_proj(_bias)?": 0,
    r"router/router_dense/kernel": 1,
    r"moe_expert_bank/(gate|up|down)_proj": 0,
    r"moe_router/proj/kernel": 1,
    r"per_layer_(input_gate|model_projection)/kernel": 1,
    r"per_layer_up_proj/kernel": 0,
    r"(make|join)_states/projection_\d+/kernel": 0,
    r"altup/(modality_router|(correction|prediction)_coefs)/kernel": 0,
    r"laurel/linear_left/kernel": 1,
    r"laurel/linear_right/kernel": 0,
    r"linear_attn/in_proj_(qkv|z|b|a)/kernel": 1,
    r"linear_attn/(out_proj/kernel|conv1d_kernel)": 0,
    r"sparse_moe_block/router_gate/kernel": 1,
    r"token_embedding/embeddings": 0,
    r"token_embedding/reverse_embeddings": 1,
}


@functools.cache
def variables(name):
    return [(v.path, tuple(v.shape)) for v in BACKBONES[name]().variables]


@pytest.mark.parametrize("name", BACKBONES)
def test_every_matrix_is_split_and_every_norm_is_not(name):
    """Over four and two devices: heads, widths, experts and vocabularies
    over the four, the longest other axis that divides over the two."""
    found = variables(name)
    assert len(found) > 10
    for path, shape in found:
        axes = layouts.spread(path, shape, model=4, data=2)
        if "norm" in path or len(shape) < 2:
            assert set(axes) <= {None}, path
            continue
        known = [i for k, i in ON_MODEL.items() if re.search(k + "$", path)]
        if re.search(r"shared_expert_gate(_dense)?/kernel$", path):
            assert axes == ("model", None)
            continue
        assert len(known) == 1, path
        assert axes[known[0]] == "model", (path, axes)
        if path.endswith("/bias"):
            assert "data" not in axes
            continue
        longest = max(
            n for i, n in enumerate(shape) if i != known[0] and n % 2 == 0
        )
        assert shape[axes.index("data")] == longest, (path, axes)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_large_matrix_is_split_over_data_alone(name):
    for path, shape in variables(name):
        axes = layouts.spread(path, shape, data=8)
        assert "model" not in axes
        if path.endswith("token_embedding/embeddings"):
            # Its rows are looked up.
            assert axes == (None, "data")
        elif len(shape) > 1 and not re.search(r"norm|/bias", path):
            assert shape[axes.index("data")] == max(
                n for n in shape if n % 8 == 0
            )
        else:
            assert set(axes) <= {None}


@pytest.mark.parametrize("name", BACKBONES)
def test_no_family_is_spread_by_size_alone(name):
    for path, shape in variables(name):
        if len(shape) > 1 and "shared_expert_gate" not in path:
            assert layouts.meanings(path, len(shape)) is not None, path


@pytest.mark.parametrize(
    "shape, model, expected",
    [
        # Four key and value heads on eight devices: the input's axis.
        ((32, 4, 8), 8, ("model", None, None)),
        # An input that does not divide either: the head's.
        ((30, 4, 8), 8, (None, None, "model")),
        ((30, 4, 6), 8, (None, None, None)),
    ],
)
def test_the_next_axis_is_tried(shape, model, expected):
    path = "transformer_layer_0/self_attention/key/kernel"
    assert layouts.spread(path, shape, model=model) == expected


def test_a_bias_lies_as_its_heads_do_or_whole():
    path = "transformer_layer_0/self_attention/key/bias"
    assert layouts.spread(path, (4, 8), 4, 2) == ("model", None)
    assert layouts.spread(path, (4, 8), 8, 2) == (None, None)


def test_an_unknown_matrix_is_spread_by_size():
    assert layouts.spread("x/kernel", (6, 64, 8), 4, 2) == (
        None,
        "model",
        "data",
    )
    assert layouts.spread("x/kernel", (7, 9), 4, 2) == (None, None)


def test_a_large_weight_that_divides_nowhere_is_named():
    path, shape = "a/feedforward_gate_dense/kernel", (4097, 1031)
    axes = layouts.spread(path, shape, data=16)
    with pytest.raises(ValueError) as e:
        layouts.check(path, shape, 4097 * 1031 * 4, axes, data=16)
    for part in (path, "(4097, 1031)", str(4097 * 1031 * 4), "16 devices"):
        assert part in str(e.value)
    layouts.check(path, (33, 31), 33 * 31 * 4, (None, None), data=16)


def test_real_sizes_divide_over_pods():
    """The widths of models that are trained on pods, over 16 to 256."""
    llama = {
        "token_embedding/embeddings": (128_256, 4096),
        "a/self_attention/query/kernel": (4096, 32, 128),
        "a/self_attention/key/kernel": (4096, 8, 128),
        "a/self_attention/attention_output/kernel": (32, 128, 4096),
        "a/feedforward_gate_dense/kernel": (4096, 14_336),
    }
    for path, shape in llama.items():
        size = 4 * int(np.prod(shape))
        for model, data in ((1, 16), (1, 256), (4, 64), (16, 16), (32, 8)):
            axes = layouts.spread(path, shape, model, data)
            layouts.check(path, shape, size, axes, model, data)
            assert ("model" in axes) == (model > 1)


def test_families_of_the_table_are_covered():
    """Layers that join the table get a line in this file's list."""
    covered = {type(make()) for make in BACKBONES.values()}
    layers = {family.layers.backbone_class for family in FAMILIES.values()}
    assert layers <= covered
