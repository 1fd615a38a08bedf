"""Moves weights between files and devices, one slice at a time.

In addition to its devices' arrays, a host holds at most one tensor of a
model, or two while they are loaded, where they are converted or joined of
several. A device holds only the slice of a tensor that it keeps. With several
processes, all of them must call a function that gathers, in the same order.
"""

import collections
import contextlib
from concurrent import futures

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import _hosts
from keras_posttrain.models import sharding

# Bytes that are fetched from a device at once.
CHUNK = 2**26
# Tensors that are read at the same time.
THREADS = 2
# Bytes at whose multiples XLA's arrays begin on a CPU.
ALIGNMENT = 64


def fill(variable, read):
    """Assigns a variable, reading the slice of each device separately.

    `read` is a function from a tuple of slices, one for each axis of the
    variable, to that part of its value as a numpy array. It may be a view of
    a file: it is copied.
    """
    fill_all([(variable, read)])


def fill_all(pairs):
    """Assigns variables, two of which are read at the same time.

    `pairs` is an iterable of variables and of their `read` functions, as of
    `fill`. These are called in threads.
    """
    # A distribution and a default device are known to this thread alone.
    default = jax.config.jax_default_device
    waiting = collections.deque()
    with futures.ThreadPoolExecutor(THREADS) as pool:
        for variable, read in pairs:
            if len(waiting) == THREADS:
                _assign(*waiting.popleft())
            shape, dtype = tuple(variable.shape), jnp.dtype(variable.dtype)
            layout = sharding.layout_of(variable)
            target = layout and layout.backend_layout
            place = pool.submit(_place, read, shape, dtype, target, default)
            waiting.append((variable, place))
        while waiting:
            _assign(*waiting.popleft())


def _assign(variable, place):
    variable.assign(place.result())


def _place(read, shape, dtype, target, default):
    """Reads an array to the devices of a sharding, or to the default one."""

    def part(bounds):
        # A part of an array without axes is a number.
        found = np.asarray(read(tuple(slice(*x) for x in bounds)))
        return found.astype(dtype, copy=False)

    if target is None:
        with jax.default_device(default):
            return _put(part([(0, size) for size in shape]))
    pieces = {}
    for bounds, devices in _by_index(target, shape).items():
        own = [d for d in devices if d.process_index == jax.process_index()]
        if own:
            array = part(bounds)
            pieces.update((device, _put(array, device)) for device in own)
    order = target.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, target, [pieces[device] for device in order]
    )


def _put(array, device=None):
    """Copies an array to a device, and waits for it.

    JAX transposes on the way, faster than NumPy. On a CPU it would keep the
    memory of an array that is aligned as its own are, also with
    `may_alias=False`: that of a file, which it could not donate either.
    """
    found = jax.device_put(array, device)
    [device] = found.devices()
    is_kept = (
        device.platform == "cpu"
        and array.flags.c_contiguous
        and array.ctypes.data % ALIGNMENT == 0
    )
    return jax.block_until_ready(jnp.copy(found) if is_kept else found)


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
