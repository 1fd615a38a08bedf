"""What the scripts that train with a transformers `Trainer` share."""

import os
import tempfile
import time

import torch
import workloads
from transformers import TrainerCallback


def settings():
    """Training arguments that are the same everywhere.

    torch gets all CPUs.
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
    """Notes when steps end."""

    def __init__(self):
        self._marks = []

    def on_step_end(self, *args, **kwargs):
        self._marks.append(time.perf_counter())

    def train(self, trainer, epochs):
        """Trains a trainer that has this among its callbacks.

        Args:
            trainer: transformers `Trainer`.
            epochs: int, those that it was told to train. The first is the
                warm-up, each other one a pass.

        Returns:
            The logs of all steps, and what `report.emit` asks for.
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
