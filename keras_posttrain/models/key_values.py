"""The cache of a layer that attends to all tokens before its own."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from keras_posttrain.models import sharding

# On a CPU the keys of at least so many tokens are in blocks. Fewer stay in the
# processor's caches, where their order makes no difference.
BLOCK = 64
LEAST_IN_BLOCKS = 384


@dataclasses.dataclass
class KeyValues:
    """The keys and values of one layer, for many sequences.

    Keys have the shape `(slots, kv_heads, head_dim, tokens)`, values
    `(slots, kv_heads, tokens, head_dim)`. The product of one query with the
    keys then reads rows of many tokens, which is four times as fast on a CPU.
    Keys of long sequences have blocks of `BLOCK` tokens there, `(slots,
    kv_heads, blocks, head_dim, block)`, the token of column `c` in block `c //
    block`: memory is read in order, which is twice as fast again.
    """

    keys: jax.Array
    values: jax.Array

    # Sequences of at most so many tokens can be cut to any of their first.
    rewindable = math.inf
    # Whether a column holds several tokens of a long sequence in turn.
    wraps = False

    @classmethod
    def zeros(cls, slots, tokens, kv_heads, head_dim, dtype):
        """Returns an empty cache."""
        keys = jnp.zeros((slots, kv_heads, head_dim, tokens), dtype)
        values = jnp.zeros((slots, kv_heads, tokens, head_dim), dtype)
        return cls(_laid_out(keys), values)

    @property
    def num_columns(self):
        """The columns of each slot."""
        return self.values.shape[2]

    def with_arrays(self, keys, values):
        """Returns a cache like this one with other arrays."""
        return dataclasses.replace(self, keys=keys, values=values)

    def empty(self, slots, tokens):
        """Returns an empty cache like this one, of so many tokens a slot."""
        _, heads, _, head_dim = self.values.shape
        columns, dtype = self.columns(tokens), self.keys.dtype
        new = KeyValues.zeros(slots, columns, heads, head_dim, dtype)
        return self.with_arrays(new.keys, new.values)

    def columns(self, tokens):
        """Returns the columns of a cache for so many tokens a slot."""
        return tokens

    def positions(self, lengths):
        """Returns which of a slot's tokens is in each column.

        Args:
            lengths: int array of shape `(slots,)`, the tokens of each.

        Returns:
            An int array of shape `(slots, columns)`, negative where a column
            has no token.
        """
        columns = jnp.arange(self.num_columns)
        return jnp.where(columns < lengths[:, None], columns, -1)

    def write(self, column, keys, values):
        """Writes `(slots, kv_heads, head_dim)` arrays to one column."""
        return self.write_block(column, keys[:, None], values[:, None])

    def write_block(self, column, keys, values):
        """Writes `(slots, tokens, kv_heads, head_dim)` arrays from a column
        on, to a cache whose keys are not in blocks."""
        update = jax.lax.dynamic_update_slice_in_dim
        return self.with_arrays(
            update(self.keys, keys.transpose(0, 2, 3, 1), column, 3),
            update(self.values, values.transpose(0, 2, 1, 3), column, 2),
        )

    def arranged(self, columns):
        """Returns a cache with the columns of each slot in another order.

        `columns` is an int array of shape `(slots, columns)`.
        """
        keys = jnp.take_along_axis(
            joined_keys(self.keys), columns[:, None, None], axis=3
        )
        values = jnp.take_along_axis(
            self.values, columns[:, None, :, None], axis=2
        )
        return self.with_arrays(_laid_out(keys), values)

    def begun(self, lengths, columns):
        """Returns an empty cache of so many columns for the same slots."""
        _, heads, _, head_dim = self.values.shape
        dtype = self.keys.dtype
        return KeyValues.zeros(len(lengths), columns, heads, head_dim, dtype)

    def append(self, lengths, counts, other):
        """Writes tokens after each slot's first `lengths`.

        They are the first `counts` of each slot of `other`. What is behind
        them in a slot is not used.
        """
        update = jax.lax.dynamic_update_slice_in_dim

        def slot(keys, values, more_keys, more_values, at):
            return (
                _update_keys(keys, more_keys, at),
                update(values, more_values, at, 1),
            )

        return self.with_arrays(
            *jax.vmap(slot)(
                self.keys, self.values, other.keys, other.values, lengths
            )
        )

    def select(self, slots):
        """Returns the keys and values of some slots."""
        return self.with_arrays(self.keys[slots], self.values[slots])

    def window(self, begins, columns):
        """Returns so many columns of each slot, keys not in blocks.

        `begins` is the first of them, an int or an int array of shape
        `(slots,)`.
        """
        if isinstance(begins, int):
            last = begins + columns
            keys = joined_keys(self.keys)[..., begins:last]
            return self.with_arrays(keys, self.values[:, :, begins:last])
        cut = jax.lax.dynamic_slice_in_dim

        def slot(keys, values, at):
            return _cut_keys(keys, at, columns), cut(values, at, columns, 1)

        return self.with_arrays(
            *jax.vmap(slot)(self.keys, self.values, begins)
        )

    def extend(self, slots, lengths, counts, keys, values):
        """Writes tokens after the first ones of some slots.

        Args:
            slots: int array of shape `(sequences,)`. A sequence whose slot
                is out of range is ignored.
            lengths: int array of that shape, the tokens of each slot before.
            counts: int array of that shape, the tokens to write.
            keys, values: arrays of shape
                `(sequences, tokens, kv_heads, head_dim)`.
        """
        columns = self.targets(lengths, counts, keys.shape[1])
        slots = slots[:, None]
        keys, values = (x.astype(self.keys.dtype) for x in (keys, values))
        if self.keys.ndim == 5:
            block, place = divmod(columns, self.keys.shape[4])
            at_keys = self.keys.at[slots, :, block, :, place]
        else:
            at_keys = self.keys.at[slots, :, :, columns]
        return self.with_arrays(
            at_keys.set(keys, mode="drop"),
            self.values.at[slots, :, columns].set(values, mode="drop"),
        )

    def targets(self, lengths, counts, tokens):
        """Returns the columns of tokens that follow others.

        Args:
            lengths, counts: as of `extend`.
            tokens: int, at least the largest of `counts`.

        Returns:
            An int array of shape `(sequences, tokens)`, out of range for
            tokens that are not written.
        """
        places = jnp.arange(tokens)
        return jnp.where(
            places < counts[:, None],
            lengths[:, None] + places,
            self.num_columns,
        )

    def prompt_tokens(self, lengths, width):
        """Returns the tokens of prompts that `fill` takes, by column.

        Args:
            lengths: int array of shape `(prompts,)`, at most `width`.
            width: int.

        Returns:
            An int array of shape `(columns,)` or `(prompts, columns)`. It is
            arbitrary in columns that are not used.
        """
        return jnp.arange(width)

    def fill(self, slots, keys, values):
        """Writes prompts to some slots, starting at the first column.

        Both arrays are `(prompts, tokens, kv_heads, head_dim)`. A prompt
        whose slot is out of range is ignored.
        """
        tokens = keys.shape[1]
        keys = keys.transpose(0, 2, 3, 1).astype(self.keys.dtype)
        values = values.transpose(0, 2, 1, 3).astype(self.values.dtype)
        if self.keys.ndim == 5:
            # Whole blocks: the columns behind a prompt are not used.
            block = self.keys.shape[4]
            more = [(0, 0)] * 3 + [(0, -tokens % block)]
            keys = _in_blocks(jnp.pad(keys, more), block)
            at_keys = self.keys.at[slots, :, : keys.shape[2]]
        else:
            at_keys = self.keys.at[slots, :, :, :tokens]
        return self.with_arrays(
            at_keys.set(keys, mode="drop"),
            self.values.at[slots, :, :tokens].set(values, mode="drop"),
        )

    def copy(self, sources, targets, columns):
        """Copies the first columns of some slots to others."""
        if self.keys.ndim == 5:
            blocks = -(-columns // self.keys.shape[4])
            keys = _joined(self.keys[sources, :, :blocks])[..., :columns]
        else:
            keys = self.keys[sources, :, :, :columns]
        keys = keys.transpose(0, 3, 1, 2)
        values = self.values[sources, :, :columns].transpose(0, 2, 1, 3)
        return self.fill(targets, keys, values)

    def resize(self, index, tokens):
        """Selects the slots of `index` and sets their number of tokens."""
        tokens = self.columns(tokens)

        def fit(x, axis, size):
            more = size - x.shape[axis]
            if more <= 0:
                return jax.lax.slice_in_dim(x, 0, size, axis=axis)
            pad = [(0, more if i == axis else 0) for i in range(x.ndim)]
            return jnp.pad(x, pad)

        keys, values = (
            jnp.take(x, index, axis=0) for x in (self.keys, self.values)
        )
        if keys.ndim == 5 and _are_in_blocks(tokens):
            keys = fit(keys, 2, tokens // keys.shape[4])
        else:
            keys = _laid_out(fit(joined_keys(keys), 3, tokens))
        return self.with_arrays(keys, fit(values, 2, tokens))


jax.tree_util.register_dataclass(KeyValues, ["keys", "values"], [])


def _are_in_blocks(columns):
    """Returns whether the keys of so many columns are in blocks."""
    is_long = columns >= LEAST_IN_BLOCKS and columns % BLOCK == 0
    return is_long and sharding.platform() == "cpu"


def _laid_out(keys):
    """Lays out keys of shape `(slots, kv_heads, head_dim, tokens)`."""
    return _in_blocks(keys, BLOCK) if _are_in_blocks(keys.shape[3]) else keys


def _in_blocks(keys, block):
    """Moves the blocks of `(..., head_dim, tokens)` before `head_dim`."""
    keys = keys.reshape(*keys.shape[:-1], -1, block)
    return jnp.moveaxis(keys, -2, -3)


def _joined(keys):
    """Puts the blocks of `(..., blocks, head_dim, block)` in a row."""
    keys = jnp.moveaxis(keys, -3, -2)
    return keys.reshape(*keys.shape[:-2], -1)


def joined_keys(keys):
    """Returns keys as `(slots, kv_heads, head_dim, tokens)`."""
    return _joined(keys) if keys.ndim == 5 else keys


def _blocks_of(keys, column, columns):
    """Cuts the blocks of a slot's keys that some columns may be in.

    Returns:
        Tuple `(part, first)`: an array of shape `(kv_heads, head_dim,
        tokens)`, and the number of its first block.
    """
    _, blocks, _, block = keys.shape
    count = min(blocks, 1 - (-columns // block))
    first = jnp.minimum(column // block, blocks - count)
    part = jax.lax.dynamic_slice_in_dim(keys, first, count, 1)
    return _joined(part), first


def _update_keys(keys, more, column):
    """Writes `more`, `(kv_heads, head_dim, tokens)`, to a slot's keys."""
    update = jax.lax.dynamic_update_slice_in_dim
    if keys.ndim == 3:
        return update(keys, more, column, 2)
    part, first = _blocks_of(keys, column, more.shape[2])
    block = keys.shape[3]
    part = update(part, more, column - first * block, 2)
    return update(keys, _in_blocks(part, block), first, 1)


def _cut_keys(keys, column, columns):
    """Cuts columns of a slot's keys: `(kv_heads, head_dim, columns)`."""
    first = 0
    if keys.ndim == 4:
        block = keys.shape[3]
        keys, first = _blocks_of(keys, column, columns)
        first = first * block
    return jax.lax.dynamic_slice_in_dim(keys, column - first, columns, 2)
