"""Runs a guide cell by cell, and writes down what each cell gave.

`python run_guide.py guides/sft.py folder cells.json` runs the guide as
`python guides/sft.py folder` would. `cells.json` then has the guide's cells
with the text that each printed and the figures that it drew. This file needs
only the standard library, so that each guide can run in its own environment.
"""

import ast
import base64
import io
import json
import linecache
import os
import pathlib
import sys
import tempfile
import time
import traceback
import types


def is_text(node):
    """Whether a statement is a string by itself: a cell of Markdown."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def split(source):
    """Returns a guide's cells: `(text, None)` or `(source, statements)`."""
    lines, cells, code, line = source.splitlines(), [], [], 0

    def end_code(until):
        text = "\n".join(lines[line:until]).strip("\n")
        if code:
            cells.append((text, list(code)))
        code.clear()

    for node in ast.parse(source).body:
        if not is_text(node):
            code.append(node)
            continue
        end_code(node.lineno - 1)
        cells.append((node.value.value.strip(), None))
        line = node.end_lineno
    end_code(len(lines))
    return cells


class Recorder:
    """Collects what is printed, by child processes too, and what is drawn."""

    def __init__(self):
        self._file = tempfile.TemporaryFile()
        self._figures = set()
        self.errors = os.dup(2)
        for stream in (1, 2):
            os.dup2(self._file.fileno(), stream)
        self._start = 0

    def text(self):
        """What was printed since the last call."""
        sys.stdout.flush()
        sys.stderr.flush()
        end = os.fstat(self._file.fileno()).st_size
        data = os.pread(self._file.fileno(), end - self._start, self._start)
        self._start = end
        return data.decode("utf-8", "replace")

    def figures(self):
        """The new figures, as PNGs in base64."""
        if "matplotlib.pyplot" not in sys.modules:
            return []
        from matplotlib import pyplot  # Not every guide has it.

        new = [n for n in pyplot.get_fignums() if n not in self._figures]
        self._figures.update(new)
        found = []
        for number in new:
            data = io.BytesIO()
            pyplot.figure(number).savefig(data, dpi=120)
            found.append(base64.b64encode(data.getvalue()).decode())
        return found


def run(path, folder):
    """Runs all cells; returns them as dicts, the failed one last."""
    source = path.read_text(encoding="utf-8")
    # As in a script: functions can be pickled and have a source.
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    sys.argv = [str(path), str(folder)]
    sys.path[0] = str(path.parent)
    linecache.getlines(str(path))
    recorder, cells = Recorder(), []
    for text, statements in split(source):
        cell = {"kind": "text" if statements is None else "code"}
        cells.append(cell | {"source": text})
        if statements is None:
            continue
        started = time.perf_counter()
        try:
            body = ast.Module(statements, [])
            exec(compile(body, str(path), "exec"), vars(main))
        except BaseException:
            traceback.print_exc()
            os.write(recorder.errors, recorder.text().encode())
            raise SystemExit(1) from None
        cells[-1] |= {
            "text": recorder.text(),
            "figures": recorder.figures(),
            "seconds": time.perf_counter() - started,
        }
    return cells


def versions():
    """The versions of the libraries that ran."""
    names = ("keras_posttrain", "keras", "jax", "vllm")
    found = {name: sys.modules.get(name) for name in names}
    return {n: m.__version__ for n, m in found.items() if m is not None}


def main():
    path, folder, target = map(pathlib.Path, sys.argv[1:])
    cells = run(path.absolute(), folder)
    record = {
        "cells": cells,
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    target.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
