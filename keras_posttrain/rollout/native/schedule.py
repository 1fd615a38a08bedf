"""Which sample sits in which slot, and when: continuous batching."""

import collections
import dataclasses

import numpy as np

from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.sampling import sample_keys
from keras_posttrain.rollout.rollout import Completion

# With requests waiting, a call ends when this share of the slots is free;
# with none, when so few are active that this many times fewer slots hold
# them, as long as it is worth a program of its own.
REFILL = 1 / 8
SHRINK = 2
LEAST_SLOTS = 8
# Steps of a call where somebody reads the tokens as they come.
STREAMED_STEPS = 8


@dataclasses.dataclass
class _Sample:
    """One sample to be drawn, and what has come of it."""

    request: int
    generation: int
    settings: object
    key: np.ndarray
    token_ids: list = dataclasses.field(default_factory=list)
    logps: list = dataclasses.field(default_factory=list)
    # Why it ended; until then what became of it is that the call ended.
    finish_reason: str = "interrupted"

    @property
    def prompt(self):
        return self.settings.token_ids


def check_finite(request, logps):
    if not np.all(np.isfinite(logps)):
        raise ValueError(
            f"The model gave no number for a token of request {request}: "
            "its weights or activations are NaN or infinite. Nothing that "
            "was sampled can be trusted."
        )


class Schedule:
    """One call of `generate`: which sample sits in which slot, and when."""

    def __init__(self, engine, decoder, requests, on_tokens, progress):
        self.decoder, self.on_tokens = decoder, on_tokens
        self.engine, self.progress = engine, progress
        self.version = engine.weight_version
        self.samples = [
            _Sample(i, g, r, key)
            for i, (r, keys) in enumerate(zip(requests, sample_keys(requests)))
            for g, key in enumerate(keys)
        ]
        self.queue = collections.deque(self.samples)
        self.requests = requests
        longest = max(
            (len(r.token_ids) + r.max_tokens for r in requests), default=0
        )
        self.most_tokens = decoding.bucket(longest + decoding.STEPS)
        slots = 0
        if self.samples:
            slots = engine.slots_for(self.most_tokens, len(self.samples))
        self.least_slots = max(decoder.placement.shards, LEAST_SLOTS)
        self.sitting = [None] * slots
        # The prompt whose keys a slot's first columns still hold. Idle slots
        # do not keep them, but with samples waiting none is idle.
        self.holds = [None] * slots
        self.stop_ids = decoding.power_of_two(
            max((len(r.stop_token_ids) for r in requests), default=0)
        )
        self.truncated = any(
            r.top_k or r.min_p or (r.top_p is not None and r.top_p < 1)
            for r in requests
        )

    @property
    def active(self):
        return [i for i, s in enumerate(self.sitting) if s is not None]

    def __call__(self, weights):
        try:
            while self._goes_on():
                new = {id(self.sitting[i]) for i in self._admit()}
                self._make_room()
                # Slots may have moved: what is seated is known by itself.
                slots = [i for i in self.active if id(self.sitting[i]) in new]
                self._bring_prompts(weights, slots)
                self._step(weights)
        finally:
            self.decoder.free()
        out = [[] for _ in self.requests]
        for s in self.samples:
            logps = np.array(s.logps, "float32")
            out[s.request].append(
                Completion(
                    s.token_ids,
                    logps,
                    s.finish_reason,
                    self.version,
                )
            )
        return out

    def _goes_on(self):
        if self.engine.is_interrupted:
            return False
        return bool(self.queue or self.active)

    def _admit(self):
        """Seats waiting samples; returns the slots that took one."""
        free = [i for i, s in enumerate(self.sitting) if s is None]
        new = []
        while free and self.queue:
            sample = self.queue.popleft()
            # Best where its prompt lies already.
            held = [i for i in free if self.holds[i] == sample.prompt]
            slot = held[0] if held else free[0]
            free.remove(slot)
            self.sitting[slot] = sample
            new.append(slot)
        return new

    def _make_room(self):
        """Fits the cache to what it must hold from now on."""
        decoder, active = self.decoder, self.active
        need = decoding.STEPS + max(self._length(i) for i in active)
        slots, tokens = len(self.sitting), decoder.tokens
        if decoder.cache is None:
            decoder.allocate(
                slots, min(decoding.bucket(need), self.most_tokens)
            )
            return
        if need > tokens:
            tokens = decoding.bucket(max(need, 2 * tokens))
            tokens = min(tokens, self.most_tokens)
        fewer = max(decoding.power_of_two(len(active)), self.least_slots)
        index = list(range(slots))
        shrinks = fewer < slots and len(active) * SHRINK <= slots
        if shrinks and not self.queue:
            rest = [i for i in index if i not in set(active)]
            index = (active + rest)[:fewer]
        if tokens == decoder.tokens and len(index) == slots:
            return
        decoder.resize(index, tokens)
        self.sitting = [self.sitting[i] for i in index]
        self.holds = [self.holds[i] for i in index]

    def _length(self, slot):
        """Tokens in the cache: all but the last, which goes in next."""
        s = self.sitting[slot]
        return len(s.prompt) + len(s.token_ids) - 1

    def _bring_prompts(self, weights, new):
        """Computes each new prompt once, or takes it from a slot with it."""
        sources, targets, computed = [], [], {}
        where = {p: i for i, p in enumerate(self.holds) if p is not None}
        for slot in new:
            prompt = self.sitting[slot].prompt
            if len(prompt) == 1 or self.holds[slot] == prompt:
                continue
            if prompt in where:
                sources.append(where[prompt])
                targets.append(slot)
            else:
                computed.setdefault(prompt, []).append(slot)
        if targets:
            longest = max(len(self.sitting[i].prompt) for i in targets)
            self.decoder.copy(sources, targets, longest - 1)
        if computed:
            prompts = [p[:-1] for p in computed]
            self.decoder.prefill(weights, prompts, list(computed.values()))
        for slot in new:
            self.holds[slot] = self.sitting[slot].prompt

    def _state(self):
        slots = len(self.sitting)
        state = {
            "token": np.zeros(slots, "int32"),
            "length": np.zeros(slots, "int32"),
            "remaining": np.zeros(slots, "int32"),
            "active": np.zeros(slots, bool),
            "keys": np.zeros((slots, 2), "uint32"),
            "temperature": np.ones(slots, "float32"),
            "stop": np.full((slots, self.stop_ids), -1, "int32"),
        }
        if self.truncated:
            state["top_k"] = np.full(slots, 2**31 - 1, "int32")
            state["top_p"] = np.ones(slots, "float32")
            state["min_p"] = np.zeros(slots, "float32")
        for i in self.active:
            s = self.sitting[i]
            r = s.settings
            state["token"][i] = (s.token_ids or s.prompt)[-1]
            state["length"][i] = self._length(i)
            state["remaining"][i] = r.max_tokens - len(s.token_ids)
            state["active"][i] = True
            state["keys"][i] = s.key
            state["temperature"][i] = r.temperature
            state["stop"][i, : len(r.stop_token_ids)] = r.stop_token_ids
            if self.truncated:
                state["top_k"][i] = r.top_k or 2**31 - 1
                state["top_p"][i] = 1.0 if r.top_p is None else r.top_p
                state["min_p"][i] = r.min_p or 0.0
        return state

    def _step(self, weights):
        active, slots = self.active, len(self.sitting)
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
        sample, count = self.sitting[slot], out["taken"][slot]
        ids = out["tokens"][:count, slot].tolist()
        logps = out["logps"][:count, slot]
        check_finite(sample.request, logps)
        sample.token_ids += ids
        sample.logps += logps.tolist()
        if self.on_tokens is not None and ids:
            self.on_tokens(sample.request, sample.generation, ids)
        if not out["active"][slot]:
            stopped = out["stopped"][slot]
            sample.finish_reason = "stop" if stopped else "length"
            self.sitting[slot] = None
            if self.progress is not None:
                self.progress.advance()
