"""Medians, ratios, checks and a table of the fine-tuning runs."""

import dataclasses
import math

import summary

LOSS_TOLERANCE = 1e-3
NAMES = {
    "ours": "keras_posttrain",
    "keras_hub": "KerasHub fit",
    "trl": "TRL",
    "tunix": "Tunix",
}
KEYS = ("tokens_per_s", "step_s", "first_step_s", "peak_gb", "first_loss")
KEYS += ("operations_per_token",)


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with its arguments."""

    peer: str
    workload: str
    lora: bool = False
    packing: bool = False
    rows: int | None = None  # per pass; None for the workload's default
    quantize: str | None = None  # of the base, as of `from_preset`

    @property
    def group(self):
        """Workload and trained weights, within which ratios are taken."""
        weights = "lora" if self.lora else "full"
        return " ".join(filter(None, (self.workload, weights, self.quantize)))

    @property
    def layout(self):
        return "packed" if self.packing else "padded"

    @property
    def name(self):
        return f"{self.group} {self.peer} {self.layout}".replace(" ", "-")

    @property
    def flags(self):
        flags = ["--workload", self.workload]
        flags += ["--lora"] if self.lora else []
        flags += ["--packing"] if self.packing else []
        flags += ["--quantize", self.quantize] if self.quantize else []
        return flags + (["--rows", str(self.rows)] if self.rows else [])

    @property
    def environ(self):
        return {}


def line(figures):
    """Returns the text that is printed when a process ends."""
    return (
        f"{figures['tokens_per_s']:.0f} tokens/s, "
        f"{figures['peak_gb']:.2f} GiB, "
        f"first loss {figures['first_loss']:.5f}, "
        f"other CPUs {figures['other_cpus']:.2f}"
    )


def disagreements(results):
    """Yields a line for each first loss that differs on the same rows.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    batches = {}
    for run, repeats in results.items():
        # LoRA starts as the base model, so full and LoRA must agree too.
        for r in repeats:
            if "error" not in r:
                batches.setdefault((run.workload, run.layout), []).append(
                    (r["first_loss"], run.name)
                )
    for (workload, layout), losses in batches.items():
        # NaN sorts last, and the comparison with it fails.
        losses.sort(key=lambda pair: (math.isnan(pair[0]), pair))
        low, high = losses[0], losses[-1]
        if not high[0] - low[0] <= LOSS_TOLERANCE:
            yield (
                f"First losses of {workload}, {layout}, differ by more than "
                f"{LOSS_TOLERANCE}: {low[1]} {low[0]:.6f}, "
                f"{high[1]} {high[0]:.6f}."
            )


def ratios(rows):
    """Yields `(text, number)` pairs: our best run over the others'.

    Args:
        rows: dict from `Run` to the result of `summary.medians`.
    """

    def best(key, peers, group):
        found = [
            row[key]
            for run, row in rows.items()
            if run.peer in peers and run.group == group
        ]
        pick = max if key == "tokens_per_s" else min
        return pick(found, default=None)

    others = tuple(p for p in NAMES if p != "ours")
    for group in ("w1 full", "w1 lora", "w2 full"):
        for name, peers in (
            ("the fastest other", others),
            ("KerasHub fit", ("keras_hub",)),
        ):
            pair = [best("tokens_per_s", p, group) for p in (["ours"], peers)]
            if None not in pair:
                yield f"{group}: tokens/s over {name}", pair[0] / pair[1]
    pair = [
        best("tokens_per_s", ["ours"], f"w1 {k}") for k in ("lora", "full")
    ]
    if None not in pair:
        yield "w1: our LoRA over our full", pair[0] / pair[1]
    pair = [best("peak_gb", [p], "w2 full") for p in ("ours", "trl")]
    if None not in pair:
        yield "w2 full: our peak memory over TRL's", pair[0] / pair[1]


def markdown(results, options):
    rows = {run: summary.medians(r, KEYS) for run, r in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    out = summary.head(
        "Supervised fine-tuning, side by side",
        results,
        options,
        "Tokens are real ones, without padding. `ours` is our best tokens/s "
        "of the group over that of the row. `of limit` is the share of the "
        "tokens/s at which the least arithmetic of the work (`flops.py`) "
        "takes all of the machine's.",
    )
    columns = ["library", "rows", "tokens/s", "slowest to fastest", "ours"]
    columns += ["of limit"]
    columns += ["s/step", "first step s", "peak GiB", "first loss", "other"]
    for group in dict.fromkeys(run.group for run in rows):
        mine = {run: row for run, row in rows.items() if run.group == group}
        ours = [r["tokens_per_s"] for k, r in mine.items() if k.peer == "ours"]
        cells = [
            [
                NAMES[run.peer],
                run.layout,
                f"{row['tokens_per_s']:.0f}",
                summary.span(row),
                f"{max(ours) / row['tokens_per_s']:.2f}x" if ours else "",
                summary.reached(row, options.limits),
                f"{row['step_s']:.2f}",
                f"{row['first_step_s']:.1f}",
                f"{row['peak_gb']:.2f}",
                f"{row['first_loss']:.5f}",
                summary.other(row),
            ]
            for run, row in sorted(
                mine.items(), key=lambda item: -item[1]["tokens_per_s"]
            )
        ]
        most = summary.limit_of(mine.values(), options.limits)
        cells = summary.limit_row(columns, "tokens/s", most) + cells
        out += [f"## {group}", "", *summary.table(columns, cells), ""]
    out += ["## Ratios", ""]
    out += [f"- {what}: {ratio:.2f}" for what, ratio in ratios(rows)]
    problems = summary.errors(results) + list(disagreements(results))
    return summary.text(out, problems), problems
