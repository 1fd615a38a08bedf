"""Agents that know only the address of a model."""

import asyncio
import collections
import dataclasses
import difflib
import functools

from keras_posttrain.episodes import chat_api, run_tool
from keras_posttrain.episodes.chat import Ended
from keras_posttrain.episodes.http_server import ChatServer
from keras_posttrain.episodes.limits import Limits
from keras_posttrain.rewards import reward

# Arguments of an agent that are no columns.
GIVEN = ("base_url", "api_key", "seed", "generation")
METRICS = ("endpoint/requests", "endpoint/forks", "endpoint/overridden")


@dataclasses.dataclass(frozen=True, eq=False)
class Endpoint:
    """An episode that an agent plays by OpenAI's chat completions API.

    An agent that was written against the API, in any framework or language,
    is trained as it is: it gets the address of a server on this machine's
    loopback, and a key for each episode. What it returns is its reward, or
    `None` where the `rewards` of `compile` score alone.

    A request whose messages continue an earlier conversation adds what is new
    to that segment: tokens are trained as they were sampled. A request that
    continues an earlier turn forks there; any other begins a segment. A
    request is another where the agent changes what was said, the model's
    turns (such as by removing thoughts) or the tools.

    The settings of sampling are those of `compile`. An agent may lower
    `max_tokens`; other settings it asks for are overridden, and counted as
    the metric `endpoint/overridden`. Not supported are several choices (`n`),
    `stop`, `logprobs` and `response_format`. A stream comes in one piece. A
    request that a limit forbids is answered with status 400 and the code
    `"episode_ended"`.

    Requests of one episode may be made at once. Samples hang on the
    conversation and on the seed, not on the order in which requests come.

    Args:
        agent: function, sync or async, with the arguments `base_url` and
            `api_key`; columns of the row, `seed` and `generation` by name. It
            runs in a thread of its own, an async one with a loop of its own.
        limits: `Limits`, for all conversations of an episode together.
        strict: bool, whether a request for other settings than the run's is
            refused.

    Example:

    ```python
    def agent(base_url, api_key, question):
        messages = [{"role": "user", "content": question}]
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="policy", messages=messages)

    task.compile(rewards=[correct], episode=kpt.episodes.Endpoint(agent))
    ```

    A program is run with its environment set:

    ```python
    async def agent(base_url, api_key, question):
        keys = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await asyncio.create_subprocess_exec(
            "my-agent", question, env=os.environ | keys
        )
        return float(await process.wait() == 0)
    ```
    """

    agent: object
    limits: Limits = dataclasses.field(default_factory=Limits)
    strict: bool = False

    def __post_init__(self):
        if not isinstance(self.strict, bool):
            raise ValueError(
                "`strict` must be True or False. Received: "
                f"strict={self.strict!r}"
            )
        needed = set(GIVEN[:2])
        if callable(self.agent) and not isinstance(self.agent, type):
            found = reward.arguments(self.agent)
            if found.rest or needed <= {*found.required, *found.optional}:
                return
        raise ValueError(
            "`agent` must be a function with the arguments `base_url` and "
            f"`api_key`. Received: agent={self.agent!r}"
        )

    @property
    def name(self):
        """String, of the agent's reward in metrics."""
        return reward.name(self.agent)

    @property
    def __name__(self):
        return self.name

    @property
    def metric_names(self):
        """Tuple of strings, what is counted besides the metrics of all."""
        return METRICS

    @functools.cached_property
    def _server(self):
        return ChatServer()

    def check_columns(self, columns):
        """Raises a `ValueError` if the agent needs another column."""
        for name in reward.arguments(self.agent).required:
            if name not in (*GIVEN, *columns):
                near = difflib.get_close_matches(name, columns, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"The agent {self.name!r} needs the column {name!r}. "
                    f"Received: columns={sorted(columns)}.{hint} Add the "
                    "column, rename the argument or give it a default."
                )

    async def __call__(self, chat, **columns):
        conversations = Conversations(chat, self.strict)
        loop = asyncio.get_running_loop()

        def answer(body):
            return asyncio.run_coroutine_threadsafe(
                conversations.answer(body), loop
            )

        server = self._server
        key = server.open(answer)
        given = columns | {"base_url": server.url, "api_key": key}
        given = reward.arguments(self.agent).choose(given)
        try:
            result = await run_tool.run(lambda: _call(self.agent, given))
        except Exception:
            # What went wrong here is why the agent failed.
            conversations.check()
            raise
        finally:
            server.close(key)
            conversations.close()
        conversations.check_faults()
        return result


def _call(agent, given):
    # In the loop of the episodes an agent with a blocking client would wait
    # for itself.
    if reward.is_async(agent):
        return asyncio.run(agent(**given))
    return agent(**given)


class Conversations:
    """The conversations of one episode of an agent.

    Args:
        chat: `Chat` that all of them are forks of.
        strict: as of `Endpoint`.
    """

    def __init__(self, chat, strict):
        self._chat, self._strict = chat, strict
        # Pairs of a chat and the tools it was shown.
        self._branches = []
        self._seen = collections.Counter()
        self._tasks = set()
        self._fault = self._limit = None
        for name in METRICS:
            chat.count(name, 0)

    def check(self):
        """Raises why requests were refused, if it is no fault of the agent."""
        self.check_faults()
        if self._limit is not None:
            raise self._limit

    def check_faults(self):
        if self._fault is not None:
            raise self._fault

    def close(self):
        """Cancels the requests that nobody waits for."""
        for task in self._tasks:
            task.cancel()

    async def answer(self, body):
        """Returns the `chat_api.Answer` to the body of a request."""
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await self._answer(body)
        except (chat_api.Refused, asyncio.CancelledError):
            raise
        except Ended as limit:
            self._limit = limit
            raise chat_api.Refused(
                f"The episode has reached its limit: {limit}.",
                code="episode_ended",
            ) from None
        except Exception as error:
            # A template that refuses the messages, an engine that failed.
            self._fault = error
            raise chat_api.Refused(
                f"{type(error).__name__}: {error}"
            ) from None
        finally:
            self._tasks.discard(task)

    async def _answer(self, body):
        chat = self._chat
        if self._fault is not None:
            raise self._fault
        call = chat_api.read(body, chat.temperature)
        chat.count("endpoint/requests")
        chat.count("endpoint/overridden", bool(call.overridden))
        if call.overridden and self._strict:
            raise chat_api.Refused(
                "The settings of sampling are those of the run. Received: "
                f"{call.overridden}. Leave them out."
            )
        words = call.words()
        number = *words, self._seen[words]
        self._seen[words] += 1
        branch = self._branch(call, number)
        reply = await branch.sample(call.tools, call.max_tokens, number)
        chat.count("tools/calls", len(reply.tool_calls))
        chat.count("tools/unreadable", len(reply.unreadable))
        end = branch.ends[-1]
        sampled = len(end.completion.token_ids)
        reason = end.completion.finish_reason
        return chat_api.Answer(
            call,
            chat_api.message_of(reply, call),
            "tool_calls" if reply.tool_calls else reason,
            (end.tokens - sampled, sampled),
        )

    def _branch(self, call, number):
        """Returns the chat that a request continues, with its new messages."""
        wanted = [chat_api.identity(m) for m in call.messages]
        best, turns, shared = self._chat, 0, 0
        for branch, tools in self._branches:
            if tools != call.tools:
                continue
            found = [chat_api.identity(m) for m in branch.messages]
            for i, end in enumerate(branch.ends):
                count = end.messages
                is_longer = shared < count < len(wanted)
                if is_longer and wanted[:count] == found[:count]:
                    best, turns, shared = branch, i + 1, count
        # Nothing has been said or sampled since.
        whole = turns and shared == len(best.messages)
        if not whole:
            self._chat.count("endpoint/forks", bool(turns))
            fork = -1 - number[0] % 2**31
            best = best.fork_at(turns, fork)
            self._branches.append((best, call.tools))
        best.say(call.messages[shared:])
        return best
