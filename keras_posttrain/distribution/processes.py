"""Several processes that train one model together.

Each runs the same script, under `keras.distribution.initialize(...)`, and
knows the same rows in the same order. Arrays of the model and of a batch span
the devices of all; a process holds the parts of its own devices. What is done
to such an array all must do, in the same order.
"""

import json
import signal

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils


def count():
    """Int, the processes of this run."""
    return jax.process_count()


def index():
    """Int, which of them this one is, from 0."""
    return jax.process_index()


def is_first():
    """Whether this is the process that writes logs and files."""
    return index() == 0


def need_distribution():
    """Refuses processes that would each train a model of its own.

    Raises:
        ValueError: several processes run, and no distribution over the
            devices of all of them is set.
    """
    if count() == 1:
        return
    distribution = keras.distribution.distribution()
    devices = set()
    if distribution is not None:
        mesh = distribution.device_mesh.backend_mesh
        devices = {d.process_index for d in mesh.devices.flat}
    if len(devices) < count():
        raise ValueError(
            "Several processes train one model by a distribution over the "
            "devices of all. Received: "
            f"{count()} processes, a distribution over {len(devices)} of "
            "them. Call `keras.distribution.set_distribution("
            "kpt.distribution.fsdp())`, or another, before the model is made."
        )


def own_rows():
    """Which rows of a batch this process holds.

    Returns:
        A function from the number of rows to an int array, in order; `None`
        where one process runs, or each for itself, and holds all. It may be
        called in any thread.
    """
    # Keras's distribution is known to this thread alone.
    distribution = keras.distribution.distribution()
    if count() == 1 or distribution is None:
        return None

    def rows(number):
        layout = distribution.get_data_layout((number,)).backend_layout
        parts = layout.addressable_devices_indices_map((number,)).values()
        every = np.arange(number)
        return np.unique(np.concatenate([every[part] for part in parts]))

    return rows


def put_rows(batch):
    """A batch with its rows spread over the mesh, where there is one.

    Args:
        batch: dict of NumPy arrays, whole and the same in all processes.

    Returns:
        Dict of arrays.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return batch

    def put(x):
        layout = distribution.get_data_layout(x.shape).backend_layout
        if count() == 1:
            return jax.device_put(x, layout)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, layout, lambda i: x[i])

    return {name: put(x) for name, x in batch.items()}


def fetch(tree):
    """Arrays as NumPy arrays, whole in every process."""

    def get(x):
        is_array = isinstance(x, jax.Array)
        if is_array and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(get, tree)


def exchange(value):
    """What each process has to say.

    Args:
        value: what JSON can hold.

    Returns:
        List of the values of all processes, in their order.
    """
    if count() == 1:
        return [value]
    text = np.frombuffer(json.dumps([index(), value]).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # Few sizes, few programs.
    room = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    room[: len(text)] = text
    texts = multihost_utils.process_allgather(room)
    said = [json.loads(bytes(t[:n])) for t, n in zip(texts, sizes.flat)]
    return [value for _, value in sorted(said, key=lambda x: x[0])]


def exchange_results(function):
    """What a function gives in each process; it may raise in some.

    Args:
        function: of nothing, gives what JSON can hold.

    Returns:
        List of the results of all processes, in their order.

    Raises:
        ValueError: in all processes, names the one in which the function
            raised, and what.
    """
    value = error = text = None
    try:
        value = function()
    except Exception as e:  # whatever it is, the others wait for it
        error, text = e, f"{type(e).__name__}: {e}"
    said = exchange([value, text])
    for k, (_, text) in enumerate(said):
        if text is not None:
            raise ValueError(f"In process {k} of {count()}: {text}") from error
    return [value for value, _ in said]


def from_first(value):
    """What the first process has, in all of them."""
    return exchange(value if is_first() else None)[0]


def any_of(flag):
    """Whether a flag is set in any of the processes."""
    return any(exchange(bool(flag)))


def wait(name):
    """Waits until all processes are here."""
    if count() > 1:
        multihost_utils.sync_global_devices(name)


def check_equal(values):
    """Refuses processes that do not do the same.

    Args:
        values: dict of what JSON can hold, by names that a user knows.

    Raises:
        ValueError: names what differs, and the processes, in all of them.
    """
    said = exchange(values)
    for k, theirs in enumerate(said):
        for name in {**said[0], **theirs}:
            one, other = said[0].get(name), theirs.get(name)
            if one != other:
                raise ValueError(
                    "All processes must run the same script on the same "
                    f"data. Received: {name}={one!r} in process 0, "
                    f"{name}={other!r} in process {k}. Start all with the "
                    "same arguments and files."
                )


def share(number):
    """The part of so many things that falls to this process: a slice."""
    first = -(-number * index() // count())
    return slice(first, -(-number * (index() + 1) // count()))


def is_preempted(call):
    """Whether one of several processes got SIGTERM, all told at one call.

    Args:
        call: int, how often this was asked: 1, 2, and so on.
    """
    return count() > 1 and multihost_utils.reached_preemption_sync_point(call)


def leave():
    """Ends being one of several processes, when all are about to end."""
    jax.distributed.shutdown()
    # JAX's own handler would go on listening.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
