"""One device and eight: the same tokens."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.support import REFERENCE

SCRIPT = """
import sys

import jax
import numpy as np

import keras_posttrain as kpt
import keras
from keras_posttrain.rollout import NativeRollout, Request
from tests.support import random_rows

devices = keras.distribution.list_devices()
assert len(devices) == 8
requests = [
    Request(row["token_ids"], 4, max_tokens=6 + 9 * i, seed=i,
            temperature=0.3 * i, stop_token_ids=[40, 41, 42, 43, 44, 45])
    for i, row in enumerate(random_rows(5, 1, 40, seed=3))
]


def layout():
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    # Heads over the model axis.
    rules = keras.distribution.LayoutMap(mesh)
    for name in ("query", "key", "value"):
        rules[f".*self_attention.*{name}.kernel"] = (None, "model", None)
    rules[".*attention_output.kernel"] = ("model", None, None)
    rules[".*feedforward_(gate|intermediate)_dense.kernel"] = (None, "model")
    rules[".*feedforward_output_dense.kernel"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=rules, batch_dim_name="batch"
    )


def run(distribution, slots, **kwargs):
    keras.distribution.set_distribution(distribution)
    task = kpt.SFTTask.from_preset(
        sys.argv[1] + "/models/llama3", sequence_length=64, **kwargs
    )
    if task.adapter is not None:
        for b in task.adapter.b:
            b.assign(np.random.default_rng(1).normal(0, 0.05, b.shape))
    engine = NativeRollout(slots)
    engine.set_model(task)
    out = engine.generate(requests)
    if distribution is not None:
        decoder = engine._decoder
        decoder.allocate(8, 128)
        spec = decoder.cache[0].keys.sharding.spec
        assert spec[0] == "batch", spec
        if "model" in distribution.device_mesh.axis_names:
            assert spec[1] == "model", spec
        decoder.free()
    scores = engine.score([[*requests[1].token_ids, 5, 6]], top_k=2)
    return out, scores


for kwargs in ({}, {"lora": kpt.LoRA(rank=4)}):
    one, _ = run(None, 128, **kwargs)
    many = [
        keras.distribution.DataParallel(devices=devices),
        layout(),
    ]
    for distribution in many:
        for slots in (8, 32):
            out, scores = run(distribution, slots, **kwargs)
            for left, right in zip(one, out):
                for a, b in zip(left, right):
                    assert a.token_ids == b.token_ids
                    np.testing.assert_allclose(
                        a.per_token_logps, b.per_token_logps, atol=6e-5
                    )
            assert np.isfinite(scores[0].per_token_logps).all()
print("equal")
"""


@pytest.mark.slow
def test_eight_devices_give_the_tokens_of_one():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(REFERENCE)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=REFERENCE.parent.parent,
    )
    assert found.stdout.endswith("equal\n"), found.stderr[-3000:]
