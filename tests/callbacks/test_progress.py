"""The printed progress of a run."""

import re
import time

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain.training.run_state import RunState
from tests.support import REFERENCE, random_rows


@pytest.fixture(scope="module")
def task():
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/llama3", sequence_length=64
    )
    task.compile(optimizer=keras.optimizers.SGD(1e-2))
    return task


class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.2)


def printed(task, capsys, rows=None, callbacks=(), **kwargs):
    task.run_state = RunState()
    capsys.readouterr()
    kwargs = {"batch_size": 4, "epochs": 2, **kwargs}
    rows = random_rows(10, seed=2) if rows is None else rows
    task.fit(rows, callbacks=list(callbacks), **kwargs)
    out, err = capsys.readouterr()
    assert err == ""
    return out


LINE = (
    r"epoch {epoch}/2 - step {step}/6 - loss [\d.]+ - grad_norm [\d.]+ - "
    r"learning_rate 0\.01 - entropy [\d.]+ - mean_token_accuracy [\d.]+ - "
    r"[\d,]+ tokens/s"
)


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_a_line_per_epoch(task, capsys, verbose):
    report, *lines = printed(task, capsys, verbose=verbose).splitlines()
    assert "10 rows" in report and "10 kept" in report
    assert len(lines) == 2
    # The first epoch's line has the time left for the second.
    first = LINE.format(epoch=1, step=3) + r" - \ds left"
    assert re.fullmatch(first, lines[0]), lines[0]
    assert re.fullmatch(LINE.format(epoch=2, step=6), lines[1]), lines[1]


def test_silence(task, capsys):
    assert printed(task, capsys, verbose=0) == ""


def test_a_bar_on_a_terminal(task, capsys, monkeypatch):
    """The complete line is overwritten each time."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("keras_posttrain.callbacks.progress.INTERVAL", 0.1)
    out = printed(task, capsys, verbose=1, callbacks=[Slow()])
    report, first, second = out.splitlines()[:1] + out.split("\n")[1:3]
    for text, steps in ((first, (2, 3, 3)), (second, (4, 5, 6, 6))):
        parts = text.split("\r")[1:]
        assert all(part.endswith("\033[K") for part in parts)
        shown = [int(re.search(r"step (\d)/6", p).group(1)) for p in parts]
        assert shown == list(steps)
    assert "left" in first and "tokens/s" in first
    # Only a terminal gets two lines per epoch.
    out = printed(task, capsys, verbose=2, callbacks=[Slow()])
    assert "\r" not in out and len(out.splitlines()) == 3


def test_tokens_per_second_and_the_time_left_are_right(task, capsys):
    """Each step takes 0.2 s: 5 per second, and 3 are left after 3."""
    rows = random_rows(12, low=20, high=20)
    out = printed(task, capsys, rows=rows, verbose=2, callbacks=[Slow()])
    first = out.splitlines()[1]
    rate = int(
        re.search(r"([\d,]+) tokens/s", first).group(1).replace(",", "")
    )
    assert 100 < rate <= 80 / 0.2
    assert 0 <= int(re.search(r"(\d+)s left", first).group(1)) <= 2


def test_validation_is_shown(task, capsys):
    out = printed(
        task, capsys, verbose=2, epochs=1, validation_data=random_rows(4)
    )
    assert "val_loss" in out and "val_perplexity" in out


def test_a_second_fit_counts_its_own_steps(task, capsys):
    rows = random_rows(10, seed=2)
    printed(task, capsys)
    for end in (12, 18):
        task.fit(rows, batch_size=4, epochs=2, verbose=2)
        out = capsys.readouterr().out
        assert f"epoch 2/2 - step {end}/{end}" in out
        assert f"epoch 1/2 - step {end - 3}/{end}" in out


def test_skipped_steps_are_named(task, capsys):
    rows = random_rows(8, seed=2)
    rows = [dict(row, weight=0.0) for row in rows[:4]] + rows[4:]
    out = printed(task, capsys, rows=rows, shuffle=False)
    assert "2 steps changed nothing" in out
    assert "no token carried loss: steps 1, 3\n" in out
    many = [dict(row, weight=0.0) for row in rows] * 3
    out = printed(task, capsys, rows=many, batch_size=2)
    assert "24 steps changed nothing" in out
    assert "steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …\n" in out
