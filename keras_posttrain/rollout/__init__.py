from keras_posttrain.rollout.native.engine import NativeRollout
from keras_posttrain.rollout.rollout import (
    Completion,
    Request,
    Rollout,
    Scores,
)
from keras_posttrain.rollout.vllm.engine import VLLMRollout

__all__ = [
    "Completion",
    "NativeRollout",
    "Request",
    "Rollout",
    "Scores",
    "VLLMRollout",
]
