"""One device and eight: the same tokens."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rollout import NativeRollout, Request
from tests.support import REFERENCE, one_layer, random_rows

REQUESTS = [
    Request(
        row["token_ids"],
        4,
        max_tokens=6 + 9 * i,
        seed=i,
        temperature=0.3 * i,
        stop_token_ids=[40, 41, 42, 43, 44, 45],
    )
    for i, row in enumerate(random_rows(5, 1, 40, seed=3))
]


def layout(devices):
    """Batches over four devices, heads and widths over two."""
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
        one_layer(REFERENCE / "models/llama3"), sequence_length=64, **kwargs
    )
    if task.adapter is not None:
        for b in task.adapter.b:
            b.assign(np.random.default_rng(1).normal(0, 0.05, b.shape))
    engine = NativeRollout(slots)
    engine.set_model(task)
    out = engine.generate(REQUESTS)
    if distribution is not None:
        decoder = engine._decoder
        decoder.allocate(8, 128)
        spec = decoder.cache[0].keys.sharding.spec
        assert spec[0] == "batch", spec
        if "model" in distribution.device_mesh.axis_names:
            assert spec[1] == "model", spec
        decoder.free()
    scores = engine.score([[*REQUESTS[1].token_ids, 5, 6]], top_k=2)
    return out, scores


def data(devices):
    return keras.distribution.DataParallel(devices=devices)


@pytest.mark.parametrize(
    "lora, slots, layouts",
    [
        pytest.param(None, 8, (data, layout), id="full-few"),
        pytest.param(kpt.LoRA(rank=4), 32, (layout,), id="lora-many"),
        # The split of slots is that of all weights.
        pytest.param(
            kpt.LoRA(rank=4),
            32,
            (data,),
            id="lora-many-data",
            marks=pytest.mark.full,
        ),
    ],
)
def test_eight_devices_give_the_tokens_of_one(
    eight_devices, lora, slots, layouts
):
    one, _ = run(None, 128, lora=lora)
    for make in layouts:
        out, scores = run(make(eight_devices), slots, lora=lora)
        for left, right in zip(one, out, strict=True):
            for a, b in zip(left, right, strict=True):
                assert a.token_ids == b.token_ids
                np.testing.assert_allclose(
                    a.per_token_logps, b.per_token_logps, atol=6e-5
                )
        assert np.isfinite(scores[0].per_token_logps).all()
