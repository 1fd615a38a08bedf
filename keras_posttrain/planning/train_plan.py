"""Implements `task.plan`: the resources that a training step needs."""

import dataclasses
import math

import numpy as np

from keras_posttrain.distribution import programs, topology
from keras_posttrain.distribution.plan import measure
from keras_posttrain.distribution.strategies import of_topology
from keras_posttrain.models import guards
from keras_posttrain.models.rematerialisation import CHOICES
from keras_posttrain.models.sharding import shared_axis, split_of
from keras_posttrain.planning import depths, formulas
from keras_posttrain.planning.advice import advise
from keras_posttrain.planning.lowering import num_bytes, planned
from keras_posttrain.training import checks, preference_checks


def make_plan(task, hardware, strategy, *, remat, **settings):
    """Plans a training step; see `Task.plan` for the arguments.

    With `"auto"` the first plan is that with the least memory.
    """
    layout = {k: settings[k] for k in ("packing", "share_prefix")}
    _check(task, settings["batch_size"], layout, remat, **_own(settings))
    if strategy is not None:
        checks.strategy(strategy)
    hardware = topology.get(hardware)
    if strategy is None:
        strategy = of_topology(hardware)[0]

    def one(remat):
        return _plan(task, hardware, strategy, layout, remat=remat, **settings)

    if remat != "auto":
        return one(remat)
    if hardware.chip is None:
        # As `recomputation.choose` does on a CPU.
        return one("none")
    least = one(CHOICES[0])
    for choice in reversed(CHOICES[1:]) if least.fits else ():
        room = least.capacity - least.set_aside
        if least.kept_by_remat[choice][0] <= room:
            found = one(choice)
            if found.fits:
                return found
    return least


def _own(settings):
    """Returns the settings that replace attributes of the task."""
    return {k: settings[k] for k in ("sequence_length", "micro_batch_size")}


def _plan(
    task,
    hardware,
    strategy,
    layout,
    *,
    batch_size,
    prompt_length,
    exact,
    remat,
    **settings,
):
    """Plans a step with one of `CHOICES`."""
    settings = {**_own(settings), "remat": remat}
    distribution = strategy(devices=list(hardware.devices))
    checks.expert_axis(task.policy, distribution)
    checks.context_axis(task.policy, distribution)
    with planned(task, distribution, **settings) as every:
        batch = every.task.example_batch(
            batch_size, prompt_length=prompt_length, **layout
        )
        chosen = depths.to_compile(every, exact)
        rows = " x ".join(map(str, batch["token_ids"].shape))
        plan = depths.assemble(
            f"A training step of {type(task).__name__}",
            hardware,
            distribution,
            len(every.policy.layers),
            chosen,
            _compiler(every, batch, hardware, chosen),
            settings={
                "batch_size": batch_size,
                **settings,
                "rows x tokens of a batch": rows,
            },
            **_facts(every, batch),
        )
    return dataclasses.replace(plan, advice=advise(plan, task.policy))


def _compiler(every, batch, hardware, chosen):
    """Returns a function of a number of layers to a `Measurement`."""
    trips = head_trips(every, batch)
    by_name = formulas.loop_trips(batch["token_ids"].shape[1])
    count, of_companions = depths.of_companions(every, chosen)

    def one(layers, others):
        lowered = every.with_layers(layers, others).lower(batch)
        program = programs.compile(lowered, hardware, every.options)
        return measure(program, hardware, trips, by_name)

    def compiled(layers):
        others = of_companions[layers]
        found = [one(layers, other) for other in others]
        if len(found) == 1:
            return found[0]
        return found[0].at_depth(count, others[0], found[1], others[1])

    return compiled


def _check(task, batch_size, layout, remat, sequence_length, micro_batch_size):
    """Validates the arguments of `plan` before anything is compiled."""
    checks.positive_int("batch_size", batch_size)
    preference_checks.layout_arguments(task.policy, **layout)
    if layout["share_prefix"] and not task.can_share_prefix:
        raise ValueError(
            f"Rows of {type(task).__name__} have no prompt that several "
            "completions share. Received: share_prefix=True. Use "
            "packing=True."
        )
    checks.may_train(task.policy, layout["packing"])
    if micro_batch_size is not None:
        checks.positive_int("micro_batch_size", micro_batch_size)
    checks.task_arguments(None, sequence_length, task.truncation, remat)
    guards.check_model(task.causal_lm, sequence_length)


def head_trips(planned, batch):
    """Counts the rounds of a device's loop over the head's chunks."""
    shards, sizes = formulas.mesh_sizes()
    rows, length = batch["token_ids"].shape
    rows //= planned.step.micro_batches.count(batch)
    slots = rows * length // (1 if rows % shards else shards)
    share = np.mean(batch["completion_mask"] > 0)
    policy = planned.policy
    policies = [policy, *(model.policy for model in planned.companions)]
    vocabulary = max(p.backbone.vocabulary_size for p in policies)
    axis = shared_axis(split_of(policy.kernel), rows)
    # Next to a teacher's the head is whole on each device.
    if axis is not None and "teachers" not in planned.step.companions:
        # Each device has a part of it, and takes more tokens at once.
        vocabulary //= sizes[axis]
    size = policy.head().chunk(vocabulary, slots)
    return max(math.ceil(slots * share / size), 1)


def _facts(planned, batch):
    """Returns the fields of a `Plan` that no compiler is needed for."""
    changing, held, rows = planned.shapes(batch)
    count = planned.step.micro_batches.count(batch)
    # All plans of a step name the companions that it may have.
    roles = planned.step.companions or {"reference": ()}
    return {
        **planned.num_parameters(),
        "arguments": {
            "weights": num_bytes([changing["trainable"], held["frozen"]]),
            "optimizer": num_bytes(changing["optimizer"]),
            **{r.removesuffix("s"): num_bytes(held.get(r)) for r in roles},
            "batch": num_bytes(rows),
        },
        "known_temporaries": {
            # Those of several micro-batches are added up in float32.
            "gradients": num_bytes(
                changing["trainable"], 4 if count > 1 else None
            ),
            "layer inputs": formulas.kept_layer_inputs(planned, batch),
        },
        "kept_by_remat": formulas.kept_by_remat(planned, batch),
        "tokens": int((batch["segment_ids"] > 0).sum()),
        "model_flops": formulas.model_flops(planned, batch),
        **formulas.ideal(planned, batch),
    }
