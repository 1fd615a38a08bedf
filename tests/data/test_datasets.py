"""Every kind of dataset gives the same examples, and says what is wrong."""

import bz2
import gzip
import itertools
import json
import lzma

import datasets
import grain
import keras
import numpy as np
import pandas
import pyarrow
import pyarrow.csv
import pyarrow.dataset
import pytest
import tensorflow
import torch

from keras_posttrain.data.rows.datasets import open_dataset
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.streams import KEPT, check_epochs

ROWS = [
    {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "weight": 0.5},
    {"prompt_ids": [1], "completion_ids": [2], "weight": 2.0},
    {"prompt_ids": [3, 4, 5], "completion_ids": [6, 7], "weight": 1.0},
]
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}
TEXTS = [
    {"prompt": "Grüße, äöü", "completion": "2 😀", "label": True},
    {"prompt": "a\nb", "completion": 'say "x", y', "label": False},
]


def prepare(rows, **kwargs):
    settings = RowSettings(None, sequence_length=64, vocabulary_size=100)
    return prepare_sft(rows, settings, **kwargs)


def read(dataset):
    """All rows of a dataset."""
    rows = open_dataset(dataset)
    if isinstance(rows, grain.IterDataset):
        return list(rows)
    return [rows[i] for i in range(len(rows))]


def write_lines(path, rows=ROWS, encoding="utf-8"):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(text.encode(encoding))
    return path


# Datasets in memory --------------------------------------------------------


class Torch(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return {k: torch.tensor(v) for k, v in ROWS[index].items()}


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        part = slice(2 * index, 2 * index + 2)
        return {name: values[part] for name, values in COLUMNS.items()}


class BatchesOfRows(Batches):
    def __getitem__(self, index):
        return ROWS[2 * index : 2 * index + 2]


class Arrow:
    """A table of a library that shares Arrow's memory, as DuckDB's does."""

    def __arrow_c_stream__(self, requested_schema=None):
        return pyarrow.Table.from_pylist(ROWS).__arrow_c_stream__(
            requested_schema
        )


def tensorflow_rows(unknown=False):
    data = tensorflow.data.Dataset.from_generator(
        lambda: iter(ROWS),
        output_signature={
            "prompt_ids": tensorflow.TensorSpec([None], "int32"),
            "completion_ids": tensorflow.TensorSpec([None], "int32"),
            "weight": tensorflow.TensorSpec([], "float32"),
        },
    )
    if unknown:
        return data
    return data.apply(tensorflow.data.experimental.assert_cardinality(3))


def loader(num_epochs=1):
    return grain.DataLoader(
        data_source=ROWS,
        sampler=grain.samplers.IndexSampler(
            len(ROWS), num_epochs=num_epochs, shuffle=False
        ),
    )


def generator():
    yield from ROWS


class Iterable:
    def __iter__(self):
        return generator()


IN_MEMORY = {
    "dict of columns": lambda: COLUMNS,
    "dict of arrays": lambda: COLUMNS | {"weight": np.array([0.5, 2, 1])},
    "pandas": lambda: pandas.DataFrame(ROWS),
    "pyarrow": lambda: pyarrow.Table.from_pylist(ROWS),
    "record batch": lambda: pyarrow.RecordBatch.from_pylist(ROWS),
    "batch reader": lambda: pyarrow.Table.from_pylist(ROWS).to_reader(),
    "arrow's interface": Arrow,
    "torch": Torch,
    "PyDataset": Batches,
    "PyDataset of rows": BatchesOfRows,
    "tf.data": tensorflow_rows,
}
STREAMS = {
    "tf.data of unknown size": lambda: tensorflow_rows(True),
    "torch iterable": TorchStream,
    "IterableDataset": lambda: datasets.IterableDataset.from_generator(
        generator
    ),
    "to_iterable_dataset": lambda: datasets.Dataset.from_list(
        ROWS
    ).to_iterable_dataset(),
    "IterDataset": lambda: grain.MapDataset.source(ROWS).to_iter_dataset(),
    "DataLoader": loader,
    "generator": generator,
    "function": lambda: generator,
    "map": lambda: map(dict, ROWS),
    "iterable": Iterable,
}


def assert_same(examples, expected):
    for ours, theirs in zip(examples, expected, strict=True):
        assert ours.row == theirs.row
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(
            ours.completion_mask, theirs.completion_mask
        )


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_kinds_with_random_access(kind):
    expected, report = prepare(ROWS)
    examples, other = prepare(IN_MEMORY[kind]())
    assert isinstance(examples, list) and other == report
    assert_same(examples, expected)


@pytest.mark.parametrize("kind", STREAMS)
def test_kinds_of_streams(kind):
    expected, report = prepare(ROWS)
    examples, other = prepare(STREAMS[kind]())
    assert isinstance(examples, grain.IterDataset)
    # Read again, as in a second epoch; counted once.
    for _ in range(2):
        assert_same(examples, expected)
    assert other == report


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_go_on_where_they_were(kind):
    iterator = iter(prepare(STREAMS[kind]())[0])
    next(iterator)
    state = iterator.get_state()
    # In another process the state has been JSON.
    again = iter(prepare(STREAMS[kind]())[0])
    again.set_state(json.loads(json.dumps(state)))
    assert_same([*again], [*iterator])


def test_values_of_other_libraries_become_python_s():
    frame = pandas.DataFrame(TEXTS + [{"prompt": "c", "completion": None}])
    assert read(frame)[:2] == TEXTS
    assert read(frame)[2] == {"prompt": "c", "completion": None, "label": None}
    table = tensorflow.data.Dataset.from_tensor_slices(
        {name: [row[name] for row in TEXTS] for name in TEXTS[0]}
    )
    assert read(table) == TEXTS
    [row] = read({"label": np.array([True]), "n": torch.tensor([3])})
    assert row["label"] is True and row["n"] == 3


def test_a_generator_is_read_once():
    def many():
        for _ in range(KEPT + 5):
            yield ROWS[0]

    examples, _ = prepare(many())
    with pytest.raises(ValueError) as error:
        check_epochs(examples, 2)
    for part in ("`dataset` can be read only once", "epochs=2", "generator"):
        assert part in str(error.value)
    check_epochs(examples, 1)
    check_epochs(prepare(many)[0], 2)
    # It may be looked into, and begun again.
    assert next(iter(examples)).row == 0
    assert len(list(examples)) == KEPT + 5
    with pytest.raises(ValueError, match=f"which {KEPT + 5} rows were read"):
        iter(examples)


ENDLESS = {
    "MapDataset": lambda: grain.MapDataset.source(ROWS).repeat(),
    "IterDataset": lambda: (
        grain.MapDataset.source(ROWS)
        .repeat()
        .to_iter_dataset()
        .map(lambda row: row)
    ),
    "repeated IterDataset": lambda: grain.experimental.RepeatIterDataset(
        grain.MapDataset.source(ROWS).to_iter_dataset()
    ),
    "DataLoader": lambda: loader(None),
    "tf.data": lambda: tensorflow_rows().repeat(),
    "IterableDataset": lambda: (
        datasets.Dataset.from_list(ROWS)
        .to_iterable_dataset()
        .repeat(None)
        .map(lambda row: row)
    ),
    "cycle": lambda: itertools.cycle(ROWS),
    "repeat": lambda: itertools.repeat(ROWS[0]),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_dataset_without_an_end_is_refused(kind):
    with pytest.raises(ValueError, match="`dataset` must have an end.*rep"):
        prepare(ENDLESS[kind]())


def test_a_part_of_an_endless_dataset_has_an_end():
    assert len(read(itertools.repeat(ROWS[0], 3))) == 3
    endless = grain.MapDataset.source(ROWS).repeat()
    assert len(read(endless[:5])) == 5
    limited = grain.experimental.LimitIterDataset(
        endless.to_iter_dataset(), count=4
    )
    assert len(read(limited)) == 4
    mixed = grain.IterDataset.mix(
        [
            endless.to_iter_dataset(),
            grain.MapDataset.source(ROWS).to_iter_dataset(),
        ]
    )
    assert len(read(mixed)) == 7


@pytest.mark.parametrize(
    "dataset, parts",
    [
        ({"a": [1, 2], "b": [1]}, ["as many values", "'a': 2, 'b': 1"]),
        ({"text": "hello"}, ["a dict with the keys ['text']", "each row"]),
        ({"train": ROWS}, ["splits"]),
        (ROWS[0], ["['prompt_ids', 'completion_ids', 'weight']", "each row"]),
        (
            {"prompt_ids": [1], "completion_ids": [2]},
            ["a list with a dict for each row"],
        ),
        ({"train": datasets.Dataset.from_list(ROWS)}, ["splits"]),
        (
            torch.utils.data.DataLoader(Torch()),
            ["of which `fit` makes batches", "Pass its `dataset`"],
        ),
        (lambda: 3, ["must return an iterable", "3 of type int"]),
        (b"abc", ["must be a list of dicts", "type bytes"]),
        ({1, 2}, ["must be a list of dicts", "type set"]),
        (dict, ["must be a list of dicts", "<class 'dict'> of type type"]),
        (lambda rows: rows, ["must be a list of dicts", "type function"]),
        (pandas.Series(["a"]), ["must be a list of dicts", "type Series"]),
        (np.ones((2, 2)), ["must be a dict of columns", "row 0"]),
        ((x for x in "ab"), ["must be a dict of columns", "row 0", "'a'"]),
    ],
)
def test_what_is_no_dataset_is_named(dataset, parts):
    with pytest.raises(ValueError) as error:
        list(prepare(dataset)[0])
    for part in parts:
        assert part in str(error.value)


# Files ---------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson", "ROWS.JSONL"])
def test_lines_of_json(tmp_path, name, encoding):
    path = write_lines(tmp_path / name, TEXTS, encoding)
    assert read(path) == read(str(path)) == TEXTS


@pytest.mark.parametrize("name", ["rows.jsonl{}", "rows.jsonl", "rows.json{}"])
@pytest.mark.parametrize(
    "suffix, compress",
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda data: pyarrow.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compressed_files(tmp_path, name, suffix, compress):
    """Known by their first bytes, whatever they are called."""
    path = tmp_path / name.format(suffix)
    if "jsonl" in name:
        data = "\n".join(map(json.dumps, TEXTS))
    else:
        data = json.dumps(TEXTS)
    path.write_bytes(compress(data.encode()))
    assert read(path) == TEXTS
    path.write_bytes(compress(data.encode())[:-15])
    with pytest.raises(ValueError, match=f"{path.name}.*whole"):
        read(path)


def test_csv_files(tmp_path):
    frame = pandas.DataFrame(TEXTS)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_csv(tmp_path / "rows.tsv", index=False, sep="\t")
    frame.to_csv(tmp_path / "rows.csv.gz", index=False)
    for name in ("rows.csv", "rows.tsv", "rows.csv.gz"):
        assert read(tmp_path / name) == TEXTS
    table = pyarrow.csv.read_csv(tmp_path / "rows.tsv".replace("t", "c", 1))
    assert read(table) == TEXTS
    text = 'prompt_ids,weight,note\n"[1, 2]",0.5,\n[],,3\n'
    (tmp_path / "ids.csv").write_text(text)
    assert read(tmp_path / "ids.csv") == [
        {"prompt_ids": [1, 2], "weight": 0.5, "note": ""},
        {"prompt_ids": [], "weight": None, "note": "3"},
    ]
    long = "x" * 200_000
    (tmp_path / "long.csv").write_text(f"text\n{long}\n")
    assert read(tmp_path / "long.csv") == [{"text": long}]


def test_patterns_and_lists_of_paths(tmp_path):
    (tmp_path / "deep").mkdir()
    first = write_lines(tmp_path / "b.jsonl", ROWS[:1])
    second = write_lines(tmp_path / "a.jsonl", ROWS[1:2])
    third = write_lines(tmp_path / "deep" / "c.jsonl", ROWS[2:])
    assert read([first, str(second), third]) == ROWS
    assert read(str(tmp_path / "*.jsonl")) == [ROWS[1], ROWS[0]]
    assert read(tmp_path / "[b]*") == ROWS[:1]
    found = read(str(tmp_path / "**" / "*.jsonl"))
    assert found == [ROWS[1], ROWS[0], ROWS[2]]
    assert read([str(tmp_path / "b*.jsonl"), third]) == [ROWS[0], ROWS[2]]


def test_a_dataset_of_parquet_files(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.dataset.write_dataset(table, tmp_path, format="parquet")
    assert read(pyarrow.dataset.dataset(tmp_path)) == ROWS
    assert read(str(tmp_path / "*.parquet")) == ROWS


@pytest.mark.parametrize(
    "name, data, parts",
    [
        (
            "rows.jsonl",
            '{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"),
            [
                "must be in UTF-8",
                "line 2",
                "byte 0xe9 at position 10",
                "iconv",
            ],
        ),
        (
            "rows.json",
            '[{"text": "é"}]'.encode("latin-1"),
            ["must be in UTF-8", "byte 0xe9"],
        ),
        ("rows.jsonl", '{"a": 1}'.encode("utf-16"), ["UTF-16", "iconv"]),
        (
            "rows.jsonl",
            b'{"a": 1}\n' + b"[" * 100_000,
            ["line 2", "nested too deeply"],
        ),
        ("rows.json", b"[" * 100_000, ["nested too deeply"]),
        ("rows.jsonl", b'{"a": ' + b"1" * 5000 + b"}", ["line 1", "4300"]),
        ("rows.jsonl", b"{'a': 1}", ["line 1", "one JSON object a line"]),
        ("rows.parquet", b"nothing", ["must be a Parquet file"]),
        ("rows.csv", b"a,b\n1\n", ["line 2", "1 cells", "['a', 'b']"]),
        ("rows.csv", b"a,a\n1,2\n", ["each column once"]),
        (
            "rows.csv",
            b"prompt_ids\n1 2\n",
            ["'prompt_ids' of a CSV file must hold JSON", "line 2", "'1 2'"],
        ),
        ("rows.csv", "a\né\n".encode("latin-1"), ["line 2", "UTF-8"]),
        ("rows.txt", b"a", ["`.jsonl`", "rows.txt"]),
    ],
)
def test_damaged_files_are_named(tmp_path, name, data, parts):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        read(path)
    for part in (*parts, name):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "path, part",
    [
        ("missing/*.jsonl", "missing/*.jsonl"),
        ("tests", "tests/*.jsonl"),
        ("tatsu-lab/alpaca", "datasets.load_dataset"),
        ('{"text": "a"}', "Is it text?"),
        (["a.jsonl", "b.jsonl"], "a.jsonl"),
    ],
)
def test_paths_of_no_file_are_named(path, part):
    with pytest.raises(ValueError, match="must be an existing file") as error:
        read(path)
    assert part in str(error.value)
