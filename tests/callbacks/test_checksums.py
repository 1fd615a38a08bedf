"""Checksums of what a checkpoint holds, on the host and on accelerators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keras_posttrain.callbacks import checkpoint_files

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool")


def placed(values):
    """Arrays on one device, split over eight, and on all of them."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    parts = P(), P("x", "y"), P(None, "x")
    shardings = [NamedSharding(mesh, part) for part in parts]
    return [jnp.asarray(values)] + [
        jax.device_put(values, sharding) for sharding in shardings
    ]


def by_hand(values):
    data = np.ascontiguousarray(values).tobytes()
    words = np.frombuffer(data, f"uint{8 * values.dtype.itemsize}")
    return sum(map(int, words)) % 2**32


@pytest.mark.parametrize("on_host", [True, False])
def test_they_are_sums_of_words_on_each_mesh(on_host, monkeypatch):
    """Where accelerators have the arrays, these sum them up."""
    if not on_host:
        monkeypatch.setattr(checkpoint_files, "ON_HOST", ())
        sum_up = checkpoint_files._sum_of_words

        def of_host(array):
            assert not isinstance(array, jax.Array)
            return sum_up(array)

        monkeypatch.setattr(checkpoint_files, "_sum_of_words", of_host)
    numbers = np.random.default_rng(0).normal(0, 50, (8, 16))
    for dtype in DTYPES:
        values = np.asarray(jnp.asarray(numbers).astype(dtype))
        arrays = {"host": values, "devices": placed(values)}
        arrays["number"] = jnp.asarray(values[0, 0])
        sums = checkpoint_files.checksums(arrays)
        number = sums.pop("['number']")
        assert number == by_hand(values[0, 0])
        assert len(sums) == 5 and set(sums.values()) == {by_hand(values)}


def test_the_host_sums_up_other_numbers(monkeypatch):
    """Those of four bits, and complex ones, are no words of a device."""
    monkeypatch.setattr(checkpoint_files, "ON_HOST", ())
    for dtype in ("int4", "complex64"):
        values = np.arange(-8, 8).astype(dtype)
        sums = checkpoint_files.checksums({"x": jnp.asarray(values)})
        assert sums == {"['x']": checkpoint_files._sum_of_words(values)}


def test_a_bit_makes_another_one(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "ON_HOST", ())
    first, second = (
        checkpoint_files.checksums({"x": jnp.array([zero, 1.0])})
        for zero in (0.0, -0.0)
    )
    assert first != second
