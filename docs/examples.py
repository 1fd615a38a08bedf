"""Runs the examples of the public names' docstrings.

An example is a Python block in a docstring. It may use the names that
`SETUP` defines, and each runs in an empty folder of its own. A value in a
comment (`# 0.3133`, `# value is log(2)`) is compared with the value that the
example has.

`python -m docs.examples losses.DPOLoss` runs those of some names and shows
what they print; with `--json FILE` the outcomes are written, too.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import io
import json
import linecache
import math
import os
import pathlib
import re
import symtable
import sys
import tempfile
import textwrap
import time
import tokenize
import traceback
import types
import warnings

# Examples of layouts use several devices.
if "jax" not in sys.modules:
    os.environ["XLA_FLAGS"] = " ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
        )
    )
# Trackers write to the folder of the example.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MLFLOW_TRACKING_URI", "mlruns")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import keras_posttrain as kpt

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Presets that would be downloaded. Examples run with a tiny model instead.
STAND_INS = re.compile(r"(qwen3|llama3)_[\d.]+b_en")
# Public modules that are imported by themselves, and what they need.
MODULES = {"keras_posttrain.serve": "tinker"}
# Code that defines the names which examples use.
SETUP = {
    "kpt": "import keras_posttrain as kpt",
    "keras": "import keras",
    "keras_hub": "import keras_hub",
    "np": "import numpy as np",
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "optax": "import optax",
    "asyncio": "import asyncio",
    "os": "import os",
    "openai": "import openai",
    "rows": """
        rows = [
            {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
            for a in range(1, 5)
            for b in range(1, 5)
        ]
    """,
    "held_out": """
        held_out = [{"prompt": "5 + 5 =", "completion": " 10"}]
    """,
    "prompts": """
        prompts = [
            {"prompt": f"{a} + {b} =", "answer": str(a + b)}
            for a in range(1, 3)
            for b in range(1, 3)
        ]
    """,
    "correct": """
        def correct(completions, answer, **columns):
            return [float(a in c) for c, a in zip(completions, answer)]
    """,
    # A pair of completions with two tokens each.
    "pair_batch": """
        pair_batch = {
            "segment_ids": np.ones((2, 3), "int32"),
            "sequence_mask": np.ones((2, 1)),
            "completion_mask": np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
            "ref_per_token_logps": np.full((2, 3), -1.0),
            "positions": np.array([[0, 1, 2], [0, 1, 2]]),
        }
    """,
    "pair_outputs": """
        pair_outputs = {
            "per_token_logps": np.array([[0.0, -0.5, -0.5], [0.0, -1.5, -1.5]])
        }
    """,
    # A desirable completion and an undesirable one.
    "label_batch": """
        label_batch = pair_batch | {"labels": np.array([[1], [0]])}
    """,
    # Two completions of a group, the first one better.
    "policy_batch": """
        policy_batch = {
            "segment_ids": np.ones((2, 3), "int32"),
            "sequence_mask": np.ones((2, 1)),
            "completion_mask": np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
            "advantages": np.array([[1.0], [-1.0]]),
            "old_per_token_logps": np.log(np.full((2, 3), 0.5)),
            "rollout_per_token_logps": np.log(np.full((2, 3), 0.4)),
        }
    """,
    "policy_outputs": """
        policy_outputs = {
            "per_token_logps": np.log([[1.0, 0.5, 0.75], [1.0, 0.5, 0.25]]),
            "entropies": np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]]),
        }
    """,
    "mixtral": """
        mixtral = keras_hub.models.MixtralCausalLM(
            keras_hub.models.MixtralBackbone(
                vocabulary_size=512,
                num_layers=1,
                num_query_heads=2,
                num_key_value_heads=1,
                hidden_dim=16,
                intermediate_dim=16,
                num_experts=4,
                top_k=2,
            )
        )
    """,
    "preset": 'preset = "qwen3_0.6b_en"',
    # See `task_setup`.
    "task": "task = None",
    "ids": """
        ids = task.tokenizer.encode("2 + 2 =")
    """,
    "engine": """
        engine = kpt.rollout.NativeRollout()
        engine.set_model(task)
    """,
}
# What `task` is: the arguments of `from_preset` and of `compile`.
TASKS = {
    "SFTTask": ("", ""),
    "DPOTask": ("", ""),
    "RewardTask": ("", ""),
    "DistillTask": (', teacher="qwen3_8b_en"', ""),
    "GRPOTask": (
        "",
        "rewards=[correct], num_generations=4, max_completion_length=8",
    ),
}
SAMPLES = re.compile(
    r"\bprompts\b|rewards=|episode=|rollout=|Loop\(|Reference"
)
# The docstrings of objects whose own one is read by a model.
DOCSTRINGS = {
    "keras_posttrain.episodes.python": """A `kpt.episodes.Python()`, ready.

Example:

```python
kpt.episodes.python("print(6 * 7)")  # "42"
tools = kpt.episodes.Tools([kpt.episodes.python])
```
""",
}
# Names to evaluate the values of comments with.
CONSTANTS = {"log": math.log, "e": math.e, "exp": math.exp, "array": np.array}


@dataclasses.dataclass(frozen=True)
class Example:
    """One block of the docstring of a public name."""

    name: str
    source: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an example printed, and the number of values compared."""

    example: Example
    setup: str
    text: str
    num_compared: int
    skipped: str | None = None


@functools.cache
def public_names():
    """`{full name: object}` of what the package exports."""

    def walk(module, prefix):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                yield from walk(value, f"{prefix}.{name}")
            else:
                yield f"{prefix}.{name}", value

    names = dict(walk(kpt, "keras_posttrain"))
    for name, library in MODULES.items():
        # The environment of vLLM has no other extras.
        if importlib.util.find_spec(library):
            names |= walk(importlib.import_module(name), name)
    return names


def docstring(value, name=None):
    text = DOCSTRINGS.get(name, value.__doc__)
    return inspect.cleandoc(text or "")


def own_members(cls):
    """`{name: value}` of a class's public members that are documented."""
    classes = [v for v in public_names().values() if isinstance(v, type)]
    found = {}
    for name in sorted(dir(cls)):
        owner = next(c for c in cls.__mro__ if name in vars(c))
        value = inspect.getattr_static(cls, name)
        is_ours = owner.__module__.startswith("keras_posttrain")
        is_above = any(
            c is not cls and issubclass(cls, c) and issubclass(c, owner)
            for c in classes
        )
        if not name.startswith("_") and is_ours and not is_above:
            found[name] = value
    return found


def function_of(member):
    """The function of a method, of any kind; other members are None."""
    if isinstance(member, (classmethod, staticmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return member if inspect.isfunction(member) else None


@functools.cache
def examples():
    """All examples, a class's before those of its methods."""
    found = []
    for name, value in public_names().items():
        documented = {name: value}
        if isinstance(value, type):
            documented |= {
                f"{name}.{member}": function_of(found)
                for member, found in own_members(value).items()
            }
        for full, thing in documented.items():
            blocks = BLOCK.findall(docstring(thing, full)) if thing else ()
            found += [Example(full, block.rstrip()) for block in blocks]
    return found


def task_of(example):
    """The class of `task` in an example: the one that takes its loss."""
    losses = kpt.losses
    kinds = (
        ((losses.PairLoss, losses.LabelledLoss), "DPOTask"),
        (losses.BradleyTerryLoss, "RewardTask"),
        (losses.PolicyLoss, "GRPOTask"),
        (losses.DistillationLoss, "DistillTask"),
    )
    value = public_names().get(example.name)
    for bases, kind in kinds:
        if isinstance(value, type) and issubclass(value, bases):
            return kind
    return "GRPOTask" if SAMPLES.search(example.source) else "SFTTask"


def task_setup(example):
    """The code that makes `task`, compiled unless the example does that."""
    kind = task_of(example)
    preset, arguments = TASKS[kind]
    code = f'task = kpt.{kind}.from_preset("qwen3_0.6b_en"{preset})'
    if "task.compile(" in example.source:
        return code
    if arguments:
        return f"{code}\ntask.compile(\n    {arguments}\n)"
    return f"{code}\ntask.compile()"


def free_names(source):
    """The names that a source reads and does not define."""
    top = symtable.symtable(source, "example", "exec")
    defined = {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }

    def read(table):
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from read(child)

    return set(read(top)) - defined


def setup_of(example):
    """The code before an example: `{name: code that defines it}`."""
    found = {}

    def add(source):
        for name in free_names(source):
            if name in SETUP and name not in found:
                code = textwrap.dedent(SETUP[name]).strip()
                found[name] = task_setup(example) if name == "task" else code
                add(found[name])

    add(example.source)
    # In the order of `SETUP`, each after what it reads.
    return {name: found[name] for name in SETUP if name in found}


def value_of(text):
    """The value that a comment states, or None if it states none."""
    text = text.strip().removeprefix("#").strip()
    match = re.match(r"(\w+) is (.+)", text)
    name, text = (match[1], match[2]) if match else (None, text)
    # What follows a colon or a comma may be an explanation.
    for candidate in (text, re.split(r": |, (?=[a-z])", text)[0]):
        try:
            code = compile(candidate, "comment", "eval")
            return name, eval(code, {"__builtins__": {}}, dict(CONSTANTS))
        except Exception:
            continue
    return None


def comments(source):
    """`{last line of a statement: the value in the comment after it}`."""
    found = {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = source.splitlines()
    for token in tokens:
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        stated = value_of(token.string)
        if stated is None:
            continue
        # On a line of its own it is about the statement above.
        if lines[line - 1].lstrip().startswith("#"):
            line -= 1
        found[line] = stated
    return found


def compare(found, stated, where):
    """Raises an error if a value is not the one in the comment."""
    if isinstance(stated, tuple) and not isinstance(found, tuple):
        # The value and how it comes about.
        stated = stated[0]
    if isinstance(stated, (list, tuple, np.ndarray)):
        for first, second in zip(found, stated, strict=True):
            compare(first, second, where)
    elif isinstance(stated, (int, float)):
        if not np.isclose(found, stated, rtol=1e-3, atol=6e-5):
            raise AssertionError(f"{where}: {found!r}, not {stated!r}")
    elif found != stated:
        raise AssertionError(f"{where}: {found!r}, not {stated!r}")


def shown(value):
    """A value as text, or None if it says nothing."""
    if value is None or re.search(r" at 0x[0-9a-f]+>", repr(value)):
        return None
    text = repr(value)
    return text if len(text) < 2000 else text[:2000] + " ..."


class Runner:
    """Runs examples in one process, which share models."""

    def __init__(self, folder, epochs=4, num_layers=2):
        """Keeps models and the examples' folders in `folder`.

        The model has `num_layers` and is trained for `epochs` on sums.
        """
        self.folder, self.epochs = pathlib.Path(folder).absolute(), epochs
        self.num_layers = num_layers
        self._made = {}
        self._count = 0

    @functools.cached_property
    def preset(self):
        """A tiny model that has learned to add, as the examples' preset."""
        rows = [
            {"prompt": f"{a} + {b} =", "completion": f" {a + b}"}
            for a in range(10)
            for b in range(10)
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            return kpt.examples.tiny_preset(
                self.folder / "tiny",
                rows,
                epochs=self.epochs,
                num_layers=self.num_layers,
            )

    def _execute(self, source, scope, name):
        """Runs statements; returns the number of values compared."""
        scope.setdefault("__name__", "__main__")
        tree, stated, count = ast.parse(source), comments(source), 0
        # Functions of an example have a source, as in a file.
        file = f"<{name}>"
        lines = source.splitlines(keepends=True)
        linecache.cache[file] = len(source), None, lines, file
        for node in tree.body:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(
                    part.value, str
                ):
                    if STAND_INS.fullmatch(part.value):
                        part.value = str(self.preset)
            value = self._statement(node, scope, file)
            if node.end_lineno in stated:
                of, wanted = stated[node.end_lineno]
                found = scope[of] if of else value
                compare(found, wanted, f"{name}, line {node.lineno}")
                count += 1
        return count

    @staticmethod
    def _statement(node, scope, file):
        """Runs one statement, and shows the value of an expression."""
        if not isinstance(node, ast.Expr):
            code = compile(ast.Module([node], []), file, "exec")
            exec(code, scope)
            return None
        value = eval(compile(ast.Expression(node.value), file, "eval"), scope)
        text = shown(value)
        if text is not None:
            print(text)
        return value

    def run(self, example):
        """Runs an example; returns its `Outcome`."""
        setup = setup_of(example)
        text = "\n".join(setup.values())
        skipped = missing(example)
        if skipped:
            return Outcome(example, text, "", 0, skipped)
        printed, scope, before = io.StringIO(), {}, os.getcwd()
        self._count += 1
        folder = self.folder / f"example{self._count}"
        folder.mkdir(parents=True)
        os.chdir(folder)
        try:
            for name, code in setup.items():
                # Examples with the same setup share its objects.
                if code not in self._made:
                    with contextlib.redirect_stdout(io.StringIO()):
                        self._execute(code, scope, name)
                    self._made[code] = scope[name]
                scope[name] = self._made[code]
            with (
                contextlib.redirect_stdout(printed),
                warnings.catch_warnings(),
            ):
                # Such as that of a tracker that fails.
                warnings.simplefilter("error", UserWarning)
                count = self._execute(example.source, scope, example.name)
        finally:
            os.chdir(before)
            keras.distribution.set_distribution(None)
        return Outcome(example, text, printed.getvalue().rstrip(), count)


def missing(example):
    """Why an example cannot run: a library that is not installed."""
    libraries = {
        "WandB": "wandb",
        "MLflow": "mlflow",
        "Trackio": "trackio",
        "TensorBoard": "tensorboardX",
        "VLLMRollout": "vllm",
        "reasoning_gym": "reasoning_gym",
    }
    wanted = libraries.get(example.name.rpartition(".")[2])
    wanted = [wanted] if wanted else []
    for node in ast.walk(ast.parse(example.source)):
        if isinstance(node, ast.Import):
            wanted += [alias.name for alias in node.names]
    for name in wanted:
        if not importlib.util.find_spec(name.partition(".")[0]):
            return f"needs {name}, which is not installed"
    return None


def main(arguments):
    """Runs examples, of some names or all; returns 1 if one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    failed, outcomes = [], []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(folder)
        for example in examples():
            if given.names and not any(n in example.name for n in given.names):
                continue
            started = time.process_time()
            try:
                outcomes.append(runner.run(example))
                text = outcomes[-1].skipped or outcomes[-1].text
            except Exception:
                failed.append(example.name)
                text = traceback.format_exc()
            seconds = time.process_time() - started
            print(f"--- {example.name}, {seconds:.1f} s\n{text}", flush=True)
    print(f"{len(failed)} failed: {', '.join(failed)}")
    if given.json:
        write_outcomes(outcomes, given.json)
    return bool(failed)


def write_outcomes(outcomes, path):
    records = [dataclasses.asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps(records), encoding="utf-8")


def read_outcomes(path):
    return [
        Outcome(Example(**record.pop("example")), **record)
        for record in json.loads(path.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
