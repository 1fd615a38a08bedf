"""Tool calls are read from what models write, and hostile text is no fault."""

import itertools
import json
import random
import time

import pytest

from keras_posttrain.data.chat import chat
from keras_posttrain.episodes import calls
from tests.data.support import TEMPLATES, chat_tokenizer

FORMAT = {
    "qwen2_5": calls.hermes,
    "qwen3": calls.hermes,
    "qwen3_2507": calls.hermes,
    "qwen3_5": calls.qwen_xml,
    "llama3_1": calls.llama_json,
    "llama3_2": calls.llama_json,
    "gemma3_tools": calls.gemma_python,
    "mistral_v3": calls.mistral,
    "mistral_v7": calls.mistral,
    "gpt_oss": calls.harmony,
    "gemma4": calls.gemma4,
    "olmo3_1": calls.olmo_python,
    "phi4_mini": calls.phi_json,
}
# The templates of these have one call a turn.
SINGLE = ("llama3_1", "llama3_2", "gpt_oss")
PARAMETERS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "loud": {"type": "boolean"},
    "items": {"type": "array"},
    "fields": {"type": "object"},
    "maybe": {"type": "string", "nullable": True},
    "either": {"type": ["integer", "string"]},
    "any": {},
    "union": {"anyOf": [{"type": "array"}, {"type": "null"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": PARAMETERS},
        },
    }
]
ARGUMENTS = {
    "text": 'it\'s "quoted" \\d {"a": 1}, é\n\n<b> ```',
    "count": -3,
    "share": 0.5,
    "loud": True,
    "items": [1, "two", None, [3.5]],
    "fields": {"a": {"b": []}},
    "maybe": None,
    "either": "7",
    "any": 7,
    "union": None,
}
HI = {"role": "user", "content": "Hi"}


def turn(*arguments, content=""):
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "type": "function",
                "id": f"call{i:05d}",
                "function": {"name": "add", "arguments": value},
            }
            for i, value in enumerate(arguments)
        ],
    }


def sampled(tokenizer, message):
    """The ids of a turn, as the model samples them."""
    ids, offsets, text, spans = chat.encode_with_spans(
        tokenizer, [HI, message], tools=TOOLS
    )
    [(start, end, _)] = spans
    return tokenizer.encode(text[start:end])


@pytest.mark.parametrize("name", FORMAT)
def test_the_format_of_a_template_is_found(name):
    tokenizer = chat_tokenizer(name)
    assert calls.choose(tokenizer, TOOLS) is FORMAT[name]
    assert set(FORMAT) == set(TEMPLATES) - {"gemma3"}


@pytest.mark.parametrize("name", FORMAT)
def test_what_a_template_writes_is_read_back_from_ids(name):
    """Also where its marks are control tokens, which are skipped by default.

    Several calls, arguments of each type, and text before the calls.
    """
    tokenizer = chat_tokenizer(name)
    read = FORMAT[name]
    several = name not in SINGLE
    arguments = [ARGUMENTS, {"count": 2}][: 1 + several]
    content = "Let me see." if name.startswith("qwen") else ""
    ids = sampled(tokenizer, turn(*arguments, content=content))
    assert ids[-1] in tokenizer.stop_token_ids
    parsed = read(calls.decode_turn(tokenizer, ids), TOOLS)
    found = [call["arguments"] for call in parsed.calls]
    assert found == arguments
    assert [call["name"] for call in parsed.calls] == ["add"] * len(found)
    assert parsed.unreadable == []
    names = [call.get("id") for call in parsed.calls]
    with_ids = name.startswith("mistral")
    assert names == (
        ["call00000", "call00001"] if with_ids else [None] * len(names)
    )
    assert parsed.content.rpartition("</think>")[2].strip() == content
    # The message that was read is rendered as it was sampled.
    again = turn(*found, content=parsed.content)
    assert sampled(tokenizer, again) == ids


@pytest.mark.parametrize("name", ["qwen3", "mistral_v7"])
def test_marks_that_are_control_tokens_need_decode_turn(name):
    tokenizer = chat_tokenizer(name)
    ids = sampled(tokenizer, turn({"count": 1}))
    assert FORMAT[name](calls.decode_turn(tokenizer, ids)).calls
    assert not FORMAT[name](tokenizer.decode(ids)).calls


def hermes(arguments='{"count": 1}', end="</tool_call>"):
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n{end}'


def xml(value="1", key="count", end="</function>\n</tool_call>"):
    return (
        f"<tool_call>\n<function=add>\n<parameter={key}>\n{value}\n"
        f"</parameter>\n{end}"
    )


ONE = [{"name": "add", "arguments": {"count": 1}}]


@pytest.mark.parametrize(
    "read, text, content, expected",
    [
        # Text around the calls is the content.
        (calls.hermes, f"A\n{hermes()}\n{hermes()} B", "A\n\n B", ONE * 2),
        (calls.hermes, hermes(end=""), "", ONE),
        (calls.hermes, "no call", "no call", []),
        (calls.hermes, " kept as it is \n", " kept as it is \n", []),
        # A thought calls nothing.
        (
            calls.hermes,
            f"<think>{hermes()}</think>\n\n{hermes()}",
            f"<think>{hermes()}</think>",
            ONE,
        ),
        (
            calls.hermes,
            f"I {hermes()}</think>Yes",
            f"I {hermes()}</think>Yes",
            [],
        ),
        (calls.hermes, f"<think>{hermes()}", f"<think>{hermes()}", []),
        # The closing mark may be in a string.
        (
            calls.hermes,
            hermes('{"text": "</tool_call>"}'),
            "",
            [{"name": "add", "arguments": {"text": "</tool_call>"}}],
        ),
        (calls.qwen_xml, f"A\n\n{xml()}", "A", ONE),
        (calls.qwen_xml, xml(end="</function>"), "", ONE),
        (
            calls.qwen_xml,
            "<tool_call><function=add></function></tool_call>",
            "",
            [{"name": "add", "arguments": {}}],
        ),
        (
            calls.llama_json,
            '<|python_tag|>{"name": "add", "parameters": {"count": 1}}; '
            '{"type": "function", "name": "add", "parameters": {"count": 1}}',
            "",
            ONE * 2,
        ),
        (calls.llama_json, '{"name": "Ann", "age": 3}', None, []),
        (calls.llama_json, "see {}", None, []),
        (
            calls.mistral,
            'A[TOOL_CALLS]add[ARGS]{"count": 1}[TOOL_CALLS]add[CALL_ID]x1'
            '[ARGS]{"count": 1}',
            "A",
            [*ONE, ONE[0] | {"id": "x1"}],
        ),
        (calls.gemma_python, " [add(count=1), add(1 - 0)]", None, None),
        (calls.gemma_python, "[add(count=+1)]", "", ONE),
        (calls.gemma_python, "[1, 2]", None, []),
        (
            calls.harmony,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.add <|constrain|>json"
            '<|message|>{"count": 1}<|call|>',
            "<|channel|>analysis<|message|>Hm.<|end|>",
            ONE,
        ),
        (
            calls.harmony,
            "<|channel|>final<|message|>to=functions.add {}",
            None,
            [],
        ),
        (
            calls.gemma4,
            "A<|tool_call>call:add{count: 1}<tool_call|><|tool_call>call:add{"
            '<|"|>count<|"|>:1}<tool_call|><|tool_response>',
            "A",
            ONE * 2,
        ),
        (
            calls.gemma4,
            "<|channel>thought\n<|tool_call>call:add{}<channel|>"
            "<|tool_call>call:add{count:1}",
            "<|channel>thought\n<|tool_call>call:add{}<channel|>",
            ONE,
        ),
        (calls.gemma4, "call:add{count:1}", None, []),
        (
            calls.olmo_python,
            "A <function_calls>add(count=1)\nadd(count=1)</function_calls>",
            "A",
            ONE * 2,
        ),
        (
            calls.olmo_python,
            "<function_calls>add(loud=true, maybe=None, items=[null])",
            "",
            [
                {
                    "name": "add",
                    "arguments": {
                        "loud": True,
                        "maybe": None,
                        "items": [None],
                    },
                }
            ],
        ),
        (
            calls.phi_json,
            'A<|tool_call|>[{"name": "add", "arguments": {"count": 1}}]B',
            "AB",
            ONE,
        ),
        (
            calls.gemma_python,
            "A\n```tool_code\nprint(add(count=1))\nadd(count=1)\n```\nB",
            "A\n\nB",
            ONE * 2,
        ),
        (
            calls.gemma_python,
            '```tool_code\nadd("\\d\\n\\\\d", 2)',
            "",
            [{"name": "add", "arguments": {"text": "\\d\n\\d", "count": 2}}],
        ),
    ],
)
def test_calls_are_read(read, text, content, expected):
    parsed = read(text, TOOLS)
    if expected is None:
        assert parsed == (text, [], ["the argument 'text' is no literal"])
        return
    assert parsed == (text if content is None else content, expected, [])


@pytest.mark.parametrize(
    "read, text, reason",
    [
        (calls.hermes, hermes('{"a": 1'), "no valid JSON: Expecting ','"),
        (calls.hermes, hermes("1"), 'must have "arguments"'),
        (calls.hermes, hermes().replace("add", ""), 'have a "name"'),
        (calls.hermes, "<tool_call>[]</tool_call>", "be a JSON object"),
        (calls.hermes, hermes(end="}</tool_call>"), "must follow the JSON"),
        (calls.hermes, hermes("[" * 10**5), "nested too deeply"),
        (calls.hermes, hermes('{"a":' + "[" * 99 + "]" * 99 + "}"), "deeply"),
        (calls.hermes, hermes('{"a": 1e999}'), "Out of range float"),
        (calls.hermes, hermes('{"a": NaN}'), "Out of range float"),
        (calls.hermes, hermes('{"a": "\\ud800"}'), "surrogates not allowed"),
        (calls.hermes, hermes('{"a": ' + "9" * 5000 + "}"), "4300"),
        (calls.qwen_xml, "<tool_call>{}</tool_call>", "must follow `<tool_c"),
        (calls.qwen_xml, xml("one"), "'count' must be of type integer"),
        (calls.qwen_xml, xml("[" * 10**5), "'count' must be of type integer"),
        (calls.qwen_xml, xml(end="</tool_call>"), "`</function>` must"),
        (calls.qwen_xml, "<tool_call><function=f><parameter=x>", "no end"),
        (calls.llama_json, '{"name": "add", "parameters": {', "no valid JSON"),
        (calls.llama_json, "<|python_tag|>{1}", "no valid JSON"),
        (calls.mistral, "[TOOL_CALLS] {}", "a list of calls must follow"),
        (calls.mistral, "[TOOL_CALLS] []", "a list of calls must follow"),
        (calls.mistral, "[TOOL_CALLS] [{]", "no valid JSON"),
        (calls.harmony, " to=functions.f<|message|>{", "no valid JSON"),
        (calls.harmony, " to=functions.f<|message|>{} x", "may follow"),
        (calls.gemma4, "<|tool_call>add{}<tool_call|>", "`call:name{` must"),
        (calls.gemma4, "<|tool_call>call:f{a:b}", "strings must be between"),
        (calls.gemma4, "<|tool_call>call:f{a}", "have a name and a colon"),
        (calls.gemma4, '<|tool_call>call:f{a:<|"|>b', "a string has no end"),
        (calls.gemma4, "<|tool_call>call:f{a:1", "`}` or a comma must follow"),
        (calls.gemma4, "<|tool_call>call:f{a:1[]}", "or a comma must follow"),
        (calls.gemma4, "<|tool_call>call:f{a:" + "[" * 99, "too deeply"),
        (calls.gemma4, "<|tool_call>call:f{a:NaN}", "Out of range float"),
        (calls.olmo_python, "<function_calls>x", "only calls of functions"),
        (calls.olmo_python, "<function_calls>f(a=b)", "'a' is no literal"),
        (calls.phi_json, "<|tool_call|>[", "no valid JSON"),
        (calls.phi_json, "<|tool_call|>[1]", "a call must be a JSON object"),
        (calls.gemma_python, "[add(count=1)", "no valid Python"),
        (calls.gemma_python, "[add(count=print(1))]", "'count' is no literal"),
        (calls.gemma_python, "[add(count={1})]", "not JSON serializable"),
        (calls.gemma_python, "[add(**{})]", "must be passed once, by name"),
        (calls.gemma_python, "[add('a', text='b')]", "must be passed once"),
        (calls.gemma_python, "[sub(1)]", "must be passed by name"),
        (calls.gemma_python, "[add(x=" + "-" * 10**5 + "1)]", "deeply"),
        (calls.gemma_python, "[add(x='\0')]", "null bytes"),
        (calls.gemma_python, "[a.b(x=1)]", "functions by their names"),
        (calls.gemma_python, "```tool_code\nx = 1\n```", "only calls"),
        (calls.gemma_python, "```tool_code\n```", "holds no call"),
    ],
)
def test_what_cannot_be_read_is_said_and_stays_in_the_content(
    read, text, reason
):
    parsed = read(text, TOOLS)
    assert (parsed.content, parsed.calls) == (text, [])
    assert len(parsed.unreadable) == 1 and reason in parsed.unreadable[0]


def test_readable_calls_next_to_others_are_read():
    parsed = calls.hermes(f"A {hermes()}<tool_call>x</tool_call>{hermes()}")
    assert parsed.calls == ONE * 2
    assert parsed.content == "A <tool_call>x</tool_call>"
    assert len(parsed.unreadable) == 1
    text = '{"name": "add", "parameters": {"count": 1}} or {"name": 2}'
    assert calls.llama_json(text).calls == ONE
    assert calls.llama_json(text).content == 'or {"name": 2}'


def test_no_text_is_a_fault():
    """Random mixes of the marks, and long repeats in a bounded time."""
    pieces = [
        *("<tool_call>", "</tool_call>", "<function=add>", "</function>"),
        *("<parameter=count>", "</parameter>", "[TOOL_CALLS]", "[ARGS]"),
        *("```tool_code\n", "```", "[add(", "add(x=", ")]", "<|python_tag|>"),
        *("<think>", "</think>", '{"name": "add", "parameters": ', "}", "{"),
        *("<|start|>assistant", " to=functions.add", "<|message|>"),
        *("<|tool_call>call:add{", "<tool_call|>", '<|"|>', "count:", "}"),
        *("<function_calls>", "</function_calls>", "<|tool_call|>"),
        *('"arguments": {', '"', "'", "\\", "\0", "\ud800", "1e999", "[", "]"),
        *("1", ",", "\n", "add", "é", "lambda: ", "**", "f'{", ";", "=", "("),
    ]
    draw = random.Random(0)
    for length in itertools.chain(range(1, 40), [80] * 200):
        text = "".join(draw.choices(pieces, k=length))
        for read in calls.FORMATS:
            parsed = read(text, TOOLS)
            json.dumps(parsed.calls, allow_nan=False).encode()
            if not parsed.calls:
                assert parsed.content == text
    start = time.monotonic()
    for piece in pieces:
        for read in calls.FORMATS:
            read("<tool_call>" + piece * 20_000, TOOLS)
            read(piece * 20_000, TOOLS)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "name, message",
    [
        ("gemma3", "does not render tools.*'add'"),
        ("calls left out", "must write tool calls in one of the formats"),
        ("another format", "writes .*CALL look_up.* for the call"),
    ],
)
def test_a_template_without_a_known_format_is_an_error(name, message):
    if name == "gemma3":
        tokenizer = chat_tokenizer("gemma3")
    else:
        call = "CALL {{ c.function.name }}" if name == "another format" else ""
        tokenizer = chat_tokenizer("qwen3").with_chat_template(
            "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role"
            " }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
            + call
            + "{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
    with pytest.raises(ValueError, match=message):
        calls.choose(tokenizer, TOOLS)
