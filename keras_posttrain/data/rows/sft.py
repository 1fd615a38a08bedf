"""Rows of supervised training to tokens with weights."""

from keras_posttrain.data.rows.examples import DataReport
from keras_posttrain.data.rows.preparation import Preparation
from keras_posttrain.data.rows.prepare import prepare_rows
from keras_posttrain.data.rows.sft_encoder import MESSAGES, SFTEncoder


def prepare_sft(dataset, settings, train_on="auto"):
    """Tokenizes and checks the rows of a dataset for supervised training.

    A row is one of
    - `{"text"}`: opened as the tokenizer opens a text, and ended;
    - `{"messages"}`, and `"tools"` where there are any;
    - `{"prompt", "completion"}`, each a string or a list of messages;
    - `{"prompt_ids", "completion_ids"}`, to which nothing is added;
    - `{"token_ids", "completion_mask"}`, to which nothing is added; the mask
      may hold weights, and without it all tokens carry loss.

    Rows of messages or of tokens may have `"images"`, a list, or `"image"`.

    Rows of ShareGPT's and Alpaca's formats are converted. A `"weight"` of a
    row multiplies its mask. All rows of a dataset (of a mixture, those from
    one dataset) are of one type; the report names the columns that nothing
    reads.

    Args:
        dataset: any kind that `datasets.ACCEPTED` lists.
        settings: `RowSettings`.
        train_on: `"completion"` (of messages: the last assistant turn),
            `"assistant"` (all its turns), `"all"` tokens, or `"auto"`: the
            assistant's turns of messages, the completion of rows that have
            one, all of a text.

    Returns:
        Tuple `(examples, report)`: a list of `Example`s and a `DataReport`.
        Of a stream the examples are a Grain `IterDataset` that
        prepares rows as they are read, and the report is filled meanwhile.
    """
    encode = SFTEncoder(settings, train_on)
    report = DataReport(settings.name)
    return prepare_rows(
        dataset, Preparation(encode, settings, MESSAGES, report)
    )
