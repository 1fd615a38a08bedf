"""Tests of vLLM on TPUs that do not need a TPU.

The runner of tpu-inference is a stand-in: it holds a KerasHub model of its
own, and computes with the state that it was given last.
"""

import types

import jax
import keras
import keras_hub
import numpy as np
import pytest
from keras_hub.src.vllm import registry

import keras_posttrain as kpt
from keras_posttrain.models.hf import families
from keras_posttrain.models.hf.checkpoint_files import read_json
from keras_posttrain.rollout import Request, VLLMRollout
from keras_posttrain.rollout.vllm import jobs, tpu
from keras_posttrain.rollout.vllm import settings as vllm_settings
from tests.support import FAMILIES, REFERENCE

IDS = {
    "token_ids": np.array([[5, 17, 101, 9, 40]]),
    "padding_mask": np.ones((1, 5), int),
}


@jax.tree_util.register_pytree_node_class
class Leaf(keras.Variable):
    """A variable in a state, as Keras makes it for Flax: a tree of one."""

    def __init__(self, variable):
        vars(self).update(vars(variable))

    def tree_flatten(self):
        fields = dict(vars(self))
        return [fields.pop("_value")], fields

    @classmethod
    def tree_unflatten(cls, fields, children):
        leaf = cls.__new__(cls)
        vars(leaf).update(fields, _value=children[0])
        return leaf


class Runner:
    """The parts of worker and runner of tpu-inference in `write_state`."""

    def __init__(self, directory, dtype):
        preset = read_json(directory / "config.json")["keras_hub_preset"]
        # As `KerasHubVllmModel.load_weights` does.
        loaded = keras_hub.models.CausalLM.from_preset(preset, dtype=dtype)
        backbone = loaded.backbone
        self.model_runner, self.kv_caches, self.calls = self, [1], []
        self.model = types.SimpleNamespace(backbone=backbone)
        # Not in the order of the backbone.
        self.state = {
            "backbone": [
                {"value": Leaf(v)} for v in reversed(backbone.variables)
            ]
        }
        self.refresh_state_leaves()

    def refresh_state_leaves(self):
        self.state_leaves = tuple(jax.tree_util.tree_leaves(self.state))

    def delete_kv_cache(self):
        self.calls.append(("delete", self.state_leaves))

    def reinitialize_kv_cache(self):
        self.calls.append(("make", self.state_leaves))

    def logits(self):
        backbone = self.model.backbone
        values = zip(reversed(backbone.variables), self.state_leaves)
        with keras.StatelessScope(state_mapping=list(values)):
            hidden = backbone(IDS)
            return np.array(backbone.token_embedding(hidden, reverse=True))


def logits(task):
    backbone = task.causal_lm.backbone
    hidden = backbone(IDS)
    return np.array(backbone.token_embedding(hidden, reverse=True))


def check_config(directory):
    """It is what KerasHub's `setup_vllm_model` would write."""
    config = read_json(directory / "config.json")
    expected = registry._derive_arch_config(config["keras_hub_preset"])
    # Which vLLM has no use for, and KerasHub's Gemma counts twice.
    expected.pop("intermediate_size")
    expected |= {
        "architectures": [registry.KERAS_HUB_ARCHITECTURE],
        "model_type": registry.KERAS_HUB_MODEL_TYPE,
        "torch_dtype": "float32",
    }
    assert {name: config.get(name) for name in expected} == expected


def weights_of(task, dtype):
    return tpu.TPUWeights(task.causal_lm, task.adapter, dtype, merged=True)


def change(task):
    for variable in task.trainable_variables:
        noise = np.random.default_rng(0).normal(0, 0.3, variable.shape)
        variable.assign_add(noise.astype("float32"))


# Two of the product for CI.
CASES = [
    pytest.param(
        family,
        lora,
        id=f"{family}-{'lora' if lora else 'full'}",
        marks=[]
        if (family, bool(lora)) in {("gemma2", False), ("qwen3", True)}
        else pytest.mark.full,
    )
    for family in FAMILIES
    for lora in (None, kpt.LoRA(rank=2))
]


@pytest.mark.parametrize(("family", "lora"), CASES)
def test_weights_in_the_runners_state(tmp_path, family, lora):
    """The runner computes with the trainer's weights, of a copy of them."""
    directory = REFERENCE / "models" / FAMILIES[family]
    task = kpt.SFTTask.from_preset(directory, lora=lora, sequence_length=32)
    tpu.write_model(task.causal_lm, tmp_path / "model", "float32")
    check_config(tmp_path / "model")
    runner = Runner(tmp_path / "model", "float32")
    weights = weights_of(task, "float32")
    found = tpu._variables(runner.state)
    weights.check({path: list(x.shape) for path, x in found.items()})
    before, old = runner.logits(), runner.state_leaves
    change(task)
    moved = tpu.write_state(runner, weights.arrays())
    assert moved == weights.num_bytes == sum(x.nbytes for x in old)
    after, expected = runner.logits(), logits(task)
    np.testing.assert_allclose(after, expected, atol=2e-4, rtol=2e-5)
    assert np.abs(after - before).max() > 0.1
    # The cache goes before and comes after.
    (first, seen), (last, left) = runner.calls
    assert (first, last) == ("delete", "make")
    assert seen is old and left is runner.state_leaves
    # The trainer's own are given away by its next step.
    for variable in task.causal_lm.backbone.variables:
        variable.value.delete()
    np.testing.assert_array_equal(runner.logits(), after)
    # Nothing holds on to what was there before.
    own = [v.value for v in runner.model.backbone.variables]
    assert not {id(x) for x in own} & {id(x) for x in old}


def test_dtypes_and_shardings_are_the_runners(tmp_path):
    task = kpt.SFTTask.from_preset(REFERENCE / "models/qwen3")
    tpu.write_model(task.causal_lm, tmp_path / "model", "bfloat16")
    runner = Runner(tmp_path / "model", "bfloat16")
    shardings = [x.sharding for x in runner.state_leaves]
    weights = weights_of(task, "bfloat16")
    change(task)
    assert tpu.write_state(runner, weights.arrays()) == weights.num_bytes
    assert {x.dtype.name for x in runner.state_leaves} == {"bfloat16"}
    assert [x.sharding for x in runner.state_leaves] == shardings
    values = reversed(task.causal_lm.backbone.variables)
    for found, variable in zip(runner.state_leaves, values):
        expected = np.array(variable.value.astype("bfloat16"))
        np.testing.assert_array_equal(np.array(found), expected)


def test_other_variables_are_refused(tmp_path):
    task = kpt.SFTTask.from_preset(REFERENCE / "models/qwen3")
    tpu.write_model(task.causal_lm, tmp_path / "model", "float32")
    runner = Runner(tmp_path / "model", "float32")
    weights = weights_of(task, "float32")
    shapes = weights.shapes()
    path = next(iter(shapes))
    with pytest.raises(ValueError, match=f"1 only here .*{path}"):
        weights.check({k: v for k, v in shapes.items() if k != path})
    some = list(weights.arrays())[1:]
    state = runner.state
    with pytest.raises(ValueError, match=f"No weights .*{path}"):
        tpu.write_state(runner, iter(some))
    assert runner.state is state


def test_jobs():
    """No seed of a request's own, and no distribution cut short."""
    job = jobs.sampling_job(Request([4, 5], 3, seed=1))
    params = tpu._job(job).params
    assert params == job.params | {"seed": None}
    for settings in ({"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}):
        job = jobs.sampling_job(Request([4, 5], seed=1, **settings))
        with pytest.raises(ValueError, match="renormalised"):
            tpu._job(job)
    tpu._job(jobs.scoring_job([4, 5], 20, 1.0))
    with pytest.raises(ValueError, match="top_k=21"):
        tpu._job(jobs.scoring_job([4, 5], 21, 1.0))
    with pytest.raises(ValueError, match="temperature=0.5"):
        tpu._job(jobs.scoring_job([4, 5], None, 0.5))


def test_a_process_with_tpus(monkeypatch):
    """It says what must be set, and takes no adapter as such."""
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen3", lora=kpt.LoRA(rank=2)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    engine = VLLMRollout()
    engine.set_model(task)
    assert not engine._sends_adapter
    with pytest.raises(RuntimeError, match="KERAS_NNX_ENABLED=true"):
        engine.start()
    assert engine._folder is None
    engine = VLLMRollout(adapter=True)
    engine.set_model(task)
    with pytest.raises(ValueError, match="takes no adapter"):
        engine.start()
    # With a server the adapter is sent.
    engine = VLLMRollout("http://127.0.0.1:1")
    engine.set_model(task)
    assert engine._sends_adapter


@pytest.mark.parametrize("model_type", vllm_settings.NOT_ON_TPU)
def test_families_that_were_compared_elsewhere_only(model_type):
    family = families.FAMILIES[model_type]
    vllm_settings.check_family(family)
    with pytest.raises(ValueError, match=f"NativeRollout.*'{model_type}'"):
        vllm_settings.check_family(family, on_tpu=True)
