"""The conversation of one player of an episode."""

import dataclasses
import functools
import inspect
import math
import numbers

import numpy as np

from keras_posttrain.episodes import run_tool
from keras_posttrain.episodes.trajectory import Segment


class Ended(BaseException):
    """Ends the episode of a player that has reached a limit.

    No `Exception`, which an episode might catch.
    """


@dataclasses.dataclass(frozen=True)
class Reply:
    """A turn that was sampled.

    Attributes:
        text: string, without the token that ends the turn and without the
            calls of tools.
        message: dict, the turn as a message.
        tool_calls: list of dicts with `"name"` and `"arguments"`.
        unreadable: list of strings, what is wrong with calls that cannot be
            read.
        ended: string or `None`: the limit after which no turn can follow:
            `"length"` (of the turn), `"turns"`, `"tokens"` or `"context"`.

    Example:

    ```python
    async def episode(chat, question, answer):
        reply = await chat(question)
        if reply.ended == "length":
            return 0.0
        return float(answer in reply.text)

    task.compile(episode=episode, num_generations=4)
    ```
    """

    text: str
    message: dict
    tool_calls: list = dataclasses.field(default_factory=list)
    unreadable: list = dataclasses.field(default_factory=list)
    ended: str | None = None


@dataclasses.dataclass(eq=False)
class Draft:
    """A segment that grows."""

    token_ids: list = dataclasses.field(default_factory=list)
    mask: list = dataclasses.field(default_factory=list)
    logps: list = dataclasses.field(default_factory=list)
    versions: list = dataclasses.field(default_factory=list)
    turns: list = dataclasses.field(default_factory=list)
    ends: list = dataclasses.field(default_factory=list)

    def add_said(self, token_ids):
        count = len(token_ids)
        self.token_ids += token_ids
        self.mask += [0.0] * count
        self.logps += [0.0] * count
        self.versions += [-1] * count
        self.turns += [None] * count

    def add_sampled(self, completion, turn):
        count = len(completion.token_ids)
        logps = completion.per_token_logps
        self.token_ids += completion.token_ids
        self.mask += [1.0] * count
        self.logps += [math.nan] * count if logps is None else logps.tolist()
        self.versions += completion.token_versions.tolist()
        self.turns += [turn] * count

    def until(self, end):
        """Returns a draft of the tokens up to an `End`, without loss."""
        copy = Draft()
        copy.add_said(self.token_ids[: end.tokens])
        copy.ends = [x for x in self.ends if x.tokens <= end.tokens]
        return copy

    def segment(self, numbers):
        """Returns the `Segment`; `numbers` are those of turns by `Turn`.

        What was said after the last sampled token had no room for an answer:
        it is left out, and may be longer than the context.
        """
        stop = len(self.mask) - self.mask[::-1].index(1.0)
        return Segment(
            np.array(self.token_ids[:stop], np.int32),
            np.array(self.mask[:stop], np.float32),
            np.array(self.logps[:stop], np.float32),
            np.array(self.versions[:stop], np.int32),
            np.array(
                [numbers.get(t, -1) for t in self.turns[:stop]], np.int32
            ),
        )


@dataclasses.dataclass(eq=False)
class Turn:
    """A sampled turn, and what it earned."""

    reward: float = 0.0


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a sampled turn.

    Attributes:
        tokens: int, the tokens of the segment up to it.
        messages: int, the messages of the conversation up to it.
        calls: list of dicts, the turn's calls of tools, or `None`.
        completion: `Completion` that was sampled.
    """

    tokens: int
    messages: int
    calls: list | None
    completion: object = None


@dataclasses.dataclass
class Used:
    """What all branches of a player have used of its limits."""

    turns: int = 0
    tokens: int = 0
    is_rewarded: bool = False
    reason: str | None = None
    counts: dict = dataclasses.field(default_factory=dict)


class Chat:
    """A conversation with the policy, as an episode has it.

    What is said is encoded, what is sampled stays as it is: tokens are never
    decoded and encoded again. Made by a run, one for each player.

    Attributes:
        player: string, the name of the parameter that the episode has it in.
        messages: list of dicts, the conversation of the current segment.

    Example:

    ```python
    async def episode(chat, question):
        reply = await chat(question)
        reply = await chat("Are you sure?")
        return float("yes" in reply.text)
    ```
    """

    def __init__(self, player, seat, used=None, path=()):
        self.player = player
        self.messages, self._earlier = [], []
        self._seat, self._path = seat, path
        self._used = Used() if used is None else used
        self._drafts, self._said, self._turns = [Draft()], [], []
        self._forks = []
        self._calls, self._ended = None, None
        self._is_sampling = False

    @property
    def token_ids(self):
        """Tuple of ints, the tokens of the current segment."""
        return tuple(self._drafts[-1].token_ids)

    @property
    def limits(self):
        """The `Limits`."""
        return self._seat.limits

    async def __call__(self, said=None, *, tools=None, max_tokens=None):
        """Says something and samples a turn.

        Args:
            said: string, which the user says; a message or a list of
                messages; or `None` where `say` has said something.
            tools: list of dicts, the JSON schemas of tools that the model may
                call, or `None`.
            max_tokens: int, the most tokens of the turn, at most those of
                `compile(max_completion_length=...)`.

        Returns:
            A `Reply`.
        """
        if said is not None:
            self.say(said)
        return await self.sample(tools, max_tokens)

    def say(self, said):
        """Adds messages without sampling: a string, a message or a list."""
        said = as_messages(said)
        self._said += said
        self.messages += said

    def reward(self, value):
        """Rewards the turn that was sampled last; rewards of a turn add up.

        Args:
            value: finite number.
        """
        is_number = isinstance(value, (numbers.Real, np.generic))
        if not is_number or not math.isfinite(value):
            raise ValueError(
                "A reward must be a finite number. "
                f"Received: reward={value!r} of player {self.player!r}"
            )
        if not self._turns:
            raise ValueError(
                "A reward is that of the turn sampled last. Received: "
                f"reward={value!r} before a turn of player {self.player!r}"
            )
        self._turns[-1].reward += float(value)
        self._used.is_rewarded = True

    def restart(self, messages=()):
        """Begins a new context, such as a summary of what came before.

        What came before stays trained.

        Args:
            messages: string, message or list of messages, the new
                conversation.
        """
        self._drafts.append(Draft())
        self._earlier += self.messages
        self.messages, self._said = [], []
        self._calls = None
        if self._ended == "context":
            self._ended = None
        self.say(messages)

    def fork(self, turns=None):
        """Returns a second chat that continues these tokens.

        Both may continue, also at once. Their turns belong to one trajectory
        and share its limits.

        Args:
            turns: int, how many turns of the current segment the second chat
                begins with, or `None`: all, and what was said since. With 0
                it begins a conversation of its own.
        """
        return self.fork_at(turns, -1 - len(self._forks))

    def count(self, name, value=1):
        """Adds to a number, whose mean over episodes is a metric.

        Args:
            name: string, the name of the metric, such as `"tools/calls"`.
            value: number; 0 reports a metric that did not occur.
        """
        counts = self._used.counts
        counts[name] = counts.get(name, 0) + value

    # For runs and `Endpoint`

    async def sample(self, tools=None, max_tokens=None, number=None):
        """Samples a turn that answers what was said; see `__call__`.

        `number` is a tuple of ints that tells its random numbers from those
        of other turns; by default its place in the conversation.
        """
        if self._is_sampling:
            raise ValueError(
                "A chat samples one turn at a time. Received: another turn "
                f"of player {self.player!r} before the last one was sampled. "
                "Await it first, or use `chat.fork()`."
            )
        self.check_ended()
        self._encode(tools)
        draft, seat = self._drafts[-1], self._seat
        most = self._room(max_tokens)
        if number is None:
            number = *self._path, len(self._turns)
        # Branches that sample at once share the limit.
        self._used.turns += 1
        self._is_sampling = True
        try:
            completion = await seat.sample(draft.token_ids, most, number)
        finally:
            self._is_sampling = False
        turn = Turn()
        self._turns.append(turn)
        draft.add_sampled(completion, turn)
        self._used.tokens += len(completion.token_ids)
        reply = seat.read(completion.token_ids, tools)
        self.messages.append(reply.message)
        self._calls = reply.tool_calls
        tokens, messages = len(draft.token_ids), len(self.messages)
        draft.ends.append(End(tokens, messages, reply.tool_calls, completion))
        self._ended = self._limit(completion, max_tokens)
        return dataclasses.replace(reply, ended=self._ended)

    @property
    def used(self):
        """The `Used` of all branches."""
        return self._used

    @property
    def num_turns(self):
        """Int, sampled turns of all branches."""
        return self._used.turns

    @property
    def was_cut(self):
        """Bool, whether the last turn reached the most tokens of a turn."""
        return any(chat._ended == "length" for chat in self._branches())

    @property
    def is_rewarded(self):
        """Bool, whether `reward` was called."""
        return self._used.is_rewarded

    @property
    def ends(self):
        """List of the `End`s of the turns of the current segment."""
        return self._drafts[-1].ends

    @property
    def temperature(self):
        """Float, at which turns are sampled."""
        return self._seat.table.temperature

    def fork_at(self, turns, number):
        """Returns a fork; see `fork`.

        `number` is a negative int, by which forks are ordered, last first.
        """
        ends, draft = self.ends, self._drafts[-1]
        if turns is not None and not 0 <= turns <= len(ends):
            raise ValueError(
                "`turns` must be a number of turns of the current segment, "
                f"0 to {len(ends)}, or None. Received: turns={turns!r}"
            )
        path = *self._path, len(self._turns), number
        other = Chat(self.player, self._seat, self._used, path)
        self._forks.append(other)
        if turns == 0:
            return other
        # These tokens are trained in this chat.
        if turns is None:
            end = End(len(draft.token_ids), len(self.messages), self._calls)
            other._said, other._ended = [*self._said], self._ended
        else:
            end = ends[turns - 1]
        other._drafts = [draft.until(end)]
        other.messages = self.messages[: end.messages]
        other._calls = end.calls
        return other

    def segments(self):
        """Returns the list of `Segment`s, and that of the turns' rewards."""
        turns = [turn for chat in self._branches() for turn in chat._turns]
        numbers = {turn: i for i, turn in enumerate(turns)}
        found = [
            draft.segment(numbers)
            for chat in self._branches()
            for draft in chat._drafts
            if any(draft.mask)
        ]
        return found, [turn.reward for turn in turns]

    def all_messages(self):
        """Returns the messages of all segments, a list of dicts."""
        return [
            message
            for chat in self._branches()
            for message in (*chat._earlier, *chat.messages)
        ]

    def release(self):
        """Says that none of the conversations continues."""
        for chat in self._branches():
            for draft in chat._drafts:
                self._seat.release(draft.token_ids)

    def _branches(self):
        yield self
        # By the turn that they follow, then the last number first.
        key = lambda fork: (fork._path[-2], -fork._path[-1])  # noqa: E731
        for fork in sorted(self._forks, key=key):
            yield from fork._branches()

    # Tokens

    def _encode(self, tools):
        """Adds the tokens of what was said to the segment."""
        if not self._said:
            raise ValueError(
                "A turn answers what was said. Received: nothing was said to "
                f"player {self.player!r}. Pass a string or messages, or call "
                "`say` before."
            )
        seat, draft = self._seat, self._drafts[-1]
        if not draft.token_ids:
            new = seat.bridges.opening(self._said, tools)
        else:
            if seat.bridges.end_of_turn_id is not None:
                end = seat.bridges.end_before(self._said, tools, self._calls)
                if draft.token_ids[-1] != end:
                    # A turn that was cut, or ended with another token.
                    draft.add_said([end])
            new = self._between(tools)
        if new is None:
            # The template shows the past in another way.
            self._drafts.append(Draft())
            draft = self._drafts[-1]
            new = seat.bridges.opening(self.messages, tools)
        draft.add_said(new)
        self._said = []

    def _between(self, tools):
        seat = self._seat
        if seat.history == "append":
            return seat.bridges.between(self._said, tools, self._calls)
        # The text of tokens hangs on what is before them.
        text = seat.decode(self._drafts[-1].token_ids)
        return seat.bridges.continued_ids(text, self.messages, tools)

    # Limits

    def check_ended(self):
        """Ends the episode if no turn can follow the last one."""
        if self._ended is not None:
            self._used.reason = self._ended
            raise Ended(self._ended)

    def _context(self):
        """Returns the tokens that the segment has room for."""
        return self._seat.context - len(self._drafts[-1].token_ids)

    def _room(self, max_tokens):
        """Returns the most tokens of the next turn; ends without room."""
        limits, most = self.limits, self._seat.max_tokens
        if max_tokens is not None:
            most = min(most, max_tokens)
        left = {"context": self._context()}
        if limits.turns is not None:
            left["turns"] = limits.turns - self._used.turns
        if limits.tokens is not None:
            left["tokens"] = limits.tokens - self._used.tokens
        for reason, rest in left.items():
            if rest < 1:
                self._ended = reason
                self.check_ended()
        left.pop("turns", None)
        return min(most, *left.values())

    def _limit(self, completion, max_tokens):
        """Returns the limit that a turn has reached, or `None`."""
        limits, used = self.limits, self._used
        if limits.tokens is not None and used.tokens >= limits.tokens:
            return "tokens"
        # A bridge takes more.
        if self._context() < 1:
            return "context"
        if completion.finish_reason == "length" and max_tokens is None:
            if limits.after_cut == "end":
                return "length"
        if limits.turns is not None and used.turns >= limits.turns:
            return "turns"
        return None


class FunctionChat:
    """A player that a function plays, with the methods of `Chat`.

    Args:
        player: string.
        function: function of messages to a text, sync or async. If it has an
            argument `seed`, it gets an int that no other turn has.
        seeds: ints that no other player or episode has.
    """

    num_turns, was_cut = 0, False

    def __init__(self, player, function, seeds):
        self.player, self.messages = player, []
        self._function, self._seeds, self._forks = function, (*seeds,), 0
        self._takes_seed = _takes_seed(function)

    async def __call__(self, said=None, *, tools=None, max_tokens=None):
        if said is not None:
            self.say(said)
        function = functools.partial(self._function, [*self.messages])
        if self._takes_seed:
            words = np.random.SeedSequence([*self._seeds, self.num_turns])
            seed = int(words.generate_state(1)[0]) >> 1
            function = functools.partial(function, seed=seed)
        text = await run_tool.run(function)
        message = {"role": "assistant", "content": str(text)}
        self.messages.append(message)
        self.num_turns += 1
        return Reply(str(text), message)

    def say(self, said):
        self.messages += as_messages(said)

    def reward(self, value):
        """Has no effect: an opponent is not trained."""

    def restart(self, messages=()):
        self.messages = as_messages(messages)

    def fork(self):
        self._forks += 1
        seeds = *self._seeds, self.num_turns, self._forks
        other = FunctionChat(self.player, self._function, seeds)
        other.messages = [*self.messages]
        return other

    def count(self, name, value=1):
        """Has no effect."""

    def check_ended(self):
        """Has no effect: an opponent has no limits."""

    def release(self):
        """Has no effect."""


def _takes_seed(function):
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def as_messages(said):
    """Returns messages as a list: a string is the user's."""
    if isinstance(said, str):
        said = {"role": "user", "content": said}
    return [said] if isinstance(said, dict) else list(said)
