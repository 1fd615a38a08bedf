"""What a page says of one run, as it is collected."""

import contextlib
import math
import time

from keras_posttrain.reports import memory
from keras_posttrain.reports.curves import Curves
from keras_posttrain.reports.diagnoses import Diagnoses
from keras_posttrain.reports.encoding import encode, plain
from keras_posttrain.reports.samples import Samples
from keras_posttrain.reports.timeline import Timeline


class Record:
    """The parts of a page on one run, each of bounded size.

    Attributes:
        origin: float, when it began, by `time.perf_counter`.
        about: dict, the state of the run.
        rows_at: float, when rows were last looked at.
    """

    def __init__(self, tokenizer, num_groups):
        self.origin, self.rows_at = time.perf_counter(), -math.inf
        now = time.time()
        self.about = {
            "status": "running",
            "started": now,
            "error": None,
            "activity": None,
            "resumed": [],
        }
        self.curves, self.validation = Curves(), Curves()
        self.samples = Samples(tokenizer, num_groups)
        self.timeline = Timeline(self.origin)
        self.diagnoses = Diagnoses()
        self.memory, self.data, self.environment = None, None, {}
        # Of the run before it was resumed.
        self._seconds = 0.0

    @contextlib.contextmanager
    def part(self, name):
        """A scope whose failure leaves one part of the page out."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - other parts go on
            self.environment[name] = {
                "not known": f"{type(error).__name__}: {str(error)[:300]}"
            }

    def add(self, step, now, logs, is_first=False):
        """Adds a step's metrics; `now` is by `time.perf_counter`."""
        values = {name: float(value) for name, value in logs.items()}
        self.about["step"] = step
        self.curves.add(step, self._since(now), values)
        self.diagnoses.add(step, values, is_first)

    def add_validation(self, step, logs):
        """Adds the metrics of held-out rows."""
        self.validation.add(step, self._since(time.perf_counter()), logs)
        self.diagnoses.add_validation(step, logs)

    def _since(self, now):
        return self._seconds + now - self.origin

    def describe(self, environment):
        """Sets what the run is, a dict of dicts."""
        self.environment |= plain(environment)

    def measure(self, task):
        """Looks at the memory and at the data report of a task."""
        report = getattr(task, "data_report", None)
        if report is not None:
            self.data = {"text": str(report), **plain(vars(report))}
            self.diagnoses.add_data(report)
        self.memory = memory.measure(memory.kinds_of(task))

    def activity(self, run):
        """Notes what a run is doing now."""
        found = getattr(run, "activity", None)
        if found is None:
            return
        done = f" {found.done}/{found.total}" if found.total else ""
        seconds = time.perf_counter() - found.since
        self.about["activity"] = f"{found.name}{done}, for {seconds:.0f} s"

    def text(self):
        """Returns the record as JSON."""
        now = time.perf_counter()
        self.about["written"] = time.time()
        self.about["elapsed"] = round(self._since(now), 1)
        parts = {
            "about": encode(self.about),
            "environment": encode(self.environment),
            "diagnoses": encode(self.diagnoses.data()),
            "curves": self.curves.text(),
            "validation": self.validation.text(),
            "samples": self.samples.text(),
            "timeline": self.timeline.text(now),
            "memory": encode(self.memory),
            "data": encode(self.data),
        }
        inside = ",".join(f'"{k}":{v}' for k, v in parts.items())
        return "{" + inside + "}"

    def restore(self, old, step):
        """Continues what `text` returned of a run, up to a step.

        Returns whether there was anything of it.
        """
        rows = [row for row in old["curves"]["rows"] if row[0] <= step]
        if not rows:
            return False
        self._seconds = self.timeline.offset = rows[-1][1]
        self.curves.restore(old["curves"], step)
        self.validation.restore(old["validation"], step)
        self.samples.restore(old["samples"], step)
        self.diagnoses.restore(old["diagnoses"], step)
        self.about["started"] = old["about"]["started"]
        self.about["resumed"] = [*old["about"]["resumed"], step][-50:]
        return True
