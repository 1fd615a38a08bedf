from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.callbacks.completions_log import CompletionsLog
from keras_posttrain.callbacks.metrics_log import MetricsLog
from keras_posttrain.callbacks.progress import Progress
from keras_posttrain.callbacks.reference import UpdateReference
from keras_posttrain.callbacks.report import Report
from keras_posttrain.callbacks.trace import Trace

__all__ = [
    "Checkpoint",
    "CompletionsLog",
    "MetricsLog",
    "Progress",
    "Report",
    "Trace",
    "UpdateReference",
]
