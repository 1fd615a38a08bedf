"""Parts of the tables of all benchmarks."""

import os
import platform
import statistics
import time

# What a token needs, and the rate that `limits.py` measures.
LIMITS = {
    "operations_per_token": "operations_per_s",
    "bytes_per_token": "bytes_per_s",
}
BUSY = 0.1  # CPUs of other processes above which a run is marked


def medians(repeats, keys):
    """Returns the medians over the repeats of a run; None if all failed.

    A figure that the run does not have is None.
    """
    good = [r for r in repeats if "error" not in r]
    if not good:
        return None
    row = {}
    for key in keys:
        values = [r[key] for r in good if r.get(key) is not None]
        row[key] = statistics.median(values) if values else None
    row["slowest"] = min(r["tokens_per_s"] for r in good)
    row["fastest"] = max(r["tokens_per_s"] for r in good)
    row["other_cpus"] = max(r["other_cpus"] for r in good)
    row["repeats"] = len(good)
    return row


def limit(row, limits):
    """Returns the tokens/s at which a limit of the machine is reached.

    Args:
        row: dict with `operations_per_token`, and `bytes_per_token` where
            reading memory may take longer.
        limits: list of the figures of `limits.py`.

    Returns:
        Float, or `None` if one of both is not known.
    """
    needed = [row.get(key) for key in LIMITS]
    seconds = limits and needed[0] and least_seconds(limits, *needed)
    return 1 / seconds if seconds else None


def least_seconds(limits, operations, read=None):
    """Returns the seconds that operations and bytes take at least."""
    rates = (max(x[rate] for x in limits) for rate in LIMITS.values())
    return max(n / rate for n, rate in zip((operations, read or 0), rates))


def reached(row, limits):
    """Returns the share of `limit` as text; empty if it is not known."""
    most = limit(row, limits)
    return f"{row['tokens_per_s'] / most:.0%}" if most else ""


def limit_row(columns, column, text):
    """Returns a row of a table for the limits; none if `text` is empty."""
    cells = dict.fromkeys(columns, "")
    cells |= {"library": "the machine's limits", column: text}
    return [list(cells.values())] if text else []


def limit_of(rows, limits):
    """Returns the highest of the limits of some rows as text."""
    most = [limit(row, limits) for row in rows]
    return number(max(filter(None, most), default=None), 0)


def rates(limits):
    """Returns lines on the limits of the machine."""
    if not limits:
        return []
    operations, read = (
        max(found[rate] for found in limits) / 1e9 for rate in LIMITS.values()
    )
    return [
        f"Limits, the best of {len(limits)} measurements by `limits.py` in "
        f"the same run: {operations:.0f} GFLOP/s by a product of float32 "
        f"matrices, {read:.1f} GB/s read from memory.",
        "",
    ]


def counted(results):
    """Returns the number of repeats as text: `3`, or `2 to 3` if stopped."""
    counts = sorted(len(repeats) for repeats in results.values() if repeats)
    if not counts or counts[0] == counts[-1]:
        return f"{counts[-1] if counts else 0}"
    return f"{counts[0]} to {counts[-1]}"


def head(title, results, options, text):
    """Returns the title and the description of all figures."""
    return [
        f"# {title}",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, "
        f"commit {options.commit}, "
        f"{os.cpu_count()} CPUs ({platform.machine()}), float32, medians of "
        f"{counted(results)} processes of {options.passes} passes each. "
        f"{text} `other` is the most CPUs that "
        f"other processes used; a run above {BUSY} is marked with *.",
        "",
        *rates(options.limits),
    ]


def table(columns, rows):
    """Returns the lines of a Markdown table.

    Args:
        columns: list of str.
        rows: list of lists of str.
    """
    lines = [columns, ["---"] * len(columns), *rows]
    # The separator row has no spaces.
    return [
        "|" + "|".join(f" {c} " if c != "---" else c for c in cells) + "|"
        for cells in lines
    ]


def number(value, digits=2):
    """Formats `value` with a number of decimals; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def busy(row):
    return row["other_cpus"] > BUSY


def other(row):
    return f"{row['other_cpus']:.2f}" + ("*" if busy(row) else "")


def span(row):
    return f"{row['slowest']:.0f} to {row['fastest']:.0f}"


def errors(results):
    """Returns a line for each process that failed."""
    return [
        f"{run.name}: {r['error'].splitlines()[-1]}"
        for run, repeats in results.items()
        for r in repeats
        if "error" in r
    ]


def text(lines, problems):
    """Returns the text of the file, with errors at its end."""
    if problems:
        lines = [*lines, "", "## Failed", "", *(f"- {p}" for p in problems)]
    return "\n".join(lines) + "\n"
