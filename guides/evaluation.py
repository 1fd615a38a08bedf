"""
Title: Evaluating a model, during and after training
Author: The keras_posttrain authors
Date created: 2026/11/25
Last modified: 2026/11/25
Description: Metrics with errors, win rates, pass@k, lm-eval and Inspect AI.
Accelerator: None
"""

"""
## Introduction

A loss on held-out rows says little about the answers of a model. This guide
looks at the answers: by metrics of text, by a judge, by the share of prompts
that some sample solves, and by the two harnesses that most published figures
come from. Each number has a standard error, so that you can tell a better
model from a lucky one.

All of them read the task's present weights, with its adapter if it has one.
Nothing is exported first.

The tiny model of this guide is trained in a minute on two CPU cores. For a
real model change one line: set `preset` to a KerasHub preset such as
`"qwen3_0.6b_en"`, or to `"hf://Qwen/Qwen3-0.6B"`. The extras that are used
here are installed by `pip install
"keras_posttrain[inspect,lm-eval,metrics,plot]"`.
"""

import json
import os
import pathlib
import random
import sys

os.environ["KERAS_BACKEND"] = "jax"

import inspect_ai
import keras
import lm_eval
import matplotlib
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact

import keras_posttrain as kpt

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/evaluation")
keras.utils.set_random_seed(0)

"""
## Rows

The model learns to add, in a chat. 60 of the 360 questions are held out.
"""

random.seed(0)
questions = [
    (f"{a} figs, {b} plums, {c} cups: how much fruit?", f"{a + b} fruit")
    for a in range(1, 7)
    for b in range(1, 7)
    for c in range(10)
]
random.shuffle(questions)
rows = [
    {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }
    for question, answer in questions
]
held_out, rows = rows[:60], rows[60:]
preset = kpt.examples.tiny_preset(folder / "tiny", rows)

task = kpt.SFTTask.from_preset(preset, sequence_length=64)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))

"""
## Metrics of text

`evaluate` with `metrics` samples a completion for each row, greedily, and
compares it with the row's own. `BitsPerByte` does not sample: it measures the
row's own completion, in a unit that does not depend on the tokenizer.

A value comes with `/stderr`, its standard error over the rows, with `/n`, the
rows that were scored, and with `/failed`, those that could not be. The model
is not trained yet, so that nothing is right.
"""

metrics = [
    kpt.metrics.ExactMatch(),
    kpt.metrics.ROUGE("L"),
    kpt.metrics.BitsPerByte(),
]
found = task.evaluate(held_out, metrics=metrics, verbose=0)
print({name: round(value, 3) for name, value in found.items()})

"""
## During training

`kpt.callbacks.Evaluate` calls a function of the task every so many steps. Its
results are logged with the step's own metrics. The updates are those of a run
without it.

Here the checkpoint with the best result is kept too, next to the newest ones.
"""


def answers(task):
    return task.evaluate(
        held_out, metrics=[kpt.metrics.ExactMatch()], verbose=0
    )


best = kpt.callbacks.Checkpoint(
    folder / "run", every=50, monitor="held_out/exact_match", mode="max"
)
task.fit(
    rows,
    batch_size=60,
    epochs=40,
    verbose=0,
    callbacks=[
        kpt.callbacks.Evaluate(answers, every=50, name="held_out"),
        kpt.callbacks.MetricsLog(folder / "run"),
        best,
    ],
)
log = [
    json.loads(line)
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
]
log = [line for line in log if "held_out/exact_match" in line]
print("best at step", best.best.name)

if "ipykernel" not in sys.modules:
    matplotlib.use("Agg")  # figures are only saved
from matplotlib import pyplot as plt

plt.errorbar(
    [line["step"] for line in log],
    [line["held_out/exact_match"] for line in log],
    [line["held_out/exact_match/stderr"] for line in log],
    marker="o",
)
plt.xlabel("step")
plt.ylabel("held-out answers that are right")
plt.savefig(folder / "evaluation.png")

"""
## Which of two models is better?

Where no reference is known, a judge compares two answers. Judges prefer what
they are shown first, or last. So `win_rate` asks twice, in both orders: a
preference for a position then counts as a tie, and is reported.

The judge is a function: call a model of your own in it, or any API. This one
counts how far an answer is from the right one. The other model is the one
before training.
"""

right = dict(questions)


def judge(prompt, first, second):
    def distance(answer):
        number = answer.split(" ")[0]
        wanted = int(right[prompt[0]["content"]].split(" ")[0])
        return abs(int(number) - wanted) if number.isdecimal() else 100

    if distance(first) == distance(second):
        return "tie"
    return "first" if distance(first) < distance(second) else "second"


before = kpt.SFTTask.from_preset(preset, sequence_length=64)
rate = kpt.evaluation.win_rate(task, before, held_out, judge, max_tokens=12)
low, high = rate.interval
print(f"win rate {rate.value:.2f}, 95 % from {low:.2f} to {high:.2f}")

"""
## Is it right sometimes?

Reinforcement learning can only reward what the model samples now and then.
`evaluate` of `GRPOTask` and `PPOTask` estimates pass@k, the probability that
at least one of k samples is right, without bias, from all samples of each
prompt. The next stage takes the model over with its weights.
"""


def is_right(prompts, completions, **columns):
    return [
        float(message[0]["content"] == right[prompt[0]["content"]])
        for prompt, message in zip(prompts, completions)
    ]


policy = kpt.GRPOTask.from_task(task)
policy.compile(rewards=[is_right], num_generations=8, max_completion_length=12)
prompts = [{"prompt": row["prompt"]} for row in held_out]
found = policy.evaluate(prompts, num_generations=8, verbose=0)
for name in ("pass@1", "pass@4", "pass@8"):
    print(f"{name} {found[name]:.3f} +- {found[f'{name}/stderr']:.3f}")

"""
Rows and scores of over a hundred puzzles come with
[reasoning-gym](https://github.com/open-thought/reasoning-gym), generated for a
seed, so that they are never used up:

```python
rows, score = kpt.evaluation.reasoning_gym("chain_sum", size=1000, seed=0)
policy.compile(rewards=[score], num_generations=8)
policy.fit(rows)
```

## lm-evaluation-harness

`kpt.evaluation.lm_eval(task)` is a model for EleutherAI's harness: its results
are those of the harness on the exported directory, without the export. The
harness downloads the rows of its own tasks, such as `tasks=["gsm8k"]`. A task
of your own is a dict.
"""

with open(folder / "held_out.jsonl", "w") as file:
    for question, answer in questions[:60]:
        line = {"question": question, "answer": answer}
        file.write(json.dumps(line) + "\n")

fruit = {
    "task": "fruit",
    "dataset_path": "json",
    "dataset_kwargs": {
        "data_files": {"test": str(folder / "held_out.jsonl")},
        "cache_dir": str(folder / "cache"),
    },
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
}
found = lm_eval.simple_evaluate(
    model=kpt.evaluation.lm_eval(task),
    tasks=[fruit],
    apply_chat_template=True,
    bootstrap_iters=100,
)
by_lm_eval = found["results"]["fruit"]["exact_match,none"]
print(f"lm-eval: exact_match {by_lm_eval:.3f}")

"""
## Inspect AI

`kpt.evaluation.inspect(task)` is a model for
[Inspect AI](https://inspect.aisi.org.uk), the harness for agents. Concurrent
calls are sampled together. Tools work as in `kpt.episodes`: their schemas are
written by the chat template, and calls are read in its format.
"""

[result] = inspect_ai.eval(
    inspect_ai.Task(
        dataset=[
            Sample(input=question, target=answer)
            for question, answer in questions[:60]
        ],
        scorer=exact(),
    ),
    model=kpt.evaluation.inspect(task),
    temperature=0.0,
    max_tokens=12,
    log_dir=str(folder / "inspect"),
    display="none",
)
by_inspect = result.results.scores[0].metrics["mean"].value
print(f"Inspect: exact {by_inspect:.3f}")

by_metric = answers(task)["exact_match"]
print("the three agree:", by_metric == by_lm_eval == by_inspect)

"""
## Next steps

- `grpo_gsm8k.py`: rewards of mathematical answers, and pass@k while training.
- `tool_use.py`: agents that are trained with their tools.
- `reward_model.py`: a model that scores answers, as a judge.
"""
