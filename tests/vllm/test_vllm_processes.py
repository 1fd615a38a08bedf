"""Two processes that train with one vLLM server (`make test-vllm`)."""

import importlib.util

import numpy as np
import pytest

from tests.distribution.test_processes import check_same, run
from tests.vllm.two_trainers import outcomes

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
)


def check_same_in_both(tmp_path, *cases):
    two = run(tmp_path, *cases, module="tests.vllm.two_trainers", devices=1)
    for case, one, other in zip(cases, outcomes(cases), two, strict=True):
        one = {name: np.asarray(value) for name, value in one.items()}
        check_same(one, other, case)


def test_two_processes_sample_and_train_as_one(tmp_path):
    """Pushes of all kinds, conversations, failures, overlapping rollouts."""
    check_same_in_both(
        tmp_path,
        "grpo",
        "episodes",
        "failures",
        "ahead",
        "ahead_and_failing",
    )


def test_a_server_of_the_first_process_is_killed(tmp_path):
    """All get the address and the key of the one that takes its place."""
    check_same_in_both(tmp_path, "killed")
