"""Processes that are started for a server end with their starter."""

import os
import signal
import subprocess
import sys
import time

import pytest

from keras_posttrain.rollout.vllm import process as vllm_process

# A server that will not end when asked to, and a process of its own.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code += "print('ready', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code])
time.sleep(600)
"""
WATCH = f"""
import sys
sys.path.append({os.path.dirname(vllm_process.__file__)!r})
import process
process.STOP_SECONDS = 0.5
sys.exit(process.watch(int(sys.argv[1]), sys.argv[2:]))
"""
STARTER = """
import os, subprocess, sys, threading, time
def start():
    command = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
    process = subprocess.Popen(command + sys.argv[2:], start_new_session=True)
    print(process.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(600)
"""


def running(group):
    return [pid for pid, _ in vllm_process._running(group)]


def gone(group, seconds=30):
    end = time.monotonic() + seconds
    while running(group) and time.monotonic() < end:
        time.sleep(0.05)
    return not running(group)


@pytest.fixture
def starter():
    """A process that starts the server in a thread, and its group."""
    command = [sys.executable, "-c", STARTER, WATCH]
    command += [sys.executable, "-c", STUBBORN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        group = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        yield process, group
        process.kill()
        for pid in running(group):
            os.kill(pid, signal.SIGKILL)


def test_it_outlives_the_thread_and_ends_with_the_process(starter):
    process, group = starter
    time.sleep(1)
    assert len(running(group)) == 3
    process.kill()
    process.wait()
    assert gone(group)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGSTOP])
def test_it_is_ended(sent, monkeypatch):
    """By its starter, even where it is halted."""
    monkeypatch.setattr(vllm_process, "STOP_SECONDS", 1)
    monkeypatch.setattr(vllm_process, "TRACKER_SECONDS", 1)
    command = [sys.executable, "-c", WATCH, str(os.getpid())]
    command += [sys.executable, "-c", STUBBORN]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        if sent == signal.SIGSTOP:
            for pid in running(process.pid):
                os.kill(pid, sent)
        else:
            os.kill(process.pid, sent)
            assert gone(process.pid)
        vllm_process.end(process)
    assert not running(process.pid)
    assert process.returncode in (128 + signal.SIGKILL, -signal.SIGKILL)


def test_what_the_server_ends_with(tmp_path):
    (tmp_path / "short.py").write_text("raise SystemExit(7)")
    process = subprocess.run(
        [
            sys.executable,
            "-I",
            vllm_process.__file__,
            str(os.getpid()),
            "short",
        ],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.returncode == 7
