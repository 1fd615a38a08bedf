"""The lock of threads that trace programs of a model."""

import threading

# Held while a program of a model is traced: scopes such as
# `adapter.disabled()` belong to the model, and several threads may trace.
TRACING = threading.RLock()


def is_held():
    """Returns whether this thread holds `TRACING`: no other can trace."""
    try:
        # It raises where the lock is not this thread's.
        threading.Condition(TRACING).notify()
    except RuntimeError:
        return False
    return True
