"""Callbacks that watch a metric: whether it exists, and its direction."""

import difflib
import re

import keras

from keras_posttrain.callbacks.evaluate import Evaluate

# By the ends of their names, metrics that training raises or lowers. Of
# others (`entropy`, lengths) neither can be said.
RISING = re.compile(
    r"(.*[/_])?(accuracy|accuracies|margins?|agreement|reward)"
    r"|rewards/(chosen|.*/mean)|(pass|maj)@\d+|value/explained_variance"
)
FALLING = re.compile(r"(.*[/_])?(loss|perplexity|kl|divergence|skipped)")
# Metrics of any rollout whose names hang on a number.
NUMBERED = re.compile(r"val_(pass|maj)@[1-9]\d*(/stderr)?")


def direction(name):
    """Returns `"max"`, `"min"` or `None` for the name of a metric."""
    name = name.removeprefix("val_")
    if RISING.fullmatch(name):
        return "max"
    return "min" if FALLING.fullmatch(name) else None


def prepare(callbacks, names, validation_names):
    """Checks what callbacks watch, and gives those on `"auto"` a direction.

    Such callbacks are `keras.callbacks.EarlyStopping`, `ReduceLROnPlateau`
    and others with a `monitor` and a `mode`.

    Args:
        callbacks: list of a run's callbacks.
        names: iterable of the metrics of its epochs.
        validation_names: iterable of those of its validation, without
            `val_`; empty without one.

    Raises:
        ValueError: for a metric that the run does not have, or one without a
            direction.
    """
    known = [*names, *(f"val_{name}" for name in validation_names)]
    for callback in callbacks:
        metric = getattr(callback, "monitor", None)
        if not isinstance(metric, str) or not hasattr(callback, "mode"):
            continue
        what = f"{type(callback).__name__}(monitor={metric!r})"
        numbered = NUMBERED.fullmatch(metric) and "val_pass@1" in known
        if metric not in known and not numbered:
            if any(_may_add(callback, metric) for callback in callbacks):
                continue
            raise ValueError(_unknown(what, metric, known))
        if callback.mode != "auto":
            continue
        callback.mode = direction(metric)
        if callback.mode is None:
            callback.mode = "auto"
            raise ValueError(
                f"{what} needs mode='max' or mode='min': training neither "
                "raises nor lowers this metric by itself."
            )


def _unknown(what, metric, known):
    near = difflib.get_close_matches(metric, known, 3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    if metric.startswith("val_") and metric.removeprefix("val_") in known:
        hint = " Pass `validation_data`, or watch the metric of training."
        if any(name.startswith("val_") for name in known):
            hint = " The validation of this task does not compute it."
    return (
        f"{what} watches a metric that this run does not have.{hint} It has "
        f"{', '.join(sorted(known))}."
    )


def _may_add(callback, metric):
    """Returns whether a callback may add a metric to the logs of an epoch."""
    if isinstance(callback, Evaluate):
        return metric.startswith(f"{callback.name}/")
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return "on_epoch_end" in vars(callback)
    own = type(callback)
    is_users = own.__module__.split(".")[0] not in ("keras", "keras_posttrain")
    base = keras.callbacks.Callback.on_epoch_end
    return is_users and own.on_epoch_end is not base
