"""Supervised fine-tuning beside other libraries, in one run.

    python benchmarks/sft.py

makes an environment for each library, runs each script in turn with nothing
beside it, `--repeats` times, and writes the medians to `results/sft.md` and
`results/sft.json`. It fails if a script does, or if the first losses of the
same rows differ between libraries. Standard library only.
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

import summary
from summary import BUSY, NAMES, Run

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
CONSTRAINTS = str(ROOT / "constraints.txt")
MARK = "RESULT "

# What pip installs, and the script. Versions that are not named here are
# those of constraints.txt, or for Tunix what it asks for itself.
PEERS = {
    "ours": ("ours_sft.py", ["-c", CONSTRAINTS, "-e", str(ROOT)]),
    "keras_hub": (
        "keras_hub_sft.py",
        ["-c", CONSTRAINTS, "keras", "keras-hub", "jax"],
    ),
    "trl": (
        "trl_sft.py",
        ["-c", CONSTRAINTS, "torch", "trl==1.16.0", "transformers", "peft"],
    ),
    "tunix": (
        "tunix_sft.py",
        [
            "google-tunix==0.1.7",
            "qwix==0.1.8",
            "flax==0.12.8",
            "optax==0.2.8",
            "jax==0.10.2",
        ],
    ),
}


def all_runs():
    """The packed rows first: they are the ones compared most."""
    for lora in (False, True):
        for peer in ("ours", "tunix", "trl"):
            yield Run(peer, "w1", lora, packing=True)
        for peer in ("ours", "tunix", "trl", "keras_hub"):
            yield Run(peer, "w1", lora)
    # Rows that are all as long as they may be: nothing to pack.
    for peer in ("ours", "tunix", "trl", "keras_hub"):
        yield Run(peer, "w2")


# --- Environments ------------------------------------------------------------


def python_of(peer, envs):
    """The Python of a library's environment, made first where it is missing.

    Ours is the one that runs this file, where it can import the package.
    """
    if peer == "ours" and importlib.util.find_spec("keras_hub"):
        return sys.executable
    wanted = PEERS[peer][1]
    stamp = envs / peer / "installed.txt"
    python = envs / peer / "bin" / "python"
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return str(python)
    print(f"Making the environment of {NAMES[peer]} ...", flush=True)
    subprocess.run(
        [sys.executable, "-m", "venv", str(envs / peer)], check=True
    )
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", *wanted], check=True
    )
    stamp.write_text("\n".join(wanted))
    return str(python)


# --- Running -----------------------------------------------------------------


def busy_cpus(seconds=3.0):
    """How many CPUs are busy now, on average over `seconds`."""

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


def execute(run, python, options):
    """The figures of one process, or `{"error": …}`."""
    command = [python, "-W", "ignore", str(HERE / PEERS[run.peer][0])]
    command += run.flags + ["--passes", str(options.passes)]
    if options.rows:
        command += ["--rows", str(options.rows)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HF_HUB_OFFLINE": "1",
        # The time to the first step is that of a program never compiled.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": str(ROOT) if run.peer == "ours" else "",
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


def commit():
    """Which of our versions this is, as git says it."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def save(results, options):
    """Writes both files; returns what failed and the text."""
    text, problems = summary.markdown(results, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sft.md").write_text(text, encoding="utf-8")
    raw = {
        "commit": options.commit,
        "runs": [
            {"name": run.name, **dataclasses.asdict(run), "repeats": repeats}
            for run, repeats in results.items()
        ],
    }
    (options.out / "sft.json").write_text(json.dumps(raw, indent=1) + "\n")
    return problems, text


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rows", type=int, help="rows a pass, fewer to try")
    parser.add_argument("--only", default="", help="a regex of run names")
    parser.add_argument("--list", action="store_true", help="print the runs")
    parser.add_argument(
        "--setup", action="store_true", help="make environments, run nothing"
    )
    parser.add_argument("--envs", type=pathlib.Path, default=HERE / ".envs")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds")
    parser.add_argument("--quiet-wait", type=int, default=120, help="seconds")
    return parser.parse_args()


def main():
    options = parse()
    runs = [r for r in all_runs() if re.search(options.only, r.name)]
    if options.list or not runs:
        print("\n".join(r.name for r in runs) or "No run has such a name.")
        return 0 if runs else 2
    options.envs.mkdir(parents=True, exist_ok=True)
    peers = dict.fromkeys(run.peer for run in runs)
    pythons = {peer: python_of(peer, options.envs) for peer in peers}
    if options.setup:
        return 0
    options.commit = commit()
    results = {run: [] for run in runs}
    problems, text = [], ""
    # Repeats are taken in turn, so that a slow spell hits all alike.
    for repeat in range(options.repeats):
        for run in runs:
            wait_until_quiet(options.quiet_wait)
            start = time.monotonic()
            figures = execute(run, pythons[run.peer], options)
            results[run].append(figures)
            took = time.monotonic() - start
            said = figures.get("error") or (
                f"{figures['tokens_per_s']:.0f} tokens/s, "
                f"{figures['peak_gb']:.2f} GiB, "
                f"first loss {figures['first_loss']:.5f}, "
                f"other CPUs {figures['other_cpus']:.2f}"
            )
            head = f"[{repeat + 1}/{options.repeats}] {run.name}"
            print(f"{head}, {took:.0f} s: {said}", flush=True)
            problems, text = save(results, options)
    print("\n" + text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
