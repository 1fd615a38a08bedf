import concurrent.futures
import importlib.util
import math
import sys
import time

import jax
import keras

from keras_posttrain._spans import span
from keras_posttrain.callbacks.harmless import Harmless, harmless
from keras_posttrain.callbacks.metrics_log import with_rates
from keras_posttrain.distribution import processes
from keras_posttrain.reports import environment
from keras_posttrain.workers.threads import SerialThread

# Seconds between two readings of the logs of steps.
INTERVAL = 1.0
# Seconds that a run waits at its end for what is still on its way.
PATIENCE = 60.0
# Steps on their way from which a tracker counts as unreachable.
MOST = 10_000


class Tracker(Harmless, keras.callbacks.Callback):
    """Base class of callbacks that give a run's metrics to a tracker.

    It gets the names and values of `metrics.jsonl` (see `MetricsLog`) by
    step, without those that are not finite, the means of validation, and what
    the run is: task, settings and versions. A thread sends them, so that a
    tracker that is slow or unreachable does not hold the run up; one that
    fails is left out of the rest of the run, with a warning. Of several
    processes, the first one sends.

    A subclass has the name of its `package`, and the methods `_open`, `_log`
    and `_finish`, which are called in that thread.
    """

    reads_step_logs = True
    package = None

    def __init__(self):
        super().__init__()
        # Kept in checkpoints, by its name.
        self.num_tokens = 0
        self._thread = None
        if importlib.util.find_spec(self.package) is None:
            name = type(self).__name__
            raise ImportError(
                f"`kpt.callbacks.{name}` needs the package "
                f"{self.package!r}. Install it: `pip install {self.package}`."
            )

    def on_train_begin(self, logs=None):
        self.close()
        self._handled = sys.exception()
        self._is_broken = not processes.is_first()
        self._pending, self._sent, self._last_step = [], [], None
        self._read_at = 0.0
        self._status = "failed"
        self.num_tokens = 0

    @harmless
    def on_epoch_begin(self, epoch, logs=None):
        self._last_step = self._model.step
        if self._thread is None:
            # Only now is the step of a resumed run known.
            self._clock = time.perf_counter()
            self._thread = SerialThread()
            about = environment.of_run(self._model, self.params)
            settings = {
                name: value
                for part in (about["run"], about["versions"])
                for name, value in part.items()
                if value is not None
            }
            self._send(self._open, settings, self._model.step)

    @harmless
    def on_train_batch_end(self, batch, logs=None):
        task = self._model
        # At the end of a stream, Keras calls this without a step.
        if task.step == self._last_step or not task.step_logs:
            return
        self._last_step, now = task.step, time.perf_counter()
        self._pending.append((task.step, now, task.step_logs))
        if now - self._read_at >= INTERVAL:
            # The step that runs is not waited for.
            self._read(behind=1)

    @harmless
    def on_epoch_end(self, epoch, logs=None):
        self._read()
        held_out = {
            name: float(value)
            for name, value in (logs or {}).items()
            if name.startswith("val_")
        }
        if held_out:
            self._send(self._log, self._model.step, _finite(held_out))

    @harmless
    def on_train_end(self, logs=None):
        self._status = "finished"

    @harmless
    def flush(self):
        """Sends the metrics of all steps that are done."""
        self._read()

    def close(self):
        """Waits until all is sent, for at most a minute."""
        if self._thread is not None:
            self._end()
            self._thread.end()
            self._thread = None

    @harmless
    def _end(self):
        if sys.exception() is self._handled:
            self._read()
        self._send(self._finish, self._status)
        done = concurrent.futures.wait(self._sent, PATIENCE)
        for job in done.done:
            job.result()
        if done.not_done:
            raise TimeoutError(
                f"{len(done.not_done)} calls were not answered in "
                f"{PATIENCE:g} s."
            )

    def _read(self, behind=0):
        """Sends the logs of all steps but the last `behind`."""
        count = max(len(self._pending) - behind, 0)
        read, self._pending = self._pending[:count], self._pending[count:]
        with span("device"):
            values = jax.device_get([logs for _, _, logs in read])
        for (step, now, _), logs in zip(read, values):
            logs = {name: float(value) for name, value in logs.items()}
            logs = with_rates(logs, self.num_tokens, now - self._clock)
            self.num_tokens, self._clock = logs["num_tokens"], now
            self._send(self._log, step, _finite(logs))
        self._read_at = time.perf_counter()

    def _send(self, function, *args):
        """Has the thread call a function; raises what earlier calls have."""
        done = [job for job in self._sent if job.done()]
        self._sent = [job for job in self._sent if not job.done()]
        for job in done:
            job.result()
        if len(self._sent) >= MOST:
            raise TimeoutError(f"{MOST:,} steps were not answered.")
        self._sent.append(self._thread.submit(lambda: function(*args)))

    def _open(self, settings, step):
        """Begins a run; `step` is that at which it begins or resumes."""
        raise NotImplementedError

    def _log(self, step, values):
        """Sends the values of a step, a dict of floats by name."""
        raise NotImplementedError

    def _finish(self, status):
        """Ends the run, which is `"finished"` or `"failed"`."""
        raise NotImplementedError


def _finite(values):
    return {k: v for k, v in values.items() if math.isfinite(v)}
