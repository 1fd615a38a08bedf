"""Evaluation of tasks: win rates, and other libraries' benchmarks."""

from keras_posttrain.evaluation.lm_eval import lm_eval
from keras_posttrain.evaluation.win_rate import WinRate, win_rate

__all__ = ["WinRate", "lm_eval", "win_rate"]
