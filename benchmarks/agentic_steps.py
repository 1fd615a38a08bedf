"""Arguments and figures that the scripts of conversations share."""

import argparse
import dataclasses
import statistics

import report
import workloads


def arguments():
    """Parses the arguments of a script, after the imports."""
    report.imports_done()
    parser = argparse.ArgumentParser()
    parser.add_argument("--tool-seconds", type=float, default=1.0)
    parser.add_argument("--lock-step", action="store_true")
    parser.add_argument("--passes", type=int, default=2)
    return parser.parse_args()


def emit(packages, seconds, tokens):
    """Prints the figures of a run as one line of JSON.

    Args:
        packages: names of installed packages whose versions matter.
        seconds: list of floats, of each rollout; the first one compiles.
        tokens: number, sampled in a rollout.
    """
    median = statistics.median(seconds[1:])
    report.result(
        packages,
        rollout_s=median,
        first_rollout_s=seconds[0],
        rollouts_s=seconds,
        tokens=tokens,
        tokens_per_s=tokens / median,
        work=dataclasses.asdict(workloads.AGENTIC),
    )
