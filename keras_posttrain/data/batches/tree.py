"""Sequences as a tree, in which tokens that they share are stored once."""

import dataclasses

import numpy as np

from keras_posttrain.data.batches.assembly import Segment

NOBODY = -1


@dataclasses.dataclass(eq=False)
class Node:
    """Tokens that are stored in one piece, and what continues them.

    Attributes:
        ids, mask, owners: arrays of shape `(tokens,)`: the tokens, their
            weights in the loss, and the sequence that has that loss, or
            `NOBODY`.
        members: list of the sequences that pass through, in order.
        children: list of `Node`s, in the order of their first members.
    """

    ids: np.ndarray
    mask: np.ndarray
    owners: np.ndarray
    members: list
    children: list = dataclasses.field(default_factory=list)

    def split(self, at):
        """Moves the tokens from index `at` on to a child."""
        arrays = (self.ids, self.mask, self.owners)
        self.ids, self.mask, self.owners = (x[:at] for x in arrays)
        tail = Node(*(x[at:] for x in arrays), self.members, self.children)
        self.members, self.children = list(self.members), [tail]

    def match(self, ids, mask, by_sequence):
        """Counts the first tokens of a sequence that may be stored here.

        Two sequences with loss on a token each have a copy of it. With
        `by_sequence` so have sequences one of which has loss on it.
        """
        count = min(len(ids), len(self.ids))
        ours, theirs = self.owners[:count] != NOBODY, mask[:count] != 0
        both = ours | theirs if by_sequence else ours & theirs
        differs = both | (self.ids[:count] != ids[:count])
        return int(differs.argmax()) if differs.any() else count

    def add(self, i, mask):
        """Adds sequence `i`, which has the tokens of this node."""
        self.members.append(i)
        self.owners = np.where(mask != 0, i, self.owners)
        self.mask = np.where(mask != 0, mask, self.mask)

    def owner(self):
        """Returns the sequence whose slot this is, `None` of a shared one."""
        owned = self.owners[self.owners != NOBODY]
        if len(owned):
            return int(owned[0])
        return self.members[0] if len(self.members) == 1 else None


def tree_segments(sequences, by_sequence=False, numbers=None, first_slot=0):
    """Lays out sequences as the segments of a radix tree, in pre-order.

    A token that several sequences begin with is stored once, unless more than
    one of them has loss on it. All loss of a segment belongs to one
    sequence, and each sequence has at least one segment of its own, if
    need be without tokens.

    Args:
        sequences: list of `Example`s.
        by_sequence: bool, whether the loss of a sequence must be in one
            segment: tokens with loss are then not shared.
        numbers: list of ints, the number of each sequence; by default its
            index.
        first_slot: int, the slot of the first segment.

    Returns:
        List of `Segment`s.
    """
    root = Node(*(np.zeros(0, np.int32),) * 3, list(range(len(sequences))))
    for i, sequence in enumerate(sequences):
        mask = np.array(sequence.completion_mask, np.float32)
        mask[:1] = 0.0  # nothing predicts a first token
        _insert(root, i, np.asarray(sequence.token_ids), mask, by_sequence)
    _split_by_owner(root)
    _give_each_its_own(root)
    segments = []

    def visit(node, prefix):
        owner = node.owner()
        row = sequences[node.members[0] if owner is None else owner].row
        if owner is not None and numbers is not None:
            owner = numbers[owner]
        slot = first_slot + len(segments)
        segments.append(
            Segment(node.ids, node.mask, row, prefix, owner, len(node.members))
        )
        for child in node.children:
            visit(child, slot)

    for child in root.children:
        visit(child, None)
    return segments


def _insert(node, i, ids, mask, by_sequence):
    while len(ids):
        counts = [x.match(ids, mask, by_sequence) for x in node.children]
        count = max(counts, default=0)
        if not count:
            owners = np.where(mask != 0, i, NOBODY)
            node.children.append(Node(ids, mask, owners, [i]))
            return
        node = node.children[counts.index(count)]
        if count < len(node.ids):
            node.split(count)
        node.add(i, mask[:count])
        ids, mask = ids[count:], mask[count:]


def _split_by_owner(node):
    places = np.flatnonzero(node.owners != NOBODY)
    changes = np.flatnonzero(np.diff(node.owners[places]))
    if len(changes):
        node.split(int(places[changes[0] + 1]))
    for child in node.children:
        _split_by_owner(child)


def _give_each_its_own(root):
    """Adds an empty leaf for each sequence that has no segment."""
    owning, ends = set(), dict.fromkeys(root.members, root)
    nodes = list(root.children)
    while nodes:
        node = nodes.pop()
        owning.add(node.owner())
        # Parents come before their children, so that the last one stays.
        ends |= dict.fromkeys(node.members, node)
        nodes += node.children
    for i, node in ends.items():
        if i not in owning:
            empty = (x[:0] for x in (node.ids, node.mask, node.owners))
            node.children.append(Node(*empty, [i]))
