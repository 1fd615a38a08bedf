"""Runs of every task that signals end at random, and that start again.

The whole file sends 100 times SIGKILL, 18 times SIGINT and SIGTERM each.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.tasks import contract

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [*contract.TASKS, "grpo_ahead", "grpo_episodes"]
KILLS = 11 * [signal.SIGKILL] + 2 * [signal.SIGINT] + 2 * [signal.SIGTERM]
# Names a run to the processes that it starts.
MARK = "KERAS_POSTTRAIN_TEST_RUN"
# In CI, of one task.
IN_CI = [signal.SIGKILL]


def start(name, directory, cache=None):
    """Starts a run; one that is to be killed needs a cache of its own."""
    directory.mkdir(exist_ok=True)
    script = str(ROOT / "tests/tasks/killed_script.py")
    with (directory / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, script, name, str(directory)],
            cwd=ROOT,
            env=os.environ
            | {
                MARK: str(directory),
                "PYTHONPATH": str(ROOT),
                # A kill can leave an incomplete program in the cache.
                **({"JAX_COMPILATION_CACHE_DIR": str(cache)} if cache else {}),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def count_of(word, directory):
    return (directory / "output.txt").read_text().count(word)


def finish(process, directory):
    code = process.wait(600)
    assert code == 0, (directory / "output.txt").read_text()[-4000:]
    with np.load(directory / "final.npz") as file:
        return dict(file)


def processes_of(directory):
    """The ids of the processes that a run has started, and its own."""
    mark, found = f"{MARK}={directory}".encode(), []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def interrupt(process, directory, number, rng):
    """Sends a signal at a random moment, once the run has begun.

    Returns:
        Whether the run was going on, and that signal ended it.
    """
    starts, end = count_of("begun", directory), time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        if count_of("begun", directory) > starts:
            break
        time.sleep(0.005)
    time.sleep(rng.uniform(0, 1))
    in_time = process.poll() is None
    process.send_signal(number)
    code = process.wait(120)
    if in_time and code > 0:
        raise AssertionError((directory / "output.txt").read_text()[-4000:])
    deadline = time.monotonic() + 60
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == []
    return code == -number


def without_rounding(log):
    return [
        {k: v for k, v in line.items() if not k.startswith("sampling/")}
        for line in log
    ]


def check_killed_runs(name, numbers, folder, atol=0.0):
    """Compares a run ended by signals and resumed with a straight one.

    Args:
        name: string, of a run of `killed_script.py`.
        numbers: list of signals.
        folder: `pathlib.Path`, an empty directory.
        atol: float, how far weights may be off. Where it is 0 the log is
            compared too; where it is infinite, no run equals another, as
            when rollouts run ahead, and only the steps are compared.
    """
    rng = random.Random(name)
    cache, shared = folder / "cache", pathlib.Path("/dev/shm")
    before = set(shared.iterdir()) if shared.exists() else set()
    straight = folder / "straight"
    want = finish(start(name, straight), straight)
    numbers, count = list(numbers), 0
    rng.shuffle(numbers)
    while numbers:
        directory = folder / f"run{count}"
        count += 1
        while numbers and not (directory / "final.npz").exists():
            process = start(name, directory, cache)
            if interrupt(process, directory, numbers[-1], rng):
                numbers.pop()
        found = finish(start(name, directory), directory)
        assert found.keys() == want.keys()
        for path, value in want.items() if np.isfinite(atol) else ():
            np.testing.assert_allclose(
                found[path], value, rtol=0, atol=atol, err_msg=path
            )
        ours, theirs = map(contract.log_of, (straight, directory))
        steps = [[line["step"] for line in log] for log in (ours, theirs)]
        assert steps[0] == steps[1]
        if name == "grpo_episodes":
            # Which turns share a batch hangs on time, and so does rounding.
            ours, theirs = map(without_rounding, (ours, theirs))
        assert atol or json.dumps(ours) == json.dumps(theirs)
    if shared.exists():
        assert set(shared.iterdir()) <= before


def test_a_run_ends_by_signals_and_goes_on(tmp_path):
    check_killed_runs("grpo", IN_CI, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_every_task_ends_by_signals_and_goes_on(name, tmp_path):
    atol = np.inf if name == "grpo_ahead" else 0.0
    check_killed_runs(name, KILLS, tmp_path, atol)
