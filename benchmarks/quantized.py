"""Adapters on bases in eight and four bits, compared with other libraries.

    python benchmarks/quantized.py

Every library trains the same adapters on the same rows, on floats and on each
kind of code that it has: TRL by bitsandbytes, Tunix by Qwix. The medians are
written to `results/quantized.md` and `results/quantized.json`. It fails if a
script fails or if the first losses on floats differ between libraries.
`quantized_loss.py` measures what the rounding costs. Uses the standard library
only.
"""

import sys

import harness
import sft_summary
import summary
from sft_summary import NAMES, Run

SCRIPTS = {
    "ours": ("ours", "ours_sft.py"),
    "trl": ("trl", "trl_sft.py"),
    "tunix": ("tunix", "tunix_sft.py"),
}
# What each library has on a CPU.
KINDS = {
    "ours": (None, "int8", "int4", "nf4"),
    "trl": (None, "int8", "nf4"),
    "tunix": (None, "int8", "int4", "nf4"),
}
KEYS = ("tokens_per_s", "step_s", "first_loss", "weights_gb", "peak_gb")


def all_runs(rows=None):
    """Yields a run for each library and kind."""
    for peer, kinds in KINDS.items():
        for kind in kinds:
            yield Run(peer, "w3", lora=True, rows=rows, quantize=kind)


def markdown(results, options):
    rows = {run: summary.medians(r, KEYS) for run, r in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    floats = {run.peer: row for run, row in rows.items() if not run.quantize}
    out = summary.head(
        "Adapters on codes, side by side",
        results,
        options,
        "Over floats: of the same library. Weights: those in memory while "
        "training, without the optimizer's.",
    )
    columns = ["base", "library", "tokens/s", "slowest to fastest"]
    columns += ["over floats", "weights, GiB", "peak GiB", "first loss"]
    cells = []
    for run, row in sorted(rows.items(), key=lambda x: str(x[0].quantize)):
        plain = floats.get(run.peer, {}).get("tokens_per_s")
        cells.append(
            [
                run.quantize or "floats",
                NAMES[run.peer],
                f"{row['tokens_per_s']:.0f}",
                summary.span(row),
                f"{row['tokens_per_s'] / plain:.2f}x" if plain else "",
                f"{row['weights_gb']:.3f}",
                f"{row['peak_gb']:.2f}",
                f"{row['first_loss']:.5f}",
            ]
        )
    out += summary.table(columns, cells)
    # Each library rounds in its own way.
    exact = {run: r for run, r in results.items() if not run.quantize}
    problems = summary.errors(results)
    problems += sft_summary.disagreements(exact)
    return summary.text(out, problems), problems


def main():
    parser = harness.parser(__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, help="rows a pass, fewer to try")
    options = parser.parse_args()
    benchmark = harness.Benchmark(
        name="quantized",
        scripts=SCRIPTS,
        all_runs=lambda: all_runs(options.rows),
        line=sft_summary.line,
        markdown=markdown,
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
