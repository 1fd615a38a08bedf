"""`task.plan`: what a task's step would need of hardware."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.distribution import layouts, topology
from keras_posttrain.distribution.collective_bytes import Weight, ideal_bytes
from keras_posttrain.distribution.plan import (
    Plan,
    measure,
    out_of_memory,
)
from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models import guards
from keras_posttrain.models.sharding import shared_axis, split_of
from keras_posttrain.planning import lowering as core
from keras_posttrain.planning.example_batches import dummy_batch
from keras_posttrain.tasks.distill_task import DistillTask
from keras_posttrain.tasks.preference_task import PreferenceTask
from keras_posttrain.tasks.rollout_task import RolloutTask
from keras_posttrain.training import checks, preference_checks


def check(task, batch_size, layout, **settings):
    """Refuses what `plan` cannot be given, before anything is compiled.

    Args:
        task: `Task`.
        batch_size: as in `Task.plan`.
        layout: dict of its `packing` and `share_prefix`.
        **settings: its `sequence_length`, `micro_batch_size` and `remat`.
    """
    task._assert_compile_called("plan")
    checks.positive_int("batch_size", batch_size)
    preference_checks.layout_arguments(task, **layout)
    completes = isinstance(task, (PreferenceTask, RolloutTask))
    completes = completes and not isinstance(task, DistillTask)
    if layout["share_prefix"] and not completes:
        raise ValueError(
            f"Rows of {type(task).__name__} have no prompt that several "
            "completions share. Received: share_prefix=True. Use "
            "packing=True."
        )
    checks.may_train(task, layout["packing"], [])
    if settings.get("micro_batch_size") is not None:
        checks.positive_int("micro_batch_size", settings["micro_batch_size"])
    length = settings.get("sequence_length", task.sequence_length)
    remat = settings.get("remat", task.remat)
    checks.task_arguments(None, length, task.truncation, remat)
    guards.check_model(task.causal_lm, length)


def make_plan(task, hardware, strategy, rows, exact, **settings):
    """A `Plan` of a training step; see `Task.plan`.

    Args:
        task: compiled `Task`.
        hardware, strategy, exact, **settings: as `Task.plan` has them.
        rows: dict, the arguments of `dummy_batch`.
    """
    hardware = topology.get(hardware)
    distribution = strategy(devices=list(hardware.devices))
    if isinstance(task, PreferenceTask):
        # What its `fit` would remember.
        share = rows["share_prefix"]
        packs = share or bool(rows["packing"])
        settings |= {"share_prefix": share, "packs": packs}
    with core.planned(task, distribution, **settings):
        batch = dummy_batch(task, **rows)
        facts = _facts(task, batch)
        asked = {
            "batch_size": rows["batch_size"],
            "sequence_length": task.sequence_length,
            "micro_batch_size": task.micro_batch_size,
            "remat": task.policy.remat,
            "rows x tokens of a batch": " x ".join(
                map(str, batch["token_ids"].shape)
            ),
        }
        count = task._micro_batches(batch)
        trips = _head_trips(task, batch, count)
        layers = len(task.causal_lm.backbone.transformer_layers)
        chosen = depths(task, layers, exact)
        theirs, beside = _beside(task, chosen)

    def one(depth, other):
        depths = {"layers": depth, "others": other}
        with core.planned(task, distribution, **depths, **settings):
            batch = dummy_batch(task, **rows)
            lowered = core.lower_step(task, batch)
            program = topology.compile(lowered)
            return measure(program, len(hardware.devices), trips)

    def compiled(depth):
        others = beside[depth]
        found = [one(depth, other) for other in others]
        if len(found) == 1:
            return found[0]
        return found[0].at_depth(theirs, others[0], found[1], others[1])

    plan = assemble(
        f"A training step of {type(task).__name__}",
        hardware,
        distribution,
        layers,
        chosen,
        compiled,
        settings=asked,
        **facts,
    )
    return dataclasses.replace(plan, advice=_advice(task, plan))


def assemble(name, hardware, distribution, layers, depths, compiled, **fields):
    """A `Plan` of what `compiled(depth)`, a `Measurement`, gives."""
    found, refusal = _measured(compiled, layers, depths)
    mesh = distribution.device_mesh
    layout = ", ".join(
        f"{n} along {axis!r}" for axis, n in zip(mesh.axis_names, mesh.shape)
    )
    return Plan(
        name=name,
        topology=hardware,
        layout=f"{type(distribution).__name__}: {layout}",
        num_layers=layers,
        compiled_layers=depths,
        measured=found,
        capacity=hardware.chip.memory if hardware.chip else None,
        **refusal,
        **fields,
    )


def _measured(compiled, layers, depths):
    """`(Measurement or None, what the compiler refused)`."""
    try:
        found = [compiled(depth) for depth in depths]
    except jax.errors.JaxRuntimeError as error:
        figures = out_of_memory(error)
        if figures is None:
            raise
        text = str(error).split("\n")[0]
        return None, {"refusal": text, "refused_bytes": figures[0]}
    if len(found) == 1:
        return found[0], {}
    a, b = depths
    return found[0].at_depth(layers, a, found[1], b), {}


def depths(task, layers, exact):
    """The numbers of layers to compile."""
    policies = [task.policy] + [r.policy for r in core.references(task)]
    period = _period(task.causal_lm.backbone.transformer_layers)
    packable = all(policy.packable for policy in policies)
    # What is compared of the layers inside needs these layers.
    inside = getattr(task, "feature_maps", ())
    if exact or inside or not packable or layers <= 2 * period:
        return (layers,)
    return (period, 2 * period)


def _beside(task, chosen):
    """Which layers are compiled of a model beside the task's.

    Args:
        task: `Task`, inside `planned`.
        chosen: what `depths` gave.

    Returns:
        `(count, depths)`: its layers, and a dict from each of `chosen` to a
        tuple: one number of its layers, `None` for all of them, or two with
        a line through both.
    """
    models = [r for r in core.references(task) if r.kind == "model"]
    if not models or len(chosen) == 1:
        return 0, {depth: (None,) for depth in chosen}
    own = task.causal_lm.backbone.transformer_layers
    theirs = models[0].policy.backbone.transformer_layers
    count, period = len(theirs), _period(theirs)
    if (count, period) == (len(own), _period(own)):
        return count, {depth: (depth,) for depth in chosen}
    line = (period, 2 * period) if count > 2 * period else (None,)
    return count, {depth: line for depth in chosen}


def _period(every):
    """After how many layers the kinds of layers repeat."""

    def kind(layer):
        windows = []
        for part in layer._flatten_layers():
            for name in ("sliding_window_size", "sliding_window"):
                windows.append(getattr(part, name, None))
            windows.append(getattr(part, "use_sliding_window_attention", 0))
        shapes = [tuple(v.shape) for v in layer.variables]
        return str((windows, shapes))

    kinds = [kind(layer) for layer in every]
    for period in range(1, len(kinds)):
        again = [kinds[i % period] for i in range(len(kinds))]
        if again == kinds:
            return period
    return len(kinds)


def _head_trips(task, batch, count):
    """Rounds of the head's loop over chunks of tokens, on one device."""
    distribution = keras.distribution.distribution()
    mesh = distribution.device_mesh.backend_mesh
    shards = mesh.shape[distribution.batch_dim_name]
    rows, length = batch["token_ids"].shape
    split = shards if rows // count % shards == 0 else 1
    slots = rows * length // count // split
    share = np.mean(batch["completion_mask"] > 0)
    policies = [task.policy] + [r.policy for r in core.references(task)]
    vocabulary = max(p.backbone.vocabulary_size for p in policies)
    shared = shared_axis(split_of(task.policy.kernel), rows // count)
    # Beside a teacher's the head is whole on each device.
    if shared is not None and not isinstance(task, DistillTask):
        # Each device has a part of it, and takes more tokens at once.
        vocabulary //= mesh.shape[shared]
    size = task.policy.head().chunk(vocabulary, slots)
    return max(math.ceil(slots * share / size), 1)


# --- What is known by shapes -------------------------------------------------


def _facts(task, batch):
    """The fields of a `Plan` that no compiler is needed for."""
    changing, held, shapes = core.step_shapes(task, batch)
    count = task._micro_batches(batch)
    beside = [core.shape_of(v) for v in core.reference_variables(task)]
    arguments = {
        "weights": num_bytes(changing["trainable"])
        + num_bytes(held["frozen"]),
        "optimizer": num_bytes(changing["optimizer"]),
        _role(task): num_bytes(beside),
        "batch": num_bytes(shapes),
    }
    distribution = keras.distribution.distribution()
    mesh = distribution.device_mesh.backend_mesh
    data = distribution.batch_dim_name
    rows, length = batch["token_ids"].shape
    backbone = task.causal_lm.backbone
    activation = rows * length / count / mesh.shape[data]
    activation *= backbone.hidden_dim * _itemsize(backbone.compute_dtype)
    layers = len(backbone.transformer_layers)
    gradients = num_bytes(changing["trainable"], 4 if count > 1 else None)
    variables = weights_of(task)
    return {
        "parameters": sum(math.prod(v.shape) for v in variables),
        "trainable_parameters": sum(
            math.prod(v.shape) for v in task.trainable_variables
        ),
        "arguments": arguments,
        "known_temporaries": {
            "gradients": gradients,
            "layer inputs": layers * activation,
        },
        "tokens": int((batch["segment_ids"] > 0).sum()),
        "model_flops": _model_flops(task, batch),
        "ideal": _ideal(task, count, rows * length / mesh.shape[data]),
    }


def _role(task):
    """What a task calls the models beside its own."""
    return "teacher" if isinstance(task, DistillTask) else "reference"


def _ideal(task, count, tokens):
    """What the layout sends by the book: `ideal_bytes` of all models.

    The model is passed forward and backward, those beside it forward.

    Args:
        task: `Task`, inside `planned`.
        count: int, micro-batches.
        tokens: float, those of a batch on one device.
    """
    distribution = keras.distribution.distribution()
    mesh = distribution.device_mesh.backend_mesh
    trained = {id(v) for v in task.trainable_variables}
    models = [(task.policy, weights_of(task), trained, 2)]
    for reference in core.references(task):
        models.append((reference.policy, _weights_of(reference), set(), 1))
    found = collections.Counter()
    for policy, variables, trained, passes in models:
        backbone = policy.backbone
        dtype = backbone.compute_dtype
        activation = tokens / count * backbone.hidden_dim * _itemsize(dtype)
        found.update(
            ideal_bytes(
                [_weight(v, dtype, id(v) in trained) for v in variables],
                dict(mesh.shape),
                distribution.batch_dim_name,
                micro_batches=count,
                num_layers=len(backbone.transformer_layers),
                activation_bytes=activation,
                passes=passes,
            )
        )
    return dict(found)


def num_bytes(shapes, itemsize=None):
    """Bytes of arrays on the device that has most of them."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape))
            * (itemsize or x.dtype.itemsize)
            for x in jax.tree.leaves(shapes)
        )
    )


def _itemsize(dtype):
    return jnp.dtype(dtype).itemsize


def weights_of(task):
    """The variables that hold a model's and an adapter's numbers."""
    return [
        v
        for v in task.trainable_variables + task.non_trainable_variables
        if jnp.issubdtype(v.dtype, jnp.floating)
    ]


def _weights_of(reference):
    """`weights_of` a reference or a teacher."""
    if reference.kind != "model":
        return weights_of(reference.task)
    floating = jnp.floating
    return [
        v for v in reference.variables if jnp.issubdtype(v.dtype, floating)
    ]


def _weight(variable, dtype, trainable):
    itemsize = min(_itemsize(variable.dtype), _itemsize(dtype))
    split = split_of(variable)
    return Weight(tuple(variable.shape), itemsize, split.axes, trainable)


def _model_flops(task, batch):
    """Operations of a step by formula, on all chips.

    Six for each token and each weight of a matrix that is trained, four for
    one that is frozen (nothing needs its gradient), and 12 * length * width
    for each token and attention layer ([Chowdhery et al., 2022](
    https://arxiv.org/abs/2204.02311), appendix B); a reference's forward pass
    a third of that. Weights that only look up are left out, and of experts
    those count that a token passes through.
    """
    trained = {id(v) for v in task.trainable_variables}
    ids = np.asarray(batch["segment_ids"])
    lengths = [np.bincount(row, minlength=2)[1:] for row in ids]
    tokens = sum(int(x.sum()) for x in lengths)
    squares = sum(float((x.astype("float64") ** 2).sum()) for x in lengths)
    # A segment that goes on from another is the rest of a longer square.
    for x, before in zip(lengths, batch.get("prefix_segments", ())):
        prefixes = np.append(0, x)[before[: len(x)]]
        squares += 2.0 * float((x * prefixes).sum())
    _, both, width = _products(task.policy, weights_of(task), trained)
    found = both * tokens + 12 * width * squares
    for reference in core.references(task):
        known = _weights_of(reference)
        forward, _, width = _products(reference.policy, known, set())
        found += forward * tokens + 4 * width * squares
    return found


def _products(policy, variables, trained):
    """Operations of a token, of which attention's go by its length.

    Returns:
        `(forward, forward and backward, width of the attention layers)`.
    """
    backbone = policy.backbone
    embedding = backbone.token_embedding
    lookup = None if embedding.tie_weights else id(embedding.embeddings)
    share = getattr(backbone, "top_k", 1) / getattr(backbone, "num_experts", 1)
    forward = both = width = 0.0
    for v in variables:
        names = layouts.meanings(v.path, len(v.shape)) or ()
        size = math.prod(v.shape)
        if len(v.shape) < 2 or id(v) == lookup:
            continue
        if "experts" in names and len(names) == 3:
            size *= share
        if v.path.endswith("query/kernel"):
            width += math.prod(
                n for n, x in zip(v.shape, names) if x != "hidden"
            )
        forward += 2 * size
        both += (6 if id(v) in trained else 4) * size
    return forward, both, width


def forward_flops(task):
    """Operations of a token's forward pass by formula, attention left out."""
    backbone = task.causal_lm.backbone
    embedding = backbone.token_embedding
    lookup = None if embedding.tie_weights else id(embedding.embeddings)
    return sum(
        2.0 * math.prod(v.shape)
        for v in weights_of(task)
        if len(v.shape) > 1 and id(v) != lookup
    )


# --- What to change ----------------------------------------------------------


# Of a chip's memory. What a compiler sets aside may be so much; where it would
# be more it starts again. Llama-3-8B on v5e:4x4 lies on the line with 25
# layers, 93 %, and 7 % of its temporaries above it with 28, 98 %.
ROOM = 0.95
# Of a chip's memory: by the line, too much for any packing. All layers of
# Gemma-2-9B there came to 8 % less than the line.
HOPELESS = 1.1


def _doubt(plan):
    """What to do where a line is no proof that a plan fits, or does not."""
    depths, capacity = plan.compiled_layers, plan.capacity
    if len(depths) == 1 or not capacity or plan.measured is None:
        return ()
    if plan.set_aside <= ROOM * capacity or plan.needed > HOPELESS * capacity:
        return ()
    return (
        f"exact=True compiles all {plan.num_layers} layers. By those of "
        f"{depths[0]} and {depths[1]} {plan.needed / capacity:.0%} of the "
        f"chip's memory are in use at once and {plan.set_aside / capacity:.0%}"
        " when packed loosely. Where that is too much the compiler packs "
        "closely, and all layers may come out some percent beside the line.",
    )


def _advice(task, plan):
    """What would help a plan that does not fit, with numbers."""
    if plan.fits:
        return _doubt(plan)
    found, chip = [], plan.arguments
    inputs = plan.known_temporaries["layer inputs"]
    if plan.needed is not None:
        over = plan.needed - plan.capacity
        found.append(f"It lacks {readable(max(over, 0.0))} on each chip.")
    if task.policy.remat == "none" and plan.settings["remat"] == "none":
        found.append(
            "remat='full' keeps the inputs of the layers alone for the "
            f"backward pass, {readable(inputs)}."
        )
    rows = plan.settings["micro_batch_size"] or plan.settings["batch_size"]
    if plan.measured is not None and rows > plan.num_devices:
        rest = plan.measured.numbers["temporaries"]
        found.append(
            f"micro_batch_size={rows // 2} halves what activations take of "
            f"the {readable(rest)} of temporaries, for float32 gradients "
            "that are added up."
        )
    state = chip["weights"] + chip["optimizer"] + chip[_role(task)]
    found.append(
        f"Twice the chips, under FSDP, hold {readable(state / 2)} less each "
        "of weights and optimizer state."
    )
    if task.adapter is None:
        found.append(
            "lora=kpt.LoRA(...) needs hardly any of the optimizer's "
            f"{readable(chip['optimizer'])} and of the gradients' "
            f"{readable(plan.known_temporaries['gradients'])}."
        )
    elif any(
        v.dtype == "float32"
        for v in task.non_trainable_variables
        if v.ndim > 1
    ):
        found.append(
            "dtype='bfloat16' halves the frozen weights, "
            f"{readable(chip['weights'] / 2)} less."
        )
    return (*found, *_doubt(plan))
