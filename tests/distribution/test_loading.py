"""Weights go straight into their shards, and from there into files."""

import os
import socket
import subprocess
import sys

import pytest

from keras_posttrain.models.hf.export import export
from keras_posttrain.models.hf.loading import load_causal_lm
from tests.support import REFERENCE, run_on_eight_devices

DIRECTORIES = sorted(p.name for p in (REFERENCE / "models").iterdir())


def run(*cases):
    run_on_eight_devices("tests.distribution.sharded_files", *cases)


@pytest.mark.slow
def test_every_family_loads_on_meshes_as_on_one_device():
    run(*(f"load:{name}" for name in DIRECTORIES))


@pytest.mark.slow
def test_files_from_a_mesh_are_those_of_one_device():
    run("export:gemma2", "export:qwen2", "preset:llama3")


@pytest.mark.full
def test_files_of_every_family():
    run(*(f"export:{name}" for name in DIRECTORIES))
    run(*(f"preset:{name}" for name in DIRECTORIES))


@pytest.mark.full
def test_host_memory(tmp_path):
    run(f"memory:{tmp_path}")


@pytest.mark.full
def test_two_processes_write_what_one_does(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    script = "tests.distribution.processes_files"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", script, address, str(i), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REFERENCE.parent.parent,
            env=environment,
        )
        for i in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for (output, errors), error in zip(ended, ("ValueError", "OSError")):
        assert output.endswith(f"{error}\nequal\n"), errors[-3000:]
    model = load_causal_lm(REFERENCE / "models/gemma2")
    export(model, tmp_path / "one", max_shard_bytes=100_000)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "plain").iterdir())
    for name in files:
        one, two = (
            (tmp_path / x / name).read_bytes() for x in ("one", "plain")
        )
        assert one == two, name
