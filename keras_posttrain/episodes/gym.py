"""Episodes from environments: classes with `reset` and `step`."""

import collections
import dataclasses
import functools
import inspect

from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.episodes.run_tool import run, within
from keras_posttrain.rewards import reward
from keras_posttrain.workers.threads import SerialThread

# The most seconds that an episode waits for `close`.
CLOSE_SECONDS = 10
# Arguments of `reset` that are no columns.
GIVEN = {"num_players": 1}


@dataclasses.dataclass(frozen=True)
class Gym:
    """An episode from an environment: any object with `reset` and `step`.

    Each episode has an environment of its own. Its methods may be async;
    others are called in one thread, which makes the environment and closes
    it. `close`, if it has one, is called at the end of every episode.

    `make` and `reset` get the columns of the row that their signatures name;
    `reset(**columns)` gets all. What the methods return is read in any of
    these shapes:

    - `reset` gives the observation, `step` gives `observation, reward, done`
      and perhaps more, as in Tunix.
    - Gymnasium: `observation, info` and `observation, reward, terminated,
      truncated, info`.
    - SkyRL-Gym: `init(prompt)` gives `messages, info`, `step` a dict of
      `observations`, `reward` and `done`.
    - OpenEnv: both give objects with `observation`, `reward` and `done`.
    - TextArena, games of one player: `get_observation` gives `player_id,
      observation`, `step` gives `done, info`, and `close` the rewards. Of a
      list of messages, those of the game are shown; use it without wrappers
      that repeat the earlier ones.

    Args:
        make: class or function that returns an environment.
        observe: function of an observation that returns a string or a list of
            messages, or `None` if they are such or TextArena's.
        act: function of the sampled text, whatever it is, that returns the
            action, or `None` if the action is the text.
        seconds: float, the time limit of a call of the environment, or
            `None`. One that takes longer raises an `EpisodeError`.

    Attributes:
        close_errors: `collections.Counter` of the exceptions of `close`, by
            the names of their types. They are not raised.

    Example:

    ```python
    class Guess:
        def reset(self, secret):
            self.secret = secret
            return "Guess a number from 1 to 9."

        def step(self, text):
            right = text.strip() == str(self.secret)
            return "No. Once more.", float(right), right

    limits = kpt.episodes.Limits(turns=3)
    task.compile(
        episode=kpt.episodes.Episode(kpt.episodes.Gym(Guess), limits),
        num_generations=8,
        max_completion_length=8,
    )
    task.fit([{"secret": 3}, {"secret": 7}])
    ```
    """

    make: object
    observe: object = None
    act: object = None
    seconds: float | None = None
    close_errors: collections.Counter = dataclasses.field(
        default_factory=collections.Counter,
        init=False,
        repr=False,
        compare=False,
    )

    def __post_init__(self):
        for name in ("make", "observe", "act"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "make"):
                raise ValueError(
                    f"`{name}` must be a class or a function. Received: "
                    f"{name}={value!r}."
                )
        # As of a function.
        object.__setattr__(self, "__name__", reward.name(self.make))

    async def __call__(self, chat, **columns):
        thread = SerialThread()

        async def call(function, *arguments, **named):
            work = functools.partial(function, *arguments, **named)
            what = f"{reward.name(function)!r} of {self.__name__}"
            return await within(run(work, thread.submit), self.seconds, what)

        try:
            made = _named(self.make, columns, rest=False)
            environment = await call(self.make, **made)
            try:
                await self._play(call, environment, chat, columns)
            finally:
                rewards = await self._close(thread, environment)
        finally:
            thread.end()
        return _final_reward(rewards) if _is_textarena(environment) else 0.0

    async def _play(self, call, environment, chat, columns):
        """Resets an environment, and takes steps until one end comes."""
        start, textarena = _start(environment), _is_textarena(environment)
        if textarena:
            columns = GIVEN | columns
        observation = _first(await call(start, **_named(start, columns)))
        if textarena:
            observation = await self._observed(call, environment)
        said = list(getattr(chat, "messages", ()))
        message = self._message(observation)
        if isinstance(message, list) and message[: len(said)] == said:
            # The row's prompt, which SkyRL-Gym returns.
            message = message[len(said) :]
        while True:
            reply = await chat(message or None)
            action = reply.text if self.act is None else self.act(reply.text)
            result = await call(environment.step, action)
            observation, earned, done = _outcome(result)
            if earned is not None:
                chat.reward(float(earned))
            if done:
                return
            # Where a limit was reached, the next turn ends the episode.
            if textarena:
                observation = await self._observed(call, environment)
            message = self._message(observation)

    async def _observed(self, call, environment):
        player, observation = await call(environment.get_observation)
        if player != 0:
            raise ValueError(
                f"`Gym` plays games of one player. Received: the turn of "
                f"player {player} of {self.__name__}. Write an async function "
                "of a chat for each player."
            )
        return observation

    def _message(self, observation):
        """Converts an observation to what a chat takes, or `None`."""
        if self.observe is not None:
            observation = self.observe(observation)
        if isinstance(observation, (list, tuple)):
            observation = list(observation)
            if all(isinstance(part, dict) for part in observation):
                return observation
            if all(isinstance(part, tuple) for part in observation):
                # TextArena's (player, text, kind); its own are in the chat.
                return "\n".join(part[1] for part in observation if part[0])
        if observation is None or isinstance(observation, str):
            return observation
        raise ValueError(
            f"An observation of {self.__name__} must be a string or a list of "
            f"messages. Received: {observation!r:.200}. Convert it with "
            "`observe=`, a function of an observation."
        )

    async def _close(self, thread, environment):
        """Closes an environment; an error is counted, and returned."""
        close = getattr(environment, "close", None)
        if close is None:
            return None
        try:
            return await within(
                run(close, thread.submit), CLOSE_SECONDS, "close"
            )
        except Exception as error:
            self.close_errors[type(error).__name__] += 1
            return error


def _start(environment):
    """Returns the function that starts an environment, or a class of them."""
    for name in ("reset", "init"):
        if callable(getattr(environment, name, None)):
            return getattr(environment, name)
    raise ValueError(
        "An environment must have the methods `reset` and `step`. Received: "
        f"{environment!r}"
    )


def _is_textarena(environment):
    return hasattr(environment, "get_observation")


def _parameters(function):
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        # A function of C, whose arguments cannot be read.
        return []


def _named(function, values, rest=True):
    """Selects the arguments that a signature names, or all of `**columns`."""
    parameters = _parameters(function)
    names = {p.name for p in parameters}
    rest = rest and any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {k: v for k, v in values.items() if rest or k in names}


def _first(result):
    """Returns the observation in what `reset` has returned."""
    if isinstance(result, tuple):
        return result[0]
    return getattr(result, "observation", result)


def _outcome(result):
    """Reads what `step` has returned as `(observation, reward, done)`."""
    if isinstance(result, dict) and "done" in result:
        observation = result.get("observations", result.get("observation"))
        return observation, result.get("reward"), result["done"]
    if isinstance(result, tuple):
        if len(result) == 2:
            return None, None, result[0]
        if len(result) == 5:
            observation, earned, terminated, truncated, _ = result
            return observation, earned, terminated or truncated
        if len(result) in (3, 4):
            return result[:3]
    if hasattr(result, "done"):
        return result.observation, result.reward, result.done
    raise ValueError(
        "`step` must return `observation, reward, done`, or a shape that the "
        f"docstring of `Gym` lists. Received: {result!r:.200}"
    )


def _final_reward(rewards):
    """Reads the reward of player 0 in what TextArena's `close` returned."""
    if isinstance(rewards, Exception):
        raise EpisodeError(
            "`close`, which gives the reward, failed: "
            f"{type(rewards).__name__}: {rewards}"
        ) from rewards
    if isinstance(rewards, tuple):
        rewards = rewards[0]
    # A game that did not end has none.
    return float(rewards[0]) if rewards else 0.0
