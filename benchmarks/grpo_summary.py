"""Medians, ratios, checks and tables of the GRPO runs."""

import dataclasses
import math

import summary

NAMES = {"ours": "keras_posttrain", "trl": "TRL", "tunix": "Tunix"}
CASES = {
    "w5": "8 prompts of 16 to 96 tokens x 8 samples x 64 new tokens",
    "w5-long": "4 prompts of 512 tokens x 8 samples x 64 new tokens",
}
# The parts of a step; the remaining time is `other`.
PARTS = ("rollout", "reward", "train", "sync")
SECONDS = tuple(f"{part}_s" for part in ("step", *PARTS, "other", "compile"))
CHECKS = ("trained_tokens", "first_loss", "grad_norm", "mean_logp", "reward")
LEAST = ("rollout_operations", "rollout_bytes", "update_operations")
KEYS = ("tokens_per_s", "peak_gb", *SECONDS, *CHECKS, *LEAST)
# The advantages of a group sum to 0, and so does the first loss, except for
# tokens that a library's mask leaves out.
FIRST_LOSS = 1e-3
TRAINED = 2e-3  # relative, of the tokens
# Over 20,000 sampled tokens the standard errors are 0.002 and 0.004.
MEAN_LOGP, REWARD = 0.02, 0.02
# Other samples and other first adapters, from the same distributions.
GRAD_NORM = 0.25
# The same samples and the same first adapter.
GRADIENT = 1e-4


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with its arguments."""

    peer: str
    case: str
    shared: bool = False  # a prompt stored once for its completions

    @property
    def layout(self):
        return "shared" if self.shared else "separate"

    @property
    def label(self):
        return f"{NAMES[self.peer]}, prompts {self.layout}"

    @property
    def name(self):
        shared = "-shared" if self.shared else ""
        return f"{self.case}-{self.peer}{shared}"

    @property
    def flags(self):
        shared = ["--share-prefix"] if self.shared else []
        return ["--case", self.case, *shared]

    @property
    def environ(self):
        return {}


def line(figures):
    """Returns the text that is printed when a process ends."""
    return (
        f"{figures['step_s']:.2f} s a step "
        f"(rollout {figures['rollout_s']:.2f}, train "
        f"{figures['train_s']:.2f}), {figures['peak_gb']:.2f} GiB, "
        f"other CPUs {figures['other_cpus']:.2f}"
    )


# --- The same work -----------------------------------------------------------


def good(results):
    """Yields `(run, figures)` of every process that succeeded."""
    return [
        (run, figures)
        for run, repeats in results.items()
        for figures in repeats
        if "error" not in figures
    ]


def disagreements(results):
    """Yields a line for each library that does not do the same work.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    found = good(results)
    for run, figures in found:
        if not abs(figures["first_loss"]) <= FIRST_LOSS:
            yield (
                f"{run.name}: the first loss is {figures['first_loss']:.2g}, "
                "though advantages add up to 0."
            )
    for case in CASES:
        for key, allowed, relative in (
            ("trained_tokens", TRAINED, True),
            ("mean_logp", MEAN_LOGP, False),
            ("reward", REWARD, False),
            ("grad_norm", GRAD_NORM, True),
        ):
            values = [
                (figures[key], run.name)
                for run, figures in found
                if run.case == case and figures.get(key) is not None
            ]
            yield from _apart(key, case, values, allowed, relative)
        yield from _gradients(case, found)


def _apart(key, case, values, allowed, relative):
    # NaN sorts last, and the comparison with it fails.
    values.sort(key=lambda pair: (math.isnan(pair[0]), pair))
    if not values:
        return
    (low, first), (high, last) = values[0], values[-1]
    if relative:
        allowed *= abs(high)
    if not high - low <= allowed:
        yield (
            f"{case}: `{key}` differs by more than {allowed:.2g}: {first} "
            f"{low:.6g}, {last} {high:.6g}."
        )


def _gradients(case, found):
    """Compares our runs' first gradients, which have the same samples."""
    ours = [
        (run.name, figures["first_gradient"])
        for run, figures in found
        if (run.peer, run.case) == ("ours", case)
    ]
    for name, gradient in ours[1:]:
        gap = gradient_gap(ours[0][1], gradient)
        if not gap <= GRADIENT:
            yield (
                f"{case}: the first gradients of {ours[0][0]} and {name} "
                f"differ by {gap:.2g} of their norm, more than {GRADIENT}."
            )


def gradient_gap(a, b):
    """Returns the relative distance of two `(norm, projection)`."""
    gaps = [abs(x - y) / abs(a[0]) for x, y in zip(a, b, strict=True)]
    # `max` would ignore a NaN.
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


# --- Tables ------------------------------------------------------------------


def ratios(rows, results):
    """Yields pairs of texts, a ratio and its value.

    Args:
        rows: dict from `Run` to the result of `summary.medians`.
        results: as in `disagreements`.
    """

    def seconds(peers, case):
        found = [
            row["step_s"]
            for run, row in rows.items()
            if run.peer in peers and run.case == case
        ]
        return min(found, default=None)

    for case in CASES:
        ours = seconds(["ours"], case)
        for name, peers in (
            ("the faster of TRL and Tunix", ("trl", "tunix")),
            ("TRL", ("trl",)),
            ("Tunix", ("tunix",)),
        ):
            theirs = seconds(peers, case)
            if ours and theirs:
                what = f"{case}: steps per second over {name}"
                yield what, f"{theirs / ours:.2f}"
        pair = [rows.get(Run("ours", case, s)) for s in (False, True)]
        if None in pair:
            continue
        for what, key in (("steps", "step_s"), ("trainings", "train_s")):
            yield (
                f"{case}: {what} per second, shared prompts over separate",
                f"{pair[0][key] / pair[1][key]:.2f}",
            )
        yield (
            f"{case}: peak memory, shared prompts over separate",
            f"{pair[1]['peak_gb'] / pair[0]['peak_gb']:.2f}",
        )
        gradients = [
            figures["first_gradient"]
            for run, figures in good(results)
            if (run.peer, run.case) == ("ours", case)
        ]
        gap = max(gradient_gap(gradients[0], g) for g in gradients[1:])
        yield (
            f"{case}: first gradients, shared and separate, differ by this "
            "share of their norm",
            f"{gap:.1g}",
        )


def least_s(row, limits):
    """Returns the seconds of a step at the machine's limits, or `None`."""
    sampled, read, trained = (row[key] for key in LEAST)
    if not limits or not sampled:
        return None
    least = summary.least_seconds(limits, sampled, read)
    return least + summary.least_seconds(limits, trained)


def of_limit(row, limits):
    """Returns the share that this is of a step as text."""
    least = least_s(row, limits)
    return f"{least / row['step_s']:.0%}" if least else ""


def markdown(results, options):
    rows = {run: summary.medians(r, KEYS) for run, r in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    out = summary.head(
        "GRPO, side by side",
        results,
        options,
        "A pass is a step: one rollout, one update. `ours` is our fastest "
        "steps per second over that of the row. `of limit` is the share of "
        "a step that the least work of its rollout and its update "
        "(`flops.py`) takes at the machine's limits.",
    )
    columns = ["library", "s/step", "ours", "of limit", *PARTS, "rest"]
    columns += ["compile s", "peak GiB", "new tokens/s"]
    columns += ["slowest to fastest", "other"]
    checks = ["library", "tokens trained", "first loss", "gradient norm"]
    checks += ["mean log-prob", "reward"]
    for case, what in CASES.items():
        mine = [(run, row) for run, row in rows.items() if run.case == case]
        if not mine:
            continue
        mine.sort(key=lambda pair: pair[1]["step_s"])
        best = min(
            (row["step_s"] for run, row in mine if run.peer == "ours"),
            default=None,
        )
        speed = [
            [
                run.label,
                summary.number(row["step_s"]),
                f"{row['step_s'] / best:.2f}x" if best else "",
                of_limit(row, options.limits),
                *(summary.number(row[f"{p}_s"]) for p in PARTS),
                summary.number(row["other_s"]),
                summary.number(row["compile_s"], 1),
                summary.number(row["peak_gb"]),
                summary.number(row["tokens_per_s"], 0),
                summary.span(row),
                summary.other(row),
            ]
            for run, row in mine
        ]
        work = [
            [
                run.label,
                summary.number(row["trained_tokens"], 1),
                f"{row['first_loss']:.1g}",
                summary.number(row["grad_norm"], 3),
                summary.number(row["mean_logp"], 3),
                summary.number(row["reward"], 3),
            ]
            for run, row in mine
        ]
        least = summary.number(least_s(mine[0][1], options.limits))
        speed = summary.limit_row(columns, "s/step", least) + speed
        out += [f"## {case}: {what}", "", *summary.table(columns, speed), ""]
        out += [*summary.table(checks, work), ""]
    out += ["## Ratios", ""]
    out += [f"- {what}: {text}" for what, text in ratios(rows, results)]
    problems = summary.errors(results) + list(disagreements(results))
    return summary.text(out, problems), problems
