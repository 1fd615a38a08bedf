import contextlib
import math
import threading
import time

import jax
import keras

from keras_posttrain import _console
from keras_posttrain._spans import span
from keras_posttrain.callbacks import displays
from keras_posttrain.callbacks.metrics_log import sorted_names
from keras_posttrain.distribution import processes

# Seconds between two readings of the logs of steps.
INTERVAL = 0.5
# Seconds between two updates while a step runs.
TICK = 1.0
# Seconds between two messages on steps that were skipped for one reason.
SAY_INTERVAL = 30.0
# The metrics that matter most, where a task does not say which.
FIRST = (
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "accuracy",
    "margin",
    "mean_token_accuracy",
)
# What is counted, and not shown as a metric.
COUNTED = ("num_tokens", "skipped")


class Progress(keras.callbacks.Callback):
    """Shows how far a run is: `fit` adds it where `verbose` is not 0.

    On a terminal it is one line, with a bar, the step of the epoch, the time
    left, what is being done, and as many metrics as have room, those that
    matter most first. In a notebook it is a table that is updated in place.
    Where output is neither, a line is printed every 30 seconds and at the end
    of an epoch. Steps that changed nothing are reported at once, with the
    reason. The time left is that of the run, at the speed since `fit` was
    called, without compilation and validation.

    Of several processes, the first one shows it.

    Args:
        verbose: 1 or `"auto"` for the above, 2 for one line per epoch.
        display: `None` for the display that suits the output, or an object
            like those of `keras_posttrain.callbacks.displays`.

    Example:

    ```python
    task.fit(rows, verbose=0, callbacks=[kpt.callbacks.Progress(verbose=2)])
    ```
    """

    reads_step_logs = True

    def __init__(self, verbose="auto", display=None):
        super().__init__()
        self.verbose, self.display = verbose, display
        self._ended = self._display = self._epoch = None

    def on_train_begin(self, logs=None):
        self.close()
        # Steps that changed nothing by their reason; of each reason how many
        # of them were reported, and when.
        self._skipped, self._reported = {}, {}
        self._steps, self._tokens, self._last = 0, 0.0, {}
        self._last_step, self._pending, self._read_at = None, [], 0.0
        self._begin = time.perf_counter()
        # Where the run was when rates began to be measured.
        self._start = self._paused = self._left = None
        self._tests = 0
        if not processes.is_first():
            self._display = displays.Hidden()
            return
        if self.verbose == 2:
            self._display = displays.Lines(math.inf)
            return
        self._display = self.display or displays.suited()
        self._ended = threading.Event()
        threading.Thread(
            target=self._tick, args=[self._ended], daemon=True
        ).start()

    def on_epoch_begin(self, epoch, logs=None):
        with _console.hold():
            self._epoch = epoch
            self._last_step = self._model.step
            self._show()

    def on_train_batch_end(self, batch, logs=None):
        task = self._model
        # At the end of a stream, Keras calls this without a step.
        if task.step == self._last_step:
            return
        self._last_step = task.step
        self._steps += 1
        self._pending.append((task.step, task.step_logs))
        now = time.perf_counter()
        # A rollout is measured as a whole, not the first of its steps alone.
        whole = getattr(task.run, "at_rest", True)
        if self._start is None:
            if whole:
                # The first step, or the steps of a first rollout, compile.
                self._read()
                self._start, self._tokens = time.perf_counter(), 0.0
                self._from = self._position()
                self._measured_at = self._start
        elif whole and now - self._measured_at > INTERVAL:
            # The step that runs is not waited for.
            self._read(behind=1)
            self._measure()
        elif now - self._read_at > INTERVAL:
            self._read(behind=1)
        else:
            return
        self._read_at = time.perf_counter()
        self._show()

    def on_test_begin(self, logs=None):
        self._paused, self._tests = time.perf_counter(), 0
        self._show()

    def on_test_batch_end(self, batch, logs=None):
        self._tests += 1

    def on_test_end(self, logs=None):
        # Rates do not include validation.
        if self._start is not None:
            self._start += time.perf_counter() - self._paused
        self._paused = None

    def on_epoch_end(self, epoch, logs=None):
        self._read()
        self._measure()
        with _console.hold():
            if self._epoch is not None:
                self._display.finish(self._status(logs or {}, ends=True))
            self._epoch = None

    def on_train_end(self, logs=None):
        for reason, steps in self._skipped.items():
            count, _ = self._reported.get(reason, (0, 0))
            if count < len(steps):
                self._display.say(_sentence(steps, reason))
        self.close()

    def close(self):
        """Ends the display, also of a run that was interrupted."""
        if self._ended is not None:
            self._ended.set()
        with _console.hold():
            self._ended = self._epoch = None
            if self._display is not None:
                self._display.close()

    def _tick(self, ended):
        """Updates what is shown while a step runs, in a thread."""
        # A closed output ends the thread; the run will meet it itself.
        with contextlib.suppress(OSError, ValueError):
            while not ended.wait(TICK):
                self._show()

    def _show(self):
        with _console.hold():
            if self._epoch is not None:
                self._display.update(self._status(self._last))

    def _read(self, behind=0):
        """Reads the logs of all steps but the last `behind`."""
        count = max(len(self._pending) - behind, 0)
        read, self._pending = self._pending[:count], self._pending[count:]
        read = [(step, logs) for step, logs in read if logs]
        if not read:
            return
        wanted = [
            {k: logs[k] for k in (*COUNTED, "grad_norm") if k in logs}
            for _, logs in read
        ]
        # One transfer of all.
        with span("device"):
            *counts, last = jax.device_get([*wanted, read[-1][1]])
        for (step, logs), found in zip(read, counts):
            self._tokens += float(found.get("num_tokens", 0.0))
            if float(found.get("skipped", 0.0)):
                norm = float(found.get("grad_norm", 0.0))
                reason = self._reason(logs, norm)
                self._skipped.setdefault(reason, []).append(step)
        self._last = {name: float(value) for name, value in last.items()}
        self._report_skipped()

    def _reason(self, logs, norm):
        """Returns why a step was skipped, by its logs."""
        if not math.isfinite(norm):
            return "the gradient was not finite"
        # A rollout reports how many of its groups have equal rewards, and a
        # mean of rewards if a completion has one.
        if logs.get("episodes/failed") and "reward" not in logs:
            return "every episode failed"
        if logs.get("episodes/turns") == 0:
            return "no episode had room for a turn, or asked for one"
        if "frac_reward_zero_std" in logs and "reward" not in logs:
            return "no completion was given a reward"
        return self._model.skipped_because

    def _report_skipped(self):
        """Says which steps changed nothing: at once, and not too often."""
        now = time.perf_counter()
        for reason, steps in self._skipped.items():
            count, when = self._reported.get(reason, (0, -math.inf))
            if count < len(steps) and now - when >= SAY_INTERVAL:
                self._display.say(_sentence(steps[count:], reason))
                self._reported[reason] = len(steps), now

    def _place(self):
        """Returns the step of the epoch, its steps and the share done.

        Each is `None` where it is not known.
        """
        run = self._model.run
        size = run.data.epoch_size
        if size:
            done = self._model.step - run.state.first_step
            step = done - self._epoch * size
            return step, size, step / size
        # Where rewards decide on the steps, prompts are counted.
        many = getattr(run.data, "num_prompts", None)
        return None, None, 1 - run.data.left / many if many else None

    def _position(self):
        """Returns how many epochs are done, a float, or `None`."""
        fraction = self._place()[2]
        return None if fraction is None else self._epoch + fraction

    def _measure(self):
        """Computes the time left."""
        now = self._measured_at = time.perf_counter()
        position = None if self._start is None else self._position()
        if position is None or position <= self._from:
            return
        pace = (now - self._start) / (position - self._from)
        epochs = self.params["epochs"]
        self._left = now + pace * max(epochs - position, 0.0)

    def _status(self, logs, ends=False):
        """Returns the `Status` with these metrics."""
        task, now = self._model, time.perf_counter()
        step, size, fraction = self._place()
        step = task.step if step is None else step
        notes = []
        if count := sum(map(len, self._skipped.values())):
            notes.append(f"skipped {count}")
        if self._start is not None and self._tokens:
            rate = self._tokens / max(now - self._start, 1e-9)
            notes.append(f"{rate:,.0f} tokens/s")
        left = None if self._left is None else max(self._left - now, 0.0)
        if left is None or (ends and left < 0.5):
            left = f"{displays.duration(now - self._begin)} elapsed"
        else:
            left = f"{displays.duration(left)} left"
        epochs = self.params["epochs"]
        return displays.Status(
            epoch=f"epoch {self._epoch + 1}/{epochs}" if epochs > 1 else None,
            step=f"step {step}/{size}" if size else f"step {step}",
            total=None if step == task.step else f"({task.step} in all)",
            fraction=fraction,
            metrics=self._metrics(logs),
            notes=notes,
            time=left,
            activity=None if ends else self._activity(now),
        )

    def _metrics(self, logs):
        """Returns `(name, text)` of what is shown, in order."""
        chosen = getattr(self._model, "shown_metrics", None)
        names = dict.fromkeys(
            x.removeprefix("val_") for x in sorted_names(logs)
        )
        order = chosen or (*FIRST, *names)
        # The value of validation next to that of training.
        both = [y for x in dict.fromkeys(order) for y in (x, f"val_{x}")]
        return [
            (name, f"{float(logs[name]):.4g}")
            for name in both
            if name in logs
            and name not in COUNTED
            and math.isfinite(logs[name])
        ]

    def _activity(self, now):
        """Returns what the run is doing, such as `"sampling 3/8, 12s"`."""
        parts, since = [], self._paused
        if self._paused is not None:
            parts.append("validating")
            if self._tests:
                parts[0] += f" {self._tests}"
        activity = getattr(self._model.run, "activity", None)
        if activity is not None and activity.name not in parts:
            name, since = activity.name, activity.since
            if activity.total:
                name += f" {activity.done}/{activity.total}"
            parts.append(name)
        if not parts and not self._steps:
            parts, since = ["compiling"], self._begin
        if not parts:
            return None
        seconds = now - since
        if seconds < 1:
            # What is over in a moment is no news.
            return None if self._steps else ": ".join(parts)
        return f"{': '.join(parts)}, {displays.duration(seconds)}"


def _sentence(steps, reason):
    """Returns the message on steps that changed nothing."""
    if len(steps) == 1:
        return f"step {steps[0]} changed nothing, since {reason}"
    many = ", ".join(map(str, steps[:10]))
    more = "" if len(steps) <= 10 else ", …"
    return (
        f"{len(steps)} steps changed nothing, since {reason}: steps "
        f"{many}{more}"
    )
