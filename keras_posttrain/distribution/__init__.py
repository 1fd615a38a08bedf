"""Meshes of devices, and how a model lies on them."""

from keras_posttrain.distribution.abstract import shapes_only
from keras_posttrain.distribution.strategies import (
    ShardedWeights,
    data_parallel,
    fsdp,
    fsdp_tensor_parallel,
    tensor_parallel,
)

__all__ = [
    "ShardedWeights",
    "data_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "shapes_only",
    "tensor_parallel",
]
