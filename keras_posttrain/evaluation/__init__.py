"""Evaluation of tasks: win rates, and other libraries' benchmarks."""

from keras_posttrain.evaluation.inspect_model import inspect
from keras_posttrain.evaluation.lm_eval import lm_eval
from keras_posttrain.evaluation.reasoning_gym import reasoning_gym
from keras_posttrain.evaluation.win_rate import WinRate, win_rate

__all__ = ["WinRate", "inspect", "lm_eval", "reasoning_gym", "win_rate"]
