"""Each promise of `tests/README.md` names tests that CI runs."""

import ast
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
# Its tests need an environment with vLLM, in which they are collected.
IN_OTHER_ENVIRONMENT = "vllm/"


def promises(text):
    """The table's rows: `{promise: [names of tests]}`."""
    found = {}
    for line in text.partition("## What is promised")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "promise":
            found[cells[0]] = re.findall(r"`([\w/]+\.py::\w+)`", cells[-1])
    return found


def of_ci(makefile, addopts):
    """The expression of marks by which `make test` selects tests."""
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", makefile, re.M)[1]
    options = shlex.split(addopts) + shlex.split(recipe.replace("\\\n", ""))
    places = [i for i, option in enumerate(options) if option == "-m"]
    # Of several the last one counts.
    return options[places[-1] + 1]


def marks_of_ci():
    """The expression of marks by which CI selects tests."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        options = tomllib.load(file)["tool"]["pytest"]["ini_options"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return of_ci(makefile, options["addopts"])


def names(lines):
    """Names of tests in lines that begin with them, without cases."""
    found = (re.match(r"tests/([\w/]+\.py::\w+)", line) for line in lines)
    return {match[1] for match in found if match}


def collected(files):
    """Names of the tests in these files that CI runs."""
    command = ["-m", "pytest", "--collect-only", "-q", "-m", marks_of_ci()]
    done = subprocess.run(
        [sys.executable, *command, *(f"tests/{file}" for file in files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return names(done.stdout.splitlines())


def unmarked(files):
    """Names of the tests in these files that have no mark `full`."""
    found = set()
    for file in files:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                marks = {ast.unparse(d) for d in node.decorator_list}
                if "pytest.mark.full" not in marks:
                    found.add(f"{file}::{node.name}")
    return found


def test_ci_runs_the_tests_of_every_promise(request):
    table = promises((TESTS / "README.md").read_text(encoding="utf-8"))
    assert len(table) > 20
    assert [promise for promise, tests in table.items() if not tests] == []
    wanted = {name for tests in table.values() for name in tests}
    files = {name.partition("::")[0] for name in wanted}
    missing = sorted(file for file in files if not (TESTS / file).exists())
    assert missing == []
    apart = {file for file in files if file.startswith(IN_OTHER_ENVIRONMENT)}
    run = unmarked(apart)
    # What this session runs need not be collected again, which takes long.
    if request.config.option.markexpr == marks_of_ci():
        run |= names(item.nodeid for item in request.session.items)
    if wanted - run:
        run |= collected(sorted(files - apart))
    lacking = {
        promise: [name for name in tests if name not in run]
        for promise, tests in table.items()
    }
    assert {k: v for k, v in lacking.items() if v} == {}


def test_the_table_and_the_selection_are_read():
    text = """
| before | `a/test_b.py::test_no` |
## What is promised
| promise | compared | tests |
|---|---|---|
| One | x | `a/test_b.py::test_c`, `test_d.py::test_e` |
| Two | `losses` | nothing |
"""
    assert promises(text) == {
        "One": ["a/test_b.py::test_c", "test_d.py::test_e"],
        "Two": [],
    }
    recipe = 'test: lint\n\tpytest -n 2 \\\n\t-m "not full"\n\nother:\n\tx\n'
    assert of_ci(recipe, "-m 'not slow' --strict") == "not full"
    assert of_ci("test: lint\n\tpytest\n", "-m 'not full'") == "not full"


def test_a_test_that_ci_leaves_out_is_found(tmp_path, monkeypatch):
    source = "@pytest.mark.full\ndef test_a(): ...\n\n\ndef test_b(): ...\n"
    (tmp_path / "test_x.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "TESTS", tmp_path)
    assert unmarked(["test_x.py"]) == {"test_x.py::test_b"}
