"""Steps compiled for TPUs: bytes sent, compared with the ideal."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import keras_posttrain as kpt
from keras_posttrain.distribution import programs, topology
from keras_posttrain.models import sharding
from keras_posttrain.planning.lowering import planned
from keras_posttrain.training import step as steps

pytest.importorskip("libtpu")

# Wide enough that weights weigh as much against tokens as in real models.
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = functools.partial(kpt.distribution.fsdp_tensor_parallel, model=2)
MODEL_ALONE = functools.partial(kpt.distribution.tensor_parallel, model=8)


def shaped(folder, sizes, length, lora=None, remat="full", **settings):
    (folder / "config.json").write_text(json.dumps(SIZES | sizes))
    with kpt.distribution.shapes_only():
        return kpt.SFTTask.from_preset(
            str(folder),
            load_weights=False,
            dtype="bfloat16",
            sequence_length=length,
            remat=remat,
            lora=lora,
            **settings,
        )


@pytest.mark.parametrize(
    "chips, strategy, layers, lora, micro",
    [
        ("v5e:2x4", BOTH, 2, None, None),
        # On a square grid XLA makes an all-reduce of a reduce-scatter.
        pytest.param(
            "v5e:4x4",
            kpt.distribution.fsdp,
            2,
            None,
            None,
            marks=pytest.mark.full,
        ),
        # Over 64 chips, and along three axes of the network, it would make
        # an all-reduce of a gather as well: twice the ideal's bytes.
        pytest.param(
            "v5p:4x4x4",
            kpt.distribution.fsdp,
            2,
            None,
            None,
            marks=pytest.mark.full,
        ),
        pytest.param(
            "v5e:2x2",
            kpt.distribution.fsdp,
            2,
            kpt.LoRA(rank=16),
            4,
            marks=pytest.mark.full,
        ),
        # The embedding's rows and the head's gradient are added up too, once
        # each in addition to the ideal's four times a layer: 18 for 16 here.
        pytest.param(
            "v5e:2x4", MODEL_ALONE, 4, None, None, marks=pytest.mark.full
        ),
    ],
)
def test_a_step_sends_what_it_must(
    tmp_path, chips, strategy, layers, lora, micro
):
    task = shaped(tmp_path, {"num_hidden_layers": layers}, 512, lora)
    task.compile(keras.optimizers.AdamW(1e-5))
    with jax.default_matmul_precision("default"):
        plan = task.plan(
            chips,
            strategy,
            batch_size=len(topology.get(chips).devices),
            micro_batch_size=micro,
            exact=True,
        )
    ratio = plan.collective_bytes / plan.ideal_bytes
    # Less than the ideal, as an embedding's tokens weigh less than it does.
    assert 0.5 < ratio <= 1.25, plan


@pytest.mark.full
def test_a_model_axis_alone_by_count(tmp_path):
    """What `MODEL_ALONE` above counts, of layers that are not recomputed."""
    sizes = {"num_hidden_layers": 4}
    task = shaped(tmp_path, sizes, 512, remat="none")
    task.compile(keras.optimizers.AdamW(1e-5))
    with jax.default_matmul_precision("default"):
        plan = task.plan("v5e:2x4", MODEL_ALONE, batch_size=8, exact=True)
    ratio = plan.collective_bytes / plan.ideal_bytes
    assert ratio == pytest.approx(18 / 16, abs=0.01), plan


@pytest.mark.parametrize(
    "chips, stages, gathers",
    [
        ("v5e:4x8", None, False),
        ("v5e:8x8", (8, 8), False),
        ("v5e:16x16", (16, 16), False),
        ("v5p:2x4x4", None, False),
        ("v5p:4x4x4", (16, 4), True),
        ("v5p:4x4x8", (16, 8), True),
    ],
)
def test_long_axes_are_gone_along_in_two_stages(chips, stages, gathers):
    devices = list(topology.get(chips).devices)
    distribution = kpt.distribution.fsdp(devices=devices)
    mesh = distribution.device_mesh.backend_mesh
    found = sharding.two_stages(mesh, "batch")
    if stages is None:
        assert found is None
        return
    assert tuple(found.mesh.shape.values()) == stages
    assert found.to_gather == gathers
    assert list(found.mesh.devices.flat) == list(mesh.devices.flat)
    # The inner stage is along one axis of the network.
    inner = np.array([d.coords for d in found.mesh.devices[0]])
    assert ((inner != inner[0]).any(axis=0)).sum() == 1


@pytest.mark.parametrize(
    "in_stages", [True, pytest.param(False, marks=pytest.mark.full)]
)
def test_no_chip_keeps_whole_gradients(monkeypatch, in_stages):
    """Of what 64 chips add up each keeps its part, not all until the update.

    In one go XLA adds gradients up whole there, and cuts where they are used
    next: 32 layers of Llama-3-8B would have kept 16 GiB.
    """
    if not in_stages:
        monkeypatch.setattr(sharding, "two_stages", lambda mesh, name: None)
    layers, width, tokens = 8, 8192, 2048
    hardware = topology.get("v5e:8x8")
    distribution = kpt.distribution.fsdp(devices=list(hardware.devices))

    def step(kernels, x):
        def loss(kernels):
            y = x
            for whole, kernel in zip(gathers, kernels, strict=True):
                y = jax.checkpoint(lambda w, y, f=whole: y @ f(w))(kernel, y)
            return jnp.sum(y.astype("float32") ** 2)

        gradients = jax.grad(loss)(kernels)
        norm = steps.global_norm(gradients)
        return [
            k - g * (1 / norm).astype(g.dtype)
            for k, g in zip(kernels, gradients)
        ]

    with kpt.distribution.shapes_only(), distribution.scope():
        denses = [
            keras.layers.Dense(width, use_bias=False, dtype="bfloat16")
            for _ in range(layers)
        ]
        for dense in denses:
            dense.build((None, width))
        gathers = sharding.gather([d.kernel for d in denses], "bfloat16")
        mesh = distribution.device_mesh.backend_mesh
        layouts = [sharding.layout_of(d.kernel).axes for d in denses]
    assert all("batch" in axes for axes in layouts)
    given = [
        jax.ShapeDtypeStruct(
            shape, "bfloat16", sharding=NamedSharding(mesh, P(*axes))
        )
        for shape, axes in [
            *(((width, width), axes) for axes in layouts),
            ((64 * tokens, width), ("batch",)),
        ]
    ]
    lowered = jax.jit(step).lower(given[:-1], given[-1])
    program = programs.compile(lowered, hardware)
    most = program.peak - program.arguments
    kernel, inputs = 2 * width * width, 2 * tokens * width
    assert layers * inputs < most < layers * inputs + 3 * kernel


@pytest.mark.full
def test_the_head_leaves_nothing_whole_behind(tmp_path):
    """Complete sums are freed before the layers' backward pass.

    XLA would keep the float32 sum of its kernel's gradient until the update,
    2 GiB of Llama-3-8B, and copy kernel and gradient to another layout.
    """
    width, vocabulary = 512, 65536
    sizes = {"hidden_size": width, "vocab_size": vocabulary}
    sizes |= {"intermediate_size": 8192, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    # By default a chunk has all tokens here, whose logits take most memory.
    task = shaped(tmp_path, sizes, 2048, chunk_size=128)
    task.compile(keras.optimizers.SGD(1e-5))
    hardware = topology.get("v5p:2x2x2")
    devices = list(hardware.devices)
    fsdp = kpt.distribution.fsdp(devices=devices)
    with planned(task, fsdp, remat="full") as every:
        batch = every.task.example_batch(len(devices))
        program = programs.compile(every.lower(batch), hardware)
    most = program.peak - program.arguments
    # Kernel and sum are three of these, the layers' backward pass four; with
    # the sum in addition it would be six.
    assert most < 5 * 2 * width * vocabulary
    whole = f"{width},{vocabulary}|{vocabulary},{width}"
    assert not re.findall(rf"= \w+\[(?:{whole})\]\S* copy\(", program.text)
