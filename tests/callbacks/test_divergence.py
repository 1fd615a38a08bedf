"""A run whose gradients are not finite stops, and keeps what is good."""

import functools

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import REFERENCE, one_layer, random_rows, starts_again

ROWS = random_rows(80, seed=3)


@functools.cache
def diverging(after):
    """Gives a task whose gradients are NaN after some steps."""

    class Diverging(kpt.SFTTask):
        def apply_gradients(self, state, gradients, logs):
            factor = np.float32("nan") * (state["step"] > after)
            gradients = [
                keras.ops.where(state["step"] > after, factor, g)
                for g in gradients
            ]
            return super().apply_gradients(state, gradients, logs)

    @starts_again
    def first_task():
        task = Diverging.from_preset(
            one_layer(REFERENCE / "models/qwen3"),
            sequence_length=32,
            truncation="cut",
            lora=kpt.LoRA(rank=2),
        )
        task.compile(optimizer=keras.optimizers.SGD(0.1))
        return task

    return first_task


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_run_that_has_diverged_stops(verbose, tmp_path):
    """The checkpoints before stay, however few are kept."""
    task = diverging(after=6)()
    with pytest.raises(FloatingPointError, match="not finite.*diverged"):
        task.fit(
            ROWS,
            batch_size=1,
            epochs=2,
            verbose=verbose,
            callbacks=[kpt.callbacks.Checkpoint(tmp_path, every=2, keep=1)],
        )
    assert 38 <= task.step < 80
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == [6]


def test_single_steps_without_a_gradient_do_not_stop_a_run(tmp_path):
    task = diverging(after=70)()
    task.fit(
        ROWS,
        batch_size=1,
        verbose=0,
        callbacks=[kpt.callbacks.Checkpoint(tmp_path, every=10, keep=9)],
    )
    assert task.step == 80
    saved = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    # The last is that of the end.
    assert saved == {*range(10, 71, 10), 80}
