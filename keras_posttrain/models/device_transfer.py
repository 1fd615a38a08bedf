"""Moves weights between files and devices, one slice at a time.

In addition to its devices' arrays, a host holds at most one tensor of a
model. A device holds only the slice of a tensor that it keeps. With several
processes, all of them must call a function that gathers, in the same order.
"""

import collections
import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import _hosts
from keras_posttrain.models import sharding

# Bytes that are fetched from a device at once.
CHUNK = 2**26


def fill(variable, read):
    """Assigns a variable, reading the slice of each device separately.

    `read` is a function from a tuple of slices, one for each axis of the
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
        # Without this, all slices would wait in the host's memory.
        jax.block_until_ready(list(pieces.values()))
    order = target.addressable_devices_indices_map(shape)
    variable.assign(
        jax.make_array_from_single_device_arrays(
            shape, target, [pieces[device] for device in order]
        )
    )


def to_host(array):
    """Copies a `jax.Array` that may span many processes to all hosts.

    Unlike with `numpy.asarray`, JAX does not cache the copy.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    shape, dtype = array.shape, array.dtype
    found = np.empty(shape, dtype)
    if array.is_fully_replicated:
        # Where each process has one device, `addressable_shards` fails for
        # what `device_put` has copied from one of them.
        _fetch(array.addressable_data(0), found)
        return found
    local = {shard.device: shard.data for shard in array.addressable_shards}
    for index, devices in _by_index(array.sharding, shape).items():
        here = [device for device in devices if device in local]
        part = found[*(slice(*bounds) for bounds in index), ...]
        if here:
            _fetch(local[here[0]], part)
        if not array.is_fully_addressable:
            part[...] = _from_process(devices[0].process_index, part)
    return found


def _by_index(target, shape):
    """Groups devices by the part they hold, `((start, stop), ...)`."""
    found = {}
    for device, index in target.devices_indices_map(shape).items():
        bounds = zip(index, shape)
        key = tuple(part.indices(size)[:2] for part, size in bounds)
        found.setdefault(key, []).append(device)
    for devices in found.values():
        devices.sort(key=lambda device: device.id)
    return dict(sorted(found.items()))


def _fetch(data, out):
    """Copies an array of one device to `out`, in chunks of rows."""
    if not data.shape:
        out[...] = jnp.copy(data)
        return
    rows = max(1, CHUNK * len(data) // max(1, data.nbytes))
    for start in range(0, len(data), rows):
        size = min(rows, len(data) - start)
        # A slice is a new array: JAX caches the numpy copy of an array on
        # that array, and this one is freed.
        out[start : start + size] = jax.lax.dynamic_slice_in_dim(
            data, start, size
        )


def _from_process(source, part):
    """Sends the array of one process to all of them."""
    sent = np.zeros(-(-part.nbytes // 4), "uint32")
    if jax.process_index() == source:
        raw = np.ascontiguousarray(part).reshape(-1).view("uint8")
        sent.view("uint8")[: part.nbytes] = raw
    got = _hosts.broadcast(sent, source)
    raw = np.ascontiguousarray(got).view("uint8")[: part.nbytes]
    return raw.view(part.dtype).reshape(part.shape)


def contiguous(array, block=256):
    """Copies an array to C order, faster than NumPy for transposed axes.

    `numpy.ascontiguousarray` reads one of the two arrays in large strides
    that miss the CPU's cache. Here both are copied in small blocks.
    """
    if array.flags.c_contiguous:
        return array
    found = np.empty(array.shape, array.dtype)
    size = array.itemsize
    # NumPy is slow at copying dtypes that it does not define itself, such as
    # bfloat16: the bits are copied as ints.
    given, taken = (x.view(f"uint{8 * size}") for x in (array, found))
    axis = int(np.argmin(array.strides))
    given, taken = (np.moveaxis(x, axis, 0) for x in (given, taken))
    for i in range(0, given.shape[0], block):
        for j in range(0, given.shape[-1], block):
            at = (slice(i, i + block), ..., slice(j, j + block))
            taken[at] = given[at]
    return found


def on_first(write, arrays=()):
    """Writes in the first process what all processes help to gather.

    Args:
        write: function called in the first process. It consumes `arrays`.
        arrays: iterator whose items all processes gather together; the other
            processes consume it and drop the items.

    Raises:
        OSError: in all other processes, if `write` raised in the first.
    """
    if jax.process_count() == 1:
        write()
        return
    error = None
    if jax.process_index() == 0:
        try:
            write()
        except Exception as e:  # noqa: BLE001 - the others must stop too
            error = e
    collections.deque(arrays, maxlen=0)
    failed = _hosts.broadcast(np.int32(error is not None), 0)
    if error is not None:
        raise error
    if failed:
        raise OSError(
            "The first process could not write; its own error says why. "
            f"Received: process {jax.process_index()} of "
            f"{jax.process_count()}"
        )


class ValueScope(keras.StatelessScope):
    """A scope in which a variable's value is `make(variable)`.

    Variables that `make` reads itself have their own values.
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
def host_as_default():
    """Creates arrays in the host's memory if a distribution will split them.

    Keras creates a complete tensor on the first device and distributes it
    from there, which needs memory for all of it on that device.
    """
    if keras.distribution.distribution() is None:
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
