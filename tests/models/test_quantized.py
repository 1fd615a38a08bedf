"""Adapters on linear layers that are stored in eight or four bits."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import peft
import pytest
import torch
import transformers

import keras_posttrain as kpt
from keras_posttrain.models import device_transfer, quantized, sharding
from keras_posttrain.models.hf.tensors import linear_layers
from keras_posttrain.models.quantized import (
    PackedCodes,
    QuantizedKernel,
    dequantize,
    quantize,
    values_of,
)
from keras_posttrain.models.quantized import kernels as quantized_kernels
from keras_posttrain.planning.advice import advise
from tests.distribution.runs import TASKS, mesh
from tests.support import (
    REFERENCE,
    in_ci,
    one_layer,
    random_rows,
    rows_of_samples,
    spread_adapter,
)

KINDS = {
    "int8": kpt.Quantization("int8"),
    "int8-groups": kpt.Quantization("int8", group_size=16),
    "int4": kpt.Quantization("int4", group_size=16),
    "nf4": kpt.Quantization("nf4", group_size=16),
    "double": kpt.Quantization("nf4", group_size=16, double=True),
}
ROWS = random_rows(6, seed=4)


def make(family="qwen3", quantize=None, all_layers=False, **kwargs):
    """Of one layer, but where files of several layers are compared."""
    directory = REFERENCE / "models" / family
    task = kpt.SFTTask.from_preset(
        directory if all_layers else one_layer(directory),
        lora=kpt.LoRA(rank=4),
        quantize=quantize,
        sequence_length=64,
        **kwargs,
    )
    spread_adapter(task)
    return task


def with_floats_of(task, family="qwen3"):
    """A task of float kernels with the values of a quantized one."""
    other = make(family)
    pairs = zip(task.adapter.pairs, other.adapter.pairs, strict=True)
    for ours, theirs in pairs:
        theirs.layer.kernel.assign(ours.layer.kernel.value)
    return other


def logps(task):
    return np.concatenate(task.log_probs(ROWS))


def trained(task, **kwargs):
    task.compile(optimizer=keras.optimizers.SGD(0.1), **kwargs)
    task.fit(ROWS, batch_size=6, verbose=0, shuffle=False)
    return [np.asarray(v.value) for v in task.trainable_variables]


def codes(task):
    kernels = [pair.layer.kernel for pair in task.adapter.pairs]
    return [np.asarray(k.variables[0].value) for k in kernels]


@pytest.mark.parametrize("kind", in_ci("int8", "double", of=KINDS))
def test_numbers_are_those_of_the_floats(kind):
    task = make(quantize=KINDS[kind])
    floats = with_floats_of(task)
    np.testing.assert_allclose(logps(task), logps(floats), atol=1e-5)
    before = codes(task)
    for ours, theirs in zip(trained(task), trained(floats), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for old, new in zip(before, codes(task), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [*KINDS, "int4-double"])
def test_rounding(kind):
    """A group is within half a step; one of zeros stays so."""
    quantization = KINDS.get(
        kind, kpt.Quantization("int4", group_size=16, double=True)
    )
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(64, 24)).astype("float32")
    matrix[16:32] *= 1e-4
    matrix[:16, 3] = 0
    storage = quantization.storage(64, "kernel")
    rows = storage.rows
    arrays = quantize(matrix, storage)
    found = np.asarray(dequantize(arrays, storage, "float32"))
    grouped = matrix.reshape(found.shape)
    largest = np.abs(grouped).max(1, keepdims=True)
    # Of the largest weight: half a step, or a step where int4 cuts what is
    # near the largest of the other sign; NF4's widest step is 0.3.
    step = {"int8": 0.5 / 127, "int4": 1 / 8, "nf4": 0.16}
    bound = step[quantization.kind] * largest
    if quantization.double:
        # A scale is within half a step of those of its group of rows.
        spread = largest.max(2, keepdims=True) * 2 / 254
        bound = bound + 0.5 * spread
    # bfloat16 scales.
    bound = bound + largest / 128 if rows != 64 else bound * 1.001
    assert (np.abs(found - grouped) <= bound).all()
    if rows != 64:
        assert not found[0, :, 3].any() or quantization.double


@pytest.mark.parametrize("kind", [*KINDS, "int4-double"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_a_kernel_are_quantized_as_all_of_it(
    kind, dtype, monkeypatch
):
    """Bit for bit, from either order of its axes."""
    quantization = KINDS.get(
        kind, kpt.Quantization("int4", group_size=16, double=True)
    )
    storage = quantization.storage(96, "kernel")
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(96, 50)).astype(jnp.dtype(dtype))
    matrix[:48, 3] = 0
    whole = quantize(matrix, storage)
    # Of the nearest values and zeros, the codes of `numpy.searchsorted`.
    if storage.kind == "nf4" and not storage.double:
        scale = whole["scale"].astype("float32")[:, None]
        ratios = matrix.astype("float32").reshape(whole["codes"].shape) / scale
        values = np.array(quantized.NF4, "float32")
        between = (values[1:] + values[:-1]) / 2
        wanted = np.searchsorted(between, ratios) - 8
        np.testing.assert_array_equal(whole["codes"], wanted)
    for size in (1, 700, 1500):
        monkeypatch.setattr(quantized, "PART", size)
        for given in (matrix, np.asfortranarray(matrix)):
            found = quantize(given, storage)
            assert found.keys() == whole.keys()
            for name, value in whole.items():
                assert found[name].dtype == value.dtype
                np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize(
    "family, kind",
    [
        pytest.param(
            family, kind, marks=[] if kind == own else pytest.mark.full
        )
        for family, own in (
            ("llama3", None),
            ("gemma2", "nf4"),
            ("gemma3_text", None),
            ("qwen2", "int4"),
        )
        for kind in KINDS
    ],
)
def test_every_family(family, kind):
    """Each in one kind, and in all kinds in the full suite."""
    task = make(family, quantize=KINDS[kind])
    floats = with_floats_of(task, family)
    np.testing.assert_allclose(logps(task), logps(floats), atol=1e-5)
    for one, other in zip(trained(task), trained(floats), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_is_read_is_rounded_once():
    """Tensors are quantized as they are read, without a copy as floats."""
    task = make(quantize="int4", all_layers=True)
    floats = make(all_layers=True)
    pairs = zip(task.adapter.pairs, floats.adapter.pairs, strict=True)
    for ours, theirs in pairs:
        kernel = ours.layer.kernel
        matrix = kernel.axes.to_matrix(np.asarray(theirs.layer.kernel.value))
        want = quantize(matrix, kernel.storage)
        want["codes"] = kernel.parts["codes"].stored(want["codes"])
        for part, variable in kernel.parts.items():
            np.testing.assert_array_equal(variable.value, want[part])
        error = np.abs(np.asarray(kernel.value - theirs.layer.kernel.value))
        # A step: what is near the largest of the other sign is cut.
        assert error.max() <= np.abs(matrix).max() / 8 * 1.01
        assert error.mean() <= np.abs(matrix).max() / 32
    stored = sum(v.value.nbytes for k in kernels(task) for v in k.variables)
    whole = sum(p.layer.kernel.value.nbytes for p in floats.adapter.pairs)
    assert stored < whole * (0.5 + 2 / 32) / 4 * 1.01
    names = {v.path for v in task.causal_lm.variables}
    assert not any("_proj" in n and n.endswith("kernel") for n in names)


def kernels(task):
    return [pair.layer.kernel for pair in task.adapter.pairs]


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": True},
        pytest.param({"remat": "full"}, marks=pytest.mark.full),
        pytest.param({"micro_batch_size": 3}, marks=pytest.mark.full),
    ],
)
def test_it_is_run_as_floats_are(settings):
    remat = {k: settings[k] for k in settings if k == "remat"}
    compiled = {k: settings[k] for k in settings if "micro" in k}
    fit = {k: settings[k] for k in settings if k == "packing"}
    found = []
    for is_changed in (False, True):
        task = make(quantize="nf4", **(remat if is_changed else {}))
        task.compile(
            optimizer=keras.optimizers.SGD(0.1),
            **(compiled if is_changed else {}),
        )
        task.fit(ROWS, batch_size=6, verbose=0, **(fit if is_changed else {}))
        found.append([np.asarray(v.value) for v in task.trainable_variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_samples_have_the_trainers_log_probs():
    task = make(quantize="int4")
    engine = kpt.rollout.NativeRollout()
    engine.set_model(task)
    engine.sync_weights()
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    samples = [
        sample
        for [sample] in engine.generate(
            [
                kpt.rollout.Request(ids, max_tokens=12, seed=i)
                for i, ids in enumerate(prompts)
            ]
        )
    ]
    rows = rows_of_samples(prompts, samples)
    for sample, want in zip(samples, task.log_probs(rows), strict=True):
        np.testing.assert_allclose(
            sample.per_token_logps, want[-len(sample.token_ids) :], atol=2e-5
        )


def test_what_is_exported_is_what_was_trained(tmp_path):
    task = make(quantize="int4", all_layers=True)
    base = kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen3", quantize="int4", trainable=False
    )
    base.export(tmp_path / "base")
    trained(task)
    want = logps(task)
    task.export(tmp_path / "export")
    task.save_adapter(tmp_path / "adapter")
    again = kpt.SFTTask.from_preset(tmp_path / "export", sequence_length=64)
    np.testing.assert_allclose(logps(again), want, atol=2e-5)
    other = make(quantize="int4", all_layers=True)
    other.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logps(other), want, atol=1e-6)

    def of_transformers(folder, adapter=None):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32"
        )
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
        ids = torch.tensor([ROWS[0]["token_ids"]])
        with torch.no_grad():
            found = torch.log_softmax(model(ids).logits[0].double(), -1)
        return found[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()

    [ours] = task.log_probs(ROWS[:1])
    trained_here = np.flatnonzero(ours)
    for found in (
        of_transformers(tmp_path / "export"),
        of_transformers(tmp_path / "base", tmp_path / "adapter"),
    ):
        np.testing.assert_allclose(
            ours[trained_here], found[trained_here - 1], atol=1e-4
        )


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", in_ci("4x2", of=["8x1", "4x2"]))
def test_eight_devices_are_one(name, kind):
    alone = make(quantize=KINDS[kind])
    want, weights = logps(alone), trained(alone)
    keras.distribution.set_distribution(mesh(name))
    task = make(quantize=KINDS[kind])
    np.testing.assert_allclose(logps(task), want, atol=1e-5)
    for kernel in kernels(task):
        assert not kernel.variables[0].value.sharding.is_fully_replicated
    for ours, theirs in zip(trained(task), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_a_run_resumes_and_names_another_base(tmp_path):
    # Of one length: one program.
    rows = random_rows(6, low=24, high=24, seed=4)

    def fit(quantize, epochs, folder="run"):
        task = make(quantize=quantize)
        task.compile(optimizer=keras.optimizers.Adam(0.01))
        checkpoint = kpt.callbacks.Checkpoint(tmp_path / folder, every=1)
        task.fit(rows, batch_size=3, epochs=epochs, verbose=0,
                 callbacks=[checkpoint])  # fmt: skip
        return [np.asarray(v.value) for v in task.trainable_variables]

    fit("int4", 1)
    resumed, whole = fit("int4", 2), fit("int4", 2, "whole")
    for one, other in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="nf4"):
        fit("nf4", 3)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"quantize": "int3"}, "quantize='int3'"),
        ({"quantize": 4}, "quantize=4"),
        ({"quantize": "int4", "lora": None}, "lora=kpt.LoRA(rank=16)"),
        (
            {"quantize": kpt.Quantization("int4", group_size=48)},
            "group_size=48",
        ),
    ],
)
def test_what_cannot_be_quantized(settings, words):
    kwargs = {"lora": kpt.LoRA(rank=4)} | settings
    with pytest.raises(ValueError, match=re.escape(words)):
        kpt.SFTTask.from_preset(REFERENCE / "models/qwen3", **kwargs)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kind": "fp4"}, "kind='fp4'"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 33}, "group_size=33"),
        ({"group_size": True}, "group_size=True"),
        ({"double": 1}, "double=1"),
        ({"kind": "int8", "double": True}, "kind='int8'"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        kpt.Quantization(**settings)


def test_the_vocabulary_is_read_before_kernels_have_memory(monkeypatch):
    order, fill_all = [], device_transfer.fill_all
    fill = QuantizedKernel.fill

    def noted_all(pairs):
        pairs = list(pairs)
        order.extend(variable.path for variable, _ in pairs)
        fill_all(pairs)

    def noted(kernel, read):
        order.append("kernel")
        fill(kernel, read)

    monkeypatch.setattr(device_transfer, "fill_all", noted_all)
    monkeypatch.setattr(QuantizedKernel, "fill", noted)
    make(quantize="int8")
    assert order.count("kernel") == 7
    before = order[: order.index("kernel")]
    assert "token_embedding/embeddings" in before[0]
    assert any("norm" in path for path in before)


def test_one_tensor_is_there_as_floats(monkeypatch):
    """While a checkpoint is read, no kernel of floats is on the device."""
    before = {id(x) for x in jax.live_arrays()}
    largest, fill = [], QuantizedKernel.fill

    def counted(kernel, read):
        fill(kernel, read)
        floats = [
            x.size
            for x in jax.live_arrays()
            if id(x) not in before
            and x.dtype == "float32"
            and x.shape == kernel.shape
        ]
        largest.append(len(floats))

    monkeypatch.setattr(QuantizedKernel, "fill", counted)
    make(quantize="int4", all_layers=True)
    assert len(largest) >= 14 and max(largest) == 0


def test_what_would_round_again_is_refused(tmp_path):
    task = make(quantize="int8")
    engine = kpt.rollout.NativeRollout(merge_adapter=True)
    with pytest.raises(ValueError, match="merge_adapter=True"):
        engine.set_model(task)
    with pytest.raises(ValueError, match="save_adapter"):
        task.save_to_preset(tmp_path / "preset")
    with pytest.raises(ValueError, match="`export`"):
        task.merge_adapter()
    assert not task.adapter.is_merged
    with pytest.raises(ValueError, match="`export`"):
        kpt.DPOTask.from_task(task, adapter="merge")


def test_a_plan_counts_codes():
    plans = []
    for kind in (None, "int8", "int4"):
        task = make(quantize=kind, dtype="bfloat16")
        task.compile()
        plans.append(task.plan("cpu:4", batch_size=4))
        lines = advise(dataclasses.replace(plans[-1], capacity=1.0),
                       task.policy)  # fmt: skip
        assert len(lines) > 2
        # The scales of int8 are float32 matrices.
        assert not any("dtype=" in line for line in lines)
    floats, eight, four = plans
    assert eight.parameters == floats.parameters == four.parameters
    assert eight.model_flops == floats.model_flops == four.model_flops
    sizes = [plan.arguments["weights"] for plan in plans]
    assert sizes[0] > sizes[1] > sizes[2]


def test_codes_of_a_tpu_stay_int4_in_a_program(monkeypatch):
    """As int8 they would be a copy of the model at twice its size."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    variable = PackedCodes(
        "zeros", (1, 4, 8), "int8", trainable=False, autocast=False
    )
    with values_of([(variable, jnp.zeros((1, 4, 8), "int4"))]):
        assert variable.value.dtype == "int4"


def test_a_quantized_reference_and_teacher(monkeypatch):
    """They compute what those do that have their weights as floats.

    Programs that read them are compiled with their options.
    """
    given = []
    monkeypatch.setattr(
        quantized, "compiler_options", lambda *models: given.append(models)
    )
    other = one_layer(REFERENCE / "models/qwen3_near")
    kept = kpt.SFTTask.from_preset(
        other, quantize="int8", trainable=False, sequence_length=64
    )
    floats = kpt.SFTTask.from_preset(other, sequence_length=64)
    layers = linear_layers(floats.causal_lm)
    for kernel in quantized_kernels(kept.causal_lm):
        layers[kernel.name].kernel.assign(kernel.value)
    path = one_layer(REFERENCE / "models/qwen3")
    kwargs = {"lora": kpt.LoRA(rank=4), "sequence_length": 64}
    pairs = [
        {
            "prompt_ids": row["token_ids"][:3],
            "chosen_ids": row["token_ids"][3:],
            "rejected_ids": row["token_ids"][4:],
        }
        for row in ROWS
    ]
    for make_task, rows in (
        (lambda x: kpt.DPOTask.from_preset(path, reference=x, **kwargs),
         pairs),
        (lambda x: kpt.DistillTask.from_preset(path, teacher=x, **kwargs),
         ROWS),
    ):  # fmt: skip
        losses = []
        for model in (kept, floats):
            task = make_task(model)
            task.compile(optimizer=keras.optimizers.SGD(0.1))
            given.clear()
            history = task.fit(rows, batch_size=6, verbose=0).history
            # The step, and in DPO the log-probabilities of the reference.
            assert [task.causal_lm, model.causal_lm] in map(list, given)
            losses.append(history["loss"][0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_options_of_the_compiler_for_tpus(monkeypatch):
    """One quantized model of several is enough, on a mesh of TPUs."""
    floats, codes_too = make().causal_lm, make(quantize="int4").causal_lm
    assert quantized.compiler_options(floats, codes_too) is None
    tpu = types.SimpleNamespace(platform="tpu")
    chips = types.SimpleNamespace(devices=np.array([tpu, tpu]))
    monkeypatch.setattr(sharding, "data_axis", lambda: (chips, "batch", 2))
    assert quantized.compiler_options(floats) is None
    found = quantized.compiler_options(floats, codes_too)
    assert list(found.values()) == [False]


@pytest.mark.parametrize("name", ["dpo", "reward", "distill", "grpo", "ppo"])
def test_every_task_trains_on_codes(name):
    kwargs = {
        "sequence_length": 64,
        "lora": kpt.LoRA(rank=4),
        "quantize": "int4",
    }
    path = REFERENCE / "models/qwen3"
    task, compiled, fit = TASKS[name](path, kwargs)
    task.compile(optimizer=keras.optimizers.SGD(0.1), **compiled)
    before = codes(task)
    history = task.fit(**fit | {"epochs": 1}, verbose=0).history
    assert history["grad_norm"][0] > 0
    assert max(np.abs(b.value).max() for b in task.adapter.b) > 0
    for old, new in zip(before, codes(task), strict=True):
        np.testing.assert_array_equal(old, new)
