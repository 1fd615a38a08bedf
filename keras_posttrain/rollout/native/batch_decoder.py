"""Sampling from families whose attention has no seam, row by row in step."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import keras_hub
import numpy as np

from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models import guards
from keras_posttrain.rollout.native.decoding import (
    Placement,
    bucket,
    power_of_two,
)
from keras_posttrain.rollout.native.sampling import sample, sample_keys

# Columns of one call where somebody reads the tokens as they come, or may
# end it.
STREAMED_COLUMNS = 16
LEAST_LENGTH = 64


@dataclasses.dataclass(eq=False)
class _Sample:
    """One sample to be drawn, and what has come of it."""

    request: int
    generation: int
    settings: object
    key: np.ndarray
    token_ids: list = dataclasses.field(default_factory=list)
    logps: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, "float32")
    )
    finish_reason: str = "interrupted"

    @property
    def prompt(self):
        return self.settings.token_ids

    @property
    def end(self):
        return len(self.prompt) + self.settings.max_tokens


class LockstepDecoder:
    """Decodes by KerasHub's own `call_with_cache`.

    Its cache has one index for all rows: the rows of a batch go through the
    columns together. A row whose prompt is longer than the shortest takes
    its own tokens until they end, one whose sample has ended waits for the
    others. Prompts of like length share a batch.

    Args:
        task: the task whose model decodes.
        num_slots: int, the most rows of a batch.
        cache_bytes: int or `None`, the bytes that the cache of keys and
            values may take on a device.

    Raises:
        ValueError: for a family that has no cache by position, or a wrong
            one.
    """

    def __init__(self, task, num_slots, cache_bytes=None):
        self.task, self.num_slots = task, num_slots
        self.cache_bytes = cache_bytes
        self.programs, self._bytes = [], {}
        self.placement = Placement(1)
        _check_family(task.causal_lm)
        self._prefill = jax.jit(self._prefill, static_argnums=2)
        self._decode = jax.jit(self._decode, donate_argnums=(1, 2))

    def generate(self, requests, emit=None, weights=None, interrupted=None):
        """Samples.

        Args:
            requests: list of `Request`s that have seeds.
            emit: `f(request, generation, token_ids)` or `None`: told of new
                tokens as they come.
            weights: `(trainable, frozen)`, lists of arrays, or `None` for
                the task's as they are.
            interrupted: function or `None`: where it says so, the samples
                that have not ended are given as they are.

        Returns:
            A list with, for each request, a list with a tuple for each
            sample: its token ids (a list), their log-probabilities (float32
            array) and the reason why it ended, `"stop"`, `"length"` or
            `"interrupted"`.
        """
        self._check_lengths(requests)
        samples = self._samples(requests)
        self._truncated = any(
            r.top_k or r.min_p or (r.top_p is not None and r.top_p < 1)
            for r in requests
        )
        self._stop_ids = power_of_two(
            max((len(r.stop_token_ids) for r in requests), default=0)
        )
        if weights is None:
            weights = (
                [v.value for v in self.task.trainable_variables],
                [v.value for v in self.task.non_trainable_variables],
            )
        for batch in self._batches(samples):
            self._run(weights, batch, emit, interrupted)
        out = [[] for _ in requests]
        for s in samples:
            out[s.request].append((s.token_ids, s.logps, s.finish_reason))
        return out

    @property
    def _max_length(self):
        # Beyond its table of positions a lookup would give the last one.
        backbone = self.task.causal_lm.backbone
        return getattr(backbone, "max_sequence_length", None)

    def _capacity(self, tokens):
        size = bucket(tokens)
        return min(size, self._max_length or size)

    def _check_lengths(self, requests):
        longest = self._max_length
        for i, r in enumerate(requests if longest else ()):
            tokens = len(r.token_ids)
            if tokens + r.max_tokens > longest:
                raise ValueError(
                    f"Request {i} does not fit the model's context of "
                    f"{longest} tokens. Received: {tokens} token ids and "
                    f"max_tokens={r.max_tokens}, {tokens + r.max_tokens} in "
                    "all. Shorten it or lower `max_tokens`."
                )

    # Batches

    def _samples(self, requests):
        return [
            _Sample(i, g, r, key)
            for i, (r, keys) in enumerate(zip(requests, sample_keys(requests)))
            for g, key in enumerate(keys)
        ]

    def _batches(self, samples):
        """Lists of samples that go together."""
        order = sorted(samples, key=lambda s: (len(s.prompt), s.end))
        batch = []
        for s in order:
            columns = max((x.settings.max_tokens for x in batch), default=0)
            # More columns for prompts than a batch of its own would take.
            far = batch and len(s.prompt) - len(batch[0].prompt) > columns
            longest = max([s.end] + [x.end for x in batch])
            if batch and (far or len(batch) >= self._most_rows(longest)):
                yield batch
                batch = []
            batch.append(s)
        if batch:
            yield batch

    def _most_rows(self, length):
        shards = self.placement.shards
        most = max(self.num_slots // shards, 1)
        if self.cache_bytes is not None:
            row = self._row_bytes(self._capacity(length))
            if row > self.cache_bytes:
                raise ValueError(
                    f"The cache does not hold one sequence of {length} "
                    f"tokens: that takes {readable(row)}, the budget is "
                    f"{readable(self.cache_bytes)}. Shorten prompts, lower "
                    "`max_tokens`, or raise the budget. Received: "
                    f"cache_bytes={self.cache_bytes}"
                )
            most = min(most, self.cache_bytes // row)
        return most * shards

    def _row_bytes(self, length):
        if length not in self._bytes:
            cache = jax.eval_shape(lambda: self._empty_cache(1, length))
            # Every step makes a new cache of the old.
            self._bytes[length] = 2 * cache.size * cache.dtype.itemsize
        return self._bytes[length]

    def _rows_for(self, count, length):
        shards = self.placement.shards
        rows = power_of_two(-(-count // shards)) * shards
        return min(rows, self._most_rows(length))

    def _run(self, weights, batch, emit, interrupted):
        if interrupted is not None and interrupted():
            return
        length = self._capacity(max(s.end for s in batch))
        rows = self._rows_for(len(batch), length)
        state, settings = self._arrays(batch, rows, length)
        index = int(state["index"])
        width = min(power_of_two(index, LEAST_LENGTH), length)
        self._note(f"lockstep prefill of {rows} x {width} tokens")
        self._note(
            f"lockstep decode of {rows} rows x {length} tokens"
            + (", truncated" if self._truncated else "")
            + f", {self._stop_ids} stop ids"
        )
        cache = self._prefill(weights, state["tokens"][:, :width], length)
        told = [0] * len(batch)
        active = True
        while active:
            until = length
            if emit is not None or interrupted is not None:
                until = index + STREAMED_COLUMNS
            cache, state = self._decode(
                weights, cache, state, settings, np.int32(until)
            )
            # The carry is given to the next call: what is read is a copy.
            seen = {k: np.array(v) for k, v in state.items()}
            index, active = int(seen["index"]), seen["active"].any()
            for row, s in enumerate(batch if emit else ()):
                first = len(s.prompt)
                new = seen["tokens"][row, first : first + seen["taken"][row]]
                if len(new) > told[row]:
                    emit(s.request, s.generation, new[told[row] :].tolist())
                    told[row] = len(new)
            if interrupted is not None and interrupted():
                break
        for row, s in enumerate(batch):
            first = len(s.prompt)
            new = slice(first, first + seen["taken"][row])
            s.token_ids = seen["tokens"][row, new].tolist()
            s.logps = seen["logps"][row, new]
            if not seen["active"][row]:
                stopped = seen["stopped"][row]
                s.finish_reason = "stop" if stopped else "length"

    def _note(self, text):
        if text not in self.programs:
            self.programs.append(text)

    def _arrays(self, batch, rows, length):
        """The carry of the loop, and what does not change in it."""
        # Rows without a sample are never active.
        shortest = min(len(s.prompt) for s in batch)
        state = {
            "index": np.int32(shortest),
            "tokens": np.zeros((rows, length), "int32"),
            "logps": np.zeros((rows, length), "float32"),
            "active": np.arange(rows) < len(batch),
            "stopped": np.zeros(rows, bool),
            "taken": np.zeros(rows, "int32"),
        }
        settings = {
            "prompt": np.full(rows, shortest, "int32"),
            "end": np.zeros(rows, "int32"),
            "keys": np.zeros((rows, 2), "uint32"),
            "temperature": np.zeros(rows, "float32"),
            "stop": np.full((rows, self._stop_ids), -1, "int32"),
        }
        if self._truncated:
            vocabulary = self.task.causal_lm.backbone.vocabulary_size
            settings["top_k"] = np.full(rows, vocabulary, "int32")
            settings["top_p"] = np.ones(rows, "float32")
            settings["min_p"] = np.zeros(rows, "float32")
        for row, s in enumerate(batch):
            r = s.settings
            state["tokens"][row, : len(s.prompt)] = s.prompt
            settings["prompt"][row] = len(s.prompt)
            settings["end"][row] = s.end
            settings["keys"][row] = s.key
            settings["temperature"][row] = r.temperature
            settings["stop"][row, : len(r.stop_token_ids)] = r.stop_token_ids
            if self._truncated:
                if r.top_k is not None:
                    settings["top_k"][row] = min(r.top_k, vocabulary)
                settings["top_p"][row] = 1.0 if r.top_p is None else r.top_p
                settings["min_p"][row] = r.min_p or 0.0
        return state, settings

    # Programs

    def _empty_cache(self, rows, length):
        """The cache that KerasHub would fill, of zeros."""
        causal_lm = self.task.causal_lm
        build = causal_lm._build_cache
        # What is asked for beside the tokens is of pictures and sound.
        others = len(inspect.signature(build).parameters) - 1
        ids = jax.ShapeDtypeStruct((rows, length), "int32")
        shape = jax.eval_shape(
            lambda ids: build(ids, *[None] * others)[1], ids
        )
        return jnp.zeros(shape.shape, shape.dtype)

    def _prefill(self, weights, token_ids, length):
        token_ids = self.placement.rows(token_ids)
        with self.task.using_weights(*weights):
            cache = self._empty_cache(token_ids.shape[0], length)
            # Behind a shorter prompt it holds what the loop overwrites
            # before any token sees it.
            _, _, cache = self.task.causal_lm.call_with_cache(
                token_ids, cache, jnp.int32(0)
            )
        return self.placement.rows(cache)

    def _decode(self, weights, cache, state, settings, until):
        """Goes on to the column `until`, or until all samples have ended."""
        settings = self.placement.rows(settings)
        names = ("top_k", "top_p", "min_p")
        cuts = {k: settings[k] for k in names if k in settings}

        def go_on(carry):
            _, state = carry
            return (state["index"] < until) & jnp.any(state["active"])

        def column(x, index):
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1)

        def body(carry):
            cache, state = carry
            index, tokens = state["index"], state["tokens"]
            logits, _, cache = self.task.causal_lm.call_with_cache(
                column(tokens, index - 1), cache, index - 1
            )
            drawn, logps = sample(
                logits[:, 0].astype("float32"),
                settings["keys"],
                jnp.full(tokens.shape[0], index),
                settings["temperature"],
                **cuts,
            )
            new = state["active"] & (index >= settings["prompt"])
            token = jnp.where(new, drawn, column(tokens, index)[:, 0])
            stop = jnp.any(token[:, None] == settings["stop"], axis=1) & new
            more = index + 1 < settings["end"]
            write = jax.lax.dynamic_update_slice_in_dim
            logps = jnp.where(new, logps, 0.0)[:, None]
            return cache, {
                "index": index + 1,
                "tokens": write(tokens, token[:, None], index, 1),
                "logps": write(state["logps"], logps, index, 1),
                "active": state["active"] & ~stop & more,
                "stopped": state["stopped"] | stop,
                "taken": state["taken"] + new,
            }

        with self.task.using_weights(*weights):
            cache, state = jax.lax.while_loop(go_on, body, (cache, state))
        return cache, self.placement.whole(state)


def _check_family(causal_lm):
    guards.check_generate(causal_lm)
    call = getattr(causal_lm, "call_with_cache", None)
    names = inspect.signature(call).parameters if call else ()
    if "cache_update_index" not in names:
        raise ValueError(
            f"{type(causal_lm).__name__} has no cached decoding by position "
            "in KerasHub 0.32, so that it cannot be sampled from here. "
            "`export` the model and sample with another engine."
        )
    if (
        isinstance(causal_lm, keras_hub.models.QwenMoeCausalLM)
        and causal_lm.backbone.use_sliding_window_attention
    ):
        raise ValueError(
            "KerasHub 0.32 cannot decode Qwen-MoE with a sliding window. "
            "`export` the model and sample with another engine. Received: "
            "use_sliding_window_attention=True"
        )
