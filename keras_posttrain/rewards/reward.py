"""What a reward function is: which arguments it takes, and its name."""

import dataclasses
import difflib
import functools
import inspect
import re

# What a batch of completions always has; all else are columns of the rows.
GIVEN = ("prompts", "completions", "prompt_ids", "completion_ids")


class Reward:
    """A reward with settings; a plain function will do as well.

    A reward function is called once for a whole batch of completions, with
    keywords: those of `prompts`, `completions`, `prompt_ids`,
    `completion_ids` and the columns of the rows that it names, all of them
    where it takes `**columns`. It may be `async`. It returns a number for
    each completion, `None` for one that it does not judge.

    Subclasses define `__call__`, which takes `**columns`, and `needs` where
    they cannot do without certain arguments.

    Call arguments:
        prompts: list of the rows' prompts, each a string or messages.
        completions: list of the sampled texts; of prompts that are messages
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

    @property
    def needs(self):
        """Names of the arguments that must be there."""
        return ("completions",)

    def __call__(self, prompts=None, completions=None, **columns):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The names of what a function takes.

    Args:
        required: tuple of strings.
        optional: tuple of strings, those with a default.
        rest: bool, whether it takes `**columns`.
    """

    required: tuple
    optional: tuple = ()
    rest: bool = False

    def choose(self, values):
        """Those of a dict of values that the function is called with."""
        named = (*self.required, *self.optional)
        return {k: v for k, v in values.items() if self.rest or k in named}


def arguments(function):
    """The `Arguments` of a reward function, or a `ValueError`."""
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
    """The name of a reward in metrics and errors."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, Reward):
        words = type(function).__name__.removesuffix("Reward")
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words).lower()
    return getattr(function, "__name__", type(function).__name__)


def names(functions):
    """A name for each reward; the second of a name is given `_2`, and on."""
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
    """Whether calling it gives an awaitable."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or (
        inspect.iscoroutinefunction(call)
    )


def check_function(function, label, columns, where):
    """Raises a `ValueError` where a reward cannot be called on such rows."""
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
    """Raises a `ValueError` for what is no function, or a class of them."""
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
    """The text of a completion, or of the last message of one.

    Args:
        completion: string, or a list of messages, whose `"content"` is a
            string or a list of parts.

    Returns:
        String; empty where there is no message or no content.

    Example:

    ```python
    completion_text([{"role": "assistant", "content": "42"}])  # "42"
    ```
    """
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    return _content(completion[-1])


def readable(value):
    """A prompt, a completion or any other column as one text."""
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
