"""One device and eight: the same numbers, under Keras's DataParallel."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, one_layer, random_rows, weights

MODEL = one_layer(REFERENCE / "models/llama3")
ROWS = random_rows(16, seed=1)


def run(distribution, **kwargs):
    keras.distribution.set_distribution(distribution)
    task = kpt.SFTTask.from_preset(MODEL, sequence_length=64, **kwargs)
    task.compile(optimizer=keras.optimizers.SGD(0.1), micro_batch_size=8)
    history = task.fit(
        ROWS, batch_size=16, epochs=2, verbose=0, validation_data=ROWS[:8]
    ).history
    return history, weights(task), task.log_probs(ROWS)


@pytest.mark.parametrize(
    "lora",
    [
        # The contract has all weights on eight devices.
        pytest.param(None, marks=pytest.mark.full),
        kpt.LoRA(rank=4, dropout=0.2),
    ],
    ids=["full", "lora"],
)
def test_eight_devices_equal_one(eight_devices, lora):
    one = run(None, lora=lora)
    eight = run(
        keras.distribution.DataParallel(devices=eight_devices), lora=lora
    )
    for key in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(one[0][key], eight[0][key], rtol=1e-5)
    pairs = zip(one[1].items(), eight[1].values(), strict=True)
    for (key, value), other in pairs:
        np.testing.assert_allclose(value, other, atol=1e-6, err_msg=key)
    for left, right in zip(one[2], eight[2], strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
