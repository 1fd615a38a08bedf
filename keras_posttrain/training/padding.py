"""How many rows a batch has: what devices and micro-batches share evenly.

A batch that does not divide is filled up with rows of padding. They hold no
sequence (`sequence_mask` is 0), and every loss, coupled or not, goes by that:
the update is the one of the batch alone.
"""

import math

from keras_posttrain.models import sharding


def micro_rows(micro_batch_size, together=1):
    """Rows that pass through the model at once.

    Args:
        micro_batch_size: int, examples.
        together: int, rows of an example, which is never split.

    Returns:
        Int: at least those of `micro_batch_size` examples, and as many on
        each device: the devices that would idle take rows as well.
    """
    return _up(micro_batch_size * together, _multiple(together))


def row_multiple(micro_batch_size, rows=None, together=1):
    """What the number of rows of a batch is a multiple of.

    Args:
        micro_batch_size: int or `None`, examples.
        rows: int or `None`, rows that a whole batch fills, where that is
            known: one that fits a micro-batch has no room for a second.
        together: int, rows of an example, which is never split.

    Returns:
        Int.
    """
    if micro_batch_size is None:
        return _multiple(together)
    micro = micro_rows(micro_batch_size, together)
    return _multiple(together) if rows and rows <= micro else micro


def describe(micro_batch_size, rows, together=1):
    """What to tell of rows of padding; `None` of a batch without any.

    Args:
        micro_batch_size, together: as in `row_multiple`.
        rows: int, rows that a whole batch fills; `None` where that depends
            on the lengths of its sequences.
    """
    multiple = row_multiple(micro_batch_size, rows, together)
    shards = sharding.data_axis()[2]
    why = f"{shards} devices" if shards > 1 else ""
    if micro_batch_size is not None:
        size = micro_rows(micro_batch_size, together)
        if rows is None or rows > size:
            why += f"{' and ' if why else ''}micro-batches of {size} rows"
    if rows is None:
        return (
            f"rows of padding fill batches up to a multiple of {multiple} "
            f"rows, for {why}"
            if multiple > 1
            else None
        )
    empty = -rows % multiple
    if not empty:
        return None
    return (
        f"{empty} rows of padding a batch: {rows} rows are filled up to "
        f"{rows + empty}, for {why}"
    )


def _multiple(together):
    return math.lcm(together, sharding.data_axis()[2])


def _up(number, multiple):
    return -(-number // multiple) * multiple
