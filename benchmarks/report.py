"""Arguments and output of all scripts."""

import argparse
import json
import os
import platform
import resource
import statistics
import time
from importlib import metadata

import flops
import workloads

MARK = "RESULT "
_TICK = os.sysconf("SC_CLK_TCK")
_import_gb = None


def _cpu_seconds():
    """Returns wall time and the CPU times of machine and process."""
    with open("/proc/stat") as f:
        fields = [int(v) for v in f.readline().split()[1:8]]
    idle, iowait = fields[3:5]
    t = os.times()
    own = t.user + t.system + t.children_user + t.children_system
    return time.time(), (sum(fields) - idle - iowait) / _TICK, own


_START = _cpu_seconds()


def other_cpus():
    """Returns the mean CPUs that other processes used since the import."""
    wall, machine, own = (
        b - a for a, b in zip(_START, _cpu_seconds(), strict=True)
    )
    return max((machine - own) / wall, 0.0)


def peak_gb():
    """Returns the peak memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def imports_done():
    """Records the memory of the imported libraries."""
    global _import_gb
    _import_gb = peak_gb()


def arguments(packing=True):
    """Parses the arguments of a training script, after the imports.

    Args:
        packing: bool, whether the library can pack rows.

    Returns:
        The parsed arguments, with `rows` of `workloads.sft_rows`, the number
        `tokens` in them, the `operations` of a pass, and `shape`, the
        `Workload`.
    """
    imports_done()
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--workload", choices=list(workloads.WORKLOADS), default="w1"
    )
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--quantize", choices=("int8", "int4", "nf4"))
    parser.add_argument("--rows", type=int, help="of the workload, per pass")
    parser.add_argument("--passes", type=int, default=2)
    if packing:
        parser.add_argument("--packing", action="store_true")
    args = parser.parse_args()
    args.shape = workloads.WORKLOADS[args.workload]
    args.rows = workloads.sft_rows(args.workload, args.rows)
    args.tokens = sum(len(ids) for ids, _ in args.rows)
    rank = workloads.LORA_RANK if args.lora else None
    args.operations = flops.sft(args.shape.model, args.rows, rank)
    return args


def pair_arguments(*flags):
    """Parses the arguments of a preference script, after the imports.

    Args:
        flags: names of boolean options.

    Returns:
        The parsed arguments, with `work`, the `PairWork`, its `pairs`, the
        number `tokens` in them, where a prompt counts once per completion,
        and the `operations` of a pass.
    """
    imports_done()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, help="of the workload, per pass")
    parser.add_argument("--passes", type=int, default=2)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    args.work = workloads.PREFERENCES
    args.pairs = args.work.pairs(args.pairs)
    args.tokens = sum(2 * len(p) + len(c) + len(r) for p, c, r in args.pairs)
    args.operations = flops.dpo(
        args.work.model, args.pairs, workloads.LORA_RANK
    )
    return args


def distill_arguments():
    """Parses the arguments of a distillation script, after the imports.

    Returns:
        The parsed arguments, with `work`, the `DistillWork`, its `rows`, the
        number `tokens` in them, and the `operations` of a pass.
    """
    imports_done()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, help="of the workload, per pass")
    parser.add_argument("--passes", type=int, default=2)
    args = parser.parse_args()
    args.work = workloads.DISTILLATION
    args.rows = args.work.rows(args.rows)
    args.tokens = sum(map(len, args.rows))
    args.operations = flops.distill(
        args.work.student, args.work.teacher, args.rows
    )
    return args


def emit(args, packages, *, first_loss, first_step_s, pass_s, steps, **extra):
    """Prints the figures of a training run as one line of JSON.

    Args:
        args: the result of one of the functions above.
        packages: names of installed packages whose versions matter.
        first_loss: float, the first step's loss.
        first_step_s: float, seconds from the call that trains to the end of
            its first step, including compilation.
        pass_s: list of floats, seconds of each pass over all rows after the
            warm-up.
        steps: int, optimizer steps per pass.
        extra: further figures.
    """
    seconds = statistics.median(pass_s)
    result(
        packages,
        tokens_per_s=args.tokens / seconds,
        step_s=seconds / steps,
        first_step_s=first_step_s,
        first_loss=float(first_loss),
        pass_s=pass_s,
        steps=steps,
        tokens=args.tokens,
        operations_per_token=args.operations / args.tokens,
        **extra,
    )


def result(packages, **figures):
    """Prints the line that a driver reads: `figures` and the machine's."""
    machine = {
        "peak_gb": peak_gb(),
        "import_gb": _import_gb,
        "other_cpus": other_cpus(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
    }
    print(MARK + json.dumps({**machine, **figures}), flush=True)
