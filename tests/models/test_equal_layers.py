"""Layers that differ in weights alone are traced once, with the same steps."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models.equal_layers import are_equal
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.linear import is_linear, sublayers
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.quantized import values_of
from tests.models.mixtures import make_mixture
from tests.models.test_activation_capture import batch_of
from tests.models.test_qwen3_5 import make_model
from tests.support import REFERENCE, in_ci

BATCH = batch_of([20, 7], [5, 22], length=32)


def of_reference(name):
    return functools.partial(load_causal_lm, REFERENCE / "models" / name)


# Each with the programs that its layers have: windows make a difference, and
# so do recurrences and what has a `call` of its own.
MODELS = {
    "llama3": (of_reference("llama3"), 1),
    "qwen3": (of_reference("qwen3"), 1),
    "mistral": (of_reference("mistral"), 1),
    "gemma2": (of_reference("gemma2"), 2),
    "gemma3_text": (of_reference("gemma3_text"), 2),
    "mixture": (functools.partial(make_mixture, "Mixtral", num_layers=2), 1),
    "qwen3_5": (make_model, 2),
}


@pytest.fixture
def each_layer_traced(monkeypatch):
    """`each_layer_traced()` turns off what is tested here."""
    return lambda: monkeypatch.setattr(Policy, "_calls", lambda *_: None)


def step_of(causal_lm, remat):
    """The loss and gradients of a model, as a function of its weights."""
    policy = Policy(causal_lm, remat=remat)
    variables = policy.backbone.trainable_variables

    def loss(values, batch):
        with values_of(list(zip(variables, values))):
            hidden = policy.hidden_states(batch)
        used = (batch["segment_ids"] > 0)[..., None]
        return jnp.sum(jnp.where(used, jnp.sin(hidden), 0))

    return jax.jit(jax.value_and_grad(loss)), [v.value for v in variables]


def assert_same_steps(causal_lm, remat, change):
    """Compares steps before and after `change` is called."""
    step, values = step_of(causal_lm, remat)
    loss, gradients = step(values, BATCH)
    change()
    step, values = step_of(causal_lm, remat)
    expected, wanted = step(values, BATCH)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, value in zip(gradients, wanted, strict=True):
        scale = np.abs(value).max()
        np.testing.assert_allclose(found, value, atol=1e-5 * scale)


def programs_of_layers(step, *arguments):
    """The programs of decoder layers, and how often they are called."""
    found = []

    def search(jaxpr):
        for equation in jaxpr.eqns:
            if equation.params.get("name") == "decoder_layer":
                found.append(id(equation.params["jaxpr"]))
                continue
            for value in equation.params.values():
                inside = getattr(value, "jaxpr", value)
                if hasattr(inside, "eqns"):
                    search(inside)

    search(jax.make_jaxpr(step)(*arguments).jaxpr)
    return len(set(found)), len(found)


def forward(causal_lm, batch):
    return Policy(causal_lm).hidden_states(batch)


@pytest.mark.parametrize(
    "name",
    in_ci("llama3", "gemma3_text", "mixture", "qwen3_5", of=MODELS),
)
def test_equal_layers_have_one_program(name):
    make, count = MODELS[name]
    causal_lm = make()
    forwards = functools.partial(forward, causal_lm)
    layers = len(causal_lm.backbone.transformer_layers)
    assert programs_of_layers(jax.jit(forwards), BATCH) == (count, layers)


@pytest.mark.parametrize("remat", ["none", "selective"])
@pytest.mark.parametrize("name", in_ci("llama3", "gemma3_text", of=MODELS))
def test_steps_are_those_of_layers_traced_one_by_one(
    name, remat, each_layer_traced
):
    assert_same_steps(MODELS[name][0](), remat, each_layer_traced)


def test_layers_have_their_own_weights_and_adapters():
    """Each one is changed, and the result is another."""
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / "llama3", lora=kpt.LoRA(rank=2)
    )
    policy = task.policy
    variables = [
        v
        for layer in policy.layers
        for v in layer.variables + policy.adapter_variables(layer)
    ]
    assert len(variables) == 2 * (9 + 14)
    for b in task.adapter.b:
        b.assign(np.ones(b.shape) / 50)

    @jax.jit
    def compute(values, batch):
        with values_of(list(zip(variables, values))):
            return policy.hidden_states(batch)

    assert programs_of_layers(
        compute, [v.value for v in variables], BATCH
    ) == (1, 2)
    rng = np.random.default_rng(0)
    values = [v.value for v in variables]
    results = [np.array(compute(values, BATCH))]
    for i, value in enumerate(values):
        noise = rng.normal(0, 0.1, value.shape).astype("float32")
        changed = [*values[:i], value + noise, *values[i + 1 :]]
        results.append(np.array(compute(changed, BATCH)))
    for i, result in enumerate(results):
        for other in results[:i]:
            assert np.abs(result - other).max() > 1e-5


def test_inputs_are_dropped_by_each_layer(each_layer_traced):
    """The masks differ, so that layers are traced one by one."""
    lora = kpt.LoRA(rank=2, dropout=0.5)
    task = kpt.SFTTask.from_preset(REFERENCE / "models/llama3", lora=lora)
    for b in task.adapter.b:
        b.assign(np.ones(b.shape) / 50)
    key = jax.random.key(3)
    batch = {**BATCH, "sequence_ids": np.arange(4).reshape(2, 2)}

    def compute():
        def hidden(batch):
            return task.policy.hidden_states(batch, key)

        return np.array(jax.jit(hidden)(batch))

    found = compute()
    each_layer_traced()
    np.testing.assert_allclose(found, compute(), atol=1e-5)


def of_layer(layer, path):
    for name in path:
        layer = getattr(layer, name)
    return layer


CHANGES = {
    "a number": ((), "_kpt_scale", lambda: 2.0),
    "the epsilon of a norm": (
        ("_feedforward_layernorm",),
        "epsilon",
        lambda: 0.1,
    ),
    "the wavelength of positions": (
        ("_self_attention_layer", "rotary_embedding_layer"),
        "max_wavelength",
        lambda: 7.0,
    ),
    "an activation": (
        ("_feedforward_gate_dense",),
        "activation",
        lambda: keras.activations.gelu,
    ),
    "a call": (
        ("_feedforward_gate_dense",),
        "call",
        lambda: lambda x: 2 * x,
    ),
    "a list": ((), "_kpt_sizes", lambda: [3, 4]),
    "an array": ((), "_kpt_table", lambda: np.arange(3)),
}


@pytest.fixture
def two_layers():
    causal_lm = load_causal_lm(REFERENCE / "models" / "llama3")
    Policy(causal_lm)
    return causal_lm.backbone.transformer_layers


def pair(layer):
    return layer, layer.variables


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_another_layer(change, two_layers):
    first, second = two_layers
    assert are_equal(pair(first), pair(second))
    path, name, make = CHANGES[change]
    setattr(of_layer(second, path), name, make())
    assert not are_equal(pair(first), pair(second))
    setattr(of_layer(first, path), name, make())
    assert are_equal(pair(first), pair(second))


def test_what_is_not_known_makes_a_difference(two_layers):
    for layer in two_layers:
        layer._kpt_thing = object()
    assert not are_equal(*map(pair, two_layers))


def test_frozen_layers_are_others(two_layers):
    first, second = two_layers
    second._feedforward_gate_dense.trainable = False
    assert not are_equal(pair(first), pair(second))
    first._feedforward_gate_dense.trainable = False
    assert are_equal(pair(first), pair(second))


def scaled(call, factor):
    return lambda *args, **kwargs: factor * call(*args, **kwargs)


def test_each_call_is_compared(two_layers):
    """All have one code; what one of them has closed over differs."""
    parts = [list(filter(is_linear, sublayers(x))) for x in two_layers]
    for layers in parts:
        for layer in layers:
            layer.call = scaled(layer.call, 2.0)
    assert are_equal(*map(pair, two_layers)) and len(parts[1]) == 7
    for layer in parts[1]:
        same = layer.call
        layer.call = scaled(same.__closure__[0].cell_contents, 3.0)
        assert not are_equal(*map(pair, two_layers)), layer.path
        layer.call = same


def test_adapted_layers_are_others():
    """Of an adapter that some layers have."""
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / "llama3",
        lora=kpt.LoRA(rank=2, targets=r".*layers\.0\..*"),
    )
    policy = task.policy
    pairs = [
        (layer, layer.variables + policy.adapter_variables(layer))
        for layer in policy.layers
    ]
    assert [len(variables) for _, variables in pairs] == [9 + 14, 9]
    assert not are_equal(*pairs)
