"""Reward functions for worker processes, which import nothing slow."""

import multiprocessing.connection
import os
import sys
import time


def evaluated(completions):
    return [float(eval(completions[0]))]


def intruding(completions):
    """Writes to the trainer what is no answer, as code under test could."""
    for data in filter(None, completions):
        connection = multiprocessing.connection.Connection(int(sys.argv[1]))
        connection.send_bytes(data.encode())
        time.sleep(60)
    return [1.0]


def pid_of(completions):
    return [os.getpid()]
