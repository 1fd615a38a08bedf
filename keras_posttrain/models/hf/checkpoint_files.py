"""Reads and writes safetensors checkpoints, one tensor at a time."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Safetensors' names of the dtypes of weights. Tensors are stored in a file in
# this order of dtypes.
FLOATS = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
}  # fmt: skip


def read_json(path):
    """Reads a JSON file; an error names the file."""
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"A file of JSON was expected. Received: {str(path)!r}, {error}"
        ) from error


def write_json(path, content):
    """Writes a dict as sorted, indented JSON."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    pathlib.Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced_directory(directory):
    """Yields an empty folder that replaces `directory` when complete.

    If anything fails inside the scope, `directory` is unchanged.
    """
    directory = pathlib.Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    new = directory.with_name(f".{directory.name}.{os.getpid()}.new")
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        yield new
        if directory.exists():
            directory.rename(old)
        try:
            new.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


class Reader:
    """Reads the tensors of a checkpoint, completely or in part.

    The constructor only reads the headers, into the dicts `shapes` and
    `dtypes` by the tensors' names. A file is open only while a tensor is
    read, or as long as a view of it exists, so that its mapped memory is
    released afterwards.

    Args:
        directory: path of a folder with `model.safetensors`, or with shards
            and their index. If any is missing, it raises a `ValueError`.
        single: str, the name of the file of an unsharded checkpoint.
    """

    def __init__(self, directory, single=SINGLE):
        directory = pathlib.Path(directory)
        self.directory = directory
        if (directory / INDEX).is_file():
            files = listed_files(directory / INDEX)
        elif (directory / single).is_file():
            files = [single]
        else:
            raise ValueError(
                f"A Hugging Face checkpoint must hold `{single}`, or "
                f"`{INDEX}` and the shards it lists. Received: "
                f"directory={str(directory)!r}, with "
                f"{sorted(p.name for p in directory.iterdir())}"
            )
        self.shapes, self.dtypes, self._places = {}, {}, {}
        for file in files:
            if not (directory / file).is_file():
                raise ValueError(
                    f"`{INDEX}` lists a shard that is not there. Received: "
                    f"directory={str(directory)!r}, missing {file!r}"
                )
            path = directory / file
            names = _checked_names(path)
            header, start = _read_header(path)
            for name in names:
                stored = header[name]
                self.shapes[name] = tuple(stored["shape"])
                self.dtypes[name] = _dtype(stored["dtype"])
                self._places[name] = path, start + stored["data_offsets"][0]

    @property
    def names(self):
        return set(self.shapes)

    def check_dtype(self, name):
        """Raises a `ValueError` if a tensor does not have floats."""
        if self.dtypes[name] not in FLOATS:
            raise ValueError(
                f"The weights of a checkpoint must be of {list(FLOATS)}. "
                f"Received: {name!r} of dtype {self.dtypes[name]} in "
                f"{str(self.directory)!r}"
            )

    def view(self, name):
        """Returns a tensor as a read-only array that is mapped to its file."""
        self.check_dtype(name)
        shape, dtype = self.shapes[name], jnp.dtype(self.dtypes[name])
        if 0 in shape:
            # Nothing cannot be mapped.
            return np.empty(shape, dtype)
        path, start = self._places[name]
        return np.memmap(path, dtype, "r", start, shape).view(np.ndarray)

    def get(self, name):
        """Reads a tensor as a numpy array in the dtype of the file."""
        self.check_dtype(name)
        return self.read(name)

    def read(self, name):
        """Reads a tensor of any dtype."""
        path, start = self._places[name]
        if self.dtypes[name] == "F8_E4M3":
            # Safetensors cannot give it to NumPy.
            shape = self.shapes[name]
            raw = np.fromfile(path, "uint8", math.prod(shape), offset=start)
            return raw.view(jnp.float8_e4m3fn).reshape(shape)
        with safe_open(path, framework="np") as opened:
            return opened.get_tensor(name)


def _checked_names(path):
    """Returns the names in a file of which safetensors has read the header."""
    try:
        with safe_open(path, framework="np") as opened:
            return opened.keys()
    except SafetensorError as error:
        raise ValueError(
            "A file of weights must be a complete safetensors file. If its "
            "download was cut short, or left a pointer of Git LFS, download "
            f"it again. Received: {str(path)!r} of "
            f"{path.stat().st_size:,} bytes, {error}"
        ) from error


def _read_header(path):
    """Reads the header of a safetensors file, and where its data begins."""
    with open(path, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def listed_files(path):
    """Returns the files that an index of shards lists, in order."""
    index = read_json(path)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not table:
        raise ValueError(
            f"`{INDEX}` must have a dict of tensors and files, 'weight_map'. "
            f"Received: {str(path)!r}, with weight_map={table!r:.80}"
        )
    for name, file in table.items():
        is_name = isinstance(file, str) and os.path.basename(file) == file
        if not is_name or file in ("", ".", ".."):
            raise ValueError(
                f"`{INDEX}` must list files in its own directory. Received: "
                f"{str(path)!r}, with {file!r} for {name!r}"
            )
    return sorted(set(table.values()))


def _dtype(code):
    """Converts safetensors' name of a dtype to NumPy's."""
    found = {theirs: name for name, theirs in FLOATS.items()}
    ints = re.sub("^I", "int", re.sub("^U", "uint", code))
    return found.get(code, ints)


def plan_shards(shapes, dtypes, max_shard_bytes):
    """Groups tensors, in order, into files of limited size.

    Returns lists of tensor names by file name, each in the order of
    safetensors: by dtype, then by name. A tensor above the limit gets a
    separate file.
    """
    groups = [[]]
    room = max_shard_bytes
    for name, size in _sizes(shapes, dtypes).items():
        if size > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= size
    order = list(FLOATS)
    for group in groups:
        group.sort(key=lambda name: (order.index(dtypes[name]), name))
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def _sizes(shapes, dtypes):
    return {
        name: math.prod(shape) * jnp.dtype(dtypes[name]).itemsize
        for name, shape in shapes.items()
    }


def write_tensors(directory, shards, shapes, dtypes, arrays):
    """Writes a checkpoint with one tensor in memory at a time, in order."""
    directory, arrays = pathlib.Path(directory), iter(arrays)
    sizes = _sizes(shapes, dtypes)
    for file, names in shards.items():
        with open(directory / file, "wb") as opened:
            opened.write(_header(names, shapes, dtypes, sizes))
            for name in names:
                array = next(arrays).reshape(-1)
                array = array.astype(jnp.dtype(dtypes[name]), copy=False)
                opened.write(array.view("uint8").data)
    if list(shards) != [SINGLE]:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: f for f, names in shards.items() for n in names},
        }
        write_json(directory / INDEX, index)


def _header(names, shapes, dtypes, sizes):
    """Returns the header of a safetensors file.

    It is written here because the library needs all tensors of a file at
    once. The format is a length, a JSON object and the tensors' bytes.
    """
    content, start = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        content[name] = {
            "dtype": FLOATS[dtypes[name]],
            "shape": list(shapes[name]),
            "data_offsets": [start, start + sizes[name]],
        }
        start += sizes[name]
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    text = text.encode()
    # Spaces align the first tensor to 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
