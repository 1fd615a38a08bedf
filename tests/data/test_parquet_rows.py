"""Rows of Parquet files: read as a table has them, and in little memory."""

import concurrent.futures
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.rows import disk, parquet, prepare
from keras_posttrain.data.rows.files import read_files
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.prompts import prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.store import StoredExamples

SETTINGS = RowSettings(None, sequence_length=256, vocabulary_size=600)


def make_row(i):
    return {
        "prompt_ids": [i % 500, 7, i % 3],
        "completion_ids": [i % 400] * (i % 5 + 2),
        "nested": {"text": "é" * (i % 4), "n": None if i % 7 == 0 else i},
        "kind": ["short", "long"][i % 2],
    }


ROWS = [make_row(i) for i in range(300)]


def write(path, rows, row_group_size=None):
    table = pyarrow.Table.from_pylist(rows)
    # A column with a dictionary, as pandas writes categories.
    place = table.column_names.index("kind")
    kinds = table.column(place).dictionary_encode()
    table = table.set_column(place, "kind", kinds)
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's directory; whatever takes any time at all is stored."""
    monkeypatch.setenv("KERAS_POSTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KERAS_POSTTRAIN_WORKERS", "1")
    monkeypatch.setattr(prepare, "PATIENCE", 0.0)
    return tmp_path / "cache" / "rows"


@pytest.fixture
def decoded(monkeypatch):
    """A list of the row groups that are decoded."""
    found, iterate = [], pyarrow.parquet.ParquetFile.iter_batches

    def note(self, size, groups):
        found.extend(groups)
        return iterate(self, size, groups)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", note)
    return found


@pytest.fixture
def paths(tmp_path):
    """Two files, of which one has many row groups and one an empty one."""
    first = write(tmp_path / "a.parquet", ROWS[:120], row_group_size=17)
    second = tmp_path / "b.parquet"
    schema = pyarrow.parquet.read_schema(first)
    with pyarrow.parquet.ParquetWriter(second, schema) as writer:
        for rows in (ROWS[:0], ROWS[120:]):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    return [first, second]


@pytest.mark.parametrize("size", [2**18, 300])
def test_they_are_those_of_the_table(paths, folder, size, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_BYTES", size)
    tables = [pyarrow.parquet.read_table(path) for path in paths]
    assert sum((table.to_pylist() for table in tables), []) == ROWS
    rows = read_files(paths, "dataset")
    assert isinstance(rows, parquet.ParquetRows) and len(rows) == len(ROWS)
    for i in np.random.default_rng(0).permutation(len(ROWS)):
        assert rows[i] == ROWS[i] and rows[i - len(ROWS)] == ROWS[i]
    assert list(rows) == ROWS
    for part in (slice(10, 250), slice(None), slice(5, 2), slice(9, -3, 7)):
        assert rows[part] == ROWS[part]
    for index in (len(ROWS), -len(ROWS) - 1):
        with pytest.raises(IndexError):
            rows[index]


def test_threads_read_them_too(paths, folder):
    rows = read_files(paths, "dataset")
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rows.__getitem__, range(len(ROWS)))) == ROWS


def test_a_row_group_is_decoded_once_and_only_if_it_is_read(
    paths, folder, decoded
):
    rows = read_files(paths, "dataset")
    rows.content_digest()
    assert not decoded
    for i in (20, 33, 100, 18, 101, 20):
        assert rows[i] == ROWS[i]
    assert decoded == [1, 5]
    assert list(rows) == list(rows) == ROWS
    assert sorted(decoded) == [0, 1, 1, 2, 3, 4, 5, 6, 7]


def test_memory_does_not_grow_with_rows(tmp_path, folder):
    """One row group; its 300,000 token ids take 12 MB in Python's lists."""
    count = 2_000
    rng = np.random.default_rng(0)
    table = pyarrow.table(
        {"token_ids": list(rng.integers(300, 600, (count, 150)))}
    )
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=count)
    del table
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    try:
        examples, _ = prepare_sft(str(path), SETTINGS)
        data = BatchAdapter(examples, batch_size=8, sequence_length=256)
        batches = data.get_jax_iterator()
        next(batches)
        size, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    batches.close()
    assert size < 2**20 + 60 * count and most < 2**23
    assert pyarrow.total_allocated_bytes() - before < 2**20


def test_a_second_start_decodes_the_rows_of_its_prompts(
    tmp_path, folder, decoded
):
    rows = [{"prompt_ids": [1 + i % 9] * 5, "kind": str(i)} for i in range(90)]
    path = write(tmp_path / "rows.parquet", rows, row_group_size=10)
    for _ in range(2):
        del decoded[:]
        prompts, _ = prepare_prompts(
            path, SETTINGS, max_prompt_length=100, limit="of the test"
        )
    assert isinstance(prompts, StoredExamples) and not decoded
    assert prompts[57].columns == {"kind": "57"} and decoded == [5]


def test_content_names_the_rows(tmp_path, folder):
    """Not the path or the time: the cache's key has the file's bytes."""
    paths = [
        write(tmp_path / name, rows)
        for name, rows in [("a", ROWS), ("b", ROWS), ("c", ROWS[::-1])]
    ]
    first, same, other = [
        parquet.ParquetRows([path], "dataset").content_digest()
        for path in paths
    ]
    assert first == same != other


@pytest.mark.parametrize("fails", ["mkstemp", "pwrite"])
def test_a_full_disk_is_no_failure(paths, folder, fails, monkeypatch):
    module = {"mkstemp": disk.tempfile, "pwrite": disk.os}[fails]
    real, calls = getattr(module, fails), []

    def fail(*args, **kwargs):
        calls.append(args)
        if fails == "mkstemp" or len(calls) == 4:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(module, fails, fail)
    rows = read_files(paths, "dataset")
    with pytest.warns(UserWarning, match="No space left") as found:
        assert list(rows) == ROWS
    assert len(found) == 1 and "KERAS_POSTTRAIN_CACHE" in str(found[0].message)
    assert list(rows) == ROWS


def test_without_a_cache_rows_are_in_the_temporary_directory(
    paths, tmp_path, monkeypatch
):
    monkeypatch.setenv("KERAS_POSTTRAIN_CACHE", "off")
    assert list(read_files(paths, "dataset")) == ROWS
    # Its directory cannot be made.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERAS_POSTTRAIN_CACHE", str(tmp_path / "file"))
    assert list(read_files(paths, "dataset")) == ROWS


def test_damage_is_named_when_rows_are_read(tmp_path, folder):
    path = write(tmp_path / "rows.parquet", ROWS)
    data = bytearray(path.read_bytes())
    # Behind the first bytes, which say what the file is.
    data[4:2000] = b"x" * 1996
    path.write_bytes(data)
    rows = read_files(path, "dataset")
    with pytest.raises(ValueError, match="must be a Parquet file.*rows.parq"):
        rows[0]


def test_files_of_several_kinds_are_one_list(paths, tmp_path, folder):
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"text": "a"}\n')
    found = read_files([paths[0], lines], "dataset")
    assert found == [*ROWS[:120], {"text": "a"}]
    mixed = kpt.data.mix({"a": str(paths[0]), "b": str(paths[1])})
    assert sorted(map(repr, mixed)) == sorted(map(repr, ROWS))
