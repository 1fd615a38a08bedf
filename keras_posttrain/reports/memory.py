"""The memory of a run, by what it is used for."""

import pathlib
import sys

import jax
import numpy as np

try:
    import resource
except ImportError:
    # Windows has no such module.
    resource = None


def of_variables(variables):
    """Returns the bytes of variables, also of those without a value now."""
    return sum(
        int(np.prod(v.shape)) * np.dtype(jax.numpy.dtype(v.dtype)).itemsize
        for v in variables
    )


def measure(kinds):
    """Returns what memory is used for, a dict fit for JSON.

    Args:
        kinds: dict of names to bytes of what is known, on all devices.

    Returns:
        `kinds` with what the process's other arrays take; `devices`, bytes
        in use, their peak and the limit of each, where the device tells; and
        `host`, the process's bytes now and at their peak.
    """
    kinds = dict(kinds)
    live = sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
    known = sum(kinds.values())
    kinds["other arrays (caches, batches, copies)"] = max(live - known, 0)
    devices = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_in_use" in stats:
            names = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
            found = [stats.get(name) for name in names]
            devices.append([f"{device.device_kind} {device.id}", *found])
    return {"kinds": kinds, "devices": devices, "host": _of_process()}


def _of_process():
    """Returns the bytes of this process now and at their peak, or `None`s."""
    if resource is None:
        return [None, None]
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return [None, peak]
    return [int(pages) * resource.getpagesize(), peak]


def kinds_of(task):
    """Returns the bytes of a task's parts, a dict by kind."""
    kinds = {
        "trained weights": of_variables(task.trainable_variables),
        "frozen weights": of_variables(task.non_trainable_variables),
        "optimizer": of_variables(task.optimizer.variables),
    }
    models = [
        (role, model)
        for role, found in getattr(task, "companions", {}).items()
        for model in found
    ]
    models.append(("reference", getattr(task, "reference", None)))
    for role, model in models:
        size = getattr(model, "num_bytes", 0)
        if size:
            kinds[role] = kinds.get(role, 0) + size
    return kinds
