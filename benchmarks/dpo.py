"""Preference tuning, compared with other libraries.

    python benchmarks/dpo.py

This creates an environment for each library, runs each script `--repeats`
times alone on the machine, and writes the medians to `results/dpo.md` and
`results/dpo.json`. It fails if a script fails or if libraries do not do the
same work. Uses the standard library only.
"""

import sys

import dpo_summary
import harness
from dpo_summary import Run

# The environment, and the script.
SCRIPTS = {
    "ours": ("ours", "ours_dpo.py"),
    "trl": ("trl", "trl_dpo.py"),
    "tunix": ("tunix", "tunix_dpo.py"),
}


def all_runs(pairs=None):
    """Yields all libraries with a row per completion, then our layouts."""
    yield Run("ours", shared=True, pairs=pairs)
    for peer in SCRIPTS:
        yield Run(peer, pairs=pairs)
    for shared in (True, False):
        yield Run("ours", packing=True, shared=shared, pairs=pairs)


def main():
    parser = harness.parser(__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, help="a pass, fewer to try")
    options = parser.parse_args()
    benchmark = harness.Benchmark(
        name="dpo",
        scripts=SCRIPTS,
        all_runs=lambda: all_runs(options.pairs),
        line=dpo_summary.line,
        markdown=dpo_summary.markdown,
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
