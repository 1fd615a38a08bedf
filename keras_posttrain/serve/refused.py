"""Requests that get an error as their answer, and checks of JSON fields."""

import difflib


class Refused(Exception):
    """An error that the client shows to its user.

    Clients repeat a request that got 408, 409, 429 or 5xx, and no other.
    """

    def __init__(self, message, status=400):
        super().__init__(message)
        self.status = int(status)


def unknown(kind, name, known=()):
    """Returns a `Refused` for a name that nothing has."""
    near = difflib.get_close_matches(str(name), list(known), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return Refused(f"There is no {kind} {name!r}.{hint}", 404)


def field(body, name, kind, default=...):
    """Returns a field of a JSON object, of a type.

    Args:
        body: dict.
        name: str.
        kind: type; `float` also takes ints.
        default: the value where the field is missing or null; without it
            that is refused.
    """
    value = body.get(name)
    if value is None and default is not ...:
        return default
    kinds = (int, float) if kind is float else (kind,)
    is_wrong_bool = isinstance(value, bool) and kind is not bool
    if not isinstance(value, kinds) or is_wrong_bool:
        raise Refused(
            f"`{name}` must be of type {kind.__name__}. "
            f"Received: {name}={value!r:.200}",
            422,
        )
    return value
