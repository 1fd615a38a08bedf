"""Padding: its token, and rows that devices and micro-batches divide evenly.

A batch that they do not divide is padded with empty rows, which hold no
sequence (`sequence_mask` is 0). Every loss, coupled or not, ignores them, so
that the update is that of the batch alone.
"""

import math

from keras_posttrain.models import sharding


def micro_rows(micro_batch_size, together=1):
    """Returns rows that pass through the model at once.

    At least those of `micro_batch_size` examples of `together` rows each,
    rounded up to the same number on each device.
    """
    return _up(micro_batch_size * together, _multiple(together))


def row_multiple(micro_batch_size, rows=None, together=1):
    """Computes the number that the rows of a batch are a multiple of.

    `rows` are those that a full batch fills, if known: a batch that fits a
    micro-batch has no room for a second. An example has `together` rows.
    """
    if micro_batch_size is None:
        return _multiple(together)
    micro = micro_rows(micro_batch_size, together)
    return _multiple(together) if rows and rows <= micro else micro


def describe(micro_batch_size, rows, together=1):
    """Describes the padding rows of a batch; `None` without any.

    `rows` is `None` if it depends on the lengths of a batch's sequences.
    """
    multiple = row_multiple(micro_batch_size, rows, together)
    shards = sharding.row_shards()
    why = f"{shards} devices" if shards > 1 else ""
    if micro_batch_size is not None:
        size = micro_rows(micro_batch_size, together)
        if rows is None or rows > size:
            why += f"{' and ' if why else ''}micro-batches of {size} rows"
    if rows is None:
        return (
            f"padding rows fill batches up to a multiple of {multiple} "
            f"rows, for {why}"
            if multiple > 1
            else None
        )
    empty = -rows % multiple
    if not empty:
        return None
    return (
        f"{empty} padding rows per batch: {rows} rows are padded to "
        f"{rows + empty}, for {why}"
    )


def _multiple(together):
    return math.lcm(together, sharding.row_shards())


def _up(number, multiple):
    return -(-number // multiple) * multiple


def token_id(tokenizer, vocabulary_size):
    """Returns the token id at padding, which the model has a row for.

    Many tokenizers have a padding token that was added after the model was
    made: the embedding of an id beyond it would be NaN. Which token it is has
    no effect, since no other token attends to it.
    """
    known = tokenizer and tokenizer.pad_token_id < vocabulary_size
    return tokenizer.pad_token_id if known else 0
