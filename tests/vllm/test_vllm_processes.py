"""Two processes that train with one vLLM server (`make test-vllm`)."""

import importlib.util

import numpy as np
import pytest

from tests.distribution.test_processes import check_same, run
from tests.vllm.two_trainers import outcomes

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
)
CASES = (
    "grpo:full",
    "grpo:lora",
    "episodes",
    "failures",
    "ahead",
    "ahead_and_failing",
)


def test_two_processes_sample_and_train_as_one(tmp_path):
    """Full, delta and adapter pushes; conversations; requests that fail."""
    two = run(tmp_path, *CASES, module="tests.vllm.two_trainers", devices=1)
    for case, one, other in zip(CASES, outcomes(CASES), two, strict=True):
        one = {name: np.asarray(value) for name, value in one.items()}
        check_same(one, other, case)
