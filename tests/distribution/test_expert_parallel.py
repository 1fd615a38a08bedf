"""Experts over devices with rows of their own, to which tokens are sent."""

import functools

import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import keras_posttrain as kpt
from keras_posttrain.models import presets
from keras_posttrain.models.expert_parallel import (
    compute_elsewhere,
    round_size,
)
from keras_posttrain.models.experts import Expert
from keras_posttrain.models.hf.export import export
from tests.distribution import runs
from tests.distribution.test_loading import same_files
from tests.models.mixtures import SIZES
from tests.models.tiny_checkpoints import make_checkpoint
from tests.support import REFERENCE, in_ci, random_rows, weights

pytestmark = pytest.mark.usefixtures("eight_devices")
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 16, 12, 8, 2


# Devices that experts are split over, and the expert that all tokens choose.
CASES = [(2, None), (2, 3), (8, None), (8, 3)]


def example():
    """All tokens, a router and kernels with all that a family may have."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape, scale=0.3), "float32")

    kernels = {
        "expand": [normal(EXPERTS, HIDDEN, 2 * WIDTH)],
        "contract": normal(EXPERTS, WIDTH, HIDDEN),
        "scales": normal(EXPERTS),
        "biases": {
            "expand": normal(EXPERTS, 2 * WIDTH),
            "contract": normal(EXPERTS, HIDDEN),
        },
        "lora": {
            "expand": [
                (normal(EXPERTS, HIDDEN, 2), normal(EXPERTS, 2, 2 * WIDTH))
            ]
        },
    }
    x = normal(8 * TOKENS, HIDDEN)
    return x, normal(8 * TOKENS, EXPERTS), kernels


@pytest.mark.parametrize("case", in_ci((2, None), (8, 3), of=CASES), ids=str)
def test_values_and_gradients_are_those_of_one_device(case):
    """Also if all tokens choose two experts, in more rounds than two.

    Of the unused tokens, each third, nothing is computed.
    """
    shards, favourite = case
    expert = Expert(TOP_K, True, jax.nn.silu)
    x, logits, kernels = example()
    if favourite is not None:
        logits = logits.at[:, favourite - 1 : favourite + 1].add(20.0)
        sent = TOKENS * TOP_K * 2 // 3
        assert sent > 2 * round_size(TOKENS * TOP_K, shards) or shards == 2
    used = jnp.arange(len(x)) % 3 > 0
    devices = np.array(jax.devices()).reshape(-1, shards)
    mesh = jax.sharding.Mesh(devices, ("replica", "expert"))

    def local(x, logits, used, kernels):
        weights, chosen = expert.choose(logits, used)
        return compute_elsewhere(
            expert.compute, x, weights, chosen, kernels, mesh.axis_names
        )

    rows = P(mesh.axis_names)
    several = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, P("expert")),
        out_specs=rows,
        check_vma=False,
    )

    def one(x, logits, used, kernels):
        return expert(x, logits, kernels, used)

    target = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    def loss(function, x, logits, kernels):
        return jnp.sum(function(x, logits, used, kernels) * target)

    found, want = (
        jax.jit(
            jax.value_and_grad(functools.partial(loss, f), argnums=(0, 1, 2))
        )(x, logits, kernels)
        for f in (several, one)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    unused = np.asarray(found[1][0])[::3]
    assert (unused == 0).all()

    # Of an adapter alone.
    def of_adapter(function, lora):
        return loss(function, x, logits, kernels | {"lora": lora})

    found, want = (
        jax.jit(jax.grad(functools.partial(of_adapter, f)))(kernels["lora"])
        for f in (several, one)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_where_weights_are():
    """Experts over 4, the longest other axis over 2, all others over 8."""
    keras.distribution.set_distribution(runs.mesh("ep4"))
    found = {
        v.path.split("block_")[-1]: v.value.sharding.spec
        for v in runs.mixture("qwen3_moe").variables
    }
    spec = next(s for k, s in found.items() if "feedforward_output_dense" in k)
    assert spec == P("expert", None, "replica")
    spec = next(s for k, s in found.items() if "query/kernel" in k)
    assert spec == P("batch", None, None)


ROWS = random_rows(16, seed=1)


def trained(place, folder, epochs):
    """A run of a step an epoch, which goes on at the newest checkpoint."""
    keras.utils.clear_session(free_memory=False)
    keras.distribution.set_distribution(runs.mesh(place))
    lora = kpt.LoRA(rank=2, targets=["q_proj", "experts"])
    task = kpt.SFTTask(
        runs.mixture("mixtral-short"), lora=lora, sequence_length=64
    )
    task.compile(keras.optimizers.SGD(0.5, momentum=0.9))
    checkpoint = kpt.callbacks.Checkpoint(folder)
    out = task.fit(
        ROWS, batch_size=16, epochs=epochs, callbacks=[checkpoint], verbose=0
    )
    return task, out.history["loss"]


def sampled(task):
    return task.generate(
        {"prompt_ids": [5, 6, 7]},
        max_tokens=4,
        temperature=0,
        stop_token_ids=None,
        return_token_ids=True,
    )


def test_a_run_moves_and_samples(tmp_path):
    """From groups of four to groups of two, as on one device."""
    straight, losses = trained(None, tmp_path / "straight", 2)
    tokens = sampled(straight)
    for epochs, place in enumerate(("ep4", "ep2"), 1):
        task, found = trained(place, tmp_path / "moved", epochs)
        np.testing.assert_allclose(found[-1], losses[epochs - 1], rtol=1e-5)
    assert sampled(task) == tokens
    want, got = weights(straight), weights(task)
    for value, other in zip(want.values(), got.values(), strict=True):
        np.testing.assert_allclose(other, value, atol=5e-6)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(
            pytest.param(x, marks=pytest.mark.full)
            for x in ("mixtral", "qwen2_moe", "gpt_oss")
        ),
    ],
)
def test_files_are_those_of_one_device(tmp_path, family):
    """What is read from a directory, and what is written to another."""
    directory, _ = make_checkpoint(tmp_path / "model", family)
    read = {}
    for place in (None, "ep2"):
        keras.distribution.set_distribution(runs.mesh(place))
        model = presets.load_causal_lm(directory)
        read[place] = [np.asarray(v.value) for v in model.variables]
        export(model, tmp_path / str(place), max_shard_bytes=100_000)
    for x, y in zip(*read.values(), strict=True):
        assert x.tobytes() == y.tobytes()
    same_files(tmp_path / "None", tmp_path / "ep2")


def test_a_dense_model_is_refused():
    keras.distribution.set_distribution(runs.mesh("ep4"))
    with pytest.raises(ValueError, match="experts=4 for a Qwen3?Backbone"):
        kpt.SFTTask.from_preset(REFERENCE / "models/qwen2", sequence_length=64)
    keras.distribution.set_distribution(None)
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen2", sequence_length=64
    )
    task.compile("sgd")
    strategy = functools.partial(kpt.distribution.fsdp, experts=4)
    with pytest.raises(ValueError, match="experts=4 for a Qwen"):
        task.plan("cpu:8", strategy, batch_size=8)


def test_experts_that_do_not_divide_are_refused():
    settings = {**SIZES, "num_experts": 6}
    keras.distribution.set_distribution(runs.mesh("ep4"))
    with pytest.raises(ValueError, match="experts=4.*of 6 experts.*divides 6"):
        keras_hub.models.MixtralBackbone(**settings)


def test_what_a_plan_counts():
    """A device's 64 tokens choose 2 experts each, rows of 32 floats.

    Three quarters of them are elsewhere: 12288 bytes, of two layers twice in
    the forward and three times in the backward pass. In each of two rounds a
    device sends 24 rows to each of three others, where 16 are needed.
    """
    task = kpt.SFTTask(runs.mixture("qwen3_moe"), sequence_length=64)
    task.compile("sgd")
    plan = task.plan(
        "cpu:8",
        functools.partial(kpt.distribution.fsdp, experts=4),
        batch_size=8,
    )
    assert "experts over 4" in str(plan)
    assert plan.ideal["expert all-to-all"] == 2 * 5 * 12288
    [sent] = [c for c in plan.collectives if c.kind == "all-to-all"]
    # Each time rows, or a number for each: weights and experts forward,
    # these and the weights' gradients backward.
    rows = 2 * 5 * 2 * 3 * 24
    # Embedded tokens and their gradients, and the gradient of the head's
    # kernel, of which seven eighths are of other devices.
    others = (2 * 64 + 512) * 32 * 7 / 8
    assert sent.num_bytes == 4 * (rows * 32 + rows + others)
