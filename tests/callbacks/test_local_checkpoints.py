"""Checkpoints on the machines of a run: written, read, used and deleted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import keras_posttrain as kpt
from keras_posttrain.callbacks import local_files
from keras_posttrain.callbacks.checkpoint_files import (
    abstract,
    checksums,
    meta_checksum,
)
from keras_posttrain.callbacks.local_checkpoints import LocalCheckpoints


def state(seed=0):
    """Arrays in eight parts, in two and in one, of several dtypes."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    numbers = np.random.default_rng(seed).normal(size=(8, 6))

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "a": {
            "float32": put(numbers.astype("float32"), "data", "model"),
            "bfloat16": put(jnp.asarray(numbers, "bfloat16"), "data"),
        },
        "b": {
            "int32": put(np.int32(seed)),
            "bool": put(numbers > 0, None, "model"),
            "empty": put(np.zeros((0, 3), "int8")),
        },
        "host": numbers.astype("float32"),
    }


def meta_of(step, arrays):
    meta = {"step": step, "sums": checksums(arrays), "loss": float("inf")}
    return meta | {"checksum": meta_checksum(meta)}


def wanted(arrays):
    return jax.tree.map(
        lambda x: abstract(x) if isinstance(x, jax.Array) else
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        arrays,
    )  # fmt: skip


def begun(tmp_path, run="run"):
    (tmp_path / run).mkdir(exist_ok=True)
    local = LocalCheckpoints(tmp_path / "local", 1)
    local.begin(tmp_path / run)
    return local


def saved(tmp_path, *steps):
    """Writes the steps; the newest two are left."""
    local = begun(tmp_path)
    for step in steps:
        arrays = state(step)
        local.save(step, arrays, meta_of(step, arrays))
    local.close(None)
    return local


def names(tmp_path):
    return sorted(p.name for p in (tmp_path / "local").rglob("*.*"))


def test_what_is_written_is_read(tmp_path):
    saved(tmp_path, 3)
    local = begun(tmp_path)
    [key] = local.find()
    meta, error = local.read_meta(key)
    assert error is None and meta == meta_of(3, state(3))
    arrays, error = local.read_arrays(key, wanted(state()))
    assert error is None
    pairs = zip(
        jax.tree.leaves_with_path(state(3)),
        jax.tree.leaves(arrays),
        strict=True,
    )
    for (path, one), two in pairs:
        assert type(one) is type(two) and one.dtype == two.dtype, path
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), path
        if isinstance(one, jax.Array):
            assert one.sharding == two.sharding, path


def test_equal_parts_are_written_once(tmp_path):
    saved(tmp_path, 3)
    [file] = local_files.files_in(next((tmp_path / "local").iterdir()))
    # float32 8, bfloat16 4, bool 2, each of the others 1.
    assert len(file.parts) == 17
    arrays = jax.tree.leaves(state())
    assert sum(size for size, _ in file.parts.values()) == sum(
        x.nbytes for x in arrays
    )


def test_devices_that_need_other_parts_do_not_find_them(tmp_path):
    saved(tmp_path, 3)
    local = begun(tmp_path)
    [key] = local.find()
    other = wanted(state())
    mesh = jax.make_mesh((8,), ("data",))
    spec = NamedSharding(mesh, PartitionSpec("data"))
    other["a"]["float32"] = jax.ShapeDtypeStruct(
        (8, 6), "float32", sharding=spec
    )
    arrays, error = local.read_arrays(key, other)
    assert arrays is None and error.startswith("8 of 17 parts that the dev")
    # As many values, with other bytes.
    other = wanted(state())
    other["host"] = jax.ShapeDtypeStruct((8, 6), "float64")
    _, error = local.read_arrays(key, other)
    assert error.startswith("1 of 17 parts")


def test_at_most_two_are_kept_until_they_are_redundant(tmp_path):
    local = saved(tmp_path, 1, 2, 3)
    process = ".process-0.safetensors"
    assert names(tmp_path) == [f"step-2{process}", f"step-3{process}"]
    local.close(2)
    assert names(tmp_path) == [f"step-3{process}"]
    # A resumed run keeps the step from which it continues.
    saved(tmp_path, 5)
    local = begun(tmp_path)
    keys = local.find()
    assert [step for step, _ in keys] == [5, 3]
    local.keep_only(keys[1], 3)
    assert names(tmp_path) == [f"step-3{process}"]
    local.close(3)
    assert list((tmp_path / "local").iterdir()) == []


def test_those_of_another_run_are_not_found(tmp_path):
    saved(tmp_path, 1)
    before = names(tmp_path)
    other = begun(tmp_path, "another")
    assert other.find() == []
    other.keep_only(None, 0)
    other.close(5)
    # A directory that was removed makes another run.
    (tmp_path / "run" / "run_id").unlink()
    assert begun(tmp_path).find() == []
    assert names(tmp_path) == before


def test_files_of_two_attempts_are_not_combined(tmp_path):
    """Each has written what the other lacks of the step."""
    saved(tmp_path, 1)
    folder = next((tmp_path / "local").iterdir())
    [path] = folder.iterdir()
    parts = local_files.own_parts(state(1))
    [file] = local_files.files_in(folder)
    names = sorted(parts)
    for i, half in enumerate((names[:9], names[9:])):
        local_files.write(
            path.with_name(f"step-1.process-{i}.safetensors"),
            {name: parts[name] for name in half},
            f"attempt {i}",
            file.meta,
        )
    local = begun(tmp_path)
    keys = local.find()
    assert keys == [(1, "attempt 1"), (1, "attempt 0")]
    errors = [local.read_arrays(key, wanted(state()))[1] for key in keys]
    assert [error.split()[0] for error in errors] == ["9", "8"]


def test_what_was_not_completed_is_removed(tmp_path):
    saved(tmp_path, 1)
    folder = next((tmp_path / "local").iterdir())
    (folder / "step-2.process-0.tmp").write_bytes(b"cut off")
    [key] = begun(tmp_path).find()
    assert key[0] == 1 and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"local_directory": "/dev/shm/run"},
        {"local_every": 5},
        {"local_directory": "gs://bucket/run", "local_every": 5},
        {"local_directory": 3, "local_every": 5},
        {"local_directory": "run", "local_every": 0},
        {"local_directory": "run", "local_every": "5 days"},
    ],
)
def test_bad_arguments_are_refused(arguments, tmp_path):
    with pytest.raises(ValueError, match="`local_.*Received: .*local_"):
        kpt.callbacks.Checkpoint(tmp_path, **arguments)
