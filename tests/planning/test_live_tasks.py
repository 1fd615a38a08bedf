"""Plans of live tasks: a custom task plans its own step, and nothing else
that runs in the process, other plans included, is disturbed."""

import concurrent.futures
import dataclasses
import json
import threading

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.distribution import programs
from tests.support import REFERENCE, one_layer, random_rows, weights

LLAMA = one_layer(REFERENCE / "models" / "llama3")


def shaped(preset=LLAMA, kind=kpt.SFTTask, optimizer=None, **kwargs):
    with kpt.distribution.shapes_only():
        task = kind.from_preset(
            preset, load_weights=False, sequence_length=64, **kwargs
        )
    task.compile(optimizer or keras.optimizers.AdamW(1e-4))
    return task


def real(kind=kpt.SFTTask, **kwargs):
    return kind.from_preset(LLAMA, sequence_length=64, **kwargs)


def deep(path, layers):
    """A directory of a tiny Llama of so many layers."""
    config = json.loads((LLAMA / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (path / "config.json").write_text(json.dumps(config))
    return path


def figures(plan):
    """All fields of a plan, to be compared."""
    found = dataclasses.asdict(dataclasses.replace(plan, topology=None))
    return found | {"topology": plan.topology.name}


def in_thread(function):
    """Calls a function in another thread and waits for what it returns."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def attributes(task):
    """The attributes of a task, its parts and its variables, by identity."""
    parts = [
        task,
        task.policy,
        task.causal_lm,
        task.causal_lm.backbone,
        *task.causal_lm.backbone.transformer_layers,
        *filter(None, [task.adapter]),
        task.optimizer,
        *task.variables,
        *task.optimizer.variables,
        *task.metrics_variables,
    ]
    return [
        {name: id(value) for name, value in vars(part).items()}
        for part in parts
    ]


# A custom task


class TwicePassedTask(kpt.SFTTask):
    """Sharpness-aware: the second gradient is taken at other weights."""

    def train_step(self, state, batch):
        gradients, _ = self.loss_and_gradients(state, batch)
        # In the order of the task's variables, also where a plan has fewer.
        uphill = [
            w + (0.0 if "norm" in v.path else 0.1) * g
            for v, w, g in zip(
                self.trainable_variables,
                state["trainable"],
                gradients,
                strict=True,
            )
        ]
        state = {**state, "trainable": uphill}
        gradients, logs = self.loss_and_gradients(state, batch)
        return self.apply_gradients(state, gradients, logs)


class ExtraLayerTask(kpt.SFTTask):
    def __init__(self, causal_lm, tokenizer=None, **kwargs):
        super().__init__(causal_lm, tokenizer, **kwargs)
        self.extra = keras.layers.Dense(32, use_bias=False)
        self.extra.build((None, 64))


class ShortRowsTask(kpt.SFTTask):
    def example_batch(self, batch_size, **kwargs):
        batch = super().example_batch(batch_size, **kwargs)
        return {name: x[:, :32] for name, x in batch.items()}


def test_a_custom_step_plans_as_itself(tmp_path):
    """Two passes are twice the operations, with fewer layers as with all."""
    preset = deep(tmp_path, 3)
    task = shaped(preset, TwicePassedTask)
    once = shaped(preset).plan("cpu:1", batch_size=4)
    twice = task.plan("cpu:1", batch_size=4)
    assert once.compiled_layers == twice.compiled_layers == (1, 2)
    assert twice.flops == pytest.approx(2 * once.flops, rel=0.05)
    assert twice.name == "A training step of TwicePassedTask"
    assert twice.arguments == once.arguments
    every = task.plan("cpu:1", batch_size=4, exact=True)
    assert every.flops == pytest.approx(twice.flops, rel=0.01)


def test_a_custom_layer_is_planned():
    """64 * 32 numbers more, of four bytes, with two moments."""
    plain = shaped().plan("cpu:1", batch_size=4)
    plan = shaped(kind=ExtraLayerTask).plan("cpu:1", batch_size=4)
    for name in ("parameters", "trainable_parameters"):
        assert getattr(plan, name) - getattr(plain, name) == 64 * 32
    more = {k: plan.arguments[k] - plain.arguments[k] for k in plan.arguments}
    size = 4 * 64 * 32
    assert more["weights"] == size and more["optimizer"] == 2 * size


def test_a_custom_batch_is_planned():
    plan = shaped(kind=ShortRowsTask).plan("cpu:1", batch_size=4)
    assert plan.settings["rows x tokens of a batch"] == "4 x 32"
    assert plan.tokens == 4 * 32


# Nothing else is disturbed


LORA = kpt.LoRA(rank=2, dropout=0.1)


@pytest.mark.parametrize(
    "kind, lora",
    [
        (kpt.SFTTask, LORA),
        pytest.param(kpt.SFTTask, None, marks=pytest.mark.full),
        pytest.param(kpt.DPOTask, LORA, marks=pytest.mark.full),
        pytest.param(kpt.DPOTask, None, marks=pytest.mark.full),
    ],
)
def test_a_plan_writes_nothing(kind, lora):
    task = real(kind, lora=lora)
    task.compile(keras.optimizers.AdamW(1e-4))
    before, values = attributes(task), weights(task)
    plan = task.plan(
        "cpu:1",
        batch_size=4,
        remat="full",
        micro_batch_size=2,
        sequence_length=32,
    )
    assert plan.settings["remat"] == "full"
    task.plan_decode("cpu:1", num_slots=4, num_tokens=64)
    assert attributes(task) == before
    assert keras.distribution.distribution() is None
    assert all((weights(task)[k] == v).all() for k, v in values.items())


class Meeting(kpt.SFTTask):
    """Waits in the middle of a plan until another is as far."""

    barrier = None

    def example_batch(self, *args, **kwargs):
        if self.barrier is not None:
            self.barrier.wait(60)
        return super().example_batch(*args, **kwargs)

    def train_step(self, state, batch):
        if self.barrier is not None:
            self.barrier.wait(60)
        return super().train_step(state, batch)


def test_two_plans_at_once(tmp_path, monkeypatch):
    """Of one task on two layouts, and of shapes next to real variables."""
    task = shaped(deep(tmp_path, 2), Meeting, lora=kpt.LoRA(rank=2))
    settings = [
        {"strategy": kpt.distribution.fsdp, "batch_size": 4, "remat": "full"},
        {"strategy": kpt.distribution.data_parallel, "batch_size": 2},
    ]
    alone = [figures(task.plan("cpu:1", **kwargs)) for kwargs in settings]
    assert alone[0] != alone[1]
    # Now read from the cache, which in tests has all programs.
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_compile", None)
        assert figures(task.plan("cpu:1", **settings[0])) == alone[0]
    # The others are compiled again, at once.
    monkeypatch.setattr(programs, "_path", lambda *_: None)
    task.barrier = threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(lambda kw=kwargs: task.plan("cpu:1", **kw))
            for kwargs in settings
        ]
        found = [figures(future.result()) for future in found]
    assert found == alone
    # The setting of the process that compiling for a plan needs is back.
    assert jax.config.jax_enable_compilation_cache


class PlanInside(keras.callbacks.Callback):
    """Plans the model in another thread, in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            task = self.model
            before = attributes(task)
            self.plan = in_thread(lambda: task.plan("cpu:1", batch_size=4))
            assert attributes(task) == before


@pytest.mark.parametrize(
    "kind, lora",
    [
        ("sft", LORA),
        pytest.param("sft", None, marks=pytest.mark.full),
        pytest.param("dpo", LORA, marks=pytest.mark.full),
        pytest.param("dpo", None, marks=pytest.mark.full),
    ],
)
def test_a_plan_during_fit(kind, lora):
    """Keras has taken the values out of the variables meanwhile."""
    rows = random_rows(16)
    if kind == "dpo":
        rows = [
            {
                "prompt_ids": row["token_ids"][:3],
                "chosen_ids": row["token_ids"][3:],
                "rejected_ids": row["token_ids"][4:],
            }
            for row in rows
        ]
    found = []
    for inside in (False, True):
        task = real({"sft": kpt.SFTTask, "dpo": kpt.DPOTask}[kind], lora=lora)
        task.compile(keras.optimizers.AdamW(1e-3))
        if inside:
            alone = task.plan("cpu:1", batch_size=4)
        planner = PlanInside()
        callbacks = [planner] if inside else []
        history = task.fit(rows, batch_size=4, verbose=0, callbacks=callbacks)
        found.append((history.history, weights(task)))
    assert figures(planner.plan) == figures(alone)
    (plain, straight), (losses, planned) = found
    assert plain == losses
    assert all((planned[k] == v).all() for k, v in straight.items())


def test_a_plan_during_sampling():
    """Planned where a sample's text arrives, and in a loop next to it."""
    task = real(kpt.GRPOTask, lora=kpt.LoRA(rank=2))
    task.compile(
        keras.optimizers.AdamW(1e-3),
        rewards=[lambda completions: [float(len(c)) for c in completions]],
        num_generations=2,
        max_completion_length=16,
    )
    prompts = [{"prompt_ids": [1, 5 + i, 9]} for i in range(4)]

    def sample():
        return task.generate(
            prompts,
            max_tokens=16,
            seed=3,
            return_token_ids=True,
            stop_token_ids=None,
        )

    straight = sample()
    alone = figures(task.plan("cpu:1", batch_size=4))
    before = attributes(task)
    done = threading.Event()

    def keep_sampling():
        found = []
        while not done.is_set() or not found:
            found.append(sample())
        return found

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        samples = pool.submit(keep_sampling)
        try:
            plans = [
                figures(task.plan("cpu:1", batch_size=4)),
                figures(task.plan_decode("cpu:1", num_slots=4)),
            ]
        finally:
            done.set()
        for found in samples.result():
            assert len(found) == len(straight)
            assert all(map(np.array_equal, found, straight))
    assert plans[0] == alone
    assert attributes(task) == before


def test_a_plan_within_a_reward():
    """Between the samples of a rollout and the step that trains on them."""
    plans, found = [], []
    for inside in (False, True):
        task = real(kpt.GRPOTask)

        def reward(completion_ids, task=task, inside=inside, **columns):
            if inside:
                plan = in_thread(lambda: task.plan("cpu:1", batch_size=2))
                plans.append(figures(plan))
            return [float(sum(ids) % 7) for ids in completion_ids]

        task.compile(
            keras.optimizers.AdamW(1e-3),
            rewards=[reward],
            num_generations=2,
            max_completion_length=8,
        )
        if inside:
            alone = figures(task.plan("cpu:1", batch_size=2))
        prompts = [{"prompt_ids": [1, 5 + i, 9]} for i in range(4)]
        history = task.fit(prompts, batch_size=2, verbose=0)
        found.append((history.history, weights(task)))
    assert len(plans) == 2 and all(plan == alone for plan in plans)
    (plain, straight), (losses, planned) = found
    times = {name for name in plain if "time" in name or "second" in name}
    assert {k: v for k, v in plain.items() if k not in times} == {
        k: v for k, v in losses.items() if k not in times
    }
    assert all((planned[k] == v).all() for k, v in straight.items())
