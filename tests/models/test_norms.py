"""Norms on a CPU compute without the axis of size 1 of hidden states."""

import re

import numpy as np
import pytest

from keras_posttrain.models import norms
from keras_posttrain.models.linear import sublayers
from keras_posttrain.models.policy import Policy
from tests.models.test_equal_layers import (
    BATCH,
    MODELS,
    assert_same_steps,
    step_of,
)
from tests.support import in_ci

# Llama's norms, those of queries and keys too, and Gemma's.
NAMES = "llama3", "qwen3", "gemma3_text"


@pytest.fixture
def as_kerashub(monkeypatch):
    """`as_kerashub()` turns off what is tested here."""
    return lambda: monkeypatch.setattr(norms, "_is_norm", lambda _: False)


# And sums in linear attention.
@pytest.mark.parametrize("name", in_ci(*NAMES, "qwen3_5", of=MODELS))
def test_no_sum_has_an_axis_of_size_one(name, as_kerashub):
    causal_lm = MODELS[name][0]()
    tokens = BATCH["token_ids"].size
    slow = re.compile(rf"applies stablehlo\.add .*\(tensor<{tokens}x1x\d+")

    def count():
        step, values = step_of(causal_lm, "none")
        return len(slow.findall(step.lower(values, BATCH).as_text()))

    assert count() == 0
    as_kerashub()
    assert count() > 0, "the inspection sees sums"


@pytest.mark.parametrize("name", in_ci(*NAMES, of=MODELS))
def test_gradients_are_those_of_kerashubs_call(name, as_kerashub):
    assert_same_steps(MODELS[name][0](), "none", as_kerashub)


@pytest.mark.parametrize(
    "shape, seen",
    [
        ((6, 1, 8), (6, 8)),
        ((6, 1, 2, 8), (6, 2, 8)),
        ((6, 1, 1, 8), (6, 8)),
        ((1, 1, 8), (1, 8)),
        ((6, 1, 1), (6, 1)),
    ],
)
def test_the_shapes_that_norms_see(shape, seen):
    shapes = []

    def call(x):
        shapes.append(x.shape)
        return 2 * x

    x = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_array_equal(norms._on_fewer_axes(call)(x), 2 * x)
    assert shapes == [seen]


def test_layers_are_what_they_were_after_a_forward_pass():
    backbone = (causal_lm := MODELS["llama3"][0]()).backbone
    layers = [*backbone.transformer_layers, backbone.layer_norm]
    parts = [part for layer in layers for part in sublayers(layer)]
    found = [part for part in parts if norms._is_norm(part)]
    assert len(found) == 2 * len(backbone.transformer_layers) + 1
    Policy(causal_lm).hidden_states(BATCH)
    assert not any("call" in vars(part) for part in found)
