"""A checkpoint of one mesh goes on, on another."""

import pytest

from tests.support import run_on_eight_devices


def run(folder, *cases):
    name = "tests.distribution.restoring"
    run_on_eight_devices(name, str(folder), *cases)


@pytest.mark.slow
def test_a_run_moves_from_mesh_to_mesh(tmp_path):
    run(tmp_path, "sgd:llama3:full:to_one")


@pytest.mark.full
def test_adapters_moments_and_masters_move_too(tmp_path):
    run(tmp_path, "adamw:qwen2:lora:to_one", "adamw:gemma2:masters:to_one")
    run(tmp_path, "adamw:qwen2:lora:back", "adamw:qwen3:full:back")
