"""Bridges: conversations whose ids only grow, on the official templates."""

import json

import pytest
import tokenizers

from keras_posttrain.data.chat import chat
from keras_posttrain.data.chat.bridge import Bridges
from keras_posttrain.data.chat.tokenizer import Tokenizer
from tests.data.support import TEMPLATES, chat_tokenizer
from tests.data.test_templates import CALL, HI, RESULT, TOOLS, says
from tests.support import REFERENCE

# They write earlier turns as they were, but for spaces around them.
ALL = [name for name in TEMPLATES if name != "gpt_oss"]
OTHERS = ("qwen3", "qwen3_5", "phi4_mini")
APPEND_ONLY = [name for name in ALL if name not in OTHERS]
WITH_TOOLS = [name for name in ALL if name != "gemma3"]
SECOND = {"role": "user", "content": "And then?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def sample(tokenizer, text):
    """Ids that a model may sample: other ones than `encode` makes."""
    find = tokenizer.backend.token_to_id
    ids = [find(c.replace(" ", "\u2581")) for c in text]
    pairs = [
        [i] if i is not None else tokenizer.encode(c)
        for i, c in zip(ids, text)
    ]
    return sum(pairs, []) + [Bridges(tokenizer).end_of_turn_id]


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def reply(tokenizer):
    """A turn as the template and the tokenizer write it, spaces included."""
    prompt = chat.render(tokenizer, [HI], add_generation_prompt=True)
    text = chat.render(tokenizer, [HI, says("Hello.")])
    prompt, text = (
        decode(tokenizer, tokenizer.encode(part)) for part in (prompt, text)
    )
    return text[len(prompt) : text.index(tokenizer.end_of_turn, len(prompt))]


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_a_conversation_that_grows_is_what_the_template_writes(name):
    tokenizer = chat_tokenizer(name)
    bridges = Bridges(tokenizer)
    bridges.check()
    turn = sample(tokenizer, reply(tokenizer))
    messages, ids = [HI], bridges.opening([HI])
    for _ in range(3):
        ids += turn
        messages += [says("Hello."), SECOND]
        ids += bridges.between([SECOND])
        text = chat.render(tokenizer, messages, add_generation_prompt=True)
        assert decode(tokenizer, ids) == decode(
            tokenizer, tokenizer.encode(text)
        )


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tool_results_are_what_the_template_writes(name):
    """One and several results, and a question behind them."""
    tokenizer = chat_tokenizer(name)
    bridges = Bridges(tokenizer)
    bridges.check(["user", "tool"], TOOLS)
    call = says("", tool_calls=[CALL])
    opened = chat.render(
        tokenizer, [HI], tools=TOOLS, add_generation_prompt=True
    )
    for said in ([RESULT], [RESULT, RESULT | {"content": "4"}]):
        text = chat.render(
            tokenizer,
            [HI, call, *said],
            tools=TOOLS,
            add_generation_prompt=True,
        )
        # The tools of Gemma 4 answer inside the model's turn.
        answers = name == "gemma4"
        stop = "<|tool_response>" if answers else tokenizer.end_of_turn
        end = text.index(stop, len(opened))
        expected = tokenizer.encode(text[end:])[1:]
        calls = [{"name": "add", "id": "abcdefghi"}] * len(said)
        found = bridges.end_before(said, TOOLS, calls)
        assert found == tokenizer.control_tokens[stop]
        assert bridges.between(said, TOOLS, calls) == expected
        # The names and the ids of the results are known from the calls.
        bare = [{"role": "tool", "content": m["content"]} for m in said]
        assert bridges.between(bare, TOOLS, calls) == expected


def test_a_bridge_does_not_begin_with_the_space_of_a_text():
    """SentencePiece puts a space before a text, not behind a control token.

    Vicuna's template, with the tokenizer of newer Llama-2-like models.
    """
    tokenizer = Tokenizer.from_directory(REFERENCE / "models" / "mistral")
    state = json.loads(tokenizer.backend.to_str()) | {"normalizer": None}
    state["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    tokenizer = Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(state)),
        tokenizer.special_tokens,
        chat_template="{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    )
    bridges = Bridges(tokenizer)
    bridges.check()
    text = chat.render(tokenizer, [HI, says("Hello."), SECOND])
    ids = tokenizer.encode(text)
    end = ids.index(bridges.end_of_turn_id)
    assert bridges.between([SECOND]) == ids[end + 1 :]
    assert bridges.between([SECOND]) != tokenizer.encode(
        text[text.index("</s>") + len("</s>") :]
    )


def test_mistral_writes_its_tools_before_each_question():
    bridges = Bridges(chat_tokenizer("mistral_v7"))
    tokens = bridges.tokenizer.control_tokens
    with_tools = bridges.between([SECOND], TOOLS)
    assert with_tools[0] == tokens["[AVAILABLE_TOOLS]"]
    assert bridges.between([SECOND])[0] == tokens["[INST]"]


def test_a_bridge_has_what_the_model_never_samples():
    """The newline behind the end of turn, and the generation prompt."""
    bridges = Bridges(chat_tokenizer("qwen3"), {"enable_thinking": False})
    assert decode(bridges.tokenizer, bridges.between([SECOND])) == (
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    bridges = Bridges(chat_tokenizer("qwen3_5"))
    opening = decode(bridges.tokenizer, bridges.opening([HI]))
    assert opening.endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("name", ALL)
def test_control_tokens_that_are_said_stay_text(name):
    tokenizer = chat_tokenizer(name)
    bridges = Bridges(tokenizer)
    quote = f"a {tokenizer.end_of_turn} b"
    plain = bridges.between([SECOND])
    quoted = bridges.between([{"role": "user", "content": quote}])
    known = set(tokenizer.control_tokens.values())
    assert [i for i in quoted if i in known] == [
        i for i in plain if i in known
    ]
    assert quote in decode(tokenizer, quoted)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_template_that_drops_thoughts_continues_no_text(name):
    """Qwen's thinking models: the past has no thoughts, so nothing extends.

    Between tool results the thoughts stay, and the text is extended.
    """
    tokenizer = chat_tokenizer(name)
    bridges = Bridges(tokenizer)
    thought = "<think>\nHm.\n</think>\n\nHello."
    messages = [HI, says(thought)]
    seen = chat.render(tokenizer, messages).rstrip("\n")
    assert thought in seen
    assert bridges.continues(seen, [*messages, SECOND]) is None
    assert bridges.continued_ids(seen, [*messages, SECOND]) is None
    messages = [HI, says(thought, tool_calls=[CALL])]
    seen = chat.render(tokenizer, messages, tools=TOOLS).rstrip("\n")
    rest = bridges.continues(seen, [*messages, RESULT], TOOLS)
    assert rest.startswith("\n<|im_start|>user\n<tool_response>\n3\n")
    assert bridges.continued_ids(
        seen, [*messages, RESULT], TOOLS
    ) == bridges.between([RESULT], TOOLS)


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_an_append_only_template_continues_its_text(name):
    tokenizer = chat_tokenizer(name)
    bridges = Bridges(tokenizer)
    messages = [HI, says("Hello.")]
    seen = chat.render(tokenizer, messages).rstrip("\n")
    rest = bridges.continues(seen, [*messages, SECOND])
    assert seen + rest == chat.render(
        tokenizer, [*messages, SECOND], add_generation_prompt=True
    )
    assert bridges.continued_ids(seen, [*messages, SECOND]) == bridges.between(
        [SECOND]
    )
    assert bridges.continues(seen + "x", [*messages, SECOND]) is None


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks around the quoted token would be cut off: it cannot be followed.
CUT = "{{ m.content[:36] }}"
LOUD = "{{ m.content | upper if m.role == 'user' else m.content }}"
FAULTS = {
    "end the model's turn with": CHATML.replace("<|im_end|>", ""),
    "after one turn, .* after two": CHATML.replace(
        "{{ m.role }}", "{{ m.role }}{{ loop.index }}"
    ),
    "a message of role='user' is parsed": CHATML.replace(
        "{{ m.content }}", CUT
    ),
    "must end each of the model's turns with <.im_end.>": CHATML.replace(
        "<|im_end|>",
        "{{ '<|im_end|>' if loop.last or m.role == 'user' else eos_token }}",
    ),
    "what is said unchanged": CHATML.replace("{{ m.content }}", LOUD),
    "does not render tools": CHATML,
    "cannot say something with role='user'.*no more.*another role": (
        "{% if messages | length > 1 and messages[-1].role == 'user' %}"
        "{{ raise_exception('no more') }}{% endif %}" + CHATML
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_templates_that_cannot_be_bridged_are_refused(message):
    tokenizer = chat_tokenizer("qwen3").with_chat_template(FAULTS[message])
    tokenizer = Tokenizer(
        tokenizer.backend,
        tokenizer.special_tokens | {"eos_token": "<|endoftext|>"},
        chat_template=tokenizer.chat_template,
    )
    bridges = Bridges(tokenizer)
    with pytest.raises(ValueError, match=message):
        bridges.check(tools=TOOLS if "tools" in message else None)


def test_harmony_has_another_end_inside_a_conversation():
    """Its turns are not continued token by token."""
    with pytest.raises(ValueError, match="turns and end them"):
        Bridges(chat_tokenizer("gpt_oss")).check()


def test_a_role_that_the_template_refuses_names_the_fix():
    tokenizer = chat_tokenizer("gemma3")
    with pytest.raises(ValueError, match=r"role='tool'.*Tools\(as_user=True"):
        Bridges(tokenizer).check(["tool"])


def test_what_is_said_may_hold_the_words_of_the_dummies():
    bridges = Bridges(chat_tokenizer("qwen2_5"))
    said = "reply0 reply1 question answer"
    ids = bridges.between([{"role": "user", "content": said}])
    assert decode(bridges.tokenizer, ids) == (
        f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    )
