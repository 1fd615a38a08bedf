"""The accepted kinds of datasets, and their rows in order."""

import json
import os
import pathlib

import grain

ACCEPTED = (
    "a list of dicts, a Hugging Face `datasets.Dataset`, a Grain `MapDataset` "
    "or `IterDataset`, or a path to a `.jsonl`, `.json` or `.parquet` file"
)


def is_stream(dataset):
    """Returns whether rows can only be read one after the other."""
    return isinstance(dataset, grain.IterDataset)


def is_filtered(dataset):
    """Returns whether `None` is a row that the dataset has filtered out."""
    return isinstance(dataset, grain.MapDataset)


def read_rows(dataset, name="dataset"):
    """Reads the rows of a dataset with random access.

    Args:
        dataset: one of the accepted kinds except a Grain `IterDataset`. A
            Grain `MapDataset` gives `None` for rows that it filtered out.
        name: string, the dataset's name in errors.

    Raises:
        ValueError: the dataset is of another kind or empty, or a file
            cannot be read.
    """
    rows = _rows(dataset, name)
    if len(rows) == 0:
        raise ValueError(
            f"`{name}` must have at least one row. Received: {name} with 0 "
            "rows. Check the path, the split or the filter that made it."
        )
    return rows


def _rows(dataset, name):
    if isinstance(dataset, (str, os.PathLike)):
        return _read_file(pathlib.Path(dataset), name)
    if isinstance(dataset, (list, tuple, grain.MapDataset)):
        return dataset
    if isinstance(dataset, dict):
        raise ValueError(
            f"`{name}` must be {ACCEPTED}. Received: a dict with the keys "
            f"{list(dataset)[:8]}. Pass one of its splits, or a list with a "
            "dict for each row."
        )
    # A `datasets.Dataset`, known by its interface: no import needed.
    if all(
        hasattr(dataset, part)
        for part in ("column_names", "features", "with_format", "__len__")
    ):
        return dataset.with_format(None)
    raise ValueError(
        f"`{name}` must be {ACCEPTED}. Received: {name}={dataset!r:.200} of "
        f"type {type(dataset).__name__}."
    )


def _read_file(path, name):
    if not path.is_file():
        raise ValueError(
            f"`{name}` must be an existing file or {ACCEPTED}. Received: "
            f"{name}={str(path)!r}."
        )
    if path.suffix == ".parquet":
        try:
            # An extra, which few need.
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(
                "Reading a `.parquet` file needs pyarrow. Install it with "
                f"`pip install pyarrow`. Received: {name}={str(path)!r}."
            ) from error
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"`{name}` must be valid JSON. Received: {str(path)!r}: "
                f"{error}. A file with one object a line is `.jsonl`."
            ) from error
        if not isinstance(rows, list):
            raise ValueError(
                f"`{name}` must be a JSON list of objects. Received: "
                f"{str(path)!r} with a {type(rows).__name__}."
            )
        return rows
    if path.suffix != ".jsonl":
        raise ValueError(
            f"`{name}` must be {ACCEPTED}. Received: {name}={str(path)!r}."
        )
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"`{name}` must hold one JSON object a line. Received: "
                    f"line {number} of {str(path)!r}: {error}."
                ) from error
    return rows
