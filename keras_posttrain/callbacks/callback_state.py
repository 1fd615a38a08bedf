"""State of other callbacks, to be saved in a checkpoint."""

import collections
import numbers

import numpy as np

from keras_posttrain.distribution import processes

# Attributes of EarlyStopping and ReduceLROnPlateau, of trackers and Evaluate.
COUNTERS = ("wait", "best", "best_epoch", "stopped_epoch", "cooldown_counter")
COUNTERS += ("num_tokens", "evaluated_at")


def by_name(callbacks):
    """Yields `(name, callback)`, such as `("EarlyStopping/0", ...)`.

    The number counts callbacks of one class, so that adding or removing a
    callback of another class, such as a progress bar, changes no name.
    """
    seen = collections.Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        yield f"{kind}/{seen[kind]}", callback
        seen[kind] += 1


def counters(callbacks):
    """Returns callbacks' counters by name, a dict that JSON can encode."""
    found = {}
    for name, callback in by_name(callbacks):
        values = {
            key: _plain(getattr(callback, key))
            for key in COUNTERS
            if isinstance(getattr(callback, key, None), numbers.Real)
        }
        if hasattr(callback, "evaluated_at"):
            values["evaluated"] = dict(callback.evaluated)
        if values:
            found[name] = values
    return found


def set_counters(callbacks, values):
    """Restores counters that `counters` returned."""
    for name, callback in by_name(callbacks):
        for key, value in values.get(name, {}).items():
            setattr(callback, key, value)


def best_weights(callbacks, task):
    """Returns the trainable part of the weights that EarlyStopping keeps.

    Returns:
        Dict of dicts of arrays: by callback, then by index among the task's
        trainable variables.
    """
    indices = _indices(task)
    return {
        name: {str(i): callback.best_weights[at] for i, at in indices.items()}
        for name, callback in by_name(callbacks)
        if getattr(callback, "best_weights", None) is not None
    }


def set_best_weights(callbacks, task, values):
    """Restores weights of `best_weights`; frozen ones come from the task."""
    for name, callback in by_name(callbacks):
        if name not in values:
            continue
        weights = task.get_weights()
        best = processes.fetch(values[name])
        for i, at in _indices(task).items():
            weights[at] = np.array(best[str(i)])
        callback.best_weights = weights


def _indices(task):
    """Returns each trainable variable's index in `task.get_weights()`."""
    at = {id(v): i for i, v in enumerate(task.weights)}
    return {i: at[id(v)] for i, v in enumerate(task.trainable_variables)}


def _plain(number):
    is_whole = isinstance(number, numbers.Integral)
    return int(number) if is_whole else float(number)
