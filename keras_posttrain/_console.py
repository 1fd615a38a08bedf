"""What the package prints while it runs.

All of it goes through `say`, so that a line that is being overwritten, such as
a progress bar, is not torn apart, and so that `verbose=0` prints nothing.
"""

import contextlib
import sys
import threading

# Reentrant: a signal's handler may print while its thread does.
_lock = threading.RLock()
# The bar that is on the screen, and how many runs are silent.
_state = {"live": None, "silent": 0}


def say(text):
    """Prints lines, above a bar that is on the screen."""
    with _lock:
        if _state["silent"]:
            return
        live = _state["live"]
        if live is not None:
            live.clear()
        write(f"{text}\n")
        if live is not None:
            live.draw()


def write(text):
    """Writes to the standard output, in characters that it can encode."""
    out = sys.stdout
    if out is None:
        # As `print` does.
        return
    encoding = getattr(out, "encoding", None) or "utf-8"
    with _lock:
        out.write(text.encode(encoding, "replace").decode(encoding))
        out.flush()


@contextlib.contextmanager
def silenced(silent=True):
    """Opens a scope in which `say` prints nothing, in any thread."""
    with _lock:
        _state["silent"] += bool(silent)
    try:
        yield
    finally:
        with _lock:
            _state["silent"] -= bool(silent)


def show(live):
    """Sets the bar that is on the screen, with the methods `clear` and `draw`.

    `None` for no bar.
    """
    with _lock:
        _state["live"] = live


def hold():
    """Returns the lock under which a bar is drawn."""
    return _lock
