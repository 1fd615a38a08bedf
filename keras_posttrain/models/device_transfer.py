"""Weights between files and devices, a slice at a time.

No host holds more of a model than one tensor beside its own devices' arrays,
and no device more of a tensor than the slice that it keeps. With several
processes, what gathers is to be done by all, in the same order.
"""

import collections
import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_posttrain.models import sharding

# What is fetched from a device at once, in bytes.
CHUNK = 2**26


def fill(variable, read):
    """Gives a variable its value, each device's slice read for itself.

    Args:
        variable: `keras.Variable`.
        read: function from a tuple of slices, one for each axis of the
            variable, to that part of its value as a numpy array.
    """
    shape, dtype = tuple(variable.shape), jnp.dtype(variable.dtype)
    layout = sharding.layout_of(variable)
    if layout is None:
        whole = tuple(slice(0, size) for size in shape)
        part = contiguous(read(whole)).astype(dtype, copy=False)
        jax.block_until_ready(variable.assign(part))
        return
    target = layout.backend_layout
    pieces = {}
    for index, devices in _by_index(target, shape).items():
        own = [d for d in devices if d.process_index == jax.process_index()]
        if not own:
            continue
        part = contiguous(read(tuple(slice(*bounds) for bounds in index)))
        part = part.astype(dtype, copy=False)
        pieces.update((device, jax.device_put(part, device)) for device in own)
        # Or all parts would wait on the host for their way to the devices.
        jax.block_until_ready(list(pieces.values()))
    order = target.addressable_devices_indices_map(shape)
    variable.assign(
        jax.make_array_from_single_device_arrays(
            shape, target, [pieces[device] for device in order]
        )
    )


def to_host(array):
    """A numpy array of a `jax.Array` that may span many processes.

    Args:
        array: `jax.Array`, or what `numpy.asarray` takes.

    Returns:
        A numpy array, the same in all processes. JAX keeps no copy of it, as
        it does of what `numpy.asarray` is called on.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    shape, dtype = array.shape, array.dtype
    local = {shard.device: shard.data for shard in array.addressable_shards}
    everywhere = array.is_fully_addressable or array.is_fully_replicated
    found = np.empty(shape, dtype)
    for index, devices in _by_index(array.sharding, shape).items():
        here = [device for device in devices if device in local]
        part = found[*(slice(*bounds) for bounds in index), ...]
        if here:
            _fetch(local[here[0]], part)
        if not everywhere:
            part[...] = _from_process(devices[0].process_index, part)
    return found


def _by_index(target, shape):
    """Which devices hold which part: `{((start, stop), ...): devices}`."""
    found = {}
    for device, index in target.devices_indices_map(shape).items():
        bounds = zip(index, shape)
        key = tuple(part.indices(size)[:2] for part, size in bounds)
        found.setdefault(key, []).append(device)
    for devices in found.values():
        devices.sort(key=lambda device: device.id)
    return dict(sorted(found.items()))


def _fetch(data, out):
    """Copies an array of one device to `out`, some rows at a time."""
    if not data.shape:
        out[...] = jnp.copy(data)
        return
    rows = max(1, CHUNK * len(data) // max(1, data.nbytes))
    for start in range(0, len(data), rows):
        size = min(rows, len(data) - start)
        # Of a new array: a numpy copy stays with the array it was made of.
        out[start : start + size] = jax.lax.dynamic_slice_in_dim(
            data, start, size
        )


def _from_process(source, part):
    """The bytes that a process holds, in all of them."""
    # As ints: a sum with zeros is how they are sent, and turns -0.0 to 0.0.
    sent = np.zeros(-(-part.nbytes // 4), "uint32")
    if jax.process_index() == source:
        raw = np.ascontiguousarray(part).reshape(-1).view("uint8")
        sent.view("uint8")[: part.nbytes] = raw
    got = multihost_utils.broadcast_one_to_all(
        sent, is_source=jax.process_index() == source
    )
    raw = np.ascontiguousarray(got).view("uint8")[: part.nbytes]
    return raw.view(part.dtype).reshape(part.shape)


def contiguous(array, block=256):
    """`numpy.ascontiguousarray`, faster where axes change places.

    NumPy goes through one of both arrays row by row, and through the other
    in strides that miss the cache.
    """
    if array.flags.c_contiguous:
        return array
    found = np.empty(array.shape, array.dtype)
    size = array.itemsize
    # Copied as they are: NumPy takes its time with dtypes not its own.
    given, taken = (x.view(f"uint{8 * size}") for x in (array, found))
    axis = int(np.argmin(array.strides))
    given, taken = (np.moveaxis(x, axis, 0) for x in (given, taken))
    for i in range(0, given.shape[0], block):
        for j in range(0, given.shape[-1], block):
            at = (slice(i, i + block), ..., slice(j, j + block))
            taken[at] = given[at]
    return found


def on_first(write, arrays=()):
    """Has the first process write what all have a part in gathering.

    Args:
        write: function without arguments, called in the first process.
        arrays: iterator that gathers, which `write` goes through; the others
            go through it for their part.

    Raises:
        OSError: in all other processes, where `write` raised in the first.
    """
    if jax.process_count() == 1:
        write()
        return
    error = None
    if jax.process_index() == 0:
        try:
            write()
        except Exception as e:  # noqa: BLE001 - whatever it is, all end
            error = e
    collections.deque(arrays, maxlen=0)
    failed = multihost_utils.broadcast_one_to_all(np.int32(error is not None))
    if error is not None:
        raise error
    if failed:
        raise OSError(
            "The first process could not write; its own error says why. "
            f"Received: process {jax.process_index()} of "
            f"{jax.process_count()}"
        )


class Values(keras.StatelessScope):
    """A scope in which a variable's value is made when it is asked for.

    Args:
        make: function from a `keras.Variable` to an array; what it asks for
            in turn are the values that variables have.
    """

    def __init__(self, make):
        super().__init__(initialize_variables=False)
        self._make, self._making = make, False

    def get_current_value(self, variable):
        if self._making:
            return None
        self._making = True
        try:
            return self._make(variable)
        finally:
            self._making = False


@contextlib.contextmanager
def whole_on_host():
    """Where arrays are made that a distribution then spreads.

    Keras makes a whole tensor on the first device and sends it on from there;
    so it is made in the host's memory.
    """
    if keras.distribution.distribution() is None:
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
