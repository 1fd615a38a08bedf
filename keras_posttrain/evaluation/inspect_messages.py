"""Converts messages and settings of Inspect AI."""

import warnings

from keras_posttrain.episodes import chat_api, parsing

# Generation settings that an answer cannot have, with the values that ask for
# nothing.
REFUSED = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "prompt_logprobs": (),
    "response_schema": (),
    "extra_body": ({},),
    "modalities": ([], ["text"]),
}
# Settings that have no meaning for this model.
WITHOUT_EFFECT = {
    "batch": (False,),
    "effort": (),
    "extra_headers": ({},),
    "fallback_models": ([],),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "reasoning_mode": (),
    "reasoning_summary": (),
    "reasoning_tokens": (),
    "verbosity": (),
}
MOST_TOP_LOGPROBS = 20


def conversation(messages, tools):
    """Reads a conversation.

    The model's thoughts are said as it wrote them. Calls that could not be
    read are not said again, and the user says what was wrong with them.

    Args:
        messages: list of `ChatMessage`s.
        tools: list of `ToolInfo`s.

    Returns:
        `chat_api.Call`.

    Raises:
        ValueError: a message has other content than text, or the model said
            the last one.
    """
    said, unreadable = [], set()
    for i, message in enumerate(messages):
        new = {"role": message.role, "content": _text(message.content, i)}
        if message.role == "assistant":
            calls = message.tool_calls or []
            unreadable |= {c.id for c in calls if c.parse_error}
            new["tool_calls"] = [_call(c) for c in calls if not c.parse_error]
        elif message.role == "tool":
            if message.error is not None:
                new["content"] = f"error: {message.error.message}"
            if message.tool_call_id in unreadable:
                new = {"role": "user", "content": new["content"]}
                if said[-1]["role"] in ("tool", "user"):
                    said[-1]["content"] += "\n" + new["content"]
                    continue
            else:
                new["tool_call_id"] = message.tool_call_id or ""
                new["name"] = message.function
        said.append(new)
    body = {"messages": said, "tools": [_tool(tool) for tool in tools]}
    try:
        return chat_api.read(body, None)
    except chat_api.Refused as error:
        raise ValueError(str(error)) from None


def _text(content, i):
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type == "reasoning":
            is_ours = isinstance(part.internal, str)
            texts.append(part.internal if is_ours else part.text)
        elif part.type == "text":
            texts.append(part.text)
        else:
            raise ValueError(
                "Messages must be text: this model takes no images, audio or "
                f"files. Received: content of the type {part.type!r} in "
                f"message {i}"
            )
    return "".join(texts)


def _call(call):
    function = {"name": call.function, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool):
    parameters = tool.parameters.model_dump(exclude_none=True)
    # Every tool has it, and the model need not read it.
    if parameters.get("additionalProperties") is False:
        del parameters["additionalProperties"]
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": parameters,
        },
    }


def split_thoughts(text):
    """Splits a turn into its thoughts and its answer.

    Returns:
        Tuple of the thoughts without their marks, the thoughts as they were
        written, with the space behind them, and the answer; all strings.
    """
    thoughts, answer = parsing.split_thoughts(text)
    written = text[: len(text) - len(answer.lstrip())] if thoughts else ""
    bare = thoughts.strip()
    for begin, end in parsing.THOUGHTS:
        bare = bare.removeprefix(begin).removesuffix(end)
    return bare.strip(), written, text[len(written) :]


def sampling(config):
    """Returns the fields of `Request` that a `GenerateConfig` sets.

    Raises:
        ValueError: a setting cannot be followed.
    """
    refused = {
        name: value
        for name, values in REFUSED.items()
        if (value := getattr(config, name, None)) is not None
        and value not in values
    }
    if refused:
        raise ValueError(
            "Generation settings must be among `max_tokens`, `temperature`, "
            "`top_p`, `top_k`, `stop_seqs`, `seed`, `num_choices`, "
            f"`logprobs` and `top_logprobs`. Received: {refused}. Leave them "
            "out."
        )
    for name in ("max_tokens", "num_choices"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(
                f"`{name}` must be a positive int. Received: {name}={value}"
            )
    top = config.top_logprobs or 0
    if not 0 <= top <= MOST_TOP_LOGPROBS:
        raise ValueError(
            f"`top_logprobs` must be from 0 to {MOST_TOP_LOGPROBS}. "
            f"Received: top_logprobs={top}"
        )
    temperature = 1.0 if config.temperature is None else config.temperature
    fields = {"temperature": float(temperature), "seed": config.seed}
    if temperature:
        fields |= {"top_p": config.top_p, "top_k": config.top_k}
    return fields


class Notes:
    """Warns about settings without effect, once for each."""

    def __init__(self):
        self._said = set()

    def __call__(self, config, tool_choice):
        found = {
            name: value
            for name, values in WITHOUT_EFFECT.items()
            if (value := getattr(config, name, None)) is not None
            and value not in values
        }
        if tool_choice not in ("auto", "none"):
            found["tool_choice"] = tool_choice
        for name in found.keys() - self._said:
            self._said.add(name)
            warnings.warn(
                f"`{name}` has no effect on this model. "
                f"Received: {name}={found[name]!r}",
                stacklevel=3,
            )
