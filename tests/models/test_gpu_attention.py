"""Attention on CUDA GPUs, without one.

Programs are lowered for CUDA: they hold the calls of cuDNN and of the Pallas
kernel that a GPU would run. Numbers are those of JAX's interpreter.
"""

import collections
import functools
import re
import types

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import keras_posttrain as kpt
from keras_posttrain import _console
from keras_posttrain.models import attention, gpu_attention, sharding
from keras_posttrain.models.gpu_attention import Case, Chooser
from keras_posttrain.models.policy import Policy
from keras_posttrain.planning.lowering import planned
from keras_posttrain.training.step import compile_step, counters
from tests.models.test_attention import example, naive
from tests.support import cases_in_ci, random_rows

LENGTH, LAYERS = 64, 2
# As they are called in a program for CUDA.
KERNELS = {
    "cudnn": r"@__cudnn\$fmhaSoftmax\(",
    "cudnn backward": r"@__cudnn\$fmhaSoftmaxBackward\(",
    "pallas": r'name = "mha_forward"',
    "pallas backward": r'name = "mha_backward"',
}


@pytest.fixture
def gpu(request, monkeypatch):
    """Has programs made for an H100, or for another compute capability."""
    capability = getattr(request, "param", "9.0")
    device = types.SimpleNamespace(
        platform="gpu", device_kind="GPU", compute_capability=capability,
        memory_stats=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(sharding, "_device", lambda: device)
    # JAX asks for cuDNN's version when it lowers a call.
    versions = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr(cudnn, "cuda_versions", versions)


def make_model(kind="Llama3", dtype="mixed_bfloat16", **settings):
    keras.utils.set_random_seed(0)
    settings = {
        "vocabulary_size": 64,
        "num_layers": LAYERS,
        "num_query_heads": 2,
        "num_key_value_heads": 1,
        "hidden_dim": 64,
        "intermediate_dim": 64,
        "dtype": dtype,
        **settings,
    }
    backbone = getattr(keras_hub.models, f"{kind}Backbone")(**settings)
    task = getattr(keras_hub.models, f"{kind}CausalLM")
    return task(backbone=backbone, preprocessor=None)


def make_task(**settings):
    task = kpt.SFTTask(make_model(), sequence_length=LENGTH, **settings)
    task.compile(keras.optimizers.AdamW(1e-3))
    return task


def one_device():
    return kpt.distribution.data_parallel(devices=jax.devices()[:1])


def lower(task, packing, distribution, platform="cuda", remat="none"):
    """The text of a training step, lowered for a platform."""
    with planned(task, distribution, remat=remat) as plan:
        more = {"packing": True} if packing else {}
        batch = plan.task.example_batch(8, **more)
        changing, held, batch = plan.shapes(batch)
        program = compile_step(plan.task.train_step)
        traced = program.trace({**changing, **counters(1, 0)}, held, batch)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    """How often a program runs each of `KERNELS`, functions included."""
    parts = re.split(r"\n  func\.func ", text)[1:]
    bodies = {re.match(r".*?@([\w.]+)\(", x)[1]: x for x in parts}

    @functools.cache
    def inside(name):
        body = bodies[name]
        found = collections.Counter(
            {x: len(re.findall(y, body)) for x, y in KERNELS.items()}
        )
        for called in re.findall(r"call @([\w.]+)\(", body):
            if called in bodies:
                found.update(inside(called))
        return found

    return {x: n for x, n in inside("main").items() if n}


# --- Programs ----------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_training_step_calls_a_kernel_in_each_layer(gpu, packing):
    kernel = "pallas" if packing else "cudnn"
    text = lower(make_task(), packing, one_device())
    assert calls(text) == {kernel: LAYERS, f"{kernel} backward": LAYERS}


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_other_tasks_can_be_set_to_cudnn(gpu, kind):
    """Rows hold one sequence each. DPO's reference is a forward pass more."""
    task = getattr(kpt, f"{kind}Task")(
        make_model(), sequence_length=LENGTH, attention="cudnn",
        lora=kpt.LoRA(rank=2),
    )  # fmt: skip
    more = {"rewards": [len], "max_completion_length": 32}
    task.compile(**(more if kind == "GRPO" else {}))
    forward = LAYERS * (1 + (kind == "DPO"))
    assert calls(lower(task, False, one_device())) == {
        "cudnn": forward,
        "cudnn backward": LAYERS,
    }


@pytest.mark.parametrize("packing", [False, True])
def test_a_device_computes_its_own_rows(gpu, eight_devices, packing):
    text = lower(make_task(), packing, kpt.distribution.fsdp())
    kernel = "pallas" if packing else "cudnn"
    assert calls(text) == {kernel: LAYERS, f"{kernel} backward": LAYERS}
    call = next(x for x in text.split("\n") if re.search(KERNELS[kernel], x))
    assert f"tensor<1x{LENGTH}x" in call and f"tensor<8x{LENGTH}x" not in call


@pytest.mark.parametrize(
    "remat, packing",
    cases_in_ci(
        ("outputs", True),
        ("attention", False),
        ("full", True),
        of=[
            (remat, packing)
            for remat in ("outputs", "attention", "full")
            for packing in (False, True)
        ],
    ),
)
def test_choices_of_remat_keep_what_kernels_compute(gpu, remat, packing):
    """All but "full", which computes it again."""
    kernel = "pallas" if packing else "cudnn"
    text = lower(make_task(), packing, one_device(), remat=remat)
    assert calls(text) == {
        kernel: LAYERS * (1 + (remat == "full")),
        f"{kernel} backward": LAYERS,
    }


def test_the_cpu_has_one_program():
    """Whatever `attention` says, that which it had without the argument."""
    task = make_task()
    text = lower(task, True, one_device(), "cpu")
    assert calls(text) == {}
    task.policy.chooser = Chooser("blocks")
    assert lower(task, True, one_device(), "cpu") == text


def hidden_states(causal_lm, chooser=None, **more):
    """The text of hidden states of two rows, packed if `more` says so."""
    batch = {
        "token_ids": np.ones((2, LENGTH), "int32"),
        "segment_ids": np.ones((2, LENGTH), "int32"),
        "positions": np.tile(np.arange(LENGTH, dtype="int32"), (2, 1)),
        "sequence_mask": np.ones((2, 1), "float32"),
        **more,
    }
    policy = Policy(causal_lm, chooser=chooser)
    traced = jax.jit(policy.hidden_states).trace(batch)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


PACKED = {"sequence_mask": np.ones((2, 3), "float32")}
TREE = PACKED | {"prefix_segments": np.asarray([[0, 1, 1]] * 2, "int32")}
GEMMA = {"head_dim": 32}
WINDOWED = {"sliding_window": 16}


@pytest.mark.parametrize(
    "kind, settings, batch, line",
    [
        ("Llama3", {}, TREE, "packed rows: blocks in 2 layers (shared pro"),
        ("Llama3", {"dtype": "float32"}, {}, "blocks in 2 layers (float32)"),
        ("Gemma", {"head_dim": 512}, {}, "blocks in 2 layers (heads of 512)"),
        ("Gemma", {"head_dim": 16}, PACKED, "blocks in 2 layers (heads of 16"),
        (
            "Gemma",
            GEMMA | {"attention_logit_soft_cap": 50.0},
            {},
            "rows of one sequence: blocks in 2 layers (a soft cap of scores)",
        ),
        ("Mistral", WINDOWED, PACKED, "blocks in 2 layers (a sliding window)"),
    ],
    ids=["tree", "float32", "large", "small", "soft cap", "window"],
)
def test_what_kernels_cannot_compute_is_computed_in_blocks(
    gpu, kind, settings, batch, line, capsys
):
    text = hidden_states(make_model(kind, **settings), **batch)
    assert calls(text) == {}
    assert line in capsys.readouterr().out


def test_cudnn_gets_windows_shorter_than_a_row(gpu):
    """A window of 16 is 16 columns; one of the row's length is none."""
    windows = {}
    for size in (16, LENGTH):
        text = hidden_states(make_model("Mistral", sliding_window=size))
        assert calls(text) == {"cudnn": LAYERS}
        [windows[size]] = set(re.findall(r"window_length\\22: (\d+)", text))
    assert windows == {16: "16", LENGTH: "0"}


def test_a_long_window_leaves_packed_rows_to_the_kernel(gpu):
    text = hidden_states(make_model("Mistral", sliding_window=64), **PACKED)
    assert calls(text) == {"pallas": LAYERS}


# --- The choice --------------------------------------------------------------


HALF = ("bfloat16",) * 3


@pytest.mark.parametrize(
    "capability, case, kernel, reason",
    [
        ((8, 0), Case(HALF, 128, False), "cudnn", None),
        ((8, 0), Case(HALF, 128, True), "pallas", None),
        ((7, 5), Case(HALF, 128, True), "blocks", "capability 7.5"),
        # cuDNN's heads have a multiple of 8 numbers.
        ((8, 0), Case(HALF, 256, False), "blocks", "heads of 256"),
        ((9, 0), Case(HALF, 256, False), "cudnn", None),
        ((9, 0), Case(HALF, 100, False), "blocks", "heads of 100"),
        ((9, 0), Case(HALF, 96, True), "blocks", "heads of 96"),
        ((9, 0), Case(("float16",) * 3, 64, True), "pallas", None),
        ((9, 0), Case(("float32",) * 3, 64, False), "blocks", "float32"),
        ((9, 0), Case((*HALF[:2], "float16"), 64, False), "blocks", " and "),
        ((9, 0), Case(HALF, 64, False, window=8), "cudnn", None),
        ((9, 0), Case(HALF, 64, True, window=8), "blocks", "window"),
        ((9, 0), Case(HALF, 64, False, special="sinks"), "blocks", "sinks"),
    ],
)
def test_the_choice_by_device_and_case(
    capability, case, kernel, reason, monkeypatch
):
    monkeypatch.setattr(sharding, "compute_capability", lambda: capability)
    found, why = Chooser().kernel(case, 0)
    assert found == kernel
    assert (why is None) == (reason is None) and (reason or "") in (why or "")


@pytest.mark.parametrize(
    "device, capability",
    [
        ({"compute_capability": "8.6"}, (8, 6)),
        ({"compute_capability": "12.0"}, (12, 0)),
        # Of AMD.
        ({"compute_capability": "gfx90a"}, None),
        ({}, None),
    ],
)
def test_compute_capabilities(device, capability, monkeypatch):
    device = types.SimpleNamespace(**device)
    monkeypatch.setattr(sharding, "_device", lambda: device)
    assert sharding.compute_capability() == capability


def test_the_choice_is_said_once(gpu, capsys):
    """A line for each kind of rows, of all layers; none without progress."""
    task = make_task()
    lower(task, False, one_device())
    chooser = task.policy.chooser
    for batch in (PACKED, {}, PACKED):
        hidden_states(make_model(), chooser, **batch)
    assert capsys.readouterr().out.splitlines() == [
        "Attention of rows of one sequence: cudnn in 2 layers.",
        "Attention of packed rows: pallas in 2 layers.",
    ]
    with _console.silenced():
        hidden_states(make_model())
    assert capsys.readouterr().out == ""


def test_a_line_counts_layers_by_their_reason(gpu, capsys):
    """Of six layers of Gemma 3, five have a window."""
    model = make_model(
        "Gemma3", head_dim=32, sliding_window_size=16, num_layers=7,
        use_sliding_window_attention=True, image_size=None,
    )  # fmt: skip
    hidden_states(model, **PACKED)
    assert capsys.readouterr().out == (
        "Attention of packed rows: blocks in 6 layers (a sliding window), "
        "pallas in 1 layer.\n"
    )


@pytest.mark.parametrize("choice", ["blocks", "pallas"])
def test_a_choice_is_kept(gpu, choice):
    """Pallas can compute rows of one sequence, and blocks all."""
    found = calls(hidden_states(make_model(), Chooser(choice)))
    assert found == ({"pallas": LAYERS} if choice == "pallas" else {})


@pytest.mark.parametrize(
    "choice, kind, settings, batch, received",
    [
        ("cudnn", "Llama3", {}, PACKED, "packed rows"),
        ("pallas", "Llama3", {}, TREE, "shared prompts"),
        ("cudnn", "Llama3", {"dtype": "float32"}, {}, "float32"),
        ("pallas", "Mistral", WINDOWED, {}, "a sliding window"),
    ],
)
def test_what_a_choice_cannot_compute(
    gpu, choice, kind, settings, batch, received
):
    with pytest.raises(ValueError) as error:
        hidden_states(make_model(kind, **settings), Chooser(choice), **batch)
    # Keras adds the layer's arguments.
    assert (
        f"attention={choice!r} cannot compute the attention of decoder layer "
        "0. Use attention='auto', which chooses for each layer. "
        f"Received: {received}"
    ) in str(error.value)


def test_an_engine_takes_what_it_can(gpu, capsys):
    """Its rows are packed, whatever rows a task trains on; it has no line."""
    batch = {
        name: np.ones((1, LENGTH), "int32")
        for name in ("token_ids", "segment_ids", "positions")
    }
    # Of the last layer only keys and values are read.
    for choice, found in (("cudnn", {"pallas": LAYERS - 1}), ("blocks", {})):
        policy = Policy(make_model(), chooser=Chooser(choice))
        traced = jax.jit(policy.prefill).trace(batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert calls(text) == found
    assert capsys.readouterr().out == ""


def test_devices_that_have_no_kernels():
    for choice in ("cudnn", "pallas"):
        with pytest.raises(ValueError, match="needs a CUDA GPU") as error:
            make_task(attention=choice)
        assert "no CUDA GPU ('cpu')" in str(error.value)
    with pytest.raises(ValueError, match="Received: attention='flash'"):
        make_task(attention="flash")


@pytest.mark.parametrize("gpu", ["7.5"], indirect=True)
def test_gpus_that_have_no_kernels(gpu):
    with pytest.raises(ValueError, match="compute capability 7.5, below 8.0"):
        make_task(attention="cudnn")


def test_what_shares_the_choice_of_a_task():
    """Companions, value models, later stages and loaded adapters."""
    task = make_task(attention="blocks")
    assert task.policy.chooser.wanted == "blocks"
    later = kpt.DPOTask.from_task(task)
    assert later.policy.chooser.wanted == "blocks"
    other = kpt.DPOTask.from_task(task, attention="auto")
    assert other.policy.chooser.wanted == "auto"
    other = kpt.DPOTask(
        make_model(), reference=make_model(), attention="blocks"
    )
    other.compile()
    with planned(other, one_device()) as plan:
        [reference] = plan.companions
        assert reference.policy.chooser is other.policy.chooser
        assert plan.policy.chooser is other.policy.chooser
    ppo = kpt.PPOTask(make_model(), attention="blocks")
    ppo.compile(rewards=[len], value_model=make_model())
    assert ppo.value_model.policy.chooser is ppo.policy.chooser


# --- Numbers -----------------------------------------------------------------


def inputs(length, is_packed, dtype="float32", **sizes):
    arrays, segments, positions = example(length, **sizes)
    if not is_packed:
        # The second row's end is padding.
        positions = np.tile(np.arange(length, dtype="int32"), (2, 1))
        used = positions < np.asarray([[length], [length - length // 3]])
        segments, positions = used.astype("int32"), positions * used
    return [jnp.asarray(x, dtype) for x in arrays], segments, positions


@pytest.mark.parametrize(
    "kernel, length, window",
    [
        ("cudnn", 100, None),
        ("cudnn", 100, 7),
        ("pallas", 100, None),
        ("pallas", 192, None),
        ("pallas", 30, None),
    ],
)
def test_kernels_compute_the_definition_and_its_gradients(
    kernel, length, window
):
    """By JAX's interpreter, and against blocks of scores."""
    arrays, segments, positions = inputs(length, kernel == "pallas")
    used = (segments > 0)[..., None, None]
    weights = np.random.default_rng(1).normal(size=arrays[0].shape)
    weights = jnp.asarray(weights * used, "float32")

    def with_gradients(attend):
        def loss(*arrays):
            out = attend(*arrays)
            return jnp.sum(weights * out), out

        run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        (_, out), gradients = jax.jit(run)(*arrays)
        return out, gradients

    out, gradients = with_gradients(
        lambda *x: gpu_attention.attend(
            kernel, *x, segments, scale=0.3, window=window, interpret=True
        )
    )
    want = naive(*arrays, segments, positions, 0.3, window, None)
    np.testing.assert_allclose(out * used, want * used, atol=5e-6)
    _, wanted = with_gradients(
        lambda *x: attention.segment_attention(
            *x, segments, positions, scale=0.3, sliding_window=window
        )
    )
    for found, expected in zip(gradients, wanted, strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_with_kernels_learns_what_one_without_does(
    gpu, packing, monkeypatch
):
    """Losses and gradients of rows, packed and not, in bfloat16."""
    rows = random_rows(6, vocabulary=60)
    task = make_task(remat="outputs")
    used = []

    def attend(kernel, *arrays, **settings):
        used.append(kernel)
        return plain(kernel, *arrays, **settings, interpret=True)

    plain = gpu_attention.attend
    monkeypatch.setattr(gpu_attention, "attend", attend)
    batches = task.make_batches(
        task.prepare(rows)[0], 3, packing=packing, shuffle=False
    )
    batch = next(iter(batches.get_jax_iterator()))

    weights = task.make_step().weights
    state = {
        "trainable": [v.value for v in weights.trainable],
        "frozen": [v.value for v in weights.frozen],
        **counters(1, 0),
    }

    def run(choice):
        task.policy.chooser = Chooser(choice)
        return jax.jit(task.loss_and_gradients)(state, batch)

    wanted = run("blocks")
    assert not used
    found = run("auto")
    assert set(used) == {"pallas" if packing else "cudnn"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())
