"""What the time of a training step on a CPU is spent on, by part of the model.

Steps of the benchmark of fine-tuning are traced (`kpt.callbacks.Trace`), and
the time of each operation of the compiled step counts for the part of the
model that it belongs to. Products of matrices are apart from the rest, with
the least time that they take: that of `flops.py`'s operations at the rate of
the fastest product. Traced steps may be slower: seconds are their shares of
the steps before them.

    python benchmarks/step_parts.py
"""

import argparse
import collections
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import figures
import flops
import harness
import workloads

# Workload, and whether adapters are trained.
CASES = {
    "w1, all weights": ("w1", False),
    "w1, LoRA": ("w1", True),
    "w2, all weights": ("w2", False),
    "w3, LoRA": ("w3", True),
}
# Steps before the first one that counts, those that are timed, and as many
# that are traced.
WARM_UP, STEPS = 3, 6
REST, NOTHING = "optimizer and others", "no operation"
PARTS = (
    *(f"{x}: {kind}" for x in flops.PARTS for kind in ("products", "rest")),
    REST,
)
# An instruction of a compiled program, and the operation it comes from.
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
ORIGIN = re.compile(r'op_name="([^"]*)"')
# Projections and rotations count for the layers.
ATTENTION = re.compile(
    r"/self_attention/"
    r"(?!(?:query|key|value|attention_output|\w*rotary_embedding)/)"
)


def part_of(instruction):
    """Returns which of `PARTS` an instruction belongs to.

    `instruction` is its text behind its name.
    """
    found = ORIGIN.search(instruction)
    origin = found[1] if found else ""
    if "(head)" in origin:
        part = "head"
    elif "decoder_layer" in origin:
        part = "attention" if ATTENTION.search(origin) else "layers"
    else:
        return REST
    is_product = origin.endswith("dot_general") or " dot(" in instruction
    return f"{part}: {'products' if is_product else 'rest'}"


def instructions(folder):
    """Returns the part of each instruction of the largest program."""
    texts = pathlib.Path(folder).glob("*cpu_after_optimizations.txt")
    largest = max(texts, key=lambda path: path.stat().st_size)
    found = map(INSTRUCTION.match, largest.read_text().splitlines())
    return {x[1]: part_of(x[2]) for x in found if x}


def shares(threads, parts):
    """Returns the share of the time of each part.

    Where several threads compute, each of their parts gets an equal share.
    The threads that help with an operation are not in a trace.

    Args:
        threads: list of lists of `(start, end, name)`, the events of each
            thread. An event may be inside another one.
        parts: dict from names of instructions to parts.
    """
    changes = []
    for thread, events in enumerate(threads):
        for start, end, name in events:
            if name in parts and start < end:
                # Ends before starts; around before inside.
                changes.append((start, 1, start - end, thread, name))
                changes.append((end, 0, 0, thread, name))
    changes.sort()
    now, spent = [[] for _ in threads], collections.Counter()
    begin = before = changes[0][0]
    for time_, is_start, _, thread, name in changes:
        active = [names[-1] for names in now if names]
        for x in active:
            spent[parts[x]] += (time_ - before) / len(active)
        before = time_
        if is_start:
            now[thread].append(name)
        else:
            now[thread].remove(name)
    return {part: x / (before - begin) for part, x in spent.items()}


def threads_of(folder):
    """Returns the events of each thread of the trace in `folder`."""
    # Only the process that trains needs it.
    import jax

    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(os.fspath(path))
    return [
        [(x.start_ns, x.end_ns, x.name) for x in line.events]
        for plane in profile.planes
        if plane.name == "/host:CPU"
        for line in plane.lines
    ]


def train(case, programs):
    """Trains, and returns the seconds of a step and the shares of its parts.

    `programs` is the folder to which XLA writes the compiled programs.
    """
    # The process that starts this one needs none of them.
    import keras
    import ours_sft

    import keras_posttrain as kpt

    timed = WARM_UP + STEPS

    class Steps(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.ends, self.in_epoch = [], 0

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # waits for the step
            self.ends.append(time.perf_counter())
            self.in_epoch = max(self.in_epoch, batch + 1)
            self.model.stop_training = len(self.ends) == timed + STEPS

    name, lora = CASES[case]
    shape, rows = workloads.WORKLOADS[name], workloads.sft_rows(name)
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trace = kpt.callbacks.Trace(folder, (timed + 1, timed + STEPS))
        ours_sft.train(
            shape,
            rows,
            timed + STEPS,
            lora=lora,
            packing=name == "w1",
            callbacks=[trace, steps],
        )
        threads = threads_of(folder)
    found = shares(threads, instructions(programs))
    rank = workloads.LORA_RANK if lora else None
    least = flops.sft_parts(shape.model, rows, rank)
    times = [b - a for a, b in zip(steps.ends, steps.ends[1:])]
    return {
        "case": case,
        "cores": len(os.sched_getaffinity(0)),
        "step_s": statistics.median(times[WARM_UP - 1 : timed - 1]),
        "traced_s": statistics.median(times[timed:]),
        "shares": {part: found.get(part, 0) for part in PARTS},
        "least": {k: x / steps.in_epoch for k, x in least.items()},
    }


def medians(runs, operations_per_s):
    """Returns `(part, share, seconds, least seconds)` of each part.

    Args:
        runs: list of what `train` returned, of one case.
        operations_per_s: float, the rate of the fastest product.
    """
    step = statistics.median(r["step_s"] for r in runs)
    rows = []
    for part in PARTS:
        share = statistics.median(r["shares"][part] for r in runs)
        name, _, kind = part.partition(": ")
        least = runs[0]["least"][name] if kind == "products" else 0
        rows.append((part, share, share * step, least / operations_per_s))
    share = 1 - sum(row[1] for row in rows)
    return [*rows, (NOTHING, share, share * step, 0)]


def table(runs, limits):
    """Returns the medians as Markdown."""
    rate = max(x["operations_per_s"] for x in limits)
    lines = [
        f"Fastest product: {rate / 1e9:.0f} GFLOP/s. {runs[0]['cores']} CPUs."
        f" Processes of each work: {len(limits)}.",
    ]
    for case in CASES:
        own = [r for r in runs if r["case"] == case]
        found = medians(own, rate)
        step, least = (sum(row[i] for row in found) for i in (2, 3))
        traced = statistics.median(r["traced_s"] for r in own)
        lines += [
            "",
            f"## {case}",
            "",
            f"A step takes {step:.2f} s, {traced:.2f} s traced, and at the"
            f" fastest product {least:.2f} s: {least / step:.0%}.",
            "",
            "| part | of the time | s | least s |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {part} | {share:.0%} | {seconds:.2f}"
            f" | {f'{at_least:.2f}' if at_least else ''} |"
            for part, share, seconds, at_least in found
        ]
    return "\n".join(lines) + "\n"


def execute(*command, **environ):
    """Runs a process of this Python, and returns the figures it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={
            **os.environ,
            # A profiler of a TPU's library would slow steps on a CPU.
            "JAX_PLATFORMS": "cpu",
            "GLIBC_TUNABLES": harness.TUNABLES,
            **environ,
        },
        cwd=harness.HERE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1].removeprefix(harness.MARK))


def main():
    parser = figures.parser(__doc__, repeats=3)
    # What one process does.
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--programs", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(train(arguments.case, arguments.programs)))
        return
    runs, limits = [], []
    for _ in range(arguments.repeats):
        limits.append(execute("limits.py"))
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
                runs.append(
                    execute(
                        __file__,
                        "--case",
                        case,
                        "--programs",
                        folder,
                        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {dump}",
                        JAX_ENABLE_COMPILATION_CACHE="false",
                    )  # fmt: skip
                )
            print(runs[-1], file=sys.stderr, flush=True)
    found = {"limits": limits, "runs": runs}
    figures.write(arguments.out, "step_parts", found, table(runs, limits))


if __name__ == "__main__":
    main()
