"""The accepted kinds of datasets, and their rows in order."""

import functools
import inspect
import itertools
import operator
import sys

import grain
import keras
import numpy as np

from keras_posttrain.data.rows import files
from keras_posttrain.data.rows.streams import Once, RowStream

ACCEPTED = (
    "a list of dicts, a dict of columns, a pandas, Polars or PyArrow table, "
    "a Hugging Face `Dataset` or `IterableDataset`, a Grain `MapDataset`, "
    "`IterDataset` or `DataLoader`, a `tf.data.Dataset`, a torch dataset, a "
    "`keras.utils.PyDataset`, an iterable of dicts or a function that "
    "returns one, or the path of a `.jsonl`, `.json`, `.csv` or `.parquet` "
    "file or a list of paths"
)


def open_dataset(dataset, name="dataset"):
    """Opens a dataset of any accepted kind.

    Args:
        dataset: what the user passed.
        name: string, its name in errors.

    Returns:
        A Grain `IterDataset` where rows can only be read one after the
        other, else their sequence.

    Raises:
        ValueError: the dataset is of another kind, has no end, or no rows,
            or a file cannot be read.
    """
    rows = _open(dataset, name)
    if has_no_end(rows):
        raise _no_end(dataset, name)
    if not is_stream(rows) and len(rows) == 0:
        raise ValueError(
            f"`{name}` must have at least one row. Received: {name} with 0 "
            "rows. Check the path, the split or the filter that made it."
        )
    return rows


def _no_end(dataset, name):
    return ValueError(
        f"`{name}` must have an end: an epoch ends with it, and `epochs` "
        f"repeats it. Received: {name}={dataset!r:.200}, which has none. "
        "Leave out its `repeat()`, set the `num_epochs` of its sampler to 1, "
        "or take a part of it."
    )


def is_stream(dataset):
    """Returns whether rows can only be read one after the other."""
    return isinstance(dataset, grain.IterDataset)


def is_filtered(dataset):
    """Returns whether `None` is a row that the dataset has filtered out."""
    return isinstance(dataset, grain.MapDataset)


def has_no_end(rows):
    """Returns whether an opened dataset is known to be infinite."""
    if not is_stream(rows):
        return len(rows) >= sys.maxsize
    kind = type(rows).__name__
    if kind == "RepeatIterDataset" and rows._num_epochs is None:
        return True
    if kind == "LimitIterDataset":
        return False
    if isinstance(rows, RowStream):
        return _repeats(rows.make)
    # Those that read several stop where the first of them ends.
    parents = getattr(rows, "_parents", ())
    return bool(parents) and all(map(has_no_end, parents))


def _repeats(iterable):
    """Returns whether an iterable of another library is endless."""
    if isinstance(iterable, Once):
        endless = (itertools.cycle, itertools.count, itertools.repeat)
        # A `repeat` with a number of times has a length.
        is_one = isinstance(iterable.iterator, endless)
        return is_one and operator.length_hint(iterable.iterator, -1) < 0
    loader = getattr(iterable, "__self__", None)
    sampler = getattr(loader, "_sampler", None)
    if sampler is not None and hasattr(sampler, "__len__"):
        return len(sampler) >= sys.maxsize
    # Hugging Face's.
    part = getattr(loader, "_ex_iterable", None)
    while part is not None:
        if getattr(part, "num_times", 1) is None:
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def _open(dataset, name):
    if files.is_path(dataset) or _are_paths(dataset):
        return files.read_files(dataset, name)
    if isinstance(dataset, (list, tuple, grain.MapDataset, grain.IterDataset)):
        return dataset
    if isinstance(dataset, dict):
        return _columns(dataset, name)
    if isinstance(dataset, (type, set, bytes, bytearray)):
        raise _unknown(dataset, name)
    module = type(dataset).__module__.split(".")[0]
    has = functools.partial(hasattr, dataset)
    if isinstance(dataset, keras.utils.PyDataset):
        return _py_dataset(dataset, name)
    if has("as_numpy_iterator"):
        return _tensorflow(dataset, name)
    if module == "torch" and has("collate_fn"):
        raise ValueError(
            f"`{name}` must be rows, of which `fit` makes batches. Received: "
            f"{name}={dataset!r:.200}, which makes batches itself. Pass its "
            "`dataset`."
        )
    # Known by its interface: no import needed.
    if has("column_names") and has("features") and has("with_format"):
        rows = dataset.with_format(None)
        return rows if has("__len__") else RowStream(rows.__iter__, _plain)
    if module == "pandas" and has("to_dict") and has("columns"):
        # Its NaN is a value that is missing.
        dataset = dataset.astype(object).where(dataset.notna(), None)
        return [_plain(row) for row in dataset.to_dict("records")]
    if has("collect") and has("collect_schema"):
        # Polars's `LazyFrame`.
        dataset = dataset.collect()
    for method in ("to_dicts", "to_pylist", "to_table"):
        # Polars's, PyArrow's tables, and PyArrow's datasets on disk.
        if hasattr(dataset, method):
            rows = getattr(dataset, method)()
            return rows if isinstance(rows, list) else _open(rows, name)
    if has("__arrow_c_stream__"):
        return _arrow(dataset, name)
    if has("__getitem__") and has("__len__"):
        return _Rows(dataset)
    if has("__iter__"):
        if iter(dataset) is dataset:
            return RowStream(Once(dataset, name), _plain)
        return RowStream(dataset.__iter__, _plain)
    if callable(dataset) and _needs_nothing(dataset):
        return _made(dataset, name)
    raise _unknown(dataset, name)


def _unknown(dataset, name):
    return ValueError(
        f"`{name}` must be {ACCEPTED}. Received: {name}={dataset!r:.200} of "
        f"type {type(dataset).__name__}."
    )


def _are_paths(dataset):
    is_list = isinstance(dataset, (list, tuple)) and len(dataset) > 0
    return is_list and all(map(files.is_file_name, dataset))


def _needs_nothing(function):
    """Returns whether a function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def _made(make, name):
    rows = make()
    if not hasattr(rows, "__iter__") or isinstance(rows, (str, bytes, dict)):
        raise ValueError(
            f"`{name}`, a function, must return an iterable of rows. "
            f"Received: {rows!r:.200} of type {type(rows).__name__}."
        )
    return RowStream(make, _plain)


def _columns(dataset, name):
    """Returns the rows of a dict of columns."""
    columns = dict(dataset)
    sized = {
        key: len(value)
        for key, value in columns.items()
        if hasattr(value, "__len__")
        and not isinstance(value, (str, bytes, dict))
    }
    splits = not all(sized.values()) or any(
        hasattr(columns[key], "column_names")
        or _is_value(key, next(iter(columns[key])))
        for key in sized
    )
    if not columns or len(sized) < len(columns) or splits:
        raise ValueError(
            f"`{name}` must be {ACCEPTED}. Received: a dict with the keys "
            f"{list(dataset)[:8]}. Pass one of its splits, or a list with a "
            "dict for each row."
        )
    if len(set(sized.values())) > 1:
        raise ValueError(
            "The columns of a dict must have as many values each. Received: "
            f"`{name}` with {sized}."
        )
    return [
        _plain(dict(zip(columns, values)))
        for values in zip(*columns.values(), strict=True)
    ]


def _is_value(column, first):
    """Returns whether the first of a column's values is part of one row's."""
    of_tokens = str(column).endswith("_ids") or column == "completion_mask"
    return isinstance(first, dict) or (of_tokens and not np.ndim(first))


def _py_dataset(dataset, name):
    """Returns the rows of the batches of a Keras `PyDataset`."""
    if dataset.num_batches is None:
        raise ValueError(
            f"`{name}` must have an end. Received: {name}={dataset!r:.200} "
            "with num_batches=None. Give it a `__len__`."
        )
    rows = []
    for index in range(dataset.num_batches):
        batch = dataset[index]
        if isinstance(batch, dict):
            batch = _columns(batch, f"batch {index} of {name}")
        if not isinstance(batch, list):
            raise ValueError(
                f"A batch of `{name}`, a `PyDataset`, must be a list of rows "
                "or a dict of columns. Received: batch "
                f"{index}={batch!r:.200} of type {type(batch).__name__}."
            )
        rows += map(_plain, batch)
    return rows


def _tensorflow(dataset, name):
    # -1 for no end, -2 for an unknown one.
    count = int(dataset.cardinality())
    if count == -1:
        raise _no_end(dataset, name)
    if count < 0:
        return RowStream(dataset.as_numpy_iterator, _plain)
    return [_plain(row) for row in dataset.as_numpy_iterator()]


def _arrow(dataset, name):
    try:
        # An extra, which few need.
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Reading a table of Arrow needs pyarrow. Install it with "
            f"`pip install pyarrow`. Received: {name} of type "
            f"{type(dataset).__name__}."
        ) from error
    try:
        return pyarrow.table(dataset).to_pylist()
    except pyarrow.ArrowInvalid:
        # One column alone, such as a `Series`.
        raise _unknown(dataset, name) from None


class _Rows:
    """The rows of a sequence of another library, such as torch's."""

    def __init__(self, sequence):
        self.sequence = sequence

    def __len__(self):
        return len(self.sequence)

    def __getitem__(self, index):
        return _plain(self.sequence[index])


def _plain(row):
    """Returns a row with values of Python's types, and arrays."""
    if not isinstance(row, dict):
        return row
    return {key: _plain_value(value) for key, value in row.items()}


def _plain_value(value):
    if isinstance(value, bytes):
        # TensorFlow's strings.
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, (str, int, float, list, tuple, dict, type(None))):
        return value
    if hasattr(value, "ndim") and hasattr(value, "tolist"):
        # An array, a tensor or one number of them.
        if value.ndim == 0 or np.asarray(value).dtype.kind in "OSU":
            value = value.tolist()
        else:
            value = np.asarray(value)
    if isinstance(value, list):
        return [_plain_value(item) for item in value]
    return _plain_value(value) if isinstance(value, bytes) else value
