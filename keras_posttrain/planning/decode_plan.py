"""Implements `task.plan_decode`: the resources that sampling needs."""

import jax
import numpy as np

from keras_posttrain.distribution import programs, topology
from keras_posttrain.distribution.plan import measure
from keras_posttrain.distribution.strategies import of_topology
from keras_posttrain.models.policy import PACKABLE_MODELS
from keras_posttrain.planning import depths, formulas
from keras_posttrain.planning.lowering import num_bytes, planned, shapes_of
from keras_posttrain.rollout.native import decoding
from keras_posttrain.training import checks


def make_plan(task, hardware, strategy, num_slots, num_tokens, exact):
    """Plans a call of the engine's program; see `Task.plan_decode`."""
    checks.positive_int("num_slots", num_slots)
    checks.positive_int("num_tokens", num_tokens)
    if not task.policy.packable:
        raise ValueError(
            f"{type(task.causal_lm.backbone).__name__} is sampled by "
            "KerasHub's own cached decoding, of which no plan is made. Use "
            f"{PACKABLE_MODELS}."
        )
    if strategy is not None:
        checks.strategy(strategy)
    hardware = topology.get(hardware)
    if strategy is None:
        strategy = of_topology(hardware)[0]
    distribution = strategy(devices=list(hardware.devices))
    checks.expert_axis(task.policy, distribution)
    with planned(task, distribution) as every:
        _, weights, cache, _ = _arguments(every, num_slots, num_tokens)
        optimizer = shapes_of(every.step.optimizer.variables)
        tokens = num_slots * decoding.STEPS

        def compiled(layers):
            shallow = every.with_layers(layers)
            decoder, *given = _arguments(shallow, num_slots, num_tokens)
            limits = np.array([0, decoding.STEPS], "int32")
            mode = (task.adapter is not None, False)
            program = decoder._decode.lower(mode, *given, limits)
            return measure(
                programs.compile(program, hardware),
                hardware,
                decoding.STEPS,
                formulas.EXPERT_TRIPS,
            )

        return depths.assemble(
            f"{decoding.STEPS} steps of sampling, {type(task).__name__}",
            hardware,
            distribution,
            len(every.policy.layers),
            depths.to_compile(every, exact),
            compiled,
            **every.num_parameters(),
            settings={"num_slots": num_slots, "num_tokens": num_tokens},
            arguments={
                "weights": num_bytes(weights),
                "optimizer": num_bytes(optimizer),
                "cache": num_bytes(cache),
            },
            known_temporaries={},
            tokens=tokens,
            model_flops=formulas.forward_flops(every) * tokens,
            ideal={},
        )


def _arguments(planned, num_slots, num_tokens):
    """`(decoder, weights, cache, state)`, what is given to its program."""
    task, weights = planned.task, planned.step.weights
    trainable, frozen = shapes_of(weights.trainable), shapes_of(weights.frozen)
    parts = task.policy, task.using_weights
    empty = decoding.empty_layers(*parts, (trainable, frozen))
    decoder = decoding.SlotDecoder(*parts, empty, lambda text: None)
    place = decoder.placement
    if num_slots % place.shards:
        raise ValueError(
            "`num_slots` must be a multiple of the devices along the data "
            f"axis. Received: num_slots={num_slots} on {place.shards}"
        )

    def placed(x, *axes):
        spec = jax.sharding.PartitionSpec(*axes)
        layout = jax.sharding.NamedSharding(place.mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    cache = jax.eval_shape(lambda: decoder._zeros(num_slots, num_tokens))
    cache = [
        jax.tree.map(
            # Keys, values and states have heads, the tails of states none.
            lambda x: placed(x, place.data, *[place.heads][: x.ndim - 3]),
            layer,
        )
        for layer in cache
    ]
    state = {
        "token": ((), "int32"),
        "length": ((), "int32"),
        "remaining": ((), "int32"),
        "active": ((), "bool"),
        "temperature": ((), "float32"),
        "keys": ((2,), "uint32"),
        "stop": ((1,), "int32"),
    }
    state = {
        name: placed(
            jax.ShapeDtypeStruct((num_slots, *shape), dtype), place.data
        )
        for name, (shape, dtype) in state.items()
    }
    return decoder, (trainable, frozen), cache, state
