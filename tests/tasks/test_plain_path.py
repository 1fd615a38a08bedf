"""Families without the attention hook: one sequence per row."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import random_rows, weights

ROWS = random_rows(4, low=5, high=12, vocabulary=90)
M = keras_hub.models


def gpt2():
    backbone = M.GPT2Backbone(
        vocabulary_size=97,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        dropout=0.0,
        max_sequence_length=64,
    )
    return M.GPT2CausalLM(backbone, preprocessor=None)


def test_log_probs_and_a_step():
    causal_lm = gpt2()
    task = kpt.SFTTask(causal_lm, sequence_length=16)
    found = task.log_probs(ROWS, batch_size=4)
    for row, logps in zip(ROWS, found):
        ids = np.array([row["token_ids"]])
        hidden = causal_lm.backbone(
            {"token_ids": ids, "padding_mask": np.ones_like(ids)},
            training=False,
        )
        logits = causal_lm.backbone.token_embedding(hidden, reverse=True)
        full = keras.ops.log_softmax(logits.astype("float32"))[0]
        want = np.asarray(full)[np.arange(len(ids[0]) - 1), ids[0, 1:]]
        np.testing.assert_allclose(logps[1:], want, atol=2e-5)
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    before = weights(task)
    history = task.fit(ROWS, batch_size=4, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    moved = [k for k, v in weights(task).items() if (v != before[k]).any()]
    assert len(moved) > len(before) / 2
    with pytest.raises(ValueError, match="packed sequences apart"):
        task.fit(ROWS, packing=True)


def test_remat_is_refused_where_it_would_do_nothing():
    with pytest.raises(ValueError, match="GPT2Backbone .* remat='full'"):
        kpt.SFTTask(gpt2(), sequence_length=16, remat="full")


def test_lora_names_are_unknown_outside_the_table():
    with pytest.raises(ValueError, match="GPT2"):
        kpt.SFTTask(gpt2(), lora=kpt.LoRA(rank=2), sequence_length=16)
