"""Arrays of rows on disk, computed once and read when needed."""

import hashlib
import json
import os
import pathlib
import threading
import zlib

import numpy as np
import safetensors
from safetensors.numpy import save_file

HEADER = "header.json"
SHARDS = "rows-*.safetensors"
# The arrays of a shard in addition to those of its rows.
KEYS, LENGTHS, CHECKSUMS = "row keys", "row lengths", "row checksums"
KEY_BYTES = 16


def row_key(token_ids, start, images=None):
    """Makes the key of a row: a digest of its tokens and prompt length.

    Args:
        token_ids: int array of shape `(tokens,)`.
        start: int, tokens before the completion.
        images: `Images` of the row, or `None`.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    digest.update(np.int64(start).tobytes())
    digest.update(np.asarray(token_ids, np.int32).tobytes())
    if images is not None:
        digest.update(images.digest)
    return digest.digest()


class RowCache:
    """Arrays of rows in a directory: log-probabilities, a teacher's top-k.

    Each call of `write` writes one file, completely or not at all: a run that
    is killed loses no more than the rows it was about to write. `header.json`
    describes what computed the arrays. Rows are read one at a time, by memory
    mapping, from any thread.

    Args:
        directory: str or path, created if it does not exist.
        header: dict that JSON can store, of everything except the row that
            the arrays depend on.

    Raises:
        ValueError: the directory was made with another header, or a file in
            it is damaged.
    """

    def __init__(self, directory, header):
        self.directory = pathlib.Path(directory)
        # As JSON returns it: tuples are lists.
        self.header = json.loads(json.dumps(header))
        self._shards, self._places = [], {}
        self._lock = threading.Lock()
        self._check_header()
        for path in sorted(self.directory.glob(SHARDS)):
            self._add(path)

    def __len__(self):
        return len(self._places)

    def __contains__(self, key):
        return key in self._places

    def missing(self, keys):
        """Returns the keys that have no arrays yet, each once."""
        return [k for k in dict.fromkeys(keys) if k not in self._places]

    def write(self, rows):
        """Writes the arrays of some rows, all of them or none.

        Args:
            rows: dict of dicts of arrays by key, such as
                `{key: {"ids": (tokens, k) int32, "logps": (tokens, k)
                float32}}`. Only the number of tokens may differ
                between rows.

        Raises:
            ValueError: the arrays of a row differ in names, types or shapes.
        """
        if not rows:
            return
        keys, values = list(rows), list(rows.values())
        _check_rows(values)
        tensors = {
            name: np.concatenate([np.asarray(row[name]) for row in values])
            for name in values[0]
        }
        tensors[KEYS] = np.frombuffer(b"".join(keys), np.uint8)
        lengths = [len(next(iter(row.values()))) for row in values]
        tensors[LENGTHS] = np.array(lengths, np.int64)
        tensors[CHECKSUMS] = np.array(
            [_checksum(row) for row in values], np.uint32
        )
        # The name depends on the rows: two runs at once write the same file.
        digest = hashlib.blake2b(b"".join(keys), digest_size=8).hexdigest()
        path = self.directory / SHARDS.replace("*", digest)
        new = self.directory / f".{path.name}.{os.getpid()}.new"
        save_file(tensors, new)
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
        self._add(path)

    def read(self, key):
        """Reads the dict of arrays of a row.

        Raises:
            KeyError: the row has no arrays.
            ValueError: the file is damaged.
        """
        shard, row, start, stop = self._places[key]
        path, file, names = self._shards[shard]
        with self._lock:
            found = {n: file.get_slice(n)[start:stop] for n in names}
            checksum = int(file.get_slice(CHECKSUMS)[row : row + 1][0])
        if _checksum(found) != checksum:
            raise _damaged(path, f"row {row} has another checksum")
        return found

    def _check_header(self):
        path = self.directory / HEADER
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            if any(self.directory.glob(SHARDS)):
                raise _damaged(path, "it is missing, but there are rows")
            new = path.with_name(f".{HEADER}.{os.getpid()}.new")
            text = json.dumps(self.header, indent=2, sort_keys=True)
            new.write_text(text + "\n", encoding="utf-8")
            os.replace(new, path)
            return
        try:
            theirs = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise _damaged(path, error) from error
        for name in sorted({*self.header, *theirs}):
            there, here = theirs.get(name), self.header.get(name)
            if there != here:
                raise ValueError(
                    f"{str(self.directory)!r} holds rows that were made with "
                    f"another {name}. There: {_differing(there, here)}. "
                    f"Received: {_differing(here, there)}. Use another "
                    "directory, or delete it."
                )

    def _add(self, path):
        """Indexes the rows of a file without reading their arrays."""
        try:
            file = safetensors.safe_open(path, framework="numpy")
            keys = file.get_tensor(KEYS).tobytes()
            lengths = file.get_tensor(LENGTHS)
            own = (KEYS, LENGTHS, CHECKSUMS)
            names = [name for name in file.keys() if name not in own]
            counts = {file.get_slice(n).get_shape()[0] for n in names}
        except (safetensors.SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
        ends = np.cumsum(lengths)
        rows = len(keys) // KEY_BYTES
        if rows != len(lengths) or counts - {int(ends[-1])}:
            raise _damaged(path, "its arrays are not of one length")
        shard = len(self._shards)
        self._shards.append((path, file, names))
        for row, (length, end) in enumerate(zip(lengths, ends)):
            key = keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]
            self._places[key] = (shard, row, int(end - length), int(end))


def _checksum(row):
    """Returns the checksum of a row's arrays, in the order of their names."""
    value = 0
    for name in sorted(row):
        value = zlib.crc32(np.ascontiguousarray(row[name]).tobytes(), value)
    return value


def _check_rows(rows):
    def layout(row):
        arrays = {name: np.asarray(x) for name, x in row.items()}
        return {n: (x.dtype.name, x.shape[1:]) for n, x in arrays.items()}

    first = layout(rows[0])
    for i, row in enumerate(rows):
        if layout(row) != first:
            raise ValueError(
                "All rows must have the same arrays but for their tokens. "
                f"Received: {layout(row)} for row {i}, {first} for row 0."
            )
        lengths = {len(x) for x in row.values()}
        if len(lengths) != 1:
            raise ValueError(
                "The arrays of a row must have as many tokens each. "
                f"Received: {sorted(lengths)} tokens for row {i}."
            )


def _differing(value, other):
    """Returns a header's value as text; of dicts only what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {k: v for k, v in value.items() if v != other.get(k)}
    return repr(value)


def _damaged(path, why):
    return ValueError(
        f"{str(path)!r} is damaged ({why}). Delete it; the rows it held are "
        "computed again."
        if path.name != HEADER
        else f"{str(path)!r} cannot be read ({why}). Delete its directory; "
        "the rows it held are computed again."
    )
