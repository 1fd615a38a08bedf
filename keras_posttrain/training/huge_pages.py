"""Huge pages of memory for the large arrays of a step, on Linux.

On a CPU, XLA takes the memory of a step from the system and returns it at its
end. The system clears it page by page, and with pages of 4 KiB this is a part
of a step's time that `benchmarks/huge_pages.py` measures. glibc asks for pages
of 2 MiB if a process starts with a variable, which has no effect later.
"""

import os
import pathlib
import platform

from keras_posttrain.models import sharding

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb"
MODE = "/sys/kernel/mm/transparent_hugepage/enabled"
# The first glibc that knows the setting.
GLIBC = (2, 35)
# Steps of models with fewer weights use little memory.
LEAST = 10_000_000

_said = []


def is_missing():
    """Whether large arrays could have huge pages, and do not."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return False
    if tuple(int(x) for x in version.split(".")[:2]) < GLIBC:
        return False
    try:
        mode = pathlib.Path(MODE).read_text(encoding="ascii")
    except OSError:
        return False
    # In the mode `always` no program has to ask, in `never` none may.
    return "[madvise]" in mode and SETTING not in os.environ.get(VARIABLE, "")


def setting():
    """Returns the variable's value, with what the user set already."""
    before = os.environ.get(VARIABLE)
    return f"{before}:{SETTING}=1" if before else f"{SETTING}=1"


def advise(model, settings):
    """Says once how the steps of a model become faster, if they can.

    Not on accelerators, which have memory of their own.

    Args:
        model: `keras.Model`.
        settings: `RunSettings`.
    """
    if _said or not settings.verbose or sharding.platform() != "cpu":
        return
    if model.count_params() < LEAST or not is_missing():
        return
    _said.append(True)
    settings.show(
        "Steps on this CPU are faster with huge pages of memory. Start the "
        f"script with {VARIABLE}={setting()} in its environment."
    )
