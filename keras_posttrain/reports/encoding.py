"""JSON that may stand in a script tag of a page."""

import json
import math

import numpy as np

# Log-probabilities and other values of tokens are sent in thousandths.
SCALE = 1000


def encode(value):
    """Returns a value as JSON without `<`, so that no tag can begin in it.

    Objects that JSON does not have are their `repr`, numbers that are not
    finite `null`.
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(plain(value), separators=(",", ":"))
    return text.replace("<", "\\u003c")


def plain(value):
    """Returns a value that JSON can encode."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    try:
        if isinstance(value, np.ndarray) and value.ndim:
            return [plain(v) for v in value.tolist()]
        number = float(value)
        if not math.isfinite(number):
            return None
        return int(number) if isinstance(value, int) else number
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a `repr` can raise any error
        return f"<{type(value).__name__}>"


def number(value):
    """Returns a float as JSON with five digits, or `null`."""
    return f"{value:.5g}" if math.isfinite(value) else "null"


def per_token(values, scale=1):
    """Returns values of tokens: a list, or one number where all are equal.

    They are rounded to whole numbers of `1 / scale`; NaN is `None`.
    """
    values = np.asarray(values, np.float64) * scale
    known = np.isfinite(values)
    if not len(values) or not known.any():
        return None
    whole = np.rint(np.where(known, values, 0)).astype(np.int64)
    if known.all() and (whole == whole[0]).all():
        return int(whole[0])
    found = whole.tolist()
    for i in np.flatnonzero(~known):
        found[i] = None
    return found
