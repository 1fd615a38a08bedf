"""A trainer and a sampler with four devices each."""

import functools

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import keras_posttrain as kpt
from keras_posttrain.distribution.transfer import copy_to
from tests.distribution import runs
from tests.support import spread_adapter, weights

pytestmark = pytest.mark.usefixtures("eight_devices")
TRAINER, SAMPLER = kpt.distribution.split(trainer=4, sampler=4)
LAYOUTS = {
    "fsdp": functools.partial(kpt.distribution.fsdp, devices=SAMPLER),
    "tensor": functools.partial(
        kpt.distribution.tensor_parallel, 2, devices=SAMPLER
    ),
    "replicas": functools.partial(
        kpt.distribution.data_parallel, devices=SAMPLER
    ),
    "experts": functools.partial(
        kpt.distribution.fsdp, experts=2, devices=SAMPLER
    ),
    # The trainer's devices with another layout.
    "same": functools.partial(
        kpt.distribution.tensor_parallel, 2, devices=TRAINER
    ),
    "slices": functools.partial(kpt.distribution.hybrid, 2, devices=SAMPLER),
}


def own_engine(layout):
    return kpt.rollout.NativeRollout(distribution=LAYOUTS[layout]())


def train(engine, task, family, mode="full", **settings):
    """Trains on the first four devices; a dict as of `runs.run`."""
    keras.distribution.set_distribution(kpt.distribution.fsdp(devices=TRAINER))
    made, fit = runs.make(task, family, mode)
    made.rollout = engine
    engine.set_model(made)
    out = {"history": made.fit(**fit, **settings, verbose=0).history}
    out["weights"] = weights(made)
    ask = {"max_tokens": 8, "seed": 3, "return_token_ids": True}
    out["tokens"] = [
        made.last_rollout["completion"],
        made.generate(runs.PROMPTS, stop_token_ids=None, **ask),
    ]
    return out


@functools.cache
def shared(*case):
    return train(kpt.rollout.NativeRollout(), *case)


@pytest.mark.parametrize(
    "case, layout",
    [
        ("grpo:llama3-short:full", "slices"),
        ("grpo:llama3-short:full", "same"),
        ("grpo:gemma2-short:lora", "tensor"),
        ("episodes:qwen3-short:lora", "replicas"),
        pytest.param("ppo:llama3:full", "tensor", marks=pytest.mark.full),
        pytest.param("grpo:qwen2:full", "replicas", marks=pytest.mark.full),
        pytest.param("episodes:llama3:full", "fsdp", marks=pytest.mark.full),
    ],
)
def test_samples_and_updates_are_those_of_a_shared_mesh(case, layout):
    case = case.split(":")
    runs.compare(shared(*case), train(own_engine(layout), *case), case)


def test_it_samples_while_the_policy_is_trained():
    engine = own_engine("tensor")
    assert engine.is_apart
    found = train(
        engine, "grpo", "llama3-short", "lora", max_staleness=1, epochs=4
    )
    history = found["history"]
    assert max(history["staleness/max"]) <= 1
    assert max(history["staleness/mean"]) > 0
    assert np.isfinite(history["loss"]).all()


def made(engine, trainer=None, **settings):
    keras.distribution.set_distribution(trainer)
    path = runs.directory("llama3-short")
    task = kpt.GRPOTask.from_preset(path, sequence_length=64, **settings)
    task.tokenizer = None
    task.compile(
        rewards=[runs.odd],
        num_generations=2,
        max_completion_length=4,
        rollout=engine,
    )
    task.rollout.set_model(task)
    return task


def sampled(task, engine):
    """Tokens, and log-probabilities of the prompts."""
    task.rollout = engine
    engine.set_model(task)
    ask = {"max_tokens": 6, "seed": 3, "return_token_ids": True}
    tokens = task.generate(runs.PROMPTS, stop_token_ids=None, **ask)
    scores = engine.score([x["prompt_ids"] for x in runs.PROMPTS])
    return tokens, np.concatenate([s.per_token_logps for s in scores])


def check_sampled(task, *layouts):
    """One task samples with its own devices, and with other engines."""
    tokens, logps = sampled(task, kpt.rollout.NativeRollout())
    for layout in layouts:
        others, values = sampled(task, own_engine(layout))
        assert others == tokens
        np.testing.assert_allclose(values, logps, atol=2e-5)


def test_quantized_weights_and_adapters():
    """Codes, scales and factors have layouts of their own."""
    trainer = kpt.distribution.fsdp(devices=TRAINER)
    lora = kpt.LoRA(rank=4)
    task = made("auto", trainer, lora=lora, quantize="int8")
    spread_adapter(task)
    check_sampled(task, "tensor", "fsdp")


def test_experts_over_an_axis_of_their_own():
    keras.distribution.set_distribution(kpt.distribution.fsdp(devices=TRAINER))
    task = kpt.GRPOTask(runs.mixture("qwen3_moe-short"), sequence_length=64)
    task.compile(rewards=[runs.odd], max_completion_length=8)
    check_sampled(task, "experts", "tensor")


def test_weights_are_the_current_ones():
    """Also without `sync_weights`; those that are frozen move once."""
    engine = own_engine("fsdp")
    trainer = kpt.distribution.fsdp(devices=TRAINER)
    task = made(engine, trainer, lora=kpt.LoRA(rank=4))
    request = kpt.rollout.Request([5, 6, 7], max_tokens=4, temperature=0)
    engine.generate([request])
    before = engine.score([[5, 6, 7, 8]])[0].per_token_logps
    frozen = [c for _, c in engine._frozen._copies.values()]
    for b in task.adapter.b:
        b.assign(b.value + 0.1)
    after = engine.score([[5, 6, 7, 8]])[0].per_token_logps
    assert not np.allclose(before, after)
    again = [c for _, c in engine._frozen._copies.values()]
    assert frozen and all(x is y for x, y in zip(frozen, again, strict=True))
    places = {d for x in frozen for d in x.sharding.device_set}
    assert places == set(jax.devices()[4:])


def test_an_opponent_has_copies_of_its_own():
    """Of what is trained; the frozen weights are there once."""
    engine = own_engine("fsdp")
    trainer = kpt.distribution.fsdp(devices=TRAINER)
    task = made(engine, trainer, lora=kpt.LoRA(rank=4))
    other, ids = engine.frozen(), [[5, 6, 7, 8]]
    other.set_weights([jax.numpy.copy(v) for v in task.trainable_variables])
    before = engine.score(ids)[0].per_token_logps
    for b in task.adapter.b:
        b.assign(b.value + 0.1)
    assert (other.score(ids)[0].per_token_logps == before).all()
    assert not np.allclose(engine.score(ids)[0].per_token_logps, before)
    assert other._frozen is engine._frozen


def test_a_trainer_on_one_device():
    """Without a distribution the weights are on the first device."""
    task = made("auto")
    assert len(task.trainable_variables[0].value.sharding.device_set) == 1
    check_sampled(task, "tensor")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_arrays_are_copied_bit_for_bit(dtype):
    devices = np.array(jax.devices())
    one = Mesh(devices[:4].reshape(2, 2), ("a", "b"))
    two = Mesh(devices[4:].reshape(4, 1), ("a", "b"))
    specs = [P(), P("a"), P(None, "a"), P("a", "b"), P(("a", "b"))]
    values = np.arange(96).reshape(8, 12)
    for source in specs:
        x = jax.device_put(
            jax.numpy.asarray(values, dtype), NamedSharding(one, source)
        )
        for mesh in (one, two):
            for spec in specs:
                target = NamedSharding(mesh, spec)
                y = copy_to(x, target)
                assert y.sharding == target and y.dtype == x.dtype
                assert (np.asarray(y) == np.asarray(x)).all()
                pointers = {
                    s.data.unsafe_buffer_pointer()
                    for a in (x, y)
                    for s in a.addressable_shards
                }
                assert len(pointers) == 8


def test_what_is_refused():
    shared = kpt.distribution.fsdp(devices=TRAINER)
    task = made(kpt.rollout.NativeRollout(), shared)
    with pytest.raises(ValueError, match="kpt.distribution.split"):
        task.fit(runs.PROMPTS, max_staleness=1, verbose=0)
    task = made(own_engine("same"), shared)
    assert not task.rollout.is_apart
    with pytest.raises(ValueError, match="a mesh of 4 devices"):
        task.fit(runs.PROMPTS, max_staleness=1, verbose=0)
    with pytest.raises(ValueError, match="distribution='fsdp'"):
        kpt.rollout.NativeRollout(distribution="fsdp")
    judge = kpt.RewardTask.from_preset(runs.directory("llama3-short"))
    task = made(own_engine("fsdp"), shared)
    task.compile(
        rewards=[kpt.rewards.ModelReward(judge)],
        num_generations=2,
        max_completion_length=4,
        rollout=task.rollout,
    )
    with pytest.raises(ValueError, match="a ModelReward of RewardTask on 4"):
        task.fit(runs.PROMPTS, max_staleness=1, verbose=0)


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        ({}, "must be given"),
        ({"trainer": 0}, "numbers of devices.*trainer=0"),
        ({"trainer": 2.0}, "numbers of devices.*trainer=2.0"),
        ({"trainer": 8}, "add up.*trainer=8, sampler=None, 8 devices"),
        ({"trainer": 3, "sampler": 4}, "add up"),
        ({"sampler": 1, "devices": ["cpu:0", "cpu:9"]}, "different names"),
    ],
)
def test_devices_that_cannot_be_divided(arguments, pattern):
    with pytest.raises(ValueError, match=pattern):
        kpt.distribution.split(**arguments)


def test_how_devices_are_divided():
    split = kpt.distribution.split
    names = keras.distribution.list_devices()
    assert split(sampler=2) == (names[:6], names[6:])
    assert split(trainer=1, devices=names[4:6]) == ([names[4]], [names[5]])
