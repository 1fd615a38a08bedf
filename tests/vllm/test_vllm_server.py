"""Real vLLM in a process of its own (`make test-vllm`)."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import VLLMRollout
from keras_posttrain.rollout.vllm import http
from keras_posttrain.rollout.vllm.server import ServerEngine
from tests.rollout import contract
from tests.support import weights
from tests.vllm.models import compile_grpo, make, prompts

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
)


def alive(group):
    """Returns whether a process of a group runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = subprocess.run(
        ["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True
    ).stdout.split()
    return any(not state.startswith("Z") for state in states)


class Seen(keras.callbacks.Callback):
    """Every completion that was trained on."""

    def __init__(self):
        super().__init__()
        self.completions, self.logs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.completions.append(self.model.last_rollout["completion"])
        self.logs.append(logs)


def test_the_contract_and_the_key():
    """Under LoRA: a full push, then adapters."""
    task = make("qwen3", True, kpt.SFTTask)
    engine = VLLMRollout(python=sys.executable)
    engine.set_model(task)
    try:
        engine.start()
        server = engine._engine
        for path in ("/collective_rpc", "/v1/models", "/load", "/metrics"):
            for key in (None, "wrong"):
                with pytest.raises(ValueError, match=f"{path} with 401"):
                    http.call(
                        server.url,
                        key,
                        "GET",
                        path,
                        None,
                        30,
                        http.Connections(),
                    )
        contract.check_engine(engine, task)
        variables = task.trainable_variables
        adapter = sum(4 * int(np.prod(v.shape)) for v in variables)
        moved = engine.metrics()["vllm/sync_bytes"]
        assert adapter < moved < adapter + 20_000
        # Another engine takes the server over: none of ours is sampled.
        other = VLLMRollout(server.url, api_key=server.api_key)
        other.set_model(task)
        other.sync_weights()
        contract.samples_are_keyed(other)
        other.stop()
        group = server.process.pid
    finally:
        engine.stop()
    assert not alive(group)


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.full)])
def test_a_server_that_is_killed(monkeypatch, kills):
    """Or stops answering, in rollouts: as many updates, of the same rows."""
    results = []
    engines = VLLMRollout(), VLLMRollout(python=sys.executable, timeout=30)
    for engine in engines:
        task, seen = make("llama_tied"), Seen()
        compile_grpo(task, engine, 0.3)
        if engine.python is not None:
            # Each followed by a call that is left alone.
            kill_in_rollouts(monkeypatch, range(1, 2 * kills, 2))
        task.fit(prompts(12), batch_size=2, callbacks=[seen], verbose=0)
        results.append((task.step, seen.completions, weights(task)))
    (steps, rows, left), (other_steps, other_rows, right) = results
    assert steps == other_steps == 6
    assert seen.logs[-1]["vllm/restarts"] == kills
    assert rows == other_rows
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=1e-4)


def kill_in_rollouts(monkeypatch, numbers):
    """Ends or halts the server at the second request of some calls.

    Args:
        monkeypatch: pytest's.
        numbers: ints, of calls that sample, from 1; those that try again
            count too.
    """
    run, one, wanted, rollouts = (
        ServerEngine.run, ServerEngine.run_job, set(numbers), []
    )  # fmt: skip

    def counted(self, jobs, *args):
        sampling = any("logprobs" in j.params for j in jobs.values())
        if sampling:
            rollouts.append(0)
        yield from run(self, jobs, *args)

    def killing(self, job, open_ones):
        if "logprobs" in job.params:
            rollouts[-1] += 1
            number, pid = len(rollouts), self.process.pid
            if rollouts[-1] == 2 and number in wanted:
                wanted.remove(number)
                if number % 3 == 1:
                    server = ["pkill", "-KILL", "-P", str(pid)]
                    subprocess.run(server, check=True)
                elif number % 3 == 2:
                    os.killpg(pid, signal.SIGSTOP)
                else:
                    os.killpg(pid, signal.SIGKILL)
        return one(self, job, open_ones)

    monkeypatch.setattr(ServerEngine, "run", counted)
    monkeypatch.setattr(ServerEngine, "run_job", killing)


def test_no_orphans_of_a_killed_trainer(tmp_path):
    """The trainer is killed while its server runs."""
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {os.getcwd()!r})
            import keras_posttrain as kpt
            from keras_posttrain.rollout.vllm.server import ServerEngine
            launch = ServerEngine.wait_until_healthy

            def announced(self):
                print(self.process.pid, flush=True)
                launch(self)
                print("healthy", flush=True)

            ServerEngine.wait_until_healthy = announced
            from tests.vllm.models import make
            engine = kpt.rollout.VLLMRollout(python=sys.executable)
            engine.set_model(make("qwen3", task=kpt.SFTTask))
            engine.start()
            time.sleep(600)
            """
        )
    )
    trainer = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    )
    with trainer:
        group = int(trainer.stdout.readline())
        assert trainer.stdout.readline() == "healthy\n"
        assert alive(group)
        trainer.kill()
    end = time.monotonic() + 60
    while alive(group) and time.monotonic() < end:
        time.sleep(0.5)
    assert not alive(group)
