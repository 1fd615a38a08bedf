from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.rollout.native.engine import NativeRollout
    from keras_posttrain.rollout.request import Completion, Request, Scores
    from keras_posttrain.rollout.rollout import Rollout
    from keras_posttrain.rollout.session import Session
    from keras_posttrain.rollout.vllm.engine import VLLMRollout

__all__ = [
    "Completion",
    "NativeRollout",
    "Request",
    "Rollout",
    "Scores",
    "Session",
    "VLLMRollout",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
