"""Medians, ratios, checks and tables of the rollout runs."""

import dataclasses
import math

import summary

NAMES = {
    "ours": "keras_posttrain",
    "vllm": "vLLM",
    "hf": "transformers",
    "tunix": "Tunix",
    "keras_hub": "KerasHub",
}
CASES = {
    "a": "16 prompts x 8 samples x exactly 128 tokens",
    "b": "16 prompts x 8 samples, a stop set, at most 256 tokens",
}
KEYS = (
    "tokens_per_s",
    "prefill_s",
    "decode_tokens_per_s",
    "first_call_s",
    "warm_s",
    "ready_s",
    "peak_gb",
    "mean_logp",
    "operations_per_token",
    "bytes_per_token",
)
GRID_KEYS = ("step_ms", "tokens_per_s", "prefill_tokens_per_s", "peak_gb")
# Leading greedy tokens that must be equal. After them two tokens may be so
# close that rounding decides.
GREEDY_TOKENS = 8
GREEDY_LOGP = 1e-4
# The mean log-prob of 16,384 sampled tokens has a standard error of 0.0025. A
# library that samples from the top 50 only is off by more than 4.
MEAN_LOGP = 0.02


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with its arguments."""

    peer: str
    case: str
    threads: int | None = None  # vLLM's OpenMP threads, and how it binds them
    bind: str = ""
    # vLLM's compiled mode; ours with all programs, as in a long run.
    compiled: bool = False

    @property
    def setting(self):
        if self.threads is None:
            return "in a long run" if self.compiled else ""
        s = "" if self.threads == 1 else "s"
        mode = ", compiled" if self.compiled else ""
        return f"{self.threads} thread{s}, {self.bind}{mode}"

    @property
    def label(self):
        named = NAMES[self.peer]
        return f"{named} ({self.setting})" if self.setting else named

    @property
    def name(self):
        mode = "compiled" if self.compiled else ""
        parts = [self.case, self.peer, self.threads, self.bind, mode]
        return "-".join(str(p) for p in parts if p)

    @property
    def flags(self):
        mode = ["--compiled"] if self.compiled else []
        return ["--case", self.case, *mode]

    @property
    def environ(self):
        if self.threads is None:
            return {}
        return {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_OMP_THREADS_BIND": self.bind,
        }


@dataclasses.dataclass(frozen=True)
class Cell:
    """Our engine with a number of slots and a context length."""

    slots: int
    context: int
    peer = "ours"
    environ = {}

    @property
    def name(self):
        return f"grid-{self.slots}-slots-{self.context}"

    @property
    def flags(self):
        return ["--slots", str(self.slots), "--context", str(self.context)]


def line(figures):
    """Returns the text that is printed when a process ends."""
    return (
        f"{figures['tokens_per_s']:.0f} new tokens/s, "
        f"first call {figures['first_call_s']:.1f} s, "
        f"{figures['peak_gb']:.2f} GiB, "
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


def agreement(figures, reference):
    """Compares greedy tokens and their log-probs.

    Returns:
        `(tokens, gap)`: the fewest leading tokens in common over the prompts,
        and the largest difference of log-probs over them, or None if one
        has none.
    """
    tokens, gaps = [], []
    for i, (mine, theirs) in enumerate(
        zip(figures["greedy"], reference["greedy"], strict=True)
    ):
        pairs = enumerate(zip(mine, theirs, strict=True))
        same = next((t for t, (a, b) in pairs if a != b), len(mine))
        tokens.append(same)
        logps = figures["greedy_logps"][i], reference["greedy_logps"][i]
        if None not in logps:
            pairs = zip(logps[0][:same], logps[1][:same], strict=True)
            gaps += [abs(a - b) for a, b in pairs]
    if any(math.isnan(gap) for gap in gaps):
        return min(tokens), math.nan  # `max` would ignore it
    return min(tokens), max(gaps, default=None)


def reference_of(results):
    """Returns the process to compare with, one that has log-probs."""
    found = good(results)
    for run, figures in found:
        if run.peer == "hf":
            return run, figures
    return found[0] if found else (None, None)


def disagreements(results):
    """Yields a line for each library with another sampling distribution.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    other, reference = reference_of(results)
    for run, figures in good(results):
        tokens, gap = agreement(figures, reference)
        if tokens < GREEDY_TOKENS:
            yield (
                f"{run.name}: only the first {tokens} greedy tokens are those "
                f"of {other.name}; {GREEDY_TOKENS} must be."
            )
        if gap is not None and not gap <= GREEDY_LOGP:
            yield (
                f"{run.name}: log-probs of greedy tokens differ by {gap:.2g} "
                f"from those of {other.name}, more than {GREEDY_LOGP}."
            )
        means = figures.get("mean_logp"), reference.get("mean_logp")
        if None not in means and not abs(means[0] - means[1]) <= MEAN_LOGP:
            yield (
                f"{run.name}: the mean log-prob of sampled tokens is "
                f"{means[0]:.3f}, that of {other.name} {means[1]:.3f}."
            )


# --- Tables ------------------------------------------------------------------


def best(rows, peer, case):
    """Returns `(run, row)` of a library's fastest setting, or None."""
    found = [
        (run, row)
        for run, row in rows.items()
        if (run.peer, run.case) == (peer, case)
    ]
    return max(found, key=lambda pair: pair[1]["tokens_per_s"], default=None)


def ratios(rows):
    """Yields `(text, number)`: our tokens/s over each library's fastest."""
    for case in CASES:
        ours = best(rows, "ours", case)
        for peer in NAMES:
            theirs = best(rows, peer, case)
            if peer != "ours" and ours and theirs:
                way = f" {ours[0].setting}".rstrip()
                yield (
                    f"{case}: new tokens/s{way} over {theirs[0].label}",
                    ours[1]["tokens_per_s"] / theirs[1]["tokens_per_s"],
                )


def cells(run, row, ours, results, limits):
    repeats = [r for r in results[run] if "error" not in r]
    _, reference = reference_of(results)
    same = [agreement(r, reference) for r in repeats]
    gaps = [gap for _, gap in same if gap is not None]
    counts = [n for r in repeats for n in r["new_tokens"]]
    ratio = ours[1]["tokens_per_s"] / row["tokens_per_s"] if ours else None
    return [
        run.label,
        f"{row['tokens_per_s']:.0f}",
        summary.span(row),
        f"{ratio:.2f}x" if ratio else "",
        summary.reached(row, limits),
        summary.number(row["prefill_s"]),
        summary.number(row["decode_tokens_per_s"], 0),
        summary.number(row["ready_s"], 1),
        summary.number(row["first_call_s"], 1),
        summary.number(row["warm_s"], 1),
        summary.number(row["peak_gb"]),
        f"{sum(counts) / len(counts):.0f}",
        summary.number(row["mean_logp"], 3),
        f"{min(tokens for tokens, _ in same)}",
        f"{max(gaps):.1g}" if gaps else "",
        summary.other(row),
    ]


def markdown(results, options):
    rows = {run: summary.medians(r, KEYS) for run, r in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    out = summary.head(
        "Rollouts, side by side",
        results,
        options,
        "Tokens are new ones, up to and with a sample's stop token. `ours` is "
        "our fastest tokens/s over that of the row. `of limit` is the share "
        "of the tokens/s at which the least arithmetic of the work, or the "
        "least that it reads (`flops.py`), takes all of the machine's.",
    )
    columns = ["library", "tokens/s", "slowest to fastest", "ours"]
    columns += ["of limit"]
    columns += ["prefill s", "decode tokens/s", "ready s", "first call s"]
    columns += ["warm-up s", "peak GiB", "new tokens", "mean log-prob"]
    columns += ["greedy equal", "log-prob gap", "other"]
    for case, what in CASES.items():
        mine = {run: row for run, row in rows.items() if run.case == case}
        if not mine:
            continue
        ours = best(rows, "ours", case)
        lines = [
            cells(run, row, ours, results, options.limits)
            for run, row in sorted(
                mine.items(), key=lambda item: -item[1]["tokens_per_s"]
            )
        ]
        most = summary.limit_of(mine.values(), options.limits)
        lines = summary.limit_row(columns, "tokens/s", most) + lines
        out += [f"## {case}: {what}", "", *summary.table(columns, lines), ""]
    out += ["## Ratios", ""]
    out += [f"- {what}: {ratio:.2f}" for what, ratio in ratios(rows)]
    problems = summary.errors(results) + list(disagreements(results))
    return summary.text(out, problems), problems


def grid_markdown(results, options):
    """Returns the tables of `Cell`s, with a row per number of slots."""
    rows = {run: summary.medians(r, GRID_KEYS) for run, r in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    out = summary.head(
        "How the cost of a rollout grows",
        results,
        options,
        "So many slots decode at once, each near the end of its context.",
    )
    slots = sorted({run.slots for run in rows})
    contexts = sorted({run.context for run in rows})
    for title, key, digits in (
        ("Milliseconds a step of all slots", "step_ms", 1),
        ("New tokens/s", "tokens_per_s", 0),
        ("Prompt tokens/s", "prefill_tokens_per_s", 0),
        ("Peak GiB", "peak_gb", 2),
    ):
        lines = [
            [str(n)]
            + [
                summary.number(rows.get(Cell(n, c), {}).get(key), digits)
                for c in contexts
            ]
            for n in slots
        ]
        columns = ["slots", *(f"context {c}" for c in contexts)]
        out += [f"## {title}", "", *summary.table(columns, lines), ""]
    busy = [run.name for run, row in rows.items() if summary.busy(row)]
    out += [f"Others were at work during {', '.join(busy)}."] if busy else []
    problems = summary.errors(results)
    return summary.text(out, problems), problems
