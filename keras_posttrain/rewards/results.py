"""What a reward function returned, as float32 with NaN for `None`."""

import numbers

import numpy as np

# The most characters of a value in an error.
SHOWN = 80


class WrongResult(Exception):
    """A result that is no list with an entry for each completion."""


def to_floats(result, count):
    """Rewards as float32 with NaN for None, and the wrong ones."""
    is_array = hasattr(result, "__array__") and np.ndim(result) == 1
    if not is_array and not isinstance(result, (list, tuple)):
        shown = " ".join(repr(result).split())[:SHOWN]
        raise WrongResult(f"{type(result).__name__} {shown}")
    if len(result) != count:
        raise WrongResult(f"{len(result)} rewards")
    column = np.full(count, np.nan, "float32")
    wrong = []
    for i, value in enumerate(result):
        if value is None:
            continue
        number = to_float(value)
        if number is None:
            wrong.append((i, value))
        else:
            column[i] = number
    return column, wrong


def to_float(value):
    """A finite float32, or `None`; numbers in strings are none."""
    is_scalar = hasattr(value, "__array__") and np.ndim(value) == 0
    if not isinstance(value, numbers.Real) and not is_scalar:
        return None
    try:
        with np.errstate(over="ignore"):
            number = np.float32(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if np.isfinite(number) else None
