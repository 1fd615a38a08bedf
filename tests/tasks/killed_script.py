"""A run that tests kill and start again: `killed_script.py case directory`.

Trains a task of `contract.TASKS`, or `grpo_ahead`, whose rollouts run ahead
of training, or `grpo_vllm`, which samples with a vLLM server, or
`grpo_episodes`, which runs episodes, with a checkpoint of every step. Writes
`final.npz` when done.
"""

import asyncio
import pathlib
import random
import signal
import sys
import time

import keras
import numpy as np

import keras_posttrain as kpt
from tests.support import REFERENCE, weights
from tests.tasks import contract


def slowly(completions):
    """Leaves time for a signal while completions are scored."""
    time.sleep(0.05)
    return contract.odd(completions)


class Announce(keras.callbacks.Callback):
    """Says that steps begin."""

    def on_train_begin(self, logs=None):
        print("begun", flush=True)


def task_of(case, directory):
    settings = {k: v or directory / "cache" for k, v in case.cache.items()}
    if "rewards" in case.compiled:
        settings["rewards"] = [slowly]
    return contract.make(case, keras.optimizers.Adam(1e-3), compiled=settings)


async def talk(chat, number, seed, generation):
    """Waits for as long as it likes, and branches."""
    rng = random.Random(seed + generation)
    total = 0
    for turn in range(3):
        reply = await chat(f"{number + turn}")
        await asyncio.sleep(0.05 * rng.random())
        chat.reward(len(reply.text) % 3)
        total += len(reply.text)
        if total % 5 == 0:
            break
    other = chat.fork()
    await asyncio.gather(chat("again"), other("or not"))
    return total % 7


def episodes():
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models/qwen3", sequence_length=256
    )
    limits = kpt.episodes.Limits(after_cut="continue")
    task.compile(
        keras.optimizers.Adam(1e-3),
        episode=kpt.episodes.Episode(talk, limits=limits),
        advantages=kpt.losses.TurnAdvantages(),
        num_generations=4,
        max_completion_length=8,
    )
    return task


def main(name, directory):
    # Also where the tests run in a shell's background, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = {"epochs": 4}
    if name == "grpo_vllm":
        from tests.vllm import models

        task, rows = models.make("llama_tied"), models.prompts(12)
        engine = kpt.rollout.VLLMRollout(python=sys.executable)
        models.compile_grpo(task, engine, 0.3)
        settings = {"batch_size": 2}
    elif name == "grpo_episodes":
        task, rows = episodes(), [{"number": n} for n in range(4)]
        settings["batch_size"] = 2
    else:
        case = contract.TASKS[name.removesuffix("_ahead")]
        task, rows = task_of(case, directory), case.rows
        settings["batch_size"] = max(len(rows) // 2, 1)
        if name.endswith("_ahead"):
            settings["max_staleness"] = 2
    task.fit(
        rows,
        verbose=0,
        callbacks=[
            kpt.callbacks.MetricsLog(directory),
            kpt.callbacks.Checkpoint(directory, every=1),
            Announce(),
        ],
        **settings,
    )
    np.savez(directory / "final.npz", **weights(task))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
