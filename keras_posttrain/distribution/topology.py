"""Hardware by name: devices to compile for."""

import dataclasses
import functools
import math
import os
import re

import jax
from jax.experimental import topologies

from keras_posttrain._chips import CHIPS, Chip

# Silence libtpu's warnings on machines without a TPU.
LIBTPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile programs for, which need not be present.

    Attributes:
        name: str, such as `"v5e:4x4"` or `"v5e:4x4 x 2"`.
        devices: tuple of `jax.Device`, slice by slice.
        chip: `Chip`, or `None` for host devices.
        num_slices: int, slices of the same size. The data-center network
            joins them.
    """

    name: str
    devices: tuple
    chip: Chip | None
    num_slices: int = 1


def get(name):
    """Looks up a topology by name.

    Args:
        name: str, as `Task.plan` explains it, or a `Topology`.

    Raises:
        ValueError: if the name is not known, or names a TPU and `libtpu` is
            not installed.
    """
    if isinstance(name, Topology):
        return name
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?: x (\d+))?", str(name))
    kind, grid, slices = match.groups() if match else (None, "", None)
    sizes = [int(n) for n in grid.split("x")] if grid else []
    slices = 1 if slices is None else int(slices)
    if slices == 0:
        raise ValueError(_unknown(name))
    if kind == "cpu" and len(sizes) == 1:
        devices = _host_devices(sizes[0] * slices, name)
        return Topology(str(name), devices, None, slices)
    chip = CHIPS.get(kind)
    if chip is None or len(sizes) != chip.dims or 0 in sizes:
        raise ValueError(_unknown(name))
    devices = _tpu_devices(kind, sizes, slices, name)
    return Topology(str(name), tuple(devices), chip, slices)


def _unknown(name, why=""):
    return (
        "`topology` must be '<chip>:<grid>', the grid being the chips along "
        "each axis of the network: 'v5e:4x4' or 'v6e:2x4' (two axes, up to "
        "16x16), 'v5p:2x2x4' (three), or 'cpu:8' for devices "
        "of this host; and for several slices '<chip>:<grid> x <slices>', "
        f"such as 'v5e:4x4 x 2' or 'cpu:4 x 2'. Known chips: {sorted(CHIPS)}. "
        f"Received: topology={name!r}{why}"
    )


def _host_devices(count, name):
    known = jax.devices("cpu")
    if not 0 < count <= len(known):
        raise ValueError(
            f"This process has {len(known)} CPU devices. For more, set the "
            "environment variable XLA_FLAGS="
            f"--xla_force_host_platform_device_count={count} before JAX is "
            f"imported. Received: topology={name!r}"
        )
    return tuple(known[:count])


def _tpu_devices(kind, sizes, slices, name):
    # libtpu reads them when it is loaded; with TPUs it is loaded already.
    if jax.default_backend() != "tpu":
        for variable, value in LIBTPU_SETTINGS.items():
            os.environ.setdefault(variable, value)
    try:
        import libtpu  # noqa: F401
    except ImportError as e:
        raise ValueError(
            "Compiling for a TPU needs its compiler, the package `libtpu`, "
            "but no TPU: `pip install 'keras_posttrain[plan]'`. "
            f"Received: topology={name!r}"
        ) from e
    try:
        return _described(kind, tuple(sizes), slices)
    except jax.errors.JaxRuntimeError as e:
        why = str(e).split("\n")[0]
        raise ValueError(_unknown(name, f" ({why})")) from e


@functools.cache
def _described(kind, sizes, slices):
    # Cached: devices of two descriptions differ, even for the same name.
    # Hosts have four chips; with fewer chips, each host has one.
    settings = {}
    if math.prod(sizes) < 4:
        bounds = [*sizes] + [1] * (3 - len(sizes))
        settings["chips_per_host_bounds"] = bounds
    grid = "x".join(map(str, sizes))
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{kind}:{grid}",
        num_slices=slices,
        **settings,
    ).devices
