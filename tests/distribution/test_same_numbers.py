"""One device and meshes of eight: the same losses, weights and tokens."""

import pytest

from tests.distribution import runs
from tests.support import REFERENCE

pytestmark = pytest.mark.usefixtures("eight_devices")

# Each task is compared in `tasks/test_contract.py` too. Here are meshes,
# families and layouts that are not there. The tiny models have 4 heads and 2
# for keys and values: over 4 and 8 devices other axes take their place.
PAIRS = [
    "sft:llama3:full:4x2,2x4x1 stages,2x2x2",
    "sft:qwen3_moe-short:full:8x1,ep4",
    "packed:qwen2-short:lora:tp2",
    "packed:gemma2-short:lora:cp4",
]
# Each task under FSDP, tensor parallelism and both or data parallelism, each
# mesh, family and mode with several tasks.
MORE_PAIRS = [
    "sft:qwen3_moe:full:8x1,ep4",
    "packed:qwen2:lora:tp2",
    "packed:gemma2:lora:cp4",
    "sft:llama3:full:dp",
    "packed:qwen2:lora:2x4x1",
    "sft:mixtral:full:2x4",
    "sft:mixtral:experts:4x2",
    "sft:qwen3_moe:experts:8x1,1x8,ep4",
    "sft:mixtral:experts:ep2",
    "packed:gemma2:lora:1x8",
    "shared:qwen3:lora:4x2",
    "uneven:llama3:full:8x1",
    "dpo:qwen3:lora:4x2",
    "coupled:gemma2:full:2x4",
    "kto:llama3:lora:dp",
    "reward:qwen3:full:8x1",
    "distill:llama3:full:8x1,8x1 stages,2x4x1",
    "grpo:gemma3_text:full:2x4,2x4x1",
    "ppo:llama3:full:4x2,4x2x1",
    "sft:llama3:full:2x4x1,2x2x2",
    "sft:mixtral:full:2x4x1,2x2x2",
    "sft:qwen3_moe:experts:2x4x1",
    "uneven:llama3:full:2x4x1",
    "dpo:qwen3:lora:2x4x1",
    "coupled:gemma2:full:2x4x1",
    "shared:qwen3:lora:2x4x1",
    "sft:llama3:full:cp8,cp4",
    "packed:gemma2:lora:cp8",
    "sft:qwen3_moe:experts:cp4",
    "uneven:llama3:full:cp2",
    "shared:qwen3:lora:cp4",
    "dpo:qwen3:lora:cp4",
    "reward:qwen3:full:cp4",
    "distill:llama3:full:cp4",
    "grpo:gemma3_text:full:cp4",
    "ppo:llama3:full:cp2",
]


def check(case):
    *case, meshes = case.split(":")
    runs.check_same_numbers(*case, meshes.split(","))


@pytest.mark.parametrize(
    "case",
    [*PAIRS, *(pytest.param(x, marks=pytest.mark.full) for x in MORE_PAIRS)],
)
def test_every_task_on_some_meshes(case):
    check(case)


def test_masters_and_optax():
    runs.check_optimizers()


@pytest.mark.parametrize(
    "task, family, mesh",
    [
        ("sft", "llama3", "4x2"),
        pytest.param("distill", "llama3", "8x1", marks=pytest.mark.full),
        pytest.param("sft", "mixtral", "4x2", marks=pytest.mark.full),
    ],
)
def test_what_is_sent(task, family, mesh):
    runs.check_what_is_sent(task, family, mesh)


@pytest.mark.full
@pytest.mark.parametrize(
    "task, family, meshes",
    [
        ("sft", "llama3", ["8x1", "2x4"]),
        ("distill", "llama3", ["4x2", "2x4"]),
        ("sft", "mixtral", ["8x1", "2x4"]),
        ("sft", "qwen3_moe", ["8x1", "2x4"]),
    ],
)
def test_what_is_sent_on_other_meshes(task, family, meshes):
    for mesh in meshes:
        runs.check_what_is_sent(task, family, mesh)


def test_dropout_sends_nothing():
    runs.check_dropout_sends_nothing("llama3", "4x2")


EVERY_MESH = "8x1,4x2,2x4,1x8"
OF_EXPERTS = "ep2,ep4"


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_on_every_mesh(family):
    check(f"sft:{family}:full:{EVERY_MESH},{OF_EXPERTS}")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(
    "family", ["llama3", "gemma2", "gemma3_text", "qwen2", "qwen3"]
)
def test_every_task_on_every_mesh(family, mode):
    tasks = ["sft", "packed", "grpo"]
    if (REFERENCE / "models" / f"{family}_ref").is_dir():
        tasks += ["dpo", "distill"]
    for task in tasks:
        check(f"{task}:{family}:{mode}:{EVERY_MESH}")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("family", ["llama3", "gemma2", "qwen3"])
def test_the_other_tasks_on_two_axes(family, mode):
    for task in ["uneven", "coupled", "kto", "reward", "shared", "ppo"]:
        check(f"{task}:{family}:{mode}:4x2,2x4")
