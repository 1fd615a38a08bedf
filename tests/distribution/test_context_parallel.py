"""Tokens of a row over devices: what it saves, and what it refuses."""

import functools

import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import context
from keras_posttrain.serve.adapters import AdapterTrainer
from tests.support import REFERENCE, random_rows

pytestmark = pytest.mark.usefixtures("eight_devices")
LLAMA = REFERENCE / "models" / "llama3"


def test_a_device_holds_its_part_of_a_row():
    """By the compiler: a row of 2,048 tokens on one device and on eight.

    Weights are split over all devices in both. Eight devices receive the keys
    and values of the row in the forward and the backward pass, and their
    gradients: 2 layers, 2 * 2 heads of 8 numbers of 4 bytes a token, 7/8 of
    them from others.
    """
    task = kpt.SFTTask.from_preset(LLAMA, sequence_length=2048, remat="full")
    task.compile(keras.optimizers.SGD(1e-3))
    plans = {
        count: task.plan(
            "cpu:8",
            functools.partial(kpt.distribution.fsdp, context=count),
            batch_size=1,
        )
        for count in (1, 8)
    }
    held = {n: p.measured.numbers["temporaries"] for n, p in plans.items()}
    assert held[8] < held[1] / 3, held
    assert "tokens of a row over 8 of them" in plans[8].layout
    backbone = task.causal_lm.backbone
    width = 2 * backbone.num_key_value_heads * (
        backbone.hidden_dim // backbone.num_query_heads
    )  # fmt: skip
    expected = 3 * 2 * 2048 * width * 4 * 7 / 8
    assert plans[8].ideal["key and value exchange"] == expected
    assert plans[1].ideal["key and value exchange"] == 0
    sent = plans[8].collective_bytes - plans[1].collective_bytes
    assert sent > expected / 2


def test_rows_are_those_of_groups_of_devices():
    """Three rows on four groups of two devices: one of padding."""
    keras.distribution.set_distribution(kpt.distribution.fsdp(context=2))
    assert context.pieces_of((4, 32)).count == 2
    task = kpt.SFTTask.from_preset(LLAMA, sequence_length=32)
    task.compile(keras.optimizers.SGD(1e-3))
    batches = task.make_batches(task.prepare(random_rows(3), "rows")[0], 3)
    batch = next(iter(batches.get_jax_iterator()))
    assert batch["token_ids"].shape[0] == 4
    # Rows that the groups cannot divide stay whole.
    assert context.pieces_of((3, 32)).count == 1


def test_what_is_refused():
    keras.distribution.set_distribution(kpt.distribution.fsdp(context=4))
    with (
        kpt.distribution.shapes_only(),
        pytest.raises(ValueError, match="recurrent.*context=4 for a Qwen3_5"),
    ):
        backbone = keras_hub.models.Qwen3_5Backbone(
            vocabulary_size=96,
            num_layers=2,
            num_query_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            hidden_dim=32,
            intermediate_dim=48,
            layer_types=["linear_attention", "full_attention"],
            partial_rotary_factor=0.5,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=6,
        )
        kpt.SFTTask(
            keras_hub.models.Qwen3_5CausalLM(backbone, preprocessor=None)
        )
    task = kpt.SFTTask.from_preset(LLAMA, lora=kpt.LoRA(rank=2))
    with pytest.raises(ValueError, match="server.*whole.*context=4"):
        AdapterTrainer(task)
    batch = {"token_ids": np.ones((2, 32), "int32"), "pixels": None}
    with pytest.raises(ValueError, match="rows with images.*context=4"):
        task.policy.hidden_states(batch)
    with pytest.raises(ValueError, match="other tokens than.*context=4"):
        batch.pop("pixels")
        task.policy.teacher(batch, batch["token_ids"], np.ones((8, 8, 32)))
