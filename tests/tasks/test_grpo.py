"""The loop of `GRPOTask`: what it samples, scores and trains on."""

import json
import random
import signal

import jax
import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import Group
from keras_posttrain.rl.batches import rollout_layout
from tests.support import (
    REFERENCE,
    lowered,
    one_layer,
    read_log,
    starts_again,
    weights,
)

VOCABULARY = 512
TWO_LAYERS = REFERENCE / "models/qwen3"
MODEL = one_layer(TWO_LAYERS)
OTHER = one_layer(REFERENCE / "models/qwen3_ref")


def odd(completions):
    """The share of odd token ids: differs among random completions."""
    return [sum(x % 2 for x in ids) / len(ids) for ids in completions]


def equal(completions):
    return [0.5] * len(completions)


def prompts(count=8, seed=0, **columns):
    rng = np.random.default_rng(seed)
    return [
        {
            "prompt_ids": rng.integers(3, 500, 4 + i % 3).tolist(),
            **{name: values[i] for name, values in columns.items()},
        }
        for i in range(count)
    ]


def make(lora=None, **settings):
    task = kpt.GRPOTask.from_preset(MODEL, lora=lora, sequence_length=64)
    # Rewards of ids and no stop token: the rows are tokenised.
    task.tokenizer = None
    return compiled(task, **settings)


def compiled(task, **settings):
    defaults = {
        "optimizer": keras.optimizers.SGD(1.0),
        "loss": kpt.losses.GRPOLoss(beta=0.0),
        "rewards": [odd],
        "num_generations": 4,
        "max_completion_length": 6,
        "max_grad_norm": None,
    }
    task.compile(**{**defaults, **settings})
    return task


def lora():
    return kpt.LoRA(rank=4)


def fit(task, rows=None, **settings):
    rows = prompts() if rows is None else rows
    settings = {"batch_size": 4, "verbose": 0, **settings}
    return task.fit(rows, **settings)


def assert_same(first, second, **tolerance):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(
            first[name], second[name], err_msg=name, **tolerance
        )


class Record(keras.callbacks.Callback):
    """The logs of every step."""

    def on_train_begin(self, logs=None):
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(dict(logs))


class Tables(keras.callbacks.Callback):
    """Returns the samples of every step, and its logs."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.model.last_rollout, dict(logs)))


def recorded(task, **settings):
    record = Record()
    fit(task, callbacks=[record], **settings)
    return record.steps


# What the first step is


@pytest.mark.parametrize("with_lora", [True, False])
def test_on_policy_ratio_1_and_no_divergence(with_lora):
    """The reference is the policy when training began."""
    loss = kpt.losses.GRPOLoss(beta=0.1)
    task = make(lora() if with_lora else None, loss=loss)
    base = [np.array(v.value) for v in task.causal_lm.variables]
    before = weights(task)
    step, *_, last = recorded(task, epochs=2)
    assert step["kl"] < 1e-9 < last["kl"]
    assert step["clip_ratio/region_mean"] == 0.0
    # Advantages of a group add up to 0 and all completions are as long.
    assert abs(step["loss"]) < 1e-6
    assert step["sampling/sampling_logp_difference/max"] < 5e-5
    assert step["sampling/effective_sample_size"] > 0.9999
    assert step["grad_norm"] > 0.01
    assert any(np.any(before[k] != x) for k, x in weights(task).items())
    if with_lora:
        assert task.reference.num_bytes == 0
        for value, v in zip(base, task.causal_lm.variables):
            np.testing.assert_array_equal(value, v.value, err_msg=v.path)
    else:
        size = sum(v.value.nbytes for v in task.trainable_variables)
        assert task.reference.num_bytes == size


def test_old_log_probs_are_those_before_the_first_update():
    loss = kpt.losses.GRPOLoss(beta=0.1)
    task = make(loss=loss, num_minibatches=2, num_iterations=2)
    steps = recorded(task, rows=prompts(4))
    assert len(steps) == 4 and task.step == 4
    assert steps[0]["kl"] < 1e-9
    # Later steps meet a policy that has moved on.
    assert steps[1]["kl"] > 1e-6 and steps[3]["kl"] > steps[1]["kl"]
    assert steps[3]["clip_ratio/region_mean"] > 0
    # The engine's own are as good, to rounding.
    other = make(
        loss=loss,
        num_minibatches=2,
        num_iterations=2,
        old_log_probs="rollout",
    )
    for ours, theirs in zip(steps, recorded(other, rows=prompts(4))):
        np.testing.assert_allclose(
            ours["loss"], theirs["loss"], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(kpt.losses.GRPOLoss(beta=0.0), marks=pytest.mark.full),
        # With a reference too.
        kpt.losses.GRPOLoss(),
    ],
)
def test_equal_rewards_change_nothing(loss):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    task = make(loss=loss, rewards=[equal], optimizer=optimizer)
    before = weights(task)
    steps = recorded(task, epochs=2)
    assert len(steps) == 4
    for step in steps:
        assert step["skipped"] == 1.0
        assert step["frac_reward_zero_std"] == 1.0
    for name, value in weights(task).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_what_is_masked_does_not_train():
    task = make(mask_truncated_completions=True)
    before = weights(task)
    [step] = recorded(task, rows=prompts(4))
    # Without a stop token all completions are cut.
    assert step["completions/clipped_ratio"] == 1.0
    assert step["skipped"] == 1.0
    assert_same(before, weights(task), atol=0)


# The layout of a batch


LAYOUT = {"num_sequences": 4, "sequence_length": 64, "num_generations": 4}


@pytest.mark.parametrize(
    "layout",
    [
        rollout_layout(row_multiple=3, **LAYOUT),
        rollout_layout(token_budget=16, row_multiple=2, **LAYOUT),
        rollout_layout(token_budget=16, share_prefix=True, **LAYOUT),
    ],
)
def test_layouts_hold_every_sequence_once(layout):
    sizes = [5, 9, 3, 12, 7, 4, 11]
    groups = [
        Group.of_completions(
            np.arange(500, 503 + g),
            [np.arange(1, n + 1) for n in part],
            [np.ones(n) for n in part],
            row=0,
        )
        for g, part in enumerate((sizes[:4], sizes[4:]))
    ]
    values = [np.arange(n) + 100.0 * i for i, n in enumerate(sizes)]
    batches = layout.minibatches(groups)
    assert [len(b.places) for b in batches] == [4, 3]
    for batch in batches:
        batch.put_tokens("x", values)
        batch.put_sequences("y", sizes)
        arrays = batch.arrays
        assert arrays["token_ids"].shape[0] % layout.row_multiple == 0
        for i, place in batch.places.items():
            own = arrays["completion_mask"][place.tokens] > 0
            found = {k: arrays[k][place.tokens] for k in ("token_ids", "x")}
            np.testing.assert_array_equal(
                found["token_ids"][own], np.arange(1, sizes[i] + 1)
            )
            np.testing.assert_array_equal(found["x"][own], values[i])
            assert not found["x"][~own].any()
            at = place.row, place.slot
            assert arrays["y"][at] == sizes[i]
            assert arrays["sequence_mask"][at] == 1.0
        assert arrays["sequence_mask"].sum() == len(batch.places)
        assert arrays["completion_mask"].sum() == sum(
            sizes[i] for i in batch.places
        )


# Resumed runs


class Stop(Exception):
    pass


def dice(completions):
    """A reward that draws random numbers."""
    return [
        x + random.random() + np.random.random()
        for x, _ in zip(odd(completions), completions)
    ]


def fail():
    raise Stop


def interrupt():
    signal.raise_signal(signal.SIGINT)


def terminate():
    signal.raise_signal(signal.SIGTERM)


class Terminated(BaseException):
    pass


def end(number, frame):
    raise Terminated


@pytest.mark.parametrize(
    "stops",
    [
        {fail: ValueError, terminate: Terminated},
        pytest.param({interrupt: KeyboardInterrupt}, marks=pytest.mark.full),
    ],
    ids=["error-SIGTERM", "SIGINT"],
)
def test_a_run_resumes_where_it_was_stopped_between_two_steps(stops, tmp_path):
    """By a reward that fails, Ctrl-C or SIGTERM, in the midst of a reward.

    The steps before are saved, and with them the state of the random
    numbers that rewards draw.
    """
    calls, plan = [], {}

    def score(completions):
        calls.append(1)
        plan.get(len(calls), int)()
        return dice(completions)

    def made(**settings):
        return make(
            lora(),
            rewards=[score],
            on_reward_error="raise",
            optimizer=keras.optimizers.Adam(1e-3),
            loss=kpt.losses.GRPOLoss(beta=0.1),
            num_minibatches=2,
            **settings,
        )

    def run(task, directory, seed=1):
        calls.clear()
        random.seed(seed)
        np.random.seed(seed)
        callbacks = [
            kpt.callbacks.Checkpoint(directory, every=2),
            kpt.callbacks.MetricsLog(directory),
            kpt.callbacks.CompletionsLog(directory, num_rows=0),
        ]
        history = fit(task, rows=prompts(12), epochs=2, callbacks=callbacks)
        return weights(task), history

    # What resumes never ran before, and what begins never resumed.
    begins, resumes = starts_again(made), starts_again(made)
    straight = run(begins(), tmp_path / "straight")
    assert [x["step"] for x in read_log(tmp_path / "straight")] == [
        *range(1, 13)
    ]
    for stop, error in stops.items():
        folder = tmp_path / stop.__name__
        plan[5] = stop
        old = signal.signal(signal.SIGTERM, end)
        try:
            with pytest.raises(error):
                run(begins(), folder)
            assert signal.getsignal(signal.SIGTERM) is end
            default = signal.default_int_handler
            assert signal.getsignal(signal.SIGINT) is default
        finally:
            signal.signal(signal.SIGTERM, old)
        plan.clear()
        resumed = run(resumes(), folder, seed=7)
        assert_same_run(straight, resumed, tmp_path / "straight", folder)
    with pytest.raises(ValueError, match="whose num_generations differs"):
        run(made(num_generations=2), tmp_path / "straight")


def assert_same_run(straight, resumed, *folders):
    """Weights, metrics, completions and history are those of one run."""
    assert_same(straight[0], resumed[0], rtol=1e-6, atol=1e-7)
    logs = [read_log(folder) for folder in folders]
    assert [x["step"] for x in logs[1]] == list(range(1, 13))
    for ours, theirs in zip(*logs):
        for name in ours:
            if "time/" not in name and name != "tokens_per_second":
                assert ours[name] == pytest.approx(
                    theirs[name], rel=1e-4, abs=1e-6
                ), name
    lines = [
        (folder / "completions.jsonl").read_text().splitlines()
        for folder in folders
    ]
    assert [json.loads(x)["completion"] for x in lines[0]] == [
        json.loads(x)["completion"] for x in lines[1]
    ]
    rewards = [x.history["reward"][-1] for _, x in (straight, resumed)]
    np.testing.assert_allclose(*rewards, rtol=1e-6)


def test_advantages_of_ones_own():
    def made(scale):
        def centred(rewards, num_generations, weights):
            groups = rewards.sum(1).reshape(-1, num_generations)
            return scale * (groups - groups.mean(1, keepdims=True)).ravel()

        return make(advantages=centred)

    task = made(2.0)
    fit(task, prompts(4))
    table = task.last_rollout
    rewards = np.array(table["odd"]).reshape(4, 4)
    expected = 2.0 * (rewards - rewards.mean(1, keepdims=True))
    np.testing.assert_allclose(table["advantage"], expected.ravel(), atol=1e-6)
    # The same function in another process is the same run.
    assert made(2.0).fingerprint() == made(2.0).fingerprint()


def test_steps_that_are_skipped_keep_the_others_samples():
    first = starts_again(lambda: make(lora()))
    tables = []
    for skip in ((), [1]):
        task, callback = first(), Tables()
        fit(task, rows=prompts(8), skip_steps=skip, callbacks=[callback])
        assert task.step == 2
        tables.append([table for table, _ in callback.seen])
    assert [t["step"][0] for t in tables[0]] == [0, 1]
    assert [t["step"][0] for t in tables[1]] == [1]
    assert tables[0][1]["prompt"] == tables[1][0]["prompt"]


# What is sampled


def test_the_table_and_metrics_of_a_rollout():
    def second(completions):
        return [None] + [1.0] * (len(completions) - 1)

    task = make(rewards=[odd, second], reward_weights=[2.0, 1.0])
    [step] = recorded(task, rows=prompts(4), shuffle=False)
    table = task.last_rollout
    assert {len(column) for column in table.values()} == {16}
    assert table["step"] == [0] * 16
    assert table["prompt"][:5:4] == [r["prompt_ids"] for r in prompts(2)]
    assert np.isnan(table["second"][0])
    expected = 2 * np.array(table["odd"]) + np.nan_to_num(table["second"])
    np.testing.assert_allclose(table["reward"], expected, rtol=1e-6)
    groups = expected.reshape(4, 4)
    std = groups.std(1, ddof=1, keepdims=True)
    advantages = (groups - groups.mean(1, keepdims=True)) / (std + 1e-4)
    np.testing.assert_allclose(
        table["advantage"], advantages.ravel(), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(step["reward"], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        step["rewards/odd/mean"], np.mean(table["odd"]), rtol=1e-5
    )
    assert step["completions/mean_length"] == 6.0
    assert step["num_tokens"] == 16 * 6 + 4 * sum((4, 5, 6, 4))
    assert set(table["finish_reason"]) == {"length"}
    for name in ("rollout", "reward", "train", "sync"):
        assert step[f"time/{name}"] >= 0


def test_groups_of_equal_rewards_are_replaced():
    """Prompts whose first id is even earn nothing, whatever is sampled."""

    def score(completions, prompt_ids):
        return [
            r * (ids[0] % 2) for r, ids in zip(odd(completions), prompt_ids)
        ]

    rows = [{"prompt_ids": [10 + i, 7, 8]} for i in range(12)]
    task = make(rewards=[score], max_resamples=3)
    tables = Tables()
    fit(task, rows=rows, shuffle=False, callbacks=[tables])
    seen = tables.seen
    table, logs = seen[0]
    firsts = [p[0] for p in table["prompt"]][::4]
    # 10 to 13, then 14 and 15, then one of the last 6 is left to replace.
    assert sorted(firsts) == [11, 13, 15, 17]
    assert logs["dynamic_sampling/num_prompts"] == 8
    assert logs["frac_reward_zero_std"] == 0.5
    # The epoch runs out: the last rollout is filled up.
    firsts = [p[0] for p in seen[1][0]["prompt"]][::4]
    assert firsts[:2] == [19, 21] and len(seen) == 2


def test_evaluate_counts_what_is_right():
    rows = prompts(6, answer=list("abcdef"))

    def score(completions, answer):
        # Of each prompt's four, the first two are right for a and b, all
        # for c, none for the others.
        marks = {"a": [1, 1, 0, 0], "b": [0, 0, 1, 1], "c": [1] * 4}
        return [
            float(marks.get(a, [0] * 4)[i % 4]) for i, a in enumerate(answer)
        ]

    task = make(rewards=[score])
    found = task.evaluate(rows, 4, num_generations=4, answer=lambda ids: 0)
    assert found["pass@1"] == pytest.approx(8 / 24)
    assert found["pass@4"] == pytest.approx(3 / 6)
    # Of the 6 pairs of two right ones and two wrong ones 5 have a right one.
    assert found["pass@2"] == pytest.approx((5 / 6 + 5 / 6 + 1) / 6)
    shares = [0.5, 0.5, 1, 0, 0, 0]
    error = np.std(shares, ddof=1) / 6**0.5
    assert found["pass@1/stderr"] == pytest.approx(error)
    # One answer in all: right where any with it is.
    assert found["maj@4"] == pytest.approx(3 / 6)
    assert found["reward"] == pytest.approx(8 / 24)
    apart = iter(range(100))
    found = task.evaluate(
        rows, 4, num_generations=4, answer=lambda ids: next(apart)
    )
    # All differ: the first one given counts.
    assert found["maj@4"] == pytest.approx(2 / 6)


def test_validation_is_in_the_history_and_leaves_training_alone():
    first = starts_again(lambda: make(lora()))
    task = first()
    fit(task, epochs=2)
    alone = weights(task)
    history = fit(
        first(),
        epochs=2,
        validation_data=prompts(4, seed=9),
        validation_generations=2,
    ).history
    assert len(history["val_pass@1"]) == len(history["val_pass@2"]) == 2
    assert len(history["reward"]) == 2
    assert_same(alone, weights(task), atol=0)


def test_text_and_messages_reach_rewards():
    task = kpt.GRPOTask.from_preset(MODEL, lora=lora(), sequence_length=128)
    seen = []

    def score(prompts, completions, answer, **columns):
        seen.append((prompts, completions, answer, columns))
        return [float(i % 2) for i in range(len(completions))]

    compiled(task, rewards=[score], num_generations=2)
    rows = [{"prompt": "one two", "answer": 3}, {"prompt": "two", "answer": 4}]
    fit(task, rows, batch_size=2, shuffle=False)
    texts, completions, answer, columns = seen[0]
    assert texts == ["one two"] * 2 + ["two"] * 2
    assert answer == [3, 3, 4, 4]
    assert all(isinstance(c, str) for c in completions)
    assert len(columns["completion_ids"]) == 4
    chat = [{"prompt": [{"role": "user", "content": "hi"}], "answer": 1}]
    fit(task, chat, batch_size=1)
    texts, completions, _, _ = seen[1]
    assert texts[0] == chat[0]["prompt"]
    assert completions[0][0]["role"] == "assistant"


class Watched(kpt.rollout.NativeRollout):
    """Writes down what is asked of it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")

    def sync_weights(self):
        self.calls.append("sync")
        return super().sync_weights()

    def generate(self, requests, **kwargs):
        self.calls.append("generate")
        return super().generate(requests, **kwargs)


def test_the_engine_is_started_synced_and_stopped():
    engine = Watched()
    task = make(lora(), rollout=engine, num_minibatches=2)
    fit(task, validation_data=prompts(2))
    rollout = ["generate", "sync"]
    calls = ["start", "sync", *rollout, *rollout, "generate", "stop"]
    assert engine.calls == calls
    engine.calls.clear()
    task.evaluate(prompts(2))
    assert engine.calls == ["start", "sync", "generate", "stop"]
    engine.calls.clear()
    fails = make(rollout=engine, rewards=[lambda completions: None])
    with pytest.raises(ValueError, match="lambda"):
        fit(fails)
    assert engine.calls == ["start", "sync", "generate", "stop"]


# The reference


def test_the_reference_of_an_adapter_that_is_not_0_is_a_copy():
    loss = kpt.losses.GRPOLoss(beta=0.1)
    second = kpt.GRPOTask.from_preset(TWO_LAYERS, sequence_length=64)
    second.load_adapter(REFERENCE / "adapters/qwen3_lora_r4_init")
    second.tokenizer = None
    compiled(second, loss=loss)
    steps = recorded(second, epochs=2)
    assert steps[0]["kl"] < 1e-9 < steps[-1]["kl"]
    size = sum(v.value.nbytes for v in second.trainable_variables)
    assert second.reference.num_bytes == size


@pytest.mark.parametrize("with_lora", [True, False])
def test_a_reference_that_follows_the_policy(with_lora, tmp_path):
    def run(rows, directory):
        task = make(
            lora() if with_lora else None,
            loss=kpt.losses.GRPOLoss(beta=0.1),
            optimizer=keras.optimizers.SGD(0.3),
        )
        record = Record()
        callbacks = [
            record,
            kpt.callbacks.UpdateReference(every=2, mixup=1.0),
            kpt.callbacks.Checkpoint(directory, every=1),
        ]
        fit(task, rows, batch_size=2, callbacks=callbacks, shuffle=False)
        return record.steps, task

    steps, task = run(prompts(8), tmp_path / "a")
    kl = [step["kl"] for step in steps]
    assert kl[0] < 1e-9 and kl[2] < 1e-9
    assert kl[1] > 1e-7 and kl[3] > 1e-7
    # It is kept with the run: an epoch that was done is not done again.
    held = [np.array(x) for x in task.reference.values]
    steps, task = run(prompts(8), tmp_path / "a")
    assert not steps
    for before, after in zip(held, task.reference.values, strict=True):
        np.testing.assert_array_equal(before, after)


def test_no_reference_no_update(refusing):
    task = compiled(refusing, rollout=NoSampling())
    with pytest.raises(ValueError, match="no reference to update"):
        fit(task, callbacks=[kpt.callbacks.UpdateReference()])


def test_a_reference_of_ones_own():
    task = kpt.GRPOTask.from_preset(
        MODEL,
        lora=lora(),
        sequence_length=64,
        reference=OTHER,
    )
    task.tokenizer = None
    names = {v.path for v in task.variables}
    compiled(task, loss=kpt.losses.GRPOLoss(beta=0.1, kl_estimator="k1"))
    [step] = recorded(task, rows=prompts(4))
    assert abs(step["kl"]) > 0.1
    assert names <= {v.path for v in task.variables}
    rows = [
        {"prompt_ids": p, "completion_ids": c}
        for p, c in zip(
            task.last_rollout["prompt"], task.last_rollout["completion"]
        )
    ]
    first = kpt.GRPOTask.from_preset(MODEL, sequence_length=64)
    other = kpt.GRPOTask.from_preset(OTHER, sequence_length=64)
    gaps = [
        np.sum((a - b)[-6:])
        for a, b in zip(first.log_probs(rows), other.log_probs(rows))
    ]
    np.testing.assert_allclose(
        step["kl"], np.sum(gaps) / (16 * 6), rtol=1e-3, atol=1e-4
    )


def test_rloo_takes_its_divergence_from_the_reward():
    rewards = kpt.losses.LeaveOneOutAdvantages(beta=0.5)
    task = make(lora(), loss=kpt.losses.ReinforceLoss(), advantages=rewards)
    steps = recorded(task, epochs=2)
    assert len(steps) == 4
    table = task.last_rollout
    plain = kpt.losses.LeaveOneOutAdvantages()(table["reward"], 4)
    # The policy has moved, so that the divergence has a share in them.
    assert np.abs(np.array(table["advantage"]) - plain).max() > 1e-3


def test_rloos_share_of_equal_groups_has_the_divergence():
    """Of equal rewards, and a reference that differs: no group is idle."""
    for beta, share in ((0.5, 0.0), (0.0, 1.0)):
        task = kpt.GRPOTask.from_preset(
            MODEL,
            lora=lora(),
            sequence_length=64,
            reference=OTHER,
        )
        task.tokenizer = None
        compiled(
            task,
            rewards=[equal],
            loss=kpt.losses.ReinforceLoss(beta=0.0 if beta else 0.1),
            advantages=kpt.losses.LeaveOneOutAdvantages(beta=beta),
        )
        [step] = recorded(task, rows=prompts(4))
        assert step["frac_reward_zero_std"] == share


def test_a_family_without_the_seam_trains():
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=97,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        dropout=0.0,
        max_sequence_length=64,
    )
    lm = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    task = compiled(
        kpt.GRPOTask(lm, sequence_length=32),
        loss=kpt.losses.GRPOLoss(beta=0.1),
    )
    rows = [{"prompt_ids": [5 + i, 6, 7][: 2 + i % 2]} for i in range(4)]
    before = weights(task)
    [step] = recorded(task, rows=rows)
    assert step["kl"] < 1e-9
    assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert any(np.any(before[k] != x) for k, x in weights(task).items())
    with pytest.raises(ValueError, match="packing=False"):
        fit(task, rows, share_prefix=True)


# What is refused, before anything is sampled


class NoSampling(kpt.rollout.NativeRollout):
    def _generate(self, *args):
        pytest.fail("sampled before the error")


@pytest.fixture(scope="module")
def refusing():
    """A task that no test lets sample."""
    return make(rollout=NoSampling())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rewards": []}, "at least one reward function"),
        ({"rewards": [odd, 3]}, "must be a function"),
        ({"num_generations": 1}, "num_generations=1"),
        ({"temperature": 0}, "temperature=0"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 50}, "top_k=50"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"loss": kpt.losses.SFTLoss()}, "policy loss"),
        ({"rollout": "vllm"}, "rollout='vllm'"),
        ({"advantages": "group"}, "advantages='group'"),
        ({"reward_weights": [1.0, 2.0]}, "one finite number for each"),
        ({"num_minibatches": 0}, "num_minibatches=0"),
        ({"max_resamples": -1}, "max_resamples=-1"),
        ({"old_log_probs": "engine"}, "old_log_probs='engine'"),
        ({"reward_timeout": 0}, "reward_timeout=0"),
        ({"on_reward_error": "ignore"}, "on_reward_error='ignore'"),
        ({"max_completion_length": 64}, "room for a prompt"),
        ({"stop_token_ids": [512]}, r"stop_token_ids=\[512\]"),
    ],
)
def test_compile_refuses(settings, message, refusing):
    with pytest.raises(ValueError, match=message):
        compiled(refusing, **settings)


@pytest.mark.parametrize(
    "rows, settings, message",
    [
        ([{"text": "x"}], {}, "either the column 'prompt'"),
        ([{"prompt": "x"}], {}, "need a tokenizer"),
        ([{"prompt_ids": []}], {}, "at least one token"),
        ([{"prompt_ids": [600]}], {}, "token id 600"),
        ([{"prompt_ids": [5] * 59}], {}, "row 0 of `dataset` with 59 tokens"),
        (prompts(4), {"packing": 8}, "packing=8"),
        (prompts(4), {"batch_size": 0}, "batch_size=0"),
        (prompts(4), {"validation_temperature": -1}, "temperature=-1"),
        (prompts(4), {"validation_generations": 0}, "_generations=0"),
        (prompts(4), {"epochs": 0}, "epochs=0"),
        ([{"prompt_ids": [5], "a": 1}, {"prompt_ids": [5]}], {},
         "row 1 of `dataset` lacks the column 'a'"),
    ],
)  # fmt: skip
def test_fit_refuses(rows, settings, message, refusing):
    task = compiled(refusing, rollout=NoSampling())
    with pytest.raises(ValueError, match=message):
        fit(task, rows, **settings)


def test_a_column_that_a_reward_needs_is_named_before_sampling(refusing):
    def correct(completions, answer):
        return [0.0] * len(completions)

    task = compiled(refusing, rewards=[correct], rollout=NoSampling())
    with pytest.raises(ValueError, match="needs the column 'answer'"):
        fit(task)
    with pytest.raises(ValueError, match="`validation_data` lacks"):
        fit(
            task,
            prompts(8, answer=range(8)),
            validation_data=prompts(2),
        )


def test_rewards_that_fail_are_named():
    def short(completions):
        return [0.0]

    with pytest.raises(ValueError, match="'short'.*16 completions"):
        fit(make(rewards=[short]))

    def broken(completions):
        raise KeyError("answer")

    with pytest.raises(ValueError, match="'broken' raised KeyError"):
        fit(make(rewards=[broken]))
    task = make(rewards=[odd, broken], on_reward_error="skip")
    fit(task)
    assert task.step == 2


def test_averages_of_the_weights_end_a_run():
    """As with rows, where Keras's own `fit` puts them in place."""
    made = make(
        optimizer=keras.optimizers.Adam(1e-3, use_ema=True, ema_momentum=0.5)
    )
    seen = []

    class Last(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            averages = self._model.optimizer._model_variables_moving_average
            seen.append([np.array(v.value) for v in averages])

    fit(made, callbacks=[Last()])
    for average, variable in zip(seen[-1], made.trainable_variables):
        np.testing.assert_array_equal(average, variable.value)


def test_a_step_without_rewards_is_called_so(capsys):
    made = make(
        rewards=[lambda completions: [None] * len(completions)],
        on_reward_error="skip",
    )
    fit(made, verbose=2)
    assert "since no completion was given a reward" in capsys.readouterr().out


def test_tools_of_prompts_may_be_json():
    """As those of rows with answers."""
    task = kpt.GRPOTask.from_preset(MODEL, sequence_length=512)
    task.tokenizer = task.tokenizer.with_chat_template(
        "{{ tools | tojson }}{{ messages[0].content }}"
    )
    task.compile(rewards=[odd], max_completion_length=8)
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [{"role": "user", "content": "Add."}]
    (as_list,), _ = task.prepare_prompts([{"prompt": chat, "tools": tools}])
    (as_text,), _ = task.prepare_prompts(
        [{"prompt": chat, "tools": json.dumps(tools)}]
    )
    assert as_list.token_ids == as_text.token_ids
    with pytest.raises(ValueError, match="plain text.*row 0 .*'add'"):
        task.prepare_prompts([{"prompt": "Add.", "tools": tools}])


def test_later_runs_use_the_programs_of_earlier_ones():
    """Of sampling, of log-probabilities and of the step."""
    loss = kpt.losses.GRPOLoss(beta=0.1)
    task = make(lora(), loss=loss, old_log_probs="trainer")
    # The count does not hang on what other tests have compiled.
    jax.clear_caches()
    with lowered() as first:
        fit(task)
    with lowered() as second:
        fit(task, seed=1)
    assert len(first) > 10 and not second
    # Another learning rate: a step of its own, the same samples.
    engine, programs = task.rollout, task.rollout.programs
    optimizer = keras.optimizers.SGD(0.5)
    compiled(task, optimizer=optimizer, loss=loss, old_log_probs="trainer")
    assert task.rollout is engine
    fit(task)
    assert programs and task.rollout.programs == programs
    compiled(task, rollout=kpt.rollout.NativeRollout())
    assert task.rollout is not engine
