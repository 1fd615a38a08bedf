"""How much memory is free on the devices that JAX computes on."""

import os

import jax

from keras_posttrain.distribution import processes


def free_bytes():
    """Bytes free on the first device; of a CPU, of the machine.

    Of several processes the least of all, so that they decide alike.
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
        # No Linux: half of all memory, for want of a better guess.
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page // 2
