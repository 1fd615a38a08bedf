"""The policy as a player of episodes: turns by an engine's session."""

import asyncio
import dataclasses
import functools

import numpy as np

from keras_posttrain.episodes.turn_reader import TurnReader
from keras_posttrain.rollout.request import Request


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What the chats of all episodes of a run have in common.

    Attributes:
        bridges: `Bridges` of the tokenizer.
        tokenizer: `Tokenizer`.
        limits: `Limits`.
        history: as of `Episode`.
        context: int, the most tokens of a segment.
        max_tokens: int, the most tokens of a turn.
        temperature: float.
        stop_token_ids: tuple of ints, which end a turn.
        refuses_long: bool, whether an episode whose first turn has no room
            in `context` is an error.
    """

    bridges: object
    tokenizer: object
    limits: object
    history: str
    context: int
    max_tokens: int
    temperature: float
    stop_token_ids: tuple
    refuses_long: bool = True

    @functools.cached_property
    def reader(self):
        """The `TurnReader`."""
        return TurnReader(self.tokenizer, self.bridges.kwargs)

    def seat(self, session, seeds):
        """Returns the place of one player of one episode.

        `seeds` are ints that no other player or episode has.
        """
        return Seat(self, session, tuple(seeds))


@dataclasses.dataclass(frozen=True, eq=False)
class Seat:
    """What a `Chat` needs of a run."""

    table: Table
    session: object
    seeds: tuple

    @property
    def bridges(self):
        return self.table.bridges

    @property
    def limits(self):
        return self.table.limits

    @property
    def history(self):
        return self.table.history

    @property
    def context(self):
        return self.table.context

    @property
    def max_tokens(self):
        return self.table.max_tokens

    async def sample(self, token_ids, max_tokens, number):
        """Samples a turn; `number` is its place among those of the player."""
        table = self.table
        # Negative numbers name branches.
        words = [x % 2**32 for x in (*self.seeds, *number)]
        seed = int(np.random.SeedSequence(words).generate_state(1)[0]) >> 1
        request = Request(
            tuple(token_ids),
            max_tokens=max_tokens,
            temperature=table.temperature,
            stop_token_ids=table.stop_token_ids,
            seed=seed,
        )
        future = self.session.submit(request)
        [completion] = await asyncio.wrap_future(future)
        return completion

    def release(self, token_ids):
        self.session.release(token_ids)

    def decode(self, token_ids):
        return self.table.tokenizer.decode(
            token_ids, skip_special_tokens=False
        )

    def read(self, token_ids, tools):
        """Returns the `Reply` of a sampled turn."""
        return self.table.reader.read(token_ids, tools)
