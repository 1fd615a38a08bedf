"""The cache of a layer that attends to a sliding window: a ring of columns.

A token of such a layer sees only the last ones, so that the cache holds no
others. The token at position `p` is in column `p % columns`, in the place of
the one that left the window. A cache shorter than the window is used as any
other: no column gets a second token.

All layers that are given a window get such a cache in the built-in engine
(`with_window` decides), of every family that it decodes from its own caches,
with images, sinks and soft caps as well. If several layers read a cache, its
window is the longest of theirs, and there is none if one of them has none.
"""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.models.key_values import KeyValues

# A ring's columns are a multiple of this number.
COLUMNS = 64


def with_window(cache, window):
    """Returns a `KeyValues` as that of a layer with a sliding window.

    `window` is the number of tokens that a token sees, itself included;
    with `None` the cache is returned as it is.
    """
    if window is None:
        return cache
    most = -(-window // COLUMNS) * COLUMNS
    return WindowKeyValues(cache.keys, cache.values, most)


@dataclasses.dataclass
class WindowKeyValues(KeyValues):
    """The keys and values of the last tokens of many sequences.

    The arrays are those of `KeyValues`, with at most `most_columns` columns.

    Attributes:
        most_columns: int, at least the layer's window.
    """

    most_columns: int

    @property
    def rewindable(self):
        return self.most_columns

    @property
    def wraps(self):
        return self.num_columns == self.most_columns

    def columns(self, tokens):
        return min(tokens, self.most_columns)

    def positions(self, lengths):
        if not self.wraps:
            return super().positions(lengths)
        last, columns = lengths[:, None] - 1, jnp.arange(self.most_columns)
        return last - (last - columns) % self.most_columns

    def append(self, lengths, counts, other):
        if not self.wraps:
            return super().append(lengths, counts, other)

        def slot(keys, values, more_keys, more_values, columns):
            if keys.ndim == 4:
                block, place = divmod(columns, keys.shape[3])
                at_keys = keys.at[:, block, :, place]
                # Indices that are apart put their axis first.
                more_keys = jnp.moveaxis(more_keys, 2, 0)
            else:
                at_keys = keys.at[:, :, columns]
            return (
                at_keys.set(more_keys, mode="drop"),
                values.at[:, columns].set(more_values, mode="drop"),
            )

        # What is behind the `counts` would overwrite the window.
        columns = self.targets(lengths, counts, other.num_columns)
        arrays = self.keys, self.values, other.keys, other.values
        return self.with_arrays(*jax.vmap(slot)(*arrays, columns))

    def targets(self, lengths, counts, tokens):
        if not self.wraps:
            return super().targets(lengths, counts, tokens)
        places, counts = jnp.arange(tokens), counts[:, None]
        # Of tokens that share a column the last one is written.
        written = (places < counts) & (places >= counts - self.most_columns)
        columns = (lengths[:, None] + places) % self.most_columns
        return jnp.where(written, columns, self.most_columns)

    def prompt_tokens(self, lengths, width):
        if not self.wraps:
            return super().prompt_tokens(lengths, width)
        return jnp.maximum(self.positions(lengths)[:, :width], 0)

    def in_order(self, lengths):
        """Returns a cache whose last column has the last of the tokens.

        Each column has the token before that of the next one; the first
        columns of a slot with fewer tokens are arbitrary.
        """
        columns = jnp.arange(self.most_columns)
        return self.arranged((lengths[:, None] + columns) % self.most_columns)


jax.tree_util.register_dataclass(
    WindowKeyValues, ["keys", "values"], ["most_columns"]
)
