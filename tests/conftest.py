"""Set-up shared by all tests: JAX on eight CPU devices, exact products."""

import gc
import json
import os
import pathlib
import signal

# Before anything imports Keras or JAX, and for the processes tests start.
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests of the cache set a directory of their own.
os.environ["KERAS_POSTTRAIN_CACHE"] = "off"
# Compiling programs that run once or twice is most of the time of a first run
# of the tests. Without LLVM's optimizations, and with XLA's older code for
# fused operations, it takes a quarter. `make test-full` compiles as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false",
)

import jax
import keras
import pytest
from jax._src import compiler

# The CPU as eight devices, in this process alone: the processes that tests
# start have one device each, as a user's script has. A model is placed on the
# first device unless a test sets a distribution.
DEVICES = 8
# XLA's defaults of the flags above.
DEFAULTS = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
}
jax.config.update("jax_num_cpu_devices", DEVICES)

REFERENCE = pathlib.Path(__file__).parent / "reference"

# The layer of a test that names none, by the end of its file's name.
LAYERS = {
    "_reference.py": "reference",
    "_learning.py": "learning",
    "guides.py": "guides",
    "guide.py": "guides",
    "contract.py": "contract",
}

LONGEST = (
    "test_guides.py",
    "test_processes.py",
    "test_distill_learning.py",
    "test_grpo_learning.py",
    "test_remote.py",
    "test_sweep.py",
    "test_vllm_processes.py",
    "test_vllm_guide.py",
)


def share_cores():
    """Gives a worker of pytest-xdist its share of the cores.

    Programs this small take longer in threads that wait for each other, of two
    workers on two cores by a tenth to a fifth.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    number = int(worker.removeprefix("gw")) % count
    cores = sorted(os.sched_getaffinity(0))
    own = cores[number::count] or [cores[number % len(cores)]]
    os.sched_setaffinity(0, own)


def pytest_configure(config):
    """Shares the cores; keeps compiled programs for all workers and runs.

    Small programs too. `JAX_COMPILATION_CACHE_DIR` names another folder than
    pytest's cache. JAX neither locks the folder nor renames finished files
    into it, but an entry that is read while it is written, or that a killed
    process left, fails to decompress and is compiled again.
    """
    share_cores()
    folder = os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax"))
    )
    jax.config.update("jax_compilation_cache_dir", folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_default_matmul_precision", "highest")


def layer(item):
    """The name of the layer that a test belongs to."""
    for name in ("unit", "devices", *LAYERS.values()):
        if item.get_closest_marker(name):
            return None
    if "eight_devices" in item.fixturenames:
        return "devices"
    for end, name in LAYERS.items():
        if item.path.name.endswith(end):
            return name
    return "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if name := layer(item):
            item.add_marker(name)
    # The longest tests first, so that no worker waits for one at the end.
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """Lets Ctrl-C interrupt, also where tests run in a shell's background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    """Spares the garbage collector what all tests keep: the modules.

    They are most of the objects that it would look at in each of its rounds,
    which take a tenth of the time of tests that trace programs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def freed_programs():
    """Frees the programs of a file, so that a worker grows less."""
    yield
    gc.collect()
    jax.clear_caches()


@pytest.fixture
def optimized(monkeypatch):
    """Compiles programs as users do, for a test that executes them for long.

    In the processes that it starts too.
    """
    flags = os.environ["XLA_FLAGS"].split()
    rest = [f for f in flags if f[2:].split("=")[0] not in DEFAULTS]
    monkeypatch.setenv("XLA_FLAGS", " ".join(rest))
    options = compiler.get_compile_options

    def as_users(*args, env_options_overrides=None, **kwargs):
        overrides = DEFAULTS | (env_options_overrides or {})
        return options(*args, env_options_overrides=overrides, **kwargs)

    monkeypatch.setattr(compiler, "get_compile_options", as_users)


@pytest.fixture
def eight_devices():
    """Names of eight devices; the distribution that a test sets is removed."""
    names = keras.distribution.list_devices()
    if len(names) != DEVICES:
        pytest.skip(f"Needs {DEVICES} devices, set JAX_PLATFORMS=cpu: {names}")
    yield names
    keras.distribution.set_distribution(None)


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
