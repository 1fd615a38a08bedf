"""Rows of supervised training to tokens with weights."""

from keras_posttrain.data.rows import columns, encoding
from keras_posttrain.data.rows.examples import DataReport, Example
from keras_posttrain.data.rows.preparation import (
    EncodedRow,
    Messages,
    Preparation,
    prepare_rows,
)

MESSAGES = Messages(
    too_long=(
        "A row must have at most `sequence_length` tokens. Received: {where} "
        "with {length} tokens, sequence_length={limit}. Use "
        "sequence_length={length} or more, truncation='drop' to leave out "
        "such rows, or truncation='cut' to cut their ends."
    ),
    no_loss=(
        "A row must have a token to learn: one with a weight in the loss that "
        "is not the row's first. Received: {where} with {length} tokens, none "
        "of which carries loss. Remove the row, or use truncation='drop'."
    ),
    none_left=(
        "No row of `{name}` is left to train on. Received: {report}. Use a "
        "larger `sequence_length`, or truncation='cut'."
    ),
)


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
    encoding.check_train_on(train_on)
    row_type = RowTypeCheck()

    def encode(index, row, where):
        kind = row_type(index, row, where)
        pixels = encoding.read_images(row, settings, where)
        side = encoding.encode_row(
            row, kind, settings, train_on, where, pixels
        )

        def build(sides):
            ids, mask = sides[0]
            images = encoding.place_images(pixels, ids, settings, where)
            return Example(ids, mask, index, images)

        return EncodedRow(
            [side],
            build,
            columns.weight(row, where),
            columns.read_columns(kind),
            encoding.num_image_tokens(pixels, settings),
        )

    report = DataReport(settings.name)
    return prepare_rows(
        dataset, Preparation(encode, settings, MESSAGES, report)
    )


class RowTypeCheck:
    """Checks that all rows of a dataset are of one type.

    Of a mixture, those from one dataset.
    """

    def __init__(self):
        self.first = {}

    def __call__(self, index, row, where):
        """Returns the type of a row, a key of `columns.KINDS`."""
        kind = columns.row_kind(row, where)
        source = getattr(row, "source", None)
        first, expected = self.first.setdefault(source, (index, kind))
        if kind != expected:
            raise ValueError(
                "All rows of a dataset must be of one type. Received: row "
                f"{first} has {columns.describe(expected)}, "
                f"{where} has {columns.describe(kind)}. Mix them as two "
                "datasets with `kpt.data.mix`, or turn them into one type."
            )
        return kind
