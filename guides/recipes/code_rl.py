"""RL on programs, scored by their tests in a sandbox.

    python guides/recipes/code_rl.py RUN
    python guides/recipes/code_rl.py RUN --preset qwen3_4b_en \
        --data problems.jsonl --eval-data held_out.jsonl

The first line trains a tiny model offline, in a minute; the second a real one.
Rows are {"prompt", "tests"}: `tests` are statements that raise an error where
the program is wrong, such as "assert f(2) == 5". Run it again to resume.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import random
import secrets

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

TINY = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 256},
    "rate": 5e-3,
    "compile": {"num_generations": 8, "max_completion_length": 24},
    "fit": {"batch_size": 14, "epochs": 8},
}
REAL = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 28672},
    "rate": 4e-5,
    "compile": {"num_generations": 8, "max_completion_length": 24576},
    "fit": {"batch_size": 128, "epochs": 1},
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
for name in ("--preset", "--data", "--eval-data"):
    parser.add_argument(name)
args = parser.parse_args()
out, settings = args.out, REAL if args.preset else TINY
keras.utils.set_random_seed(0)
random.seed(0)

# The data: files, or functions; a tiny model has half of the signs right.
if args.preset:
    preset, rows, held_out = args.preset, args.data, args.eval_data
else:
    kinds = {"+": "adds {}", "-": "subtracts {}", "*": "multiplies by {}"}
    rows, guesses = [], []
    for name in ("f", "g", "h"):
        for sign, kind in kinds.items():
            for n in range(2, 10):
                prompt = f"Write {name}(x), which {kind.format(n)}."
                results = {x: eval(f"{x} {sign} {n}") for x in (3, 8)}
                tests = [f"assert {name}({x}) == {y}" for x, y in
                         results.items()]  # fmt: skip
                rows.append({"prompt": prompt, "tests": "\n".join(tests)})
                for guess in (*kinds, sign):
                    code = f"def {name}(x):\n    return x {guess} {n}"
                    guesses.append({"prompt": prompt, "completion": code})
    random.shuffle(rows)
    held_out, rows = rows[:16], rows[16:]
    preset = kpt.examples.tiny_preset(out / "tiny", guesses * 6, epochs=1)

# Each program runs in a process of its own: killed after its time, with
# limits of memory, processes and files, and without network where the system
# allows it. Equal programs are run once.
sandbox = kpt.episodes.Python(seconds=6 if args.preset else 2)


@functools.lru_cache(maxsize=10_000)
def passes(program, tests):
    # A program that ends before its tests does not print this.
    passed = secrets.token_hex(8)
    printed = sandbox(f"{program}\n{tests}\nprint({passed!r})")
    return float(printed.splitlines()[-1] == passed)


def judge(completions, tests):
    texts = [kpt.rewards.completion_text(c) for c in completions]
    # The last block of an answer, or all of it.
    programs = [
        text.rpartition("```python\n")[2].partition("```")[0] for text in texts
    ]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(passes, programs, tests))


task = kpt.GRPOTask.from_preset(preset, truncation="drop", **settings["task"])
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    ),
    loss=kpt.losses.GRPOLoss(beta=0.0),
    rewards=[judge],
    **settings["compile"],
)
sampled = {"num_generations": 8, "temperature": 1.0, "batch_size": 16}
before = task.evaluate(held_out, **sampled)
task.fit(
    rows,
    **settings["fit"],
    share_prefix=True,
    callbacks=[
        kpt.callbacks.Checkpoint(out, every="10min"),
        kpt.callbacks.MetricsLog(out),
        kpt.callbacks.CompletionsLog(out, every=10),
        kpt.callbacks.Report(out),
    ],
)
after = task.evaluate(held_out, **sampled)
task.save_adapter(out / "adapter")
print(f"held-out right: {before['pass@1']:.0%} -> {after['pass@1']:.0%}")
scores = {"before": before["pass@1"], "after": after["pass@1"]}
(out / "results.json").write_text(json.dumps(scores) + "\n")
