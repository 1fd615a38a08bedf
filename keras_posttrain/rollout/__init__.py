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
