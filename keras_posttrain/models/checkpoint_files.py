"""Safetensors checkpoints, in one file or in shards, tensor by tensor."""

import contextlib
import json
import math
import os
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("float64", "float32", "float16", "bfloat16")


def read_json(path):
    """The content of a JSON file; an error that names it if it is none."""
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
    """A folder to write in, which takes the place of another when complete.

    Whatever fails inside, the folder that was there stays as it was.

    Args:
        directory: path; may exist.

    Yields:
        The path of an empty folder beside it.
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


class Reader(contextlib.ExitStack):
    """Reads the tensors of a checkpoint one at a time.

    Args:
        directory: path of a folder with `model.safetensors`, or shards and
            their index.

    Raises:
        ValueError: if there is neither, or a shard is missing.

    Example:

    ```python
    with Reader("model/") as tensors:
        array = tensors.get("model.norm.weight")
    ```
    """

    def __init__(self, directory):
        super().__init__()
        directory = pathlib.Path(directory)
        self.directory = directory
        if (directory / INDEX).is_file():
            index = read_json(directory / INDEX)
            files = sorted(set(index["weight_map"].values()))
        elif (directory / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise ValueError(
                f"A Hugging Face checkpoint must hold `{SINGLE}`, or "
                f"`{INDEX}` and the shards it lists. Received: "
                f"directory={str(directory)!r}, with "
                f"{sorted(p.name for p in directory.iterdir())}"
            )
        self.files = {}
        for file in files:
            if not (directory / file).is_file():
                raise ValueError(
                    f"`{INDEX}` lists a shard that is not there. Received: "
                    f"directory={str(directory)!r}, missing {file!r}"
                )
            opened = self.enter_context(
                safe_open(directory / file, framework="np")
            )
            self.files.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self):
        return set(self.files)

    def get(self, name):
        """The tensor `name` as a numpy array, in the dtype of the file."""
        array = self.files[name].get_tensor(name)
        if array.dtype.name not in FLOATS:
            raise ValueError(
                f"The weights of a checkpoint must be of {list(FLOATS)}. "
                f"Received: {name!r} of dtype {array.dtype.name} in "
                f"{str(self.directory)!r}"
            )
        return array


def plan_shards(sizes, max_shard_bytes):
    """Groups tensors, in order, into files of limited size.

    Args:
        sizes: dict from tensor names to bytes.
        max_shard_bytes: int; a larger tensor gets a file of its own.

    Returns:
        A dict from file names to lists of tensor names.
    """
    groups = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def write_tensors(directory, shapes, dtypes, get, max_shard_bytes):
    """Writes a checkpoint, no more than a shard of it in memory at once.

    Args:
        directory: path of an existing folder.
        shapes: dict from tensor names to shapes.
        dtypes: dict from tensor names to names of dtypes.
        get: function from a tensor's name to its array.
        max_shard_bytes: int.
    """
    directory = pathlib.Path(directory)
    sizes = {
        name: math.prod(shape) * jnp.dtype(dtypes[name]).itemsize
        for name, shape in shapes.items()
    }
    shards = plan_shards(sizes, max_shard_bytes)
    for file, names in shards.items():
        arrays = {
            name: np.ascontiguousarray(
                np.asarray(get(name)).astype(jnp.dtype(dtypes[name]))
            )
            for name in names
        }
        save_file(arrays, directory / file, metadata={"format": "pt"})
    if list(shards) != [SINGLE]:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: f for f, names in shards.items() for n in names},
        }
        write_json(directory / INDEX, index)
