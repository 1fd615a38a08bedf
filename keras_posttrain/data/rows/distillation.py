"""Rows of distillation to tokens: what the student and the teacher read."""

from keras_posttrain.data.rows.distillation_encoder import DistillationEncoder
from keras_posttrain.data.rows.distillation_example import DistillationReport
from keras_posttrain.data.rows.preparation import Preparation
from keras_posttrain.data.rows.prepare import prepare_rows
from keras_posttrain.data.rows.sft_encoder import MESSAGES


def prepare_distillation(
    dataset,
    settings,
    *,
    teacher_tokenizer=None,
    teacher_length=None,
    teacher_vocabulary_size=None,
    train_on="auto",
    teacher_column=None,
    teacher_names=None,
):
    """Tokenizes and checks the rows of a dataset for distillation.

    Rows are those of supervised training. The teacher reads what the student
    reads, unless

    - a row has a `"teacher_prompt"` (a string or messages, next to
      `"prompt"` and `"completion"`) or `"teacher_prompt_ids"` (next to
      `"prompt_ids"` and `"completion_ids"`): then the teacher reads that
      prompt before the same completion;
    - the teacher has another tokenizer: then rows are texts, which both
      tokenizers read, and a token can be distilled where both have a token
      boundary before it.

    Args:
        dataset: as of `prepare_sft`.
        settings: `RowSettings` of the student.
        teacher_tokenizer: a `Tokenizer` with another vocabulary, or `None`.
        teacher_length: int, the most tokens that the teacher reads of a row;
            `None` for `settings.sequence_length`.
        teacher_vocabulary_size: int, how many token ids the teacher has;
            `None` for `settings.vocabulary_size`.
        train_on: as of `prepare_sft`.
        teacher_column: string, the column that names a row's teacher, or
            `None`.
        teacher_names: list of strings, the names of the teachers in their
            order, or `None`.

    Returns:
        Tuple `(examples, report)`: a list of `Example`s, which are
        `DistillationExample`s where the teacher reads other tokens or is
        named by the row (of a stream, a Grain `IterDataset`), and a
        `DistillationReport`.
    """
    if (teacher_column is None) != (teacher_names is None):
        raise ValueError(
            "`teacher_column` and `teacher_names` go together: the column "
            f"holds one of the names. Received: {teacher_column=}, "
            f"{teacher_names=}."
        )
    if teacher_tokenizer is settings.tokenizer:
        teacher_tokenizer = None
    encode = DistillationEncoder(
        settings=settings,
        train_on=train_on,
        teacher_tokenizer=teacher_tokenizer,
        teacher_limit=teacher_length or settings.sequence_length,
        teacher_vocabulary_size=teacher_vocabulary_size
        or settings.vocabulary_size,
        teacher_column=teacher_column,
        teacher_names=teacher_names,
    )
    examples, report = prepare_rows(
        dataset,
        Preparation(
            encode, settings, MESSAGES, DistillationReport(settings.name)
        ),
    )
    if report.teacher_tokens and not report.predicted_tokens:
        raise ValueError(
            "The teacher must predict a token of some row: one before which "
            "both tokenizers have a token boundary. Received: "
            f"{report}. Do both chat templates write the same words, and is "
            "`teacher_length` long enough?"
        )
    return examples, report
