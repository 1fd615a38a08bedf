"""Conversations of several turns with a slow tool, against TRL and Tunix.

    python benchmarks/agentic.py

This creates an environment for each library, runs each script `--repeats`
times alone on the machine, and writes the medians to `results/agentic.md` and
`results/agentic.json`. It fails if a script fails or if the ways sample other
numbers of tokens. Uses the standard library only.

Ours are an episode of `GRPOTask`, and the engine in lock-step: all
conversations sample a turn by `generate`, then all tools run at once, and
everything is computed again each turn.
"""

import sys

import agentic_summary
import harness

# The environment, and the script.
SCRIPTS = {
    "ours": ("ours", "ours_agentic.py"),
    "trl": ("trl", "trl_agentic.py"),
    "tunix": ("tunix", "tunix_agentic.py"),
}


def main():
    options = harness.parser(__doc__.split("\n")[0]).parse_args()
    benchmark = harness.Benchmark(
        name="agentic",
        scripts=SCRIPTS,
        all_runs=agentic_summary.all_runs,
        line=agentic_summary.line,
        markdown=agentic_summary.markdown,
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
