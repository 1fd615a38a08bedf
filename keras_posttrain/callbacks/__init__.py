from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.callbacks.checkpoint import Checkpoint
    from keras_posttrain.callbacks.completions_log import CompletionsLog
    from keras_posttrain.callbacks.evaluate import Evaluate
    from keras_posttrain.callbacks.metrics_log import MetricsLog
    from keras_posttrain.callbacks.mlflow import MLflow
    from keras_posttrain.callbacks.progress import Progress
    from keras_posttrain.callbacks.reference import UpdateReference
    from keras_posttrain.callbacks.report import Report
    from keras_posttrain.callbacks.tensorboard import TensorBoard
    from keras_posttrain.callbacks.trace import Trace
    from keras_posttrain.callbacks.trackio import Trackio
    from keras_posttrain.callbacks.wandb import WandB

__all__ = [
    "Checkpoint",
    "CompletionsLog",
    "Evaluate",
    "MLflow",
    "MetricsLog",
    "Progress",
    "Report",
    "TensorBoard",
    "Trace",
    "Trackio",
    "UpdateReference",
    "WandB",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
