"""Imports point down, without cycles; private modules stay in two files."""

import ast
import graphlib
import pathlib

import pytest

import keras_posttrain
from keras_posttrain.training.keras_words import METHODS

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "keras_posttrain"
LEVELS = {
    "workers": -1,
    "losses": 0,
    "_chips": 0,
    "_compilation_cache": 0,
    "_compiling": -1,
    "_cache": -2,
    "_console": -2,
    "_cores": -2,
    "_hosts": -1,
    "_remote": -1,
    "_spans": -2,
    "_tracing": -2,
    "_deferred_imports": 0,
    "_lazy_imports": -2,
    "_variables": 0,
    "data": 0,
    "metrics": 1,
    "models": 1,
    "distribution": 1,
    "optimizers": 1,
    "adamw_8bit": 1,
    "rewards": 1,
    "rollout": 2,
    "reports": 1,
    "callbacks": 2,
    "episodes": 3,
    "training": 3,
    "rl": 4,
    "planning": 4,
    "distill": 5,
    "tasks": 6,
    "evaluation": 7,
    "sweeps": 7,
    "serve": 7,
    "examples": 7,
    "_command_line": 7,
    "__main__": 8,
}
# Private modules of other libraries, each with the one file that imports it.
PRIVATE = ("keras.src", "keras_hub.src", "jax._src", "jaxlib")
MAY_IMPORT_PRIVATE = {
    "jax._src.distributed.global_state": "_hosts.py",
    "keras_hub.src.vllm.context.get_vllm_context": "models/attention.py",
    "keras_hub.src.vllm.context.vllm_context_scope": "models/attention.py",
    "keras.src.trainers.data_adapters.data_adapter.DataAdapter": (
        "data/batches/pipeline.py"
    ),
}
# Losses are functions of arrays: they see JAX and the standard library.
LOSSES_MAY_IMPORT = {"jax", "numpy", "dataclasses", "functools", "math"}
LOSSES_MAY_IMPORT |= {"collections", "inspect", "typing"}
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
    for path in sorted(package_root.rglob("*.py")):
        file = path.relative_to(package_root).as_posix()
        own = file.split("/")[0].removesuffix(".py")
        names = list(imported(path, package_root))
        for name in names:
            if name.split(".")[0] in FOREIGN and file != IN_VLLM:
                yield f"{file}: imports {name}"
            if name.startswith(PRIVATE):
                if MAY_IMPORT_PRIVATE.get(name) != file:
                    yield f"{file}: imports {name}, which is private"
        yield from lazy_imports(path, file)
        yield from switches(path, file)
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
    yield from cycles(package_root)


def lazy_imports(path, file):
    """Imports inside functions: of other packages, with a comment."""
    if file == IN_VLLM:
        # Its imports exist in vLLM's processes alone, as the file says.
        return
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            module = getattr(node, "module", None) or node.names[0].name
            if module.startswith(PACKAGE):
                yield f"{file}:{node.lineno}: a lazy import of {module}"
            # The comment is in the function, above the import or behind it.
            part = lines[function.lineno - 1 : node.end_lineno]
            if not any("#" in line for line in part):
                yield f"{file}:{node.lineno}: a lazy import without a reason"


def switches(path, file):
    """`isinstance` and comparisons of types on tasks, outside `tasks`."""
    if file.startswith("tasks/"):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        if getattr(node.func, "id", "") not in ("isinstance", "issubclass"):
            continue
        for part in ast.walk(node.args[1]):
            name = getattr(part, "id", getattr(part, "attr", ""))
            if name.endswith("Task"):
                yield f"{file}:{node.lineno}: asks whether it is a {name}"


def cycles(package_root):
    """Files that import each other, directly or through others."""
    root = package_root.parent
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in package_root.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {}
    for module, path in modules.items():
        names = list(imported(path, package_root))
        names += [name.rpartition(".")[0] for name in names]
        graph[module] = {n for n in names if n in modules and n != module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"a cycle: {' <- '.join(error.args[1])}"


def test_the_package_keeps_its_layers():
    files = list((ROOT / PACKAGE).rglob("*.py"))
    assert len(files) > 3, "the package was not found"
    assert list(violations(ROOT / PACKAGE)) == []


@pytest.mark.parametrize(
    "file, line, found",
    [
        ("data/chat.py", "from ..models import policy", "not below it"),
        ("rl/a.py", "from keras_posttrain.planning import b", "not below it"),
        ("training/a.py", "from keras_posttrain.rl import b", "not below"),
        ("tasks/a.py", "from jax._src import core", "which is private"),
        ("models/attention.py", "from keras_hub.src import x", "private"),
        ("tasks/a.py", "def f():\n    import vllm", "without a reason"),
        (
            "tasks/a.py",
            "def f():\n    # Why.\n    from keras_posttrain.rl import b",
            "a lazy import of keras_posttrain.rl",
        ),
        (
            "planning/a.py",
            "isinstance(task, (int, tasks.SFTTask))",
            "asks whether it is a SFTTask",
        ),
        ("data/chat.py", "from keras_posttrain.losses import x", "not below"),
        ("models/head.py", "import keras_posttrain.tasks.task", "not below"),
        ("models/a.py", "def f():\n    from ..rollout import b", "not below"),
        ("tasks/a.py", "from keras_posttrain import SFTTask", "no level"),
        ("losses/dpo.py", "import keras", "a loss imports keras"),
        ("losses/dpo.py", "from torch import nn", "imports torch.nn"),
        ("tasks/a.py", "import tensorflow as tf", "imports tensorflow"),
        ("models/lora.py", "from keras_hub.src.a import b", "keras_hub.src"),
        ("tasks/a.py", "from keras.src import tree", "keras.src.tree"),
        ("data/batches/pipeline.py", "from keras.src import a", "private"),
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
        (
            "models/attention.py",
            "from keras_hub.src.vllm.context import vllm_context_scope",
        ),
        (
            "data/batches/pipeline.py",
            "from keras.src.trainers.data_adapters.data_adapter import "
            "DataAdapter",
        ),
        ("tasks/a.py", "def f():\n    # Optional.\n    import vllm"),
        ("tasks/a.py", "isinstance(task, SFTTask)"),
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


def test_a_cycle_inside_a_folder_is_found(tmp_path):
    folder = tmp_path / PACKAGE / "tasks"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from keras_posttrain.tasks import b\n")
    (folder / "b.py").write_text("from .c import thing\n")
    (folder / "c.py").write_text("x = 1\n")
    assert list(violations(tmp_path / PACKAGE)) == []
    (folder / "c.py").write_text(
        "def f():\n    # Why.\n    from .a import thing\n"
    )
    found = [x for x in violations(tmp_path / PACKAGE) if "cycle" in x]
    assert len(found) == 1 and "tasks.a" in found[0]


def task_classes():
    """The public tasks, with their classes of the package."""
    for name in keras_posttrain.__all__:
        value = getattr(keras_posttrain, name)
        is_task = isinstance(value, type) and name.endswith("Task")
        if is_task:
            own = [
                c for c in value.__mro__ if c.__module__.startswith(PACKAGE)
            ]
            yield name, own


@pytest.mark.parametrize("name, own", list(task_classes()))
def test_a_task_can_be_seen_at_once(name, own):
    """At most four classes deep, and 64 names over all of them."""
    assert len(own) <= 4, own
    names = {n for c in own for n in vars(c) if not n.startswith("__")}
    # Methods of Keras that only say what to use instead.
    names -= set(METHODS)
    assert len(names) <= 64, sorted(names)
