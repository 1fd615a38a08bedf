"""Conversion of a reward function's result to float32."""

import numbers

import numpy as np

# The most characters of a value that an error shows.
SHOWN = 80


class WrongResult(Exception):
    """A result that is not a list with an entry for each completion."""


def to_floats(result, count):
    """Returns rewards as float32, NaN for `None`, and the invalid ones."""
    is_array = hasattr(result, "__array__") and np.ndim(result) == 1
    if not is_array and not isinstance(result, (list, tuple)):
        shown = " ".join(repr(result).split())[:SHOWN]
        raise WrongResult(f"{type(result).__name__} {shown}")
    if len(result) != count:
        raise WrongResult(f"{len(result)} rewards")
    column = np.full(count, np.nan, "float32")
    invalid = []
    for i, value in enumerate(result):
        if value is None:
            continue
        number = to_float(value)
        if number is None:
            invalid.append((i, value))
        else:
            column[i] = number
    return column, invalid


def to_float(value):
    """Converts a value to a finite float32; `None` if it is no number."""
    is_scalar = hasattr(value, "__array__") and np.ndim(value) == 0
    if not isinstance(value, numbers.Real) and not is_scalar:
        return None
    try:
        with np.errstate(over="ignore"):
            number = np.float32(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if np.isfinite(number) else None
