"""Batches of examples in a known order, with a position to save."""

import array
import bisect

import grain
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_posttrain._cores import num_cores
from keras_posttrain.data import order
from keras_posttrain.data.batches import packing as packing_lib
from keras_posttrain.data.batches import streaming
from keras_posttrain.data.batches.layout import BatchLayout
from keras_posttrain.data.batches.packing import most_sequences
from keras_posttrain.data.rows.examples import digest_of, summary_of

# How many sequences are packed together, and how many batches are built
# ahead of the step that takes them.
WINDOW = 2048
PREFETCH = 8
MAX_SEQUENCES = 64
ENDLESS = 2**62
# The most rows of all epochs whose batches are looked at for their lengths:
# half a second.
KNOWN_ROWS = 2**18


class BatchAdapter(DataAdapter):
    """Feeds `Example`s to Keras's `fit` as batches.

    Without packing, a row is a sequence, in the order of the dataset or of a
    permutation an epoch; a batch is as long as the smallest bucket that fits.
    With packing, sequences share rows: windows of the order are packed once,
    and it is the packed rows that are shuffled in each epoch. A last partial
    batch is filled with empty rows, so nothing is dropped.

    Progress is counted in batches: `state_after(count)` returns the position
    after `count` batches, however many were prefetched, and `set_state`
    resumes there with exactly the batches that follow.

    Args:
        examples: list of `Example`s, or a Grain `IterDataset` of them.
        batch_size: int, rows of a batch (packed rows when packing).
        sequence_length: int, the longest row.
        packing: bool, whether sequences share rows.
        shuffle: bool. Of a stream, only windows of it are shuffled.
        seed: int, of the order.
        skip_steps: ints, the data steps (1 for the first batch of the first
            epoch) whose batches are left out.
        pad_id: int, the token id at padding.
        row_multiple: int; batches are filled with empty rows to a multiple of
            it.
        layout: `BatchLayout` of a batch's examples, in place of the last
            two; `None` for a sequence a row.
        epochs: int, the epochs of the run. Of a stream, each is read ahead
            during the last steps of the one before.
    """

    def __init__(
        self,
        examples,
        *,
        batch_size,
        sequence_length,
        packing=False,
        shuffle=True,
        seed=0,
        skip_steps=(),
        pad_id=0,
        row_multiple=1,
        layout=None,
        epochs=1,
    ):
        self._batch_size = _positive("batch_size", batch_size)
        _positive("row_multiple", row_multiple)
        self._skip = sorted({int(step) for step in skip_steps})
        if self._skip and self._skip[0] < 1:
            raise ValueError(
                "`skip_steps` must count data steps from 1. Received: "
                f"skip_steps={self._skip[:8]}."
            )
        if not isinstance(packing, bool):
            raise ValueError(
                "`packing` must be True or False: packed rows have the "
                "task's `sequence_length` tokens. "
                f"Received: packing={packing!r}"
            )
        self._packing = bool(packing)
        # A sequence has at least two tokens.
        most = most_sequences(sequence_length, MAX_SEQUENCES)
        sequences = max(1, min(most, sequence_length // 2))
        self._layout = layout or BatchLayout(
            num_sequences=self._batch_size,
            sequence_length=sequence_length,
            token_budget=sequence_length if packing else None,
            max_sequences=sequences,
            row_multiple=row_multiple,
            pad_id=pad_id,
        )
        self._own = None
        settings = {
            "batch_size": self._batch_size,
            "packing": self._packing,
            "shuffle": bool(shuffle),
            "seed": int(seed),
            "sequence_length": int(sequence_length),
        }
        parts = examples, settings, self._build, sequences, WINDOW
        if isinstance(examples, grain.IterDataset):
            self._source = streaming.Stream(*parts, epochs)
        else:
            self._source = RandomAccess(*parts)
        self._restart(self._source.initial_state(), 0)

    def keep_rows(self, own):
        """Keeps a part of the rows of each batch: those of one process.

        `own` is a function of the number of rows to the indices of those that
        are kept, or `None` for all.
        """
        self._own = own

    def share_rows(self, share):
        """Makes a share of the rows of a stream; other processes the others.

        `share` is a `Share`, or `None` for all of them. A list is shared when
        it is prepared, and its rows are compared by its fingerprint.
        """
        self._source.share = share

    def _build(self, rows):
        if self._packing:
            batch = self._layout.of_rows(rows).arrays
        else:
            batch = self._layout([x for row in rows for x in row]).arrays
        if self._own is None:
            return batch
        kept = self._own(len(batch["token_ids"]))
        return {name: values[kept] for name, values in batch.items()}

    @property
    def fingerprint(self):
        """Dict that JSON can store: the data and its order."""
        return self._source.fingerprint

    def _restart(self, position, step):
        # `_base`: where counting began. `_start`: where the epoch that is
        # being iterated began or was resumed.
        self._base = (position, step)
        self._start = (position, step)
        # Batches left out so far because of `skip_steps`.
        self.skipped = self._start_skipped = 0
        self._history = streaming.History()
        self._history.add(step, position)

    @property
    def epoch_size(self):
        """Int, batches of an epoch, skipped ones included; `None` of a
        stream."""
        return self._source.num_batches

    @property
    def num_batches(self):
        """`epoch_size` for Keras. Of a stream it is a number never reached:
        with `None` Keras would end every epoch where the first ended, even
        one that was resumed in its middle."""
        return self.epoch_size or ENDLESS

    @property
    def batch_size(self):
        return self._batch_size

    @property
    def has_partial_batch(self):
        return False

    @property
    def partial_batch_size(self):
        return None

    def _skips_between(self, after, to):
        return bisect.bisect_right(self._skip, to) - bisect.bisect_right(
            self._skip, after
        )

    def step_of(self, count):
        """Returns the data step of the `count`-th batch of this count.

        Steps count from 1 over all epochs, with those that are skipped; 0
        stands for the step before.
        """
        base = self._base[1]
        step, known = base, base + count
        while step != known:
            step = known
            known = base + count + self._skips_between(base, step)
        return step

    def state_after(self, count):
        """Returns the position after `count` batches were consumed.

        It is a dict that JSON can store, for `set_state`. `count` starts at
        construction or `set_state`, and of a stream is among the last few.
        """
        step = self.step_of(count)
        position = self._source.position_at(step, self._history)
        return {
            "step": step,
            "position": self._source.to_json(position),
            "data": self._source.fingerprint,
        }

    def set_state(self, state):
        """Resumes from a position, and starts counting again."""
        order.check_same(self._source.fingerprint, state["data"])
        position = self._source.from_json(state["position"])
        self._restart(position, int(state["step"]))

    def get_jax_iterator(self):
        """Iterates over the rest of the epoch, then over the next one.

        If an iterator is dropped before its last batch, the next one begins
        at the same position.
        """
        position, step = self._start
        self.skipped = self._start_skipped
        self._history.drop_after(step)
        source = self._source.batches(position, step, self._skip)
        for batch, position, is_last in source:
            step += 1
            wanted = step not in self._skip
            self.skipped += not wanted
            self._history.add(step, position)
            # Pass the steps that are skipped next, so that the last batch
            # of an epoch is known to be the last.
            while not is_last and step + 1 in self._skip:
                _, position, is_last = next(source)
                step += 1
                self.skipped += 1
                self._history.add(step, position)
            if is_last:
                self._start = (position, step)
                self._start_skipped = self.skipped
            if wanted:
                yield batch

    def other_shapes(self, batch, epochs):
        """Yields zeros in the other shapes of a run's batches.

        Nothing is known of streams, of packed rows, of completions that are
        paired with other prompts (KTO), and of tokens of teachers.

        Args:
            batch: dict of arrays, one of the batches.
            epochs: int, those of the run.
        """
        layout, source = self._layout, self._source
        if self.epoch_size is None or not layout.pads_by_length:
            return
        row_lengths = layout.row_lengths(summary_of(source.examples))
        lengths = {
            layout.padded(longest)
            for longest in source.longest_rows(row_lengths, epochs)
        }
        for other in layout.other_shapes(batch):
            if other["token_ids"].shape[1] in lengths:
                yield other

    def close(self):
        """Stops reading a stream ahead, until it is iterated again."""
        self._source.close()

    def get_numpy_iterator(self):
        return self.get_jax_iterator()


def _positive(name, value):
    """Returns an argument as an int; raises unless it is one from 1 on."""
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ValueError(
            f"`{name}` must be an int of at least 1. Received: {name}={value}."
        )
    return int(value)


class _SingleRows:
    """Rows of one example each: lists of indices of examples."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return [row]


class _PackedRows:
    """Rows of several examples: lists of their indices, in little memory."""

    def __init__(self):
        self.members, self.ends = array.array("q"), array.array("q", [0])

    def add(self, indices, rows):
        """Adds rows, lists of places in a list of indices."""
        for row in rows:
            self.members.extend(int(indices[place]) for place in row)
            self.ends.append(len(self.members))

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, row):
        return self.members[self.ends[row] : self.ends[row + 1]].tolist()


class RandomAccess:
    """The batches of a list of examples, with random access.

    A position is a data step, so no state has to be kept. Takes a list in
    place of the stream of `streaming.Stream`, and what that takes.
    """

    def __init__(self, examples, settings, build, max_sequences, window):
        if len(examples) == 0:
            raise ValueError(
                "A dataset must have at least one row. Received: 0 examples."
            )
        self.examples = examples
        self.batch_size = settings["batch_size"]
        self.shuffle = settings["shuffle"]
        self.seed = settings["seed"]
        self.build = build
        self.fingerprint = settings | {
            "num_examples": len(examples),
            "tokens": digest_of(examples),
        }
        self.rows = _SingleRows(len(examples))
        if settings["packing"]:
            # Packed once, so that an epoch always has as many batches.
            indices = order.indices(len(examples), self.shuffle, self.seed, 0)
            lengths = summary_of(examples)["tokens"]
            self.rows = _PackedRows()
            for at in range(0, len(indices), window):
                part = indices[at : at + window]
                packed = packing_lib.pack(
                    [int(lengths[i]) for i in part],
                    settings["sequence_length"],
                    max_sequences,
                )
                self.rows.add(part, packed)
        self.num_batches = -(-len(self.rows) // self.batch_size)

    def _order(self, size, stream):
        return order.shuffled(size, self.shuffle, self.seed, stream)

    def close(self):
        """Does nothing: no rows are read ahead for long."""

    def initial_state(self):
        """Returns the position before the first batch."""
        return 0

    def position_at(self, step, history):
        """Returns the position after a data step."""
        return step

    def to_json(self, position):
        """Returns a position as a dict that JSON can store."""
        return {
            "epoch": position // self.num_batches,
            "batch": position % self.num_batches,
        }

    def from_json(self, position):
        """Returns the position of a dict of `to_json`."""
        return position["epoch"] * self.num_batches + position["batch"]

    def longest_rows(self, row_lengths, epochs):
        """Returns the tokens of the longest row of each batch, as a set.

        Of many rows it may have lengths that are the longest in no batch.

        Args:
            row_lengths: int array of shape `(examples,)`.
            epochs: int, those of the run.
        """
        count = len(self.rows)
        if count * epochs > KNOWN_ROWS:
            return set(np.unique(row_lengths).tolist())
        found, starts = set(), np.arange(0, count, self.batch_size)
        for epoch in range(epochs):
            places = order.indices(count, self.shuffle, self.seed, epoch + 1)
            longest = np.maximum.reduceat(row_lengths[places], starts)
            found.update(longest.tolist())
        return found

    def batches(self, position, step, skip):
        """Yields `(batch, position after it, whether the epoch ends)`."""
        epoch, first = divmod(step, self.num_batches)
        places = self._order(len(self.rows), epoch + 1)
        skipped = {s - epoch * self.num_batches - 1 for s in skip}

        def build(b):
            if b in skipped:
                return {}
            at = range(
                b * self.batch_size,
                min((b + 1) * self.batch_size, len(self.rows)),
            )
            rows = [self.rows[int(places[i])] for i in at]
            return self.build([[self.examples[i] for i in r] for r in rows])

        threads = min(4, num_cores())
        ahead = (
            grain.MapDataset.range(first, self.num_batches)
            .map(build)
            .to_iter_dataset(
                grain.ReadOptions(
                    num_threads=threads, prefetch_buffer_size=PREFETCH
                )
            )
        )
        for batch in ahead:
            step += 1
            yield batch, step, step % self.num_batches == 0
