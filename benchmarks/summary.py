"""Parts of the tables of all benchmarks."""

import os
import platform
import statistics
import time

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
