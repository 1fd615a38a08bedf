"""Defers KerasHub's import of TensorFlow until KerasHub uses it."""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types

NAMES = ("tensorflow", "tensorflow_text")


class _Deferred(types.ModuleType):
    """A module of TensorFlow that is imported when a name in it is used."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__") or _Finder in map(type, sys.meta_path):
            # KerasHub defines a class on `tf.Module`, or without it on
            # `object`, which differs only in what a SavedModel keeps.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)

    def executing_eagerly(self):
        """KerasHub looks this up when it is imported."""
        return self.__getattr__("executing_eagerly")()


class _Finder:
    """Finds deferred modules in place of TensorFlow's."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Deferred(spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def deferred():
    """Makes imports of TensorFlow in the scope cost nothing.

    KerasHub imports it for preprocessing that this package does not use: it
    takes seconds, 0.6 GB and prints warnings. In the scope KerasHub gets
    modules that import the real ones at the first use of a name. No other
    module sees them: `import tensorflow` anywhere else imports TensorFlow.
    Where it is imported already, or not installed, nothing changes.
    """
    if any(name in sys.modules for name in NAMES) or not all(
        map(_is_installed, NAMES)
    ):
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Deferred):
                del sys.modules[name]


def _is_installed(name):
    spec = importlib.util.find_spec(name)
    # A folder without files is what an uninstallation may leave.
    return spec is not None and spec.origin is not None
