"""Which checkpoints are kept: the newest, some of all times, the best."""

import functools
import logging
import pathlib

import jax
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.callbacks import checkpoint_files
from tests.callbacks.train_script import make_task
from tests.support import random_rows, starts_again

fresh_task = starts_again(functools.partial(make_task, False))
SCORES = {2: 0.4, 4: 0.9, 6: 0.1, 8: float("nan"), 10: 0.7, 12: 0.5}


def fit(directory, epochs=2, scores=SCORES, interrupt=None, **settings):
    """Makes six steps an epoch, and returns the callback."""
    saver = kpt.callbacks.Checkpoint(
        directory, every=2, keep=2, monitor="test/score", **settings
    )

    def score(task):
        if task.step == interrupt:
            raise KeyboardInterrupt
        return {"score": scores[task.step]}

    fresh_task().fit(
        random_rows(22, seed=5),
        batch_size=4,
        epochs=epochs,
        validation_data=random_rows(2, seed=6),
        callbacks=[saver, kpt.callbacks.Evaluate(score, 2, name="test")],
        verbose=0,
    )
    return saver


def saved(directory):
    names = (pathlib.Path(directory) / "checkpoints").iterdir()
    return sorted(int(x.name) for x in names if x.name.isdigit())


@pytest.mark.parametrize(["mode", "best"], [("max", 4), ("min", 6)])
def test_the_best_is_kept_beside_the_newest(mode, best, tmp_path, caplog):
    logger = logging.getLogger("absl")
    logger.addHandler(caplog.handler)
    saver = fit(tmp_path, mode=mode)
    logger.removeHandler(caplog.handler)
    # Orbax warns of a checkpoint without a metric, which is nothing special.
    assert "tracked_metric" not in caplog.text
    assert saved(tmp_path) == [best, 10, 12]
    assert saver.best == tmp_path / "checkpoints" / str(best)


def test_the_best_of_a_resumed_run_may_be_from_before(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, mode="max", interrupt=8)
    saver = fit(tmp_path, mode="max")
    assert saved(tmp_path) == [4, 10, 12]
    assert saver.best.name == "4"
    # A finished run knows it too.
    assert fit(tmp_path, mode="max").best.name == "4"


def test_one_of_each_interval_is_kept(tmp_path):
    fresh_task().fit(
        random_rows(22, seed=5),
        batch_size=4,
        epochs=3,
        callbacks=[
            kpt.callbacks.Checkpoint(tmp_path, 1, keep=1, keep_every=6)
        ],
        verbose=0,
    )
    assert saved(tmp_path) == [1, 7, 13, 18]


def test_a_metric_that_is_not_logged_is_named(tmp_path):
    saver = kpt.callbacks.Checkpoint(tmp_path, monitor="val_los", mode="min")
    expected = r"monitor='val_los': it is not logged. Logged are .*'val_loss'"
    with pytest.warns(UserWarning, match=expected):
        fresh_task().fit(
            random_rows(4),
            batch_size=4,
            validation_data=random_rows(2),
            callbacks=[saver],
            verbose=0,
        )
    assert saver.best is None


@pytest.mark.parametrize(
    ["settings", "message"],
    [
        ({"monitor": "val_loss"}, "`mode` must be 'min' or 'max'"),
        ({"monitor": "val_loss", "mode": "auto"}, "mode='auto'"),
        ({"mode": "max"}, "Received: monitor=None, mode='max'"),
        ({"monitor": 3, "mode": "max"}, "name of a metric.* monitor=3"),
        ({"keep_every": "5 days"}, "`keep_every`.*keep_every='5 days'"),
    ],
)
def test_bad_settings_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        kpt.callbacks.Checkpoint(tmp_path, **settings)


def test_a_save_does_not_see_the_next_step():
    """What is saved is copied, by no program of its own."""
    array = jax.numpy.zeros((61, 67))
    events = []

    def listen(event, seconds, **_):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        kept = checkpoint_files.detached({"x": array})
        assert not [e for e in events if "compile" in e]
        jax.numpy.array(array, copy=True)
        assert [e for e in events if "compile" in e]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert step(array)[0, 0] == 1 and array.is_deleted()
    assert np.all(kept["x"] == 0)


def test_arrays_are_not_compressed(tmp_path):
    arrays = {"x": jax.numpy.zeros((1024, 256))}
    checkpoint_files.write(tmp_path / "0", {"trainable": arrays}, {})
    files = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert sum(x.stat().st_size for x in files) > arrays["x"].nbytes
