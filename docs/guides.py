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
import nbformat

import keras_posttrain as kpt
from docs import run_guide

ROOT = pathlib.Path(__file__).parent.parent
RUNNER = ROOT / "docs" / "run_guide.py"
LIMIT = 3600


def guides():
    """The files of all guides, in the order of their names."""
    return sorted((ROOT / "guides").rglob("*.py"))


def name_of(path):
    """A guide's name, such as `sft` or `recipes/sft`."""
    return path.relative_to(ROOT / "guides").with_suffix("").as_posix()


def header(path):
    """The fields of a guide's header, `{"Title": ...}`."""
    text, _ = run_guide.split(path.read_text(encoding="utf-8"))[0]
    return dict(re.findall(r"^([\w ]+): (.+)$", text, re.MULTILINE))


def python_of(path):
    """The interpreter that a guide needs, or None if it is not installed."""
    if "VLLMRollout(" not in path.read_text(encoding="utf-8"):
        return sys.executable
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
    """Printed text as a terminal shows it, without lines written over."""
    lines = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    return "\n".join(lines)


def heading(path, made):
    """The first cell: title, description, and how the guide was run."""
    fields, name = header(path), name_of(path)
    lines = [f"# {fields['Title']}", fields["Description"]]
    if made is None:
        lines.append(
            ":::{warning}\nThis guide was not run for this site, so it has "
            "no outputs. Those that use vLLM run after `make vllm`.\n:::"
        )
    else:
        seconds = sum(cell.get("seconds", 0) for cell in made["cells"])
        versions = ", ".join(f"{n} {v}" for n, v in made["versions"].items())
        lines.append(
            f"Last modified {fields['Last modified'].replace('/', '-')}. "
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
    """
    cells = [nbformat.v4.new_markdown_cell(heading(path, made))]
    if made is None:
        parts = run_guide.split(path.read_text(encoding="utf-8"))
        parts = [
            {"kind": "text" if code is None else "code", "source": text}
            for text, code in parts
        ]
    else:
        parts = made["cells"]
    # The header became the first cell.
    for cell in parts[1:]:
        if cell["kind"] == "text":
            text = linked(cell["source"], name_of(path), names)
            cells.append(nbformat.v4.new_markdown_cell(text))
            continue
        outputs = []
        if cell.get("text", "").strip():
            outputs.append(
                nbformat.v4.new_output(
                    "stream", name="stdout", text=shown(cell["text"])
                )
            )
        for image in cell.get("figures", ()):
            outputs.append(
                nbformat.v4.new_output(
                    "display_data", data={"image/png": image}
                )
            )
        cells.append(
            nbformat.v4.new_code_cell(cell["source"], outputs=outputs)
        )
    # Equal runs give equal files.
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    made = nbformat.v4.new_notebook(cells=cells)
    made.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return made
