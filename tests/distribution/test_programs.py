"""Programs that are compiled to be read: stored, and read again."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from keras_posttrain.distribution import programs, topology


@pytest.fixture
def hardware(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield topology.get("v5e:2x2")
    jax.config.update("jax_compilation_cache_dir", before)
    # JAX remembers the folder that it has used.
    compilation_cache.reset_cache()


def lower(hardware, width=128, scale=1.0):
    sharding = SingleDeviceSharding(hardware.devices[0])
    shape = jax.ShapeDtypeStruct((8, width), "bfloat16", sharding=sharding)

    def function(x):
        out = jax.lax.optimization_barrier(x.T @ x)
        return (scale * out.astype("float32")).sum()

    return jax.jit(function).lower(shape)


def test_the_second_time_it_is_read(hardware, tmp_path, monkeypatch):
    program = programs.compile(lower(hardware), hardware)
    [file] = (tmp_path / "plans").iterdir()
    # Two operations for each of the products, and the others.
    assert 1 < program.flops / (2 * 8 * 128**2) < 1.5
    assert program.arguments == 8 * 128 * 2 and program.text.count("ENTRY")
    compiled, compile_ = [], programs._compile

    def count(lowered):
        compiled.append(lowered)
        return compile_(lowered)

    monkeypatch.setattr(programs, "_compile", count)
    assert programs.compile(lower(hardware), hardware) == program
    assert not compiled
    # Another program, hardware or option of the compiler is another entry.
    other = topology.get("v5e:1x1")
    options = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": False}
    programs.compile(lower(hardware, scale=2.0), hardware)
    programs.compile(lower(other), other)
    programs.compile(lower(hardware), hardware, options)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_flash=1")
    programs.compile(lower(hardware), hardware)
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert len(compiled) == len(list(file.parent.iterdir())) - 1 == 4
    # What a killed process left is compiled again.
    file.write_bytes(file.read_bytes()[:-9])
    again = programs.compile(lower(hardware), hardware)
    # Its text names the lines of Python that lowered it.
    assert dataclasses.replace(again, text=program.text) == program
    assert len(compiled) == 5
    monkeypatch.setattr(programs, "_compile", None)
    assert programs.compile(lower(hardware), hardware) == again


def test_what_does_not_fit_is_stored_too(hardware, monkeypatch):
    def error():
        with pytest.raises(jax.errors.JaxRuntimeError) as found:
            programs.compile(lower(hardware, width=131072), hardware)
        return str(found.value)

    first = error()
    assert "RESOURCE_EXHAUSTED" in first
    monkeypatch.setattr(programs, "_compile", None)
    assert error() == first


def test_without_a_local_cache_nothing_is_stored(hardware, tmp_path):
    for directory in (None, "gs://bucket/cache"):
        jax.config.update("jax_compilation_cache_dir", directory)
        assert programs.compile(lower(hardware), hardware).flops > 0
    assert not list(tmp_path.iterdir())


def named(name):
    def function(x):
        with jax.named_scope(name):
            return jnp.sin(x)

    return jax.jit(function).lower(jnp.ones(4))


def test_present_devices(hardware, tmp_path, monkeypatch):
    """JAX's own cache would give the names of the first program."""
    here = topology.get("cpu:1")
    for name in ("head", "tail"):
        program = programs.compile(named(name), here)
        assert program.arguments == 16
        assert f"jit(function)/{name}/sin" in program.text
    assert len(list((tmp_path / "plans").iterdir())) == 2
    monkeypatch.setattr(programs, "_compile", None)
    assert f"/{name}/sin" in programs.compile(named(name), here).text
