"""Batches of a stream, a bounded window at a time, with a position."""

import base64
import dataclasses

import numpy as np

from keras_posttrain.data.batches import packing as packing_lib
from keras_posttrain.data.batches.lookahead import (
    check_record,
    read_ahead,
    record,
)
from keras_posttrain.data.rows.records import EXAMPLES

# How many positions are kept; more than are ever prefetched.
KEPT = 64


class History:
    """The positions after the last few data steps."""

    def __init__(self):
        self.positions = {}

    def add(self, step, position):
        """Remembers the position after a data step."""
        self.positions[step] = position
        if len(self.positions) > KEPT:
            del self.positions[min(self.positions)]

    def drop_after(self, step):
        """Forgets the positions after a data step."""
        for later in [s for s in self.positions if s > step]:
            del self.positions[later]


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in a stream.

    Args:
        epoch: int.
        window: int, which window of the epoch.
        batch: int, batches of that window before the position.
        stream: Grain's state of the stream at the window's start, `None` at
            the stream's start.
        carried: tuple of examples that earlier windows left over.
        following: dict of `record`, of the first examples behind `stream`
            as far as they were known; `None` before anything was read.
        first: dict of `record`, of the first examples of an epoch.
    """

    epoch: int = 0
    window: int = 0
    batch: int = 0
    stream: object = None
    carried: tuple = ()
    following: dict | None = None
    first: dict | None = None


class Stream:
    """The batches of a Grain `IterDataset` of examples.

    The stream is read a window at a time. A window's rows, packed or single,
    give whole batches; the examples of rows that are left over go into the
    next window, so that only an epoch's last batch is partial. Where order
    does not matter, a window is one batch. The next epoch's first window is
    read during the last steps of the epoch before.

    Args:
        examples: Grain `IterDataset` of `Example`s or `Preference`s.
        settings: dict of `batch_size`, `packing`, `shuffle`, `seed` and
            `sequence_length`.
        build: function of a list of rows to a batch.
        max_sequences: int, the most sequences of a row.
        window: int, how many sequences are packed and shuffled together.
        epochs: int, how many epochs are read; none is read ahead after them.

    Attributes:
        share: `Share` of this process of several, or `None`.
    """

    num_batches = None

    def __init__(
        self, examples, settings, build, max_sequences, window, epochs=1
    ):
        self.examples = examples
        self.batch_size = settings["batch_size"]
        self.packing = settings["packing"]
        self.shuffle = settings["shuffle"]
        self.seed = settings["seed"]
        self.capacity = settings["sequence_length"]
        self.build = build
        self.max_sequences = max_sequences
        self.window = window
        if not (self.packing or self.shuffle):
            self.window = self.batch_size
        self.fingerprint = dict(settings)
        self.epochs, self.share = epochs, None
        # A position that was restored, and the one where `_ahead` is at the
        # end of the epoch before.
        self._ahead = self._restored = self._ahead_of = None

    def close(self):
        """Stops reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = self._ahead_of = None

    def initial_state(self):
        """Returns the position before the first batch."""
        return Position()

    def position_at(self, step, history):
        """Returns the position after one of the last few data steps."""
        if step not in history.positions:
            known = sorted(history.positions)
            raise ValueError(
                "The position in a stream is known for the last few batches. "
                f"Received: data step {step}, known: {known[0]} to "
                f"{known[-1]}. Save the position right after the batch."
            )
        return history.positions[step]

    def to_json(self, position):
        """Returns a position as a dict that JSON can store."""
        carried = [_to_json(example) for example in position.carried]
        return vars(position) | {"carried": carried}

    def from_json(self, state):
        """Returns the position of a dict of `to_json`."""
        carried = tuple(map(_from_json, state["carried"]))
        self._restored = Position(**(state | {"carried": carried}))
        return self._restored

    def _open(self, position):
        """Returns the `Lookahead` at a position."""
        follows, self._ahead_of = position is self._ahead_of, None
        if follows and self._ahead.next_epoch():
            return self._ahead
        # An iterator that was dropped may still be reading.
        self.close()
        self._ahead = read_ahead(
            self.examples,
            position.stream,
            max(1, self.epochs - position.epoch),
            self.share,
            self.window,
        )
        return self._ahead

    def batches(self, position, step, skip):
        """Yields `(batch, position after it, whether the epoch ends)`."""
        ahead = self._open(position)
        at_end = False
        while not at_end:
            stream, new = ahead.state, ahead.take(self.window)
            pool, at_end = [*position.carried, *new], ahead.at_end
            start = self._start(position, stream, new)
            if not pool:
                raise ValueError(
                    "A stream must have examples to train on. Received: a "
                    "stream with none left. Check its filter, its length, and "
                    "the report of the rows that were dropped."
                )
            rows = self._rows(pool, position)
            count = len(rows) // self.batch_size
            left = rows[count * self.batch_size :]
            if at_end:
                count = -(-len(rows) // self.batch_size)
                after = self._ahead_of = Position(
                    epoch=position.epoch + 1,
                    following=start.first,
                    first=start.first,
                )
            else:
                after = Position(
                    epoch=position.epoch,
                    window=position.window + 1,
                    stream=ahead.state,
                    carried=tuple(pool[i] for i in sorted(sum(left, []))),
                    following=record([ahead.example]),
                    first=start.first,
                )
            for b in range(position.batch, count):
                place = slice(b * self.batch_size, (b + 1) * self.batch_size)
                behind = dataclasses.replace(start, batch=b + 1)
                last = b + 1 == count
                batch = self.build([[pool[i] for i in r] for r in rows[place]])
                yield batch, after if last else behind, at_end and last
            position = after

    def _start(self, position, stream, new):
        """Returns a position with what is known of its window's examples.

        One that was restored is checked to have the same ones.
        """
        if position is self._restored:
            begins = not (position.window or position.batch)
            check_record(position.following, new, begins)
        known = record(new)
        first = position.first if position.window else known
        return dataclasses.replace(
            position, stream=stream, following=known, first=first
        )

    def _rows(self, pool, position):
        """Returns rows of indices into the pool, in training order."""
        if self.packing:
            sizes = [len(example.token_ids) for example in pool]
            rows = packing_lib.pack(sizes, self.capacity, self.max_sequences)
        else:
            rows = [[i] for i in range(len(pool))]
        if self.shuffle:
            seeds = [self.seed % 2**32, position.epoch + 1, position.window]
            order = np.random.default_rng(seeds).permutation(len(rows))
            rows = [rows[i] for i in order]
        return rows


def _to_json(value):
    """Returns an example, or a value of one, as what JSON can store."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {f.name: _to_json(getattr(value, f.name)) for f in fields} | {
            "kind": type(value).__name__
        }
    if isinstance(value, np.ndarray):
        data = base64.b64encode(value.tobytes()).decode("ascii")
        shape = {} if value.ndim == 1 else {"shape": list(value.shape)}
        return {"dtype": value.dtype.name, "data": data, **shape}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value):
    """Returns the value that `_to_json` stored."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        data = base64.b64decode(value["data"])
        array = np.frombuffer(data, value["dtype"])
        return array.reshape(value.get("shape", -1))
    kind = EXAMPLES[value["kind"]]
    names = [field.name for field in dataclasses.fields(kind)]
    given = {name: value[name] for name in names if name in value}
    return kind(**{name: _from_json(x) for name, x in given.items()})
