from keras_posttrain.rollout.native import NativeRollout
from keras_posttrain.rollout.rollout import (
    Completion,
    Request,
    Rollout,
    Scores,
)

__all__ = ["Completion", "NativeRollout", "Request", "Rollout", "Scores"]
