"""The layout of pairs and labelled completions, and its extra arrays."""

import dataclasses
import functools

import numpy as np

from keras_posttrain.data.batches.layout import BatchLayout
from keras_posttrain.data.batches.packing import fine_lengths
from keras_posttrain.data.batches.row_cache import RowCache, row_key
from keras_posttrain.data.rows.examples import summary_of


def preference_layout(
    *,
    batch_size,
    sequence_length,
    labelled=False,
    mismatched=False,
    reference_cache=None,
    **settings,
):
    """Makes the layout of pairs or labelled completions.

    Without packing a row is a sequence: chosen and rejected are neighbouring
    rows; with a shared prompt a row is a pair. With packing a row holds
    several pairs, none of which is split.

    Args:
        batch_size: int, the most examples of a batch.
        sequence_length: int, the most tokens of a prompt and a completion.
        labelled: bool, whether examples are labelled completions, not pairs.
        mismatched: bool, whether each completion of the batch is put under
            the next example's prompt as well, with role 1. Its end is cut
            where it is too long there: it serves an estimate alone.
        reference_cache: `RowCache` of the reference's log-probabilities, for
            batches with `ref_per_token_logps`, or `None`.
        **settings: `share_prefix`, `token_budget`, `row_multiple` and
            `pad_id` of a `BatchLayout`.

    Returns:
        A `BatchLayout` of `Preference`s.
    """
    together = 2 if mismatched or not labelled else 1
    regroup = None
    if mismatched:
        regroup = functools.partial(
            add_mismatched, sequence_length=sequence_length
        )
    return BatchLayout(
        num_sequences=together * batch_size,
        sequence_length=sequence_length,
        lengths=fine_lengths,
        together=together,
        regroup=regroup,
        extras=PreferenceExtras(labelled, mismatched, reference_cache),
        **settings,
    )


@dataclasses.dataclass(frozen=True)
class PreferenceExtras:
    """Adds the arrays that preference losses read next to the tokens.

    Of pairs `margins`, at the chosen sequence; of labelled completions
    `labels` and, where there are mismatched ones, `roles`; with a cache
    `ref_per_token_logps`.
    """

    labelled: bool
    mismatched: bool
    reference_cache: RowCache | None

    def __call__(self, batch, examples):
        sides = [(x, i) for x in examples for i in range(len(x.completions))]
        if self.labelled:
            batch.put_sequences(
                "labels", [x.label for x, _ in sides], np.int32
            )
        else:
            batch.put_sequences(
                "margins", [x.margin * (i == 0) for x, i in sides]
            )
        if self.mismatched:
            batch.put_sequences("roles", [i for _, i in sides], np.int32)
        if self.reference_cache is not None:
            batch.put_tokens(
                "ref_per_token_logps", [self._logps(*side) for side in sides]
            )

    def _logps(self, example, i):
        found = self.reference_cache.read(completion_key(example, i))
        return found["logps"] * (example.masks[i] != 0)


def add_mismatched(examples, sequence_length):
    """Puts the completion before each example's under its prompt as well.

    It is cut where both exceed `sequence_length`. A lone example stays alone.
    """
    if len(examples) < 2:
        return examples
    before = [examples[-1], *examples[:-1]]
    return [
        _with_completion(example, other, sequence_length)
        for example, other in zip(examples, before)
    ]


def _with_completion(example, other, sequence_length):
    # A completion with loss stands behind the prompt, so there is room.
    room = sequence_length - len(example.prompt)
    return dataclasses.replace(
        example,
        completions=[example.completions[0], other.completions[0][:room]],
        masks=[example.masks[0], other.masks[0][:room]],
    )


def row_length(layout, examples):
    """Returns the most tokens that one example may take in a packed row.

    `examples` are all those of a run.
    """
    summary = summary_of(examples)
    prompt, second = summary["prompt"], summary["second"]
    first = summary["tokens"] - prompt
    if layout.regroup is not None:
        # Under shuffling any completion may meet any prompt, where its end
        # is cut.
        second = np.minimum(first.max(), layout.sequence_length - prompt)
    copies = 1 if layout.share_prefix else 1 + (second >= 0)
    return int((prompt * copies + first + np.maximum(second, 0)).max())


def completion_key(example, i):
    """Returns what a completion is found by in a `RowCache`."""
    tokens = np.concatenate([example.prompt, example.completions[i]])
    return row_key(tokens, len(example.prompt), example.images)
