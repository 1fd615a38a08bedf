"""What a Keras user tries: it works, or a line says what to use instead."""

import functools

import keras
import numpy as np
import pytest
import transformers

import keras_posttrain as kpt
from keras_posttrain.training import keras_words, monitors
from tests.support import REFERENCE, one_layer, random_rows, weights

MODEL = one_layer(REFERENCE / "models/qwen3")
ROWS = random_rows(4, seed=9)
PROMPTS = [{"prompt_ids": [5, 6]}, {"prompt_ids": [7, 8]}]


def make(kind=kpt.SFTTask, **kwargs):
    kwargs = {"sequence_length": 64, "lora": kpt.LoRA(rank=2), **kwargs}
    return kind.from_preset(MODEL, **kwargs)


def refused(function, *parts, error=ValueError):
    with pytest.raises(error) as caught:
        function()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.fixture(scope="module")
def sft():
    task = make()
    task.compile()
    return task


@pytest.fixture(scope="module")
def grpo():
    return make(kpt.GRPOTask)


def compiled(task, rewards, **kwargs):
    settings = {"max_completion_length": 4, "num_generations": 2, **kwargs}
    task.compile(rewards=rewards, **settings)
    return task


class Falling:
    """A reward that falls from call to call, or rises."""

    def __init__(self, sign=-1.0):
        self.sign, self.calls = sign, 0

    def __call__(self, completions, **columns):
        self.calls += 1
        return [self.sign * self.calls + i for i in range(len(completions))]


# Watched metrics


@pytest.mark.parametrize(
    "name, expected",
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_perplexity", "min"),
        ("kl", "min"),
        ("nll_loss", "min"),
        ("divergence", "min"),
        ("mean_token_accuracy", "max"),
        ("val_mean_token_accuracy", "max"),
        ("reward", "max"),
        ("val_reward", "max"),
        ("rewards/correct/mean", "max"),
        ("rewards/accuracies", "max"),
        ("rewards/margins", "max"),
        ("accuracy", "max"),
        ("val_pass@8", "max"),
        ("maj@4", "max"),
        ("rewards/correct/std", None),
        ("reward_std", None),
        ("entropy", None),
        ("completions/mean_length", None),
    ],
)
def test_metrics_have_a_direction(name, expected):
    assert monitors.direction(name) == expected


@pytest.fixture(scope="module")
def falling():
    """A task with a reward whose direction is set, and this reward."""
    reward = Falling()
    settings = {"optimizer": keras.optimizers.SGD(1.0)}
    return compiled(make(kpt.GRPOTask), reward, **settings), reward


@pytest.mark.parametrize("sign, epochs", [(-1.0, 2), (1.0, 4)])
def test_early_stopping_maximises_the_reward(falling, sign, epochs):
    grpo, reward = falling
    reward.sign = sign
    stop = keras.callbacks.EarlyStopping(monitor="reward", patience=1)
    history = grpo.fit(
        PROMPTS, batch_size=2, epochs=4, callbacks=[stop], verbose=0
    )
    assert len(history.epoch) == epochs


def test_the_best_weights_come_back(falling):
    grpo, reward = falling
    reward.sign, kept = -1.0, []
    grpo.fit(
        PROMPTS,
        batch_size=2,
        epochs=3,
        callbacks=[
            keras.callbacks.EarlyStopping(
                "reward", patience=2, restore_best_weights=True
            ),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: kept.append(weights(grpo))
            ),
        ],
        verbose=0,
    )
    final = weights(grpo)
    first, last = kept[0], kept[-1]
    assert any((first[k] != last[k]).any() for k in first)
    for name, value in first.items():
        np.testing.assert_array_equal(value, final[name], name)


@pytest.mark.parametrize(
    "monitor", ["val_mean_token_accuracy", "val_perplexity", "loss"]
)
@pytest.mark.parametrize(
    "kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau]
)
def test_rows_are_watched(sft, monitor, kind):
    callback = kind(monitor=monitor, patience=1)
    settings = {"epochs": 2, "validation_data": ROWS, "verbose": 0}
    sft.fit(ROWS, callbacks=[callback], **settings)
    assert callback.mode == ("max" if "accuracy" in monitor else "min")
    assert callback.best is not None


def distilled():
    task = make(kpt.DistillTask, teacher=MODEL)
    task.compile(on_policy=True, max_completion_length=4)
    return task, PROMPTS, ROWS


def ppo():
    task = compiled(make(kpt.PPOTask), [Falling()], num_iterations=1)
    return task, PROMPTS, PROMPTS


def trained():
    task = make()
    task.compile()
    return task, ROWS, ROWS


@pytest.mark.parametrize("case", [trained, ppo, distilled])
def test_every_metric_of_a_run_can_be_watched(case):
    """None that Keras's history has is refused as unknown."""
    task, rows, held_out = case()
    settings = {"batch_size": 2, "validation_data": held_out, "verbose": 0}
    history = task.fit(rows, **settings).history
    callbacks = [
        keras.callbacks.EarlyStopping(name, mode="max", patience=9)
        for name in history
    ]
    task.fit(rows, callbacks=callbacks, **settings)
    assert all(callback.best is not None for callback in callbacks)


def test_a_misspelt_metric_is_refused_before_training(grpo):
    compiled(grpo, [Falling()])
    before = grpo.step
    for monitor, parts in [
        ("rewards", ["'rewards'", "Did you mean", "'reward'"]),
        ("val_reward", ["'val_reward'", "validation_data"]),
        ("val_loss", ["'val_loss'", "validation_data"]),
    ]:
        stop = keras.callbacks.EarlyStopping(monitor)
        refused(lambda s=stop: grpo.fit(PROMPTS, callbacks=[s]), *parts)
    stop = keras.callbacks.EarlyStopping("val_loss")
    refused(
        lambda: grpo.fit(PROMPTS, validation_data=PROMPTS, callbacks=[stop]),
        "does not compute it",
        "val_reward",
    )
    assert grpo.step == before


def test_a_callback_may_add_a_metric(sft):
    class Bleu(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["bleu"] = float(epoch)

    stop = keras.callbacks.EarlyStopping("bleu", mode="max")
    sft.fit(ROWS, epochs=2, callbacks=[Bleu(), stop], verbose=0)
    assert stop.best == 1.0


# What is handed in


def test_a_reward_model_is_a_reward(grpo):
    model = make(kpt.RewardTask)
    rows = [{"prompt": "a b"}, {"prompt": "c d"}]
    compiled(grpo, [model])
    found = grpo.evaluate(rows, verbose=0)
    compiled(grpo, [kpt.rewards.ModelReward(model)])
    assert found == grpo.evaluate(rows, verbose=0)
    assert found["reward"] == found["rewards/model/mean"]
    # Alone, without a list.
    compiled(grpo, model)
    assert found == grpo.evaluate(rows, verbose=0)


def test_one_reward_needs_no_list(grpo):
    def short(completions):
        return [-float(len(c)) for c in completions]

    compiled(grpo, short)
    assert [f.__name__ for f in grpo.scoring.rewards] == ["short"]


@pytest.mark.parametrize(
    "made",
    [
        str,
        lambda path: path,
        kpt.Tokenizer.from_directory,
        lambda path: transformers.AutoTokenizer.from_pretrained(str(path)),
    ],
    ids=["str", "path", "Tokenizer", "transformers"],
)
def test_tokenizers_of_every_kind(made, sft, tmp_path):
    lm = make(lora=None).causal_lm
    task = kpt.SFTTask(lm, tokenizer=made(MODEL), sequence_length=64)
    ours, theirs = task.tokenizer, sft.tokenizer
    assert ours.encode("2 + 2 = 4") == theirs.encode("2 + 2 = 4")
    assert ours.stop_token_ids == theirs.stop_token_ids
    assert ours.chat_template == theirs.chat_template
    task.export(tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.encode("2 + 2 = 4") == theirs.encode("2 + 2 = 4")


def test_a_tokenizer_beside_the_presets_own(tmp_path):
    kpt.Tokenizer.from_directory(MODEL).with_chat_template(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    ).save(tmp_path)
    task = make(tokenizer=tmp_path)
    assert task.tokenizer.chat_template.startswith("{% for m in messages %}")


def test_settings_may_be_numpys(tmp_path):
    """A run with them is the one with Python's numbers, checkpoints too."""

    def run(i, f, directory):
        task = make(
            kpt.GRPOTask,
            lora=kpt.LoRA(rank=i(2), alpha=f(4), dropout=f(0.5)),
            sequence_length=i(64),
        )
        compiled(
            task,
            [Falling()],
            num_generations=i(2),
            max_completion_length=i(4),
            temperature=f(1),
            max_grad_norm=f(1),
            micro_batch_size=i(2),
        )
        task.fit(
            PROMPTS,
            batch_size=i(1),
            epochs=i(1),
            seed=i(3),
            callbacks=[kpt.callbacks.Checkpoint(directory, every=i(1))],
            verbose=0,
        )
        return task

    ours = weights(run(int, float, tmp_path / "a"))
    task = run(np.int64, np.float32, tmp_path / "b")
    for name, value in weights(task).items():
        np.testing.assert_array_equal(value, ours[name], name)
    # Python's numbers resume the same run.
    assert run(int, float, tmp_path / "b").step == 2


# Steps of Keras's kind


def test_a_step_that_returns_logs_alone_is_refused():
    class Logs(kpt.SFTTask):
        def train_step(self, state, batch):
            return {"loss": 0.0}

    task = make(Logs)
    task.compile()
    refused(lambda: task.fit(ROWS, verbose=0), "`(logs, state)`", "'loss'")


def test_every_word_says_what_to_use():
    task = make()
    given = {"from_preset": ["no such preset"], "generate": ["a"]}
    for method, words in keras_words.ARGUMENTS.items():
        for word in words:
            call = functools.partial(
                getattr(task, method), *given.get(method, [])
            )
            refused(lambda c=call, w=word: c(**{w: 1}), f"`{word}`")
    for name in keras_words.METHODS:
        refused(getattr(task, name), f"`{name}`")


@pytest.mark.parametrize(
    "method, argument, places",
    [
        ("from_preset", "micro_batch_size", "`compile` and `plan`."),
        ("from_preset", "batch_size", "`fit`, `evaluate`, `log_probs` and"),
        ("from_preset", "teacher_column", "`compile`."),
        ("from_task", "max_tokens", "`generate`."),
        ("compile", "epochs", "`fit`."),
        ("compile", "lora", "`from_preset`."),
        ("compile", "teacher", "`from_preset`."),
        ("fit", "micro_batch_size", "`compile` and `plan`."),
        ("fit", "num_generations", "`compile` and `generate`."),
        ("evaluate", "temperature", "`compile` and `generate`."),
        ("generate", "packing", "`fit` and `plan`."),
        ("log_probs", "max_tokens", "`generate`."),
        ("plan", "temperature", "`compile` and `generate`."),
    ],
)
def test_a_misplaced_argument_is_shown_its_place(method, argument, places):
    parts = [f"`DistillTask.{method}` has no", f"`{argument}`", places]
    call = getattr(kpt.DistillTask, method)
    # Before anything is loaded.
    given = ["no such preset"]
    if method not in ("from_preset", "from_task"):
        given = [make(kpt.DistillTask)]
        given[0].compile()
    refused(lambda: call(*given, **{argument: 1}), *parts, error=TypeError)


def test_a_subclass_has_arguments_of_its_own():
    class Shorter(kpt.SFTTask):
        def __init__(self, *args, factor=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.factor = factor

        def fit(self, rows):
            return super().fit(rows, batch_size=4, packing=True, verbose=0)

    task = make(Shorter, factor=2)
    assert task.factor == 2
    task.compile()
    task.fit(ROWS)
    refused(lambda: make(Shorter, facter=2), "`factor`", error=TypeError)
    refused(lambda: task.fit(ROWS, epochs=2), "epochs", error=TypeError)


def test_a_distribution_comes_before_the_model(eight_devices):
    task = make()
    task.compile()
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    for call in (
        task.compile,
        lambda: task.fit(ROWS),
        lambda: task.evaluate(ROWS),
        lambda: task.log_probs(ROWS),
        lambda: task.generate("a"),
    ):
        refused(call, "before the model is made", "8 devices", "on 1")
    keras.distribution.set_distribution(None)
    task.fit(ROWS, batch_size=4, verbose=0)
