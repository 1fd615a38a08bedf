"""Post-training for Keras: fine-tune, align, reinforce, distil."""

import os
import sys

if "keras" not in sys.modules:
    os.environ["KERAS_BACKEND"] = "jax"
# Where KerasHub uses TensorFlow, it need not say what it found.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402

if keras.config.backend() != "jax":
    raise ImportError(
        "keras_posttrain runs on the JAX backend. Keras was imported with "
        f"backend={keras.config.backend()!r}: set the environment variable "
        'KERAS_BACKEND="jax" or `import keras_posttrain` before `keras`.'
    )

from typing import TYPE_CHECKING  # noqa: E402

from keras_posttrain import (  # noqa: E402
    _compilation_cache,
    _deferred_imports,
    _lazy_imports,
)

if TYPE_CHECKING:
    from keras_posttrain import (
        callbacks,
        data,
        distribution,
        episodes,
        evaluation,
        examples,
        losses,
        metrics,
        rewards,
        rollout,
    )
    from keras_posttrain.adamw_8bit import AdamW8bit
    from keras_posttrain.data.chat.tokenizer import Tokenizer
    from keras_posttrain.models.lora import LoRA
    from keras_posttrain.models.quantized import Quantization
    from keras_posttrain.optimizers import decay_mask
    from keras_posttrain.reports.overlay import report
    from keras_posttrain.sweeps.sweep import sweep
    from keras_posttrain.tasks.distill_task import DistillTask
    from keras_posttrain.tasks.dpo_task import DPOTask
    from keras_posttrain.tasks.grpo_task import GRPOTask
    from keras_posttrain.tasks.loop import Loop
    from keras_posttrain.tasks.ppo_task import PPOTask
    from keras_posttrain.tasks.reward_task import RewardTask
    from keras_posttrain.tasks.rollout_task import RolloutTask
    from keras_posttrain.tasks.sft_task import SFTTask
    from keras_posttrain.tasks.task import Task
    from keras_posttrain.training.datum import Datum

__version__ = "0.1.0"

__all__ = [
    "AdamW8bit",
    "DPOTask",
    "Datum",
    "DistillTask",
    "GRPOTask",
    "LoRA",
    "Loop",
    "PPOTask",
    "Quantization",
    "RewardTask",
    "RolloutTask",
    "SFTTask",
    "Task",
    "Tokenizer",
    "callbacks",
    "data",
    "decay_mask",
    "distribution",
    "episodes",
    "evaluation",
    "examples",
    "losses",
    "metrics",
    "report",
    "rewards",
    "rollout",
    "sweep",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)

_compilation_cache.enable()
_deferred_imports.defer_in("keras_hub")
