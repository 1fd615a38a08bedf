"""Copies of arrays on other devices of the same job."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def copy_to(x, target):
    """Copies an array to the devices of another sharding.

    Parts go from device to device, within a process, and not through the
    memory of the host. If a process does not have a part that one of its
    devices needs, all devices of `x` gather the whole array first.

    Args:
        x: `jax.Array`.
        target: `jax.sharding.Sharding`. Every process that has devices of it
            must have devices of `x`.

    Returns:
        A `jax.Array` that shares no memory with `x`.
    """
    parts = _parts(x.sharding, target, x.shape)
    if parts is None:
        x = _gather(NamedSharding(x.sharding.mesh, P()))(x)
        parts = _parts(x.sharding, target, x.shape)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    arrays = []
    for device in target.addressable_devices:
        origin, starts, sizes = parts[device]
        part = shards[origin]
        if part.shape != sizes:
            part = jax.lax.dynamic_slice(part, starts, sizes)
        elif origin == device:
            part = jnp.array(part, copy=True)
        arrays.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(x.shape, target, arrays)


@functools.lru_cache(maxsize=4096)
def _parts(source, target, shape):
    """Finds where each device of `target` gets its part of an array from.

    Returns:
        A dict from a device to one of `source` in its process, and to the
        place and the sizes of its part in the part of that one. `None` if a
        device finds none.
    """
    found, have = {}, _ranges(source, shape)
    for i, (device, wanted) in enumerate(_ranges(target, shape).items()):
        near = [
            other
            for other, held in have.items()
            if other.process_index == device.process_index
            and all(a <= c and d <= b for (a, b), (c, d) in zip(held, wanted))
        ]
        if not near:
            return None
        # Several devices send, where several can.
        origin = device if device in near else near[i % len(near)]
        starts = tuple(
            start - first
            for (start, _), (first, _) in zip(wanted, have[origin])
        )
        found[device] = origin, starts, tuple(b - a for a, b in wanted)
    return found


def _ranges(sharding, shape):
    """Returns the part of each device, `(start, end)` along each axis."""
    return {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, shape))
        for device, index in sharding.devices_indices_map(shape).items()
    }


@functools.lru_cache(maxsize=16)
def _gather(target):
    return jax.jit(lambda x: x, out_shardings=target)
