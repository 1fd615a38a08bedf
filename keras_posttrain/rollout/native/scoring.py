"""Scores given tokens by a forward pass of the policy."""

import jax

from keras_posttrain.data.batches.assembly import Segment
from keras_posttrain.data.batches.packing import pack
from keras_posttrain.distribution import processes
from keras_posttrain.models import sharding
from keras_posttrain.rollout.native.decoding import (
    Placement,
    model_inputs,
    using,
)
from keras_posttrain.rollout.native.samples import power_of_two
from keras_posttrain.rollout.request import Scores

# The least number of tokens that are computed at once.
SCORE_TOKENS = 2048


class Scorer:
    """Computes the log-probabilities of sequences, packed if possible."""

    def __init__(self, policy, using_weights, note):
        self.policy, self._using_weights = policy, using_weights
        self._note = note
        self._program = None

    def __call__(self, sequences, top_k, temperature, weights):
        if not sequences:
            return []
        if self._program is None:
            self._program = jax.jit(
                self._run,
                static_argnums=(0, 1, 2),
                out_shardings=sharding.of_results(),
            )
        adapter = self.policy.adapter
        lengths = [len(s) for s in sequences]
        length = power_of_two(max(lengths), 64)
        if self.policy.packable:
            rows = pack(lengths, length)
        else:
            rows = [[i] for i in range(len(sequences))]
        shards = Placement(1).shards
        per_batch = -(-max(SCORE_TOKENS // length, 1) // shards) * shards
        adapted = adapter is not None and not adapter.is_merged
        out = [None] * len(sequences)
        for start in range(0, len(rows), per_batch):
            part = rows[start : start + per_batch]
            segments = [[Segment(sequences[i]) for i in row] for row in part]
            batch = model_inputs(segments, length, per_batch)
            self._note(f"score of {per_batch} x {length} tokens, k={top_k}")
            values = self._program(adapted, top_k, temperature, weights, batch)
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
        policy = self.policy
        with using(policy, self._using_weights, adapted, weights):
            out = policy.token_outputs(
                batch, mask, temperature=temperature, differentiable=False
            )
            if top_k is not None:
                out.update(policy.top_tokens(batch, mask, top_k, temperature))
        return out
