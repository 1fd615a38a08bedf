"""Imports point down only; private Keras modules stay in two files."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "keras_posttrain"
LEVELS = {
    "losses": 0,
    "_compilation_cache": 0,
    "_variables": 0,
    "data": 0,
    "models": 1,
    "distribution": 1,
    "optimizers": 1,
    "rewards": 1,
    "rollout": 2,
    "callbacks": 2,
    "tasks": 3,
    "examples": 6,
}
# Losses are functions of arrays: they see JAX and the standard library.
LOSSES_MAY_IMPORT = {"jax", "numpy", "dataclasses", "functools", "math"}
LOSSES_MAY_IMPORT |= {"collections", "typing"}
FOREIGN = {"torch", "tensorflow", "tensorflow_text"}
# Runs inside vLLM, which is made of torch.
IN_VLLM = "rollout/vllm/worker.py"


def imported(path, package_root):
    """Absolute names a file imports; `a.b.c` for `from a.b import c`."""
    here = path.relative_to(package_root.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the file's own folder, each further one its parent.
            base = here[: -node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from (".".join((*base, a.name)) for a in node.names)


def component(name):
    """`data` for `keras_posttrain.data.chat`; None outside the package."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 else ""


def violations(package_root):
    """Each broken rule as a line `file: reason`."""
    private = []
    for path in sorted(package_root.rglob("*.py")):
        file = path.relative_to(package_root).as_posix()
        own = file.split("/")[0].removesuffix(".py")
        names = list(imported(path, package_root))
        private += [(file, n) for n in names if n.startswith("keras.src")]
        for name in names:
            if name.split(".")[0] in FOREIGN and file != IN_VLLM:
                yield f"{file}: imports {name}"
            if name.startswith("keras_hub.src"):
                if file != "models/attention.py":
                    yield f"{file}: imports {name}"
        if own == "__init__":
            continue
        if own not in LEVELS:
            yield f"{file}: `{own}` has no level in LEVELS"
            continue
        for name in names:
            other = component(name)
            if other is None:
                if own == "losses":
                    if name.split(".")[0] not in LOSSES_MAY_IMPORT:
                        yield f"{file}: a loss imports {name}"
            elif other not in LEVELS:
                yield f"{file}: imports {name}, which has no level"
            elif other != own and LEVELS[other] >= LEVELS[own]:
                yield f"{file}: imports {name}, which is not below it"
    for file, name in private:
        if file != "data/batches/pipeline.py":
            yield f"{file}: imports {name}"
    if len({name for _, name in private}) > 1:
        yield f"more than one name of keras.src: {sorted(set(private))}"


def test_the_package_keeps_its_layers():
    files = list((ROOT / PACKAGE).rglob("*.py"))
    assert len(files) > 3, "the package was not found"
    assert list(violations(ROOT / PACKAGE)) == []


@pytest.mark.parametrize(
    "file, line, found",
    [
        ("data/chat.py", "from ..models import policy", "not below it"),
        ("data/chat.py", "from keras_posttrain.losses import x", "not below"),
        ("models/head.py", "import keras_posttrain.tasks.task", "not below"),
        ("models/a.py", "def f():\n    from ..rollout import b", "not below"),
        ("tasks/a.py", "from keras_posttrain import SFTTask", "no level"),
        ("losses/dpo.py", "import keras", "a loss imports keras"),
        ("losses/dpo.py", "from torch import nn", "imports torch.nn"),
        ("tasks/a.py", "import tensorflow as tf", "imports tensorflow"),
        ("models/lora.py", "from keras_hub.src.a import b", "keras_hub.src"),
        ("tasks/a.py", "from keras.src import tree", "keras.src.tree"),
        (
            "data/batches/pipeline.py",
            "from keras.src import a, b",
            "more than one",
        ),
        ("helpers.py", "import jax", "no level in LEVELS"),
    ],
)
def test_a_broken_layer_is_found(tmp_path, file, line, found):
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    lines = list(violations(tmp_path / PACKAGE))
    assert any(found in text for text in lines), lines


@pytest.mark.parametrize(
    "file, line",
    [
        ("tasks/a.py", "from ..models import policy\nfrom .task import Task"),
        ("models/attention.py", "from keras_hub.src.vllm import context"),
        ("data/batches/pipeline.py", "from keras.src.x.y import DataAdapter"),
        ("losses/dpo.py", "import jax.numpy as jnp\nfrom . import reductions"),
        ("callbacks/a.py", "import keras\nfrom ..models import policy"),
        ("__init__.py", "from .tasks.sft_task import SFTTask"),
    ],
)
def test_a_sound_import_is_not_reported(tmp_path, file, line):
    path = tmp_path / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    assert list(violations(tmp_path / PACKAGE)) == []
