"""One device and eight: the same numbers, under Keras's DataParallel."""

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
from tests.support import random_rows, weights

rows = random_rows(16, seed=1)


def run(distribution, **kwargs):
    keras.distribution.set_distribution(distribution)
    task = kpt.SFTTask.from_preset(
        sys.argv[1] + "/models/llama3", sequence_length=64, **kwargs
    )
    task.compile(optimizer=keras.optimizers.SGD(0.1), micro_batch_size=8)
    history = task.fit(
        rows, batch_size=16, epochs=2, verbose=0, validation_data=rows[:8]
    ).history
    return history, weights(task), task.log_probs(rows)


assert len(jax.devices()) == 8
many = keras.distribution.DataParallel(
    devices=keras.distribution.list_devices()
)
for kwargs in ({}, {"lora": kpt.LoRA(rank=4, dropout=0.2)}):
    one, eight = run(None, **kwargs), run(many, **kwargs)
    for key in ("loss", "grad_norm", "val_loss"):
        np.testing.assert_allclose(one[0][key], eight[0][key], rtol=1e-5)
    for key, value in one[1].items():
        np.testing.assert_allclose(value, eight[1][key], atol=1e-6)
    for left, right in zip(one[2], eight[2]):
        np.testing.assert_allclose(left, right, atol=2e-5)
print("equal")
"""


@pytest.mark.full
def test_eight_devices_equal_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(REFERENCE.parent.parent)
    done = subprocess.run(
        [sys.executable, str(script), str(REFERENCE)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": root,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")
