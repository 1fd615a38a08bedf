"""Rows with a prompt to sample from, and the order of prompts."""

import dataclasses
import functools
import hashlib

import numpy as np

from keras_posttrain.data import order
from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.template import TemplateFault
from keras_posttrain.data.rows import columns, encoding
from keras_posttrain.data.rows.examples import DataReport
from keras_posttrain.data.rows.preparation import (
    EncodedRow,
    Messages,
    Preparation,
    prepare_rows,
)

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
    """

    token_ids: tuple
    prompt: object
    columns: dict
    row: int


class PromptReport(DataReport):
    """The numbers of the rows of a dataset of prompts."""

    def __str__(self):
        text = self.describe_rows("prompts")
        # Episodes open their conversations themselves.
        if self.tokens:
            text += (
                f"; {self.tokens:,} tokens; longest {self.longest:,} tokens"
            )
        return text + self.describe_columns()


def prepare_prompts(dataset, settings, *, max_prompt_length, limit):
    """Tokenizes and checks the rows that completions are sampled for.

    A row is `{"prompt"}`, a string or a list of messages, or
    `{"prompt_ids"}`, to which nothing is added. All other columns are kept
    for reward functions.

    Args:
        dataset: as of `prepare_sft`.
        settings: `RowSettings`. Of prompts that are too long
            `truncation="cut"` keeps the ends.
        max_prompt_length: int, the most tokens of a prompt.
        limit: string, where that number comes from, for errors.

    Returns:
        Tuple `(prompts, report)`: a list of `Prompt`s (of a stream a Grain
        `IterDataset`) and a `PromptReport`.
    """
    messages = Messages(
        too_long=(
            f"A prompt must have at most {{limit}} tokens, {limit}. Received: "
            "{where} with {length} tokens. Lower `max_completion_length`, use "
            "a larger `sequence_length` where the model allows it, or "
            "truncation='drop' to leave out such rows, or 'cut' to keep their "
            "ends."
        ),
        no_loss=None,
        none_left=(
            "No row of `{name}` is left to sample from. Received: {report}."
        ),
    )
    preparation = Preparation(
        _Encoder(settings),
        settings,
        messages,
        PromptReport(settings.name),
        limit=max_prompt_length,
        prompts=True,
    )
    return prepare_rows(dataset, preparation)


def prepare_columns(dataset, settings):
    """Checks rows that episodes are run for, which need no prompt.

    Takes and returns what `prepare_prompts` does. The columns of a `Prompt`
    are all of its row's.
    """
    messages = Messages(
        too_long="",
        no_loss=None,
        none_left="No row of `{name}` is left. Received: {report}.",
    )
    preparation = Preparation(
        _Columns(),
        settings,
        messages,
        PromptReport(settings.name),
        converts=False,
    )
    return prepare_rows(dataset, preparation)


class _Columns:
    def __init__(self):
        self.first = None

    def __call__(self, index, row, where):
        columns.check_dict(row, where)
        if self.first is None:
            self.first = (index, row)
        _check_columns(row, where, *self.first)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)

        def build(sides):
            return Prompt((), row.get("prompt"), dict(row), index)

        return EncodedRow([nothing], build)


class _Encoder:
    def __init__(self, settings):
        self.settings, self.first = settings, None

    def __call__(self, index, row, where):
        side = _side(row, where)
        if self.first is None:
            self.first = (index, row)
        _check_columns(row, where, *self.first)
        ids = _encode(row, side, self.settings, where)
        build = functools.partial(
            _prompt, row, side, self.settings.tokenizer, index
        )
        # A prompt carries no loss.
        return EncodedRow([(ids, np.zeros(len(ids), np.float32))], build)


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


def _check_columns(row, where, first_index, first):
    if row.keys() != first.keys():
        odd = sorted(set(row) ^ set(first))[0]
        has = "has" if odd in row else "lacks"
        raise ValueError(
            "All rows must have the same columns. Received: "
            f"{where} {has} the column {odd!r}, unlike row {first_index}. "
            "Give every row the column; its value may be None."
        )


def _encode(row, side, settings, where):
    value, tokenizer = row[side], settings.tokenizer
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
        ids, _ = encoding.encode_opened(tokenizer, value)
    elif isinstance(value, (list, tuple)):
        try:
            ids = chat.render_ids(
                tokenizer,
                value,
                add_generation_prompt=True,
                tools=encoding.tools_of(row),
                **(settings.chat_template_kwargs or {}),
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


def _prompt(row, side, tokenizer, index, sides):
    [(ids, _)] = sides
    ids = tuple(ids.tolist())
    shown = row[side]
    if side == "prompt_ids":
        shown = list(ids)
        if tokenizer is not None:
            shown = tokenizer.decode(list(ids), skip_special_tokens=False)
    others = {k: v for k, v in row.items() if k not in SIDES}
    return Prompt(ids, shown, others, index)


class PromptOrder:
    """The prompts of each epoch in order, from a position on.

    Args:
        prompts: list of `Prompt`s.
        batch_size: int, prompts of a rollout.
        shuffle: bool; every epoch has another order.
        seed: int, of the order.
    """

    def __init__(self, prompts, *, batch_size, shuffle=True, seed=0):
        self.prompts = prompts
        self.batch_size = batch_size
        self.shuffle, self.seed = shuffle, seed
        self.epoch = self.taken = self.used = 0
        self.fingerprint = {
            "batch_size": batch_size,
            "shuffle": bool(shuffle),
            "seed": int(seed),
            "num_prompts": len(prompts),
            "tokens": _hash(prompts),
        }

    @property
    def num_prompts(self):
        """Int, prompts of an epoch."""
        return len(self.prompts)

    @property
    def left(self):
        """Int, prompts of the epoch that have not been used."""
        return len(self.prompts) - self.used

    def take(self, count):
        """Returns the next prompts of the epoch; fewer or none at its end."""
        places = order.shuffled(
            len(self.prompts), self.shuffle, self.seed, self.epoch + 1
        )
        first = self.taken
        self.taken = min(first + count, len(self.prompts))
        return [self.prompts[int(places[i])] for i in range(first, self.taken)]

    def use(self, taken):
        """Records that the first `taken` of the epoch have been trained on.

        They may be fewer than were taken: `state` is the position after them.
        """
        self.used = taken

    def next_epoch(self):
        self.epoch += 1
        self.taken = self.used = 0

    def state(self):
        """Returns the position as a dict that JSON can store."""
        # The end of an epoch is the beginning of the next one.
        over = self.used == len(self.prompts)
        place = {
            "epoch": self.epoch + over,
            "taken": 0 if over else self.used,
        }
        return {"position": place, "data": self.fingerprint}

    def set_state(self, state):
        """Resumes from a position."""
        order.check_same(self.fingerprint, state["data"])
        self.epoch = state["position"]["epoch"]
        self.taken = self.used = state["position"]["taken"]


def _hash(prompts):
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(np.array(prompt.token_ids, np.int32).tobytes())
        if not prompt.token_ids:
            # A row without a prompt.
            digest.update(repr(prompt.columns).encode(errors="replace"))
        digest.update(b"|")
    return digest.hexdigest()
