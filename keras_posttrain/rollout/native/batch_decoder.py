"""Batched decoding by KerasHub, for families without the attention hook."""

import inspect

import jax
import jax.numpy as jnp
import keras_hub
import numpy as np

from keras_posttrain.distribution.plan_table import readable
from keras_posttrain.models import guards
from keras_posttrain.rollout.native.decoding import Placement, bucket
from keras_posttrain.rollout.native.samples import (
    Samples,
    power_of_two,
    sampling_arrays,
)
from keras_posttrain.rollout.native.sampling import sample

# Columns of a call whose tokens are streamed or which may be interrupted.
STREAMED_COLUMNS = 16
LEAST_LENGTH = 64


class BatchDecoder:
    """Decodes batches by KerasHub's `call_with_cache`.

    KerasHub's cache has one index for all rows, so that all rows of a batch
    decode the same column. A row whose prompt is longer than the shortest one
    gets the tokens of its prompt until it ends, and a row whose sample has
    ended waits for the others. Prompts of similar length share a batch.

    A batch has at most `num_slots` rows, and its cache of keys and values at
    most `cache_bytes` on a device. A family without a cache by position, or
    with an incorrect one, raises a `ValueError`.
    """

    def __init__(self, causal_lm, using_weights, num_slots, cache_bytes=None):
        self.causal_lm, self._using_weights = causal_lm, using_weights
        self.num_slots, self.cache_bytes = num_slots, cache_bytes
        self.programs, self._bytes = [], {}
        self.placement = Placement(1)
        _check_family(causal_lm)
        self._prefill = jax.jit(self._prefill, static_argnums=2)
        self._decode = jax.jit(self._decode, donate_argnums=(1, 2))

    def generate(self, weights, requests, emit=None, interrupted=None):
        """Samples completions of requests that have seeds.

        `weights` is `(trainable, frozen)`, `emit` is the `on_tokens` of
        `Rollout.generate`. Once `interrupted` returns true, unfinished
        samples are returned early.

        Returns:
            A list with, for each request, a list with a tuple for each
            sample: its token ids (a list), their log-probabilities (float32
            array) and its finish reason, `"stop"`, `"length"` or
            `"interrupted"`.
        """
        self._check_lengths(requests)
        samples = Samples(requests)
        for batch in self._batches(samples):
            self._run(weights, samples, batch, emit, interrupted)
        return [
            [
                (s.token_ids, np.asarray(s.logps, "float32"), s.finish_reason)
                for s in of_request
            ]
            for of_request in samples.by_request()
        ]

    @property
    def _max_length(self):
        # For a position beyond its table, a lookup would return the last one.
        return getattr(self.causal_lm.backbone, "max_sequence_length", None)

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

    def _batches(self, samples):
        """Yields lists of samples that are decoded together."""
        order = sorted(samples, key=lambda s: (len(s.prompt), s.end))
        batch = []
        for s in order:
            columns = max((x.settings.max_tokens for x in batch), default=0)
            # A separate batch would need fewer columns.
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
            # Every step creates a new cache from the old one.
            self._bytes[length] = 2 * cache.size * cache.dtype.itemsize
        return self._bytes[length]

    def _rows_for(self, count, length):
        shards = self.placement.shards
        rows = power_of_two(-(-count // shards)) * shards
        return min(rows, self._most_rows(length))

    def _run(self, weights, samples, batch, emit, interrupted):
        if interrupted is not None and interrupted():
            return
        length = self._capacity(max(s.end for s in batch))
        rows = self._rows_for(len(batch), length)
        state, settings = self._arrays(samples, batch, rows, length)
        index = int(state["index"])
        width = min(power_of_two(index, LEAST_LENGTH), length)
        self._note(f"batch prefill of {rows} x {width} tokens")
        self._note(
            f"batch decode of {rows} rows x {length} tokens"
            + (", truncated" if samples.truncated else "")
            + f", {samples.num_stop_ids} stop ids"
        )
        cache = self._prefill(weights, state["tokens"][:, :width], length)
        emitted = [0] * len(batch)
        active = True
        while active:
            until = length
            if emit is not None or interrupted is not None:
                until = index + STREAMED_COLUMNS
            cache, state = self._decode(
                weights, cache, state, settings, np.int32(until)
            )
            # The next call donates the carry, so it is copied for reading.
            seen = {k: np.array(v) for k, v in state.items()}
            index, active = int(seen["index"]), seen["active"].any()
            for row, s in enumerate(batch if emit else ()):
                first = len(s.prompt)
                new = seen["tokens"][row, first : first + seen["taken"][row]]
                if len(new) > emitted[row]:
                    new_ids = new[emitted[row] :].tolist()
                    emit(s.request, s.generation, new_ids)
                    emitted[row] = len(new)
            if interrupted is not None and interrupted():
                break
        for row, s in enumerate(batch):
            first = len(s.prompt)
            new = slice(first, first + seen["taken"][row])
            s.token_ids = seen["tokens"][row, new].tolist()
            s.logps = seen["logps"][row, new]
            if not seen["active"][row]:
                s.finish(seen["stopped"][row])

    def _note(self, text):
        if text not in self.programs:
            self.programs.append(text)

    def _arrays(self, samples, batch, rows, length):
        """Returns the carry of the loop, and the arrays it does not change."""
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
            **sampling_arrays(
                batch + [None] * (rows - len(batch)),
                samples.num_stop_ids,
                samples.truncated,
            ),
        }
        for row, s in enumerate(batch):
            state["tokens"][row, : len(s.prompt)] = s.prompt
            settings["prompt"][row] = len(s.prompt)
            settings["end"][row] = s.end
        return state, settings

    # Programs

    def _empty_cache(self, rows, length):
        """Returns KerasHub's cache; it has no public way to create one."""
        build = self.causal_lm._build_cache
        # The other arguments are for images and audio.
        others = len(inspect.signature(build).parameters) - 1
        ids = jax.ShapeDtypeStruct((rows, length), "int32")
        shape = jax.eval_shape(
            lambda ids: build(ids, *[None] * others)[1], ids
        )
        return jnp.zeros(shape.shape, shape.dtype)

    def _prefill(self, weights, token_ids, length):
        token_ids = self.placement.rows(token_ids)
        with self._using_weights(*weights):
            cache = self._empty_cache(token_ids.shape[0], length)
            # The columns after a shorter prompt are overwritten by the loop
            # before a token attends to them.
            _, _, cache = self.causal_lm.call_with_cache(
                token_ids, cache, jnp.int32(0)
            )
        return self.placement.rows(cache)

    def _decode(self, weights, cache, state, settings, until):
        """Decodes up to the column `until`, or until all samples end."""
        settings = self.placement.rows(settings)
        names = ("top_k", "top_p", "min_p")
        cuts = {k: settings[k] for k in names if k in settings}

        def is_unfinished(carry):
            _, state = carry
            return (state["index"] < until) & jnp.any(state["active"])

        def column(x, index):
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1)

        def body(carry):
            cache, state = carry
            index, tokens = state["index"], state["tokens"]
            logits, _, cache = self.causal_lm.call_with_cache(
                column(tokens, index - 1), cache, index - 1
            )
            sampled, logps = sample(
                logits[:, 0].astype("float32"),
                settings["keys"],
                jnp.full(tokens.shape[0], index),
                settings["temperature"],
                **cuts,
            )
            new = state["active"] & (index >= settings["prompt"])
            token = jnp.where(new, sampled, column(tokens, index)[:, 0])
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

        with self._using_weights(*weights):
            cache, state = jax.lax.while_loop(
                is_unfinished, body, (cache, state)
            )
        return cache, self.placement.replicated(state)


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
