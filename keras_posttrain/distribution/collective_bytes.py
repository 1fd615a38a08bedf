"""The bytes that a step sends under an ideal use of its layout.

A program may send less: an embedding that is looked up on the device that
stores it is not gathered at all.
"""

import dataclasses
import math

import numpy as np

from keras_posttrain.distribution.mesh import MODEL, SLICE


def received(kind, size, devices, slices=1):
    """Computes the bytes that a device receives in a collective.

    Over several slices it runs in two stages, so that as little as possible
    is sent from slice to slice: a device exchanges its part with the devices
    of the same place in other slices
    ([Cho et al., 2019](https://ieeexplore.ieee.org/document/8752949)).

    Args:
        kind: str, as `hlo.Collective.kind`.
        size: float, bytes of the full array: what an all-gather returns, and
            what the others get.
        devices: int, the devices that it is over.
        slices: int, the slices that these devices are in.

    Returns:
        A tuple of floats: bytes from devices of the same slice, and of
        others.
    """
    own = devices / slices
    within = size * (own - 1) / own
    across = size / own * (slices - 1) / slices
    if kind == "all-reduce":
        return 2 * within, 2 * across
    if kind in ("all-gather", "reduce-scatter"):
        return within, across
    if kind in ("all-to-all", "ragged-all-to-all"):
        return size * (own - 1) / devices, size * (devices - own) / devices
    # Sent as it is.
    return (size, 0.0) if slices == 1 else (0.0, size)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A model variable in a plan.

    Attributes:
        shape: tuple of ints.
        itemsize: int, bytes of an entry in the compute dtype.
        axes: tuple of the mesh axis, or `None`, that each axis is split over.
        trainable: bool.
        data: str, the mesh axis whose devices have different rows and the
            same part of the weight, if it is not split over it.
    """

    shape: tuple
    itemsize: int
    axes: tuple
    trainable: bool
    data: str

    def num_bytes(self, sizes):
        """Returns the bytes on a device, for mesh axes of these sizes."""
        split = math.prod(sizes.get(a, 1) for a in self.axes if a is not None)
        return math.prod(self.shape) * self.itemsize / split


def ideal_bytes(
    weights,
    sizes,
    *,
    micro_batches,
    num_layers,
    activation_bytes,
    expert_bytes=0.0,
    context_bytes=0.0,
    passes=2,
    slices=None,
):
    """Computes the bytes that a device ideally receives in a step.

    In each micro-batch, a weight that is split over the data axis is gathered
    once in the forward and once in the backward pass, and its gradient is
    scattered once
    ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)). Other
    gradients are summed over the data axis once a step, and all over the axis
    of slices, those of several micro-batches in float32. In each micro-batch,
    the activations are summed over the model axis twice per layer and pass
    ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053)). Tokens that
    are sent to their experts are sent in each pass. Keys and values of rows
    whose tokens are split are gathered in each pass, and their gradients
    scattered in the backward pass.

    Args:
        weights: list of `Weight`.
        sizes: dict of ints, the mesh axes' sizes by name.
        micro_batches: int, the number of micro-batches in a step.
        num_layers: int, the number of decoder layers.
        activation_bytes: float, bytes that one layer passes to the next on a
            device in a micro-batch.
        expert_bytes: float, bytes that a device receives of other devices'
            tokens, for its experts, and of its own tokens' outputs, in all
            layers and passes of a micro-batch.
        context_bytes: float, bytes that a device receives of keys and values
            of other devices' tokens of its rows, and of their gradients, in
            all layers and passes of a micro-batch.
        passes: int, the passes of a micro-batch through the model: forward,
            backward, and another one for a reference's forward pass.
        slices: dict of ints, by a mesh axis's name the slices along it, if
            there are several.

    Returns:
        Two dicts of floats by purpose: of bytes from devices of the same
        slice, and of others.
    """
    slices = slices or {}
    found = {
        "weight all-gather": np.zeros(2),
        "gradient reduce-scatter": np.zeros(2),
        "gradient all-reduce": np.zeros(2),
        "activation all-reduce": np.zeros(2),
        "expert all-to-all": np.array([expert_bytes * micro_batches, 0.0]),
        "key and value exchange": np.array(
            [context_bytes * micro_batches, 0.0]
        ),
    }

    def add(purpose, size, axis, times=1):
        kind = purpose.split()[1]
        moved = received(kind, size, sizes.get(axis, 1), slices.get(axis, 1))
        found[purpose] += times * np.array(moved)

    for weight in weights:
        whole = weight.num_bytes(sizes | {weight.data: 1})
        own, is_split = whole, weight.data in weight.axes
        if is_split:
            own = whole / sizes[weight.data]
            passed = passes * micro_batches
            add("weight all-gather", whole, weight.data, passed)
        if not weight.trainable:
            continue
        if is_split:
            add("gradient reduce-scatter", whole, weight.data, micro_batches)
        else:
            add("gradient all-reduce", whole, weight.data)
        if micro_batches > 1:
            own *= 4 / weight.itemsize
        add("gradient all-reduce", own, SLICE)
    times = 2 * passes * num_layers * micro_batches
    add("activation all-reduce", activation_bytes, MODEL, times)
    return tuple(
        {name: float(moved[i]) for name, moved in found.items()}
        for i in range(2)
    )
