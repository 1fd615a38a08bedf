"""A server of the Tinker API: `python -m keras_posttrain.serve`."""

from keras_posttrain.serve.server import TinkerServer

__all__ = ["TinkerServer"]
