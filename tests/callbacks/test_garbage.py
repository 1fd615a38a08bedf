"""Full collections of garbage do not look at what a long run keeps."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import REFERENCE

ROOT = REFERENCE.parents[1]


@pytest.fixture(scope="module")
def found():
    """What runs in a process of their own have found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.collected_runs"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_what_a_long_run_keeps_is_not_looked_at(found, task):
    (*frozen, after), looked_at = found[task]
    assert frozen[:2] == [0, 0] and min(frozen[2:]) > 100_000
    assert looked_at[-1] < 0.1 * looked_at[0]
    assert after == 0


def test_a_short_run_changes_nothing(found):
    assert found["short"] == [0, 0]


def test_garbage_of_later_steps_is_collected(found):
    assert found["garbage"] == [[False] * i for i in range(6)]


def test_a_run_that_fails_gives_it_back(found):
    during, after = found["fails"]
    assert during > 100_000 and after == 0


def test_what_a_script_froze_stays_frozen(found):
    before, after = found["script"]
    # Objects that nothing refers to any more are freed all the same.
    assert after > 0.9 * before
