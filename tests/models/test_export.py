"""Exported directories give equal logits wherever they are read."""

import json
import shutil

import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file

import keras_posttrain as kpt
from keras_posttrain.data.chat.tokenizer_files import TOKENIZER_FILES
from keras_posttrain.models.hf.export import export, hf_config
from keras_posttrain.models.hf.loading import load_causal_lm, repair
from keras_posttrain.models.hf.tensors import model_tensors
from tests.models.tiny_checkpoints import (
    BASES,
    GEMMA3N_E2B,
    GEMMA4_E2B,
    GEMMA4_EXPERTS,
    assert_equal_logits,
    make_checkpoint,
    plain_logits,
    randomize,
    transformers_logits,
)
from tests.support import REFERENCE, in_ci

FULL, SLIDING = "full_attention", "sliding_attention"
# Each has what KerasHub's constructors cannot say.
SOURCES = {
    "gemma": (
        "gemma",
        {
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": False,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "query_pre_attn_scalar": 29,
            "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 29,
            "layer_types": [FULL, SLIDING, FULL],
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "final_logit_softcapping": 3.0,
            "layer_types": [FULL, SLIDING],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 500.0,
        },
    ),
    "gemma3n_e2b": ("gemma3n_text", {**GEMMA3N_E2B, "as_saved": True}),
    "gemma4": (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_e2b": ("gemma4_text", {**GEMMA4_E2B, "as_saved": True}),
    "gemma4_experts": ("gemma4_text", GEMMA4_EXPERTS),
    "llama": (
        "llama",
        {
            "rms_norm_eps": 1e-3,
            "hidden_act": "gelu",
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            },
        },
    ),
    "llama_tied": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": (
        "mistral",
        {"tie_word_embeddings": True, "sliding_window": 4},
    ),
    # Which transformers reads as its Ministral.
    "mistral_layers": (
        "mistral",
        {"sliding_window": 4, "layer_types": [SLIDING, FULL]},
    ),
    "qwen2": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "llama_biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0, 1, 1], "attention_bias": True},
    ),
    "granite": ("granite", {"rope_theta": 500.0}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-3}),
    "olmo3": (
        "olmo3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phi3": (
        "phi3",
        {
            "sliding_window": 4,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5],
                "long_factor": [1.5, 4.0],
            },
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 32,
        },
    ),
    "mixtral": ("mixtral", {"rms_norm_eps": 1e-3}),
    "gpt_oss": (
        "gpt_oss",
        {"layer_types": [FULL, SLIDING], "swiglu_limit": 0.8},
    ),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
        },
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_round_trip(tmp_path, name):
    """Loaded, exported, and read by transformers and by us again."""
    model_type, fields = SOURCES[name]
    source, want = make_checkpoint(tmp_path / "hf", model_type, **fields)
    causal_lm = load_causal_lm(source)
    export(causal_lm, tmp_path / "out")
    stored = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "out/model.safetensors")
    if causal_lm.backbone.token_embedding.tie_weights:
        stored.pop("lm_head.weight", None)
    assert sorted(written) == sorted(stored)
    for key, value in written.items():
        assert (value == stored[key]).all(), key
    assert (transformers_logits(tmp_path / "out") == want).all()
    again = load_causal_lm(tmp_path / "out")
    assert_equal_logits(plain_logits(again), want)
    assert hf_config(again) == hf_config(causal_lm)


# What KerasHub's own converters read rightly: their eps (Qwen 3's norms of
# queries and keys want 1e-5), thetas and patterns are fixed.
PLAIN = {
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 4.0},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "final_logit_softcapping": 5.0,
    },
    "llama": {"rope_theta": 5000.0},
    "mistral": {"rms_norm_eps": 1e-5, "sliding_window": 4},
    "qwen2": {"rope_theta": 5000.0},
    "qwen3": {"rms_norm_eps": 1e-5},
}


@pytest.mark.parametrize("model_type", PLAIN)
def test_kerashub_reads_plain_exports(tmp_path, model_type):
    source, want = make_checkpoint(
        tmp_path / "hf", model_type, **PLAIN[model_type]
    )
    export(load_causal_lm(source), tmp_path / "out")
    theirs = keras_hub.models.CausalLM.from_preset(
        str(tmp_path / "out"), preprocessor=None, dtype="float32"
    )
    got = plain_logits(theirs)
    if model_type == "mistral":
        # It takes these weights through float16.
        np.testing.assert_allclose(got, want, atol=2e-2)
    else:
        assert_equal_logits(got, want)


KERAS_SIZES = {
    "vocabulary_size": 96,
    "num_layers": 3,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 48,
}
GEMMA2 = {"use_post_ffw_norm": True, "use_post_attention_norm": True}
LLAMA3 = {
    "rope_frequency_adjustment_factor": 4.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 16,
}
BUILT = {
    "gemma": ("Gemma", {"head_dim": 12, "layer_norm_epsilon": 1e-3}),
    "gemma_7b_like": ("Gemma", {"head_dim": 12, "num_key_value_heads": 4}),
    "gemma2": (
        "Gemma",
        {
            **GEMMA2,
            "head_dim": 12,
            "query_head_dim_normalize": False,
            "use_sliding_window_attention": True,
            "sliding_window_size": 5,
            "attention_logit_soft_cap": 4,
            "final_logit_soft_cap": 6,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA2,
            "head_dim": 12,
            "image_size": None,
            "num_layers": 6,
            "use_sliding_window_attention": True,
            "sliding_window_size": 5,
            "global_rope_scaling_factor": 8.0,
            "final_logit_soft_cap": 6,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 12,
            "image_size": None,
            "sliding_window_size": 5,
            "sliding_window_pattern": 3,
            "global_rope_partial_rotary_factor": 0.5,
            "num_global_key_value_heads": 1,
            "final_logit_soft_cap": 6,
        },
    ),
    "gemma3_all_full": (
        "Gemma3",
        {**GEMMA2, "head_dim": 12, "image_size": None},
    ),
    "llama": ("Llama", {}),
    "llama3": ("Llama3", {**LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 4, "rope_scaling_factor": 2.0}),
    "mistral_no_window": (
        "Mistral",
        {"sliding_window": None, "head_dim": 12},
    ),
    "qwen2": ("Qwen", {}),
    "qwen2_window": (
        "Qwen",
        {
            "use_sliding_window_attention": True,
            "sliding_window_size": 4,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_window": ("Qwen3", {"head_dim": 12, "sliding_window_size": 4}),
}


def build(name):
    kind, arguments = BUILT[name]
    backbone_class = getattr(keras_hub.models, f"{kind}Backbone")
    backbone = backbone_class(**{**KERAS_SIZES, **arguments})
    task_class = getattr(keras_hub.models, f"{kind}CausalLM")
    causal_lm = task_class(backbone=backbone, preprocessor=None)
    repair(causal_lm)
    return randomize(causal_lm)


# The others have the same layers with other numbers.
@pytest.mark.parametrize(
    "name",
    in_ci(
        *BUILT.keys()
        - {"gemma_7b_like", "gemma3_all_full", "mistral_no_window"}
        - {"qwen2", "qwen3", "llama"},
        of=BUILT,
    ),
)
def test_models_of_kerashub(tmp_path, name):
    causal_lm = build(name)
    export(causal_lm, tmp_path / "out")
    want = plain_logits(causal_lm)
    assert_equal_logits(transformers_logits(tmp_path / "out"), want)
    again = load_causal_lm(tmp_path / "out")
    assert_equal_logits(plain_logits(again), want)


def test_an_unrepaired_model_is_refused(tmp_path):
    backbone = keras_hub.models.Qwen3Backbone(**KERAS_SIZES, head_dim=12)
    causal_lm = keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)
    with pytest.raises(ValueError, match="repair"):
        export(causal_lm, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        ("Gemma", {"final_logit_soft_cap": 6}, "final_logit_soft_cap=6"),
        ("Gemma", {"query_head_dim_normalize": False}, "query_scalar=8"),
        (
            "Gemma",
            {"use_sliding_window_attention": True, "sliding_window_size": 4},
            "windows",
        ),
        (
            "Gemma3",
            {**GEMMA2, "image_size": None, "attention_logit_soft_cap": 3},
            "attention_logit_soft_cap=3",
        ),
        ("Gemma4", {"image_size": None}, "a window in the last layer"),
        (
            "Gemma4",
            {"image_size": None, "use_sliding_window_attention": False},
            "local layers without a window",
        ),
    ],
)
def test_what_no_config_can_say(tmp_path, kind, arguments, message):
    models = keras_hub.models
    backbone_class = getattr(models, f"{kind}Backbone")
    backbone = backbone_class(**KERAS_SIZES, head_dim=12, **arguments)
    task_class = getattr(models, f"{kind}CausalLM")
    causal_lm = task_class(backbone=backbone, preprocessor=None)
    repair(causal_lm)
    with pytest.raises(ValueError, match=message):
        export(causal_lm, tmp_path / "out")


def test_shards(tmp_path, reference):
    causal_lm = load_causal_lm(reference / "models/llama3")
    export(causal_lm, tmp_path / "one")
    export(causal_lm, tmp_path / "many", max_shard_bytes=100_000)
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads(
        (tmp_path / "many/model.safetensors.index.json").read_text()
    )
    whole = load_file(tmp_path / "one/model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(
        array.nbytes for array in whole.values()
    )
    for file in files:
        part = load_file(tmp_path / "many" / file)
        size = sum(array.nbytes for array in part.values())
        # The embedding and the head are larger than a shard each.
        assert size <= 100_000 or len(part) == 1
        for name, array in part.items():
            assert index["weight_map"][name] == file
            assert (array == whole[name]).all()
    got = plain_logits(load_causal_lm(tmp_path / "many"))
    assert (got == plain_logits(causal_lm)).all()
    (tmp_path / "many" / files[0]).unlink()
    with pytest.raises(ValueError, match=files[0]):
        load_causal_lm(tmp_path / "many")


def test_dtypes(tmp_path, reference):
    causal_lm = load_causal_lm(reference / "models/gemma2")
    export(causal_lm, tmp_path / "out", dtype="bfloat16")
    written = load_file(tmp_path / "out/model.safetensors")
    assert {array.dtype.name for array in written.values()} == {"bfloat16"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    again = load_causal_lm(tmp_path / "out", dtype="float32")
    for one, two in zip(
        model_tensors(causal_lm), model_tensors(again), strict=True
    ):
        rounded = np.array(one.variable.value.astype("bfloat16"), "float32")
        assert (np.array(two.variable.value) == rounded).all()
    assert_equal_logits(
        transformers_logits(tmp_path / "out"), plain_logits(again)
    )
    with pytest.raises(ValueError, match="dtype='int8'"):
        export(causal_lm, tmp_path / "other", dtype="int8")


def test_values_are_written_in_place_of_the_variables(tmp_path, reference):
    causal_lm = load_causal_lm(reference / "models/qwen3")
    embedding = causal_lm.backbone.token_embedding.embeddings
    before = np.array(embedding.value)

    def values(variable):
        return variable.value * (2.0 if variable is embedding else 1.0)

    export(causal_lm, tmp_path / "out", values=values)
    written = load_file(tmp_path / "out/model.safetensors")
    assert (written["model.embed_tokens.weight"] == 2 * before).all()
    assert (np.array(embedding.value) == before).all()


class Tokenizer:
    """The two things an export asks of a tokenizer."""

    bos_token_id, eos_token_id, pad_token_id = 5, 6, 7

    def save(self, directory):
        (directory / "tokenizer.json").write_text("{}")


def test_files_next_to_the_weights(tmp_path, reference):
    """The source's own where there is one, made otherwise."""
    source = reference / "models/llama3"
    export(load_causal_lm(source), tmp_path / "one", tokenizer=Tokenizer())
    assert (tmp_path / "one/tokenizer.json").read_text() == "{}"
    for name in ("generation_config.json", "config.json"):
        written = json.loads((tmp_path / "one" / name).read_text())
        original = json.loads((source / name).read_text())
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert written.get(key) == original.get(key)
    assert written["max_position_embeddings"] == 4096
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["rope_scaling"]["rope_type"] == "llama3"
    assert written["rope_parameters"]["rope_theta"] == 500000.0
    export(build("llama"), tmp_path / "two", tokenizer=Tokenizer())
    for name in ("generation_config.json", "config.json"):
        written = json.loads((tmp_path / "two" / name).read_text())
        assert written["eos_token_id"] == 6


def test_a_failed_export_leaves_nothing(tmp_path, reference):
    causal_lm = load_causal_lm(reference / "models/llama3")
    export(causal_lm, tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    class Broken(Tokenizer):
        def save(self, directory):
            raise OSError("disk full")

    for name in ("out", "new"):
        with pytest.raises(OSError, match="disk full"):
            export(causal_lm, tmp_path / name, tokenizer=Broken())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_what_is_written_over(tmp_path, reference):
    causal_lm = load_causal_lm(reference / "models/llama3")
    out = tmp_path / "out"
    out.mkdir()
    export(causal_lm, out, max_shard_bytes=100_000)
    # An earlier export is replaced, shards and all.
    export(load_causal_lm(out), out)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="thesis.txt"):
        export(causal_lm, other)
    source, _ = make_checkpoint(tmp_path / "hf", "llama", **BASES["llama"])
    with pytest.raises(ValueError, match="earlier export"):
        export(causal_lm, source)
    with pytest.raises(ValueError, match="must not be a file"):
        export(causal_lm, other / "thesis.txt")


@pytest.mark.parametrize(
    "name",
    [
        "merges.txt",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "config.json",
    ],
)
def test_a_link_out_of_the_directory_is_not_copied(tmp_path, name):
    """A file that comes with a model may be a link to one of the user's."""
    source, private = tmp_path / "source", tmp_path / "private"
    shutil.copytree(REFERENCE / "models/qwen2", source)
    (source / name).unlink(missing_ok=True)
    given = REFERENCE / "models/qwen2" / name
    private.write_text(given.read_text() if given.exists() else "{}")
    (source / name).symlink_to(private)
    task = kpt.SFTTask.from_preset(source, sequence_length=16)
    with pytest.raises(ValueError, match=f"a link.*{name}.*Replace"):
        task.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()
    if name in TOKENIZER_FILES:
        with pytest.raises(ValueError, match=f"a link.*{name}"):
            task.tokenizer.save(tmp_path / "tokenizer")
    # A link inside the directory, and those of the Hugging Face cache.
    (source / name).unlink()
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    private.rename(cache / "blobs" / "0a1b")
    snapshot = cache / "snapshots" / "3c4d"
    snapshot.parent.mkdir()
    source.rename(snapshot)
    (snapshot / name).symlink_to("../../blobs/0a1b")
    task = kpt.SFTTask.from_preset(snapshot, sequence_length=16)
    task.export(tmp_path / "export")
    assert not (tmp_path / "export" / name).is_symlink()
