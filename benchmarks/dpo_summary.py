"""Medians, ratios, checks and a table of the DPO runs."""

import dataclasses
import math

import summary

NAMES = {"ours": "keras_posttrain", "trl": "TRL", "tunix": "Tunix"}
KEYS = ("tokens_per_s", "step_s", "first_step_s", "peak_gb")
KEYS += ("operations_per_token",)
CHECKS = ("first_loss", "chosen_logp", "rejected_logp", "grad_norm")
FIRST_LOSS = 1e-4  # from log 2: the first policy is the reference
# Relative, of the first step's log-probs of some 150 tokens.
LOGPS = 1e-5
# Adapters of libraries start from other numbers of one distribution, ...
GRAD_NORM = 0.25
# ... ours from the same numbers, in any layout.
OUR_GRAD_NORM = 1e-4


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with its arguments."""

    peer: str
    packing: bool = False
    shared: bool = False  # a prompt stored once for its two completions
    pairs: int | None = None  # per pass; None for the workload's default

    @property
    def layout(self):
        prompts = "shared" if self.shared else "separate"
        return prompts + (", packed" if self.packing else "")

    @property
    def label(self):
        return f"{NAMES[self.peer]}, prompts {self.layout}"

    @property
    def name(self):
        packed = "-packed" if self.packing else ""
        return self.peer + packed + ("-shared" if self.shared else "")

    @property
    def flags(self):
        flags = ["--packing"] if self.packing else []
        flags += ["--share-prefix"] if self.shared else []
        return flags + (["--pairs", str(self.pairs)] if self.pairs else [])

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


# --- The same work -----------------------------------------------------------


def disagreements(results):
    """Yields a line for each library that does not do the same work.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    found = [
        (run, figures)
        for run, repeats in results.items()
        for figures in repeats
        if "error" not in figures
    ]
    for run, figures in found:
        if not abs(figures["first_loss"] - math.log(2)) <= FIRST_LOSS:
            yield (
                f"{run.name}: the first loss is "
                f"{figures['first_loss']:.6g}, not log 2."
            )
    for key, allowed, peers in (
        ("chosen_logp", LOGPS, NAMES),
        ("rejected_logp", LOGPS, NAMES),
        ("grad_norm", GRAD_NORM, NAMES),
        ("grad_norm", OUR_GRAD_NORM, ("ours",)),
    ):
        values = [
            (figures[key], run.name)
            for run, figures in found
            if run.peer in peers and figures.get(key) is not None
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


# --- Tables ------------------------------------------------------------------


def ratios(rows):
    """Yields `(text, number)` pairs.

    Args:
        rows: dict from `Run` to the result of `summary.medians`.
    """

    def best(key, *peers):
        found = [row[key] for run, row in rows.items() if run.peer in peers]
        pick = max if key == "tokens_per_s" else min
        return pick(found, default=None)

    for name, peers in (
        ("the faster of TRL and Tunix", ("trl", "tunix")),
        ("TRL", ("trl",)),
        ("Tunix", ("tunix",)),
    ):
        pair = best("tokens_per_s", "ours"), best("tokens_per_s", *peers)
        if None not in pair:
            yield f"tokens/s over {name}", pair[0] / pair[1]
    peaks = [row["peak_gb"] for run, row in rows.items() if run.peer == "ours"]
    for peer in ("trl", "tunix"):
        theirs = best("peak_gb", peer)
        if peaks and theirs:
            yield (
                f"the highest peak memory of ours over {NAMES[peer]}'s",
                max(peaks) / theirs,
            )
    by_layout = {run.layout: run for run in rows if run.peer == "ours"}
    for end in ("", ", packed"):
        runs = [by_layout.get(x + end) for x in ("shared", "separate")]
        if None in runs:
            continue
        for key, what in (
            ("tokens_per_s", "tokens/s"),
            ("peak_gb", "peak memory"),
        ):
            yield (
                f"{what}, prompts shared over separate{end}",
                rows[runs[0]][key] / rows[runs[1]][key],
            )


def markdown(results, options):
    rows = {
        run: summary.medians(r, KEYS + CHECKS) for run, r in results.items()
    }
    rows = {run: row for run, row in rows.items() if row}
    out = summary.head(
        "DPO, side by side",
        results,
        options,
        "Tokens are real ones, the prompt counted with each completion, "
        "also where it is computed once. `ours` is our best tokens/s over "
        "that of the row. `of limit` is the share of the tokens/s at which "
        "the least arithmetic of the work (`flops.py`) takes all of the "
        "machine's.",
    )
    columns = ["library", "tokens/s", "slowest to fastest", "ours"]
    columns += ["of limit", "s/step"]
    columns += ["first step s", "peak GiB", "first loss", "chosen log-prob"]
    columns += ["rejected log-prob", "gradient norm", "other"]
    ours = [r["tokens_per_s"] for run, r in rows.items() if run.peer == "ours"]
    cells = [
        [
            run.label,
            f"{row['tokens_per_s']:.0f}",
            summary.span(row),
            f"{max(ours) / row['tokens_per_s']:.2f}x" if ours else "",
            summary.reached(row, options.limits),
            f"{row['step_s']:.2f}",
            f"{row['first_step_s']:.1f}",
            f"{row['peak_gb']:.2f}",
            f"{row['first_loss']:.5f}",
            f"{row['chosen_logp']:.2f}",
            f"{row['rejected_logp']:.2f}",
            summary.number(row["grad_norm"], 3),
            summary.other(row),
        ]
        for run, row in sorted(
            rows.items(), key=lambda item: -item[1]["tokens_per_s"]
        )
    ]
    most = summary.limit_of(rows.values(), options.limits)
    cells = summary.limit_row(columns, "tokens/s", most) + cells
    out += [*summary.table(columns, cells), "", "## Ratios", ""]
    out += [f"- {what}: {ratio:.2f}" for what, ratio in ratios(rows)]
    problems = summary.errors(results) + list(disagreements(results))
    return summary.text(out, problems), problems
