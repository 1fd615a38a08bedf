"""Encodes rows of preferences: pairs, and labelled completions."""

import dataclasses
import os

import numpy as np

from keras_posttrain.data.rows import columns, encoding
from keras_posttrain.data.rows.examples import completion_example
from keras_posttrain.data.rows.preference_columns import (
    PAIRS,
    completion_columns,
    label_of,
    margin_of,
    read_columns,
    row_columns,
    without_prompt,
)
from keras_posttrain.data.rows.preparation import (
    DroppedRow,
    EncodedRow,
    Messages,
)

EQUAL = "chosen equals rejected"
MESSAGES = Messages(
    too_long=(
        "A prompt and its completion must have at most `sequence_length` "
        "tokens. Received: {where} with {length} tokens, "
        "sequence_length={limit}. Use sequence_length={length} or more, "
        "truncation='drop' to leave out such rows, or truncation='cut' to cut "
        "their ends."
    ),
    no_loss=(
        "A completion must have a token to learn that is not the first of its "
        "row. Received: {where} with {length} tokens, none of which carries "
        "loss. Remove the row, or use truncation='drop'."
    ),
    none_left=(
        "No row of `{name}` is left to train on. Received: {report}. Use a "
        "larger `sequence_length`, rows whose sides differ, or "
        "truncation='cut'."
    ),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Preference:
    """A pair, or a labelled completion, ready for a batch.

    Args:
        prompt: int32 array of shape `(tokens,)`, the common beginning of a
            pair without loss. May be empty.
        completions: list of int32 arrays: the chosen and the rejected, or
            the labelled one alone.
        masks: list of float32 arrays, the weight of each of their tokens.
        row: int, index of the dataset row.
        label: bool, or `None` of a pair.
        margin: float, by how much the chosen is to be preferred.
        images: `Images` of the prompt, or `None`.
    """

    prompt: np.ndarray
    completions: list
    masks: list
    row: int = 0
    label: bool | None = None
    margin: float = 0.0
    images: object = None

    # A group of sequences to a `BatchLayout`.

    @property
    def sequences(self):
        return [
            completion_example(self.prompt, *pair, self.row, self.images)
            for pair in zip(self.completions, self.masks, strict=True)
        ]

    @property
    def prefix_length(self):
        return len(self.prompt)

    # The first sequence, as an `Example` has it.

    @property
    def token_ids(self):
        return self.sequences[0].token_ids

    @property
    def completion_mask(self):
        return self.sequences[0].completion_mask

    @property
    def other_bytes(self):
        """Bytes of everything except the first sequence."""
        rest = [x.tobytes() for x in (*self.completions, *self.masks)]
        rest.append(repr((self.label, self.margin)).encode())
        if self.images is not None:
            rest.append(self.images.digest)
        return b"|".join(rest)

    @property
    def summary(self):
        """Dict of ints: tokens, and the label as a number.

        `tokens` are those of the first sequence, `prompt` those of its
        prompt, and `second` those of the second completion. -1 stands for
        what there is not.
        """
        first, *rest = map(len, self.completions)
        return {
            "tokens": len(self.prompt) + first,
            "prompt": len(self.prompt),
            "second": rest[0] if rest else -1,
            "label": -1 if self.label is None else int(self.label),
        }


class PreferenceEncoder:
    """Encodes rows of preferences; see `prepare_preferences`."""

    def __init__(self, settings, labelled, share_prompt):
        self.settings = settings
        self.labelled, self.share_prompt = labelled, share_prompt
        # Rows may be of several types.
        self.firsts = []

    @property
    def key(self):
        return {"labelled": self.labelled, "share_prompt": self.share_prompt}

    def __call__(self, index, row, where):
        needed = row_columns(row, self.labelled, where)
        label = label_of(row, where) if self.labelled else None
        margin = 0.0 if self.labelled else margin_of(row, where)
        pictures = encoding.read_images(row, self.settings, where)
        if needed == PAIRS[1]:
            sides = [columns.int_array(row[c], where, c) for c in needed]
            sides = self._behind_common(sides, where, needed)
        elif needed == PAIRS[3]:
            sides = self._implicit(row, where, pictures)
        else:
            row = without_prompt(row, needed)
            sides = [
                self._side(row, c, where, pictures)
                for c in completion_columns(needed)
            ]

        def build(sides):
            images = encoding.place_images(
                pictures, sides[0][0], self.settings, where
            )
            return _preference(sides, index, label, margin, images, where)

        return EncodedRow(
            sides,
            build,
            read=read_columns(needed, self.labelled),
            num_image_tokens=encoding.num_image_tokens(pictures),
        )

    def _encode(self, row, kind, where, pictures):
        return encoding.encode_row(
            row, kind, self.settings, "auto", where, pictures
        )

    def _side(self, row, side, where, pictures):
        """Encodes the prompt with one of its completions."""
        if side.endswith("_ids"):
            ids, first = encoding.join_ids(row, "prompt_ids", side, where)
            return ids, encoding.mask_after(first, len(ids))
        try:
            return self._encode(
                {**row, "completion": row[side]},
                "prompt_completion",
                where,
                pictures,
            )
        except ValueError as error:
            text = str(error).replace("'completion'", f"'{side}'")
            text = text.replace("completion=", f"{side}=")
            raise ValueError(text) from error

    def _implicit(self, row, where, pictures):
        """Encodes a row whose prompt is the common beginning of its sides."""
        given = [row["chosen"], row["rejected"]]
        if all(isinstance(side, str) for side in given):
            if self.share_prompt and not os.path.commonprefix(given):
                raise _not_shared(where, PAIRS[3], given)
            sides = [
                self._encode(row | {"text": side}, "text", where, pictures)[0]
                for side in given
            ]
            return self._behind_common(sides, where, PAIRS[3])
        for side, value in zip(PAIRS[3], given):
            if not isinstance(value, (list, tuple)) or not value:
                raise columns.wrong_type(
                    where, side, "a string or a list of messages", value
                )
        most = min(map(len, given)) - 1
        shared = 0
        while shared < most and given[0][shared] == given[1][shared]:
            shared += 1
        if self.share_prompt and not shared:
            raise _not_shared(where, PAIRS[3], given)
        prompt = list(given[0][:shared])
        row = {**row, "prompt": prompt}
        for side, value in zip(PAIRS[3], given):
            row[side] = list(value[shared:])
        return [self._side(row, side, where, pictures) for side in PAIRS[3]]

    def _behind_common(self, sides, where, names):
        """Masks the tokens that both sides begin with."""
        shared = _common(*sides)
        if self.share_prompt and not shared:
            raise _not_shared(where, names, [x.tolist() for x in sides])
        # Of a side that is the other's beginning one token is left over.
        shared = max(min(shared, *(len(ids) - 1 for ids in sides)), 0)
        return [(x, encoding.mask_after(shared, len(x))) for x in sides]


def _preference(sides, index, label, margin, images, where):
    if len(sides) == 2 and np.array_equal(sides[0][0], sides[1][0]):
        raise DroppedRow(EQUAL)
    split = _prompt_length(sides)
    if images is not None and images.places.max() >= split:
        raise ValueError(
            "The images of a preference must be in its prompt, which its "
            f"sides share. Received: {where} with an image at token "
            f"{images.places.max()}, a prompt of {split} tokens."
        )
    return Preference(
        prompt=sides[0][0][:split],
        completions=[ids[split:] for ids, _ in sides],
        masks=[mask[split:] for _, mask in sides],
        row=index,
        label=label,
        margin=margin,
        images=images,
    )


def _common(first, second):
    """Counts the equal tokens at the beginning of two sequences."""
    most = min(len(first), len(second))
    differ = np.flatnonzero(first[:most] != second[:most])
    return int(differ[0]) if differ.size else most


def _prompt_length(sides):
    """Counts the equal tokens without loss that all sides begin with."""
    free = [
        int(np.argmax(mask != 0)) if mask.any() else len(mask)
        for _, mask in sides
    ]
    if len(sides) == 1:
        return free[0]
    return min(*free, _common(sides[0][0], sides[1][0]))


def _not_shared(where, names, values):
    shown = ", ".join(f"{n}={v!r:.80}" for n, v in zip(names, values))
    return ValueError(
        f"The columns '{names[0]}' and '{names[1]}' must begin with the same "
        f"prompt. Received: {where}, {shown}. Give the prompt as a column of "
        "its own ('prompt' or 'prompt_ids')."
    )
