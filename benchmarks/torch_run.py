"""Training with a transformers `Trainer`."""

import os
import tempfile
import time

import torch
import workloads
from transformers import TrainerCallback


def settings():
    """Returns the training arguments of all scripts.

    torch uses all CPUs.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return {
        "output_dir": tempfile.mkdtemp(),
        "train_sampling_strategy": "sequential",
        "learning_rate": workloads.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": workloads.WEIGHT_DECAY,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


class Clock(TrainerCallback):
    """Records when steps end."""

    def __init__(self):
        self._marks = []

    def on_step_end(self, *args, **kwargs):
        self._marks.append(time.perf_counter())

    def train(self, trainer, epochs):
        """Trains with a trainer that has this callback.

        Args:
            trainer: transformers `Trainer`.
            epochs: int, the trainer's epochs. The first one is a warm-up,
                each other one a pass.

        Returns:
            The logs of all steps, and the arguments of `report.emit`.
        """
        start = time.perf_counter()
        trainer.train()
        steps = len(self._marks) // epochs
        ends = self._marks[steps - 1 :: steps]
        logs = [h for h in trainer.state.log_history if "loss" in h]
        return logs, {
            "first_step_s": self._marks[0] - start,
            "pass_s": [b - a for a, b in zip(ends, ends[1:], strict=False)],
            "steps": steps,
        }
