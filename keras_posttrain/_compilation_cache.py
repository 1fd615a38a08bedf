"""XLA's persistent compilation cache, which is on by default."""

import hashlib
import os
import pathlib
import platform

import jax

from keras_posttrain import _cache

# The shortest compilation, in seconds, whose program is stored.
THRESHOLD = "jax_persistent_cache_min_compile_time_secs"


def enable():
    """Stores compiled programs in the user's cache directory.

    The environment variable `KERAS_POSTTRAIN_CACHE` sets another directory,
    or turns the cache off with `0` or `off`. A cache directory that is set in
    JAX's own configuration is not changed.

    Programs that compile in less than a second are stored too, unless the
    configuration says otherwise: a run has dozens of them.
    """
    directory = _cache.directory()
    if directory is None or jax.config.jax_compilation_cache_dir:
        return
    if not os.environ.get(_cache.VARIABLE):
        # Home directories are shared by machines, and a program compiled for
        # one CPU may not run on another.
        directory = directory / _machine()
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if THRESHOLD.upper() not in os.environ:
        jax.config.update(THRESHOLD, 0.0)


def _machine():
    """Returns a name for this CPU model."""
    description = platform.machine()
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features", "model name")):
                description += line
            if not line:
                break
    except OSError:
        description += platform.processor()
    digest = hashlib.sha256(description.encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"
