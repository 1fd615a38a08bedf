"""Several vLLM servers as one engine (`make test-vllm`)."""

import contextlib
import importlib.util
import os
import secrets
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain import _console
from keras_posttrain.rollout import Request, VLLMRollout
from keras_posttrain.rollout.vllm import jobs, worker
from keras_posttrain.rollout.vllm import process as vllm_process
from keras_posttrain.rollout.vllm import weights as vllm_weights
from keras_posttrain.rollout.vllm.server import ServerEngine
from tests.rollout import contract
from tests.support import weights
from tests.vllm.models import compile_grpo, make, prompts

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
)
KEY = secrets.token_hex(16)


class Server:
    """A server started by hand, as the docstring of `VLLMRollout` says."""

    def __init__(self, folder, causal_lm, name):
        self.folder, self.socket = folder, folder / name
        self.url, self.process = f"unix:{self.socket}", None
        vllm_weights.write_config(causal_lm, folder / "model", "float32")

    def start(self):
        self.socket.unlink(missing_ok=True)
        options = (
            f"--model {self.folder}/model --uds {self.socket} --load-format "
            "dummy --dtype float32 --max-model-len 257 --enforce-eager "
            "--enable-lora --max-lora-rank 8 --no-enable-chunked-prefill "
            f"--kv-cache-memory-bytes {2**27} --uvicorn-log-level error"
        )
        self.process = subprocess.Popen(
            [sys.executable, worker.__file__, *options.split()],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_API_KEY": KEY,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_PLUGINS": "",
            },
            start_new_session=True,
        )

    def wait(self):
        # The key is not needed for it.
        engine = ServerEngine({}, 300, self.folder, None, self.url, KEY)
        engine.wait_until_healthy()

    @property
    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def kill(self):
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        vllm_process.kill(self.process.pid)
        self.process.wait()


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """Two servers of the tests' Llama, which is the same in all of them."""
    folder = tmp_path_factory.mktemp("servers")
    causal_lm = make("llama_tied", task=kpt.SFTTask).causal_lm
    found = [Server(folder, causal_lm, name) for name in ("a", "b")]
    yield found
    for server in found:
        server.kill()


@pytest.fixture
def servers(two_servers):
    """Both servers, started if they do not run."""
    for server in two_servers:
        if not server.is_running:
            server.start()
    for server in two_servers:
        server.wait()
    return two_servers


def engine_of(servers, **settings):
    urls = [server.url for server in servers]
    return VLLMRollout(urls=urls, api_key=KEY, timeout=120, **settings)


@pytest.fixture
def served(monkeypatch):
    """Sampling jobs that ended, a list of `(url, prompt)`."""
    found, run_job = [], ServerEngine.run_job

    def recorded(self, job, *args):
        result = run_job(self, job, *args)
        if "logprobs" in job.params:
            found.append((self.url, job.token_ids))
        return result

    monkeypatch.setattr(ServerEngine, "run_job", recorded)
    return found


class Seen(keras.callbacks.Callback):
    """Completions that were trained on, logs, and what to do after a step."""

    def __init__(self, at=None):
        super().__init__()
        self.completions, self.logs, self.at = [], [], at or {}

    def on_train_batch_end(self, batch, logs=None):
        self.completions.append(self.model.last_rollout["completion"])
        self.logs.append(logs)
        self.at.get(len(self.logs), lambda: None)()


def kill_at_its_next_request(monkeypatch, server):
    """Kills a server while it has a request."""
    run_job, alive = ServerEngine.run_job, [server]

    def killing(self, job, *args):
        if alive and "logprobs" in job.params and self.url == server.url:
            alive.pop().kill()
        return run_job(self, job, *args)

    monkeypatch.setattr(ServerEngine, "run_job", killing)


@pytest.mark.parametrize(
    "lora", [True, pytest.param(False, marks=pytest.mark.full)]
)
def test_one_of_two_is_killed_and_comes_back(
    servers, served, monkeypatch, lora
):
    """Every row is trained once, with the tokens of one undisturbed engine."""
    results, one, said = [], servers[1], []
    say = _console.say
    monkeypatch.setattr(_console, "say", lambda x: (said.append(x), say(x)))

    def bring_back():
        served.clear()
        one.start()
        one.wait()

    events = {
        1: lambda: kill_at_its_next_request(monkeypatch, one),
        4: bring_back,
    }
    for engine, at in ((VLLMRollout(), {}), (engine_of(servers), events)):
        task, seen = make("llama_tied", lora, sequence_length=256), Seen(at)
        compile_grpo(task, engine, 0.3)
        task.fit(prompts(24), batch_size=4, callbacks=[seen], verbose=0)
        results.append((task.step, seen.completions, weights(task)))
    (steps, rows, left), (other_steps, other_rows, right) = results
    assert steps == other_steps == 6
    assert rows == other_rows
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=1e-4)
    used = [logs["vllm/replicas"] for logs in seen.logs]
    assert used == [2, 1, 1, 1, 2, 2]
    assert all(logs["vllm/probe_difference"] < 1e-4 for logs in seen.logs)
    # The one that came back samples again.
    assert {url for url, _ in served} == {s.url for s in servers}
    lost, back = [line for line in said if one.url in line]
    assert "is lost (1 of 2 left)" in lost and "answers again" in back


def test_deltas_give_the_weights_of_a_full_push(servers):
    """Also to a server that another trainer has used in between."""
    task = make("llama_tied", task=kpt.SFTTask, sequence_length=256)
    engine, full = engine_of(servers, push="delta"), engine_of(servers)
    # Changes of a few values of float32.
    rng, rates = np.random.default_rng(0), iter((0.5, 0.7))

    def train():
        rate = next(rates)
        for variable in task.trainable_variables:
            chosen = rng.random(variable.shape) < 0.01
            variable.assign_add((rate * chosen).astype("float32"))

    def pushed(engine):
        """The log-probabilities of each server, and the bytes sent."""
        engine.set_model(task)
        engine.sync_weights()
        job = jobs.scoring_job(engine._probe.token_ids, None, 1.0)
        scores = [r.prompt for r in engine._engine.run_on_each(job)]
        assert scores[0] == scores[1]
        return scores[0], engine.metrics()["vllm/sync_bytes"]

    try:
        first, size = pushed(engine)
        train()
        second, moved = pushed(engine)
        assert second != first and 0 < moved < size / 10
        other = VLLMRollout(servers[0].url, api_key=KEY)
        other.set_model(make("llama_tied", task=kpt.SFTTask))
        other.sync_weights()
        other.stop()
        train()
        third, moved = pushed(engine)
        # One of the two gets all weights.
        assert size / 2 < moved < 0.6 * size
        assert (third, size) == pushed(full)
        assert third not in (first, second)
        used = engine.metrics()["vllm/replicas"], engine.restarts
        assert used == (2, 0)
    finally:
        engine.stop()
        full.stop()


def test_conversations_weights_and_the_last_server(servers, served):
    """Turns stay where their first was; foreign weights are not sampled."""
    task = make("llama_tied", task=kpt.SFTTask, sequence_length=256)
    engine = engine_of(servers)
    engine.set_model(task)
    try:
        engine.sync_weights()
        rng = np.random.default_rng(0)
        with engine.session() as session:
            places = converse(session, rng, served)
        assert all(len(urls) == 1 for urls in places)
        assert set.union(*places) == {s.url for s in servers}
        # Another engine takes a server over, with the same names of weights.
        other = VLLMRollout(servers[0].url, api_key=KEY)
        other.set_model(make("llama_tied", task=kpt.SFTTask))
        other.sync_weights()
        other.stop()
        served.clear()
        requests = [
            Request(ids, max_tokens=4, seed=0)
            for ids in rng.integers(3, 500, (6, 5)).tolist()
        ]
        out = engine.generate(requests)
        assert len(engine._engine.used) == 1
        taken = {url for url, _ in served}
        assert taken == {s.url for s in servers}
        # The next sync takes the server back.
        engine.sync_weights()
        assert len(engine._engine.used) == 2
        again = engine.generate(requests)
        ids = [[c.token_ids for c in samples] for samples in out]
        assert ids == [[c.token_ids for c in samples] for samples in again]
        # Without any server.
        for server in servers:
            server.kill()
        engine._engine.replicas[0].server.timeout = 0.1
        with pytest.raises(RuntimeError, match="failed 3 times in a row"):
            engine.generate(requests)
    finally:
        engine.stop()


def converse(session, rng, served):
    """Six conversations of three turns at once; the servers of each."""
    chats = rng.integers(3, 500, (6, 70)).tolist()
    places = [set() for _ in chats]
    for turn in range(3):
        futures = [
            session.submit(Request(ids, max_tokens=8, seed=turn))
            for ids in chats
        ]
        for ids, urls, future in zip(chats, places, futures):
            [sample] = future.result()
            urls |= {url for url, asked in served if list(asked) == ids}
            ids += [*sample.token_ids, *rng.integers(3, 500, 20).tolist()]
    return places


def test_one_server_with_two_engines():
    """vLLM spreads the requests; both engines have the trainer's weights."""
    task = make("llama_tied", True, task=kpt.SFTTask)
    engine = VLLMRollout(
        python=sys.executable,
        timeout=60,
        engine_args={"data_parallel_size": 2},
    )
    engine.set_model(task)
    try:
        engine.sync_weights()
        for variable in task.trainable_variables:
            noise = np.random.default_rng(0).normal(0, 0.1, variable.shape)
            variable.assign_add(noise.astype("float32"))
        engine.sync_weights()
        probe = engine._probe
        job = jobs.scoring_job(probe.token_ids, None, 1.0)
        results = engine._engine.run_on_each(job)
        assert len(results) == 2
        expected = probe(engine._task_weights())
        for result in results:
            found, *_ = jobs.score_arrays(job, result.prompt, None)
            np.testing.assert_allclose(found, expected, atol=1e-4)
        contract.samples_are_keyed(engine)
    finally:
        engine.stop()
