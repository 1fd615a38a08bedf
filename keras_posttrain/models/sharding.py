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
    layouts = [NamedSharding(mesh, x) for x in (whole, summed, P(*axes))]
    return functools.partial(_cast_and_gather, tuple(layouts), dtype)


def _cast_and_gather(layouts, dtype, x):
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if is_float and jnp.dtype(dtype).itemsize < x.dtype.itemsize:
        x = x.astype(dtype)
    return _gathered(layouts, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(layouts, x):
    x = jax.lax.with_sharding_constraint(x, layouts[0])
    return checkpoint_name(x, GATHERED)


def _gathered_forward(layouts, x):
    return _gathered(layouts, x), None


def _gathered_backward(layouts, _, gradient):
    # Only its own part of the sum over rows comes to each device. Of another
    # axis the part is cut out afterwards: wanting no more than it, XLA would
    # split the activations as well.
    for layout in layouts[1:]:
        gradient = jax.lax.with_sharding_constraint(gradient, layout)
    # Over 64 chips XLA makes it an all-reduce and a cut, and would fuse the
    # cut into what uses it: the whole of all gradients would wait for their
    # norm and the update, 16 GiB of an 8B model.
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
        return _gather_along(name, axes.index(name), kernel)

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_along(name, axis, x):
    return jax.lax.all_gather(x, name, axis=axis, tiled=True)


def _gather_along_forward(name, axis, x):
    return _gather_along(name, axis, x), None


def _gather_along_backward(name, axis, _, gradient):
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
