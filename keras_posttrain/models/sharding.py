"""How a model's arrays lie on the mesh of Keras's distribution.

Without a distribution, or where an axis does not divide, all is as it was.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def layout_of(variable):
    """Where Keras's distribution puts a variable.

    Args:
        variable: `keras.Variable`.

    Returns:
        A `keras.distribution.TensorLayout`; `None` without a distribution.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    return distribution.get_variable_layout(variable)


def factor_layouts(pair):
    """Layouts of the LoRA factors of a layer, after its kernel's.

    `A`'s rows are split as the kernel's inputs and `B`'s columns as its
    outputs, so that the products need no array moved that the layer's own
    does not move. An axis of a matrix is made of several of the kernel's: it
    is split where one of these is.

    Args:
        pair: `models/lora.py:Pair`.

    Returns:
        `(layout of A, layout of B)`, both `None` without a distribution.
    """
    layout = layout_of(pair.layer.kernel)
    if layout is None:
        return None, None
    # The axes of the kernel in the order of the matrix, inputs first.
    axes = [None] * len(pair.to_kernel)
    for axis, place in zip(layout.axes, pair.to_kernel):
        axes[place] = axis
    count = len(pair.in_shape)
    into = next(filter(None, axes[:count]), None)
    out = next(filter(None, axes[count:]), None)
    mesh = layout.device_mesh
    return (
        keras.distribution.TensorLayout((into, None), mesh),
        keras.distribution.TensorLayout((None, out), mesh),
    )


# What a backward pass makes again and does not keep: gathered weights.
GATHERED = "kpt_gathered"


def data_axis():
    """The mesh and its axis of rows, as `(jax mesh, name, size)`.

    Without a distribution, or over one device, `(None, None, 1)`.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None, None, 1
    mesh = distribution.device_mesh.backend_mesh
    name = distribution.batch_dim_name
    size = mesh.shape[name]
    return (mesh, name, size) if size > 1 else (None, None, 1)


def axes():
    """The mesh with both of its axes.

    Returns:
        `(jax mesh, axis of rows, its size, the other axis, its size)`; the
        other axis is `None`, of size 1, where the mesh has one axis alone.
        The mesh is `None` without a distribution.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None, None, 1, None, 1
    mesh = distribution.device_mesh.backend_mesh
    data = distribution.batch_dim_name
    model = next((name for name in mesh.axis_names if name != data), None)
    return mesh, data, mesh.shape[data], model, mesh.shape.get(model, 1)


def by_rows(x):
    """`x` with its first axis, rows or their tokens, over the data axis.

    Said of what flows from layer to layer, so that weights come to the
    activations and not the other way round.
    """
    mesh, name, size = data_axis()
    if mesh is None or x.shape[0] % size:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(name)))


@dataclasses.dataclass(frozen=True)
class Stages:
    """An axis of a mesh as two, one after the other on the way.

    Args:
        mesh: `jax.sharding.Mesh` of the same devices in the same order.
        names: tuple of the two axes' names, the outer first.
        to_gather: bool, whether gathering needs them too.
    """

    mesh: jax.sharding.Mesh
    names: tuple
    to_gather: bool

    def groups(self):
        """Places along the axis that exchange: in the inner, the outer."""
        outer, inner = (self.mesh.shape[name] for name in self.names)
        places = np.arange(outer * inner).reshape(outer, inner)
        return places.tolist(), places.T.tolist()


# Over more chips at once the TPU compiler makes an all-reduce of the whole, of
# twice the bytes, of what scatters, and where they lie along three axes of the
# network of what gathers too.
MOST_AT_ONCE = 32


@functools.lru_cache(maxsize=16)
def two_stages(mesh, name):
    """How to go along an axis of the mesh that is too long for one go.

    Args:
        mesh: `jax.sharding.Mesh`.
        name: str, one of its axes.

    Returns:
        `Stages`, the inner of them along one axis of the TPUs' network; or
        `None`, where one go does, or the devices are no TPUs.
    """
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    if mesh.shape[name] <= MOST_AT_ONCE or not is_tpu:
        return None
    place = mesh.axis_names.index(name)
    line = np.moveaxis(mesh.devices, place, 0).reshape(mesh.shape[name], -1)
    at = np.array([device.coords for device in line[:, 0]])
    # Along how many axes of the network the first of them, 1 to all, lie.
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
    """How a weight is split over the mesh.

    Args:
        axes: tuple of names of axes of the mesh, or `None`, one for each
            axis of the weight.
        to_save_memory: frozenset of those over which it is split only to
            save memory: it is whole along them while it is used.
    """

    axes: tuple
    to_save_memory: frozenset


def split_of(variable):
    """The `Split` of a variable; `None` without a distribution.

    To save memory are the weights split over the data axis, and over what
    else the distribution's `gathered_axes(variable)` names, if it has that
    method.

    Args:
        variable: `keras.Variable`.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    mesh = distribution.device_mesh.backend_mesh
    axes = tuple(layout_of(variable).axes)
    ask = getattr(distribution, "gathered_axes", None)
    names = ask(variable) if ask else {distribution.batch_dim_name}
    names = {name for name in names if mesh.shape[name] > 1}
    return Split(axes, frozenset(names & set(axes)))


def gather(variables, dtype):
    """How to have weights at hand that are split only to save memory.

    Args:
        variables: list of `keras.Variable`.
        dtype: that of the activations; weights kept in more are sent so.

    Returns:
        A list: for each variable that is split so, a function of its array,
        `None` for the others.
    """
    return [_gather(split_of(variable), dtype) for variable in variables]


def _gather(split, dtype):
    if split is None or not split.to_save_memory:
        return None
    distribution = keras.distribution.distribution()
    mesh = distribution.device_mesh.backend_mesh
    rows = distribution.batch_dim_name
    names, axes = split.to_save_memory, split.axes
    whole = P(*(None if axis in names else axis for axis in axes))
    summed = P(*(None if a in names and a != rows else a for a in axes))
    gathered = [NamedSharding(mesh, whole)]
    kept = (NamedSharding(mesh, summed), NamedSharding(mesh, P(*axes)))
    scattered, place = [], 0
    stages = two_stages(mesh, rows) if rows in axes else None
    if stages is not None:
        place = axes.index(rows)
        others = (*summed[:place], *summed[place + 1 :])
        outer, both = stages.names[0], stages.names
        for axis in (outer, both):
            scattered.append(NamedSharding(stages.mesh, P(axis, *others)))
        if stages.to_gather:
            parts = P(*(outer if axis == rows else axis for axis in summed))
            gathered.insert(0, NamedSharding(stages.mesh, parts))
    way = _Way(tuple(gathered), tuple(scattered), place, kept)
    return functools.partial(_cast_and_gather, way, dtype)


@dataclasses.dataclass(frozen=True)
class _Way:
    """The layouts of a weight on its way to where it is used, and back.

    `scattered` are those of its gradient with the axis `place` first.
    """

    gathered: tuple
    scattered: tuple
    place: int
    kept: tuple


def _cast_and_gather(way, dtype, x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if is_float and jnp.dtype(dtype).itemsize < x.dtype.itemsize:
        x = x.astype(dtype)
    return _gathered(way, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(way, x):
    for layout in way.gathered:
        x = jax.lax.with_sharding_constraint(x, layout)
        x = checkpoint_name(x, GATHERED)
    return x


def _gathered_forward(way, x):
    return _gathered(way, x), None


def _gathered_backward(way, _, gradient):
    # Of an axis that is not the first the TPU compiler scatters only what
    # divides into pairs of its tiles.
    gradient = jnp.moveaxis(gradient, way.place, 0)
    for layout in way.scattered:
        gradient = jax.lax.with_sharding_constraint(gradient, layout)
    gradient = jnp.moveaxis(gradient, 0, way.place)
    # Only its own part of the sum over rows comes to each device. Of another
    # axis the part is cut out afterwards: wanting no more than it, XLA would
    # split the activations as well.
    for layout in way.kept:
        gradient = jax.lax.with_sharding_constraint(gradient, layout)
    # XLA may make it an all-reduce and a cut, and would fuse the cut into
    # what uses it: the whole of all gradients would wait for their norm and
    # the update, 16 GiB of an 8B model over 64 chips.
    return (jax.lax.optimization_barrier(gradient),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


# Outputs that devices along the model axis have added up.
SUMMED = "kpt_summed"


def summing(layer):
    """The linear layers whose outputs devices add up, within a layer.

    Each device along the mesh's other axis has a part of such a layer's
    inputs: an attention's output, a feed-forward layer's.

    Args:
        layer: a Keras layer, built.

    Returns:
        A list of Keras layers, empty where the mesh has one axis alone.
    """
    *_, model, size = axes()
    if size == 1:
        return []
    return [part for part in layer._flatten_layers() if _sums(part, model)]


def _sums(layer, model):
    kernel = getattr(layer, "kernel", None)
    if not isinstance(kernel, keras.Variable):
        return False
    split = split_of(kernel)
    equation = getattr(layer, "equation", "bd,do->bo")
    _, labels, outputs = re.split(",|->", equation)
    return model not in split.to_save_memory and any(
        axis == model and label not in outputs
        for axis, label in zip(split.axes, labels)
    )


@contextlib.contextmanager
def naming(layers):
    """Names what these layers put out `SUMMED`, while it lasts."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            own = vars(layer)
            if "call" in own:
                stack.callback(own.__setitem__, "call", own["call"])
            else:
                stack.callback(own.pop, "call")
            own["call"] = _named(layer.call)
        yield


def _named(call):
    def named(*args, **kwargs):
        return checkpoint_name(call(*args, **kwargs), SUMMED)

    return named


def shared_axis(split, rows):
    """The axis over which a kernel stays split while `over_rows` runs.

    Args:
        split: `Split` of the kernel, or `None`.
        rows: int, the rows of the batch.

    Returns:
        The name of the mesh's axis beside that of rows, where the kernel is
        split over it to share out work; else `None`.
    """
    mesh, _, size, model, model_size = axes()
    if split is None or model_size == 1 or rows % size:
        return None
    is_shared = model in split.axes and model not in split.to_save_memory
    return model if is_shared else None


def over_rows(function, kernels, splits, *rows, shared=None):
    """`function(kernels, *rows)`, each device on its own rows.

    What gathers tokens out of a batch would have XLA bring all of them to
    every device. Here the kernels come to the rows, once, and their gradients
    are added up once.

    Args:
        function: of a list of kernels and of pytrees of arrays with a leading
            `rows` axis; gives `(sums, values)`: scalars, of which those of
            all devices are added up, and arrays with a leading `rows` axis.
        kernels: list of arrays.
        splits: list, the `Split` of each, or `None` where it is whole.
        *rows: pytrees of arrays.
        shared: what `shared_axis` gave, or `None`: along it each device has
            its own part of the kernels, and `function` sees to the rest.

    Returns:
        `(sums, values)`.
    """
    kernels, rows = finished_together((kernels, rows))
    mesh, name, size = data_axis()
    leading = {x.shape[0] for x in jax.tree.leaves(rows)}
    if shared is not None:
        mesh, name, size, *_ = axes()
    if mesh is None or any(n % size for n in leading):
        return function(kernels, *rows)
    stages = two_stages(mesh, name)
    groups = stages.groups() if stages and stages.to_gather else (None,)
    dtypes = [kernel.dtype for kernel in kernels]
    lie = [_along({name, shared}, split) for split in splits]
    manual = {name, shared} - {None}
    if mesh.size > size and shared is None:
        # XLA would undo the split over the mesh's other axis to do it inside,
        # and its CPU backend cannot add up bfloat16 on a part of the axes.
        whole = [_gather(*pair) for pair in zip(splits, dtypes)]
        kernels = [k if f is None else f(k) for f, k in zip(whole, kernels)]
        kernels = [kernel.astype("float32") for kernel in kernels]
        lie = [()] * len(kernels)

    def at_hand(kernel, dtype, axes):
        kernel = kernel.astype(dtype)
        if name not in axes:
            return kernel
        return _gather_along(name, axes.index(name), groups, kernel)

    def local(kernels, *rows):
        kernels = [at_hand(*parts) for parts in zip(kernels, dtypes, lie)]
        sums, values = function(kernels, *rows)
        return jax.tree.map(lambda x: x[None], sums), values

    sums, values = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([P(*a) for a in lie], *(P(name) for _ in rows)),
        out_specs=P(name),
        axis_names=manual,
        check_vma=False,
    )(kernels, *rows)
    return jax.tree.map(lambda x: x.sum(axis=0), sums), values


def finished_together(arrays):
    """`arrays`, whose gradients are all there before one of them is used.

    Nothing waits for the gradient of the head's kernel but the update: XLA
    would leave its sum over chunks in float32 and whole, 2 GiB for Llama-3,
    beside the backward pass of all layers, and then send it to the devices
    that keep it.

    Args:
        arrays: a pytree of arrays.
    """
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, _finished_together(*leaves))


@jax.custom_vjp
def _finished_together(*arrays):
    return arrays


def _finished_together_forward(*arrays):
    # Of what is not trained nobody reads the gradient, nor should it be made.
    is_read = tuple(() if x.perturbed else None for x in arrays)
    return tuple(x.value for x in arrays), is_read


def _finished_together_backward(is_read, gradients):
    read = {
        i: gradient
        for i, gradient in enumerate(gradients)
        if is_read[i] is not None and not isinstance(gradient, SymbolicZero)
    }
    read = jax.lax.optimization_barrier(read)
    return tuple(read.get(i) for i in range(len(gradients)))


_finished_together.defvjp(
    _finished_together_forward,
    _finished_together_backward,
    symbolic_zeros=True,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather_along(name, axis, groups, x):
    for group in groups:
        x = jax.lax.all_gather(
            x, name, axis=axis, tiled=True, axis_index_groups=group
        )
    return x


def _gather_along_forward(name, axis, groups, x):
    return _gather_along(name, axis, groups, x), None


def _gather_along_backward(name, axis, groups, _, gradient):
    # Each device is sent its part by all others and adds up in float32. The
    # bytes are those of a reduce-scatter, which the TPU compiler makes an
    # all-reduce, of twice as many, on grids such as 4x4.
    count = jax.lax.axis_size(name)
    shape = gradient.shape
    cut = (*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    parts = jax.lax.all_to_all(gradient.reshape(cut), name, axis, axis)
    total = parts.sum(axis=axis, dtype="float32")
    return (total.astype(gradient.dtype),)


_gather_along.defvjp(_gather_along_forward, _gather_along_backward)


def _along(names, split):
    """How a kernel lies along some axes of the mesh."""
    axes = () if split is None else split.axes
    return tuple(axis if axis in names else None for axis in axes)


def looked_up(x, embeddings):
    """Rows of an embedding that were looked up, brought to their devices.

    Where each device has some columns of the embedding, it looks up those of
    all tokens, of which each token's own device is sent its share: what is
    sent is the tokens' activations, however large the vocabulary.

    Args:
        x: array of shape `(tokens, ..., hidden_dim)`.
        embeddings: `keras.Variable` of shape `(vocabulary, hidden_dim)`.
    """
    mesh, name, size = data_axis()
    if mesh is None or x.shape[0] % size:
        return x
    if layout_of(embeddings).axes[1] == name:
        spec = P(*[None] * (x.ndim - 1), name)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return by_rows(x)
