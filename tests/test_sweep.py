"""`kpt.sweep`: its points, its table, and sweeps that are killed."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import read_log

ROOT = pathlib.Path(__file__).parent.parent
MODEL = ROOT / "tests" / "reference" / "models" / "qwen3"
ROWS = [{"prompt": f"is {n} a number?", "completion": " yes"} for n in "1234"]
GRID = {"learning_rate": [1e-3, 1e-2], "rank": [2, 4]}
# That of the third of four points.
KILLED_AT = (1e-2, 2, 5)


class Kill(keras.callbacks.Callback):
    """Kills this process, at one step of one point."""

    def __init__(self, learning_rate, rank):
        super().__init__()
        self.at = learning_rate, rank

    def on_train_batch_end(self, batch, logs=None):
        if (*self.at, self.model.step) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(learning_rate, rank, folder, callbacks=()):
    task = kpt.SFTTask.from_preset(
        MODEL, lora=kpt.LoRA(rank=rank), sequence_length=32
    )
    task.compile(keras.optimizers.AdamW(learning_rate))
    history = task.fit(
        ROWS,
        batch_size=2,
        epochs=4,
        verbose=0,
        callbacks=[
            kpt.callbacks.Checkpoint(folder, every=1),
            kpt.callbacks.MetricsLog(folder),
            *callbacks,
        ],
    )
    return task, history


def run(learning_rate, rank, folder):
    task, _ = fitted(learning_rate, rank, folder)
    return task.evaluate(ROWS, verbose=0)


def run_killed(learning_rate, rank, folder):
    kill = Kill(learning_rate, rank)
    task, _ = fitted(learning_rate, rank, folder, [kill])
    return task.evaluate(ROWS, verbose=0)


def killed_sweep(directory):
    """Returns the exit status of a process whose sweep kills it."""
    code = (
        "from tests import test_sweep as t\n"
        "t.kpt.sweep(t.run_killed, t.GRID, sys.argv[1])"
    )
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).returncode


def without_time(log):
    return [
        {k: v for k, v in line.items() if k != "tokens_per_second"}
        for line in log
    ]


def test_a_killed_sweep_goes_on_and_gives_the_table(tmp_path, capfd):
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    assert killed_sweep(killed) == -signal.SIGKILL
    finished = sorted(p.parent.name for p in killed.glob("*/result.json"))
    assert finished == ["learning_rate=0.001,rank=2",
                        "learning_rate=0.001,rank=4"]  # fmt: skip
    times = {p: p.stat().st_mtime_ns for p in killed.glob("*/result.json")}
    third = killed / "learning_rate=0.01,rank=2"
    assert [line["step"] for line in read_log(third)] == [1, 2, 3, 4]
    capfd.readouterr()

    table = kpt.sweep(run, GRID, killed)
    shown = capfd.readouterr().out
    assert "2 of 4 points are finished." in shown
    assert "another version of the function" in shown
    assert {p: p.stat().st_mtime_ns for p in times} == times
    want = kpt.sweep(run, GRID, straight, verbose=0)
    assert capfd.readouterr().out == ""
    assert len(table) == 4 and str(table) == str(want)
    for ours, theirs in zip(table.rows, want.rows):
        for name in ("settings", "metrics", "status", "count"):
            assert ours[name] == theirs[name]
        logs = [without_time(read_log(r["folder"])) for r in (ours, theirs)]
        assert logs[0] == logs[1] and len(logs[0]) == 8
    for name in ("table.md", "table.csv"):
        assert (killed / name).read_text() == (straight / name).read_text()
    page = (killed / "sweep.html").read_text()
    assert "learning_rate=0.01, rank=2" in page
    # The order of settings does not matter.
    more = kpt.sweep(run, {"rank": [4], "learning_rate": [1e-2]}, straight)
    assert [r["metrics"] for r in more.rows] == [want.rows[3]["metrics"]]
    assert "Point" not in capfd.readouterr().out


def losses(values):
    """Returns a function whose result is one of a list, in its order."""
    calls = iter(values)

    def f(x, folder):
        (folder / "was_here").touch()
        found = next(calls)
        if isinstance(found, Exception):
            raise found
        return {"loss": found}

    return f


def test_a_point_that_fails_is_tried_again(tmp_path, capsys):
    grid = {"x": [1, 2, 3]}
    values = [0.3, FloatingPointError("no\nnumber"), np.float32(0.25)]
    table = kpt.sweep(losses(values), grid, tmp_path)
    shown = capsys.readouterr().out
    assert "FloatingPointError: no" in shown and "Traceback" in shown
    assert [r["status"] for r in table.rows] == ["done", "failed", "done"]
    assert table.rows[1]["error"] == "FloatingPointError: no\nnumber"
    assert table.best("loss")["settings"] == {"x": 3}
    assert "failed: FloatingPointError: no |" in table.to_markdown()
    table = kpt.sweep(losses([0.1]), grid, tmp_path)
    assert [r["metrics"]["loss"] for r in table.rows] == [0.3, 0.1, 0.25]
    assert table.to_csv().splitlines()[2] == "2,0.1,1,done"
    assert "another version" not in capsys.readouterr().out


def test_a_mistake_of_the_script_ends_it(tmp_path):
    calls = [ValueError("a"), FloatingPointError("a"), FloatingPointError("a")]
    calls += [ValueError("a"), ValueError("b"), ValueError("b"), None]
    function = losses(calls)
    with pytest.raises(ValueError, match="b") as error:
        kpt.sweep(function, {"x": list(range(7))}, tmp_path, verbose=0)
    assert "Two points in a row" in error.value.__notes__[0]
    assert len(list(tmp_path.glob("*/result.json"))) == 6


def test_what_is_returned(tmp_path):
    for found in (None, {}, {"loss": "low"}, [1.0]):
        values = [lambda x, folder, found=found: found][0]
        table = kpt.sweep(values, {"x": [1]}, tmp_path, verbose=0)
        assert "must return a dict of numbers" in table.rows[0]["error"]
    table = kpt.sweep(losses([math.inf]), {"x": [1]}, tmp_path, verbose=0)
    result = json.loads((tmp_path / "x=1" / "result.json").read_text())
    assert result["metrics"] == {"loss": None}
    with pytest.raises(ValueError, match="with a finite value"):
        table.best("loss")


def test_a_history_is_its_last_epoch(tmp_path):
    def run(learning_rate, folder):
        task, history = fitted(learning_rate, 2, folder)
        return history

    grid = {"learning_rate": [1e-2]}
    [row] = kpt.sweep(run, grid, tmp_path, verbose=0).rows
    last = read_log(row["folder"])[-2:]
    assert row["metrics"]["loss"] == pytest.approx(
        sum(line["loss"] for line in last) / 2, rel=1e-5
    )
    # Killed between the end of `fit` and the result.
    (row["folder"] / "result.json").unlink()
    assert kpt.sweep(run, grid, tmp_path, verbose=0).rows == [row]


def test_a_choice_of_points(tmp_path):
    grid = {"a": np.array([0.5, 1.0]), "b": {"x y": abs, "1": max}, "c": [1]}
    seen = []

    def run(a, b, folder, c=None):
        seen.append((a, b, folder.name, np.random.rand()))
        return {"reward": a}

    table = kpt.sweep(run, grid, tmp_path, num_samples=3, verbose=0)
    again = kpt.sweep(run, grid, tmp_path, num_samples=3, verbose=0)
    assert len(seen) == 3 and table.rows == again.rows
    kpt.sweep(run, grid, tmp_path, verbose=0)
    assert len(seen) == 4 and len({name for _, _, name, _ in seen}) == 4
    assert {b for _, b, _, _ in seen} == {abs, max}
    assert len({number for _, _, _, number in seen}) == 1
    assert table.best("reward")["settings"]["a"] == 1.0


def test_means_over_seeds(tmp_path):
    values = [1.0, 3.0, 5.0, FloatingPointError()]
    function = losses(values)

    def run(seed, rate, folder):
        return function(seed, folder)

    grid = {"rate": [0.1, 0.2], "seed": [0, 1]}
    table = kpt.sweep(run, grid, tmp_path, verbose=0).mean_over("seed")
    first, second = table.rows
    assert first["settings"] == {"rate": 0.1} and first["count"] == 2
    # The spread of 1 and 3 is the square root of 2.
    assert first["metrics"] == {"loss": 2.0, "loss/stderr": pytest.approx(1)}
    assert second["metrics"] == {"loss": 5.0} and second["count"] == 1
    assert str(table).splitlines() == [
        "rate  loss  loss/stderr  count  status",
        " 0.1     2            1      2    done",
        " 0.2     5            -      1    done",
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"grid": {}}, "`grid` must be a dict"),
        ({"grid": {"x": 1}}, "with a list of values"),
        ({"grid": {"x": []}}, "with a list of values"),
        ({"grid": {"x": [abs]}}, "Give other values names by a dict"),
        ({"grid": {"x": [1, 1]}}, "must differ"),
        ({"grid": {"x": [1], "folder": [1]}}, "'folder' cannot be"),
        ({"grid": {"y": [1]}}, "def f\\(y, folder\\)"),
        ({"function": 3}, "`function` must be a function"),
        ({"num_samples": 3}, "from 1 to the number of points of the grid, 2"),
        ({"seed": -1}, "`seed` must be an int"),
        ({"directory": ""}, "`directory` must be the path of a folder"),
    ],
)
def test_what_is_refused(tmp_path, arguments, message):
    given = {"function": losses([]), "grid": {"x": [1, 2]}}
    given |= {"directory": tmp_path / "sweep"} | arguments
    with pytest.raises(ValueError, match=message):
        kpt.sweep(**given)
    assert not (tmp_path / "sweep").exists()


def test_metrics_without_a_direction_need_a_mode(tmp_path):
    table = kpt.sweep(losses([1.0, 2.0]), {"x": [1, 2]}, tmp_path, verbose=0)
    assert table.best("loss", mode="max")["settings"] == {"x": 2}
    with pytest.raises(ValueError, match='`mode` must be "min" or "max"'):
        table.best("entropy")
    with pytest.raises(ValueError, match=r"\['loss'\]"):
        table.best("reward")


def test_one_process_sweeps_in_a_directory(tmp_path):
    code = (
        "import sys, fcntl, os\n"
        "f = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(f, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match="Another run writes"):
            kpt.sweep(losses([]), {"x": [1]}, tmp_path)
        other.stdin.close()
