"""Weight transfer from the trainer to vLLM, and GRPO steps with vLLM.

    .venv-vllm/bin/python benchmarks/sync.py        # `make vllm` made it
    .venv-vllm/bin/python benchmarks/sync.py --only 'adapter|grpo' --list

Each run is a separate process. A push is `VLLMRollout.sync_weights` with
changed weights, in the trainer's process or to a server; its bytes and its
time, including the probe, are medians of `--pushes` after the first. The steps
are those of `ours_grpo.py`. Tables are written to `results/sync.md` and
figures to `results/sync.json`; figures of runs that `--only` leaves out are
kept.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).resolve().parent
MARK = "RESULT "
RANK = 16
# Llama models with an untied head; the head size is 64.
SIZES = {
    "14m": {
        "vocabulary_size": 16000,
        "num_layers": 6,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "hidden_dim": 256,
        "intermediate_dim": 1024,
    },
    "114m": {
        "vocabulary_size": 32000,
        "num_layers": 12,
        "num_query_heads": 10,
        "num_key_value_heads": 5,
        "hidden_dim": 640,
        "intermediate_dim": 2560,
    },
    "317m": {
        "vocabulary_size": 32000,
        "num_layers": 16,
        "num_query_heads": 16,
        "num_key_value_heads": 8,
        "hidden_dim": 1024,
        "intermediate_dim": 4096,
    },
}


def all_runs():
    for engine in ("native", "vllm"):
        yield f"grpo/{engine}"
    for size in SIZES:
        for what in ("adapter", "full"):
            for place in ("process", "server"):
                yield f"{size}/{what}/{place}"


def push(name, pushes):
    """Measures the pushes of a run in this process."""
    import keras_posttrain as kpt  # sets the backend

    # isort: split
    import keras
    import keras_hub
    import numpy as np

    size, what, place = name.split("/")
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        **SIZES[size], tie_word_embeddings=False
    )
    task = kpt.SFTTask(
        keras_hub.models.Llama3CausalLM(backbone),
        None,
        lora=kpt.LoRA(rank=RANK) if what == "adapter" else None,
        sequence_length=256,
    )
    engine = kpt.rollout.VLLMRollout(
        python=sys.executable if place == "server" else None
    )
    engine.set_model(task)
    parts = {"_push": [], "_verify": []}
    for part, seconds in parts.items():
        setattr(engine, part, timed(getattr(engine, part), seconds))
    rng, whole, begin = np.random.default_rng(0), [], time.perf_counter()
    try:
        engine.start()
        started = time.perf_counter() - begin
        for _ in range(1 + pushes):
            for variable in task.trainable_variables:
                noise = rng.normal(0, 1e-3, variable.shape)
                variable.assign_add(noise.astype("float32"))
            engine.sync_weights()
            metrics = engine.metrics()
            whole.append(metrics["vllm/sync_seconds"])
    finally:
        engine.stop()
    assert engine.restarts == 0
    return {
        "parameters": backbone.count_params(),
        "trained": sum(
            int(np.prod(v.shape)) for v in task.trainable_variables
        ),
        "bytes": metrics["vllm/sync_bytes"],
        "sync_s": statistics.median(whole[1:]),
        "push_s": statistics.median(parts["_push"][1:]),
        "probe_s": statistics.median(parts["_verify"][1:]),
        "first_sync_s": whole[0],
        "start_s": started,
        "probe_difference": metrics["vllm/probe_difference"],
    }


def timed(function, seconds):
    def wrapper(*args):
        begin = time.perf_counter()
        out = function(*args)
        seconds.append(time.perf_counter() - begin)
        return out

    return wrapper


def execute(name, options):
    """Runs a separate process; returns its figures."""
    command = [__file__, "--run", name, "--pushes", str(options.pushes)]
    if name.startswith("grpo/"):
        engine = name.partition("/")[2]
        command = [str(FOLDER / "ours_grpo.py"), "--engine", engine]
    path = os.pathsep.join([str(FOLDER.parent), os.getenv("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        check=True,
    )
    [line] = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def markdown(records):
    """Returns the tables of the runs' figures."""
    head = (
        "engine | s/step | rollout | reward | train | sync | new tokens/s | "
        "other"
    )
    lines = [f"| {head} |", "|" + "---|" * 8]
    for name, r in records.items():
        if name.startswith("grpo/"):
            parts = ("step", "rollout", "reward", "train", "sync")
            cells = [f"{r[f'{part}_s']:.3f}" for part in parts]
            cells = [name[5:], *cells, f"{r['tokens_per_s']:,.0f}"]
            cells.append(f"{r['other_cpus']:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
    head = (
        "parameters | pushed | where | MB | s | of which the push | the "
        "engine's probe | start, s | other"
    )
    lines += ["", f"| {head} |", "|" + "---|" * 9]
    for name, r in records.items():
        if not name.startswith("grpo/"):
            _, what, place = name.split("/")
            cells = [f"{r['parameters'] / 1e6:,.0f} M", what, place]
            cells.append(f"{r['bytes'] / 1e6:,.1f}")
            for figure in ("sync_s", "push_s", "probe_s"):
                cells.append(f"{r[figure]:.3f}")
            cells.append(f"{r['start_s']:.0f}")
            cells.append(f"{r['busy_cpus']:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{os.cpu_count()} CPUs; other: the CPUs that other processes used "
        "during steps and just before pushes. With other processes running, "
        f"times are an upper bound. float32, LoRA of rank {RANK}.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="regex of runs")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(MARK + json.dumps(push(options.run, options.pushes)))
        return
    names = [n for n in all_runs() if re.search(options.only, n)]
    if options.list:
        print("\n".join(names))
        return
    # The file is in this folder.
    from harness import busy_cpus

    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "sync.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        busy = busy_cpus()
        records[name] = execute(name, options) | {"busy_cpus": busy}
        print(name, json.dumps(records[name])[:300], file=sys.stderr)
        # Earlier figures are kept, in the order of all runs.
        records = {n: records[n] for n in all_runs() if n in records}
        file.write_text(json.dumps(records, indent=1) + "\n")
        (options.out / "sync.md").write_text(markdown(records))
    print(markdown(records))


if __name__ == "__main__":
    main()
