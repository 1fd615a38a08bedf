"""Prepares all rows of a dataset, or finds them prepared."""

import contextlib
import json
import time
import warnings

from keras_posttrain import _console
from keras_posttrain.data.rows import datasets, reading, sharing
from keras_posttrain.data.rows.cache import Entry
from keras_posttrain.data.rows.parallel import (
    prepare_in_workers,
    prepare_together,
)
from keras_posttrain.data.rows.preparation import prepare_part
from keras_posttrain.data.rows.records import Part
from keras_posttrain.data.rows.store import StoredExamples, StoreWriter
from keras_posttrain.data.rows.stream_shares import PreparedStream

# Rows that take longer, in seconds, are prepared in several processes, and
# are kept for the next run.
PATIENCE = 1.0
# Rows that are prepared before the time is read.
SIZE = 32
# Rows from which each of several processes tokenizes a share.
SHARED = 2048
# Seconds until the first line on progress, and between two of them.
FIRST_LINE, NEXT_LINE = 5.0, 15.0


def prepare_rows(dataset, prepare):
    """Prepares all rows of a dataset by a `Preparation`.

    Rows that took long are stored in the cache directory, by their content
    and by all that their examples depend on: another run reads them there.

    Takes a dataset and returns `(examples, report)` as `prepare_sft` does.
    Where examples are in a file they are `StoredExamples`, not a list.
    """
    report = prepare.report
    rows = datasets.open_dataset(dataset, report.name)
    if datasets.is_stream(rows):
        return PreparedStream(rows, prepare), report
    entry = Entry.of(rows, prepare)
    examples = _read(entry, rows, prepare)
    share = sharing.current()
    if share is not None and _is_shared(share, rows, examples):
        report.clear()
        examples = _prepare_together(rows, prepare, entry, share)
    elif examples is None:
        examples = _prepare(rows, prepare, entry)
    if not examples:
        raise ValueError(
            prepare.messages.none_left.format(name=report.name, report=report)
        )
    return examples, report


def _is_shared(share, rows, examples):
    """Returns, in all processes, whether they prepare many rows together.

    They do unless each has all examples stored, or they have other rows,
    which is an error later.
    """
    own = [len(rows), examples is not None]
    found = [json.loads(x) for x in share.exchange(json.dumps(own).encode())]
    counts = {count for count, _ in found}
    return (
        len(counts) == 1
        and min(counts) >= SHARED
        and not all(has_all for _, has_all in found)
    )


def _prepare(rows, prepare, entry):
    """Returns the examples of rows that this process prepares."""
    # A Grain dataset gives `None` for a row that it has filtered.
    filtered = datasets.is_filtered(rows)
    begin, examples, done = time.monotonic(), [], 0
    for read in reading.parts(rows, 0, SIZE):
        examples += prepare_part(prepare, done, read, filtered)
        done += len(read)
        if time.monotonic() - begin > PATIENCE:
            break
    if done < len(rows):
        examples = _prepare_many(rows, prepare, entry, examples, done)
    return examples


def _prepare_together(rows, prepare, entry, share):
    """Returns the examples of rows, of which each process prepares a share.

    Each stores all of them: processes of one machine do not wait here for
    each other's files, as they wait for each other's rows.
    """
    filtered = datasets.is_filtered(rows)
    found = _Found(entry, prepare.restorer(rows), [])
    with contextlib.closing(found):
        progress = _Progress(prepare.report.name, 0, len(rows))
        for count, part in prepare_together(rows, prepare, filtered, share):
            found.add(part)
            if share.index == 0:
                progress.add(count)
        return found.finish(prepare.report)


def _read(entry, rows, prepare):
    """Returns the stored examples of rows, or `None`."""
    if entry is None:
        return None
    examples = entry.read(prepare.restorer(rows))
    if examples is not None:
        prepare.report.clear()
        prepare.report.add(examples.report)
    return examples


def _prepare_many(rows, prepare, entry, examples, done):
    """Prepares the rows after the first `done`, whose examples are given."""
    filtered = datasets.is_filtered(rows)
    restore = prepare.restorer(rows)
    with contextlib.ExitStack() as stack:
        if entry is not None:
            stack.enter_context(entry.locked())
            # Another process may have stored them meanwhile.
            stored = _read(entry, rows, prepare)
            if stored is not None:
                return stored
        found = stack.enter_context(
            contextlib.closing(_Found(entry, restore, examples))
        )
        progress = _Progress(prepare.report.name, done, len(rows))
        for count, part in prepare_in_workers(rows, prepare, done, filtered):
            found.add(part)
            progress.add(count)
        return found.finish(prepare.report)


class _Found:
    """The examples found so far: a list, or a file where they are many.

    Args:
        entry: `Entry` of the file, or `None` for a list.
        restore: as of `Preparation.restorer`.
        examples: list, the first ones.
    """

    def __init__(self, entry, restore, examples):
        self.entry, self.restore = entry, restore
        self.examples, self._writer = examples, None
        if entry is None:
            return
        try:
            self._writer = StoreWriter(entry.new_path())
        except OSError as error:
            self._warn(error)
            return
        part, self.examples = Part.of(examples), []
        self.add(part)

    def add(self, part):
        """Adds a `Part`."""
        if self._writer is not None:
            try:
                self._writer.add(part)
                return
            except OSError as error:
                self._give_up(error)
        self.examples += self._restored(part.examples())

    def finish(self, report):
        """Returns all examples; those of a file have the report's numbers."""
        if self._writer is not None and report.kept:
            try:
                self._writer.finish(report.counts())
                self.entry.keep(self._writer.path)
                return StoredExamples(self.entry.path, self.restore)
            except OSError as error:
                self._give_up(error)
        return self.examples

    def close(self):
        """Removes a file that was not finished."""
        if self._writer is not None:
            self._writer.close()

    def _restored(self, examples):
        if self.restore is None:
            return examples
        return list(map(self.restore, examples))

    def _give_up(self, error):
        """Goes on in memory where the file cannot be written."""
        self._warn(error)
        self.examples = self._restored(self._writer.examples())
        self._writer.close()
        self._writer = None

    def _warn(self, error):
        warnings.warn(
            f"Tokenized rows cannot be stored ({error}): they stay in memory, "
            "and the next run tokenizes them again. The environment variable "
            "`KERAS_POSTTRAIN_CACHE` sets another directory, or `off`.",
            stacklevel=2,
        )


class _Progress:
    """Prints how many rows have been tokenized, and the time left."""

    def __init__(self, name, done, total):
        self.name, self.done, self.total = name, done, total
        self.begin, self.before = time.monotonic(), done
        self.next = self.begin + FIRST_LINE

    def add(self, count):
        self.done += count
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + NEXT_LINE
        rate = (self.done - self.before) / (now - self.begin)
        minutes, seconds = divmod(round((self.total - self.done) / rate), 60)
        left = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        _console.say(
            f"{self.name}: {self.done:,} of {self.total:,} rows tokenized, "
            f"{rate:,.0f} rows/s, {left} left"
        )
