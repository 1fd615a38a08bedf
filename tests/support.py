"""Helpers of several test files: the reference folder and small rows."""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_posttrain.training.run_state import RunState

REFERENCE = pathlib.Path(__file__).parent / "reference"

# One directory of each family whose sequences can be packed.
FAMILIES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama3",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


def in_ci(*kept, of):
    """Parameters of which CI runs some; `make test-full` runs all of them."""
    assert set(kept) < set(of), set(kept) - set(of)
    return [
        x if x in kept else pytest.param(x, marks=pytest.mark.full) for x in of
    ]


def cases_in_ci(*kept, of):
    """As `in_ci`, of cases that are tuples of several parameters."""
    assert set(kept) < set(of), set(kept) - set(of)
    return [
        pytest.param(*x, marks=() if x in kept else pytest.mark.full)
        for x in of
    ]


# Those whose attention differs, the others in `make test-full`.
FAMILY_CASES = [
    pytest.param(
        model,
        id=name,
        marks=() if name in ("gemma3", "llama", "qwen3") else pytest.mark.full,
    )
    for name, model in FAMILIES.items()
]


def load_json(name):
    return json.loads((REFERENCE / name).read_text(encoding="utf-8"))


@functools.cache
def one_layer(path):
    """Returns a copy of a model's directory that has its first layer alone.

    Tracing and lowering its programs takes little more than half as long.
    For tests of what surrounds a model; what a layer gets from the one before
    is for tests of models.
    """
    path = pathlib.Path(path)
    folder = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = shutil.copytree(path, folder / path.name)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = 1
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(path / "model.safetensors")
    first = {
        name: value
        for name, value in tensors.items()
        if ".layers." not in name or ".layers.0." in name
    }
    save_file(first, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def random_rows(count, low=6, high=30, seed=0, vocabulary=500):
    """Tokenised rows of unequal length, the first third a prompt."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        n = int(rng.integers(low, high + 1))
        ids = rng.integers(3, vocabulary, n).tolist()
        rows.append(
            {
                "token_ids": ids,
                "completion_mask": [0] * (n // 3) + [1] * (n - n // 3),
            }
        )
    return rows


def rows_of_samples(prompts, samples):
    """The rows of prompts' token ids and their samples, for `log_probs`."""
    return [
        {
            "token_ids": [*ids, *sample.token_ids],
            "completion_mask": [0] * len(ids) + [1] * len(sample.token_ids),
        }
        for ids, sample in zip(prompts, samples, strict=True)
    ]


def weights(task):
    """The trainable arrays of a task, by path."""
    return {v.path: np.array(v.value) for v in task.trainable_variables}


def spread_adapter(task):
    """Gives an adapter's B values: at 0, half of the gradients are 0."""
    rng = np.random.default_rng(0)
    for b in task.adapter.b:
        b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))


def starts_again(make):
    """Returns a function that gives the task of `make()` in its first state.

    It is one task, compiled once: weights, optimizer and progress are put
    back. For tests of what surrounds a run; what a task keeps from one run
    to the next is for tests with tasks of their own.
    """

    @functools.cache
    def made():
        task = make()
        return task, [np.array(v.value) for v in of(task)]

    def of(task):
        return [*task.variables, *task.optimizer.variables]

    def first():
        task, values = made()
        for variable, value in zip(of(task), values, strict=True):
            variable.assign(value)
        task.run_state = RunState()
        return task

    return first


@contextlib.contextmanager
def lowered():
    """Yields a list with an item for each program that is made meanwhile."""
    found = []

    def listen(event, seconds, **_):
        if "jaxpr_to_mlir" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def check_most(check, seeds):
    """Asserts that a check holds for most of an odd number of seeds.

    The course of a run that learns hangs on the rounding of its CPU. Ends as
    soon as most have passed or failed.
    """
    failures, enough = [], len(seeds) // 2 + 1
    for count, seed in enumerate(seeds):
        if count - len(failures) == enough:
            break
        try:
            check(seed)
        except AssertionError as error:
            failures.append(error)
            if len(failures) == enough:
                raise


def read_log(directory):
    lines = (pathlib.Path(directory) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in lines.splitlines()]


def simulated(count):
    """The environment of a process with so many CPU devices."""
    flag = f"--xla_force_host_platform_device_count={count}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def run_on_eight_devices(module, *arguments):
    """Runs a script of `tests` in a process with eight CPU devices.

    It must print "equal" at its end.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=REFERENCE.parent.parent,
        env=simulated(8),
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
    return done.stdout
