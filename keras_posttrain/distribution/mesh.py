"""Device meshes with named axes."""

import math
import numbers

import jax
import keras
import numpy as np
from jax.experimental import mesh_utils

# "batch" is Keras's name for the data axis. On TPUs the attention of Keras and
# KerasHub expects the name "model".
DATA, MODEL = "batch", "model"
# The data axis divided into two, for the weights of experts.
REPLICA, EXPERT = "replica", "expert"
# Along it weights are replicated and rows are split.
SLICE = "slice"
# The data axis divided into two: devices with different rows, and those that
# have pieces of the same rows.
ROWS, CONTEXT = "rows", "context"


def make_mesh(sizes, devices=None):
    """Makes a `keras.distribution.DeviceMesh` with named axes.

    Args:
        sizes: dict from the name of an axis to the number of devices along
            it; one of them may be `None` and is then computed.
        devices: list of names from `keras.distribution.list_devices()`, or
            of `jax.Device`s, which need not be on this machine, or `None` for
            all. Unless names are given, neighbours along the last axis are
            neighbours in the network, if the hardware reports it.

    Raises:
        ValueError: if the sizes do not multiply to the number of devices.
    """
    chosen = _chosen(devices)
    sizes = _filled(sizes, len(chosen))
    shape = tuple(sizes.values())
    if math.prod(shape) != len(chosen):
        product = " * ".join(f"{name}={n}" for name, n in sizes.items())
        hint = ""
        if math.prod(shape) < len(chosen):
            hint = (
                " To leave some idle, pass `devices="
                f"keras.distribution.list_devices()[:{math.prod(shape)}]`."
            )
        raise ValueError(
            "The sizes of the axes must multiply to the number of devices. "
            f"Received: {product}, which is {math.prod(shape)}, on "
            f"{len(chosen)} devices.{hint}"
        )
    grid = _arranged(shape, chosen)
    return _device_mesh(sizes, shape, grid, devices)


def make_hybrid_mesh(slices, sizes, devices=None):
    """Makes a mesh whose first axis, `"slice"`, is along the slow network.

    Args:
        slices: int, or `None` for the slices that the devices report.
        sizes, devices: as in `make_mesh`; the axes within a slice.

    Raises:
        ValueError: if the devices cannot be divided into `slices`, or if
            the sizes do not multiply to the number of devices in a slice.
    """
    groups = _slices(slices, _chosen(devices))
    count = len(groups[0])
    try:
        sizes = _filled(sizes, count)
    except ValueError as error:
        error.add_note(f"These are the devices of one of {len(groups)} slices")
        raise
    shape = tuple(sizes.values())
    grid = np.stack([_arranged(shape, group) for group in groups])
    sizes = {SLICE: len(groups), **sizes}
    return _device_mesh(sizes, grid.shape, grid, devices)


def slice_of(device):
    """Returns the index of a device's slice, `None` if it reports none.

    Chips of a slice, or the GPUs of a node, are joined by a fast network.
    """
    return getattr(device, "slice_index", None)


def _slices(slices, chosen):
    """Divides devices into lists of the same length, one for each slice."""
    known = {name_of(device): device for device in jax.devices()}
    groups = {}
    for device in chosen:
        at = slice_of(known.get(device) if isinstance(device, str) else device)
        groups.setdefault(at, []).append(device)
    sizes = {at: len(group) for at, group in groups.items()}
    if slices is None and len(chosen) == 1:
        slices = 1
    is_int = isinstance(slices, numbers.Integral) and slices is not True
    if slices is None and None in groups:
        raise ValueError(
            "`slices` must be given: these devices do not report the slice "
            "that they belong to. Received: slices=None, on "
            f"{len(chosen)} devices. Pass the number of groups that a fast "
            "network joins, such as slices=2; each is the next "
            "`len(devices) / slices` devices."
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "Each slice must have the same number of `devices`. Received: "
            f"{sizes} by slice"
        )
    if slices is None:
        slices = len(groups)
    elif not (is_int and slices > 0):
        raise ValueError(
            f"`slices` must be a positive int. Received: slices={slices!r}"
        )
    if len(chosen) % slices or slices % len(groups):
        raise ValueError(
            "`slices` must divide the number of devices, and be a multiple "
            "of the slices that they report. Received: "
            f"slices={slices}, on {len(chosen)} devices in {len(groups)} "
            "slices"
        )
    ordered = [
        device
        for at in sorted(groups, key=lambda x: -1 if x is None else x)
        for device in groups[at]
    ]
    size = len(chosen) // slices
    return [ordered[i : i + size] for i in range(0, len(chosen), size)]


def _chosen(devices):
    """Returns a list of `jax.Device`s, or of names that were checked."""
    chosen = jax.devices() if devices is None else list(devices)
    if not chosen or not all(isinstance(d, jax.Device) for d in chosen):
        chosen = _checked(chosen, keras.distribution.list_devices())
    return chosen


def _arranged(shape, chosen):
    """Returns an array of devices, neighbours along its last axis.

    Devices of several slices are divided along its first axis.
    """
    slices = {}
    for device in chosen:
        slices.setdefault(slice_of(device), []).append(device)
    if len(slices) > 1:
        own = (shape[0] // len(slices), *shape[1:])
        if any(len(group) != math.prod(own) for group in slices.values()):
            return np.array(sum(slices.values(), [])).reshape(shape)
        return np.concatenate([_arranged(own, x) for x in slices.values()])
    if not isinstance(chosen[0], jax.Device):
        return np.array(chosen).reshape(shape)
    return mesh_utils.create_device_mesh(
        shape, chosen, allow_split_physical_axes=True
    )


def _device_mesh(sizes, shape, grid, devices):
    if devices is None:
        grid = np.array([name_of(device) for device in grid.flatten()])
    return keras.distribution.DeviceMesh(
        shape, list(sizes), grid.reshape(shape)
    )


def name_of(device):
    """Returns Keras's name of a `jax.Device`."""
    return f"{device.platform}:{device.id}"


def divide_devices(trainer, sampler, devices=None):
    """Divides devices in two, with the same share of each process.

    The arguments are those of `split`. Returns two lists of `jax.Device`s.
    """
    known = {name_of(device): device for device in jax.devices()}
    names = _checked(list(known if devices is None else devices), list(known))
    count = len(names)
    sizes = {"trainer": trainer, "sampler": sampler}
    text = f"trainer={trainer!r}, sampler={sampler!r}, {count} devices"
    for size in sizes.values():
        is_int = isinstance(size, numbers.Integral) and size is not True
        if size is not None and not (is_int and size > 0):
            raise ValueError(
                "`trainer` and `sampler` must be numbers of devices, or one "
                f"of them None for those that are left. Received: {text}"
            )
    if trainer is None and sampler is None:
        raise ValueError(
            "`trainer` or `sampler` must be given, a number of devices. "
            f"Received: {text}"
        )
    trainer = count - sampler if trainer is None else int(trainer)
    sampler = count - trainer if sampler is None else int(sampler)
    if min(trainer, sampler) < 1 or trainer + sampler != count:
        raise ValueError(
            "`trainer` and `sampler` must add up to the number of devices, "
            f"each at least 1. Received: {text}. To leave some idle, pass "
            "`devices`."
        )
    by_process = {}
    for name in names:
        device = known[name]
        by_process.setdefault(device.process_index, []).append(device)
    shares = {len(own) for own in by_process.values()}
    processes = len(by_process)
    if len(shares) > 1 or processes < jax.process_count():
        raise ValueError(
            "Each process must have the same number of `devices`. Received: "
            f"{ {i: len(own) for i, own in by_process.items()} } by process, "
            f"of {jax.process_count()} processes"
        )
    if trainer % processes or sampler % processes:
        raise ValueError(
            "The trainer and the sampler need the same number of devices in "
            f"each of the {processes} processes: weights are copied within a "
            f"process. Received: {text}. Use multiples of {processes}."
        )
    cut = trainer // processes
    return (
        [device for own in by_process.values() for device in own[:cut]],
        [device for own in by_process.values() for device in own[cut:]],
    )


def divide(mesh, size, names=(REPLICA, EXPERT)):
    """Divides the data axis of a mesh of one axis in two.

    Args:
        mesh: `keras.distribution.DeviceMesh` with the axis `"batch"` alone.
        size: int, the devices along the second of the two axes.
        names: tuple of the two axes' names.

    Returns:
        A `keras.distribution.DeviceMesh` of the same devices in the same
        order.
    """
    shape = (math.prod(mesh.shape) // size, size)
    return keras.distribution.DeviceMesh(
        shape, list(names), mesh.devices.reshape(shape)
    )


def _checked(devices, known):
    unknown = [d for d in devices if d not in known]
    if not devices or unknown or len(set(devices)) < len(devices):
        raise ValueError(
            "`devices` must be different names from "
            "`keras.distribution.list_devices()`, such as "
            f"{known[:2]} of {len(known)}. "
            f"Received: devices={devices}"
        )
    return devices


def _filled(sizes, count):
    """Replaces the `None` in `sizes` by the number that is left."""
    for name, size in sizes.items():
        is_int = isinstance(size, numbers.Integral) and size is not True
        if size is not None and not (is_int and size > 0):
            raise ValueError(
                "The size of an axis must be a positive int. "
                f"Received: {_argument(name)}={size!r}"
            )
    given = {name: int(n) for name, n in sizes.items() if n is not None}
    product = math.prod(given.values())
    if count % product:
        text = " * ".join(f"{_argument(n)}={s}" for n, s in given.items())
        reason = "too many" if product > count else "not a divisor"
        raise ValueError(
            "The sizes of the axes must divide the number of devices. "
            f"Received: {text}, on {count} devices ({reason})."
        )
    return {
        name: count // product if size is None else given[name]
        for name, size in sizes.items()
    }


def _argument(name):
    return {DATA: "data", EXPERT: "experts"}.get(name, name)
