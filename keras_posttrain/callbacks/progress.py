import math
import sys
import time

import keras

from keras_posttrain.callbacks.metrics_log import sorted_names
from keras_posttrain.distribution import processes

# Seconds between two readings of the logs, each of which waits for the device.
INTERVAL = 0.5
# Seconds between two lines in a file, where no line can be overwritten.
LINE_INTERVAL = 60.0


class Progress(keras.callbacks.Callback):
    """A progress bar with metrics, tokens per second and remaining time.

    Of several processes, the first one shows it.

    Args:
        verbose: 1 or `"auto"` for a bar, 2 for one line per epoch.
    """

    reads_step_logs = True

    def __init__(self, verbose="auto"):
        super().__init__()
        self.verbose = verbose

    def on_train_begin(self, logs=None):
        # Steps by the reason why they changed nothing.
        self._skipped = {}
        self._steps = 0
        self._tokens = 0.0
        self._start = self._printed = time.perf_counter()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._epoch_steps = 0
        self._shown = 0.0
        self._pending = []

    def on_train_batch_end(self, batch, logs=None):
        self._steps += 1
        self._epoch_steps += 1
        self._pending.append((self._model.step, self._model.step_logs))
        now = time.perf_counter()
        if self._steps == 1:
            # The first step compiles, so rates start after it.
            self._read()
            self._start, self._tokens = time.perf_counter(), 0.0
        elif now - self._shown > INTERVAL:
            self._read()
            self._shown = now
            if self.verbose == 2:
                return
            if sys.stdout.isatty():
                _print("\r" + self._line() + "\033[K", end="")
            elif now - self._printed > LINE_INTERVAL:
                _print(self._line())
                self._printed = now

    def on_test_begin(self, logs=None):
        self._paused = time.perf_counter()

    def on_test_end(self, logs=None):
        # Rates do not include validation.
        self._start += time.perf_counter() - self._paused

    def on_epoch_end(self, epoch, logs=None):
        self._read()
        line = self._line(logs or {})
        if self.verbose != 2 and sys.stdout.isatty():
            line = "\r" + line + "\033[K"
        _print(line)

    def on_train_end(self, logs=None):
        for reason, steps in self._skipped.items():
            many = ", ".join(map(str, steps[:10]))
            more = "" if len(steps) <= 10 else ", …"
            _print(
                f"{len(steps)} steps changed nothing, since {reason}: steps "
                f"{many}{more}"
            )

    def _read(self):
        for step, logs in self._pending:
            if logs:
                self._tokens += float(logs.get("num_tokens", 0.0))
                if float(logs.get("skipped", 0.0)):
                    reason = self._reason(logs)
                    self._skipped.setdefault(reason, []).append(step)
                self._last = logs
        self._pending = []

    def _reason(self, logs):
        """Returns why a step was skipped, by its logs."""
        if not math.isfinite(float(logs.get("grad_norm", 0.0))):
            return "their gradient was not finite"
        # A rollout reports how many of its groups have equal rewards, and a
        # mean of rewards if a completion has one.
        if "frac_reward_zero_std" in logs and "reward" not in logs:
            return "no completion was given a reward"
        return self._model.skipped_because

    def _line(self, logs=None):
        logs = getattr(self, "_last", {}) if logs is None else logs
        run, epochs = self._model.run, self.params["epochs"]
        elapsed = time.perf_counter() - self._start
        parts = [f"epoch {self._epoch + 1}/{epochs}"]
        left = None
        if run.data.epoch_size:
            # `step` includes the steps of earlier calls of `fit`.
            step = self._model.step
            total = run.state.first_step + epochs * run.data.epoch_size
            parts.append(f"step {step}/{total}")
            if self._steps > 1:
                per_step = elapsed / (self._steps - 1)
                left = max(total - step, 0) * per_step
        else:
            parts.append(f"step {self._model.step}")
        hidden = {"num_tokens", "skipped"}
        chosen = getattr(self._model, "shown_metrics", None)
        if chosen is not None:
            hidden |= {x for x in logs if x.removeprefix("val_") not in chosen}
        parts += [
            f"{name} {float(logs[name]):.4g}"
            for name in sorted_names(logs)
            if name not in hidden and math.isfinite(logs[name])
        ]
        if elapsed > 0 and self._tokens:
            parts.append(f"{self._tokens / elapsed:,.0f} tokens/s")
        if left:
            parts.append(f"{_duration(left)} left")
        return " - ".join(parts)


def _print(line, end="\n"):
    if processes.is_first():
        print(line, end=end, flush=True)


def _duration(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
