"""Trackers get what `metrics.jsonl` has, and never end a run."""

import importlib
import math
import struct
import threading
import time

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain.callbacks import tracker
from tests.callbacks.test_report import fit_rows
from tests.support import random_rows, read_log


class Listed(tracker.Tracker):
    """A tracker that keeps what it is given."""

    package = "json"

    def __init__(self, fails=None):
        super().__init__()
        self.fails, self.calls = fails, []

    def _note(self, name, *args):
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append((name, *args))
        if self.fails == name:
            raise ConnectionError("no route to host")

    def _open(self, settings, step):
        self._note("open", settings, step)

    def _log(self, step, values):
        self._note("log", step, values)

    def _finish(self, status):
        self._note("finish", status)

    def by_step(self):
        return {c[1]: c[2] for c in self.calls if c[0] == "log"}


def check(found, log, name=str):
    """Compares what a tracker has, dicts by step, with the log."""
    assert sorted(found) == [line["step"] for line in log]
    for line in log:
        step = line.pop("step")
        wanted = {name(k): v for k, v in line.items() if v is not None}
        values = found[step]
        assert wanted.keys() <= values.keys()
        for key, value in wanted.items():
            if key != "tokens_per_second":
                # TensorBoard keeps 32 bits.
                assert values[key] == pytest.approx(value, 1e-6), key


def test_names_and_values_are_those_of_the_log(tmp_path):
    listed = Listed()
    fit_rows(
        listed,
        kpt.callbacks.MetricsLog(tmp_path),
        epochs=2,
        validation_data=random_rows(4, seed=5),
    )
    kinds = [c[0] for c in listed.calls]
    assert kinds[0] == "open" and listed.calls[-1] == ("finish", "finished")
    assert listed.calls[0][1]["task"] == "SFTTask"
    logs = [c for c in listed.calls if c[0] == "log"]
    held_out = [c for c in logs if "val_loss" in c[2]]
    assert [c[1] for c in held_out] == [3, 6]
    check({c[1]: c[2] for c in logs if c not in held_out}, read_log(tmp_path))


def test_what_is_not_finite_is_left_out():
    assert tracker._finite({"a": math.nan, "b": 1.0, "c": math.inf}) == {
        "b": 1.0
    }


@pytest.mark.parametrize("when", ["open", "log", "finish"])
def test_a_tracker_that_fails_never_stops_a_run(when):
    listed = Listed(when)
    with pytest.warns(UserWarning, match="no route to host") as found:
        assert fit_rows(listed, epochs=2).step == 6
    # What compiles first may bring NumPy's warnings on arrays of Keras.
    assert len([w for w in found if w.category is UserWarning]) == 1


def test_one_that_does_not_answer_holds_nothing_up(monkeypatch):
    class Hangs(Listed):
        def _log(self, step, values):
            time.sleep(5)

    monkeypatch.setattr(tracker, "PATIENCE", 0.2)
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="not answered"):
        assert fit_rows(Hangs()).step == 3
    assert time.perf_counter() - start < 4


def test_how_a_run_ended_and_resumed(tmp_path):
    """Tokens are counted over both parts, as in the log."""

    class Stop(keras.callbacks.Callback):
        reads_step_logs = True

        def on_train_batch_end(self, batch, logs=None):
            if self._model.step == 4:
                raise KeyboardInterrupt

    def fit(*more):
        listed = Listed()
        fit_rows(
            listed,
            kpt.callbacks.MetricsLog(tmp_path),
            kpt.callbacks.Checkpoint(tmp_path, every=2),
            *more,
            epochs=2,
        )
        return listed

    first = Listed()
    with pytest.raises(KeyboardInterrupt):
        fit(first, Stop())
    assert first.calls[-1] == ("finish", "failed")
    second = fit()
    assert second.calls[0][2] == 2
    check({**first.by_step(), **second.by_step()}, read_log(tmp_path))


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(kpt.callbacks.WandB, "package", "no_such_package")
    with pytest.raises(ImportError, match="pip install no_such_package"):
        kpt.callbacks.WandB("x")


def records(folder):
    """The events of TensorBoard's files: length, checksum, data, checksum."""
    proto = importlib.import_module("tensorboardX.proto.event_pb2")
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = proto.Event()
            event.ParseFromString(data[12 : 12 + size])
            data = data[16 + size :]
            yield event


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    fit_rows(
        kpt.callbacks.TensorBoard(tmp_path / "tb"),
        kpt.callbacks.MetricsLog(tmp_path),
    )
    found = {}
    for event in records(tmp_path / "tb"):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                of_step = found.setdefault(event.step, {})
                of_step[value.tag] = value.simple_value
    check(found, read_log(tmp_path))


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    # The skinny package has this store alone.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    client = mlflow.MlflowClient(uri)
    fit_rows(
        kpt.callbacks.MLflow("test", uri),
        kpt.callbacks.MetricsLog(tmp_path),
    )
    experiment = client.get_experiment_by_name("test")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["task"] == "SFTTask"
    assert run.info.status == "FINISHED"
    found = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            found.setdefault(point.step, {})[name] = point.value
    check(found, read_log(tmp_path))


def test_wandb(tmp_path):
    pytest.importorskip("wandb")

    class Kept(kpt.callbacks.WandB):
        def _finish(self, status):
            self.summary = dict(self._run.summary)
            super()._finish(status)

    callback = Kept("test", mode="offline", dir=str(tmp_path))
    fit_rows(callback, kpt.callbacks.MetricsLog(tmp_path))
    # Its client keeps a step until the next one begins.
    line = read_log(tmp_path)[-2]
    summary = callback.summary
    for name in ("loss", "grad_norm", "num_tokens"):
        assert summary[name] == pytest.approx(line[name], 1e-6)
    assert callback._run.config["task"] == "SFTTask"
    assert list(tmp_path.rglob("*.wandb"))


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    fit_rows(
        kpt.callbacks.Trackio("test", name="one"),
        kpt.callbacks.MetricsLog(tmp_path),
    )
    (run,) = trackio.Api().runs("test")
    assert run.name == "one"
