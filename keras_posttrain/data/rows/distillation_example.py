"""A sequence to distil, and what its teacher reads."""

import dataclasses

import numpy as np

from keras_posttrain.data.rows.examples import DataReport, Example


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DistillationExample(Example):
    """A sequence, and what its teacher reads in its place.

    Args, after those of `Example`:
        teacher_ids: int32 array of shape `(teacher_length,)`, or `None` where
            the teacher reads the same tokens.
        teacher_source: int32 array of shape `(length,)`: the index of
            the teacher's token whose hidden state predicts the student's
            token; -1 where there is none, and outside completions.
        teacher_index: int, the row's teacher among several, or `None`.
    """

    teacher_ids: np.ndarray | None = None
    teacher_source: np.ndarray | None = None
    teacher_index: int | None = None

    @property
    def other_bytes(self):
        """Bytes of everything that an `Example` lacks."""
        arrays = (self.teacher_ids, self.teacher_source)
        parts = [b"" if x is None else x.tobytes() for x in arrays]
        return b"|".join([*parts, repr(self.teacher_index).encode()])

    @property
    def summary(self):
        """Dict of ints; `teacher`, the tokens that it reads, may be -1."""
        # A class with slots has no `super()`.
        found = Example.summary.fget(self)
        if self.teacher_ids is not None:
            found["teacher"] = len(self.teacher_ids)
        return found


@dataclasses.dataclass
class DistillationReport(DataReport):
    """The numbers of a dataset's rows, and of what its teachers predict.

    Args:
        teacher_tokens: int, tokens that the teacher reads, where they differ
            from the student's.
        predicted_tokens: int, tokens with loss that one of them predicts.
        unpredicted_rows: int, kept rows without such a token.
    """

    teacher_tokens: int = 0
    predicted_tokens: int = 0
    unpredicted_rows: int = 0

    @property
    def predicted_share(self):
        """Float, the share of tokens with loss that the teacher predicts."""
        if not self.teacher_tokens:
            return 1.0
        return self.predicted_tokens / max(self.loss_tokens, 1)

    def __str__(self):
        text = DataReport.__str__(self)
        if self.teacher_tokens:
            text += (
                f"; the teacher reads {self.teacher_tokens:,} tokens and "
                f"predicts {self.predicted_tokens:,} of those with loss "
                f"({self.predicted_share:.1%}), none in "
                f"{self.unpredicted_rows:,} rows"
            )
        return text


def teacher_view(teacher_prompt, completion, length):
    """Makes what a teacher reads: another prompt before a completion.

    Args:
        teacher_prompt: int array of shape `(teacher_prompt_length,)`.
        completion: int array of shape `(completion_length,)`.
        length: int, tokens of the student's prompt and the completion.

    Returns:
        Tuple `(teacher_ids, teacher_source)` as of `DistillationExample`:
        for `[8, 9, 5]`, `[7, 1]` and 3 `[8, 9, 5, 7, 1]` and `[-1, 2, 3]`.
    """
    teacher_ids = np.concatenate([teacher_prompt, completion])
    source = np.full(length, -1, np.int32)
    first = length - len(completion)
    source[first:] = len(teacher_prompt) - 1 + np.arange(len(completion))
    return teacher_ids.astype(np.int32), source
