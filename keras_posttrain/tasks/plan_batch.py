"""Batches of the shapes that a run would have, for a plan."""

import numpy as np

from keras_posttrain.data.formats import Example
from keras_posttrain.data.preference import Preference
from keras_posttrain.data.prompts import Prompt
from keras_posttrain.tasks.distill_task import DistillTask
from keras_posttrain.tasks.ppo_task import PPOTask
from keras_posttrain.tasks.preference_task import PreferenceTask
from keras_posttrain.tasks.rollout_batch import Sampled
from keras_posttrain.tasks.rollout_task import RolloutTask


def dummy_batch(task, batch_size, prompt_length=None):
    """A batch as `fit` would build it, of the longest rows there may be.

    Args:
        task: `SFTTask`, `DPOTask`, `RewardTask` or `GRPOTask`, inside
            `planned`.
        batch_size: int, as in `fit` of the task.
        prompt_length: int, tokens of a prompt, or `None`: half of the row,
            or what a completion leaves of it. All tokens of an `SFTTask`
            carry loss.

    Returns:
        Dict of numpy arrays.

    Raises:
        ValueError: for other tasks, and what `fit` refuses.
    """
    if isinstance(task, (DistillTask, PPOTask)):
        raise ValueError(
            "A plan can be made of SFTTask, DPOTask, RewardTask and "
            f"GRPOTask. Received: {type(task).__name__}. Plan a GRPOTask or "
            "an SFTTask of its model: the policy's step is the same."
        )
    if isinstance(task, RolloutTask):
        return _of_rollout(task, batch_size, prompt_length)
    if isinstance(task, PreferenceTask):
        return _of_pairs(task, batch_size, prompt_length)
    length = task.sequence_length
    mask = np.ones(length, "float32")
    examples = [Example(_ids(length), mask, i) for i in range(batch_size)]
    return _first(task._batches(examples, batch_size, shuffle=False))


def _ids(length):
    return np.ones(length, "int32")


def _first(batches):
    return next(iter(batches.get_jax_iterator()))


def _of_pairs(task, batch_size, prompt_length):
    length = task.sequence_length
    before = length // 2 if prompt_length is None else prompt_length
    sides = 1 if task.labelled else 2
    completions = [_ids(length - before)] * sides
    masks = [np.ones(length - before, "float32")] * sides
    examples = [
        Preference(
            _ids(before),
            completions,
            masks,
            i,
            # Losses of labelled completions want both kinds.
            label=i % 2 == 0 if task.labelled else None,
        )
        for i in range(batch_size)
    ]
    return _first(task._batches(examples, batch_size, shuffle=False))


def _of_rollout(task, batch_size, prompt_length):
    completion = task.max_completion_length
    if prompt_length is None:
        prompt_length = task.sequence_length - completion
    prompts = [
        Prompt((1,) * prompt_length, None, {}, i) for i in range(batch_size)
    ]
    mask = np.ones(completion, "float32")
    layout = task._layout(prompts, batch_size, False, False)
    sampled = [
        Sampled(i, _ids(prompt_length), _ids(completion), mask, i)
        for i in range(batch_size)
        for _ in range(task.num_generations)
    ]
    batches = layout.batches(sampled)
    logps = [np.zeros(completion, "float32")] * len(sampled)
    batch = batches[0]
    batch.put_tokens("rollout_per_token_logps", logps)
    several = len(batches) * task.num_iterations > 1
    if task.old_log_probs == "rollout" or several or task.kl_in_reward:
        batch.put_tokens("old_per_token_logps", logps)
    if "ref_per_token_logps" in task.objective.needs or task.kl_in_reward:
        batch.put_tokens("ref_per_token_logps", logps)
    batch.put_sequences("advantages", np.ones(len(sampled), "float32"))
    return batch.arrays
