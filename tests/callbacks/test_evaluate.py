"""`kpt.callbacks.Evaluate`: between steps, without changing training."""

import functools
import random

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import (
    REFERENCE,
    one_layer,
    random_rows,
    read_log,
    starts_again,
    weights,
)

ROWS = random_rows(12, seed=3)
HELD_OUT = random_rows(3, seed=4)
PROMPTS = [{"prompt_ids": [3 + i, 40, 7]} for i in range(8)]


def make(cls=kpt.SFTTask):
    """Returns a task in its first state, without compiling it again."""
    return first_task(cls)()


@functools.cache
def first_task(cls):
    return starts_again(functools.partial(compiled, cls))


def compiled(cls):
    task = cls.from_preset(
        one_layer(REFERENCE / "models" / "llama3"),
        sequence_length=64,
        lora=kpt.LoRA(rank=2, dropout=0.1),
    )
    settings = {}
    if cls is kpt.GRPOTask:
        settings = {"rewards": [score], "num_generations": 2}
        settings |= {"max_completion_length": 4, "num_minibatches": 2}
    task.compile(keras.optimizers.Adam(1e-2), **settings)
    return task


def score(completions):
    """Draws random numbers of Python, as a reward of a user may."""
    return [len(c) % 7 + random.random() for c in completions]


class Counted:
    """Evaluates with all that a user may call, and counts the steps."""

    def __init__(self, rows=HELD_OUT):
        self.steps, self.rows = [], rows

    def __call__(self, task):
        self.steps.append(task.step)
        random.random(), np.random.rand()
        task.generate({"prompt_ids": [3, 4]}, max_tokens=2)
        logps = task.log_probs(HELD_OUT)
        loss = task.evaluate(self.rows, verbose=0)
        value = loss.get("loss", loss.get("reward"))
        return {"loss": value, "logps": float(sum(x.sum() for x in logps))}


def fit(task, directory, evaluate=(), **kwargs):
    is_sft = isinstance(task, kpt.SFTTask)
    random.seed(0), np.random.seed(0)
    return task.fit(
        ROWS if is_sft else PROMPTS,
        batch_size=4,
        callbacks=[kpt.callbacks.MetricsLog(directory), *evaluate],
        verbose=0,
        **{"epochs": 3, **kwargs},
    )


@pytest.mark.parametrize("cls", [kpt.SFTTask, kpt.GRPOTask])
def test_it_changes_nothing_and_is_logged(cls, tmp_path):
    plain = make(cls)
    history = fit(plain, tmp_path / "plain").history
    expected = weights(plain)
    evaluated = make(cls)
    counted = Counted(HELD_OUT if cls is kpt.SFTTask else PROMPTS[:2])
    callback = kpt.callbacks.Evaluate(counted, every=4, name="mine")
    logs = fit(evaluated, tmp_path / "evaluated", [callback]).history
    for name, value in expected.items():
        np.testing.assert_array_equal(value, weights(evaluated)[name], name)
    assert {k: logs[k] for k in history if k[:4] != "time"} == {
        k: v for k, v in history.items() if k[:4] != "time"
    }
    lines = read_log(tmp_path / "evaluated")
    last = len(lines)
    # GRPO: a rollout is two steps.
    assert counted.steps == [4, 8, last] if last % 4 else [4, 8, 12]
    found = [line["step"] for line in lines if "mine/loss" in line]
    assert found == counted.steps
    alone = read_log(tmp_path / "plain")
    for line, without in zip(lines, alone, strict=True):
        assert line["loss"] == without["loss"]
    # Each epoch has the last results, and the weights are the present ones.
    assert len(logs["mine/loss"]) == 3 - (found[0] > last // 3)
    again = counted(evaluated)
    assert again["logps"] == pytest.approx(lines[-1]["mine/logps"], abs=1e-4)


@pytest.mark.parametrize(
    "cls, steps",
    [
        (kpt.SFTTask, [2, 4, 6, 8, 9]),
        pytest.param(
            kpt.GRPOTask, [2, 4, 6, 8, 10, 12], marks=pytest.mark.full
        ),
    ],
)
def test_a_resumed_run_neither_repeats_nor_loses_one(cls, steps, tmp_path):
    """Interrupted in the middle of an epoch, after and before evaluations."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.step == 5:
                raise KeyboardInterrupt

    def run(directory, *others):
        is_sft = cls is kpt.SFTTask
        counted = Counted(HELD_OUT if is_sft else PROMPTS[:2])
        callbacks = [
            kpt.callbacks.Evaluate(counted, every=2, name="mine"),
            kpt.callbacks.Checkpoint(directory, every=2),
            *others,
        ]
        try:
            history = fit(make(cls), directory, callbacks).history
        except KeyboardInterrupt:
            history = None
        return counted.steps, history

    straight, history = run(tmp_path / "straight")
    assert straight == steps
    first, _ = run(tmp_path / "stopped", Interrupt())
    second, resumed = run(tmp_path / "stopped")
    # From the checkpoint of step 4, whose evaluation is kept.
    assert (first, second) == ([2, 4], steps[2:])
    ours, theirs = (read_log(tmp_path / d) for d in ("straight", "stopped"))
    assert len(ours) == len(theirs) == steps[-1]
    for one, other in zip(ours, theirs):
        for name in ("loss", "mine/loss", "mine/logps"):
            assert one.get(name) == other.get(name)
    assert resumed["mine/loss"] == history["mine/loss"][-2:]
    # A finished run trains nothing and evaluates nothing.
    assert run(tmp_path / "stopped")[0] == []


def test_other_callbacks_watch_it(tmp_path):
    values = iter([3.0, 2.0, 1.0, 0.0])
    stop = keras.callbacks.EarlyStopping("mine/x", mode="max", patience=1)
    evaluate = kpt.callbacks.Evaluate(
        lambda task: {"x": next(values)}, every=3, name="mine"
    )
    history = fit(make(), tmp_path, [stop, evaluate], epochs=4)
    assert history.history["mine/x"] == [3.0, 2.0]
    unknown = keras.callbacks.EarlyStopping("other/x", mode="max")
    with pytest.raises(ValueError, match="'other/x'.* does not have"):
        fit(make(), tmp_path / "b", [unknown, evaluate])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), "`function` must be a function"),
        ((print, 0), "`every` must be a positive int"),
        ((print, 5, ""), "`name` must be a string"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kpt.callbacks.Evaluate(*arguments)


@pytest.mark.parametrize(
    "result, message",
    [
        (None, "must return a dict of floats. Received: None"),
        ({"x": "high"}, "must return numbers by name.*'x': 'high'"),
        ({"x": np.array("high")}, "must return numbers by name.*'x': array"),
        ({3: 1.0}, "must return numbers by name.*3: 1.0"),
    ],
)
def test_results_that_are_none_are_refused(result, message, tmp_path):
    callback = kpt.callbacks.Evaluate(lambda task: result, every=1)
    with pytest.raises(ValueError, match=message):
        fit(make(), tmp_path, [callback])


def test_an_error_says_where_it_was_raised(tmp_path):
    def measure(task):
        raise KeyError("score")

    callback = kpt.callbacks.Evaluate(measure, every=2, name="mine")
    with pytest.raises(KeyError) as caught:
        fit(make(), tmp_path, [callback])
    [note] = caught.value.__notes__
    assert note == "'measure' of Evaluate(name='mine') raised this at step 2."


def test_names_are_of_one(tmp_path):
    two = [kpt.callbacks.Evaluate(Counted()) for _ in "ab"]
    with pytest.raises(ValueError, match="name of its own.*2 with name"):
        fit(make(), tmp_path, two)
