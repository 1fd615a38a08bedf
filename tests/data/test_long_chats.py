"""Turns of conversations, found without rendering the beginning of each."""

import numpy as np
import pytest

from keras_posttrain.data.chat import chat, spans, template
from tests.data.support import TEMPLATES, chat_tokenizer
from tests.data.test_templates import CALL, RESULT, TOOLS, says

WORDS = ("Yes.", "No.", "<b>", "a b", "42", "Why?", "  spaced ", "two\nlines")
# What a turn of the assistant may be, and what follows it.
KINDS = {
    "words": lambda words: [says(words)],
    "thoughts": lambda words: [says(words, reasoning_content="So.")],
    "inline": lambda words: [says(f"<think>\nSo.\n</think>\n\n{words}")],
    "call": lambda words: [says("", tool_calls=[CALL]), RESULT, says(words)],
    "words_and_call": lambda words: [
        says(words, tool_calls=[CALL]), RESULT, says(words),
    ],
    "two": lambda words: [says(words), says("And so on.")],
}  # fmt: skip
ODD = {
    # The token that ends a turn is written before the turn that follows.
    "ends_late": (
        "{% for m in messages %}{% if loop.index0 and messages[loop.index0 "
        "- 1].role == 'assistant' %}<|im_end|>{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Every third turn ends otherwise.
    "counts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '!' if loop.index % 3 == 0 else '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # One turn ends with the next message.
    "ends_late_once": (
        "{% for m in messages %}{% if loop.index0 and 'Why' in "
        "messages[loop.index0 - 1].content %} <|im_end|>{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if 'Why' not in m.content %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # One turn has two headers.
    "repeats": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if 'Why' in m.content %}Hm.<|im_start|>{{ m.role }}\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # A header of its own for a turn that follows a certain one.
    "looks_back": (
        "{% for m in messages %}<|im_start|>{{ m.role }}"
        "{{ ' (shy)' if m.role == 'assistant' and 'Why' in messages["
        "loop.index0 - 1].content else '' }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def conversation(kinds, turns, seed, words=WORDS):
    """Messages of random turns of some kinds."""
    rng = np.random.default_rng(seed)
    messages = [{"role": "system", "content": "Be brief."}]
    for _ in range(turns):
        asked, said = rng.choice(words, 2)
        messages.append({"role": "user", "content": str(asked)})
        messages += KINDS[rng.choice(kinds)](str(said))
    return messages


def found(tokenizer, messages, monkeypatch, trusted):
    """Spans where kinds of turns are known after so many of them."""
    monkeypatch.setattr(spans, "TRUSTED", trusted)
    try:
        return chat.encode_with_spans(tokenizer, messages, tools=TOOLS)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", [*TEMPLATES, *ODD])
def test_they_are_those_of_every_beginning(name, monkeypatch):
    """For all templates, of turns of each kind alone and of all kinds."""
    if name in ODD:
        tokenizer = chat_tokenizer("qwen2_5").with_chat_template(ODD[name])
    else:
        tokenizer = chat_tokenizer(name)
    # Templates without tools are not asked to show them.
    monkeypatch.setattr(chat, "check_tools", lambda conversation: None)
    agreed, every = 0, [*([k] for k in KINDS), list(KINDS)]
    # What the odd templates treat otherwise comes when the rest is known.
    usual = [word for word in WORDS if word != "Why?"]
    for seed, kinds in enumerate(every + every):
        words = usual if seed < len(every) else WORDS
        messages = conversation(kinds, 9, seed, words)
        many = found(tokenizer, messages, monkeypatch, 2)
        with monkeypatch.context() as patch:
            patch.setattr(spans._Search, "_guesses", lambda *_: {})
            each = found(tokenizer, messages, monkeypatch, 2)
        assert many == each, kinds
        agreed += not isinstance(each, str)
    assert agreed > 1
    if name.startswith(("qwen", "llama", "gemma", "olmo")):
        assert max(tokenizer.turn_kinds.values(), default=0) >= 2


def test_the_time_grows_with_the_turns(monkeypatch):
    """Four times the turns render four times the messages."""
    render, rendered = template._renderers.call, []

    def counted(template, conversations):
        rendered[-1] += sum(len(c["messages"]) for c in conversations)
        return render(template=template, conversations=conversations)

    tokenizer = chat_tokenizer("qwen3")
    monkeypatch.setattr(template._renderers, "call", counted)
    for turns in (64, 256):
        rendered.append(0)
        messages = conversation(["words", "call"], turns, 0)
        *_, places = chat.encode_with_spans(tokenizer, messages, tools=TOOLS)
        assert len(places) == sum(m["role"] == "assistant" for m in messages)
    assert rendered[1] < 5 * rendered[0]
