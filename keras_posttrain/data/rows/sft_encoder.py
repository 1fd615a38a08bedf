"""Encodes the rows of supervised training."""

from keras_posttrain.data.rows import columns, encoding
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.data.rows.preparation import EncodedRow, Messages

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


class SFTEncoder:
    """Encodes rows of supervised training; see `prepare_sft`.

    Args:
        settings: `RowSettings`.
        train_on: one of `encoding.TRAIN_ON`.
    """

    def __init__(self, settings, train_on):
        encoding.check_train_on(train_on)
        self.settings, self.train_on = settings, train_on
        self.row_type = RowTypeCheck()

    @property
    def key(self):
        return {"train_on": self.train_on}

    @property
    def firsts(self):
        return [self.row_type.first]

    def __call__(self, index, row, where):
        settings = self.settings
        kind = self.row_type(index, row, where)
        pictures = encoding.read_images(row, settings, where)
        side = encoding.encode_row(
            row, kind, settings, self.train_on, where, pictures
        )

        def build(sides):
            ids, mask = sides[0]
            images = encoding.place_images(pictures, ids, settings, where)
            return Example(ids, mask, index, images)

        return EncodedRow(
            [side],
            build,
            columns.weight(row, where),
            columns.read_columns(kind),
            encoding.num_image_tokens(pictures),
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
