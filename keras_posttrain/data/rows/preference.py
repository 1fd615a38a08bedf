"""Rows of preferences to tokens: pairs, and labelled completions."""

from keras_posttrain.data.rows.examples import DataReport
from keras_posttrain.data.rows.preference_encoder import (
    MESSAGES,
    PreferenceEncoder,
)
from keras_posttrain.data.rows.preparation import Preparation
from keras_posttrain.data.rows.prepare import prepare_rows


def prepare_preferences(dataset, settings, *, labelled, share_prompt=True):
    """Tokenizes and checks rows of preferences.

    A row is `{"prompt", "chosen", "rejected"}`, each side a string or a list
    of messages, or `{"chosen", "rejected"}`, whose common beginning is the
    prompt; `{"prompt_ids", "chosen_ids", "rejected_ids"}` or without
    `prompt_ids`, to which nothing is added. A pair may have a number
    `margin`, and rows of messages or of tokens `images` of their prompt. A
    labelled row is `{"prompt", "completion", "label"}` or
    `{"prompt_ids", "completion_ids", "label"}`.

    Args:
        dataset: as of `prepare_sft`.
        settings: `RowSettings`. `sequence_length` is the most tokens of a
            prompt and a completion.
        labelled: bool, whether rows are labelled, not pairs.
        share_prompt: bool, whether a pair that gives no prompt must begin
            with the same tokens.

    Returns:
        `(examples, report)`: a list of `Preference`s (of a stream a Grain
        `IterDataset`) and a `DataReport`.
    """
    encode = PreferenceEncoder(settings, labelled, share_prompt)
    report = DataReport(settings.name)
    return prepare_rows(
        dataset, Preparation(encode, settings, MESSAGES, report)
    )
