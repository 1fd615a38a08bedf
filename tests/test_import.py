"""Effects of `import keras_posttrain` on a process."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(code, **environment):
    """Runs code in a process without this one's settings."""
    dropped = (
        "KERAS_BACKEND",
        "KERAS_POSTTRAIN_CACHE",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    )
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
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


CACHE = "print(jax.config.jax_compilation_cache_dir)"


def test_it_sets_the_backend_and_a_cache_of_the_users(tmp_path):
    """Also where the environment names another backend: nothing of Keras's
    has been imported that could disagree."""
    backend, cache = output(
        "import keras_posttrain, keras, jax;"
        f"print(keras.config.backend()); {CACHE}",
        KERAS_BACKEND="torch",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert backend == "jax"
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


def cache_setting(before="", **environment):
    """The cache that the package's own set-up leaves, without Keras."""
    path = ROOT / "keras_posttrain" / "_compilation_cache.py"
    return output(
        "import jax; from importlib import util;"
        f"spec = util.spec_from_file_location('cache', {str(path)!r});"
        "module = util.module_from_spec(spec);"
        f"spec.loader.exec_module(module); {before} module.enable(); {CACHE}",
        **environment,
    )[0]


@pytest.mark.parametrize(
    "value",
    [
        "0",
        pytest.param("off", marks=pytest.mark.full),
        pytest.param("False", marks=pytest.mark.full),
        "no",
    ],
)
def test_the_cache_can_be_turned_off(value):
    assert cache_setting(KERAS_POSTTRAIN_CACHE=value) == "None"


def test_the_cache_can_be_elsewhere(tmp_path):
    found = cache_setting(KERAS_POSTTRAIN_CACHE=str(tmp_path / "mine"))
    assert found == str(tmp_path / "mine")
    found = cache_setting(KERAS_POSTTRAIN_CACHE="~/mine", HOME=str(tmp_path))
    assert found == str(tmp_path / "mine")


def test_the_caches_default_is_the_users_and_the_machines(tmp_path):
    first = cache_setting(XDG_CACHE_HOME="", HOME=str(tmp_path))
    root = tmp_path / ".cache" / "keras_posttrain"
    assert pathlib.Path(first).parent == root
    assert cache_setting(XDG_CACHE_HOME="", HOME=str(tmp_path)) == first


def test_a_cache_of_jaxs_own_is_left_alone(tmp_path):
    mine = str(tmp_path / "mine")
    assert cache_setting(JAX_COMPILATION_CACHE_DIR=mine) == mine
    before = f"jax.config.update('jax_compilation_cache_dir', {mine!r});"
    assert cache_setting(before) == mine


TRAINS = """
import collections
import jax

events = collections.Counter()
jax.monitoring.register_event_listener(lambda e, **_: events.update([e]))

import keras_posttrain as kpt

rows = [{"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(4)]
kpt.examples.tiny_preset("preset", rows, num_layers=1, hidden_dim=32)
task = kpt.SFTTask.from_preset("preset", lora=kpt.LoRA(rank=2))
task.compile("adamw")
task.fit(rows, batch_size=2, verbose=0)
task.generate("1 + 1 =", max_tokens=2)
asked, found = "compile_requests_use_cache", "cache_hits"
print(*(events["/jax/compilation_cache/" + name] for name in (asked, found)))
"""


def test_a_second_start_compiles_nothing(tmp_path, monkeypatch):
    """Programs that compile in no time are stored too."""
    monkeypatch.chdir(tmp_path)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    asked, found = map(int, output(TRAINS, **cache))
    assert asked > found
    asked, found = map(int, output(TRAINS, **cache))
    assert asked == found > 0


def test_a_threshold_that_is_set_is_kept():
    """Of the time a program's compilation takes, to be stored."""
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    code = f"import keras_posttrain, jax; print(jax.config.{name.lower()})"
    assert output(code) == ["0.0"]
    assert output(code, **{name: "2"}) == ["2.0"]


def test_it_prints_nothing_and_leaves_tensorflow_alone():
    done = run("import keras_posttrain")
    assert done.returncode == 0
    assert done.stdout == done.stderr == ""


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


def test_training_needs_no_tensorflow(tmp_path):
    output(
        UNUSED + f"saved = kpt.callbacks.Checkpoint({str(tmp_path)!r})\n"
        f"path = {str(ROOT / 'tests/reference/models/qwen3')!r}\n"
        "task = kpt.SFTTask.from_preset(path, sequence_length=16)\n"
        "task.compile(optimizer='adam')\n"
        "row = {'prompt': 'a', 'completion': 'b'}\n"
        "task.fit([row] * 4, batch_size=2, verbose=0, callbacks=[saved])\n"
        "assert 'tensorflow' not in sys.modules"
    )


def test_it_adds_little_to_kerashubs_import():
    """Modules that take seconds to import are imported where used."""
    code = (
        "import keras_hub, sys;"
        "names = lambda: {name.split('.')[0] for name in sys.modules};"
        "before = names(); import keras_posttrain; print(*names() - before)"
    )
    found = set(output(code, KERAS_BACKEND="jax"))
    small = {"jinja2", "keras_posttrain", "markupsafe", "optax", "safetensors"}
    assert found <= small, found - small
