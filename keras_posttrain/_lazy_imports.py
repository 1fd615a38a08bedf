"""Imports the public names of a package at their first use (PEP 562)."""

import dis
import functools
import importlib
import sys


def attach(package):
    """Returns `__getattr__` and `__dir__` for a package's `__init__` file.

    The names are those that the file imports under `if TYPE_CHECKING:`, where
    type checkers and editors find them too. Running the file imports none of
    the package's modules, so threads that use several names for the first
    time do not wait for each other in a circle.

    Args:
        package: string, the `__name__` of the package. A module of it may
            not have a public name's name: its import would replace the name.

    Returns:
        The functions `__getattr__` and `__dir__`.
    """
    module = sys.modules[package]

    def __getattr__(name):
        if name.startswith("__"):
            raise _missing(module, name)
        source = sources(package).get(name, package)
        if source == package:
            value = _submodule(module, name)
        else:
            value = getattr(importlib.import_module(source), name)
        setattr(module, name, value)
        return value

    def __dir__():
        return sorted({*vars(module), *module.__all__})

    return __getattr__, __dir__


@functools.cache
def sources(package):
    """Returns `{name: module}` of what a package's `__init__` file imports.

    They are read from its compiled code, as `ast.parse` fails in Python 3.11
    where two threads call it.
    """
    code = sys.modules[package].__spec__.loader.get_code(package)
    found, module = {}, None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            found[instruction.argval] = module
    return found


def _submodule(package, name):
    """Returns a module of the package, public or not."""
    full = f"{package.__name__}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        raise _missing(package, name) from None


def _missing(module, name):
    return AttributeError(
        f"module {module.__name__!r} has no attribute {name!r}",
        name=name,
        obj=module,
    )
