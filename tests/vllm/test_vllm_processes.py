"""Two processes that train with one vLLM server (`make test-vllm`)."""

import importlib.util
import json

import numpy as np
import pytest

from tests.distribution.test_processes import check_same, run
from tests.vllm.two_trainers import CASES, outcomes, server

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
)


def test_two_processes_sample_and_train_as_one(tmp_path):
    """Pushes of all kinds, conversations, failures, overlapping rollouts.

    Last, a server that the first process starts is killed: all get the
    address and the key of the one that takes its place.
    """
    with server() as servers:
        (tmp_path / "server.json").write_text(json.dumps(servers))
        two = run(
            tmp_path, *CASES, module="tests.vllm.two_trainers", devices=1
        )
        for case, one, other in zip(
            CASES, outcomes(CASES, servers), two, strict=True
        ):
            one = {name: np.asarray(value) for name, value in one.items()}
            check_same(one, other, case)
