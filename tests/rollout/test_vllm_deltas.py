"""Differences of weights, which a server applies (no vLLM is needed).

The server is a stand-in for vLLM's: it calls the methods of our workers, and
keeps the weights that they load.
"""

import functools
import http.server
import json
import socketserver
import threading
import types

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain import _console
from keras_posttrain.rollout import VLLMRollout
from keras_posttrain.rollout.vllm import difference, worker
from keras_posttrain.rollout.vllm.jobs import EngineFailure
from keras_posttrain.rollout.vllm.pushes import DeltaPush, FullPush
from keras_posttrain.rollout.vllm.replicas import ReplicatedEngine
from keras_posttrain.rollout.vllm.server import ServerEngine
from keras_posttrain.rollout.vllm.weights import Weights
from tests.support import REFERENCE

SHAPES = {
    "matrix": (300, 70),
    "cube": (3, 5, 7),
    "one": (1,),
    "number": (),
    "nothing": (0, 4),
    # Its last value is further from the one before than 16 bits can say.
    "long": (2**16 + 9,),
}


def pattern(shape, dtype, seed):
    """Any bits of a dtype, NaNs among them."""
    rng, size = np.random.default_rng(seed), jnp.dtype(dtype).itemsize
    bits = rng.integers(0, 2 ** (8 * size), shape, dtype=f"uint{8 * size}")
    return np.asarray(bits).view(dtype)


def changed(array, share, seed):
    """Other bits in a share of the values, and in the last one if any."""
    new, rng = array.copy(), np.random.default_rng(seed)
    bits = new.reshape(-1).view(f"uint{8 * new.itemsize}")
    places = rng.random(bits.shape) < share
    places[-1:] = share > 0
    flips = rng.integers(1, 2 ** (8 * new.itemsize), bits.shape, bits.dtype)
    bits[places] ^= flips[places]
    return new


def apply(folder, arrays):
    """Applies a difference to copies; returns what is wrong, and these."""
    index = json.loads((folder / difference.INDEX).read_text())
    # A copy is in C order, and can be written to.
    copies = {k: np.array(v, order="C") for k, v in arrays.items()}
    flat = {k: v.reshape(-1).view("uint8") for k, v in copies.items()}
    return worker.apply_difference(folder, index, flat), copies


def as_bytes(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("share", [0, 1e-4, 0.1, 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_all_bits_are_those_of_the_new_weights(dtype, share, tmp_path):
    """Any shape, any bits, any share of changed values."""
    dtype = jnp.dtype(dtype)
    old = {k: pattern(s, dtype, 0) for k, s in SHAPES.items()}
    new = {k: changed(v, share, 1) for k, v in old.items()}
    # Not in C order, as some arrays of a model are.
    old["matrix"], new["matrix"] = old["matrix"].T, new["matrix"].T
    pairs = [(name, old[name], new[name]) for name in old]
    size = difference.write(tmp_path / "a", "1", "2", pairs)
    wrong, found = apply(tmp_path / "a", old)
    assert wrong == [] and as_bytes(found) == as_bytes(new)
    stored = sum(array.nbytes for array in new.values())
    assert size == (tmp_path / "a" / difference.DATA).stat().st_size
    # Whole tensors where most has changed: never much more than all.
    bound = {0: 0, 1e-4: 0.004, 0.1: 0.4, 1: 1}[share]
    assert size <= bound * stored


@pytest.mark.parametrize("share", [0.1, 1])
def test_a_result_that_differs_is_found(share, tmp_path):
    """Another base, a damaged file, another list of tensors."""
    names, dtype = ("matrix", "cube"), jnp.dtype("bfloat16")
    old = {k: pattern(SHAPES[k], dtype, 0) for k in names}
    new = {k: changed(v, share, 1) for k, v in old.items()}
    folder = tmp_path / "a"
    difference.write(folder, "1", "2", [(k, old[k], new[k]) for k in names])
    data = folder / difference.DATA
    stored = data.read_bytes()
    # All values of a whole tensor are replaced: its base does not matter.
    other = old | {"cube": changed(old["cube"], 0.001, 2)}
    assert apply(folder, other)[0] == (["cube"] if share < 1 else [])
    for place in (0, len(stored) - 1):
        damaged = bytearray(stored)
        damaged[place] ^= 16
        data.write_bytes(damaged)
        assert apply(folder, old)[0] == ["cube" if place else "matrix"]
    data.write_bytes(stored[:-1])
    assert apply(folder, old)[0] == ["cube"]
    data.write_bytes(stored)
    assert apply(folder, old)[0] == []
    assert apply(folder, {"cube": old["cube"]})[0] == ["matrix"]
    assert apply(folder, old | {"more": old["cube"]})[0] == ["more"]


class Worker(worker.RolloutWorkerExtension):
    """A worker of vLLM that keeps what it loads, as bytes."""

    def __init__(self):
        # Nothing is packed again on it.
        self.device = types.SimpleNamespace(type="cuda")
        self.parallel_config = types.SimpleNamespace(data_parallel_size=1)
        self.loaded, self.calls = {}, []

    def kpt_prepare(self):
        return {"device": "cuda"}

    def kpt_tensors(self):
        return {}

    def reload_weights(self, weights_iterator):
        import torch

        self.loaded = {
            name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in weights_iterator
        }


class Handler(http.server.BaseHTTPRequestHandler):
    """The paths of vLLM's server that a push of weights uses."""

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        size = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(size) or "{}")
        answer, here, status = {}, self.server.worker, 200
        if self.path == "/collective_rpc":
            here.calls.append(body["method"])
            try:
                result = getattr(here, body["method"])(*body["args"])
                answer = {"results": [result]}
            except RuntimeError:
                status = 500
        self.answer(answer, status)

    def answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass

    def address_string(self):
        return "local"


@pytest.fixture
def servers(tmp_path):
    """Two stand-ins; `server.worker` has what was loaded."""
    found, threads = [], []
    for name in ("a", "b"):
        path = str(tmp_path / name)
        server = socketserver.ThreadingUnixStreamServer(path, Handler)
        server.worker, server.url = Worker(), f"unix:{path}"
        found.append(server)
        # Seconds until it notices the end.
        run = functools.partial(server.serve_forever, 0.01)
        threads.append(threading.Thread(target=run))
        threads[-1].start()
    yield found
    for server, thread in zip(found, threads):
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(_console, "say", found.append)
    return found


@functools.cache
def model():
    """The weights of a small model, and a function that trains it."""
    path = REFERENCE / "models/qwen3"
    causal_lm = kpt.SFTTask.from_preset(path).causal_lm
    optimizer, rng = keras.optimizers.AdamW(1e-6), np.random.default_rng(0)
    variables = causal_lm.trainable_variables

    def train():
        gradients = [
            rng.normal(0, 1, v.shape).astype("float32") for v in variables
        ]
        optimizer.apply(gradients, variables)

    return Weights(causal_lm, None, "bfloat16", merged=False), train


def connected(server, sender, folder):
    engine = ServerEngine({}, 30, folder, None, server.url, "key", sender)
    engine.start()
    return engine


def expected(weights):
    return as_bytes(dict(weights.arrays()))


def loads(server):
    """The pushes that a server got, which are removed from its list."""
    found = [c for c in server.worker.calls if c.startswith("kpt_load")]
    server.worker.calls.clear()
    return found


def test_what_changed_is_sent_and_gives_the_bits_of_a_full_push(
    servers, said, tmp_path
):
    weights, train = model()
    folder = tmp_path / "files"
    folder.mkdir()
    delta = connected(servers[0], DeltaPush(folder), folder)
    full = connected(servers[1], FullPush(folder), folder)
    moved = []
    for i in range(3):
        train()
        moved.append(delta.push(weights, f"version-{i}"))
        assert full.push(weights, f"version-{i}") == weights.num_bytes
        assert servers[0].worker.loaded == servers[1].worker.loaded
        assert servers[0].worker.loaded == expected(weights)
        assert list(folder.iterdir()) == []
    assert loads(servers[0]) == ["kpt_load"] + 2 * ["kpt_load_difference"]
    assert loads(servers[1]) == 3 * ["kpt_load"]
    assert moved[0] == weights.num_bytes
    assert 0 < max(moved[1:]) < weights.num_bytes / 10
    # Weights that did not change.
    assert delta.push(weights, "again") == 0
    assert servers[0].worker.loaded == expected(weights)
    assert said == []


def test_what_does_not_fit_gets_all_weights(servers, said, tmp_path):
    """Restarts, other versions and other bits; each server reports once."""
    weights, train = model()
    server, folder = servers[0], tmp_path
    engine = connected(server, DeltaPush(folder), folder)
    versions = iter("abcdefghijk")

    def push(*wanted):
        train()
        engine.push(weights, next(versions))
        assert server.worker.loaded == expected(weights)
        assert loads(server) == [f"kpt_load{x}" for x in wanted]

    push("")
    push("_difference")
    # Another process answers at the address, which nobody has noticed.
    server.worker = Worker()
    push("_difference", "")
    [line] = said
    assert server.url in line and "kept no weights" in line
    push("_difference")
    # Another trainer was there.
    connected(server, DeltaPush(folder), folder).push(weights, "foreign")
    loads(server)
    push("_difference", "")
    # Other bits.
    version, tensors = server.worker._kpt_kept
    tensors["model.norm.weight"][0] += 1
    push("_difference", "")
    # A process that was restarted by the trainer, or has no full copy.
    engine.restart()
    push("")
    push("_difference")
    assert len(said) == 1


def test_a_refused_difference_loads_nothing(servers, tmp_path):
    weights, train = model()
    here, sender = servers[0].worker, DeltaPush(tmp_path)
    engine = connected(servers[0], sender, tmp_path)
    engine.push(weights, "one")
    loaded = here.loaded
    train()
    sender._update(weights, "two", tmp_path / "difference")
    here._kpt_kept = "other", here._kpt_kept[1]
    reason = engine.load_difference(
        tmp_path / "difference", len(weights.table), "two"
    )
    assert reason == "it has kept version 'other'"
    assert here.loaded is loaded
    assert here._kpt_kept is None and engine.held is None


def test_a_refusal_of_several_engines_is_a_failure(servers, tmp_path):
    """vLLM returns the answer of its first engine, but errors of all."""
    weights, train = model()
    here = servers[0].worker
    engine = connected(servers[0], DeltaPush(tmp_path), tmp_path)
    engine.push(weights, "one")
    here.parallel_config.data_parallel_size = 2
    here._kpt_kept = None
    train()
    with pytest.raises(EngineFailure, match="/collective_rpc"):
        engine.push(weights, "two")
    # As the run does: the same weights, of another name.
    assert engine.push(weights, "again") == weights.num_bytes
    assert here.loaded == expected(weights)
    names = "kpt_load", "kpt_load_difference", "kpt_load"
    assert loads(servers[0]) == list(names)


def test_one_of_two_servers_comes_back(servers, said, tmp_path):
    """It gets all weights, the other one what has changed."""
    weights, train = model()
    sender = DeltaPush(tmp_path)
    engines = [connected(s, sender, tmp_path) for s in servers]
    both = ReplicatedEngine(engines, sender)
    both.tensors()
    pushed = []
    for version in "abcd":
        train()
        if version == "c":
            both._lose(both.replicas[1], EngineFailure("it has ended"))
            servers[1].worker = Worker()
        both.push(weights, version)
        wanted = expected(weights)
        assert all(s.worker.loaded == wanted for s in servers)
        pushed.append([loads(server) for server in servers])
    full, delta = ["kpt_load"], ["kpt_load_difference"]
    assert pushed == [
        [full, full], [delta, delta], [delta, full], [delta, delta]
    ]  # fmt: skip
    assert len(said) == 2 and "answers again" in said[1]


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"push": "some", "url": "http://a"}, "'full' or 'delta'.*'some'"),
        ({"push": "delta"}, "is for servers: pass `url`, `urls` or `python`"),
    ],
)
def test_the_setting_is_checked(settings, match):
    with pytest.raises(ValueError, match=match):
        VLLMRollout(**settings)
