"""Rows in which the completions of one prompt share its tokens."""

import dataclasses

import numpy as np

from keras_posttrain.data.batches.packing import pack


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and what goes on from it.

    Args:
        prompt: int32 array of shape `(tokens,)`, at least one.
        completions: list of int32 arrays of shape `(tokens,)`.
        masks: list of float32 arrays, the weight of each completion's tokens
            in the loss.
        row: int, index of the dataset row.
    """

    prompt: np.ndarray
    completions: list
    masks: list
    row: int = 0

    def __len__(self):
        return len(self.prompt) + sum(map(len, self.completions))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tokens of a completion lie: columns `start` to `stop`."""

    row: int
    slot: int
    start: int
    stop: int

    @property
    def tokens(self):
        return self.row, slice(self.start, self.stop)


def pack_groups(groups, capacity, *, max_sequences=64, together=1):
    """Packs groups into rows, each prompt once for its neighbours in a row.

    A group that fits into a row is not cut. One that does not is cut into
    pieces that do, each with a copy of the prompt.

    Args:
        groups: list of `Group`s.
        capacity: int, the tokens of a row.
        max_sequences: int, the most prompts and completions of a row.
        together: int, so many neighbours of a group stay together: 2 for
            pairs.

    Returns:
        List of rows, each a list of pieces `(group, completions)`, the index
        of the group and a list of indices of its completions.

    Raises:
        ValueError: a prompt with one completion (one pair) over the capacity.
    """
    pieces, lengths = [], []
    for g, group in enumerate(groups):
        sizes = [len(c) for c in group.completions]
        piece, total = [], len(group.prompt)
        for first in range(0, len(sizes), together):
            unit = list(range(first, min(first + together, len(sizes))))
            more = sum(sizes[i] for i in unit)
            full = 1 + len(piece) + len(unit) > max_sequences
            if piece and (total + more > capacity or full):
                pieces.append((g, piece))
                lengths.append(total)
                piece, total = [], len(group.prompt)
            if total + more > capacity:
                raise ValueError(
                    "A prompt and its completion must fit into a row. "
                    f"Received: a prompt of {total} tokens and {more} tokens "
                    f"of completion {unit[0]} in row {group.row} of the "
                    f"dataset, capacity={capacity}."
                )
            piece += unit
            total += more
        pieces.append((g, piece))
        lengths.append(total)
    most = max((1 + len(p) for _, p in pieces), default=1)
    rows = pack(lengths, capacity, max(max_sequences // most, 1))
    # Groups in their order, so that neighbours stay neighbours.
    return [[pieces[i] for i in sorted(row)] for row in rows]


def assemble_groups(rows, groups, *, length, num_rows, max_sequences, pad_id):
    """Puts groups into the arrays of a batch.

    Args:
        rows: as `pack_groups` gives them.
        groups: list of `Group`s.
        length, num_rows, max_sequences, pad_id: as in
            `data/packing.py:assemble`.

    Returns:
        `(batch, places)`: the dict of `assemble` with `prefix_segments` of
        shape `(num_rows, max_sequences)` and `predicted_by` of shape
        `(num_rows, length)`, both int32; and a dict of `Place`s by
        `(group, completion)`. A prompt takes a slot of its own, whose
        `sequence_mask` is 0.
    """
    tokens, sequences = (num_rows, length), (num_rows, max_sequences)
    batch = {
        "token_ids": np.full(tokens, pad_id, np.int32),
        "segment_ids": np.zeros(tokens, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "completion_mask": np.zeros(tokens, np.float32),
        "predicted_by": np.broadcast_to(
            np.maximum(np.arange(length, dtype=np.int32) - 1, 0), tokens
        ).copy(),
        "sequence_mask": np.zeros(sequences, np.float32),
        "sequence_ids": np.zeros(sequences, np.int32),
        "prefix_segments": np.zeros(sequences, np.int32),
    }
    places = {}
    for r, row in enumerate(rows):
        at = slot = 0
        for g, piece in row:
            group = groups[g]
            prompt, prefix = len(group.prompt), slot + 1
            place = slice(at, at + prompt)
            batch["token_ids"][r, place] = group.prompt
            batch["segment_ids"][r, place] = prefix
            batch["positions"][r, place] = np.arange(prompt)
            batch["sequence_ids"][r, slot] = group.row
            end = at + prompt - 1
            at, slot = place.stop, slot + 1
            for i in piece:
                ids = group.completions[i]
                place = slice(at, at + len(ids))
                batch["token_ids"][r, place] = ids
                batch["segment_ids"][r, place] = slot + 1
                batch["positions"][r, place] = prompt + np.arange(len(ids))
                batch["completion_mask"][r, place] = group.masks[i]
                batch["predicted_by"][r, at : at + 1] = end
                batch["sequence_mask"][r, slot] = 1.0
                batch["sequence_ids"][r, slot] = group.row
                batch["prefix_segments"][r, slot] = prefix
                places[g, i] = Place(r, slot, at, place.stop)
                at, slot = place.stop, slot + 1
    return batch, places
