"""The rows of files: JSON, lines of JSON, CSV and Parquet, compressed too."""

import bz2
import contextlib
import csv
import functools
import glob
import gzip
import io
import json
import lzma
import os
import pathlib
import zlib

from keras_posttrain import _remote
from keras_posttrain.data.rows.lines import LineRows
from keras_posttrain.data.rows.parquet import ParquetRows

FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# The first bytes of compressed files, whatever their names say.
MAGIC = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": None,
}
# The columns of a CSV file that hold no text, but JSON.
JSON_COLUMNS = ("messages", "conversations", "tools", "weight", "margin")
JSON_COLUMNS += ("label", "completion_mask")
# The bytes from which on rows of lines are not read into memory.
LARGE = 2**25
KINDS = (
    "`.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`, or one of these with "
    "`.gz`, `.bz2`, `.xz` or `.zst`"
)


def is_path(value):
    return isinstance(value, (str, os.PathLike))


def is_file_name(value):
    """Returns whether a value of a list is a path, not a row of text."""
    if isinstance(value, str):
        return value.lower().endswith((*FORMATS, *COMPRESSED))
    return isinstance(value, os.PathLike)


def read_files(paths, name):
    """Reads the rows of files, one after the other.

    Args:
        paths: a path or address, or a list of them, each of a file or with
            the wildcards `*`, `?`, `[...]` and `**`, whose files are sorted.
            Files at addresses are copied to the user's cache.
        name: string, the dataset's name in errors.

    Returns:
        A list of rows; of Parquet files `ParquetRows`, and of large files
        with a JSON object a line `LineRows`, which are read later. Where
        files of both kinds are mixed, all rows are in the list.

    Raises:
        ValueError: there is no such file, or it cannot be read.
        ImportError: it needs a package that is not installed.
    """
    paths = [paths] if is_path(paths) else list(paths)
    found = [file for path in paths for file in _files(path, name)]
    if found and all(p.suffix.lower() == ".parquet" for p in found):
        return ParquetRows(found, name)
    if _stay_on_disk(found):
        return LineRows(found, functools.partial(_parse_line, name))
    return [row for file in found for row in _read(file, name)]


def _stay_on_disk(paths):
    """Returns whether files are large, and each line can be read alone."""
    return sum(path.stat().st_size for path in paths) >= LARGE and all(
        path.suffix.lower() in (".jsonl", ".ndjson") and not _compression(path)
        for path in paths
    )


def _compression(path):
    """Returns the first bytes that say how a file is compressed, or `None`."""
    with path.open("rb") as file:
        first = file.read(8)
    return next((magic for magic in MAGIC if first.startswith(magic)), None)


def _copies(address, name):
    try:
        found = [_remote.local_copy(x) for x in _remote.matches(address)]
    except OSError as error:
        raise ValueError(
            f"`{name}` could not be read from {address!r}. "
            f"({type(error).__name__}: {str(error)[:500]})"
        ) from error
    if not found:
        raise ValueError(
            f"`{name}` must be an existing file, or a pattern such as "
            f"'gs://bucket/rows-*.jsonl'. Received: {name}={address!r}, where "
            "there is no file."
        )
    return found


def _files(path, name):
    if _remote.is_address(path):
        return _copies(os.fspath(path), name)
    path = pathlib.Path(path).expanduser()
    if path.is_file():
        return [path]
    found = sorted(glob.glob(str(path), recursive=True))
    found = [pathlib.Path(file) for file in found if os.path.isfile(file)]
    if found:
        return found
    text = str(path)
    hint = ""
    if path.is_dir():
        hint = f" It is a directory: use '{text}/*.jsonl'."
    elif "\n" in text or "{" in text:
        hint = " Is it text? Pass a list with a dict for each row."
    elif path.suffix not in (*FORMATS, *COMPRESSED):
        hint = (
            " A dataset of the Hugging Face Hub is loaded by "
            "`datasets.load_dataset`."
        )
    raise ValueError(
        f"`{name}` must be an existing file, {KINDS}, a pattern such as "
        "'data/*.jsonl', or rows. Received: "
        f"{name}={text[:200]!r}, which is no file.{hint}"
    )


def _read(path, name):
    suffixes = [s.lower() for s in path.suffixes]
    while suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    readers = {
        ".jsonl": _read_lines,
        ".ndjson": _read_lines,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    }
    if kind not in readers:
        raise ValueError(
            f"`{name}` must be {KINDS}. Received: {name}={str(path)!r}."
        )
    return readers[kind](path, name)


def _open(path, name):
    """Opens a file, decompressed where its first bytes say so."""
    magic = _compression(path)
    if magic is None:
        return path.open("rb")
    opened = MAGIC[magic]
    return opened(path) if opened else _open_zstd(path, name)


def _open_zstd(path, name):
    try:
        # An extra, which few need.
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Reading a `.zst` file needs pyarrow. Install it with "
            f"`pip install pyarrow`. Received: {name}={str(path)!r}."
        ) from error
    file = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(file)


@contextlib.contextmanager
def _errors(path, name):
    """Names the file in the errors of damaged and truncated archives."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(
            f"`{name}` must be a file that can be read. Received: "
            f"{str(path)!r}: {error}. Is it whole?"
        ) from error


def _lines(path, name):
    """Yields `(number, line)` as text."""
    with _errors(path, name), _open(path, name) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                _check_encoding(line, path, name)
            yield number, _decode(line, f"line {number} of", path, name)


def _check_encoding(start, path, name):
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"`{name}` must be in UTF-8. Received: {str(path)!r}, which is in "
            "UTF-16. Convert it with `iconv -f UTF-16 -t UTF-8`."
        )


def _decode(line, where, path, name):
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{name}` must be in UTF-8. Received: {where} {str(path)!r} with "
            f"the byte 0x{line[error.start]:02x} at position {error.start}. "
            "Convert it, for example with `iconv -f LATIN1 -t UTF-8`."
        ) from error


def _parse(text):
    """Parses JSON; raises `ValueError` for all that is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _read_lines(path, name):
    return [
        _parse_object(line, number, path, name)
        for number, line in _lines(path, name)
        if line.strip()
    ]


def _parse_line(name, path, line, number):
    """Parses one line of a file alone; see `LineRows`."""
    try:
        return _parse(line.decode("utf-8-sig"))
    except ValueError:
        # What is wrong is said as of a file that is read from its start.
        number = number()
    if number == 1:
        _check_encoding(line, path, name)
    line = _decode(line, f"line {number} of", path, name)
    return _parse_object(line, number, path, name)


def _parse_object(line, number, path, name):
    try:
        return _parse(line)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must hold one JSON object a line. Received: "
            f"line {number} of {str(path)!r}: {error}."
        ) from error


def _read_json(path, name):
    with _errors(path, name), _open(path, name) as file:
        data = file.read()
    _check_encoding(data, path, name)
    text = _decode(data, "the file", path, name)
    try:
        rows = _parse(text)
    except ValueError as error:
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


def _read_csv(path, name):
    """Reads a table of text; the first line names the columns.

    Columns that cannot be text (`JSON_COLUMNS` and those that end in `_ids`)
    are parsed as JSON; there an empty cell is `None`.
    """
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    text = "".join(line for _, line in _lines(path, name))
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    # The default would refuse long texts.
    limit = csv.field_size_limit(2**31 - 1)
    try:
        header = next(lines, [])
        if len(set(header)) < len(header):
            raise ValueError(
                f"`{name}` must name each column once. Received: "
                f"{str(path)!r} with the columns {header[:20]}."
            )
        return [
            _csv_row(header, cells, f"line {lines.line_num} of", path, name)
            for cells in lines
            if cells
        ]
    except csv.Error as error:
        raise ValueError(
            f"`{name}` must be a table of text. Received: line "
            f"{lines.line_num} of {str(path)!r}: {error}."
        ) from error
    finally:
        csv.field_size_limit(limit)


def _csv_row(header, cells, where, path, name):
    if len(cells) != len(header):
        raise ValueError(
            f"Each row of `{name}` must have a cell for each column. "
            f"Received: {where} {str(path)!r} with {len(cells)} cells; the "
            f"columns are {header[:20]}. Put quotes around text that "
            "contains the delimiter."
        )
    row = dict(zip(header, cells))
    for column, cell in row.items():
        if column not in JSON_COLUMNS and not column.endswith("_ids"):
            continue
        is_bool = cell.strip().lower() in ("true", "false")
        try:
            value = cell.lower() if is_bool else cell
            row[column] = _parse(value) if cell.strip() else None
        except ValueError as error:
            raise ValueError(
                f"The column '{column}' of a CSV file must hold JSON. "
                f"Received: {where} {str(path)!r}, {column}={cell!r:.200}: "
                f"{error}."
            ) from error
    return row


def _read_parquet(path, name):
    return list(ParquetRows([path], name))
