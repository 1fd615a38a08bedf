"""The keys and values of sequences that begin alike, read once for several.

While the samples of a prompt decode, the keys and values of its tokens are
equal in all their slots. They are multiplied with the queries of all samples
at once then, as in Hydragen (https://arxiv.org/abs/2402.05099): memory is read
once for a prompt, and not once for each sample. What each sample has of its
own is read from a cache of that part alone.
"""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.models.key_values import KeyValues


@dataclasses.dataclass
class PrefixGroups:
    """Groups of slots whose sequences begin with the same tokens.

    Attributes:
        members: int32 array of shape `(groups, members)`, the slots of each
            group, and any slot in the places that it does not need.
        places: int32 array of shape `(slots,)`, where each slot is in
            `members`, flattened; any place for a slot without a group.
        shared: int32 array of shape `(slots,)`, the first tokens that a slot
            shares with its group; 0 without a group.
    """

    members: jax.Array
    places: jax.Array
    shared: jax.Array

    def of_groups(self, x):
        """Gathers the rows of each group's members.

        Args:
            x: array of shape `(slots, heads, rows, ...)`.

        Returns:
            An array of shape `(groups, heads, members * rows, ...)`.
        """
        x = jnp.moveaxis(x[self.members], 1, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def of_slots(self, x):
        """Reverses `of_groups`."""
        groups, members = self.members.shape
        x = x.reshape(groups, x.shape[1], members, -1, *x.shape[3:])
        x = jnp.moveaxis(x, 2, 1)
        return x.reshape(-1, *x.shape[2:])[self.places]


@dataclasses.dataclass
class PrefixKeyValues:
    """The keys and values of one layer, those of groups apart.

    Attributes:
        groups: `PrefixGroups`.
        prefixes: `KeyValues` with the first tokens of each group.
        own: `KeyValues` with later tokens of each slot, or `None` if no slot
            has any.
        begins: int32 array of shape `(slots,)`, the token in the first column
            of `own`. It may belong to the group.
    """

    groups: PrefixGroups
    prefixes: KeyValues
    own: KeyValues | None
    begins: jax.Array

    @classmethod
    def divided(cls, cache, groups, columns, own):
        """Divides a cache.

        Args:
            cache: `KeyValues` that does not wrap.
            groups: `PrefixGroups`.
            columns: int, at least the tokens that a group shares.
            own: int, at least the tokens that a slot has of its own.
        """
        first = cache.select(groups.members[:, 0]).window(0, columns)
        begins = jnp.minimum(groups.shared, cache.num_columns - own)
        own = cache.window(begins, own) if own else None
        return cls(groups, first, own, begins)

    def begun(self, lengths, columns):
        """Returns an empty cache of so many columns for the same slots."""
        return self.prefixes.begun(lengths, columns)

    def positions(self, lengths):
        """Returns which of a slot's tokens is in each column of `own`.

        Arguments and result are those of `KeyValues.positions`. Tokens of the
        group count as absent.
        """
        columns = self.begins[:, None] + jnp.arange(self.own.num_columns)
        is_own = columns >= self.groups.shared[:, None]
        return jnp.where(is_own & (columns < lengths[:, None]), columns, -1)


for _class in (PrefixGroups, PrefixKeyValues):
    _names = [x.name for x in dataclasses.fields(_class)]
    jax.tree_util.register_dataclass(_class, _names, [])
