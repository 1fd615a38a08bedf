"""A return to a step before a loss spike, without the spike's data."""

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

ROWS = random_rows(16, seed=7)


@starts_again
def first_task():
    task = kpt.SFTTask.from_preset(
        one_layer(REFERENCE / "models/qwen3"),
        sequence_length=64,
        lora=kpt.LoRA(rank=2),
    )
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    return task


def run(
    directory,
    *,
    every=2,
    keep=5,
    from_step=None,
    skip_steps=(),
    stop_at=None,
    local=None,
):
    task = first_task()
    callbacks = [
        kpt.callbacks.Checkpoint(
            directory,
            every=every,
            keep=keep,
            from_step=from_step,
            local_directory=local and directory / "local",
            local_every=local,
        ),
        kpt.callbacks.MetricsLog(directory),
    ]
    if stop_at:

        class Crash(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if self.model.step == stop_at:
                    raise RuntimeError("crash")

        callbacks.append(Crash())
    task.fit(
        ROWS,
        batch_size=4,
        epochs=2,
        verbose=2,
        callbacks=callbacks,
        skip_steps=skip_steps,
    )
    return weights(task), [x["step"] for x in read_log(directory)]


def test_a_run_goes_back_and_leaves_steps_out(tmp_path, capsys):
    skip = (5, 6)
    straight, steps = run(tmp_path / "straight", skip_steps=skip)
    assert steps == [1, 2, 3, 4, 7, 8]
    run(tmp_path / "spiked")
    branch = dict(from_step=4, skip_steps=skip)
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path / "spiked", stop_at=8, **branch)
    assert "removed the checkpoints of steps [6, 8]" in capsys.readouterr().out
    # The same script resumes from the newest checkpoint of the new branch.
    again, steps = run(tmp_path / "spiked", **branch)
    assert "removed" not in capsys.readouterr().out
    assert steps == [1, 2, 3, 4, 7, 8]
    for key, value in straight.items():
        np.testing.assert_array_equal(value, again[key])


def test_there_must_be_a_checkpoint_that_early(tmp_path):
    run(tmp_path, keep=1)
    with pytest.raises(ValueError, match="No checkpoint .* step 2 or before"):
        run(tmp_path, from_step=2)


def test_local_checkpoints_after_it_are_removed(tmp_path, capsys):
    straight, _ = run(tmp_path / "straight", from_step=4)
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path / "again", every=4, stop_at=8, local=1)
    branch = dict(every=100, from_step=4, local=1)
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path / "again", stop_at=7, **branch)
    found = capsys.readouterr().out
    assert "removed the checkpoints of steps [6, 7]" in found
    # Those of the new branch are used.
    again, _ = run(tmp_path / "again", **branch)
    assert "the local checkpoint of step 6." in capsys.readouterr().out
    for key, value in straight.items():
        np.testing.assert_array_equal(value, again[key])


def test_there_must_be_a_local_checkpoint_that_early(tmp_path):
    with pytest.raises(RuntimeError, match="crash"):
        run(tmp_path, every=100, stop_at=4, local=1)
    with pytest.raises(ValueError, match=r"step 1 or before.* \[2, 3\]"):
        run(tmp_path, every=100, from_step=1, local=1)
