"""Families on layers of another one: what the seven first families hold.

The models are made by transformers. `test_loading.py` compares logits of
configs, plain, packed and cached, and `test_export.py` what is written.
"""

import functools
import re

import jax
import keras
import numpy as np
import peft
import pytest
import torch
import transformers

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import BatchLayout
from tests.data.support import random_trajectories
from tests.data.test_tree import shared
from tests.models.tiny_checkpoints import (
    GEMMA4_E2B,
    GEMMA4_EXPERTS,
    TOKEN_IDS,
    assert_equal_logits,
    compiled,
    make_checkpoint,
    transformers_logits,
)
from tests.support import (
    in_ci,
    random_rows,
    rows_of_samples,
    spread_adapter,
    starts_again,
    weights,
)

LONG = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.5],
        "long_factor": [1.5, 4.0],
    },
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 8,
}
# A model of each, and the fields of its config that are not the usual ones.
FAMILIES = {
    "gpt_oss": {},
    "gemma3n_text": {
        "layer_types": ["sliding_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    "gemma4_text": {
        **GEMMA4_E2B,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 1,
    },
    # Two sizes of heads, and two numbers of those of keys and values.
    "gemma4_text_moe": GEMMA4_EXPERTS,
    "granite": {},
    "llama_wide": {"head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "mixtral": {},
    # One layer of each kind, as the period of the usual ones is longer.
    "olmo3": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": 6, **LONG},
    "qwen2_moe": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "smollm3": {
        "attention_bias": True,
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
    },
}
ROWS = random_rows(8, seed=1, vocabulary=96)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def directory(family):
        model_type = family.removesuffix("_wide")
        model_type = model_type.replace("_text_moe", "_text")
        path, logits = make_checkpoint(
            folder / family, model_type, **FAMILIES[family]
        )
        np.save(path.with_suffix(".npy"), logits)
        return path

    return directory


def make(directory, lora=None, task=kpt.SFTTask, **settings):
    settings = {"sequence_length": 40, **settings}
    made = task.from_preset(directory, lora=lora, **settings)
    if lora is not None:
        spread_adapter(made)
    return made


def cases(full):
    """Cases of all families, of which `full(name)` says what CI leaves out."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(name, marks=[pytest.mark.full] if full(name) else [])
            for name in FAMILIES
        ],
    )


# `test_mixtures.py` and `test_same_numbers.py` have the dense families' tests
# of mixtures, other files those of Llama.
is_other = re.compile(".*(_moe|_moe_text|_wide)|mixtral").fullmatch
by_family = cases(lambda name: name in ("gemma4_text_moe", "qwen3_5_moe_text"))
by_dense_family = cases(is_other)


def steps(directory, **fit):
    """An SGD step; returns its history and the update.

    It is of an adapter, or of all weights where the family has what no other
    has: sinks, and biases of experts.
    """
    settings = {k: fit.pop(k) for k in ("remat",) if k in fit}
    lora = kpt.LoRA(rank=2, dropout=0.2)
    if directory.name == "gpt_oss":
        lora = None
    task = make(directory, lora, **settings)
    before = weights(task)
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        micro_batch_size=fit.pop("micro_batch_size", None),
        max_grad_norm=None,
    )
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0, **fit}
    history = task.fit(ROWS, **fit).history
    after = weights(task)
    return history, {k: after[k] - before[k] for k in after}


@functools.cache
def plain_steps(directory):
    """The step that others are compared with, on one device."""
    return steps(directory)


# All at once, and two of them without the third.
WAYS = [
    {"packing": True, "micro_batch_size": 2, "remat": "full"},
    pytest.param(
        {"packing": True, "micro_batch_size": 2}, marks=pytest.mark.full
    ),
    pytest.param(
        {"micro_batch_size": 4, "remat": "full"}, marks=pytest.mark.full
    ),
]


@by_dense_family
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_step_is_the_same_in_every_way(family, way, directories):
    """Packed, in micro-batches and rematerialised; dropout too."""
    history, update = plain_steps(directories(family))
    for name, value in update.items():
        assert np.abs(value).max() > 0, name
    other, other_update = steps(directories(family), **way)
    np.testing.assert_allclose(history["loss"], other["loss"], rtol=1e-5)
    largest = max(np.abs(x).max() for x in update.values())
    for key, value in update.items():
        np.testing.assert_allclose(
            other_update[key], value, atol=2e-7 + 2e-5 * largest
        )


@by_dense_family
def test_a_tree_equals_its_paths(family, directories):
    """Completions that share prompts have the log-probabilities of copies."""
    task = make(directories(family), sequence_length=64)
    groups = [random_trajectories(seed, vocabulary=96) for seed in range(3)]
    together = shared(groups, 256, 32)
    apart = BatchLayout(64, 64)(groups)

    @jax.jit
    def run(batch):
        mask = batch["completion_mask"] > 0
        outputs = task.policy.token_outputs(batch, mask)
        return outputs["per_token_logps"]

    got, want = (np.asarray(run(x.arrays)) for x in (together, apart))
    values = [want[place.tokens] for place in apart.places.values()]
    together.put_tokens("apart", values)
    mask = together.arrays["completion_mask"] > 0
    assert mask.sum() > 50
    np.testing.assert_allclose(
        got[mask], together.arrays["apart"][mask], atol=2e-5
    )


@cases(lambda name: is_other(name) and name != "gemma4_text_moe")
def test_samples_have_the_trainers_log_probs(family, directories):
    task = make(directories(family), kpt.LoRA(rank=2))
    engine = kpt.rollout.NativeRollout(num_slots=3)
    engine.set_model(task)
    requests = [
        kpt.rollout.Request(list(ids[:n]), max_tokens=12, seed=i)
        for i, (ids, n) in enumerate(zip(TOKEN_IDS.repeat(3, 0), range(3, 9)))
    ]
    samples = [sample for (sample,) in engine.generate(requests)]
    rows = rows_of_samples([x.token_ids for x in requests], samples)
    # In one batch: a program for each length would be compiled.
    found = task.log_probs(rows)
    for request, sample, want in zip(requests, samples, found):
        want = want[len(request.token_ids) :]
        assert len(want) == len(sample.token_ids) > 0
        np.testing.assert_allclose(sample.per_token_logps, want, atol=2e-5)


def own_logits(task):
    rows, length = TOKEN_IDS.shape
    batch = {
        "token_ids": TOKEN_IDS,
        "segment_ids": np.ones_like(TOKEN_IDS),
        "positions": np.tile(np.arange(length), (rows, 1)),
    }
    hidden = compiled(task.causal_lm, task.policy.hidden_states)(batch)
    embedding = task.causal_lm.backbone.token_embedding
    return np.array(embedding(hidden, reverse=True))


def peft_logits(directory, adapter):
    """Returns PEFT's model of an adapter, and its logits of `TOKEN_IDS`."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        return model, model(torch.tensor(TOKEN_IDS)).logits.numpy()


def assert_as_peft(got, theirs, model):
    """Within 1e-5 of PEFT, or as near to it in float64 as it is in float32.

    Processors differ in how they round. Mixtures do not run in float64.
    """
    try:
        assert_equal_logits(got, theirs, 1e-5)
    except AssertionError:
        with torch.no_grad():
            exact = model.double()(torch.tensor(TOKEN_IDS)).logits.numpy()
        model.float()
        assert np.abs(got - exact).max() < 2 * np.abs(theirs - exact).max()


def exchange(directory, lora, tmp_path):
    """Asserts that PEFT computes what a task does, and gives it back.

    Returns the task.
    """
    task = make(directory, lora)
    task.save_adapter(tmp_path / "ours")
    got = own_logits(task)
    model, theirs = peft_logits(directory, tmp_path / "ours")
    assert_as_peft(got, theirs, model)
    # Those of transformers, without the adapter.
    base = np.load(directory.with_suffix(".npy"))
    assert np.abs(got - base).max() > 1e-3
    model.save_pretrained(tmp_path / "theirs")
    again = kpt.SFTTask.from_preset(directory, sequence_length=40)
    again.load_adapter(tmp_path / "theirs")
    settings = [
        (x.adapter.lora.rank, x.adapter.lora.alpha) for x in (task, again)
    ]
    assert settings[0] == settings[1]
    variables = (task.adapter.variables, again.adapter.variables)
    for ours, read in zip(*variables, strict=True):
        np.testing.assert_array_equal(read, ours, err_msg=ours.path)
    return task


# With their experts these are below, `test_expert_lora.py` has all layers.
WITH_EXPERTS = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")


@cases(lambda name: name in ("gemma4_text_moe", *WITH_EXPERTS))
def test_adapters_are_exchanged_with_peft(family, directories, tmp_path):
    # PEFT takes the MLPs of Qwen3-MoE's other layers for experts.
    targets = "self_attn.*" if family == "qwen3_moe" else "all-linear"
    lora = kpt.LoRA(rank=2, alpha=5, targets=targets)
    exchange(directories(family), lora, tmp_path)


@by_family
def test_what_is_exported_is_the_model(family, directories, tmp_path):
    task = make(directories(family), kpt.LoRA(rank=2))
    task.export(tmp_path / "hf")
    got = own_logits(task)
    assert_equal_logits(got, transformers_logits(tmp_path / "hf"))
    task.save_to_preset(tmp_path / "preset")
    again = kpt.SFTTask.from_preset(tmp_path / "preset", sequence_length=40)
    assert_equal_logits(own_logits(again), got)


# The layouts of the others are those of OLMo's layers.
@cases(lambda name: is_other(name) or name in ("granite", "phi3", "smollm3"))
def test_eight_devices_are_one(family, directories, eight_devices):
    check_devices(
        family, directories, kpt.distribution.fsdp_tensor_parallel(2)
    )


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text_moe", "qwen2_moe"])
def test_experts_of_eight_devices_are_one(family, directories, eight_devices):
    """Experts over two of them, to which tokens are sent."""
    check_devices(family, directories, kpt.distribution.fsdp(experts=2))


def check_devices(family, directories, distribution):
    want = plain_steps(directories(family))
    keras.distribution.set_distribution(distribution)
    got = steps(directories(family))
    np.testing.assert_allclose(got[0]["loss"], want[0]["loss"], rtol=1e-5)
    largest = max(np.abs(x).max() for x in want[1].values())
    for key, value in want[1].items():
        atol = max(1e-6, 2e-5 * largest)
        np.testing.assert_allclose(got[1][key], value, atol=atol)


@pytest.mark.parametrize(
    "family", ["gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_a_second_model_has_the_paths_of_the_first(family, directories):
    """By which checkpoints and optimizers know variables."""
    first, second = (make(directories(family)) for _ in range(2))
    paths = [v.path for v in first.variables]
    assert len(set(paths)) == len(paths)
    assert [v.path for v in second.variables] == paths


def test_long_and_short_rows_are_not_mixed(directories):
    """Phi-3 rotates rows beyond its first length in another way."""
    task = make(directories("phi3"), sequence_length=40)
    with pytest.raises(ValueError, match="made for longer ones"):
        kpt.DPOTask(task.causal_lm, sequence_length=8)
    short = make(directories("phi3"), sequence_length=8)
    rows = [{"token_ids": TOKEN_IDS[0, :8].tolist()}]
    rows[0]["completion_mask"] = [1] * 8
    long_values, short_values = (
        np.array(x.log_probs(rows)[0]) for x in (task, short)
    )
    assert np.abs(long_values - short_values).max() > 1e-3
    # As transformers has it for each length.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directories("phi3"), attn_implementation="eager", dtype=torch.float32
    )
    for values, count in ((long_values, 14), (short_values, 8)):
        with torch.no_grad():
            logits = model(torch.tensor(TOKEN_IDS[:1, :count])).logits
        logps = torch.log_softmax(logits, -1)[0].numpy()
        want = logps[np.arange(7), TOKEN_IDS[0, 1:8]]
        np.testing.assert_allclose(values[1:], want, atol=2e-5)


def test_an_adapter_that_peft_cannot_load_is_said(
    directories, tmp_path, capsys
):
    task = make(directories("qwen3_moe"), kpt.LoRA(rank=2))
    task.save_adapter(tmp_path)
    assert "model.layers.1.mlp.gate_proj" in capsys.readouterr().out
    again = kpt.SFTTask.from_preset(
        directories("qwen3_moe"), sequence_length=40
    )
    again.load_adapter(tmp_path)
    np.testing.assert_array_equal(own_logits(again), own_logits(task))


@pytest.mark.parametrize(
    "family",
    ["gemma4_text_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"],
)
def test_adapters_of_experts_are_exchanged_with_peft(
    family, directories, tmp_path
):
    lora = kpt.LoRA(rank=2, alpha=5, targets=["self_attn.*", "experts"])
    task = exchange(directories(family), lora, tmp_path)
    for pair, b in zip(task.adapter.pairs, task.adapter.b):
        assert np.abs(np.array(b)).max() > 0, pair.name


def test_a_quantized_mixture_says_what_stays_floats(directories, capsys):
    directory = directories("qwen2_moe")
    lora = kpt.LoRA(rank=2, targets=["self_attn.*", "experts"])
    task = make(directory, lora, quantize="int8")
    assert "experts of the mixture stay floats" in capsys.readouterr().out
    plain = make(directory, lora)
    gap = np.abs(own_logits(task) - own_logits(plain))
    assert 0 < gap.mean() < 0.05
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    before = weights(task)
    task.fit(ROWS, batch_size=8, verbose=0)
    for name, value in weights(task).items():
        assert np.abs(value - before[name]).max() > 0, name


@pytest.mark.parametrize("family", in_ci("phi3", of=["granite", "phi3"]))
def test_a_quantized_base(family, directories):
    """Fused modules have one adapter on layers of codes too."""
    task = make(directories(family), kpt.LoRA(rank=2), quantize="int8")
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    before = weights(task)
    task.fit(ROWS, batch_size=8, verbose=0)
    for name, value in weights(task).items():
        assert np.abs(value - before[name]).max() > 0, name
    rows = [{"token_ids": TOKEN_IDS[0].tolist()}]
    rows[0]["completion_mask"] = [1] * TOKEN_IDS.shape[1]
    codes = task.log_probs(rows)[0]
    floats = make(directories(family), kpt.LoRA(rank=2), quantize="none")
    for ours, theirs in zip(floats.adapter.variables, task.adapter.variables):
        ours.assign(theirs)
    assert np.abs(floats.log_probs(rows)[0] - codes).mean() < 0.1


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("stop")


@pytest.mark.parametrize(
    "family",
    [pytest.param("gemma4_text", marks=[pytest.mark.full]), "mixtral", "phi3"],
)
def test_a_stopped_run_is_resumed_bit_for_bit(family, directories, tmp_path):
    # Of one length: one program.
    rows = random_rows(8, low=24, high=24, seed=1, vocabulary=96)

    def make_compiled():
        task = make(directories(family))
        task.compile(optimizer=keras.optimizers.Adam(1e-3))
        return task

    def run(task, directory, *callbacks):
        saved = kpt.callbacks.Checkpoint(directory, every=1)
        fit = {"batch_size": 2, "verbose": 0, "callbacks": [*callbacks, saved]}
        task.fit(rows, **fit)
        return weights(task)

    first = starts_again(make_compiled)
    want = run(first(), tmp_path / "straight")
    with pytest.raises(RuntimeError, match="stop"):
        run(first(), tmp_path / "stopped", Stop())
    got = run(make_compiled(), tmp_path / "stopped")
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
