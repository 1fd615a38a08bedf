"""The built-in engine: continuous batching on the trainer's arrays."""

import contextlib
import functools
import numbers
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import _compiling, _console
from keras_posttrain.distribution import processes
from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models import placing
from keras_posttrain.models.quantized import quantization_of
from keras_posttrain.rollout.memory import free_bytes
from keras_posttrain.rollout.native import ahead, decoding, parts
from keras_posttrain.rollout.native.batch_decoder import BatchDecoder
from keras_posttrain.rollout.native.drafts import Drafts
from keras_posttrain.rollout.native.placed import PlacedWeights
from keras_posttrain.rollout.native.samples import (
    Samples,
    check_finite,
    power_of_two,
)
from keras_posttrain.rollout.native.schedule import LEAST_SHARED, Schedule
from keras_posttrain.rollout.native.scoring import Scorer
from keras_posttrain.rollout.native.session import NativeSession
from keras_posttrain.rollout.request import Completion
from keras_posttrain.rollout.rollout import Rollout, sample_counter


class NativeRollout(Rollout):
    """Samples from the policy in training, in its process and on its arrays.

    A call samples from the current weights of the task; nothing is copied.
    Several slots decode together, each at its own length. A slot whose sample
    has ended takes the next one without waiting for the others. A prompt is
    computed once for all its samples. Families whose attention layers lack
    the hook that this needs (see the README) use KerasHub's cached decoding
    in batches, which is slower. The trained weights are copied only if
    rollouts overlap with training (`fit(max_staleness=...)`), after every
    rollout, or for devices of the engine's own. Prompts of a Gemma 3 or 4 with
    `vision=True` may have images, which are computed as in training.

    A layer with a sliding window holds keys and values of the window alone,
    rounded up to 64 tokens: its memory and its time do not grow with longer
    sequences. Layers that see all tokens hold all. In return, once a sequence
    is longer than the shortest window, another one that begins in the same
    way cannot copy a part of it later, only all of it. Prompts that get their
    slots at the same time still share what they begin with.

    On a CPU that is one device, samples of the same prompt that decode at once
    read its keys and values together, once for all of them, where slots are
    many and prompts long enough for that to pay. What is read is copied for
    that, within the memory of the cache. With `drafts` each sample reads its
    own.

    There, too, a call divides its samples among threads, at most one for each
    core that the process may use, so that small operations of one do not
    leave the other cores idle. A thread has at least 16 slots and whole
    requests. The samples are the same ones, up to rounding, and equal calls
    on equally many cores are equal bit for bit. Samples of `on_tokens`, of
    sessions, with `drafts`, and inside of `task.using_weights`, are not
    divided.

    Args:
        num_slots: int, the most samples at once.
        cache_bytes: int, the most bytes of the cache of keys and values on
            each device, or `"auto"` for half of the free memory. If it is too
            small for all slots, fewer are used.
        merge_adapter: bool, whether to add a LoRA adapter to a copy of the
            kernels during a call, which is faster but needs the memory of
            these kernels. `"auto"` does so for float32 kernels if the copy
            takes at most an eighth of the free memory; in 16 bits, rounding
            would lose most of the adapter.
        distribution: Keras distribution to sample with, such as
            `kpt.distribution.tensor_parallel(devices=...)`, or `None` for
            that of the trainer. Its devices hold a copy of all weights. If
            none of them is the trainer's (`kpt.distribution.split`), rollouts
            can overlap with training on several devices and in several
            processes.
        compile_ahead: bool, whether a run compiles, after its second rollout
            and in several threads, the programs of all lengths that may
            still come, so that none of its later rollouts waits for one.
            `"auto"` does so in runs of 200 rollouts and more, and on streams
            after 20. Programs of sessions, of prompts that share a beginning
            of 64 tokens, of images and of recurrent layers' prompts are
            compiled when they are needed.
        prefill_chunk: int, a power of two, at least 64: the most tokens of
            prompts, and of what continues a conversation, that each device
            computes at once. Longer ones are computed in pieces of so many
            tokens, each over the cache of those before, so that the memory
            of the computation does not grow with them. The beginning of a
            prompt up to its last image is never divided, and no prompt is
            where KerasHub's cached decoding is used.
        drafts: bool, whether several tokens of a sample may be computed in
            one pass of the model (speculative decoding without a second
            model). What followed the last tokens before, in the same
            sequence, in the other samples of its prompt, or in those of
            earlier calls, is a draft of the next 3 or 7 tokens. Each token is
            still sampled with the random key of its position, and the draft
            is kept up to the first that differs: samples and
            log-probabilities are those of `drafts=False`, up to rounding. It
            is faster where few samples decode at once (up to 8 on a CPU) and
            repeat what is known. The engine drafts only while the drafts
            accepted lately and the seconds measured promise at least a tenth
            more tokens a second. Logs get `rollout/draft_acceptance`, the
            share of drafted tokens that are right, and
            `rollout/tokens_per_pass`. Up to 2**24 tokens of earlier samples
            are kept until the engine gets another model. Off by default: more
            programs are compiled, and measured times decide which of them
            run, so that the last bits of log-probabilities may differ between
            two equal runs. Sessions, recurrent layers (Qwen 3.5) and
            KerasHub's cached decoding have no drafts.

    Raises:
        ValueError: for an invalid argument.

    Example:

    ```python
    engine = kpt.rollout.NativeRollout()
    engine.set_model(task)
    [[completion]] = engine.generate([kpt.rollout.Request(ids, max_tokens=4)])
    completion.token_ids, completion.per_token_logps
    ```
    """

    returns_routed_experts = takes_images = uses_devices = True

    def __init__(
        self,
        num_slots=128,
        *,
        cache_bytes="auto",
        merge_adapter="auto",
        distribution=None,
        compile_ahead="auto",
        prefill_chunk=decoding.CHUNK,
        drafts=False,
    ):
        super().__init__()
        is_int = (
            isinstance(num_slots, numbers.Integral) and num_slots is not True
        )
        if not is_int or num_slots < 1:
            raise ValueError(
                "`num_slots` must be a positive int. "
                f"Received: num_slots={num_slots!r}"
            )
        is_int = (
            isinstance(cache_bytes, numbers.Integral)
            and cache_bytes is not True
        )
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
        if distribution is not None:
            _check_distribution(distribution)
        if compile_ahead not in ("auto", True, False):
            raise ValueError(
                "`compile_ahead` must be 'auto', True or False. "
                f"Received: compile_ahead={compile_ahead!r}"
            )
        is_int = (
            isinstance(prefill_chunk, numbers.Integral)
            and prefill_chunk is not True
        )
        if (
            not is_int
            or prefill_chunk < 64
            or prefill_chunk != power_of_two(prefill_chunk)
        ):
            raise ValueError(
                "`prefill_chunk` must be a power of two and at least 64, "
                "such as 512. "
                f"Received: prefill_chunk={prefill_chunk!r}"
            )
        if drafts is not True and drafts is not False:
            raise ValueError(
                f"`drafts` must be True or False. Received: drafts={drafts!r}"
            )
        self.num_slots = num_slots
        self.cache_bytes = cache_bytes
        self.merge_adapter = merge_adapter
        self.distribution = distribution
        self.compile_ahead = compile_ahead
        self.prefill_chunk = prefill_chunk
        self.drafts = drafts
        self._synced = self._placed_for = self._expected = None
        self._reset()

    def _reset(self):
        self._decoder = self._scorer = self._batch_decoder = None
        self._drafts = Drafts() if self.drafts else None
        self._created_for = None
        self._programs = []
        self._reported_slots = False
        self._sizes, self._calls = None, 0

    def set_model(self, model):
        quantization = quantization_of(model.causal_lm)
        if self.merge_adapter is True and quantization is not None:
            raise ValueError(
                "An adapter is not merged into quantized kernels. Leave "
                "`merge_adapter` at 'auto'. Received: merge_adapter=True for "
                f"a model with {quantization}"
            )
        if model is not self._model:
            self._reset()
            self._synced = self._placed_for = None
        super().set_model(model)

    @property
    def programs(self):
        """The programs compiled so far, a line of text each."""
        batch = self._batch_decoder.programs if self._batch_decoder else []
        return [*self._programs, *batch]

    @property
    def is_apart(self):
        devices = _devices(self.distribution)
        return bool(devices) and devices.isdisjoint(_trainers_devices())

    def start(self):
        count = len(_trainers_devices())
        if self.overlaps and count > 1 and not self.is_apart:
            # If two threads start programs on the same several devices,
            # programs that exchange data may wait for each other forever.
            raise ValueError(
                "On several devices the built-in engine can sample during "
                "training if it has devices of its own: divide them by "
                "`kpt.distribution.split` and pass "
                "`NativeRollout(distribution=...)`. Or use "
                "`max_staleness=0`, or vLLM as a server "
                "(`kpt.rollout.VLLMRollout(python=...)`). Received: "
                f"max_staleness > 0 and a mesh of {count} devices"
            )

    def expect(self, expected):
        self._expected, self._sizes, self._calls = expected, None, 0

    def stop(self):
        self._synced = self._expected = self._sizes = None
        if self._decoder is not None:
            self._decoder.longest_prompt = 0

    def sync_weights(self):
        # The arrays are the trainer's, so there is nothing to move, unless
        # the engine has a distribution. If a rollout overlaps with training
        # they are copied, because training donates their memory to the next
        # step.
        if self.distribution is not None:
            trainable, _ = self._placed_weights()
            self._synced = trainable if self.overlaps else None
        elif self.overlaps:
            trainable, _ = self._task_weights()
            self._synced = [jnp.array(x, copy=True) for x in trainable]
        self.weight_version += 1
        return self.weight_version

    def scope(self):
        if self.distribution is None:
            return contextlib.nullcontext()
        self._place()
        return placing.using(self._trainable.distribution)

    def _place(self):
        """Finds the layouts of the task's variables for the engine."""
        policy = self.model.policy
        if self._placed_for is policy:
            return
        self._placed_for = policy
        placed = placing.for_policies(self.distribution, [policy])
        self._trainable = PlacedWeights(placed)
        self._frozen = PlacedWeights(placed)

    def _placed_weights(self):
        """Returns copies on the engine's devices, `(trainable, frozen)`."""
        self._place()
        return (
            self._trainable(self.model.trainable_variables),
            self._frozen(self.model.non_trainable_variables),
        )

    # Sampling

    def _generate(self, requests, on_tokens, progress):
        with self.scope():
            return self._sample(requests, on_tokens, progress)

    def _sample(self, requests, on_tokens, progress):
        policy = self.model.policy
        self._refresh()
        advance = sample_counter(progress, requests)
        if not policy.packable:
            return self._decode_batches(requests, on_tokens, advance)
        samples = Samples(requests)
        schedules = self._schedules(samples, on_tokens, advance)
        weights = self._decoder_weights()

        def advance_all(schedule, is_ended):
            while schedule.is_busy and not is_ended():
                schedule.advance(weights, self.weight_version)

        try:
            parts.run(
                [functools.partial(advance_all, x) for x in schedules],
                lambda: self.is_interrupted,
            )
        finally:
            for schedule in schedules:
                schedule.decoder.free()
        self._calls += 1
        if self._sizes is not None and _compiling.is_due(
            self.compile_ahead, self._expected.rollouts, self._calls
        ):
            self._compile_ahead(schedules[0].decoder, weights)
        return [
            [s.completion(self.weight_version) for s in of_request]
            for of_request in samples.by_request()
        ]

    def _schedules(self, samples, on_tokens, progress):
        """Makes a `Schedule` of each part of a call's samples."""
        drafts = self._drafts if self._takes_drafts else None
        if drafts is not None:
            drafts.begin()
        budget = self._cache_budget()
        count = self._count_parts(samples, on_tokens, budget)
        decoders = self._decoder.divided(count)
        most_slots = functools.partial(self._most_slots, budget, count)
        if self._expected is not None and self._sizes is None:
            self._sizes = ahead.sizes_for(
                decoders[0],
                self._expected,
                samples,
                most_slots,
                self.overlaps,
                drafts,
            )
        if count > 1:
            progress = parts.one_at_a_time(progress)
        found = []
        for decoder, part in zip(decoders, parts.divide(samples, count)):
            if self._sizes is not None:
                decoder.longest_prompt = self._sizes.longest_prompt
            schedule = Schedule(
                decoder,
                most_slots,
                sizes=self._sizes,
                least_shared=LEAST_SHARED,
                drafts=drafts,
                on_tokens=on_tokens,
                progress=progress,
            )
            schedule.add(part)
            found.append(schedule)
        return found

    def _compile_ahead(self, decoder, weights):
        """Compiles the programs that a long run may need."""
        sizes = self._sizes
        slots = sizes.num_parts * sizes.slots[0]
        purpose = f"{slots} slots of {sizes.tokens[-1]} tokens"
        is_first = processes.is_first()
        if is_first:
            _console.say(
                f"NativeRollout: compiling the programs for up to {purpose} "
                "(`compile_ahead`) ..."
            )
        start = time.perf_counter()
        count = _compiling.compile_all(ahead.lower(decoder, weights, sizes))
        if is_first:
            _console.say(
                f"NativeRollout: compiled {count} programs for up to "
                f"{purpose}, in {time.perf_counter() - start:.0f} s"
            )

    def metrics(self):
        return self._drafts.metrics() if self._takes_drafts else {}

    @property
    def _takes_drafts(self):
        if self.model is None:
            return self.drafts
        policy = self.model.policy
        return self.drafts and policy.packable and not policy.is_recurrent

    def session(self):
        self._need_task()
        if not self.model.policy.packable:
            return super().session()
        return NativeSession(
            self, self._session_schedule, self._decoder_weights
        )

    def frozen(self):
        """Returns an engine that samples from other weights of the task.

        They are set by `set_weights`. Both engines take turns.
        """
        other = NativeRollout(
            self.num_slots,
            cache_bytes=self.cache_bytes,
            merge_adapter=self.merge_adapter,
            distribution=self.distribution,
            compile_ahead=self.compile_ahead,
            prefill_chunk=self.prefill_chunk,
            drafts=self.drafts,
        )
        other.set_model(self.model)
        other.turn = self.turn
        if self.distribution is not None:
            self._place()
            other._place()
            other._frozen = self._frozen
        return other

    def set_weights(self, trainable):
        """Sets the values of the task's trainable variables to sample from.

        Args:
            trainable: list of arrays.
        """
        with self.turn:
            if self.distribution is not None:
                self._place()
                variables = self.model.trainable_variables
                trainable = self._trainable(variables, trainable)
            self._synced = trainable
            self.weight_version += 1

    def _session_schedule(self):
        self._refresh()
        return self._schedule()

    def _schedule(self):
        """Makes a `Schedule` within the memory that is free now."""
        budget = self._cache_budget()
        most_slots = functools.partial(self._most_slots, budget, 1)
        return Schedule(self._decoder, most_slots)

    def _count_parts(self, samples, on_tokens, budget):
        """Returns the number of decoders that a call's samples have.

        It is the same in all calls of a run, which has programs for it.
        """
        if self.drafts or on_tokens is not None or not samples:
            return 1
        if self._sizes is not None:
            return self._sizes.num_parts
        requests, most = samples.num_requests, len(samples)
        if self._expected is not None:
            requests, most = self._expected.prompts, self._expected.samples
        tokens = decoding.bucket(max(s.end for s in samples) + decoding.STEPS)
        slots = min(most, self._fitting(budget, tokens))
        return parts.count_parts(self._decoder.placement, requests, slots)

    def _cache_budget(self):
        """Returns the bytes of the cache on each device."""
        if self.cache_bytes == "auto":
            return free_bytes() // 2
        return self.cache_bytes

    def _decode_batches(self, requests, on_tokens, advance):
        if self._batch_decoder is None:
            budget = None if self.cache_bytes == "auto" else self.cache_bytes
            self._batch_decoder = BatchDecoder(
                self.model.causal_lm,
                self.model.using_weights,
                self.num_slots,
                budget,
            )
        out = self._batch_decoder.generate(
            self._arrays(), requests, on_tokens, self._interrupted()
        )
        done = [
            [Completion(*sample, self.weight_version) for sample in samples]
            for samples in out
        ]
        for i, samples in enumerate(done):
            for completion in samples:
                check_finite(i, completion.per_token_logps)
                if advance is not None:
                    advance(1)
        return done

    def _refresh(self):
        """Creates new programs if the task's policy or the mesh changed."""
        task = self.model
        mesh = decoding.Placement(1).key()
        key = (task.policy, mesh)
        if self._created_for == key:
            return
        self._reset()
        self._created_for = key
        model = task.policy, task.using_weights
        self._scorer = Scorer(*model, self._note)
        if task.policy.packable:
            empty = decoding.empty_layers(*model, self._task_weights())
            self._decoder = decoding.SlotDecoder(
                *model, empty, self._note, self.prefill_chunk
            )

    def _note(self, text):
        if text not in self._programs:
            self._programs.append(text)

    # Weights

    def _arrays(self):
        """Returns the weights to sample from, `(trainable, frozen)`.

        In overlapping runs, `trainable` is that of the last `sync_weights`.
        """
        if self._synced is None and self.distribution is None:
            return self._task_weights()
        if self._synced is None:
            return self._placed_weights()
        frozen = self.model.non_trainable_variables
        if self.distribution is None:
            return self._synced, [v.value for v in frozen]
        self._place()
        return self._synced, self._frozen(frozen)

    def _decoder_weights(self):
        """Returns the `Weights` to decode with; may merge the adapter."""
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
            for variable in pair.kernels:
                at = place[id(variable)]
                frozen[at] = adapter.merged_kernel(
                    i, factors, frozen[at], variable
                )
        return decoding.Weights(trainable, frozen, False)

    def _merges(self, adapter):
        if quantization_of(self.model.causal_lm) is not None:
            return False
        kernels = [x for pair in adapter.pairs for x in pair.kernels]
        if self.merge_adapter != "auto":
            return self.merge_adapter
        if any(k.dtype != "float32" for k in kernels):
            return False
        size = sum(4 * int(np.prod(k.shape)) for k in kernels)
        return size <= free_bytes() / 8

    # Memory

    def _fitting(self, budget, tokens):
        """Returns the slots of `tokens` each that a budget in bytes holds."""
        shards = self._decoder.placement.shards
        per_slot = self._bytes_while_resized(tokens)
        fits = budget // per_slot * shards
        if fits < shards:
            raise ValueError(
                f"The cache does not hold one sequence of {tokens} tokens: "
                f"that takes {readable(per_slot)}, the budget is "
                f"{readable(budget)}. Shorten prompts, lower `max_tokens`, "
                f"or raise the budget. Received: "
                f"cache_bytes={self.cache_bytes!r}"
            )
        return min(max(self.num_slots // shards, 1) * shards, fits)

    def _bytes_while_resized(self, tokens):
        """Returns the bytes of a slot; a layer exists twice for a while."""
        layers = self._decoder.layer_bytes(tokens + decoding.STEPS)
        return sum(layers) + max(layers)

    def _most_slots(self, budget, num_parts, tokens):
        """Returns the most slots of one of `num_parts` decoders."""
        slots = max(self._fitting(budget, tokens) // num_parts, 1)
        if self._sizes is not None and self._sizes.num_parts == num_parts:
            # Those that have programs.
            known = [x for x in self._sizes.slots if x <= slots]
            slots = max(known, default=slots)
        if not self._reported_slots:
            self._reported_slots = True
            all_slots = num_parts * slots
            size = self._bytes_while_resized(tokens) * all_slots
            if processes.is_first():
                _console.say(
                    f"NativeRollout: up to {all_slots} slots of {tokens} "
                    "tokens, "
                    f"{readable(size // self._decoder.placement.shards)} of "
                    f"cache a device (budget {readable(budget)})"
                )
        return slots

    # Scoring

    @property
    def score_length(self):
        context = self.context_length
        # The last token is predicted and need not be read. Tables of learned
        # positions end with the context.
        more = context is not None and self.model.policy.packable
        return context + 1 if more else context

    def _score(self, sequences, top_k, temperature):
        with self.scope():
            self._refresh()
            return self._scorer(sequences, top_k, temperature, self._arrays())


def _devices(distribution):
    """Returns the set of a distribution's devices, empty for `None`."""
    if distribution is None:
        return set()
    return set(distribution.device_mesh.backend_mesh.devices.flat)


def _trainers_devices():
    distribution = keras.distribution.distribution()
    return _devices(distribution) or {jax.local_devices()[0]}


def _check_distribution(distribution):
    kinds = keras.distribution.DataParallel, keras.distribution.ModelParallel
    if not isinstance(distribution, kinds):
        raise ValueError(
            "`distribution` must be a distribution such as "
            "`kpt.distribution.tensor_parallel(devices=...)`, or None. "
            f"Received: distribution={distribution!r}"
        )
    found = {d.process_index for d in _devices(distribution)}
    if len(found) < processes.count():
        raise ValueError(
            "`distribution` must have devices of every process. Received: "
            f"devices of {len(found)} of {processes.count()} processes. "
            "`kpt.distribution.split` divides the devices of each."
        )
