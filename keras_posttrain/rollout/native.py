"""The built-in engine: continuous batching on the trainer's own arrays."""

import collections
import dataclasses

import jax
import keras
import numpy as np

from keras_posttrain.models import guards
from keras_posttrain.rollout import decoding
from keras_posttrain.rollout.lockstep import LockstepDecoder
from keras_posttrain.rollout.memory import free_bytes, readable
from keras_posttrain.rollout.rollout import Completion, Rollout
from keras_posttrain.rollout.sampling import sample_keys
from keras_posttrain.rollout.scoring import Scorer

# With requests waiting, a call ends when this share of the slots is free;
# with none, when so few are active that this many times fewer slots hold
# them, as long as it is worth a program of its own.
REFILL = 1 / 8
SHRINK = 2
LEAST_SLOTS = 8
# Steps of a call where somebody reads the tokens as they come.
STREAMED_STEPS = 8


class NativeRollout(Rollout):
    """Samples from the policy in training, in the process and on its arrays.

    The weights are those of the task at the moment of the call: nothing is
    copied and nothing can be stale. A number of slots decode together, each
    at its own length; one whose sample has ended takes the next request
    without waiting for the others. A prompt is computed once for all its
    samples. Families whose attention has no seam (see the README) go through
    KerasHub's own cached decoding, row by row in step, slower.

    Args:
        num_slots: int, the most samples at once.
        cache_bytes: int, the bytes that the cache of keys and values may
            take on each device, or `"auto"` for half of what is free. Fewer
            slots are used where it does not hold all.
        merge_adapter: bool, whether a LoRA adapter is added to a copy of the
            kernels for the time of a call; faster, for the memory of these
            kernels. `"auto"` does so in float32 where the copy takes at most
            an eighth of what is free; in 16 bits it would round the adapter
            away.

    Example:

    ```python
    engine = kpt.rollout.NativeRollout()
    engine.set_model(task)
    [[completion]] = engine.generate([kpt.rollout.Request([1, 5, 9])])
    completion.token_ids, completion.per_token_logps
    ```
    """

    def __init__(
        self, num_slots=128, *, cache_bytes="auto", merge_adapter="auto"
    ):
        super().__init__()
        is_int = isinstance(num_slots, int) and num_slots is not True
        if not is_int or num_slots < 1:
            raise ValueError(
                "`num_slots` must be a positive int. "
                f"Received: num_slots={num_slots!r}"
            )
        is_int = isinstance(cache_bytes, int) and cache_bytes is not True
        if cache_bytes != "auto" and (not is_int or cache_bytes < 1):
            raise ValueError(
                "`cache_bytes` must be a positive number of bytes, or 'auto'. "
                f"Received: cache_bytes={cache_bytes!r}"
            )
        if merge_adapter not in ("auto", True, False):
            raise ValueError(
                "`merge_adapter` must be 'auto', True or False. "
                f"Received: merge_adapter={merge_adapter!r}"
            )
        self.num_slots = num_slots
        self.cache_bytes = cache_bytes
        self.merge_adapter = merge_adapter
        self._forget()

    def _forget(self):
        self._decoder = self._scorer = self._lockstep = None
        self._made_for = None
        self._programs = []
        self._told = False

    def set_model(self, model):
        if model is not self._model:
            self._forget()
        super().set_model(model)

    @property
    def programs(self):
        """The programs compiled so far, a line of text each."""
        lockstep = self._lockstep.programs if self._lockstep else []
        return [*self._programs, *lockstep]

    def sync_weights(self):
        # The arrays are the trainer's: there is nothing to move.
        self.weight_version += 1
        return self.weight_version

    # Sampling

    def _generate(self, requests, on_tokens, progress):
        task = self.model
        guards.check_generate(task.causal_lm)
        self._refresh()
        show = _Progress(requests) if progress else None
        if task.policy.packable:
            run = _Run(self, self._decoder, requests, on_tokens, show)
            done = run(self._weights())
        else:
            done = self._in_lockstep(requests, on_tokens, show)
        return done

    def _in_lockstep(self, requests, on_tokens, show):
        if self._lockstep is None:
            budget = None if self.cache_bytes == "auto" else self.cache_bytes
            self._lockstep = LockstepDecoder(
                self.model, self.num_slots, budget
            )
        out = self._lockstep.generate(requests, on_tokens)
        done = [
            [Completion(*sample, self.weight_version) for sample in samples]
            for samples in out
        ]
        for i, samples in enumerate(done):
            for completion in samples:
                _check_finite(i, completion.per_token_logps)
                if show is not None:
                    show.advance()
        return done

    def _refresh(self):
        """Programs are made anew where the task's policy or mesh changed."""
        task = self.model
        mesh = decoding.Placement(1).key()
        key = (task.policy, mesh)
        if self._made_for == key:
            return
        self._forget()
        self._made_for = key
        self._scorer = Scorer(task, self._note)
        if task.policy.packable:
            shapes, dtype = self._kv_shapes()
            self._decoder = decoding.SlotDecoder(
                task, shapes, dtype, self._note
            )

    def _note(self, text):
        if text not in self._programs:
            self._programs.append(text)

    def _kv_shapes(self):
        """`[(kv_heads, head_dim)]` of each layer, and the dtype."""
        token = jax.ShapeDtypeStruct((1, 1), "int32")
        names = ("token_ids", "segment_ids", "positions")
        kept = jax.eval_shape(
            self.model.policy.prefill, dict.fromkeys(names, token)
        )
        return [k.shape[1:] for k, _ in kept], kept[0][0].dtype

    # Weights

    def _weights(self):
        task = self.model
        trainable = [v.value for v in task.trainable_variables]
        frozen = [v.value for v in task.non_trainable_variables]
        adapter = task.adapter
        if adapter is None or adapter.is_merged:
            return decoding.Weights(trainable, frozen, False)
        if not self._merges(adapter):
            return decoding.Weights(trainable, frozen, True)
        place = {id(v): i for i, v in enumerate(task.non_trainable_variables)}
        for i, pair in enumerate(adapter.pairs):
            frozen[place[id(pair.layer.kernel)]] = adapter.merged_kernel(i)
        return decoding.Weights(trainable, frozen, False)

    def _merges(self, adapter):
        kernels = [pair.layer.kernel for pair in adapter.pairs]
        quantized = any(
            getattr(pair.layer, "quantization_mode", None)
            for pair in adapter.pairs
        )
        if self.merge_adapter is True and quantized:
            raise ValueError(
                "A quantized kernel cannot take the adapter in. Use "
                "`merge_adapter=False`. Received: merge_adapter=True"
            )
        if self.merge_adapter != "auto":
            return self.merge_adapter
        if quantized or any(k.dtype != "float32" for k in kernels):
            return False
        size = sum(4 * int(np.prod(k.shape)) for k in kernels)
        return size <= free_bytes() / 8

    # Memory

    def _slots_for(self, tokens, samples):
        """How many slots of so many tokens are used, by memory and need."""
        decoder = self._decoder
        shards = decoder.placement.shards
        budget = self.cache_bytes
        if budget == "auto":
            budget = free_bytes() // 2
        # A layer exists twice while it is resized.
        layers = len(decoder.kv_shapes)
        per_slot = decoder.token_bytes() * (tokens + decoding.STEPS)
        per_slot = per_slot * (layers + 1) // layers
        fits = budget // per_slot * shards
        if fits < shards:
            raise ValueError(
                f"The cache does not hold one sequence of {tokens} tokens: "
                f"that takes {readable(per_slot)}, the budget is "
                f"{readable(budget)}. Shorten prompts, lower `max_tokens`, "
                f"or raise the budget. Received: "
                f"cache_bytes={self.cache_bytes!r}"
            )
        slots = max(self.num_slots // shards, 1) * shards
        slots = min(slots, fits)
        if not self._told:
            self._told = True
            print(
                f"NativeRollout: up to {slots} slots of {tokens} tokens, "
                f"{readable(slots // shards * per_slot)} of cache a device "
                f"(budget {readable(budget)})",
                flush=True,
            )
        needed = decoding.power_of_two(-(-samples // shards)) * shards
        return min(slots, needed)

    # Scoring

    def _score(self, sequences, top_k, temperature):
        self._refresh()
        return self._scorer(sequences, top_k, temperature)


class _Progress:
    def __init__(self, requests):
        total = sum(r.num_generations for r in requests)
        self.bar = keras.utils.Progbar(total, unit_name="sample")

    def advance(self):
        self.bar.add(1)


@dataclasses.dataclass
class _Sample:
    """One sample to be drawn, and what has come of it."""

    request: int
    generation: int
    settings: object
    key: np.ndarray
    token_ids: list = dataclasses.field(default_factory=list)
    logps: list = dataclasses.field(default_factory=list)
    stopped: bool = False

    @property
    def prompt(self):
        return self.settings.token_ids


def _check_finite(request, logps):
    if not np.all(np.isfinite(logps)):
        raise ValueError(
            f"The model gave no number for a token of request {request}: "
            "its weights or activations are NaN or infinite. Nothing that "
            "was sampled can be trusted."
        )


class _Run:
    """One call of `generate`: which sample sits in which slot, and when."""

    def __init__(self, engine, decoder, requests, on_tokens, progress):
        self.decoder, self.on_tokens = decoder, on_tokens
        self.progress = progress
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
            slots = engine._slots_for(self.most_tokens, len(self.samples))
        self.least_slots = max(decoder.placement.shards, LEAST_SLOTS)
        self._empty(slots)
        self.stop_ids = decoding.power_of_two(
            max((len(r.stop_token_ids) for r in requests), default=0)
        )
        self.truncated = any(
            r.top_k or r.min_p or (r.top_p is not None and r.top_p < 1)
            for r in requests
        )

    def _empty(self, slots):
        self.sitting = [None] * slots
        # The prompt whose keys a slot's first columns still hold.
        self.holds = [None] * slots

    @property
    def active(self):
        return [i for i, s in enumerate(self.sitting) if s is not None]

    def __call__(self, weights):
        try:
            while self.queue or self.active:
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
                    "stop" if s.stopped else "length",
                    self.version,
                )
            )
        return out

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
        _check_finite(sample.request, logps)
        sample.token_ids += ids
        sample.logps += logps.tolist()
        if self.on_tokens is not None and ids:
            self.on_tokens(sample.request, sample.generation, ids)
        if not out["active"][slot]:
            sample.stopped = bool(out["stopped"][slot])
            self.sitting[slot] = None
            if self.progress is not None:
                self.progress.advance()
