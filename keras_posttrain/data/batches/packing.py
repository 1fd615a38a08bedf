"""Packing of sequences and groups into rows, and the sizes of rows."""

import bisect
import heapq

# The mean length of sequences from which on they fill a long row.
MEAN_TOKENS = 64


def pack(lengths, capacity, max_sequences=64):
    """Packs sequences into rows by best-fit decreasing.

    Each sequence, longest first, goes into the fullest
    row that still has room. Of rows that are equally full the oldest is
    taken, so the result depends on the lengths alone.

    Args:
        lengths: sequence of ints.
        capacity: int, the tokens of a row.
        max_sequences: int, the most sequences of a row.

    Returns:
        List of rows, each a list of indices into `lengths`. Every sequence
        with tokens is in one row; empty sequences are in none.

    Raises:
        ValueError: a length exceeds the capacity.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if order and lengths[order[0]] > capacity:
        raise ValueError(
            "A sequence must fit into a row. Received: length "
            f"{lengths[order[0]]} of sequence {order[0]}, "
            f"capacity={capacity}. Use a larger `sequence_length`."
        )
    rows = []
    # The rows by the room that they have left, and these amounts in order: at
    # most `capacity` of them, however many rows there are.
    with_room, rooms = {}, []
    for i in order:
        length = int(lengths[i])
        if length == 0:
            continue
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            queue = with_room[room]
            row = heapq.heappop(queue)
            if not queue:
                del with_room[room], rooms[at]
        rows[row].append(i)
        room -= length
        if room and len(rows[row]) < max_sequences:
            if room not in with_room:
                with_room[room] = []
                bisect.insort(rooms, room)
            heapq.heappush(with_room[room], row)
    return rows


def coarse_lengths(longest):
    """Returns a list of powers of two from 64, and `longest` itself."""
    lengths = []
    length = 64
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def fine_lengths(longest):
    """Returns multiples of 64 up to 768, then six lengths to a doubling.

    The last one of the list is at least `longest`.
    """
    lengths, step = [64], 64
    while lengths[-1] < longest:
        if lengths[-1] >= 12 * step:
            step *= 2
        lengths.append(lengths[-1] + step)
    return lengths


def padded_rows(filled, multiple):
    """Rounds the number of rows of a packed batch, for few batch shapes.

    It becomes the next power of two, or one and a half times one, and then a
    multiple of `multiple`.
    """
    power = 1 << (filled - 1).bit_length()
    rows = power * 3 // 4 if filled <= power * 3 // 4 else power
    return -(-rows // multiple) * multiple


def most_sequences(tokens, least):
    """Returns the most sequences of a packed row of so many tokens.

    It is `least` for short rows. Long ones have room for more, which many
    short sequences would else leave empty.
    """
    return max(least, (tokens or 0) // MEAN_TOKENS)


def pack_groups(
    groups, capacity, *, max_sequences=64, together=1, by_sequence=False
):
    """Packs groups into rows that store the prefixes of a group once.

    A group that fits into a row is not cut. One that does not is cut into
    pieces that do, each with a copy of the prefixes.

    Args:
        groups: list of `Group`s.
        capacity: int, the tokens of a row.
        max_sequences: int, the most prefixes and sequences of a row.
        together: int, how many neighbours of a group are never split: 2
            for pairs.
        by_sequence: bool, as of `BatchLayout`.

    Returns:
        List of rows, each a list of pieces `(group, sequences)`, the index of
        the group and a list of indices of its sequences.

    Raises:
        ValueError: a prefix with one sequence (one pair) exceeds the
            capacity.
    """
    pieces, lengths, slots = [], [], []
    for g, group in enumerate(groups):
        piece, size, count = [], 0, len(group.sequences)
        for first in range(0, count, together):
            unit = list(range(first, min(first + together, count)))
            more = group.shared_size(piece + unit, by_sequence)
            if piece and (more[0] > capacity or more[1] > max_sequences):
                pieces.append((g, piece))
                lengths.append(size[0])
                slots.append(size[1])
                piece, more = [], group.shared_size(unit, by_sequence)
            if more[0] > capacity:
                raise _too_long(group, unit, more[0], capacity)
            piece, size = piece + unit, more
        pieces.append((g, piece))
        lengths.append(size[0])
        slots.append(size[1])
    rows = pack(
        lengths, capacity, max(max_sequences // max(slots, default=1), 1)
    )
    # Groups in their order, so that neighbours stay neighbours.
    return [[pieces[i] for i in sorted(row)] for row in rows]


def _too_long(group, unit, tokens, capacity):
    prefix = group.prefix_length or 0
    return ValueError(
        "A prompt and its completion must fit into a row. "
        f"Received: a prompt of {prefix} tokens and {tokens - prefix} tokens "
        f"of completion {unit[0]} in row "
        f"{group.sequences[0].row} of the dataset, "
        f"capacity={capacity}."
    )
