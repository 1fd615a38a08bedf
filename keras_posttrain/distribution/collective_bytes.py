"""The bytes that a layout sends by the book.

A program may send less: an embedding that is looked up where it lies is not
gathered at all.
"""

import dataclasses
import math

from keras_posttrain.distribution.mesh import MODEL


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable of a model, as a plan sees it.

    Attributes:
        shape: tuple of ints.
        itemsize: int, bytes of an entry where it is used: in the compute
            dtype.
        axes: tuple of names of axes of the mesh, or `None`, one an axis.
        trainable: bool.
    """

    shape: tuple
    itemsize: int
    axes: tuple
    trainable: bool

    def num_bytes(self, sizes):
        """Bytes of the part that axes of these sizes leave on a device."""
        split = math.prod(sizes.get(a, 1) for a in self.axes if a is not None)
        return math.prod(self.shape) * self.itemsize / split


def ideal_bytes(
    weights,
    sizes,
    data,
    *,
    micro_batches,
    num_layers,
    activation_bytes,
    passes=2,
):
    """Bytes that a device receives in a step that sends what it must.

    A weight that is split over the data axis is gathered once forward and
    once backward, and its gradient scattered once, in each micro-batch
    ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)). Other
    gradients are added up over the data axis once a step. Over the model axis
    the activations are added up twice a layer each way, in each micro-batch
    ([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053)).

    Args:
        weights: list of `Weight`.
        sizes: dict of ints, the axes of the mesh.
        data: str, the axis of rows.
        micro_batches: int.
        num_layers: int.
        activation_bytes: float, those that flow between two layers on one
            device in a micro-batch.
        passes: int, how often a micro-batch goes through the model: forward,
            backward, and once more for a reference's forward pass.

    Returns:
        Dict of floats: `"gathering weights"`, `"scattering gradients"`,
        `"adding up gradients"` and `"adding up activations"`.
    """
    n = sizes[data]
    others = {name: size for name, size in sizes.items() if name != data}
    found = dict.fromkeys(
        (
            "gathering weights",
            "scattering gradients",
            "adding up gradients",
            "adding up activations",
        ),
        0.0,
    )
    for weight in weights:
        moved = weight.num_bytes(others) * (n - 1) / n
        if data in weight.axes:
            found["gathering weights"] += passes * moved * micro_batches
            if weight.trainable:
                found["scattering gradients"] += moved * micro_batches
        elif weight.trainable:
            found["adding up gradients"] += 2 * moved
    m = sizes.get(MODEL, 1)
    found["adding up activations"] = (
        2 * passes * num_layers * micro_batches * activation_bytes
    ) * (2 * (m - 1) / m)
    return found
