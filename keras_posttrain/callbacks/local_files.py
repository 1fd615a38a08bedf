"""The files of local checkpoints: the parts of arrays that a process holds.

A part is a box of an array, such as the shard of one device. A file in
safetensors' format has the bytes of each part under the path of its array and
the bounds of its box, and the metadata of the checkpoint in its header.
"""

import dataclasses
import json
import os
import pathlib
import re
import zlib

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from keras_posttrain.callbacks.checkpoint_files import (
    is_of_one_process,
    meta_checksum,
)
from keras_posttrain.distribution import processes

NAME = re.compile(r"step-(\d+)\.process-(\d+)\.safetensors")


def path_of(folder, step):
    """Returns the path of this process's file of a step."""
    return folder / f"step-{step}.process-{processes.index()}.safetensors"


@dataclasses.dataclass(frozen=True)
class File:
    """A file of parts, as its header describes it.

    Attributes:
        path: `pathlib.Path`.
        step: int.
        process: int, index of the process that wrote it.
        run: str, what distinguishes the `fit` that wrote it from others of
            the same run; empty if the file is damaged.
        meta: dict, the metadata of the checkpoint.
        parts: dict from the names of parts to `(size, checksum)`, the number
            of bytes and their CRC-32.
        error: str or `None`, how the file is damaged.
    """

    path: pathlib.Path
    step: int
    process: int
    run: str = ""
    meta: dict | None = None
    parts: dict = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def key(self):
        """The step and what wrote it: the same in files of one checkpoint."""
        return self.step, self.run

    def open(self):
        """Opens the file; `get_tensor(name)` reads a part, a uint8 array."""
        return safe_open(self.path, "numpy")


def files_in(folder):
    """Returns the `File`s of a folder, and removes what was not completed."""
    found = []
    for path in sorted(folder.iterdir()):
        if name := NAME.fullmatch(path.name):
            found.append(_file(path, *map(int, name.groups())))
        elif path.suffix == ".tmp":
            path.unlink(missing_ok=True)
    return found


def _file(path, step, process):
    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata()
            meta = json.loads(header["meta"])
            if meta["checksum"] != meta_checksum(meta):
                raise ValueError("the checksum of its metadata differs")
            sums = json.loads(header["sums"])
            parts = {
                name: (file.get_slice(name).get_shape()[0], sums[name])
                for name in file.keys()
            }
        return File(path, step, process, header["run"], meta, parts)
    except Exception as e:  # noqa: BLE001 - damage can raise any error
        error = f"{type(e).__name__}: {str(e)[:200]}"
        return File(path, step, process, error=error)


def write(path, parts, run, meta):
    """Writes a file of parts, which is complete once it has its name.

    Args:
        path: `pathlib.Path`; folders are created.
        parts: dict of NumPy arrays by name.
        run: str, see `File`.
        meta: dict with its checksum.
    """
    data = {
        name: np.ascontiguousarray(part).reshape(-1).view("uint8")
        for name, part in parts.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_suffix(".tmp")
    try:
        # Those of whole arrays, in `meta`, do not see a damaged replica.
        sums = {name: zlib.crc32(part) for name, part in data.items()}
        header = {
            "run": run,
            "meta": json.dumps(meta),
            "sums": json.dumps(sums),
        }
        save_file(data, incomplete, metadata=header)
        _sync(incomplete)
        os.replace(incomplete, path)
        _sync(path.parent)
    except BaseException:
        incomplete.unlink(missing_ok=True)
        raise


def _sync(path):
    """Waits until a file or folder is on the disk."""
    if os.name == "nt":
        # Windows opens no folders, and files only to be written.
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def own_parts(arrays):
    """Copies the parts of arrays that this process holds to the host.

    Devices with equal parts give them once.

    Args:
        arrays: tree of `jax.Array`s and NumPy arrays.

    Returns:
        A dict of NumPy arrays by name.
    """
    found = {}
    for path, array in jax.tree.leaves_with_path(arrays):
        key = jax.tree_util.keystr(path)
        if not isinstance(array, jax.Array) or is_of_one_process(array):
            found[_name(key, _box((), array.shape))] = array
            continue
        for shard in array.addressable_shards:
            name = _name(key, _box(shard.index, array.shape))
            if name not in found:
                shard.data.copy_to_host_async()
                found[name] = shard.data
    return {name: np.asarray(part) for name, part in found.items()}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part that some processes need.

    Attributes:
        name: str.
        size: int, bytes.
        needed_by: frozenset of indices of processes.
    """

    name: str
    size: int
    needed_by: frozenset


def parts_of(wanted):
    """Lists the parts of arrays that processes need, the same in all.

    Args:
        wanted: tree of `jax.ShapeDtypeStruct`s. All processes need the whole
            of one without a sharding, or with one over devices of one of
            several processes.

    Returns:
        A list of `Part`s.
    """
    found = []
    for path, leaf in jax.tree.leaves_with_path(wanted):
        key = jax.tree_util.keystr(path)
        for box, needed_by in _needed(leaf).items():
            size = int(np.prod(_shape(box), dtype=int)) * leaf.dtype.itemsize
            found.append(Part(_name(key, box), size, frozenset(needed_by)))
    return found


def _needed(leaf):
    if _is_whole(leaf):
        return {_box((), leaf.shape): range(processes.count())}
    found = {}
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    for device, index in indices.items():
        box = _box(index, leaf.shape)
        found.setdefault(box, set()).add(device.process_index)
    return found


def _is_whole(leaf):
    if leaf.sharding is None:
        return True
    return processes.count() > 1 and leaf.sharding.is_fully_addressable


def assembled(wanted, parts):
    """Returns arrays made of the parts of this process.

    Args:
        wanted: tree as in `parts_of`. What has no sharding becomes a NumPy
            array.
        parts: dict from the names of parts to uint8 arrays.
    """

    def make(path, leaf):
        key = jax.tree_util.keystr(path)

        def part(index):
            box = _box(index, leaf.shape)
            data = parts[_name(key, box)].view(leaf.dtype)
            return data.reshape(_shape(box))

        if leaf.sharding is None:
            return part(())
        if _is_whole(leaf):
            return jax.device_put(part(()), leaf.sharding)
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        return jax.make_array_from_single_device_arrays(
            leaf.shape,
            leaf.sharding,
            [jax.device_put(part(i), device) for device, i in indices.items()],
            dtype=leaf.dtype,
        )

    return jax.tree.map_with_path(make, wanted)


def _box(index, shape):
    """Returns the `(start, stop)` of each axis; `()` stands for the whole."""
    index = index or (slice(None),) * len(shape)
    return tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True))


def _shape(box):
    return tuple(stop - start for start, stop in box)


def _name(key, box):
    bounds = ",".join(f"{start}:{stop}" for start, stop in box)
    return f"{key} {bounds}"
