"""Prompts of on-policy distillation, for the student and its teachers."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_posttrain.data.rows.distillation_columns import teacher_index
from keras_posttrain.data.rows.distillation_example import (
    DistillationExample,
    teacher_view,
)
from keras_posttrain.data.rows.prompt_encoder import Prompt
from keras_posttrain.distill.teacher_cache import first_with_loss

# The column of a prompt that the teacher reads in place of the student's.
TEACHER_PROMPTS = {
    "teacher_prompt": "prompt",
    "teacher_prompt_ids": "prompt_ids",
}


@dataclasses.dataclass
class StudentPrompts:
    """The prompts of a run on the student's own samples.

    Attributes:
        prompts: sequence of `Prompt`s.
        stored: dict by row of the examples that are used as given.
        contexts: dict by row of `(teacher's prompt, teacher's index)`, each
            `None` where it is the student's or there is one teacher. Empty
            where both are so in all rows.
    """

    prompts: Sequence
    stored: dict = dataclasses.field(default_factory=dict)
    contexts: dict = dataclasses.field(default_factory=dict)

    def examples(self, prompt, trajectory):
        """Returns the examples of a trajectory, one for each segment."""
        return [self._example(prompt, s) for s in trajectory.segments]

    def _example(self, prompt, segment):
        ids, mask = segment.token_ids, segment.mask
        new = ids[len(prompt.token_ids) :]
        before, index = self.contexts.get(prompt.row, (None, None))
        theirs = source = None
        if before is not None:
            theirs, source = teacher_view(before, new, len(ids))
        return DistillationExample(
            ids,
            mask,
            prompt.row,
            teacher_ids=theirs,
            teacher_source=source,
            teacher_index=index,
        )


def prompts_of_rows(examples, tokenizer, most, why, name):
    """Makes the prompts to sample from of rows with completions.

    Args:
        examples: list of `Example`s, the rows.
        tokenizer: `Tokenizer`, or `None`.
        most: int, the most tokens of a prompt.
        why: string for errors, which setting `most` comes from.
        name: string for errors, the name of the dataset.

    Returns:
        `StudentPrompts`, which keep the rows too.
    """
    found = StudentPrompts([], {x.row: x for x in examples})
    for x in examples:
        start = first_with_loss(x)
        if start > most:
            raise ValueError(
                "A prompt must leave room for a completion. Received: "
                f"row {x.row} of `{name}` with a prompt of {start} "
                f"tokens; it may have {most} ({why})."
            )
        ids = tuple(x.token_ids[:start].tolist())
        text = tokenizer.decode(ids) if tokenizer else list(ids)
        found.prompts.append(Prompt(ids, text, {}, x.row))
        if isinstance(x, DistillationExample):
            before = None
            if x.teacher_ids is not None:
                if x.teacher_source[start] < 0:
                    raise ValueError(
                        "To sample from a row, the teacher's prompt must "
                        "end where its completion begins. Received: row "
                        f"{x.row} of `{name}`, whose first token with "
                        "loss reaches over that place. End both prompts "
                        "with a space or a new line, or pass tokenised "
                        "rows."
                    )
                before = x.teacher_ids[: x.teacher_source[start] + 1]
            found.contexts[x.row] = before, x.teacher_index
    return found


def teacher_prompts(prompts):
    """Returns name and rows of a column of teachers' prompts, or `None`s."""
    given = prompts[0].columns
    column = next((c for c in TEACHER_PROMPTS if c in given), None)
    if column is None:
        return None, None
    key = TEACHER_PROMPTS[column]
    return column, [{key: p.columns[column]} for p in prompts]


def contexts_of(prompts, teachers, column, names, name):
    """Returns the `contexts` of `StudentPrompts`.

    `teachers` are the `Prompt`s that the teacher reads instead, or `None`.
    """
    found = {}
    for i, p in enumerate(prompts):
        before = index = None
        if teachers is not None:
            before = np.array(teachers[i].token_ids, np.int32)
        if column is not None:
            where = f"row {p.row} of `{name}`"
            index = teacher_index(p.columns, column, names, where)
        found[p.row] = before, index
    return found
