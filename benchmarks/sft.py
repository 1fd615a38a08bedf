"""Supervised fine-tuning beside other libraries, in one run.

    python benchmarks/sft.py

makes an environment for each library, runs each script in turn with nothing
beside it, `--repeats` times, and writes the medians to `results/sft.md` and
`results/sft.json`. It fails if a script does, or if the first losses of the
same rows differ between libraries. Standard library only.
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
    """The packed rows first: they are the ones compared most."""
    run = functools.partial(Run, rows=rows)
    for lora in (False, True):
        for peer in ("ours", "tunix", "trl"):
            yield run(peer, "w1", lora, packing=True)
        for peer in ("ours", "tunix", "trl", "keras_hub"):
            yield run(peer, "w1", lora)
    # Rows that are all as long as they may be: nothing to pack.
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
