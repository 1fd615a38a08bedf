"""The columns of a row: the row types, and checks of values."""

import difflib
import functools

import numpy as np

# The required columns of each row type.
KINDS = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "token_pairs": ("prompt_ids", "completion_ids"),
    "masked_tokens": ("token_ids", "completion_mask"),
    # All of them carry loss.
    "tokens": ("token_ids",),
}
# Row types without messages: nothing renders tools.
TOKENISED = ("token_pairs", "masked_tokens", "tokens")
OPTIONAL = ("weight", "tools", "images", "image")
# Sums of larger ones would leave float32.
MAX_WEIGHT = 1e6


class MixedRow(dict):
    """A row of a mixture of datasets.

    Args:
        row: dict.
        source: string, the name of the dataset that it is from.
    """

    def __init__(self, row, source):
        super().__init__(row)
        self.source = source


def describe(needed):
    """Returns a key of `KINDS`, or columns, as the user writes a row type."""
    names = KINDS.get(needed, needed)
    return "{" + ", ".join(f"'{column}'" for column in names) + "}"


def _types():
    return ", ".join(map(describe, KINDS))


def check_dict(row, where):
    """Raises where a row is no dict; `where` names it in the error."""
    if not isinstance(row, dict):
        raise ValueError(
            "A row must be a dict of columns. Received: "
            f"{where} is {row!r:.200} of type {type(row).__name__}."
        )


def row_kind(row, where):
    """Finds the type of a row by its columns: a key of `KINDS`.

    Raises:
        ValueError: the row is no dict, or has the columns of no type or of
            several.
    """
    check_dict(row, where)
    given = {column for column, value in row.items() if value is not None}
    complete = [
        kind for kind, needed in KINDS.items() if given.issuperset(needed)
    ]
    if "masked_tokens" in complete:
        complete.remove("tokens")
    if len(complete) > 1:
        raise ValueError(
            "A row must have the columns of one type. Received: "
            f"{where} has those of "
            f"{' and '.join(map(describe, complete))}. Remove one of them. "
            f"Row types: {_types()}."
        )
    if not complete:
        raise ValueError(
            f"A row must have the columns of one of {_types()}. Received: "
            f"{where} with the columns {list(map(str, row))}."
            + _suggestion(row, given)
        )
    optional = OPTIONAL
    if complete == ["tokens"]:
        optional = (*OPTIONAL, "completion_mask")
    check_spelling(given.difference(KINDS[complete[0]]), optional, where)
    return complete[0]


def check_spelling(given, optional, where):
    """Raises where an optional column is misspelt: it would be ignored."""
    for column in set(given).difference(optional):
        for name in set(_near(str(column).lower(), optional)) - set(given):
            raise ValueError(
                f"Did you mean the column '{name}'? Received: "
                f"{where} with the column {column!r}. Rename it, or "
                "remove it if it is something else."
            )


@functools.lru_cache
def _near(column, names):
    return difflib.get_close_matches(column, names, 1, cutoff=0.8)


def read_columns(kind):
    """Returns the columns that are read of a row type."""
    optional = OPTIONAL
    if kind in TOKENISED:
        optional = tuple(c for c in OPTIONAL if c != "tools")
    return (*KINDS[kind], *optional)


def _suggestion(row, given):
    known = sorted({column for needed in KINDS.values() for column in needed})
    text = ""
    for column in row:
        if column in known:
            if column not in given:
                text += f" The column '{column}' is None."
            continue
        close = difflib.get_close_matches(str(column).lower(), known, n=1)
        if close:
            text += f" Did you mean '{close[0]}' by {column!r}?"
    for needed in KINDS.values():
        missing = set(needed) - set(row)
        if len(needed) == 2 and len(missing) == 1:
            there = next(column for column in needed if column in row)
            text += f" The column '{there}' goes with '{missing.pop()}'."
    return text


def wrong_type(where, column, expected, value):
    """Makes the error for a value of the wrong type."""
    return ValueError(
        f"The column '{column}' must be {expected}. Received: {where}, "
        f"{column}={value!r:.200} of type {type(value).__name__}."
    )


def int_array(value, where, column):
    """Returns a column of token ids as an int64 array `(length,)`."""
    array = _array(value, where, column, "a list of integers")
    if array.dtype.kind not in "iu":
        raise wrong_type(where, column, "a list of integers", value)
    return array.astype(np.int64)


def weight_array(value, where, column):
    """Returns a column of token weights as a float32 array `(length,)`."""
    array = _array(value, where, column, "a list of numbers")
    if array.dtype.kind not in "iufb":
        raise wrong_type(where, column, "a list of numbers", value)
    array = array.astype(np.float32)
    bad = np.flatnonzero(~((array >= 0) & (array <= MAX_WEIGHT)))
    if bad.size:
        raise ValueError(
            f"The column '{column}' must hold finite numbers of at least 0 "
            "and at most 1e6. "
            f"Received: {where}, {column}[{bad[0]}]={value[bad[0]]}."
        )
    return array


def _array(value, where, column, expected):
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__len__"):
        raise wrong_type(where, column, expected, value)
    if len(value) == 0:
        return np.zeros((0,), np.int64)
    try:
        array = np.asarray(value)
    except ValueError:
        raise wrong_type(where, column, expected, value) from None
    if array.ndim != 1:
        raise wrong_type(where, column, expected, value)
    return array


def check_token_ids(ids, vocabulary_size, where):
    """Raises where a token id is not in the model's vocabulary."""
    [bad] = ((ids < 0) | (ids >= vocabulary_size)).nonzero()
    if bad.size:
        raise ValueError(
            "A token id must be at least 0 and less than the model's "
            f"vocabulary size. Received: {where}, token id {ids[bad[0]]} at "
            f"position {bad[0]}, vocabulary_size={vocabulary_size}. Was the "
            "row tokenised for another model?"
        )


def is_number(value):
    """Returns whether a value is an int or a float, of Python or NumPy."""
    types = (int, float, np.integer, np.floating)
    return isinstance(value, types) and not isinstance(value, bool)


def weight(row, where):
    """Returns the row's weight, 1 where it has none."""
    value = row.get("weight")
    if value is None:
        return 1.0
    if not is_number(value):
        raise wrong_type(where, "weight", "a number", value)
    if not 0 <= value <= MAX_WEIGHT:
        raise ValueError(
            "The column 'weight' must be a finite number of at least 0 and "
            "at most 1e6. "
            f"Received: {where}, weight={value}."
        )
    return float(value)


def check_characters(value, where, place=""):
    """Raises where a text holds half a character, which has no UTF-8."""
    if isinstance(value, str):
        bad = next((i for i, c in enumerate(value) if _is_half(c)), None)
        if bad is not None:
            raise ValueError(
                "A text must consist of whole characters. Received: "
                f"{where}{place and ', '}{place.lstrip('.')} with "
                f"{value[bad]!a}, half of a character (a lone surrogate), at "
                f"position {bad}. Remove it, for example with "
                "text.encode('utf-8', 'ignore').decode()."
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            check_characters(item, where, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            check_characters(item, where, f"{place}[{i}]")


def _is_half(character):
    return "\ud800" <= character <= "\udfff"
