"""The examples of docstrings that need vLLM run with a real one."""

import importlib.util

import pytest

from docs import examples

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
    ),
    # What vLLM's and torch's own files warn of.
    pytest.mark.filterwarnings("ignore"),
]


def test_examples_run(tmp_path):
    runner = examples.Runner(tmp_path, epochs=0)
    name = "keras_posttrain.rollout.VLLMRollout"
    done = [
        runner.run(example)
        for example in examples.examples()
        if example.name.startswith(name)
    ]
    assert done and not any(outcome.skipped for outcome in done)
