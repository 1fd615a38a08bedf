"""Measures the free memory of JAX's devices."""

import os

import jax
import keras

from keras_posttrain.distribution import processes


def free_bytes():
    """Returns the free bytes of a device; for a CPU, those of the machine.

    It is the first of Keras's distribution in this process. With several
    processes it is the minimum, so that all decide alike.
    """
    return min(processes.exchange(_free_here()))


def _free_here():
    distribution, device = keras.distribution.distribution(), None
    if distribution is not None:
        device = distribution.device_mesh.backend_mesh.local_devices[0]
    stats = (device or jax.local_devices()[0]).memory_stats()
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
