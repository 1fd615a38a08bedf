"""A task's own step, compiled for hardware that is not there.

```python
with kpt.distribution.shapes_only():
    task = kpt.SFTTask.from_preset(
        directory, load_weights=False, dtype="bfloat16", sequence_length=4096
    )
task.compile(keras.optimizers.AdamW(1e-5))
hardware = topology.get("v5e:4x4")
distribution = kpt.distribution.fsdp(devices=hardware.devices)
with planned(task, distribution, layers=2, remat="full"):
    lowered = lower_step(task, dummy_batch(task, 16))
    compiled = topology.compile(lowered)
counts = hlo.count(compiled.as_text(), num_devices=16)
counts.collectives, counts.flops, compiled.memory_analysis()
```
"""

import contextlib

import jax
import keras
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.distribution import shapes_only
from keras_posttrain.models import presets, sharding
from keras_posttrain.models.hf import loading
from keras_posttrain.models.policy import Policy
from keras_posttrain.tasks.distill_task import DistillTask
from keras_posttrain.training.frozen import Reference


@contextlib.contextmanager
def planned(task, distribution, *, layers=None, others=None, **settings):
    """A scope in which a task is as `compile` would have it elsewhere.

    Its variables lie as `distribution` has them, its optimizer is a new one
    that holds shapes only, and afterwards all is as it was.

    Args:
        task: compiled `Task`.
        distribution: `keras.distribution.Distribution`, also of devices that
            are not there.
        layers: int or `None`, only so many of its decoder layers.
        others: int or `None`, as `layers`, of a reference or a teacher that
            is another model.
        **settings: attributes of the task to replace: `micro_batch_size`,
            `sequence_length`, `remat`.
    """
    with contextlib.ExitStack() as stack:
        before = keras.distribution.distribution()
        stack.callback(keras.distribution.set_distribution, before)
        keras.distribution.set_distribution(distribution)
        if "remat" in settings:
            put(stack, task.policy, remat=settings["remat"])
        put(stack, task, **settings)
        if layers is not None:
            put(stack, task, left_out=_leave_out(stack, task.policy, layers))
        _lay_out(stack, task)
        # Made without a distribution: its few values cannot lie on devices
        # that are not there.
        keras.distribution.set_distribution(None)
        with shapes_only():
            optimizer = optimizers.unbuilt_copy(task.optimizer)
            masters = optimizers.build(optimizer, task.trainable_variables)
        put(stack, task, optimizer=optimizer, _masters=masters)
        _refer(stack, task, others)
        keras.distribution.set_distribution(distribution)
        yield


def _refer(stack, task, layers):
    """Gives a task the models that its step compares with."""
    if getattr(task, "compares", False):
        reference = ShapesOfReference(task, task._given_reference())
        put(stack, task, reference=reference, cached=None)
    elif isinstance(task, DistillTask):
        models = task.given.models()
        found = tuple(ShapesOfReference(task, model) for model in models)
        put(stack, task, teachers=found)
    for reference in references(task):
        if reference.kind == "model" and layers is not None:
            rest = _leave_out(stack, reference.policy, layers)
            put(stack, task, left_out=task.left_out | rest)
        reference.variables = [
            v for v in reference.variables if id(v) not in task.left_out
        ]


def put(stack, thing, **values):
    """Sets attributes until the stack is left, past any `__setattr__`."""
    own = vars(thing)
    for name, value in values.items():
        if name in own:
            stack.callback(own.__setitem__, name, own[name])
        else:
            stack.callback(own.pop, name)
        own[name] = value


def _leave_out(stack, policy, layers):
    """Takes layers from a model; the ids of their variables."""
    backbone = policy.backbone
    every = list(backbone.transformer_layers)
    rest = []
    for layer in every[layers:]:
        rest += layer.variables + policy.adapter_variables(layer)
    put(stack, backbone, transformer_layers=every[:layers])
    return frozenset(map(id, rest))


def _lay_out(stack, task):
    distribution = keras.distribution.distribution()
    layouts = {}
    own = [] if task.adapter is None else task.adapter.a + task.adapter.b
    inside = {id(v) for v in own}
    known = [v for v in task.variables if id(v) not in inside]
    for variable in known + own:
        put(stack, variable, _layout=None)
    for variable in known:
        layouts[id(variable)] = distribution.get_variable_layout(variable)
    for variable in known:
        vars(variable)["_layout"] = layouts[id(variable)]
    if task.adapter is not None:
        for i, pair in enumerate(task.adapter.pairs):
            a, b = sharding.factor_layouts(pair)
            vars(task.adapter.a[i])["_layout"] = a
            vars(task.adapter.b[i])["_layout"] = b


def shape_of(variable):
    """A variable's shape and dtype, and where it lies."""
    layout = keras.distribution.distribution().get_variable_layout(variable)
    return jax.ShapeDtypeStruct(
        variable.shape, variable.dtype, sharding=layout.backend_layout
    )


def step_shapes(task, batch):
    """What the step of a task is given; inside `planned`.

    Args:
        task: `Task`.
        batch: dict of numpy arrays, a batch of the task.

    Returns:
        `(changing, held, batch)`, as in `Trainer.step_program`, of
        `jax.ShapeDtypeStruct`s.
    """
    distribution = keras.distribution.distribution()

    def shapes(variables):
        return [shape_of(v) for v in variables]

    changing = {
        "trainable": shapes(task.trainable_variables),
        "optimizer": shapes(task.optimizer.variables),
        "metrics": shapes(task.metrics_variables),
    }
    held = task.held(shapes(task.non_trainable_variables))
    if "reference" in held:
        held["reference"] = shapes(reference_variables(task))
    if "teachers" in held:
        held["teachers"] = [shapes(t.variables) for t in task.teachers]

    def row(x):
        layout = distribution.get_data_layout(x.shape).backend_layout
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return changing, held, jax.tree.map(row, batch)


def lower_step(task, batch):
    """The training step of a task, lowered; inside `planned`.

    Args:
        task, batch: as in `step_shapes`.

    Returns:
        A `jax.stages.Lowered`.
    """
    changing, held, batch = step_shapes(task, batch)
    out = jax.tree.map(lambda x: x.sharding, changing)
    counters = {"step": np.int32(1), "seed": np.int32(0)}
    program = task.step_program(out)
    return program.lower({**changing, **counters}, held, batch)


# --- References -------------------------------------------------------------


class ShapesOfReference(Reference):
    """The reference that a run would have, without its values.

    Args:
        task: `Task`, inside `planned`.
        model: as in `Reference`.
    """

    def __init__(self, task, model=None):
        self.task, self.policy, self.values = task, task.policy, []
        adapter = task.adapter
        if model is not None:
            self.kind = "model"
            with shapes_only():
                model = _without_weights(task, model)
                self.policy = Policy(model, chunk_size=task.chunk_size)
            self.variables = model.variables
        elif adapter is not None and _may_be_off(adapter):
            self.kind, self.variables = "off", []
        else:
            self.kind = "copy"
            owners = [x for x in (task.causal_lm, adapter) if x]
            self.variables = [v for x in owners for v in x.trainable_variables]


def _without_weights(task, model):
    if not isinstance(model, keras.Model):
        dtype = task.causal_lm.backbone.dtype_policy
        model = presets.load_causal_lm(model, dtype=dtype, load_weights=False)
    loading.repair(model)
    return model


def _may_be_off(adapter):
    if optimizers.holds_shapes(adapter.b):
        return True
    return not any(bool(np.any(np.asarray(b.value))) for b in adapter.b)


def references(task):
    """The references or teachers that run in a task's step, a list.

    Args:
        task: `Task`, inside `planned`.
    """
    found = list(getattr(task, "teachers", ()))
    if getattr(task, "compares", False):
        found.append(task.reference)
    return [reference for reference in found if reference is not None]


def reference_variables(task):
    """Those of its references that the step reads, or that lie beside it.

    Args:
        task: `Task`, inside `planned`.
    """
    every = [getattr(task, "reference", None), *getattr(task, "teachers", ())]
    variables = [v for r in every if r is not None for v in r.variables]
    return [v for v in variables if id(v) not in task.left_out]
