"""Distributions of a model and its batches over devices."""

import functools
import math

import jax.numpy as jnp
import keras

from keras_posttrain.distribution import layouts
from keras_posttrain.distribution.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    MODEL,
    REPLICA,
    ROWS,
    SLICE,
    divide,
    divide_devices,
    make_hybrid_mesh,
    make_mesh,
    name_of,
)


class ShardedWeights(keras.distribution.ModelParallel):
    """A distribution that splits weights by the meaning of their axes.

    `fsdp`, `tensor_parallel`, `fsdp_tensor_parallel` and `hybrid` make one.
    The rows of a batch are split over the mesh axis `"batch"`, and over
    `"slice"`, if there is one; no weight is. The mesh axis `"model"`,
    if there is one, splits experts, heads, the width of feed-forward layers
    or the vocabulary: the first of these whose size it divides. With
    `shard_over_data`, every matrix is split over `"batch"` as well. Norms are
    replicated. LoRA factors, float32 copies and the optimizer's state have
    the layout of the weight they belong to.

    With `num_expert_shards` the weights of experts lie on `expert_mesh`,
    which has the same devices in the same order and two axes for `"batch"`:
    experts are split over `"expert"`, and another axis of their weights over
    `"replica"`.

    Args:
        device_mesh: `keras.distribution.DeviceMesh` with an axis `"batch"`
            and, if weights are split over it, an axis `"model"`. The first
            axis may be `"slice"`.
        shard_over_data: bool, whether to split weights over `"batch"` too.
        num_expert_shards: int, the devices that hold all experts together,
            or 1 for experts that are split as other weights are.
        num_context_shards: int, the devices that split the tokens of a row,
            or 1 for rows that each device has whole. `context_mesh` has the
            devices along two axes: rows are split over `"rows"`, tokens of a
            row over `"context"`.

    Raises:
        ValueError: while a model is made, if a weight of more than a
            megabyte has no axis that can be split, or if
            `num_expert_shards` does not divide the number of experts.

    Attributes:
        row_axes: tuple of str, the mesh axes that rows are split over.

    Example:

    ```python
    mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"])
    layout = kpt.distribution.ShardedWeights(mesh, shard_over_data=True)
    keras.distribution.set_distribution(layout)
    task = kpt.SFTTask.from_preset("qwen3_0.6b_en")
    ```
    """

    def __init__(
        self,
        device_mesh,
        shard_over_data,
        num_expert_shards=1,
        num_context_shards=1,
    ):
        super().__init__(
            layout_map=keras.distribution.LayoutMap(device_mesh),
            batch_dim_name=DATA,
            # Keras can only split a `tf.data.Dataset` over processes.
            auto_shard_dataset=False,
        )
        self.shard_over_data = shard_over_data
        sizes = dict(zip(device_mesh.axis_names, device_mesh.shape))
        self.row_axes = (SLICE, DATA) if SLICE in sizes else (DATA,)
        self._sizes = {
            "model": sizes.get(MODEL, 1),
            "data": sizes[DATA] if shard_over_data else 1,
        }
        self.num_expert_shards = num_expert_shards
        self.expert_mesh = None
        if num_expert_shards > 1:
            self.expert_mesh = divide(device_mesh, num_expert_shards)
        self.num_context_shards = num_context_shards
        self.context_mesh = None
        if num_context_shards > 1:
            self.context_mesh = divide(
                device_mesh, num_context_shards, (ROWS, CONTEXT)
            )

    def get_data_layout(self, data_shape):
        """Returns the `TensorLayout` of a batch's array, split by rows.

        Devices that split the tokens of a row have all of its arrays, which
        are small: only what the model computes of them is split.
        """
        rest = [None] * (len(data_shape) - 1)
        if self.context_mesh is not None:
            axes = [ROWS, *rest]
            return keras.distribution.TensorLayout(axes, self.context_mesh)
        if len(self.row_axes) == 1:
            return super().get_data_layout(data_shape)
        return _RowLayout([self.row_axes, *rest], self.device_mesh)

    def get_variable_layout(self, variable):
        """Returns the `TensorLayout` of a `keras.Variable`."""
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        path, shape = variable.path, tuple(variable.shape)
        mesh, sizes = self.device_mesh, self._sizes
        names = {"model": MODEL, "data": DATA, None: None}
        if self._is_of_experts(path, shape):
            mesh = self.expert_mesh
            sizes = dict(zip(("data", "model"), mesh.shape))
            names = {"model": EXPERT, "data": REPLICA, None: None}
        axes = layouts.spread(path, shape, **sizes)
        num_bytes = math.prod(shape) * jnp.dtype(variable.dtype).itemsize
        layouts.check(path, shape, num_bytes, axes, **sizes)
        return keras.distribution.TensorLayout([names[a] for a in axes], mesh)

    def _is_of_experts(self, path, shape):
        """Returns whether a variable is split by expert on `expert_mesh`."""
        names = layouts.meanings(path, len(shape)) or ()
        if self.expert_mesh is None or names[:1] != ("experts",):
            return False
        if shape[0] % self.num_expert_shards:
            raise ValueError(
                "`experts` must divide the number of experts of a layer. "
                f"Received: experts={self.num_expert_shards}, and {path!r} "
                f"of {shape[0]} experts. Use a number of devices that "
                f"divides {shape[0]}."
            )
        return True

    def gathered_axes(self, variable):
        """Returns the mesh axes over which a weight is gathered before use.

        Args:
            variable: `keras.Variable`.

        Returns:
            A set of names: the data axis, or that of the expert mesh; and
            the model axis if it splits an axis that tensor parallelism does
            not, such as the inputs of a key's kernel with fewer heads than
            devices.
        """
        layout = self.get_variable_layout(variable)
        if REPLICA in layout.device_mesh.axis_names:
            return {REPLICA}
        axes = layout.axes
        names = layouts.meanings(variable.path, len(axes))
        found = {DATA}
        if names and MODEL in axes:
            if names[axes.index(MODEL)] in layouts.ONLY_FOR_MEMORY:
                found.add(MODEL)
        return found


class _RowLayout(keras.distribution.TensorLayout):
    """A layout whose first axis is split over several axes of the mesh.

    Keras's class takes one name for an axis; JAX takes a tuple of them.
    """

    def _validate_axes(self):
        pass


def split(*, trainer=None, sampler=None, devices=None):
    """Divides devices between the trainer and the sampler.

    Each trains or samples on devices of its own, with a layout of its own, at
    the same time (`fit(max_staleness=1)`). The weights are copied from device
    to device after each rollout. Both get the same share of each process.
    Several processes on CPUs take turns: there JAX runs one program of
    several devices at a time.

    Args:
        trainer, sampler: ints, numbers of devices in all processes; one of
            them may be `None` for those that are left.
        devices: as in `data_parallel`.

    Returns:
        Two lists of names, of the trainer's devices and of the sampler's.

    Raises:
        ValueError: if the numbers are not those of the devices, or if a
            process would have no device of both.

    Example:

    ```python
    trainer, sampler = kpt.distribution.split(trainer=4, sampler=4)
    keras.distribution.set_distribution(
        kpt.distribution.fsdp(devices=trainer)
    )
    task = kpt.GRPOTask.from_preset("qwen3_0.6b_en")
    reward = kpt.rewards.ExactMatchReward()
    engine = kpt.rollout.NativeRollout(
        distribution=kpt.distribution.tensor_parallel(devices=sampler)
    )
    task.compile(rewards=[reward], rollout=engine)
    ```
    """
    parts = divide_devices(trainer, sampler, devices)
    return tuple([name_of(device) for device in part] for part in parts)


def of_topology(hardware):
    """Returns the strategies to try first on a `Topology`, the default first.

    Each is a function of `devices`, as `Task.plan` takes it.
    """
    if hardware.num_slices == 1:
        return [fsdp] + [
            functools.partial(fsdp_tensor_parallel, model=n) for n in (2, 4)
        ]
    within = functools.partial(hybrid, slices=hardware.num_slices)
    more = [functools.partial(within, model=n) for n in (2, 4)]
    return [within, *more, fsdp]


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


def fsdp(data=None, *, experts=1, context=1, devices=None):
    """Fully sharded data parallelism: splits rows and every matrix.

    Weights, gradients and the optimizer's state are split over the devices;
    a layer's weights are gathered when it runs
    ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054), stage 3).

    With `experts`, that many devices hold the experts of a mixture together:
    tokens are sent to the devices of their experts and back
    ([Lepikhin et al., 2020](https://arxiv.org/abs/2006.16668)), and experts
    are gathered only from the devices that have the same ones. No token is
    dropped; `models/expert_parallel.py` says how. This sends less than FSDP
    alone where a layer's experts weigh more than the tokens that they get.

    With `context`, that many devices split the tokens of a row, for rows that
    one device's memory cannot hold. Each device computes the attention of its
    own tokens to the keys and values of the full row, which are gathered in
    every layer (as in [Llama Team, 2024](https://arxiv.org/abs/2407.21783),
    section 3.3.2); `models/context.py` says how. Weights are split over all
    devices as without it. `NativeRollout` samples as under `fsdp()`: each
    device has sequences of its own. With several processes these devices are
    some of one process, or all devices of several, which then make the same
    rows; `fit` on rows refuses others.

    Args:
        data: int, the number of devices, or with `experts` or `context` the
            number of their groups; `None` for all of `devices`.
        experts: int, the devices that hold all experts of a layer together,
            or `None` to compute it from `data`. It must divide the number of
            experts. Rows are split over all `data * experts` devices.
        context: int, the devices that split the tokens of a row, or `None`
            to compute it from `data`. Rows are split over `data` devices.
        devices: as in `data_parallel`.

    Returns:
        A `keras.distribution.ModelParallel`, to be set before the model is
        made.

    Raises:
        ValueError: if `data * experts * context` is not the number of
            devices, or if both `experts` and `context` are used.

    Example:

    ```python
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    task = kpt.SFTTask.from_preset("llama3_8b_en", dtype="bfloat16")
    ```

    Rows of 32,768 tokens, each on eight devices:

    ```python
    keras.distribution.set_distribution(kpt.distribution.fsdp(context=8))
    task = kpt.SFTTask.from_preset(
        "qwen3_8b_en", dtype="bfloat16", sequence_length=32_768
    )
    ```
    """
    if context != 1:
        if experts != 1:
            raise ValueError(
                "`experts` and `context` divide the same devices, so that "
                "one of them must be 1. Received: "
                f"experts={experts}, context={context}. With `context`, "
                "experts are split as other weights are."
            )
        data, context = make_mesh(
            {DATA: data, CONTEXT: context}, devices
        ).shape
        mesh = make_mesh({DATA: data * context}, devices)
        return ShardedWeights(mesh, True, num_context_shards=context)
    if experts == 1:
        return ShardedWeights(make_mesh({DATA: data}, devices), True)
    # Raises an error for sizes that do not fit.
    data, experts = make_mesh({DATA: data, EXPERT: experts}, devices).shape
    mesh = make_mesh({DATA: data * experts}, devices)
    return ShardedWeights(mesh, True, num_expert_shards=experts)


def tensor_parallel(model=None, *, devices=None):
    """Tensor parallelism: splits the work of each layer.

    Heads, feed-forward widths, experts and the vocabulary are split
    ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053)). Between the
    products of a layer the tokens of a batch are split, and with them what is
    kept for the backward pass
    ([Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198)), if their
    number is divisible by that of the devices. Layers with experts or
    quantized kernels keep them whole. If `model` is below the number of
    devices, the model is replicated and the replicas split the rows.

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

    See `fsdp` and `tensor_parallel`.

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


def hybrid(slices=None, *, model=1, devices=None):
    """FSDP within each slice, and data parallelism over slices.

    A slice is a group of devices that a fast network joins: a TPU slice, or
    the GPUs of a node. Weights, gradients and the optimizer's state are split
    over the devices of a slice and replicated over slices, rows are split
    over all devices. Weights are gathered within a slice alone. Gradients are
    scattered within a slice, and each device adds its part up with those of
    other slices once per step, also with micro-batches
    ([Zhao et al., 2023](https://arxiv.org/abs/2304.11277), "hybrid sharding").

    With several micro-batches that sum is of float32 numbers. A batch that is
    not cut into micro-batches, with a loss that couples it or one that
    balances routers, is computed over all slices at once, and more may be
    sent. So is one whose examples of several rows do not divide evenly.

    Args:
        slices: int, the number of slices, or `None` for those that the
            devices report (`slice_index`). Devices that report none, such as
            those of a CPU, are divided in their order; a single one is a
            slice.
        model: int, devices of a slice for tensor parallelism.
        devices: as in `data_parallel`.

    Returns:
        A `keras.distribution.ModelParallel`, as of `fsdp`.

    Raises:
        ValueError: if `slices` is not given and several devices report none,
            or if the devices cannot be divided into `slices` of the same size,
            each a multiple of `model`.

    Example:

    ```python
    keras.distribution.set_distribution(kpt.distribution.hybrid(slices=2))
    task = kpt.SFTTask.from_preset("llama3_8b_en", dtype="bfloat16")
    ```
    """
    sizes = {DATA: None} if model == 1 else {DATA: None, MODEL: model}
    mesh = make_hybrid_mesh(slices, sizes, devices)
    return ShardedWeights(mesh, shard_over_data=True)
