"""The guide to vLLM runs with a real vLLM, and its result holds."""

import importlib.util
import json

import pytest

from tests.test_guides import has_files, read_log, run_alone


@pytest.mark.skipif(
    not importlib.util.find_spec("vllm"), reason="vLLM is not installed"
)
def test_vllm_rollouts(tmp_path):
    folder, _ = run_alone("vllm_rollouts", tmp_path)
    assert has_files(folder, ["metrics.jsonl"])
    results = json.loads((folder / "results.json").read_text())
    rewards = results["rewards"]
    assert rewards[-1] > rewards[0] + 0.2
    assert results["probe_difference"] < 1e-4
    log = read_log(folder)
    assert len(log) == 20
    # The adapter's alone: names and shapes are in the file too.
    assert {line["vllm/sync_bytes"] for line in log[1:]} == {
        results["sync_bytes"]
    }
