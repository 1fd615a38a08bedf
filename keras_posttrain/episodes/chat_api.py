"""Requests and answers of OpenAI's chat completions.

Source: https://platform.openai.com/docs/api-reference/chat
"""

import dataclasses
import hashlib
import json
import numbers

ROLES = ("system", "user", "assistant", "tool")
# What an answer cannot have, with the values that ask for nothing.
REFUSED = {
    "n": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto",),
}
# Settings that are the run's, with the values that change nothing.
OVERRIDDEN = {
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}


class Refused(Exception):
    """A request that gets an error as its answer.

    Clients repeat a request that got 408, 409, 429 or 5xx.
    """

    def __init__(self, message, status=400, code=None):
        super().__init__(message)
        self.status, self.code = int(status), code

    def body(self):
        return {
            "error": {
                "message": str(self),
                "type": "invalid_request_error",
                "param": None,
                "code": self.code,
            }
        }


@dataclasses.dataclass(frozen=True)
class Call:
    """A request that was read.

    Attributes:
        messages: list of dicts, as chat templates take them.
        tools: list of dicts, JSON schemas, or `None`.
        max_tokens: int or `None`.
        model: string, as the client calls the model.
        stream: bool.
        with_usage: bool, whether a stream ends with numbers of tokens.
        overridden: list of strings, the settings that the run has otherwise.
    """

    messages: list
    tools: list | None
    max_tokens: int | None
    model: str
    stream: bool
    with_usage: bool
    overridden: list

    def words(self):
        """Returns ints that tell this conversation from others."""
        text = json.dumps([self.messages, self.tools], sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        return tuple(
            int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8)
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sampled turn as an answer.

    Attributes:
        call: `Call`.
        message: dict, OpenAI's message.
        finish_reason: string.
        tokens: tuple of ints, those of the prompt and those sampled.
    """

    call: Call
    message: dict
    finish_reason: str
    tokens: tuple

    @property
    def stream(self):
        return self.call.stream

    def _usage(self):
        prompt, completion = self.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _head(self, kind):
        words = "".join(f"{word:08x}" for word in self.call.words())
        return {
            "id": f"chatcmpl-{words}",
            "object": kind,
            "created": 0,
            "model": self.call.model,
        }

    def completion(self):
        """Returns a chat completion."""
        choice = {
            "index": 0,
            "message": self.message,
            "finish_reason": self.finish_reason,
            "logprobs": None,
        }
        head = self._head("chat.completion")
        return head | {"choices": [choice], "usage": self._usage()}

    def chunks(self):
        """Yields the parts of a stream: the whole turn, then its end."""
        head = self._head("chat.completion.chunk")
        delta = dict(self.message)
        if "tool_calls" in delta:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [call | {"index": i} for i, call in calls]
        for part, reason in ((delta, None), ({}, self.finish_reason)):
            choice = {"index": 0, "delta": part, "finish_reason": reason}
            yield head | {"choices": [choice]}
        if self.call.with_usage:
            yield head | {"choices": [], "usage": self._usage()}


def read(body, temperature):
    """Reads the body of a request.

    Args:
        body: what JSON gave.
        temperature: float, that of the run.

    Returns:
        A `Call`.

    Raises:
        Refused: the request asks for what cannot be given.
    """
    if not isinstance(body, dict) or not body.get("messages"):
        raise Refused("A request must be an object with `messages`.")
    for name, values in REFUSED.items():
        if body.get(name) is not None and body[name] not in values:
            raise Refused(
                f"`{name}` is not supported by a policy in training. "
                f"Received: {name}={body[name]!r}. Leave it out."
            )
    allowed = OVERRIDDEN | {"temperature": (temperature,)}
    options = body.get("stream_options") or {}
    return Call(
        _messages(body["messages"]),
        _tools(body.get("tools")),
        _max_tokens(body),
        str(body.get("model", "policy")),
        bool(body.get("stream")),
        bool(options.get("include_usage")),
        [
            name
            for name, values in allowed.items()
            if body.get(name) is not None and body[name] not in values
        ],
    )


def message_of(reply, call):
    """Returns OpenAI's message of a `Reply` to a `Call`."""
    message = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        # Nine letters and digits, as Mistral's templates want them.
        base = "".join(f"{word:08x}" for word in call.words())
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {
                "id": f"{base[:7]}{i:02d}",
                "type": "function",
                "function": {
                    "name": c["name"],
                    "arguments": json.dumps(c["arguments"]),
                },
            }
            for i, c in enumerate(reply.tool_calls)
        ]
    return message


def identity(message):
    """Returns what two messages that say the same have in common."""
    calls = [
        [c["function"]["name"], c["function"]["arguments"]]
        for c in message.get("tool_calls") or ()
    ]
    content, role = message.get("content") or "", message["role"]
    answers = message.get("tool_call_id") if role == "tool" else None
    return json.dumps([role, content, calls, answers], sort_keys=True)


def _messages(messages):
    if not isinstance(messages, list):
        raise Refused("`messages` must be a list.")
    found, names = [], {}
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise Refused(f"Message {i} must be an object.")
        role = message.get("role")
        # The newer name.
        role = "system" if role == "developer" else role
        if role not in ROLES:
            raise Refused(
                f"`role` must be one of {ROLES}. Received: role={role!r} of "
                f"message {i}"
            )
        new = {"role": role, "content": _text(message.get("content"), i)}
        if role == "assistant" and message.get("tool_calls"):
            new["tool_calls"] = _calls(message["tool_calls"], i)
            for call in new["tool_calls"]:
                names[call["id"]] = call["function"]["name"]
        if role == "tool":
            new["tool_call_id"] = str(message.get("tool_call_id", ""))
            name = names.get(new["tool_call_id"]) or message.get("name")
            if name:
                new["name"] = name
        found.append(new)
    if found[-1]["role"] == "assistant":
        raise Refused(
            "The last message must be what the model answers, such as the "
            "user's. Received: role='assistant'"
        )
    return found


def _text(content, i):
    """Returns the text of a message, whose content may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise Refused(
                "`content` must be text, or a list of parts with text. "
                f"Received: {str(part)[:100]} in message {i}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls, i):
    found = []
    try:
        for call in calls:
            function = call["function"]
            arguments = function["arguments"]
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            named = {"name": function["name"], "arguments": arguments}
            found.append(
                {
                    "id": str(call.get("id", "")),
                    "type": "function",
                    "function": named,
                }
            )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Refused(
            "`tool_calls` must be a list of functions with a `name` and "
            f"`arguments` in JSON. Received: {calls!r} in message {i}"
        ) from error
    return found


def _tools(tools):
    if not tools:
        return None
    for tool in tools:
        known = isinstance(tool, dict) and tool.get("type") == "function"
        if not known or "name" not in tool.get("function", {}):
            raise Refused(
                "`tools` must be a list of functions, with their JSON "
                f"schemas. Received: {str(tool)[:200]}"
            )
    return tools


def _max_tokens(body):
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        is_int = isinstance(value, numbers.Integral)
        if not is_int or isinstance(value, bool) or value < 1:
            raise Refused(
                f"`{name}` must be a positive int. Received: {value!r}"
            )
        return value
    return None
