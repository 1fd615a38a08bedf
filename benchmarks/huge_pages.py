"""Steps with huge pages of memory and without.

The models of the benchmark of fine-tuning train in processes that start with
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1` and in processes that start without, in
turn. A figure is the median over processes of the median step after the first
epoch. Linux with glibc 2.35, where transparent huge pages are in the mode
`madvise`.

    python benchmarks/huge_pages.py
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys

import figures
import ours_sft  # sets the backend
import workloads

from keras_posttrain.training import huge_pages

# Workload, and whether adapters are trained.
CASES = {
    "w1, all weights": ("w1", False),
    "w1, LoRA": ("w1", True),
    "w2, all weights": ("w2", False),
}
NAMES = {"4 KiB": False, "2 MiB": True}


def train(case, passes):
    """Trains, and returns the figures of this process."""
    name, lora = CASES[case]
    _, clock = ours_sft.train(
        workloads.WORKLOADS[name],
        workloads.sft_rows(name),
        passes,
        lora=lora,
        packing=name == "w1",
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_s": statistics.median(clock.pass_s) / clock.steps,
        "loss": clock.first["loss"],
        "system_s": used.ru_stime,
        "faults": used.ru_minflt,
        "peak_mib": used.ru_maxrss / 1024,
    }


def median(runs, case, pages, figure):
    found = [
        r[figure] for r in runs if (r["case"], r["pages"]) == (case, pages)
    ]
    return statistics.median(found)


def table(runs):
    """Returns the medians as Markdown."""
    lines = [
        "| work | pages | s/step | time | page faults | system s | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        before = median(runs, case, "4 KiB", "step_s")
        for pages in NAMES:
            seconds, faults, system, peak = (
                median(runs, case, pages, figure)
                for figure in ("step_s", "faults", "system_s", "peak_mib")
            )
            lines.append(
                f"| {case} | {pages} | {seconds:.3f} | {seconds / before:.2f}x"
                f" | {faults:,.0f} | {system:.1f} | {peak:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = figures.parser(__doc__, repeats=3)
    parser.add_argument("--passes", type=int, default=3)
    # What one process does.
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(train(arguments.case, arguments.passes)))
        return
    if not huge_pages.is_missing():
        parser.error("Here huge pages are given to all processes, or to none.")
    runs = []
    for _ in range(arguments.repeats):
        for case in CASES:
            for pages, wanted in NAMES.items():
                more = {huge_pages.VARIABLE: huge_pages.setting()}
                done = subprocess.run(
                    [sys.executable, __file__, "--case", case,
                     "--passes", str(arguments.passes)],
                    env=os.environ | (more if wanted else {}),
                    stdout=subprocess.PIPE,
                    check=True,
                )  # fmt: skip
                run = json.loads(done.stdout.splitlines()[-1])
                runs.append({"case": case, "pages": pages, **run})
                print(runs[-1], file=sys.stderr, flush=True)
    for case in CASES:
        losses = {r["loss"] for r in runs if r["case"] == case}
        if len(losses) > 1:
            raise ValueError(f"Losses differ: {case}, {losses}")
    figures.write(arguments.out, "huge_pages", runs, table(runs))


if __name__ == "__main__":
    main()
