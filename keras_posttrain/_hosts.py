"""Small arrays that all processes of a run exchange.

They are sent by one device of each process, the first of Keras's distribution
in this thread. Threads whose distributions share no device can therefore
exchange arrays at the same time, as a trainer and a sampler do. A thread
without devices of its own uses a `Channel`, and so do processes with several
CPU devices each: JAX does not order a program on one of them after those on
all, and what both send over a pair of devices would get mixed up.
"""

import contextlib
import functools
import threading

import jax
import keras
import numpy as np
from jax._src.distributed import global_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "process"
# The most bytes of a value that JAX's service gets at once.
PART = 2**20
# Milliseconds until another process must have sent something. One that is
# lost ends this process sooner, by JAX's heartbeats.
TIMEOUT = 7 * 24 * 3600 * 1000

_of_thread = threading.local()


class Channel:
    """Exchanges arrays without devices, through JAX's coordination service.

    The process that hosts the service passes all of them on, in parts. This
    suits samples and rewards, and takes long for the weights of large models.
    One thread of each process uses a channel at a time.

    Args:
        name: str, the same in all processes, and another for each channel.
    """

    def __init__(self, name):
        self._name, self._count = name, 0
        self._sent = []

    @contextlib.contextmanager
    def used(self):
        """A scope in which this thread exchanges arrays by this channel."""
        before = _channel()
        _of_thread.channel = self
        try:
            yield
        finally:
            _of_thread.channel = before

    def gather(self, x):
        """As the function `gather` below."""
        every = self._exchange(x, range(jax.process_count()))
        return np.stack(list(every.values()))

    def broadcast(self, x, source):
        """As the function `broadcast` below."""
        return self._exchange(x, [source])[source]

    def _exchange(self, x, sources):
        """Returns the arrays of some processes, by their indices.

        The others send one byte each, to say that they have read all before.
        """
        if not x.nbytes:
            return dict.fromkeys(sources, x)
        client, own = global_state.client, jax.process_index()
        data = x.tobytes() if own in sources else b"-"
        self._count += 1

        def keys(process):
            name = f"{self._name}/{self._count}/{process}"
            size = x.nbytes if process in sources else 1
            return [f"{name}/{start}" for start in range(0, size, PART)]

        sent = keys(own)
        for i, key in enumerate(sent):
            part = data[i * PART : (i + 1) * PART]
            client.key_value_set_bytes(key, part)
        found = {}
        for process in range(jax.process_count()):
            parts = [
                client.blocking_key_value_get_bytes(key, TIMEOUT)
                for key in keys(process)
            ]
            if process in sources:
                array = np.frombuffer(b"".join(parts), x.dtype)
                found[process] = array.reshape(x.shape)
        # All have read what this process sent before, as they have sent more.
        for key in self._sent:
            client.key_value_delete(key)
        self._sent = sent
        return found


def _channel():
    return getattr(_of_thread, "channel", None)


def _channel_to_use():
    """Returns this thread's `Channel`, or that of its CPUs, or `None`."""
    if (channel := _channel()) is not None:
        return channel
    has_several = jax.device_count() > jax.process_count()
    if has_several and jax.local_devices()[0].platform == "cpu":
        return _channel_of(tuple(_mesh().devices.flat))
    return None


@functools.cache
def _channel_of(devices):
    return Channel("exchange/" + "-".join(str(d.id) for d in devices))


def gather(x):
    """Returns all processes' arrays, stacked in the order of the processes.

    `x` is a NumPy array of the same shape and dtype in all of them.
    """
    if (channel := _channel_to_use()) is not None:
        return channel.gather(np.asarray(x))
    return _run(_mesh(), "gather", x)


def broadcast(x, source):
    """Returns the array of the process with the index `source`.

    `x` is a NumPy array of the same shape and dtype in all processes. Its
    dtype is one of ints: the others are replaced by zeros, and -0.0 + 0.0 is
    0.0.
    """
    if (channel := _channel_to_use()) is not None:
        return channel.broadcast(np.asarray(x), source)
    if jax.process_index() != source:
        x = np.zeros_like(x)
    return _run(_mesh(), "sum", x)


def _mesh():
    distribution = keras.distribution.distribution()
    devices = jax.devices()
    if distribution is not None:
        own = list(distribution.device_mesh.backend_mesh.devices.flat)
        if len({d.process_index for d in own}) == jax.process_count():
            devices = own
    first = {}
    for device in devices:
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[i] for i in sorted(first)]), AXIS)


def _run(mesh, what, x):
    x = np.asarray(x)
    here = mesh.local_devices[0]
    whole = jax.make_array_from_single_device_arrays(
        (mesh.size, *x.shape),
        NamedSharding(mesh, P(AXIS)),
        [jax.device_put(x[None], here)],
    )
    return np.asarray(_program(mesh, what)(whole).addressable_data(0))


@functools.lru_cache(maxsize=16)
def _program(mesh, what):
    def program(x):
        return x if what == "gather" else x.sum(axis=0, dtype=x.dtype)

    return jax.jit(program, out_shardings=NamedSharding(mesh, P()))
