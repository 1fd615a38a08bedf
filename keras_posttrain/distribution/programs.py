"""Programs compiled to be read, for devices that may not be there."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
import threading
import zlib

import jax
from jax.experimental.compilation_cache import compilation_cache

# Held while JAX's cache of programs is off, which is a setting of the process.
_COMPILING = threading.Lock()
# Variables that a compiler reads its settings from.
_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of a program on one device.

    Attributes:
        text: str, its instructions.
        arguments, temporaries, code: ints, bytes. Temporaries include what
            the compiler sets aside.
        peak: int, the most bytes in use at once, with the arguments; 0 from
            a compiler that does not report it.
        flops, traffic: floats, operations, and bytes read and written, with
            the body of each loop counted once.
    """

    text: str
    arguments: int
    temporaries: int
    code: int
    peak: int
    flops: float
    traffic: float


def compile(lowered, hardware, options=None):
    """Compiles a program for a topology.

    What is read of a program, or that it does not fit, is stored under
    `plans/` in the directory of JAX's persistent cache. That cache itself
    can't serve: programs for devices that are not there can be written to it
    but not read from it, and it ignores the names of operations, so that a
    program from it may have those of older code.

    Args:
        lowered: `jax.stages.Lowered`.
        hardware: `Topology`.
        options: the compiler's options that `lowered` was made with.

    Raises:
        jax.errors.JaxRuntimeError: if it does not fit into the memory.
    """
    path = _path(lowered, hardware, options)
    found = _load(path)
    if found is None:
        found = _compile(lowered)
        _store(path, found)
    if isinstance(found, str):
        raise jax.errors.JaxRuntimeError(found)
    if hardware.devices[0].platform == "cpu":
        # As its peak the compiler for CPUs reports the arguments.
        found = dataclasses.replace(found, peak=0)
    return found


def _compile(lowered):
    """Returns a `Program`, or the error of one that is too large."""
    with _COMPILING:
        before = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            return _read(lowered.compile())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return str(error)
        finally:
            jax.config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()


def _read(compiled):
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    return Program(
        text=compiled.as_text(),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        flops=float(cost.get("flops", 0.0)),
        traffic=float(cost.get("bytes accessed", 0.0)),
    )


def _path(lowered, hardware, options):
    """Returns the file of a program, or `None` without a local cache."""
    directory = jax.config.jax_compilation_cache_dir
    if not directory or "://" in directory:
        return None
    versions = [importlib.metadata.version(x) for x in ("jax", "jaxlib")]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("libtpu"))
    settings = [os.environ.get(name, "") for name in _SETTINGS]
    key = repr((hardware.name, versions, settings, options))
    digest = hashlib.sha256(key.encode())
    digest.update(lowered.as_text().encode())
    # The names of operations, without Python's functions and lines.
    named = r'loc\("([^"]*[/(][^"]*)"\('
    names = re.findall(named, lowered.as_text(debug_info=True))
    digest.update("\n".join(sorted(set(names))).encode())
    return pathlib.Path(directory, "plans", digest.hexdigest())


def _load(path):
    try:
        found = json.loads(zlib.decompress(path.read_bytes()))
        return found if isinstance(found, str) else Program(**found)
    except (AttributeError, OSError, TypeError, ValueError, zlib.error):
        # There is none, or none that this version can read.
        return None


def _store(path, found):
    if path is None:
        return
    if isinstance(found, Program):
        found = dataclasses.asdict(found)
    # A full disk loses nothing but time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(zlib.compress(json.dumps(found).encode(), 1))
        os.replace(f.name, path)
