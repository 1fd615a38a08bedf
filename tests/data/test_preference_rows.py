"""Rows of preferences to tokens, and to batches."""

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.preference import (
    completion_key,
    preference_layout,
    row_length,
)
from keras_posttrain.data.batches.row_cache import RowCache
from keras_posttrain.data.rows.preference import prepare_preferences
from keras_posttrain.data.rows.preparation import RowSettings
from tests.support import REFERENCE

TOKENIZER = kpt.Tokenizer.from_directory(REFERENCE / "models/qwen3")


def prepare(rows, *, labelled=False, tokenizer=TOKENIZER, **settings):
    settings = {"sequence_length": 64, "vocabulary_size": 512, **settings}
    return prepare_preferences(
        rows, RowSettings(tokenizer, **settings), labelled=labelled
    )


def test_tokenised_pairs_are_taken_as_they_are():
    rows = [{"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9]}]
    [example], report = prepare(rows, tokenizer=None)
    assert example.prompt.tolist() == [5, 6]
    assert [c.tolist() for c in example.completions] == [[7], [8, 9]]
    assert [m.tolist() for m in example.masks] == [[1], [1, 1]]
    assert (report.kept, report.tokens, report.loss_tokens) == (1, 7, 3)
    assert report.longest == 4


def test_without_a_prompt_it_is_what_both_sides_begin_with():
    rows = [{"chosen_ids": [5, 6, 7], "rejected_ids": [5, 6, 8, 9]}]
    [example], _ = prepare(rows, tokenizer=None)
    assert example.prompt.tolist() == [5, 6]
    # One side is the other's beginning: a token of it is left to learn.
    rows = [{"chosen_ids": [5, 6], "rejected_ids": [5, 6, 8]}]
    [example], _ = prepare(rows, tokenizer=None)
    assert example.prompt.tolist() == [5]
    assert [c.tolist() for c in example.completions] == [[6], [6, 8]]


def test_strings_are_joined_and_ended():
    rows = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]
    [example], _ = prepare(rows)
    end = TOKENIZER.eos_token_id
    for side, text in ((0, "2 + 2 = 4"), (1, "2 + 2 = 5")):
        sequence = example.sequences[side]
        ids, mask = sequence.token_ids, sequence.completion_mask
        assert ids.tolist() == [*TOKENIZER.encode(text), end]
        trained = ids[mask != 0].tolist()
        assert TOKENIZER.decode(trained).strip() in text
        assert trained[-1] == end
    whole = [{"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}]
    [implicit], _ = prepare(whole)
    for side in (0, 1):
        assert implicit.sequences[side].token_ids.tolist() == (
            example.sequences[side].token_ids.tolist()
        )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
    ],
)
def test_tools_of_strings_are_an_error(row):
    prepare([row | {"tools": []}])
    with pytest.raises(ValueError, match="plain text.*row 0.*'add'"):
        prepare([row | {"tools": [{"name": "add"}]}])


def test_messages_with_a_prompt_in_common():
    user = {"role": "user", "content": "hi"}
    good = {"role": "assistant", "content": "hello"}
    bad = {"role": "assistant", "content": "no"}
    ways = [
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        # The prompt is given, and repeated on both sides.
        {"prompt": "hi", "chosen": [user, good], "rejected": [user, bad]},
        {"prompt": [user], "chosen": "hello", "rejected": "no"},
    ]
    found = [prepare([row])[0][0] for row in ways]
    for example in found[1:]:
        for ours, theirs in zip(
            example.sequences, found[0].sequences, strict=True
        ):
            for name in ("token_ids", "completion_mask"):
                np.testing.assert_array_equal(
                    getattr(ours, name), getattr(theirs, name)
                )
    [chosen, _] = found[0].sequences
    ids = chosen.token_ids[chosen.completion_mask != 0]
    assert TOKENIZER.decode(ids.tolist()).strip() == "hello"


def test_labels_and_margins():
    rows = [
        {"prompt": "a", "completion": " b", "label": True},
        {"prompt_ids": [5], "completion_ids": [6, 7], "label": np.False_},
    ]
    examples, _ = prepare(rows, labelled=True)
    assert [e.label for e in examples] == [True, False]
    assert examples[1].prompt.tolist() == [5]
    row = {"chosen_ids": [5, 6], "rejected_ids": [5, 7], "margin": 2}
    [example], _ = prepare([row])
    assert example.margin == 2.0


def test_equal_sides_are_left_out_and_counted():
    pair = {"prompt_ids": [5], "chosen_ids": [7], "rejected_ids": [7]}
    other = {**pair, "rejected_ids": [8]}
    examples, report = prepare([pair, other])
    assert [e.row for e in examples] == [1]
    assert report.dropped == {"chosen equals rejected": 1}
    assert "1 chosen equals rejected" in str(report)
    with pytest.raises(ValueError, match="No row of `dataset` is left"):
        prepare([pair])


def test_long_rows():
    row = {"prompt_ids": [5] * 4, "chosen_ids": [7], "rejected_ids": [8] * 9}
    short = {"prompt_ids": [5], "chosen_ids": [7], "rejected_ids": [8]}
    with pytest.raises(ValueError, match="row 0 of `dataset` with 13 tokens"):
        prepare([row], sequence_length=8)
    examples, report = prepare(
        [row, short], sequence_length=8, truncation="drop"
    )
    assert [e.row for e in examples] == [1]
    assert report.dropped == {"too long": 1}
    examples, report = prepare([row], sequence_length=8, truncation="cut")
    assert len(examples[0].completions[1]) == 4
    assert report.cut == 1


PAIR = {"prompt_ids": [5], "chosen_ids": [7], "rejected_ids": [8]}
LABELLED = {"prompt_ids": [5], "completion_ids": [7], "label": True}


@pytest.mark.parametrize(
    "row, labelled, parts",
    [
        ({"prompt": "a", "chosen": "b"}, False, ["goes with 'rejected'"]),
        (
            {"prompt_ids": [5], "rejected_ids": [6]},
            False,
            ["row 0 of `dataset`", "goes with 'chosen_ids'"],
        ),
        ({**PAIR, "chosen_ids": None}, False, ["'chosen_ids' is None"]),
        (
            {"chosen": "abc", "rejected": "xyz"},
            False,
            ["begin with the same prompt", "chosen='abc'"],
        ),
        (
            {"chosen_ids": [5], "rejected_ids": [6]},
            False,
            ["begin with the same prompt", "'prompt_ids'"],
        ),
        (
            {
                "chosen": [{"role": "user", "content": "a"}],
                "rejected": [{"role": "user", "content": "b"}],
            },
            False,
            ["begin with the same prompt"],
        ),
        ({**LABELLED, "label": 1}, True, ["label=1 of type int", "True"]),
        ({**LABELLED, "label": "yes"}, True, ["label='yes'"]),
        (PAIR, True, ["with a label", "DPOLoss"]),
        (LABELLED, False, ["a chosen and a rejected side", "KTOLoss"]),
        ({**PAIR, "margin": "2"}, False, ["margin='2'", "a finite number"]),
        ({**PAIR, "chosen_ids": [999]}, False, ["999", "vocabulary size"]),
        ({**PAIR, "chosen_ids": [1.5]}, False, ["chosen_ids=[1.5]"]),
        ({**PAIR, "chosen_ids": []}, False, ["none of which carries loss"]),
        (
            {"prompt": "a", "chosen": 3, "rejected": "b"},
            False,
            ["chosen=3"],
        ),
        ({"chosn": "a", "rejected": "b"}, False, ["Did you mean 'chosen'"]),
        ([1, 2], False, ["must be a dict"]),
    ],
)
def test_rows_that_cannot_be_used(row, labelled, parts):
    with pytest.raises(ValueError) as error:
        prepare([row], labelled=labelled)
    for part in parts:
        assert part in str(error.value)


# Batches

PAIRS = [
    {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9, 10]},
    {"prompt_ids": [11], "chosen_ids": [12, 13], "rejected_ids": [14]},
]


def batch_of(rows, *, labelled=False, **settings):
    examples, _ = prepare(rows, labelled=labelled, tokenizer=None)
    layout = preference_layout(
        batch_size=settings.pop("batch_size", len(rows)),
        sequence_length=64,
        labelled=labelled,
        **settings,
    )
    return layout(examples).arrays


def test_chosen_and_rejected_are_neighbouring_rows():
    batch = batch_of(PAIRS, batch_size=3)
    assert batch["token_ids"].shape == (6, 64)
    assert batch["sequence_mask"].tolist() == [[1]] * 4 + [[0]] * 2
    assert batch["token_ids"][:4, :5].tolist() == [
        [5, 6, 7, 0, 0],
        [5, 6, 8, 9, 10],
        [11, 12, 13, 0, 0],
        [11, 14, 0, 0, 0],
    ]
    assert batch["completion_mask"][:4].sum(1).tolist() == [1, 3, 2, 1]
    assert batch["sequence_ids"][:4, 0].tolist() == [0, 0, 1, 1]


def test_a_shared_prompt_is_stored_once():
    batch = batch_of(PAIRS, share_prefix=True)
    assert batch["token_ids"].shape == (2, 64)
    assert batch["token_ids"][0, :6].tolist() == [5, 6, 7, 8, 9, 10]
    assert batch["sequence_mask"].tolist() == [[0, 1, 1]] * 2
    packed = batch_of(PAIRS, share_prefix=True, token_budget=64)
    assert packed["token_ids"].shape == (1, 64)
    assert (packed["sequence_mask"] != 0).sum() == 4


def test_a_packed_row_splits_no_pair():
    rows = [
        {"prompt_ids": [5], "chosen_ids": [7] * n, "rejected_ids": [8] * n}
        for n in (3, 9, 4, 7, 5)
    ]
    batch = batch_of(rows, token_budget=24)
    ids = batch["sequence_ids"] * (batch["sequence_mask"] != 0)
    for row, used in zip(ids, batch["sequence_mask"]):
        count = int(used.sum())
        assert count % 2 == 0
        assert (row[0:count:2] == row[1:count:2]).all()
    assert batch["sequence_mask"].sum() == 10


def test_completions_extend_to_the_next_prompt():
    rows = [
        {"prompt_ids": [i], "completion_ids": [10 + i], "label": i == 5}
        for i in (5, 6, 7)
    ]
    batch = batch_of(rows, labelled=True, mismatched=True)
    assert batch["token_ids"][:, :2].tolist() == [
        [5, 15], [5, 17], [6, 16], [6, 15], [7, 17], [7, 16]
    ]  # fmt: skip
    assert batch["roles"][:, 0].tolist() == [0, 1] * 3
    assert batch["labels"][::2, 0].tolist() == [1, 0, 0]
    # A lone completion has no stranger.
    lone = batch_of(rows[:1], labelled=True, mismatched=True, batch_size=3)
    assert lone["token_ids"].shape == (6, 64)
    assert lone["sequence_mask"].sum() == 1


def test_a_mismatched_completion_is_cut_at_the_sequence_length():
    rows = [
        {"prompt_ids": [5] * n, "completion_ids": [6] * m, "label": n > 9}
        for n, m in ((50, 4), (1, 30))
    ]
    for share_prefix in (False, True):
        batch = batch_of(
            rows, labelled=True, mismatched=True, share_prefix=share_prefix
        )
        mask, segments = batch["completion_mask"], batch["segment_ids"]
        counts = [
            int(mask[row][segments[row] == slot + 1].sum())
            for row, slot in zip(*np.nonzero(batch["sequence_mask"]))
        ]
        assert counts == [4, 14, 30, 4]


def test_labelled_completions_are_single_rows():
    rows = [LABELLED, {**LABELLED, "label": False}]
    batch = batch_of(rows, labelled=True)
    assert batch["token_ids"].shape == (2, 64)
    assert batch["labels"].tolist() == [[1], [0]]
    assert "margins" not in batch and "roles" not in batch


def test_rows_of_pairs_have_fine_lengths():
    pair = {**PAIRS[0], "rejected_ids": [8] * 140}
    examples, _ = prepare([pair], sequence_length=300)
    layout = preference_layout(batch_size=1, sequence_length=300)
    assert layout(examples).arrays["token_ids"].shape == (2, 192)


def test_the_reference_is_read_from_its_cache(tmp_path):
    """Log-probabilities stand at the tokens with loss, 0 at the others."""
    [example], _ = prepare(PAIRS[:1], tokenizer=None)
    example.masks[1][1] = 0.0
    cache = RowCache(tmp_path, {})
    for i, logps in enumerate(([-1.0], [-2.0, -3.0, -4.0])):
        array = np.array(logps, np.float32)
        cache.write({completion_key(example, i): {"logps": array}})
    layout = preference_layout(
        batch_size=1, sequence_length=64, reference_cache=cache
    )
    found = layout([example]).arrays["ref_per_token_logps"]
    assert found.shape == (2, 64)
    assert found[:, :5].tolist() == [[0, 0, -1, 0, 0], [0, 0, -2, 0, -4]]
    assert not found[:, 5:].any()


def test_the_key_of_a_completion_is_of_its_prompt_as_well():
    pair = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]}
    other = {"prompt_ids": [5], "chosen_ids": [6, 7], "rejected_ids": [8]}
    examples, _ = prepare([pair, other], tokenizer=None)
    keys = {completion_key(x, i) for x in examples for i in (0, 1)}
    assert len(keys) == 4


def test_the_tokens_that_an_example_takes_in_a_row():
    """Prompts of 2 and 1 with 1 + 3 and 2 + 1 tokens after them."""
    examples, _ = prepare(PAIRS, tokenizer=None)
    for share_prefix, longest in ((False, 8), (True, 6)):
        layout = preference_layout(
            batch_size=2, sequence_length=64, share_prefix=share_prefix
        )
        assert row_length(layout, examples) == longest
        assert row_length(layout, examples[1:]) == longest - 3 + share_prefix


def test_any_completion_may_meet_any_prompt():
    """Prompts of 50 and 1 with completions of 4 and 30, of at most 64."""
    rows = [
        {"prompt_ids": [5] * n, "completion_ids": [6] * m, "label": n > 9}
        for n, m in ((50, 4), (1, 30))
    ]
    examples, _ = prepare(rows, labelled=True, tokenizer=None)
    for share_prefix, longest in ((False, 118), (True, 68)):
        layout = preference_layout(
            batch_size=2,
            sequence_length=64,
            labelled=True,
            mismatched=True,
            share_prefix=share_prefix,
        )
        assert row_length(layout, examples) == longest


def test_margins_stand_at_the_chosen():
    rows = [{**PAIRS[0], "margin": 2.0}, PAIRS[1]]
    assert batch_of(rows)["margins"][:, 0].tolist() == [2, 0, 0, 0]
