"""Directories of runs: locked, and read whatever is in them."""

import json
import resource
import subprocess
import sys

import pytest
import tensorstore

import keras_posttrain as kpt
from keras_posttrain.callbacks.directories import advice
from tests.callbacks.train_script import fit, make_task
from tests.support import in_ci, starts_again

first_task = starts_again(make_task)
ROWS = [{"prompt_ids": [5], "completion_ids": [6]}]
HOLDER = """
import sys, time
from keras_posttrain.callbacks.directories import lock
for folder in sys.argv[1:]:
    lock(folder)
print("locked", flush=True)
time.sleep(600)
"""
# Each with the folder that it writes to, in the one that it is given.
CALLBACKS = {
    "MetricsLog": (kpt.callbacks.MetricsLog, "."),
    "CompletionsLog": (kpt.callbacks.CompletionsLog, "."),
    "Checkpoint": (kpt.callbacks.Checkpoint, "checkpoints"),
}


def test_two_runs_do_not_share_a_directory(tmp_path):
    folders = [tmp_path / name / x for name, (_, x) in CALLBACKS.items()]
    for folder in folders:
        folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDER, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            for name, (make, _) in CALLBACKS.items():
                task, logs = first_task(), [make(tmp_path / name)]
                with pytest.raises(ValueError, match="Another run writes to"):
                    task.fit(ROWS, verbose=0, callbacks=logs)
                assert task.step == 0, name
        finally:
            other.kill()
    for name, (make, _) in CALLBACKS.items():
        task = first_task()
        for _ in range(2):
            # The second one finds that the first has given it free.
            task.fit(ROWS, verbose=0, callbacks=[make(tmp_path / name)])
        assert task.step == (1 if name == "Checkpoint" else 2), name


LINES = [b"\xff\xfe\n", b"[]\n", b"{}\n", b"7\n", b'{"step": "1"}\n']
ALL = b"".join(LINES)


@pytest.mark.parametrize("line", in_ci(ALL, of=[*LINES, ALL]))
def test_a_log_with_other_lines_is_continued(line, tmp_path):
    """Lines that are no steps are left out."""
    fit(first_task(), tmp_path, epochs=1)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + path.read_bytes())
    fit(first_task(), tmp_path, epochs=2)
    steps = [json.loads(x)["step"] for x in path.read_text().splitlines()]
    assert steps == list(range(1, 13))


def test_a_finished_run_says_so(tmp_path, capsys):
    fit(first_task(), tmp_path, epochs=1)
    capsys.readouterr()
    fit(first_task(), tmp_path, epochs=1)
    out = capsys.readouterr().out
    assert "is finished, at step 6: nothing is trained" in out
    fit(first_task(), tmp_path, epochs=2)
    assert "is finished" not in capsys.readouterr().out


def test_a_directory_that_is_gone_is_called_so(tmp_path):
    assert "is gone" in advice(OSError(), tmp_path / "no")
    assert advice(OSError(28, "full"), tmp_path) == "Make room"
    assert advice(OSError(28, "full"), "gs://a/b") == "Look after the storage"


def test_a_full_disk_is_known_from_what_tensorstore_says(tmp_path):
    store = tensorstore.KvStore.open(f"file://{tmp_path}/").result()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(ValueError) as error:
            store.write("array", bytes(4096)).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert advice(error.value, tmp_path) == "Make room"
