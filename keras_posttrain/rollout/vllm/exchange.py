"""Gives all processes what each of them has sampled or scored."""

import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.rollout.request import Completion, Scores


def completions(own):
    """Returns the `Completion`s of all processes, in their order.

    `own` is the list of those of this process, each of one version of weights.
    """
    if processes.count() == 1:
        return own
    parts = processes.exchange_arrays(
        {
            "ids": _joined([c.token_ids for c in own], np.int32),
            "logps": _joined([c.per_token_logps for c in own], np.float32),
            "lengths": np.array([len(c.token_ids) for c in own], np.int32),
            "versions": np.array([c.weight_version for c in own], np.int64),
            "reasons": np.array([c.finish_reason for c in own], "U16"),
        }
    )
    return [
        Completion(ids.tolist(), logps, str(reason), int(version))
        for part in parts
        for ids, logps, reason, version in zip(
            _split(part["ids"], part["lengths"]),
            _split(part["logps"], part["lengths"]),
            part["reasons"],
            part["versions"],
        )
    ]


def scores(own, top_k):
    """Returns the `Scores` of all processes, in their order.

    `own` is the list of those of this process, which have the `top_k` most
    probable tokens, or none if that is `None`.
    """
    if processes.count() == 1:
        return own
    arrays = {
        "lengths": np.array([len(s.per_token_logps) for s in own], np.int32),
        "logps": _joined([s.per_token_logps for s in own], np.float32),
    }
    if top_k is not None:
        arrays |= {
            "ids": _joined([s.top_ids for s in own], np.int32),
            "top": _joined([s.top_logps for s in own], np.float32),
        }
    found = []
    for part in processes.exchange_arrays(arrays):
        columns = [_split(part["logps"], part["lengths"])]
        if top_k is not None:
            columns += [
                [x.reshape(-1, top_k) for x in _split(part[name], sizes)]
                for sizes in [top_k * part["lengths"]]
                for name in ("ids", "top")
            ]
        found += [Scores(*fields) for fields in zip(*columns)]
    return found


def _joined(arrays, dtype):
    """Concatenates arrays, flat."""
    flat = [np.asarray(x, dtype).reshape(-1) for x in arrays]
    return np.concatenate([np.zeros(0, dtype), *flat])


def _split(array, lengths):
    """Splits a flat array into parts of such lengths."""
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []
