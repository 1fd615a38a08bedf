"""Measures the free memory of JAX's devices."""

import os

import jax

from keras_posttrain.distribution import processes


def free_bytes():
    """Returns the free bytes of the first device; for a CPU, the machine's.

    With several processes it is the minimum, so that all decide alike.
    """
    return min(processes.exchange(_free_here()))


def _free_here():
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        with open("/proc/meminfo") as f:
            lines = dict(line.split(":") for line in f)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        # Other systems do not report free memory: half of all is assumed.
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page // 2
