"""Continuous batching: assigns samples to the slots of a decoder."""

import collections

import numpy as np

from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.samples import (
    Samples,
    check_finite,
    power_of_two,
)
from keras_posttrain.rollout.rollout import Completion

# While samples are waiting, a call of the decoder ends when this share of the
# slots is free.
REFILL = 1 / 8
# Without waiting samples, the slots are reduced once this many times fewer
# would hold the active ones, down to `LEAST_SLOTS`: each number of slots needs
# another program.
SHRINK = 2
LEAST_SLOTS = 8
# Steps of a call whose tokens are streamed.
STREAMED_STEPS = 8


class Schedule:
    """One call of `generate` by continuous batching.

    Requests have seeds. `slots_for(tokens, samples)` returns the number of
    slots of `tokens` to use, `is_interrupted()` whether to end early.
    `version` is that of the weights; `progress` is called with 1 when one has
    ended.
    """

    def __init__(
        self, decoder, requests, *, slots_for, version, is_interrupted,
        on_tokens=None, progress=None,
    ):  # fmt: skip
        self.decoder, self.version = decoder, version
        self.is_interrupted = is_interrupted
        self.on_tokens, self.progress = on_tokens, progress
        self.samples = Samples(requests)
        self.queue = collections.deque(self.samples)
        longest = max((s.end for s in self.samples), default=0)
        self.most_tokens = decoding.bucket(longest + decoding.STEPS)
        slots = 0
        if self.samples:
            slots = slots_for(self.most_tokens, len(self.samples))
        self.least_slots = max(decoder.placement.shards, LEAST_SLOTS)
        # The sample in each slot, or `None`.
        self.occupants = [None] * slots
        # The prompt whose keys are still in the first columns of each slot.
        # Decoding overwrites them in idle slots, but while samples are waiting
        # no slot is idle.
        self.cached_prompts = [None] * slots

    @property
    def active(self):
        return [i for i, s in enumerate(self.occupants) if s is not None]

    def __call__(self, weights):
        try:
            while self._is_unfinished():
                new = self._admit()
                self._resize()
                # Resizing may move samples to other slots.
                slots = [i for i in self.active if self.occupants[i] in new]
                self._fill_prompts(weights, slots)
                self._step(weights)
        finally:
            self.decoder.free()
        return [
            [
                Completion(
                    s.token_ids,
                    np.array(s.logps, "float32"),
                    s.finish_reason,
                    self.version,
                )
                for s in samples
            ]
            for samples in self.samples.by_request()
        ]

    def _is_unfinished(self):
        if self.is_interrupted():
            return False
        return bool(self.queue or self.active)

    def _admit(self):
        """Assigns waiting samples to free slots and returns these samples."""
        free = [i for i, s in enumerate(self.occupants) if s is None]
        new = set()
        while free and self.queue:
            sample = self.queue.popleft()
            # Slots whose cache still has the prompt are preferred.
            cached = [
                i for i in free if self.cached_prompts[i] == sample.prompt
            ]
            slot = cached[0] if cached else free[0]
            free.remove(slot)
            self.occupants[slot] = sample
            new.add(sample)
        return new

    def _resize(self):
        """Resizes the cache for the next steps of the active samples."""
        decoder, active = self.decoder, self.active
        need = decoding.STEPS + max(self._length(i) for i in active)
        slots, tokens = len(self.occupants), decoder.tokens
        if decoder.cache is None:
            decoder.allocate(
                slots, min(decoding.bucket(need), self.most_tokens)
            )
            return
        if need > tokens:
            tokens = decoding.bucket(max(need, 2 * tokens))
            tokens = min(tokens, self.most_tokens)
        fewer = max(power_of_two(len(active)), self.least_slots)
        index = list(range(slots))
        shrinks = fewer < slots and len(active) * SHRINK <= slots
        if shrinks and not self.queue:
            rest = [i for i in index if i not in set(active)]
            index = (active + rest)[:fewer]
        if tokens == decoder.tokens and len(index) == slots:
            return
        decoder.resize(index, tokens)
        self.occupants = [self.occupants[i] for i in index]
        self.cached_prompts = [self.cached_prompts[i] for i in index]

    def _length(self, slot):
        """Returns the tokens in the cache: all but a slot's last token."""
        s = self.occupants[slot]
        return len(s.prompt) + len(s.token_ids) - 1

    def _fill_prompts(self, weights, new):
        """Computes each new prompt once, or copies it from another slot."""
        sources, targets, computed = [], [], {}
        where = {
            p: i for i, p in enumerate(self.cached_prompts) if p is not None
        }
        for slot in new:
            prompt = self.occupants[slot].prompt
            if len(prompt) == 1 or self.cached_prompts[slot] == prompt:
                continue
            if prompt in where:
                sources.append(where[prompt])
                targets.append(slot)
            else:
                computed.setdefault(prompt, []).append(slot)
        if targets:
            longest = max(len(self.occupants[i].prompt) for i in targets)
            self.decoder.copy(sources, targets, longest - 1)
        if computed:
            prompts = [p[:-1] for p in computed]
            self.decoder.prefill(weights, prompts, list(computed.values()))
        for slot in new:
            self.cached_prompts[slot] = self.occupants[slot].prompt

    def _state(self):
        slots = len(self.occupants)
        state = {
            "token": np.zeros(slots, "int32"),
            "length": np.zeros(slots, "int32"),
            "remaining": np.zeros(slots, "int32"),
            "active": np.zeros(slots, bool),
            **self.samples.settings(self.occupants),
        }
        for i in self.active:
            s = self.occupants[i]
            state["token"][i] = (s.token_ids or s.prompt)[-1]
            state["length"][i] = self._length(i)
            state["remaining"][i] = s.settings.max_tokens - len(s.token_ids)
            state["active"][i] = True
        return state

    def _step(self, weights):
        active, slots = self.active, len(self.occupants)
        if self.queue:
            floor = max(len(active) - max(int(slots * REFILL), 1), 0)
        else:
            floor = slots // SHRINK if slots > self.least_slots else 0
            floor = floor if floor < len(active) else 0
        steps = STREAMED_STEPS if self.on_tokens else decoding.STEPS
        out = self.decoder.decode(weights, self._state(), floor, steps)
        for i in active:
            self._take(i, out)

    def _take(self, slot, out):
        sample, count = self.occupants[slot], out["taken"][slot]
        ids = out["tokens"][:count, slot].tolist()
        logps = out["logps"][:count, slot]
        check_finite(sample.request, logps)
        sample.token_ids += ids
        sample.logps += logps.tolist()
        if self.on_tokens is not None and ids:
            self.on_tokens(sample.request, sample.generation, ids)
        if not out["active"][slot]:
            sample.finish(out["stopped"][slot])
            self.occupants[slot] = None
            if self.progress is not None:
                self.progress(1)
