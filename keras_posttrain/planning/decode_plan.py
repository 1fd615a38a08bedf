"""`task.plan_decode`: what sampling would need of hardware."""

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.distribution import topology
from keras_posttrain.models.attention import KeyValues
from keras_posttrain.planning import lowering as core
from keras_posttrain.planning import train_plan
from keras_posttrain.rollout.native import decoding
from keras_posttrain.training import checks


def make_plan(task, hardware, strategy, num_slots, num_tokens, exact):
    """A `Plan` of a call of the engine's program; see `Task.plan_decode`."""
    task._assert_compile_called("plan_decode")
    checks.positive_int("num_slots", num_slots)
    checks.positive_int("num_tokens", num_tokens)
    if not task.policy.packable:
        raise ValueError(
            f"{type(task.causal_lm.backbone).__name__} is sampled by "
            "KerasHub's own cached decoding, of which no plan is made. Use a "
            "Gemma 1-3, Llama, Mistral or Qwen 2-3 preset."
        )
    hardware = topology.get(hardware)
    distribution = strategy(devices=list(hardware.devices))
    with core.planned(task, distribution):
        layers = len(task.causal_lm.backbone.transformer_layers)
        _, weights, cache, _ = _arguments(task, num_slots, num_tokens)
        optimizer = [core.shape_of(v) for v in task.optimizer.variables]
        variables = train_plan.weights_of(task)
        fields = {
            "parameters": sum(int(np.prod(v.shape)) for v in variables),
            "trainable_parameters": sum(
                int(np.prod(v.shape)) for v in task.trainable_variables
            ),
            "arguments": {
                "weights": train_plan.num_bytes(weights),
                "optimizer": train_plan.num_bytes(optimizer),
                "cache": train_plan.num_bytes(cache),
            },
        }
        flops = train_plan.forward_flops(task) * num_slots * decoding.STEPS

    def compiled(depth):
        with core.planned(task, distribution, layers=depth):
            decoder, *given = _arguments(task, num_slots, num_tokens)
            limits = np.array([0, decoding.STEPS], "int32")
            adapted = task.adapter is not None
            lowered = decoder._decode.lower(adapted, *given, limits)
            program = topology.compile(lowered)
            return train_plan.measure(
                program, len(hardware.devices), decoding.STEPS
            )

    return train_plan.assemble(
        f"{decoding.STEPS} steps of sampling, {type(task).__name__}",
        hardware,
        distribution,
        layers,
        train_plan.depths(task, layers, exact),
        compiled,
        settings={"num_slots": num_slots, "num_tokens": num_tokens},
        known_temporaries={},
        tokens=num_slots * decoding.STEPS,
        model_flops=flops,
        ideal={},
        **fields,
    )


def _arguments(task, num_slots, num_tokens):
    """`(decoder, weights, cache, state)`, what is given to its program."""
    trainable = [core.shape_of(v) for v in task.trainable_variables]
    frozen = [core.shape_of(v) for v in task.non_trainable_variables]
    token = jax.ShapeDtypeStruct((1, 1), "int32")

    def prefill(trainable, frozen, batch):
        with task.using_weights(trainable, frozen):
            return task.policy.prefill(batch)

    names = ("token_ids", "segment_ids", "positions")
    kept = jax.eval_shape(
        prefill, trainable, frozen, dict.fromkeys(names, token)
    )
    shapes = [k.shape[1:] for k, _ in kept]
    decoder = decoding.SlotDecoder(
        task, shapes, kept[0][0].dtype, lambda text: None
    )
    place = decoder.placement
    if num_slots % place.shards:
        raise ValueError(
            "`num_slots` must be a multiple of the devices along the data "
            f"axis. Received: num_slots={num_slots} on {place.shards}"
        )

    def lies(x, *axes):
        spec = jax.sharding.PartitionSpec(*axes)
        where = jax.sharding.NamedSharding(place.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    cache = [
        jax.eval_shape(
            lambda h=heads, d=dim: KeyValues.zeros(
                num_slots, num_tokens, h, d, decoder.dtype
            )
        )
        for heads, dim in shapes
    ]
    cache = jax.tree.map(lambda x: lies(x, place.data, place.heads), cache)
    state = {
        "token": jnp.int32,
        "length": jnp.int32,
        "remaining": jnp.int32,
        "active": jnp.bool_,
        "temperature": jnp.float32,
    }
    state = {
        name: jax.ShapeDtypeStruct((num_slots,), dtype)
        for name, dtype in state.items()
    }
    state["keys"] = jax.ShapeDtypeStruct((num_slots, 2), "uint32")
    state["stop"] = jax.ShapeDtypeStruct((num_slots, 1), "int32")
    state = {name: lies(x, place.data) for name, x in state.items()}
    return decoder, (trainable, frozen), cache, state
