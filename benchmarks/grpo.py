"""Reinforcement learning, compared with other libraries.

    python benchmarks/grpo.py

This creates an environment for each library, runs each script `--repeats`
times alone on the machine, and writes the medians to `results/grpo.md` and
`results/grpo.json`. It fails if a script fails or if libraries do not do the
same work. Uses the standard library only.
"""

import sys

import grpo_summary
import harness
from grpo_summary import Run

# The environment, and the script.
SCRIPTS = {
    "ours": ("ours", "ours_grpo.py"),
    "trl": ("trl", "trl_grpo.py"),
    "tunix": ("tunix", "tunix_grpo.py"),
}


def all_runs():
    """Yields all libraries, then ours with long prompts."""
    yield Run("ours", "w5", shared=True)
    for peer in SCRIPTS:
        yield Run(peer, "w5")
    for shared in (True, False):
        yield Run("ours", "w5-long", shared)


def main():
    parser = harness.parser(__doc__.split("\n")[0])
    parser.set_defaults(passes=5)
    options = parser.parse_args()
    benchmark = harness.Benchmark(
        name="grpo",
        scripts=SCRIPTS,
        all_runs=all_runs,
        line=grpo_summary.line,
        markdown=grpo_summary.markdown,
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
