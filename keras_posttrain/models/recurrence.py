"""Recurrent layers over rows of several sequences, and their states.

A layer of linear attention mixes tokens twice: by a short causal convolution,
and by the gated delta rule (`delta_rule.py`). Both read only tokens of the
same sequence. Where its tokens are, the scopes of this file say; they are
opened together with those of `attention.py`.
"""

import contextlib
import contextvars
import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from keras_posttrain.models.delta_rule import (
    delta_rule,
    delta_step,
    tree_delta_rule,
)
from keras_posttrain.models.rematerialisation import ATTENDED

_ROWS = contextvars.ContextVar("recurrent_rows", default=None)


@contextlib.contextmanager
def recurrent_scope(rows):
    """Makes recurrent layers called inside mix tokens of these rows.

    Args:
        rows: `PackedRows`, `TreeRows`, `NextTokens` or `NextToken`.
    """
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def current_rows():
    """Returns the rows of the scope, or `None` outside."""
    return _ROWS.get()


class PackedRows:
    """Rows of sequences next to each other.

    All kinds of rows are called by a layer with

    - inputs: float array of the convolution's inputs,
      `(tokens, channels)`;
    - kernel: array of shape `(channels, width)`, the convolution's;
    - split: function from its outputs, of the shape
      `(rows, length, channels)`, to float32 queries, keys and values as
      `delta_rule` takes them;
    - decay, beta: float32 arrays of shape `(tokens, heads)`;

    and return the float32 outputs `(tokens, heads, value_dim)`.

    Args:
        segment_ids: int array of shape `(rows, length)`.
    """

    def __init__(self, segment_ids):
        self.ids = segment_ids

    def __call__(self, inputs, kernel, split, decay, beta):
        inputs, decay, beta = self._by_row(inputs, decay, beta)
        parts = [self.before(inputs, d) for d in _taps(kernel)]
        mixed = split(convolve(parts, kernel))
        out = self.mix(*mixed, decay, beta, inputs, kernel)
        out = checkpoint_name(out, ATTENDED)
        return out.reshape(-1, *out.shape[2:])

    def _by_row(self, *arrays):
        return (x.reshape(*self.ids.shape, -1) for x in arrays)

    def before(self, x, distance):
        """Returns what is so many tokens earlier, 0 in other sequences."""
        if not distance:
            return x
        length = x.shape[1]
        moved = jnp.pad(x, ((0, 0), (distance, 0), (0, 0)))[:, :length]
        ids = jnp.pad(self.ids, ((0, 0), (distance, 0)), constant_values=-1)[
            :, :length
        ]
        return jnp.where((ids == self.ids)[..., None], moved, 0)

    def mix(self, query, key, value, decay, beta, inputs, kernel):
        return delta_rule(query, key, value, decay, beta, self.ids)[0]


class TreeRows(PackedRows):
    """Rows of sequences that may continue others.

    Args:
        prefix_segments: int array of shape `(rows, num_sequences)`, see
            `delta_rule.py:tree_delta_rule`.
        kept: list or `None`: each layer appends a pair of the arrays of
            `RecurrentState` after each segment, where the axis of slots has
            `num_sequences` for each row.
    """

    def __init__(self, segment_ids, prefix_segments, kept=None):
        super().__init__(segment_ids)
        self.prefixes, self.kept = prefix_segments, kept
        # Not as layers need them: what is computed inside of a layer that is
        # rematerialised belongs to it.
        self._ends = self._ends_of_segments()
        self._previous = self._columns_before()

    def _ends_of_segments(self):
        """Returns the last column of each segment, -1 before the first."""
        numbers = jnp.arange(1, self.prefixes.shape[1] + 1)
        is_inside = self.ids[:, None] == numbers[:, None]
        columns = jnp.arange(self.ids.shape[1])
        ends = jnp.max(jnp.where(is_inside, columns, -1), axis=2)
        return jnp.pad(ends, ((0, 0), (1, 0)), constant_values=-1)

    def _columns_before(self):
        """Returns the column of the token before each one, or -1."""
        ids = self.ids
        begins = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1] != ids
        begins = begins.at[:, 0].set(True)
        parents = jnp.pad(self.prefixes, ((0, 0), (1, 0)))
        parents = jnp.take_along_axis(parents, ids, axis=1)
        ends = jnp.take_along_axis(self._ends, parents, axis=1)
        before = jnp.arange(ids.shape[1]) - 1
        return jnp.where(begins, ends, before)

    def _back(self, columns, distance):
        """Goes back so many tokens from each column."""
        for _ in range(distance):
            before = jnp.take_along_axis(
                self._previous, jnp.maximum(columns, 0), axis=1
            )
            columns = jnp.where(columns < 0, -1, before)
        return columns

    def before(self, x, distance):
        if not distance:
            return x
        columns = jnp.broadcast_to(
            jnp.arange(self.ids.shape[1]), self.ids.shape
        )
        return self._take(x, self._back(columns, distance))

    def _take(self, x, columns):
        found = jnp.take_along_axis(
            x, jnp.maximum(columns, 0)[..., None], axis=1
        )
        return jnp.where((columns < 0)[..., None], 0, found)

    def mix(self, query, key, value, decay, beta, inputs, kernel):
        out, states = tree_delta_rule(
            query, key, value, decay, beta, self.ids, self.prefixes
        )
        if self.kept is not None:
            ends = self._ends[:, 1:]
            tails = [
                self._take(inputs, self._back(ends, d))
                for d in reversed(_taps(kernel)[:-1])
            ]
            pair = states, jnp.stack(tails, axis=2)
            self.kept.append(tuple(x.reshape(-1, *x.shape[2:]) for x in pair))
        return out


class NextTokens(PackedRows):
    """The next tokens of each sequence of a cache.

    Args:
        shape: tuple, `(sequences, tokens)`.
        slots, counts, caches, place: as of `attention.py:extending_scope`.
            The caches of recurrent layers are replaced by ones with the
            states after these tokens.
    """

    def __init__(self, shape, slots, counts, caches, place):
        super().__init__(jnp.ones(shape, "int32"))
        self.slots, self.counts = slots, counts
        self.caches, self.place = caches, place
        self.is_used = jnp.arange(shape[1]) < counts[:, None]
        self.layers = iter(
            [i for i, x in enumerate(caches) if isinstance(x, RecurrentState)]
        )

    def __call__(self, inputs, kernel, split, decay, beta):
        layer = next(self.layers)
        past = self.place(self.caches[layer].select(self.slots))
        inputs, decay, beta = self._by_row(inputs, decay, beta)
        # A token that is not there leaves the state as it is.
        decay, beta = (
            jnp.where(self.is_used[..., None], x, 0) for x in (decay, beta)
        )
        length, taps = inputs.shape[1], _taps(kernel)
        whole = jnp.concatenate([past.tail.astype(inputs.dtype), inputs], 1)
        parts = [
            jax.lax.slice_in_dim(whole, start, start + length, axis=1)
            for start in reversed(taps)
        ]
        mixed = split(convolve(parts, kernel))
        out, state = delta_rule(*mixed, decay, beta, self.ids, past.state)
        places = self.counts[:, None] + jnp.arange(len(taps) - 1)
        tail = jnp.take_along_axis(whole, places[..., None], axis=1)
        new = self.caches[layer].fill(self.slots, state, tail)
        self.caches[layer] = self.place(new)
        return out.reshape(-1, *out.shape[2:])


class NextToken:
    """The next token of each sequence of a cache.

    Args:
        is_active: bool array of shape `(slots,)`. The states of the other
            slots stay as they are.
        recent: list of the layers' caches; those of recurrent layers are
            replaced by ones with the new token.
    """

    def __init__(self, is_active, recent):
        self.is_active, self.recent = is_active, recent
        self.layers = iter(
            [i for i, x in enumerate(recent) if isinstance(x, RecurrentState)]
        )

    def __call__(self, inputs, kernel, split, decay, beta):
        layer = next(self.layers)
        old = self.recent[layer]
        tail = old.tail.astype(inputs.dtype)
        whole = jnp.concatenate([tail, inputs[:, None]], axis=1)
        taps = reversed(_taps(kernel))
        parts = [whole[:, start : start + 1] for start in taps]
        query, key, value = (x[:, 0] for x in split(convolve(parts, kernel)))
        out, state = delta_step(query, key, value, decay, beta, old.state)
        new = RecurrentState(state, whole[:, 1:].astype(old.tail.dtype))
        self.recent[layer] = jax.tree.map(
            lambda x, y: jnp.where(
                self.is_active.reshape(-1, *[1] * (x.ndim - 1)), x, y
            ),
            new,
            old,
        )
        return out


def _taps(kernel):
    """Returns how far back each tap of a convolution reads."""
    return list(range(kernel.shape[-1]))


def convolve(parts, kernel):
    """Computes a causal convolution of each channel, in float32.

    Args:
        parts: list of arrays `(rows, length, channels)`, the inputs 0, 1, ...
            tokens before each token.
        kernel: array of shape `(channels, width)`; the last column is that
            of the token itself.
    """
    kernel = kernel.astype("float32")
    out = sum(
        part.astype("float32") * kernel[:, -1 - d]
        for d, part in enumerate(parts)
    )
    return out.astype(parts[0].dtype)


@dataclasses.dataclass
class RecurrentState:
    """What a recurrent layer knows of the tokens of many sequences.

    It has the interface of `key_values.py:KeyValues`.

    Attributes:
        state: float32 array of shape `(slots, heads, key_dim, value_dim)`.
        tail: float array of shape `(slots, width - 1, channels)`, the last
            inputs of the convolution, 0 before the first token.
    """

    state: jax.Array
    tail: jax.Array

    # A state cannot go back to earlier tokens.
    rewindable = 0

    def empty(self, slots, tokens):
        """Returns states like these for so many slots."""
        return jax.tree.map(
            lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), self
        )

    def columns(self, tokens):
        """Returns 1: the size of a state is that of one token."""
        return 1

    def begun(self, lengths, columns):
        """Returns the states to decode from: 0 for an empty slot."""
        return jax.tree.map(
            lambda x: jnp.where(
                lengths.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, 0
            ),
            self,
        )

    def append(self, lengths, counts, other):
        """Returns the states after the tokens of a call."""
        return other

    def select(self, slots):
        """Returns the states of some slots."""
        return RecurrentState(self.state[slots], self.tail[slots])

    def fill(self, slots, state, tail):
        """Writes the states of some slots; those out of range are ignored."""
        new = RecurrentState(state, tail)
        return jax.tree.map(
            lambda x, y: x.at[slots].set(y.astype(x.dtype), mode="drop"),
            self,
            new,
        )

    def copy(self, sources, targets, columns):
        """Copies the states of some slots to others."""
        return self.fill(targets, self.state[sources], self.tail[sources])

    def resize(self, index, tokens):
        """Selects the slots of `index`."""
        return self.select(index)


jax.tree_util.register_dataclass(RecurrentState, ["state", "tail"], [])
