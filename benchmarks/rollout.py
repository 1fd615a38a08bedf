"""Rollouts, compared with other libraries.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --grid

This creates an environment for each library, runs each script `--repeats`
times alone on the machine, and writes the medians to `results/rollout.md` and
`results/rollout.json`. It fails if a script fails or if libraries do not
sample from the same distribution. With `--grid` it runs only our engine, over
numbers of slots and context lengths, and writes `results/rollout_grid.md` and
`.json`. Uses the standard library only.
"""

import os
import sys

import harness
import rollout_summary
from rollout_summary import CASES, Cell, Run

# The environment, and the script.
SCRIPTS = {
    "ours": ("ours", "ours_rollout.py"),
    "vllm": ("vllm", "vllm_rollout.py"),
    "hf": ("trl", "hf_rollout.py"),
    "tunix": ("tunix", "tunix_rollout.py"),
    "keras_hub": ("keras_hub", "keras_hub_rollout.py"),
}
GRID_SLOTS = (1, 8, 32, 128)
GRID_CONTEXTS = (256, 1024, 4096)


def all_runs():
    """Returns ours and vLLM, in every setting that may be its fastest."""
    cpus = len(os.sched_getaffinity(0))
    settings = [
        (cpus, "auto", False),
        (cpus, "nobind", False),
        (1, "nobind", False),
        (cpus, "auto", True),
        (cpus, "nobind", True),
    ]
    for case in CASES:
        yield Run("ours", case)
        yield Run("ours", case, compiled=True)
        for setting in dict.fromkeys(settings):
            yield Run("vllm", case, *setting)
        for peer in ("hf", "tunix", "keras_hub"):
            yield Run(peer, case)


def all_cells():
    for slots in GRID_SLOTS:
        for context in GRID_CONTEXTS:
            yield Cell(slots, context)


def main():
    parser = harness.parser(__doc__.split("\n")[0])
    parser.add_argument(
        "--grid", action="store_true", help="our cost by slots and context"
    )
    parser.set_defaults(passes=3)
    options = parser.parse_args()
    grid = options.grid
    benchmark = harness.Benchmark(
        name="rollout_grid" if grid else "rollout",
        scripts=SCRIPTS,
        all_runs=all_cells if grid else all_runs,
        line=rollout_summary.line,
        markdown=(
            rollout_summary.grid_markdown if grid else rollout_summary.markdown
        ),
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
