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
    lowered, arguments = lower_step(task, dummy_batch(task, 16))
    compiled = lowered.compile()
counts = hlo.count(compiled.as_text(), num_devices=16)
counts.collectives, counts.flops, compiled.memory_analysis()
```
"""

import contextlib

import jax
import keras
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.data.formats import Example
from keras_posttrain.distribution import shapes_only
from keras_posttrain.models import sharding


@contextlib.contextmanager
def planned(task, distribution, *, layers=None, **settings):
    """A scope in which a task is as `compile` would have it elsewhere.

    Its variables lie as `distribution` has them, its optimizer is a new one
    that holds shapes only, and afterwards all is as it was.

    Args:
        task: compiled `Task`.
        distribution: `keras.distribution.Distribution`, also of devices that
            are not there.
        layers: int or `None`, only so many of its decoder layers.
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
            _leave_out(stack, task, layers)
        _lay_out(stack, task)
        # Made without a distribution: its few values cannot lie on devices
        # that are not there.
        keras.distribution.set_distribution(None)
        with shapes_only():
            optimizer = optimizers.renewed(task.optimizer)
            masters = optimizers.build(optimizer, task.trainable_variables)
        put(stack, task, optimizer=optimizer, _masters=masters)
        keras.distribution.set_distribution(distribution)
        yield


def put(stack, thing, **values):
    """Sets attributes until the stack is left, past any `__setattr__`."""
    own = vars(thing)
    for name, value in values.items():
        if name in own:
            stack.callback(own.__setitem__, name, own[name])
        else:
            stack.callback(own.pop, name)
        own[name] = value


def _leave_out(stack, task, layers):
    backbone = task.causal_lm.backbone
    every = list(backbone.transformer_layers)
    rest = [v for layer in every[layers:] for v in layer.variables]
    if task.adapter is not None:
        for layer in every[layers:]:
            rest += task.policy.adapter_variables(layer)
    put(stack, backbone, transformer_layers=every[:layers])
    put(stack, task, left_out=frozenset(map(id, rest)))


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


def dummy_batch(task, batch_size):
    """A batch as `fit` would build it, every row full and with loss.

    Args:
        task: `SFTTask`, inside `planned`.
        batch_size: int.

    Returns:
        Dict of numpy arrays.
    """
    length = task.sequence_length
    ids, mask = np.ones(length, "int32"), np.ones(length, "float32")
    examples = [Example(ids, mask, i) for i in range(batch_size)]
    batches = task._batches(examples, batch_size, shuffle=False)
    return next(iter(batches.get_jax_iterator()))


def shape_of(variable):
    """A variable's shape and dtype, and where it lies."""
    layout = keras.distribution.distribution().get_variable_layout(variable)
    return jax.ShapeDtypeStruct(
        variable.shape, variable.dtype, sharding=layout.backend_layout
    )


def lower_step(task, batch):
    """The training step of a task, lowered; inside `planned`.

    Args:
        task: `Task`.
        batch: dict of numpy arrays, a batch of the task.

    Returns:
        `(lowered, arguments)`: a `jax.stages.Lowered`, and what it takes:
        `jax.ShapeDtypeStruct`s by `"trainable"`, `"frozen"`, `"optimizer"`,
        `"metrics"`, `"batch"` and what else the step is given.
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

    def row(x):
        layout = distribution.get_data_layout(x.shape).backend_layout
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    batch = jax.tree.map(row, batch)
    out = jax.tree.map(lambda x: x.sharding, changing)
    counters = {"step": np.int32(1), "seed": np.int32(0)}
    lowered = task.step_program(out).lower(
        {**changing, **counters}, held, batch
    )
    return lowered, {**changing, **held, "batch": batch}
