"""Makes an executed notebook of each guide.

Each guide runs in its own process and folder. A run is kept until the guide
or a version changes; `fresh=True` runs all of them again.
"""

import hashlib
import json
import os
import pathlib
import posixpath
import re
import subprocess
import sys
import tempfile
import time

import jax
import keras

import keras_posttrain as kpt
from docs import run_guide

ROOT = pathlib.Path(__file__).parent.parent
RUNNER = ROOT / "docs" / "run_guide.py"
LIMIT = 3600
LOGGED = re.compile(
    r"[IWEF]0000 |WARNING: All log messages before absl::"
    r"|To enable the following instructions: "
)


def guides():
    """The files of all guides, in the order of their names."""
    return sorted((ROOT / "guides").rglob("*.py"))


def name_of(path):
    """A guide's name, such as `sft` or `recipes/sft`."""
    return path.relative_to(ROOT / "guides").with_suffix("").as_posix()


def header(path):
    """The fields of a guide's header, `{"Title": ...}`.

    A recipe has a docstring in its place: `Title: description.` and text.
    """
    text, _ = run_guide.split(path.read_text(encoding="utf-8"))[0]
    fields = dict(re.findall(r"^([\w ]+): (.+)$", text, re.MULTILINE))
    if "Title" in fields:
        return fields
    first, _, rest = text.partition("\n")
    title, _, about = first.rstrip(".").partition(": ")
    return {"Title": title, "Description": about, "Text": rest.strip("\n")}


def python_of(path):
    """The interpreter that a guide needs, or None if it is not installed."""
    if "VLLMRollout(" not in path.read_text(encoding="utf-8"):
        return sys.executable
    return vllm_python()


def vllm_python():
    """The interpreter that has vLLM, or None if it is not installed."""
    found = ROOT / os.environ.get("VLLM_ENV", ".venv-vllm") / "bin" / "python"
    return str(found) if found.exists() else None


def key(path):
    """Changes with the guide, its runner and the versions of what runs it."""
    versions = kpt.__version__, keras.__version__, jax.__version__
    parts = [path.read_bytes(), RUNNER.read_bytes(), repr(versions).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def record(path, kept, fresh=False, may_run=True):
    """The record of a guide's run; the run takes place if none is kept.

    Returns:
        A dict, see `run_guide.py`, or `None` if the guide has not run.
    """
    target = kept / f"{name_of(path).replace('/', '.')}-{key(path)}.json"
    if target.exists() and not fresh:
        return json.loads(target.read_text(encoding="utf-8"))
    python = python_of(path)
    if python is None or not may_run:
        return None
    kept.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    print(f"Runs guides/{name_of(path)}.py ...", end=" ", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [python, RUNNER, path, "out", target.absolute()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            timeout=LIMIT,
            check=True,
        )
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
    return json.loads(target.read_text(encoding="utf-8"))


def shown(text):
    """Printed text as a terminal shows it, without lines written over.

    What TensorFlow logs about the machine, through KerasHub, is left out.
    """
    lines = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    return "\n".join(line for line in lines if not LOGGED.match(line))


def heading(path, made):
    """The first cell: title, description, and how the guide was run."""
    fields, name = header(path), name_of(path)
    lines = [f"# {fields['Title']}", fields["Description"]]
    lines += [fields["Text"]] if "Text" in fields else []
    if made is None:
        lines.append(
            ":::{warning}\nThis guide was not run for this site, so it has "
            "no outputs. Those that use vLLM run after `make vllm`.\n:::"
        )
    else:
        seconds = sum(cell.get("seconds", 0) for cell in made["cells"])
        versions = ", ".join(f"{n} {v}" for n, v in made["versions"].items())
        lines.append(
            f"Outputs: {made['date']}, {seconds:.0f} s on a CPU, {versions}."
        )
    up = "../" * (name.count("/") + 1)
    source = f"{up}files/guides/{name}.py"
    last = name.rpartition("/")[2]
    lines.append(
        f"{{download}}`Script <{source}>` · "
        f"{{download}}`Notebook <{last}.ipynb>`"
    )
    return "\n\n".join(lines)


def linked(text, name, names):
    """A text in which names of guides, such as `sft.py`, are links."""

    def replace(match):
        if match[1] not in names or match[1] == name:
            return match[0]
        here = posixpath.dirname(name)
        target = posixpath.relpath(f"{match[1]}.ipynb", here or ".")
        return f"[{match[0]}]({target})"

    text = re.sub(r"\]\(([\w/.]+)\.py\)", r"](\1.ipynb)", text)
    return re.sub(r"`(?:guides/)?([\w/]+)\.py`", replace, text)


def notebook(path, made, names=()):
    """The notebook of a guide, with the outputs of its run.

    Args:
        path: path of the guide.
        made: dict, its `record`, or `None`.
        names: set of strings, the guides that a text may link to.

    Returns:
        A dict in version 4.5 of Jupyter's format.
    """
    parts = made["cells"] if made else _cells_without_outputs(path)
    cells = [_cell("markdown", heading(path, made))]
    # The header became the first cell.
    for part in parts[1:]:
        if part["kind"] == "text":
            text = linked(part["source"], name_of(path), names)
            cells.append(_cell("markdown", text))
        else:
            more = {"execution_count": None, "outputs": _outputs(part)}
            cells.append(_cell("code", part["source"]) | more)
    # Equal runs give equal files.
    cells = [c | {"id": f"cell-{i}"} for i, c in enumerate(cells)]
    kernel = {"name": "python3", "display_name": "Python 3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel | {"language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cells_without_outputs(path):
    return [
        {"kind": "text" if code is None else "code", "source": text}
        for text, code in run_guide.split(path.read_text(encoding="utf-8"))
    ]


def _cell(kind, source):
    return {"cell_type": kind, "metadata": {}, "source": source}


def _outputs(part):
    """What a cell printed and drew, in Jupyter's format."""
    found, text = [], shown(part.get("text", ""))
    if text.strip():
        stream = {"output_type": "stream", "name": "stdout"}
        found.append(stream | {"text": text})
    for image in part.get("figures", ()):
        picture = {"output_type": "display_data", "metadata": {}}
        found.append(picture | {"data": {"image/png": image}})
    return found
