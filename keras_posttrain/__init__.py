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

from keras_posttrain import _deferred_imports  # noqa: E402

with _deferred_imports.deferred():
    import keras_hub  # noqa: E402, F401

from keras_posttrain import (
    _compilation_cache,  # noqa: E402
    callbacks,  # noqa: E402
    data,  # noqa: E402
    distribution,  # noqa: E402
    episodes,  # noqa: E402
    evaluation,  # noqa: E402
    examples,  # noqa: E402
    losses,  # noqa: E402
    metrics,  # noqa: E402
    rewards,  # noqa: E402
    rollout,  # noqa: E402
)
from keras_posttrain.adamw_8bit import AdamW8bit  # noqa: E402
from keras_posttrain.data.chat.tokenizer import Tokenizer  # noqa: E402
from keras_posttrain.models.lora import LoRA  # noqa: E402
from keras_posttrain.models.quantized import Quantization  # noqa: E402
from keras_posttrain.optimizers import decay_mask  # noqa: E402
from keras_posttrain.reports.overlay import report  # noqa: E402
from keras_posttrain.sweeps.sweep import sweep  # noqa: E402
from keras_posttrain.tasks.distill_task import DistillTask  # noqa: E402
from keras_posttrain.tasks.dpo_task import DPOTask  # noqa: E402
from keras_posttrain.tasks.grpo_task import GRPOTask  # noqa: E402
from keras_posttrain.tasks.loop import Loop  # noqa: E402
from keras_posttrain.tasks.ppo_task import PPOTask  # noqa: E402
from keras_posttrain.tasks.reward_task import RewardTask  # noqa: E402
from keras_posttrain.tasks.rollout_task import RolloutTask  # noqa: E402
from keras_posttrain.tasks.sft_task import SFTTask  # noqa: E402
from keras_posttrain.tasks.task import Task  # noqa: E402
from keras_posttrain.training.datum import Datum  # noqa: E402

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

_compilation_cache.enable()
