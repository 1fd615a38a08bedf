"""A weighted mixture of datasets."""

import functools
import math

import grain
import numpy as np

from keras_posttrain.data.rows.columns import MixedRow, is_number
from keras_posttrain.data.rows.datasets import is_stream, open_dataset


def mix(datasets, weights=None, *, repeat=False, seed=0):
    """Mixes datasets, each with its share of the rows.

    The mixture is a dataset for `fit` and `evaluate` of every task; a run on
    it resumes bit for bit. Each dataset has rows of a type of its own, and
    `task.data_report` counts the rows of each.

    Args:
        datasets: dict by name of datasets, of any kind that `fit` takes.
        weights: dict by name of positive floats, the share of each dataset:
            among any number of rows in a row, each has its share up to
            rounding. `None` for all rows of all datasets.
        repeat: bool. `False` ends the mixture where the first dataset has
            no rows left. Every epoch has the same rows: of 2,000 rows that
            are mixed half and half with 20, the other 1,980 are never read.
            `True` repeats datasets, in another order each
            time, until every row of every dataset was read.
        seed: int, of the order in which rows are taken from each dataset. A
            stream is read in its own order.

    Returns:
        A Grain `MapDataset`; an `IterDataset` where a dataset is a stream.

    Raises:
        ValueError: a dataset cannot be read, the names of the weights
            differ, or a stream is mixed without weights or with `repeat`.

    Example:

    ```python
    more_rows = [{"prompt": "1 + 1 =", "completion": " 2"}] * 8
    mixture = kpt.data.mix(
        {"sums": rows, "ones": more_rows},
        weights={"sums": 0.7, "ones": 0.3},
    )
    task.fit(mixture)
    ```
    """
    _check(datasets, weights, seed)
    opened = {
        k: open_dataset(x, f"datasets[{k!r}]") for k, x in datasets.items()
    }
    streams = [name for name, rows in opened.items() if is_stream(rows)]
    if streams and (weights is None or repeat):
        raise ValueError(
            "The rows of a stream cannot be counted: a mixture with one needs "
            "`weights`, and ends with the first dataset that ends. Received: "
            f"{weights=}, {repeat=}, and the streams {streams}."
        )
    seeds = np.random.SeedSequence([seed < 0, abs(seed)])
    seeds = seeds.generate_state(len(opened))
    parts = [
        _part(name, rows, int(number))
        for (name, rows), number in zip(opened.items(), seeds)
    ]
    if weights is None:
        return grain.MapDataset.concatenate(parts)
    shares = [float(weights[name]) for name in datasets]
    if streams:
        parts = [p if is_stream(p) else p.to_iter_dataset() for p in parts]
        return grain.IterDataset.mix(parts, shares)
    if not repeat:
        return grain.MapDataset.mix(parts, shares)
    total = sum(shares)
    sizes = [len(p) * total / share for p, share in zip(parts, shares)]
    mixed = grain.MapDataset.mix([p.repeat() for p in parts], shares)
    return mixed[: math.ceil(max(sizes))]


def _part(name, rows, seed):
    """Returns the rows of a dataset, shuffled, with its name."""
    if not is_stream(rows):
        if not isinstance(rows, grain.MapDataset):
            rows = grain.MapDataset.source(rows)
        rows = rows.shuffle(seed=seed)
    return rows.map(functools.partial(_named, name))


def _named(name, row):
    if not isinstance(row, dict):
        return row
    inner = getattr(row, "source", None)
    return MixedRow(row, name if inner is None else f"{name}/{inner}")


def _check(datasets, weights, seed):
    is_int = isinstance(seed, (int, np.integer))
    if isinstance(seed, bool) or not is_int or seed < 0:
        raise ValueError(
            f"`seed` must be an int of at least 0. Received: seed={seed!r}."
        )
    if not isinstance(datasets, dict) or not datasets:
        raise ValueError(
            "`datasets` must be a dict of datasets by name, such as "
            '{"chat": chat_rows, "math": "math.jsonl"}. Received: '
            f"datasets={datasets!r:.200} of type {type(datasets).__name__}."
        )
    if weights is None:
        return
    if not isinstance(weights, dict) or set(weights) != set(datasets):
        raise ValueError(
            "`weights` must have a number for each dataset. Received: "
            f"weights={weights!r:.200} for the datasets {list(datasets)}."
        )
    for name, weight in weights.items():
        if not is_number(weight) or not 0 < weight < math.inf:
            raise ValueError(
                "A weight of a mixture must be a positive, finite number. "
                f"Received: weights[{name!r}]={weight!r:.200}. Leave a "
                "dataset out instead of weighting it with 0."
            )
