"""Meshes of devices, and how a model lies on them."""

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
    "tensor_parallel",
]
