"""`RowCache`: what was written is read, kept, and refused if damaged."""

import concurrent.futures
import subprocess
import sys
import zlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_posttrain.data.batches.row_cache import RowCache, row_key

HEADER = {"model": "tiny", "weights": 17, "temperature": 1.0, "config": (1,)}


def top_k_rows(count, seed=0, k=3):
    """Rows of unequal length as a teacher's top-k has them."""
    rng = np.random.default_rng(seed)
    rows = {}
    for i in range(count):
        n = int(rng.integers(1, 9))
        rows[row_key([seed, i], 1)] = {
            "ids": rng.integers(0, 500, (n, k)).astype("int32"),
            "logps": rng.normal(size=(n, k)).astype("float32"),
        }
    return rows


def check(cache, rows):
    for key, row in rows.items():
        found = cache.read(key)
        assert found.keys() == row.keys()
        for name in row:
            assert found[name].dtype == row[name].dtype
            np.testing.assert_array_equal(found[name], row[name])


def refused(function, *parts):
    with pytest.raises(ValueError) as error:
        function()
    for part in parts:
        assert part in str(error.value)


def shards(directory):
    return sorted(directory.glob("rows-*.safetensors"))


def test_a_key_is_of_tokens_and_start():
    key = row_key([1, 2, 3], 1)
    assert key == row_key(np.array([1, 2, 3]), 1) and len(key) == 16
    others = [([1, 2, 3], 2), ([1, 2], 1), ([1, 3, 2], 1), ([3], 1)]
    assert len({key, *(row_key(*other) for other in others)}) == 5


def test_rows_come_back_from_another_opening(tmp_path):
    first, second = top_k_rows(20), top_k_rows(7, seed=1)
    cache = RowCache(tmp_path / "new" / "cache", HEADER)
    assert len(cache) == 0
    cache.write(first)
    check(cache, first)
    cache.write(second)
    cache.write({})
    again = RowCache(tmp_path / "new" / "cache", HEADER)
    assert len(again) == 27 and len(shards(again.directory)) == 2
    check(again, first | second)
    unknown = row_key([9], 0)
    assert again.missing([*first, unknown, unknown]) == [unknown]
    assert unknown not in again and next(iter(first)) in again
    with pytest.raises(KeyError):
        again.read(unknown)


def test_an_empty_row_and_plain_vectors(tmp_path):
    rows = {
        row_key([i], 0): {"logps": np.arange(i, dtype="float32")}
        for i in range(4)
    }
    RowCache(tmp_path, HEADER).write(rows)
    check(RowCache(tmp_path, HEADER), rows)


def test_many_threads_read(tmp_path):
    rows = top_k_rows(200)
    RowCache(tmp_path, HEADER).write(rows)
    cache = RowCache(tmp_path, HEADER)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = [*rows] * 3
        for key, found in zip(keys, pool.map(cache.read, keys)):
            np.testing.assert_array_equal(found["ids"], rows[key]["ids"])


def test_another_header_is_refused(tmp_path):
    RowCache(tmp_path, HEADER)
    RowCache(tmp_path, dict(reversed(HEADER.items())))
    for name, value in (("weights", 18), ("temperature", 2.0), ("k", 5)):
        refused(
            lambda name=name, value=value: RowCache(
                tmp_path, HEADER | {name: value}
            ),
            f"another {name}. There: {HEADER.get(name)!r}. ",
            f"Received: {value!r}. Use another directory, or delete it.",
        )
    # The first by its name is shown.
    more = {name: 1 for name in "gfedcba"}
    refused(lambda: RowCache(tmp_path, HEADER | more), "another a. There: ")
    # Of a long config only what differs is shown.
    config = {str(i): i for i in range(50)}
    RowCache(tmp_path / "b", {"config": config})
    refused(
        lambda: RowCache(tmp_path / "b", {"config": config | {"7": 0}}),
        "There: {'7': 7}. Received: {'7': 0}.",
    )


def test_a_header_with_a_dict_in_place_of_a_number(tmp_path):
    for i, (there, here) in enumerate(((3, {"k": 3}), ({"k": 3}, 3))):
        RowCache(tmp_path / str(i), {"top": there})
        refused(
            lambda i=i, here=here: RowCache(tmp_path / str(i), {"top": here}),
            f"another top. There: {there!r}. Received: {here!r}.",
        )


def test_the_arrays_of_a_file(tmp_path):
    """Caches outlive versions of the library, so their files stay the same."""
    rows = top_k_rows(2)
    # The order in which a row has its arrays is of no importance.
    turned = {key: dict(reversed(row.items())) for key, row in rows.items()}
    RowCache(tmp_path, HEADER).write(turned)
    found = load_file(shards(tmp_path)[0])
    keys, values = list(rows), list(rows.values())
    assert found.pop("row keys").tobytes() == b"".join(keys)
    assert found.pop("row lengths").tolist() == [len(v["ids"]) for v in values]
    assert found.pop("row checksums").tolist() == [
        zlib.crc32(row["ids"].tobytes() + row["logps"].tobytes())
        for row in values
    ]
    assert found.keys() == {"ids", "logps"}
    for name, array in found.items():
        whole = np.concatenate([row[name] for row in values])
        np.testing.assert_array_equal(array, whole)


@pytest.mark.parametrize("name", ["row keys", "row lengths", "ids"])
def test_a_file_whose_arrays_do_not_fit_is_damaged(tmp_path, name):
    RowCache(tmp_path, HEADER).write(top_k_rows(3))
    (path,) = shards(tmp_path)
    arrays = load_file(path)
    arrays[name] = np.concatenate([arrays[name]] * 2)
    save_file(arrays, path)
    refused(lambda: RowCache(tmp_path, HEADER), "are not of one length")


def test_rows_that_do_not_fit_are_not_written(tmp_path):
    cache = RowCache(tmp_path, HEADER)
    (key, row), (other, _) = top_k_rows(2).items()
    fewer = {"ids": row["ids"], "logps": row["logps"][:, :2]}
    refused(lambda: cache.write({key: row, other: fewer}), "for row 1")
    short = {"ids": row["ids"], "logps": row["logps"][:0]}
    refused(lambda: cache.write({key: short}), "as many tokens", "row 0")
    assert shards(tmp_path) == [] and len(cache) == 0


def test_a_killed_run_keeps_what_it_has_written(tmp_path):
    """Killed in the third of its writes, while its file is half there."""
    script = """
import os, signal, sys
import numpy as np
from keras_posttrain.data.batches import row_cache

def cut(tensors, path):
    with open(path, "wb") as file:
        file.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

cache = row_cache.RowCache(sys.argv[1], {"model": "tiny"})
for i in range(3):
    if i == 2:
        row_cache.save_file = cut
    key = row_cache.row_key([i], 0)
    cache.write({key: {"logps": np.full(i + 1, i, "float32")}})
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert done.returncode == -9
    cache = RowCache(tmp_path, {"model": "tiny"})
    keys = [row_key([i], 0) for i in range(3)]
    assert cache.missing(keys) == keys[2:]
    np.testing.assert_array_equal(cache.read(keys[1])["logps"], [1, 1])


def test_damage_is_reported(tmp_path):
    rows = top_k_rows(20)
    RowCache(tmp_path, HEADER).write(rows)
    (path,) = shards(tmp_path)
    whole = path.read_bytes()
    for cut in (whole[:-5], whole[:4], b""):
        path.write_bytes(cut)
        refused(
            lambda: RowCache(tmp_path, HEADER),
            f"{str(path)!r} is damaged",
            "Delete it; the rows it held are computed again.",
        )
    flipped = bytearray(whole)
    at = whole.find(rows[next(iter(rows))]["ids"].tobytes())
    flipped[at] ^= 1
    path.write_bytes(flipped)
    cache, (bad, *good) = RowCache(tmp_path, HEADER), rows
    refused(lambda: cache.read(bad), str(path), "row 0", "Delete it")
    check(cache, {key: rows[key] for key in good})
    (tmp_path / "header.json").write_text("{")
    refused(lambda: RowCache(tmp_path, HEADER), "Delete its directory")
    (tmp_path / "header.json").unlink()
    refused(lambda: RowCache(tmp_path, HEADER), "Delete its directory")
