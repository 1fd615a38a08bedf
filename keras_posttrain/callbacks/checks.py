"""Checks of the arguments of callbacks."""

import math
import numbers


def positive(name, value, kind=int):
    """Returns a positive number of a kind, `int` or `float`.

    Raises:
        ValueError: it is none.
    """
    wanted = numbers.Integral if kind is int else numbers.Real
    is_number = isinstance(value, wanted) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        what = "int" if kind is int else "number"
        raise ValueError(
            f"`{name}` must be a positive {what}. Received: {name}={value!r}"
        )
    return kind(value)
