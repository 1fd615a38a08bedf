"""Log-probabilities of given tokens, by the policy's own forward pass."""

import jax

from keras_posttrain.data.batches.packing import pack
from keras_posttrain.distribution import processes
from keras_posttrain.rollout.native.decoding import (
    Placement,
    model_inputs,
    power_of_two,
    using,
)
from keras_posttrain.rollout.rollout import Scores

# Tokens that go through the model at once, at least.
SCORE_TOKENS = 2048


class Scorer:
    """Scores sequences of a task's policy, packed where it can be.

    Args:
        task: the task.
        note: `f(text)`, told of every program that is compiled.
    """

    def __init__(self, task, note):
        self.task, self._note = task, note
        self._run = jax.jit(self._run, static_argnums=(0, 1, 2))

    def __call__(self, sequences, top_k, temperature, weights):
        if not sequences:
            return []
        task = self.task
        lengths = [len(s) for s in sequences]
        length = power_of_two(max(lengths), 64)
        if task.policy.packable:
            rows = pack(lengths, length)
        else:
            rows = [[i] for i in range(len(sequences))]
        shards = Placement(1).shards
        per_batch = -(-max(SCORE_TOKENS // length, 1) // shards) * shards
        adapted = task.adapter is not None and not task.adapter.is_merged
        out = [None] * len(sequences)
        for start in range(0, len(rows), per_batch):
            part = rows[start : start + per_batch]
            ids = [[sequences[i] for i in row] for row in part]
            batch = model_inputs(ids, length, per_batch)
            self._note(f"score of {per_batch} x {length} tokens, k={top_k}")
            values = self._run(adapted, top_k, temperature, weights, batch)
            values = processes.fetch(values)
            for r, row in enumerate(part):
                at = 0
                for i in row:
                    place = slice(at, at + lengths[i])
                    out[i] = Scores(
                        **{k: v[r, place] for k, v in values.items()}
                    )
                    at = place.stop
        return out

    def _run(self, adapted, top_k, temperature, weights, batch):
        mask = batch["segment_ids"] > 0
        with using(self.task, adapted, weights):
            policy = self.task.policy
            out = policy.token_outputs(
                batch, mask, temperature=temperature, differentiable=False
            )
            if top_k is not None:
                out.update(policy.top_tokens(batch, mask, top_k, temperature))
        return out
