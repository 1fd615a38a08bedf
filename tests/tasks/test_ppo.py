"""`PPOTask`: its update by hand, its value model, its errors."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import presets
from keras_posttrain.rl.ppo import TokenAdvantages
from tests.support import check_most, weights
from tests.tasks.test_grpo import (
    MODEL,
    OTHER,
    Record,
    assert_same,
    odd,
    prompts,
)
from tests.tasks.test_grpo_learning import (
    END,
    middle,
    split,
    trained_on_the_format,
)


def make(lora=None, reference=None, model=MODEL, **settings):
    task = kpt.PPOTask.from_preset(
        model, lora=lora, reference=reference, sequence_length=64
    )
    # Rewards of ids and no stop token: the rows are tokenised.
    task.tokenizer = None
    return compiled(task, **settings)


def compiled(task, **settings):
    defaults = {
        "optimizer": keras.optimizers.SGD(0.1),
        "rewards": [odd],
        "num_iterations": 1,
        "max_completion_length": 6,
        "max_grad_norm": None,
    }
    task.compile(**{**defaults, **settings})
    return task


def lora():
    return kpt.LoRA(rank=4)


def fit(task, rows=None, **settings):
    rows = prompts(4) if rows is None else rows
    record = Record()
    callbacks = [record, *settings.pop("callbacks", ())]
    settings = {"batch_size": 4, "verbose": 0, **settings}
    task.fit(rows, callbacks=callbacks, **settings)
    return record.steps


def set_head(task, seed=5):
    """Values that differ: the head starts at 0."""
    head = task.value_model
    kernel = np.random.default_rng(seed).normal(0, 0.05, head.kernel.shape)
    head.kernel.assign(kernel)
    head.bias.assign(0.2)


# The update, by hand


def plain_outputs(model, values, head, ids):
    """Log-probabilities and values of one sequence, by KerasHub's call."""
    mapping = list(zip(model.trainable_variables, values))
    with keras.StatelessScope(state_mapping=mapping):
        backbone, row = model.backbone, jnp.asarray(ids)[None]
        hidden = backbone(
            {"token_ids": row, "padding_mask": jnp.ones_like(row)}
        )
        logits = backbone.token_embedding(hidden, reverse=True)[0, :-1]
    logps = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    return logps, hidden[0, :-1] @ head["kernel"] + head["bias"]


def loop_advantages(rewards, values, gamma, gae_lambda):
    """From the last token back: delta, and what is carried on of it."""
    advantages, carried, after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        delta = reward + gamma * after - value
        carried = delta + gamma * gae_lambda * carried
        advantages.append(carried)
        after = value
    return advantages[::-1]


def loss_by_hand(model, part, trained):
    """Means over the tokens of some completions: clipped policy loss, and
    half of the larger squared error of values."""
    policy, value, count = 0.0, 0.0, 0
    for x in part:
        ids = np.array(x["ids"])
        logps, values = plain_outputs(model, trained["model"], trained, ids)
        logps, values = logps[-x["n"] :], values[-x["n"] :]
        ratio = jnp.exp(logps - x["old"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        a = x["advantages"]
        policy -= jnp.minimum(ratio * a, clipped * a).sum()
        near = jnp.clip(values, x["values"] - 0.2, x["values"] + 0.2)
        errors = jnp.maximum(
            (values - x["returns"]) ** 2, (near - x["returns"]) ** 2
        )
        value += 0.5 * errors.sum()
        count += x["n"]
    return (policy + 0.5 * value) / count


def test_two_minibatches_are_those_by_hand():
    """Whitened over the rollout; old values and old log-probabilities are
    those before the first of the two updates; rewards are fractions."""
    task = make(
        reference=OTHER,
        stop_token_ids=range(3, 60),
        value_loss=kpt.losses.ValueLoss(coefficient=0.5),
        kl_coef=0.1,
        gamma=0.9,
        gae_lambda=0.8,
        num_minibatches=2,
    )
    set_head(task)
    model = presets.load_causal_lm(MODEL)
    other = presets.load_causal_lm(OTHER)
    trained = {
        "model": [v.value for v in model.trainable_variables],
        "kernel": jnp.array(task.value_model.kernel.value),
        "bias": jnp.array(task.value_model.bias.value),
    }
    theirs = [v.value for v in other.trainable_variables]
    steps = fit(task, shuffle=False)
    table = task.last_rollout
    assert len(set(map(len, table["completion"]))) > 1
    samples, kls = [], []
    outputs = jax.jit(functools.partial(plain_outputs, model))
    ref_outputs = jax.jit(functools.partial(plain_outputs, other))
    for prompt, completion in zip(table["prompt"], table["completion"]):
        n, ids = len(completion), np.array([*prompt, *completion])
        found = outputs(trained["model"], trained, ids)
        old, values = (np.array(x, "float64")[-n:] for x in found)
        ref, _ = ref_outputs(theirs, trained, ids)
        kl = old - np.array(ref)[-n:]
        rewards = -0.1 * kl
        rewards[-1] += sum(i % 2 for i in completion) / n
        advantages = loop_advantages(rewards, values, 0.9, 0.8)
        samples.append(dict(ids=ids, n=n, old=old, values=values))
        samples[-1]["raw"] = np.array(advantages)
        samples[-1]["returns"] = advantages + values
        kls.extend(kl)
    raw = np.concatenate([x["raw"] for x in samples])
    for x in samples:
        white = (x["raw"] - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
        x["advantages"] = white
    np.testing.assert_allclose(
        table["advantage"],
        [x["advantages"].mean() for x in samples],
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(steps[0]["kl"], np.mean(kls), rtol=1e-4)
    for step, part in zip(steps, (samples[:2], samples[2:]), strict=True):
        by_hand = functools.partial(loss_by_hand, model, part)
        loss, gradients = jax.jit(jax.value_and_grad(by_hand))(trained)
        np.testing.assert_allclose(step["loss"], loss, rtol=1e-4, atol=1e-5)
        trained = jax.tree.map(lambda w, g: w - 0.1 * g, trained, gradients)
    for v, expected in zip(
        task.trainable_variables,
        [*trained["model"], trained["kernel"], trained["bias"]],
        strict=True,
    ):
        np.testing.assert_allclose(
            v.value, expected, rtol=1e-4, atol=2e-5, err_msg=v.path
        )


def test_advantages_are_whitened_over_all_minibatches():
    rng = np.random.default_rng(0)

    def batch(rows, length):
        ids = np.ones((rows, length), "int32")
        return {
            "segment_ids": ids,
            "completion_mask": (ids * (np.arange(length) > 1)).astype("f4"),
            "old_values": rng.normal(size=ids.shape).astype("f4"),
            "rewards": rng.random((rows, 1)).astype("f4"),
        }

    batches = [batch(3, 6), batch(1, 9)]
    raw, returns = TokenAdvantages(0.0, 1.0, 0.95, False)(batches, [None] * 2)
    white, same = TokenAdvantages(0.0, 1.0, 0.95, True)(batches, [None] * 2)
    inside = [b["completion_mask"] != 0 for b in batches]
    flat = np.concatenate([x[m] for x, m in zip(raw, inside)])
    expected = (flat - flat.mean()) / flat.std(ddof=1)
    found = np.concatenate([x[m] for x, m in zip(white, inside)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # Of one batch alone the mean is another, and returns are as they were.
    assert abs(np.mean(white[1][inside[1]])) > 1e-2
    for ours, theirs in zip(returns, same):
        np.testing.assert_array_equal(ours, theirs)
    for x, m in zip(white, inside):
        assert not x[~m].any()


# The value model


def test_the_value_model_stays_out_of_what_is_saved(tmp_path):
    task = make(lora())
    base = [np.array(v.value) for v in task.causal_lm.variables]
    fit(task)
    assert np.any(task.value_model.kernel.value)
    assert task.value_model.kernel.dtype == "float32"
    for value, v in zip(base, task.causal_lm.variables):
        np.testing.assert_array_equal(value, v.value, err_msg=v.path)
    task.save_adapter(tmp_path / "adapter")
    task.export(tmp_path / "model")
    task.save_to_preset(tmp_path / "preset")
    rows = [{"prompt_ids": [5, 6, 7], "completion_ids": [8, 9]}]
    expected = task.log_probs(rows)[0]
    plain = kpt.GRPOTask.from_preset(MODEL, lora=lora(), sequence_length=64)
    names = len(plain.variables)
    plain.load_adapter(tmp_path / "adapter")
    assert len(plain.variables) == names
    exported = kpt.GRPOTask.from_preset(tmp_path / "model")
    saved = kpt.GRPOTask.from_preset(tmp_path / "preset")
    for other in (plain, exported, saved):
        found = other.log_probs(rows)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    shapes = [tuple(v.shape) for v in exported.causal_lm.variables]
    assert shapes == [tuple(v.shape) for v in task.causal_lm.variables]
    files = (tmp_path / "adapter").iterdir()
    assert not any(b"value_model" in f.read_bytes() for f in files)


@pytest.mark.parametrize(
    "with_lora", [True, pytest.param(False, marks=pytest.mark.full)]
)
def test_a_backbone_of_its_own(with_lora):
    """The policy's first gradient has nothing of the values in it, and the
    variables of two like models have paths that Optax can tell apart."""
    model = presets.load_causal_lm(MODEL)
    adapter = lora() if with_lora else None
    task = make(adapter, value_model=model, optimizer=optax.adam(1e-3))
    ours = [v for v in task.trainable_variables if "value_model" in v.path]
    assert len(ours) > 2
    before = [np.array(v.value) for v in ours]
    # At first the head is 0 and lets nothing through, then the adapter's B.
    fit(task, epochs=3)
    for value, v in zip(before, ours):
        assert np.any(value != v.value), v.path
    # To compile again forgets nothing.
    kernel = np.array(task.value_model.kernel.value)
    compiled(task, value_model=model)
    np.testing.assert_array_equal(kernel, task.value_model.kernel.value)
    with pytest.raises(ValueError, match="keeps the value model"):
        compiled(task)


def test_values_do_not_train_a_policy_with_its_own_value_model():
    plain = make(lora(), value_model=MODEL, kl_coef=0)
    strong = make(
        lora(),
        value_model=MODEL,
        kl_coef=0,
        value_loss=kpt.losses.ValueLoss(coefficient=10.0),
    )
    for task in (plain, strong):
        set_head(task)
        fit(task)
    for a, b in zip(plain.adapter.b, strong.adapter.b):
        np.testing.assert_allclose(a.value, b.value, rtol=1e-5, atol=1e-8)
    head = [t.value_model.kernel.value for t in (plain, strong)]
    assert np.abs(np.array(head[0] - head[1])).max() > 1e-3


def test_the_divergence_in_the_loss_and_nowhere():
    task = make(lora(), reference=OTHER, kl_in="loss", kl_coef=0.1)
    [step] = fit(task)
    assert step["kl"] > 0.1
    policy = task.objective.losses[0]
    assert policy.beta == 0.1 and not task.scoring.kl_in_reward
    task = make(lora(), kl_coef=0)
    [step] = fit(task)
    assert "kl" not in step and task.reference is None


def test_completions_without_a_reward_are_left_out():
    def half(completions):
        return [0.5 if i % 2 else None for i in range(len(completions))]

    def none(completions):
        return [None] * len(completions)

    scores = [half]
    task = make(lora(), rewards=[lambda completions: scores[0](completions)])
    set_head(task)
    [step] = fit(task)
    advantages = np.array(task.last_rollout["advantage"])
    assert np.all(advantages[::2] == 0) and np.all(advantages[1::2] != 0)
    assert step["reward"] == pytest.approx(0.5)
    scores[0] = none
    before = weights(task)
    [step] = fit(task)
    assert step["skipped"] == 1.0
    assert_same(before, weights(task), atol=0)


@pytest.fixture(scope="module")
def refusing():
    """A task that nothing compiles."""
    return make()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"value_loss": kpt.losses.PPOLoss()}, "value_loss=PPOLoss"),
        ({"value_model": 3}, "value_model=3"),
        ({"kl_in": "both"}, "kl_in='both'"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
        ({"loss": kpt.losses.PPOLoss(beta=0.1)}, "has one weight"),
        ({"loss": kpt.losses.SFTLoss()}, "policy loss"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"gae_lambda": "1"}, "gae_lambda='1'"),
        ({"advantages": "auto"}, "advantages='auto'"),
        ({"max_resamples": 2}, "max_resamples=2"),
        ({"rewards": []}, "at least one reward function"),
    ],
)
def test_compile_refuses(settings, message, refusing):
    with pytest.raises(ValueError, match=message):
        compiled(refusing, **settings)


def test_the_policy_is_no_value_model():
    task = kpt.PPOTask.from_preset(MODEL, sequence_length=64)
    with pytest.raises(ValueError, match="another model than the policy"):
        compiled(task, value_model=task.causal_lm)
    # A refusal leaves nothing behind.
    compiled(task)


# Learning


def learn(seed):
    """Shares of right answers on unseen prompts, before and after."""
    train, unseen = split(seed)
    task = kpt.PPOTask(trained_on_the_format(train, seed), sequence_length=16)
    task.compile(
        keras.optimizers.AdamW(1e-3),
        rewards=[middle],
        value_loss=kpt.losses.ValueLoss(coefficient=0.1),
        num_generations=8,
        num_iterations=2,
        stop_token_ids=[END],
        max_completion_length=4,
    )

    def solved():
        return task.evaluate(unseen, 200, temperature=1.0)["pass@1"]

    before = solved()
    task.fit(train, batch_size=32, epochs=4, seed=seed, verbose=0)
    return before, solved()


def check(seed):
    before, after = learn(seed)
    assert before <= 0.2
    assert after - before >= 0.3


@pytest.mark.full
def test_it_learns():
    check_most(check, (0, 1, 2))
