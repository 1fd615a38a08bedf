"""Rotary embeddings on a CPU read sines and cosines from tables."""

import math
import re

import jax
import jax.numpy as jnp
import keras_hub
import numpy as np
import pytest

from keras_posttrain.models import rotary
from keras_posttrain.models.linear import sublayers
from keras_posttrain.models.policy import Policy
from tests.models.test_equal_layers import (
    BATCH,
    MODELS,
    assert_same_steps,
    step_of,
)
from tests.support import in_ci

ROTARY = keras_hub.layers.RotaryEmbedding

by_model = pytest.mark.parametrize(
    "name", in_ci("llama3", "gemma3_text", of=MODELS)
)


@pytest.fixture
def as_kerashub(monkeypatch):
    """`as_kerashub()` turns off what is tested here."""
    return lambda: monkeypatch.setattr(rotary, "_by_table", lambda call: call)


def sizes_with_cosines(text):
    """The elements of the results of computations with cosines and sines."""
    computation = re.compile(
        r"\n%\S+ \([^\n]*\) -> (\([^\n]*\)|\w+\[[\d,]*\])[^\n]*\{\n(.*?)\n\}",
        re.S,
    )
    return [
        max(
            math.prod(map(int, shape.split(",")))
            for shape in re.findall(r"f32\[([\d,]+)\]", result)
        )
        for result, body in computation.findall(text)
        if " cosine(" in body and " sine(" in body
    ]


def test_no_queries_are_computed_with_their_cosines(as_kerashub):
    causal_lm = MODELS["llama3"][0]()
    backbone = causal_lm.backbone
    size = backbone.hidden_dim // backbone.num_query_heads
    tokens, heads = BATCH["token_ids"].size, backbone.num_query_heads

    def largest():
        step, values = step_of(causal_lm, "none")
        text = step.lower(values, BATCH).compile().as_text()
        return max(sizes_with_cosines(text))

    # Cosines and sines of a token, twice each.
    assert largest() <= tokens * 2 * size < tokens * heads * size
    as_kerashub()
    assert largest() >= tokens * heads * size, "the inspection sees them"


@by_model
def test_gradients_are_those_of_kerashubs_call(name, as_kerashub):
    assert_same_steps(MODELS[name][0](), "none", as_kerashub)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scaling_factor": 4.0, "rope_type": "linear"},
        {
            "rope_type": "yarn",
            "scaling_factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["default", "linear", "yarn"],
)
def test_numbers_are_those_of_kerashub(dtype, settings):
    rng = np.random.default_rng(0)
    layer = ROTARY(max_wavelength=500.0, dtype=dtype, **settings)
    x = jnp.asarray(rng.normal(size=(40, 1, 3, 16)), dtype)
    positions = jnp.asarray(rng.integers(0, 3000, (40, 1)), "float32")
    expected = layer(x, positions=positions)
    with rotary.with_tables([layer]):
        found = layer(x, positions=positions)
    assert found.dtype == expected.dtype == dtype
    atol = 1e-6 if dtype == "float32" else 0.03
    np.testing.assert_allclose(
        *(np.asarray(y, "float32") for y in (found, expected)), atol=atol
    )


def test_positions_that_a_layer_counts_itself():
    layer, x = ROTARY(), jax.random.normal(jax.random.key(0), (2, 9, 3, 8))
    expected = layer(x, start_index=5)
    with rotary.with_tables([layer]):
        found = layer(x, start_index=5)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_layers_are_what_they_were_after_a_forward_pass():
    backbone = (causal_lm := MODELS["llama3"][0]()).backbone
    parts = [x for y in backbone.transformer_layers for x in sublayers(y)]
    found = [part for part in parts if isinstance(part, ROTARY)]
    assert len(found) == len(backbone.transformer_layers)
    Policy(causal_lm).hidden_states(BATCH)
    assert not any("call" in vars(part) for part in found)
