"""Batches of the shapes that a run would have, for a plan."""

import numpy as np

from keras_posttrain.data.batches.layout import Group
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.data.rows.preference import Preference
from keras_posttrain.data.rows.prompts import Prompt
from keras_posttrain.tasks.distill_task import DistillTask
from keras_posttrain.tasks.ppo_task import PPOTask
from keras_posttrain.tasks.preference_task import PreferenceTask
from keras_posttrain.tasks.rollout_task import RolloutTask


def dummy_batch(
    task, batch_size, prompt_length=None, packing=False, share_prefix=False
):
    """A batch as `fit` would build it, of the longest rows there may be.

    Args:
        task: `SFTTask`, `DPOTask`, `RewardTask`, `GRPOTask`, `PPOTask` or
            `DistillTask`, inside `planned`.
        batch_size: int, as in `fit` of the task.
        prompt_length: int, tokens of a prompt, or `None`: half of the row,
            or what a completion leaves of it. All tokens of an `SFTTask`
            and a `DistillTask` carry loss.
        packing, share_prefix: as in `fit`. A task on preferences has the
            latter as its attribute.

    Returns:
        Dict of numpy arrays.

    Raises:
        ValueError: for a model beside the task's that is not planned, and
            what `fit` refuses.
    """
    if isinstance(task, DistillTask):
        _check_teachers(task)
    elif isinstance(task, RolloutTask):
        _check_value_model(task)
        return _of_rollout(
            task, batch_size, prompt_length, packing, share_prefix
        )
    if isinstance(task, PreferenceTask):
        examples = _pairs(task, batch_size, prompt_length)
    else:
        ids = _ids(task.sequence_length)
        mask = ids.astype("float32")
        examples = [Example(ids, mask, i) for i in range(batch_size)]
    batches = task._batches(
        examples, batch_size, packing=packing, shuffle=False
    )
    return next(iter(batches.get_jax_iterator()))


def _check_teachers(task):
    """Refuses a distillation whose step reads more than its rows."""
    why = None
    if len(task.given) > 1:
        why = "one teacher, the largest: each adds a pass of its own"
    elif task.given.engine is not None or task.teacher_cache is not None:
        why = "an SFTTask of the student: the teacher is not in the step"
    elif task.teacher_tokenizer is not None:
        why = "a teacher that has the student's tokenizer"
    elif task.on_policy:
        why = "on_policy=False: rows that are sampled take the same step"
    if why is not None:
        raise ValueError(
            "Of a distillation a step is planned on given rows, with one "
            f"teacher that reads the same tokens. Plan {why}. Received: "
            f"teachers {task.given.names}, on_policy={task.on_policy}, "
            f"teacher_cache={task.teacher_cache!r}"
        )


def _check_value_model(task):
    own = getattr(task, "value_model", None)
    if own is not None and own.causal_lm is not None:
        raise ValueError(
            "PPO is planned with a value head on the policy's own backbone. "
            "Received: a `value_model` of its own. Plan value_model=None, "
            "and an SFTTask of the value model's preset: they add up."
        )


def _ids(length):
    return np.ones(length, "int32")


def _pairs(task, batch_size, prompt_length):
    length = task.sequence_length
    before = length // 2 if prompt_length is None else prompt_length
    sides = 1 if task.labelled else 2
    completions = [_ids(length - before)] * sides
    masks = [np.ones(length - before, "float32")] * sides
    return [
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


def _of_rollout(task, batch_size, prompt_length, packing, share_prefix):
    completion = task.max_completion_length
    if prompt_length is None:
        prompt_length = task.sequence_length - completion
    prompts = [
        Prompt((1,) * prompt_length, None, {}, i) for i in range(batch_size)
    ]
    mask = np.ones(completion, "float32")
    layout = task._layout(prompts, batch_size, packing, share_prefix)
    many = task.num_generations
    groups = [
        Group.of_completions(
            _ids(prompt_length), [_ids(completion)] * many, [mask] * many, i
        )
        for i in range(batch_size)
    ]
    batches = layout.minibatches(groups)
    num_sequences = batch_size * many
    logps = [np.zeros(completion, "float32")] * num_sequences
    batch = batches[0]
    batch.put_tokens("rollout_per_token_logps", logps)
    several = len(batches) * task.num_iterations > 1
    if task.old_log_probs == "rollout" or several or task.kl_in_reward:
        batch.put_tokens("old_per_token_logps", logps)
    if "ref_per_token_logps" in task.objective.needs or task.kl_in_reward:
        batch.put_tokens("ref_per_token_logps", logps)
    if isinstance(task, PPOTask):
        names = ("old_per_token_logps", "old_values", "advantages", "returns")
        for name in names:
            batch.put_tokens(name, logps)
        batch.put_sequences("rewards", np.ones(num_sequences, "float32"))
        return batch.arrays
    batch.put_sequences("advantages", np.ones(num_sequences, "float32"))
    return batch.arrays
