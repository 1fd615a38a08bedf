"""Rollouts that are sampled and scored while others are trained on."""

import os
import pathlib
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import (
    REFERENCE,
    one_layer,
    read_log,
    starts_again,
    weights,
)
from tests.tasks.test_grpo import (
    MODEL,
    Tables,
    compiled,
    fit,
    lora,
    make,
    odd,
    prompts,
)

STILL = keras.optimizers.SGD


def run(task, count=24, **settings):
    tables = Tables()
    fit(task, prompts(count), callbacks=[tables], **settings)
    return tables.seen


def trained(seen):
    """The prompts of each step, in order."""
    return [table["prompt"] for table, _ in seen]


@pytest.mark.parametrize(
    "staleness", [1, pytest.param(3, marks=pytest.mark.full)]
)
def test_weights_that_stay_give_the_samples_of_taking_turns(staleness):
    """Samples that are interrupted too, with an adapter too."""
    settings = {"optimizer": STILL(0.0), "max_completion_length": 40}
    task = starts_again(lambda: make(lora(), **settings))
    expected = run(task())
    seen = run(task(), max_staleness=staleness)
    assert len(seen) == len(expected) == 6
    for (one, _), (other, logs) in zip(expected, seen):
        assert one == other
        assert logs["staleness/max"] <= staleness
    # All that may be begun at once is.
    assert seen[0][1]["staleness/max"] == 0
    assert seen[-1][1]["staleness/max"] > 0


def test_what_is_trained_on_is_never_older_than_asked_for():
    first = starts_again(
        lambda: make(num_minibatches=2, max_completion_length=40)
    )
    task = first()
    seen = run(task, epochs=2, max_staleness=2)
    assert task.step == len(seen) == 24
    assert task.rollout.weight_version == 13
    ages = [logs["staleness/max"] for _, logs in seen]
    assert max(ages) == 2 and ages[0] == 0
    # An epoch's first rollouts wait for the last one of the epoch before.
    assert ages[12] == 0
    assert trained(seen) == trained(run(first(), epochs=2))


def test_a_run_that_cannot_begin_leaves_the_loss():
    """Its loss is corrected for stale tokens only while it runs."""
    task = kpt.GRPOTask.from_preset(
        one_layer(REFERENCE / "models/llama3"),
        reference=MODEL,
        sequence_length=64,
    )
    task.tokenizer = None
    loss = kpt.losses.GRPOLoss(beta=0.1)
    compiled(task, loss=loss)
    follows = kpt.callbacks.UpdateReference(every=1)
    with pytest.raises(ValueError, match="began as the policy"):
        fit(task, prompts(), max_staleness=1, callbacks=[follows])
    assert task.objective == loss


def test_a_stale_token_counts_by_how_probable_it_is_now():
    loss = kpt.losses.GRPOLoss(beta=0.0)
    task = make(loss=loss)
    seen = run(task, max_staleness=1)
    ratio = "sampling/importance_sampling_ratio/"
    for i, (_, logs) in enumerate(seen):
        assert (logs[ratio + "max"] > 1.001) == (i > 0)
        assert logs[ratio + "max"] <= 2.0
        assert (logs["sampling/effective_sample_size"] < 0.9999) == (i > 0)
    # It is the run's, not the loss's.
    assert task.objective == loss
    assert ratio + "max" not in run(task)[0][1]
    # What the user says of it holds.
    own = kpt.losses.ImportanceCorrection("token_mask", max_ratio=1.0)
    task = make(loss=kpt.losses.GRPOLoss(beta=0.0, correction=own))
    for _, logs in run(task, max_staleness=1):
        assert logs[ratio + "max"] <= 1.0


def test_rollouts_are_scored_concurrently_and_during_training():
    """If sampling and training alternated, the rewards would never end."""
    begun = [threading.Event() for _ in range(6)]
    is_trained = [threading.Event() for _ in range(6)]
    numbers = iter(range(6))

    def patient(completions):
        i = next(numbers)
        begun[i].set()
        if i == 0:
            # It is scored in its own thread: the next one has begun too.
            assert begun[1].wait(60)
        else:
            # While it is scored the previous one is trained on.
            assert is_trained[i - 1].wait(60)
        return odd(completions)

    class Trained(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            is_trained[self.model.step - 1].set()

    task = make(rewards=[patient])
    fit(task, prompts(24), max_staleness=1, callbacks=[Trained()])
    assert task.step == 6


def test_dynamic_sampling_takes_each_prompt_once():
    def some(completions, prompt_ids):
        return [
            float(len(p) > 4) * r for p, r in zip(prompt_ids, odd(completions))
        ]

    task = starts_again(
        lambda: make(rewards=[some], max_resamples=2, optimizer=STILL(0.0))
    )
    seen, expected = (run(task(), max_staleness=n) for n in (2, 0))
    assert trained(seen) == trained(expected)


def test_a_reward_that_fails_ends_the_run_before_its_step():
    calls = []

    def fails(completions):
        calls.append(len(completions))
        if len(calls) == 4:
            raise KeyError("no score")
        return odd(completions)

    task = make(rewards=[fails], optimizer=STILL(0.1))
    with pytest.raises(ValueError, match="'fails' raised KeyError"):
        # Rollouts are scored one after the other.
        fit(task, prompts(24), max_staleness=1)
    assert 1 <= task.step <= 4
    # No state is left behind: the task can be used again.
    assert not task.rollout.is_interrupted
    assert task.rollout.turn.acquire(blocking=False)
    task.rollout.turn.release()
    before = task.step
    fit(task, prompts(8))
    assert task.step == before + 2


@pytest.mark.parametrize(
    "staleness", [0, pytest.param(1, marks=pytest.mark.full)]
)
def test_a_rollout_that_fails_costs_no_step(tmp_path, staleness):
    calls = []

    def fails_once(completions):
        calls.append(len(completions))
        if len(calls) == 4:
            raise KeyError("no score")
        return odd(completions)

    def made():
        return make(lora(), rewards=[fails_once])

    def go(task):
        tables = Tables()
        callbacks = [kpt.callbacks.Checkpoint(tmp_path), tables]
        fit(task, callbacks=callbacks, epochs=2, max_staleness=staleness)
        return trained(tables.seen)

    begins, resumed = starts_again(made), made()
    first = begins()
    with pytest.raises(ValueError, match="KeyError"):
        go(first)
    made_steps = first.step
    after = go(resumed)
    assert made_steps > 0 and resumed.step == 4
    # It resumes after the last step that was made.
    assert len(after) == 4 - made_steps
    if staleness == 0:
        straight = begins()
        fit(straight, epochs=2)
        for name, value in weights(straight).items():
            np.testing.assert_array_equal(weights(resumed)[name], value)


class StopAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.last = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.step == self.last:
            raise KeyboardInterrupt


def test_a_run_resumes_with_the_prompts_not_trained_on(tmp_path):
    def callbacks(*more):
        return [
            kpt.callbacks.Checkpoint(tmp_path, every=1),
            kpt.callbacks.MetricsLog(tmp_path),
            *more,
        ]

    settings = {"max_staleness": 2, "epochs": 2}
    begins, tables = starts_again(lambda: make(lora())), Tables()
    with pytest.raises(KeyboardInterrupt):
        fit(begins(), callbacks=callbacks(tables, StopAt(3)), **settings)
    again, rest = make(lora()), Tables()
    fit(again, callbacks=callbacks(rest), **settings)
    log = read_log(tmp_path)
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    seen = trained(tables.seen[: 4 - len(rest.seen)]) + trained(rest.seen)
    assert seen == trained(run(begins(), 8, epochs=2))
    with pytest.raises(ValueError, match="max_staleness differs"):
        fit(begins(), callbacks=callbacks(), epochs=3)


def test_evaluating_in_the_middle_takes_its_turn():
    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(self.model.evaluate(prompts(2))["reward"])

    found, task = [], make(max_completion_length=40)
    fit(
        task,
        prompts(16),
        callbacks=[Looks()],
        max_staleness=2,
        validation_data=prompts(2),
    )
    assert len(found) == 4 and np.isfinite(found).all()


@pytest.mark.full
def test_ppo_and_distillation_too():
    task = kpt.PPOTask.from_preset(MODEL)
    task.tokenizer = None
    task.compile(
        keras.optimizers.SGD(0.1),
        rewards=[odd],
        max_completion_length=6,
        num_iterations=2,
    )
    logs = [x for _, x in run(task, 12, max_staleness=1)]
    assert len(logs) == 6 and logs[-1]["staleness/max"] == 1
    assert logs[-1]["sampling/importance_sampling_ratio/max"] > 1
    task = kpt.DistillTask.from_preset(MODEL, teacher=MODEL)
    before = weights(task)
    task.compile(
        keras.optimizers.SGD(0.1), on_policy=True, max_completion_length=6
    )
    logs = [x for _, x in run(task, 12, max_staleness=1)]
    assert len(logs) == 3 and logs[-1]["staleness/max"] == 1
    for name, value in weights(task).items():
        np.testing.assert_allclose(value, before[name], atol=1e-6)


def test_rows_that_are_given_are_not_sampled_ahead():
    task = kpt.DistillTask.from_preset(MODEL, teacher=MODEL)
    task.compile()
    with pytest.raises(ValueError, match="on_policy=True"):
        fit(task, max_staleness=1)


@pytest.mark.parametrize("wrong", [-1, 0.5, True, None])
def test_how_stale_must_be_a_count(wrong):
    with pytest.raises(ValueError, match=f"max_staleness={wrong}"):
        fit(make(), max_staleness=wrong)


HANGING = """
import sys, time
import keras
import keras_posttrain as kpt

def hang(completions):
    if calls: time.sleep(600)
    calls.append(1)
    return [float(i) for i in range(len(completions))]

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise StopIteration("enough")

calls = []
task = kpt.GRPOTask.from_preset(sys.argv[1], lora=kpt.LoRA(rank=2))
task.compile(rewards=[hang], num_generations=2, max_completion_length=3)
try:
    task.fit(
        [{"prompt": "a"}] * 8,
        batch_size=2,
        verbose=0,
        max_staleness=1,
        callbacks=[Stop()],
    )
except StopIteration:
    print("ended", flush=True)
"""


def test_a_reward_that_hangs_ends_with_its_process():
    """`fit` is over while the next rollout is scored, and will ever be."""
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(MODEL)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    with process:
        assert "ended\n" in process.stdout
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
