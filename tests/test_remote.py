"""Runs whose files are at addresses, with a server of S3's protocol."""

import json
import os
import pathlib
import shutil
import socket
import time
from unittest import mock

import gcp_storage_emulator.server as gcs
import gcsfs
import keras
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

import keras_posttrain as kpt
from keras_posttrain import _cache, _remote
from keras_posttrain.callbacks import directories
from keras_posttrain.distill import checks as distill_checks
from keras_posttrain.training import preference_checks
from tests.distribution.test_processes import finish, start
from tests.support import REFERENCE, weights


@pytest.fixture(scope="module")
def server():
    """An S3 server in this process."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """The address of an empty bucket."""
    import boto3
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "TMPDIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(_cache.VARIABLE, str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(str(tmp_path))):x}"
    boto3.client("s3").create_bucket(Bucket=name)
    return f"s3://{name}"


def there(address):
    """Returns the files at an address, by their names."""
    fs, path = _remote._opened(address)
    fs.invalidate_cache()
    names = fs.find(path)
    return {name[len(path) + 1 :]: fs.cat_file(name) for name in names}


def put(address, content):
    fs, path = _remote._opened(address)
    fs.pipe_file(path, content)


@pytest.fixture(scope="module")
def task():
    return make_task()


def make_task():
    task = kpt.SFTTask.from_preset(
        REFERENCE / "models" / "llama3",
        sequence_length=64,
        lora=kpt.LoRA(rank=4),
    )
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    return task


ROWS = [{"text": f"{i} and {i + 1} make {2 * i + 1}."} for i in range(12)]


def callbacks(directory, **settings):
    return [
        kpt.callbacks.Checkpoint(directory, **settings),
        kpt.callbacks.MetricsLog(directory),
        kpt.callbacks.Report(directory),
    ]


class Response(gcs.Response):
    """One with a header that Google's storage sends, and TensorStore needs."""

    def __init__(self, handler):
        super().__init__(handler)
        self["x-goog-generation"] = "1"


@pytest.fixture
def google(monkeypatch):
    """The address of a bucket on a server of Google's protocol."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(gcs, "Response", Response)
    server = gcs.create_server(
        "127.0.0.1", port, in_memory=True, default_bucket="bucket"
    )
    server.start()
    for name, value in {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "GOOGLE_CLOUD_PROJECT": "project",
        "NO_GCE_CHECK": "true",
    }.items():
        monkeypatch.setenv(name, value)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield "gs://bucket"
    server.stop()


def lines(data):
    found = [json.loads(line) for line in data.splitlines()]
    for line in found:
        del line["tokens_per_second"]
    return found


class Ends(keras.callbacks.Callback):
    """Raises an error at a step."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self._model.step == self.step:
            raise KeyError("the machine")


def test_a_run_resumes_on_another_machine(bucket, tmp_path):
    """The first one has nothing that is not at the address."""
    settings = {"batch_size": 2, "epochs": 2, "verbose": 0}
    straight = make_task()
    straight.fit(ROWS, callbacks=callbacks(tmp_path / "run"), **settings)
    run = f"{bucket}/runs/1"
    first = callbacks(run, every=2)
    with pytest.raises(KeyError):
        make_task().fit(ROWS, callbacks=[*first, Ends(5)], **settings)
    assert not list(tmp_path.glob("keras_posttrain-*"))
    found = there(run)
    steps = {name.split("/")[1] for name in found if name[:5] == "check"}
    assert steps == {"2", "4"}
    assert lines(found["metrics.jsonl"])[-1]["step"] == 5
    resumed = make_task()
    logs = callbacks(run, every=2)
    resumed.fit(ROWS, callbacks=logs, **settings)
    found = there(run)
    expected = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert lines(found["metrics.jsonl"]) == lines(expected)
    assert b"<html" in found["report.html"]
    assert not list(tmp_path.glob("keras_posttrain-*"))
    one, two = weights(straight), weights(resumed)
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value, name)
    # Of steps that were removed nothing is left.
    steps = {name.split("/")[1] for name in found if name[:5] == "check"}
    assert steps == {"10", "12"}


class Begins(keras.callbacks.Callback):
    """Begins a run at an address, as another process does, after a step.

    The checkpoint of step 2 is there by then.
    """

    def __init__(self, step, address):
        super().__init__()
        self.step, self.address = step, address

    def on_train_batch_end(self, batch, logs=None):
        if self._model.step == self.step:
            last = f"checkpoints/2/{_remote.LAST}"
            while last not in there(self.address):
                time.sleep(0.05)
            with mock.patch.object(_remote, "_OWN", b"another process"):
                _remote.Owner(self.address).take()


def test_of_two_runs_at_an_address_the_last_one_writes(bucket):
    settings = {"batch_size": 2, "epochs": 2, "verbose": 0}
    run = f"{bucket}/run"
    logs = callbacks(run, every=2)
    with pytest.warns(UserWarning) as warned:
        with pytest.raises(RuntimeError, match=f"begun to write to '{run}'"):
            make_task().fit(
                ROWS, callbacks=[Begins(5, run), *logs], **settings
            )
    every = [str(one.message) for one in warned]
    [message] = [text for text in every if "Another run has begun" in text]
    assert "Its logs are in '/" in message
    found = there(run)
    steps = {name.split("/")[1] for name in found if name[:5] == "check"}
    assert "2" in steps and "6" not in steps
    # What it logged after that is not there, and can be found.
    assert lines(found["metrics.jsonl"])[-1]["step"] < 6
    # One that begins here later is the last, and of two processes that take
    # turns each notices the other.
    owner = _remote.Owner(run)
    owner.take()
    with mock.patch.object(_remote, "_OWN", b"another process"):
        _remote.Owner(run).take()
    with pytest.raises(_remote.OtherRun, match="use another address"):
        owner.check()
    resumed = make_task()
    resumed.fit(ROWS, callbacks=callbacks(run, every=2), **settings)
    assert resumed.step == 12
    assert lines(there(run)["metrics.jsonl"])[-1]["step"] == 12


def test_several_processes_resume_from_googles_storage(google, tmp_path):
    module = "tests.distribution.on_storage"
    run = f"{google}/run"
    started = start(tmp_path / "run", run, module=module, devices=2)
    for status, output in finish(started, tmp_path / "run"):
        assert status == 0 and output.endswith("done\n"), output[-4000:]
    found = there(run)
    steps = {name.split("/")[1] for name in found if name[:5] == "check"}
    assert steps == {"6", "8"}
    assert {"model/config.json", "model/model.safetensors"} <= set(found)
    expected = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert lines(found["metrics.jsonl"]) == lines(expected)


def test_a_checkpoint_that_was_not_copied_whole_is_none(bucket, tmp_path):
    mirror = _remote.Mirror(bucket, tmp_path / "one")
    for step in ("2", "4"):
        folder = mirror.folder / "checkpoints" / step
        folder.mkdir(parents=True)
        (folder / "state").write_text(step)
        (folder / _remote.LAST).write_text("{}")
    (mirror.folder / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    (mirror.folder / "checkpoints" / "6.orbax-checkpoint-tmp/state").touch()
    mirror.push()
    names = {
        f"checkpoints/{s}/{n}" for s in "24" for n in ("state", _remote.LAST)
    }
    assert set(there(bucket)) == names
    put(f"{bucket}/checkpoints/5/state", b"of a process that was killed")
    other = _remote.Mirror(bucket, tmp_path / "two")
    other.pull("checkpoints")
    found = {
        path.relative_to(other.folder).as_posix()
        for path in other.folder.rglob("*")
        if path.is_file()
    }
    assert found == names
    # What is removed here is removed there.
    (other.folder / "checkpoints/2/state").unlink()
    (other.folder / "checkpoints/4/state").write_text("another")
    other.push()
    found = there(bucket)
    assert "checkpoints/2/state" not in found
    assert found["checkpoints/4/state"] == b"another"


def test_a_checkpoint_may_be_removed_while_it_is_copied(bucket, tmp_path):
    mirror = _remote.Mirror(bucket, tmp_path / "one")
    for step in ("2", "4"):
        folder = mirror.folder / "checkpoints" / step
        folder.mkdir(parents=True)
        for name in ("a", "b", _remote.LAST):
            (folder / name).write_text(step)
    put, calls = mirror._fs.put, []

    def put_slowly(sources, targets):
        calls.append(sources)
        if len(calls) == 1:
            # One file is there when the others are removed.
            put(sources[:1], targets[:1])
            shutil.rmtree(mirror.folder / "checkpoints" / "2")
        put(sources, targets)

    with mock.patch.object(mirror._fs, "put", put_slowly):
        mirror.push()
    names = {f"checkpoints/4/{name}" for name in ("a", "b", _remote.LAST)}
    assert set(there(bucket)) == names and len(calls) == 3


def test_models_and_adapters(bucket, task, tmp_path):
    task.export(f"{bucket}/model")
    assert "model.safetensors" in there(f"{bucket}/model")
    rows = [{"text": "4 and 5 make 9."}]
    expected = task.log_probs(rows)
    loaded = kpt.SFTTask.from_preset(f"{bucket}/model", sequence_length=64)
    for one, two in zip(expected, loaded.log_probs(rows)):
        np.testing.assert_allclose(two, one, atol=1e-6)
    # An export of other shards replaces it.
    task.export(f"{bucket}/model", max_shard_bytes=10_000)
    found = there(f"{bucket}/model")
    assert "model.safetensors" not in found
    assert "model.safetensors.index.json" in found
    put(f"{bucket}/other/notes.txt", b"mine")
    with pytest.raises(ValueError, match=f"{bucket}/other") as error:
        task.export(f"{bucket}/other")
    assert str(tmp_path) not in str(error.value)
    assert there(f"{bucket}/other") == {"notes.txt": b"mine"}
    with pytest.raises(ValueError, match="other"):
        task.save_to_preset(f"{bucket}/other")

    task.save_adapter(f"{bucket}/adapter")
    found = set(there(f"{bucket}/adapter"))
    assert found == {"adapter_config.json", "adapter_model.safetensors"}
    other = make_task()
    other.load_adapter(f"{bucket}/adapter")
    for name, value in weights(task).items():
        np.testing.assert_array_equal(weights(other)[name], value)

    task.save_to_preset(f"{bucket}/preset")
    kpt.SFTTask.from_preset(f"{bucket}/preset")
    with pytest.raises(ValueError, match="Nothing could be read"):
        kpt.SFTTask.from_preset(f"{bucket}/nothing")


def test_states_of_a_loop(bucket, task):
    with kpt.Loop(task) as loop:
        loop.save_state(f"{bucket}/states/1")
    other = make_task()
    with kpt.Loop(other) as loop:
        loop.load_state(f"{bucket}/states/1")
        with pytest.raises(ValueError, match="Nothing could be read"):
            loop.load_state(f"{bucket}/states/2")
    for name, value in weights(task).items():
        np.testing.assert_array_equal(weights(other)[name], value)


def test_rows(bucket, task, monkeypatch):
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    put(f"{bucket}/rows-1.jsonl", text.encode())
    put(f"{bucket}/rows-2.jsonl", text.encode())
    expected = task.log_probs(ROWS + ROWS)
    copied, copy = [], _remote._copy
    monkeypatch.setattr(
        _remote, "_copy", lambda *args: copied.append(args) or copy(*args)
    )
    found = task.log_probs(f"{bucket}/rows-*.jsonl")
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)
    assert len(copied) == 2
    # Copied again where a file has changed.
    put(f"{bucket}/rows-2.jsonl", text.encode()[: text.index("\n") + 1])
    paths = [f"{bucket}/rows-1.jsonl", f"{bucket}/rows-2.jsonl"]
    assert len(task.log_probs(paths)) == len(ROWS) + 1
    assert len(copied) == 3
    with pytest.raises(ValueError, match="where there is no file"):
        task.log_probs(f"{bucket}/none-*.jsonl")
    # As a page of the web, with a signature.
    signed = _remote._opened(bucket)[0].sign(f"{bucket}/rows-1.jsonl")
    assert "?" in signed
    assert len(task.log_probs(signed)) == len(ROWS)


def test_earlier_copies_are_removed_after_a_day(bucket):
    put(f"{bucket}/a.txt", b"1")
    first = _remote.local_copy(f"{bucket}/a.txt")
    put(f"{bucket}/a.txt", b"22")
    second = _remote.local_copy(f"{bucket}/a.txt")
    assert first.read_bytes() == b"1" and second.read_bytes() == b"22"
    old = time.time() - _remote.DAY - 60
    os.utime(first.parent, (old, old))
    assert _remote.local_copy(f"{bucket}/a.txt") == second
    assert not first.exists() and second.exists()


def test_other_logs(bucket, tmp_path):
    task = kpt.GRPOTask.from_preset(
        REFERENCE / "models" / "llama3", sequence_length=32
    )
    task.compile(
        rewards=[lambda completions: [float(len(c)) for c in completions]],
        num_generations=2,
        max_completion_length=4,
    )
    task.fit(
        [{"prompt": "one"}, {"prompt": "two"}],
        batch_size=2,
        verbose=0,
        callbacks=[
            kpt.callbacks.CompletionsLog(f"{bucket}/lines"),
            kpt.callbacks.CompletionsLog(f"{bucket}/tables", format="parquet"),
            kpt.callbacks.TensorBoard(f"{bucket}/board"),
            kpt.callbacks.Trace(f"{bucket}/traces", (1, 1), profile=False),
        ],
    )
    found = sorted(there(bucket))
    assert found[0].startswith("board/events.out.tfevents")
    assert found[1:] == [
        "lines/completions.jsonl",
        found[2],
        "traces/trace/steps_1_1.json",
    ]
    assert found[2].startswith("tables/completions/")
    assert not list(tmp_path.glob("keras_posttrain-*"))


def test_reports_of_several_runs(bucket, tmp_path):
    log = "".join(
        json.dumps({"step": i, "loss": 1 / i}) + "\n" for i in (1, 2)
    )
    put(f"{bucket}/a/metrics.jsonl", log.encode())
    put(f"{bucket}/b/metrics.jsonl", log.encode())
    put(f"{bucket}/b/checkpoints/large", b"not copied")
    path = kpt.report([f"{bucket}/a", f"{bucket}/b"], tmp_path / "both.html")
    assert "<html" in path.read_text()
    assert not list(tmp_path.rglob("large"))
    with pytest.raises(ValueError, match="must have"):
        kpt.report(f"{bucket}/c", tmp_path / "both.html")


def test_storage_that_fails_loses_nothing(bucket, tmp_path):
    """A run continues, copies later, and says where its files are."""
    import boto3

    folder = directories.Folder(f"{bucket}/run")
    folder.begin("metrics.jsonl")
    (folder.path / "metrics.jsonl").write_text("1\n")
    client, name = boto3.client("s3"), bucket.removeprefix("s3://")
    client.delete_bucket(Bucket=name)
    with pytest.warns(UserWarning, match="are copied later"):
        folder.push()
    client.create_bucket(Bucket=name)
    folder.push()
    assert there(f"{bucket}/run") == {"metrics.jsonl": b"1\n"}
    assert folder.end() and not folder.path.exists()

    saver = kpt.callbacks.Checkpoint(f"{bucket}/run")
    saver._open()
    (saver.directory / "5").mkdir()
    (saver.directory / "5" / "state").write_text("1")
    fs, path = _remote._opened(f"{bucket}/run")
    fs.rm(path, recursive=True)
    client.delete_bucket(Bucket=name)
    with pytest.warns(UserWarning) as warned:
        with pytest.raises(OSError, match="could not be copied") as error:
            saver.close()
    assert "are copied later" in str(warned[0].message)
    # Without checkpoints that is all that a user learns.
    assert f"Copy them from {str(saver._folder.path)!r}" in str(
        warned[1].message
    )
    assert str(saver.directory) in str(error.value)
    assert (saver.directory / "5" / "state").exists()


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda b: kpt.callbacks.MetricsLog(pathlib.Path(f"{b}/run")),
            "string",
        ),
        # `str` of such a path.
        (lambda b: kpt.callbacks.Checkpoint("gs:/bucket/run"), "'gs://bucket"),
        (lambda b: make_task().export("s3:/bucket/x"), "'s3://bucket/x'"),
        (lambda b: kpt.callbacks.Checkpoint("s4://bucket/run"), "protocol"),
        (
            lambda b: kpt.callbacks.Report("s3://no-such-bucket/run"),
            "write to",
        ),
        (
            lambda b: kpt.sweep(lambda a, folder: {}, {"a": [1]}, f"{b}/s"),
            "this machine",
        ),
        (lambda b: directories.shared_path(b), "mounted bucket"),
        (lambda b: kpt.report(b, f"{b}/page.html"), "this machine"),
        (
            lambda b: preference_checks.reference_cache(b, None),
            "this machine",
        ),
        (
            lambda b: distill_checks.teacher_settings([], None, None, 1, b),
            "this machine",
        ),
        (
            lambda b: mock.patch.dict(os.environ, {_cache.VARIABLE: b})(
                _cache.directory
            )(),
            "folder of this machine",
        ),
        (lambda b: make_task().export("s3://no-such-bucket/x"), "write to"),
    ],
)
def test_what_cannot_be(bucket, call, message):
    with pytest.raises(ValueError, match=message):
        call(bucket)
    assert not [name for name in os.listdir() if name.startswith("s3")]
