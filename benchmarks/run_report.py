"""What `kpt.callbacks.Report` takes of a run's time.

    python benchmarks/run_report.py

Fine-tuning and GRPO, each in one run. The report takes part in half of the
steps, by chance, so that steps with and without it are next to each other. Its
own time is measured too: in each step, and in the thread that writes the page.
The table is written to `results/run_report.md`, the figures to a `.json` file.
"""

import dataclasses
import json
import os
import pathlib
import random
import statistics
import tempfile
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import learning_rate as languages

import keras_posttrain as kpt

# isort: split
import figures
import preset
import report
import workloads

# Steps that compile.
WARM_UP = 3
LIMIT = 0.005
# Steps with and without the report, each.
LEAST = 5


class Alternating(keras.callbacks.Callback):
    """Gives a report half of the steps, and records what steps take.

    Ends the run after some seconds.
    """

    reads_step_logs = True

    def __init__(self, report, seconds):
        super().__init__()
        self.report, self.count, self.end = report, 0, None
        self.seconds, self.rng = seconds, random.Random(0)
        # Seconds of steps with and without the report, and of its part.
        self.steps = {True: [], False: []}
        self.own, self.begun = [], None

    def set_model(self, model):
        super().set_model(model)
        self.report.set_model(model)

    def set_params(self, params):
        super().set_params(params)
        self.report.set_params(params)

    def on_train_begin(self, logs=None):
        self.report.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        self.report.on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        is_on = self.rng.random() < 0.5
        # Waits for the step in any case.
        float(self._model.step_logs["loss"])
        waited = time.perf_counter()
        if is_on:
            self.report.on_train_batch_end(batch, logs)
        end = time.perf_counter()
        if self.count > WARM_UP:
            self.steps[is_on].append(end - self.end)
            if is_on:
                self.own.append(end - waited)
        else:
            self.report.seconds, self.begun = 0.0, end
        self.end = end
        many = min(map(len, self.steps.values()))
        if end - self.begun > self.seconds and many >= LEAST:
            self._model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        # The rest is no part of a step.
        self.spent, self.all = self.report.seconds, self.end - self.begun
        self.report.on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        self.report.on_train_end(logs)

    def close(self):
        self.report.close()


def figures_of(clock, path):
    """Returns the figures of a run."""
    on, off = (statistics.median(clock.steps[x]) for x in (True, False))
    rng = random.Random(1)
    again = [
        statistics.median(rng.choices(clock.steps[True], k=len(clock.own)))
        / statistics.median(
            rng.choices(clock.steps[False], k=len(clock.steps[False]))
        )
        for _ in range(200)
    ]
    return {
        "steps": clock.count,
        "seconds": clock.all,
        "step": off,
        "step_with": on,
        "ratio": on / off - 1,
        # By resampling.
        "ratio_error": statistics.stdev(again),
        # Of the steps in which it takes part.
        "own": statistics.median(clock.own),
        "share": statistics.median(clock.own) / off,
        "all": clock.spent / clock.all,
        "page_bytes": path.stat().st_size,
        "other_cpus": report.other_cpus(),
    }


def fine_tuning(folder, seconds):
    """Fine-tunes a Llama of width 256 in short steps."""
    both = languages.language(0), languages.language(1)
    rows = languages.sequences(1, 8192, both, languages.BEFORE)
    task = languages.make(256, None, None)
    task.compile(keras.optimizers.AdamW(1e-3))
    page = kpt.callbacks.Report(folder)
    clock = Alternating(page, seconds)
    task.fit(
        rows,
        batch_size=8,
        epochs=50,
        callbacks=[clock],
        verbose=0,
    )
    return figures_of(clock, page.path)


def reinforcement(folder, seconds):
    """Trains on rollouts of 32 completions of the model of `grpo.py`."""
    work = dataclasses.replace(workloads.RL["w5"], prompts=4, max_tokens=32)
    with tempfile.TemporaryDirectory() as model:
        preset.write(work.model, pathlib.Path(model))
        task = kpt.GRPOTask.from_preset(
            model,
            lora=kpt.LoRA(
                rank=workloads.LORA_RANK, alpha=workloads.LORA_ALPHA
            ),
            sequence_length=work.longest,
        )
    task.compile(
        keras.optimizers.AdamW(workloads.LEARNING_RATE),
        rewards=[even_share],
        num_generations=work.samples,
        max_completion_length=work.max_tokens,
        stop_token_ids=None,
    )
    page = kpt.callbacks.Report(folder)
    clock = Alternating(page, seconds)
    rows = [{"prompt_ids": ids} for ids in work.prompt_ids(200)]
    task.fit(
        rows,
        batch_size=work.prompts,
        packing=True,
        share_prefix=True,
        callbacks=[clock],
        verbose=0,
    )
    return figures_of(clock, page.path)


def even_share(completion_ids):
    return [sum(x % 2 == 0 for x in ids) / len(ids) for ids in completion_ids]


def table(found):
    """Returns the results as Markdown."""
    lines = [
        "# The report on a run",
        "",
        "`python benchmarks/run_report.py`: medians of steps of one run, in "
        "which the report takes part in half of the steps. `own` is the time "
        "in its hooks; `whole run` all of its processor time, with that of "
        "the thread that writes the page every 30 s. The bar is "
        f"{LIMIT:.1%}. `others` are the CPUs that other processes used: with "
        "more than 0.1 the difference is theirs (± its standard error).",
        "",
        "| run | steps | s/step without | with | difference | own, ms | share "
        "of a step | share of the whole run | page, kB | others |",
        "|" + "---|" * 10,
    ]
    for name, x in found.items():
        lines.append(
            f"| {name} | {x['steps']} | {x['step']:.4f} | "
            f"{x['step_with']:.4f} | {x['ratio']:+.1%} ± "
            f"{x['ratio_error']:.1%} | "
            f"{1000 * x['own']:.3f} | {x['share']:.3%} | {x['all']:.3%} | "
            f"{x['page_bytes'] / 1000:.0f} | {x['other_cpus']:.1f} |"
        )
    return "\n".join(lines) + "\n"


RUNS = {"fine-tuning": fine_tuning, "GRPO": reinforcement}


def main():
    parser = figures.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", nargs="+", choices=list(RUNS))
    arguments = parser.parse_args()
    found = {}
    for name in arguments.only or RUNS:
        run = RUNS[name]
        keras.utils.set_random_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(folder, arguments.seconds)
        print(name, json.dumps(found[name]), flush=True)
    figures.write(arguments.out, "run_report", found, table(found))
    over = [n for n, x in found.items() if max(x["share"], x["all"]) > LIMIT]
    if over:
        raise SystemExit(f"More than {LIMIT:.1%} in {over}.")


if __name__ == "__main__":
    main()
