"""What other callbacks count between epochs, for a checkpoint."""

import collections
import numbers

import numpy as np

from keras_posttrain.distribution import processes

# By attribute: EarlyStopping's and ReduceLROnPlateau's.
COUNTERS = ("wait", "best", "best_epoch", "stopped_epoch", "cooldown_counter")


def named(callbacks):
    """Yields `(name, callback)`, such as `("EarlyStopping/0", ...)`.

    The number counts callbacks of one class, so that another callback more
    or less, a progress bar among them, renames none.
    """
    seen = collections.Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        yield f"{kind}/{seen[kind]}", callback
        seen[kind] += 1


def counters(callbacks):
    """The counters of callbacks by name: a dict that JSON can hold."""
    found = {}
    for name, callback in named(callbacks):
        values = {
            key: _plain(getattr(callback, key))
            for key in COUNTERS
            if isinstance(getattr(callback, key, None), numbers.Real)
        }
        if values:
            found[name] = values
    return found


def set_counters(callbacks, values):
    """Sets what `counters` found."""
    for name, callback in named(callbacks):
        for key, value in values.get(name, {}).items():
            setattr(callback, key, value)


def best_weights(callbacks, task):
    """The trainable part of the weights that EarlyStopping keeps.

    Returns:
        Dict of dicts of arrays: by callback, then by place among the task's
        trainable variables.
    """
    places = _places(task)
    return {
        name: {str(i): callback.best_weights[at] for i, at in places.items()}
        for name, callback in named(callbacks)
        if getattr(callback, "best_weights", None) is not None
    }


def set_best_weights(callbacks, task, values):
    """Sets what `best_weights` found; frozen weights are the task's own."""
    for name, callback in named(callbacks):
        if name not in values:
            continue
        weights = task.get_weights()
        best = processes.fetch(values[name])
        for i, at in _places(task).items():
            weights[at] = np.array(best[str(i)])
        callback.best_weights = weights


def _places(task):
    """Where each trainable variable is in `task.get_weights()`."""
    at = {id(v): i for i, v in enumerate(task.weights)}
    return {i: at[id(v)] for i, v in enumerate(task.trainable_variables)}


def _plain(number):
    is_whole = isinstance(number, numbers.Integral)
    return int(number) if is_whole else float(number)
