"""Batches that micro-batches or devices do not divide evenly."""

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.training import padding
from tests.support import REFERENCE, one_layer, random_rows, weights

LLAMA = one_layer(REFERENCE / "models/llama3")


@pytest.fixture
def devices(monkeypatch):
    """Sets the number of devices that rows are spread over, a count alone."""

    def set_count(count):
        axis = (None, None, count)
        monkeypatch.setattr(padding.sharding, "data_axis", lambda: axis)

    return set_count


@pytest.mark.parametrize(
    "shards, micro, rows, together, expected",
    [
        (1, None, 10, 1, 1),
        (1, 4, 10, 1, 4),
        # All in one micro-batch: it is not padded to its full size.
        (1, 16, 10, 1, 1),
        (1, 4, None, 1, 4),
        (8, None, 10, 1, 8),
        # On 8 devices 8 rows take no longer than 3, and no more memory.
        (8, 3, 10, 1, 8),
        (8, 16, 10, 1, 8),
        (8, 20, 30, 1, 24),
        # Pairs of rows: 3 pairs are 6 rows, and 8 take no longer.
        (8, 3, 10, 2, 8),
        (4, 3, 10, 2, 8),
        # An odd number of devices splits no pair.
        (3, None, 10, 2, 6),
        (3, 2, 10, 2, 6),
    ],
)
def test_the_multiple_that_batches_are_padded_to(
    devices, shards, micro, rows, together, expected
):
    devices(shards)
    assert padding.row_multiple(micro, rows, together) == expected
    if micro is not None:
        size = padding.micro_rows(micro, together)
        assert size >= micro * together
        assert size % shards == 0 and size % together == 0


def test_padding_is_reported(devices):
    devices(1)
    assert padding.describe(None, 10) is None
    assert padding.describe(5, 10) is None
    assert padding.describe(None, None) is None
    assert padding.describe(4, 10) == (
        "2 padding rows per batch: 10 rows are padded to 12, for "
        "micro-batches of 4 rows"
    )
    devices(8)
    assert padding.describe(None, 16) is None
    assert padding.describe(None, 10) == (
        "6 padding rows per batch: 10 rows are padded to 16, for 8 devices"
    )
    assert padding.describe(3, 17) == (
        "7 padding rows per batch: 17 rows are padded to 24, for 8 "
        "devices and micro-batches of 8 rows"
    )
    assert padding.describe(3, None) == (
        "padding rows fill batches up to a multiple of 8 rows, for 8 "
        "devices and micro-batches of 8 rows"
    )


def test_five_rows_in_micro_batches_of_two(capsys):
    """The update is that of the five alone, and the padding is reported."""
    found = []
    for micro in (None, 2):
        task = kpt.SFTTask.from_preset(LLAMA, sequence_length=64)
        task.compile(optimizer="sgd", micro_batch_size=micro)
        history = task.fit(random_rows(5), batch_size=5, verbose=2).history
        shown = "1 padding rows per batch: 5 rows are padded to 6"
        assert (shown in capsys.readouterr().out) == (micro is not None)
        found.append((history, weights(task)))
        # Padding rows have no answer.
        assert len(task.log_probs(random_rows(5), batch_size=3)) == 5
    (one, ours), (many, theirs) = found
    for key in ("loss", "grad_norm", "num_tokens"):
        np.testing.assert_allclose(many[key], one[key], rtol=1e-5)
    for key, value in ours.items():
        np.testing.assert_allclose(theirs[key], value, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("lora", [None, kpt.LoRA(rank=4)])
def test_a_padding_token_that_the_model_lacks(lora):
    """Such a token has no embedding; as an id it would give NaN."""
    rows = random_rows(4)
    steps = {}
    for added in (False, True):
        task = kpt.SFTTask.from_preset(LLAMA, lora=lora, sequence_length=32)
        if added:
            vocabulary = task.causal_lm.backbone.vocabulary_size
            task.tokenizer.pad_token_id = vocabulary
        task.compile()
        history = task.fit(rows, batch_size=4, verbose=0).history
        assert history["skipped"] == [0]
        steps[added] = history["loss"]
    assert steps[True] == steps[False]
