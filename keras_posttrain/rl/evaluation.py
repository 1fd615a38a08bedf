"""How good the policy is on prompts: samples, judged and counted."""

import collections

import numpy as np

from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.rewards.reward import completion_text
from keras_posttrain.rl.sampling import Sampler, length_metrics, request_seed


def evaluate_prompts(
    task,
    prompts,
    *,
    batch_size,
    num_generations,
    temperature,
    correct_reward,
    answer,
    seed,
):
    """The metrics of `RolloutTask.evaluate`, which see."""
    sample = Sampler(task, num_generations, temperature, task.step)
    groups = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        groups += sample(part, request_seed(seed, first))
    metrics = advantage_lib.reward_metrics(
        np.concatenate([g.rewards for g in groups]),
        num_generations,
        task.reward_weights,
        task.reward_names,
    )
    total = [
        advantage_lib.total_rewards(
            g.rewards, num_generations, task.reward_weights
        )[0]
        for g in groups
    ]
    # What was not judged is not right.
    right = np.nan_to_num(np.stack(total), nan=-np.inf) >= correct_reward
    metrics |= length_metrics(groups) | {"pass@1": float(right.mean())}
    if num_generations > 1:
        votes = [_majority(g, r, answer) for g, r in zip(groups, right)]
        metrics[f"pass@{num_generations}"] = float(right.any(1).mean())
        metrics[f"maj@{num_generations}"] = float(np.mean(votes))
    return metrics


def _majority(group, right, answer):
    """Whether the most frequent answer of a group is right."""
    answers = [_answer(text, answer) for text in group.texts]
    # Of answers that are equally frequent, the one given first.
    winner = collections.Counter(answers).most_common(1)[0][0]
    return any(r for a, r in zip(answers, right) if a == winner)


def _answer(text, answer):
    is_ids = bool(text) and isinstance(text[0], int)
    text = tuple(text) if is_ids else completion_text(text).strip()
    return text if answer is None else answer(text)
