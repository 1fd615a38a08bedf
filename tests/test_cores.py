"""How many cores a process may use."""

import os
import subprocess
import sys

import pytest

# What starts threads or processes, on a large machine, in a process that has
# one core left.
CODE = """
import os
os.cpu_count = lambda: 64
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from keras_posttrain._cores import num_cores
from keras_posttrain.rollout.vllm.local import threads
from keras_posttrain.workers import pool
print(num_cores(), threads(), pool.COUNT)
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system cannot pin"
)
def test_cores_are_those_that_the_process_may_use():
    command = [sys.executable, "-c", CODE]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1", "1", "1"]
