"""The printed progress of a run."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain import _console
from keras_posttrain.callbacks import displays, progress
from keras_posttrain.callbacks.displays import Notebook, Status, columns
from keras_posttrain.training.run_state import RunState
from tests.support import REFERENCE, one_layer, random_rows
from tests.tasks import contract


@pytest.fixture(scope="module")
def task():
    task = kpt.SFTTask.from_preset(
        one_layer(REFERENCE / "models/llama3"), sequence_length=64
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
    r"epoch {epoch}/2 - step 3/3{total} - loss [\d.]+ - "
    r"mean_token_accuracy [\d.]+ - grad_norm [\d.]+ - learning_rate 0\.01 - "
    r"entropy [\d.]+ - [\d,]+ tokens/s"
)


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_a_line_per_epoch(task, capsys, verbose):
    report, *lines = printed(
        task, capsys, verbose=verbose, callbacks=[Slow()]
    ).splitlines()
    assert "10 rows" in report and "10 kept" in report
    assert len(lines) == 2
    # The first epoch's line has the time left for the second.
    first = LINE.format(epoch=1, total="") + r" - \ds left"
    assert re.fullmatch(first, lines[0]), lines[0]
    last = LINE.format(epoch=2, total=r" \(6 in all\)") + r" - \d+s elapsed"
    assert re.fullmatch(last, lines[1]), lines[1]


def test_lines_in_between_where_nothing_can_be_overwritten(
    task, capsys, monkeypatch
):
    """Printed by time, also while a step runs."""

    class Stuck(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self._model.step == 1:
                time.sleep(1.0)

    monkeypatch.setattr(progress, "TICK", 0.05)
    monkeypatch.setattr(displays, "LINE_INTERVAL", 0.3)
    out = printed(task, capsys, callbacks=[Stuck()], epochs=1)
    # The number of an only epoch is no news.
    between = [x for x in out.splitlines() if x.startswith("step 1/3 - loss")]
    assert 2 <= len(between) <= 4, out
    assert "\r" not in out


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


def test_validation_is_next_to_training(task, capsys):
    out = printed(
        task, capsys, verbose=2, epochs=1, validation_data=random_rows(4)
    )
    assert re.search(r" - loss [\d.]+ - val_loss [\d.]+ - ", out)
    assert "val_perplexity" in out


def test_a_second_fit_counts_its_own_steps(task, capsys):
    rows = random_rows(10, seed=2)
    printed(task, capsys)
    for end in (12, 18):
        task.fit(rows, batch_size=4, epochs=2, verbose=2)
        out = capsys.readouterr().out
        assert f"epoch 2/2 - step 3/3 ({end} in all)" in out
        assert f"epoch 1/2 - step 3/3 ({end - 3} in all)" in out


def test_a_resumed_run_begins_where_it_was(task, capsys, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self._model.step == 6:
                raise RuntimeError("stopped")

    class Recorder(displays.Lines):
        def update(self, status):
            shown.append((status.epoch, status.step, status.fraction))

    def fit(*callbacks):
        task.run_state = RunState()
        task.fit(
            random_rows(16, seed=2),
            batch_size=4,
            epochs=2,
            callbacks=[
                kpt.callbacks.Checkpoint(tmp_path, every=5),
                kpt.callbacks.Progress(display=Recorder()),
                *callbacks,
            ],
        )

    shown = []
    with pytest.raises(RuntimeError):
        fit(Stop())
    assert shown[0] == ("epoch 1/2", "step 0/4", 0.0)
    shown.clear()
    fit()
    assert shown[0] == ("epoch 2/2", "step 1/4", 0.25)
    # One display in all: that of `verbose` is left out.
    assert capsys.readouterr().out.count("epoch 2/2") == 1


def test_a_stream_has_no_bar(task, capsys):
    rows = random_rows(12, seed=2)
    out = printed(task, capsys, rows=lambda: iter(rows), epochs=1)
    line = next(x for x in out.splitlines() if x.startswith("step"))
    assert re.match(r"step 3 - loss .* elapsed$", line), line


def test_skipped_steps_are_named_at_once(task, capsys):
    rows = random_rows(8, seed=2)
    rows = [dict(row, weight=0.0) for row in rows[:4]] + rows[4:]
    out = printed(task, capsys, rows=rows, shuffle=False)
    lines = out.splitlines()
    # The first one before the epoch's line; all of them at the end.
    assert lines[1] == "step 1 changed nothing, since no token carried loss"
    assert lines[2].startswith("epoch 1/2")
    assert lines[-1] == (
        "2 steps changed nothing, since no token carried loss: steps 1, 3"
    )
    many = [dict(row, weight=0.0) for row in rows] * 3
    out = printed(task, capsys, rows=many, batch_size=2)
    assert out.count("changed nothing") == 2
    assert "24 steps changed nothing" in out and "skipped 24" in out
    assert "steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …\n" in out


def test_a_text_that_the_output_cannot_encode(task, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    _console.say("größe …")
    assert displays.drawn(0.5, 4) == "==--"
    out.flush()
    assert out.buffer.getvalue() == b"gr??e ?\n"


# The terminal

STATUS = Status(
    epoch="epoch 1/2",
    step="step 12/40",
    total="(52 in all)",
    fraction=0.3,
    metrics=[("reward", "0.4312"), ("loss", "0.01234"), ("kl", "0.01")],
    notes=["skipped 3"],
    time="1m20s left",
    activity="sampling 37/64, 12s",
)


@pytest.mark.parametrize(
    "width, line",
    [
        (4, "step"),
        (12, "step 12/40"),
        (24, "step 12/40 - 1m20s left"),
        (39, "step 12/40 - 1m20s left - reward 0.4312"),
        (
            79,
            "epoch 1/2 - step 12/40 - 1m20s left - reward 0.4312 - "
            "sampling 37/64, 12s",
        ),
        (
            119,
            "epoch 1/2 - step 12/40 ━━━━━━────────────── - 1m20s left - "
            "reward 0.4312 - loss 0.01234 - kl 0.01 - sampling 37/64, 12s",
        ),
    ],
)
def test_what_matters_most_has_room_first(width, line):
    assert STATUS.fitted(width) == line


def test_a_line_is_never_too_wide():
    for width in range(1, 200):
        assert columns(STATUS.fitted(width)) <= width
    wide = Status("epoch 1/2", "step 1/2", metrics=[("奖励", "0.5")] * 9)
    for width in range(30, 99):
        line = wide.fitted(width)
        assert columns(line) <= width and columns(line) > width - 14


def screen(raw, widths):
    """The lines that terminals of these widths show, by run.

    Asserts that none was filled to its end, where it would wrap.
    """
    shown, width = [], None
    for line in raw.replace("\r\n", "\n").split("\n"):
        text = ""
        for part in line.split("\r"):
            # A part overwrites the one before, and erases what is behind it.
            text = part.removeprefix("\033[K").removesuffix("\033[K")
            assert "\033" not in text
            # The reports of the data may wrap.
            if width and " - " in text or "changed nothing" in text:
                assert columns(text) < max(width, 80), (width, text)
            if " left" in text or " elapsed" in text:
                assert columns(text) < width, (width, text)
        if text.startswith("width "):
            width = int(text.removeprefix("width "))
            shown.append([])
        elif shown:
            shown[-1].append(text)
    assert len(shown) == len(widths)
    return shown


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_terminals_of_40_80_and_200_columns():
    """In a real terminal: rows, then rollouts."""
    widths = ["40", "80", "200"]
    main, worker = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.callbacks.printed_runs", "terminal"]
        + widths,
        stdout=worker,
        stderr=subprocess.PIPE,
        cwd=REFERENCE.parent.parent,
        env={**env, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(worker)
    raw = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        raw += part
    os.close(main)
    _, err = process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    raw = raw.decode()
    narrow, usual, wide = screen(raw, widths)
    for lines in (narrow, usual, wide):
        text = "\n".join(lines)
        assert len(re.findall("step 6/6", text)) == 3, text
        assert re.search(r"step \d+ changed nothing, since no token", text)
        assert "4 steps changed nothing" in text
        assert re.search("step 6/6 .*reward", text)
        # Nothing else is left on the screen.
        assert all(
            re.match(r"(epoch \d/2 - )?step |\w+: |4 steps|NativeRollout|$", x)
            for x in lines
        ), text
    first = [next(x for x in y if "step 6/6" in x) for y in (usual, wide)]
    assert all("━━━━" in x and "val_loss" in x for x in first)
    assert "mean_token_accuracy" in first[1]
    # What takes long is named.
    assert "scoring" in raw and "compiling" in raw


def test_what_a_rollout_is_doing(monkeypatch):
    class Recorder(displays.Lines):
        def update(self, status):
            shown.add(status.activity)

    def slow(completions):
        time.sleep(0.2)
        return contract.odd(completions)

    shown = set()
    monkeypatch.setattr(progress, "TICK", 0.01)
    task = contract.make(
        contract.TASKS["grpo"],
        keras.optimizers.SGD(1e-3),
        compiled={"rewards": [slow]},
    )
    rows = contract.PROMPTS[:2]
    task.fit(
        rows,
        batch_size=2,
        validation_data=rows,
        callbacks=[kpt.callbacks.Progress(display=Recorder())],
    )
    names = {re.sub(r"\d+/|, .*", "", x) for x in shown if x}
    assert names >= {"sampling 8", "scoring", "preparing batches", "training"}


# The notebook


class Cells:
    """Keeps what a notebook would show."""

    def __init__(self, bundle):
        self.bundles = [bundle]

    def update(self, bundle):
        self.bundles.append(bundle)


def test_a_notebook_shows_a_table(task, capsys, monkeypatch):
    made = []

    def display(bundle):
        made.append(Cells(bundle))
        return made[-1]

    monkeypatch.setattr(progress, "INTERVAL", 0.1)
    shown = kpt.callbacks.Progress(display=Notebook(display))
    rows = random_rows(10, seed=2)
    printed(task, capsys, rows, [shown, Slow()], validation_data=rows[:2])
    # One cell, updated in place.
    (cells,) = made
    assert len(cells.bundles) > 4
    last = cells.bundles[-1]["text/html"]
    names = re.findall("<th>(.*?)</th>", last)
    assert names[:4] == ["step", "loss", "val_loss", "mean_token_accuracy"]
    (head, *body) = re.findall("<tr>(.*?)</tr>", last)
    assert len(body) == 2 and "epoch 2/2, step 3/3" in body[-1]
    assert "<progress max='1' value='1.0000'>" in last
    assert "val_loss" in cells.bundles[-1]["text/plain"]
    # A reward may have any name.
    odd = Status("", "step 1", metrics=[("<script>", "1")])
    Notebook(display).update(odd)
    assert "<script>" not in made[-1].bundles[0]["text/html"]


# Silence


def test_verbose_0_writes_nothing(tmp_path):
    """To neither stream, at the file descriptors, in every task."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.printed_runs", "silent"]
        + [str(tmp_path)],
        cwd=REFERENCE.parent.parent,
    )
    for name in contract.TASKS:
        assert (tmp_path / name).read_text() == "", name
    assert done.returncode == 0
