"""Rows whose tokens are split over devices: context parallelism.

A layout of `kpt.distribution.fsdp(context=n)` cuts each row of a batch into
`n` pieces, one for each of `n` devices. What a model computes of single
tokens then runs on pieces as it does on rows. Two things cross their borders:
attention, for which each device gathers the keys and values of the full row
in each layer, and the prediction of a token by the one before it.
Log-probabilities are therefore computed where the predicting token is, and
moved to the predicted one as numbers, not as hidden states.

A row has `2 * n` chunks of equal length, and piece `i` the chunks `i` and
`2 * n - 1 - i`. Under a causal mask all pieces then have the same number of
scores to compute ([Llama Team, 2024](https://arxiv.org/abs/2407.21783),
section 3.3.2). Rows are padded at their end to such a length.

Gathered keys and values of a row take `length * kv_heads * head_dim` numbers
each on a device, in one layer at a time: 256 MiB in bfloat16 for Llama-3.1-8B
at 131,072 tokens. Passing them around a ring of devices
([Liu et al., 2023](https://arxiv.org/abs/2310.01889)) would take a part of
that, but needs a mask that differs by device and by step, which the TPU's
kernel of attention does not have. It could hide little communication: by the
TPU compiler and published rates, all of a step on eight v5p chips takes 0.15 s
on their network, and its operations 9.5 s.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_posttrain.models import sharding

# Chunks of more tokens than this have a multiple of it, so that they divide
# into blocks of attention.
UNIT = 64


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How the rows of a batch are cut into pieces.

    The pieces of the rows of one group of devices are neighbours, in the
    order of the devices: those of the first device come first. With `count`
    of 1 a piece is a row, and nothing is changed.

    Args:
        rows, length: ints, the shape of the batch's arrays.
        count: int, the pieces of a row.
        mesh: jax mesh of two axes, `sharding.context_mesh()`, or `None`.
    """

    rows: int
    length: int
    count: int = 1
    mesh: jax.sharding.Mesh | None = None

    @property
    def axis(self):
        """Name of the mesh's axis over which a row is split, or `None`."""
        return self.mesh and self.mesh.axis_names[1]

    @property
    def chunk(self):
        """Int, the tokens of one of the two chunks of a piece."""
        size = -(-self.length // (2 * self.count))
        return size if size <= UNIT else -(-size // UNIT) * UNIT

    @property
    def padded_length(self):
        """Int, the tokens of all pieces of a row."""
        if self.count == 1:
            return self.length
        return 2 * self.count * self.chunk

    @property
    def shape(self):
        """Tuple, the shape of arrays that are cut."""
        return self.rows * self.count, self.padded_length // self.count

    def pad(self, x):
        """Pads rows, `(rows, length, ...)`, with zeros to `padded_length`."""
        more = self.padded_length - self.length
        if not more:
            return x
        return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))

    def cut(self, x):
        """Cuts rows, `(rows, length, ...)`, into pieces, an array of `shape`.

        Each device has its piece afterwards.
        """
        if self.count == 1:
            return x
        groups, more = self.mesh.devices.shape[0], x.shape[2:]
        x = self.pad(x).reshape(
            groups, self.rows // groups, 2 * self.count, self.chunk, *more
        )
        # Axes: group, row, chunk, token. Then: group, row, piece, chunk.
        x = jnp.take(x, self._chunks(), axis=2)
        x = jnp.moveaxis(x, 2, 1).reshape(*self.shape, *more)
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, P(self.mesh.axis_names))
        )

    def join(self, x):
        """Joins pieces, an array of `shape`, to rows of `length`.

        Each device has its full rows afterwards: arrays should be small.
        """
        if self.count == 1:
            return x
        groups, more = self.mesh.devices.shape[0], x.shape[2:]
        # Each chunk is gathered as it is, and put in order afterwards.
        x = x.reshape(
            groups, self.count, self.rows // groups, 2, self.chunk, *more
        )
        x = jax.lax.with_sharding_constraint(
            x, NamedSharding(self.mesh, P(self.mesh.axis_names[0]))
        )
        x = self.in_order(jnp.moveaxis(x, 1, 2))
        return x.reshape(self.rows, self.padded_length, *more)[
            :, : self.length
        ]

    def in_order(self, x):
        """Orders the chunks of pieces, `(groups, rows, count, 2, ...)`.

        Returns an array of shape `(groups, rows, 2 * count, ...)`.
        """
        return jnp.concatenate([x[:, :, :, 0], x[:, :, ::-1, 1]], axis=2)

    def columns(self):
        """Returns the column in its row of each token of each piece.

        An int32 NumPy array of shape `(count, padded_length // count)`.
        """
        columns = np.arange(self.padded_length, dtype=np.int32)
        columns = columns.reshape(2 * self.count, self.chunk)
        return columns[self._chunks()].reshape(self.count, -1)

    def attend(self, function, query, key, value, tokens, sinks, *more):
        """Runs attention on each device with its own pieces.

        Args:
            function: function of the following arguments to an array like
                `query`. It gets a device's part of the first three, the full
                rows of `tokens`, and all sinks.
            query, key, value: arrays of shape `(*shape, heads, head_dim)`.
            tokens: pytree of arrays of shape `(rows, padded_length)`.
            sinks: array of shape `(heads,)`, or `None`.
            *more: pairs of a further argument and its partition.
        """
        own, rows = P(self.mesh.axis_names), P(self.mesh.axis_names[0])
        arguments = [argument for argument, _ in more]
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(own, own, own, rows, P(), *(spec for _, spec in more)),
            out_specs=own,
            check_vma=False,
        )(query, key, value, tokens, sinks, *arguments)

    def gather(self, x):
        """Gathers the rows of a device's pieces, within `attend`.

        Args:
            x: array of shape `(pieces, tokens, ...)`.

        Returns:
            An array of shape `(pieces, padded_length, ...)`.
        """
        x = sharding.gather_along(self.axis, 1, ((self.axis, None),), x)
        shape = (1, x.shape[0], self.count, 2, self.chunk, *x.shape[2:])
        return self.in_order(x.reshape(shape)).reshape(x.shape)

    def own(self, tokens):
        """Selects the tokens of a device's pieces, within `attend`.

        Args:
            tokens: pytree of arrays of shape `(rows, padded_length)`.

        Returns:
            `(columns, tokens)`: an int32 array of shape `(tokens,)`, the
            columns of a piece's tokens in the row, and a pytree of arrays of
            these columns.
        """
        columns = jnp.asarray(self.columns())
        columns = columns[jax.lax.axis_index(self.axis)]
        return columns, jax.tree.map(lambda x: x[:, columns], tokens)

    def _chunks(self):
        """Returns the chunks of each piece, an array of `(count, 2)`."""
        first = np.arange(self.count)
        return np.stack([first, 2 * self.count - 1 - first], axis=1)


@dataclasses.dataclass(frozen=True)
class Targets:
    """Tokens of pieces, in the place of the ones that predict them.

    A token is usually predicted by the one before it, whose device has the
    hidden state. The few tokens of a row that another one predicts, at the
    start of sequences that share a prompt, are appended to the first piece of
    the row, and so are their hidden states. Rows that are not cut stay as
    they are.

    Args:
        pieces: `Pieces`.
        appended: int32 array of shape `(rows, num_sequences)`, the columns of
            these tokens, and `length` where there are fewer; or `None`.
        sources: int32 array of that shape, the columns that predict them.
    """

    pieces: Pieces
    appended: jax.Array | None = None
    sources: jax.Array | None = None

    @classmethod
    def of(cls, batch):
        """Returns the `Targets` of a batch, as `Policy.hidden_states`."""
        pieces = pieces_of(batch["token_ids"].shape)
        predicted_by = batch.get("predicted_by")
        if pieces.count == 1 or predicted_by is None:
            return cls(pieces)
        columns = jnp.arange(pieces.length, dtype="int32")
        jumps = (predicted_by != columns - 1) & (batch["segment_ids"] > 0)
        jumps &= batch["positions"] > 0
        size = batch["prefix_segments"].shape[1]
        # The columns of jumps first, in their order.
        first = jnp.sort(jnp.where(jumps, columns, pieces.length))[:, :size]
        last = jnp.minimum(first, pieces.length - 1)
        sources = jnp.take_along_axis(predicted_by, last, axis=1)
        return cls(pieces, first.astype("int32"), sources)

    def cut(self, x):
        """Cuts rows, `(rows, length, ...)`, to `(pieces, tokens, ...)`."""
        pieces = self.pieces
        if pieces.count == 1:
            return x
        x, more = jnp.asarray(x), x.shape[2:]
        ones = (1,) * len(more)
        pads = [(0, 0)] * len(more)
        zero = jnp.zeros((), x.dtype)
        if self.appended is not None:
            columns = self.appended
            is_used = (columns < pieces.length).reshape(*columns.shape, *ones)
            last = jnp.minimum(columns, pieces.length - 1)
            found = jnp.take_along_axis(
                x, last.reshape(*columns.shape, *ones), axis=1
            )
            found = jnp.where(is_used, found, zero)
            rows = jnp.arange(pieces.rows)[:, None]
            x = x.at[rows, columns].set(zero, mode="drop")
        x = pieces.cut(jnp.pad(x[:, 1:], [(0, 0), (0, 1), *pads]))
        if self.appended is None:
            return x
        return jnp.concatenate([x, self._to_first(found)], axis=1)

    def hidden(self, hidden):
        """Appends hidden states to those of pieces, `(*pieces.shape, dim)`."""
        if self.appended is None:
            return hidden
        pieces, dim = self.pieces, hidden.shape[-1]
        count, groups = pieces.count, pieces.mesh.devices.shape[0]
        x = hidden.reshape(groups, count, -1, pieces.shape[1], dim)
        sources = self.sources.reshape(groups, 1, x.shape[2], -1, 1)
        columns = pieces.columns()[None, :, None, None]
        # Each device adds what it has.
        found = jnp.einsum(
            "gprst,gprtd->grsd",
            (sources == columns).astype(x.dtype),
            x,
            preferred_element_type="float32",
        ).astype(x.dtype)
        found = found.reshape(pieces.rows, -1, dim)
        return jnp.concatenate([hidden, self._to_first(found)], axis=1)

    def join(self, x):
        """Returns values of tokens, `(pieces, tokens, ...)`, in rows."""
        pieces = self.pieces
        if pieces.count == 1:
            return x
        size, more = pieces.shape[1], x.shape[2:]
        pads = [(0, 0)] * len(more)
        found = pieces.join(x[:, :size])[:, :-1]
        found = jnp.pad(found, [(0, 0), (1, 0), *pads])
        if self.appended is None:
            return found
        groups = pieces.mesh.devices.shape[0]
        rest = x[:, size:].reshape(
            groups, pieces.count, -1, x.shape[1] - size, *more
        )
        rest = rest[:, 0].reshape(pieces.rows, -1, *more)
        rows = jnp.arange(pieces.rows)[:, None]
        return found.at[rows, self.appended].set(rest, mode="drop")

    def _to_first(self, x):
        """Gives the first pieces of rows `x`, `(rows, ...)`, others zeros."""
        pieces = self.pieces
        groups = pieces.mesh.devices.shape[0]
        x = x.reshape(groups, 1, -1, *x.shape[1:])
        pads = [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, [(0, 0), (0, pieces.count - 1), *pads])
        x = x.reshape(pieces.shape[0], *x.shape[3:])
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(pieces.mesh, P(pieces.mesh.axis_names))
        )


def pieces_of(shape):
    """Returns the `Pieces` of rows of a shape, on the mesh of Keras's layout.

    If the rows cannot be divided among the groups of devices, they stay
    whole.
    """
    rows, length = shape
    mesh = sharding.context_mesh()
    if mesh is None or rows % mesh.devices.shape[0]:
        return Pieces(rows, length)
    return Pieces(rows, length, mesh.devices.shape[1], mesh)
