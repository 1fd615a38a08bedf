"""Tests of vLLM's engine that do not need vLLM."""

import asyncio
import fcntl
import http.server
import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.distribution import processes
from keras_posttrain.rollout import Request, VLLMRollout
from keras_posttrain.rollout.vllm import (
    folder,
    job_threads,
    jobs,
    replicas,
    settings,
    weights,
    worker,
)
from keras_posttrain.rollout.vllm import http as vllm_http
from keras_posttrain.rollout.vllm.engine import _TokenStream
from keras_posttrain.rollout.vllm.local import THREAD_BINDING, UNBOUND
from keras_posttrain.rollout.vllm.server import ServerEngine, _flags
from tests.models.tiny_checkpoints import make_checkpoint
from tests.support import REFERENCE


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"url": "localhost:8000"}, "url='localhost:8000'"),
        ({"url": "unix:socket"}, "url='unix:socket'"),
        ({"url": "http://a", "python": "python3"}, "pass one of them"),
        ({"url": "http://a", "urls": ["http://b"]}, "pass one of them"),
        ({"urls": "http://a"}, "must be a list .* urls='http://a'"),
        ({"urls": []}, "must be a list"),
        ({"urls": iter(["http://a"])}, "must be a list"),
        ({"urls": ["http://a", "b:8000"]}, "Received: 'b:8000' in"),
        ({"urls": ["http://a", "http://a/"]}, "must be given once"),
        ({"adapter": "yes"}, "adapter='yes'"),
        ({"max_length": 1}, "max_length=1"),
        ({"cache_bytes": "all"}, "cache_bytes='all'"),
        ({"timeout": 0}, "timeout=0"),
        ({"directory": "/not/there"}, "directory='/not/there'"),
    ],
)
def test_settings_are_checked(settings, match):
    with pytest.raises(ValueError, match=match):
        VLLMRollout(**settings)


@pytest.mark.parametrize("model_type", settings.NOT_COMPARED)
def test_families_that_were_not_compared(model_type, tmp_path):
    """Refused by name before vLLM is looked for."""
    directory, _ = make_checkpoint(tmp_path / "hf", model_type)
    task = kpt.GRPOTask.from_preset(
        directory, tokenizer=REFERENCE / "models/qwen3", sequence_length=32
    )
    task.compile(
        rewards=[lambda completions: [0.0] * len(completions)],
        rollout=VLLMRollout(),
        max_completion_length=8,
        stop_token_ids=[2],
    )
    reason = settings.NOT_COMPARED[model_type]
    match = f"{reason}. Use .*NativeRollout.*model_type='{model_type}'"
    with pytest.raises(ValueError, match=match):
        task.fit([{"prompt_ids": [5, 7]}], batch_size=1, verbose=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": 1e-6},
        {"swiglu_alpha": 1.5},
        {"swiglu_limit": 9.0},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_vllms_gpt_oss_has_in_its_code(fields):
    [(name, value)] = fields.items()
    fixed = settings.FIXED_OF_GPT_OSS
    kinds = ["sliding_attention", "full_attention"]
    config = {"model_type": "gpt_oss", "num_hidden_layers": 2, **fixed}
    config["layer_types"] = kinds
    settings.check_config(config)
    with pytest.raises(ValueError) as error:
        settings.check_config(config | fields)
    expected = {name: config[name]}
    assert f"computes with {expected}, whatever" in str(error.value)
    assert str(error.value).endswith(f"a model with { {name: value} }")
    # Of other families vLLM reads them.
    settings.check_config(config | fields | {"model_type": "mixtral"})


def test_an_adapter_where_keys_are_values(tmp_path):
    """vLLM would add that of keys to keys alone: it is merged."""
    directory, _ = make_checkpoint(
        tmp_path / "hf", "gemma4_text", attention_k_eq_v=True
    )
    task = kpt.SFTTask.from_preset(
        directory, lora=kpt.LoRA(rank=2), sequence_length=32
    )
    engine = VLLMRollout("http://127.0.0.1:1")
    engine.set_model(task)
    assert not engine._sends_adapter
    engine = VLLMRollout("http://127.0.0.1:1", adapter=True)
    engine.set_model(task)
    with pytest.raises(ValueError, match="take keys as values.*adapter=True"):
        engine.start()


def test_requests_to_vllms_parameters():
    request = Request(
        [4, 5], 3, max_tokens=7, top_k=9, stop_token_ids=[2], seed=1
    )
    params = jobs.sampling_job(request).params
    wanted = {
        "n": 3, "max_tokens": 7, "temperature": 1.0, "top_k": 9,
        "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [2],
        "ignore_eos": True, "logprobs": 0, "detokenize": False,
    }  # fmt: skip
    seed = params.pop("seed")
    assert params == wanted and 0 <= seed < 2**62
    # Of the seed and the prompt.
    seeds = {
        jobs.sample_seed(Request(ids, seed=s))
        for ids in ([4, 5], [5, 4], [4])
        for s in (1, 2)
    }
    assert len(seeds) == 6 and seed in seeds
    greedy = jobs.sampling_job(Request([4], 3, temperature=0, seed=1))
    assert greedy.params["n"] == 1


def test_a_probe_that_differs_gives_both_numbers():
    expected = np.array([0.0, -1.0, -2.5])
    assert weights.compare(expected + 1e-4, expected, "float32") < 2e-4
    for wrong in (-2.75, np.nan):
        with pytest.raises(RuntimeError) as error:
            weights.compare([0.0, -1.0, wrong], expected, "float32")
        for part in ("token 2", f"{wrong:.6f}"[:4], "-2.500000"):
            assert part in str(error.value)


def test_tokens_that_are_sampled_again_are_streamed_once():
    streamed = {}

    def on_tokens(i, g, ids):
        streamed.setdefault((i, g), []).extend(ids)

    stream = _TokenStream(
        [Request([1], 2), Request([1], 2, temperature=0)], on_tokens
    )
    stream(0, 1, [5, 6])
    stream(1, 0, [9])
    stream.restart()
    stream(0, 1, [5])
    stream(0, 1, [6, 7])
    stream(1, 0, [9, 8])
    assert streamed == {(0, 1): [5, 6, 7], (1, 0): [9, 8], (1, 1): [9, 8]}


def test_flags_of_the_command_line():
    arguments = {"max_model_len": 5, "enable_lora": True, "a_b": False,
                 "c": None, "d": {"e": 1}}  # fmt: skip
    flags = ["--max-model-len", "5", "--enable-lora", "--no-a-b"]
    assert list(_flags(arguments)) == [*flags, "--d", '{"e": 1}']


def test_folders_go_with_their_owner(tmp_path):
    """Files of a killed process are removed; files in use are not."""
    script = (
        "import runpy, sys, os\n"
        f"module = runpy.run_path({folder.__file__!r})\n"
        f"folder = module['Folder']({str(tmp_path)!r})\n"
        "print(folder.path, flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        path = process.stdout.readline().strip()
        own = folder.Folder(tmp_path)
        assert os.path.isdir(path)
        process.stdin.write("\n")
    assert os.path.isdir(path)
    other = folder.Folder(tmp_path)
    assert not os.path.isdir(path) and own.path.is_dir()
    own.remove()
    del other
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_for_abandoned(tmp_path, monkeypatch):
    """By another process, between its creation and its lock: a new one."""
    lock, lost = fcntl.flock, []

    def late(file, kind):
        if not lost:
            [path] = tmp_path.glob(f"{folder.PREFIX}*")
            lost.append(path)
            monkeypatch.setattr(fcntl, "flock", lock)
            folder._remove_if_abandoned(path)
        return lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    own = folder.Folder(tmp_path)
    assert not lost[0].exists() and own.path.is_dir()
    # Its lock is that of a folder in use.
    folder._remove_if_abandoned(own.path)
    assert (own.path / folder.LOCK).exists()
    own.remove()


def test_the_server_listens_where_no_other_user_can(tmp_path):
    """A socket in a private folder, and another key at each start."""
    python, started = tmp_path / "python", tmp_path / "started"
    python.write_text(f'#!/bin/sh\necho "$VLLM_API_KEY $@" >> {started}\n')
    python.chmod(0o700)
    keys = []
    for place in (tmp_path, tmp_path / ("long" * 30)):
        place.mkdir(exist_ok=True)
        own = folder.Folder(place)
        engine = ServerEngine({}, 5, own.path, python, None, None)
        for _ in range(2):
            engine._launch()
            engine.process.wait()
            path = engine.url.removeprefix("unix:")
            assert len(path) < 104
            assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
            engine.stop()
            keys.append(engine.api_key)
        own.remove()
    lines = started.read_text().splitlines()
    assert [line.split()[0] for line in lines] == keys
    assert len(set(keys)) == 4
    for line, key in zip(lines, keys):
        assert line.count(key) == 1
        assert "--uds /" in line and "--port" not in line


def started_with(tmp_path, arguments):
    """The executor that a started server is given, or `None`."""
    python, options = tmp_path / "python", tmp_path / "options"
    python.write_text(f'#!/bin/sh\necho "$@" > {options}\n')
    python.chmod(0o700)
    own = folder.Folder(tmp_path)
    engine = ServerEngine(arguments, 5, own.path, python, None, None)
    try:
        engine._launch()
        engine.process.wait()
    finally:
        engine.stop()
        own.remove()
    found = re.findall(
        r"--distributed-executor-backend (\S+)", options.read_text()
    )
    assert len(found) < 2
    return found[0] if found else None


def test_a_server_on_a_cpu_needs_no_process_for_its_model(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(THREAD_BINDING, raising=False)
    two_engines = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    for arguments in ({}, two_engines):
        found = started_with(tmp_path, arguments)
        assert found.endswith(".UniProcExecutor"), arguments
    # Set by an engine that this process has had.
    monkeypatch.setenv(THREAD_BINDING, UNBOUND)
    assert started_with(tmp_path, {}) == found
    # Others have several workers, or are chosen by the user.
    assert started_with(tmp_path, {"tensor_parallel_size": 2}) is None
    chosen = {"distributed_executor_backend": "mp"}
    assert started_with(tmp_path, chosen) == "mp"
    monkeypatch.setenv(THREAD_BINDING, "0-1")
    assert started_with(tmp_path, {}) is None
    monkeypatch.delenv(THREAD_BINDING)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert started_with(tmp_path, {}) is None


class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Authorization"]
        answer = f'{{"path": "{self.path}", "key": "{key}"}}'.encode()
        self.send_response(200 if body == b'{"a": 1}' else 500)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass

    def address_string(self):
        return "local"


def test_requests_over_a_socket_of_the_file_system(tmp_path):
    path = tmp_path / "socket"
    call = vllm_http.call
    arguments = "key", "POST", "/a/b", {"a": 1}, 5, set()
    with pytest.raises(jobs.EngineFailure, match="POST /a/b"):
        call(f"unix:{path}", *arguments)
    with socketserver.ThreadingUnixStreamServer(str(path), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            answer = call(f"unix:{path}", *arguments)
        finally:
            server.shutdown()
            thread.join()
    assert answer == {"path": "/a/b", "key": "Bearer key"}


@pytest.mark.parametrize(
    "kind, path, key, sent",
    [
        ("http", "/health", None, "app"),
        ("lifespan", None, None, "app"),
        ("http", "/collective_rpc", "right", "app"),
        ("http", "/collective_rpc", "wrong", 401),
        ("http", "/collective_rpc", None, 401),
        ("websocket", "/v1/realtime", "right", "app"),
        ("websocket", "/v1/realtime", "wrong", "websocket.close"),
        ("websocket", "/v1/realtime", None, "websocket.close"),
        ("websocket", "/health", None, "websocket.close"),
    ],
)
def test_every_kind_of_request_needs_the_key(
    kind, path, key, sent, monkeypatch
):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    seen = []

    async def app(scope, receive, send):
        seen.append("app")

    async def send(message):
        seen.append(message.get("status", message["type"]))

    scope = {"type": kind, "path": path, "headers": []}
    if key is not None:
        value = f"Bearer {key}".encode()
        scope["headers"] = [(b"authorization", value)]
    if kind == "lifespan":
        scope = {"type": kind}
    asyncio.run(worker.RequireKey(app)(scope, None, send))
    assert seen[0] == sent and "app" not in seen[1:]


def test_weights_are_those_of_an_export(tmp_path):
    """Names, shapes and values, the adapter added or left out."""
    from safetensors.numpy import load_file

    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen3", lora=kpt.LoRA(rank=2)
    )
    for b in task.adapter.b:
        b.assign(np.random.default_rng(1).normal(0, 0.1, b.shape))
    task.export(tmp_path / "export")
    merged = weights.Weights(
        task.causal_lm, task.adapter, "float32", merged=True
    )
    merged.write(tmp_path / "merged")
    base = load_file(REFERENCE / "models/qwen3/model.safetensors")
    files = [
        load_file(tmp_path / name / "model.safetensors")
        for name in ("export", "merged")
    ]
    assert files[0].keys() == files[1].keys() == merged.table.keys()
    plain = weights.Weights(
        task.causal_lm, task.adapter, "float32", merged=False
    )
    task.merge_adapter()
    for name, array in plain.arrays():
        np.testing.assert_array_equal(files[0][name], files[1][name])
        np.testing.assert_array_equal(array, base[name])
    assert any((files[0][name] != base[name]).any() for name in base)


def test_without_vllm_it_says_what_to_install():
    task = kpt.SFTTask.from_preset(REFERENCE / "models/qwen3")
    engine = VLLMRollout()
    engine.set_model(task)
    if vllm_is_there():
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match="needs vLLM"):
        engine.start()
    assert engine._folder is None
    with pytest.raises(ValueError, match="adapter of rank 512 at most"):
        engine = VLLMRollout(adapter=True)
        engine.set_model(task)
        engine.start()


def vllm_is_there():
    from keras_posttrain.rollout.vllm.local import is_installed

    return is_installed()


def replicas_of(count):
    servers = [
        ServerEngine({}, 1, "/", None, f"http://{i}", "key")
        for i in range(count)
    ]
    return replicas.ReplicatedEngine(servers, "/")


def chosen(engine, ids, samples=8):
    digests = replicas.prefix_digests(ids)
    return engine._begin(digests, samples).server.url


def test_requests_go_where_their_beginning_was_computed():
    rng, engine = np.random.default_rng(0), replicas_of(3)
    system, *chats = rng.integers(0, 500, (4, 2 * replicas.BLOCK))
    chats = [np.concatenate([system, chat]) for chat in chats]
    # What all share does not keep them together.
    places = [chosen(engine, chat) for chat in chats]
    assert sorted(places) == ["http://0", "http://1", "http://2"]
    more = rng.integers(0, 500, (3, 70))
    for order in ([2, 0, 1], [1, 1, 0]):
        for i in order:
            chats[i] = np.concatenate([chats[i], more[i]])
            assert chosen(engine, chats[i], 1) == places[i]
    # Less than a block says nothing.
    assert chosen(engine, chats[0][:10]) != places[0]


def test_a_busy_server_gets_no_more_for_its_cache():
    engine = replicas_of(2)
    ids = np.arange(replicas.BLOCK)
    places = [chosen(engine, ids, 8) for _ in range(8)]
    assert sorted(places) == 4 * ["http://0"] + 4 * ["http://1"]
    # A server that is lost gets none; without any, its error is raised.
    first, second = engine.replicas
    engine._lose(first, jobs.EngineFailure("the first has ended"))
    assert {chosen(engine, ids) for _ in range(4)} == {"http://1"}
    engine._lose(second, jobs.EngineFailure("so has the second"))
    with pytest.raises(jobs.EngineFailure, match="left.*has ended"):
        chosen(engine, ids)
    with pytest.raises(jobs.EngineFailure, match="the first has ended"):
        engine.run_on_each(jobs.scoring_job(ids, None, 1.0))


def test_processes_share_what_they_know_of_servers(monkeypatch):
    """Keys, models, versions, and which servers one of them has lost."""
    first = replicas_of(4)
    first._sent("a version")
    first._lose(first.replicas[1], jobs.EngineFailure("it has ended"))
    first.replicas[3].server.model = "policy-adapter"
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    other = replicas_of(4)
    other._lose(other.replicas[0], jobs.EngineFailure("no longer so"))
    other.adopt(json.loads(json.dumps(first.state())))
    assert other._version == "a version"
    assert [r.server.model for r in other.replicas[2:]] == [
        "policy", "policy-adapter"
    ]  # fmt: skip
    assert [r.lost is None for r in other.replicas] == [True, False] + 2 * [
        True
    ]
    # Each begins with other servers.
    prompts = np.arange(40).reshape(4, 10)
    places = [chosen(other, ids) for ids in prompts[:3]]
    assert places == ["http://2", "http://3", "http://0"]
    assert chosen(first, prompts[3]) == "http://0"
    # What another one has lost gets all weights with the next sync.
    other._lose(other.replicas[2], jobs.EngineFailure("it samples others"))
    first.replicas[2].server.held = "a version"
    first.lose(json.loads(json.dumps(other.losses())))
    assert first.used == [first.replicas[0], first.replicas[3]]
    assert first.replicas[2].server.held is None


@pytest.mark.parametrize(
    "url",
    [
        "unix:/dev/shm/a",
        "http://localhost:1",
        "http://127.0.0.1",
        "http://[::1]:8",
    ],
)
def test_a_server_of_another_machine_has_another_address(url):
    settings.check_address(url, socket.gethostname())
    settings.check_address("http://gpu-1:8000", "another")
    with pytest.raises(ValueError, match="serves processes of its own mach"):
        settings.check_address(url, "another")


def test_interrupted_jobs_end_without_their_tokens():
    """Where a server would end the requests of other processes too."""
    began, ended = threading.Semaphore(0), threading.Event()

    def run_job(job, connections):
        began.release()
        # As a request whose connection is closed.
        while not connections.closed:
            ended.wait(0.01)
        raise jobs.EngineFailure("closed")

    work = {i: jobs.scoring_job([1, 2], None, 1.0) for i in range(3)}

    def interrupted():
        return began.acquire(timeout=60)

    found = list(
        job_threads.run(work, run_job, None, 2, None, interrupted, None)
    )
    assert [key for key, _ in found] == [0, 1, 2]
    assert all(result.token_ids == [[]] for _, result in found)
