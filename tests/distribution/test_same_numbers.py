"""One device and meshes of eight: the same losses, weights and tokens."""

import os
import subprocess
import sys

import pytest

from tests.support import REFERENCE

ROOT = REFERENCE.parent.parent
# The tiny models have 4 heads and 2 for keys and values: over 4 and 8 devices
# other axes take their place.
MESHES = "8x1,4x2,2x4,1x8"


def run(*cases):
    done = subprocess.run(
        [sys.executable, "-m", "tests.distribution.same_numbers", *cases],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


def test_full_weights_on_two_axes():
    run("sft:llama3:full:4x2")


@pytest.mark.slow
def test_sft_on_two_meshes():
    run("sft:gemma2:full:2x4", "packed:qwen2:lora:4x2")


@pytest.mark.full
def test_sft_on_the_other_meshes():
    run(
        "sft:llama3:full:8x1,1x8,dp",
        "packed:qwen2:lora:tp2",
    )


@pytest.mark.slow
def test_preferences_and_rollouts():
    run("dpo:qwen3:lora:4x2", "grpo:llama3:full:2x4")


@pytest.mark.full
def test_rollouts_with_an_adapter():
    run("grpo:qwen2:lora:8x1")


@pytest.mark.slow
def test_distillation():
    run("distill:llama3:full:2x4")


@pytest.mark.slow
def test_masters_and_optax_and_mixtures():
    run("optimizers", "sft:mixtral:full:2x4")


@pytest.mark.slow
def test_what_is_sent():
    run("collectives")


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_on_every_mesh(family):
    run(f"sft:{family}:full:{MESHES}")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(
    "family", ["llama3", "gemma2", "gemma3_text", "qwen2", "qwen3"]
)
def test_every_task_on_every_mesh(family, mode):
    tasks = ["sft", "packed", "grpo"]
    if (REFERENCE / "models" / f"{family}_ref").is_dir():
        tasks += ["dpo", "distill"]
    run(*(f"{task}:{family}:{mode}:{MESHES}" for task in tasks))
