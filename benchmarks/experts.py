"""Mixtures of experts: steps on this machine, and operations by the compiler.

    python benchmarks/experts.py

A compiled training step of a small mixture on CPU, by this library and by
KerasHub's own `CausalLM` under Keras's `train_on_batch`, in turns and in one
process. Then the
operations that the compiler counts for the experts of one layer of
Qwen3-30B-A3B, forward and backward, over those that the chosen experts need:
for this CPU, and for a TPU v5e that need not be present. The table is written
to `results/experts.md` and the figures to a `.json` file of that name. It
fails if the losses differ.
"""

import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import figures
import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

import keras_posttrain as kpt
from keras_posttrain.distribution import hlo, programs, topology
from keras_posttrain.models.experts import Expert, choose_experts
from keras_posttrain.models.grouped_matmul import block_size, sort_by_expert

MODEL = dict(
    vocabulary_size=4096,
    num_layers=4,
    num_query_heads=8,
    num_key_value_heads=4,
    hidden_dim=256,
    head_dim=32,
    intermediate_dim=512,
    moe_intermediate_dim=128,
    # For each that a token chooses 16, as in Qwen3-30B-A3B.
    num_experts=64,
    top_k=4,
    norm_top_k_prob=True,
    # KerasHub adds the router's loss to the loss that is compared.
    router_aux_loss_coefficient=0.0,
)
ROWS, LENGTH = 4, 256
# The experts of a layer of Qwen3-30B-A3B, and tokens of a device.
LAYER = dict(tokens=4096, hidden=2048, width=768, experts=128, top_k=8)
# Multiples of the operations of a forward pass: with the gradients of the
# inputs, as under LoRA, and with those of the kernels too.
PASSES = {"forward": 1, "forward and backward, frozen": 2, "all trained": 3}


def make_model():
    keras.utils.set_random_seed(0)
    keras.utils.clear_session(free_memory=False)
    backbone = keras_hub.models.Qwen3MoeBackbone(**MODEL)
    return keras_hub.models.Qwen3MoeCausalLM(backbone, preprocessor=None)


def make_ours(ids):
    """Returns a function that takes a step and returns its loss."""
    task = kpt.SFTTask(make_model(), sequence_length=LENGTH)
    task.compile(keras.optimizers.AdamW(1e-4), max_grad_norm=None)
    values = {
        "trainable": task.trainable_variables,
        "frozen": task.non_trainable_variables,
        "optimizer": task.optimizer.variables,
        "metrics": task.metrics_variables,
    }
    state = {k: [v.value for v in x] for k, x in values.items()}
    state |= {"step": np.int32(1), "seed": np.int32(0)}
    columns = np.arange(LENGTH, dtype="int32")
    batch = {
        "token_ids": ids,
        "segment_ids": np.ones_like(ids),
        "positions": np.tile(columns, (ROWS, 1)),
        # Nothing predicts the first token.
        "completion_mask": np.tile((columns > 0).astype("float32"), (ROWS, 1)),
        "sequence_mask": np.ones((ROWS, 1), "float32"),
        "sequence_ids": np.arange(ROWS, dtype="int32")[:, None],
    }
    compiled = jax.jit(task.train_step, donate_argnums=0)

    def step():
        nonlocal state
        logs, state = compiled(state, batch)
        return float(logs["loss"])

    return step


def make_keras_hubs(ids):
    causal_lm = make_model()
    causal_lm.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        sampler="greedy",
    )
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    y = np.roll(ids, -1, axis=1)
    # No token follows the last one.
    weight = np.ones(ids.shape, "float32")
    weight[:, -1] = 0

    def step():
        loss = causal_lm.train_on_batch(x, y, sample_weight=weight)
        # Keras divides by all tokens.
        return float(np.asarray(loss)) * LENGTH / (LENGTH - 1)

    return step


def measure_steps(repeats):
    """Returns the figures of both libraries, which take turns."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, MODEL["vocabulary_size"], (ROWS, LENGTH))
    ids = ids.astype("int32")
    steps = {"ours": make_ours(ids), "KerasHub": make_keras_hubs(ids)}
    seconds = {name: [] for name in steps}
    losses = {name: [] for name in steps}
    for repeat in range(1 + repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(step())
            # The first step compiles.
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    np.testing.assert_allclose(*losses.values(), rtol=1e-4)
    return {
        name: {
            "seconds": statistics.median(times),
            "fastest": min(times),
            "slowest": max(times),
            "loss": losses[name],
        }
        for name, times in seconds.items()
    }


def layer_arguments(dtype, sharding=None):
    """Returns the shapes of tokens, logits and kernels of a layer."""
    tokens, hidden, width, experts, _ = LAYER.values()

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    kernels = {
        "expand": [shape(experts, hidden, 2 * width)],
        "contract": shape(experts, width, hidden),
    }
    return shape(tokens, hidden), shape(tokens, experts), kernels


def lower(passes, arguments, block):
    """Lowers the experts of a layer with the gradients of `PASSES`."""
    expert = Expert(LAYER["top_k"], True, keras.activations.silu)

    def forward(x, logits, kernels):
        out = expert(x, logits, kernels, block=block)
        return out.astype(x.dtype)

    def loss(*arrays):
        return jnp.sum(forward(*arrays).astype("float32") ** 2)

    if passes == 1:
        function = forward
    else:
        trained = (0, 1) if passes == 2 else (0, 1, 2)
        function = jax.grad(loss, argnums=trained)
    return jax.jit(function).lower(*arguments)


def ideal_flops(passes):
    tokens, hidden, width, _, top_k = LAYER.values()
    return passes * 2 * tokens * top_k * 3 * hidden * width


def measure_cpu():
    """Counts the loops' operations, for a random choice of experts."""
    experts, choices = LAYER["experts"], LAYER["tokens"] * LAYER["top_k"]
    block = block_size(choices, experts)
    logits = jax.random.normal(jax.random.key(0), (LAYER["tokens"], experts))
    _, chosen = choose_experts(logits, LAYER["top_k"], True)
    slots = sort_by_expert(chosen, experts, block)
    blocks = int(slots.sizes.sum()) // block
    found = {}
    for name, passes in PASSES.items():
        compiled = lower(passes, layer_arguments("float32"), block).compile()
        # Each loop over blocks, once.
        flops = hlo.count(compiled.as_text(), 1).flops * blocks
        found[name] = {
            "ratio": flops / ideal_flops(passes),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
    return found


def measure_tpu(name="v5e:2x2"):
    """Compiles for one chip of a topology, in bfloat16."""
    hardware = topology.get(name)
    device = hardware.devices[0]
    found = {}
    with kpt.distribution.fsdp(devices=[device]).scope():
        sharding = jax.sharding.SingleDeviceSharding(device)
        arguments = layer_arguments("bfloat16", sharding)
        for name, passes in PASSES.items():
            program = programs.compile(lower(passes, arguments, 1), hardware)
            found[name] = {
                "ratio": program.flops / ideal_flops(passes),
                "temporaries": program.temporaries,
            }
    return found


def table(records):
    """Returns the Markdown tables of the results."""
    theirs = records["steps"]["KerasHub"]["seconds"]
    lines = [
        f"A step of {ROWS} rows of {LENGTH} tokens on {os.cpu_count()} CPUs: "
        f"{MODEL['num_layers']} layers of {MODEL['num_experts']} experts, "
        f"{MODEL['top_k']} a token, all weights trained by AdamW.",
        "",
        "| library | s/step | fastest to slowest | speed-up |",
        "|---|---|---|---|",
    ]
    for name, x in records["steps"].items():
        lines.append(
            f"| {name} | {x['seconds']:.3f} | {x['fastest']:.3f} to "
            f"{x['slowest']:.3f} | {theirs / x['seconds']:.2f}x |"
        )
    lines += [
        "",
        "Operations over those of the chosen experts, by the compiler: the "
        "experts of a layer of Qwen3-30B-A3B, {tokens} tokens.".format(
            **LAYER
        ),
        "",
        "| for | pass | operations | temporaries, GiB |",
        "|---|---|---|---|",
    ]
    for device in ("CPU, float32", "TPU v5e, bfloat16"):
        for name, x in records[device].items():
            lines.append(
                f"| {device} | {name} | {x['ratio']:.3f}x | "
                f"{x['temporaries'] / 2**30:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main():
    arguments = figures.parser(__doc__, repeats=5).parse_args()
    records = {
        "steps": measure_steps(arguments.repeats),
        "CPU, float32": measure_cpu(),
        "TPU v5e, bfloat16": measure_tpu(),
    }
    figures.write(arguments.out, "experts", records, table(records))


if __name__ == "__main__":
    main()
