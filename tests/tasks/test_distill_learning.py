"""A student learns from a teacher what its rows do not say.

The job is to walk through a town of `SIDE * SIDE` squares to one of its
corners, each token being the next square. The prompt names the corner and the
first square. The teacher has seen many shortest routes; the student has few
rows, of people who often turn anywhere.
"""

import functools

import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import check_most

SIDE, END, FIRST = 5, 1, 2
SQUARES = range(SIDE * SIDE)
CORNERS = (0, SIDE - 1, SIDE * SIDE - SIDE, SIDE * SIDE - 1)
MOST = 14
# Of a prompt and a route.
LONGEST = 2 + MOST
losses = kpt.losses


def distance(a, b):
    return abs(a // SIDE - b // SIDE) + abs(a % SIDE - b % SIDE)


NEXT = [[b for b in SQUARES if distance(a, b) == 1] for a in SQUARES]


def route_row(rng, trip, slips):
    """A route, of which a share of the moves goes anywhere."""
    square, corner = trip
    end, route = CORNERS[corner], []
    while square != end and len(route) < MOST - 1:
        moves = NEXT[square]
        if rng.random() >= slips:
            here = distance(square, end)
            moves = [x for x in moves if distance(x, end) < here]
        square = int(rng.choice(moves))
        route.append(FIRST + square)
    start = [FIRST + len(SQUARES) + corner, FIRST + trip[0]]
    return {"prompt_ids": start, "completion_ids": [*route, END]}


def is_right(row, completion, shortest):
    """Returns whether a route goes by neighbours to its corner."""
    corner, square = (x - FIRST for x in row["prompt_ids"])
    end = CORNERS[corner - len(SQUARES)]
    most = distance(square, end) if shortest else MOST
    *route, last = completion or [None]
    for x in route:
        if x - FIRST not in NEXT[square]:
            return False
        square = x - FIRST
    return last == END and square == end and len(route) <= most


def tiny_model(seed, dim, num_layers):
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.Qwen3Backbone(
        vocabulary_size=FIRST + len(SQUARES) + len(CORNERS),
        num_layers=num_layers,
        num_query_heads=dim // 16,
        num_key_value_heads=dim // 16,
        head_dim=16,
        hidden_dim=dim,
        intermediate_dim=2 * dim,
        tie_word_embeddings=False,
    )
    return keras_hub.models.Qwen3CausalLM(backbone)


def split(seed):
    """Trips held out, and others."""
    trips = [
        (a, c) for c, end in enumerate(CORNERS) for a in SQUARES if a != end
    ]
    np.random.default_rng(seed).shuffle(trips)
    trips = [tuple(map(int, trip)) for trip in trips]
    return trips[:32], trips[32:]


@functools.cache
def learned_teacher(seed):
    rng = np.random.default_rng(seed)
    _, trips = split(seed)
    task = kpt.SFTTask(tiny_model(100 + seed, 64, 2), sequence_length=LONGEST)
    task.compile(keras.optimizers.AdamW(3e-3))
    rows = [route_row(rng, trip, 0.0) for trip in trips for _ in range(240)]
    task.fit(rows, batch_size=64, verbose=0)
    return task.causal_lm


def scores(task, seed):
    """Scores the student of a `DistillTask` on unseen trips.

    Returns:
        Shares: of samples that arrive by a shortest route, of those that
        arrive, and of tokens whose most probable one is the teacher's.
    """
    rng = np.random.default_rng(seed)
    rows = [route_row(rng, trip, 0.0) for trip in split(seed)[0]]
    agreement = task.evaluate(rows, 32, verbose=0)["agreement"]
    samples = task.generate(
        [{"prompt_ids": row["prompt_ids"]} for row in rows],
        max_tokens=MOST,
        num_generations=8,
        stop_token_ids=[END],
        return_token_ids=True,
        seed=seed,
        verbose=0,
    )
    pairs = [(r, list(ids)) for r, s in zip(rows, samples) for ids in s]
    shortest, arrived = (
        np.mean([is_right(row, ids, which) for row, ids in pairs])
        for which in (True, False)
    )
    return shortest, arrived, agreement


def few_rows(seed, count, slips):
    rng = np.random.default_rng(seed)
    trips = split(seed)[1]
    return [route_row(rng, trips[i % 64], slips) for i in range(count)]


def train(seed, rows, loss=None, steps=120, **settings):
    """Scores a student after some steps of 12 rows."""
    teacher, student = learned_teacher(seed), tiny_model(seed, 32, 1)
    if loss is None:
        task = kpt.SFTTask(student, sequence_length=LONGEST)
    else:
        task = kpt.DistillTask(
            student, teacher=teacher, sequence_length=LONGEST
        )
        settings["loss"] = loss
    task.compile(keras.optimizers.AdamW(1e-2), **settings)
    task.fit(rows, batch_size=12, epochs=steps * 12 // len(rows), verbose=0)
    if loss is None:
        task = kpt.DistillTask(
            student, teacher=teacher, sequence_length=LONGEST
        )
        task.compile()
    return scores(task, seed)


def check_against_fine_tuning(seed):
    rows = few_rows(seed, 60, slips=0.4)
    alone = train(seed, rows)
    distilled = train(seed, rows, losses.ForwardKLLoss())
    print("alone", np.round(alone, 3), "distilled", np.round(distilled, 3))
    assert distilled[0] > alone[0] + 0.15
    assert distilled[2] > alone[2] + 0.1


def check_own_samples(seed):
    """The rows are routes of somebody who never errs, so that the student
    sees in them none of the squares that its own errors lead to."""
    rows = few_rows(seed, 24, slips=0.0)
    given = train(seed, rows, losses.ForwardKLLoss(), 180)
    own = train(
        seed,
        rows,
        losses.ForwardKLLoss(),
        180,
        on_policy=True,
        stop_token_ids=[END],
        max_completion_length=MOST,
    )
    print("given", np.round(given, 3), "own", np.round(own, 3))
    assert own[1] > given[1] + 0.1
    assert own[2] > given[2]


@pytest.mark.usefixtures("optimized")
def test_a_teacher_helps():
    """In one test, as both learn from one teacher of a seed."""
    for check in (check_against_fine_tuning, check_own_samples):
        check_most(check, (0, 1, 2))
