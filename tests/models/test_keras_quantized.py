"""Adapters on models that Keras has quantized."""

import contextlib
import gc

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import quantized
from keras_posttrain.models.hf.loading import load_causal_lm
from keras_posttrain.models.hf.tensors import linear_layers
from keras_posttrain.models.linear import sublayers
from keras_posttrain.models.quantized import QuantizedKernel
from keras_posttrain.planning.lowering import planned
from tests.distribution.runs import mesh
from tests.support import (
    REFERENCE,
    in_ci,
    one_layer,
    random_rows,
    spread_adapter,
)

ROWS = random_rows(6, seed=4)
MODELS = REFERENCE / "models"
QWEN3 = one_layer(MODELS / "qwen3")
Int4 = keras.quantizers.Int4QuantizationConfig
Int8 = keras.quantizers.Int8QuantizationConfig
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Layer .* does not have a `quantize` method",
        # Of weights that are not read, before the error.
        "Skipping nested container",
        # Of float8, by layers that have other modes.
        "Invalid quantization mode",
    )
]


@pytest.fixture(autouse=True)
def collected_later(monkeypatch):
    """Keras collects garbage for each weight that it replaces by codes.

    With the modules of all tests in memory that took most of their time.
    """
    monkeypatch.setattr(gc, "collect", lambda *args: 0)


def _calibrated(causal_lm, mode, bits=4, reordered=False):
    """Stores random codes as GPTQ and AWQ do, which would take minutes."""
    config = {
        "gptq": keras.quantizers.GPTQConfig,
        "awq": keras.quantizers.AWQConfig,
    }[mode](None, None, weight_bits=bits, group_size=16)
    rng = np.random.default_rng(0)
    for layer in linear_layers(causal_lm).values():
        kernel = np.asarray(layer.kernel)
        layer.quantize(mode, config=config)
        # Without the garbage collection of Keras's `__delattr__`.
        layer._untrack_variable(layer._kernel)
        del vars(layer)["_kernel"]
        columns, groups = layer.kernel_scale.shape
        rows = layer.g_idx.shape[0]
        codes = rng.integers(0, 2**bits, (columns, rows))
        if bits == 4:
            codes = keras.quantizers.pack_int4(codes.astype("uint8"), axis=0,
                                               dtype="uint8")[0]  # fmt: skip
        layer.quantized_kernel.assign(codes)
        size = kernel.std() / 2**bits
        scale = rng.uniform(size, 2 * size, (columns, groups))
        layer.kernel_scale.assign(scale)
        layer.kernel_zero.assign(rng.integers(0, 2**bits, (columns, groups)))
        index = np.arange(rows) // 16
        layer.g_idx.assign(rng.permutation(index) if reordered else index)
        if mode == "awq":
            layer.awq_scales.assign(rng.uniform(0.5, 2, rows))
        setattr(layer, f"is_{mode}_calibrated", True)


def _linear_only(layer):
    return not isinstance(layer, keras.layers.ReversibleEmbedding)


CASES = {
    "int8": lambda m: m.quantize("int8"),
    "int8-weights": lambda m: m.quantize(
        "int8", config=Int8(activation_quantizer=None), filters=_linear_only
    ),
    "int4": lambda m: m.quantize("int4"),
    "int4-groups": lambda m: m.quantize("int4", config=Int4(block_size=32)),
    "int4-columns": lambda m: m.quantize("int4", config=Int4(block_size=-1)),
    "gptq": lambda m: _calibrated(m, "gptq"),
    "gptq-8": lambda m: _calibrated(m, "gptq", bits=8),
    "awq": lambda m: _calibrated(m, "awq"),
    "gptq-reordered": lambda m: _calibrated(m, "gptq", reordered=True),
}
FLOATS = {"awq": "divisor", "gptq-reordered": "rows far apart"}


def quantize(case, directory=QWEN3):
    causal_lm = load_causal_lm(directory)
    CASES[case](causal_lm)
    return causal_lm


@contextlib.contextmanager
def inputs_not_rounded(causal_lm):
    """Keras rounds the inputs of layers in int8, by default."""
    layers = [
        layer
        for layer in sublayers(causal_lm.backbone)
        if getattr(layer, "inputs_quantizer", None)
    ]
    rounded = [layer.inputs_quantizer for layer in layers]
    for layer in layers:
        layer.inputs_quantizer = None
    yield
    for layer, quantizer in zip(layers, rounded):
        layer.inputs_quantizer = quantizer


def logps_of_keras(causal_lm):
    """Log-probabilities by Keras's quantized layers."""
    lengths = [len(row["token_ids"]) for row in ROWS]
    ids = np.zeros((len(ROWS), max(lengths)), int)
    for row, length, taken in zip(ROWS, lengths, ids):
        taken[:length] = row["token_ids"]
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    with inputs_not_rounded(causal_lm):
        inputs = {"token_ids": ids, "padding_mask": mask.astype(int)}
        logits = np.asarray(causal_lm(inputs), "float32")
    logps = np.asarray(jax.nn.log_softmax(logits))[:, :-1]
    logps = np.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0]
    # Nothing predicts the first token.
    logps = np.pad(logps, [(0, 0), (1, 0)])
    return np.concatenate([x[:n] for x, n in zip(logps, lengths)])


def logps(task):
    return np.concatenate(task.log_probs(ROWS))


def make(model, **kwargs):
    settings = {"lora": kpt.LoRA(rank=4), "sequence_length": 64} | kwargs
    if isinstance(model, keras.Model):
        return kpt.SFTTask(model, QWEN3, **settings)
    return kpt.SFTTask.from_preset(model, tokenizer=QWEN3, **settings)


def kernels(task):
    layers = linear_layers(task.causal_lm).values()
    return [layer.kernel for layer in layers]


def codes(task):
    return [np.asarray(k.variables[0].value) for k in kernels(task)]


def trained(task, **kwargs):
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    task.fit(ROWS, batch_size=6, verbose=0, shuffle=False, **kwargs)
    return [np.asarray(v.value) for v in task.trainable_variables]


def with_floats_of(task):
    """A task of float kernels with the values of another."""
    other = make(load_causal_lm(QWEN3))
    for ours, theirs in zip(kernels(task), kernels(other), strict=True):
        theirs.assign(ours.value)
    embedding = other.causal_lm.backbone.token_embedding
    embedding.embeddings.assign(
        task.causal_lm.backbone.token_embedding.embeddings
    )
    return other


# The others differ from one of these in one setting.
IN_CI = ("int8", "int4-groups", "gptq", "awq")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=[] if x in IN_CI else [pytest.mark.full])
        for x in CASES
    ],
)
def test_a_model_that_keras_quantized(case, capsys):
    causal_lm = quantize(case)
    want = logps_of_keras(causal_lm)
    task = make(causal_lm)
    np.testing.assert_allclose(logps(task), want, atol=1e-5)
    said = capsys.readouterr().out
    if case in FLOATS:
        assert FLOATS[case] in said
        assert quantized.kernels(causal_lm) == []
        return
    assert "codes are kept" in said
    assert ("inputs, which Keras rounds" in said) == (case == "int8")
    assert ("token_embedding" in said) == (
        case in ("int8", "int4", "int4-groups", "int4-columns")
    ), said
    assert all(isinstance(x, QuantizedKernel) for x in kernels(task))
    bits = {kernel.storage.bits for kernel in kernels(task)}
    assert bits == {8 if "8" in case else 4}
    # An adapter learns what it learns on these weights as floats.
    floats = with_floats_of(task)
    for each in (task, floats):
        spread_adapter(each)
    before = codes(task)
    for ours, theirs in zip(
        trained(task, packing=True), trained(floats, packing=True), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for old, new in zip(before, codes(task), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("case", in_ci("int4", of=["int8", "int4"]))
def test_an_adapter_of_zeros_learns(case):
    """Under Keras's own layers B stays 0 without a word."""
    task = make(quantize(case))
    trained(task)
    for b in task.adapter.b:
        assert np.abs(np.asarray(b.value)).max() > 0


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama3", marks=pytest.mark.full),
        pytest.param("gemma2", marks=pytest.mark.full),
        "gemma3_text",
    ],
)
@pytest.mark.parametrize(
    "case", [pytest.param("int8", marks=pytest.mark.full), "int4-groups"]
)
def test_other_families(family, case, capsys):
    """Keras's groups of int4 mix the heads of Gemma's kernels."""
    causal_lm = quantize(case, MODELS / family)
    want = logps_of_keras(causal_lm)
    task = make(causal_lm)
    np.testing.assert_allclose(logps(task), want, atol=1e-5)
    said = capsys.readouterr().out
    mixed = "gemma" in family and case == "int4-groups"
    assert ("the groups are not rows" in said) == mixed
    assert quantized.kernels(causal_lm)


@pytest.mark.parametrize("case", ["int8", "int4-groups"])
def test_a_preset_that_keras_quantized(case, tmp_path):
    causal_lm = quantize(case)
    want = logps_of_keras(causal_lm)
    causal_lm.save_to_preset(str(tmp_path / "preset"))
    task = make(tmp_path / "preset")
    np.testing.assert_allclose(logps(task), want, atol=1e-5)
    assert len(quantized.kernels(task.causal_lm)) == 7
    trained(task)
    spread_adapter(task)
    # What is exported is what was trained.
    task.export(tmp_path / "export")
    exported = make(tmp_path / "export", lora=None)
    np.testing.assert_allclose(logps(exported), logps(task), atol=1e-4)


def test_keras_saves_no_zeros_of_gptq(tmp_path):
    """Keras 3.15.1 cannot read what it saved. A newer one may: then the case
    "gptq" belongs to `test_a_preset_that_keras_quantized`."""
    causal_lm = quantize("gptq")
    causal_lm.save_to_preset(str(tmp_path / "preset"))
    with pytest.raises(ValueError, match="expected 4 var.*received 3"):
        make(tmp_path / "preset")


def test_a_preset_is_read_as_asked(tmp_path, capsys):
    causal_lm = quantize("int4")
    want = logps_of_keras(causal_lm)
    causal_lm.save_to_preset(str(tmp_path / "preset"))
    floats = make(tmp_path / "preset", quantize="none", lora=None)
    np.testing.assert_allclose(logps(floats), want, atol=1e-5)
    assert quantized.kernels(floats.causal_lm) == []
    assert "quantize='none'" in capsys.readouterr().out
    # All weights of such a model are trained.
    before = [np.asarray(kernel.value) for kernel in kernels(floats)]
    trained(floats)
    assert (np.asarray(kernels(floats)[0].value) != before[0]).any()
    again = make(tmp_path / "preset", quantize="int8")
    assert "rounded again, to int8" in capsys.readouterr().out
    for old, kernel in zip(before, kernels(again), strict=True):
        error = np.linalg.norm(np.asarray(kernel.value) - old)
        # A step of 255, evenly off: 0.006 of a normal distribution.
        assert 0 < error < 0.01 * np.linalg.norm(old)
    assert {k.storage.kind for k in kernels(again)} == {"int8"}
    with pytest.raises(ValueError, match="leave `dtype` out.*'bfloat16'"):
        make(tmp_path / "preset", dtype="bfloat16")
    judge = make(tmp_path / "preset", lora=None, trainable=False)
    np.testing.assert_allclose(logps(judge), want, atol=1e-5)
    with pytest.raises(ValueError, match="lora=kpt.LoRA"):
        make(tmp_path / "preset", lora=None)


PAIRS = [
    {
        "prompt_ids": row["token_ids"][:3],
        "chosen_ids": row["token_ids"][3:],
        "rejected_ids": row["token_ids"][4:],
    }
    for row in ROWS
]


def preference_task(reference):
    task = kpt.DPOTask.from_preset(
        QWEN3,
        reference=reference,
        lora=kpt.LoRA(rank=4),
        sequence_length=64,
    )
    task.compile()
    return task


def test_a_reference_that_keras_quantized(tmp_path):
    """A preset of one keeps its own dtype, whatever the policy's is."""
    causal_lm = quantize("int4")
    causal_lm.save_to_preset(str(tmp_path / "preset"))
    losses = []
    for reference in (causal_lm, str(tmp_path / "preset")):
        history = preference_task(reference).fit(
            PAIRS, batch_size=6, verbose=0
        )
        losses += history.history["loss"]
    assert len(quantized.kernels(causal_lm)) == 7
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_a_plan_counts_codes_of_such_a_reference(tmp_path):
    whole = quantize("int4", MODELS / "qwen3")
    whole.save_to_preset(str(tmp_path / "preset"))
    task = preference_task(str(tmp_path / "preset"))
    devices = keras.distribution.list_devices()[:1]
    with planned(task, kpt.distribution.fsdp(devices=devices)) as every:
        (reference,) = every.known["reference"]
    codes = [v for v in reference.variables if v.dtype == "uint8"]
    assert len(codes) == 14
    assert not any(isinstance(v.value, jax.Array) for v in codes)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    "case", in_ci("int4-groups", of=["int8", "int4-groups"])
)
def test_a_preset_on_eight_devices(case, tmp_path):
    causal_lm = quantize(case)
    want = logps_of_keras(causal_lm)
    causal_lm.save_to_preset(str(tmp_path / "preset"))
    keras.distribution.set_distribution(mesh("4x2"))
    task = make(tmp_path / "preset")
    np.testing.assert_allclose(logps(task), want, atol=1e-5)
    for kernel in kernels(task):
        assert not kernel.variables[0].value.sharding.is_fully_replicated


def float8(causal_lm):
    causal_lm.quantize("float8")


def norms(causal_lm):
    """A layer outside the decoder's linear ones."""
    layer = causal_lm.backbone.transformer_layers[0]
    extra = keras.layers.Dense(4)
    extra.build((None, 8))
    extra.quantize("int8")
    layer._tracker.unlock()
    layer.extra = extra


def own_lora(causal_lm):
    causal_lm.quantize("int8", filters=_linear_only)
    causal_lm.backbone.enable_lora(2)


@pytest.mark.parametrize(
    "change, words",
    [
        (float8, "quantization_mode='float8'"),
        (norms, "linear layers of the decoder"),
        (own_lora, "Keras's own LoRA is enabled"),
    ],
)
def test_what_cannot_be_read(change, words):
    causal_lm = load_causal_lm(QWEN3)
    change(causal_lm)
    before = len(causal_lm.variables)
    with pytest.raises(ValueError, match=words):
        make(causal_lm)
    assert len(causal_lm.variables) == before


def test_training_needs_an_adapter():
    task = make(quantize("int8"), lora=None)
    with pytest.raises(ValueError, match="lora=kpt.LoRA"):
        task.compile()
    task.trainable = False
    task.compile()
    assert np.isfinite(task.evaluate(ROWS)["loss"])
