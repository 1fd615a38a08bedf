"""Models saved as KerasHub presets reload with equal numbers."""

import functools

import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.chat.chat import render
from keras_posttrain.models import guards, presets
from keras_posttrain.models.hf import directories
from tests.support import (
    FAMILIES,
    REFERENCE,
    in_ci,
    random_rows,
    spread_adapter,
)

ROWS = random_rows(3, seed=5)
NAMES = [*sorted(FAMILIES.values()), "llama3_tied"]


@functools.cache
def adapted(name):
    """A task that no test trains, and its log-probabilities."""
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / name,
        sequence_length=64,
        lora=kpt.LoRA(rank=4),
    )
    spread_adapter(task)
    return task, task.log_probs(ROWS)


@pytest.mark.parametrize("name", NAMES)
def test_save_to_preset_round_trip(name, tmp_path):
    task, expected = adapted(name)
    task.save_to_preset(tmp_path / "preset")
    again = kpt.SFTTask.from_preset(tmp_path / "preset", sequence_length=64)
    for found, want in zip(again.log_probs(ROWS), expected):
        np.testing.assert_allclose(found, want, atol=2e-5)
    assert again.tokenizer.encode("Hello there") == task.tokenizer.encode(
        "Hello there"
    )
    assert again.tokenizer.stop_token_ids == task.tokenizer.stop_token_ids
    # KerasHub by itself reads the weights too.
    plain = keras_hub.models.CausalLM.from_preset(
        str(tmp_path / "preset"), preprocessor=None
    )
    assert plain.backbone.count_params() == (
        again.causal_lm.backbone.count_params()
    )


def test_a_directory_with_files_is_refused(tmp_path):
    task = kpt.SFTTask.from_preset(REFERENCE / "models/qwen3")
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match="new or empty directory"):
        task.save_to_preset(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep me"


# `models/test_export.py` has every family.
@pytest.mark.parametrize(
    "name", in_ci("gemma3_text", "llama3_tied", "qwen3", of=NAMES)
)
def test_export_with_the_adapter_merged_reloads_in_transformers(
    name, tmp_path
):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task, expected = adapted(name)
    task.export(tmp_path / "model", max_shard_bytes=100_000)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    for row, want in zip(ROWS, expected):
        ids = torch.tensor([row["token_ids"]])
        with torch.no_grad():
            logps = model(ids).logits.float().log_softmax(-1)[0, :-1]
        found = logps.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found, want[1:], atol=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "Hello  there"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == render(
        task.tokenizer, chat
    )
    again = kpt.SFTTask.from_preset(tmp_path / "model", sequence_length=64)
    for found, want in zip(again.log_probs(ROWS), expected):
        np.testing.assert_allclose(found, want, atol=2e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_a_run_knows_all_numbers_of_the_config(name):
    model = presets.load_causal_lm(REFERENCE / "models" / name)
    config = model.backbone.get_config()
    numbers = {
        key: value
        for key, value in config.items()
        if isinstance(value, (int, float)) and key != "trainable"
    }
    assert len(numbers) > 8
    assert guards.architecture(model).items() >= numbers.items()


def test_a_path_is_not_looked_for_among_presets(monkeypatch):
    """KerasHub looks through its classes for their names, which is slow."""
    monkeypatch.setattr(keras_hub.models.CausalLM, "presets", None)
    path = REFERENCE / "models" / "qwen3"
    assert directories.resolve(path) == path
