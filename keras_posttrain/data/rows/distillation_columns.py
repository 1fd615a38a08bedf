"""The columns of distillation rows: the teacher's prompt and name."""

import difflib

from keras_posttrain.data.rows import columns

# The columns with a prompt that the teacher reads in place of the student's,
# and the row type that each belongs to.
TEACHER_PROMPTS = {
    "teacher_prompt": "prompt_completion",
    "teacher_prompt_ids": "token_pairs",
}


def teacher_index(row, column, names, where):
    """Returns the index into `names` of the teacher that a row names.

    Raises:
        ValueError: the row's `column` has none of the names.
    """
    value, names = row.get(column), list(names)
    if value in names:
        return names.index(value)
    close = difflib.get_close_matches(str(value), map(str, names), 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"The column '{column}' must name one of the teachers {names}. "
        f"Received: {where}, {column}={value!r:.200}.{hint}"
    )


def teacher_prompt_column(row, kind, teacher_column, where):
    """Finds the column of the teacher's prompt, or `None`.

    Raises:
        ValueError: it is misspelt and not `teacher_column`, or belongs to
            rows of another type.
    """
    for column in row:
        # A misspelt column would be ignored.
        close = difflib.get_close_matches(
            str(column).lower(), TEACHER_PROMPTS, 1, cutoff=0.9
        )
        if close and column not in (*TEACHER_PROMPTS, teacher_column):
            raise ValueError(
                f"Did you mean the column '{close[0]}'? Received: {where} "
                f"with the column {column!r}. Rename it, or remove it if it "
                "is something else."
            )
    given = [c for c in TEACHER_PROMPTS if row.get(c) is not None]
    for column in given:
        if kind != TEACHER_PROMPTS[column]:
            needed = columns.describe(TEACHER_PROMPTS[column])
            raise ValueError(
                f"The column '{column}' goes with rows with {needed}: the "
                f"teacher reads it before the completion. Received: {where} "
                f"with {columns.describe(kind)}."
            )
    return given[0] if given else None


def check_own_tokens(kind, teacher_tokenizer, train_on, where):
    """Refuses rows that the teacher cannot tokenize differently."""
    if teacher_tokenizer is not None and kind in columns.TOKENISED:
        raise ValueError(
            "A teacher with a tokenizer of its own needs rows of text: "
            "'text', 'messages', or 'prompt' and 'completion'. Received: "
            f"{where} with {columns.describe(kind)}, which only the student "
            "can read. Pass the text, or use a teacher with the student's "
            "vocabulary."
        )
    if train_on == "all" and kind != "text":
        raise ValueError(
            "Where the teacher reads other tokens than the student, only "
            "completions can be distilled. Received: train_on='all' for "
            f"{where}. Use train_on='auto'."
        )


def check_prompt(row, column, where):
    """Refuses a teacher's prompt of another kind than the row's."""
    value = row[column]
    if not isinstance(value, (str, list, tuple)):
        raise columns.wrong_type(
            where, column, "a string or a list of messages", value
        )
    sides = (row["prompt"], row["completion"])
    if all(isinstance(s, str) for s in sides) and not isinstance(value, str):
        raise ValueError(
            f"The column '{column}' must be a string where the prompt and "
            "the completion are: no chat template ends their text. Received: "
            f"{where}, {column}={value!r:.200}. Give the prompt as messages "
            "too."
        )
