"""Evaluation of tasks: pass@k, win rates, and other libraries' benchmarks."""

from keras_posttrain.evaluation.lm_eval import lm_eval

__all__ = ["lm_eval"]
