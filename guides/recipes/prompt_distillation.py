"""Prompt distillation: an adapter that replaces a long system prompt.

    python guides/recipes/prompt_distillation.py RUN
    python guides/recipes/prompt_distillation.py RUN --preset qwen3_4b_en \
        --system prompt.txt --data questions.jsonl --eval-data held_out.jsonl

The first line trains a tiny model offline, in a minute; the second a real one.
Rows are {"prompt": question}. The model itself, with the prompt, is the
teacher. Run it again to resume. RUN gets the log, a report and the adapter.
"""

import argparse
import json
import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"

import keras

import keras_posttrain as kpt

TINY = {
    "task": {"lora": kpt.LoRA(rank=8, alpha=32), "sequence_length": 128},
    "rate": 5e-3,
    "fit": {"batch_size": 8, "epochs": 4},
    "max_tokens": 12,
}
REAL = {
    "task": {"lora": kpt.LoRA(rank=32, alpha=32), "sequence_length": 8192},
    "rate": 1e-4,
    "fit": {"batch_size": 128, "epochs": 4},
    "max_tokens": 1024,
}

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
for name in ("--preset", "--system", "--data", "--eval-data"):
    parser.add_argument(name)
args = parser.parse_args()
out, settings = args.out, REAL if args.preset else TINY
keras.utils.set_random_seed(0)

# The data: files, or a shop, and a tiny model that knows it by the prompt.
if args.preset:
    preset, system = args.preset, pathlib.Path(args.system).read_text()
    rows, held_out = (
        [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        for path in (pathlib.Path(args.data), pathlib.Path(args.eval_data))
    )
else:
    aisles = {"bread": 4, "milk": 2, "soap": 7, "rice": 5, "jam": 3,
              "tea": 8, "eggs": 6, "salt": 9}  # fmt: skip
    plan = ", ".join(f"{thing} in aisle {n}" for thing, n in aisles.items())
    system = f"You help in a shop: {plan}. Name the aisle, and be polite."
    asks = ("Where is the {}?", "I need {}.", "Have you got {}?", "Is there "
            "{} here?", "Which aisle has {}?")  # fmt: skip
    rows = [ask.format(thing) for ask in asks for thing in aisles]
    chats = []
    for question, n in zip(rows, [*aisles.values()] * len(asks)):
        user = {"role": "user", "content": question}
        for before, answer in (
            ([{"role": "system", "content": system}], f"Aisle {n}, please."),
            ([], "I do not know."),
        ):
            assistant = {"role": "assistant", "content": answer}
            chats.append({"messages": [*before, user, assistant]})
    preset = kpt.examples.tiny_preset(out / "tiny", chats, epochs=20)
    rows, held_out = rows[:-8], rows[-8:]

task = kpt.DistillTask.from_preset(preset, **settings["task"])
task.compile(
    optimizer=keras.optimizers.AdamW(
        settings["rate"], weight_decay=0.0, beta_2=0.95, epsilon=1e-8
    )
)


def answers(questions, prompt=None):
    first = [{"role": "system", "content": prompt}] if prompt else []
    return task.generate(
        [[*first, {"role": "user", "content": q}] for q in questions],
        max_tokens=settings["max_tokens"],
        temperature=0,
    )


# The teacher's answers are kept, so that a resumed run has the same rows.
file = out / "answers.json"
if not file.exists():
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([answers(x, system) for x in (rows, held_out)]))
targets, expected = json.loads(file.read_text())
before = answers(held_out)
first = {"role": "system", "content": system}
messages = [{"role": "user", "content": question} for question in rows]
task.fit(
    [
        {
            "prompt": [question],
            "teacher_prompt": [first, question],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for question, answer in zip(messages, targets)
    ],
    **settings["fit"],
    callbacks=[
        kpt.callbacks.Checkpoint(out, every="10min"),
        kpt.callbacks.MetricsLog(out),
        kpt.callbacks.Report(out),
    ],
)
after = answers(held_out)
task.save_adapter(out / "adapter")
scores = {
    name: sum(a == b for a, b in zip(given, expected)) / len(expected)
    for name, given in (("before", before), ("after", after))
}
print("answers as with the prompt:", scores)
(out / "results.json").write_text(json.dumps(scores) + "\n")
