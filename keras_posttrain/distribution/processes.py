"""Several processes that train one model together.

Each process runs the same script after `keras.distribution.initialize(...)`
and reads the same rows in the same order. Arrays of the model and of a batch
span the devices of all processes; each process holds the shards of its own
devices. All processes must run the same computations on such arrays, in the
same order.
"""

import io
import json
import os
import signal
import sys
import time

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

from keras_posttrain import _hosts
from keras_posttrain.data.rows import sharing

# Seconds in which processes that raise the same error report it themselves.
GRACE_SECONDS = 5.0


def count():
    """Returns the number of processes of this run."""
    return jax.process_count()


def index():
    """Returns the index of this process, from 0."""
    return jax.process_index()


def is_first():
    """Returns `True` in the process that writes logs and files."""
    return index() == 0


def need_distribution():
    """Raises an error if each process would train its own model.

    That is so if no distribution over the devices of all of them is set.
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
            "Several processes train one model with a distribution over the "
            "devices of all. Received: "
            f"{count()} processes, a distribution over {len(devices)} of "
            "them. Call `keras.distribution.set_distribution("
            "kpt.distribution.fsdp())`, or another one, before the model is "
            "made."
        )


def need_even_rows():
    """Raises an error if processes hold rows of a batch that partly overlap.

    Keras makes arrays of what each process has: as many rows in all of them,
    and in any two of them the same rows or different ones. `put_rows` makes
    them of all rows, for any layout.
    """
    distribution = keras.distribution.distribution()
    if count() == 1 or distribution is None:
        return
    size = distribution.device_mesh.backend_mesh.size
    layout = distribution.get_data_layout((size,)).backend_layout
    held = {}
    for device, (part,) in layout.devices_indices_map((size,)).items():
        starts = held.setdefault(device.process_index, set())
        starts.add(part.start or 0)
    shares = set(map(frozenset, held.values()))
    rows = set().union(*shares)
    if len({*map(len, shares)}) == 1 and len(rows) == sum(map(len, shares)):
        return
    numbers = {start: i for i, start in enumerate(sorted(rows))}
    text = ", ".join(
        f"process {i} has {sorted(numbers[x] for x in held[i])}"
        for i in sorted(held)[:4]
    )
    raise ValueError(
        "Devices that have the same rows, along the axis of `context` or "
        "`model`, must belong to one process, or be all devices of several; "
        "and each process must have the same number of devices. Received: "
        f"of {len(rows)} parts of a batch, counted from 0, {text}"
        f"{', and so on' * (len(held) > 4)}. Use a `context` or `model` that "
        "divides the number of devices of a process or is a multiple of it."
    )


def own_rows():
    """Returns a function that selects this process's rows of a batch.

    Devices of several processes that have the same rows, such as those that
    split the tokens of a row, select the same.

    Returns:
        A function from the number of rows to a sorted int array of indices.
        It may be called in any thread. `None` if this process holds all
        rows: there is one process, or no distribution.

    Raises:
        ValueError: see `need_even_rows`.
    """
    need_even_rows()
    # Keras's distribution is thread-local.
    distribution = keras.distribution.distribution()
    if count() == 1 or distribution is None:
        return None

    def rows(number):
        layout = distribution.get_data_layout((number,)).backend_layout
        parts = layout.addressable_devices_indices_map((number,)).values()
        indices = np.arange(number)
        return np.unique(np.concatenate([indices[part] for part in parts]))

    return rows


def put_rows(batch):
    """Shards the rows of a batch over the mesh, if a distribution is set.

    `batch` is a dict of NumPy arrays with all rows, the same everywhere.
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
    """Gathers the arrays of a tree into full NumPy arrays in every process."""

    def get(x):
        is_array = isinstance(x, jax.Array)
        if is_array and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(get, tree)


def exchange(value):
    """Returns all processes' values, which JSON can encode, in their order."""
    if count() == 1:
        return [value]
    return [json.loads(text) for text in _exchange(json.dumps(value).encode())]


def exchange_arrays(arrays):
    """Returns all processes' arrays, in the order of the processes.

    Args:
        arrays: dict from names to NumPy arrays of numbers or strings, whose
            shapes may differ between processes.

    Returns:
        A list of such dicts.
    """
    if count() == 1:
        return [arrays]
    file = io.BytesIO()
    np.savez(file, **arrays)
    found = []
    for data in _exchange(file.getvalue()):
        with np.load(io.BytesIO(data)) as part:
            found.append(dict(part))
    return found


def _exchange(data):
    """Returns the bytes of all processes."""
    data = np.frombuffer(data, np.uint8)
    sizes = _hosts.gather(np.int32(len(data))).reshape(-1)
    # Rounded up, so that few sizes are compiled.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    every = _hosts.gather(padded)
    return [part[:size].tobytes() for part, size in zip(every, sizes)]


def shared_rows():
    """Returns a scope in which each process tokenizes a share of the rows.

    All processes must prepare the same datasets in it.
    """
    return sharing.shared(row_share())


def row_share():
    """Returns this process's `Share` of rows; `None` if it is alone."""
    if count() == 1:
        return None
    return sharing.Share(index(), count(), _exchange, _compare_rows)


def exchange_results(function):
    """Calls a function in each process and returns a list of the results.

    Args:
        function: function without arguments that returns a value that JSON
            can encode. It may raise an exception in some processes.

    Raises:
        ValueError: in all processes, with the index of the first process in
            which the function raised an exception, and its text.
    """
    value = error = text = None
    try:
        value = function()
    except Exception as e:  # Any exception: the others wait for a result.
        error, text = e, f"{type(e).__name__}: {e}"
    results = exchange([value, text])
    for k, (_, text) in enumerate(results):
        if text is not None:
            raise ValueError(f"In process {k} of {count()}: {text}") from error
    return [value for value, _ in results]


def from_first(value):
    """Returns the first process's value in all processes."""
    return exchange(value if is_first() else None)[0]


def check_equal(values):
    """Raises an error in all processes if values differ between them.

    Args:
        values: dict of values that JSON can encode, by names that a user
            knows.
    """
    first, *rest = exchange(values)
    for k, values in enumerate(rest, 1):
        for name in {**first, **values}:
            one, other = first.get(name), values.get(name)
            if one != other:
                raise ValueError(
                    "All processes must run the same script on the same "
                    f"data. Received: {name}={one!r} in process 0, "
                    f"{name}={other!r} in process {k}. Start all with the "
                    "same arguments and files."
                )


def _compare_rows(read):
    first, *rest = exchange_results(read)
    for k, found in enumerate(rest, 1):
        if found != first:
            raise ValueError(
                "All processes must be given the same stream, in the same "
                "order: each trains on its part of every batch. Received: "
                f"after {first['before']:,} rows of an epoch that are the "
                f"same, {_rows(first)} in process 0, {_rows(found)} in "
                f"process {k}. Give all processes all rows: do not split "
                "them by process, nor shuffle them with another seed."
            )


def _rows(found):
    end = " and the end" if found["ends"] else ""
    return f"{found['rows']:,} rows (hash={found['hash']!r}){end}"


def must_start_in_order():
    """Returns `True` if two threads may not start programs at the same time.

    That is so with several processes on CPUs, even for programs that share no
    device: JAX's CPU client runs one program of several devices at a time, in
    the order of their start. If the orders of two processes differ, each
    waits for the other forever.
    """
    return count() > 1 and jax.local_devices()[0].platform == "cpu"


def share(number):
    """Returns the slice of `number` items that this process handles."""
    first = -(-number * index() // count())
    return slice(first, -(-number * (index() + 1) // count()))


def is_preempted(call):
    """Returns `True` in all processes after one of them received SIGTERM.

    `call` is the number of this call: 1, 2, and so on.
    """
    return count() > 1 and multihost_utils.reached_preemption_sync_point(call)


def leave():
    """Disconnects from the other processes when all are about to end."""
    jax.distributed.shutdown()
    # JAX's own handler would still catch the signal.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def may_be_lost(error):
    """Returns `True` if the loss of a process may be the cause of an error.

    The error and its causes are searched for one of JAX's runtime.
    """
    while error is not None and count() > 1:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def exit_after(error):
    """Exits without JAX's barrier if an uncaught error ends the script.

    At a normal exit JAX waits for the other processes, which wait in a
    collective for this one. Without the barrier this process sends no more
    heartbeats, and JAX ends the others.
    """
    if getattr(sys, "last_value", None) is error:
        time.sleep(GRACE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
