"""Supervised fine-tuning, compared with other libraries.

    python benchmarks/sft.py

This creates an environment for each library, runs each script `--repeats`
times alone on the machine, and writes the medians to `results/sft.md` and
`results/sft.json`. It fails if a script fails or if the first losses on the
same rows differ between libraries. Uses the standard library only.
"""

import functools
import sys

import harness
import sft_summary
from sft_summary import Run

# The environment, and the script.
SCRIPTS = {
    "ours": ("ours", "ours_sft.py"),
    "keras_hub": ("keras_hub", "keras_hub_sft.py"),
    "trl": ("trl", "trl_sft.py"),
    "tunix": ("tunix", "tunix_sft.py"),
}


def all_runs(rows=None):
    """Yields the packed runs first, which are the most compared."""
    run = functools.partial(Run, rows=rows)
    for lora in (False, True):
        for peer in ("ours", "tunix", "trl"):
            yield run(peer, "w1", lora, packing=True)
        for peer in ("ours", "tunix", "trl", "keras_hub"):
            yield run(peer, "w1", lora)
    # All rows have the full length, so there is nothing to pack.
    for peer in ("ours", "tunix", "trl", "keras_hub"):
        yield run(peer, "w2")


def main():
    parser = harness.parser(__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, help="rows a pass, fewer to try")
    options = parser.parse_args()
    benchmark = harness.Benchmark(
        name="sft",
        scripts=SCRIPTS,
        all_runs=lambda: all_runs(options.rows),
        line=sft_summary.line,
        markdown=sft_summary.markdown,
    )
    return harness.drive(benchmark, options)


if __name__ == "__main__":
    sys.exit(main())
