"""Metrics of completions, for `task.evaluate(metrics=[...])`."""

from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.metrics.bits_per_byte import BitsPerByte
    from keras_posttrain.metrics.metric import Metric
    from keras_posttrain.metrics.pass_rates import pass_at_k
    from keras_posttrain.metrics.text_metrics import (
        BLEU,
        ROUGE,
        ExactMatch,
        normalize_answer,
    )

__all__ = [
    "BLEU",
    "BitsPerByte",
    "ExactMatch",
    "Metric",
    "ROUGE",
    "normalize_answer",
    "pass_at_k",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
