"""Promises of `fit`, `evaluate` and `generate` other than the numbers."""

import keras
import numpy as np
import optax
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

MODEL = one_layer(REFERENCE / "models/qwen3")
ROWS = random_rows(12, seed=2)
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"Say {i}."},
            {"role": "assistant", "content": f"It is {i}."},
        ]
    }
    for i in range(6)
]


def make(**kwargs):
    kwargs.setdefault("sequence_length", 64)
    return kpt.SFTTask.from_preset(MODEL, **kwargs)


@pytest.fixture(scope="module")
def reader():
    """A task that no test here trains."""
    task = make()
    task.compile()
    return task


@starts_again
def task_that_stays():
    """Weights stay put, so that a step's loss tells its batch."""
    task = make()
    task.compile(optimizer=keras.optimizers.SGD(0.0))
    return task


def test_skip_steps_leaves_out_exactly_those_batches(tmp_path):
    """Steps keep their numbers and batches: only 2 and 5 are gone."""
    logs = {}
    for name, skip in (("whole", ()), ("less", (2, 5))):
        task = task_that_stays()
        task.fit(
            ROWS,
            batch_size=4,
            epochs=2,
            verbose=0,
            skip_steps=skip,
            callbacks=[kpt.callbacks.MetricsLog(tmp_path / name)],
        )
        logs[name] = {x["step"]: x["loss"] for x in read_log(tmp_path / name)}
        assert int(task.optimizer.iterations.value) == 6 - len(skip)
    assert sorted(logs["whole"]) == [1, 2, 3, 4, 5, 6]
    assert sorted(logs["less"]) == [1, 3, 4, 6]
    for step, loss in logs["less"].items():
        assert loss == logs["whole"][step]


def test_evaluate_is_the_token_mean_of_all_rows(reader):
    """Batches of unequal token counts weigh by their tokens."""
    task = reader
    one = task.evaluate(ROWS, batch_size=12)
    many = task.evaluate(ROWS, batch_size=5)
    for key in ("loss", "perplexity", "entropy", "mean_token_accuracy"):
        np.testing.assert_allclose(one[key], many[key], rtol=1e-5)
    logps = task.log_probs(ROWS)
    total = sum(-(x * r["completion_mask"]).sum() for x, r in zip(logps, ROWS))
    count = sum(sum(r["completion_mask"]) for r in ROWS)
    np.testing.assert_allclose(one["loss"], total / count, rtol=1e-5)
    np.testing.assert_allclose(one["perplexity"], np.exp(one["loss"]))


def test_evaluate_also_generates(reader):
    task = reader
    found = task.evaluate(CHAT, num_samples=2, max_tokens=4)["samples"]
    keys = {"prompt", "completion", "reference"}
    assert [set(s) for s in found] == [keys] * 2
    assert found[1]["prompt"].endswith("<|im_start|>assistant\n")
    assert found[1]["reference"].strip().endswith("It is 1.")
    longer = [{"messages": CHAT[0]["messages"] + CHAT[1]["messages"]}]
    found = task.evaluate(longer, num_samples=1, max_tokens=4)["samples"]
    assert found[0]["reference"].strip().endswith("It is 0.")


def test_validation_early_stopping_and_schedules_work_as_in_keras():
    task = make(lora=kpt.LoRA(rank=2))
    task.compile(optimizer=keras.optimizers.Adam(1e-9))
    history = task.fit(
        ROWS,
        batch_size=4,
        epochs=6,
        verbose=0,
        validation_data=ROWS[:3],
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", 0.1, patience=2),
            keras.callbacks.LearningRateScheduler(lambda e: 1e-9 * (e + 1)),
        ],
    )
    assert len(history.history["val_loss"]) == 3
    np.testing.assert_allclose(
        history.history["learning_rate"], [1e-9, 2e-9, 3e-9], rtol=1e-5
    )


def test_shuffle_is_seeded_and_differs_between_epochs(tmp_path):
    def run(name, **kwargs):
        task = task_that_stays()
        log = kpt.callbacks.MetricsLog(tmp_path / name)
        task.fit(
            ROWS, batch_size=4, epochs=2, verbose=0, callbacks=[log], **kwargs
        )
        return [x["loss"] for x in read_log(tmp_path / name)]

    first = run("a", seed=1)
    assert first == run("b", seed=1)
    assert first != run("c", seed=2)
    assert first[:3] != first[3:]
    kept = run("d", shuffle=False)
    assert kept[:3] == kept[3:]


def test_base_weights_are_bit_equal_under_lora():
    task = make(lora=kpt.LoRA(rank=4, dropout=0.1))
    base = [np.array(v.value) for v in task.causal_lm.weights]
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    before = weights(task)
    task.fit(ROWS, batch_size=4, epochs=2, verbose=0)
    task.generate("Hello", max_tokens=4, temperature=0)
    for array, variable in zip(base, task.causal_lm.weights):
        np.testing.assert_array_equal(array, np.asarray(variable.value))
    assert all((before[k] != v).any() for k, v in weights(task).items())


def test_generate_takes_what_it_says(reader):
    task = reader
    text = task.generate("Hello", max_tokens=4, temperature=0)
    assert isinstance(text, str)
    messages = [{"role": "user", "content": "Hi"}]
    several = task.generate([messages, messages], max_tokens=4, seed=3)
    assert len(several) == 2
    one = task.generate(messages, max_tokens=4, temperature=0)
    assert isinstance(one, str)
    ids = task.generate(
        {"prompt_ids": task.tokenizer.encode("Hello")},
        max_tokens=4,
        temperature=0,
        return_token_ids=True,
    )
    assert task.tokenizer.decode(ids) == text
    # Each is sampled again with the same seed, and otherwise with another.
    sample = dict(max_tokens=8, temperature=1.0, return_token_ids=True)
    left = task.generate(["a", "b c d"], seed=1, **sample)
    assert left == task.generate(["a", "b c d"], seed=1, **sample)
    assert left != task.generate(["a", "b c d"], seed=2, **sample)
    only = task.generate(["a"], top_k=1, seed=5, **sample)
    greedy = task.generate(
        ["a"], max_tokens=8, temperature=0, return_token_ids=True
    )
    assert only == greedy


def test_generate_stops_at_any_token_of_the_set(reader):
    task = reader
    free = task.generate(
        "Hello",
        max_tokens=12,
        temperature=0,
        stop_token_ids=None,
        return_token_ids=True,
    )
    stop = free[5]
    cut = task.generate(
        "Hello",
        max_tokens=12,
        temperature=0,
        stop_token_ids=[stop, 3],
        return_token_ids=True,
    )
    assert cut == free[: free.index(stop) + 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_sixteen_bits_train(dtype):
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen3",
        sequence_length=64,
        dtype=dtype,
        lora=kpt.LoRA(rank=4),
    )
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    losses = task.fit(ROWS, batch_size=4, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.5
    assert all(v.dtype == "float32" for v in task.trainable_variables)


def test_expert_train_step_runs_under_fit():
    class Halved(kpt.SFTTask):
        def train_step(self, state, batch):
            gradients, logs = self.loss_and_gradients(state, batch)
            return self.apply_gradients(
                state, [g / 2 for g in gradients], logs
            )

    results = []
    for cls, rate in ((Halved, 0.2), (kpt.SFTTask, 0.1)):
        task = cls.from_preset(MODEL, sequence_length=64)
        task.compile(optimizer=keras.optimizers.SGD(rate), max_grad_norm=None)
        task.fit(ROWS, batch_size=4, shuffle=False, verbose=0)
        results.append(weights(task))
    for key, value in results[0].items():
        np.testing.assert_allclose(value, results[1][key], atol=1e-6)


def test_template_variables_reach_training_and_generation():
    """Qwen 3's template opens the answer with an empty thought or not."""
    plain, quiet = (
        make(chat_template_kwargs=kwargs)
        for kwargs in ({}, {"enable_thinking": False})
    )
    messages = [{"role": "user", "content": "Hi"}]
    found = []
    for task in (plain, quiet):
        generate = task._engine.generate

        def recorded(requests, generate=generate, **kwargs):
            found.append(list(requests[0].token_ids))
            return generate(requests, **kwargs)

        task._engine.generate = recorded
        task.generate(messages, max_tokens=1)
    assert found[1][: len(found[0])] == found[0]
    assert "<think>" in quiet.tokenizer.decode(
        found[1][len(found[0]) :], skip_special_tokens=False
    )


def test_an_own_step_need_not_report_every_metric():
    class Bare(kpt.SFTTask):
        def train_step(self, state, batch):
            gradients, logs = self.loss_and_gradients(state, batch)
            logs = {"loss": logs["loss"], "num_tokens": logs["num_tokens"]}
            return self.apply_gradients(state, gradients, logs)

    task = Bare.from_preset(MODEL, sequence_length=64)
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    history = task.fit(ROWS, batch_size=4, verbose=0).history
    assert "entropy" not in history and history["loss"][0] > 0


def test_a_refused_adapter_leaves_the_task_as_it_was(tmp_path):
    other = kpt.SFTTask.from_preset(
        one_layer(REFERENCE / "models/llama3"), lora=kpt.LoRA(rank=2)
    )
    other.save_adapter(tmp_path)
    task = make()
    expected = task.log_probs(ROWS[:2])
    with pytest.raises(ValueError, match="another model"):
        task.load_adapter(tmp_path)
    assert task.adapter is None
    assert len(task.trainable_variables) == len(task.causal_lm.weights)
    for found, want in zip(task.log_probs(ROWS[:2]), expected):
        np.testing.assert_array_equal(found, want)


def test_bfloat16_weights_assigned_after_compile_are_trained_on():
    """Neither the old masters nor a second `compile` undo them."""
    optimizer = keras.optimizers.SGD(1e-6)
    task = make(dtype="bfloat16")
    task.compile(optimizer=optimizer)
    task.fit(ROWS, batch_size=4, verbose=0)
    variable = task.trainable_variables[-1]
    variable.assign(variable.value * 2)
    wanted = np.asarray(variable.value, "float32")
    task.compile(optimizer=optimizer)
    task.fit(ROWS, batch_size=4, verbose=0)
    np.testing.assert_allclose(
        np.asarray(variable.value, "float32"), wanted, rtol=0.01
    )


def test_the_rate_of_an_injected_schedule_is_that_of_the_step(tmp_path):
    schedule = optax.linear_schedule(1e-2, 0.0, 3)
    task = make()
    task.compile(optimizer=optax.inject_hyperparams(optax.sgd)(schedule))
    log = kpt.callbacks.MetricsLog(tmp_path)
    task.fit(ROWS, batch_size=4, verbose=0, callbacks=[log])
    np.testing.assert_allclose(
        [x["learning_rate"] for x in read_log(tmp_path)],
        [schedule(i) for i in range(3)],
        rtol=1e-6,
    )
