"""Programs of all lengths are compiled before a run on rows needs them."""

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain import _spans
from keras_posttrain.data.batches import pipeline
from tests.support import REFERENCE, one_layer, random_rows, weights

MODEL = one_layer(REFERENCE / "models/llama3")
# Of the rows of each batch.
LENGTHS = [10] * 10 + [100] + [10] * 10 + [220] + [10] * 2
TWO_LENGTHS = LENGTHS[:12]


class Compiled(keras.callbacks.Callback):
    """Names of the programs compiled at each step, from 0."""

    def __init__(self):
        super().__init__()
        self.names, self.step = [], 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1

    def listen(self, span):
        if span.name == "compile" and span.label == "jit(run)":
            self.names.append(self.step)


def sft_rows(lengths=LENGTHS):
    return [
        row
        for i, n in enumerate(lengths)
        for row in random_rows(2, n, n, seed=i)
    ]


def pairs():
    return [
        {
            "prompt_ids": row["token_ids"][:4],
            "chosen_ids": row["token_ids"][4:],
            "rejected_ids": row["token_ids"][4:8],
        }
        for row in sft_rows(TWO_LENGTHS)
    ]


def train(task, rows, compile_ahead, batch_size=2):
    """The steps at which the step was compiled, and the weights."""
    keras.utils.set_random_seed(0)
    made = task.from_preset(MODEL, sequence_length=256)
    made.compile(keras.optimizers.SGD(1e-2))
    reader = Compiled()
    _spans.listen(reader.listen)
    try:
        made.fit(
            rows,
            batch_size=batch_size,
            shuffle=False,
            callbacks=[reader],
            verbose=0,
            compile_ahead=compile_ahead,
        )
    finally:
        _spans.unlisten(reader.listen)
    return reader.names, weights(made)


@pytest.mark.parametrize(
    "task, rows, otherwise, count",
    # Short runs compile as they need.
    [(kpt.SFTTask, sft_rows(), "auto", 3), (kpt.DPOTask, pairs(), False, 2)],
    ids=["sft", "dpo"],
)
def test_no_later_step_is_compiled(task, rows, otherwise, count):
    lazily, expected = train(task, rows, otherwise)
    assert len(lazily) == count and min(lazily[1:]) >= 10
    ahead, found = train(task, rows, True)
    assert len(ahead) == count and max(ahead) <= 1
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_of_many_rows_all_lengths_are_compiled(monkeypatch):
    """Their batches are not looked at, which would take long."""
    monkeypatch.setattr(pipeline, "KNOWN_ROWS", 1)
    steps, _ = train(kpt.SFTTask, sft_rows(), True)
    assert len(steps) == 3 and max(steps) <= 1


def test_on_eight_devices(eight_devices):
    keras.distribution.set_distribution(kpt.distribution.fsdp())
    rows = [row for row in sft_rows(TWO_LENGTHS) for _ in range(4)]
    steps, _ = train(kpt.SFTTask, rows, True, batch_size=8)
    assert len(steps) == 2 and max(steps) <= 1


def test_a_word_that_it_is_not():
    rows = sft_rows()
    with pytest.raises(ValueError, match="compile_ahead='always'"):
        train(kpt.SFTTask, rows, "always")
