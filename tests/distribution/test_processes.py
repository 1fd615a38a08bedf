"""Two processes on one machine, compared with one that has all devices."""

import filecmp
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support import REFERENCE, read_log

ROOT = REFERENCE.parent.parent
DEVICES = 4
# For a machine that many tests share.
SECONDS = 400


def start(case, directory, count=2):
    """A script in each of so many processes, with four devices in all."""
    directory.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count="
        f"{DEVICES // count}",
    }
    script = "tests.distribution.two_processes", case, str(directory)
    started = []
    for i in range(count):
        rank = (port, str(count), str(i)) if count > 1 else ()
        with open(directory / f"log{i}", "w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *script, *rank],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=env,
                    start_new_session=True,
                )
            )
    return started


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
    return [
        (one.returncode, log.read_text()) for one, log in zip(started, logs)
    ]


def run(case, directory, count=2):
    """Runs a script that ends well; what came of it, a dict of arrays."""
    for status, output in finish(start(case, directory, count), directory):
        assert status == 0 and output.endswith("done\n"), output[-4000:]
    with np.load(directory / "out.npz") as found:
        return dict(found)


def check_same(one, two):
    assert set(one) == set(two)
    for name, value in one.items():
        if value.dtype.kind == "U":
            assert value == two[name], name
            continue
        is_weight = name.startswith("weight")
        bounds = {"atol": 2e-6} if is_weight else {"rtol": 2e-5, "atol": 1e-5}
        np.testing.assert_allclose(two[name], value, err_msg=name, **bounds)


def check_same_in_both(case, tmp_path):
    two = run(case, tmp_path / "two")
    check_same(run(case, tmp_path / "one", 1), two)


def check_same_logs(one, two):
    one, two = read_log(one), read_log(two)
    assert [x["step"] for x in one] == [x["step"] for x in two]
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5)
        assert a["num_tokens"] == b["num_tokens"]


def killed_and_resumed(tmp_path, mode, layout, death, check):
    """A run that is ended and started again is the straight one."""
    straight = run(f"resume:{mode}:{layout}", tmp_path / "one", 1)
    two = tmp_path / "two"
    ended = finish(start(f"resume:{mode}:{layout}:{death}", two), two)
    check(*ended)
    check_same(straight, run(f"resume:{mode}:{layout}", two))
    check_same_logs(tmp_path / "one", two)


def check_survivor(ended, process, lost):
    """JAX names the lost process, and a message says how to resume."""
    status, output = ended
    assert status == -signal.SIGABRT, output[-4000:]
    # Process 0 hosts the service that all others report to.
    named = ["Failed to send RPC to coordination service"]
    if lost:
        named = [
            f"(stopped sending heartbeats):\n{lost}\n",
            f"Task {lost} heartbeat timeout",
        ]
    assert any(text in output for text in named), output[-4000:]
    what = rf"Process {process} of 2 ended at step [78]\."
    messages = [x for x in output.splitlines() if re.match(what, x)]
    assert len(messages) == 1, output[-4000:]
    assert "Start the script again in all processes: it resumes" in messages[0]
    step = int(messages[0].rstrip(".").split("checkpoint of step ")[1])
    # Saved every two steps; the last checkpoint may be incomplete.
    assert step in (4, 6), messages[0]


@pytest.mark.slow
def test_a_lost_process_ends_the_other_and_both_resume(tmp_path):
    def check(first, second):
        assert second[0] == -signal.SIGKILL
        check_survivor(first, 0, lost=1)

    killed_and_resumed(tmp_path, "full", "4x1", "7:1:SIGKILL", check)


@pytest.mark.slow
def test_rollouts_of_two_processes(tmp_path):
    check_same_in_both("train:grpo:llama3:lora:2x2", tmp_path)


@pytest.mark.full
def test_a_lost_first_process(tmp_path):
    def check(first, second):
        assert first[0] == -signal.SIGKILL
        check_survivor(second, 1, lost=0)

    killed_and_resumed(tmp_path, "lora", "1x4", "7:0:SIGKILL", check)


@pytest.mark.full
@pytest.mark.parametrize("which", ["0", "1", "all"])
def test_sigterm_saves_and_ends_all(tmp_path, which):
    def check(first, second):
        assert first[0] == second[0] == -signal.SIGTERM, (first, second)
        assert "ended at step" not in first[1] + second[1]
        steps = os.listdir(tmp_path / "two/checkpoints")
        assert max(int(s) for s in steps if s.isdigit()) >= 8

    killed_and_resumed(tmp_path, "full", "2x2", f"7:{which}:SIGTERM", check)


@pytest.mark.full
@pytest.mark.parametrize("which", [0, 1])
def test_what_one_process_raises_ends_the_other(tmp_path, which):
    def check(*ended):
        status, output = ended[which]
        assert status == 1 and "OSError: No space left on device" in output
        assert "ended at step" not in output
        check_survivor(ended[1 - which], 1 - which, lost=which)

    killed_and_resumed(tmp_path, "full", "4x1", f"7:{which}:raise", check)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["4x1", "2x2", "1x4", "dp"])
@pytest.mark.parametrize(
    "case",
    ["sft:llama3:full", "packed:qwen2:lora", "dpo:qwen3:full",
     "distill:llama3:full", "grpo:llama3:full", "ppo:llama3:full"],
)  # fmt: skip
def test_every_task_in_two_processes(tmp_path, case, layout):
    check_same_in_both(f"train:{case}:{layout}", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["4x1", "2x2", "1x4"])
def test_what_a_model_is_used_for(tmp_path, layout):
    check_same_in_both(f"use:gemma2:lora:{layout}", tmp_path)
    for folder in ("export", "adapter"):
        one, two = (tmp_path / x / folder for x in ("one", "two"))
        names = sorted(os.listdir(one))
        assert names and names == sorted(os.listdir(two))
        same, *_ = filecmp.cmpfiles(one, two, names, shallow=False)
        assert sorted(same) == names


@pytest.mark.full
def test_processes_that_do_not_fit_together(tmp_path):
    run("refused", tmp_path / "two")


@pytest.mark.full
def test_a_checkpoint_that_is_damaged_for_one_process(tmp_path):
    straight = run("resume:full:4x1", tmp_path / "one", 1)
    two = tmp_path / "two"
    ended = finish(start("resume:full:4x1:9:1:SIGKILL", two), two)
    assert ended[0][0] == -signal.SIGABRT
    steps = [int(x) for x in os.listdir(two / "checkpoints") if x.isdigit()]
    newest = two / "checkpoints" / str(max(steps)) / "state"
    files = sorted(newest.glob("ocdbt.process_1/d/*"))
    assert files
    for file in files:
        file.write_bytes(b"\0" * file.stat().st_size)
    check_same(straight, run("resume:full:4x1", two))
    output = (two / "log0").read_text()
    assert f"Checkpoint of step {max(steps)} is damaged" in output
