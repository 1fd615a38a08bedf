"""Choices of `remat`: the same gradients, and what each keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.lora import Adapter
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.quantized import values_of
from keras_posttrain.models.rematerialisation import CHOICES
from keras_posttrain.training import recomputation
from tests.models.mixtures import make_mixture
from tests.models.test_activation_capture import batch_of
from tests.models.test_qwen3_5 import make_model
from tests.support import REFERENCE

MODELS = {
    "gemma2": lambda: load_causal_lm(REFERENCE / "models" / "gemma2"),
    "llama3": lambda: load_causal_lm(REFERENCE / "models" / "llama3"),
    "mixture": lambda: make_mixture("Qwen3Moe", num_layers=2),
    "qwen3_5": make_model,
}
BATCH = batch_of([20, 7], [5, 22], length=32)


@functools.cache
def made(family, with_lora):
    """A policy and its trainable variables, made once."""
    causal_lm = MODELS[family]()
    if not with_lora:
        policy = Policy(causal_lm)
        return policy, policy.backbone.trainable_variables
    adapter = Adapter(causal_lm, kpt.LoRA(rank=2))
    rng = np.random.default_rng(0)
    for b in adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape))
    return Policy(causal_lm, adapter), adapter.trainable_variables


def with_choice(policy, choice):
    return Policy(policy.causal_lm, policy.adapter, choice)


def loss_of(policy, variables):
    """A sum of hidden states, as a function of the variables' values."""

    def loss(values):
        with values_of(list(zip(variables, values))):
            hidden = policy.hidden_states(BATCH)
        used = (BATCH["segment_ids"] > 0)[..., None]
        return jnp.sum(jnp.where(used, jnp.sin(hidden), 0))

    return loss


@functools.cache
def gradients(family, with_lora, choice):
    policy, variables = made(family, with_lora)
    loss = loss_of(with_choice(policy, choice), variables)
    values = [v.value for v in variables]
    return jax.jit(jax.value_and_grad(loss))(values)


def cases():
    """CI compares "selective", and of one family "attention" and adapters."""
    for family in MODELS:
        for with_lora in (False, True):
            for choice in CHOICES:
                long = choice in ("outputs", "full")
                other = with_lora or choice == "attention"
                long |= other and family != "llama3"
                if choice != "none":
                    yield pytest.param(
                        family,
                        with_lora,
                        choice,
                        marks=pytest.mark.full if long else (),
                    )


@pytest.mark.parametrize("family, with_lora, choice", list(cases()))
def test_gradients_are_those_of_keeping_everything(family, with_lora, choice):
    want, found = (gradients(family, with_lora, x) for x in ("none", choice))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    largest = max(np.abs(x).max() for x in want[1])
    assert largest > 0
    for a, b in zip(found[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * largest)


def kept_bytes(policy, variables):
    """The bytes between the forward and the backward pass."""

    def forward(values):
        return jax.vjp(loss_of(policy, variables), values)[1]

    held = jax.eval_shape(forward, [v.value for v in variables])
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


@pytest.mark.parametrize("family", ["llama3", "mixture", "qwen3_5"])
def test_what_is_kept(family):
    """Next to the inputs of layers, what each choice names.

    Of a layer of Llama these are, for each token: 4 bytes times the heads'
    `q` numbers of attention's output; `q + 2 kv` of queries, keys and values;
    and `hidden + 2 width` of the output projection, gate and what it
    multiplies. The last product's output is not read again.
    """
    policy, variables = made(family, False)
    sizes = {x: kept_bytes(with_choice(policy, x), variables) for x in CHOICES}
    extra = {x: sizes[x] - sizes["full"] for x in CHOICES}
    assert sorted(extra.values()) == [extra[x] for x in CHOICES]
    assert len(set(extra.values())) == len(CHOICES)
    if family != "llama3":
        return
    backbone, tokens = policy.backbone, BATCH["token_ids"].size
    head = backbone.hidden_dim // backbone.num_query_heads
    q = head * backbone.num_query_heads
    kv = head * backbone.num_key_value_heads
    row = 4 * tokens * backbone.num_layers
    assert extra["outputs"] == row * q
    assert extra["selective"] == row * (2 * q + 2 * kv)
    products = backbone.hidden_dim + 2 * backbone.intermediate_dim
    assert extra["attention"] == extra["selective"] + row * products
    costs = recomputation.costs(policy)
    for choice in ("full", "outputs", "selective"):
        assert costs[choice].kept * tokens == extra[choice]
    last = row * backbone.hidden_dim
    assert costs["attention"].kept * tokens == extra["attention"] + last


def test_the_most_that_there_is_room_for(monkeypatch):
    policy, _ = made("llama3", False)
    costs = recomputation.costs(policy)
    for choice in CHOICES:
        room = 64 * costs[choice].kept
        assert recomputation.within(costs, 64, room) == choice
    assert recomputation.within(costs, 64, -1.0) == "full"
    assert recomputation.within(costs, 64, 1e12) == "none"
    # On a CPU the others save hardly any memory.
    assert recomputation.choose(policy, 64) == "none"
    monkeypatch.setattr(recomputation.sharding, "platform", lambda: "tpu")
    assert recomputation.choose(policy, 64) in CHOICES
    monkeypatch.setattr(recomputation.processes, "count", lambda: 2)
    with pytest.raises(ValueError, match="task.plan.*and 2 processes"):
        recomputation.choose(policy, 64)


def test_auto_is_what_was_chosen():
    policy, variables = made("llama3", False)
    asked = []

    def choose(policy, tokens):
        asked.append(tokens)
        return "selective"

    own = Policy(policy.causal_lm, remat="auto", choose_remat=choose)
    found = kept_bytes(own, variables)
    assert asked == [BATCH["token_ids"].size]
    selective = with_choice(policy, "selective")
    assert found == kept_bytes(selective, variables)
