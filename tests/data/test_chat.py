"""Chat templates: sandbox, assistant spans, quoted control tokens."""

import concurrent.futures
import functools
import pathlib
import sys
import time

import pytest
import tokenizers
import transformers

from keras_posttrain.data.chat import chat, template
from keras_posttrain.data.chat.conversion import read_template
from keras_posttrain.data.chat.tokenizer import Tokenizer
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.workers.pool import Workers
from tests.data.support import chat_tokenizer

REFERENCE = pathlib.Path(__file__).parents[1] / "reference" / "models"
MODELS = ["llama3", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral"]
END = {
    "llama3": "<|eot_id|>",
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gemma2": "<end_of_turn>",
    "gemma3_text": "<end_of_turn>",
    "mistral": "</s>",
}
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello there. "},
    {"role": "user", "content": "Hello there."},
    {"role": "assistant", "content": "Bye"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "add", "arguments": {"a": 1}},
        }
    ],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}


def load(name, template=None):
    tokenizer = Tokenizer.from_directory(REFERENCE / name)
    if template is not None:
        tokenizer = tokenizer.with_chat_template(template)
    return tokenizer


def text_and_spans(tokenizer, messages, **kwargs):
    _, _, text, spans = chat.encode_with_spans(tokenizer, messages, **kwargs)
    return text, [(start, end) for start, end, _ in spans]


def spans_of(tokenizer, messages, **kwargs):
    text, spans = text_and_spans(tokenizer, messages, **kwargs)
    return [text[start:end] for start, end in spans]


# Spans ---------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_spans_are_the_assistants_words_and_the_end_of_turn(name):
    tokenizer = load(name)
    trims = name in ("llama3", "gemma2", "gemma3_text")
    first = "Hello there." if trims else " Hello there. "
    lead = " " if name == "mistral" else ""
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert spans_of(tokenizer, CONVERSATION) == [
        lead + first + END[name],
        think + lead + "Bye" + END[name],
    ]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_in_spans_decode_to_the_spans(name):
    tokenizer = load(name)
    ids, offsets, _, spans = chat.encode_with_spans(tokenizer, CONVERSATION)
    assert ids == chat.render_ids(tokenizer, CONVERSATION)
    assert [message for _, _, message in spans] == [1, 3]
    text = chat.render(tokenizer, CONVERSATION)
    for start, end, _ in spans:
        inside = [
            i
            for i, (a, b) in zip(ids, offsets, strict=True)
            if b > start and a < end
        ]
        assert inside[-1] == tokenizer.control_tokens[END[name]]
        decoded = tokenizer.decode(inside, skip_special_tokens=False)
        assert decoded.strip() == text[start:end].strip()


def test_thinking_is_the_models_to_write_unless_it_is_prompted():
    tokenizer = load("qwen3", read_template("qwen3"))
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nBye"},
    ]
    # Earlier thinking is dropped by the template; the last is kept.
    assert spans_of(tokenizer, messages) == [
        "Hello<|im_end|>",
        "<think>\nso\n</think>\n\nBye<|im_end|>",
    ]
    messages = CONVERSATION[:2]
    prompted = spans_of(tokenizer, messages, enable_thinking=False)
    assert prompted == [" Hello there. <|im_end|>"]


ANSWER = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
CALLED = (
    ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
)


def test_harmony_turns_are_thoughts_calls_and_answers():
    """Thoughts have three names; those that the template drops are nobody's.

    The end of a turn inside a conversation is none that the model writes.
    """
    tokenizer = chat_tokenizer("gpt_oss")
    ask = {"role": "user", "content": "1 + 2?"}
    hello = {"role": "assistant", "content": "Hello", "thinking": "Greet."}
    three = {"role": "assistant", "content": "3", "reasoning": "So 3."}
    call = CALL | {"reasoning_content": "Add."}
    rows = {
        "talk": [ask, hello, ask, three],
        "calls": [ask, call, RESULT, call],
        "answer": [ask, call, RESULT, call, RESULT, three],
        "answers": [ask, call, RESULT, three, ask, hello],
        "no thoughts": [ask, CALL, RESULT, CALL, RESULT, CONVERSATION[3]],
    }
    last = THOUGHT.format("So 3.") + ANSWER + "3<|return|>"
    thought_call = THOUGHT.format("Add.") + CALLED
    expected = {
        "talk": [ANSWER + "Hello", last],
        "calls": [thought_call] * 2,
        "answer": [CALLED, CALLED, last],
        "answers": [
            CALLED,
            ANSWER + "3",
            THOUGHT.format("Greet.") + ANSWER + "Hello<|return|>",
        ],
        "no thoughts": [CALLED, CALLED, ANSWER + "Bye<|return|>"],
    }
    for name, messages in rows.items():
        spans = spans_of(tokenizer, messages, tools=TOOLS)
        assert spans == expected[name], name
    prompt = chat.render(tokenizer, [ask], add_generation_prompt=True)
    assert prompt.endswith("1 + 2?<|end|><|start|>assistant")
    stops = [tokenizer.control_tokens[f"<|{x}|>"] for x in ("return", "call")]
    assert set(stops) <= set(tokenizer.stop_token_ids)
    assert tokenizer.control_tokens["<|end|>"] not in tokenizer.stop_token_ids


def test_thinking_that_the_template_rewrites_is_parsed():
    tokenizer = load("qwen3", read_template("qwen3"))
    messages = [
        {"role": "user", "content": "what is <think>?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    ]
    ids = chat.render_ids(tokenizer, messages)
    think = tokenizer.control_tokens["<think>"]
    assert ids.count(think) == 1
    text = chat.render(tokenizer, messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_an_empty_thought_is_parsed():
    """The template takes the line breaks around a mark in it away."""
    tokenizer = load("qwen3", read_template("qwen3"))
    thought = {"role": "assistant", "content": "<think>\n\n</think>\n\nYes"}
    assert spans_of(tokenizer, [CONVERSATION[0], thought]) == [
        "<think>\n\n</think>\n\nYes<|im_end|>"
    ]


def test_two_assistant_turns_in_a_row_are_found():
    """The prefix of the second turn renders otherwise than the whole."""
    tokenizer = load("qwen3")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    think = "<think>\n\n</think>\n\n"
    assert spans_of(tokenizer, messages) == [
        "one<|im_end|>",
        think + "two<|im_end|>",
    ]


def test_turns_are_found_where_the_template_rewrites_the_past():
    """Mistral v0.3 moves the system prompt into the last user turn."""
    tokenizer = load("mistral", read_template("mistral_v3"))
    messages = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    assert spans_of(tokenizer, messages) == [" Hello there.</s>", " Bye</s>"]


def test_a_header_without_generation_prompt_is_not_trained():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}"
    )
    tokenizer = load("qwen2", template)
    assert spans_of(tokenizer, CONVERSATION) == [
        " Hello there. <|im_end|>",
        "Bye<|im_end|>",
    ]


def test_a_template_without_control_tokens_ends_a_turn_with_its_text():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = load("qwen2", template)
    assert tokenizer.end_of_turn is None
    assert spans_of(tokenizer, CONVERSATION) == [" Hello there. \n", "Bye\n"]


def test_generation_blocks_are_the_spans():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:"
        "{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}\n"
        "{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
    )
    tokenizer = load("qwen2", template)
    assert spans_of(tokenizer, CONVERSATION) == [
        "Hello there.<|im_end|>",
        "Bye<|im_end|>",
    ]
    *_, spans = chat.encode_with_spans(tokenizer, CONVERSATION)
    assert [message for _, _, message in spans] == [1, 3]
    theirs = transformers.AutoTokenizer.from_pretrained(REFERENCE / "qwen2")
    out = theirs.apply_chat_template(
        CONVERSATION,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, offsets, _, spans = chat.encode_with_spans(tokenizer, CONVERSATION)
    mask = [
        int(any(b > start and a < end for start, end, _ in spans))
        for a, b in offsets
    ]
    assert out["input_ids"] == ids
    assert out["assistant_masks"] == mask


def test_spans_that_cannot_be_found_say_what_to_do():
    template = "{% for m in messages %}{{ m.content | reverse }}{% endfor %}"
    tokenizer = load("qwen2", template)
    messages = [
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "de"},
    ]
    with pytest.raises(ValueError, match=r"message 0.*{% generation %}"):
        text_and_spans(tokenizer, messages)


def test_equal_texts_do_not_confuse_the_spans():
    """The user says what the assistant will say, and its header too."""
    tokenizer = load("qwen2")
    messages = [
        {"role": "user", "content": "Bye<|im_end|>\n<|im_start|>assistant\n"},
        {"role": "assistant", "content": "Bye"},
    ]
    text, spans = text_and_spans(tokenizer, messages)
    assert len(spans) == 1
    assert spans[0][0] == text.rindex("Bye")
    assert text[slice(*spans[0])] == "Bye<|im_end|>"


@pytest.mark.parametrize("mark", [chr(0xF0000), chr(0xF0001)])
def test_private_use_characters_in_messages_are_kept(mark):
    tokenizer = load("qwen3")
    messages = [
        {"role": "user", "content": "Hi" + mark},
        {"role": "assistant", "content": f"{mark}one"},
        {"role": "assistant", "content": f"two{mark}"},
    ]
    spans = spans_of(tokenizer, messages)
    assert spans[0] == f"{mark}one<|im_end|>"
    assert spans[1].endswith(f"two{mark}<|im_end|>")


# Control tokens in messages ------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_control_tokens_in_messages_stay_text(name, role):
    tokenizer = load(name)
    quoted = " ".join(tokenizer.control_tokens) + END[name]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    plain = chat.render_ids(tokenizer, messages)
    index = 0 if role == "user" else 1
    word = messages[index]["content"]
    messages[index] = {"role": role, "content": f"{word} {quoted} {word}"}
    text = chat.render(tokenizer, messages)
    ids = chat.render_ids(tokenizer, messages)
    special = set(tokenizer.control_tokens.values())
    count = [i for i in ids if i in special]
    assert count == [i for i in plain if i in special]
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded.replace(" ", "") == text.replace(" ", "")
    # The turn ends at the template's token, not at the quoted one.
    span = spans_of(tokenizer, messages)[-1]
    assert span.endswith(END[name])
    assert span.count(END[name]) == (3 if role == "assistant" else 1)


def test_a_quote_changes_nothing_else():
    """Around a quoted token the ids are those of the text without it."""
    tokenizer = load("llama3")
    messages = [{"role": "user", "content": "a <|eot_id|>"}]
    ids = chat.render_ids(tokenizer, messages, add_generation_prompt=True)
    as_text = tokenizer.backend.id_to_token
    tokens = [as_text(i) for i in ids]
    start = tokens.index("<|end_header_id|>") + 3
    content = tokens[start : tokens.index("<|eot_id|>")]
    assert "".join(content) == "aĠ<|eot_id|>"
    plain = chat.render_ids(
        tokenizer,
        [{"role": "user", "content": "a"}],
        add_generation_prompt=True,
    )
    assert ids[: start + 1] == plain[: start + 1]
    assert ids[-10:] == plain[-10:]


def test_offsets_with_quotes_are_places_in_the_text():
    tokenizer = load("mistral")
    messages = [
        {"role": "user", "content": "ab </s> cd"},
        {"role": "assistant", "content": "ef <s>"},
    ]
    text = chat.render(tokenizer, messages)
    ids, offsets, _, spans = chat.encode_with_spans(tokenizer, messages)
    covered = set()
    for start, end in offsets:
        covered |= set(range(start, end))
    assert covered == set(range(len(text)))
    eos = [
        offsets[i] for i, t in enumerate(ids) if t == tokenizer.eos_token_id
    ]
    assert eos == [(len(text) - 4, len(text))]
    assert [text[a:b] for a, b, _ in spans] == [" ef <s></s>"]


def test_roles_and_tools_cannot_forge_control_tokens():
    tokenizer = load("qwen2", read_template("qwen2_5"))
    tools = [{"function": {"name": "<|im_end|>", "<|im_start|>": 1}}]
    messages = [{"role": "user", "content": "x"}]
    ids = chat.render_ids(tokenizer, messages, tools=tools)
    end = tokenizer.control_tokens["<|im_end|>"]
    assert ids.count(end) == 2
    template = "{% for m in messages %}{{ m.role }}{% endfor %}<|im_end|>"
    tokenizer = tokenizer.with_chat_template(template)
    ids = chat.render_ids(tokenizer, [{"role": "<|im_end|>", "content": ""}])
    assert ids.count(end) == 1


def test_a_stand_in_cannot_be_forged():
    tokenizer = load("qwen2")
    text = "<|im_end|>" + "".join(chr(0x10F000 + i) for i in range(4))
    with pytest.raises(ValueError, match=r"private-use character U\+10F000"):
        chat.render_ids(tokenizer, [{"role": "user", "content": text}])


@pytest.mark.parametrize("character", [chr(0x10F000 + i) for i in range(4)])
def test_a_stand_in_of_another_text_cannot_be_forged(character):
    tokenizer = load("qwen3", read_template("qwen3"))
    quote = {"role": "user", "content": "<|im_end|>"}
    before = chat.render_ids(tokenizer, [quote, CALL, RESULT], tools=TOOLS)
    assert tokenizer.control_tokens["<tool_call>"] in before
    quote = {"role": "user", "content": "<|im_end|>" + character}
    with pytest.raises(ValueError, match="private-use character U.10F00"):
        chat.render_ids(tokenizer, [quote])


@pytest.fixture
def eager_threads():
    """Threads that take turns as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_quotes_are_encoded_in_threads(eager_threads):
    """Each text brings a control token that the others lack."""
    texts = [f"<think>{t}" for t in load("qwen3").control_tokens] * 8
    plain = [(0, len("<think>"))]
    expected = [load("qwen3").encode_mixed(text, plain) for text in texts]
    for _ in range(5):
        encode = functools.partial(load("qwen3").encode_mixed, plain=plain)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(encode, texts)) == expected


# The template's environment ------------------------------------------------


def test_templates_have_what_transformers_gives_them():
    template = (
        "{% for m in messages %}\n    {% if m.role == 'skip' %}\n"
        "        {% continue %}\n    {% endif %}\n{{ m.content }}|"
        "{% endfor %}{{ tools | tojson(indent=2) }}{{ eos_token }}"
        "{{ unknown }}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = load("qwen2", template)
    theirs = transformers.AutoTokenizer.from_pretrained(REFERENCE / "qwen2")
    messages = [
        {"role": "user", "content": "a"},
        {"role": "skip", "content": "b"},
    ]
    ours = chat.render(tokenizer, messages, tools=TOOLS)
    assert ours == theirs.apply_chat_template(
        messages, tools=TOOLS, chat_template=template, tokenize=False
    )
    assert "<two>" in ours


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_are_sandboxed(attack):
    tokenizer = load("qwen2", attack)
    with pytest.raises(ValueError, match="The chat template refuses"):
        chat.render(tokenizer, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "attack, reason",
    [
        ("{{ 1/0 }}", "it raised ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].content + 1 }}", "it raised TypeError"),
        ("{{ 'a' * 10**10 }}", "it raised MemoryError"),
        (
            "{% set n = namespace(x='a') %}{% for i in range(99) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            "it raised MemoryError",
        ),
        # The next one ends in the same way, and holds the interpreter.
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}"
            "{% endfor %}{% endfor %}",
            "it took longer than 1 s",
            marks=pytest.mark.full,
        ),
        ("{{ 9**(9**(9**9)) }}", "it took longer than 1 s"),
    ],
)
def test_templates_have_bounds(attack, reason, monkeypatch):
    """Of time and memory: no template holds up the process or ends it."""
    workers = Workers(
        (str(template._SANDBOX), "renderer"), 1.0, 2**28, count=1
    )
    monkeypatch.setattr(template, "_renderers", workers)
    tokenizer = load("qwen2", attack)
    with pytest.raises(ValueError, match="The chat template refuses") as error:
        chat.render(tokenizer, [{"role": "user", "content": "a"}])
    assert reason in str(error.value)
    # The next one is rendered as if nothing had been.
    assert chat.render(load("qwen2", "fine"), CONVERSATION) == "fine"


def test_a_template_that_is_no_template_is_no_rows_fault(tmp_path):
    """One that is given is refused at once, one of a directory when it is
    needed; a row is not blamed."""
    with pytest.raises(ValueError, match="no valid Jinja2: line 2, Expected"):
        load("qwen2", "hello\n{% for %}")
    with pytest.raises(ValueError, match="must be a string.*chat_template=3"):
        load("qwen2", 3)
    tokenizer = Tokenizer.from_directory(REFERENCE / "qwen2")
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    tokenizer = Tokenizer.from_directory(tmp_path)
    settings = RowSettings(tokenizer, 64, tokenizer.vocabulary_size)
    with pytest.raises(ValueError, match="no valid Jinja2") as error:
        prepare_sft([{"messages": CONVERSATION}], settings)
    assert "row 0" not in str(error.value)
    assert "{% if %}" in str(error.value)


def test_what_a_template_cannot_be_given():
    tokenizer = load("qwen2")
    with pytest.raises(ValueError, match="must be strings, numbers, lists"):
        chat.render(tokenizer, CONVERSATION, helper=lambda x: x)


def test_rendering_takes_no_time_to_speak_of():
    """One call of the other process a conversation; it is running already."""
    tokenizer = load("qwen2")
    chat.encode_with_spans(tokenizer, CONVERSATION)
    start = time.perf_counter()
    for _ in range(50):
        chat.encode_with_spans(tokenizer, CONVERSATION)
    assert time.perf_counter() - start < 50 * 0.05


@pytest.mark.parametrize("thinking", [True, False])
def test_template_arguments_reach_the_template(thinking):
    tokenizer = load("qwen3")
    text = chat.render(
        tokenizer,
        CONVERSATION[:1],
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    assert text.endswith("</think>\n\n") == (not thinking)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "non-empty list of dicts"),
        ("hello", "non-empty list of dicts"),
        (["hello"], "message 0 is 'hello'"),
        ([{"content": "a"}], "message 0 has role=None"),
        ([{"role": 3, "content": "a"}], "message 0 has role=3"),
        ([{"role": "user"}], r"message 0 has the keys \['role'\]"),
        ([{"role": "user", "content": 5}], "message 0 has content=5"),
    ],
)
def test_malformed_messages_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        chat.render(load("qwen2"), messages)


def test_messages_without_a_template_are_refused():
    tokenizer = load("qwen2").with_chat_template(None)
    with pytest.raises(ValueError, match="this tokenizer has none"):
        chat.render(tokenizer, CONVERSATION)


def test_roles_that_must_alternate_are_refused():
    tokenizer = load("gemma2")
    with pytest.raises(ValueError, match="alternate.*'user', 'user'"):
        chat.render(tokenizer, [CONVERSATION[0], CONVERSATION[0]])


# Built-in templates --------------------------------------------------------


def test_llama_3_1_has_a_dated_system_turn_and_tools():
    tokenizer = load("llama3", read_template("llama3_1"))
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    date = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": " Hi "},
    ]
    assert chat.render(tokenizer, messages, add_generation_prompt=True) == (
        "<|begin_of_text|>"
        + head.format("system")
        + date
        + "Be brief.<|eot_id|>"
        + head.format("user")
        + "Hi<|eot_id|>"
        + head.format("assistant")
    )
    messages = [messages[1], CALL, RESULT]
    text = chat.render(tokenizer, messages, tools=TOOLS)
    assert "Environment: ipython\nCutting Knowledge Date" in text
    assert '    "type": "function",\n    "function": {' in text
    assert (
        head.format("assistant")
        + '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
        + head.format("ipython")
        + '"3"<|eot_id|>'
    ) in text
    assert text.count("Do not use variables.\n\n{") == 1
    assert spans_of(tokenizer, messages, tools=TOOLS) == [
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
    ]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_qwen_templates_render_tools(name):
    tokenizer = load("qwen3", read_template(name))
    messages = [CONVERSATION[0], CALL, RESULT, RESULT, CONVERSATION[3]]
    text = chat.render(tokenizer, messages, tools=TOOLS)
    assert "<tools>\n" + '{"type": "function"' in text
    assert "Adds <two> numbers" in text
    assert (
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n"
    ) in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    assert spans_of(tokenizer, messages, tools=TOOLS) == [
        call + "<|im_end|>",
        think + "Bye<|im_end|>",
    ]


def test_mistral_v3_renders_tools():
    tokenizer = load("mistral", read_template("mistral_v3"))
    messages = [CONVERSATION[0], CALL, RESULT, CONVERSATION[3]]
    assert chat.render(tokenizer, messages, tools=TOOLS) == (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": '
        '"add", "description": "Adds <two> numbers", "parameters": {"type": '
        '"object", "properties": {}}}}][/AVAILABLE_TOOLS][INST] Hi[/INST]'
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": '
        '"abcdefghi"}]</s>[TOOL_RESULTS] {"content": 3, "call_id": '
        '"abcdefghi"}[/TOOL_RESULTS] Bye</s>'
    )


def test_a_call_without_a_header_is_the_models_to_write():
    """Mistral's `[TOOL_CALLS]` opens no turn: it is trained on."""
    tokenizer = chat_tokenizer("mistral_v3")
    messages = [CONVERSATION[0], CALL, RESULT, CONVERSATION[3]]
    assert spans_of(tokenizer, messages, tools=TOOLS) == [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": '
        '"abcdefghi"}]</s>',
        " Bye</s>",
    ]


def test_llama_2_puts_the_system_prompt_into_the_instruction():
    tokenizer = load("mistral", read_template("llama2"))
    messages = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    assert chat.render(tokenizer, messages) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello there. "
        "</s><s>[INST] Hello there. [/INST] Bye </s>"
    )
    assert spans_of(tokenizer, messages) == [
        " Hello there. </s>",
        " Bye </s>",
    ]


def test_gemma_3_takes_lists_of_parts():
    tokenizer = load("gemma3_text", read_template("gemma3"))
    parts = [{"type": "text", "text": " Hi "}, {"type": "text", "text": "x"}]
    text = chat.render(tokenizer, [{"role": "user", "content": parts}])
    assert text == "<bos><start_of_turn>user\nHix<end_of_turn>\n"


GEMMA_4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def test_turns_of_gemma_4():
    """Their control tokens open and close on other sides of the bar."""
    gemma3 = load("gemma3_text")
    backend = tokenizers.Tokenizer.from_str(gemma3.backend.to_str())
    backend.add_special_tokens(["<|turn>", "<turn|>"])
    names = dict(gemma3.special_tokens)
    tokenizer = Tokenizer(backend, names, chat_template=GEMMA_4)
    want = ["Hello there.<turn|>", "Bye<turn|>"]
    assert spans_of(tokenizer, CONVERSATION) == want
    assert tokenizer.control_tokens["<turn|>"] in tokenizer.stop_token_ids
    assert tokenizer.control_tokens["<|turn>"] not in tokenizer.stop_token_ids


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_tools_that_a_template_leaves_out_are_an_error(name):
    tokenizer = load(name)
    message = "does not render tools.*tools=.'add'.*begins with"
    for function in (chat.render, chat.render_ids, chat.encode_with_spans):
        with pytest.raises(ValueError, match=message):
            function(tokenizer, CONVERSATION, tools=TOOLS)
        function(tokenizer, CONVERSATION, tools=[])


# Templates that render some of the tools.
PARTIAL = {
    "sub": "{% if tools %}{{ tools[0].function.name }}{% endif %}",
    "add', 'sub": "{% if tools %}You have {{ tools | length }}.{% endif %}",
}


@pytest.mark.parametrize("missing", PARTIAL)
def test_tools_of_which_a_template_leaves_out_some_are_an_error(missing):
    """Also where a message names them."""
    template = PARTIAL[missing] + (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = load("qwen3", template)
    sub = {"type": "function", "function": {"name": "sub"}}
    messages = [{"role": "user", "content": "add or sub"}, *CONVERSATION[1:]]
    for function in (chat.render, chat.render_ids, chat.encode_with_spans):
        with pytest.raises(ValueError, match=rf"tools=\['{missing}'\]"):
            function(tokenizer, messages, tools=[*TOOLS, sub])


@pytest.mark.parametrize("flat", [False, True])
def test_tools_of_other_shapes_are_found(flat):
    tool = {"name": "add", "parameters": {}}
    tokenizer = load("qwen3", read_template("qwen3"))
    tools = [tool if flat else {"function": tool}]
    assert '"add"' in chat.render(tokenizer, CONVERSATION, tools=tools)


@pytest.mark.parametrize("role", ["Assistant", "asistant", " user", "sytem"])
def test_a_misspelt_role_is_named(role):
    tokenizer = load("qwen3")
    messages = [*CONVERSATION, {"role": role, "content": "a"}]
    with pytest.raises(ValueError, match=f"Did you mean.*message 4.*{role}"):
        chat.render(tokenizer, messages)


def test_a_role_that_the_template_quotes_is_one():
    template = (
        "{% for m in messages %}{% if m.role == 'users' %}U{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = load("qwen3", template)
    messages = [{"role": "users", "content": "a"}]
    assert chat.render(tokenizer, messages) == "Ua"
