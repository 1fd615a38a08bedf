"""Where the time of a run went: the newest spans, and sums of all."""

import collections
import threading

from keras_posttrain.reports.encoding import encode

# A program that was compiled, or read from the cache, in less time is
# counted, and not drawn.
SHORT = 0.05


class Timeline:
    """Listens to spans; see `_spans.py`.

    Args:
        origin: float, the time of `time.perf_counter` that counts as 0.
        most: int, spans to keep: the newest.
        programs: int, compiled programs to keep: the slowest.

    Attributes:
        offset: float, seconds of the run before `origin`.
    """

    def __init__(self, origin, most=3000, programs=50):
        self.origin, self._programs = origin, programs
        self._main = threading.get_ident()
        self._spans = collections.deque(maxlen=most)
        self._lock = threading.Lock()
        self.count, self.offset = 0, 0.0
        # Seconds of the run's thread that some span covers, and the newest
        # spans that lie in no other.
        self.own, self._outer = 0.0, collections.deque(maxlen=64)
        # By name: seconds, and how many.
        self.totals, self.compiled = {}, {}

    def __call__(self, span):
        """Adds a `Span`."""
        seconds = span.end - span.start
        with self._lock:
            self.count += 1
            total = self.totals.setdefault(span.name, [0.0, 0])
            total[0] += seconds
            total[1] += 1
            if span.thread == self._main:
                self._cover(span)
            if span.name == "compile":
                found = self.compiled.setdefault(span.label, [0.0, 0])
                found[0] += seconds
                found[1] += 1
                if len(self.compiled) > 4 * self._programs:
                    self.compiled = self._slowest()
                if seconds < SHORT:
                    return
            self._spans.append(span)

    def _cover(self, span):
        """Counts a span in place of those inside of it, which came before."""
        outer = self._outer
        while outer and outer[-1][0] >= span.start:
            start, end = outer.pop()
            self.own -= end - start
        outer.append((span.start, span.end))
        self.own += span.end - span.start

    def _slowest(self):
        order = sorted(self.compiled.items(), key=lambda x: -x[1][0])
        return dict(order[: self._programs])

    def text(self, until):
        """Returns it as JSON; `until` is the time now.

        A span is its name's number, start and length in milliseconds, its
        label, and 1 if it was not in the run's own thread.
        """
        with self._lock:
            spans = list(self._spans)
            totals = {k: list(v) for k, v in self.totals.items()}
            compiled = self._slowest()
        names = list(dict.fromkeys(s.name for s in spans))
        places = {name: i for i, name in enumerate(names)}
        rows = [
            [
                places[s.name],
                round(1000 * (s.start - self.origin), 1),
                round(1000 * (s.end - s.start), 1),
                s.label,
                int(s.thread != self._main),
            ]
            for s in spans
        ]
        data = {
            "names": names,
            "spans": rows,
            "until": round(1000 * (until - self.origin), 1),
            "offset": self.offset,
            "own": round(self.own, 3),
            "count": self.count,
            "totals": {k: [round(s, 3), n] for k, (s, n) in totals.items()},
            "compiled": [
                [name, round(seconds, 3), many]
                for name, (seconds, many) in compiled.items()
            ],
        }
        return encode(data)
