import contextlib
import functools
import math
import os
import sys
import threading
import time
import warnings

import jax
import keras

from keras_posttrain import _spans
from keras_posttrain.callbacks.checks import positive
from keras_posttrain.callbacks.directories import Folder
from keras_posttrain.distribution import processes
from keras_posttrain.reports import environment, page
from keras_posttrain.reports.record import Record

NAME = "report.html"
# Seconds between two readings of the logs of steps.
INTERVAL = 1.0
# The share of a run's time that the choice of samples may take.
BUDGET = 0.003


def harmless(method):
    """Makes a hook of a callback that warns once instead of raising."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if self._record is None:
            return
        start = time.thread_time()
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._warn(error)
        finally:
            self.seconds += time.thread_time() - start

    return guarded


class Report(keras.callbacks.Callback):
    """Writes a page on the run: one HTML file, `report.html`.

    It opens in a browser from the disk, without a server or a network, and
    reloads itself while the run lives. It shows

    - what may be wrong, in plain words, with what to try;
    - curves of all metrics, with the spread of rewards;
    - samples with their tokens: by whom each was written, its
      log-probabilities, advantage and version of weights; in other tasks rows
      that were trained on;
    - where the time went, programs that were compiled, memory by kind;
    - the data report, versions, settings, and the command to resume.

    The file stays small: with many steps curves are thinned, and a choice of
    samples is kept; the page says so. A run that resumes continues the page,
    and one that starts from the beginning keeps that of an earlier run as
    `report.old.html`. `kpt.report` puts several runs on one page. A report
    that cannot be written never stops a run; it warns once. Of several
    processes, the first one writes.

    Args:
        directory: str or path, created if missing; or an address, such as
            `"gs://bucket/run"`.
        every: float, seconds between two versions of the file.
        num_groups: int, groups of completions (rows, in other tasks) that are
            kept of a rollout.

    Attributes:
        seconds: float, the processor's time that the report has taken.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.Report("run/")])
    ```
    """

    reads_step_logs = True

    def __init__(self, directory, every=30.0, num_groups=3):
        super().__init__()
        self.every = positive("every", every, float)
        self.num_groups = positive("num_groups", num_groups, int)
        self._folder = Folder(directory)
        self.path = self._folder.path.absolute() / NAME
        self.seconds = 0.0
        self._record = self._ended = None
        # Held while the record changes, and while it is read.
        self._lock = threading.RLock()

    def on_train_begin(self, logs=None):
        self.close()
        self._folder.begin(NAME)
        # Of an earlier error, which is not the run's.
        self._handled = sys.exception()
        self.seconds, self._warned = 0.0, False
        self._failure = None
        if not processes.is_first():
            return
        self._pending, self._last_step = [], None
        self._read_at = self._measured_at = 0.0
        self._seen = self._paused = None
        # When samples were kept last, and what that took.
        self._sampled_at, self._cost = -math.inf, 0.0
        self._is_open = False
        self._begin_record()

    def _begin_record(self):
        self._record = Record(self._model.tokenizer, self.num_groups)
        self._record.about["every"] = self.every
        _spans.listen(self._record.timeline)

    @harmless
    def on_epoch_begin(self, epoch, logs=None):
        with self._lock:
            self._last_step = self._model.step
            if not self._is_open:
                # Only now is the step of a resumed run known.
                self._is_open = True
                self._open(self._model.step)
                # What the start takes is no part of a step.
                self.seconds = 0.0
            self._record.about["epoch"] = epoch + 1

    def _open(self, step):
        """Continues the page of an earlier run, and begins to write."""
        self._keep_old(step)
        with self._record.part("environment"):
            task = self._model
            self._record.describe(environment.of_run(task, self.params))
        self._measure()
        self._ended = threading.Event()
        threading.Thread(
            target=self._tick, args=[self._ended], daemon=True
        ).start()

    def _keep_old(self, step):
        if not self.path.exists():
            return
        try:
            (old,) = page.read(self.path)
            continues = step > 0 and self._record.restore(old, step)
        except (ValueError, TypeError, KeyError, IndexError):
            # A page of another version, or one that was changed.
            continues = False
            _spans.unlisten(self._record.timeline)
            self._begin_record()
        if not continues:
            os.replace(self.path, self.path.with_name("report.old.html"))

    def on_train_batch_begin(self, batch, logs=None):
        if self._record is not None:
            self._note_error()

    @harmless
    def on_train_batch_end(self, batch, logs=None):
        task = self._model
        # At the end of a stream, Keras calls this without a step.
        if task.step == self._last_step:
            return
        self._last_step = task.step
        now = time.perf_counter()
        collection = getattr(task.run, "collection", None)
        is_new = collection is not None and collection is not self._seen
        with self._lock:
            self._pending.append((task.step, now, task.step_logs, is_new))
            if is_new:
                self._seen = collection
                self._record.samples.seen += 1
                if self._may_sample(now):
                    with self._sampling():
                        self._record.samples.add_rollout(collection)
                else:
                    self._record.samples.skipped += 1
            if now - self._read_at >= INTERVAL:
                # The step that runs is not waited for.
                self._read(behind=1)
                self._sample_rows(task, now)
            if now - self._measured_at >= self.every:
                self._measure()

    def _may_sample(self, now):
        """Returns whether the last samples are long enough ago."""
        return now - self._sampled_at >= self._cost / BUDGET

    @contextlib.contextmanager
    def _sampling(self):
        """A scope in which samples are kept; measures what that takes."""
        start = time.perf_counter()
        yield
        self._sampled_at = time.perf_counter()
        self._cost = self._sampled_at - start

    def _sample_rows(self, task, now):
        """Keeps rows of the last batch, of a run that does not sample."""
        batch = getattr(task.run, "last_batch", None)
        due = now - self._record.rows_at >= self.every
        if batch is None or not due or not self._may_sample(now):
            return
        if all(
            getattr(x, "is_fully_addressable", True) for x in batch.values()
        ):
            self._record.rows_at = now
            self._record.samples.seen += 1
            with self._sampling():
                self._record.samples.add_rows(task.step, batch)

    def _read(self, behind=0):
        """Reads the logs of all steps but the last `behind`."""
        count = max(len(self._pending) - behind, 0)
        read, self._pending = self._pending[:count], self._pending[count:]
        read = [x for x in read if x[2]]
        values = [logs for _, _, logs, _ in read]
        if any(isinstance(x, jax.Array) for x in _first(values).values()):
            with _spans.span("device"):
                values = jax.device_get(values)
        for (step, now, _, is_first), logs in zip(read, values):
            self._record.add(step, now, logs, is_first)
        self._read_at = time.perf_counter()
        about = self._record.about
        about["activity"] = None
        run = self._model.run
        size = getattr(run.data, "epoch_size", None)
        epochs = self.params.get("epochs") or 1
        about["last"] = run.state.first_step + size * epochs if size else None

    def _measure(self):
        """Looks at the memory and at the data report."""
        self._measured_at = time.perf_counter()
        self._record.measure(self._model)

    @harmless
    def on_test_begin(self, logs=None):
        self._paused = time.perf_counter()

    @harmless
    def on_test_end(self, logs=None):
        if self._paused is not None:
            _spans.tell("validation", self._paused, time.perf_counter())
            self._paused = None

    @harmless
    def on_epoch_end(self, epoch, logs=None):
        with self._lock:
            self._read()
            held_out = {
                name: float(value)
                for name, value in (logs or {}).items()
                if name.startswith("val_")
            }
            if held_out:
                self._record.add_validation(self._model.step, held_out)

    @harmless
    def on_train_end(self, logs=None):
        stopped = self._model.stop_training
        self._record.about["status"] = "stopped" if stopped else "finished"

    def flush(self):
        """Writes the page, so that no checkpoint is ahead of it."""
        if self._record is not None and self._is_open:
            self._flush()
            self._folder.push()

    @harmless
    def _flush(self):
        with self._lock:
            self._read()
            self._write()

    def close(self):
        """Writes the page of a run that has ended, however it ended."""
        if self._record is not None:
            if self._ended is not None:
                self._ended.set()
            _spans.unlisten(self._record.timeline)
        try:
            if self._record is not None:
                self._end()
                self._note_error()
        finally:
            self._record = self._ended = self._seen = None
            self._folder.end()

    @harmless
    def _end(self):
        error = sys.exception()
        with self._lock:
            about = self._record.about
            if about["status"] == "running":
                about["status"] = "ended"
                if error is not None and error is not self._handled:
                    is_asked = isinstance(error, KeyboardInterrupt)
                    about["status"] = "interrupted" if is_asked else "failed"
                    about["error"] = f"{type(error).__name__}: {error}"[:2000]
            if self._is_open:
                # What an error has ended may have logs that cannot be read.
                with contextlib.suppress(Exception):
                    self._read()
                self._measure()
                self._write()

    def _write(self):
        self._record.about["seconds"] = round(self.seconds, 3)
        page.write(self.path, page.render([self._record.text()]))

    def _tick(self, ended):
        """Writes the page now and then, in a thread."""
        while not ended.is_set():
            start = time.thread_time()
            try:
                with self._lock:
                    if not ended.is_set():
                        self._record.activity(self._model.run)
                        self._write()
            except Exception as error:  # noqa: BLE001 - the run continues
                self._failure = error
            self.seconds += time.thread_time() - start
            ended.wait(self.every)

    def _note_error(self):
        """Warns of what failed in the thread."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._warn(failure)

    def _warn(self, error):
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"The report {str(self.path)!r} is not complete; the run "
            f"continues. ({type(error).__name__}: {str(error)[:500]})",
            stacklevel=3,
        )


def _first(values):
    return values[0] if values else {}
