"""Each completion is logged exactly once, even in interrupted runs."""

import functools
import json

import keras
import numpy as np
import pyarrow.parquet
import pytest

import keras_posttrain as kpt
from keras_posttrain.callbacks.completions_log import table_text
from keras_posttrain.training.run_state import RunState
from tests.support import REFERENCE, random_rows

CompletionsLog = kpt.callbacks.CompletionsLog


def rollout(step, prompt="1 + 1?"):
    """Returns a rollout of two completions as a task reports it."""
    return {
        "step": [step, step],
        "prompt": [prompt, "2 + 2?"],
        "completion": [f"two\n{step}", "\u56db"],
        "correct": [np.float32(1.0), None],
        "reward": np.array([1.0, np.nan], "float32"),
        "advantage": [0.5, -0.5],
        "finish_reason": ["stop", "length"],
    }


class Sampler(keras.callbacks.Callback):
    """Sets `last_rollout` like a task that samples."""

    def __init__(self, steps_per_rollout=1):
        super().__init__()
        self.steps_per_rollout = steps_per_rollout

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.step % self.steps_per_rollout == 0:
            self.model.last_rollout = rollout(self.model.step)


@functools.cache
def new_task():
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/llama3", sequence_length=64
    )
    task.compile(optimizer=keras.optimizers.SGD(1e-2))
    return task


def fit(directory, steps, start=0, steps_per_rollout=1, **kwargs):
    task = new_task()
    task.run_state = RunState(step=start)
    callbacks = [
        Sampler(steps_per_rollout),
        CompletionsLog(directory, **{"num_rows": 0, **kwargs}),
    ]
    rows = random_rows(2 * steps, seed=1)
    task.fit(rows, batch_size=2, verbose=2, callbacks=callbacks)
    return task


def lines(directory):
    text = (directory / "completions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def steps(directory):
    return [row["step"] for row in lines(directory)][::2]


def test_a_line_per_completion(tmp_path):
    fit(tmp_path, 2)
    rows = lines(tmp_path)
    assert rows[:2] == [
        {
            "step": 0,
            "prompt": "1 + 1?",
            "completion": "two\n0",
            "correct": 1.0,
            "reward": 1.0,
            "advantage": 0.5,
            "finish_reason": "stop",
        },
        {
            "step": 0,
            "prompt": "2 + 2?",
            "completion": "\u56db",
            "correct": None,
            "reward": None,
            "advantage": -0.5,
            "finish_reason": "length",
        },
    ]
    assert steps(tmp_path) == [0, 1]


def test_a_rollout_of_several_steps_is_written_once(tmp_path):
    fit(tmp_path, 5, steps_per_rollout=2)
    assert steps(tmp_path) == [0, 2, 4]


def test_every(tmp_path):
    fit(tmp_path, 7, every=3)
    assert steps(tmp_path) == [0, 3, 6]
    fit(tmp_path / "b", 8, steps_per_rollout=2, every=3)
    assert steps(tmp_path / "b") == [0, 4, 6]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path, format):
    def found():
        if format == "jsonl":
            return steps(tmp_path)
        names = sorted((tmp_path / "completions").iterdir())
        assert all(p.suffix == ".parquet" for p in names)
        return [int(p.stem) for p in names]

    fit(tmp_path, 4, format=format)
    assert found() == [0, 1, 2, 3]
    # Killed after step 4, resumed from the checkpoint of step 2.
    fit(tmp_path, 3, start=2, format=format)
    assert found() == [0, 1, 2, 3, 4]
    # Another run in the same directory moves the old log.
    fit(tmp_path, 1, format=format)
    assert found() == [0]
    if format == "jsonl":
        old = (tmp_path / "completions.jsonl.old").read_text()
        assert len(old.splitlines()) == 10
    else:
        assert len(list((tmp_path / "completions.old").iterdir())) == 5


def test_a_run_resumed_within_a_rollout_does_not_write_it_again(tmp_path):
    """Steps 2 and 3 train on the rollout of step 2; resumed after step 3,
    the task has that rollout from its checkpoint."""
    fit(tmp_path, 3, steps_per_rollout=2)
    task = new_task()
    log = CompletionsLog(tmp_path, num_rows=0)
    log.set_model(task)
    task.step, task.last_rollout = 3, rollout(2)
    log.on_train_begin()
    log.on_epoch_begin(0)
    log.on_train_batch_begin(0)
    log.on_train_batch_end(0)
    assert steps(tmp_path) == [0, 2]
    # A line that the kill prevented is written now.
    task.step, task.last_rollout = 5, rollout(4)
    log.on_train_batch_end(0)
    assert steps(tmp_path) == [0, 2, 4]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    fit(tmp_path, 2)
    with open(tmp_path / "completions.jsonl", "a") as file:
        file.write('{"step": 1, "prom')
    fit(tmp_path, 1, start=2)
    assert steps(tmp_path) == [0, 1, 2]


def test_parquet_files_read_as_one_table(tmp_path):
    task = new_task()
    messages = [{"role": "user", "content": "hi"}]
    log = CompletionsLog(tmp_path, num_rows=0, format="parquet")
    log.set_model(task)
    for step, prompt in ((0, "a"), (1, messages)):
        task.step, task.last_rollout = step, rollout(step, prompt)
        log.on_train_batch_begin(step)
    table = pyarrow.parquet.read_table(tmp_path / "completions")
    assert table["step"].to_pylist() == [0, 0, 1, 1]
    assert json.loads(table["prompt"].to_pylist()[2]) == messages
    assert table["reward"].to_pylist() == [1.0, None] * 2


def test_a_task_without_rollouts_writes_nothing(tmp_path):
    task = new_task()
    task.last_rollout = None
    task.fit(
        random_rows(2),
        batch_size=2,
        verbose=0,
        callbacks=[CompletionsLog(tmp_path)],
    )
    assert list(tmp_path.iterdir()) == []


def test_the_table_in_the_terminal(tmp_path, capsys):
    fit(tmp_path, 1, num_rows=1)
    out = capsys.readouterr().out
    assert "step 0, 1 of 2" in out
    assert "two\\n0" in out and "\u56db" not in out


def test_the_table_fits_and_shows_no_control_characters():
    table = rollout(3)
    table["prompt"] = ["x" * 300, "\x1b[31mred\tand\r"]
    table["completion"] = [[{"role": "assistant", "content": "y" * 300}], ""]
    text = table_text({**table, "reward": [1.25, None]}, 5, width=100)
    rows = text.split("\n")
    assert len(rows) == 4 and max(map(len, rows)) <= 100
    assert rows[1].split() == [n for n in table if n != "step"]
    assert "\x1b" not in text and "\\x1b[31mred\\tand\\r" in text
    assert "xxx…xxx" in rows[2] and 'y"}]' in rows[2]
    assert rows[2].split()[-4:] == ["1", "1.25", "0.5", "stop"]
    assert rows[3].split()[-4:] == ["-", "-", "-0.5", "length"]


def test_bad_settings(tmp_path):
    for kwargs, text in (
        ({"every": 0}, "`every` must be an int of at least 1"),
        ({"num_rows": -1}, "`num_rows` must be an int of at least 0"),
        ({"format": "csv"}, "format='csv'"),
    ):
        with pytest.raises(ValueError, match=text):
            CompletionsLog(tmp_path, **kwargs)
    task = new_task()
    task.step, task.last_rollout = 0, {"step": [1], "prompt": []}
    log = CompletionsLog(tmp_path)
    log.set_model(task)
    with pytest.raises(ValueError, match="lists of one length"):
        log.on_train_batch_end(0)
