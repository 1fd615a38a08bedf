"""Routing replay: tokens are trained with the experts that sampled them."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.models import experts
from keras_posttrain.models.experts import choose_experts
from tests.models.mixtures import make_mixture
from tests.support import REFERENCE, weights
from tests.tasks.contract import Record, odd

SIZES = {"num_experts": 4, "mlp_only_layers": []}
PROMPTS = [{"prompt_ids": [5, 6, 7, 8]}, {"prompt_ids": [9, 4, 3]}]
STOP = range(3, 20)


def make(kind=kpt.GRPOTask, remat="none", num_layers=1, rate=0.5, **settings):
    model = make_mixture("Qwen3Moe", num_layers=num_layers, **SIZES)
    task = kind(model, sequence_length=48, remat=remat)
    settings = {
        "rewards": [odd],
        "num_generations": 4,
        "max_completion_length": 6,
        "stop_token_ids": STOP,
        "max_grad_norm": None,
        **settings,
    }
    task.compile(keras.optimizers.SGD(rate), **settings)
    return task


def choices_of(task, token_ids):
    """The experts of a sequence's tokens, by a forward pass."""
    with experts.recorded_choices() as found:
        shape = (1, len(token_ids))
        batch = {
            "token_ids": jnp.asarray([token_ids], "int32"),
            "segment_ids": jnp.ones(shape, "int32"),
            "positions": jnp.arange(shape[1])[None],
        }
        task.policy.prefill(batch)
    return np.stack([np.asarray(x) for x in found], axis=1)


def test_the_engine_reports_the_experts_of_each_token():
    """Of prompts that are computed, in pieces too, copied and continued."""
    task = make(num_layers=2)
    rng = np.random.default_rng(0)
    long, more = (rng.integers(3, 95, n).tolist() for n in (70, 131))
    prompts = [[5, 6, 7], [5, 6, 7], long + [3], long + more]
    requests = [
        kpt.rollout.Request(
            ids, 2, max_tokens=40, seed=0, return_routed_experts=True
        )
        for ids in prompts
    ]
    engine = kpt.rollout.NativeRollout(num_slots=3, prefill_chunk=64)
    engine.set_model(task)
    found = engine.generate(requests)
    assert any("extension" in text for text in engine.programs)
    assert any("copy" in text for text in engine.programs)
    for ids, completions in zip(prompts, found, strict=True):
        for completion in completions:
            every = [*ids, *completion.token_ids]
            want = choices_of(task, every)[:-1]
            assert want.shape == (len(every) - 1, 2, 2)
            assert completion.routed_experts.dtype == np.int16
            np.testing.assert_array_equal(completion.routed_experts, want)
    plain = kpt.rollout.Request([5, 6, 7], max_tokens=2, seed=0)
    [[completion]] = engine.generate([plain])
    assert completion.routed_experts is None


def test_given_experts_have_the_routers_weights():
    """Of logits log 1, log 2, log 5 the experts 0 and 1 are given.

    Their probabilities are 1/8 and 2/8; normalized they are 1/3 and 2/3. The
    gradient of the first weight is 1/3 * 2/3 for its own logit, minus that
    for the other and 0 for the logit of the third. The second token, with -1,
    takes the best.
    """
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0]] * 2))
    given = jnp.array([[0, 1], [-1, -1]])
    values, chosen = choose_experts(logits, 2, True, given)
    np.testing.assert_array_equal(chosen, [[0, 1], [2, 1]])
    np.testing.assert_allclose(values, [[1 / 3, 2 / 3], [5 / 7, 2 / 7]], 1e-6)
    values, _ = choose_experts(logits, 2, False, given)
    np.testing.assert_allclose(values, [[1 / 8, 2 / 8], [5 / 8, 2 / 8]], 1e-6)
    gradient = jax.grad(lambda x: choose_experts(x, 2, True, given)[0][0, 0])
    want = [[2 / 9, -2 / 9, 0], [0, 0, 0]]
    np.testing.assert_allclose(gradient(logits), want, atol=1e-6)


def one_step(kind=kpt.GRPOTask, way=(), **settings):
    """The logs and the update of a step."""
    task, record = make(kind, **settings), Record()
    before = list(weights(task).values())
    fit = {"batch_size": 2, "shuffle": False, "verbose": 0, **dict(way)}
    task.fit(PROMPTS, callbacks=[record], **fit)
    after = weights(task).items()
    return record.steps[0], [x - y for (_, x), y in zip(after, before)]


plain = functools.cache(one_step)


def assert_same(one, other):
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(
            one[0][name], other[0][name], rtol=2e-5, atol=1e-6
        )
    size = max(np.abs(x).max() for x in one[1])
    for x, y in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * size + 1e-8)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"packing": 48}, marks=pytest.mark.full),
        {"packing": 48, "share_prefix": True},
    ],
    ids=["rows", "packed", "shared"],
)
def test_it_changes_nothing_in_float32(way):
    """The engine's choices are the trainer's, however rows are laid out."""
    loss = kpt.losses.GRPOLoss(beta=0.1)
    found = one_step(
        way=tuple(way.items()), routing_replay=True, loss=loss,
        micro_batch_size=1 if "packing" in way else 2,
    )  # fmt: skip
    assert_same(plain(loss=loss), found)


@pytest.mark.full
def test_ppo_and_minibatches():
    """Updates are so small that no token gets other experts after them."""
    settings = {
        "num_generations": 1, "num_iterations": 2, "num_minibatches": 2,
        "rate": 1e-4,
    }  # fmt: skip
    found = one_step(kpt.PPOTask, routing_replay=True, **settings)
    assert_same(one_step(kpt.PPOTask, **settings), found)


def worst(logits, top_k, normalize, given=None):
    """Chooses the experts with the least probabilities."""
    _, experts = jax.lax.top_k(-logits, top_k)
    if given is not None:
        experts = jnp.where(given < 0, experts, given)
    return choose_experts(logits, top_k, normalize, experts)


def test_the_experts_that_sampled_are_trained(monkeypatch):
    """An engine with other experts, and a trainer that takes the best.

    With the replay, and only with it, its step is that of a trainer which
    takes the others itself.
    """
    with monkeypatch.context() as patch:
        patch.setattr(experts, "choose_experts", worst)
        want = one_step()
    generate = kpt.rollout.NativeRollout._generate

    def with_others(*args):
        with monkeypatch.context() as patch:
            patch.setattr(experts, "choose_experts", worst)
            return generate(*args)

    monkeypatch.setattr(kpt.rollout.NativeRollout, "_generate", with_others)
    assert_same(want, one_step(routing_replay=True))
    _, other = one_step()
    size = max(np.abs(x).max() for x in other)
    gap = max(np.abs(x - y).max() for x, y in zip(want[1], other))
    assert gap > 0.1 * size


@pytest.mark.full
def test_eight_devices_are_one(eight_devices):
    """With rematerialised layers, and experts that tokens are sent to."""
    want = plain()
    keras.distribution.set_distribution(kpt.distribution.fsdp(experts=4))
    assert_same(want, one_step(routing_replay=True, remat="full"))


@pytest.mark.full
def test_a_run_resumes_bit_for_bit(tmp_path):
    def run(folder, epochs):
        task = make(routing_replay=True)
        checkpoint = kpt.callbacks.Checkpoint(folder)
        task.fit(PROMPTS, batch_size=2, epochs=epochs, verbose=0,
                 callbacks=[checkpoint])  # fmt: skip
        return weights(task).values()

    straight = run(tmp_path / "straight", 2)
    run(tmp_path / "resumed", 1)
    resumed = run(tmp_path / "resumed", 2)
    for x, y in zip(straight, resumed, strict=True):
        assert x.tobytes() == y.tobytes()


async def talk(chat, prompt_ids):
    return float(len((await chat("Hello")).text))


def test_what_cannot_be_replayed():
    engine = kpt.rollout.VLLMRollout(python="/usr/bin/python3")
    with pytest.raises(ValueError, match="NativeRollout.*VLLMRollout for a"):
        make(routing_replay=True, rollout=engine)
    with pytest.raises(ValueError, match="max_staleness=0"):
        make(routing_replay=True).fit(PROMPTS, max_staleness=1, verbose=0)
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models/qwen2", sequence_length=48
    )
    with pytest.raises(ValueError, match="NativeRollout for a Qwen"):
        task.compile(
            rewards=[odd], max_completion_length=8, routing_replay=True
        )
    task = kpt.GRPOTask(
        make_mixture("Qwen3Moe", vocabulary_size=151_936, **SIZES),
        REFERENCE / "models/qwen3",
        sequence_length=48,
    )
    with pytest.raises(ValueError, match="turns of an episode.*'talk'"):
        task.compile(
            episode=talk, max_completion_length=8, routing_replay=True
        )
