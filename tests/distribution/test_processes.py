"""Two processes with four devices each, compared with one that has eight."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from keras_posttrain.distribution.exit_message import message
from tests.distribution.two_processes import outcome
from tests.support import REFERENCE, read_log, simulated

ROOT = REFERENCE.parent.parent
pytestmark = pytest.mark.usefixtures("eight_devices")
# For a machine that many tests share.
SECONDS = 600


def start(directory, *cases, module="tests.distribution.two_processes",
          devices=4):  # fmt: skip
    """The script in each of two processes, each with so many devices."""
    directory.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = simulated(devices)
    script = "-m", module, str(directory), port
    started = []
    for i in range(2):
        with open(directory / f"log{i}", "w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, *script, str(i), *cases],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=env,
                    start_new_session=True,
                )
            )
    return started


def is_written(log):
    """Whether a process has a file open."""
    for path in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if path.samefile(log):
                return True
    return False


def finish(started, directory):
    """`[(exit status, output)]`; what hangs is ended and fails the test."""
    end = time.monotonic() + SECONDS
    try:
        for one in started:
            one.wait(max(end - time.monotonic(), 1))
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
    logs = [directory / f"log{i}" for i in range(len(started))]
    # What an aborted process says how to resume, its child writes later.
    while any(map(is_written, logs)) and time.monotonic() < end:
        time.sleep(0.05)
    return [
        (one.returncode, log.read_text()) for one, log in zip(started, logs)
    ]


def run(directory, *cases, **settings):
    """Two processes that end well; an array by name for each case."""
    started = start(directory, *cases, **settings)
    ended = finish(started, directory)
    # Of a crash, the process that others miss knows most.
    logs = "\n".join(f"{status}: {log[-4000:]}" for status, log in ended)
    for status, output in ended:
        assert status == 0 and output.endswith("done\n"), logs
    return [load(directory, case) for case in cases]


def load(directory, case):
    """What came of a case that has ended."""
    with np.load(directory / f"{case}.npz") as arrays:
        return dict(arrays)


def alone(directory, case):
    """The same case in this process, with all eight devices."""
    directory.mkdir(exist_ok=True)
    np.savez(directory / f"{case}.npz", **outcome(case, directory))
    return load(directory, case)


def check_same(one, two, what):
    assert set(one) == set(two), what
    for name, value in one.items():
        if value.dtype.kind == "U":
            assert value == two[name], (what, name)
            continue
        is_weight = name.startswith("weight")
        bounds = {"atol": 2e-6} if is_weight else {"rtol": 2e-5, "atol": 1e-5}
        np.testing.assert_allclose(
            two[name], value, err_msg=f"{what} {name}", **bounds
        )


def check_same_in_both(tmp_path, *cases):
    two = run(tmp_path / "two", *cases)
    for case, found in zip(cases, two, strict=True):
        check_same(alone(tmp_path / "one", case), found, case)


def content(path):
    """A file's bytes; of an adapter, its base without the folder.

    Each process has its own copy of a model of one layer.
    """
    if path.name != "adapter_config.json":
        return path.read_bytes()
    config = json.loads(path.read_text())
    base = pathlib.Path(config.pop("base_model_name_or_path") or "")
    return [*config.items(), base.name]


def check_same_files(one, two):
    names = sorted(os.listdir(one))
    assert names and names == sorted(os.listdir(two))
    for name in names:
        assert content(one / name) == content(two / name), name


def check_same_logs(one, two):
    one, two = read_log(one), read_log(two)
    assert [x["step"] for x in one] == [x["step"] for x in two]
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5)
        assert a["num_tokens"] == b["num_tokens"]


def check_survivor(ended, process, died_in):
    """JAX names the lost process, and a message says how to resume."""
    status, output = ended
    assert status == -signal.SIGABRT, output[-4000:]
    # Process 0 hosts the service that all others report to.
    named = ["Failed to send RPC to coordination service"]
    if process == 0:
        named = [
            "(stopped sending heartbeats):\n1\n",
            "Task 1 heartbeat timeout",
        ]
    assert any(text in output for text in named), output[-4000:]
    what = rf"Process {process} of 2 ended at step \d+\."
    lines = [x for x in output.splitlines() if re.match(what, x)]
    assert len(lines) == 1, output[-4000:]
    assert "Start the script again in all processes: it resumes" in lines[0]
    step = int(lines[0].rstrip(".").split("checkpoint of step ")[1])
    # Saved every two steps; the last checkpoint may be incomplete.
    assert step in (died_in - 3, died_in - 1), lines[0]


def saved_steps(directory):
    names = os.listdir(directory / "resume/checkpoints")
    return [int(name) for name in names if name.isdigit()]


def end(directory, case, step, process, how):
    """Starts a run that ends in a step; checks how both processes end."""
    death = f"{case}:{step}:{process}:{how}"
    started = start(directory, death)
    ended = finish(started, directory)
    if how == "SIGTERM":
        assert [status for status, _ in ended] == [-signal.SIGTERM] * 2, ended
        assert "ended at step" not in ended[0][1] + ended[1][1]
        assert max(saved_steps(directory)) > step
        return
    status, output = ended[process]
    if how == "SIGKILL":
        assert status == -signal.SIGKILL, output[-4000:]
    else:
        assert status == 1 and "OSError: No space left on device" in output
        assert "ended at step" not in output
    check_survivor(ended[1 - process], 1 - process, step)


def check_resumed(tmp_path, case):
    """Resumes the ended run; it ends as one that was not interrupted."""
    straight = alone(tmp_path / "one", case)
    [resumed] = run(tmp_path / "two", case)
    check_same(straight, resumed, case)
    check_same_logs(tmp_path / "one/resume", tmp_path / "two/resume")


def test_two_processes_are_one(tmp_path):
    """Kinds of tasks and of meshes, and all that a model is used for."""
    check_same_in_both(
        tmp_path,
        "train:dpo:qwen3-short:full:1x8",
        "train:distill:llama3-short:full:8x1",
        "train:grpo:llama3-short:lora:4x2",
        # Tokens of a row over the devices of a process, and of both.
        "train:packed:qwen2-short:lora:cp4",
        "train:sft:llama3-short:full:cp8",
        "use:gemma2-short:lora:2x2x2",
        "files",
        "shares",
        # Under data parallelism.
        "streams",
    )
    for name in ("use/export", "use/adapter", "files/plain", "files/adapter"):
        check_same_files(tmp_path / "one" / name, tmp_path / "two" / name)


def test_what_one_process_raises_all_raise(tmp_path):
    """Also of processes that differ, and of the work of the first one.

    Then they exchange small arrays while their devices are busy, and their
    machines lose local checkpoints.
    """
    run(tmp_path, "refused", "vllm", "led", "busy", "lost")


def test_the_message_of_a_process_names_local_checkpoints(tmp_path):
    (tmp_path / "6").mkdir()
    text = message("Process 1 of 2", 9, str(tmp_path), local=True)
    expected = "of step 6, or from a newer local checkpoint if the machines"
    assert expected in text
    assert "local" not in message("Process 1 of 2", 9, str(tmp_path))
    text = message("Process 1 of 2", 9, "gs://bucket/run/checkpoints")
    assert "it resumes from its last checkpoint." in text


def test_a_run_survives_all_that_ends_processes(tmp_path):
    """One run, ended twice and resumed twice.

    `test_a_sampler_with_devices_of_its_own` kills one of two processes.
    """
    case, two = "resume:full:8x1", tmp_path / "two"
    end(two, case, 7, 0, "raise")
    # Last: the two agree on a step to save, soon after that of the signal.
    end(two, case, 9, 1, "SIGTERM")
    # The newest checkpoint, damaged for one process: the one before is used.
    newest = max(saved_steps(two))
    files = sorted(
        (two / f"resume/checkpoints/{newest}/state").glob(
            "ocdbt.process_1/d/*"
        )
    )
    assert files
    for file in files:
        file.write_bytes(b"\0" * file.stat().st_size)
    check_resumed(tmp_path, case)
    output = (two / "log0").read_text()
    assert f"Checkpoint of step {newest} is damaged" in output


@pytest.mark.full
@pytest.mark.parametrize(
    "mode, layout, process, how",
    [
        ("full", "8x1", 0, "SIGKILL"),
        ("full", "8x1", 1, "SIGKILL"),
        ("lora", "1x8", 0, "SIGKILL"),
        ("full", "4x2", 0, "SIGTERM"),
        ("full", "4x2", "all", "SIGTERM"),
        ("lora", "8x1", 1, "raise"),
    ],
)
def test_other_ends_and_layouts(tmp_path, mode, layout, process, how):
    case = f"resume:{mode}:{layout}"
    end(tmp_path / "two", case, 7, process, how)
    check_resumed(tmp_path, case)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["8x1", "4x2", "1x8", "dp", "cp4", "cp8"])
def test_every_task_in_two_processes(tmp_path, layout):
    cases = ["sft:llama3:full", "packed:qwen2:lora", "dpo:qwen3:full",
             "distill:llama3:full", "grpo:llama3:full",
             "ppo:llama3:full", "episodes:qwen3:full"]  # fmt: skip
    cases = [f"train:{case}:{layout}" for case in cases]
    if layout != "dp":
        cases.append(f"use:gemma2:lora:{layout}")
    check_same_in_both(tmp_path, *cases)


def test_a_sampler_with_devices_of_its_own(tmp_path):
    """In turn as in one process; ahead of training it learns and resumes."""

    def logged(name):
        return read_log(tmp_path / "two/split" / name)

    # In one pair of processes, of which the last case ends one.
    cases = "split:0", "split:again1", "split:1:11:1:SIGKILL"
    ended = finish(start(tmp_path / "two", *cases), tmp_path / "two")
    assert ended[1][0] == -signal.SIGKILL, ended[1][1][-4000:]
    check_survivor(ended[0], 0, 11)
    check_same(
        alone(tmp_path / "one", "split:0"),
        load(tmp_path / "two", "split:0"),
        "split:0",
    )
    # The first rollout of an epoch waits for the last update of the one
    # before.
    ages = [x["staleness/max"] for x in logged("again1")]
    assert ages == 2 * [0.0, *[1.0] * 7]
    rewards = [x["reward"] for x in logged("again1")]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.2
    # All weights that sampled are of one version: a second run is the same.
    again = [x["reward"] for x in logged("1")]
    assert again and again == rewards[: len(again)]
    run(tmp_path / "two", "split:1")
    resumed = [x["reward"] for x in logged("1")]
    assert len(resumed) == 16
    assert np.mean(resumed[-4:]) > np.mean(resumed[:4]) + 0.2
