"""Rows of every kind, how they are prepared, and how results are compared."""

import dataclasses

import numpy as np

from keras_posttrain.data.rows.distillation import prepare_distillation
from keras_posttrain.data.rows.examples import digest_of
from keras_posttrain.data.rows.preference import prepare_preferences
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.prompts import prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft
from tests.data.support import chat_tokenizer

TOKENIZER = chat_tokenizer("qwen2_5")


def chat(i):
    return [
        {"role": "user", "content": f"What is {i}?"},
        {"role": "assistant", "content": f"It is {i * i}."},
    ]


def settings(tokenizer=TOKENIZER, **changes):
    given = {"sequence_length": 128, "vocabulary_size": 600, **changes}
    return RowSettings(tokenizer, **given)


def prompts(rows, settings):
    return prepare_prompts(
        rows, settings, max_prompt_length=100, limit="as the test says"
    )


def preferences(rows, settings, labelled=False):
    return prepare_preferences(rows, settings, labelled=labelled)


def labelled(rows, settings):
    return preferences(rows, settings, labelled=True)


def distillation(rows, settings):
    return prepare_distillation(
        rows,
        settings,
        teacher_length=128,
        teacher_column="who",
        teacher_names=["a", "b"],
    )


# Each kind of rows by name: how they are prepared, and the i-th row.
KINDS = {
    "chat": (
        prepare_sft,
        lambda i: {"messages": chat(i), "weight": 0.5 + i, "unread": i},
    ),
    "converted": (prepare_sft, lambda i: {"instruction": "a", "output": "b"}),
    "text": (prepare_sft, lambda i: {"text": f"a text of {i} words"}),
    "tokens": (
        prepare_sft,
        lambda i: {
            "token_ids": np.arange(i % 9 + 2),
            "completion_mask": [0.25] * (i % 9 + 2),
        },
    ),
    "pairs": (
        preferences,
        lambda i: {
            "prompt": f"{i}?",
            "chosen": f"{i}",
            "rejected": f"{i + 1}",
            "margin": i / 3,
        },
    ),
    "labelled": (
        labelled,
        lambda i: {"prompt": f"{i}?", "completion": "a", "label": i % 2 == 0},
    ),
    "distillation": (
        distillation,
        lambda i: {
            "prompt": f"{i}?",
            "completion": f"It is {i}.",
            "teacher_prompt": f"Answer well: {i}?",
            "who": "ab"[i % 2],
        },
    ),
    "prompts": (
        prompts,
        lambda i: {"prompt": chat(i)[:1], "answer": {"value": [i]}},
    ),
}


def plain(value):
    """An example as something that `==` compares bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), [plain(getattr(value, f.name)) for f in fields]
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def assert_same(found, expected):
    """Two results of a `prepare_...` function are equal."""
    (ours, our_report), (theirs, their_report) = found, expected
    assert our_report == their_report
    assert str(our_report) == str(their_report)
    assert len(ours) == len(theirs)
    assert [plain(x) for x in ours] == [plain(x) for x in theirs]
    assert digest_of(ours) == digest_of(theirs)
