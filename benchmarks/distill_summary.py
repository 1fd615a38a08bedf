"""Medians, ratios, checks and a table of the distillation runs."""

import dataclasses
import math

import summary

NAMES = {
    "ours": "keras_posttrain",
    "trl": "TRL GKD",
    "tunix": "Tunix logit strategy",
}
KEYS = ("tokens_per_s", "step_s", "first_step_s", "peak_gb")
KEYS += ("operations_per_token",)
# Figures of the first step that must agree, with relative tolerances.
CHECKS = {"first_loss": 1e-4, "grad_norm": 1e-3}


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with its arguments."""

    peer: str
    rows: int | None = None  # per pass; None for the workload's default

    @property
    def name(self):
        return self.peer

    @property
    def flags(self):
        return ["--rows", str(self.rows)] if self.rows else []

    @property
    def environ(self):
        return {}


def line(figures):
    """Returns the text that is printed when a process ends."""
    return (
        f"{figures['tokens_per_s']:.0f} tokens/s, "
        f"{figures['peak_gb']:.2f} GiB, "
        f"first loss {figures['first_loss']:.6f}, "
        f"other CPUs {figures['other_cpus']:.2f}"
    )


def disagreements(results):
    """Yields a line for each library that does not do the same work.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    for key, allowed in CHECKS.items():
        values = [
            (figures[key], run.name)
            for run, repeats in results.items()
            for figures in repeats
            if "error" not in figures and figures.get(key) is not None
        ]
        if not values:
            continue
        # NaN sorts last, and the comparison with it fails.
        values.sort(key=lambda pair: (math.isnan(pair[0]), pair))
        (low, first), (high, last) = values[0], values[-1]
        if not high - low <= allowed * abs(high):
            yield (
                f"`{key}` differs by more than {allowed:g} of it: "
                f"{first} {low:.6g}, {last} {high:.6g}."
            )


def ratios(rows):
    """Yields `(text, number)` pairs.

    Args:
        rows: dict from the library to the result of `summary.medians`.
    """
    if "ours" not in rows:
        return
    for key, what in (
        ("tokens_per_s", "tokens/s"),
        ("peak_gb", "peak memory"),
    ):
        for peer, row in rows.items():
            if peer != "ours":
                yield (
                    f"{what} over {NAMES[peer]}",
                    rows["ours"][key] / row[key],
                )


def markdown(results, options):
    keys = (*KEYS, *CHECKS)
    rows = {run.peer: summary.medians(r, keys) for run, r in results.items()}
    rows = {peer: row for peer, row in rows.items() if row}
    out = summary.head(
        "Distillation, side by side",
        results,
        options,
        "Tokens are those of the rows, read by student and teacher. `ours` "
        "is our tokens/s over that of the row. `of limit` is the share of the "
        "tokens/s at which the least arithmetic of the work (`flops.py`) "
        "takes all of the machine's.",
    )
    columns = ["library", "tokens/s", "slowest to fastest", "ours"]
    columns += ["of limit", "s/step"]
    columns += ["first step s", "peak GiB", "first loss", "gradient norm"]
    columns += ["other"]
    ours = rows.get("ours")
    cells = [
        [
            NAMES[peer],
            f"{row['tokens_per_s']:.0f}",
            summary.span(row),
            f"{ours['tokens_per_s'] / row['tokens_per_s']:.2f}x"
            if ours
            else "",
            summary.reached(row, options.limits),
            f"{row['step_s']:.2f}",
            f"{row['first_step_s']:.1f}",
            f"{row['peak_gb']:.2f}",
            f"{row['first_loss']:.6f}",
            summary.number(row["grad_norm"], 5),
            summary.other(row),
        ]
        for peer, row in sorted(
            rows.items(), key=lambda item: -item[1]["tokens_per_s"]
        )
    ]
    most = summary.limit_of(rows.values(), options.limits)
    cells = summary.limit_row(columns, "tokens/s", most) + cells
    out += [*summary.table(columns, cells), "", "## Ratios", ""]
    out += [f"- {what}: {ratio:.2f}" for what, ratio in ratios(rows)]
    problems = summary.errors(results) + list(disagreements(results))
    return summary.text(out, problems), problems
