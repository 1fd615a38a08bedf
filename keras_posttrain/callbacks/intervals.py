"""Intervals between two actions of a callback, in steps or in time."""

import re
import time

from keras_posttrain.callbacks import checks
from keras_posttrain.distribution import processes

SECONDS = {"s": 1, "min": 60, "h": 3600}


class Interval:
    """Some steps, or some time, since something was done last.

    Args:
        every: int, steps; or str, a time such as `"30s"`, `"10min"` or
            `"1.5h"`.
        name: str, that of the argument.
    """

    def __init__(self, every, name="every"):
        self.steps = self.seconds = None
        if isinstance(every, str):
            self.seconds = _seconds(every, name)
        else:
            self.steps = checks.positive(name, every)
        self.step = self.time = 0

    def begin(self, step):
        """Begins anew, at a step."""
        self.step, self.time = step, time.monotonic()

    def is_over(self, step):
        """Returns whether an interval ended since `begin`, at a step.

        All processes must ask; they get the first one's answer.
        """
        if self.steps is not None:
            return step // self.steps != self.step // self.steps
        if step == self.step:
            return False
        is_over = time.monotonic() - self.time >= self.seconds
        return processes.from_first(is_over)


def _seconds(text, name):
    """Returns the seconds of a text such as `"10min"`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", text)
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0
    if not seconds:
        raise ValueError(
            f"`{name}` must be a positive int, steps, or a time such as "
            f'"30s", "10min" or "1.5h". Received: {name}={text!r}'
        )
    return seconds
