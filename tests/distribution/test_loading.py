"""Weights go straight into their shards, and from there into files."""

import pytest

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


@pytest.mark.slow
def test_host_memory(tmp_path):
    run(f"memory:{tmp_path}")
