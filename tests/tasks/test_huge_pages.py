"""Huge pages of memory: what the variable does, and when `fit` names it."""

import os
import subprocess
import sys

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain.training import huge_pages

ROWS = [{"prompt": "1 + 1 =", "completion": "2"}] * 2
FLAGS = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
at = libc.malloc(ctypes.c_size_t(2**26))
found = False
for line in open("/proc/self/smaps"):
    first, *rest = line.split()
    if first == "VmFlags:" and found:
        print(*rest)
        break
    if "-" in first:
        begin, end = (int(x, 16) for x in first.split("-"))
        found = begin <= at < end
"""


def flags(**environment):
    """Returns the kernel's flags of 64 MiB that a new process takes."""
    known = {k: v for k, v in os.environ.items() if k != huge_pages.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", FLAGS],
        env=known | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(
    not huge_pages.is_missing(),
    reason="This system gives huge pages to all, or to none.",
)
def test_the_variable_asks_for_huge_pages_for_large_arrays():
    # `hg` is what `madvise(MADV_HUGEPAGE)` sets.
    assert "hg" not in flags()
    assert "hg" in flags(**{huge_pages.VARIABLE: huge_pages.setting()})


@pytest.fixture
def system(monkeypatch, tmp_path):
    """`system(mode, variable, libc)` sets what the process sees."""
    monkeypatch.setattr(huge_pages, "_said", [])

    def found(mode="always [madvise] never", variable=None,
              libc=("glibc", "2.36")):  # fmt: skip
        file = tmp_path / "enabled"
        if mode is not None:
            file.write_text(f"{mode}\n")
        monkeypatch.setattr(huge_pages, "MODE", str(file))
        monkeypatch.setattr(huge_pages.platform, "libc_ver", lambda: libc)
        monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(huge_pages.VARIABLE, variable)

    return found


@pytest.mark.parametrize(
    "settings, missing",
    [
        ({}, True),
        ({"variable": "glibc.malloc.arena_max=1"}, True),
        ({"variable": "glibc.malloc.hugetlb=1"}, False),
        ({"mode": "[always] madvise never"}, False),
        ({"mode": "always madvise [never]"}, False),
        ({"mode": None}, False),
        ({"libc": ("glibc", "2.34")}, False),
        ({"libc": ("", "")}, False),
    ],
)
def test_they_are_missing_where_a_variable_would_give_them(
    system, settings, missing
):
    system(**settings)
    assert huge_pages.is_missing() == missing


def test_what_the_variable_has_already_is_kept(system):
    system()
    assert huge_pages.setting() == "glibc.malloc.hugetlb=1"
    system(variable="glibc.malloc.arena_max=1")
    assert huge_pages.setting() == (
        "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"
    )


def test_a_fit_says_so_once_where_it_prints_and_the_model_is_not_small(
    system, monkeypatch, capsys, tmp_path
):
    system()
    preset = kpt.examples.tiny_preset(
        tmp_path / "model", ROWS, num_layers=1, hidden_dim=32
    )
    task = kpt.SFTTask.from_preset(preset, sequence_length=32)
    task.compile(keras.optimizers.SGD(0.0))

    def said(verbose):
        task.fit(ROWS, batch_size=2, verbose=verbose)
        return (
            "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in capsys.readouterr().out
        )

    assert not said(1), "the model is small"
    monkeypatch.setattr(huge_pages, "LEAST", task.causal_lm.count_params())
    assert [said(0), said(1), said(1)] == [False, True, False]
