"""ShareGPT's and Alpaca's rows give what the same rows of ours give."""

import pathlib

import pytest

from keras_posttrain.data.chat.conversion import read_template
from keras_posttrain.data.chat.tokenizer import Tokenizer
from keras_posttrain.data.rows.known_formats import ALPACA_WITH_INPUT
from keras_posttrain.data.rows.preference import prepare_preferences
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.prompts import prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft

REFERENCE = pathlib.Path(__file__).parents[1] / "reference" / "models"
TURNS = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello."},
    {"from": "human", "value": "2+2?"},
    {"from": "gpt", "value": "4"},
]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
INSTRUCTION = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
ASKED = [{"role": "user", "content": "Add.\n\n2 and 2"}]
ANSWER = [{"role": "assistant", "content": "4"}]
WRONG = [{"role": "assistant", "content": "5"}]


@pytest.fixture(scope="module")
def qwen2():
    tokenizer = Tokenizer.from_directory(REFERENCE / "qwen2")
    return tokenizer.with_chat_template(read_template("qwen2_5"))


def settings(tokenizer):
    return RowSettings(tokenizer, sequence_length=1024, vocabulary_size=512)


def sft(tokenizer, rows):
    return prepare_sft(rows, settings(tokenizer))


def pairs(tokenizer, rows):
    return prepare_preferences(rows, settings(tokenizer), labelled=False)


def labelled(tokenizer, rows):
    return prepare_preferences(rows, settings(tokenizer), labelled=True)


def prompts(tokenizer, rows):
    return prepare_prompts(
        rows, settings(tokenizer), max_prompt_length=512, limit="a test"
    )


def described(example):
    """An example as values that can be compared."""
    if hasattr(example, "prompt") and hasattr(example, "columns"):
        return example.token_ids, example.prompt, example.columns
    mask = example.completion_mask.tolist()
    others = getattr(example, "other_bytes", b"")
    return example.token_ids.tolist(), mask, others


CASES = {
    "ShareGPT": (sft, {"conversations": TURNS}, {"messages": MESSAGES}),
    "ShareGPT, system aside": (
        sft,
        {"conversations": TURNS[1:], "system": "Be short."},
        {"messages": MESSAGES},
    ),
    "ShareGPT with roles": (
        sft,
        {"conversations": MESSAGES},
        {"messages": MESSAGES},
    ),
    "ShareGPT, pair": (
        pairs,
        {
            "conversations": TURNS[:4],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        {"prompt": MESSAGES[:4], "chosen": ANSWER, "rejected": WRONG},
    ),
    "ShareGPT, labelled": (
        labelled,
        {"conversations": TURNS, "label": True},
        {"prompt": MESSAGES[:4], "completion": ANSWER, "label": True},
    ),
    "ShareGPT, prompt": (
        prompts,
        {"conversations": TURNS, "answer": 4},
        {"prompt": MESSAGES[:4], "answer": 4},
    ),
    "Alpaca": (sft, INSTRUCTION, {"messages": ASKED + ANSWER}),
    "Alpaca without input": (
        sft,
        {"instruction": "Add.", "output": "4", "input": ""},
        {"messages": [{"role": "user", "content": "Add."}, *ANSWER]},
    ),
    "Alpaca with system": (
        sft,
        INSTRUCTION | {"system": "Be short."},
        {"messages": MESSAGES[:1] + ASKED + ANSWER},
    ),
    "Alpaca, pair": (
        pairs,
        {
            "instruction": "Add.",
            "input": "2 and 2",
            "chosen": "4",
            "rejected": "5",
        },
        {"prompt": ASKED, "chosen": "4", "rejected": "5"},
    ),
    "Alpaca, labelled": (
        labelled,
        INSTRUCTION | {"label": False},
        {"prompt": ASKED, "completion": "4", "label": False},
    ),
    "Alpaca, prompt": (
        prompts,
        INSTRUCTION,
        {"prompt": ASKED, "output": "4"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_converted_and_counted(case, qwen2):
    prepare, theirs, ours = CASES[case]
    [example], report = prepare(qwen2, [theirs])
    [expected], own = prepare(qwen2, [ours])
    assert described(example) == described(expected)
    name = case.split(",")[0].split(" ")[0]
    assert report.converted == {name: 1} and not own.converted
    assert f"; 1 converted from {name}'s format" in str(report)
    assert not report.unused


def test_without_a_template_alpacas_own_prompt_is_used(qwen2):
    plain = qwen2.with_chat_template(None)
    prompt = ALPACA_WITH_INPUT.format(**INSTRUCTION)
    assert prompt.endswith("### Input:\n2 and 2\n\n### Response:\n")
    [example], _ = sft(plain, [INSTRUCTION])
    [expected], _ = sft(plain, [{"prompt": prompt, "completion": "4"}])
    assert described(example) == described(expected)


def test_calls_and_tools(qwen2):
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "Add 1."},
                {
                    "from": "function_call",
                    "value": '{"name": "add", "arguments": {"a": 1}}',
                },
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "It is 2."},
            ],
            "tools": '[{"function": {"name": "add"}}]',
        }
    ]
    [example], _ = sft(qwen2, rows)
    text = qwen2.decode(example.token_ids, skip_special_tokens=False)
    assert '{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\n2\n</tool_response>" in text
    trained = example.token_ids[example.completion_mask > 0]
    assert "2\n</tool_response>" not in qwen2.decode(trained)


def test_rows_of_our_own_columns_are_not_converted(qwen2):
    """The Alpaca of the Hub has its whole text in a column too."""
    [example], report = sft(qwen2, [INSTRUCTION | {"text": "Hi"}])
    [expected], _ = sft(qwen2, [{"text": "Hi"}])
    assert described(example) == described(expected)
    assert not report.converted
    assert list(report.unused) == ["instruction", "input", "output"]


@pytest.mark.parametrize(
    "row, parts",
    [
        (
            {"conversations": [{"from": "alien", "value": "a"}]},
            ["from='alien'", "'human'"],
        ),
        ({"conversations": "Hi"}, ["turns with 'from' and 'value'", "'Hi'"]),
        ({"conversations": []}, ["turns with 'from' and 'value'"]),
        ({"conversations": [{"from": "gpt"}]}, ["{'from': 'gpt'}"]),
        (
            {"conversations": [{"from": "function_call", "value": "add"}]},
            ["must be JSON with 'name'", "'add'"],
        ),
        (
            {"instruction": 5, "output": "a"},
            ["'instruction' must be a string", "instruction=5"],
        ),
        (
            {"instruction": "a", "input": "b"},
            ["must have the columns of one of", "['instruction', 'input']"],
        ),
    ],
)
def test_wrong_values_are_named(row, parts, qwen2):
    with pytest.raises(ValueError) as error:
        sft(qwen2, [{"conversations": TURNS}, row])
    for part in (*parts, "row 1 of `dataset`"):
        assert part in str(error.value)
