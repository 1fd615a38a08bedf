"""Real vLLM samples while the trainer trains (`make test-vllm`)."""

import importlib.util
import sys

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import VLLMRollout
from tests.rollout import contract
from tests.vllm.models import compile_grpo, make, prompts
from tests.vllm.test_vllm_server import kill_in_rollouts

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]

SERVER = {"python": sys.executable, "timeout": 60}


@pytest.mark.parametrize(
    "lora, settings, every",
    [
        pytest.param(True, {}, 40, id="lora"),
        pytest.param(False, {}, 40, id="full", marks=pytest.mark.full),
        pytest.param(True, SERVER, 5, id="server", marks=pytest.mark.full),
    ],
)
def test_samples_continue_with_new_weights(lora, settings, every):
    task = make("qwen3", lora, kpt.SFTTask, sequence_length=256)
    engine = VLLMRollout(**settings)
    engine.set_model(task)
    try:
        contract.check_overlap(engine, task, 1e-4, every)
    finally:
        engine.stop()


class Seen(keras.callbacks.Callback):
    """The prompts of each step, and its logs."""

    def __init__(self):
        super().__init__()
        self.prompts, self.logs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.prompts.append(self.model.last_rollout["prompt"])
        self.logs.append(dict(logs))


def fitted(engine, **settings):
    task, seen = make("llama_tied", True), Seen()
    compile_grpo(task, engine, 0.3)
    task.fit(
        prompts(12),
        batch_size=2,
        shuffle=False,
        callbacks=[seen],
        verbose=0,
        **settings,
    )
    assert task.step == 6
    return seen


def check(seen, restarts, oldest=(2,)):
    """Each prompt is trained on once, in its turn, and none is too old."""
    turns = [row["prompt_ids"] for row in prompts(12)]
    turns = [turns[i : i + 2] for i in range(0, 12, 2)]
    assert [[list(p) for p in step[::4]] for step in seen.prompts] == turns
    ages = [logs["staleness/max"] for logs in seen.logs]
    assert max(ages) in oldest and ages[0] == 0
    assert seen.logs[-1]["vllm/restarts"] == restarts


def test_rollouts_overlap_with_training():
    check(fitted(VLLMRollout(), max_staleness=2), 0)


@pytest.mark.full
def test_a_server_that_is_killed_during_training(monkeypatch):
    kill_in_rollouts(monkeypatch, [1, 3])
    # Training may catch up while a server starts.
    seen = fitted(VLLMRollout(**SERVER), max_staleness=2)
    check(seen, 2, oldest=(1, 2))
