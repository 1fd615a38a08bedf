"""Families without a table: as transformers computes them, or refused."""

import json

import keras
import keras_hub
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from keras_posttrain.models.hf.config import HARMLESS, READ
from keras_posttrain.models.hf.converted import CONVERTED
from keras_posttrain.models.hf.families import FAMILIES
from keras_posttrain.models.hf.loading import load_causal_lm
from tests.models.tiny_checkpoints import (
    SIZES,
    assert_equal_logits,
    make_checkpoint,
    plain_logits,
)

BASES = {
    "gpt2": {
        "drop": tuple(k for k in SIZES if k != "vocab_size"),
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "n_positions": 64,
    },
}
# Rounding moves logits by up to 1.2e-5 here; the least mistake, an epsilon in
# two norms, by 4e-2.
BOUND = 1e-4


def make(tmp_path, model_type, **fields):
    fields = {**BASES[model_type], **fields}
    return make_checkpoint(tmp_path / "hf", model_type, **fields)


EQUAL = {
    "gpt2": {},
    "gpt2 as saved": {"as_saved": True},
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_logits_are_those_of_transformers(tmp_path, name):
    directory, want = make(tmp_path, name.split()[0], **EQUAL[name])
    assert_equal_logits(plain_logits(load_causal_lm(directory)), want, BOUND)


# What differs from a config that is taken, and words of the message.
REFUSED = [
    ("gpt2", {"n_inner": 40}, "n_inner=40"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu'"),
    ("gpt2", {"layer_norm_epsilon": 1e-2}, "layer_norm_epsilon=0.01"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx=True"),
]


def write_config(directory, model_type, fields):
    base = {**SIZES, **BASES[model_type]}
    drop = base.pop("drop", ())
    base = {k: v for k, v in base.items() if k not in drop}
    config = {**base, "model_type": model_type, **fields}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("model_type, fields, words", REFUSED)
def test_a_config_that_was_not_compared(tmp_path, model_type, fields, words):
    """Refused by name, before any weight is read."""
    write_config(tmp_path, model_type, fields)
    with pytest.raises(ValueError) as error:
        load_causal_lm(tmp_path)
    assert words in str(error.value)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "falcon", "paligemma"])
def test_a_type_that_was_not_compared(tmp_path, model_type):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(ValueError, match=f"model_type='{model_type}'"):
        load_causal_lm(tmp_path)


CLASSES = (*CONVERTED, *FAMILIES)


def config_of_transformers(model_type):
    return transformers.AutoConfig.for_model(model_type).to_dict()


@pytest.mark.parametrize("model_type", CLASSES)
def test_every_field_of_transformers_is_known(model_type):
    """A field that a new transformers reads shows up here."""
    known = READ | HARMLESS
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        known |= {*family.only, *family.fields, *family.ignored}
    if model_type in CONVERTED:
        family = CONVERTED[model_type]
        known = {*family.sizes, *family.read, *family.only, *family.ignored}
        known |= HARMLESS | {"rope_parameters", "model_type"}
    assert set(config_of_transformers(model_type)) - known == set()


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_field_left_out_has_the_default_of_transformers(model_type):
    found = config_of_transformers(model_type)
    if model_type in CONVERTED:
        family = CONVERTED[model_type]
        ours = family.read | {k: v[0] for k, v in family.only.items()}
    else:
        family = FAMILIES[model_type]
        ours = family.defaults | {k: v[0] for k, v in family.only.items()}
    rope = found["rope_parameters"] if "rope_parameters" in found else {}
    ours = {k: v for k, v in ours.items() if k in found and v is not None}
    # transformers replaces these by what is in use.
    in_use = ("sliding_window", "layer_types", "use_sliding_window")
    for field, value in ours.items():
        if field not in in_use:
            assert found[field] == value, field
    if "rope_theta" in ours and "rope_theta" in rope:
        assert rope["rope_theta"] == ours["rope_theta"]


def test_gemma4_has_its_class_in_every_process(tmp_path, monkeypatch):
    """KerasHub takes the first of a `set`, so that only one may be in it."""
    models, seen = keras_hub.models, []
    original = models.CausalLM.from_preset.__func__

    def from_preset(cls, *args, **kwargs):
        classes = set(keras.saving.get_custom_objects().values())
        seen.append(
            [
                c
                for c in classes
                if isinstance(c, type)
                and issubclass(c, models.CausalLM)
                and c.backbone_cls is models.Gemma4Backbone
            ]
        )
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(
        models.CausalLM, "from_preset", classmethod(from_preset)
    )
    before = dict(keras.saving.get_custom_objects())
    backbone = models.Gemma4Backbone(
        vocabulary_size=32,
        image_size=None,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=8,
        head_dim=4,
    )
    backbone.save_to_preset(tmp_path / "preset")
    again = load_causal_lm(tmp_path / "preset", load_weights=False)
    assert type(again) is models.Gemma4CausalLM
    assert seen == [[models.Gemma4CausalLM]]
    assert keras.saving.get_custom_objects() == before


def edited(tmp_path, model_type, edit):
    directory, want = make(tmp_path, model_type)
    file = directory / "model.safetensors"
    arrays = load_file(file)
    edit(arrays)
    save_file(arrays, file)
    return directory, want


def other_head(arrays):
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"] + 1


def same_head(arrays):
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"].copy()


def more(arrays):
    arrays["transformer.h.0.attn.q_norm.weight"] = np.ones(32, "float32")


@pytest.mark.parametrize(
    "model_type, edit, words",
    [
        ("gpt2", other_head, "has another head"),
        ("gpt2", more, "30592 numbers. Received: 30624"),
        ("gpt2", lambda x: x.pop("transformer.ln_f.weight"), "cannot read"),
    ],
)
def test_a_checkpoint_that_is_not_read_whole(
    tmp_path, model_type, edit, words
):
    directory, _ = edited(tmp_path, model_type, edit)
    with pytest.raises(ValueError, match=words):
        load_causal_lm(directory)


def test_a_tied_head_may_be_stored_twice(tmp_path):
    directory, want = edited(tmp_path, "gpt2", same_head)
    assert_equal_logits(plain_logits(load_causal_lm(directory)), want, BOUND)


def test_an_index_may_not_point_elsewhere(tmp_path):
    write_config(tmp_path, "gpt2", {})
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="in its own directory"):
        load_causal_lm(tmp_path)
