"""Distributions of a model and its batches over devices."""

import math

import jax.numpy as jnp
import keras

from keras_posttrain.distribution import layouts
from keras_posttrain.distribution.mesh import DATA, MODEL, make_mesh


class ShardedWeights(keras.distribution.ModelParallel):
    """A distribution that splits weights by the meaning of their axes.

    `fsdp`, `tensor_parallel` and `fsdp_tensor_parallel` make one. The rows of
    a batch are split over the mesh axis `"batch"`. The mesh axis `"model"`,
    if there is one, splits experts, heads, the width of feed-forward layers
    or the vocabulary: the first of these whose size it divides. With
    `shard_over_data`, every matrix is split over `"batch"` as well. Norms are
    replicated. LoRA factors, float32 copies and the optimizer's state have
    the layout of the weight they belong to.

    Args:
        device_mesh: `keras.distribution.DeviceMesh` with an axis `"batch"`
            and, if weights are split over it, an axis `"model"`.
        shard_over_data: bool, whether to split weights over `"batch"` too.

    Raises:
        ValueError: while a model is made, if a weight of more than a
            megabyte has no axis that can be split.
    """

    def __init__(self, device_mesh, shard_over_data):
        super().__init__(
            layout_map=keras.distribution.LayoutMap(device_mesh),
            batch_dim_name=DATA,
            # Keras can only split a `tf.data.Dataset` over processes.
            auto_shard_dataset=False,
        )
        self.shard_over_data = shard_over_data
        sizes = dict(zip(device_mesh.axis_names, device_mesh.shape))
        self._sizes = {
            "model": sizes.get(MODEL, 1),
            "data": sizes[DATA] if shard_over_data else 1,
        }

    def get_variable_layout(self, variable):
        """Returns the `TensorLayout` of a `keras.Variable`."""
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        path, shape = variable.path, tuple(variable.shape)
        axes = layouts.spread(path, shape, **self._sizes)
        num_bytes = math.prod(shape) * jnp.dtype(variable.dtype).itemsize
        layouts.check(path, shape, num_bytes, axes, **self._sizes)
        names = {"model": MODEL, "data": DATA, None: None}
        return keras.distribution.TensorLayout(
            [names[a] for a in axes], self.device_mesh
        )

    def gathered_axes(self, variable):
        """Returns the mesh axes over which a weight is gathered before use.

        Args:
            variable: `keras.Variable`.

        Returns:
            A set of names: the data axis; and the model axis if it splits an
            axis that tensor parallelism does not, such as the inputs of a
            key's kernel with fewer heads than devices.
        """
        axes = self.get_variable_layout(variable).axes
        names = layouts.meanings(variable.path, len(axes))
        found = {DATA}
        if names and MODEL in axes:
            if names[axes.index(MODEL)] in layouts.ONLY_FOR_MEMORY:
                found.add(MODEL)
        return found


def data_parallel(*, devices=None):
    """Replicates the model on every device and splits the rows of a batch.

    Args:
        devices: list of names from `keras.distribution.list_devices()`, or
            `None` for all.

    Returns:
        A `keras.distribution.DataParallel`.

    Example:

    ```python
    keras.distribution.set_distribution(kpt.distribution.data_parallel())
    task = kpt.SFTTask.from_preset("qwen3_0.6b_en")
    ```
    """
    return keras.distribution.DataParallel(
        device_mesh=make_mesh({DATA: None}, devices), auto_shard_dataset=False
    )


def fsdp(data=None, *, devices=None):
    """Fully sharded data parallelism: splits rows and every matrix.

    Weights, gradients and the optimizer's state are split over the devices;
    a layer's weights are gathered when it runs
    ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054), stage 3).

    Args:
        data: int, the number of devices, or `None` for all of `devices`.
        devices: as in `data_parallel`.

    Returns:
        A `keras.distribution.ModelParallel`, to be set before the model is
        made.

    Raises:
        ValueError: if `data` is not the number of devices.

    Example:

    ```python
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    task = kpt.SFTTask.from_preset("llama3_8b_en", dtype="bfloat16")
    ```
    """
    mesh = make_mesh({DATA: data}, devices)
    return ShardedWeights(mesh, shard_over_data=True)


def tensor_parallel(model=None, *, devices=None):
    """Tensor parallelism: splits the work of each layer.

    Heads, feed-forward widths, experts and the vocabulary are split
    ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053)). If `model` is
    below the number of devices, the model is replicated and the replicas
    split the rows.

    Args:
        model: int, devices that hold the model together, or `None` for all.
        devices: as in `data_parallel`.

    Returns:
        A `keras.distribution.ModelParallel`, as of `fsdp`.

    Raises:
        ValueError: if `model` does not divide the number of devices.

    Example:

    ```python
    keras.distribution.set_distribution(
        kpt.distribution.tensor_parallel(model=4)
    )
    ```
    """
    sizes = {DATA: 1 if model is None else None, MODEL: model}
    return ShardedWeights(make_mesh(sizes, devices), shard_over_data=False)


def fsdp_tensor_parallel(data=None, model=None, *, devices=None):
    """FSDP over `data` devices and tensor parallelism over `model` devices.

    Args:
        data: int, devices along the data axis, or `None` to compute it from
            `model`.
        model: int, devices along the model axis, or `None` to compute it
            from `data`; one of the two must be given.
        devices: as in `data_parallel`.

    Returns:
        A `keras.distribution.ModelParallel`, as of `fsdp`.

    Raises:
        ValueError: if the sizes do not multiply to the number of devices.

    Example:

    ```python
    keras.distribution.set_distribution(
        kpt.distribution.fsdp_tensor_parallel(data=4, model=2)
    )
    ```
    """
    if data is None and model is None:
        raise ValueError(
            "`data` or `model` must be given: the mesh has two axes, and the "
            "number of devices determines one of them. Received: data=None, "
            "model=None"
        )
    mesh = make_mesh({DATA: data, MODEL: model}, devices)
    return ShardedWeights(mesh, shard_over_data=True)
