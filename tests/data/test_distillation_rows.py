"""Rows of distillation to tokens, and to batches."""

import json
import unicodedata

import grain
import numpy as np
import pytest
import tokenizers

import keras_posttrain as kpt
from keras_posttrain.data.batches.distillation import (
    distillation_layout,
    fit_teacher_rows,
    with_lookup,
)
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.chat import alignment
from keras_posttrain.data.rows import encoding
from keras_posttrain.data.rows.distillation import prepare_distillation
from keras_posttrain.data.rows.distillation_example import (
    DistillationExample,
    teacher_view,
)
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.sft import prepare_sft
from tests.data.support import split_settings
from tests.support import REFERENCE, random_rows

TOKENIZERS = {
    name: kpt.Tokenizer.from_directory(REFERENCE / "models" / name)
    for name in ("qwen3", "llama3", "gemma2", "mistral")
}
QWEN, GEMMA = TOKENIZERS["qwen3"], TOKENIZERS["gemma2"]


def prepare(rows, tokenizer=QWEN, **settings):
    row_settings, teacher = split_settings(
        {"sequence_length": 64, "vocabulary_size": 600, **settings}
    )
    return prepare_distillation(
        rows, RowSettings(tokenizer, **row_settings), **teacher
    )


CONTEXT = {
    "prompt_ids": [5, 6],
    "completion_ids": [7, 8, 1],
    "teacher_prompt_ids": [9, 9, 9, 5, 6],
}


# What the teacher reads


def test_rows_of_fine_tuning_are_those_of_sft():
    kinds = [
        [{"text": "a text"}],
        [{"prompt": "2 + 2 =", "completion": " 4", "weight": 0.5}],
        [{"messages": [{"role": "user", "content": "hi"}, ASSISTANT]}],
        random_rows(3),
    ]
    for rows in kinds:
        ours, report = prepare(rows)
        theirs, expected = prepare_sft(
            rows, RowSettings(QWEN, sequence_length=64, vocabulary_size=600)
        )
        for example, other in zip(ours, theirs, strict=True):
            assert example.token_ids.tolist() == other.token_ids.tolist()
            assert example.completion_mask.tolist() == (
                other.completion_mask.tolist()
            )
            assert not isinstance(example, DistillationExample)
        assert str(report) == str(expected)
        assert report.predicted_share == 1.0


ASSISTANT = {"role": "assistant", "content": "hello there"}


def test_the_teachers_prompt_stands_before_the_same_tokens():
    [example], report = prepare([CONTEXT], tokenizer=None)
    assert example.token_ids.tolist() == [5, 6, 7, 8, 1]
    assert example.completion_mask.tolist() == [0, 0, 1, 1, 1]
    assert example.teacher_ids.tolist() == [9, 9, 9, 5, 6, 7, 8, 1]
    assert example.teacher_source.tolist() == [-1, -1, 4, 5, 6]
    assert (report.teacher_tokens, report.predicted_tokens) == (8, 3)
    # No token comes before the completion to predict its first.
    [example], report = prepare([CONTEXT | {"teacher_prompt_ids": []}])
    assert example.teacher_source.tolist() == [-1, -1, -1, 0, 1]
    assert report.predicted_share == pytest.approx(2 / 3)
    assert "predicts 2 of those with loss (66.7%), none in 0" in str(report)


def test_random_rows_are_predicted_at_the_token_before_the_same_one():
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt_ids": rng.integers(3, 500, rng.integers(0, 9)).tolist(),
            "completion_ids": rng.integers(3, 500, 2 + i % 7).tolist(),
            "teacher_prompt_ids": rng.integers(3, 500, 1 + i % 11).tolist(),
        }
        for i in range(50)
    ]
    for example in prepare(rows, tokenizer=None)[0]:
        row = rows[example.row]
        for t in np.flatnonzero(example.completion_mask):
            source = example.teacher_source[t]
            assert example.teacher_ids[source + 1] == example.token_ids[t]
            past = t - len(row["prompt_ids"])
            given = row["teacher_prompt_ids"] + row["completion_ids"][:past]
            assert example.teacher_ids[: source + 1].tolist() == given
        assert (example.teacher_source[example.completion_mask == 0] < 0).all()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_of_text_or_messages(name):
    tokenizer = TOKENIZERS[name]
    user = {"role": "user", "content": "hi"}
    long = {"role": "user", "content": "Answer as a pirate would. hi"}
    rows = [
        {
            "prompt": "Question: 2 + 2\nAnswer:",
            "completion": " four café 🙂",
            "teacher_prompt": "Sums.\nQuestion: 2 + 2\nAnswer:",
        },
        {"prompt": [user], "completion": "arr", "teacher_prompt": [long]},
        {
            "prompt": [user],
            "completion": [{"role": "assistant", "content": " arr, matey "}],
            "teacher_prompt": long["content"],
        },
    ]
    examples, report = prepare(rows, tokenizer, sequence_length=128)
    assert report.predicted_share == 1.0
    for example, row in zip(examples, rows, strict=True):
        alone, _ = prepare_sft(
            [row],
            RowSettings(tokenizer, sequence_length=128, vocabulary_size=600),
        )
        assert example.token_ids.tolist() == alone[0].token_ids.tolist()
        trained = np.flatnonzero(example.completion_mask)
        source = example.teacher_source[trained]
        assert example.teacher_ids[source + 1].tolist() == (
            example.token_ids[trained].tolist()
        )
        before = tokenizer.decode(example.teacher_ids[: source[0] + 1])
        assert ("Sums" in before) or ("pirate" in before)


def test_teachers_by_name():
    rows = [row | {"by": name} for row, name in zip(random_rows(3), "aba")]
    examples, _ = prepare(rows, teacher_column="by", teacher_names="ab")
    assert [e.teacher_index for e in examples] == [0, 1, 0]
    assert all(e.teacher_ids is None for e in examples)
    # Only the teacher differs, which changes the fingerprint.
    assert examples[0].other_bytes != examples[1].other_bytes


def test_what_is_too_long_for_the_teacher():
    long = CONTEXT | {"teacher_prompt_ids": [9] * 20}
    with pytest.raises(ValueError, match="row 1 .* 23 tokens for the teacher"):
        prepare([CONTEXT, long], teacher_length=22)
    examples, report = prepare(
        [CONTEXT, long], teacher_length=22, truncation="drop"
    )
    assert [e.row for e in examples] == [0]
    assert report.dropped == {"too long for the teacher": 1}
    assert (report.rows, report.kept) == (2, 1)
    [example], report = prepare([long], teacher_length=21, truncation="cut")
    assert example.token_ids.tolist() == [5, 6, 7, 8, 1]
    assert len(example.teacher_ids) == 21
    assert example.teacher_source.tolist() == [-1, -1, 19, 20, -1]
    assert (report.cut, report.predicted_tokens) == (1, 2)
    # Both sides are cut: still one row.
    [example], report = prepare(
        [long], teacher_length=21, sequence_length=4, truncation="cut"
    )
    assert example.teacher_source.tolist() == [-1, -1, 19, 20]
    assert report.cut == 1


# Another tokenizer


def test_boundaries_by_hand():
    # A start token, "ab", a character in two pieces, " c", the end token.
    offsets = [(0, 0), (0, 2), (2, 3), (2, 3), (3, 5), (5, 5)]
    assert alignment.boundaries(offsets).tolist() == [0, 0, 2, -1, 3, 5]
    # An accent of its own, which is no part of any token's place.
    assert alignment.boundaries([(0, 1), (2, 4)]).tolist() == [0, 2]
    assert alignment.boundaries([]).tolist() == []


def encoded(text, offsets, spans):
    ids = np.arange(len(offsets))
    return encoding.EncodedText(
        ids, np.ones(len(ids), np.float32), text, np.array(offsets), spans
    )


def test_alignment_by_hand():
    # "xx" and "y" are prompts. Completion: ab|c|d against ab|cd.
    student = encoded(
        "xxabcd", [(0, 2), (2, 4), (4, 5), (5, 6), (6, 6)], [(2, 6, 2)]
    )
    teacher = encoded(
        "yabcd", [(0, 0), (0, 1), (1, 3), (3, 5), (5, 5)], [(1, 5, 1)]
    )
    # ab: behind "y". c: behind the other ab. d: not where "cd" is one token.
    source = alignment.align(student, teacher)
    assert source.tolist() == [-1, 1, 2, -1, 3]


UNICODE = [
    "plain words, some numbers: 12 345",
    "café, naïve, cafe\u0301",
    "🙂👩‍👩‍👧 done 日本語の文字",
    "  two  spaces\n\n\tand\t  tabs \n",
]


@pytest.mark.parametrize("student", TOKENIZERS)
@pytest.mark.parametrize("teacher", TOKENIZERS)
def test_aligned_tokens_have_the_same_text_before_them(student, teacher):
    ours, theirs = TOKENIZERS[student], TOKENIZERS[teacher]
    if ours is theirs:
        theirs = kpt.Tokenizer.from_directory(ours.source)
    rows = [{"prompt": "Say: ", "completion": x} for x in UNICODE]
    examples, report = prepare(
        rows, ours, teacher_tokenizer=theirs, sequence_length=256
    )
    seen = 0
    for example in examples:
        # The texts of all tokens before each one; é is composed by some.
        for t in np.flatnonzero(example.teacher_source >= 0):
            source = example.teacher_source[t]
            before, other = (
                unicodedata.normalize("NFC", x.lstrip())
                for x in (
                    ours.decode(example.token_ids[:t]),
                    theirs.decode(example.teacher_ids[: source + 1]),
                )
            )
            assert before == other
            seen += 1
        # The end of the text is always in common.
        assert example.teacher_source[-1] == len(example.teacher_ids) - 2
    assert seen == report.predicted_tokens
    # Of the pieces of a character only the first has a counterpart.
    assert seen > 20


def test_every_boundary_in_common_is_found():
    """Against the texts of all beginnings, where pieces are whole."""
    row = {"prompt": "Q:", "completion": " def f(x):\n    return x + 1"}
    [example], report = prepare([row], teacher_tokenizer=GEMMA)
    theirs = {
        GEMMA.decode(example.teacher_ids[:i]): i - 1
        for i in range(len(example.teacher_ids))
    }
    expected = [
        theirs.get(QWEN.decode(example.token_ids[:t]), -1) if m else -1
        for t, m in enumerate(example.completion_mask)
    ]
    assert example.teacher_source.tolist() == expected
    predicted = sum(source >= 0 for source in expected)
    assert 0 < predicted < example.completion_mask.sum()
    assert (report.predicted_tokens, report.unpredicted_rows) == (predicted, 0)


@pytest.mark.parametrize("teacher", ["llama3", "gemma2", "mistral"])
def test_turns_are_aligned_behind_each_ones_own_template(teacher):
    theirs = TOKENIZERS[teacher]
    messages = [
        {"role": "user", "content": "hi 🙂"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "second one"},
    ]
    [example], report = prepare(
        [{"messages": messages}], teacher_tokenizer=theirs, sequence_length=256
    )
    # Each turn's end is predicted: both sides have the full answer before it.
    ends = np.flatnonzero(example.token_ids == QWEN.eos_token_id)
    ends = [t for t in ends if example.completion_mask[t]]
    for t, answer in zip(ends, ("first answer", "second one"), strict=True):
        source = example.teacher_source[t]
        read = theirs.decode(example.teacher_ids[: source + 1])
        assert read.endswith(answer), read
        assert example.teacher_ids[source + 1] in theirs.stop_token_ids


def test_places_without_spaces_are_made_whole():
    """Some published tokenizers give places that leave out spaces."""
    state = json.loads(TOKENIZERS["llama3"].backend.to_str())
    state["post_processor"]["processors"][0]["trim_offsets"] = True
    trimmed = kpt.Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(state)),
        TOKENIZERS["llama3"].special_tokens,
        chat_template=TOKENIZERS["llama3"].chat_template,
    )
    whole = alignment.with_whole_places(trimmed)
    assert alignment.with_whole_places(whole) is whole
    text = "some words\t  and\t spaces"
    assert trimmed.encode_with_offsets(text) != whole.encode_with_offsets(text)
    assert whole.encode_with_offsets(text) == (
        TOKENIZERS["llama3"].encode_with_offsets(text)
    )
    rows = [{"text": text}]
    for pair in ((trimmed, QWEN), (QWEN, trimmed)):
        same = [TOKENIZERS["llama3"] if t is trimmed else t for t in pair]
        [example], _ = prepare(rows, pair[0], teacher_tokenizer=pair[1])
        [other], _ = prepare(rows, same[0], teacher_tokenizer=same[1])
        assert example.teacher_source.tolist() == other.teacher_source.tolist()


def test_rows_without_a_boundary_in_common_are_counted():
    """A teacher's tokenizer that reads any text as one token, and no end."""
    model = tokenizers.models.WordLevel({"[U]": 0, "</s>": 1}, "[U]")
    one = kpt.Tokenizer(tokenizers.Tokenizer(model), {"eos_token": "</s>"})
    text = "several tokens"
    # Cut, so that the end token, which both have, is gone.
    settings = {"teacher_tokenizer": one, "truncation": "cut"}
    with pytest.raises(ValueError) as error:
        prepare([{"text": text}], sequence_length=2, **settings)
    for part in ("predict a token of some row", "none in 1 rows"):
        assert part in str(error.value)
    short = "a"
    examples, report = prepare(
        [{"text": text}, {"text": short}], sequence_length=2, **settings
    )
    assert (
        len(examples),
        report.unpredicted_rows,
        report.predicted_tokens,
    ) == (2, 1, 1)


# Errors

TEXT = {"prompt": "a", "completion": " b"}


@pytest.mark.parametrize(
    "rows, settings, parts",
    [
        (
            [CONTEXT, {**CONTEXT, "teacher_prompt_ids": None}],
            {},
            ["or none", "row 0 of `dataset` has one, row 1 has none"],
        ),
        (
            [TEXT, {**TEXT, "teacher_prompt": "c"}],
            {},
            ["row 1 of `dataset` has one, row 0 has none"],
        ),
        (
            [{"text": "a", "teacher_prompt": "b"}],
            {},
            ["'teacher_prompt' goes with rows with {'prompt', 'completion'}"],
        ),
        (
            [{**TEXT, "teacher_prompt_ids": [5]}],
            {},
            ["goes with rows with {'prompt_ids', 'completion_ids'}"],
        ),
        (
            [{**CONTEXT, "teacher_promt_ids": [5]}],
            {},
            ["Did you mean the column 'teacher_prompt_ids'", "row 0"],
        ),
        (
            [{**CONTEXT, "teacher_prompt_ids": [999]}],
            {},
            ["row 0 of `dataset` (teacher), token id 999 at position 0"],
        ),
        (
            [{**CONTEXT, "teacher_prompt_ids": "ab"}],
            {},
            ["teacher_prompt_ids='ab'", "a list of integers"],
        ),
        (
            [{**TEXT, "teacher_prompt": 3}],
            {},
            ["'teacher_prompt' must be a string or a list", "row 0"],
        ),
        (
            [{**TEXT, "teacher_prompt": [{"role": "user", "content": "c"}]}],
            {},
            ["must be a string where the prompt and the completion are"],
        ),
        (
            [{**TEXT, "prompt": [ASSISTANT], "teacher_prompt": [{}]}],
            {},
            ["What the teacher reads cannot be made", "`role`", "row 0"],
        ),
        (
            [CONTEXT],
            {"train_on": "all"},
            ["only completions can be distilled", "train_on='all'", "row 0"],
        ),
        (
            [{"prompt_ids": [5], "completion_ids": [6]}],
            {"teacher_tokenizer": GEMMA},
            ["needs rows of text", "{'prompt_ids', 'completion_ids'}"],
        ),
        (
            random_rows(1),
            {"teacher_tokenizer": GEMMA},
            ["needs rows of text", "student's vocabulary"],
        ),
        (
            [TEXT],
            {"teacher_tokenizer": GEMMA, "tokenizer": None},
            ["Rows of text need a tokenizer", "row 0"],
        ),
        (
            [TEXT],
            {"teacher_tokenizer": GEMMA, "teacher_vocabulary_size": 3},
            ["row 0 of `dataset` (teacher)", "vocabulary_size=3"],
        ),
        (
            [{**CONTEXT, "by": "mathh"}],
            {"teacher_column": "by", "teacher_names": ["math", "code"]},
            ["row 0", "by='mathh'", "['math', 'code']", "mean 'math'"],
        ),
        (
            [CONTEXT],
            {"teacher_column": "by", "teacher_names": ["math"]},
            ["The column 'by'", "by=None"],
        ),
        (
            [CONTEXT],
            {"teacher_column": "by"},
            ["go together", "teacher_names=None"],
        ),
    ],
)
def test_rows_that_cannot_be_used(rows, settings, parts):
    with pytest.raises(ValueError) as error:
        prepare(rows, **settings)
    for part in parts:
        assert part in str(error.value)


def test_a_stream_gives_the_examples_of_its_rows():
    for rows in (random_rows(4), [CONTEXT] * 3):
        expected, counted = prepare(rows)
        examples, report = prepare(
            grain.MapDataset.source(rows).to_iter_dataset()
        )
        # As in two epochs.
        for _ in range(2):
            for ours, theirs in zip(examples, expected, strict=True):
                assert ours.token_ids.tobytes() == theirs.token_ids.tobytes()
                others = [getattr(x, "other_bytes", 0) for x in (ours, theirs)]
                assert others[0] == others[1]
        assert report == counted


# Batches


def batch_of(examples, **settings):
    layout = distillation_layout(
        batch_size=settings.pop("batch_size", len(examples)),
        sequence_length=settings.pop("sequence_length", 64),
        **settings,
    )
    return layout(examples).arrays


def test_a_batch_by_hand():
    other = {
        "prompt_ids": [11],
        "completion_ids": [12, 1],
        "teacher_prompt_ids": [13, 14],
    }
    examples, _ = prepare([CONTEXT, other], tokenizer=None)
    batch = batch_of(examples, batch_size=3, teacher_pad_id=2)
    assert batch["token_ids"].shape == (3, 64)
    assert batch["teacher_token_ids"].shape == (3, 64)
    first = [9, 9, 9, 5, 6, 7, 8, 1]
    for key, row, expected in [
        ("token_ids", 0, [5, 6, 7, 8, 1, 0]),
        ("teacher_token_ids", 0, [*first, 2, 2]),
        ("teacher_segment_ids", 0, [1] * 8 + [0]),
        ("teacher_positions", 0, [*range(8), 0]),
        ("teacher_source", 0, [0, 0, 4, 5, 6, 0]),
        ("teacher_mask", 0, [0, 0, 1, 1, 1, 0]),
        ("teacher_source", 1, [0, 1, 2, 0]),
        ("teacher_mask", 1, [0, 1, 1, 0]),
        ("teacher_token_ids", 2, [2, 2]),
        ("teacher_segment_ids", 2, [0, 0]),
    ]:
        assert batch[key][row, : len(expected)].tolist() == expected, key
        assert not batch[key][row, len(expected) :].any() or "ids" in key

    packed = batch_of(examples, token_budget=8, teacher_budget=16)
    assert packed["token_ids"].tolist() == [[5, 6, 7, 8, 1, 11, 12, 1]]
    assert packed["segment_ids"].tolist() == [[1] * 5 + [2] * 3]
    teacher = [[*first, 13, 14, 12, 1, 0, 0, 0, 0]]
    assert packed["teacher_token_ids"].tolist() == teacher
    assert packed["teacher_segment_ids"].tolist() == [
        [1] * 8 + [2] * 4 + [0] * 4
    ]
    # The second one's tokens begin in column 8 of the teacher's row.
    assert packed["teacher_source"].tolist() == [[0, 0, 4, 5, 6, 0, 9, 10]]
    assert packed["teacher_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 1, 1]]


def test_the_first_token_of_a_teacher_predicts_the_next():
    row = CONTEXT | {"teacher_prompt_ids": [9]}
    examples, _ = prepare([row], tokenizer=None)
    batch = batch_of(examples)
    assert batch["teacher_source"][0, :5].tolist() == [0, 0, 0, 1, 2]
    assert batch["teacher_mask"][0, :6].tolist() == [0, 0, 1, 1, 1, 0]
    # In a packed row as well, behind the teacher's 8 tokens of another.
    pair, _ = prepare([CONTEXT, row], tokenizer=None)
    packed = batch_of(pair, token_budget=10, teacher_budget=16)
    assert packed["teacher_source"].tolist() == [
        [0, 0, 4, 5, 6, 0, 0, 8, 9, 10]
    ]
    assert packed["teacher_mask"].tolist() == [[0, 0, 1, 1, 1] * 2]


def test_rows_of_a_batch_have_fine_lengths_and_their_padding():
    row = CONTEXT | {"completion_ids": [7] * 130}
    examples, _ = prepare([row], tokenizer=None, sequence_length=300)
    batch = batch_of(
        examples,
        sequence_length=300,
        pad_id=3,
        teacher_pad_id=4,
        row_multiple=3,
    )
    assert batch["token_ids"].shape == (3, 192)
    assert (batch["token_ids"][0, 132:] == 3).all()
    assert batch["teacher_token_ids"].shape == (3, 192)
    assert (batch["teacher_token_ids"][0, 135:] == 4).all()


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"token_budget": 128, "teacher_length": 80}, 160),
        # Rounded up, and never less than one sequence.
        ({"token_budget": 65, "teacher_length": 80}, 82),
        ({"token_budget": 32, "teacher_length": 80}, 80),
        ({"token_budget": 128}, 128),
        ({"token_budget": 128, "teacher_budget": 99}, 99),
        ({"teacher_length": 80, "teacher_budget": 99}, None),
    ],
)
def test_the_length_of_a_teachers_packed_rows(settings, expected):
    layout = distillation_layout(batch_size=4, sequence_length=64, **settings)
    assert layout.extras.teacher_budget == expected


def test_a_teachers_rows_are_fitted_to_the_tokens_of_a_run():
    """5 tokens of the student to 8 of the teacher: 160 to 256."""
    examples, _ = prepare([CONTEXT] * 3, tokenizer=None)
    settings = {"batch_size": 4, "sequence_length": 64}
    for budget, expected in ((160, 256), (161, 320), (40, 64), (120, 192)):
        layout = distillation_layout(**settings, token_budget=budget)
        fitted = fit_teacher_rows(layout, examples)
        assert fitted.extras.teacher_budget == expected
        assert fitted.token_budget == budget
    # The longest of the teacher's sequences has room.
    rows = [
        {
            "prompt_ids": [5] * 50,
            "completion_ids": [6] * 10,
            "teacher_prompt_ids": [7] * n,
        }
        for n in (*[51] * 9, 193)
    ]
    some, _ = prepare(rows, tokenizer=None, teacher_length=300)
    layout = distillation_layout(**settings, token_budget=64)
    assert fit_teacher_rows(layout, some).extras.teacher_budget == 256
    # Nothing to fit without packing, or where the teacher reads the same.
    apart = distillation_layout(**settings)
    assert fit_teacher_rows(apart, examples) is apart
    same, _ = prepare(random_rows(3))
    assert fit_teacher_rows(layout, same) is layout


def test_no_arrays_of_a_teacher_that_reads_the_same():
    examples, _ = prepare(random_rows(3))
    batch = batch_of(examples)
    assert not [key for key in batch if key.startswith("teacher")]


def context_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "prompt_ids": rng.integers(3, 500, rng.integers(0, 9)).tolist(),
            "completion_ids": rng.integers(3, 500, 2 + i % 17).tolist(),
            "teacher_prompt_ids": rng.integers(
                3, 500, rng.integers(0, 60)
            ).tolist(),
        }
        for i in range(count)
    ]


def tokens_of(batch):
    """Returns the facts of each trained token, sorted."""
    found = []
    for r, t in zip(*np.nonzero(batch["completion_mask"])):
        segment = batch["segment_ids"][r, t]
        entry = [
            int(batch["sequence_ids"][r, segment - 1]),
            int(batch["positions"][r, t]),
            int(batch["token_ids"][r, t]),
            float(batch["teacher_mask"][r, t]),
        ]
        if batch["teacher_mask"][r, t]:
            column = batch["teacher_source"][r, t]
            assert batch["teacher_segment_ids"][r, column] == segment
            first = column - batch["teacher_positions"][r, column]
            read = batch["teacher_token_ids"][r, first : column + 1]
            entry.append(read.tolist())
        found.append(entry)
    return sorted(found)


@pytest.mark.parametrize("budget", [32, 64, 100])
@pytest.mark.parametrize("fit", [False, True])
def test_packed_batches_hold_the_same_tokens(budget, fit):
    examples, _ = prepare(context_rows(60), tokenizer=None, teacher_length=80)
    layout = distillation_layout(
        batch_size=60,
        sequence_length=32,
        teacher_length=80,
        token_budget=budget,
        row_multiple=2,
    )
    if fit:
        layout = fit_teacher_rows(layout, examples)
    packed = layout(examples).arrays
    apart = batch_of(examples, teacher_length=80)
    assert tokens_of(packed) == tokens_of(apart)
    assert len(packed["token_ids"]) % 2 == 0
    assert len(packed["token_ids"]) < 60
    if fit:
        # Rows fill alike on both sides: little of either is padding.
        for key in ("segment_ids", "teacher_segment_ids"):
            used = packed[key][packed["segment_ids"].any(1)]
            assert (used != 0).mean() > 0.6


def test_batches_of_an_adapter_are_the_same_packed():
    """The same sequences are in a step, and its arrays have few shapes."""
    examples, _ = prepare(context_rows(22), tokenizer=None, teacher_length=80)
    settings = {"batch_size": 8, "sequence_length": 64}
    layout = distillation_layout(**settings, teacher_length=80)
    packing = distillation_layout(
        **settings, teacher_length=80, token_budget=128
    )
    packing = fit_teacher_rows(packing, examples)
    apart, packed = (
        list(BatchAdapter(examples, **settings, layout=x).get_jax_iterator())
        for x in (layout, packing)
    )
    assert len(apart) == 3
    for one, other in zip(apart, packed, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert one["teacher_token_ids"].shape[1] in (64, 128)


def test_weights_of_several_teachers():
    rows = [row | {"by": name} for row, name in zip(random_rows(3), "aba")]
    examples, _ = prepare(rows, teacher_column="by", teacher_names="ab")
    batch = batch_of(examples, batch_size=4, num_teachers=2)
    assert batch["teacher_weights"].tolist() == [
        [[1, 0]],
        [[0, 1]],
        [[1, 0]],
        [[0, 0]],
    ]
    packed = batch_of(examples, num_teachers=2, token_budget=128)
    weights, ids = packed["teacher_weights"], packed["sequence_ids"]
    assert weights.shape == (1, 16, 2)
    for s in range(3):
        named = "ab".index(rows[ids[0, s]]["by"])
        assert weights[0, s].tolist() == np.eye(2)[named].tolist()
    assert not weights[0, 3:].any()
    plain, _ = prepare(random_rows(2))
    batch = batch_of(plain, teacher_weights=(0.25, 0.75))
    assert batch["teacher_weights"].tolist() == [[[0.25, 0.75]]] * 2
    with pytest.raises(ValueError, match="row 0 .* without a name"):
        batch_of(plain, num_teachers=2)


def test_distributions_that_are_looked_up():
    """All tokens' of the first row, the last two tokens' of the second."""
    rows = [
        {"prompt_ids": [5], "completion_ids": [6, 7]},
        {"prompt_ids": [8, 9], "completion_ids": [10, 1]},
    ]
    examples, _ = prepare(rows, tokenizer=None)

    def lookup(example):
        ids = np.stack([example.token_ids, example.token_ids + 1], 1)
        ids = ids[-2:] if example.row else ids
        return {"ids": ids, "logps": -ids.astype(np.float32)}

    batch = batch_of(examples, lookup=lookup, token_budget=8)
    assert batch["token_ids"].tolist() == [[8, 9, 10, 1, 5, 6, 7, 0]]
    ids = batch["teacher_ids"][0].tolist()
    assert ids[2:7] == [[10, 11], [1, 2], [5, 6], [6, 7], [7, 8]]
    assert (batch["teacher_logps"][0, 2:7] == -np.array(ids[2:7])).all()
    assert batch["teacher_ids"].dtype == np.int32
    assert batch["teacher_logps"].dtype == np.float32
    # Elsewhere: two tokens and the rest, all as probable.
    for t in (0, 1, 7):
        assert ids[t] == [0, 1]
        assert np.exp(batch["teacher_logps"][0, t]) == pytest.approx(1 / 3)
    assert "teacher_token_ids" not in batch and "teacher_mask" not in batch


def test_what_is_looked_up_takes_no_row_of_the_teacher():
    """8 tokens of the teacher are half a row of 16, so 4 of 8; 5 are ours."""
    long = CONTEXT | {"teacher_prompt_ids": [9] * 9}
    examples, _ = prepare([CONTEXT, long], tokenizer=None)
    layout = distillation_layout(
        batch_size=2, sequence_length=64, token_budget=8, teacher_budget=16
    )
    assert [layout.size(x) for x in examples] == [5, 6]
    looked_up = with_lookup(layout, len)
    assert looked_up.extras.lookup is len
    assert [looked_up.size(x) for x in examples] == [5, 5]


def test_what_is_looked_up_must_fit_its_row():
    examples, _ = prepare(random_rows(1))
    ids = np.zeros((99, 2), np.int32)
    with pytest.raises(ValueError, match=r"row 0 .* shape \(99, 2\)"):
        batch_of(examples, lookup=lambda e: {"ids": ids, "logps": ids})
    flat, other = np.zeros(2, np.int32), np.zeros((2, 3), np.int32)
    for given in ((flat, flat), (other, other[:, :2])):
        with pytest.raises(ValueError, match=r"must have the shape"):
            batch_of(
                examples,
                lookup=lambda e, given=given: dict(
                    zip(("ids", "logps"), given)
                ),
            )


def test_a_teacher_behind_its_own_prompt_is_looked_up_by_mask():
    """The teacher read a longer prompt once: only its top-k are left."""
    [example], _ = prepare([CONTEXT], tokenizer=None)
    ids = np.ones((3, 2), np.int32)

    def lookup(e):
        return {"ids": ids, "logps": -ids.astype(np.float32)}

    batch = batch_of([example], lookup=lookup)
    assert batch["teacher_mask"][0, :6].tolist() == [0, 0, 1, 1, 1, 0]
    assert "teacher_source" not in batch
    assert "teacher_token_ids" not in batch


def test_sampled_tokens_behind_another_prompt():
    ids, source = teacher_view(np.array([4, 5]), np.array([7, 8]), 5)
    assert ids.tolist() == [4, 5, 7, 8]
    assert source.tolist() == [-1, -1, -1, 1, 2]
