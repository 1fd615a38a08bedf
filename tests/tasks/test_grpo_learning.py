"""A policy learns from rewards what it was never shown.

The prompt is three digits, and the reward is 1 for an answer that is the one
in the middle and then ends. A constant answer earns 10 %. A first round of
supervised training shows the format, with random digits.
"""

import functools

import keras
import keras_hub
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, check_most

END, ASK = 1, 2
DIGITS = range(3, 13)
losses = kpt.losses

ALGORITHMS = {
    "grpo": (losses.GRPOLoss(beta=0.0), "auto"),
    "grpo_with_kl": (losses.GRPOLoss(beta=0.001), "auto"),
    "dr_grpo": (losses.DrGRPOLoss(), "auto"),
    "dapo": (losses.DAPOLoss(), "auto"),
    "gspo": (losses.GSPOLoss(), "auto"),
    "cispo": (losses.CISPOLoss(), "auto"),
    "rloo": (losses.ReinforceLoss(), "auto"),
    "reinforce++": (
        losses.PPOLoss(),
        losses.ReinforcePlusPlusAdvantages(baseline=True),
    ),
}
SEEDS = (0, 1, 2)
# Of a prompt and an answer of four tokens each.
LONGEST = 8


def tiny_model(seed, num_layers=2):
    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.Qwen3Backbone(
        vocabulary_size=16,
        num_layers=num_layers,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        hidden_dim=64,
        intermediate_dim=128,
        tie_word_embeddings=False,
    )
    return keras_hub.models.Qwen3CausalLM(backbone)


def split(seed):
    """Prompts to train on, and others."""
    digits = [[a, b, c] for a in DIGITS for b in DIGITS for c in DIGITS]
    np.random.default_rng(seed).shuffle(digits)
    rows = [
        {"prompt_ids": [*map(int, d), ASK], "answer": int(d[1])}
        for d in digits
    ]
    return rows[:800], rows[800:]


def trained_on_the_format(rows, seed, num_layers=2):
    rng = np.random.default_rng(seed)
    model = tiny_model(seed, num_layers)
    task = kpt.SFTTask(model, sequence_length=LONGEST)
    task.compile(keras.optimizers.AdamW(3e-3))
    task.fit(
        [
            {
                "prompt_ids": row["prompt_ids"],
                "completion_ids": [int(rng.choice(DIGITS)), END],
            }
            for row in rows[:512]
        ],
        batch_size=32,
        epochs=2,
        verbose=0,
    )
    return task.causal_lm


def middle(completions, answer):
    return [float(c == [a, END]) for c, a in zip(completions, answer)]


class Solved(keras.callbacks.Callback):
    """Ends a run that has nothing left to learn."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = logs["reward"] > 0.95


def learn(name, seed, rollout="auto", max_staleness=0, num_layers=2):
    """Shares of right answers on unseen prompts, before and after."""
    train, unseen = split(seed)
    loss, advantages = ALGORITHMS[name]
    model = trained_on_the_format(train, seed, num_layers)
    task = kpt.GRPOTask(model, sequence_length=LONGEST)
    task.compile(
        keras.optimizers.AdamW(1e-3),
        loss,
        rewards=[middle],
        advantages=advantages,
        rollout=rollout,
        stop_token_ids=[END],
        max_completion_length=4,
    )

    def solved():
        return task.evaluate(unseen, 200, temperature=1.0)["pass@1"]

    before = solved()
    task.fit(
        train,
        batch_size=32,
        epochs=14,
        seed=seed,
        verbose=0,
        callbacks=[Solved()],
        max_staleness=max_staleness,
    )
    return before, solved()


def check(seed, name="grpo", least=0.8, **settings):
    before, after = learn(name, seed, **settings)
    assert before <= 0.2
    assert after >= least


@pytest.mark.usefixtures("optimized")
def test_it_learns():
    check_most(functools.partial(check, num_layers=1), SEEDS)


@pytest.mark.full
def test_two_layers_learn():
    check_most(check, SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("max_staleness", [2, 4])
def test_it_learns_from_samples_of_earlier_weights(max_staleness):
    check_most(functools.partial(check, max_staleness=max_staleness), SEEDS)


@pytest.mark.full
@pytest.mark.parametrize("name", [x for x in ALGORITHMS if x != "grpo"])
def test_every_algorithm_learns(name):
    check_most(functools.partial(check, name=name, least=0.5), SEEDS)


@pytest.mark.full
def test_an_adapter_learns_and_leaves_the_base_as_it_is():
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models/qwen3", lora=kpt.LoRA(rank=8), sequence_length=64
    )
    task.tokenizer = None

    def odd(completions):
        return [sum(x % 2 for x in ids) / len(ids) for ids in completions]

    task.compile(
        keras.optimizers.AdamW(1e-2),
        kpt.losses.GRPOLoss(beta=0.001),
        rewards=[odd],
        max_completion_length=8,
    )
    base = [np.array(v.value) for v in task.causal_lm.variables]
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(3, 500, 5).tolist()} for _ in range(80)
    ]
    train, unseen = rows[:64], rows[64:]
    before = task.evaluate(unseen, num_generations=4)["reward"]
    task.fit(train, batch_size=8, epochs=5, verbose=0)
    after = task.evaluate(unseen, num_generations=4)["reward"]
    for value, v in zip(base, task.causal_lm.variables):
        np.testing.assert_array_equal(value, v.value)
    assert 0.4 < before < 0.6
    assert after >= 0.9
