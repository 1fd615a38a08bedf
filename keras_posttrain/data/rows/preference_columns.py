"""The columns of preference rows: the row types, and their values."""

import difflib
import math

import numpy as np

from keras_posttrain.data.rows import columns
from keras_posttrain.data.rows.images import COLUMNS

# The required columns of each row type, the richest first.
PAIRS = (
    ("prompt_ids", "chosen_ids", "rejected_ids"),
    ("chosen_ids", "rejected_ids"),
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
)
LABELLED = (
    ("prompt_ids", "completion_ids", "label"),
    ("prompt", "completion", "label"),
)


def row_columns(row, labelled, where):
    """Finds the row type: one of `PAIRS` or `LABELLED`.

    Raises:
        ValueError: the row is no dict, or has the columns of no type or of
            the other kind.
    """
    columns.check_dict(row, where)
    given = {column for column, value in row.items() if value is not None}
    ours, others = (LABELLED, PAIRS) if labelled else (PAIRS, LABELLED)
    for needed in ours:
        if given.issuperset(needed):
            optional = set(read_columns(needed, labelled)).difference(needed)
            columns.check_spelling(given, tuple(optional), where)
            return needed
    kind = "a label" if labelled else "a chosen and a rejected side"
    text = (
        f"The loss asks for rows with {kind}: "
        f"{' or '.join(map(columns.describe, ours))}. Received: {where} with "
        f"the columns {list(map(str, row))}."
    )
    known = sorted({column for needed in ours for column in needed})
    for column in map(str, row):
        if column in known and column not in given:
            text += f" The column '{column}' is None."
        elif column not in known:
            close = difflib.get_close_matches(column.lower(), known, n=1)
            text += f" Did you mean '{close[0]}'?" if close else ""
    sides = {"chosen", "rejected", "chosen_ids", "rejected_ids"} & given
    if len(sides) == 1 and not labelled:
        side = sides.pop()
        other = {"chosen": "rejected", "rejected": "chosen"}
        word, *end = side.split("_")
        missing = "_".join([other[word], *end])
        text += f" The column '{side}' goes with '{missing}'."
    if any(given.issuperset(needed) for needed in others):
        text += (
            " Use a loss of labelled completions such as `KTOLoss`, or rows "
            "of pairs."
            if not labelled
            else " Use a loss of pairs such as `DPOLoss`, or give each "
            "completion a row with a label."
        )
    raise ValueError(text)


def read_columns(needed, labelled):
    """Returns the columns that are read of a row type."""
    margin = () if labelled else ("margin",)
    tools = () if any(c.endswith("_ids") for c in needed) else ("tools",)
    return (*needed, *margin, *tools, *COLUMNS)


def completion_columns(needed):
    """Returns the columns of a row type that hold a completion."""
    return [c for c in needed if c not in ("prompt", "prompt_ids", "label")]


def without_prompt(row, needed):
    """Removes the prompt from sides that repeat it."""
    if "prompt" not in needed:
        return row
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return row
    repeated = {
        side: row[side]
        for side in completion_columns(needed)
        if isinstance(row[side], (list, tuple))
        and len(row[side]) > len(prompt)
        and list(row[side][: len(prompt)]) == list(prompt)
    }
    return row | {k: list(v[len(prompt) :]) for k, v in repeated.items()}


def label_of(row, where):
    """Returns the row's label, a bool."""
    value = row["label"]
    if not isinstance(value, (bool, np.bool_)):
        raise columns.wrong_type(
            where, "label", "True (a good completion) or False", value
        )
    return bool(value)


def margin_of(row, where):
    """Returns the row's margin, 0 where it has none."""
    value = row.get("margin")
    if value is None:
        return 0.0
    if not columns.is_number(value) or not math.isfinite(value):
        raise columns.wrong_type(where, "margin", "a finite number", value)
    return float(value)
