"""Calls one tool: bounded in time, its result a text for the model."""

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import json
import traceback
import types
import typing

from keras_posttrain.episodes.errors import EpisodeError, ToolError
from keras_posttrain.episodes.tool_text import as_text
from keras_posttrain.rewards import reward
from keras_posttrain.workers.threads import in_thread

MAX_CHARACTERS = 20_000
# Characters of an argument that an error shows.
SHOWN = 100
# What JSON has for a type; others are not checked.
JSON_TYPES = {
    str: str,
    bool: bool,
    int: int,
    float: (int, float),
    list: list,
    tuple: list,
    dict: dict,
    None: types.NoneType,
    types.NoneType: types.NoneType,
}


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """What a call of a tool gave.

    Attributes:
        text: string, for the model.
        kind: `"ok"`; `"arguments"` if the model's arguments do not fit the
            tool; or `"exception"` if the tool raised one.
    """

    text: str
    kind: str = "ok"

    @property
    def failed(self):
        return self.kind != "ok"


async def call(tool, arguments, *, seconds, max_characters=MAX_CHARACTERS):
    """Calls a tool with the arguments that a model wrote.

    An async tool runs in the current event loop. Any other tool runs in a
    thread of its own, with the caller's context variables, so that it holds
    up nobody. Python cannot end a thread: a tool that never returns keeps it
    until the process ends, and should rather be `Isolated`.

    Results that are no strings are written as JSON. A text that is longer
    than `max_characters` loses its middle, and says how much.

    Args:
        tool: function, sync or async.
        arguments: dict of the arguments by name, as JSON has them.
        seconds: float, the time limit, or `None`. It is not for a tool with
            a true attribute `limits_itself`, whose calls may also have to
            wait for others.
        max_characters: int, the most characters of the text.

    Returns:
        A `ToolResult`. Wrong arguments and exceptions of the tool are a text
        that begins with `"error: "`.

    Raises:
        EpisodeError: if the tool takes longer than `seconds`, or raised it.
    """
    if getattr(tool, "limits_itself", False):
        seconds = None
    wrong = wrong_arguments(tool, arguments)
    if wrong:
        text = f"error: {reward.name(tool)}: {wrong}"
        return ToolResult(bounded(text, max_characters), "arguments")
    return await within(
        _answer(tool, arguments, max_characters),
        seconds,
        f"The tool {reward.name(tool)!r}",
    )


async def _answer(tool, arguments, max_characters):
    try:
        result = await run(functools.partial(tool, **arguments))
        if not isinstance(result, str):
            # It may be large.
            result = await run(functools.partial(as_text, result))
        return ToolResult(bounded(result, max_characters))
    except EpisodeError:
        raise
    except ToolError as error:
        text = f"error: {error}"
        return ToolResult(bounded(text, max_characters), "exception")
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # As the last lines of a traceback say it.
        lines = traceback.format_exception_only(error)
        text = f"error: {''.join(lines).rstrip()}"
        return ToolResult(bounded(text, max_characters), "exception")


async def run(function, submit=in_thread):
    """Calls a function without arguments, and returns its result.

    An async one is awaited. Another is given to `submit`, a function that
    calls it in another thread and returns a `concurrent.futures.Future`.
    """
    if reward.is_async(function):
        result = function()
    else:
        context = contextvars.copy_context()

        def work():
            try:
                return context.run(function)
            except StopIteration as error:
                # No future can hold it.
                raise RuntimeError("StopIteration was raised") from error

        result = asyncio.wrap_future(submit(work))
    while inspect.isawaitable(result):
        result = await result
    return result


async def within(awaitable, seconds, what):
    """Awaits a result for at most `seconds`.

    A call that ignores that it is cancelled is not waited for either.

    Args:
        awaitable: coroutine or future.
        seconds: float, or `None` for no limit.
        what: string, the subject of the error.

    Raises:
        EpisodeError: if the time is over.
        RuntimeError: if the awaitable was cancelled by itself.
    """
    task = asyncio.ensure_future(awaitable)
    # Says that nobody reads an exception raised after the time is over.
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise EpisodeError(f"{what} took longer than {seconds:g} s.")
    finally:
        task.cancel()
    if task.cancelled():
        raise RuntimeError(f"{what} was cancelled.")
    return task.result()


def bounded(text, max_characters):
    """Cuts the middle of a long text, and replaces lone surrogates."""
    left_out = len(text) - max_characters
    if left_out > 0:
        head = max_characters // 2
        tail = head + left_out
        note = f"[... {left_out} characters left out ...]"
        text = f"{text[:head]}\n{note}\n{text[tail:]}"
    return text.encode(errors="replace").decode()


def wrong_arguments(tool, arguments):
    """Says in which way arguments do not fit a tool, or returns `None`."""
    if not isinstance(arguments, dict):
        return f"the arguments must be an object, not {_shown(arguments)}"
    signature = _signature(tool)
    try:
        bound = signature.bind(**arguments)
    except TypeError as error:
        names = ", ".join(map(str, signature.parameters.values()))
        return f"{error}. The arguments are ({names})"
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        variable = parameter.kind is parameter.VAR_KEYWORD
        values = value.values() if variable else [value]
        for value in values:
            if not _fits(value, parameter.annotation):
                return f"{_shown(value)} is not of the type of {parameter}"
    return None


def _shown(value):
    return bounded(json.dumps(value, default=str), SHOWN)


def _signature(tool):
    try:
        return inspect.signature(tool, eval_str=True)
    except Exception:
        # A name in an annotation does not exist at run time.
        return inspect.signature(tool)


def _fits(value, kind):
    """Tests whether a value of JSON is of an annotated type."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Annotated:
        return _fits(value, inner[0])
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, k) for k in inner)
    if origin is typing.Literal:
        return value in inner
    # An annotation need not be hashable.
    wanted = next((j for t, j in JSON_TYPES.items() if t is origin), object)
    if not isinstance(value, wanted):
        return False
    if isinstance(value, bool) and origin in (int, float):
        return False
    if origin is list and inner:
        return all(_fits(v, inner[0]) for v in value)
    if origin is dict and inner:
        return all(_fits(v, inner[1]) for v in value.values())
    return True
