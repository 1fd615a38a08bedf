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
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
CONSTRAINTS = str(ROOT / "constraints.txt")
MARK = "RESULT "
LOSS_TOLERANCE = 1e-3
BUSY = 0.1  # CPUs of other processes above which a run is marked

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
NAMES = {
    "ours": "keras_posttrain",
    "keras_hub": "KerasHub fit",
    "trl": "TRL",
    "tunix": "Tunix",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One script with its arguments; the same for every repeat."""

    peer: str
    workload: str
    lora: bool = False
    packing: bool = False

    @property
    def group(self):
        """What ratios are taken within: the workload and what is trained."""
        return f"{self.workload} {'lora' if self.lora else 'full'}"

    @property
    def layout(self):
        return "packed" if self.packing else "padded"

    @property
    def name(self):
        return f"{self.group} {self.peer} {self.layout}".replace(" ", "-")

    @property
    def flags(self):
        flags = ["--workload", self.workload]
        flags += ["--lora"] if self.lora else []
        return flags + (["--packing"] if self.packing else [])


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


# --- Reading the results -----------------------------------------------------


def medians(repeats):
    """One row from the repeats of a run; None where all failed."""
    good = [r for r in repeats if "error" not in r]
    if not good:
        return None
    keys = ("tokens_per_s", "step_s", "first_step_s", "peak_gb", "first_loss")
    row = {k: statistics.median(r[k] for r in good) for k in keys}
    row["slowest"] = min(r["tokens_per_s"] for r in good)
    row["fastest"] = max(r["tokens_per_s"] for r in good)
    row["other_cpus"] = max(r["other_cpus"] for r in good)
    row["repeats"] = len(good)
    return row


def disagreements(results):
    """Lines on first losses that differ between libraries on equal rows.

    Args:
        results: dict from `Run` to the list of its repeats' figures.
    """
    batches = {}
    for run, repeats in results.items():
        # LoRA begins as the base model does: full and LoRA must agree too.
        for r in repeats:
            if "error" not in r:
                batches.setdefault((run.workload, run.layout), []).append(
                    (r["first_loss"], run.name)
                )
    for (workload, layout), losses in batches.items():
        # NaN is sorted to the end, where the comparison fails.
        losses.sort(key=lambda pair: (math.isnan(pair[0]), pair))
        low, high = losses[0], losses[-1]
        if not high[0] - low[0] <= LOSS_TOLERANCE:
            yield (
                f"First losses of {workload}, {layout}, differ by more than "
                f"{LOSS_TOLERANCE}: {low[1]} {low[0]:.6f}, "
                f"{high[1]} {high[0]:.6f}."
            )


def ratios(rows):
    """`(what, number)` pairs: our best row against the others'.

    Args:
        rows: dict from `Run` to what `medians` returns.
    """

    def best(key, peers, group):
        found = [
            row[key]
            for run, row in rows.items()
            if run.peer in peers and run.group == group
        ]
        pick = max if key == "tokens_per_s" else min
        return pick(found, default=None)

    others = tuple(p for p in PEERS if p != "ours")
    for group in ("w1 full", "w1 lora", "w2 full"):
        for name, peers in (
            ("the fastest other", others),
            ("KerasHub fit", ("keras_hub",)),
        ):
            pair = [best("tokens_per_s", p, group) for p in (["ours"], peers)]
            if None not in pair:
                yield f"{group}: tokens/s over {name}", pair[0] / pair[1]
    pair = [
        best("tokens_per_s", ["ours"], f"w1 {k}") for k in ("lora", "full")
    ]
    if None not in pair:
        yield "w1: our LoRA over our full", pair[0] / pair[1]
    pair = [best("peak_gb", [p], "w2 full") for p in ("ours", "trl")]
    if None not in pair:
        yield "w2 full: our peak memory over TRL's", pair[0] / pair[1]


def markdown(results, options):
    rows = {run: medians(repeats) for run, repeats in results.items()}
    rows = {run: row for run, row in rows.items() if row}
    out = [
        "# Supervised fine-tuning, side by side",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, "
        f"{os.cpu_count()} CPUs ({platform.machine()}), float32, medians of "
        f"{options.repeats} processes with {options.passes} passes each. "
        "Tokens are real ones, without padding. `ours` is our best tokens/s "
        "of the group over that of the row. `other` is the most CPUs that "
        f"other processes used; a run above {BUSY} is marked with *.",
        "",
    ]
    for group in dict.fromkeys(run.group for run in rows):
        mine = {run: row for run, row in rows.items() if run.group == group}
        ours = [r["tokens_per_s"] for k, r in mine.items() if k.peer == "ours"]
        out += [
            f"## {group}",
            "",
            "| library | rows | tokens/s | slowest to fastest | ours | s/step "
            "| first step s | peak GiB | first loss | other |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for run, row in sorted(
            mine.items(), key=lambda item: -item[1]["tokens_per_s"]
        ):
            ratio = max(ours) / row["tokens_per_s"] if ours else None
            cells = [
                NAMES[run.peer],
                run.layout,
                f"{row['tokens_per_s']:.0f}",
                f"{row['slowest']:.0f} to {row['fastest']:.0f}",
                f"{ratio:.2f}x" if ratio else "",
                f"{row['step_s']:.2f}",
                f"{row['first_step_s']:.1f}",
                f"{row['peak_gb']:.2f}",
                f"{row['first_loss']:.5f}",
                f"{row['other_cpus']:.2f}"
                + ("*" if row["other_cpus"] > BUSY else ""),
            ]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    out += ["## Ratios", ""]
    out += [f"- {what}: {number:.2f}" for what, number in ratios(rows)]
    problems = [
        f"{run.name}: {r['error'].splitlines()[-1]}"
        for run, repeats in results.items()
        for r in repeats
        if "error" in r
    ]
    problems += disagreements(results)
    if problems:
        out += ["", "## Failed", "", *(f"- {p}" for p in problems)]
    return "\n".join(out) + "\n", problems


def save(results, options):
    """Writes both files; returns what failed and the text."""
    text, problems = markdown(results, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sft.md").write_text(text, encoding="utf-8")
    raw = [
        {"name": run.name, **dataclasses.asdict(run), "repeats": repeats}
        for run, repeats in results.items()
    ]
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
