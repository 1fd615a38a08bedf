import contextlib
import json
import math
import os
import time

import keras

from keras_posttrain._spans import span
from keras_posttrain.callbacks.directories import (
    Folder,
    logged_lines,
    not_written,
)
from keras_posttrain.distribution import processes


class MetricsLog(keras.callbacks.Callback):
    """Writes a JSON object for every training step to `metrics.jsonl`.

    Each line has `step`, `loss`, `grad_norm`, `learning_rate`, `num_tokens`
    (tokens since the start, without padding), `tokens_per_second` (of this
    step), `skipped` and the metrics of the loss. The values are those of the
    step, not running means; numbers that are not finite are `null`. A line is
    written while the next step runs, so that the device never waits for it.

    A run that starts from the beginning moves the lines of an earlier run to
    `metrics.jsonl.old`. A resumed run drops the lines of steps that it
    repeats. Of several processes, the first one writes.

    Args:
        directory: str or path, created if missing; or an address, such as
            `"gs://bucket/run"`.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.MetricsLog("run/")])
    ```
    """

    # Reads the step's logs from the task instead of those that Keras passes.
    reads_step_logs = True

    def __init__(self, directory):
        super().__init__()
        self._folder = Folder(directory)
        self.path = self._folder.path / "metrics.jsonl"
        self._file = None
        self._pending = None
        self._start = self._last_step = None
        self._num_tokens = 0
        self._clock = None

    def on_train_begin(self, logs=None):
        self.close()
        self._folder.begin(self.path.name)
        self._start = None

    def on_train_batch_end(self, batch, logs=None):
        if not processes.is_first():
            return
        task = self._model
        # At the end of a stream, Keras calls this without a step.
        if task.step == self._last_step or not task.step_logs:
            return
        self._write()
        if self._file is None:
            self._open(self._start)
        self._last_step = task.step
        self._pending = (task.step, task.step_logs)

    def on_test_begin(self, logs=None):
        self._write()

    def on_epoch_begin(self, epoch, logs=None):
        self._clock = time.perf_counter()
        if self._start is None:
            # Only now is the step of a resumed run known.
            self._start = self._last_step = self._model.step

    def on_train_end(self, logs=None):
        self.close()

    def flush(self):
        """Writes the lines of all steps that are done."""
        self._write()
        self._folder.push()

    def close(self):
        """Writes the last line and closes the file."""
        file = self._file
        try:
            self._write()
        finally:
            self._file = self._pending = None
            if file is not None:
                # An error of a full disk was raised already.
                with contextlib.suppress(OSError):
                    file.close()
            self._folder.end()

    def _write(self):
        if self._pending is None:
            return
        step, logs = self._pending
        self._pending = None
        with span("device"):
            values = {name: float(value) for name, value in logs.items()}
        now = time.perf_counter()
        values = with_rates(values, self._num_tokens, now - self._clock)
        self._num_tokens, self._clock = values["num_tokens"], now
        line = {"step": step}
        for name in sorted_names(values):
            value = values[name]
            line[name] = value if math.isfinite(value) else None
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as e:
            raise not_written(e, f"The line of step {step}", self.path) from e

    def _open(self, step):
        """Opens the file and keeps only the lines up to this step."""
        kept, dropped = [], []
        if self.path.exists():
            for line, row in logged_lines(self.path):
                (kept if row["step"] <= step else dropped).append(line)
                if row["step"] <= step:
                    tokens = row.get("num_tokens")
                    self._num_tokens = tokens or self._num_tokens
        if not kept:
            self._num_tokens = 0
            if dropped:
                old = self.path.with_name("metrics.jsonl.old")
                old.write_bytes(b"".join(dropped))
        temporary = self.path.with_name("metrics.jsonl.tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, self.path)
        self._file = open(self.path, "a")


def with_rates(values, before, seconds):
    """Returns the metrics of a step as they are logged, with all tokens.

    Args:
        values: dict of floats, those of the step.
        before: int, tokens of the steps before.
        seconds: float, what the step took.
    """
    tokens = values.get("num_tokens", 0.0)
    return values | {
        "num_tokens": before + int(tokens),
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }


def sorted_names(names):
    """Sorts metrics: those of every step first, the others by name."""
    first = ("loss", "grad_norm", "learning_rate", "num_tokens")
    return [n for n in first if n in names] + sorted(set(names) - set(first))
