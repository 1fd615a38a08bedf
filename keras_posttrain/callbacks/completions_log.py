import importlib.util
import json
import math
import numbers
import os
import re
import shutil

import keras
import numpy as np

from keras_posttrain import _console
from keras_posttrain.callbacks.directories import (
    Folder,
    logged_lines,
    not_written,
)
from keras_posttrain.distribution import processes

FORMATS = ("jsonl", "parquet")


class CompletionsLog(keras.callbacks.Callback):
    """Logs sampled completions with their prompts and rewards.

    It reads the task's `last_rollout`, a new dict for each rollout. Its values
    are lists of equal length: `step` (the number of steps done before the
    rollout), `prompt`, `completion`, a column for each reward, `reward`,
    `advantage`, `finish_reason` and others. It is `None` before the first
    rollout.

    With `format="jsonl"`, one line per completion is appended to
    `completions.jsonl`. With `"parquet"`, each rollout is written to a file
    named by its step, such as `completions/00000042.parquet`, in which prompts
    and completions that are messages are JSON. Numbers that are not finite are
    `null`. A resumed run drops the rollouts of steps that it repeats. A run
    that starts from the beginning moves those of an earlier run to
    `completions.jsonl.old` or `completions.old`. Of several processes, the
    first one writes.

    Args:
        directory: str or path, created if missing; or an address, such as
            `"gs://bucket/run"`.
        every: int, steps between two rollouts that are written and shown.
        num_rows: int, completions to show in the terminal, 0 for none. With
            `verbose=0` none is shown.
        format: `"jsonl"`, or `"parquet"`, which needs pyarrow.

    Example:

    ```python
    task.fit(prompts, callbacks=[kpt.callbacks.CompletionsLog("run/")])
    ```
    """

    # Reads the task's rollout instead of the logs that Keras passes.
    reads_step_logs = True

    def __init__(self, directory, every=1, num_rows=3, format="jsonl"):
        super().__init__()
        for name, value, least in (
            ("every", every, 1),
            ("num_rows", num_rows, 0),
        ):
            is_int = isinstance(value, numbers.Integral) and not isinstance(
                value, bool
            )
            if not is_int or value < least:
                raise ValueError(
                    f"`{name}` must be an int of at least {least}. Received: "
                    f"{name}={value!r}."
                )
        if format not in FORMATS:
            raise ValueError(
                f"`format` must be one of {FORMATS}. Received: "
                f"format={format!r}."
            )
        if format == "parquet" and not importlib.util.find_spec("pyarrow"):
            raise ImportError(
                'CompletionsLog(format="parquet") needs pyarrow. Install it, '
                '`pip install pyarrow`, or use format="jsonl".'
            )
        self._folder = Folder(directory)
        kind = {"jsonl": _Lines, "parquet": _Files}[format]
        self.every, self.num_rows = every, num_rows
        self._store = kind(self._folder.path)
        self._seen = self._steps = None

    def on_train_begin(self, logs=None):
        self.close()
        self._folder.begin(self._store.path.name)
        self._seen = self._steps = None

    def on_train_end(self, logs=None):
        self.close()

    def flush(self):
        """Copies what was written to an address."""
        self._folder.push()

    def close(self):
        """Releases the directory, so that other runs may write to it."""
        self._folder.end()

    def on_train_batch_begin(self, batch, logs=None):
        # Before the step, so that no checkpoint is ahead of this log.
        self._record()

    def on_train_batch_end(self, batch, logs=None):
        self._record()

    def on_epoch_begin(self, epoch, logs=None):
        if self._steps is None and processes.is_first():
            # Only now is the step of a resumed run known.
            self._open()

    def _open(self):
        self._steps = self._store.keep_before(self._model.step)

    def _record(self):
        table = getattr(self._model, "last_rollout", None)
        if table is None or table is self._seen or not processes.is_first():
            return
        if self._steps is None:
            self._open()
        self._seen = table
        table = _checked(table)
        if not table["step"]:
            return
        step = int(table["step"][0])
        # A rollout restored from a checkpoint may be written already.
        last = max((s for s in self._steps if s <= step), default=None)
        if last is not None and last // self.every == step // self.every:
            return
        try:
            self._store.write(step, table)
        except OSError as e:
            what = f"The completions of step {step}"
            raise not_written(e, what, self._store.path) from e
        self._steps.add(step)
        if self.num_rows:
            _console.say("\n" + table_text(table, self.num_rows))


def _checked(table):
    """Returns the columns as lists of values that JSON can encode."""
    columns = {k: [_plain(x) for x in v] for k, v in table.items()}
    lengths = {k: len(v) for k, v in columns.items()}
    if "step" not in columns or len(set(lengths.values())) != 1:
        raise ValueError(
            "`last_rollout` must be a dict of lists of one length, `step` "
            f"among them. Received: lengths={lengths}."
        )
    return columns


def _plain(value):
    if hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


class _Lines:
    """A file with one JSON object per completion."""

    def __init__(self, directory):
        self.path = directory / "completions.jsonl"

    def keep_before(self, step):
        """Drops rollouts of this step or later; returns the other steps."""
        steps, dropped = set(), False
        if not self.path.exists():
            return steps
        kept = self.path.with_name("completions.jsonl.tmp")
        with open(kept, "wb") as out:
            for line, row in logged_lines(self.path):
                at = row["step"]
                if at < step:
                    steps.add(at)
                    out.write(line)
                dropped |= at >= step
        if dropped and not steps:
            os.replace(self.path, self.path.with_name("completions.jsonl.old"))
        os.replace(kept, self.path)
        return steps

    def write(self, step, table):
        names = list(table)
        rows = zip(*table.values())
        lines = [
            json.dumps(dict(zip(names, row)), ensure_ascii=False) + "\n"
            for row in rows
        ]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(lines))


class _Files:
    """A folder with one Parquet file per rollout."""

    def __init__(self, directory):
        self.path = directory / "completions"

    def keep_before(self, step):
        """Drops rollouts of this step or later; returns the other steps."""
        steps, dropped = set(), []
        for path in sorted(self.path.glob("*.parquet")):
            if not re.fullmatch(r"\d+", path.stem):
                continue
            if int(path.stem) < step:
                steps.add(int(path.stem))
            else:
                dropped.append(path)
        if dropped and not steps:
            old = self.path.with_name("completions.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.path, old)
        else:
            for path in dropped:
                path.unlink()
        return steps

    def write(self, step, table):
        # An optional dependency.
        import pyarrow
        import pyarrow.parquet

        columns = {name: _column(values) for name, values in table.items()}
        self.path.mkdir(exist_ok=True)
        path = self.path / f"{step:08d}.parquet"
        temporary = path.with_suffix(".tmp")
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
        os.replace(temporary, path)


def _column(values):
    """Encodes messages as JSON, so that all files have the same types."""
    return [
        json.dumps(v, ensure_ascii=False) if isinstance(v, (dict, list)) else v
        for v in values
    ]


def table_text(table, num_rows, width=None):
    """Formats the first completions of a rollout as a text table.

    Args:
        table: dict of lists of equal length.
        num_rows: int, number of completions.
        width: int, characters per line, or `None` for the terminal's width.

    Returns:
        String.
    """
    table = _checked(table)
    width = width or shutil.get_terminal_size().columns
    texts = [n for n in ("prompt", "completion") if n in table]
    columns = [n for n in table if n not in ("step", *texts)]
    count = min(num_rows, len(table["step"]))
    cells = {n: [_cell(v) for v in table[n][:count]] for n in texts + columns}
    sizes = {n: max(map(len, [n, *cells[n]])) for n in columns}
    gaps = 2 * (len(texts) + len(columns) - 1)
    room = max(width - sum(sizes.values()) - gaps, 20 * len(texts))
    for n in texts:
        # The prompt gets a third: the completion is of more interest.
        share = room // 3 if n == "prompt" and len(texts) == 2 else room
        longest = max(map(len, [n, *cells[n]]))
        sizes[n] = min(longest, share)
        room -= sizes[n]
        cells[n] = [_shortened(c, sizes[n]) for c in cells[n]]
    lines = [f"step {table['step'][0]}, {count} of {len(table['step'])}"]
    lines.append("  ".join(n.ljust(sizes[n]) for n in cells))
    for i in range(count):
        row = (cells[n][i].ljust(sizes[n]) for n in cells)
        lines.append("  ".join(row))
    return "\n".join(line.rstrip() for line in lines)


def _cell(value):
    """Returns one printable line, without control characters."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _shortened(text, size):
    """Cuts out the middle of a text that is longer than `size`."""
    if len(text) <= size:
        return text
    head = (size - 1) // 2
    return text[:head] + "…" + text[len(text) - (size - 1 - head) :]
