"""The episode in which the model calls tools until it answers."""

import asyncio
import dataclasses
import functools
import inspect
import time

from keras_posttrain._spans import span
from keras_posttrain.episodes import run_tool, schema
from keras_posttrain.episodes.chat import as_messages
from keras_posttrain.episodes.limits import Limits
from keras_posttrain.rewards import reward


@dataclasses.dataclass(frozen=True, eq=False)
class Tools:
    """An episode in which the model may call tools before it answers.

    It says the row's `prompt`, runs the calls of each turn and says their
    results, until a turn has none. The rewards of `compile` score the whole
    conversation.

    A call that cannot be read, names no tool or has wrong arguments is
    answered with an error that the model reads, and counted; so is an
    exception of a tool. A tool that takes longer than
    `Limits(tool_seconds=...)`, or raises `EpisodeError`, is no fault of the
    model: the episode is run again.

    Args:
        tools: list of functions, sync or async, with type hints and a
            docstring that describes each argument; or a class, of which each
            episode makes an object: its public methods are tools,
            `reset(**columns)`, if it has one, opens the conversation with
            what it returns, and `get_reward()` gives the reward.
        limits: `Limits`.
        system: string, a system message before the prompt, or `None`.
        as_user: bool, whether the user says the results, for chat templates
            without the role `"tool"`.
        parallel: bool, whether the calls of one turn run at once.

    Example:

    ```python
    def calculator(expression: str) -> str:
        \"\"\"Computes an arithmetic expression.

        Args:
            expression: such as "3 * (4 + 5)".
        \"\"\"
        return str(kpt.episodes.arithmetic(expression))

    task.compile(
        rewards=[correct],
        episode=kpt.episodes.Tools(
            [calculator], limits=kpt.episodes.Limits(turns=4)
        ),
        max_completion_length=16,
    )
    task.fit([{"prompt": "What is 17 * 23?", "answer": 391}])
    ```
    """

    tools: object
    limits: Limits = dataclasses.field(default_factory=Limits)
    system: str | None = None
    as_user: bool = False
    parallel: bool = False

    def __post_init__(self):
        if isinstance(self.tools, type):
            functions = _methods(self.tools)
        else:
            functions = self.tools
        known = isinstance(functions, (list, tuple)) and functions
        if not known or not all(callable(f) for f in functions):
            raise ValueError(
                "`tools` must be a list of functions, or a class with methods "
                f"that are tools. Received: tools={self.tools!r}"
            )
        names = [s["function"]["name"] for s in self.schemas]
        if len(set(names)) < len(names):
            raise ValueError(
                f"Tools must have different names. Received: {names}"
            )

    @property
    def name(self):
        """String, of the reward of `get_reward` in metrics."""
        if isinstance(self.tools, type):
            return self.tools.__name__.lower()
        return "tools"

    @property
    def __name__(self):
        return self.name

    @functools.cached_property
    def schemas(self):
        """List of dicts, the tools' JSON schemas."""
        functions = self.tools
        if isinstance(functions, type):
            functions = _methods(functions)
        return [schema.json_schema(f) for f in functions]

    @property
    def says(self):
        """Tuple of the roles that it says something in, and its schemas."""
        return ("user",) if self.as_user else ("tool",), self.schemas

    async def __call__(self, chat, prompt=None, **columns):
        tools, opening, environment = self.tools, prompt, None
        if isinstance(tools, type):
            environment = tools()
            given = columns | {"prompt": prompt}
            if hasattr(environment, "reset"):
                given = _chosen(environment.reset, given)
                opening = await run_tool.run(
                    functools.partial(environment.reset, **given)
                )
                opening = prompt if opening is None else opening
            tools = [getattr(environment, m.__name__) for m in _methods(tools)]
        if opening is None:
            raise ValueError(
                "`Tools` opens the conversation with the row's `prompt`. "
                f"Received: a row with the columns {sorted(columns)}."
            )
        by_name = {reward.name(f): f for f in tools}
        said = as_messages(opening)
        if self.system is not None:
            said = [{"role": "system", "content": self.system}, *said]
        while True:
            reply = await chat(said, tools=self.schemas)
            if not reply.tool_calls and not reply.unreadable:
                break
            if reply.ended is not None:
                chat.check_ended()
            said = await self._answers(chat, reply, by_name)
        if hasattr(environment, "get_reward"):
            return await run_tool.run(environment.get_reward)
        return None

    async def _answers(self, chat, reply, by_name):
        """Returns the messages that answer a turn's calls."""
        calls = [self._answer(chat, c, by_name) for c in reply.tool_calls]
        if self.parallel:
            texts = await asyncio.gather(*calls)
        else:
            texts = [await call for call in calls]
        answers = [
            {"role": "tool", "name": call["name"], "content": text}
            | ({"tool_call_id": call["id"]} if call.get("id") else {})
            for call, text in zip(reply.tool_calls, texts)
        ]
        chat.count("tools/unreadable", len(reply.unreadable))
        faults = [f"error: {what}" for what in reply.unreadable]
        if self.as_user or not answers:
            text = "\n".join([*texts, *faults])
            return [{"role": "user", "content": text}]
        answers[-1]["content"] = "\n".join([answers[-1]["content"], *faults])
        return answers

    async def _answer(self, chat, call, by_name):
        """Runs one call and returns its text."""
        limits, name = chat.limits, call["name"]
        chat.count("tools/calls")
        most = limits.tool_calls
        if most is not None and chat.used.counts["tools/calls"] > most:
            return f"error: no more than {most} calls are allowed"
        if name not in by_name:
            chat.count("tools/errors")
            known = ", ".join(by_name)
            return f"error: there is no tool {name!r}. The tools are: {known}"
        start = time.perf_counter()
        try:
            with span("tool", name):
                result = await run_tool.call(
                    by_name[name],
                    call["arguments"],
                    seconds=limits.tool_seconds,
                )
        finally:
            chat.count("tools/seconds", time.perf_counter() - start)
        chat.count("tools/errors", result.failed)
        return result.text


def _methods(kind):
    """Returns the methods of a class that are tools."""
    return [
        method
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    ]


def _chosen(function, given):
    """Returns the arguments that a function has."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given
    return {p.name: given[p.name] for p in parameters if p.name in given}
