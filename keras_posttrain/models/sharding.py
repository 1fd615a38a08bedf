"""Layouts of a model's arrays on the mesh of Keras's distribution.

Without a distribution, or where a size is not divisible by the mesh's axis,
arrays are left unchanged.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_posttrain._chips import published_memory
from keras_posttrain.models.linear import equation_of, sublayers


def layout_of(variable):
    """Returns a variable's `TensorLayout`; `None` without a distribution."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    return distribution.get_variable_layout(variable)


def factor_layouts(pair):
    """Derives the layouts of a layer's LoRA factors from its kernel's.

    The rows of `A` are split like the kernel's inputs and the columns of `B`
    like its outputs, so that the products need no more communication than the
    layer itself. An axis of a factor may combine several axes of the kernel;
    it is split if one of them is. Without a distribution both are `None`.
    """
    layout = layout_of(pair.layer.kernel)
    if layout is None:
        return None, None
    into, out = pair.axes.of_matrix(layout.axes)
    mesh = layout.device_mesh
    return (
        keras.distribution.TensorLayout((into, None), mesh),
        keras.distribution.TensorLayout((None, out), mesh),
    )


def expert_factor_layouts(kernel):
    """Derives the layouts of LoRA factors of experts from their kernel's.

    The kernel has the shape `(experts, in, out)`, the factors
    `(experts, in, rank)` and `(experts, rank, out)`. See `factor_layouts`.
    """
    layout = layout_of(kernel)
    if layout is None:
        return None, None
    experts, into, out = layout.axes
    mesh = layout.device_mesh
    return (
        keras.distribution.TensorLayout((experts, into, None), mesh),
        keras.distribution.TensorLayout((experts, None, out), mesh),
    )


# The name of gathered weights, which are recomputed in the backward pass.
GATHERED = "kpt_gathered"


def data_axis():
    """Returns the mesh and its axis of rows, `(jax mesh, name, size)`.

    Where rows are split over several axes, slices and devices in a slice,
    the name is a tuple of theirs. In `over_slices` the mesh is that of a
    slice. If there is one device along the axis, these are
    `(None, None, 1)`.
    """
    mesh, name, size, *_ = axes()
    return (mesh, name, size) if size > 1 else (None, None, 1)


def axes():
    """Returns `(jax mesh, axis of rows, its size, other axis, its size)`.

    The first three are as in `data_axis`. On a mesh without another axis the
    other one is `None` with size 1. Without a distribution the mesh is
    `None`.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None, None, 1, None, 1
    mesh, data = _mesh_and_rows(distribution)
    others = set(mesh.axis_names) - set(data) - _manual_axes()
    model = next((name for name in mesh.axis_names if name in others), None)
    size = math.prod(mesh.shape[name] for name in data)
    name = data[0] if len(data) == 1 else data
    return mesh, name, size, model, mesh.shape.get(model, 1)


def _manual_axes():
    """Returns the axes that this part of a program runs over separately."""
    return set(jax.sharding.get_abstract_mesh().manual_axes)


def _mesh_and_rows(distribution):
    """Returns the jax mesh and a tuple of its axes that split rows."""
    mesh = distribution.device_mesh.backend_mesh
    data = distribution.batch_dim_name
    rows = getattr(distribution, "row_axes", (data,))
    if not _manual_axes() & set(rows[:-1]):
        return mesh, rows
    stages = two_stages(mesh, data)
    names = (data,) if stages is None else stages.names
    return jax.sharding.get_abstract_mesh(), names


def slices_of(rows, multiple=1):
    """Returns the number of slices that can run on their own rows.

    It is 1 on a mesh without slices, where the rows of a slice are not a
    multiple of `multiple`, and where arrays differ in their number of rows.
    `rows` is a pytree of arrays with a leading `rows` axis.
    """
    distribution = keras.distribution.distribution()
    names = getattr(distribution, "row_axes", ())[:-1]
    if not names:
        return 1
    size = distribution.device_mesh.backend_mesh.shape[names[0]]
    leading = {x.shape[:1] for x in jax.tree.leaves(rows)}
    if len(leading) > 1 or () in leading:
        return 1
    [[number]] = leading
    return 1 if number % (size * multiple) else size


def over_slices(function, rows):
    """Runs `function(rows)` in each slice on its own rows.

    Within a slice the program is partitioned as it is on a mesh of one slice,
    and nothing is sent to another one. `slices_of(rows)` is above 1.

    Args:
        function: returns `(sums, values)`: pytrees of arrays. Sums are added
            up over slices, values are concatenated along their first axis.
        rows: pytree of arrays with a leading `rows` axis.
    """
    distribution = keras.distribution.distribution()
    name, data = distribution.row_axes
    mesh = distribution.device_mesh.backend_mesh
    stages = two_stages(mesh, data)

    def local(rows):
        sums, values = function(rows)
        return jax.tree.map(lambda x: _added(x, name), sums), values

    return jax.shard_map(
        local,
        mesh=mesh if stages is None else stages.mesh,
        in_specs=P(name),
        out_specs=(P(), P(name)),
        axis_names={name},
        check_vma=False,
    )(rows)


def on_devices(function, mesh, in_specs, out_specs, names=None):
    """Runs a function on each device: `jax.shard_map` for this module's mesh.

    `names` are the axes to run it over separately, by default all those that
    this part of the program does not run over separately already.
    """
    if names is None:
        names = set(mesh.axis_names) - _manual_axes()
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=names,
        check_vma=False,
    )


def flat(*names):
    """Returns a set of the axes in `names`: str, tuples of them or `None`."""
    parts = (x if isinstance(x, tuple) else (x,) for x in names)
    return {name for part in parts for name in part} - {None}


def expert_mesh():
    """Returns the jax mesh that experts are split over, or `None`.

    It has the devices of `data_axis()` in the same order, along two axes:
    over the first one experts are split to save memory, over the second one
    each device has some of them.
    """
    distribution = keras.distribution.distribution()
    mesh = getattr(distribution, "expert_mesh", None)
    return None if mesh is None else mesh.backend_mesh


def context_mesh():
    """Returns the jax mesh of rows and their tokens, or `None`.

    It has the devices of `data_axis()` in the same order, along two axes:
    rows are split over the first one, the tokens of a row over the second.
    """
    distribution = keras.distribution.distribution()
    mesh = getattr(distribution, "context_mesh", None)
    return None if mesh is None else mesh.backend_mesh


def row_shards():
    """Returns the number of parts that the rows of a batch are split into."""
    mesh = context_mesh()
    if mesh is None:
        return data_axis()[2]
    return mesh.shape[mesh.axis_names[0]]


def of_results():
    """Returns `out_shardings` of programs that compute arrays of rows.

    Where a layout splits the tokens of rows, each device gets all results:
    JAX cannot express those of the compiler's choice, which are on another
    mesh than the weights. `None` leaves it to the compiler.
    """
    if context_mesh() is None:
        return None
    mesh, *_ = axes()
    return NamedSharding(mesh, P())


def platform():
    """Returns the platform that a program is compiled for.

    When planning, the devices of the mesh may not exist on this machine.
    """
    return _device().platform


def compute_capability():
    """Returns the compute capability of the CUDA GPUs compiled for.

    It is a tuple of ints, such as `(9, 0)`, and `None` for devices that are
    no CUDA GPUs.
    """
    found = str(getattr(_device(), "compute_capability", "")).split(".")
    # That of AMD's GPUs is a name.
    return tuple(map(int, found)) if all(map(str.isdecimal, found)) else None


def device_memory():
    """Returns the bytes of memory of a device, `None` if unknown.

    It is a device that a program is compiled for, as in `platform`. What
    processes measure of their own devices may differ, and their programs must
    not: several use the published memory alone.
    """
    device = _device()
    memory = published_memory(device)
    if memory is None and jax.process_count() == 1:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    return memory


def _device():
    distribution = keras.distribution.distribution()
    if distribution is None:
        return jax.local_devices()[0]
    return distribution.device_mesh.backend_mesh.devices.flat[0]


def shard_rows(x):
    """Splits the first axis of `x`, rows or their tokens, over the data axis.

    Applied to the activations between layers, this makes XLA gather weights
    and not activations.
    """
    mesh, name, size = data_axis()
    if mesh is None or x.shape[0] % size:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(name)))


@dataclasses.dataclass(frozen=True)
class Stages:
    """An axis of a mesh divided into two, for communication in two stages.

    `mesh` has the same devices in the same order. `names` are those of the
    two axes, the outer one first. Scattering always uses two stages,
    gathering only if `to_gather` is set.
    """

    mesh: jax.sharding.Mesh
    names: tuple
    to_gather: bool

    def groups(self):
        """Returns two lists of groups of devices: inner axis, outer axis.

        A group is a list of indices along the original axis.
        """
        outer, inner = (self.mesh.shape[name] for name in self.names)
        places = np.arange(outer * inner).reshape(outer, inner)
        return places.tolist(), places.T.tolist()


# Over more chips the TPU compiler replaces a reduce-scatter by an all-reduce,
# which sends twice the bytes. If the chips span three axes of the network it
# replaces an all-gather as well.
MAX_CHIPS_PER_STAGE = 32


@functools.lru_cache(maxsize=16)
def two_stages(mesh, name):
    """Divides an axis of the mesh that is too long for one collective.

    Returns `Stages`, whose inner axis is along one axis of the TPUs' network;
    or `None`, if one stage is enough or the devices are not TPUs.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    if mesh.shape[name] <= MAX_CHIPS_PER_STAGE or not is_tpu:
        return None
    place = mesh.axis_names.index(name)
    line = np.moveaxis(mesh.devices, place, 0).reshape(mesh.shape[name], -1)
    at = np.array([device.coords for device in line[:, 0]])
    # For each n, the number of network axes that the first n chips span.
    moved = at != at[0]
    across = np.logical_or.accumulate(moved).sum(axis=1)
    inner = int((across <= 1).sum())
    if inner in (1, len(at)) or len(at) % inner:
        return None
    shape, names = list(mesh.devices.shape), list(mesh.axis_names)
    shape[place : place + 1] = [len(at) // inner, inner]
    both = (f"{name}_outer", f"{name}_inner")
    names[place : place + 1] = both
    finer = jax.sharding.Mesh(mesh.devices.reshape(shape), names)
    return Stages(finer, both, bool(across[-1] > 2))


@dataclasses.dataclass(frozen=True)
class Split:
    """The layout of a weight: for each axis, an axis of the mesh or `None`.

    The weight is split over the axes `to_save_memory` only for that purpose:
    it is gathered along them for use. `rows` is the axis of `mesh` whose
    devices have different rows and the same weights.
    """

    mesh: jax.sharding.Mesh
    axes: tuple
    to_save_memory: frozenset
    rows: str | tuple

    def stages(self):
        """Returns the `Stages` of `rows`, or `None` for one stage."""
        if isinstance(self.rows, tuple):
            mesh = keras.distribution.distribution().device_mesh.backend_mesh
            [name] = set(mesh.axis_names) - set(self.mesh.axis_names)
            return dataclasses.replace(two_stages(mesh, name), mesh=self.mesh)
        if not isinstance(self.mesh, jax.sharding.Mesh):
            return None
        return two_stages(self.mesh, self.rows)


def split_of(variable):
    """Returns the `Split` of a variable; `None` without a distribution.

    Weights are split to save memory over the data axis, or over the axes of
    the distribution's `gathered_axes(variable)`, if it has this method.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    layout, rows = layout_of(variable), distribution.batch_dim_name
    mesh, axes = layout.device_mesh.backend_mesh, tuple(layout.axes)
    if rows not in mesh.axis_names:
        # The mesh of experts.
        rows = mesh.axis_names[0]
    ask = getattr(distribution, "gathered_axes", None)
    names = ask(variable) if ask else {rows}
    names = {name for name in names if mesh.shape[name] > 1}
    now, inner = _mesh_and_rows(distribution)
    if now is not distribution.device_mesh.backend_mesh:
        # In `over_slices`.
        mesh = now
        renamed = {rows: inner[0] if len(inner) == 1 else inner}
        axes = tuple(renamed.get(axis, axis) for axis in axes)
        names = {renamed.get(name, name) for name in names}
        rows = renamed[rows]
    return Split(mesh, axes, frozenset(names & set(axes)), rows)


def gather(variables, dtype):
    """Returns functions that gather weights split only to save memory.

    The list has, for each variable, a function of its array, or `None` if it
    is not split to save memory. Weights wider than `dtype`, that of the
    activations, are cast to it before they are sent.
    """
    return [_gather(split_of(variable), dtype) for variable in variables]


def in_turn(x, values, gathers, trained):
    """Makes a layer whose codes are gathered wait for the one before it.

    Codes depend on nothing, so that the TPU compiler may gather those of all
    layers before the first one runs. It also may compute the gradients of all
    adapters after the last layer's, and hold their inputs until then.

    Args:
        x: array, the layer's input.
        values: list of arrays, the layer's weights.
        gathers: list as of `gather`.
        trained: list of bools, whether a weight has a gradient.

    Returns:
        `x` and `values`. Codes are read after `x` was computed; the gradient
        of `x` is there after those of the weights.
    """
    codes = [
        i
        for i, (value, function) in enumerate(zip(values, gathers))
        if function is not None and jnp.issubdtype(value.dtype, jnp.integer)
    ]
    if not codes:
        return x, values
    values, now = list(values), jax.lax.stop_gradient(x)
    for i in codes:
        values[i], _ = jax.lax.optimization_barrier((values[i], now))
    own = [i for i, is_trained in enumerate(trained) if is_trained]
    x, found = _gradients_together(x, [values[i] for i in own])
    for i, value in zip(own, found):
        values[i] = value
    return x, values


@jax.custom_vjp
def _gradients_together(x, values):
    return x, values


_gradients_together.defvjp(
    lambda *inputs: (inputs, None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def _gather(split, dtype):
    if split is None or not split.to_save_memory:
        return None
    mesh, rows = split.mesh, split.rows
    names, axes = split.to_save_memory, split.axes
    whole = P(*(None if axis in names else axis for axis in axes))
    summed = P(*(None if a in names and a != rows else a for a in axes))
    gathered = [NamedSharding(mesh, whole)]
    kept = (NamedSharding(mesh, summed), NamedSharding(mesh, P(*axes)))
    scattered, place = [], 0
    stages = split.stages() if rows in axes else None
    if stages is not None:
        place = axes.index(rows)
        others = (*summed[:place], *summed[place + 1 :])
        outer, both = stages.names[0], stages.names
        for axis in (outer, both):
            scattered.append(NamedSharding(stages.mesh, P(axis, *others)))
        if stages.to_gather:
            parts = P(*(outer if axis == rows else axis for axis in summed))
            gathered.insert(0, NamedSharding(stages.mesh, parts))
    layouts = _GatherLayouts(tuple(gathered), tuple(scattered), place, kept)
    return functools.partial(_cast_and_gather, layouts, dtype)


@dataclasses.dataclass(frozen=True)
class _GatherLayouts:
    """The sequence of layouts of a gathered weight and of its gradient.

    Args:
        gathered: layouts of the weight, the last of them for use.
        scattered: layouts of the gradient with the axis `place` moved to the
            front.
        place: int, the axis of the weight that is split over rows.
        kept: layouts of the gradient, the last that of the variable.
    """

    gathered: tuple
    scattered: tuple
    place: int
    kept: tuple


def _cast_and_gather(layouts, dtype, x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if is_float and jnp.dtype(dtype).itemsize < x.dtype.itemsize:
        x = x.astype(dtype)
    return _gathered(layouts, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(layouts, x):
    for layout in layouts.gathered:
        x = jax.lax.with_sharding_constraint(x, layout)
        x = checkpoint_name(x, GATHERED)
    return x


def _gathered_forward(layouts, x):
    return _gathered(layouts, x), None


def _gathered_backward(layouts, _, gradient):
    # Along an axis other than the first, the TPU compiler scatters only sizes
    # that are divisible into pairs of its tiles.
    gradient = jnp.moveaxis(gradient, layouts.place, 0)
    for layout in layouts.scattered:
        gradient = jax.lax.with_sharding_constraint(gradient, layout)
    gradient = jnp.moveaxis(gradient, 0, layouts.place)
    # Each device receives only its part of the sum over rows. Parts along
    # another axis are cut out afterwards: if only they were requested, XLA
    # would split the activations as well.
    for layout in layouts.kept:
        gradient = jax.lax.with_sharding_constraint(gradient, layout)
    # XLA may turn this into an all-reduce and a slice, and fuse the slice with
    # its consumers. All full gradients would then stay in memory until their
    # norm and the update: 16 GiB for an 8B model on 64 chips.
    return (jax.lax.optimization_barrier(gradient),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


# The name of outputs that are sums over the devices of the model axis.
SUMMED = "kpt_summed"


def layers_with_summed_outputs(layer):
    """Lists the linear layers in `layer` whose outputs are sums over devices.

    Each device along the mesh's other axis has a part of such a layer's
    inputs. Examples are the output projections of attention and feed-forward
    layers. There are none on a mesh of one axis.
    """
    *_, model, size = axes()
    if size == 1:
        return []
    return [x for x in sublayers(layer) if _has_summed_output(x, model)]


def _has_summed_output(layer, model):
    kernel = getattr(layer, "kernel", None)
    if not hasattr(kernel, "path"):
        return False
    split = split_of(kernel)
    equation = equation_of(layer)
    _, labels, outputs = re.split(",|->", equation)
    return model not in split.to_save_memory and any(
        axis == model and label not in outputs
        for axis, label in zip(split.axes, labels)
    )


def shared_axis(split, rows):
    """Returns the axis over which a kernel stays split in `over_rows`.

    It is the mesh's axis other than that of rows, if the kernel is split over
    it to divide the work; else `None`.
    """
    mesh, _, size, model, model_size = axes()
    if split is None or model_size == 1 or rows % size:
        return None
    is_shared = model in split.axes and model not in split.to_save_memory
    return model if is_shared else None


def over_rows(function, kernels, splits, *rows, shared=None):
    """Runs `function(kernels, *rows)` on each device with its own rows.

    If a function selects tokens of a batch, XLA would gather the tokens of
    all rows on every device. Here the kernels are gathered instead, once, and
    their gradients are summed once.

    Args:
        function: returns `(sums, values)`: scalars, which are added up over
            devices, and arrays with a leading `rows` axis.
        kernels: list of arrays.
        splits: list with the `Split` of each kernel, or `None` if it is not
            split.
        *rows: pytrees of arrays with a leading `rows` axis.
        shared: name returned by `shared_axis`, or `None`. Along this axis
            each device keeps its part of the kernels, and `function` has to
            combine the results.
    """
    kernels, rows = synchronize_gradients((kernels, rows))
    mesh, name, size = data_axis()
    leading = {x.shape[0] for x in jax.tree.leaves(rows)}
    if shared is not None:
        mesh, name, size, *_ = axes()
    if mesh is None or any(n % size for n in leading):
        return function(kernels, *rows)
    along, groups = _gathered_along(splits)
    dtypes = [kernel.dtype for kernel in kernels]
    specs = [_axes_among({along, shared}, split) for split in splits]
    manual = flat(name, shared)
    if axes()[4] > 1 and shared is None:
        # The kernels are gathered here because inside `shard_map` XLA would
        # first undo their split over the mesh's other axis. They are float32
        # because XLA's CPU backend cannot sum bfloat16 over some of the axes.
        whole = [_gather(*pair) for pair in zip(splits, dtypes)]
        kernels = [k if f is None else f(k) for f, k in zip(whole, kernels)]
        kernels = [kernel.astype("float32") for kernel in kernels]
        specs = [()] * len(kernels)

    def gathered(kernel, dtype, axes):
        kernel = kernel.astype(dtype)
        if along not in axes:
            return kernel
        return gather_along(along, axes.index(along), groups, kernel)

    def local(kernels, *rows):
        kernels = [gathered(*parts) for parts in zip(kernels, dtypes, specs)]
        sums, values = function(kernels, *rows)
        return jax.tree.map(lambda x: x[None], sums), values

    sums, values = on_devices(
        local,
        mesh,
        ([P(*axes) for axes in specs], *(P(name) for _ in rows)),
        P(name),
        manual,
    )(kernels, *rows)
    return jax.tree.map(lambda x: x.sum(axis=0), sums), values


def over_heads(function, query, key, value, tokens, sinks):
    """Runs attention on each device with its own rows and heads.

    If there are fewer heads of keys than devices, they are repeated so that
    each device has the one that its queries need.

    Args:
        function: function of the other arguments to an array like `query`.
        query, key, value: arrays of shape `(rows, length, heads, head_dim)`.
        tokens: pytree of arrays of shape `(rows, length)`.
        sinks: array of shape `(heads,)`, or `None`.
    """
    mesh, data, data_size, model, size = axes()
    if mesh is None or data_size * size == 1:
        return function(query, key, value, tokens, sinks)
    heads, kv_heads = query.shape[2], key.shape[2]
    rows = data if query.shape[0] % data_size == 0 else None
    if kv_heads % size:
        if heads % size == 0 and size % kv_heads == 0:
            repeats = size // kv_heads
            key, value = (jnp.repeat(x, repeats, 2) for x in (key, value))
        else:
            model = None
    spec = P(rows, None, model)
    specs = (spec, spec, spec, P(rows), P(model))
    run = on_devices(function, mesh, specs, spec)
    return run(query, key, value, tokens, sinks)


def synchronize_gradients(arrays):
    """Returns `arrays`; their gradients are used only when all are computed.

    Only the update uses the gradient of the head's kernel. XLA would keep its
    float32 sum over chunks (2 GiB for Llama-3) on every device during the
    backward pass of all layers, and scatter it afterwards.
    """
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, _synchronize(*leaves))


@jax.custom_vjp
def _synchronize(*arrays):
    return arrays


def _synchronize_forward(*arrays):
    # Gradients of arrays that are not trained are not used and must not be
    # computed.
    is_read = tuple(() if x.perturbed else None for x in arrays)
    return tuple(x.value for x in arrays), is_read


def _synchronize_backward(is_read, gradients):
    read = {
        i: gradient
        for i, gradient in enumerate(gradients)
        if is_read[i] is not None and not isinstance(gradient, SymbolicZero)
    }
    read = jax.lax.optimization_barrier(read)
    return tuple(read.get(i) for i in range(len(gradients)))


_synchronize.defvjp(
    _synchronize_forward,
    _synchronize_backward,
    symbolic_zeros=True,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_along(name, axis, groups, x):
    """Gathers the parts of `x` along an axis, within a `jax.shard_map`.

    Args:
        name: str or tuple of them, the axis of the mesh.
        axis: int, the axis of `x`.
        groups: tuple of stages, `(name, groups)`: what is gathered over one
            after another, as arguments of `jax.lax.all_gather`.
        x: array. Its gradient is summed in float32.
    """
    for part, group in groups:
        x = jax.lax.all_gather(
            x, part, axis=axis, tiled=True, axis_index_groups=group
        )
    return x


def _gather_along_forward(name, axis, groups, x):
    return gather_along(name, axis, groups, x), None


def _gather_along_backward(name, axis, groups, _, gradient):
    # Each device receives its part from all others and sums in float32. This
    # sends as many bytes as a reduce-scatter, which on grids such as 4x4 the
    # TPU compiler replaces by an all-reduce with twice the bytes.
    count = jax.lax.axis_size(name)
    shape = gradient.shape
    cut = (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    parts = jax.lax.all_to_all(gradient.reshape(cut), name, axis, axis)
    total = parts.sum(axis=axis, dtype="float32")
    return (total.astype(gradient.dtype),)


gather_along.defvjp(_gather_along_forward, _gather_along_backward)


def _gathered_along(splits):
    """Returns the axis that weights are split over, and how it is gathered.

    Returns:
        `(axis, stages)`: the stages are pairs of an axis and groups of
        devices along it, or `None` for all of them.
    """
    found = [split for split in splits if split is not None]
    if not found:
        return None, ()
    split = found[0]
    stages = split.stages()
    if isinstance(split.rows, tuple):
        # The last one is the inner one.
        return split.rows, tuple((name, None) for name in split.rows[::-1])
    if stages is None or not stages.to_gather:
        return split.rows, ((split.rows, None),)
    return split.rows, tuple((split.rows, x) for x in stages.groups())


def _axes_among(names, split):
    """Returns a kernel's axes, with `None` for those not in `names`."""
    axes = () if split is None else split.axes
    return tuple(axis if axis in names else None for axis in axes)


def embedded(embedding, ids):
    """Looks up tokens, `(tokens, ..., hidden_dim)`, split over the data axis.

    If each device has some columns of the embedding, it looks up these
    columns for all tokens of its slice and sends them to the tokens' devices.
    The bytes sent are those of the activations and do not depend on the
    vocabulary.

    Args:
        embedding: KerasHub layer with a variable `embeddings`.
        ids: int array of shape `(tokens, ...)`.
    """
    mesh, name, size, model, _ = axes()
    if mesh is None or size == 1 or ids.shape[0] % size:
        return embedding(ids)
    split = split_of(embedding.embeddings)
    if _manual_axes() and model is not None and split.axes[0] == model:
        return _looked_up(embedding, ids, split)
    x = embedding(ids)
    if split.axes[1] == split.rows:
        # Each slice looks up its own tokens.
        slices = tuple(sorted(flat(name) - flat(split.rows))) or None
        spec = P(slices, *[None] * (x.ndim - 2), split.rows)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return shard_rows(x)


def _looked_up(embedding, ids, split):
    """Looks up tokens of an embedding whose words the model axis splits.

    XLA's partitioner fails on this lookup in `over_slices`.
    """
    mesh, name, size, model, _ = axes()

    def local(table, ids):
        own = len(table)
        every = jax.lax.all_gather(ids, name, tiled=True)
        at = every - jax.lax.axis_index(model) * own
        rows = jnp.take(table, jnp.clip(at, 0, own - 1), axis=0)
        rows = jnp.where(((at >= 0) & (at < own))[..., None], rows, 0)
        # All but one of the devices add zeros.
        rows = _added(rows, model)
        if split.axes[1] is None:
            first = jax.lax.axis_index(name) * len(ids)
            return jax.lax.dynamic_slice_in_dim(rows, first, len(ids))
        return jax.lax.all_to_all(rows, name, 0, rows.ndim - 1, tiled=True)

    specs = (P(*split.axes), P(name))
    x = on_devices(local, mesh, specs, P(name))(
        jnp.asarray(embedding.embeddings.value), ids
    )
    return x.astype(embedding.compute_dtype)


def _added(x, name):
    """Adds up arrays over an axis in `jax.shard_map`."""
    # XLA's backend for CPUs cannot add up bfloat16.
    dtype = "float32" if platform() == "cpu" else x.dtype
    return jax.lax.psum(x.astype(dtype), name).astype(x.dtype)
