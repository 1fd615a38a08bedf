"""Tools in worker processes: what hangs or dies costs its own call only."""

import asyncio
import copy
import inspect
import os
import threading
import time

import pytest

from keras_posttrain.episodes.errors import EpisodeError
from keras_posttrain.episodes.isolated import Isolated
from keras_posttrain.episodes.run_tool import call
from keras_posttrain.episodes.schema import json_schema


def functions():
    """Functions that are pickled by value: this file is slow to import."""

    def evaluate(expression: str, times: int = 1):
        """Evaluates an expression."""
        return eval(expression)

    async def fetch(url: str):
        return {"url": url}

    return evaluate, fetch


evaluate, fetch = functions()
tool = Isolated(evaluate, timeout=2.0, max_bytes=2**28, processes=2)


def answer(tool, **arguments):
    # Less time than processes take to start: they limit themselves.
    return asyncio.run(call(tool, arguments, seconds=0.01))


@pytest.mark.parametrize(
    "expression, text, kind",
    [
        ("1 + 1", "2", "ok"),
        ("'text'", "text", "ok"),
        ("b'\\xff'", "�", "ok"),
        ("{'a': [1, None]}", '{"a": [1, null]}', "ok"),
        ("{1}", '"{1}"', "ok"),
        ("'\\ud800'", "?", "ok"),
        ("1 / 0", "error: ZeroDivisionError: division by zero", "exception"),
        ("exit(3)", "error: SystemExit: 3", "exception"),
        ("len('a' * 2**30)", "error: MemoryError: ", "exception"),
    ],
)
def test_answers(expression, text, kind):
    result = answer(tool, expression=expression)
    assert (result.text, result.kind) == (text, kind)


@pytest.mark.parametrize(
    "expression, words",
    [
        # It holds the interpreter.
        ("9**9**9**9", "took longer than 2 s"),
        ("__import__('os')._exit(3)", "its process .exit status 3"),
        ("__import__('os').kill(__import__('os').getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_process_that_hangs_or_dies(expression, words):
    start = time.monotonic()
    with pytest.raises(EpisodeError, match=f"'evaluate' .*{words}"):
        answer(tool, expression=expression)
    assert time.monotonic() - start < 20
    assert answer(tool, expression="2 + 2").text == "4"


def test_a_tool_that_cannot_be_loaded():
    class Unloadable:
        def __reduce__(self):
            return (eval, ("1 / 0",))

    needs = Unloadable()
    broken = Isolated(lambda: needs)
    with pytest.raises(EpisodeError, match="could not load.*ZeroDivision"):
        answer(broken)
    with pytest.raises(ValueError, match="pickled.*Create locks"):
        Isolated(threading.Lock().acquire)
    with pytest.raises(ValueError, match="`processes`.*processes=0"):
        Isolated(evaluate, processes=0)


def test_it_is_the_function_it_isolates():
    assert tool.__name__ == "evaluate"
    assert inspect.getdoc(tool) == "Evaluates an expression."
    assert [*inspect.signature(tool).parameters] == ["expression", "times"]
    wrong = answer(tool, expression=1)
    assert wrong.kind == "arguments"
    assert "expression: str" in wrong.text
    assert answer(Isolated(fetch), url="a").text == '{"url": "a"}'
    other = copy.deepcopy(tool)
    assert other == tool and other._workers is not tool._workers
    assert answer(other, expression="1").text == "1"


def test_calls_share_the_processes():
    code = "__import__('time').sleep(0.1) or __import__('os').getpid()"

    async def main():
        calls = (call(tool, {"expression": code}, seconds=9) for _ in range(8))
        return await asyncio.gather(*calls)

    ids = {result.text for result in asyncio.run(main())}
    assert 1 <= len(ids) <= 2 and str(os.getpid()) not in ids


def test_a_model_is_told_of_the_functions_arguments():
    def double(number: int) -> int:
        """Doubles a number.

        Args:
            number: any one.
        """
        return 2 * number

    assert json_schema(Isolated(double)) == json_schema(double)
