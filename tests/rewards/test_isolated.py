"""Rewards in worker processes: what hangs, grows or dies costs itself only."""

import copy
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.rewards import run_rewards
from keras_posttrain.rewards.reward import arguments, name
from keras_posttrain.workers.pool import Failure, Workers
from tests.rewards.isolated_functions import evaluated, intruding, pid_of
from tests.support import in_ci

ROOT = pathlib.Path(__file__).parents[2]
# Python computes it without ever giving the interpreter to another thread.
BOMB = "9**9**9**9"


def score(reward, completions, **columns):
    """Returns what a reward says of each completion, a text for failures."""
    found = reward(["?"] * len(completions), completions, **columns)
    return [x.reason if isinstance(x, Failure) else x for x in found]


def running(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def gone(pids, seconds=20):
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(running, pids))


def test_a_formula_that_holds_the_interpreter_gets_0():
    """With `reward_timeout` as well: the run continues as if it were wrong."""
    reward = kpt.rewards.MathReward(timeout=1.0)
    completions = ["$9^{9^{9^{9}}}$", "$2$", r"$\frac{4}{2}$", "$3$"]
    assert score(reward, completions, answer=["2"] * 4) == [0, 1, 1, 0]
    rewards, report = run_rewards(
        [reward], ["?"] * 4, completions, {"answer": ["2"] * 4}, timeout=30
    )
    assert rewards[:, 0].tolist() == [0, 1, 1, 0]
    assert report["math"]["skipped"] == 0
    with pytest.raises(ValueError, match="`timeout` must be.*timeout=0"):
        kpt.rewards.MathReward(timeout=0)


def test_what_costs_a_completion_its_own_reward_only():
    """A bomb, a wrong result, too much memory, an exit, and a leap into C."""
    reward = kpt.rewards.Isolated(evaluated, timeout=2.0, max_bytes=2**28)
    completions = [
        "1 + 1",
        BOMB,
        "1 / 0",
        "len('a' * 2**30)",
        "__import__('os')._exit(3)",
        "__import__('os').kill(__import__('os').getpid(), 11)",
        "exit()",
        "2 + 2",
    ]
    found = score(reward, completions)
    assert found[0] == 2 and found[-1] == 4
    assert found[1:-1] == [
        "took longer than 2 s",
        "raised ZeroDivisionError: division by zero",
        "raised MemoryError: ",
        "ended its process (exit status 3)",
        "ended its process (SIGSEGV)",
        "raised SystemExit: None",
    ]
    # All is well again.
    assert score(reward, ["1", "2"]) == [1, 2]


def test_an_answer_that_cannot_be_read_costs_its_completion():
    reward = kpt.rewards.Isolated(intruding, timeout=60.0)
    answers = ["no JSON", '["value", 1, {"a": 1}]', ""]
    *failed, last = score(reward, answers)
    assert last == 1.0
    assert all("cannot be read" in reason for reason in failed), failed


def test_the_report_names_the_completion():
    reward = kpt.rewards.Isolated(evaluated, timeout=1.0)
    batch = ["?"] * 3, ["1", BOMB, "3"]
    rewards, report = run_rewards([reward], *batch, on_error="skip")
    np.testing.assert_array_equal(rewards[:, 0], [1, np.nan, 3])
    assert report["evaluated"]["skipped"] == 1
    with pytest.raises(ValueError) as error:
        run_rewards([reward], *batch, rows=[5, 6, 7])
    for part in (
        "'evaluated' took longer than 1 s for completion 1 of 3",
        f"(dataset row 6), prompt='?', completion='{BOMB}'",
    ):
        assert part in str(error.value)


def test_it_is_the_function_it_isolates():
    """Its name, the columns it needs, async ones and other rewards."""

    async def near(completions, answer, scale=2.0):
        import asyncio

        await asyncio.sleep(0.01)
        return [scale * float(completions[0] == answer[0])]

    reward = kpt.rewards.Isolated(near)
    assert name(reward) == "near"
    assert set(arguments(reward).required) == {"completions", "answer"}
    rewards, report = run_rewards(
        [reward],
        ["?"] * 2,
        ["a", "b"],
        {"answer": ["a", "a"], "other": [1, 2]},
    )
    assert rewards[:, 0].tolist() == [2, 0] and list(report) == ["near"]
    exact = kpt.rewards.Isolated(kpt.rewards.ExactMatchReward(), timeout=60)
    assert name(exact) == "exact_match"
    assert score(exact, ["a", "b"], answer=["a", "a"]) == [1, 0]
    # A reward that is built on it passes failures on.
    cosine = kpt.rewards.CosineLengthReward(
        kpt.rewards.Isolated(evaluated, timeout=1.0), 4
    )
    found = cosine(completions=["1", "x"], completion_ids=[[1], [1]])
    assert found[0] > 0 and isinstance(found[1], Failure)


@pytest.mark.parametrize(
    "result, text",
    [
        (1.0, "raised TypeError"),
        ([1.0, 2.0], "a list of one reward was expected"),
        (["good"], "a list of one reward was expected"),
        ({0: 1.0}, "a list of one reward was expected"),
    ],
)
def test_a_result_that_is_no_list_of_one_reward(result, text):
    reward = kpt.rewards.Isolated(lambda completions: result)
    [found] = score(reward, ["a"])
    assert text in found
    good = kpt.rewards.Isolated(lambda completions: np.array([0.5]))
    assert score(good, ["a"]) == [0.5]
    assert score(kpt.rewards.Isolated(lambda completions: [None]), ["a"]) == [
        None
    ]


def test_bad_settings():
    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [1.0]

    for settings, text in (
        ({"function": locked}, "can be pickled.*lock"),
        ({"function": 3}, "`function` must be a function"),
        ({"function": len, "timeout": -1}, "timeout=-1"),
        ({"function": len, "timeout": float("inf")}, "timeout=inf"),
        ({"function": len, "max_bytes": 0.5}, "max_bytes=0.5"),
    ):
        with pytest.raises(ValueError, match=text):
            kpt.rewards.Isolated(**settings)


def test_a_function_that_a_new_process_cannot_import(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "def f(completions):\n    return [1.0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    reward = kpt.rewards.Isolated(only_here.f)
    assert score(reward, ["a"]) == [1]
    other = kpt.rewards.Isolated(only_here.f)
    (tmp_path / "only_here.py").write_text("raise OSError('moved')\n")
    with pytest.raises(RuntimeError, match="could not load.*OSError: moved"):
        score(other, ["a"])


def test_processes_are_started_once_and_end_with_their_owner():
    reward = kpt.rewards.Isolated(pid_of)
    pids = set(score(reward, ["a"] * 40))
    # One that starts slowly may serve the second call alone.
    pids |= set(score(reward, ["a"] * 40))
    assert len(pids) <= reward._workers.count
    assert all(map(running, map(int, pids)))
    other = copy.deepcopy(reward)
    assert not pids & set(score(other, ["a"] * 40))
    del reward
    assert gone(map(int, pids))


def test_several_threads_use_it_at_once():
    reward = kpt.rewards.Isolated(evaluated)
    found = [None] * 3

    def work(i):
        found[i] = score(reward, [f"{i} * {j}" for j in range(20)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[i * j for j in range(20)] for i in range(3)]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_has_its_own():
    workers = Workers(
        (str(ROOT / "keras_posttrain/data/chat/sandbox.py"), "renderer"),
        10.0,
        2**28,
    )
    call = {"template": "{{ a }}", "conversations": [{"a": 1}]}
    assert workers.call(**call) == [["text", "1"]]
    child = os.fork()
    if child == 0:
        is_right = workers.call(**call) == [["text", "1"]]
        for worker in workers._idle:
            worker.end()
        os._exit(not is_right)
    assert os.waitpid(child, 0)[1] == 0
    assert workers.call(**call) == [["text", "1"]]


@pytest.mark.parametrize(
    "how",
    [
        "bomb",
        "sleep",
        pytest.param("idle", marks=pytest.mark.full),
        pytest.param("unread", marks=pytest.mark.full),
    ],
)
def test_they_end_with_a_process_that_is_killed(how, tmp_path):
    """Also one whose interpreter is held, and processes that it started."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, pathlib, signal, subprocess, sys, time
            sys.path.insert(0, sys.argv[2])
            from keras_posttrain.workers.pool import Workers
            import cloudpickle

            def f(completions):
                child = subprocess.Popen(["sleep", "600"])
                if completions[0] == "unread":
                    # This process will not read the answer.
                    os.kill(os.getppid(), signal.SIGSTOP)
                print(os.getpid(), child.pid, flush=True)
                if completions[0] == "bomb":
                    9**eval("9**9**9")
                if completions[0] == "sleep":
                    time.sleep(600)
                return [1.0]

            workers = Workers(cloudpickle.dumps(f), 0.5, 2**30, count=1)
            if sys.argv[1] != "idle":
                # The time limit is this process's to hold: it will not.
                workers.seconds = 600
            workers.call(completions=[sys.argv[1]])
            time.sleep(600)
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script), how, str(ROOT)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 2 and all(map(running, pids))
        process.send_signal(signal.SIGKILL)
        process.wait()
        ended = pids[:1] if how == "bomb" else pids
        try:
            assert gone(ended, 60)
        finally:
            for pid in filter(running, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "kinds",
    in_ci(
        ("judge", "to_thread", "timeout"),
        of=[
            ("judge",),
            ("to_thread",),
            ("timeout",),
            ("judge", "to_thread", "timeout"),
        ],
    ),
)
def test_a_reward_that_hangs_does_not_keep_the_process_alive(kinds):
    code = """
    import asyncio, sys, time
    import keras_posttrain as kpt
    from keras_posttrain.rewards import run_rewards

    def hang(*args, **columns):
        time.sleep(600)

    async def away(completions):
        return await asyncio.to_thread(hang)

    rewards = {
        "judge": kpt.rewards.JudgeReward(hang),
        "to_thread": away,
        "timeout": hang,
    }
    for kind in sys.argv[1:]:
        _, report = run_rewards(
            [rewards[kind]], ["?"], ["a"], timeout=0.5, on_error="skip"
        )
        [entry] = report.values()
        assert "took longer" in entry["error"]
    print("ended", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *kinds],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        assert process.stdout.readline() == "ended\n"
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
