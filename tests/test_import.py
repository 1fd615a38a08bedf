"""Effects of `import keras_posttrain` on a process."""

import ast
import importlib
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import keras
import keras_hub
import pytest

import keras_posttrain
from keras_posttrain import _compilation_cache, _lazy_imports

ROOT = pathlib.Path(__file__).parent.parent
# Those with public names. That of the server needs an extra.
PACKAGES = [
    ".".join(file.parent.relative_to(ROOT).parts)
    for file in sorted((ROOT / "keras_posttrain").rglob("__init__.py"))
    if "__all__" in file.read_text(encoding="utf-8")
    and file.parent.name != "serve"
]


DROPPED = (
    "KERAS_BACKEND",
    "KERAS_POSTTRAIN_CACHE",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
)


def run(code, **environment):
    """Runs code in a process without this one's settings."""
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def output(code, **environment):
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_it_sets_the_backend_and_a_cache_of_the_users(tmp_path):
    """Also where the environment names another backend: nothing of Keras's
    has been imported that could disagree. Nothing is printed."""
    done = run(
        "import keras_posttrain, keras, jax;"
        "print(keras.config.backend(), jax.config.jax_compilation_cache_dir,"
        "jax.config.jax_persistent_cache_min_compile_time_secs)",
        KERAS_BACKEND="torch",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == 0 and done.stderr == ""
    (line,) = done.stdout.splitlines()
    backend, cache, threshold = line.split()
    assert backend == "jax" and threshold == "0.0"
    assert pathlib.Path(cache).parent == tmp_path / "keras_posttrain"


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_another_backend_is_explained(backend):
    if backend == "tensorflow":
        pytest.importorskip("tensorflow")
    done = run("import keras, keras_posttrain", KERAS_BACKEND=backend)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: keras_posttrain runs on the JAX")
    assert f"backend='{backend}'" in last and 'KERAS_BACKEND="jax"' in last


@pytest.fixture
def cache_setting(monkeypatch):
    """A function that returns the cache that the package's own set-up leaves.

    It takes what is set in JAX's configuration before, and the environment.
    """
    names = "jax_compilation_cache_dir", _compilation_cache.THRESHOLD
    kept = {name: getattr(jax.config, name) for name in names}
    for name in DROPPED:
        monkeypatch.delenv(name, raising=False)

    def setting(before=None, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        jax.config.update("jax_compilation_cache_dir", before)
        _compilation_cache.enable()
        return jax.config.jax_compilation_cache_dir

    yield setting
    for name, value in kept.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("value", ["0", "off", "False", "no"])
def test_the_cache_can_be_turned_off(cache_setting, value):
    assert cache_setting(KERAS_POSTTRAIN_CACHE=value) is None


def test_the_cache_can_be_elsewhere(cache_setting, tmp_path):
    found = cache_setting(KERAS_POSTTRAIN_CACHE=str(tmp_path / "mine"))
    assert found == str(tmp_path / "mine")
    found = cache_setting(KERAS_POSTTRAIN_CACHE="~/mine", HOME=str(tmp_path))
    assert found == str(tmp_path / "mine")


def test_the_caches_default_is_the_users_and_the_machines(
    cache_setting, tmp_path
):
    first = cache_setting(XDG_CACHE_HOME="", HOME=str(tmp_path))
    root = tmp_path / ".cache" / "keras_posttrain"
    assert pathlib.Path(first).parent == root
    assert cache_setting(XDG_CACHE_HOME="", HOME=str(tmp_path)) == first


def test_a_cache_of_jaxs_own_is_left_alone(cache_setting, tmp_path):
    mine = str(tmp_path / "mine")
    assert cache_setting(mine) == mine
    code = "import keras_posttrain, jax;"
    code += "print(jax.config.jax_compilation_cache_dir)"
    assert output(code, JAX_COMPILATION_CACHE_DIR=mine) == [mine]


TRAINS = """
import collections
import sys
import tempfile
import jax

events = collections.Counter()
jax.monitoring.register_event_listener(lambda e, **_: events.update([e]))

import keras_posttrain as kpt

rows = [{"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(4)]
kpt.examples.tiny_preset("preset", rows, num_layers=1, hidden_dim=32)
task = kpt.SFTTask.from_preset("preset", lora=kpt.LoRA(rank=2))
task.compile("adamw")
saved = kpt.callbacks.Checkpoint(tempfile.mkdtemp())
task.fit(rows, batch_size=2, verbose=0, callbacks=[saved])
task.generate("1 + 1 =", max_tokens=2)
assert "tensorflow" not in sys.modules
asked, found = "compile_requests_use_cache", "cache_hits"
print(*(events["/jax/compilation_cache/" + name] for name in (asked, found)))
"""


def test_a_second_start_compiles_nothing(tmp_path, monkeypatch):
    """Programs that compile in no time are stored too. Nor does it import
    TensorFlow."""
    monkeypatch.chdir(tmp_path)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    asked, found = map(int, output(TRAINS, **cache))
    assert asked > found
    asked, found = map(int, output(TRAINS, **cache))
    assert asked == found > 0


def test_a_threshold_that_is_set_is_kept(cache_setting):
    """Of the time a program's compilation takes, to be stored."""
    name = _compilation_cache.THRESHOLD
    jax.config.update(name, 2.0)
    cache_setting(**{name.upper(): "2"})
    assert getattr(jax.config, name) == 2.0


UNUSED = """
import sys
import keras_posttrain as kpt
import keras_hub
assert not [n for n in sys.modules if n.partition(".")[0] == "tensorflow"]
assert not [n for n in sys.modules if n.startswith("tensorflow_text")]
assert not {"rouge_score", "nltk"} & set(sys.modules)
"""
USED = """
from keras_hub.src.utils import tensor_utils
assert tensor_utils.tf is not None
tokenizer = keras_hub.tokenizers.BytePairTokenizer(
    vocabulary={"a": 0, "b": 1, "ab": 2}, merges=["a b"]
)
import tensorflow as tf
data = tf.data.Dataset.from_tensors(["ab", "a"]).map(tokenizer)
assert [x.to_list() for x in data] == [[[2], [0]]]
assert tensor_utils.tf.Tensor is tf.Tensor
assert tensor_utils.tf.executing_eagerly()
rouge = keras_hub.metrics.RougeL()(["a b"], ["a c"])
assert float(rouge["f1_score"]) == 0.5
words = tf.data.Dataset.from_tensors(["a b"])
make = keras_hub.tokenizers.compute_word_piece_vocabulary
assert "a" in make(words, 5, reserved_tokens=["[UNK]"])
"""
BEFORE = """
import tensorflow as tf, keras_posttrain
from keras_hub.src.utils import tensor_utils
assert tensor_utils.tf is tf
"""


def test_tensorflow_is_there_for_those_who_use_it():
    """Imported by them, before or after, and by KerasHub as it uses it."""
    pytest.importorskip("tensorflow")
    pytest.importorskip("tensorflow_text")
    output(UNUSED + USED)
    output(BEFORE, KERAS_BACKEND="jax")


EVERY_NAME = """
import types

def every_name(module):
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from every_name(value)
        else:
            yield f"{module.__name__}.{name}"
"""


def test_all_of_it_adds_little_to_kerashubs_import():
    """Modules that take seconds to import are imported where used."""
    code = (
        "import keras_hub, sys;"
        "names = lambda: {name.split('.')[0] for name in sys.modules};"
        "before = names(); import keras_posttrain;"
        "assert len(list(every_name(keras_posttrain))) > 200;"
        "print(*names() - before)"
    )
    found = set(output(EVERY_NAME + code, KERAS_BACKEND="jax"))
    small = {"jinja2", "keras_posttrain", "markupsafe", "optax", "safetensors"}
    assert found <= small, found - small


NAMES = """
import keras, pydoc, sys

def added(before):
    new = set(sys.modules) - before
    known = sys.stdlib_module_names
    return {name for name in new if name.partition(".")[0] not in known}

before = set(sys.modules)
import keras_posttrain as kpt
print(*added(before))
assert {"SFTTask", "losses", "__version__"} <= set(dir(kpt))
for name in ("SFTTaks", "_no_module", "__wrapped__"):
    try:
        getattr(kpt, name)
    except AttributeError as error:
        message = f"module 'keras_posttrain' has no attribute {name!r}"
        assert str(error) == message and error.obj is kpt
    else:
        raise AssertionError(name)

# A name brings what it needs, and no more.
from keras_posttrain import losses
assert losses is kpt.losses and losses.dpo_loss and losses.pairs
assert "keras_posttrain.losses.distillation" not in sys.modules
# The file that a server on another machine is started with.
assert kpt.rollout.vllm.worker.__file__.endswith("worker.py")
assert "keras_hub" not in sys.modules

from keras_posttrain import *
assert set(kpt.__all__) <= set(vars())
assert SFTTask is kpt.SFTTask
text = pydoc.render_doc(kpt, renderer=pydoc.plaintext)
assert "class GRPOTask" in text
"""


def test_it_adds_five_small_modules_to_kerass_import():
    """So it takes milliseconds: what a name needs is imported with it."""
    own = "_cache _compilation_cache _deferred_imports _lazy_imports".split()
    expected = {"keras_posttrain", *(f"keras_posttrain.{x}" for x in own)}
    assert set(output(NAMES, KERAS_BACKEND="jax")) == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_those_that_type_checkers_see(package):
    """And no module has the name of a function or a class: its import would
    put the module in the name's place."""
    module = importlib.import_module(package)
    path = pathlib.Path(module.__file__)
    seen = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for line in node.body:
                seen |= {alias.name: line.module for alias in line.names}
    assert sorted(seen) == sorted(module.__all__)
    sources = _lazy_imports.sources(package)
    assert {name: sources[name] for name in seen} == seen
    modules = {file.stem for file in path.parent.glob("*.py")}
    modules |= {file.parent.name for file in path.parent.glob("*/*.py")}
    values = {name for name, source in seen.items() if source != package}
    assert not values & modules


THREADS = """
import importlib, sys, threading
# While Grain is imported, etils replaces `builtins.__import__` of all threads
# for an instant. What another one then imports may fail.
import grain
sys.setswitchinterval(1e-6)
import keras_posttrain as kpt

def use(first):
    for name in (*kpt.__all__[first:], *kpt.__all__[:first]):
        value = getattr(kpt, name)
        found.setdefault(name, set()).add(id(value))
        for inner in getattr(value, "__all__", ()):
            values = found.setdefault((name, inner), set())
            values.add(id(getattr(value, inner)))

def load(module):
    importlib.import_module(f"keras_posttrain.losses.{module}")

def run(function, argument):
    started.wait()
    try:
        function(argument)
    except BaseException as error:
        errors.append(f"{argument}: {error!r}")

calls = [(use, place) for place in range(0, len(kpt.__all__), 4)]
modules = "advantages preference reductions unpaired value".split()
calls += [(load, module) for module in modules]
found, errors, started = {}, [], threading.Barrier(len(calls))
threads = [threading.Thread(target=run, args=call) for call in calls]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
assert len(found) > 200
assert {len(values) for values in found.values()} == {1}
"""


def test_threads_may_use_names_for_the_first_time():
    """Each begins with other names, and some import modules, as unpickling
    does: in Python 3.11 a package that imports its modules when it is
    imported, and a thread that imports one of them, wait for each other."""
    output(THREADS)


STORED = """
import keras_posttrain, keras, pickle, sys
assert "keras_hub" not in sys.modules
model = keras.models.load_model("model.keras")
print(type(model.layers[0]).__module__.partition(".")[0])
with open("loss.pickle", "rb") as file:
    print(repr(pickle.load(file)))
"""


def test_stored_objects_need_no_other_import(tmp_path, monkeypatch):
    """KerasHub's layers are found by their registered names, and classes of
    this package by those of their modules."""
    monkeypatch.chdir(tmp_path)
    layer = keras_hub.layers.SinePositionEncoding()
    keras.Sequential([keras.Input((4, 8)), layer]).save("model.keras")
    loss = keras_posttrain.losses.DPOLoss(beta=0.25)
    pathlib.Path("loss.pickle").write_bytes(pickle.dumps(loss))
    found = output(STORED)
    assert found[0] == "keras_hub"
    assert " ".join(found[1:]) == repr(loss)
