"""Random groups of sequences, and settings of rows."""

import dataclasses

import numpy as np

from keras_posttrain.data.batches.layout import Group
from keras_posttrain.data.rows.preparation import RowSettings

SIZES = [(30, [5, 9, 1, 12]), (1, [7, 3]), (12, [20, 21]), (40, [2])]


def random_groups(sizes, seed=0):
    """Groups of `(prompt length, [completion lengths])`."""
    rng = np.random.default_rng(seed)
    return [
        Group.of_completions(
            rng.integers(3, 500, prompt).astype("int32"),
            [rng.integers(3, 500, n).astype("int32") for n in lengths],
            [rng.integers(0, 2, n).astype("float32") for n in lengths],
            row,
        )
        for row, (prompt, lengths) in enumerate(sizes)
    ]


def split_settings(arguments):
    """`(those of RowSettings, the others)`."""
    names = {field.name for field in dataclasses.fields(RowSettings)}
    ours = {k: v for k, v in arguments.items() if k in names}
    return ours, {k: v for k, v in arguments.items() if k not in names}
