"""
Title: Distillation into a smaller model
Author: The keras_posttrain authors
Date created: 2026/11/20
Last modified: 2026/11/22
Description: Distillation on given rows, on samples, and from a cache on disk.
Accelerator: None
"""

"""
## Introduction

A row contains one possible continuation. A trained model gives a probability
to every continuation. In distillation a large *teacher* passes these on to a
smaller *student*, which learns more from them than from the same rows without
a teacher ([Hinton et al., 2015](https://arxiv.org/abs/1503.02531)). It learns
most from its own samples, in which the teacher corrects the student's own
errors ([Agarwal et al., 2023](https://arxiv.org/abs/2306.13649)).

This guide compares three runs with the same rows and the same number of steps:
fine-tuning without a teacher, the teacher on the given rows, and the teacher
on the student's own samples. Then it shows other ways to use a teacher, each
of which changes a few arguments.

It runs in a minute on two CPU cores. For a real model change one line: set
`preset` to a KerasHub preset such as `"qwen3_0.6b_en"`, and `teacher` to a
larger one of the same family, such as `"qwen3_8b_en"`.
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
import matplotlib

import keras_posttrain as kpt

folder = pathlib.Path(
    sys.argv[1] if len(sys.argv) > 1 else "runs/distillation"
)
shutil.rmtree(
    folder / "teacher_cache", ignore_errors=True
)  # start from scratch
keras.utils.set_random_seed(0)
random.seed(0)

"""
## A town

A town has 25 squares, A to Y, in five rows of five. Streets connect
neighbouring squares. There are four places, one at each corner. A trip starts
at a square and ends at a place. There are 96 trips, of which a third is held
out.
"""

squares = {
    name: divmod(i, 5) for i, name in enumerate(map(chr, range(65, 90)))
}
places = {"mill": "A", "port": "E", "school": "U", "church": "Y"}
streets = {
    a: [b for b in squares if math.dist(squares[a], squares[b]) == 1]
    for a in squares
}
# The distance of each square from each place.
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
A route is a completion. The teacher is trained on many good routes: each move
leads closer to the place, and where two moves do, either may be taken. The
student gets 60 poor routes, in which four of ten moves go anywhere. In strolls
all moves go anywhere; both models are trained on these first, so that they
know the streets, but not the places.
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

Both presets have the same tokenizer, since it is trained on the same text. The
larger model is fine-tuned on the good routes. A real teacher is a preset that
knows the job already, or is fine-tuned in the same way.
"""

preset = kpt.examples.tiny_preset(
    folder / "student",
    routes["strolls"],
    epochs=2,
    num_layers=1,
    hidden_dim=32,
)
teacher = kpt.examples.tiny_preset(
    folder / "large", routes["strolls"], epochs=2
)

task = kpt.SFTTask.from_preset(teacher, sequence_length=32)
task.compile(optimizer=keras.optimizers.AdamW(3e-3))
task.fit(routes["good"], batch_size=50, epochs=3, verbose=0)
teacher = folder / "teacher"
task.export(teacher)

"""
## A reward as a metric

A route is right if it follows the streets and ends at its place, on any way.
Written as a reward, `GRPOTask` can evaluate samples with it: `pass@1` is the
share of samples that are right.
"""


def arrives(completions, place, start):
    right = []
    for completion, name, square in zip(completions, place, start):
        route = [square, *completion.split()]
        legal = all(b in streets.get(a, ()) for a, b in zip(route, route[1:]))
        right.append(float(legal and route[-1] == places[name]))
    return right


print(arrives(completions=[" B A", " G A"], place=["mill"] * 2, start="CC"))

grader = kpt.GRPOTask.from_preset(teacher, sequence_length=32)
grader.compile(rewards=[arrives], max_completion_length=16)
score = grader.evaluate(
    held_out, batch_size=32, num_generations=8, temperature=1.0
)
print(f"the teacher arrives in {score['pass@1']:.0%} of held-out samples")

"""
## Three runs

`loss=` selects how the student is compared with the teacher. `ForwardKLLoss`
is the usual choice: the student learns to give a probability to everything
that the teacher might say. The losses' `temperature` softens both
distributions, and `alpha` mixes in the cross-entropy of the row's own tokens.

With `on_policy=True` rows are prompts, and the student samples the
completions. With `on_policy=0.5` half of the rows in each step are sampled.
The given rows show an untrained student what a route looks like, and the
samples show it where it makes errors. A student that is good already can train
on samples alone. Then the default loss is `ReverseKLLoss`, which avoids what
the teacher would not say.

All three runs use the same 60 rows, 20 of them a step, for 40 epochs. The
`evaluate` method of `DistillTask` also measures the agreement: how often the
most probable token of the student is that of the teacher, here on held-out
routes.
"""

held_out_routes = []
for trip in held_out:
    distance, square, route = far[trip["place"]], trip["start"], ""
    while distance[square]:
        here = distance[square]
        square = next(a for a in streets[square] if distance[a] < here)
        route += f" {square}"
    held_out_routes.append({"prompt": trip["prompt"], "completion": route})

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
    grader = kpt.GRPOTask(student, task.tokenizer, sequence_length=32)
    grader.compile(rewards=[arrives], max_completion_length=16)
    score = grader.evaluate(
        held_out, batch_size=32, num_generations=8, temperature=1.0
    )
    comparison = kpt.DistillTask(
        student, task.tokenizer, teacher=teacher, sequence_length=32
    )
    comparison.compile()
    metrics = comparison.evaluate(held_out_routes, batch_size=32, verbose=0)
    results[name] = {"arrives": score["pass@1"]} | metrics
    print(name, {k: round(v, 3) for k, v in results[name].items()})

(folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
task.export(folder / "distilled")

"""
Fine-tuned on 60 poor rows, the student has learned to take wrong turns. With
the teacher, the same rows were enough to learn good moves, and its own samples
corrected its remaining errors.
"""

matplotlib.use("Agg")  # plot to a file, without a window
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
## A cached teacher

A large teacher need not be in memory while the student trains, nor be run
again in each epoch. With `teacher_cache=` the `top_k` most probable tokens at
each position are written to a directory before the first step, and read from
there. The remaining probability counts as one more token. Later runs on the
same rows reuse the files.
"""

task = kpt.DistillTask.from_preset(preset, teacher=teacher, sequence_length=32)
task.compile(
    optimizer=keras.optimizers.AdamW(1e-2),
    teacher_cache=folder / "teacher_cache",
    top_k=8,
)
history = task.fit(few, batch_size=20, epochs=5, verbose=0)
print("cached:", [round(x, 3) for x in history.history["divergence"]])

"""
## Distillation as a policy gradient

A policy loss needs advantages. Here the advantage of a token is the teacher's
log-probability minus the student's, so that only the sampled tokens are
compared and not the distributions. This needs the least of the teacher, but
more samples and smaller steps than a divergence, and a student that is already
close to it. The last student is trained further. `reverse_kl`, the mean of the
student's log-probability minus the teacher's, should fall.
"""

task = kpt.DistillTask.from_preset(
    folder / "distilled", teacher=teacher, sequence_length=32
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
## Hidden states

`HiddenStateLoss` also compares hidden states: by default those of the
student's layers with the teacher's at the same relative depth, through a
linear map that is trained too and not exported. `SumLoss` adds it to a
divergence. `AttentionLoss` compares attention weights.
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

- `prompt_distillation.py`: move the effect of a long prompt into an adapter.
- `teacher=` also takes a list or a dict of teachers, which `teacher_weights=`
  mixes, or `teacher_column=` selects for each row.
- For a teacher with another tokenizer, use `kpt.losses.ULDLoss()`.
- `sft.py`: checkpoints, packing and adapters, which work here in the same way.
"""
