"""Meshes of devices, and how a model lies on them."""

from keras_posttrain.distribution.abstract import shapes_only
from keras_posttrain.distribution.plan import Plan
from keras_posttrain.distribution.search import search
from keras_posttrain.distribution.strategies import (
    ShardedWeights,
    data_parallel,
    fsdp,
    fsdp_tensor_parallel,
    tensor_parallel,
)

__all__ = [
    "Plan",
    "ShardedWeights",
    "data_parallel",
    "fsdp",
    "fsdp_tensor_parallel",
    "search",
    "shapes_only",
    "tensor_parallel",
]
