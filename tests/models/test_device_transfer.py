"""Weights between files and devices: what each step keeps and takes."""

import concurrent.futures
import json
import threading

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_posttrain._variables import without_values
from keras_posttrain.models import device_transfer
from keras_posttrain.models.hf import checkpoint_files


def test_variables_without_values_take_them_later():
    """Pins a private method of Keras, which calls the initializer."""
    initialized = []

    def initializer(shape, dtype=None):
        initialized.append(shape)
        return np.ones(shape, dtype)

    with without_values() as made:
        variable = keras.Variable(initializer, (2, 3), "bfloat16", name="v")
        layer = keras.layers.Dense(4, kernel_initializer=initializer)
        layer.build((None, 3))
    assert not initialized
    assert made == [variable, layer.kernel, layer.bias]
    assert variable.shape == (2, 3) and variable.dtype == "bfloat16"
    variable.assign(np.full((2, 3), 2.0))
    assert (np.array(variable.value) == 2).all()
    # As it was, also for those that are made in no scope, and later.
    with keras.StatelessScope():
        pass
    assert not initialized
    keras.Variable(initializer, (2,))
    assert initialized == [(2,)]


def test_a_failure_inside_puts_the_method_back():
    before = keras.Variable._initialize_with_initializer
    with pytest.raises(RuntimeError), without_values():
        raise RuntimeError
    assert keras.Variable._initialize_with_initializer is before


def test_only_variables_of_the_same_thread_are_deferred():
    """Scopes of two threads, of which the first to open closes first."""
    before = keras.Variable._initialize_with_initializer
    opened, closed = threading.Event(), threading.Event()

    def other():
        outside = keras.Variable("ones", (2,))
        with without_values() as made:
            opened.set()
            assert closed.wait(60)
            inside = keras.Variable("ones", (2,))
        return outside._value, inside._value, made[0] is inside

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with without_values() as made:
            found = pool.submit(other)
            assert opened.wait(60)
        variable = keras.Variable("ones", (2,))
        closed.set()
        outside, inside, is_made = found.result()
    assert made == [] and variable._value is not None
    assert outside is not None and inside is None and is_made
    assert keras.Variable._initialize_with_initializer is before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_contiguous_copies(dtype):
    x = np.arange(3 * 300 * 520).reshape(3, 300, 520).astype(dtype)
    for order in [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)]:
        for view in (x.transpose(order), x[:, 5:290, 3:].transpose(order)):
            got = device_transfer.contiguous(view)
            assert got.flags.c_contiguous and got.dtype == view.dtype
            assert (got == view).all()
    assert device_transfer.contiguous(np.ones((), dtype)).shape == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shift", [0, 2, 8])
def test_variables_do_not_keep_a_files_memory(dtype, shift, tmp_path):
    """Wherever tensors begin in a file, whose bytes change afterwards."""
    tensors = {
        "whole": np.arange(64 * 96, dtype="float32").reshape(64, 96),
        "number": np.array(7, "float32"),
        "none": np.zeros((0, 4), "float32"),
    }
    path = tmp_path / checkpoint_files.SINGLE
    save_file(tensors, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length], raw[8 + length :]
    first = json.loads(header)["whole"]["data_offsets"][0]
    header += b" " * ((shift - 8 - length - first) % device_transfer.ALIGNMENT)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    reader = checkpoint_files.Reader(tmp_path)
    place = reader.view("whole").ctypes.data
    assert place % device_transfer.ALIGNMENT == shift
    variables, pairs = {}, []
    for name, value in tensors.items():
        for flip in (False, True):
            view = reader.view(name).T if flip else reader.view(name)
            assert not (view.size and view.flags.writeable)
            variable = keras.Variable("ones", view.shape, dtype)
            variables[name, flip] = variable, value.T if flip else value
            pairs.append((variable, view.__getitem__))
    device_transfer.fill_all(pairs)
    del view, pairs
    with path.open("r+b") as file:
        file.seek(8 + len(header))
        file.write(bytes(len(data)))
    for variable, value in variables.values():
        found = np.array(variable.value)
        assert found.dtype == jnp.dtype(dtype)
        assert (found == value.astype(found.dtype)).all()


def test_the_default_device_is_that_of_the_caller(eight_devices):
    """Threads read the arrays, and a default device is one thread's."""
    variable = keras.Variable("ones", (2, 3))
    pairs = [(variable, np.zeros((3, 2), "float32").T.__getitem__)]
    for device in (jax.devices()[3], jax.devices()[0]):
        with jax.default_device(device):
            device_transfer.fill_all(pairs)
        assert variable.value.devices() == {device}
    # Bound to no device: a program may move it.
    device_transfer.fill_all(pairs)
    assert not variable.value.committed


def test_what_reading_raises_is_raised():
    variables = [keras.Variable("ones", (2,)) for _ in range(5)]

    def fails(index):
        raise ValueError("the third")

    reads = [np.zeros(2).__getitem__] * 2 + [fails] * 3
    with pytest.raises(ValueError, match="the third"):
        device_transfer.fill_all(zip(variables, reads))
    assert [float(x.value[0]) for x in variables] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_copies_do_not_stay(dtype, monkeypatch):
    """JAX keeps a copy with each array that NumPy has looked at."""
    monkeypatch.setattr(device_transfer, "CHUNK", 1000)
    array = keras.ops.reshape(keras.ops.arange(1230, dtype=dtype), (41, 30))
    got = device_transfer.to_host(array)
    assert array._npy_value is None
    assert got.dtype == array.dtype and (got == np.array(array)).all()
    assert device_transfer.to_host(array[0, 1]) == array[0, 1]


DTYPES = {"b": "bfloat16", "a": "float32", "c\u00e9": "float16"}
DTYPES |= {"d": "float64", "e": "bfloat16"}


def test_files_are_those_of_the_library(tmp_path):
    """Byte by byte what `safetensors` writes with all tensors at hand."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=(3, 1 + i)).astype(dtype)
        for i, (name, dtype) in enumerate(DTYPES.items())
    }
    assert arrays["b"].dtype == ml_dtypes.bfloat16
    shapes = {name: x.shape for name, x in arrays.items()}
    for most, count in ((10**6, 1), (60, 3)):
        folder = tmp_path / str(most)
        folder.mkdir()
        shards = checkpoint_files.plan_shards(shapes, DTYPES, most)
        assert len(shards) == count
        checkpoint_files.write_tensors(
            folder,
            shards,
            shapes,
            DTYPES,
            (arrays[n] for names in shards.values() for n in names),
        )
        for file, names in shards.items():
            wanted = {name: arrays[name] for name in names}
            save_file(wanted, tmp_path / "theirs", {"format": "pt"})
            ours = (folder / file).read_bytes()
            assert ours == (tmp_path / "theirs").read_bytes()
            assert set(load_file(folder / file)) == set(names)
