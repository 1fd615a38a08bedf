"""The official chat templates of the tests render what the published do."""

import hashlib
import re

import pytest
import transformers

from keras_posttrain.data.chat import chat
from tests.data.support import chat_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a", "b"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
BYE = {"role": "user", "content": "Bye"}
THOUGHT = "<think>\nGreet.\n</think>\n\nHello."
CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
RESULT = {
    "role": "tool",
    "content": "3",
    "name": "add",
    "tool_call_id": "abcdefghi",
}


def says(content, **fields):
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS = {
    "talk": ([SYSTEM, HI, says("Hello."), BYE], None, True),
    "thoughts": ([SYSTEM, HI, says(THOUGHT), BYE, says(THOUGHT)], None, False),
    "call": ([SYSTEM, HI, says("", tool_calls=[CALL])], TOOLS, False),
    "result": (
        [SYSTEM, HI, says("Wait.", tool_calls=[CALL]), RESULT],
        TOOLS,
        True,
    ),
    "answer": (
        [SYSTEM, HI, says("", tool_calls=[CALL]), RESULT, says("3.")],
        TOOLS,
        False,
    ),
}
# The first digits of the SHA-256 of what the published templates render with
# `date_string="26 Jul 2024"`: Qwen's, Llama's, Gemma's and gpt-oss's as the
# repository huggingface/trl keeps them, Mistral's as ggml-org/llama.cpp
# does, OLMo's as allenai publishes it.
# `None`: the template refuses; Gemma's without tools, which it does not know.
PUBLISHED = {
    "qwen2_5": [
        "115c92b4646c",
        "7c820ebd1a7c",
        "6830747c44c4",
        "401ac8a4821a",
        "e7ac5776fac6",
    ],
    "qwen3": [
        "115c92b4646c",
        "eaeb13db1bef",
        "5f68808a0135",
        "401ac8a4821a",
        "b2e7f6f21bd3",
    ],
    "qwen3_2507": [
        "115c92b4646c",
        "7c820ebd1a7c",
        "6830747c44c4",
        "401ac8a4821a",
        "e7ac5776fac6",
    ],
    "qwen3_5": [
        "75f432f52fb1",
        "eaeb13db1bef",
        "5b80f2cbdaeb",
        "35482025e150",
        "16583835d2fe",
    ],
    "llama3_1": [
        "8aba6db0ab9a",
        "75f53da4043a",
        "be1f01c80231",
        "26f088d61cee",
        "6612a8fb81db",
    ],
    "llama3_2": [
        "8aba6db0ab9a",
        "75f53da4043a",
        "be1f01c80231",
        "26f088d61cee",
        "6612a8fb81db",
    ],
    "gemma3": ["93adab2a4108", "07daa9e3e4fc", "3f8932981519", None, None],
    "gpt_oss": [
        "91c1fbbfbab4",
        "f486de9ea8a6",
        "e2851c429f23",
        "5511018cd71c",
        "7e6edbd8b753",
    ],
    "gemma4": [
        "cd173e85e337",
        "3daa4c2ab4a9",
        "24c28c41f30a",
        "4c7e1bf817f2",
        "aac3d2444179",
    ],
    "olmo3_1": [
        "115c92b4646c",
        "06451d54c60d",
        "ae1862c28487",
        "b328fca196ac",
        "ef904a5ea71c",
    ],
    "mistral_v7": [
        "70f6e04c526b",
        "f035c1942190",
        "ba57f8dfc4a2",
        "b5fe771ebc25",
        "2daf2ebd3a36",
    ],
}


def render(name, case):
    tokenizer = chat_tokenizer(name)
    messages, tools, prompt = CONVERSATIONS[case]
    return chat.render(
        tokenizer,
        messages,
        tools=None if name == "gemma3" else tools,
        add_generation_prompt=prompt,
        date_string="26 Jul 2024",
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_templates_render_what_the_published_ones_do(name):
    for case, expected in zip(CONVERSATIONS, PUBLISHED[name]):
        if expected is None:
            with pytest.raises(ValueError, match="refuses these messages"):
                render(name, case)
        else:
            # gpt-oss's template asks for the date itself.
            text = re.sub(r"(?<=Current date: )\S+", "D", render(name, case))
            found = hashlib.sha256(text.encode()).hexdigest()
            assert found.startswith(expected), (case, text)


@pytest.mark.parametrize(
    "name", [*PUBLISHED, "mistral_v3", "gemma3_tools", "phi4_mini"]
)
def test_transformers_renders_the_same(name):
    """Its text and its ids are ours, with tools, calls and thoughts."""
    tokenizer = chat_tokenizer(name)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens,
    )
    rendered = 0
    for case, (messages, tools, prompt) in CONVERSATIONS.items():
        if name == "gemma3" and tools:
            continue
        settings = {"tools": tools, "add_generation_prompt": prompt}
        settings["date_string"] = "26 Jul 2024"
        text = chat.render(tokenizer, messages, **settings)
        assert text == theirs.apply_chat_template(
            messages, tokenize=False, **settings
        ), case
        if case != "thoughts":
            # There, messages quote control tokens: ours leave them as text.
            ids = chat.render_ids(tokenizer, messages, **settings)
            assert ids == theirs.apply_chat_template(
                messages, return_dict=False, **settings
            )
        rendered += 1
    assert rendered >= 2
