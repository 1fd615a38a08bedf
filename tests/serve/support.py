"""A served tiny model, and clients of it."""

import contextlib
import functools
import json
import os
import pathlib
import tempfile
import urllib.error
import urllib.request

import numpy as np
import tinker
from safetensors.numpy import load_file
from tinker import types

import keras_posttrain as kpt
from keras_posttrain.serve import TinkerServer

# Else clients spend seconds on it when they are closed.
os.environ["TINKER_TELEMETRY"] = "0"
RANK, LENGTH = 4, 32
ROWS = [
    {"prompt": f"{a}+{b}=", "completion": f"{(a + b) % 10}<"}
    for a in range(4)
    for b in range(3)
]
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-2, weight_decay=0.01)


@functools.cache
def preset():
    folder = pathlib.Path(tempfile.mkdtemp()) / "org" / "tiny"
    return str(kpt.examples.tiny_preset(folder, ROWS, num_layers=1))


@functools.cache
def served_task():
    return kpt.SFTTask.from_preset(
        preset(), lora=kpt.LoRA(rank=RANK, alpha=32), sequence_length=LENGTH
    )


def serve(directory, **settings):
    return TinkerServer(
        served_task(), directory, micro_batch_size=4, **settings
    )


@contextlib.contextmanager
def client_of(server):
    client = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    try:
        yield client
    finally:
        client.close("success").result(60)


def new_model(client, seed=1, rank=RANK, **settings):
    return client.create_lora_training_client(
        preset(), rank, seed=seed, **settings
    ).result(120)


@functools.cache
def encoded():
    """Returns the rows as `(prompt ids, completion ids)`."""
    encode = served_task().tokenizer.encode
    return [(encode(r["prompt"]), encode(r["completion"])) for r in ROWS]


def supervised(rows=slice(None)):
    return [
        datum(p + c, weights=[0.0] * (len(p) - 1) + [1.0] * len(c))
        for p, c in encoded()[rows]
    ]


def datum(ids, **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(ids[:-1])),
        loss_fn_inputs={"target_tokens": list(ids[1:]), **inputs},
    )


def step(model, data, loss="cross_entropy", **config):
    done = model.forward_backward(data, loss, config or None)
    updated = model.optim_step(ADAM)
    return done.result(120), updated.result(120)


def logprobs(output):
    return [x["logprobs"].to_numpy() for x in output.loss_fn_outputs]


def saved_arrays(directory, path):
    """Returns the adapter of a `tinker://` path, arrays by PEFT's names."""
    folder = pathlib.Path(directory) / path.removeprefix("tinker://")
    return load_file(folder / "adapter_model.safetensors")


def weights_of(model, directory, name):
    path = model.save_weights_for_sampler(name).result(60).path
    return saved_arrays(directory, path)


def equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def post(server, path, body, key=None, content="application/json"):
    """Sends a request and returns `(status, parsed body)`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "X-API-Key": server.key if key is None else key,
        "Content-Type": content,
    }
    request = urllib.request.Request(
        f"{server.url}/api/v1/{path}", data, headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def ints(values):
    return np.asarray(values, np.int32).tobytes()
