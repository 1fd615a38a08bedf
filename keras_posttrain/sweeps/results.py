"""The table of a sweep."""

import csv
import io
import math

from keras_posttrain.training import monitors

DONE, FAILED = "done", "failed"
NEITHER = "-"


class SweepResults:
    """The table of a sweep: its points, and the metrics of each.

    `print` shows it as a table; `len` is the number of points.

    Attributes:
        rows: list of dicts in the order of the grid, one a point:
            `settings`, a dict; `metrics`, a dict of floats, empty for a point
            that has failed; `count`, the number of points that the metrics
            are the mean of, 1 but for `mean_over`; `status`, `"done"` or
            `"failed"`; `error`, str or `None`; `folder`, the point's
            `pathlib.Path` or `None`.
    """

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def best(self, metric, mode="auto"):
        """Returns the row with the best value of a metric.

        Args:
            metric: str, a name in the rows' `metrics`.
            mode: `"min"`, `"max"`, or `"auto"` for what the name says, such
                as `"min"` for `val_loss` and `"max"` for `reward`.

        Returns:
            A dict of `rows`, the first of equal ones. Values that are not
            finite are left out.

        Raises:
            ValueError: no point has the metric, or its name says no
                direction.
        """
        if mode == "auto":
            mode = monitors.direction(metric)
        if mode not in ("min", "max"):
            raise ValueError(
                '`mode` must be "min" or "max": which of them is better is '
                f"not known for this metric. Received: metric={metric!r}"
            )
        rows = [
            row
            for row in self.rows
            if math.isfinite(row["metrics"].get(metric, math.nan))
        ]
        if not rows:
            raise ValueError(
                "`metric` must be one that a point has, with a finite value: "
                f"{self._metrics()}. Received: metric={metric!r}"
            )
        choose = min if mode == "min" else max
        return choose(rows, key=lambda row: row["metrics"][metric])

    def mean_over(self, setting):
        """Returns the table without a setting, such as `"seed"`.

        Metrics are means over the points that differ in this setting alone.
        For each there is a `<metric>/stderr`, the standard error of the mean
        by the spread of the points, where there are two or more; `count` is
        their number. Points that failed are left out, and counted in no row.
        """
        names = {name for row in self.rows for name in row["settings"]}
        if setting not in names:
            raise ValueError(
                f"`setting` must be one of {sorted(names)}. "
                f"Received: setting={setting!r}"
            )
        groups = {}
        for row in self.rows:
            rest = {k: v for k, v in row["settings"].items() if k != setting}
            groups.setdefault(repr(rest), (rest, []))[1].append(row)
        return SweepResults([_mean(*group) for group in groups.values()])

    def to_csv(self):
        """Returns the table as text with commas, numbers in full."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(self._cells(repr))
        return file.getvalue()

    def to_markdown(self):
        """Returns the table in Markdown."""
        head, *lines = [
            [cell.replace("|", "\\|").replace("\n", " ") for cell in line]
            for line in self._cells(_short)
        ]
        lines = [head, ["---"] * len(head), *lines]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def __str__(self):
        lines = list(self._cells(_short))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(line, widths)).rstrip()
            for line in lines
        )

    def _metrics(self):
        """Names of all metrics, in their order."""
        names = [name for row in self.rows for name in row["metrics"]]
        return list(dict.fromkeys(names))

    def _cells(self, number):
        """The table as lists of strings, with a function of its floats."""
        names = [name for row in self.rows for name in row["settings"]]
        names = list(dict.fromkeys(names))
        metrics = self._metrics()
        yield [*names, *metrics, "count", "status"]
        for row in self.rows:
            status = row["status"]
            if row["error"]:
                status += ": " + row["error"].splitlines()[0][:60]
            yield [
                *(str(row["settings"].get(name, NEITHER)) for name in names),
                *(
                    number(row["metrics"][name])
                    if name in row["metrics"]
                    else NEITHER
                    for name in metrics
                ),
                str(row["count"]),
                status,
            ]


def _short(value):
    return f"{value:.5g}"


def _mean(settings, rows):
    """Returns the row of the mean of several."""
    done = [row for row in rows if row["status"] == DONE]
    metrics = {}
    for name in dict.fromkeys(n for row in done for n in row["metrics"]):
        values = [r["metrics"][name] for r in done if name in r["metrics"]]
        mean = math.fsum(values) / len(values)
        metrics[name] = mean
        if len(values) > 1:
            square = math.fsum((v - mean) ** 2 for v in values)
            metrics[f"{name}/stderr"] = math.sqrt(
                square / (len(values) - 1) / len(values)
            )
    return {
        "settings": settings,
        "metrics": metrics,
        "count": len(done),
        "status": DONE if done else FAILED,
        "error": None if done else rows[0]["error"],
        "folder": None,
    }
