"""Row types, datasets, weights, truncation, and an error for each fault."""

import builtins
import json
import pathlib

import datasets
import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from keras_posttrain.data.chat.tokenizer import Tokenizer
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.sft import prepare_sft
from tests.data.support import split_settings

REFERENCE = pathlib.Path(__file__).parents[1] / "reference" / "models"
MODELS = ["llama3", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral"]
PAIR = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9]}
MESSAGES = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def qwen2():
    return Tokenizer.from_directory(REFERENCE / "qwen2")


@pytest.fixture(scope="module")
def mistral():
    return Tokenizer.from_directory(REFERENCE / "mistral")


def prepare(rows, tokenizer=None, sequence_length=256, **kwargs):
    kwargs.setdefault("vocabulary_size", 512)
    settings, others = split_settings(kwargs)
    settings = RowSettings(
        tokenizer, sequence_length=sequence_length, **settings
    )
    return prepare_sft(rows, settings, **others)


def one(row, tokenizer=None, **kwargs):
    """The only example of a row."""
    (example,), _ = prepare([row], tokenizer, **kwargs)
    assert example.token_ids.dtype == np.int32
    assert example.completion_mask.dtype == np.float32
    assert example.token_ids.shape == example.completion_mask.shape
    return example


def trained(example, tokenizer):
    """The text of the tokens that carry loss, control tokens included."""
    ids = example.token_ids[example.completion_mask > 0]
    return tokenizer.decode(ids, skip_special_tokens=False)


# Row types -----------------------------------------------------------------


def test_token_pairs_are_taken_as_they_are():
    example = one(PAIR)
    assert example.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert example.completion_mask.tolist() == [0, 0, 1, 1, 1]
    example = one(PAIR, train_on="all")
    assert example.completion_mask.tolist() == [0, 1, 1, 1, 1]
    example = one({"prompt_ids": [], "completion_ids": [7, 8]})
    assert example.completion_mask.tolist() == [0, 1]


@pytest.mark.parametrize(
    "row", [{"text": "Hi"}, {"prompt": "Hi", "completion": " there"}]
)
def test_tools_of_plain_text_are_an_error(row, qwen2):
    """Nothing renders them."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    one(row | {"tools": None}, qwen2)
    one(row | {"tools": "[]"}, qwen2)
    with pytest.raises(ValueError, match="plain text.*row 0 .*'add'"):
        one(row | {"tools": tools}, qwen2)


def test_masked_tokens_keep_their_weights():
    row = {"token_ids": [1, 2, 3], "completion_mask": [1, 0.5, 2]}
    assert one(row).completion_mask.tolist() == [0, 0.5, 2]
    assert one(row, train_on="all").completion_mask.tolist() == [0, 1, 1]
    row = {
        "token_ids": np.array([1, 2]),
        "completion_mask": np.array([False, True]),
    }
    assert one(row).completion_mask.tolist() == [0, 1]


def test_tokens_without_a_mask_all_carry_loss():
    example = one({"token_ids": [1, 2, 3]})
    assert example.completion_mask.tolist() == [0, 1, 1]
    row = {"token_ids": [1, 2, 3], "completion_mask": None, "weight": 2}
    assert one(row, train_on="all").completion_mask.tolist() == [0, 2, 2]
    # A mask that is misspelt or missing in one row is no such row.
    with pytest.raises(ValueError, match="mean the column 'completion_mask'"):
        one({"token_ids": [1, 2], "completion_masks": [0, 1]})
    rows = [
        {"token_ids": [1, 2], "completion_mask": [0, 1]},
        {"token_ids": [1, 2]},
    ]
    with pytest.raises(ValueError, match="must be of one type.*row 1"):
        prepare(rows)


def test_the_report_names_columns_that_nothing_reads(qwen2):
    rows = [
        PAIR | {"weight": 1.0, "id": 3, "wgt": 0.1, "empty": None},
        PAIR | {"id": 4, "tools": [{}]},
    ]
    _, report = prepare(rows)
    assert report.unused == {"id": 2, "wgt": 1, "tools": 1}
    assert str(report).endswith(
        "; columns that nothing reads: 'id', 'wgt', 'tools'"
    )
    rows = [{"text": "a", **{f"c{i}": i for i in range(10)}}]
    assert str(prepare(rows, qwen2)[1]).endswith("'c6', 'c7', ...")
    rows = [{"messages": MESSAGES, "tools": None, "weight": 1}]
    assert "nothing reads" not in str(prepare(rows, qwen2)[1])


@pytest.mark.parametrize(
    "row, place",
    [
        ({"text": "ab\ud83dc"}, "text with '\\ud83d'"),
        (
            {
                "messages": [
                    *MESSAGES[:3],
                    {"role": "assistant", "content": "\udc00"},
                ]
            },
            "messages[3].content with '\\udc00'",
        ),
        (
            {"prompt": "a", "completion": "\udcffb"},
            "completion with '\\udcff'",
        ),
    ],
)
def test_half_a_character_is_named(row, place, qwen2):
    """What JSON's \\ud83d without its other half becomes."""
    with pytest.raises(ValueError) as error:
        prepare([row], qwen2)
    for part in ("row 0 of `dataset`", place, "lone surrogate", "position"):
        assert part in str(error.value)


def test_a_row_that_is_nested_too_deeply_is_named(qwen2):
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    rows = [
        {"messages": MESSAGES, "tools": [deep]},
        {"messages": MESSAGES, "tools": "[" * 100_000},
    ]
    for row in rows:
        with pytest.raises(ValueError, match="row 0 of `dataset`"):
            prepare([row], qwen2)


def test_the_weight_of_a_row_multiplies_its_mask():
    example = one(PAIR | {"weight": 0.25})
    assert example.completion_mask.tolist() == [0, 0, 0.25, 0.25, 0.25]
    # A row may be turned off: it is kept, and counts for nothing.
    example = one(PAIR | {"weight": 0})
    assert example.completion_mask.tolist() == [0] * 5


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_opened_and_ended_once(name):
    tokenizer = Tokenizer.from_directory(REFERENCE / name)
    ids = tokenizer.encode("Hello world", add_special_tokens=True)
    example = one({"text": "Hello world"}, tokenizer)
    assert example.token_ids.tolist() == [*ids, tokenizer.eos_token_id]
    assert example.completion_mask.tolist() == [0] + [1] * len(ids)
    # Written out in the text, the special tokens are not doubled.
    bos = tokenizer.special_tokens.get("bos_token", "")
    text = bos + "Hello world" + tokenizer.special_tokens["eos_token"]
    if name != "mistral":
        again = one({"text": text}, tokenizer)
        assert again.token_ids.tolist() == example.token_ids.tolist()
    again = one({"text": text}, tokenizer).token_ids.tolist()
    assert again.count(tokenizer.eos_token_id) == 1
    if bos:
        assert again.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", MODELS)
def test_strings_are_tokenised_together(name):
    tokenizer = Tokenizer.from_directory(REFERENCE / name)
    example = one({"prompt": "2+2 is", "completion": " 4."}, tokenizer)
    ids = tokenizer.encode("2+2 is 4.", add_special_tokens=True)
    assert example.token_ids.tolist() == [*ids, tokenizer.eos_token_id]
    words = trained(example, tokenizer)
    eos = tokenizer.special_tokens["eos_token"]
    assert words.lstrip() == "4." + eos
    everything = one(
        {"prompt": "2+2 is", "completion": " 4."}, tokenizer, train_on="all"
    )
    assert everything.completion_mask.tolist() == [0] + [1] * len(ids)


def test_a_token_over_the_boundary_is_the_completions(qwen2):
    """`the` and `he` are tokens; the prompts end in their middle."""
    example = one({"prompt": "-t", "completion": "he"}, qwen2)
    tokens = [qwen2.backend.id_to_token(i) for i in example.token_ids]
    assert tokens == ["-", "the", "<|im_end|>"]
    assert example.completion_mask.tolist() == [0, 1, 1]
    example = one({"prompt": "a h", "completion": "e"}, qwen2)
    tokens = [qwen2.backend.id_to_token(i) for i in example.token_ids]
    assert tokens == ["a", "Ġ", "he", "<|im_end|>"]
    assert example.completion_mask.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_a_character_are_on_one_side(name):
    tokenizer = Tokenizer.from_directory(REFERENCE / name)
    example = one({"prompt": "🙂", "completion": "🙂"}, tokenizer)
    prefix = len(tokenizer.encode("", add_special_tokens=True))
    count = len(tokenizer.encode("🙂🙂")) + prefix
    mask = example.completion_mask
    assert len(mask) == count + 1
    bytes_of_one = int(mask.sum()) - 1
    assert bytes_of_one == 4
    assert trained(example, tokenizer).startswith("🙂")


def test_an_empty_completion_of_strings_is_the_end_token(qwen2):
    example = one({"prompt": "Hi", "completion": ""}, qwen2)
    assert trained(example, qwen2) == "<|im_end|>"


@pytest.mark.parametrize("name", MODELS)
def test_messages_train_the_assistants_turns(name):
    tokenizer = Tokenizer.from_directory(REFERENCE / name)
    end = tokenizer.end_of_turn
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    example = one({"messages": MESSAGES}, tokenizer)
    assert trained(example, tokenizer).replace(end + " ", end) == (
        f"Hello there.{end}{think}4{end}"
    )
    ids = example.token_ids.tolist()
    assert ids.count(tokenizer.bos_token_id) in (0, 1)
    example = one({"messages": MESSAGES}, tokenizer, train_on="completion")
    assert trained(example, tokenizer).lstrip() == f"{think}4{end}"
    assert example.token_ids.tolist() == ids
    example = one({"messages": MESSAGES}, tokenizer, train_on="all")
    assert example.completion_mask.tolist() == [0] + [1] * (len(ids) - 1)
    assert example.token_ids.tolist() == ids


def test_prompt_and_completion_may_be_messages(qwen2):
    whole = one({"messages": MESSAGES}, qwen2)
    row = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    example = one(row, qwen2)
    assert example.token_ids.tolist() == whole.token_ids.tolist()
    assert trained(example, qwen2) == "4<|im_end|>"
    both = one(row, qwen2, train_on="assistant")
    assert trained(both, qwen2) == "Hello there.<|im_end|>4<|im_end|>"
    # A string is the user's, or the assistant's, one message.
    for mixed in (
        {"prompt": "Hi", "completion": MESSAGES[1:2]},
        {"prompt": MESSAGES[:1], "completion": "Hello there."},
    ):
        example = one(mixed, qwen2)
        assert trained(example, qwen2) == "Hello there.<|im_end|>"


def test_text_from_a_tool_is_not_trained(qwen2):
    from keras_posttrain.data.chat.conversion import read_template

    tokenizer = qwen2.with_chat_template(read_template("qwen2_5"))
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    row = {
        "prompt": MESSAGES[:1],
        "completion": [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "secret"},
            {"role": "assistant", "content": "done"},
        ],
        "tools": json.dumps([{"function": {"name": "add"}}]),
    }
    example = one(row, tokenizer, sequence_length=1024)
    assert trained(example, tokenizer) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>done<|im_end|>"
    )
    text = tokenizer.decode(example.token_ids)
    assert "secret" in text and '{"function": {"name": "add"}}' in text


def test_template_arguments_are_passed_on():
    tokenizer = Tokenizer.from_directory(REFERENCE / "qwen3")
    example = one(
        {"messages": MESSAGES[:2]},
        tokenizer,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert trained(example, tokenizer) == "Hello there.<|im_end|>"


# Datasets ------------------------------------------------------------------


def test_all_kinds_of_datasets_give_the_same(tmp_path):
    rows = [PAIR, {"prompt_ids": [1], "completion_ids": [2]}]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    expected, report = prepare(rows)
    for kind in (
        tuple(rows),
        datasets.Dataset.from_list(rows),
        datasets.Dataset.from_list(rows).with_format("numpy"),
        grain.MapDataset.source(rows),
        str(lines),
        lines,
        tmp_path / "rows.json",
        tmp_path / "rows.parquet",
    ):
        examples, other = prepare(kind)
        assert other == report
        for ours, theirs in zip(examples, expected, strict=True):
            assert ours.row == theirs.row
            assert (ours.token_ids == theirs.token_ids).all()
            assert (ours.completion_mask == theirs.completion_mask).all()


def test_rows_of_tables_may_hold_nones(qwen2):
    """A table fills missing columns and keys with None."""
    rows = [
        {"messages": MESSAGES[:2], "tools": None, "weight": None},
        {
            "messages": [m | {"tool_calls": None} for m in MESSAGES],
            "tools": None,
            "weight": 1.0,
        },
    ]
    from_list, _ = prepare(rows, qwen2)
    from_table, _ = prepare(datasets.Dataset.from_list(rows), qwen2)
    for ours, theirs in zip(from_list, from_table, strict=True):
        assert (ours.token_ids == theirs.token_ids).all()


def test_a_map_dataset_may_filter():
    dataset = grain.MapDataset.source([PAIR] * 4)
    dataset = dataset.map_with_index(lambda i, row: row | {"index": i})
    dataset = dataset.filter(lambda row: row["index"] != 1)
    examples, report = prepare(dataset)
    assert [example.row for example in examples] == [0, 2, 3]
    assert report.rows == 3


def test_a_stream_is_prepared_as_it_is_read():
    rows = [PAIR, {"prompt_ids": [1] * 8, "completion_ids": [2]}, PAIR]
    stream = grain.MapDataset.source(rows).to_iter_dataset()
    examples, report = prepare(stream, sequence_length=6, truncation="drop")
    assert isinstance(examples, grain.IterDataset)
    assert report.rows == 0
    assert [example.row for example in examples] == [0, 2]
    assert (report.rows, report.kept) == (3, 2)
    assert report.dropped == {"too long": 1}
    bad = grain.MapDataset.source([PAIR, {"txt": 1}]).to_iter_dataset()
    iterator = iter(prepare(bad)[0])
    next(iterator)
    with pytest.raises(ValueError, match="row 1 of `dataset`"):
        next(iterator)


# Length --------------------------------------------------------------------

LONG = {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5, 6, 7, 8]}
LONG_PROMPT = {"prompt_ids": [1] * 6, "completion_ids": [2, 2]}


def test_a_long_row_is_an_error():
    with pytest.raises(ValueError) as error:
        prepare([PAIR, LONG], sequence_length=6)
    for part in (
        "row 1 of `dataset` with 8 tokens",
        "sequence_length=6",
        "sequence_length=8 or more",
        "truncation='drop'",
        "truncation='cut'",
    ):
        assert part in str(error.value)


def test_long_rows_are_dropped_and_counted():
    examples, report = prepare(
        [PAIR, LONG, PAIR], sequence_length=6, truncation="drop"
    )
    assert [example.row for example in examples] == [0, 2]
    assert (report.rows, report.kept, report.cut) == (3, 2, 0)
    assert report.dropped == {"too long": 1}
    assert report.longest == 8
    assert (report.tokens, report.loss_tokens) == (10, 6)


def test_long_rows_are_cut_and_counted():
    examples, report = prepare(
        [PAIR, LONG, LONG_PROMPT], sequence_length=6, truncation="cut"
    )
    assert [example.row for example in examples] == [0, 1]
    assert examples[1].token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert examples[1].completion_mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert (report.kept, report.cut) == (2, 1)
    assert report.dropped == {"no token with loss": 1}
    assert report.loss_share == 5 / 11


def test_the_report_is_one_line():
    _, report = prepare(
        [PAIR, LONG, LONG_PROMPT],
        sequence_length=6,
        truncation="cut",
        name="validation_data",
    )
    assert str(report) == (
        "validation_data: 3 rows, 2 kept, 1 dropped (1 no token with loss), "
        "1 cut; 11 tokens, 5 with loss (45.5%); longest row 8 tokens"
    )


# Errors --------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, parts",
    [
        ([], ["at least one row", "0 rows"]),
        (3, ["must be a list of dicts", "dataset=3", "type int"]),
        ({"train": []}, ["a dict with the keys ['train']", "splits"]),
        (["hello"], ["must be a dict of columns", "row 0", "'hello'"]),
        (
            [PAIR, {"prompt_ids": [1], "completion_id": [2]}],
            ["row 1", "'completion_id'", "Did you mean 'completion_ids'"],
        ),
        ([{"txt": "a"}], ["row 0", "Did you mean 'text' by 'txt'"]),
        ([{"mesages": []}], ["Did you mean 'messages' by 'mesages'"]),
        ([{"prompt": "a"}], ["'prompt' goes with 'completion'"]),
        ([{"text": None}], ["row 0", "The column 'text' is None"]),
        (
            [{"question": "a", "answer": "b"}],
            ["{'prompt', 'completion'}", "['question', 'answer']"],
        ),
        (
            [PAIR | {"text": "a"}],
            ["columns of one type", "{'text'} and {'prompt_ids'"],
        ),
        ([PAIR | {"weights": 1.0}], ["Did you mean the column 'weight'"]),
        (
            [PAIR, {"token_ids": [1, 2], "completion_mask": [0, 1]}],
            ["one type", "row 0 has {'prompt_ids'", "row 1 of `dataset` has"],
        ),
        (
            [{"prompt_ids": "ab", "completion_ids": [1]}],
            ["row 0", "'prompt_ids' must be a list of integers", "'ab'"],
        ),
        (
            [{"prompt_ids": [1.5], "completion_ids": [1]}],
            ["'prompt_ids' must be a list of integers", "[1.5]"],
        ),
        (
            [{"prompt_ids": [[1], [2]], "completion_ids": [1]}],
            ["'prompt_ids' must be a list of integers"],
        ),
        (
            [{"prompt_ids": [[1], [2, 3]], "completion_ids": [1]}],
            ["'prompt_ids' must be a list of integers"],
        ),
        (
            [{"token_ids": [1, 2], "completion_mask": ["a", "b"]}],
            ["'completion_mask' must be a list of numbers"],
        ),
        (
            [{"token_ids": [1, 2, 3], "completion_mask": [0, 1]}],
            ["row 0", "3 token ids and 2 mask entries"],
        ),
        (
            [PAIR, {"prompt_ids": [1], "completion_ids": [2, 512]}],
            ["row 1", "token id 512 at position 2", "vocabulary_size=512"],
        ),
        (
            [{"prompt_ids": [-1], "completion_ids": [2]}],
            ["token id -1 at position 0"],
        ),
        (
            [PAIR, {"prompt_ids": [1], "completion_ids": []}],
            ["row 1", "none of which carries loss", "truncation='drop'"],
        ),
        (
            [{"token_ids": [1, 2], "completion_mask": [1, 0]}],
            ["row 0", "none of which carries loss"],
        ),
        ([{"text": "a"}], ["need a tokenizer", "tokenizer=None"]),
    ],
)
def test_bad_rows_are_named(rows, parts):
    with pytest.raises(ValueError) as error:
        prepare(rows)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -0.5])
def test_bad_weights_are_named(value):
    rows = [PAIR, PAIR | {"weight": value}]
    with pytest.raises(ValueError, match=f"row 1.*weight={value}"):
        prepare(rows)
    rows = [{"token_ids": [1, 2, 3], "completion_mask": [0, 1, value]}]
    with pytest.raises(ValueError, match=rf"completion_mask\[2\]={value}"):
        prepare(rows)


@pytest.mark.parametrize("value", ["1", True, [1]])
def test_weights_of_the_wrong_type_are_named(value):
    with pytest.raises(ValueError, match="'weight' must be a number.*row 0"):
        prepare([PAIR | {"weight": value}])


@pytest.mark.parametrize(
    "row, parts",
    [
        ({"text": 5}, ["'text' must be a string", "row 1", "type int"]),
        (
            {"prompt": 5, "completion": "a"},
            ["'prompt' must be a string or a list of messages", "prompt=5"],
        ),
        (
            {"prompt": "a", "completion": []},
            ["'completion' must hold at least one message", "row 1"],
        ),
        ({"messages": []}, ["row 1", "non-empty list"]),
        ({"messages": "hello"}, ["row 1", "non-empty list", "'hello'"]),
        (
            {"messages": [{"role": "user"}]},
            ["row 1", "must have `content`", "message 0"],
        ),
        (
            {"messages": [{"content": "a"}]},
            ["row 1", "`role` must be a string"],
        ),
        (
            {"messages": MESSAGES[:1]},
            ["row 1", "none of which carries loss", "roles=['user']"],
        ),
        (
            {
                "messages": [
                    *MESSAGES[:1],
                    {"role": "Assistant", "content": ""},
                ]
            },
            ["row 1", "Did you mean the role 'assistant'?", "message 1"],
        ),
        (
            {"messages": [*MESSAGES[:1], {"role": "asistant", "content": ""}]},
            ["row 1", "Did you mean the role 'assistant'?", "'asistant'"],
        ),
        (
            {"messages": MESSAGES, "tools": "add"},
            ["row 1", "'tools' must be a list of dicts", "'add'"],
        ),
        (
            {"messages": [{"role": "assistant", "content": 3}]},
            ["row 1", "content=3"],
        ),
    ],
)
def test_bad_rows_of_text_are_named(row, parts, qwen2):
    good = {
        "text": {"text": "a"},
        "prompt": {"prompt": "a", "completion": "b"},
        "messages": {"messages": MESSAGES},
    }
    rows = [good[next(iter(row))], row]
    with pytest.raises(ValueError) as error:
        prepare(rows, qwen2)
    for part in parts:
        assert part in str(error.value)


def test_what_the_template_refuses_names_the_row():
    tokenizer = Tokenizer.from_directory(REFERENCE / "gemma2")
    system = [{"role": "system", "content": "a"}, *MESSAGES]
    rows = [{"messages": MESSAGES}, {"messages": system}]
    with pytest.raises(ValueError, match="In row 1.*System role not supp"):
        prepare(rows, tokenizer)
    rows = [{"messages": MESSAGES + MESSAGES[-1:]}]
    with pytest.raises(ValueError, match="In row 0.*must alternate"):
        prepare(rows, tokenizer)


def test_messages_need_a_template(qwen2):
    tokenizer = qwen2.with_chat_template(None)
    with pytest.raises(ValueError, match="In row 0.*chat_template=None"):
        prepare([{"messages": MESSAGES}], tokenizer)


def test_text_needs_an_end_token(qwen2):
    tokenizer = Tokenizer(qwen2.backend)
    with pytest.raises(ValueError, match="eos_token_id=None for row 0"):
        prepare([{"text": "a"}], tokenizer)


@pytest.mark.parametrize(
    "row, train_on, choices",
    [
        (PAIR, "assistant", "'completion' or 'all'"),
        (
            {"token_ids": [1, 2], "completion_mask": [0, 1]},
            "assistant",
            "'completion' or 'all'",
        ),
        ({"text": "a"}, "completion", "'all'"),
        ({"text": "a"}, "assistant", "'all'"),
        ({"prompt": "a", "completion": "b"}, "assistant", "'completion' or"),
    ],
)
def test_train_on_must_fit_the_rows(row, train_on, choices, qwen2):
    with pytest.raises(ValueError, match=f"{choices}.*{train_on=}"):
        prepare([row], qwen2, train_on=train_on)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"truncation": "left"}, "truncation='left'"),
        ({"train_on": "prompt"}, "train_on='prompt'"),
        ({"sequence_length": 1}, "sequence_length=1"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        prepare([PAIR], **kwargs)


def test_nothing_left_is_an_error():
    with pytest.raises(ValueError, match="No row.*2 rows, 0 kept, 2 dropped"):
        prepare([LONG, LONG], sequence_length=4, truncation="drop")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.jsonl", None, "missing.jsonl"),
        ("rows.txt", "a,b", "rows.txt"),
        ("rows.csv", "a,b", "at least one row"),
        ("rows.jsonl", '{"text": "a"}\n{"text": ', "line 2"),
        ("rows.json", '{"text": "a"}', "with a dict"),
        ("rows.json", '{"text": "a"}\n{"text": "b"}', "is `.jsonl`"),
        ("empty.jsonl", "\n", "at least one row"),
    ],
)
def test_bad_files_are_named(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        prepare(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PAIR]), path)
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError("No module named 'pyarrow'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        prepare(path)


@pytest.mark.parametrize(
    "setting, part",
    [
        ({"sequence_length": 1}, "sequence_length=1"),
        ({"truncation": "no"}, "truncation='no'"),
    ],
)
def test_settings_that_no_rows_can_be_prepared_with(setting, part):
    settings = {"sequence_length": 8, "vocabulary_size": 9} | setting
    with pytest.raises(ValueError, match=part):
        RowSettings(None, **settings)


def test_rows_that_are_none_are_counted(qwen2):
    rows = [{"text": "a b"}, None, {"text": "c d"}, None]
    examples, report = prepare(rows, qwen2)
    assert [x.row for x in examples] == [0, 2]
    assert (report.rows, report.kept) == (4, 2)
    assert dict(report.dropped) == {"None": 2}
    # A Grain dataset gives `None` for rows that it has filtered out.
    source = grain.MapDataset.source(rows[::2])
    kept = source.filter(lambda row: "a" in row["text"])
    _, report = prepare(kept, qwen2)
    assert (report.rows, report.kept) == (1, 1)
