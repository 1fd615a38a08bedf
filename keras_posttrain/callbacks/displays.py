"""How the progress of a run is shown: a bar, plain lines or a table."""

import dataclasses
import html
import os
import shutil
import sys
import time
import unicodedata

from keras_posttrain import _console

# Seconds between two lines where no line can be overwritten, and between two
# rows of a notebook's table.
LINE_INTERVAL = 30.0
# Columns of the bar, in a narrow terminal and in one of 100 columns or more.
# Always the same ones: a bar that grows and shrinks with the text jumps.
BAR = (10, 20)
SEPARATOR = " - "
# Rows of a notebook's table, and metrics of a row.
NUM_ROWS, NUM_METRICS = 20, 8


@dataclasses.dataclass
class Status:
    """How far a run is.

    Attributes:
        epoch: str or `None`, such as `"epoch 1/2"`.
        step: str, such as `"step 3/40"`, within the epoch.
        total: str or `None`, the step of the run where it is another one.
        fraction: float or `None`, the share of the epoch that is done.
        metrics: list of `(name, value)`, strs; what matters most is first.
        notes: list of str, shown after them.
        time: str or `None`, the time left, or since the start.
        activity: str or `None`, what is done now.
    """

    epoch: str | None
    step: str
    total: str | None = None
    fraction: float | None = None
    metrics: list = dataclasses.field(default_factory=list)
    notes: list = dataclasses.field(default_factory=list)
    time: str | None = None
    activity: str | None = None

    def line(self):
        """Returns all of it as one line."""
        step = self.step if self.total is None else f"{self.step} {self.total}"
        metrics = map(" ".join, self.metrics)
        parts = [self.epoch, step, *metrics, *self.notes, self.time]
        return SEPARATOR.join(x for x in (*parts, self.activity) if x)

    def fitted(self, width):
        """Returns what matters most within so many columns, with a bar."""
        metrics = map(" ".join, self.metrics)
        parts = [self.epoch, self.step, self.time, *metrics, *self.notes]
        last = len(parts)
        parts.append(self.activity)
        # Who gets room first: the step, the time, the activity, the first
        # metric, the epoch, the bar, the other metrics.
        order = [1, 2, last, 3, 0, "bar", *range(4, last)]
        size = BAR[width >= 100]
        kept, bar, room = set(), False, width + len(SEPARATOR)
        for rank, i in enumerate(order):
            if i == "bar":
                bar = self.fraction is not None and room > size
                room -= bar * (size + 1)
                continue
            if i in kept or not parts[i]:
                continue
            needed = columns(parts[i]) + len(SEPARATOR)
            if needed <= room:
                kept.add(i)
                room -= needed
            elif rank > order.index("bar"):
                break
        if 1 not in kept:
            return clip(self.step, width)
        if bar:
            parts[1] += " " + drawn(self.fraction, size)
        return SEPARATOR.join(x for i, x in enumerate(parts) if i in kept)


class Lines:
    """Plain lines, for files and pipes."""

    def __init__(self, interval=None):
        self.interval = LINE_INTERVAL if interval is None else interval
        self._printed = time.perf_counter()

    def update(self, status):
        """Shows where the run is, now and then."""
        now = time.perf_counter()
        if now - self._printed >= self.interval:
            self._printed = now
            _console.say(status.line())

    def finish(self, status):
        """Shows where the run is, for good."""
        self._printed = time.perf_counter()
        _console.say(status.line())

    def say(self, text):
        """Prints a message."""
        _console.say(text)

    def close(self):
        """Ends the display."""


class Hidden(Lines):
    """Nothing, for all processes but the first."""

    def update(self, status):
        pass

    def finish(self, status):
        pass

    def say(self, text):
        pass


class Terminal(Lines):
    """One line with a bar that is overwritten and never wraps."""

    def __init__(self):
        self._status, self._is_shown = None, False

    def update(self, status):
        with _console.hold():
            self._status = status
            self.draw()

    def finish(self, status):
        with _console.hold():
            self.clear()
            self._status = None
            _console.say(status.fitted(width()))

    def draw(self):
        """Draws the line over the one before."""
        if self._status is not None:
            _console.show(self)
            _console.write(f"\r{self._status.fitted(width())}\033[K")
            self._is_shown = True

    def clear(self):
        """Removes the line from the screen."""
        if self._is_shown:
            _console.write("\r\033[K")
            self._is_shown = False

    def close(self):
        with _console.hold():
            if self._is_shown:
                # What is printed next, an error perhaps, has its own line.
                _console.write("\n")
            self._status, self._is_shown = None, False
            _console.show(None)


class Notebook(Lines):
    """A bar and a table that are updated in place, in a notebook.

    Args:
        display: function of a dict of texts by MIME type that shows it and
            returns an object whose method `update` replaces it.
    """

    def __init__(self, display):
        super().__init__()
        self._display, self._handle = display, None
        self._rows = []

    def update(self, status):
        now = time.perf_counter()
        self._show(status, [*self._rows, status])
        if now - self._printed >= self.interval:
            self._printed = now
            self._keep(status)

    def finish(self, status):
        self._printed = time.perf_counter()
        self._keep(status)
        self._show(status, self._rows)

    def _keep(self, status):
        self._rows = [*self._rows, status][-NUM_ROWS:]

    def _show(self, status, rows):
        bundle = {
            "text/html": self._html(status, rows),
            "text/plain": status.line(),
        }
        if self._handle is None:
            self._handle = self._display(bundle)
        else:
            self._handle.update(bundle)

    def _html(self, status, rows):
        names = dict.fromkeys(
            name for row in rows for name, _ in row.metrics[:NUM_METRICS]
        )
        head = "".join(f"<th>{_escaped(x)}</th>" for x in ("step", *names))
        body = ""
        for row in rows:
            values = dict(row.metrics)
            place = ", ".join(x for x in (row.epoch, row.step) if x)
            cells = [place, *(values.get(name, "") for name in names)]
            cells = "".join(f"<td>{_escaped(x)}</td>" for x in cells)
            body += f"<tr>{cells}</tr>"
        bar = "<progress></progress>"
        if status.fraction is not None:
            bar = f"<progress max='1' value='{status.fraction:.4f}'>"
            bar += "</progress>"
        texts = [status.epoch, status.step, status.total]
        texts += [*status.notes, status.time, status.activity]
        text = _escaped(SEPARATOR.join(x for x in texts if x))
        return (
            f"<div>{bar} {text}</div><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


def suited():
    """Returns the display for where the output goes."""
    display = notebook_display()
    if display is not None:
        return Notebook(display)
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)()
    if is_terminal and os.environ.get("TERM") != "dumb":
        return Terminal()
    return Lines()


def notebook_display():
    """Returns a `display` for `Notebook`, or `None` outside of notebooks."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    # Optional, and there in a notebook.
    from IPython.display import display

    class Handle:
        def __init__(self, bundle):
            self._handle = display(bundle, raw=True, display_id=True)

        def update(self, bundle):
            self._handle.update(bundle, raw=True)

    return Handle


def width():
    """Returns the columns of the terminal that a line may fill."""
    # A terminal wraps where the last one is filled.
    return max(shutil.get_terminal_size().columns - 1, 1)


def columns(text):
    """Returns the columns that a text takes."""
    return sum(
        0
        if unicodedata.combining(c)
        else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def clip(text, width):
    """Returns the start of a text that fits."""
    while columns(text) > width:
        text = text[:-1]
    return text


def drawn(fraction, size):
    """Returns a bar of so many columns."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    done, left = "━─"
    try:
        (done + left).encode(encoding)
    except UnicodeEncodeError:
        done, left = "=-"
    count = round(min(max(fraction, 0.0), 1.0) * size)
    return done * count + left * (size - count)


def duration(seconds):
    """Returns seconds as a short text."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _escaped(text):
    return html.escape(str(text))
