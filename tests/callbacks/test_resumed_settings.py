"""A run resumes with its own settings, or with others that are asked for."""

import functools
import json

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import (
    REFERENCE,
    one_layer,
    random_rows,
    read_log,
    starts_again,
    weights,
)

ROWS = random_rows(8, seed=5)


@functools.cache
def first_task(decays, **settings):
    """Gives a task in its first state, trained by Adam."""

    @starts_again
    def make():
        task = kpt.SFTTask.from_preset(
            one_layer(REFERENCE / "models/qwen3"),
            sequence_length=64,
            lora=kpt.LoRA(rank=2),
        )
        rate = settings.pop("learning_rate")
        if decays:
            rate = keras.optimizers.schedules.CosineDecay(rate, 8)
        task.compile(keras.optimizers.Adam(rate, **settings))
        return task

    return make


def run(directory, rate=1e-3, epochs=1, override=(), decays=False, **settings):
    task = first_task(decays, learning_rate=rate, **settings)()
    task.fit(
        ROWS,
        batch_size=4,
        epochs=epochs,
        verbose=2,
        callbacks=[
            kpt.callbacks.Checkpoint(directory, every=1, override=override),
            kpt.callbacks.MetricsLog(directory),
        ],
    )
    return task


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"rate": 1e-2}, "learning_rate"),
        ({"epsilon": 1e-3}, "epsilon"),
        ({"beta_1": 0.5}, "beta_1"),
        ({"decays": True}, "learning_rate"),
    ],
)
def test_changed_settings_of_the_optimizer_are_refused(
    settings, name, tmp_path
):
    run(tmp_path)
    with pytest.raises(ValueError, match=rf"optimizer's {name} differs.*over"):
        run(tmp_path, epochs=2, **settings)


def test_a_changed_schedule_is_refused(tmp_path):
    run(tmp_path, decays=True)
    with pytest.raises(ValueError, match="optimizer's learning_rate differs"):
        run(tmp_path, 1e-2, epochs=2, decays=True)
    run(tmp_path, epochs=2, decays=True)


def test_a_rate_that_a_callback_has_changed_is_no_other_setting(tmp_path):
    task = run(tmp_path)
    task.optimizer.learning_rate = 5e-4
    run(tmp_path, epochs=2)


def test_settings_are_changed_on_purpose(tmp_path, capsys):
    """The new rate is printed, logged, and kept by the next checkpoint."""
    run(tmp_path)
    capsys.readouterr()
    new = {"rate": 1e-4, "epsilon": 1e-5}
    run(tmp_path, epochs=2, override=["learning_rate", "epsilon"], **new)
    out = capsys.readouterr().out
    assert "Resuming from step 2 with the optimizer's learning_rate" in out
    assert "epsilon 1e-05 instead of 1e-07" in out
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 1e-4, 1e-4], rtol=1e-6)
    run(tmp_path, epochs=3, **new)
    assert read_log(tmp_path)[-1]["learning_rate"] == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="optimizer's learning_rate differs"):
        run(tmp_path, epochs=4)


@pytest.mark.parametrize("override", ["learning_rate", [1], [None]])
def test_override_names_settings(override, tmp_path):
    with pytest.raises(ValueError, match="`override` must be a list of names"):
        kpt.callbacks.Checkpoint(tmp_path, override=override)


def test_damaged_metadata_is_noticed(tmp_path):
    """A step that has changed in the file is not believed."""
    straight = weights(run(tmp_path / "straight", epochs=2))
    run(tmp_path / "run")
    path = tmp_path / "run/checkpoints/2/meta/metadata"
    meta = json.loads(path.read_text())
    meta["step"] += 1
    path.write_text(json.dumps(meta))
    message = r"step 2 is damaged \(Checksum\); resuming from step 1"
    with pytest.warns(match=message):
        resumed = run(tmp_path / "run", epochs=2)
    for name, value in straight.items():
        np.testing.assert_array_equal(value, weights(resumed)[name])
