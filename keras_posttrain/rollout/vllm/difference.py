"""Writes what has changed of a model's weights since the last push.

A difference is a folder with `INDEX`, a JSON object, and `DATA`. The index has
the names of the two versions, `base` and `version`, and an entry for each
tensor, also for one that did not change:

- `bits`, of a value: 16 or 32; `size`, the number of values;
- `start` and `stop`, the tensor's bytes in `DATA`, none if nothing changed;
- `gap_bits`: 16 or 32, or 0 if these bytes are all values;
- `checksum`: the CRC-32 of the new values.

Changed values are stored as gaps, the distances between their positions in
the flat tensor (the first one from -1), and flips, the exclusive or of the old
and the new bits. Both are split into planes, all lowest bytes first, and
compressed with zlib. `worker.apply_difference` reads it.
"""

import concurrent.futures
import json
import pathlib
import zlib

import numpy as np

from keras_posttrain._cores import num_cores
from keras_posttrain.rollout.vllm.worker import DATA, INDEX

# A tensor of which more has changed is stored whole.
MAX_SHARE = 0.25
# Tensors that are encoded at the same time. Each needs about four times its
# bytes meanwhile.
MAX_THREADS = 8


def bits_of(array):
    """Returns the bit patterns of an array, flat unsigned ints."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"uint{8 * flat.itemsize}")


def encode(old, new):
    """Encodes the difference of two arrays of equal shape and dtype.

    Returns:
        `(entry, data)`: the index's entry without `start` and `stop`, and an
        object of bytes.
    """
    old, new = bits_of(old), bits_of(new)
    flips = old ^ new
    changed = flips != 0
    entry = {
        "bits": 8 * new.itemsize,
        "size": len(new),
        "gap_bits": 0,
        "checksum": zlib.crc32(new),
    }
    count = np.count_nonzero(changed)
    if not count or count > MAX_SHARE * len(new):
        return entry, new.view("uint8").data if count else b""
    places = np.flatnonzero(changed)
    gaps = np.diff(places, prepend=-1)
    entry["gap_bits"] = 16 if gaps.max() < 2**16 else 32
    planes = [
        np.ascontiguousarray(x.view("uint8").reshape(len(x), x.itemsize).T)
        for x in (gaps.astype(f"uint{entry['gap_bits']}"), flips[places])
    ]
    # Both have few repetitions but many small numbers: this strategy is the
    # fastest, and its result the smallest.
    squeeze = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return entry, b"".join([*map(squeeze.compress, planes), squeeze.flush()])


def write(directory, base, version, pairs):
    """Writes the difference of two versions; returns the bytes of its data.

    Args:
        directory: path of a folder to create.
        base: str, the name of the version at which the difference begins.
        version: str, that of the version after it.
        pairs: iterable of `(name, old, new)`, an array of both versions.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True)
    entries, start = {}, 0
    with open(directory / DATA, "wb") as file:
        for name, (entry, data) in _encoded(pairs):
            file.write(data)
            stop = start + len(data)
            entries[name] = {**entry, "start": start, "stop": stop}
            start = stop
    index = {"base": base, "version": version, "tensors": entries}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return start


def _encoded(pairs):
    """Yields `(name, encode(old, new))` in order, several at a time."""
    count, waiting = min(MAX_THREADS, num_cores()), []
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for name, old, new in pairs:
            waiting.append((name, pool.submit(encode, old, new)))
            if len(waiting) > count:
                name, future = waiting.pop(0)
                yield name, future.result()
        for name, future in waiting:
            yield name, future.result()
