"""The cores that this process may use."""

import os


def num_cores():
    """Returns how many cores this process may use.

    `taskset`, or the set of CPUs of a container or of a cluster's job, may
    leave it fewer than the machine has.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
