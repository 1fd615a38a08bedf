"""Plans: shapes without values, counts of programs, steps for TPUs."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import keras_posttrain as kpt
from keras_posttrain.distribution import hlo, programs, topology
from keras_posttrain.distribution.collective_bytes import (
    Weight,
    ideal_bytes,
    received,
)
from keras_posttrain.distribution.plan import Measurement, out_of_memory
from keras_posttrain.models import attention, grouped_matmul
from keras_posttrain.models.head import Head
from keras_posttrain.models.rematerialisation import CHOICES
from keras_posttrain.planning import depths, train_plan
from keras_posttrain.planning.advice import advise
from keras_posttrain.planning.lowering import planned
from tests.support import REFERENCE, one_layer, random_rows, weights

LLAMA = REFERENCE / "models" / "llama3"
# Of tasks that sample.
SAMPLED = {
    "rewards": [lambda completions: [0.0] * len(completions)],
    "max_completion_length": 16,
}


def shaped(preset=LLAMA, kind=kpt.SFTTask, **kwargs):
    with kpt.distribution.shapes_only():
        return kind.from_preset(
            preset, load_weights=False, sequence_length=64, **kwargs
        )


def four(chips="v5e:2x2"):
    devices = topology.get(chips).devices
    return kpt.distribution.fsdp(devices=list(devices))


def on_four(function, *shapes, chips="v5e:2x2"):
    """A function of arrays split over four TPU chips, compiled."""
    mesh = four(chips).device_mesh.backend_mesh
    given = [
        jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, P(*axes))
        )
        for shape, dtype, axes in shapes
    ]
    lowered = jax.jit(functools.partial(function, mesh)).lower(*given)
    return programs.compile(lowered, topology.get(chips))


# --- Shapes only -------------------------------------------------------------


def test_a_model_of_shapes_has_no_values(tmp_path):
    """Eight billion parameters: values would take 16 GB."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    config = json.loads((LLAMA / "config.json").read_text()) | sizes
    config.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = shaped(tmp_path, dtype="bfloat16")
    task.compile(keras.optimizers.AdamW(1e-5))
    # Leaving a stateless scope, Keras initializes what it has kept.
    with task.using_weights([], []):
        pass
    variables = task.variables + task.optimizer.variables
    large = [v for v in variables if np.prod(v.shape) > 1]
    assert len(large) == 4 * 291
    assert all(isinstance(v._value, jax.ShapeDtypeStruct) for v in large)
    trained = task.trainable_variables
    assert sum(np.prod(v.shape) for v in trained) == 8030261248


def test_optax_keeps_shapes():
    shapes = []
    real = kpt.SFTTask.from_preset(LLAMA, sequence_length=64)
    for task in (shaped(), real):
        task.compile(optax.adamw(1e-3))
        shapes.append([tuple(v.shape) for v in task.optimizer.variables])
    assert shapes[0] == shapes[1] and len(shapes[0]) > 40


# --- Counts ------------------------------------------------------------------


def test_a_loop_counts_as_often_as_it_runs():
    """Six rounds of (8, 128) @ (128, 128) are 6 * 2 * 8 * 128 * 128.

    In each round the kernel, of 128 * 128 * 4 = 65536 bytes, is gathered
    from four devices: each receives 3/4 of it.
    """

    def inside(mesh, x, w):
        def rounds(x, w):
            def body(i, x):
                # Other in each round, or it would be gathered once.
                whole = jax.lax.all_gather(w * i, "batch", tiled=True)
                return jnp.tanh(x @ whole)

            return jax.lax.fori_loop(0, 6, body, x)

        return jax.shard_map(
            rounds, mesh=mesh, in_specs=(P("batch"), P("batch")),
            out_specs=P("batch"), check_vma=False,
        )(x, w)  # fmt: skip

    compiled = on_four(
        inside,
        ((32, 128), "float32", ("batch",)),
        ((128, 128), "float32", ("batch",)),
    )
    counts = hlo.count(compiled.text, 4)
    assert counts.unknown_loops == 0
    assert counts.flops == 6 * 2 * 8 * 128 * 128
    assert counts.flops_once == 2 * 8 * 128 * 128
    (gather,) = counts.collectives
    assert gather == hlo.Collective("all-gather", 6, 6 * 65536 * 3 / 4)


def test_a_loop_that_data_end():
    def function(mesh, x, n):
        return jax.lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ x), x)

    compiled = on_four(
        function, ((128, 128), "float32", ()), ((), "int32", ())
    )
    counts = hlo.count(compiled.text, 4, data_dependent_trips=10)
    assert counts.unknown_loops == 1
    assert counts.flops == 10 * 2 * 128**3


def test_parts_of_a_program():
    """Each scope's operations, and of an array its slices that are read.

    In each of 64 rounds a device multiplies its rows by one of 64 kernels of
    1024 * 1024 numbers of two bytes; after them numbers are gathered.
    """

    def function(mesh, x, kernels, small):
        def round(i, x):
            kernel = jax.lax.dynamic_index_in_dim(kernels, i, keepdims=False)
            return jnp.tanh(x @ kernel)

        with jax.named_scope("rounds_1"):
            x = jax.lax.fori_loop(0, 64, round, x)
        with jax.named_scope("last"):
            return x @ small

    compiled = on_four(
        function,
        ((256, 1024), "bfloat16", ("batch",)),
        ((64, 1024, 1024), "bfloat16", ()),
        ((1024, 128), "bfloat16", ("batch",)),
    )
    counts = hlo.count(compiled.text, 4)
    parts = counts.parts
    rounds = parts["rounds/dot_general"]
    assert rounds.count == 64 and rounds.flops == 64 * 2 * 64 * 1024 * 1024
    read = 64 * 2 * 1024 * 1024
    assert read <= rounds.traffic < 1.2 * read
    assert parts["last/dot_general"].flops == 2 * 64 * 1024 * 128
    assert sum(part.flops for part in parts.values()) == counts.flops
    waited = sum(x.received + x.overlapped for x in parts.values())
    assert waited == sum(x.num_bytes for x in counts.collectives) > 0


def test_what_other_cores_of_a_chip_do_is_read():
    """A v5p adds up pairs on its sparse cores, in parallel to the rest."""

    def function(mesh, x, places):
        sums = jnp.zeros(2).at[places].add(jnp.diag(x @ x))
        return sums[0] * sums[1]

    compiled = on_four(
        function,
        ((128, 128), "float32", ()),
        ((128,), "int32", ()),
        chips="v5p:2x2x1",
    )
    text = compiled.text
    assert '}, execution_thread="sparsecore"' in text
    assert hlo.count(text, 4).flops == 2 * 128**3


def test_products_are_counted_as_by_xla():
    """Without loops XLA's own analysis is right, batches and heads too."""

    def function(mesh, q, k, w):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd,hde->bqe", scores, k, w)

    compiled = on_four(
        function,
        ((8, 64, 4, 32), "bfloat16", ("batch",)),
        ((8, 96, 4, 32), "bfloat16", ("batch",)),
        ((4, 32, 128), "bfloat16", ()),
    )
    counts = hlo.count(compiled.text, 4)
    # Two rows a device; XLA may order the second einsum as it likes.
    first = 2 * 2 * 4 * 64 * 96 * 32
    assert counts.flops == counts.flops_once >= 2 * first
    assert counts.flops == pytest.approx(compiled.flops, rel=0.02)


def test_attention_kernels_are_counted():
    """One row of 1024 tokens a chip, 8 heads of 128: 2 x 2 blocks of 512.

    Forward two products, backward three and four, each of 2 * 8 * 1024 *
    1024 * 128, of whose blocks three in four are not masked.
    """

    def function(mesh, q, k, ids):
        positions = jnp.broadcast_to(jnp.arange(1024), ids.shape)
        return attention.segment_attention(
            q, k, k, ids, positions, scale=0.1
        ).astype("float32").sum()  # fmt: skip

    def gradients(mesh, q, k, ids):
        return jax.grad(functools.partial(function, mesh), (0, 1))(q, k, ids)

    # The kernel takes bfloat16 at no other precision.
    with four().scope(), jax.default_matmul_precision("default"):
        compiled = on_four(
            gradients,
            ((4, 1024, 8, 128), "bfloat16", ("batch",)),
            ((4, 1024, 8, 128), "bfloat16", ("batch",)),
            ((4, 1024), "int32", ("batch",)),
        )
    counts = hlo.count(compiled.text, 4)
    product = 2 * 8 * 1024 * 1024 * 128
    assert counts.flops == (2 + 3 + 4) * product * 3 / 4


def test_products_of_experts_are_counted():
    """4096 choices a chip, each for one of 8 experts.

    Forward one product, backward two, each of 2 * 4096 * 256 * 384.
    """

    def function(mesh, x, kernel, choices):
        def local(x, kernel, choices):
            slots = grouped_matmul.sort_by_expert(choices, 8)
            rows = grouped_matmul.dispatch(x, slots)
            out = grouped_matmul.grouped_matmul(rows, kernel, slots)
            return out.astype("float32").sum()[None] ** 2

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("batch"), P(), P("batch")),
            out_specs=P("batch"),
            check_vma=False,
        )(x, kernel, choices).sum()

    def gradients(mesh, *arrays):
        return jax.grad(functools.partial(function, mesh), (0, 1))(*arrays)

    with four().scope(), jax.default_matmul_precision("default"):
        compiled = on_four(
            gradients,
            ((8192, 256), "bfloat16", ("batch",)),
            ((8, 256, 384), "bfloat16", ()),
            ((8192, 2), "int32", ("batch",)),
        )
    counts = hlo.count(compiled.text, 4)
    assert counts.flops == 3 * 2 * 4096 * 256 * 384


def test_sums_over_devices():
    """A reduced (64, 64) of float32 is 16384 bytes: 3/4 of it twice."""

    def function(mesh, x):
        return jax.lax.with_sharding_constraint(
            x.T @ x, NamedSharding(mesh, P())
        )

    compiled = on_four(function, ((32, 64), "float32", ("batch",)))
    counts = hlo.count(compiled.text, 4)
    assert sum(c.num_bytes for c in counts.collectives) == 2 * 16384 * 3 / 4


@pytest.mark.parametrize(
    "groups, first",
    [
        ("replica_groups={{0,1,2},{3,4,5}}, x", [0, 1, 2]),
        ("replica_groups=[2,4]<=[8], x", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [0, 4]),
        ("replica_groups=mesh['a'=1,'b'=16,'c'=2] {'b','c'}, x", range(32)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", [0, 4]),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) "
            "{'a'}, x",
            [0, 1, 2, 3],
        ),
        ("replica_groups={}, x", range(8)),
        ("no groups", range(8)),
    ],
)
def test_groups(groups, first):
    assert hlo._group(groups, 8).tolist() == list(first)


def test_ideal_bytes():
    """A matrix of 1000 bytes over 4 x 2 devices, of which 500 are gathered.

    Each device receives 375 of them forward, backward and, of the gradient,
    scattered: 1125 in each of 3 micro-batches. A norm of 16 bytes adds up
    once, 2 * 12. Activations of 100 bytes add up 4 times a layer of 5, each
    time 2 * 50.
    """
    matrix = Weight((20, 25), 2, ("batch", "model"), True, "batch")
    norm = Weight((8,), 2, (None,), True, "batch")
    frozen = Weight((20, 25), 2, ("batch", None), False, "batch")
    found = ideal_bytes(
        [matrix, norm], {"batch": 4, "model": 2},
        micro_batches=3, num_layers=5, activation_bytes=100,
    )  # fmt: skip
    assert not any(found[1].values())
    assert found[0] == {
        "weight all-gather": 3 * 2 * 375,
        "gradient reduce-scatter": 3 * 375,
        "gradient all-reduce": 24,
        "activation all-reduce": 3 * 4 * 5 * 100,
        "expert all-to-all": 0,
        "key and value exchange": 0,
    }
    found = ideal_bytes(
        [frozen], {"batch": 4},
        micro_batches=1, num_layers=5, activation_bytes=100, passes=3,
    )  # fmt: skip
    found, _ = found
    assert sum(found.values()) == found["weight all-gather"] == 3 * 750
    # Experts over 2 of 4 devices: 500 bytes on each pair, half of them on
    # each device, are gathered from one other device.
    experts = Weight((20, 25), 2, ("expert", "replica"), True, "replica")
    found = ideal_bytes(
        [experts], {"batch": 4, "replica": 2, "expert": 2},
        micro_batches=3, num_layers=5, activation_bytes=100, expert_bytes=70,
    )  # fmt: skip
    assert {x: n for x, n in found[0].items() if n} == {
        "weight all-gather": 3 * 2 * 250,
        "gradient reduce-scatter": 3 * 250,
        "expert all-to-all": 3 * 70,
    }


def test_ideal_bytes_of_slices():
    """A matrix of 1000 bytes in 2 slices of 4 devices.

    Within a slice 750 are gathered twice and 750 scattered. A device's sum
    over rows, 250 bytes, is added up with that of the other slice once:
    2 * 250 * 1/2. In 3 micro-batches of bfloat16 it is of float32, 500 bytes.

    FSDP over all 8 devices gathers and scatters 875: of each device the 125
    of one device of the other slice, and 750 of its own slice's.
    """
    sizes = {"slice": 2, "batch": 4}
    matrix = Weight((20, 25), 2, ("batch", None), True, "batch")
    for count, summed in ((1, 250), (3, 500)):
        own, others = ideal_bytes(
            [matrix], sizes, slices={"slice": 2}, micro_batches=count,
            num_layers=5, activation_bytes=100,
        )  # fmt: skip
        assert own["weight all-gather"] == count * 1500
        assert own["gradient reduce-scatter"] == count * 750
        assert sum(own.values()) == count * 2250
        assert others["gradient all-reduce"] == sum(others.values()) == summed
    own, others = ideal_bytes(
        [matrix], {"batch": 8}, slices={"batch": 2}, micro_batches=1,
        num_layers=5, activation_bytes=100,
    )  # fmt: skip
    assert sum(own.values()) == 3 * 750 and sum(others.values()) == 3 * 125


# A float32 array of (1024, 1024) is 4 MiB, of which each of 8 devices has
# 512 KiB, and each of 4 in a slice 1 MiB. What a device receives within its
# slice, and of the other one, in KiB:
SENT = {
    # Half a MiB of the device at its place, and 3/4 of all 4 within.
    "gather": (("slice", "batch"), (), 3072, 512),
    # Its own 2 MiB are those of its slice; the other 2 are half of each
    # device's.
    "gather over slices": (("slice",), (), 0, 2048),
    # Within a slice alone.
    "gather in a slice": (("batch",), (), 3072, 0),
}


@pytest.mark.parametrize("case", SENT)
@pytest.mark.parametrize("hardware", ["v5e:2x2 x 2", "cpu:4 x 2"])
def test_what_crosses_slices(case, hardware):
    before, after, within, across = SENT[case]
    hardware = topology.get(hardware)
    strategy = functools.partial(kpt.distribution.hybrid, slices=2)
    mesh = strategy(devices=hardware.devices).device_mesh.backend_mesh

    def function(x):
        return jax.lax.with_sharding_constraint(
            2.0 * x, NamedSharding(mesh, P(*after))
        )

    layout = NamedSharding(mesh, P(before))
    x = jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=layout)
    program = programs.compile(jax.jit(function).lower(x), hardware)
    counts = hlo.count(program.text, 8, num_slices=2)
    found = {"ici": 0.0, "dcn": 0.0}
    for collective in counts.collectives:
        found[collective.network] += collective.num_bytes / 1024
    assert found == {"ici": within, "dcn": across}


@pytest.mark.parametrize(
    "kind, moved",
    [
        # Of 80 bytes, 20 on each of 4 devices in 2 slices.
        ("all-gather", (40, 20)),
        ("reduce-scatter", (40, 20)),
        ("all-reduce", (80, 40)),
        ("all-to-all", (20, 40)),
        ("collective-permute", (0, 80)),
    ],
)
def test_received_in_two_stages(kind, moved):
    assert received(kind, 80, 4, 2) == moved


def test_pairs_that_cross_slices():
    """Of a ring of four devices in two slices, two of four pairs cross."""
    text = """HloModule m

ENTRY main (x: f32[25]) -> f32[25] {
  x = f32[25] parameter(0)
  ROOT y = f32[25] collective-permute(x), channel_id=1, \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}
""".replace("\\\n", "")
    text = text.replace(" x = ", " %x = ").replace("(x),", "(%x),")
    found = hlo.count(text, 4, num_slices=2).collectives
    assert {c.network: c.num_bytes for c in found} == {"ici": 50, "dcn": 50}


# --- Plans -------------------------------------------------------------------


def test_a_plan_for_tpus():
    """A step of full fine-tuning, and one layout against another."""
    task = shaped(remat="full")
    task.compile(keras.optimizers.AdamW(1e-4))
    plan = task.plan("v5e:2x2", batch_size=8)
    assert plan.compiled_layers == (2,) and plan.num_layers == 2
    assert plan.parameters == plan.trainable_parameters == 127296
    # Float32 weights and two moments, of which norms (192 numbers) are whole.
    split = (127296 - 5 * 64) / 4 + 5 * 64
    assert plan.arguments["weights"] == 4 * split
    assert plan.arguments["optimizer"] == pytest.approx(8 * split, abs=64)
    assert plan.tokens == 8 * 64 and plan.fits and not plan.advice
    assert 0.5 < plan.model_flops / plan.flops < 1.1
    assert plan.ideal["weight all-gather"] > 0 < plan.collective_bytes
    assert plan.tokens_per_second == plan.tokens / plan.step_seconds
    assert plan.mfu / plan.hfu == pytest.approx(plan.model_flops / plan.flops)
    parts = {part.name: part for part in plan.parts}
    seconds = [part.seconds for part in plan.parts]
    assert seconds == sorted(seconds, reverse=True)
    assert plan.serial_seconds == pytest.approx(sum(seconds))
    # Of two layers, by 128 tokens a chip.
    width = 2 * 2 * 128 * 64 * 64
    for name in ("forward query", "recomputed query"):
        assert parts[f"{name}/dot_general"].flops == width
    assert parts["backward query/dot_general"].flops == 2 * width
    assert {p.bound for p in plan.parts} >= {"memory", "network"}
    share = plan.seconds["compute"] / plan.step_seconds
    assert plan.hfu == pytest.approx(share) and plan.hfu <= 1
    text = str(plan)
    for word in ("127,296", "all-gather", "ideal", "fits", "MFU", "Costliest"):
        assert word in text


def test_slices_add_up_their_gradients_once():
    """In 2 slices of 4 chips, with and without micro-batches.

    Float32 gradients are added up over slices: a chip has a quarter of 126,976
    numbers, and of norms all 320. It receives twice a half of them from the
    other slice, whose network is much slower.
    """
    task = shaped()
    task.compile(keras.optimizers.AdamW(1e-4))
    book = 2 * 4 * (126976 / 4 + 320) / 2
    for settings in (
        {"batch_size": 16},
        {"batch_size": 32, "micro_batch_size": 16},
    ):
        plan = task.plan("v5e:2x2 x 2", **settings)
        assert plan.ideal_dcn_bytes == plan.ideal_dcn["gradient all-reduce"]
        assert plan.ideal_dcn_bytes == book
        assert book <= plan.dcn_bytes <= 1.1 * book
        assert plan.collective_bytes <= 1.1 * plan.ideal_bytes
        seconds = plan.seconds["data-center network"]
        assert seconds == plan.dcn_bytes / (25e9 / 8)
    text = str(plan)
    assert "2 along 'slice', 4 along 'batch'" in text
    for words in ("within a slice", "from other slices", "data-center"):
        assert words in text


def test_a_plan_changes_nothing():
    task = kpt.SFTTask.from_preset(
        LLAMA, sequence_length=64, lora=kpt.LoRA(rank=2)
    )
    task.compile(keras.optimizers.SGD(0.1))
    optimizer, before = task.optimizer, weights(task)
    layers = task.causal_lm.backbone.transformer_layers
    plan = task.plan("cpu:1", batch_size=4, remat="full", micro_batch_size=2)
    assert plan.settings["remat"] == "full"
    assert plan.trainable_parameters == sum(x.size for x in before.values())
    assert task.optimizer is optimizer and task.policy.remat == "none"
    assert task.micro_batch_size is None
    assert task.causal_lm.backbone.transformer_layers is layers
    assert keras.distribution.distribution() is None
    assert all(v._layout is None for v in task.variables)
    assert all((weights(task)[k] == v).all() for k, v in before.items())
    logs = task.fit(random_rows(4), batch_size=4, verbose=0).history
    assert np.isfinite(logs["loss"]).all()
    # A line through two depths is no proof where memory must be packed close.
    numbers = plan.measured.numbers
    loose = {"set aside": numbers["temporaries"] + 2 * plan.needed}
    plan = dataclasses.replace(plan, measured=Measurement(numbers | loose))
    assert plan.set_aside == 3 * plan.needed
    full = dataclasses.replace(plan, capacity=plan.needed / 0.95)
    line = dataclasses.replace(full, compiled_layers=(1, 2))
    roomy = dataclasses.replace(line, capacity=plan.set_aside / 0.9)
    assert advise(full, task.policy) == advise(roomy, task.policy) == ()
    assert "layers compiled" not in str(full) and "1 and 2 of 2" in str(line)
    (advice,) = advise(line, task.policy)
    assert advice.startswith("exact=True") and "95%" in advice
    assert "285% when packed loosely" in advice
    lacking = dataclasses.replace(line, capacity=plan.needed / 1.05)
    assert advise(lacking, task.policy)[-1].startswith("exact=True")
    lacking = dataclasses.replace(line, capacity=plan.needed / 1.2)
    assert "exact" not in str(advise(lacking, task.policy))


def on_first_device(variables):
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("lora", [None, kpt.LoRA(rank=4)])
def test_arguments_are_what_a_run_allocates(lora):
    settings = {"lora": lora, "dtype": "bfloat16"}
    planned = shaped(one_layer(LLAMA), **settings)
    planned.compile(keras.optimizers.AdamW(1e-3))
    plan = planned.plan("cpu:8", batch_size=8)
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    task = kpt.SFTTask.from_preset(
        one_layer(LLAMA), sequence_length=64, **settings
    )
    task.compile(keras.optimizers.AdamW(1e-3))
    task.fit(random_rows(8), batch_size=8, verbose=0)
    for name, variables in (
        ("weights", task.variables),
        ("optimizer", task.optimizer.variables),
    ):
        assert plan.arguments[name] == on_first_device(variables), name


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dpo", marks=pytest.mark.full),
        "dpo lora",
        pytest.param("distill", marks=pytest.mark.full),
        pytest.param("ppo", marks=pytest.mark.full),
        pytest.param("grpo", marks=pytest.mark.full),
        "decode",
    ],
)
def test_other_steps(kind):
    lora = kpt.LoRA(rank=2) if "lora" in kind else None
    if "dpo" in kind:
        task = shaped(kind=kpt.DPOTask, lora=lora)
        task.compile()
        plan = task.plan("v5e:2x2", batch_size=8)
        # Both sides of a pair; a copy of all weights, or none.
        assert plan.tokens == 2 * 8 * 64
        reference = plan.arguments["reference"]
        assert reference == (0 if lora else plan.arguments["weights"])
        return
    if kind == "distill":
        task = shaped(kind=kpt.DistillTask, teacher=LLAMA)
        task.compile()
        plan = task.plan("v5e:2x2", batch_size=8)
        assert plan.tokens == 8 * 64
        assert plan.arguments["teacher"] == plan.arguments["weights"]
        # A teacher goes forward: 8/6 of the work of training.
        own = shaped()
        own.compile()
        alone = own.plan("v5e:2x2", batch_size=8)
        assert plan.model_flops == pytest.approx(alone.model_flops * 8 / 6)
        assert plan.flops == pytest.approx(alone.flops * 8 / 6, rel=0.15)
        return
    task = shaped(kind=kpt.GRPOTask if kind != "ppo" else kpt.PPOTask)
    task.compile(**SAMPLED, num_generations=4)
    if kind != "decode":
        plan = task.plan("v5e:2x2", batch_size=4)
        assert plan.tokens == 4 * 4 * 64
        return
    plan = task.plan_decode("v5e:2x2", num_slots=8, num_tokens=128)
    # Two layers of keys and values, 2 heads of 16, for two slots a chip.
    assert plan.arguments["cache"] == 2 * 2 * 2 * 16 * 4 * 2 * 128
    assert plan.tokens == 8 * 32 and plan.fits


def test_codes_are_gathered_where_they_are_read(monkeypatch):
    """Gathered ahead, codes are copied: a step takes twice the memory."""
    found, compile_ = [], programs.compile

    def compiled(*args):
        found.append(compile_(*args))
        return found[-1]

    monkeypatch.setattr(programs, "compile", compiled)
    kind = kpt.Quantization("int4", group_size=16)
    task = shaped(lora=kpt.LoRA(rank=2), quantize=kind, dtype="bfloat16")
    task.compile()
    task.plan("v5e:2x2", batch_size=8)
    text = found[-1].text
    assert "all-gather" in text and "async-collective" not in text


@pytest.mark.parametrize(
    "kind",
    [kpt.GRPOTask, pytest.param(kpt.DPOTask, marks=pytest.mark.full)],
)
def test_rows_as_fit_lays_them_out(kind):
    """Eight prompts of 24 tokens, each with two completions of 40."""
    task = shaped(kind=kind)
    settings = {"batch_size": 8, "prompt_length": 24}
    if kind is kpt.GRPOTask:
        sampled = SAMPLED | {"max_completion_length": 40}
        task.compile(**sampled, num_generations=2)
    else:
        task.compile(keras.optimizers.AdamW(1e-4))
    apart = task.plan("v5e:2x2", **settings)
    shared = task.plan("v5e:2x2", packing=128, share_prefix=True, **settings)
    assert apart.settings["rows x tokens of a batch"] == "16 x 64"
    assert shared.settings["rows x tokens of a batch"] == "8 x 128"
    assert (apart.tokens, shared.tokens) == (16 * 64, 8 * (24 + 2 * 40))
    # The model's 2 layers of 4 heads of 16 are 12 * 2 * 64 operations for
    # each pair of a token and one before or after it.
    squares = 16 * 64**2, 8 * (2 * 64**2 - 24**2)
    each = 12 * 2 * 64
    if kind is kpt.DPOTask:
        each *= 4 / 3  # the reference's pass forward
    products = [
        plan.model_flops - each * pairs
        for plan, pairs in zip((apart, shared), squares)
    ]
    assert products[0] / products[1] == pytest.approx(1024 / 832)
    assert not getattr(task, "share_prefix", False)


def test_what_does_not_fit_is_a_plan():
    """The compiler's own complaint about a product of 34 GB."""

    def too_large(mesh, x):
        return jax.lax.optimization_barrier(x.T @ x).sum()

    def compiled(depth):
        return on_four(too_large, ((128, 131072), "bfloat16", ()))

    found, refusal = depths.measured(compiled, 2, (2,))
    assert found is None
    assert "RESOURCE_EXHAUSTED" in refusal["refusal"]
    assert refusal["refused_bytes"] == pytest.approx(2 * 131072**2, rel=0.05)
    assert out_of_memory(ValueError("another")) is None


def test_a_plan_that_does_not_fit_says_what_would_help(monkeypatch):
    chip = topology.CHIPS["v5e"]
    small = dataclasses.replace(chip, memory=2.0**19)
    monkeypatch.setitem(topology.CHIPS, "v5e", small)
    task = shaped()
    task.compile(keras.optimizers.AdamW(1e-4))
    plan = task.plan("v5e:1x1", batch_size=8, exact=True)
    assert not plan.fits and plan.needed > 2**19
    text = str(plan)
    for word in ("does not fit", "remat='full'", "Twice the chips", "lora="):
        assert word in text


def test_auto_keeps_what_the_free_memory_holds(monkeypatch):
    """Chips with room for everything, and for attention's outputs alone."""
    # The default chunk of the head would follow the memory.
    task = shaped(chunk_size=64)
    task.compile(keras.optimizers.AdamW(1e-4))
    plan = functools.partial(task.plan, "v5e:1x1", batch_size=8, exact=True)
    found = plan(remat="auto")
    assert found.settings["remat"] == "none" and found.fits
    kept = {k: v for k, (v, _) in found.kept_by_remat.items()}
    again = [v for _, v in found.kept_by_remat.values()]
    assert tuple(kept) == CHOICES
    assert sorted(kept.values()) == list(kept.values())
    assert sorted(again, reverse=True) == again
    assert "remat='selective'" in str(found)
    least = plan(remat="full")
    assert least.flops > found.flops
    memory = least.set_aside + (kept["outputs"] + kept["selective"]) / 2
    chip = dataclasses.replace(topology.CHIPS["v5e"], memory=memory)
    monkeypatch.setitem(topology.CHIPS, "v5e", chip)
    found = plan(remat="auto")
    assert found.settings["remat"] == "outputs" and found.fits


@pytest.mark.parametrize(
    "chips, size", [("v5e:2x2", 1024), ("v6e:2x2", 1920), ("v5p:2x2x1", 2048)]
)
def test_the_heads_chunk_follows_the_memory(chips, size, eight_devices):
    """A v5e has 15.75 GiB, of which logits take a 32nd: 504 MiB hold 1,030
    tokens of 128,256 float32 logits, 8 times 128 and a few."""
    keras.distribution.set_distribution(four(chips))
    head = Head(transposed=True)
    assert head.chunk(128_256, 10**6) == size
    assert head.chunk(512, 10**6) == 2048
    assert head.chunk(10**8, 10**6) == 128


def test_a_plan_for_a_cpu_has_temporaries():
    """XLA's compiler for CPUs reports the arguments as its peak."""
    task = shaped()
    task.compile(keras.optimizers.AdamW(1e-4))
    numbers = task.plan("cpu:1", batch_size=8, exact=True).measured.numbers
    # At least the float32 gradients of all weights.
    assert numbers["temporaries"] > 4 * 127_296


def test_search_ranks():
    task = shaped()
    task.compile(keras.optimizers.AdamW(1e-4))
    found = kpt.distribution.search(
        task,
        "v5e:2x2",
        strategies=[
            kpt.distribution.fsdp,
            functools.partial(kpt.distribution.fsdp_tensor_parallel, model=3),
        ],
        remats=("full",),
        batch_size=8,
    )
    assert len(found) == 1 and len(found.refused) == 1
    assert "model=3" in str(found) and "tokens/s" in str(found)


def with_sizes(path, **sizes):
    """A directory of a tiny Llama of other sizes."""
    path.mkdir(exist_ok=True)
    config = json.loads((LLAMA / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | sizes))
    return path


@pytest.mark.parametrize("kind", ["copy", "reference", "teacher"])
def test_fewer_layers_of_what_a_step_compares_with(tmp_path, kind):
    """Layers left out of a companion model have no variables in it."""
    student = with_sizes(tmp_path / "student", num_hidden_layers=3)
    other = with_sizes(tmp_path / "other", num_hidden_layers=5)
    if kind == "teacher":
        task = shaped(student, kpt.DistillTask, teacher=other)
    else:
        reference = None if kind == "copy" else other
        task = shaped(student, kpt.DPOTask, reference=reference)
    task.compile(keras.optimizers.SGD(0.1))
    with planned(task, four()) as every:
        few = every.with_layers(1, 2)
        few.lower(few.task.example_batch(4))
        (companion,) = few.companions
        variables = companion.variables
    # Nine a layer, an embedding, its norm and a head.
    assert len(variables) == (1 if kind == "copy" else 2) * 9 + 3
    assert len(few.step.weights.trainable) == 1 * 9 + 3
    assert len(task.trainable_variables) == 3 * 9 + 3


@pytest.mark.full
def test_a_line_through_a_teachers_depths(tmp_path):
    """Three layers and the teacher's five, by one and two of each."""
    student = with_sizes(tmp_path / "student", num_hidden_layers=3)
    other = with_sizes(tmp_path / "other", num_hidden_layers=5)
    task = shaped(student, kpt.DistillTask, teacher=other)
    task.compile(keras.optimizers.AdamW(1e-4))
    line = task.plan("v5e:2x2", batch_size=8)
    every = task.plan("v5e:2x2", batch_size=8, exact=True)
    assert line.compiled_layers == (1, 2) and every.compiled_layers == (3,)
    for name in ("flops", "collective_bytes"):
        a, b = getattr(line, name), getattr(every, name)
        assert a == pytest.approx(b, rel=0.02), name
    assert line.arguments == every.arguments
    # All of both models' work, and none that no model asks for.
    assert 0.8 < every.model_flops / every.flops < 1


@pytest.mark.parametrize(
    "strategy",
    [
        kpt.distribution.fsdp,
        kpt.distribution.tensor_parallel,
        functools.partial(kpt.distribution.fsdp_tensor_parallel, model=2),
    ],
)
def test_a_head_that_is_split_takes_more_tokens_at_once(tmp_path, strategy):
    """Of these words a chip's chunk is 128 tokens, of a quarter of them 512.

    32 rows of 64 are 512 tokens a device or, on every one, 2048: four rounds
    either way, and for halves of both.
    """
    task = shaped(with_sizes(tmp_path, vocab_size=983040))
    task.compile(keras.optimizers.SGD(0.1))
    devices = topology.get("v5e:2x2").devices
    with planned(task, strategy(devices=list(devices))) as every:
        batch = every.task.example_batch(32)
        assert train_plan.head_trips(every, batch) == 4


# --- Errors ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "v5e", "v5e:3x3", "v5e:2x2x2", "v9:2x2", "cpu:0", "cpu:99", "tpu",
        "v5e:2x2 x 0", "v5e:2x2 x", "v5e:2x2 x two", "v5e:2x2x2 x 2",
        "v5e:3x3 x 2", "2 x v5e:2x2", "cpu:8 x 99",
    ],
)  # fmt: skip
def test_unknown_hardware(name):
    with pytest.raises(ValueError, match=f"Received: topology='{name}'"):
        topology.get(name)


def test_libtpu_is_named_where_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ValueError, match=r"keras_posttrain\[plan\]"):
        topology.get("v5e:2x2")


def test_what_plan_refuses():
    task = shaped()
    with pytest.raises(ValueError, match="compile"):
        task.plan("v5e:2x2")
    task.compile()
    with pytest.raises(ValueError, match="batch_size=0"):
        task.plan("v5e:2x2", batch_size=0)
    with pytest.raises(ValueError, match="remat='some'"):
        task.plan("v5e:2x2", remat="some")


def test_what_plan_refuses_of_layouts():
    task = shaped()
    task.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="SFTTask have no prompt"):
        task.plan("v5e:2x2", share_prefix=True)
    with pytest.raises(ValueError, match="`packing` must be True, False or"):
        task.plan("v5e:2x2", packing=-1)
    task = shaped(kind=kpt.DPOTask)
    task.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="room for every pair"):
        task.plan("v5e:2x2", packing=8)


def test_what_plan_refuses_of_a_distillation():
    settings = [
        ({"teacher": [LLAMA, LLAMA]}, {}, "one teacher, the largest"),
        (
            {"teacher": LLAMA},
            {"on_policy": True, "max_completion_length": 16},
            "on_policy=False",
        ),
        (
            {"teacher": LLAMA},
            {"teacher_cache": "cache", "top_k": 4},
            "an SFTTask of the student",
        ),
    ]
    for given, compiled, match in settings:
        task = shaped(kind=kpt.DistillTask, **given)
        task.compile(keras.optimizers.SGD(0.1), **compiled)
        with pytest.raises(ValueError, match=match):
            task.plan("v5e:2x2")


def test_what_plan_refuses_of_ppo():
    other = kpt.SFTTask.from_preset(LLAMA, load_weights=False).causal_lm
    task = kpt.PPOTask.from_preset(
        LLAMA, load_weights=False, sequence_length=64
    )
    task.compile(**SAMPLED, value_model=other)
    with pytest.raises(ValueError, match="Plan value_model=None"):
        task.plan("v5e:2x2")


@pytest.mark.full
def test_a_line_through_two_depths(tmp_path):
    """Eight layers by one and two, and by all of them: within 2 %."""
    config = json.loads((LLAMA / "config.json").read_text())
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "vocab_size": 2048}
    sizes |= {"intermediate_size": 1536, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 2048}
    config.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    task = shaped(tmp_path, dtype="bfloat16", remat="full")
    task.compile(keras.optimizers.AdamW(1e-4))
    settings = {"batch_size": 16, "sequence_length": 512}
    line = task.plan("v5e:2x2", **settings)
    every = task.plan("v5e:2x2", exact=True, **settings)
    assert line.compiled_layers == (1, 2) and every.compiled_layers == (8,)
    for name in ("flops", "needed", "collective_bytes"):
        a, b = getattr(line, name), getattr(every, name)
        assert a == pytest.approx(b, rel=0.02), name
