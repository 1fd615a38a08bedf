"""Calls of tools: what is the model's fault, the tool's and nobody's."""

import asyncio
import contextvars
import functools
import subprocess
import sys
import threading
import time
import typing

import numpy as np
import pytest

from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.episodes.run_tool import ToolResult, bounded, call


def answer(_, seconds=20, max_characters=20_000, **arguments):
    return asyncio.run(
        call(_, arguments, seconds=seconds, max_characters=max_characters)
    )


def calculator(expression: str, digits: int = 2, *, exact: bool = False):
    return expression, digits, exact


async def fetch(url: str):
    await asyncio.sleep(0.01)
    return {"url": url}


class Search:
    async def __call__(self, query: str):
        return [query]

    def find(self, word):
        return word


@pytest.mark.parametrize(
    "tool, arguments, text",
    [
        (calculator, {"expression": "1"}, '["1", 2, false]'),
        (fetch, {"url": "a"}, '{"url": "a"}'),
        (Search(), {"query": "q"}, '["q"]'),
        (Search().find, {"word": "w"}, "w"),
        (functools.partial(calculator, digits=3), {"expression": "1"}, None),
        # A coroutine that its function does not announce.
        (lambda url: fetch(url), {"url": "b"}, '{"url": "b"}'),
        (lambda: "ü 漢", {}, "ü 漢"),
        (
            lambda function, tool, self: tool,
            dict.fromkeys(("function", "tool", "self"), "any name"),
            "any name",
        ),
        (lambda: b"\xff ok", {}, "� ok"),
        (lambda: None, {}, "null"),
        (lambda: 3.5, {}, "3.5"),
        (lambda: {"ü": {1}}, {}, '{"ü": "{1}"}'),
        (lambda: {"x": np.ones(2)}, {}, '{"x": [1.0, 1.0]}'),
        (lambda: "\ud800!", {}, "?!"),
    ],
)
def test_results_are_text(tool, arguments, text):
    result = answer(tool, **arguments)
    assert not result.failed
    if text is not None:
        assert result == ToolResult(text, "ok")


def typed(
    a: int = 0,
    b: float = 0.0,
    c: str | None = None,
    d: list[int] = (),
    e: dict[str, float] = None,
    f: typing.Literal["x", "y"] = "x",
    g: "bool | None" = None,
    h: typing.Annotated[int, "words"] = 0,
    i: "NotThere" = None,  # noqa: F821
    **rest: int,
):
    return "fine"


def resolved(a: "int | str", b: Search = None):
    return "fine"


@pytest.mark.parametrize(
    "tool, arguments",
    [
        (typed, {"a": 1, "b": 1, "c": None, "d": [1], "e": {"k": 1}}),
        (typed, {"f": "y", "g": None, "h": 3, "i": object, "z": 4}),
        (resolved, {"a": "s", "b": {}}),
    ],
)
def test_arguments_that_fit(tool, arguments):
    assert answer(tool, **arguments).text == "fine"


@pytest.mark.parametrize(
    "tool, arguments, words",
    [
        (calculator, {}, "missing a required argument: 'expression'"),
        (calculator, {"expression": "1", "x": 1}, "keyword argument 'x'"),
        (calculator, {"expression": 1}, "1 is not of the type of expression"),
        (calculator, {"expression": "1", "exact": 0}, "0 is not of the type"),
        (calculator, {"expression": "1", "digits": True}, "true is not of"),
        (calculator, {"expression": "1", "digits": 1.5}, "digits: int = 2"),
        (typed, {"c": 1}, "c: str | None"),
        (typed, {"d": [1, "2"]}, "d: list[int]"),
        (typed, {"e": {"k": "v"}}, "e: dict[str, float]"),
        (typed, {"f": "z"}, "'x', 'y'"),
        (typed, {"h": "z"}, "h: "),
        (typed, {"z": "z"}, "rest: int"),
        (resolved, {"a": 1.5}, "a: int | str"),
        (fetch, {"url": ["x" * 1000]}, "characters left out"),
    ],
)
def test_wrong_arguments_are_the_model_s_fault(tool, arguments, words):
    result = answer(tool, **arguments)
    assert result.failed and result.kind == "arguments"
    assert result.text.startswith("error: ") and words in result.text
    assert len(result.text) < 500
    # The signature says what would be right.
    if tool is calculator and "required" in words:
        assert "digits: int = 2" in result.text


def test_arguments_that_are_no_object():
    result = asyncio.run(call(fetch, ["a"], seconds=1))
    assert result.kind == "arguments" and "must be an object" in result.text


def raises(error):
    raise error


async def raises_late(error):
    await asyncio.sleep(0)
    raise error


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no")


@pytest.mark.parametrize("tool", [raises, raises_late])
@pytest.mark.parametrize(
    "error, text",
    [
        (ZeroDivisionError("division by zero"), None),
        (KeyError("x"), None),
        (SystemExit(3), None),
        (TimeoutError("its own"), None),
        (asyncio.CancelledError(), "CancelledError"),
        (StopIteration(), "StopIteration"),
        (Unprintable(), "Unprintable"),
        (MemoryError(), "MemoryError"),
        (ValueError("x" * 10**6), "characters left out"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_is_shown_to_the_model(tool, error, text):
    result = answer(tool, error=error)
    assert result.kind == "exception" and len(result.text) < 21_000
    text = text or f"{type(error).__name__}: {error}"
    assert result.text.startswith("error: ") and text in result.text


def test_results_that_cannot_be_written():
    loop = []
    loop.append(loop)
    assert "Circular" in answer(lambda: loop).text
    assert answer(lambda: {(1, 2): 3}).kind == "exception"


@pytest.mark.parametrize("tool", [raises, raises_late])
def test_an_episode_error_passes_through(tool):
    with pytest.raises(EpisodeError, match="no server"):
        answer(tool, error=EpisodeError("no server"))


def sleeps(seconds):
    time.sleep(seconds)


async def sleeps_on(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # It does not care.
            break
    raise ValueError("nobody reads this")


@pytest.mark.parametrize("tool", [sleeps, sleeps_on])
def test_a_slow_tool_is_an_episode_error(tool):
    start = time.monotonic()

    async def main():
        with pytest.raises(
            EpisodeError, match="The tool '.*' took longer than 0.1 s"
        ):
            await call(tool, {"seconds": 2}, seconds=0.1)
        taken = time.monotonic() - start
        await asyncio.sleep(0.1)
        return taken

    assert asyncio.run(main()) < 1
    # Without a limit.
    assert answer(sleeps, seconds=None, **{}).kind == "arguments"


def test_calls_run_at_once_and_hold_up_nobody():
    """64 tools that wait for all others, while the loop keeps going."""
    everyone = threading.Barrier(64)
    name = contextvars.ContextVar("name", default=None)

    def tool(number: int):
        everyone.wait(30)
        return f"{name.get()} {number}"

    async def episode(number):
        name.set(f"episode {number}")
        return (await call(tool, {"number": number}, seconds=30)).text

    async def main():
        return await asyncio.gather(*map(episode, range(64)))

    texts = asyncio.run(main())
    # The context variables are those of the caller.
    assert texts == [f"episode {i} {i}" for i in range(64)]


def test_a_cancelled_call_ends_its_tool():
    ended = []

    async def tool():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def main():
        task = asyncio.create_task(call(tool, {}, seconds=60))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ended == [True]


def test_long_results_lose_their_middle():
    text = answer(lambda: "a" * 600 + "b" * 600, max_characters=1000).text
    assert text == "\n".join(
        ["a" * 500, "[... 200 characters left out ...]", "b" * 500]
    )
    assert bounded("abc", 3) == "abc"
    assert bounded("abcd", 1) == "\n[... 3 characters left out ...]\nd"
    # A gigabyte.
    start = time.monotonic()
    assert len(answer(lambda: "x" * 2**30).text) < 20_100
    assert time.monotonic() - start < 20


def test_a_tool_that_hangs_does_not_keep_the_process():
    program = """
import asyncio, time
from keras_posttrain.episodes.run_tool import call
from keras_posttrain.episodes.errors import EpisodeError
try:
    asyncio.run(call(lambda: time.sleep(600), {}, seconds=0.1))
except EpisodeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "took longer than 0.1 s" in done.stdout, done.stderr
