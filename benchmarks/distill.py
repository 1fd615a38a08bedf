"""Distillation, compared with other libraries.

    python benchmarks/distill.py

This creates an environment for each library, runs each script `--repeats`
times alone on the machine, and writes the medians to `results/distill.md` and
`results/distill.json`. It fails if a script fails or if libraries do not do
the same work. Uses the standard library only.
"""

import sys

import distill_summary
import harness
from distill_summary import Run

# The environment, and the script.
SCRIPTS = {
    "ours": ("ours", "ours_distill.py"),
    "trl": ("trl", "trl_distill.py"),
    "tunix": ("tunix", "tunix_distill.py"),
}


def all_runs(rows=None):
    for peer in SCRIPTS:
        yield Run(peer, rows)


def main():
    parser = harness.parser(__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, help="a pass, fewer to try")
    options = parser.parse_args()
    benchmark = harness.Benchmark(
        name="distill",
        scripts=SCRIPTS,
        all_runs=lambda: all_runs(options.rows),
        line=distill_summary.line,
        markdown=distill_summary.markdown,
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
