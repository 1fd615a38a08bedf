"""AdamW with 8-bit moments trains as AdamW does."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.adamw_8bit import LEAST, decode, encode
from tests.distribution.runs import mesh
from tests.support import REFERENCE, random_rows

ROWS = random_rows(8, seed=4)


def make(**kwargs):
    return kpt.SFTTask.from_preset(
        REFERENCE / "models/qwen3", sequence_length=64, **kwargs
    )


def fit(optimizer, epochs=20, callbacks=(), **kwargs):
    task = make(**kwargs)
    task.compile(optimizer=optimizer)
    losses = []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    task.fit(ROWS, batch_size=4, epochs=epochs, verbose=0, shuffle=False,
             callbacks=[each, *callbacks])  # fmt: skip
    return task, np.array(losses)


def moments(optimizer):
    """Variables of at least `LEAST` numbers and their scales."""
    return [v for v in optimizer.variables if np.prod(v.shape) > 100]


def test_the_course_is_adamws():
    """Of 40 steps the losses are within 2 %, and the state is a quarter."""
    task, losses = fit(kpt.AdamW8bit(1e-3))
    plain, want = fit(keras.optimizers.AdamW(1e-3))
    assert want[-1] < 0.7 * want[0]
    np.testing.assert_allclose(losses, want, rtol=0.02)
    sizes = []
    for each in (task, plain):
        state = [v for v in each.optimizer.variables if v.ndim]
        sizes.append(sum(v.value.nbytes for v in state))
    # Scales of blocks of 32 to 256 numbers, and float32 of small variables.
    assert sizes[0] < 0.29 * sizes[1]


@pytest.mark.parametrize("root", [2, 4])
def test_numbers_of_8_bits(root):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(8, 512)).astype("float32")
    values[0, :256] = 0
    values[1] *= 1e-12
    if root == 4:
        values = values**2
    found = [
        np.asarray(decode(*encode(values, root, np.uint32(seed)), root))
        for seed in range(256)
    ]
    largest = np.abs(values.reshape(8, 2, 256)).max(-1)
    largest = largest.repeat(256, 1).reshape(values.shape)
    step = 2 / 127 if root == 2 else 4 / 255
    # A step where the number is the largest; more below it.
    error = np.abs(np.array(found) - values)
    assert (error <= 1.1 * step * largest + 1e-30).all()
    # The mean over many draws is the number.
    assert (error.mean(0) > 0).any()
    mean = np.abs(np.mean(found, 0) - values)
    assert (mean <= 0.005 * largest + 1e-30).all()
    assert not np.any(found[0][0, :256])
    if root == 4:
        # None but a 0 becomes 0.
        assert (np.array(found)[:, 2:] > 0).all()


def test_small_variables_keep_floats():
    task, _ = fit(kpt.AdamW8bit(1e-3), epochs=1)
    kinds = {
        v.dtype for v in task.optimizer.variables if np.prod(v.shape) >= LEAST
    }
    assert kinds == {"int8", "uint8"}
    small = [
        v
        for v in task.optimizer.variables
        if v.path.endswith("scale_momentum")
    ]
    assert small and all(v.dtype == "float32" for v in small)


def test_bfloat16_weights_have_masters():
    task, losses = fit(kpt.AdamW8bit(1e-3), 8, dtype="bfloat16")
    _, want = fit(keras.optimizers.AdamW(1e-3), 8, dtype="bfloat16")
    np.testing.assert_allclose(losses, want, rtol=0.05)
    assert task.causal_lm.backbone.variable_dtype == "bfloat16"


def test_a_run_resumes_bit_for_bit(tmp_path):
    def run(epochs, folder):
        checkpoint = kpt.callbacks.Checkpoint(tmp_path / folder, every=1)
        task, _ = fit(kpt.AdamW8bit(1e-3), epochs, [checkpoint])
        return [np.asarray(v.value) for v in task.trainable_variables]

    run(2, "resumed")
    for one, other in zip(run(4, "resumed"), run(4, "whole"), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("name", ["4x2"])
def test_eight_devices_are_one(name):
    _, want = fit(kpt.AdamW8bit(1e-3), 5)
    keras.distribution.set_distribution(mesh(name))
    task, losses = fit(kpt.AdamW8bit(1e-3), 5)
    # A number at the edge of two codes may fall on either side.
    np.testing.assert_allclose(losses, want, rtol=1e-3)
    for v in moments(task.optimizer):
        if np.prod(v.shape) >= LEAST and v.dtype != "float32":
            assert not v.value.sharding.is_fully_replicated, v.path


def test_a_plan_counts_bytes():
    sizes = []
    for optimizer in (kpt.AdamW8bit(1e-3), keras.optimizers.AdamW(1e-3)):
        task = make()
        task.compile(optimizer=optimizer)
        plan = task.plan("cpu:4", batch_size=4)
        sizes.append(plan.arguments["optimizer"])
    assert sizes[0] < 0.35 * sizes[1]


def test_amsgrad_is_refused():
    with pytest.raises(ValueError, match="amsgrad=True"):
        kpt.AdamW8bit(1e-3, amsgrad=True)
