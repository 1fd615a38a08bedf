"""Callbacks that watch a run and never end it."""

import functools
import warnings


class Harmless:
    """A mixin of callbacks whose failure is a warning.

    Methods that `harmless` decorates do nothing after the first failure.
    """

    _is_broken = False

    def _fail(self, error):
        """Warns of an error, once a run."""
        if self._is_broken:
            return
        self._is_broken = True
        warnings.warn(
            f"{type(self).__name__} has failed, and is left out of the rest "
            f"of the run, which continues. ({type(error).__name__}: "
            f"{str(error)[:500]})",
            stacklevel=4,
        )


def harmless(method):
    """Decorates a method of a `Harmless` callback."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if self._is_broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._fail(error)

    return guarded
