"""The base class of rewards; arguments and names of reward functions."""

import dataclasses
import difflib
import functools
import inspect
import re

# The arguments of every batch; all others are columns of the rows.
GIVEN = ("prompts", "completions", "prompt_ids", "completion_ids")


class Reward:
    """Base class for rewards with settings.

    A plain function can be a reward too. A reward function is called once for
    a whole batch of completions, with keyword arguments: those of `prompts`,
    `completions`, `prompt_ids`, `completion_ids` and the columns of the rows
    that its signature names, or all of them if it takes `**columns`. It may be
    `async`. It returns a number for each completion, or `None` for one that it
    does not score.

    Subclasses define `__call__`, which takes `**columns`, and `needs` if they
    require certain arguments.

    Call arguments:
        prompts: list of the rows' prompts, each a string or messages.
        completions: list of the sampled texts; for prompts that are messages,
            each is a list of messages as well.
        prompt_ids, completion_ids: lists of lists of ints, the tokens.
        **columns: lists, the other columns of the rows.

    Returns:
        List of a float or `None` for each completion.

    Example:

    ```python
    def correct(completions, answer, **columns):
        return [float(a in c) for a, c in zip(answer, completions)]

    task.compile(rewards=[correct, kpt.rewards.ThinkFormatReward()])
    ```
    """

    # The reward whose name this one has in metrics and errors.
    _inner = None

    @property
    def needs(self):
        """Tuple of strings, the names of the required arguments."""
        return ("completions",)

    def __call__(self, prompts=None, completions=None, **columns):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The names of a function's arguments.

    Args:
        required: tuple of strings.
        optional: tuple of strings, those with a default.
        rest: bool, whether it takes `**columns`.
    """

    required: tuple
    optional: tuple = ()
    rest: bool = False

    def choose(self, values):
        """Selects the arguments of the function from a dict of values."""
        named = (*self.required, *self.optional)
        return {k: v for k, v in values.items() if self.rest or k in named}


def arguments(function):
    """Reads the `Arguments` of a reward function; may raise `ValueError`."""
    if isinstance(function, Reward):
        return Arguments(tuple(function.needs), rest=True)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(
            "A reward must be a function whose arguments can be read. "
            f"Received: {function!r}. Wrap it in a function that takes "
            "`prompts, completions, **columns`."
        ) from None
    named = [
        p
        for p in parameters
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    for p in named:
        if p.kind is p.POSITIONAL_ONLY:
            raise ValueError(
                "A reward function must take its arguments by keyword. "
                f"Received: {name(function)!r} with the positional-only "
                f"argument {p.name!r}."
            )
    return Arguments(
        tuple(p.name for p in named if p.default is p.empty),
        tuple(p.name for p in named if p.default is not p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def name(function):
    """Returns the name of a reward in metrics and errors."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Reward):
        if function._inner is not None:
            return name(function._inner)
        words = type(function).__name__.removesuffix("Reward")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
    return getattr(function, "__name__", type(function).__name__)


def names(functions):
    """Returns unique names of rewards; a second `correct` is `correct_2`."""
    given = []
    for function in functions:
        base = unique = name(function)
        count = 1
        while unique in given:
            count += 1
            unique = f"{base}_{count}"
        given.append(unique)
    return given


def is_async(function):
    """Returns `True` if a call of the function returns an awaitable."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or (
        inspect.iscoroutinefunction(call)
    )


def check_function(function, label, columns, where):
    """Raises a `ValueError` if a reward cannot be called on the columns."""
    check_callable(function)
    known = (*GIVEN, *columns)
    for column in arguments(function).required:
        if column not in known:
            near = difflib.get_close_matches(column, columns, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"The reward function {label!r} needs the column {column!r}, "
                f"which {where} lacks. Received: columns={sorted(columns)}."
                f"{hint} Add the column, rename the argument or give it a "
                "default."
            )


def check_callable(function, what="A reward"):
    """Raises a `ValueError` for a class or an object without a call."""
    if isinstance(function, type):
        raise ValueError(
            f"{what} must be a function or an object that can be called. "
            f"Received: the class {function.__name__!r}. Pass an instance: "
            f"`{function.__name__}()`."
        )
    if not callable(function):
        raise ValueError(
            f"{what} must be a function of `prompts, completions, "
            f"**columns`. Received: {function!r}."
        )


def completion_text(completion):
    """Returns the text of a completion, or of its last message.

    Args:
        completion: string, or a list of messages, whose `"content"` is a
            string or a list of parts.

    Returns:
        String, empty if there is no message or no content.

    Example:

    ```python
    messages = [{"role": "assistant", "content": "42"}]
    kpt.rewards.completion_text(messages)  # "42"
    ```
    """
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    return _content(completion[-1])


def readable(value):
    """Converts a prompt, a completion or another column to text."""
    if isinstance(value, (list, tuple)) and all(
        isinstance(message, dict) and "role" in message for message in value
    ):
        return "\n".join(f"{m['role']}: {_content(m)}" for m in value)
    return value if isinstance(value, str) else str(value)


def _content(message):
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(part.get("text") or "" for part in content)
    return content or ""
