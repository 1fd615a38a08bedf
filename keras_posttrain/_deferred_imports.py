"""Defers what KerasHub imports for preprocessing until KerasHub uses it."""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types

# TensorFlow takes seconds, 0.6 GB and prints warnings; `rouge_score` imports
# NLTK, a seventh of the time that this package takes.
NAMES = ("tensorflow", "tensorflow_text", "rouge_score")


class _Deferred(types.ModuleType):
    """A module that is imported when a name in it is used."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__") or _is_deferring():
            # KerasHub defines a class on `tf.Module`, or without it on
            # `object`, which differs only in what a SavedModel keeps.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)

    def executing_eagerly(self):
        """KerasHub looks this up in TensorFlow when it is imported."""
        return self.__getattr__("executing_eagerly")()


class _Finder:
    """Finds deferred modules in place of those with the given names."""

    def __init__(self, names):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Deferred(spec.name)

    def exec_module(self, module):
        pass


class _PackageFinder:
    """Finds one package as other finders do, with a `_Loader`."""

    def __init__(self, package):
        self._package = package

    def find_spec(self, name, path=None, target=None):
        if name != self._package:
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                # A folder without files has no loader.
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Runs a package in the scope of `deferred`."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        with deferred():
            self._loader.exec_module(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


def defer_in(package):
    """Defers `NAMES` where a package imports them, whoever imports it.

    Args:
        package: string, its name. One that is imported already stays as it
            is.
    """
    if package not in sys.modules:
        sys.meta_path.insert(0, _PackageFinder(package))


@contextlib.contextmanager
def deferred():
    """Makes imports of `NAMES` in the scope cost nothing.

    KerasHub imports them for preprocessing and metrics that this package does
    not use. In the scope it gets modules that import the real ones at the
    first use of a name. No other module sees them: `import tensorflow`
    anywhere else imports TensorFlow. What is imported already, or not
    installed, stays so.
    """
    finder = _Finder(_deferrable())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Deferred):
                del sys.modules[name]


def _deferrable():
    names = {n for n in NAMES if n not in sys.modules and _is_installed(n)}
    # KerasHub uses the two together.
    both = {"tensorflow", "tensorflow_text"}
    return names if both <= names else names - both


def _is_deferring():
    return _Finder in map(type, sys.meta_path)


def _is_installed(name):
    spec = importlib.util.find_spec(name)
    # A folder without files is what an uninstallation may leave.
    return spec is not None and spec.origin is not None
