"""Tests of vLLM's engine that do not need vLLM."""

import os
import subprocess
import sys

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import Request, VLLMRollout
from keras_posttrain.rollout.vllm import folder, jobs, weights
from keras_posttrain.rollout.vllm.engine import _TokenStream
from keras_posttrain.rollout.vllm.server import _flags
from tests.support import REFERENCE


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"url": "localhost:8000"}, "url='localhost:8000'"),
        ({"url": "http://a", "python": "python3"}, "pass one of them"),
        ({"adapter": "yes"}, "adapter='yes'"),
        ({"max_length": 1}, "max_length=1"),
        ({"cache_bytes": "all"}, "cache_bytes='all'"),
        ({"timeout": 0}, "timeout=0"),
        ({"directory": "/not/there"}, "directory='/not/there'"),
    ],
)
def test_settings_are_checked(settings, match):
    with pytest.raises(ValueError, match=match):
        VLLMRollout(**settings)


def test_requests_to_vllms_parameters():
    request = Request(
        [4, 5], 3, max_tokens=7, top_k=9, stop_token_ids=[2], seed=1
    )
    params = jobs.sampling_job(request).params
    wanted = {
        "n": 3, "max_tokens": 7, "temperature": 1.0, "top_k": 9,
        "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [2],
        "ignore_eos": True, "logprobs": 0, "detokenize": False,
    }  # fmt: skip
    seed = params.pop("seed")
    assert params == wanted and 0 <= seed < 2**62
    # Of the seed and the prompt.
    seeds = {
        jobs.sample_seed(Request(ids, seed=s))
        for ids in ([4, 5], [5, 4], [4])
        for s in (1, 2)
    }
    assert len(seeds) == 6 and seed in seeds
    greedy = jobs.sampling_job(Request([4], 3, temperature=0, seed=1))
    assert greedy.params["n"] == 1


def test_a_probe_that_differs_gives_both_numbers():
    expected = np.array([0.0, -1.0, -2.5])
    assert weights.compare(expected + 1e-4, expected, "float32") < 2e-4
    for wrong in (-2.75, np.nan):
        with pytest.raises(RuntimeError) as error:
            weights.compare([0.0, -1.0, wrong], expected, "float32")
        for part in ("token 2", f"{wrong:.6f}"[:4], "-2.500000"):
            assert part in str(error.value)


def test_tokens_that_are_sampled_again_are_streamed_once():
    streamed = {}

    def on_tokens(i, g, ids):
        streamed.setdefault((i, g), []).extend(ids)

    stream = _TokenStream(
        [Request([1], 2), Request([1], 2, temperature=0)], on_tokens
    )
    stream(0, 1, [5, 6])
    stream(1, 0, [9])
    stream.restart()
    stream(0, 1, [5])
    stream(0, 1, [6, 7])
    stream(1, 0, [9, 8])
    assert streamed == {(0, 1): [5, 6, 7], (1, 0): [9, 8], (1, 1): [9, 8]}


def test_flags_of_the_command_line():
    arguments = {"max_model_len": 5, "enable_lora": True, "a_b": False,
                 "c": None, "d": {"e": 1}}  # fmt: skip
    flags = ["--max-model-len", "5", "--enable-lora", "--no-a-b"]
    assert list(_flags(arguments)) == [*flags, "--d", '{"e": 1}']


def test_folders_go_with_their_owner(tmp_path):
    """Files of a killed process are removed; files in use are not."""
    script = (
        "import runpy, sys, os\n"
        f"module = runpy.run_path({folder.__file__!r})\n"
        f"folder = module['Folder']({str(tmp_path)!r})\n"
        "print(folder.path, flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        path = process.stdout.readline().strip()
        own = folder.Folder(tmp_path)
        assert os.path.isdir(path)
        process.stdin.write("\n")
    assert os.path.isdir(path)
    other = folder.Folder(tmp_path)
    assert not os.path.isdir(path) and own.path.is_dir()
    own.remove()
    del other
    assert list(tmp_path.iterdir()) == []


def test_weights_are_those_of_an_export(tmp_path):
    """Names, shapes and values, the adapter added or left out."""
    from safetensors.numpy import load_file

    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen3", lora=kpt.LoRA(rank=2)
    )
    for b in task.adapter.b:
        b.assign(np.random.default_rng(1).normal(0, 0.1, b.shape))
    task.export(tmp_path / "export")
    merged = weights.Weights(
        task.causal_lm, task.adapter, "float32", merged=True
    )
    merged.write(tmp_path / "merged")
    base = load_file(REFERENCE / "models/qwen3/model.safetensors")
    files = [
        load_file(tmp_path / name / "model.safetensors")
        for name in ("export", "merged")
    ]
    assert files[0].keys() == files[1].keys() == merged.table.keys()
    plain = weights.Weights(
        task.causal_lm, task.adapter, "float32", merged=False
    )
    task.merge_adapter()
    for name, array in plain.arrays():
        np.testing.assert_array_equal(files[0][name], files[1][name])
        np.testing.assert_array_equal(array, base[name])
    assert any((files[0][name] != base[name]).any() for name in base)


def test_without_vllm_it_says_what_to_install():
    task = kpt.SFTTask.from_preset(REFERENCE / "models/qwen3")
    engine = VLLMRollout()
    engine.set_model(task)
    if vllm_is_there():
        pytest.skip("vLLM is installed")
    with pytest.raises(ImportError, match="needs vLLM"):
        engine.start()
    assert engine._folder is None
    with pytest.raises(ValueError, match="adapter of rank 512 at most"):
        engine = VLLMRollout(adapter=True)
        engine.set_model(task)
        engine.start()


def vllm_is_there():
    from keras_posttrain.rollout.vllm.local import is_installed

    return is_installed()
