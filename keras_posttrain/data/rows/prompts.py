"""Rows with a prompt: their tokens, their columns, and their order."""

import dataclasses
import hashlib

import grain
import numpy as np

from keras_posttrain.data.chat import chat
from keras_posttrain.data.rows import columns, datasets
from keras_posttrain.data.rows.examples import (
    TOO_LONG,
    TRUNCATIONS,
    DataReport,
)

SIDES = ("prompt", "prompt_ids")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt to sample from.

    Args:
        token_ids: tuple of ints.
        prompt: what rewards are shown: the row's string or messages, or of a
            tokenised row its text (its ids, where there is no tokenizer).
        columns: dict, the other columns of the row.
        row: int, index of the dataset row.
    """

    token_ids: tuple
    prompt: object
    columns: dict
    row: int


class PromptReport(DataReport):
    """What became of the rows of a dataset of prompts."""

    def __str__(self):
        reasons = ", ".join(f"{n:,} {why}" for why, n in self.dropped.items())
        dropped = sum(self.dropped.values())
        return (
            f"{self.name}: {self.rows:,} prompts, {self.kept:,} kept, "
            f"{dropped:,} dropped"
            + (f" ({reasons})" if reasons else "")
            + f", {self.cut:,} cut; {self.tokens:,} tokens; longest "
            f"{self.longest:,} tokens"
        )


def prepare_prompts(
    dataset,
    tokenizer,
    *,
    max_prompt_length,
    limit,
    truncation="error",
    vocabulary_size,
    chat_template_kwargs=None,
    name="dataset",
):
    """Tokenizes and checks the rows that completions are sampled for.

    A row is `{"prompt"}`, a string or a list of messages, or
    `{"prompt_ids"}`, taken as it is. All other columns are kept for reward
    functions.

    Args:
        dataset: a list of dicts, a `datasets.Dataset`, a Grain `MapDataset`,
            or a path to `.jsonl`, `.json` or `.parquet`.
        tokenizer: a `Tokenizer`; `None` will do for tokenised rows.
        max_prompt_length: int, the most tokens of a prompt.
        limit: string, where that number comes from, for errors.
        truncation: what becomes of longer prompts: `"error"`, `"drop"`, or
            `"cut"`, which keeps their ends.
        vocabulary_size: int, how many token ids the model has.
        chat_template_kwargs: dict of further variables for the chat template,
            or `None`.
        name: string, what to call the dataset in errors and the report.

    Returns:
        Tuple `(prompts, report)`: a list of `Prompt`s and a `DataReport`.

    Raises:
        ValueError: a row cannot be used; the message names it.

    Example:

    ```python
    prompts, report = prepare_prompts(
        [{"prompt_ids": [5, 6], "answer": "7"}],
        None,
        max_prompt_length=8,
        limit="sequence_length=8",
        vocabulary_size=10,
    )
    prompts[0].columns  # {"answer": "7"}
    ```
    """
    if truncation not in TRUNCATIONS:
        raise ValueError(
            f"`truncation` must be one of {TRUNCATIONS}. Received: "
            f"{truncation=}."
        )
    if datasets.is_stream(dataset):
        raise ValueError(
            "Prompts must be rows with random access, so that a run can go on "
            f"in their middle. Received: `{name}`, a Grain `IterDataset`. Use "
            "a Grain `MapDataset`, a list of dicts or a file."
        )
    rows = datasets.read_rows(dataset, name)
    report, prompts, first = PromptReport(name), [], None
    for index in range(len(rows)):
        row = rows[index]
        if row is None:
            continue
        where = f"row {index} of `{name}`"
        side = _side(row, where)
        first = (index, row) if first is None else first
        _check_columns(row, where, *first)
        ids = _encode(row, side, tokenizer, chat_template_kwargs or {}, where)
        columns.check_token_ids(ids, vocabulary_size, where)
        report.rows += 1
        report.longest = max(report.longest, len(ids))
        if len(ids) > max_prompt_length:
            if truncation == "error":
                raise ValueError(
                    f"A prompt must have at most {max_prompt_length} tokens, "
                    f"{limit}. Received: {where} with {len(ids)} tokens. "
                    "Lower `max_completion_length`, use a larger "
                    "`sequence_length` where the model allows it, or "
                    "truncation='drop' to leave out such rows, or 'cut' to "
                    "keep their ends."
                )
            if truncation == "drop":
                report.dropped[TOO_LONG] += 1
                continue
            ids = ids[-max_prompt_length:]
            report.cut += 1
        report.kept += 1
        report.tokens += len(ids)
        prompts.append(_prompt(row, side, ids, tokenizer, index))
    if not prompts:
        raise ValueError(
            f"No row of `{name}` is left to sample from. Received: {report}."
        )
    return prompts, report


def _side(row, where):
    if not isinstance(row, dict):
        raise ValueError(
            "A row must be a dict of columns. Received: "
            f"{where} is {row!r:.200} of type {type(row).__name__}."
        )
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


def _encode(row, side, tokenizer, template_kwargs, where):
    value = row[side]
    if side == "prompt_ids":
        ids = columns.int_array(value, where, side)
    elif tokenizer is None:
        raise ValueError(
            "Prompts of text need a tokenizer. Received: tokenizer=None, "
            f"{where} has 'prompt'. Pass rows with 'prompt_ids', or a model "
            "with a tokenizer."
        )
    elif isinstance(value, str):
        bos = tokenizer.special_tokens.get("bos_token")
        opened = bool(bos) and value.startswith(bos)
        ids = tokenizer.encode(value, add_special_tokens=not opened)
    elif isinstance(value, (list, tuple)):
        try:
            ids = chat.render_ids(
                tokenizer,
                value,
                add_generation_prompt=True,
                tools=row.get("tools"),
                **template_kwargs,
            )
        except ValueError as error:
            raise ValueError(f"In {where}: {error}") from error
    else:
        raise columns.wrong_type(
            where, side, "a string or a list of messages", value
        )
    ids = np.asarray(ids, np.int64)
    if not len(ids):
        raise ValueError(
            "A prompt must have at least one token to go on from. Received: "
            f"{where} with none."
        )
    return ids


def _prompt(row, side, ids, tokenizer, index):
    ids = tuple(ids.tolist())
    shown = row[side]
    if side == "prompt_ids":
        shown = list(ids)
        if tokenizer is not None:
            shown = tokenizer.decode(list(ids), skip_special_tokens=False)
    others = {k: v for k, v in row.items() if k not in SIDES}
    return Prompt(ids, shown, others, index)


class PromptOrder:
    """The prompts of each epoch in their order, from a place on.

    Args:
        prompts: list of `Prompt`s.
        batch_size: int, prompts of a rollout.
        shuffle: bool; the order is drawn anew for every epoch.
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
    def num_rollouts(self):
        """Rollouts of an epoch, where none is refilled."""
        return -(-len(self.prompts) // self.batch_size)

    @property
    def left(self):
        """Prompts of the epoch that have not been used."""
        return len(self.prompts) - self.used

    def take(self, count):
        """The next prompts of the epoch; fewer or none at its end."""
        order = grain.MapDataset.range(len(self.prompts))
        if self.shuffle:
            key = np.random.SeedSequence([self.seed % 2**32, self.epoch + 1])
            order = order.shuffle(seed=int(key.generate_state(1)[0]))
        last = min(self.taken + count, len(self.prompts))
        places = range(self.taken, last)
        self.taken = last
        return [self.prompts[int(order[i])] for i in places]

    def use(self, taken):
        """Says that the first `taken` of the epoch have been trained on.

        They may be fewer than were taken: `state` is the place behind them.
        """
        self.used = taken

    def next_epoch(self):
        self.epoch += 1
        self.taken = self.used = 0

    def state(self):
        """The place as JSON can hold it."""
        # At an epoch's end it is the beginning of the next one.
        over = self.used == len(self.prompts)
        place = {
            "epoch": self.epoch + over,
            "taken": 0 if over else self.used,
        }
        return {"position": place, "data": self.fingerprint}

    def set_state(self, state):
        """Goes on from a place.

        Raises:
            ValueError: the place is one in other data or settings.
        """
        ours, theirs = self.fingerprint, state["data"]
        differing = [k for k in ours if ours[k] != theirs.get(k)]
        if differing:
            there = ", ".join(f"{k}={theirs.get(k)!r}" for k in differing)
            here = ", ".join(f"{k}={ours[k]!r}" for k in differing)
            raise ValueError(
                "A position in the data can only be used with the same data "
                f"and settings. Received: a state of {there}, data of "
                f"{here}. Use the data and arguments of the run that saved "
                "it, or start a new run directory."
            )
        self.epoch = state["position"]["epoch"]
        self.taken = self.used = state["position"]["taken"]


def _hash(prompts):
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(np.array(prompt.token_ids, np.int32).tobytes())
        digest.update(b"|")
    return digest.hexdigest()
