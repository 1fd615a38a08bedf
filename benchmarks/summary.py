"""From the figures of the runs to medians, ratios, checks and a table."""

import dataclasses
import math
import os
import platform
import statistics
import time

LOSS_TOLERANCE = 1e-3
BUSY = 0.1  # CPUs of other processes above which a run is marked
NAMES = {
    "ours": "keras_posttrain",
    "keras_hub": "KerasHub fit",
    "trl": "TRL",
    "tunix": "Tunix",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One script with its arguments; the same for every repeat."""

    peer: str
    workload: str
    lora: bool = False
    packing: bool = False

    @property
    def group(self):
        """What ratios are taken within: the workload and what is trained."""
        return f"{self.workload} {'lora' if self.lora else 'full'}"

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
        return flags + (["--packing"] if self.packing else [])


def medians(repeats):
    """One row from the repeats of a run; None where all failed."""
    good = [r for r in repeats if "error" not in r]
    if not good:
        return None
    keys = ("tokens_per_s", "step_s", "first_step_s", "peak_gb", "first_loss")
    row = {k: statistics.median(r[k] for r in good) for k in keys}
    row["slowest"] = min(r["tokens_per_s"] for r in good)
    row["fastest"] = max(r["tokens_per_s"] for r in good)
    row["other_cpus"] = max(r["other_cpus"] for r in good)
    row["repeats"] = len(good)
    return row


def disagreements(results):
    """Lines on first losses that differ between libraries on equal rows.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    batches = {}
    for run, repeats in results.items():
        # LoRA begins as the base model does: full and LoRA must agree too.
        for r in repeats:
            if "error" not in r:
                batches.setdefault((run.workload, run.layout), []).append(
                    (r["first_loss"], run.name)
                )
    for (workload, layout), losses in batches.items():
        # NaN is sorted to the end, where the comparison fails.
        losses.sort(key=lambda pair: (math.isnan(pair[0]), pair))
        low, high = losses[0], losses[-1]
        if not high[0] - low[0] <= LOSS_TOLERANCE:
            yield (
                f"First losses of {workload}, {layout}, differ by more than "
                f"{LOSS_TOLERANCE}: {low[1]} {low[0]:.6f}, "
                f"{high[1]} {high[0]:.6f}."
            )


def ratios(rows):
    """`(what, number)` pairs: our best row against the others'.

    Args:
        rows: dict from `Run` to what `medians` returns.
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


def counted(results):
    """How many times the libraries ran: `3`, or `2 to 3` if cut short."""
    counts = sorted(len(repeats) for repeats in results.values() if repeats)
    if not counts or counts[0] == counts[-1]:
        return f"{counts[-1] if counts else 0}"
    return f"{counts[0]} to {counts[-1]}"


def markdown(results, options):
    rows = {run: medians(repeats) for run, repeats in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    out = [
        "# Supervised fine-tuning, side by side",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, "
        f"commit {options.commit}, "
        f"{os.cpu_count()} CPUs ({platform.machine()}), float32, medians of "
        f"{counted(results)} processes of {options.passes} passes each. "
        "Tokens are real ones, without padding. `ours` is our best tokens/s "
        "of the group over that of the row. `other` is the most CPUs that "
        f"other processes used; a run above {BUSY} is marked with *.",
        "",
    ]
    for group in dict.fromkeys(run.group for run in rows):
        mine = {run: row for run, row in rows.items() if run.group == group}
        ours = [r["tokens_per_s"] for k, r in mine.items() if k.peer == "ours"]
        out += [
            f"## {group}",
            "",
            "| library | rows | tokens/s | slowest to fastest | ours | s/step "
            "| first step s | peak GiB | first loss | other |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for run, row in sorted(
            mine.items(), key=lambda item: -item[1]["tokens_per_s"]
        ):
            ratio = max(ours) / row["tokens_per_s"] if ours else None
            cells = [
                NAMES[run.peer],
                run.layout,
                f"{row['tokens_per_s']:.0f}",
                f"{row['slowest']:.0f} to {row['fastest']:.0f}",
                f"{ratio:.2f}x" if ratio else "",
                f"{row['step_s']:.2f}",
                f"{row['first_step_s']:.1f}",
                f"{row['peak_gb']:.2f}",
                f"{row['first_loss']:.5f}",
                f"{row['other_cpus']:.2f}"
                + ("*" if row["other_cpus"] > BUSY else ""),
            ]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    out += ["## Ratios", ""]
    out += [f"- {what}: {number:.2f}" for what, number in ratios(rows)]
    problems = [
        f"{run.name}: {r['error'].splitlines()[-1]}"
        for run, repeats in results.items()
        for r in repeats
        if "error" in r
    ]
    problems += disagreements(results)
    if problems:
        out += ["", "## Failed", "", *(f"- {p}" for p in problems)]
    return "\n".join(out) + "\n", problems
