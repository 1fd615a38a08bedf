import contextlib
import json
import numbers
import os
import threading
import time

import jax
import keras

from keras_posttrain import _spans
from keras_posttrain.callbacks.directories import Folder, make_directory
from keras_posttrain.callbacks.harmless import Harmless, harmless
from keras_posttrain.distribution import processes

# Spans that may overlap in one thread.
OVERLAPPING = ("tool",)
# The most spans of a trace.
MOST = 200_000


class Trace(Harmless, keras.callbacks.Callback):
    """Records where the time of some steps goes, on the host and the devices.

    It writes to `directory/trace`

    - `steps_10_12.json`, the host's spans (rollout, tools, rewards,
      log-probabilities, training step, weights that are sent, compilation)
      for [Perfetto](https://ui.perfetto.dev) or `chrome://tracing`;
    - `plugins/profile/`, JAX's profile of host and devices for XProf or
      TensorBoard's profiler;
    - `steps_10_12.memory.prof`, the memory of the devices by the lines that
      allocated it, for `pprof`.

    The rollout of the first step is included. Profiling slows the steps that
    it records. If it fails, it warns and the run continues. Of several
    processes the first one records.

    Args:
        directory: str or path, created if missing; or an address, such as
            `"gs://bucket/run"`.
        steps: pair of ints, the first and the last step; they count from 1.
        profile: bool, whether JAX's profile is recorded as well.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.Trace("run/", steps=(2, 2))])
    ```
    """

    reads_step_logs = True

    def __init__(self, directory, steps=(10, 12), profile=True):
        super().__init__()
        self.steps, self.profile = _checked(steps), profile
        if not isinstance(profile, bool):
            raise ValueError(
                f"`profile` must be True or False. Received: {profile!r}"
            )
        self._folder = Folder(directory, is_locked=False)
        self.directory = self._folder.path.absolute() / "trace"
        self._spans = None
        self._is_profiling = False

    def on_train_begin(self, logs=None):
        self.close()
        self._is_broken = not processes.is_first()
        self._spans, self._marks = None, []

    @harmless
    def on_epoch_begin(self, epoch, logs=None):
        self._begin()

    @harmless
    def on_train_batch_end(self, batch, logs=None):
        if self._spans is not None:
            if not self._marks or self._marks[-1][0] != self._model.step:
                self._marks.append((self._model.step, time.perf_counter()))
            if self._model.step >= self.steps[1]:
                # What the devices still do is part of the last step.
                jax.block_until_ready(self._model.step_logs)
                self._end()
        else:
            self._begin()

    def _begin(self):
        """Begins before the first step, or in a run that resumed later."""
        first, last = self.steps
        if self._spans is not None or not first - 1 <= self._model.step < last:
            return
        self._folder.begin()
        make_directory(self.directory)
        self._spans = []
        self._from = self._model.step + 1
        _spans.listen(self._add)
        if self.profile:
            options = jax.profiler.ProfileOptions()
            # Calls of Python would fill the profile.
            options.python_tracer_level = 0
            jax.profiler.start_trace(
                os.fspath(self.directory), profiler_options=options
            )
            self._is_profiling = True
        self._own = threading.get_ident()
        self._start = time.perf_counter()

    def _add(self, span):
        if len(self._spans) < MOST:
            self._spans.append(span)

    def _end(self):
        """Writes what was recorded."""
        spans, self._spans = self._spans, None
        _spans.unlisten(self._add)
        self._stop_profile()
        last = self._marks[-1][0] if self._marks else self._from
        name = f"steps_{self._from}_{last}"
        text = json.dumps(events(spans, self._start, self._marks, self._own))
        path = self.directory / f"{name}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        if self.profile:
            jax.profiler.save_device_memory_profile(
                os.fspath(self.directory / f"{name}.memory.prof")
            )
        self._folder.end()

    def _stop_profile(self):
        if self._is_profiling:
            self._is_profiling = False
            jax.profiler.stop_trace()

    @harmless
    def on_train_end(self, logs=None):
        if self._spans is not None:
            self._end()

    def close(self):
        """Writes what was recorded of a run that has ended early."""
        if self._spans is not None:
            self._close()
        _spans.unlisten(self._add)
        self._spans = None
        with contextlib.suppress(Exception):
            self._stop_profile()
        self._folder.end()

    @harmless
    def _close(self):
        self._end()


def _checked(steps):
    """Returns the first and the last step."""
    try:
        first, last = steps
    except (TypeError, ValueError):
        first = last = None
    are_ints = all(
        isinstance(x, numbers.Integral) and not isinstance(x, bool)
        for x in (first, last)
    )
    if not are_ints or not 1 <= first <= last:
        raise ValueError(
            "`steps` must be the first and the last step to record, such as "
            f"(10, 12). Received: steps={steps!r}"
        )
    return int(first), int(last)


def events(spans, start, marks, own):
    """Returns spans in the format of Chrome's traces, a dict for JSON.

    Args:
        spans: list of `Span`s.
        start: float, the time of `time.perf_counter` that counts as 0.
        marks: list of `(step, time)`, the ends of steps.
        own: int, the identifier of the run's thread.
    """
    names = {own: "run"}
    found, free = [], {}
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        thread = span.thread
        if span.name in OVERLAPPING:
            # Each row of a trace holds spans that lie in each other.
            lane = 0
            while free.get(lane, 0.0) > span.start:
                lane += 1
            free[lane] = span.end
            thread = lane + 1
            names[thread] = f"tools {lane + 1}"
        else:
            names.setdefault(thread, f"thread {len(names)}")
        found.append(
            {
                "name": span.name,
                "ph": "X",
                "ts": 1e6 * (span.start - start),
                "dur": 1e6 * (span.end - span.start),
                "pid": 0,
                "tid": thread,
                "args": {"what": span.label} if span.label else {},
            }
        )
    before = start
    for step, end in marks:
        found.append(
            {
                "name": f"step {step}",
                "ph": "X",
                "ts": 1e6 * (before - start),
                "dur": 1e6 * (end - before),
                "pid": 0,
                "tid": 0,
            }
        )
        before = end
    names[0] = "steps"
    about = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": thread,
         "args": {"name": name}}
        for thread, name in names.items()
    ]  # fmt: skip
    return {"traceEvents": about + found, "displayTimeUnit": "ms"}
