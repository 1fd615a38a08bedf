"""The built-in engine: continuous batching on the trainer's own arrays."""

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models import guards
from keras_posttrain.rollout.memory import free_bytes
from keras_posttrain.rollout.native import decoding
from keras_posttrain.rollout.native.batch_decoder import LockstepDecoder
from keras_posttrain.rollout.native.schedule import Schedule, check_finite
from keras_posttrain.rollout.native.scoring import Scorer
from keras_posttrain.rollout.rollout import Completion, Rollout


class NativeRollout(Rollout):
    """Samples from the policy in training, in the process and on its arrays.

    The weights are those of the task at the moment of the call: nothing is
    copied and nothing can be stale. A number of slots decode together, each
    at its own length; one whose sample has ended takes the next request
    without waiting for the others. A prompt is computed once for all its
    samples. Families whose attention has no seam (see the README) go through
    KerasHub's own cached decoding, row by row in step, slower. Only where
    rollouts overlap with training (`fit(max_staleness=...)`) is what is
    trained copied, after every rollout.

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
        self._kept = None
        self._forget()

    def _forget(self):
        self._decoder = self._scorer = self._lockstep = None
        self._made_for = None
        self._programs = []
        self._told = False

    def set_model(self, model):
        if model is not self._model:
            self._forget()
            self._kept = None
        super().set_model(model)

    @property
    def programs(self):
        """The programs compiled so far, a line of text each."""
        lockstep = self._lockstep.programs if self._lockstep else []
        return [*self._programs, *lockstep]

    def start(self):
        distribution = keras.distribution.distribution()
        if self.overlaps and distribution is not None:
            _one_device(distribution)

    def stop(self):
        self._kept = None

    def sync_weights(self):
        # The arrays are the trainer's: there is nothing to move. While
        # others sample from them, training gives their memory away.
        if self.overlaps:
            variables = self.model.trainable_variables
            self._kept = [jnp.array(v.value, copy=True) for v in variables]
        self.weight_version += 1
        return self.weight_version

    # Sampling

    def _generate(self, requests, on_tokens, progress):
        task = self.model
        guards.check_generate(task.causal_lm)
        self._refresh()
        show = _Progress(requests) if progress else None
        if task.policy.packable:
            run = Schedule(self, self._decoder, requests, on_tokens, show)
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
        out = self._lockstep.generate(
            requests,
            on_tokens,
            self._arrays(),
            self._interrupted(),
        )
        done = [
            [Completion(*sample, self.weight_version) for sample in samples]
            for samples in out
        ]
        for i, samples in enumerate(done):
            for completion in samples:
                check_finite(i, completion.per_token_logps)
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

    def _arrays(self):
        """The task's arrays; where rollouts overlap those of the last sync."""
        task = self.model
        trainable = self._kept
        if trainable is None:
            trainable = [v.value for v in task.trainable_variables]
        return trainable, [v.value for v in task.non_trainable_variables]

    def _weights(self):
        task = self.model
        trainable, frozen = self._arrays()
        adapter = task.adapter
        if adapter is None or adapter.is_merged:
            return decoding.Weights(trainable, frozen, False)
        if not self._merges(adapter):
            return decoding.Weights(trainable, frozen, True)
        place = {id(v): i for i, v in enumerate(task.non_trainable_variables)}
        value = {id(v): x for v, x in zip(task.trainable_variables, trainable)}
        for i, pair in enumerate(adapter.pairs):
            factors = value[id(adapter.a[i])], value[id(adapter.b[i])]
            kernel = adapter.merged_kernel(i, factors)
            frozen[place[id(pair.layer.kernel)]] = kernel
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

    def slots_for(self, tokens, samples):
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
            if processes.is_first():
                print(
                    f"NativeRollout: up to {slots} slots of {tokens} tokens, "
                    f"{readable(slots // shards * per_slot)} of cache a "
                    f"device (budget {readable(budget)})",
                    flush=True,
                )
        needed = decoding.power_of_two(-(-samples // shards)) * shards
        return min(slots, needed)

    # Scoring

    def _score(self, sequences, top_k, temperature):
        self._refresh()
        return self._scorer(sequences, top_k, temperature, self._arrays())


def _one_device(distribution):
    """Two threads may not send programs to the same several devices: those
    that exchange data would wait for each other."""
    count = distribution.device_mesh.backend_mesh.size
    if count > 1:
        raise ValueError(
            "The built-in engine can only sample beside training on one "
            "device: on several, programs of two threads would wait for each "
            "other. Use `max_staleness=0`, or vLLM as a server "
            "(`kpt.rollout.VLLMRollout(python=...)`). Received: "
            f"max_staleness > 0 and a mesh of {count} devices"
        )


class _Progress:
    def __init__(self, requests):
        total = sum(r.num_generations for r in requests)
        self.bar = keras.utils.Progbar(total, unit_name="sample")

    def advance(self):
        self.bar.add(1)
