"""Measures what rows cost: until the first step, again, and in memory.

Chats of about 150 tokens in a `.jsonl` file are trained on with a tiny model,
for a few steps. The first start tokenizes the rows, the second one finds them
in the cache. For comparison `datasets.map` renders and encodes the same rows
with transformers in as many processes, without masks of the loss. A last run
reads rows as a stream, for two epochs, and reports the longest wait of a step
for data, and that of the second epoch's first step. The cases of GRPO sample
for the questions alone, and their first step is the first rollout. Each case
is a process of its own. Times count from the call of `fit` or `map`; CPU
seconds are those of all processes.

    python benchmarks/growth.py --rows 1000 10000 100000
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import pathlib
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS = 20
# Windows of a stream have 2,048 rows; this many are read in each epoch.
STREAM_ROWS, STREAM_EPOCHS = 10_000, 2
# Steps after which pauses for the collection of garbage are measured.
WARM = 50
BATCH_SIZE, LENGTH = 8, 256
CASES = (
    "ours", "ours again", "datasets.map", "ours, a stream", "GRPO",
    "GRPO again",
)  # fmt: skip


def words(rng):
    return [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6)))
        for _ in range(120)
    ]


def chat(rng, vocabulary):
    question = rng.choices(vocabulary, k=rng.randint(25, 45))
    answer = rng.choices(vocabulary, k=rng.randint(35, 65))
    return {
        "messages": [
            {"role": "user", "content": " ".join(question)},
            {"role": "assistant", "content": " ".join(answer)},
        ]
    }


def write_rows(path, count, prompts):
    """Writes rows, all different, and prompts; the same ones each time."""
    rng = random.Random(0)
    vocabulary = words(rng)
    with open(path, "w") as file, open(prompts, "w") as other:
        for number in range(count):
            row = chat(rng, vocabulary)
            file.write(json.dumps(row) + "\n")
            prompt = {"prompt": row["messages"][:1], "answer": number}
            other.write(json.dumps(prompt) + "\n")


def memory():
    """Returns the resident memory of this process in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024


def cpu_seconds():
    return sum(os.times()[:4])


def run_ours(preset, path, stream):
    """Trains for a few steps, and returns the figures of the run."""
    # The other library's process needs none of them.
    import keras

    import keras_posttrain as kpt
    from keras_posttrain import _spans

    class Clock(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.ends, self.epochs = [], []

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs.append(len(waits))

        def on_train_batch_end(self, batch, logs=None):
            self.ends.append((time.perf_counter(), cpu_seconds()))
            if not stream and len(self.ends) == STEPS:
                self.model.stop_training = True

    task = kpt.SFTTask.from_preset(preset, sequence_length=LENGTH)
    task.compile(keras.optimizers.AdamW(1e-4))
    # Programs are compiled before.
    few = [json.loads(line) for line, _ in zip(open(path), range(64))]
    task.fit(few, batch_size=BATCH_SIZE, verbose=0)
    rows, epochs = path, 1
    if stream:
        epochs = STREAM_EPOCHS

        def rows():
            lines = itertools.islice(open(path), STREAM_ROWS)
            return map(json.loads, lines)

    clock, waits, pauses = Clock(), [], []

    def pause(phase, info):
        """Records the beginnings and the ends of full collections."""
        # A long run is warm after its first steps.
        if info["generation"] == 2 and len(clock.ends) > WARM:
            pauses.append(time.perf_counter())

    gc.callbacks.append(pause)
    _spans.listen(lambda x: waits.append(x) if x.name == "data" else None)
    begin, cpu = time.perf_counter(), cpu_seconds()
    task.fit(
        rows,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        callbacks=[clock],
        verbose=2,
    )
    waits = [1e3 * (x.end - x.start) for x in waits]
    first, first_cpu = clock.ends[0]
    steps = [b[0] - a[0] for a, b in zip(clock.ends, clock.ends[1:])]
    found = {
        "first step s": first - begin,
        "first step CPU s": first_cpu - cpu,
        "memory MiB": memory(),
        "tokens a row": task.data_report.tokens / task.data_report.kept,
        "median step ms": 1e3 * sorted(steps)[len(steps) // 2],
        # The first batch is waited for before the first step.
        "longest wait ms": max(waits[1:]),
    }
    if stream:
        found["next epoch's wait ms"] = waits[clock.epochs[1]]
        ends = zip(pauses[::2], pauses[1::2])
        longest = max((end - start for start, end in ends), default=0.0)
        found["longest collection ms"] = 1e3 * longest
    return found


def run_grpo(preset, path):
    """Samples for a few prompts, and returns the figures of the run."""
    # The other library's process needs none of them.
    import keras_posttrain as kpt

    task = kpt.GRPOTask.from_preset(preset, sequence_length=LENGTH)
    ends = []

    def reward(completions, answer):
        ends.append((time.perf_counter(), cpu_seconds()))
        return [0.0] * len(completions)

    task.compile(rewards=[reward], num_generations=2, max_completion_length=8)
    # Programs are compiled before.
    few = [json.loads(line) for line, _ in zip(open(path), range(16))]
    task.fit(few, batch_size=BATCH_SIZE, verbose=0)
    ends.clear()

    class End(Exception):
        pass

    def stop(task):
        raise End()

    begin, cpu = time.perf_counter(), cpu_seconds()
    with contextlib.suppress(End):
        task.fit(
            path,
            batch_size=BATCH_SIZE,
            callbacks=[kpt.callbacks.Evaluate(stop, 1, name="end")],
            verbose=2,
        )
    first, first_cpu = ends[0]
    return {
        "first step s": first - begin,
        "first step CPU s": first_cpu - cpu,
        "memory MiB": memory(),
        "tokens a row": task.data_report.tokens / task.data_report.kept,
    }


def run_map(preset, path, processes, folder):
    """Renders and encodes the rows with `datasets.map`."""
    # Only this process needs them.
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(preset)
    begin, cpu = time.perf_counter(), cpu_seconds()
    rows = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=folder
    )
    rows = rows.map(
        lambda row: tokenizer.apply_chat_template(
            row["messages"], return_dict=True
        ),
        num_proc=processes,
        remove_columns=["messages"],
    )
    rows[0]
    return {
        "first step s": time.perf_counter() - begin,
        "first step CPU s": cpu_seconds() - cpu,
        "memory MiB": memory(),
    }


def run_case(case, preset, path, processes, folder):
    if case == "datasets.map":
        return run_map(preset, path, processes, folder / "datasets")
    if case.startswith("GRPO"):
        return run_grpo(preset, path)
    return run_ours(preset, path, case.endswith("stream"))


def run_all(arguments, folder):
    """Yields the figures of each case, each in a process of its own."""
    # Another process may hold the lock of an import: it runs alone.
    import keras_posttrain as kpt

    rng = random.Random(0)
    vocabulary = words(rng)
    preset = kpt.examples.tiny_preset(
        folder / "preset",
        [chat(rng, vocabulary) for _ in range(200)],
        num_layers=1,
        hidden_dim=32,
    )
    for count in arguments.rows:
        path, prompts = (
            folder / f"{name}{count}.jsonl" for name in ("rows", "prompts")
        )
        write_rows(path, count, prompts)
        for case in arguments.cases:
            if case.endswith("stream") and count < STREAM_ROWS:
                continue
            command = [sys.executable, __file__, "--case", case]
            file = prompts if case.startswith("GRPO") else path
            command += ["--preset", str(preset), "--file", str(file)]
            command += ["--processes", str(arguments.processes)]
            environment = os.environ | {
                "KERAS_BACKEND": "jax",
                "KERAS_POSTTRAIN_CACHE": str(folder / "cache"),
                "KERAS_POSTTRAIN_WORKERS": str(arguments.processes),
            }
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            yield {"rows": count, "case": case, **found}
        path.unlink()
        prompts.unlink()
        shutil.rmtree(folder / "datasets", ignore_errors=True)


def table(found, processes):
    """Returns the results as Markdown."""
    columns = list(dict.fromkeys(k for figures in found for k in figures))
    lines = [
        "# Rows, and what they cost",
        "",
        f"`python benchmarks/growth.py`, {processes} processes that tokenize.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for figures in found:
        cells = [figures.get(column, "") for column in columns]
        shown = [f"{x:,.1f}" if isinstance(x, float) else x for x in cells]
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = [1_000, 10_000, 100_000]
    parser.add_argument("--rows", type=int, nargs="+", default=sizes)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    # One case, in the process that measures it.
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--preset", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        folder = arguments.file.parent
        case, preset = arguments.case, arguments.preset
        processes = arguments.processes
        found = run_case(case, preset, arguments.file, processes, folder)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for figures in run_all(arguments, pathlib.Path(folder)):
            found.append(figures)
            print(figures, flush=True)
    text = table(found, arguments.processes)
    print(text)
    settings = {"processes": arguments.processes, "rows": arguments.rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "growth.json").write_text(
        json.dumps({"settings": settings, "results": found}) + "\n"
    )
    (arguments.out / "growth.md").write_text(text)


if __name__ == "__main__":
    main()
