"""
Title: A larger model teaches a smaller one
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/20
Description: Distillation from few rows, from samples, and from disk.
Accelerator: None
"""

"""
## Introduction

A row says one thing that may come next. A model that has learned the job says
how probable each thing is, and that is what a *teacher* hands on to a smaller
*student*: from as few rows, and rows as poor, the student learns more
([Hinton et al., 2015](https://arxiv.org/abs/1503.02531)). It learns more still
from what it writes itself, where the teacher corrects the student's own errors
([Agarwal et al., 2023](https://arxiv.org/abs/2306.13649)).

Here the three are side by side, with the same rows and the same number of
steps: fine-tuning without a teacher, the teacher on the given rows, and the
teacher on the student's own samples. After that the other ways to have a
teacher follow, each by one changed line.

It runs in about two minutes on two CPU cores. For a real model change one
line: set `preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, and
`teacher` to a larger one of the same family, `"qwen3_8b_en"`.
"""

import json
import math
import os
import pathlib
import random
import shutil
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
import matplotlib
import tokenizers

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/distillation"
)
shutil.rmtree(folder / "teacher_cache", ignore_errors=True)  # begin anew
folder.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)
random.seed(0)

"""
## A town

A town has 25 squares, A to Y, in five rows of five; streets lead to the next
squares. Four places are at its corners. A trip begins at a square and ends at
a place; there are 96 of them, and a third is held out.
"""

squares = {
    name: divmod(i, 5) for i, name in enumerate(map(chr, range(65, 90)))
}
places = {"mill": "A", "port": "E", "school": "U", "church": "Y"}
streets = {
    a: [b for b in squares if math.dist(squares[a], squares[b]) == 1]
    for a in squares
}
# How far from each place each square is.
far = {
    place: {a: math.dist(squares[a], squares[corner]) for a in squares}
    for place, corner in places.items()
}
trips = [
    {"prompt": f"to the {place} from {start}", "place": place, "start": start}
    for place in places
    for start in squares
    if far[place][start]
]
random.shuffle(trips)
held_out, trips = trips[:32], trips[32:]
print(held_out[0])

"""
A route is a completion. There are many for the teacher, by people who know
the town: each move leads nearer, and where two do, either may be taken. For
the student there are 60, by people who do not: four moves in ten go anywhere.
Strolls, where all of them do, are what a model may have read before.
"""

routes = {}
for kind, count, careless in (
    ("good", 4000, 0.0),
    ("poor", 60, 0.4),
    ("strolls", 1000, 1.0),
):
    routes[kind] = []
    for trip in random.choices(trips, k=count):
        distance, square, route = far[trip["place"]], trip["start"], ""
        for _ in range(12):
            here, moves = distance[square], streets[square]
            if not here:
                break
            if random.random() >= careless:
                moves = [a for a in moves if distance[a] < here]
            square = random.choice(moves)
            route += f" {square}"
        routes[kind].append({"prompt": trip["prompt"], "completion": route})
    print(kind, routes[kind][0])

"""
## A teacher and a student

With real presets this section falls away. It makes two models with the same
tokens. The larger one learns the good routes; the smaller one, the strolls,
so that it knows the streets but not the places.
"""

bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = tokenizers.decoders.ByteLevel()
bpe.train_from_iterator(
    [row["prompt"] + row["completion"] for row in routes["good"]],
    tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    ),
)
tokenizer = kpt.Tokenizer(bpe, {"eos_token": "<|endoftext|>"})
for name, dim, num_layers, rows, epochs in (
    ("student", 32, 1, routes["strolls"], 3),
    ("teacher", 64, 2, routes["good"], 4),
):
    backbone = keras_hub.models.Qwen3Backbone(
        vocabulary_size=tokenizer.vocabulary_size,
        num_layers=num_layers,
        num_query_heads=dim // 16,
        num_key_value_heads=dim // 16,
        head_dim=16,
        hidden_dim=dim,
        intermediate_dim=2 * dim,
    )
    causal_lm = keras_hub.models.Qwen3CausalLM(backbone, preprocessor=None)
    task = kpt.SFTTask(causal_lm, tokenizer, sequence_length=32)
    task.compile(optimizer=keras.optimizers.AdamW(3e-3))
    task.fit(rows, batch_size=50, epochs=epochs, verbose=0)
    task.export(folder / name)
    print(name, f"{causal_lm.count_params():,} weights")

preset, teacher = folder / "student", folder / "teacher"

"""
## What is right

A route is right if it keeps to the streets and ends at its place, by whatever
way. Written as a reward, it lets `GRPOTask` judge samples: `pass@1` is the
share of those that are right.
"""


def arrives(completions, place, start):
    right = []
    for completion, name, square in zip(completions, place, start):
        route = [square, *completion.split()]
        legal = all(b in streets.get(a, ()) for a, b in zip(route, route[1:]))
        right.append(float(legal and route[-1] == places[name]))
    return right


print(arrives(completions=[" B A", " G A"], place=["mill"] * 2, start="CC"))

judge = kpt.GRPOTask.from_preset(teacher, sequence_length=32)
judge.compile(rewards=[arrives], max_completion_length=16)
score = judge.evaluate(
    held_out, batch_size=32, num_generations=8, temperature=1.0
)
print(f"the teacher arrives in {score['pass@1']:.0%} of held-out samples")

"""
## Without a teacher, with one, and on the student's own samples

`loss=` says how the student is compared with the teacher. `ForwardKLLoss` is
the usual one: the student covers all that the teacher would say.
`temperature` and `alpha` of the losses soften both sides and mix in the hard
labels.

With `on_policy=True` rows are prompts, and the completions are the student's
own. With `on_policy=0.5` half of the rows of each step are: the given ones
show a young student what a route looks like, and its own where it goes wrong.
One that is good already does with its own alone, and there `ReverseKLLoss`,
the default then, leaves out what the teacher would not say.

All three have 60 rows, 20 of them a step, for 40 epochs. In the first the
teacher only looks on: `evaluate` of `DistillTask` gives the agreement, how
often the student's most probable token is the teacher's, here on held-out
routes that nobody has trained on.
"""

watched = []
for trip in held_out:
    distance, square, route = far[trip["place"]], trip["start"], ""
    while distance[square]:
        here = distance[square]
        square = next(a for a in streets[square] if distance[a] < here)
        route += f" {square}"
    watched.append({"prompt": trip["prompt"], "completion": route})

few = routes["poor"]
runs = {
    "fine-tuning": {},
    "teacher, given rows": {"loss": kpt.losses.ForwardKLLoss()},
    "teacher, own samples": {
        "loss": kpt.losses.ForwardKLLoss(),
        "on_policy": 0.5,
        "max_completion_length": 16,
    },
}
results = {}
for name, settings in runs.items():
    kind = kpt.DistillTask if settings else kpt.SFTTask
    chosen = {"teacher": teacher} if settings else {}
    task = kind.from_preset(preset, sequence_length=32, **chosen)
    task.compile(optimizer=keras.optimizers.AdamW(1e-2), **settings)
    task.fit(few, batch_size=20, epochs=40, verbose=0)

    student = task.causal_lm
    judge = kpt.GRPOTask(student, tokenizer, sequence_length=32)
    judge.compile(rewards=[arrives], max_completion_length=16)
    score = judge.evaluate(
        held_out, batch_size=32, num_generations=8, temperature=1.0
    )
    onlooker = kpt.DistillTask(
        student, tokenizer, teacher=teacher, sequence_length=32
    )
    onlooker.compile()
    seen = onlooker.evaluate(watched, batch_size=32, verbose=0)
    results[name] = {"arrives": score["pass@1"]} | seen
    print(name, {k: round(v, 3) for k, v in results[name].items()})

(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
task.export(folder / "taught")

"""
The student of 60 poor rows has learned to lose its way. With the teacher the
same rows were enough to see what a good move is, and the student's own samples
showed it where it goes wrong.
"""

matplotlib.use("Agg")  # draws to a file; there is no window
from matplotlib import pyplot

figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
for axis, key, title in (
    (axes[0], "arrives", "held-out samples that arrive"),
    (axes[1], "agreement", "held-out agreement with the teacher"),
):
    axis.bar(range(3), [scores[key] for scores in results.values()])
    axis.set_xticks(range(3), [name.replace(", ", ",\n") for name in results])
    axis.set_title(title)
    axis.set_ylim(0, 1)
figure.tight_layout()
figure.savefig(folder / "students.png")

"""
## A teacher that is written down

A large teacher need not be in memory while the student learns, nor be asked
the same thing in each epoch. With `teacher_cache=` its `top_k` most probable
tokens at each place are written to a directory before the first step, and
read from there; what is left over counts as one more token. Later runs on the
same rows find them there.
"""

task = kpt.DistillTask.from_preset(preset, teacher=teacher, sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-2),
    teacher_cache=folder / "teacher_cache",
    top_k=8,
)
history = task.fit(few, batch_size=20, epochs=5, verbose=0)
print("written down:", [round(x, 3) for x in history.history["divergence"]])

"""
## As a policy gradient

A policy loss goes by advantages. Here a token's is the teacher's
log-probability less the student's, so that no distribution is compared: the
teacher says of each token that was sampled how good it is. It needs the least
of the teacher, but more samples and smaller steps than a divergence does, and
a student that is not far off. The last one goes on. `reverse_kl`, the mean of
the student's log-probability less the teacher's, is what is lowered.
"""

task = kpt.DistillTask.from_preset(
    folder / "taught", teacher=teacher, sequence_length=32
)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    loss=kpt.losses.ReinforceLoss(),
    on_policy=True,
    num_generations=8,
    max_completion_length=16,
)
history = task.fit(few, batch_size=20, epochs=10, verbose=0)
print("policy loss:", [round(x, 3) for x in history.history["reverse_kl"]])

"""
## What goes on inside

`HiddenStateLoss` compares hidden states too: by default those of the
student's layers with the teacher's at the same depth, through a linear map
that is trained along and not exported. `SumLoss` adds it to a divergence.
`AttentionLoss` does it for where attention goes.
"""

task = kpt.DistillTask.from_preset(preset, teacher=teacher, sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-2),
    loss=kpt.losses.SumLoss(
        [kpt.losses.ForwardKLLoss(), kpt.losses.HiddenStateLoss()],
        weights=[1.0, 0.1],
    ),
)
history = task.fit(few, batch_size=20, epochs=5, verbose=0)
for name in ("divergence", "hidden_state_loss"):
    print(f"{name}:", [round(x, 3) for x in history.history[name]])

"""
## Next

- `prompt_distillation.py`: a long prompt's behaviour without the prompt.
- Several teachers are `teacher=[...]` or `{...}`, with `teacher_weights=` or
  one for each row by `teacher_column=`.
- A teacher with another tokenizer wants `kpt.losses.ULDLoss()`.
- `sft.py`: checkpoints, packing and adapters, which work here as there.
"""
