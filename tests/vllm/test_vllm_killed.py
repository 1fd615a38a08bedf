"""A run with a vLLM server, ended by signals at random, is resumed."""

import importlib.util
import signal

import pytest

from tests.tasks.test_killed import check_killed_runs

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
    ),
]
SIGNALS = 3 * [signal.SIGKILL] + [signal.SIGINT, signal.SIGTERM]


def test_it_goes_on_and_leaves_nothing_behind(tmp_path):
    check_killed_runs("grpo_vllm", SIGNALS, tmp_path, atol=1e-4)
