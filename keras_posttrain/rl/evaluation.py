"""Scores the policy on prompts: pass@k and the metrics of rewards."""

import collections

import numpy as np

from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.metrics.pass_rates import pass_at_k
from keras_posttrain.rewards.reward import completion_text
from keras_posttrain.rl.sampling import request_seed
from keras_posttrain.rl.trajectory import length_metrics


def evaluate_prompts(
    sampler, prompts, *, batch_size, correct_reward, answer, seed, step=0
):
    """Computes the metrics of `RolloutTask.evaluate`."""
    scoring, many = sampler.scoring, sampler.sampling.num_generations
    groups = []
    for first in range(0, len(prompts), batch_size):
        part = prompts[first : first + batch_size]
        groups += sampler(part, request_seed(seed, first), step)
    metrics = advantage_lib.reward_metrics(
        np.concatenate([g.rewards for g in groups]),
        many,
        scoring.weights,
        scoring.names,
    )
    total = [scoring.total(g.rewards, many)[0] for g in groups]
    # A completion without a reward is not right.
    right = np.nan_to_num(np.stack(total), nan=-np.inf) >= correct_reward
    metrics |= length_metrics(groups) | _pass_metrics(right)
    if hasattr(sampler, "results"):
        # Of episodes.
        metrics |= sampler.results()
    if many > 1:
        votes = [_majority(g, r, answer) for g, r in zip(groups, right)]
        metrics[f"maj@{many}"] = float(np.mean(votes))
    return metrics


def _pass_metrics(right):
    """Computes pass@k for powers of two, and their standard errors.

    `right` is a bool array `(prompts, samples)`.
    """
    prompts, many = right.shape
    found = {}
    for k in sorted({1 << i for i in range(many.bit_length())} | {many}):
        if k > many:
            continue
        values = pass_at_k(many, right.sum(1), k)
        found[f"pass@{k}"] = float(values.mean())
        if prompts > 1:
            error = values.std(ddof=1) / np.sqrt(prompts)
            found[f"pass@{k}/stderr"] = float(error)
    return found


def _majority(group, right, answer):
    """Returns whether the most frequent answer of a group is right."""
    answers = [_answer(text, answer) for text in group.texts]
    # Of answers that are equally frequent, the one given first.
    winner = collections.Counter(answers).most_common(1)[0][0]
    return any(r for a, r in zip(answers, right) if a == winner)


def _answer(text, answer):
    is_ids = bool(text) and isinstance(text[0], int)
    text = tuple(text) if is_ids else completion_text(text).strip()
    return text if answer is None else answer(text)
