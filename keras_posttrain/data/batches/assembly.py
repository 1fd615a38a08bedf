"""The arrays of a batch: segments of tokens in rows, and their places."""

import dataclasses
import itertools

import numpy as np

# The arrays that a batch with images has in addition, the last of them where
# images have sizes of their own.
IMAGE_ARRAYS = ("pixels", "image_tokens", "image_grids")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where tokens of a sequence are stored: columns of a row.

    Args:
        row, slot: ints.
        start, stop: ints, the columns.
        position: int, that of the first of the tokens in its sequence.
    """

    row: int
    slot: int
    start: int
    stop: int
    position: int = 0

    @property
    def tokens(self):
        return self.row, slice(self.start, self.stop)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Tokens that are stored in one piece: of a sequence, or shared.

    Args:
        token_ids: ints of shape `(tokens,)`.
        completion_mask: float32 array of the same shape, or 0.
        row: int, index of the dataset row.
        prefix: int, the slot of the segment that the tokens continue, or
            `None`.
        sequence: int, the number of the sequence that the segment belongs
            to, or `None` of a prefix without loss that several share.
        shared_by: int, how many sequences the tokens are part of.
        images: `Images` with places among the tokens, or `None`.
    """

    token_ids: np.ndarray
    completion_mask: np.ndarray | float = 0.0
    row: int = 0
    prefix: int | None = None
    sequence: int | None = 0
    shared_by: int = 1
    images: object = None


def assemble(
    rows, *, length, num_rows, max_sequences, pad_id, share_prefix=False
):
    """Puts segments into the arrays of a batch.

    Args:
        rows: list of at most `num_rows` lists of `Segment`s, in pre-order:
            right after a segment come those that continue it.
        length: int, tokens of a row.
        num_rows: int, rows of the batch. Missing ones are empty: they have no
            sequence and no weight.
        max_sequences: int, the most segments of a row.
        pad_id: int, the token id at padding.
        share_prefix: bool, whether there are prefixes.

    Returns:
        `(batch, places)`: a dict of `token_ids`, `segment_ids` and
        `positions` (int32) and `completion_mask` (float32) of shape
        `(num_rows, length)`; `sequence_mask` (float32) and `sequence_ids`
        (int32, the dataset rows, 0 where unused) of shape
        `(num_rows, max_sequences)`; with `share_prefix` also
        `predicted_by` of shape `(num_rows, length)`, and `prefix_segments`
        and `shared_by` of shape `(num_rows, max_sequences)`, all int32; with
        images those of `IMAGE_ARRAYS`: see `models/vision.py`. A prefix has a
        slot, whose `sequence_mask` is 0. And a list of the
        `Place`s of the segments that belong to a sequence, row by row.

    Raises:
        ValueError: the rows do not fit.
    """
    if len(rows) > num_rows:
        raise ValueError(
            "A batch must have room for its rows. Received: "
            f"{len(rows)} rows, num_rows={num_rows}."
        )
    tokens, slots = (num_rows, length), (num_rows, max_sequences)
    batch = {
        "token_ids": np.full(tokens, pad_id, np.int32),
        "segment_ids": np.zeros(tokens, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "completion_mask": np.zeros(tokens, np.float32),
        "sequence_mask": np.zeros(slots, np.float32),
        "sequence_ids": np.zeros(slots, np.int32),
    }
    if share_prefix:
        before = np.maximum(np.arange(length, dtype=np.int32) - 1, 0)
        batch["predicted_by"] = np.broadcast_to(before, tokens).copy()
        batch["prefix_segments"] = np.zeros(slots, np.int32)
        batch["shared_by"] = np.zeros(slots, np.int32)
    places, images = [], [[] for _ in rows]
    for r, row in enumerate(rows):
        total = sum(len(segment.token_ids) for segment in row)
        if total > length or len(row) > max_sequences:
            raise ValueError(
                "A row must have room for its sequences. Received: row "
                f"{r} with {len(row)} sequences of {total} tokens, "
                f"length={length}, max_sequences={max_sequences}."
            )
        # The columns and the positions at which segments end.
        stops, ends = [0], []
        for s, segment in enumerate(row):
            start, first = stops[s], 0
            stops.append(start + len(segment.token_ids))
            if segment.prefix is not None:
                first, before = ends[segment.prefix], stops[segment.prefix + 1]
                batch["predicted_by"][r, start : start + 1] = before - 1
                batch["prefix_segments"][r, s] = segment.prefix + 1
            ends.append(first + len(segment.token_ids))
            place = Place(r, s, start, stops[-1], first)
            batch["token_ids"][place.tokens] = segment.token_ids
            batch["segment_ids"][place.tokens] = s + 1
            batch["positions"][place.tokens] = first + np.arange(
                place.stop - start
            )
            batch["completion_mask"][place.tokens] = segment.completion_mask
            if not first:
                # Nothing comes before a sequence's first token to predict it.
                batch["completion_mask"][r, start : start + 1] = 0.0
            batch["sequence_ids"][r, s] = segment.row
            if share_prefix:
                batch["shared_by"][r, s] = segment.shared_by
            if segment.images is not None:
                images[r].append((start, segment.images))
            if segment.sequence is not None:
                batch["sequence_mask"][r, s] = 1.0
                places.append(place)
    if any(images):
        _put_images(batch, images)
    return batch, places


def _put_images(batch, images):
    """Adds the images of rows to a batch: see `models/vision.py`.

    All rows have room for as many images as the one with the most, rounded
    up to a power of two, so that few programs are compiled.

    Args:
        images: a list for each row of `(column, Images)`, the column of the
            first token of their segment.
    """
    most = max(sum(len(x.pixels) for _, x in row) for row in images)
    room = 1 << (most - 1).bit_length()
    one = next(x for row in images for _, x in row)
    tokens = batch["token_ids"].shape
    shape = tokens[0], room
    batch["pixels"] = np.zeros((*shape, *one.pixels.shape[1:]), np.uint8)
    if one.grids is not None:
        batch["image_grids"] = np.zeros((*shape, 2), np.int32)
    batch["image_tokens"] = np.zeros(tokens, np.int32)
    for r, row in enumerate(images):
        first = 0
        for column, found in row:
            stop = first + len(found.pixels)
            batch["pixels"][r, first:stop] = found.pixels
            if found.grids is not None:
                batch["image_grids"][r, first:stop] = found.grids
            count = found.places.shape[1]
            numbers = np.arange(first * count, stop * count) + 1
            numbers = numbers[found.places.reshape(-1) >= 0]
            batch["image_tokens"][r, column + found.tokens] = numbers
            first = stop


@dataclasses.dataclass
class Batch:
    """A batch, and where its sequences are stored.

    Sequences are numbered in the order of the groups they were given in. The
    numbers of a rollout's minibatches run on from one to the next. So do those
    of units: the sequences of a unit are the segments of one trajectory.

    Attributes:
        arrays: dict of arrays.
        sequences: dict of `Example`s by number.
        parts: dict by number of lists of `Place`s: those of a sequence's own
            segments, from its beginning to its end. Prefixes that belong to
            no sequence or to another are left out.
        units: dict by number of the number of the sequence's unit.
    """

    arrays: dict
    sequences: dict
    parts: dict
    units: dict

    @property
    def places(self):
        """Dict of the last `Place` of each sequence by number."""
        return {i: places[-1] for i, places in self.parts.items()}

    def unit_parts(self):
        """Returns the `Place`s of the sequences of each unit, in order."""
        found = {}
        for i, places in self.parts.items():
            found.setdefault(self.units[i], []).extend(places)
        return found

    def chains(self):
        """Returns the loss tokens of each unit in order, over its segments.

        Returns:
            An int32 array of shape `(units, tokens)`, both rounded up to
            powers of two: indices of the flattened `(rows, length)`, -1 after
            the last. `None` if each unit is in one segment.
        """
        by_unit = list(self.unit_parts().values())
        if all(len(places) == 1 for places in by_unit):
            return None
        mask = self.arrays["completion_mask"]
        columns = np.arange(mask.size).reshape(mask.shape)
        found = [
            np.concatenate([columns[x.tokens][mask[x.tokens] != 0] for x in p])
            for p in by_unit
        ]
        sizes = (len(found), max(1, *map(len, found)))
        shape = [1 << (size - 1).bit_length() for size in sizes]
        chains = np.full(shape, -1, np.int32)
        for chain, indices in zip(chains, found):
            chain[: len(indices)] = indices
        return chains

    def rows(self):
        """Returns the numbers of each filled row's sequences, in order."""
        places = self.places
        order = sorted(places, key=lambda i: (places[i].row, places[i].slot))
        by_row = itertools.groupby(order, lambda i: places[i].row)
        return [list(numbers) for _, numbers in by_row]

    def put_tokens(self, name, values, dtype=np.float32):
        """Adds an array of shape `(rows, length, ...)`.

        Args:
            name: str, its key.
            values: list or dict by number, the values of the last tokens of
                each sequence, such as those of its completion. Other tokens
                have 0. So have prefixes that belong to no sequence; those
                that belong to another one have its values.
            dtype: the array's.
        """
        shape = self.arrays["token_ids"].shape
        array = np.zeros(shape, dtype)
        for i, places in self.parts.items():
            given = values[i]
            # The position of the first value.
            first = len(self.sequences[i].token_ids) - len(given)
            for place in places:
                at = max(place.position, first)
                start = place.start + at - place.position
                count = max(place.stop - start, 0)
                columns = slice(start, start + count)
                at -= first
                array[place.row, columns] = given[at : at + count]
        self.arrays[name] = array

    def tokens(self, name, number):
        """Returns what an array `(rows, length)` holds for a sequence.

        A float array with a value for each token of sequence `number`, NaN
        for those of a prefix that is not its own.
        """
        size = len(self.sequences[number].token_ids)
        found = np.full(size, np.nan, np.float32)
        for place in self.parts[number]:
            stop = place.position + place.stop - place.start
            found[place.position : stop] = self.arrays[name][place.tokens]
        return found

    def put_all_tokens(self, name, values, shape, dtype, fill):
        """Adds an array of shape `(rows, length, *shape)`.

        Args:
            name: str, its key.
            values: list or dict by number, the values of the first tokens of
                each sequence, prefixes that it shares included. Of several
                sequences that share a prefix the last one's are taken.
            shape: tuple of ints, of the value of a token.
            dtype: the array's.
            fill: number, the value of all other tokens.
        """
        ids, positions = self.arrays["segment_ids"], self.arrays["positions"]
        prefixes = self.arrays.get("prefix_segments")
        array = np.full((*ids.shape, *shape), fill, dtype)
        for i, place in self.places.items():
            row, segment = place.row, place.slot + 1
            while segment:
                columns = np.flatnonzero(ids[row] == segment)
                at = positions[row, columns]
                known = at < len(values[i])
                array[row, columns[known]] = values[i][at[known]]
                segment = 0 if prefixes is None else prefixes[row, segment - 1]
        self.arrays[name] = array

    def put_sequences(self, name, values, dtype=np.float32):
        """Adds an array of shape `(rows, max_sequences)`.

        Args:
            name, dtype: as of `put_tokens`.
            values: list, array or dict by number, a value a sequence. All
                segments of a sequence have it.
        """
        array = np.zeros(self.arrays["sequence_mask"].shape, dtype)
        for i, places in self.parts.items():
            for place in places:
                array[place.row, place.slot] = values[i]
        self.arrays[name] = array

    def put_units(self, name, values, dtype=np.float32):
        """Adds an array as `put_sequences`, of values by number of a unit."""
        self.put_sequences(
            name, {i: values[unit] for i, unit in self.units.items()}, dtype
        )

    def sequence_sums(self, values):
        """Returns `{number: sum}` of an array `(rows, length)`."""
        return {
            i: sum(float(values[place.tokens].sum()) for place in places)
            for i, places in self.parts.items()
        }

    def unit_sums(self, values):
        """Returns `{number of a unit: sum}` of an array `(rows, length)`."""
        found = {}
        for i, total in self.sequence_sums(values).items():
            unit = self.units[i]
            found[unit] = found.get(unit, 0.0) + total
        return found
