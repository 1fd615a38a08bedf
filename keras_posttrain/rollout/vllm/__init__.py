"""The engine of vLLM's servers, and `worker`, the program of a server."""

from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.rollout.vllm import worker

__all__ = ["worker"]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
