"""Rows with a prompt to sample from, and the order of prompts."""

import functools

from keras_posttrain.data import order
from keras_posttrain.data.rows.examples import (
    DataReport,
    digest_of,
    summary_of,
)
from keras_posttrain.data.rows.preparation import Messages, Preparation
from keras_posttrain.data.rows.prepare import prepare_rows
from keras_posttrain.data.rows.prompt_encoder import (
    ColumnsEncoder,
    PromptEncoder,
)


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
        PromptEncoder(settings),
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
        ColumnsEncoder(),
        settings,
        messages,
        PromptReport(settings.name),
        converts=False,
    )
    return prepare_rows(dataset, preparation)


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
            "tokens": digest_of(prompts),
        }

    @property
    def num_prompts(self):
        """Int, prompts of an epoch."""
        return len(self.prompts)

    @functools.cached_property
    def prompt_lengths(self):
        """Ints, the fewest and the most tokens of a prompt."""
        lengths = summary_of(self.prompts)["tokens"]
        return int(lengths.min()), int(lengths.max())

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
