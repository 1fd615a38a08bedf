"""Episodes: async functions of chats and of a row's columns."""

import dataclasses
import difflib
import inspect

from keras_posttrain.episodes.chat import Chat
from keras_posttrain.episodes.limits import Limits
from keras_posttrain.rewards import reward

HISTORIES = ("append", "template")
# Parameters that no column can be named after.
OWN = ("seed", "generation")
NAMED = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """An episode with its settings.

    Args:
        function: async function of one or more chats and of the row's columns
            by name. A parameter that is no column, and has no default, is a
            chat of a player of that name; so is one annotated with
            `kpt.episodes.Chat`. `seed`, an int that is the same for all
            generations of a row, and `generation`, its number, are given to
            a function that has these parameters. It returns the reward, a
            number, or with several players a dict from chat to number; `None`
            where the `rewards` of `compile` score alone.
        limits: `Limits`.
        history: `"append"`: the model sees all that was said and sampled, in
            one segment. `"template"`: it sees what the chat template shows of
            earlier turns, such as turns without thoughts; a segment ends
            where that differs.
        opponents: dict from names of players to who plays in the policy's
            place, which is not trained: `Frozen()`, an engine, or a function,
            sync or async, of messages to a text. One that moves at random
            takes an argument `seed`, an int that differs from turn to turn:
            then equal runs have equal games.
        name: string, of its reward in metrics; by default that of the
            function.

    Example:

    ```python
    async def digit(chat, answer):
        reply = await chat("Which digit do I think of?")
        return float(reply.text.strip() == answer)

    limits = kpt.episodes.Limits(turns=1)
    episode = kpt.episodes.Episode(digit, limits=limits)
    task.compile(episode=episode, num_generations=4)
    ```
    """

    function: object
    limits: Limits = dataclasses.field(default_factory=Limits)
    history: str = "append"
    opponents: dict = dataclasses.field(default_factory=dict)
    name: str | None = None

    def __post_init__(self):
        if not callable(self.function) or isinstance(self.function, type):
            raise ValueError(
                "`episode` must be an async function of a chat, or an object "
                "such as `kpt.episodes.Tools([...])`. "
                f"Received: episode={self.function!r}"
            )
        if not reward.is_async(self.function):
            raise ValueError(
                "`episode` must be an async function: it waits for turns by "
                f"`await chat(...)`. Received: {reward.name(self.function)!r}."
                " Define it with `async def`."
            )
        if not isinstance(self.limits, Limits):
            raise ValueError(
                "`limits` must be `kpt.episodes.Limits(...)`. "
                f"Received: limits={self.limits!r}"
            )
        if self.history not in HISTORIES:
            raise ValueError(
                f"`history` must be one of {HISTORIES}. "
                f"Received: history={self.history!r}"
            )
        if self.name is None:
            object.__setattr__(self, "name", reward.name(self.function))

    @classmethod
    def of(cls, episode):
        """Returns an `Episode` of one, of a ready one or of a function."""
        if isinstance(episode, cls):
            return episode
        limits = getattr(episode, "limits", None) or Limits()
        return cls(episode, limits)

    def fingerprint(self):
        """Returns the settings that must match for a run to be resumed."""
        return {
            "name": self.name,
            "limits": repr(self.limits),
            "history": self.history,
            "opponents": {k: repr(v) for k, v in self.opponents.items()},
        }

    def players(self, columns):
        """Returns the names of the players, in their order.

        Args:
            columns: names of the columns of the rows.

        Raises:
            ValueError: no parameter is left for a chat, or a column is
                missing.
        """
        if hasattr(self.function, "check_columns"):
            self.function.check_columns(columns)
        parameters = inspect.signature(self.function).parameters
        names = [p for p in parameters.values() if p.kind in NAMED]
        left = [column for column in columns if column not in parameters]
        players = []
        for p in names:
            if p.annotation in (Chat, "Chat", "kpt.episodes.Chat"):
                players.append(p.name)
            elif p.name not in (*columns, *OWN) and p.default is p.empty:
                near = difflib.get_close_matches(p.name, left, 1, cutoff=0.8)
                if near:
                    raise ValueError(
                        f"The episode {self.name!r} has the parameter "
                        f"{p.name!r}, which is no column. Received: "
                        f"columns={sorted(columns)}. Did you mean "
                        f"{near[0]!r}? If it is a player, annotate it with "
                        "`kpt.episodes.Chat`."
                    )
                players.append(p.name)
        unknown = sorted(set(self.opponents) - set(players))
        if not players or unknown:
            what = f"opponents={unknown}" if unknown else "no player"
            raise ValueError(
                "An episode is a function of a chat for each player; each "
                "parameter without a default that is no column is one. "
                f"Received: {self.name!r} with the parameters "
                f"{[p.name for p in names]}, columns={list(columns)}, {what}."
            )
        return players

    def arguments(self, chats, columns, seed, generation):
        """Returns the arguments of a call as a dict by name."""
        given = columns | {"seed": seed, "generation": generation} | chats
        parameters = inspect.signature(self.function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return given
        return {name: given[name] for name in parameters if name in given}
