"""Small arrays that all processes of a run exchange.

They are sent by one device of each process, the first of Keras's distribution
in this thread. Threads whose distributions share no device can therefore
exchange arrays at the same time, as a trainer and a sampler do.
"""

import functools

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "process"


def gather(x):
    """Returns all processes' arrays, stacked in the order of the processes.

    `x` is a NumPy array of the same shape and dtype in all of them.
    """
    return _run(_mesh(), "gather", x)


def broadcast(x, source):
    """Returns the array of the process with the index `source`.

    `x` is a NumPy array of the same shape and dtype in all processes. Its
    dtype is one of ints: the others are replaced by zeros, and -0.0 + 0.0 is
    0.0.
    """
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
