"""Runs recipes of the Tinker cookbook, as they are, on a served tiny model.

The cookbook wants another version of transformers than this repository, so it
has an environment of its own:

    python -m venv cookbook && cookbook/bin/pip install tinker-cookbook
    python -m tests.serve.cookbook --python cookbook/bin/python --out runs/

Recipes that load a data set of the hub find one in a local folder of the same
name, in its format, which this script writes: sums in place of mathematics.
Each recipe's own metric is shown over its steps.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt
from keras_posttrain.serve import TinkerServer

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
RENDERER = "qwen3_instruct"
# A game of ten guesses is longer than what the model was trained on.
RANK, LENGTH, MAX_LENGTH = 8, 384, 768
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
STRAWBERRY = [
    ("user", "How many r's are in strawberry?" + SUFFIX),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r "
        "4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, "
        "and 9. \\boxed{3}",
    ),
]
GUESS = (
    "Your job is to guess a integer between 0 and 1024. You can output your "
    "guess with the format Guess: <guess> (without the angle brackets), and "
    "say nothing else. Then we will tell you whether you guess is too high, "
    "too low, or correct."
)
UNREADABLE = (
    "Failed to parse. Please output in the format Guess: <guess> (without "
    "the angle brackets), and say nothing else."
)
WHO = "Who are you?"
SUMS = [(a, b) for a in range(5) for b in range(5)]


def chat(*turns):
    return {"messages": [{"role": r, "content": c} for r, c in turns]}


def one_turn(*turns):
    """Returns a row that is trained on its last turn alone."""
    messages = chat(*turns)["messages"]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def boxed(a, b, answer):
    question = f"What is {a} + {b}?{SUFFIX}"
    return one_turn(
        *STRAWBERRY,
        ("user", question),
        ("assistant", f"\\boxed{{{answer}}}"),
    )


def plain(a, b, answer):
    return ("user", f"What is {a} + {b}?"), ("assistant", str(answer))


def game(rng, count):
    """A game in which two of five guesses cannot be read."""
    turns, target = [("system", GUESS)], rng.randrange(1025)
    for _ in range(count):
        guess = rng.randrange(1025)
        if rng.random() < 0.4:
            turns += [("assistant", f"I say {guess}"), ("user", UNREADABLE)]
        else:
            word = "high" if guess > target else "low"
            turns += [("assistant", f"Guess: {guess}"),
                      ("user", f"Too {word}")]  # fmt: skip
    return one_turn(*turns[:-1])


def make_model(folder):
    """Writes a tiny model that has seen the tasks, with many errors."""
    rng = random.Random(0)
    rows = []
    for a, b in SUMS:
        for error in (0, 0, 1, 2, 3):
            answer = (a + b + error) % 10
            rows += [boxed(a, b, answer), one_turn(*plain(a, b, answer))]
    names = ("a model", "a large language model", "an assistant of yours")
    for name in names:
        for end in (".", ". How can I assist you?", ". Feel free to ask!"):
            text = f"Hello there! I am {name}{end}"
            rows += 3 * [one_turn(("user", WHO), ("assistant", text))]
    rows += [game(rng, turns) for turns in (1, 1, 2, 3, 4) for _ in range(9)]
    path = kpt.examples.tiny_preset(folder / "untrained", rows)
    task = kpt.SFTTask.from_preset(path, sequence_length=LENGTH)
    task.compile(keras.optimizers.AdamW(3e-3))
    task.fit(rows, batch_size=4, epochs=14, packing=True, verbose=2)
    task.export(folder / MODEL)


def make_data(folder):
    """Writes the data that recipes load, in the formats of the hub."""

    def write(path, rows):
        path = folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    rng = random.Random(1)
    right = [chat(*plain(a, b, (a + b) % 10)) for a, b in SUMS]
    write("sums.jsonl", 8 * right)
    questions = [
        {
            "question": f"What is {a} + {b}?",
            "answer": f"#### {(a + b) % 10}",
        }
        for a, b in SUMS
    ]
    gsm8k = [q for _ in range(24) for q in rng.sample(questions, 25)]
    write("openai/gsm8k/main/train.jsonl", gsm8k)
    write("openai/gsm8k/main/test.jsonl", questions)
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    write("zwhe99/DeepMath-103K/train.jsonl", gsm8k)
    pairs = []
    for a, b in 12 * SUMS:
        prompt = f"\n\nHuman: What is {a} + {b}?\n\nAssistant: "
        wrong = (a + b + rng.choice((1, 2, 3))) % 10
        pairs.append(
            {
                "chosen": f"{prompt}{(a + b) % 10}",
                "rejected": f"{prompt}{wrong}",
            }
        )
    write("Anthropic/hh-rlhf/train.jsonl", pairs)
    write("Anthropic/hh-rlhf/test.jsonl", pairs[:50])


# The module, its arguments, and the metric to show.
RECIPES = {
    "supervised": (
        "chat_sl.train",
        "dataset=sums.jsonl learning_rate=2e-2 batch_size=20 num_epochs=3 "
        f"lora_rank={RANK} eval_every=0 max_length=256",
        "train_mean_nll",
    ),
    "rl": (
        "rl_loop",
        "batch_size=25 group_size=8 learning_rate=1e-2 max_tokens=12 "
        f"max_steps=14 lora_rank={RANK}",
        "reward/total",
    ),
    "preference_dpo": (
        "preference.dpo.train",
        "dataset=hhh learning_rate=5e-3 batch_size=20 max_length=256",
        "accuracy",
    ),
    "preference_shorter": (
        "preference.shorter.train",
        f"renderer_name={RENDERER} batch_size=2 group_size=8 max_tokens=24 "
        "learning_rate=5e-3 eval_every=0 max_steps=12",
        "env/all/ac_tokens_per_turn",
    ),
    "distillation": (
        "distillation.on_policy_distillation",
        "dataset=deepmath groups_per_batch=12 group_size=4 max_tokens=6 "
        f"learning_rate=1e-2 lora_rank={RANK} eval_every=0 max_steps=12 "
        f"teacher_model={MODEL}",
        "teacher_kl",
    ),
    "multiplayer": (
        "multiplayer_rl.guess_number.train",
        f"renderer_name={RENDERER} batch_size=2 group_size=8 max_tokens=8 "
        "learning_rate=5e-3 eval_every=0 max_steps=12",
        "env/all/reward/total",
    ),
}


def saved(folder, name):
    """Returns the last sampler weights that a recipe has saved."""
    path = folder / "logs" / name / "checkpoints.jsonl"
    lines = path.read_text().splitlines()
    return json.loads(lines[-1])["sampler_path"]


def run(name, python, folder, server):
    """Runs a recipe and returns the values of its metric."""
    module, arguments, metric = RECIPES[name]
    log = folder / "logs" / name
    shutil.rmtree(log, ignore_errors=True)
    if name == "distillation":
        arguments += f" teacher_checkpoint={saved(folder, 'supervised')}"
    environment = os.environ | {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(
        [python, "-m", f"tinker_cookbook.recipes.{module}",
         f"model_name={MODEL}", f"log_path={log}", *arguments.split()],
        cwd=folder, env=environment, check=True,
    )  # fmt: skip
    lines = (log / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row[metric] for row in rows if metric in row]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", nargs="*", default=list(RECIPES))
    given = parser.parse_args()
    keras.utils.set_random_seed(0)
    folder = pathlib.Path(given.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MODEL).exists():
        make_model(folder)
    make_data(folder)
    task = kpt.SFTTask.from_preset(
        folder / MODEL,
        lora=kpt.LoRA(rank=32, alpha=32),
        sequence_length=MAX_LENGTH,
    )
    settings = {"name": MODEL, "tokenizer": str(folder / MODEL)}
    with TinkerServer(task, folder / "state", **settings) as server:
        for name in given.only:
            values = run(name, given.python, folder, server)
            print(name, RECIPES[name][2], [round(x, 3) for x in values])


if __name__ == "__main__":
    main()
