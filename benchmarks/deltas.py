"""What `VLLMRollout(push="delta")` sends, and what it costs.

    .venv-vllm/bin/python benchmarks/deltas.py      # `make vllm` made it

The first table has the share of bfloat16 values that change in a step of GRPO
and the bytes of their difference. All weights of a small Llama are trained
with AdamW; they are bfloat16, with float32 masters. The second table has the
CPU seconds in which a difference is made and applied, and those in which all
weights are written. The third has the seconds of a sync with a vLLM
server on this machine. Weights change by noise there. Times are medians of
`--pushes`. Tables are written to `results/deltas.md` and figures to
`results/deltas.json`. Each run is a process of its own.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
MARK = "RESULT "
RATES, STEPS = ("1e-6", "3e-6", "1e-5"), 20
PLACES = {"memory": "/dev/shm", "disk": tempfile.gettempdir()}


def all_runs():
    for rate in RATES:
        yield f"share/{rate}"
    for rate in RATES:
        yield f"parts/{rate}"
    for place in PLACES:
        for push in ("full", "delta"):
            yield f"sync/{place}/{push}"


def make_causal_lm(size):
    import keras
    import keras_hub
    from sync import SIZES

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.Llama3Backbone(
        **SIZES[size], tie_word_embeddings=False, dtype="bfloat16"
    )
    return keras_hub.models.Llama3CausalLM(backbone)


def measure_share(rate):
    """Trains with GRPO; returns figures of each step."""
    import keras_posttrain as kpt  # sets the backend

    # isort: split
    import keras
    import numpy as np

    from keras_posttrain.rollout.vllm import difference
    from keras_posttrain.rollout.vllm.weights import Weights

    causal_lm = make_causal_lm("14m")
    task = kpt.GRPOTask(causal_lm, None, sequence_length=64)
    task.compile(
        optimizer=keras.optimizers.AdamW(float(rate)),
        rewards=[lambda completions: [sum(x) % 7 / 6 for x in completions]],
        num_generations=4,
        max_completion_length=32,
    )
    weights = Weights(causal_lm, None, "bfloat16", merged=False)
    held, steps = dict(weights.arrays()), []

    class Compare(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            nonlocal held
            new = dict(weights.arrays())
            changed = sum(
                np.count_nonzero(
                    difference.bits_of(held[k]) != difference.bits_of(new[k])
                )
                for k in new
            )
            pairs = ((k, held[k], new[k]) for k in new)
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "difference"
                size = difference.write(path, "a", "b", pairs)
            steps.append((changed, size))
            held = new

    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(3, 16000, 16).tolist()}
        for _ in range(4 * STEPS)
    ]
    task.fit(rows, batch_size=4, callbacks=[Compare()], verbose=0)
    values = sum(int(np.prod(s)) for s in weights.shapes().values())
    return {
        "values": values,
        "bytes_of_all": weights.num_bytes,
        "shares": [float(changed / values) for changed, _ in steps],
        "bytes": [size for _, size in steps],
    }


def medians(function, times):
    """Calls a function that returns seconds; returns their medians."""
    found = [function() for _ in range(times)]
    return {
        name: statistics.median(x[name] for x in found) for name in found[0]
    }


def measure_parts(rate, pushes):
    """Returns CPU seconds of writing and reading files, in memory."""
    import keras_posttrain as kpt  # noqa: F401 (sets the backend)

    # isort: split
    from keras_posttrain.rollout.vllm import difference, worker
    from keras_posttrain.rollout.vllm.weights import Weights

    causal_lm = make_causal_lm("114m")
    weights = Weights(causal_lm, None, "bfloat16", merged=False)
    step = noise(causal_lm.trainable_variables, float(rate))
    step()
    old = dict(weights.arrays())
    step()
    new = dict(weights.arrays())
    size = []

    def once():
        with tempfile.TemporaryDirectory(dir=PLACES["memory"]) as folder:
            folder = pathlib.Path(folder)
            clock = [time.process_time()]
            pairs = ((k, old[k], new[k]) for k in new)
            size.append(difference.write(folder / "a", "1", "2", pairs))
            clock.append(time.process_time())
            index = json.loads((folder / "a" / difference.INDEX).read_text())
            flat = {k: v.copy().reshape(-1) for k, v in old.items()}
            flat = {k: v.view("uint8") for k, v in flat.items()}
            clock.append(time.process_time())
            wrong = worker.apply_difference(folder / "a", index, flat)
            clock.append(time.process_time())
            weights.write(folder / "b", new)
            clock.append(time.process_time())
        assert not wrong
        spans = [b - a for a, b in zip(clock, clock[1:])]
        names = ("make_s", None, "apply_s", "write_all_s")
        return {k: v for k, v in zip(names, spans, strict=True) if k}

    return {
        **medians(once, pushes),
        "bytes": size[-1],
        "bytes_of_all": weights.num_bytes,
    }


def noise(variables, rate):
    """Returns a function that changes variables, as AdamW does after a while.

    The variables of bfloat16 have float32 masters.
    """
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    masters = [np.array(v.value, "float32") for v in variables]
    for master in masters:
        # Between the values of bfloat16.
        master *= 1 + 2**-9 * rng.uniform(-1, 1, master.shape)

    def step():
        for variable, master in zip(variables, masters):
            master += rate * rng.normal(0, 0.5, master.shape)
            variable.assign(jnp.asarray(master, "bfloat16"))

    return step


def measure_sync(place, push, pushes):
    """Pushes to a server after each step; returns median seconds."""
    import keras_posttrain as kpt  # sets the backend

    # isort: split
    from sync import timed

    task = kpt.SFTTask(make_causal_lm("114m"), None, sequence_length=256)
    step = noise(task.trainable_variables, float(RATES[0]))
    engine = kpt.rollout.VLLMRollout(
        python=sys.executable, push=push, directory=PLACES[place]
    )
    engine.set_model(task)
    whole, moved, pushed = [], [], []
    engine._push = timed(engine._push, pushed)
    try:
        engine.start()
        for _ in range(1 + pushes):
            step()
            engine.sync_weights()
            whole.append(engine.metrics()["vllm/sync_seconds"])
            moved.append(engine.metrics()["vllm/sync_bytes"])
    finally:
        engine.stop()
    assert engine.restarts == 0
    return {
        "bytes": statistics.median(moved[1:]),
        "sync_s": statistics.median(whole[1:]),
        "push_s": statistics.median(pushed[1:]),
        "first_push_s": pushed[0],
    }


def run(name, pushes):
    kind, *rest = name.split("/")
    if kind == "share":
        return measure_share(*rest)
    if kind == "parts":
        return measure_parts(*rest, pushes)
    return measure_sync(*rest, pushes)


def execute(name, options):
    """Runs a separate process; returns its figures."""
    path = [str(FOLDER.parent), str(FOLDER), os.getenv("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, "--run", name]
        + ["--pushes", str(options.pushes)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        text=True,
        check=True,
    )
    [line] = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
    return json.loads(line.removeprefix(MARK))


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


def markdown(records):
    """Returns the tables of the runs' figures."""
    rows = {"share": [], "parts": [], "sync": []}
    for name, r in records.items():
        kind, *rest = name.split("/")
        if kind == "share":
            # After the first steps, in which AdamW's are larger or smaller.
            share, size = (
                statistics.median(r[x][STEPS // 2 :])
                for x in ("shares", "bytes")
            )
            part = size / r["bytes_of_all"]
            cells = [f"{share:.2%}", f"{part:.2%}", f"{1 / part:.0f}x"]
        elif kind == "parts":
            cells = [f"{r[x] / 1e6:.1f}" for x in ("bytes", "bytes_of_all")]
            names = ("make_s", "apply_s", "write_all_s")
            cells += [f"{r[x]:.2f}" for x in names]
        else:
            cells = [f"{r['bytes'] / 1e6:.1f}"]
            cells += [
                f"{r[x]:.2f}" for x in ("first_push_s", "push_s", "sync_s")
            ]
        rows[kind].append([*rest, *cells, f"{r['busy_cpus']:.2f}"])
    lines = ["GRPO, 14 M parameters, the second half of 20 steps:", ""]
    lines += table(
        ["learning rate", "values that change", "difference / all", "smaller"]
        + ["other"],
        rows["share"],
    )
    lines += ["115 M parameters, CPU seconds, of all threads:", ""]
    lines += table(
        ["learning rate", "difference, MB", "all, MB", "make it", "apply it"]
        + ["write all", "other"],
        rows["parts"],
    )
    lines += [f"A vLLM server, 115 M parameters, steps of {RATES[0]}:", ""]
    lines += table(
        ["files in", "push", "MB", "first push, s", "a push, s", "sync, s"]
        + ["other"],
        rows["sync"],
    )
    lines.append(
        f"{os.cpu_count()} CPUs; other: the CPUs that other processes used "
        "just before. With other processes running, times are an upper bound."
    )
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
        print(MARK + json.dumps(run(options.run, options.pushes)))
        return
    names = [n for n in all_runs() if re.search(options.only, n)]
    if options.list:
        print("\n".join(names))
        return
    # The file is in this folder.
    from harness import busy_cpus

    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "deltas.json"
    records = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        busy = busy_cpus()
        records[name] = execute(name, options) | {"busy_cpus": busy}
        print(name, json.dumps(records[name])[:300], file=sys.stderr)
        # Earlier figures are kept, in the order of all runs.
        records = {n: records[n] for n in all_runs() if n in records}
        file.write_text(json.dumps(records, indent=1) + "\n")
        (options.out / "deltas.md").write_text(markdown(records))
    print(markdown(records))


if __name__ == "__main__":
    main()
