"""Metrics of completions, for `task.evaluate(metrics=[...])`."""

from keras_posttrain.metrics.bits_per_byte import BitsPerByte
from keras_posttrain.metrics.metric import Metric
from keras_posttrain.metrics.pass_at_k import pass_at_k
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
