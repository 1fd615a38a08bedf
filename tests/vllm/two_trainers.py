"""A user's script that samples with vLLM, for each process of a run.

`two_trainers.py DIRECTORY PORT INDEX CASE...`: runs the cases one after the
other with the server of `DIRECTORY/server.json`, and the first process writes
what came of each to `DIRECTORY/CASE.npz`. The tests call `outcomes` for the
same in one process.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys

import jax
import keras

if __name__ == "__main__":
    keras.distribution.initialize(
        f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3])
    )

import numpy as np  # noqa: E402

import keras_posttrain as kpt  # noqa: E402
from keras_posttrain.distribution import processes  # noqa: E402
from keras_posttrain.rl.async_sampler import AsyncSampler  # noqa: E402
from keras_posttrain.rollout import Request, VLLMRollout  # noqa: E402
from keras_posttrain.rollout.vllm.jobs import EngineFailure  # noqa: E402
from keras_posttrain.rollout.vllm.server import ServerEngine  # noqa: E402
from tests.distribution.two_processes import (  # noqa: E402
    trained,
    write_programs,
)
from tests.support import REFERENCE  # noqa: E402
from tests.vllm.models import compile_grpo, make, prompts  # noqa: E402

NAMES = "vllm/sync_bytes", "vllm/restarts", "staleness/max"


class Seen(keras.callbacks.Callback):
    """Completions that were trained on, and logs.

    Before a step, while the next rollout is sampled, it evaluates the task.
    """

    def __init__(self, evaluated_before=None):
        super().__init__()
        self.rows, self.logs, self.evaluations = [], [], []
        self.evaluated_before = evaluated_before

    def on_train_batch_begin(self, batch, logs=None):
        if len(self.logs) == self.evaluated_before:
            self.evaluations.append(self.model.evaluate(prompts(4)))

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append(self.model.last_rollout["completion"])
        self.logs.append(logs)


@contextlib.contextmanager
def server():
    """A server that this process starts; the arguments to use it."""
    task = make("qwen3", True, kpt.SFTTask, sequence_length=256)
    engine = VLLMRollout(python=sys.executable, timeout=120)
    engine.set_model(task)
    engine.start()
    own = engine._engine
    try:
        yield {"urls": [own.url], "api_key": own.api_key, "timeout": 120}
    finally:
        started = own.process
        engine.stop()
    assert started.poll() is not None


def fitted(task, dataset, seen=None, **settings):
    """Trains; a dict of what came of it."""
    seen = seen or Seen()
    task.fit(dataset, callbacks=[seen], verbose=0, **settings)
    for logs in seen.logs:
        assert logs["vllm/probe_difference"] < 1e-4, logs
    found = trained(task)
    for name in ("reward", "loss", *NAMES):
        found[name] = [logs.get(name, 0.0) for logs in seen.logs]
    return {**found, "rows": json.dumps(seen.rows)}


def grpo(servers):
    """All weights are sent as differences."""
    task = make("qwen3", sequence_length=256)
    compile_grpo(task, VLLMRollout(push="delta", **servers), 0.3)
    return fitted(task, prompts(6), batch_size=3)


def ahead(servers):
    """Rollouts overlap with training; all of one wait for those in flight."""
    task = make("qwen3", True, sequence_length=256)
    compile_grpo(task, VLLMRollout(**servers), 0.3)
    seen = Seen(evaluated_before=1)
    with waiting():
        found = fitted(task, prompts(8), seen, batch_size=2, max_staleness=1)
    [metrics] = seen.evaluations
    return {**found, "evaluated": metrics["reward"]}


def ahead_and_failing(servers):
    """A request of one process fails while the others train."""
    task = make("qwen3", True, sequence_length=256)
    compile_grpo(task, VLLMRollout(**servers), 0.3)
    # In the second rollout, while the first one is trained on.
    with failing(EngineFailure("it was unplugged"), after=1):
        found = fitted(task, prompts(8), batch_size=2, max_staleness=1)
    assert task.step == 4 and max(found["staleness/max"]) == 1
    for rows in json.loads(found["rows"]):
        assert [len(ids) for ids in rows] == 8 * [6], rows
    return {"vllm/restarts": found["vllm/restarts"][-1]}


@contextlib.contextmanager
def waiting():
    """One process waits for its samples where several have to."""
    make_sampler = AsyncSampler.__init__

    def waits(self, *args, **kwargs):
        make_sampler(self, *args, **kwargs)
        self._waits = self._scores_in_turn = True

    AsyncSampler.__init__ = waits
    try:
        yield
    finally:
        AsyncSampler.__init__ = make_sampler


async def two_turns(chat, word):
    first = await chat(word)
    second = await chat(f"{word} again")
    return float(len(first.text) % 2 + len(second.text) % 2)


def episodes(servers):
    """Conversations, each of one process; an adapter is sent alone."""
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models/qwen3",
        sequence_length=256,
        lora=kpt.LoRA(rank=4),
    )
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        episode=kpt.episodes.Episode(
            two_turns, limits=kpt.episodes.Limits(after_cut="continue")
        ),
        num_generations=2,
        max_completion_length=6,
        rollout=VLLMRollout(**servers),
    )
    rows = [{"word": word} for word in ("one", "two", "three", "four")]
    return fitted(task, rows, batch_size=2)


@contextlib.contextmanager
def failing(error, after=0):
    """A request of the last process fails, after so many that do not."""
    run_job, left = ServerEngine.run_job, [error, *after * [None]]

    def run(self, job, *args):
        is_last = processes.index() + 1 == processes.count()
        if "logprobs" in job.params and is_last and left:
            if (wrong := left.pop()) is not None:
                raise wrong
        return run_job(self, job, *args)

    ServerEngine.run_job = run
    try:
        yield
    finally:
        ServerEngine.run_job = run_job


def failures(servers):
    """A request of one process fails: all send weights again, or all raise."""
    task = make("qwen3", True, kpt.SFTTask, sequence_length=256)
    engine = VLLMRollout(**servers)
    engine.set_model(task)
    requests = [
        Request(row["prompt_ids"], 2, max_tokens=6, seed=1)
        for row in prompts(5)
    ]
    try:
        with failing(EngineFailure("it was unplugged")):
            found = engine.generate(requests)
        assert engine.restarts == 1
        for error in (ValueError("no such model"), KeyError("choices")):
            with failing(error):
                try:
                    engine.generate(requests)
                except (ValueError, RuntimeError, KeyError) as raised:
                    assert error.args[0] in str(raised), raised
                else:
                    raise AssertionError("nothing was raised")
        scores = engine.score([r.token_ids for r in requests], top_k=2)
    finally:
        engine.stop()
    return {
        "rows": json.dumps([[c.token_ids for c in s] for s in found]),
        "logps": np.concatenate([c.per_token_logps for s in found for c in s]),
        "scores": np.concatenate([s.per_token_logps for s in scores]),
        "top": np.concatenate([s.top_logps for s in scores]),
        "top ids": np.concatenate([s.top_ids for s in scores]),
    }


def killed(servers):
    """The server that two processes have started is killed as it samples.

    One process trains in the same way, with a server that is not killed.
    """
    task = make("qwen3", True, sequence_length=256)
    alone = processes.count() == 1
    own = servers if alone else {"python": sys.executable, "timeout": 60}
    compile_grpo(task, VLLMRollout(**own), 0.3)
    run_job, left, pids = ServerEngine.run_job, [*3 * [False], True], set()

    def run(self, job, *args):
        if "logprobs" in job.params and self.process:
            pids.add(self.process.pid)
            if left and left.pop(0):
                os.killpg(self.process.pid, signal.SIGKILL)
        return run_job(self, job, *args)

    ServerEngine.run_job = run
    try:
        found = fitted(task, prompts(6), batch_size=3)
    finally:
        ServerEngine.run_job = run_job
    # Another one took its place, for all. The first process starts both.
    assert found.pop("vllm/restarts")[-1] == (0 if alone else 1)
    assert len(pids) == (2 if processes.is_first() and not alone else 0)
    # All weights are sent again.
    del found["vllm/sync_bytes"]
    return found


CASES = {
    f.__name__: f
    for f in (grpo, episodes, failures, ahead, ahead_and_failing, killed)
}


def outcomes(cases, servers):
    """Runs cases; yields a dict of what came of each."""
    if processes.count() > 1:
        keras.distribution.set_distribution(kpt.distribution.fsdp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for case in cases:
        yield CASES[case](servers)


def main(directory, cases):
    servers = json.loads((directory / "server.json").read_text())
    for case, found in zip(cases, outcomes(cases, servers), strict=True):
        if processes.is_first():
            np.savez(directory / f"{case}.npz", **found)
    print("done", flush=True)


if __name__ == "__main__":
    write_programs()
    main(pathlib.Path(sys.argv[1]), sys.argv[4:])
