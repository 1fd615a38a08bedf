"""Tool calls in the text of a sampled turn, in the formats of model families.

Each format is a function `parse(text, tools=None)` that returns a
`parsing.ParsedTurn`. It takes any text without an error, because models write
anything. The text is that of `decode_turn`; `tools` are the schemas that the
model was shown.
"""

import re

from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.spans import text_and_spans
from keras_posttrain.data.chat.template import Conversation
from keras_posttrain.episodes import parsing

_BETWEEN = re.compile(r"[\s;]*")
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_GEMMA4_NAME = re.compile(r"\s*call:([\w.-]+)\s*\{")
_PYTHON_LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
# A known tool, and a known call of it.
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a forecast.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["place", "days"],
        },
    },
}
_CALL = {
    "name": "look_up",
    "arguments": {"place": 'the "Old" town\'s', "days": 3},
}


def decode_turn(tokenizer, token_ids):
    """Decodes a sampled turn for the formats.

    Control tokens stay in the text: `<tool_call>` or `[TOOL_CALLS]` may be
    ones, and `tokenizer.decode` leaves them out by default. Only the token
    that ends the turn is left out.

    Args:
        tokenizer: a `Tokenizer`.
        token_ids: sequence of ints.

    Returns:
        String.
    """
    ids = [int(i) for i in token_ids]
    if ids and ids[-1] in tokenizer.stop_token_ids:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False)


def choose(tokenizer, tools, kwargs=None):
    """Finds the format of the calls that a chat template renders.

    The template renders a known call; the format that reads it back from its
    tokens is the model's.

    Args:
        tokenizer: a `Tokenizer` with a chat template.
        tools: list of dicts, the tools' JSON schemas.
        kwargs: dict, further variables of the template, or `None`.

    Returns:
        One of the functions of this module, `parse(text, tools)`.

    Raises:
        ValueError: the template does not render the tools, or writes calls in
            a format that is not known.
    """
    kwargs = kwargs or {}
    question = {"role": "user", "content": "question"}
    chat.render(
        tokenizer,
        [question],
        tools=tools,
        add_generation_prompt=True,
        **kwargs,
    )
    call = {"type": "function", "id": "call00000", "function": _CALL}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversation = Conversation(tokenizer, [question, turn], [_TOOL], kwargs)
    text = ""
    try:
        rendered, _, spans = text_and_spans(conversation)
        text = rendered[slice(*spans[-1][:2])]
    except ValueError:
        # It refuses calls, or leaves them out: no text, no format.
        pass
    text = decode_turn(tokenizer, tokenizer.encode(text))
    for parse in FORMATS:
        parsed = parse(text, [_TOOL])
        without_ids = [call | {"id": ""} for call in parsed.calls]
        if without_ids == [_CALL | {"id": ""}] and not parsed.unreadable:
            return parse
    names = [parse.__name__ for parse in FORMATS]
    raise ValueError(
        "The chat template must write tool calls in one of the formats "
        f"{names}. Received: a template that writes {text!r} for the call "
        f"{_CALL}. Pass another `chat_template=`."
    )


def hermes(text, tools=None):
    """Reads the JSON calls of Hermes, Qwen2.5 and Qwen3.

    `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.
    """

    def read(text, at):
        value, at = parsing.read_json(text, at)
        end = parsing.SPACE.match(text, at).end()
        if end < len(text) and not text.startswith("</tool_call>", end):
            raise ValueError("`</tool_call>` must follow the JSON object")
        return [parsing.as_call(value)], end + len("</tool_call>")

    return parsing.scan(text, "<tool_call>", "</tool_call>", read)


def qwen_xml(text, tools=None):
    """Reads the XML calls of Qwen3-Coder and Qwen3.5.

    `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`
    with a line break behind each part. The tool's schema says which
    parameters are no strings.
    """

    def read(text, at):
        function = _FUNCTION.match(text, at)
        if function is None:
            raise ValueError("`<function=name>` must follow `<tool_call>`")
        name, at, arguments = function[1].strip(), function.end(), {}
        schemas = parsing.parameters(tools, name)
        while parameter := _PARAMETER.match(text, at):
            key, start = parameter[1].strip(), parameter.end()
            end = text.find("</parameter>", start)
            if end < 0:
                raise ValueError(f"the parameter {key!r} has no end")
            value = text[start:end].removeprefix("\n").removesuffix("\n")
            arguments[key] = parsing.as_value(
                value, key, schemas.get(key, {"type": "string"})
            )
            at = end + len("</parameter>")
        end = _FUNCTION_END.match(text, at)
        if end is None:
            raise ValueError("`</function>` must follow the parameters")
        end = parsing.SPACE.match(text, end.end()).end()
        if text.startswith("</tool_call>", end):
            end += len("</tool_call>")
        return [parsing.as_call({"name": name, "arguments": arguments})], end

    return parsing.scan(text, "<tool_call>", "</tool_call>", read)


def llama_json(text, tools=None):
    """Reads the JSON calls of Llama 3.1 and 3.2, which are the whole turn.

    `{"name": "f", "parameters": {"x": 1}}`; several are separated by `;`.
    """
    thoughts, rest = parsing.split_thoughts(text)
    rest = rest.strip()
    tagged = rest.startswith("<|python_tag|>")
    rest = rest.removeprefix("<|python_tag|>").lstrip()
    if not rest.startswith("{") or not (tagged or '"parameters"' in rest):
        return parsing.ParsedTurn(text, [], [])
    calls, unreadable, at = [], [], 0
    while at < len(rest) and not unreadable:
        try:
            value, end = parsing.read_json(rest, at)
            calls.append(parsing.as_call(value, "parameters"))
            at = _BETWEEN.match(rest, end).end()
        except parsing.FAULTS as error:
            unreadable.append(parsing.reason(error))
    content = text if not calls else (thoughts + rest[at:]).strip()
    return parsing.ParsedTurn(content, calls, unreadable)


def mistral(text, tools=None):
    """Reads the JSON calls of Mistral.

    `[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]`,
    or of newer models `[TOOL_CALLS]f[ARGS]{"x": 1}`.
    """

    def read(text, at):
        named = _NAMED.match(text, at)
        value, end = parsing.read_json(text, named.end() if named else at)
        if named:
            value = [{"name": named[1], "arguments": value, "id": named[2]}]
        if not isinstance(value, list) or not value:
            raise ValueError("a list of calls must follow `[TOOL_CALLS]`")
        return [parsing.as_call(call) for call in value], end

    return parsing.scan(text, "[TOOL_CALLS]", "[/TOOL_CALLS]", read)


def gemma_python(text, tools=None):
    """Reads the Python calls that Gemma 3 is prompted for.

    `[f(x=1), g()]` as the whole turn, or calls on lines of their own in a
    block of Markdown with the language `tool_code`. Nothing is run.
    """

    def read(text, at):
        end = text.find("```", at)
        end = len(text) if end < 0 else end
        return parsing.read_python(text[at:end], tools), end + len("```")

    thoughts, rest = parsing.split_thoughts(text)
    if not _PYTHON_LIST.match(rest):
        return parsing.scan(text, "```tool_code\n", "```", read)
    try:
        return parsing.ParsedTurn(
            thoughts.strip(), parsing.read_python(rest, tools), []
        )
    except parsing.FAULTS as error:
        return parsing.ParsedTurn(text, [], [parsing.reason(error)])


def harmony(text, tools=None):
    """Reads the JSON calls of gpt-oss, messages to a function.

    ` to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>`;
    the recipient may be behind the channel. Thoughts are messages of their
    own, which the content keeps.
    """
    kept, calls, unreadable = [], [], []
    for message in text.split("<|start|>assistant"):
        header, _, body = message.partition("<|message|>")
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            kept.append(message)
            continue
        try:
            value, end = parsing.read_json(body, 0)
            if body[end:].strip() not in ("", "<|call|>", "<|end|>"):
                raise ValueError("nothing may follow the JSON object")
            call = {"name": recipient[1], "arguments": value}
            calls.append(parsing.as_call(call))
        except parsing.FAULTS as error:
            unreadable.append(parsing.reason(error))
            kept.append(message)
    content = "<|start|>assistant".join(kept).strip() if calls else text
    return parsing.ParsedTurn(content, calls, unreadable)


def gemma4(text, tools=None):
    """Reads the calls of Gemma 4, in a notation of its own.

    `<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>`.
    """

    def read(text, at):
        named = _GEMMA4_NAME.match(text, at)
        if named is None:
            raise ValueError("`call:name{` must follow `<|tool_call>`")
        value, at = parsing.read_gemma4(text, named.end() - 1)
        if text.startswith("<tool_call|>", at):
            at += len("<tool_call|>")
        return [parsing.as_call({"name": named[1], "arguments": value})], at

    parsed = parsing.scan(text, "<|tool_call>", "<tool_call|>", read)
    content = parsed.content
    if parsed.calls:
        # Tools answer inside the turn, which this token stops.
        content = content.removesuffix("<|tool_response>").rstrip()
    return parsed._replace(content=content)


def olmo_python(text, tools=None):
    """Reads the Python calls of OLMo 3, a line each; values are JSON's too.

    `<function_calls>f(x=1)</function_calls>`. Nothing is run.
    """

    def read(text, at):
        end = text.find("</function_calls>", at)
        end = len(text) if end < 0 else end
        found = parsing.read_python(text[at:end], tools)
        return found, end + len("</function_calls>")

    return parsing.scan(text, "<function_calls>", "</function_calls>", read)


def phi_json(text, tools=None):
    """Reads the JSON calls of Phi-4-mini and Granite 3.

    `<|tool_call|>{"name": "f", "arguments": {"x": 1}}<|/tool_call|>`, or a
    list of such objects; the closing mark may be missing.
    """

    def read(text, at):
        value, at = parsing.read_json(text, at)
        end = parsing.SPACE.match(text, at).end()
        if text.startswith("<|/tool_call|>", end):
            at = end + len("<|/tool_call|>")
        value = value if isinstance(value, list) else [value]
        return [parsing.as_call(call) for call in value], at

    return parsing.scan(text, "<|tool_call|>", "<|/tool_call|>", read)


FORMATS = (
    hermes,
    qwen_xml,
    llama_json,
    mistral,
    gemma_python,
    harmony,
    gemma4,
    olmo_python,
    phi_json,
)
