"""`metrics.jsonl` has a line per step with the values of that step."""

import json

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.training.keras_fit import RowRun
from keras_posttrain.training.run_state import RunState
from tests.support import REFERENCE, random_rows, read_log

NAMES = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "entropy",
    "mean_token_accuracy",
    "skipped",
    "tokens_per_second",
]


class Reader(keras.callbacks.Callback):
    """A user's callback that reads the logs of each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))


@pytest.fixture(scope="module")
def task():
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models/llama3", sequence_length=64
    )
    task.compile(optimizer=keras.optimizers.SGD(1e-2))
    return task


def fit(task, *callbacks, rows=None, **kwargs):
    kwargs = {"batch_size": 4, "verbose": 0, **kwargs}
    rows = random_rows(10, seed=2) if rows is None else rows
    return task.fit(rows, callbacks=list(callbacks), **kwargs)


def rerun(task):
    task.run_state = RunState()


def test_a_line_per_step_with_the_values_of_that_step(task, tmp_path):
    rerun(task)
    reader = Reader()
    rows = random_rows(10, seed=2)
    fit(
        task,
        kpt.callbacks.MetricsLog(tmp_path),
        reader,
        rows=rows,
        epochs=2,
        shuffle=False,
    )
    lines = read_log(tmp_path)
    assert [list(line) for line in lines] == [NAMES] * 6
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    lengths = [len(row["token_ids"]) for row in rows]
    batches = [sum(lengths[i : i + 4]) for i in (0, 4, 8)] * 2
    assert [x["num_tokens"] for x in lines] == np.cumsum(batches).tolist()
    assert len(reader.seen) == 6
    for line, logs, tokens in zip(lines, reader.seen, batches):
        assert logs["num_tokens"] == tokens
        assert line["skipped"] == 0 and line["tokens_per_second"] > 0
        assert line["learning_rate"] == np.float32(1e-2)
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy"):
            assert line[name] == logs[name]
    assert len({line["loss"] for line in lines}) == 6


def test_the_values_are_no_running_means(task, tmp_path):
    """A run on one batch gives the same line as that batch in a run."""
    rerun(task)
    rows = random_rows(8, seed=4)
    start = task.get_weights()
    log = kpt.callbacks.MetricsLog(tmp_path / "all")
    task.optimizer.learning_rate = 0.0
    fit(task, log, rows=rows, shuffle=False)
    for i in (0, 1):
        rerun(task)
        log = kpt.callbacks.MetricsLog(tmp_path / str(i))
        part = rows[4 * i : 4 * i + 4]
        fit(task, log, rows=part, shuffle=False)
    task.optimizer.learning_rate = 1e-2
    for x, y in zip(start, task.get_weights()):
        np.testing.assert_array_equal(x, y)
    both = read_log(tmp_path / "all")
    for i in (0, 1):
        (line,) = read_log(tmp_path / str(i))
        for name in ("loss", "grad_norm", "entropy"):
            assert line[name] == both[i][name]


def test_what_is_not_finite_is_null(task, tmp_path):
    class Broken(kpt.losses.TokenLoss):
        def token_loss(self, logps):
            return logps * float("inf")

    broken = kpt.SFTTask(task.causal_lm, sequence_length=64)
    broken.compile(optimizer=keras.optimizers.SGD(0.1), loss=Broken())
    fit(broken, kpt.callbacks.MetricsLog(tmp_path), rows=random_rows(4))
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads(text, parse_constant=refuse)
    assert line["loss"] is None and line["grad_norm"] is None
    assert line["skipped"] == 1


def test_a_new_run_moves_an_old_ones_lines(task, tmp_path):
    for _ in range(2):
        rerun(task)
        fit(task, kpt.callbacks.MetricsLog(tmp_path))
        assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]
    old = (tmp_path / "metrics.jsonl.old").read_text().splitlines()
    assert [json.loads(line)["step"] for line in old] == [1, 2, 3]
    assert (
        json.loads(old[-1])["num_tokens"]
        == read_log(tmp_path)[-1]["num_tokens"]
    )


def test_two_fits_in_a_row_are_one_log(task, tmp_path):
    rerun(task)
    log = kpt.callbacks.MetricsLog(tmp_path)
    fit(task, log)
    first = read_log(tmp_path)
    fit(task, kpt.callbacks.MetricsLog(tmp_path))
    fit(task, log)
    lines = read_log(tmp_path)
    assert lines[:3] == first
    assert [line["step"] for line in lines] == list(range(1, 10))
    tokens = first[-1]["num_tokens"]
    assert lines[5]["num_tokens"] == 2 * tokens
    assert lines[8]["num_tokens"] == 3 * tokens


def test_a_half_written_line_is_dropped(task, tmp_path):
    """A crash after a checkpoint's last step leaves such a line."""
    rerun(task)
    fit(task, kpt.callbacks.MetricsLog(tmp_path))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    task.step = 2
    fit(task, kpt.callbacks.MetricsLog(tmp_path), rows=random_rows(4))
    after = path.read_text().splitlines(keepends=True)
    assert after[:2] == lines[:2]
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3]


def test_lines_of_repeated_steps_are_dropped(task, tmp_path):
    rerun(task)
    fit(task, kpt.callbacks.MetricsLog(tmp_path), epochs=2)
    first = read_log(tmp_path)
    task.step = 4
    fit(task, kpt.callbacks.MetricsLog(tmp_path), rows=random_rows(4))
    lines = read_log(tmp_path)
    assert lines[:4] == first[:4]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[4]["num_tokens"] == lines[3]["num_tokens"] + sum(
        len(row["token_ids"]) for row in random_rows(4)
    )


def test_the_lines_before_a_checkpoint_are_on_the_disk(task, tmp_path):
    """After an error, the lines of all steps are on the disk."""

    class Look(keras.callbacks.Callback):
        counts = []

        def flush(self):
            # `Checkpoint` calls this on every callback before it saves.
            self.counts.append(len(read_log(tmp_path)))

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.step == 3:
                raise KeyboardInterrupt

    rerun(task)
    log = kpt.callbacks.MetricsLog(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(
            task,
            log,
            Look(),
            kpt.callbacks.Checkpoint(tmp_path, every=2),
            Fail(),
        )
    assert Look.counts == [2]
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3]


def test_evaluating_writes_nothing(task, tmp_path):
    rerun(task)
    fit(task, kpt.callbacks.MetricsLog(tmp_path))
    before = (tmp_path / "metrics.jsonl").read_text()
    rows = random_rows(4)
    for directory in (tmp_path, tmp_path / "other"):
        log = kpt.callbacks.MetricsLog(directory)
        task.evaluate(rows, batch_size=4, callbacks=[log])
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_a_full_disk_is_reported(task, tmp_path):
    rerun(task)
    log = kpt.callbacks.MetricsLog(tmp_path)
    full = open("/dev/full", "w")

    class Fill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self._model.step == 2:
                log._file.close()
                log._file = full

    with pytest.raises(OSError, match="line of step 2.*No space.*Make room"):
        fit(task, log, Fill())
    rerun(task)
    task.step = 1
    fit(task, kpt.callbacks.MetricsLog(tmp_path))
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3, 4]


# Logs that steps return


def handed_out(task, *callbacks):
    """Records the logs that the train function returns to Keras."""
    seen, make = [], RowRun.train_function

    def watched(run, program):
        train_function = make(run, program)

        def recording(state, iterator):
            logs, state = train_function(state, iterator)
            seen.append(logs)
            return logs, state

        return recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowRun, "train_function", watched)
        fit(task, *callbacks, verbose=1)
    return seen


def test_nothing_waits_for_a_step_that_nobody_reads(task, tmp_path):
    """Keras converts its logs to numbers, which waits for the step."""
    rerun(task)
    callbacks = [
        kpt.callbacks.MetricsLog(tmp_path),
        kpt.callbacks.Checkpoint(tmp_path),
        keras.callbacks.EarlyStopping(monitor="loss"),
        keras.callbacks.CSVLogger(tmp_path / "epochs.csv"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]
    assert handed_out(task, *callbacks) == [{}, {}, {}]


def test_a_callback_that_reads_steps_gets_floats(task):
    class Old(keras.callbacks.Callback):
        seen = []

        def on_batch_end(self, batch, logs=None):
            self.seen.append(dict(logs))

    class OwnLog(kpt.callbacks.Progress):
        """A subclass inherits `reads_step_logs`."""

        seen = []

        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            self.seen.append(dict(logs))

    plain, seen = Reader(), []
    for callback, read in (
        (plain, plain.seen),
        (Old(), Old.seen),
        (OwnLog(), OwnLog.seen),
        (
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: seen.append(dict(logs))
            ),
            seen,
        ),
    ):
        fit(task, callback)
        assert len(read) == 3
        for logs in read:
            assert set(logs) >= {"loss", "grad_norm", "num_tokens"}
            assert all(isinstance(x, float) for x in logs.values())
