"""Sequences that a user's own loop trains on, and batches of them."""

import itertools

import numpy as np

from keras_posttrain.data.batches.group import Group
from keras_posttrain.data.batches.layout import MAX_SEQUENCES, BatchLayout
from keras_posttrain.data.batches.packing import most_sequences


class Datum:
    """A prompt, its completion and what a loss reads of it: for `kpt.Loop`.

    Args:
        prompt_ids: ints, the token ids of the prompt, which carry no loss.
        completion_ids: ints, those of the completion.
        mask: numbers, one for each token of the completion: its weight in
            the loss. `None` for 1.
        **extras: further inputs of the loss by name, such as `advantages` or
            `old_per_token_logps`. A number is one value of the sequence, an
            array has a value for each token of the completion.

    Raises:
        ValueError: for token ids that are no list of ints, or for arrays of
            another length than the completion.

    Example:

    ```python
    kpt.Datum([5, 6], [7, 8], advantages=0.5, old_per_token_logps=[-1.0, -2.0])
    ```
    """

    def __init__(self, prompt_ids, completion_ids, mask=None, **extras):
        self.prompt_ids = _ids("prompt_ids", prompt_ids)
        self.completion_ids = _ids("completion_ids", completion_ids)
        size = len(self.completion_ids)
        if not size or len(self) < 2:
            raise ValueError(
                "A Datum must have a completion, of two tokens or more where "
                "there is no prompt. Received: "
                f"{len(self.prompt_ids)} tokens of a prompt and {size} of a "
                "completion."
            )
        mask = np.ones(size, np.float32) if mask is None else mask
        self.mask = _values("mask", mask, size)
        if self.mask.ndim == 0:
            raise ValueError(
                "`mask` must have a number for each token of the completion. "
                f"Received: mask={mask!r}"
            )
        self.extras = {k: _values(k, v, size) for k, v in extras.items()}

    def __len__(self):
        return len(self.prompt_ids) + len(self.completion_ids)

    def __repr__(self):
        names = "".join(f", {name}" for name in self.extras)
        return (
            f"Datum({len(self.prompt_ids)} + {len(self.completion_ids)} "
            f"tokens{names})"
        )


def _ids(name, ids):
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` of a Datum must be a list of ints, token ids. "
            f"Received: {ids!r:.200}"
        )
    return array.astype(np.int32)


def _values(name, values, size):
    """Returns a number, or an array of the completion's size, as floats."""
    try:
        array = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        array = None
    if array is None or array.shape not in ((), (size,)):
        shape = "" if array is None else f" of shape {array.shape}"
        raise ValueError(
            f"`{name}` of a Datum must be a number or have one for each of "
            f"the {size} tokens of the completion. Received: "
            f"{name}={values!r:.200}{shape}"
        )
    return array


def check_data(data, sequence_length, vocabulary_size):
    """Raises a `ValueError` for data that no batch can be made of."""
    first = data[0]
    for i, datum in enumerate(data):
        if len(datum) > sequence_length:
            raise ValueError(
                f"A Datum must fit `sequence_length`={sequence_length}. "
                f"Received: datum {i} with {len(datum)} tokens."
            )
        for name in ("prompt_ids", "completion_ids"):
            ids = getattr(datum, name)
            wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary_size))
            if len(wrong):
                at = wrong[0]
                raise ValueError(
                    f"Token ids must be in [0, {vocabulary_size}), the "
                    f"model's vocabulary. Received: id {ids[at]} at place "
                    f"{at} of `{name}` of datum {i}."
                )
        kinds = {k: v.ndim for k, v in datum.extras.items()}
        if kinds != {k: v.ndim for k, v in first.extras.items()}:
            raise ValueError(
                "All data of a call must have the same extras, of a sequence "
                f"or of tokens. Received: {sorted(first.extras)} in datum 0 "
                f"and {sorted(kinds)} in datum {i}."
            )


def make_batch(data, packing=False, share_prefix=False, **settings):
    """Makes a `Batch` of a list of `Datum`s; datum `i` is its sequence `i`.

    `settings` are `sequence_length`, `row_multiple`, `pad_id` and
    `by_sequence` of `BatchLayout`.
    """
    groups = []
    # Neighbours with the same prompt.
    for prompt, many in itertools.groupby(
        data, lambda datum: datum.prompt_ids.tobytes()
    ):
        del prompt
        many = list(many)
        parts = [many] if share_prefix else [[datum] for datum in many]
        for part in parts:
            groups.append(
                Group.of_completions(
                    part[0].prompt_ids,
                    [x.completion_ids for x in part],
                    [x.mask for x in part],
                    0,
                )
            )
    longest = max(len(group.sequences) for group in groups)
    packs = packing or share_prefix
    layout = BatchLayout(
        # A power of two, so that few numbers of rows are compiled.
        num_sequences=1 << (len(data) - 1).bit_length(),
        token_budget=settings["sequence_length"] if packs else None,
        share_prefix=share_prefix,
        max_sequences=max(
            most_sequences(settings["sequence_length"], MAX_SEQUENCES),
            1 << longest.bit_length(),
        ),
        **settings,
    )
    batch = layout(groups)
    for name, first in data[0].extras.items():
        values = [datum.extras[name] for datum in data]
        if first.ndim:
            batch.put_tokens(name, values)
        else:
            batch.put_units(name, values)
    return batch
