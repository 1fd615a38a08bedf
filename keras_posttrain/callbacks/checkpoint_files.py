"""The folder of one step of a checkpoint: how it is written and read."""

import collections
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.callbacks.directories import advice
from keras_posttrain.distribution import processes

# Platforms whose arrays are in the memory of the host.
ON_HOST = ("cpu",)
# Bits of the words that accelerators sum up.
WORDS = (8, 16, 32)


def write(path, arrays, meta):
    """Writes a folder with `state` and `meta`, in place of one that is there.

    It is complete when this returns: it is written beside and renamed.
    """
    path = path.absolute()
    arrays = arrays | {"best": {}}
    meta = meta | {"best": [], "sums": checksums(arrays)}
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, args=contents(arrays, meta), force=True)
    except OSError as e:
        shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            f"A state could not be written to {str(path)!r}. "
            f"{advice(e, path)}. ({type(e).__name__}: {str(e)[:500]})"
        ) from e


def read_meta(path):
    """Returns the `meta` of a folder.

    Raises:
        ValueError: there is none that can be read.
    """
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    return _read(
        path, ocp.JsonCheckpointHandler(), "meta", ocp.args.JsonRestore()
    )


def read_arrays(path, arrays, meta):
    """Returns the arrays of a folder, as `arrays` are placed."""
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    best = {name: arrays["trainable"] for name in meta["best"]}
    wanted = jax.tree.map(abstract, {**arrays, "best": best})
    found = _read(
        path,
        ocp.StandardCheckpointHandler(),
        "state",
        ocp.args.StandardRestore(wanted),
    )
    try:
        check_sums(found, meta)
    except ValueError as e:
        raise ValueError(f"The state in {str(path)!r} is damaged: {e}.") from e
    return found


def _read(path, handler, name, args):
    try:
        return handler.restore(path.absolute() / name, args=args)
    except Exception as e:  # noqa: BLE001 - damage can raise any error
        raise ValueError(
            f"No state can be read from {str(path)!r}: name a folder that "
            "`save_state` wrote, or that of a step of "
            '`kpt.callbacks.Checkpoint`, such as "run/checkpoints/500". '
            f"({type(e).__name__}: {str(e)[:300]})"
        ) from e


def _checkpointer():
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(handler_registry=handlers()),
        multiprocessing_options=waiting(),
    )


def contents(arrays, meta):
    """Returns what Orbax writes to a folder, by the `handlers`."""
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)
    )


def handlers():
    """Returns Orbax's handlers of `state` and `meta`.

    Arrays are not compressed: zstd takes most of a save's processor time, and
    makes random float32 numbers 8 % smaller.
    """
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    arrays = ocp.PyTreeCheckpointHandler(
        use_compression=False, multiprocessing_options=waiting()
    )
    registry.add("state", ocp.args.PyTreeSave, arrays)
    registry.add("meta", ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return registry


def waiting():
    """Returns Orbax's options of how processes wait for each other.

    By default they wait in a program on all devices. Those of a sampler run
    programs of another thread meanwhile, and if not all processes began them
    in the same order, none would ever end.
    """
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    count = processes.count()
    return ocp.options.MultiprocessingOptions(
        active_processes=set(range(count)) if count > 1 else None
    )


def detached(arrays):
    """Returns arrays that stay as they are while training goes on.

    On the CPU, arrays are written from where they are, while the next step
    takes over their memory: they are copied, once. Those of other devices are
    copied to the host before the save returns.
    """
    if jax.default_backend() != "cpu":
        return arrays
    return jax.tree.map(_copy, arrays)


def _copy(array):
    if not isinstance(array, jax.Array):
        return np.array(array)
    if is_of_one_process(array):
        # Orbax does not write the arrays of one process among several.
        return np.array(array)
    # In the background, and without a program for each shape.
    return jax.device_put(array, array.sharding, may_alias=False)


def checksums(arrays):
    """Computes a checksum of each array, the same on each mesh.

    Orbax reads damaged numbers as they are.

    Args:
        arrays: dict of trees of `jax.Array` and NumPy arrays.

    Returns:
        A dict from the path of each array to an int: the sum of its bits, as
        unsigned words of its item size, modulo 2**32. It is the same in all
        processes.
    """
    leaves = jax.tree.leaves_with_path(arrays)
    found = _sums_on_devices([array for _, array in leaves])
    own = [
        _sum_of_words(array)
        if total is None
        # The same in all processes.
        else total * processes.is_first()
        for (_, array), total in zip(leaves, found, strict=True)
    ]
    sums = np.sum(processes.exchange(own), axis=0, dtype="uint32")
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    return dict(zip(names, sums.tolist(), strict=True))


def _sums_on_devices(arrays):
    """Sums up the words of arrays on accelerators, where they are.

    On the host this would wait for a copy of each.

    Returns:
        List of ints, of all processes; `None` for an array of the host.
    """
    groups = collections.defaultdict(list)
    for i, array in enumerate(arrays):
        if (
            isinstance(array, jax.Array)
            and not is_of_one_process(array)
            and _bits(array.dtype) in WORDS
            and _platform(array) not in ON_HOST
        ):
            groups[frozenset(array.sharding.device_set)].append(i)
    found = [None] * len(arrays)
    for places in groups.values():
        sums = jax.device_get(_sums([arrays[i] for i in places]))
        for i, total in zip(places, sums):
            found[i] = int(total)
    return found


def _bits(dtype):
    """Returns the bits of a number: fewer than a byte has, or 0 of others."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 if jnp.issubdtype(dtype, jnp.bool_) else 0


def _platform(array):
    return next(iter(array.sharding.device_set)).platform


@jax.jit
def _sums(arrays):
    """Sums up the words of each array, modulo 2**32."""

    def words(x):
        if x.dtype == bool:
            return x.astype("uint8")
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return [jnp.sum(words(x), dtype="uint32") for x in arrays]


def _sum_of_words(array):
    """Sums up the words that this process adds to those of the others."""
    if isinstance(array, jax.Array) and not is_of_one_process(array):
        shards = array.addressable_shards
        parts = [shard.data for shard in shards if shard.replica_id == 0]
    else:
        parts = [array] if processes.is_first() else []
    total = np.uint64(0)
    for part in parts:
        words = np.ascontiguousarray(part).reshape(-1)
        words = words.view(f"uint{8 * words.itemsize}")
        total += np.sum(words, dtype="uint32")
    return int(total)


def is_of_one_process(array):
    """Returns `True` for an array of one process among several."""
    return processes.count() > 1 and array.is_fully_addressable


def check_sums(arrays, meta):
    """Raises an error if arrays are not those that were written.

    Args:
        arrays: dict of trees of arrays, as they were read.
        meta: dict with their `sums`.

    Raises:
        ValueError: in all processes, with the path of the first array that
            differs.
    """
    found = checksums(arrays)
    different = [name for name, x in meta["sums"].items() if found[name] != x]
    if different:
        raise ValueError(
            f"{len(different)} of {len(found)} arrays have another checksum "
            f"than when they were written, the first is {different[0]}"
        )


def meta_checksum(meta):
    """Returns the SHA-256 sum of all other entries of `meta`, as JSON."""
    others = {k: v for k, v in meta.items() if k != "checksum"}
    text = json.dumps(others, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def abstract(array):
    """Returns the shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=array.sharding
    )
