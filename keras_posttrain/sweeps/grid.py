"""The points of a grid of settings, and their names on the disk."""

import collections.abc
import dataclasses
import hashlib
import inspect
import itertools
import random
import re

PLAIN = (str, int, float, bool, type(None))
# Of a file system, without the suffix that keeps names apart.
MAX_NAME = 120


@dataclasses.dataclass(frozen=True)
class Point:
    """One choice of settings.

    Args:
        settings: dict by name of what tables and files show: strings,
            numbers, bools or `None`.
        arguments: dict by name of what the function is called with.
    """

    settings: dict
    arguments: dict

    @property
    def title(self):
        """Str, the settings in one line."""
        return ", ".join(f"{k}={v}" for k, v in self.settings.items())

    @property
    def folder(self):
        """Str, the name of the point's folder, which no other point has."""
        items = sorted(self.settings.items())
        text = ",".join(f"{k}={v}" for k, v in items)
        name = re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)[:MAX_NAME]
        if name == text and all(_is_clear(v) for _, v in items):
            return name
        digest = hashlib.sha256(repr(items).encode()).hexdigest()[:8]
        return f"{name}-{digest}"


def _is_clear(value):
    """Returns whether no other value has the same text, as "1" and 1 have."""
    if not isinstance(value, str):
        return True
    is_word = re.fullmatch(r"[a-z_][a-z0-9_.+-]*", value)
    return bool(is_word) and value not in ("nan", "inf")


def make_points(grid, num_samples, seed):
    """Returns the points of a grid, or a random choice of them, a list."""
    if not isinstance(grid, collections.abc.Mapping) or not grid:
        raise ValueError(
            "`grid` must be a dict from the names of settings to lists of "
            'values, such as {"learning_rate": [1e-4, 3e-4]}. '
            f"Received: grid={grid!r}"
        )
    values = [_values(name, choices) for name, choices in grid.items()]
    points = [
        Point(
            {name: shown for name, (shown, _) in zip(grid, chosen)},
            {name: value for name, (_, value) in zip(grid, chosen)},
        )
        for chosen in itertools.product(*values)
    ]
    if num_samples is None:
        return points
    if not isinstance(num_samples, int) or not 0 < num_samples <= len(points):
        raise ValueError(
            "`num_samples` must be an int from 1 to the number of points of "
            f"the grid, {len(points)}. Received: num_samples={num_samples!r}"
        )
    chosen = random.Random(seed).sample(range(len(points)), num_samples)
    return [points[i] for i in sorted(chosen)]


def _values(name, choices):
    """Returns pairs of what is shown of a value and the value."""
    if hasattr(choices, "tolist"):
        # An array.
        choices = choices.tolist()
    if isinstance(choices, collections.abc.Mapping):
        pairs = list(choices.items())
    elif isinstance(choices, (list, tuple, range)):
        pairs = [(value, value) for value in choices]
    else:
        pairs = []
    if not isinstance(name, str) or not pairs:
        raise ValueError(
            "Each setting of `grid` must be a name with a list of values, at "
            "least one, or a dict of values by names. "
            f"Received: {name!r}: {choices!r:.200}"
        )
    for shown, _ in pairs:
        if not isinstance(shown, PLAIN):
            raise ValueError(
                f"Values of the setting {name!r} must be strings, numbers, "
                "bools or None, which name the point in files. Give other "
                f'values names by a dict, such as {{"{name}": {{"a": ...}}}}. '
                f"Received: {shown!r:.200}"
            )
    if len({repr(shown) for shown, _ in pairs}) < len(pairs):
        raise ValueError(
            f"Values of the setting {name!r} must differ. "
            f"Received: {[shown for shown, _ in pairs]}"
        )
    return pairs


def check_function(function, names):
    """Raises a `ValueError` where a function does not take the settings."""
    if "folder" in names:
        raise ValueError(
            "'folder' cannot be a setting of `grid`: the function is given "
            "the point's folder by this name."
        )
    if not callable(function):
        raise ValueError(
            f"`function` must be a function. Received: {function!r:.200}"
        )
    wanted = {name: None for name in (*names, "folder")}
    try:
        inspect.signature(function).bind(**wanted)
    except TypeError as error:
        raise ValueError(
            "`function` must take the settings of `grid` and `folder` by "
            f"name: def f({', '.join(wanted)}). Received: "
            f"{getattr(function, '__name__', function)}"
            f"{inspect.signature(function)} ({error})"
        ) from None


def fingerprint(function):
    """Returns a digest of a function's source; `None` where it has none."""
    function = inspect.unwrap(getattr(function, "func", function))
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
