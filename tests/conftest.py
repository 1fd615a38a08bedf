"""Set-up shared by all tests: JAX on the CPU, exact float32 products."""

import json
import os
import pathlib

# Before anything imports Keras or JAX, and for the processes tests start.
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest

REFERENCE = pathlib.Path(__file__).parent / "reference"


def pytest_configure(config):
    """Compiled programs are kept in pytest's cache, one folder a worker.

    JAX does not lock its cache folder, so parallel workers do not share one.
    Small programs are kept too: the tests and the processes they start make
    the same ones again and again.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    folder = str(config.cache.mkdir(f"jax-{worker}"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def reference():
    """The folder of numbers that other implementations gave."""
    return REFERENCE


@pytest.fixture(scope="session")
def load_reference():
    """`load_reference("sft")` reads `tests/reference/sft.json`.

    The non-finite floats are the strings `"NaN"` and `"Infinity"` there, and
    come back as floats.
    """

    def number(value):
        if isinstance(value, str) and value in ("NaN", "Infinity"):
            return float(value)
        if isinstance(value, str) and value == "-Infinity":
            return float("-inf")
        if isinstance(value, list):
            return [number(v) for v in value]
        if isinstance(value, dict):
            return {k: number(v) for k, v in value.items()}
        return value

    def load(name):
        text = (REFERENCE / f"{name}.json").read_text(encoding="utf-8")
        return number(json.loads(text))

    return load


@pytest.fixture
def strict_ranks():
    """Shapes that broadcast by adding axes are errors inside the test.

    It catches a `(rows,)` array that meets a `(rows, length)` one.
    """
    with jax.numpy_rank_promotion("raise"):
        yield
