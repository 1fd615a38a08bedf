"""The episode with tools, with a model that knows one call by heart."""

import keras
import numpy as np

import keras_posttrain as kpt
from tests.episodes.support import CHAT, TOOLS, Batches


def correct(completions):
    return [float("12" in m[-1]["content"]) for m in completions]


def test_calls_are_run_and_their_results_said(knows_a_call):
    task = kpt.GRPOTask.from_preset(knows_a_call, sequence_length=512)
    task.compile(
        keras.optimizers.SGD(0.01),
        rewards=[correct],
        episode=TOOLS,
        num_generations=4,
        max_completion_length=96,
        num_iterations=2,
    )
    found = Batches(task).found
    rows = [{"prompt": CHAT[0]["content"]}] * 2
    history = task.fit(rows, batch_size=2, share_prefix=True, verbose=0)
    assert history.history["tools/calls"][0] > 0
    assert "rewards/correct/mean" in history.history
    told = [
        message["content"]
        for messages in task.last_rollout["completion"]
        for message in messages
        if message["role"] == "tool"
    ]
    assert "12" in told
    [batch] = found
    mask = batch["completion_mask"]
    gap = batch["rollout_per_token_logps"] - batch["old_per_token_logps"]
    gap = np.abs(gap[mask > 0])
    # A model that knows its chat by heart magnifies the rounding of a few.
    assert np.median(gap) < 1e-6 and gap.max() < 1e-4
    # What the tools said is in the batch and carries no loss.
    assert mask.sum() == sum(task.last_rollout["tokens"])
