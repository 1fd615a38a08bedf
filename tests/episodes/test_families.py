"""Every family: what episodes sample has the trainer's log-probabilities."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.episodes.support import Batches
from tests.support import FAMILIES, REFERENCE, in_ci


async def talk(chat, number, generation):
    """Three turns, the last in two branches and in a new context."""
    await chat(f"What is {number}?")
    other = chat.fork()
    await other("Why?")
    await chat(f"And {number + generation}?")
    chat.restart("In short?")
    reply = await chat()
    return float(len(reply.text) % 5)


def batches_of(model, **settings):
    """The batches of a rollout, with old log-probabilities."""
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models" / model, sequence_length=256
    )
    limits = kpt.episodes.Limits(after_cut="continue")
    task.compile(
        keras.optimizers.SGD(0.1),
        episode=kpt.episodes.Episode(talk, limits=limits),
        num_generations=2,
        num_iterations=2,
        max_completion_length=6,
    )
    found = Batches(task).found
    rows = [{"number": n} for n in range(2)]
    task.fit(rows, batch_size=2, verbose=0, **settings)
    return found


def check(batches):
    assert len(batches) == 1
    for batch in batches:
        mask = batch["completion_mask"]
        np.testing.assert_allclose(batch["sequence_mask"].sum(), 4, rtol=1e-5)
        # Four turns of at most six tokens, each trained once.
        assert 0.5 * 4 * 24 < mask.sum() <= 4 * 24
        gap = batch["rollout_per_token_logps"] - batch["old_per_token_logps"]
        assert np.abs(gap * mask).max() < 1e-5


# Windows; the tests of episodes and of eight devices have a Qwen3.
@pytest.mark.parametrize(
    "model", in_ci("gemma3_text", of=FAMILIES.values()), ids=FAMILIES
)
def test_log_probs_of_all_turns(model):
    check(batches_of(model, share_prefix=True))


@pytest.mark.devices
def test_log_probs_on_eight_devices(eight_devices):
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    check(batches_of("qwen3", share_prefix=True))
