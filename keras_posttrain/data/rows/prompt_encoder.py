"""Encodes rows with a prompt to sample from."""

import dataclasses

import numpy as np

from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.template import TemplateFault
from keras_posttrain.data.rows import columns, encoding
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.data.rows.images import with_parts
from keras_posttrain.data.rows.preparation import EncodedRow

SIDES = ("prompt", "prompt_ids")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt to sample from.

    Args:
        token_ids: tuple of ints.
        prompt: the prompt that reward functions get: the row's string or
            messages, or of a tokenised row its text (its ids, where there is
            no tokenizer).
        columns: dict, the other columns of the row.
        row: int, index of the dataset row.
        images: `Images` of the prompt, or `None`.
    """

    token_ids: tuple
    prompt: object
    columns: dict
    row: int
    images: object = None

    @property
    def hashed(self):
        """The bytes that identify it in a hash."""
        ids = np.array(self.token_ids, np.int32).tobytes()
        if not self.token_ids:
            # A row without a prompt.
            ids = repr(self.columns).encode(errors="replace")
        images = b"" if self.images is None else self.images.digest
        return ids + b"|" + images

    @property
    def summary(self):
        """Dict of ints, as of an `Example`."""
        return {"tokens": len(self.token_ids)}

    @property
    def stored(self):
        """Its tokens as an `Example`; the rest is in its row."""
        ids = np.array(self.token_ids, np.int32)
        return Example(ids, np.zeros(0, np.float32), self.row, self.images)


class ColumnsEncoder:
    """Checks rows that need no prompt; see `prepare_columns`."""

    # There is nothing to encode.
    key = None

    def __init__(self):
        self.first = {}

    @property
    def firsts(self):
        return [self.first]

    def __call__(self, index, row, where):
        columns.check_dict(row, where)
        _check_columns(index, row, where, self.first)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)

        def build(sides):
            return Prompt((), row.get("prompt"), dict(row), index)

        return EncodedRow([nothing], build)


class PromptEncoder:
    """Encodes the prompts of rows; see `prepare_prompts`."""

    key = {}

    def __init__(self, settings):
        self.settings, self.first = settings, {}

    @property
    def firsts(self):
        return [self.first]

    def __call__(self, index, row, where):
        side = _side(row, where)
        _check_columns(index, row, where, self.first)
        settings = self.settings
        pictures = encoding.read_images(row, settings, where)
        ids = _encode(row, side, settings, where, pictures)

        def build(sides):
            [(ids, _)] = sides
            images = encoding.place_images(pictures, ids, settings, where)
            if settings.images is not None:
                settings.images.check(ids, images, where)
            return _prompt(row, side, settings.tokenizer, index, ids, images)

        # A prompt carries no loss.
        return EncodedRow(
            [(ids, np.zeros(len(ids), np.float32))],
            build,
            num_image_tokens=encoding.num_image_tokens(pictures),
        )

    def restore(self, example, row):
        """Makes the `Prompt` of stored tokens and of its row."""
        return _prompt(
            row,
            _side(row, "row"),
            self.settings.tokenizer,
            example.row,
            example.token_ids,
            example.images,
        )


def _side(row, where):
    columns.check_dict(row, where)
    given = [side for side in SIDES if row.get(side) is not None]
    if len(given) != 1:
        raise ValueError(
            "A row must have either the column 'prompt', a string or a list "
            "of messages, or 'prompt_ids', a list of ints. Received: "
            f"{where} with the columns {list(map(str, row))}."
        )
    return given[0]


def _check_columns(index, row, where, known):
    first_index, first = known.setdefault(None, (index, list(row)))
    if row.keys() != set(first):
        odd = sorted(set(row) ^ set(first))[0]
        has = "has" if odd in row else "lacks"
        raise ValueError(
            "All rows must have the same columns. Received: "
            f"{where} {has} the column {odd!r}, unlike row {first_index}. "
            "Give every row the column; its value may be None."
        )


def _encode(row, side, settings, where, pictures):
    value, tokenizer = row[side], settings.tokenizer
    count = 0 if pictures is None else len(pictures)
    if side == "prompt_ids":
        ids = columns.int_array(value, where, side)
    elif tokenizer is None:
        raise ValueError(
            "Prompts of text need a tokenizer. Received: tokenizer=None, "
            f"{where} has 'prompt'. Pass rows with 'prompt_ids', or a model "
            "with a tokenizer."
        )
    elif isinstance(value, str):
        encoding.refuse_tools(row, where)
        encoding.refuse_images_of_text(count, where)
        ids, _ = encoding.encode_opened(tokenizer, value)
    elif isinstance(value, (list, tuple)):
        try:
            value = with_parts(value, count, where)
            kwargs = dict(settings.chat_template_kwargs or {})
            if count:
                texts = settings.images.texts(tokenizer, pictures)
                kwargs["image_texts"] = texts
            ids = chat.render_ids(
                tokenizer,
                value,
                add_generation_prompt=True,
                tools=encoding.tools_of(row),
                **kwargs,
            )
        except TemplateFault:
            raise
        except ValueError as error:
            raise ValueError(f"In {where}: {error}") from error
    else:
        raise columns.wrong_type(
            where, side, "a string or a list of messages", value
        )
    ids = np.asarray(ids, np.int64)
    if not len(ids):
        raise ValueError(
            "A prompt must have at least one token. Received: "
            f"{where} with none."
        )
    return ids


def _prompt(row, side, tokenizer, index, ids, images):
    ids = tuple(ids.tolist())
    shown = row[side]
    if side == "prompt_ids":
        shown = list(ids)
        if tokenizer is not None:
            shown = tokenizer.decode(list(ids), skip_special_tokens=False)
    others = {k: v for k, v in row.items() if k not in SIDES}
    return Prompt(ids, shown, others, index, images)
