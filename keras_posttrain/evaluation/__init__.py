"""Evaluation of tasks: win rates, and other libraries' benchmarks."""

from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.evaluation.inspect_model import inspect
    from keras_posttrain.evaluation.lm_eval_model import lm_eval
    from keras_posttrain.evaluation.reasoning_gym_rows import reasoning_gym
    from keras_posttrain.evaluation.win_rates import WinRate, win_rate

__all__ = ["WinRate", "inspect", "lm_eval", "reasoning_gym", "win_rate"]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
