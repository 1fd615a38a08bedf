"""Conversations with a real vLLM (`make test-vllm`)."""

import importlib.util
import sys
import threading

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import VLLMRollout
from keras_posttrain.rollout.vllm.local import LocalEngine
from tests.rollout import test_session as conversations
from tests.vllm.models import make

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]

SERVER = {"python": sys.executable, "timeout": 60}
ENGINES = [
    pytest.param({}, id="local"),
    pytest.param(SERVER, id="server", marks=pytest.mark.full),
]


@pytest.mark.parametrize("settings", ENGINES)
def test_every_turn_has_the_trainers_log_probs(settings):
    """Turns of six conversations join those that are sampled."""
    task = make("qwen3", task=kpt.SFTTask, sequence_length=256)
    engine = VLLMRollout(**settings)
    engine.set_model(task)
    try:
        engine.sync_weights()
        found, _ = conversations.converse_at_once(engine, 6, delay=0.05)
        conversations.check_log_probs(task, found, atol=1e-4)
        # Who else is sampled changes no token.
        alone, _ = conversations.converse_at_once(engine, 6, concurrency=1)
        assert [x[0] for x in alone] == [x[0] for x in found]
    finally:
        engine.stop()


@pytest.mark.parametrize("settings", ENGINES)
def test_a_short_turn_does_not_wait_for_a_long_one(settings):
    task = make("qwen3", task=kpt.SFTTask, sequence_length=256)
    engine = VLLMRollout(**settings)
    engine.set_model(task)
    ids = list(range(40, 60))
    try:
        engine.sync_weights()
        with engine.session() as session:
            long = session.submit(
                kpt.rollout.Request(ids, max_tokens=230, seed=0)
            )
            for seed in range(3):
                short = kpt.rollout.Request(ids, max_tokens=2, seed=seed)
                session.submit(short).result()
            assert not long.done()
            assert len(long.result()[0].token_ids) == 230
    finally:
        engine.stop()


def test_new_weights_interrupt_a_turn(monkeypatch):
    steps = threading.Semaphore(0)
    run = LocalEngine.run

    def counted(engine, jobs, on_tokens=None, *args):
        def count(*tokens):
            steps.release()

        return run(engine, jobs, on_tokens or count, *args)

    monkeypatch.setattr(LocalEngine, "run", counted)
    task = make("qwen3", task=kpt.SFTTask, sequence_length=256)
    engine = VLLMRollout()
    engine.set_model(task)
    engine.overlaps = True
    try:
        engine.sync_weights()
        with engine.session() as session:
            request = kpt.rollout.Request(
                range(40, 60), max_tokens=200, num_generations=2, seed=0
            )
            future = session.submit(request)
            for _ in range(20):
                assert steps.acquire(timeout=60)
            engine.interrupt()
            with engine.turn:
                engine.sync_weights()
                engine.resume()
            samples = future.result()
    finally:
        engine.stop()
    # vLLM refuses a step whose thread has other settings than its own.
    assert engine.restarts == 0
    for sample in samples:
        assert len(sample.token_ids) == 200
        versions = sample.token_versions
        assert np.diff(versions).max() == 1 and np.diff(versions).min() == 0


async def two_turns(chat, word):
    first = await chat(word)
    second = await chat(f"{word} again")
    return float(len(first.text) % 2 + len(second.text) % 2)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_episodes_train(max_staleness):
    """What is trained are the sampled tokens, with the trainer's log-probs."""
    task = kpt.GRPOTask.from_preset(
        conversations.REFERENCE / "models" / "qwen3",
        sequence_length=256,
        lora=kpt.LoRA(rank=4),
    )
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=kpt.losses.GRPOLoss(beta=0.0),
        episode=kpt.episodes.Episode(
            # The model knows no end of a turn.
            two_turns,
            limits=kpt.episodes.Limits(after_cut="continue"),
        ),
        num_generations=4,
        max_completion_length=8,
        rollout=VLLMRollout(),
    )
    history = task.fit(
        [{"word": word} for word in ("one", "two", "three", "four")],
        batch_size=2,
        max_staleness=max_staleness,
        verbose=0,
    )
    assert task.step == 2
    assert history.history["episodes/turns"] == [2.0]
    gaps = np.array(history.history["sampling/sampling_logp_difference/max"])
    if not max_staleness:
        assert gaps.max() < 1e-4
