"""Chooses the slots that share the keys and values of their prompts."""

import collections
import dataclasses

import numpy as np

from keras_posttrain.models import sharding
from keras_posttrain.models.prefix_key_values import PrefixGroups
from keras_posttrain.rollout.native.decoding import bucket
from keras_posttrain.rollout.native.samples import power_of_two

# A call of the decoder uses groups if at most this share of the columns of its
# cache is left to read: copies of these columns take as long as two steps.
MOST_READ = 7 / 8
# They leave at least so many columns of the cache unread. With less, which is
# with few slots, a step spends its time on the weights.
LEAST_SAVED = 4096
# Groups are at most so many times as many as full ones would be: those of the
# first prompts lose members while the last ones get theirs.
MOST_GROUPS = 4
# The fewest columns of prompts, and of own tokens.
LEAST_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class GroupSizes:
    """The sizes of groups in a run or a call: few, as each has programs.

    Attributes:
        prompts: int, different ones with several samples.
        members: int, the most samples of a prompt.
        columns: int, at least the tokens of each of these prompts.
    """

    prompts: int = 1
    members: int = 1
    columns: int = 0

    @classmethod
    def of(cls, prompts, members, longest):
        """Chooses the sizes for numbers of prompts, samples and tokens."""
        columns = bucket(longest, LEAST_COLUMNS)
        return cls(power_of_two(prompts), power_of_two(members), columns)

    @classmethod
    def of_samples(cls, samples):
        """Chooses the sizes for a list of `Sample`s."""
        counts = collections.Counter(s.prompt_key for s in samples)
        groups = {s.prompt_key: s for s in samples if counts[s.prompt_key] > 1}
        if not groups:
            return cls()
        longest = max(shared_tokens(s) for s in groups.values())
        return cls.of(len(groups), max(counts.values()), longest)

    def joined(self, other):
        """Returns the larger ones of both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
        return GroupSizes(*map(max, pairs))

    def count(self, slots):
        """Returns the number of groups of so many slots; 0 is none."""
        if self.members == 1:
            return 0
        most = max(MOST_GROUPS * slots // self.members, 1)
        return min(self.prompts, most, slots // 2)

    def pays(self, slots, tokens, own):
        """Returns whether groups leave few enough columns to read.

        Args:
            slots, tokens: ints, those of the cache.
            own: int, the columns of each slot's own tokens.
        """
        count, held = self.count(slots), slots * tokens
        read = count * self.columns + slots * own
        most = min(MOST_READ * held, held - LEAST_SAVED)
        return 0 < count and max(self.columns, own) <= tokens and read <= most

    def empty(self, slots, own):
        """Returns a `Grouping` of slots without a group."""
        members = np.zeros((self.count(slots), self.members), "int32")
        places, shared = np.zeros((2, slots), "int32")
        groups = PrefixGroups(members, places, shared)
        return Grouping(groups, self.columns, own)


@dataclasses.dataclass
class Grouping:
    """The groups of a call of the decoder.

    Attributes:
        groups: `PrefixGroups`.
        columns: int, at least the tokens that a group shares.
        own: int, at least the tokens that a slot has of its own.
    """

    groups: PrefixGroups
    columns: int
    own: int

    def described(self):
        """Returns a text for the list of programs."""
        count, members = self.groups.members.shape
        return (
            f"{count} prompts of {self.columns} tokens with {members} samples "
            f"each, {self.own} tokens of a sample"
        )


def can_group(placement):
    """Returns whether slots may share what they hold.

    They do on one CPU: elsewhere it was not measured, and members of a group
    may be on several devices.

    Args:
        placement: `Placement` of the cache.
    """
    return placement.mesh is None and sharding.platform() == "cpu"


def own_columns(tokens):
    """Rounds a number of own tokens up to one of few numbers of columns."""
    return bucket(tokens, LEAST_COLUMNS) if tokens else 0


def shared_tokens(sample):
    """Counts the tokens in the cache that all samples of a prompt have."""
    return len(sample.prompt) - sample.settings.drawn - 1


def find(sizes, occupants, lengths, tokens):
    """Finds the groups of a call of the decoder.

    Args:
        sizes: `GroupSizes`.
        occupants: list of the `Sample` of each slot, or `None`.
        lengths: int array, the tokens in the cache of each slot.
        tokens: int, the columns of the cache.

    Returns:
        A `Grouping`, or `None` where groups do not pay.
    """
    slots, found = len(occupants), collections.defaultdict(list)
    active = [i for i, sample in enumerate(occupants) if sample is not None]
    for slot in active:
        found[occupants[slot].prompt_key].append(slot)
    parts = [
        group[i : i + sizes.members]
        for group in found.values()
        for i in range(0, len(group), sizes.members)
    ]
    parts = [part for part in parts if len(part) > 1]
    if not 0 < len(parts) <= sizes.count(slots):
        return None
    shared = np.zeros(slots, "int32")
    for part in parts:
        shared[part] = shared_tokens(occupants[part[0]])
    own = own_columns(int((lengths - shared)[active].max()))
    if not sizes.pays(slots, tokens, own):
        return None
    grouping = sizes.empty(slots, own)
    groups = grouping.groups
    groups.shared[:] = shared
    for row, part in enumerate(parts):
        groups.members[row, : len(part)] = part
        groups.places[part] = row * sizes.members + np.arange(len(part))
    return grouping
