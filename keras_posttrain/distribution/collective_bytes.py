"""The bytes that a step sends under an ideal use of its layout.

A program may send less: an embedding that is looked up on the device that
stores it is not gathered at all.
"""

import dataclasses
import math

from keras_posttrain.distribution.mesh import MODEL


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
):
    """Computes the bytes that a device ideally receives in a step.

    In each micro-batch, a weight that is split over the data axis is gathered
    once in the forward and once in the backward pass, and its gradient is
    scattered once
    ([Rajbhandari et al., 2020](https://arxiv.org/abs/1910.02054)). Other
    gradients are summed over the data axis once a step. In each micro-batch,
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

    Returns:
        Dict of floats by purpose.
    """
    gathered = scattered = summed = 0.0
    for weight in weights:
        n = sizes[weight.data]
        received = weight.num_bytes(sizes | {weight.data: 1}) * (n - 1) / n
        if weight.data in weight.axes:
            gathered += passes * received * micro_batches
            if weight.trainable:
                scattered += received * micro_batches
        elif weight.trainable:
            summed += 2 * received
    m = sizes.get(MODEL, 1)
    activations = 2 * passes * num_layers * micro_batches * activation_bytes
    return {
        "weight all-gather": gathered,
        "gradient reduce-scatter": scattered,
        "gradient all-reduce": summed,
        "activation all-reduce": activations * (2 * (m - 1) / m),
        "expert all-to-all": expert_bytes * micro_batches,
        "key and value exchange": context_bytes * micro_batches,
    }
