"""Batches that neither micro-batches nor devices share evenly."""

import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.training import padding
from tests.support import REFERENCE, load_json, random_rows, weights

LLAMA = REFERENCE / "models/llama3"


@pytest.fixture
def devices(monkeypatch):
    """Sets how many devices rows are spread over; only the count is read."""

    def set_count(count):
        axis = (None, None, count)
        monkeypatch.setattr(padding.sharding, "data_axis", lambda: axis)

    return set_count


@pytest.mark.parametrize(
    "shards, micro, rows, together, expected",
    [
        (1, None, 10, 1, 1),
        (1, 4, 10, 1, 4),
        # All in one micro-batch: nothing is filled up to it.
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
def test_what_rows_are_filled_up_to(
    devices, shards, micro, rows, together, expected
):
    devices(shards)
    assert padding.row_multiple(micro, rows, together) == expected
    if micro is not None:
        size = padding.micro_rows(micro, together)
        assert size >= micro * together
        assert size % shards == 0 and size % together == 0


def test_what_is_told(devices):
    devices(1)
    assert padding.describe(None, 10) is None
    assert padding.describe(5, 10) is None
    assert padding.describe(None, None) is None
    assert padding.describe(4, 10) == (
        "2 rows of padding a batch: 10 rows are filled up to 12, for "
        "micro-batches of 4 rows"
    )
    devices(8)
    assert padding.describe(None, 16) is None
    assert padding.describe(None, 10) == (
        "6 rows of padding a batch: 10 rows are filled up to 16, for 8 devices"
    )
    assert padding.describe(3, 17) == (
        "7 rows of padding a batch: 17 rows are filled up to 24, for 8 "
        "devices and micro-batches of 8 rows"
    )
    assert padding.describe(3, None) == (
        "rows of padding fill batches up to a multiple of 8 rows, for 8 "
        "devices and micro-batches of 8 rows"
    )


def test_rows_that_micro_batches_do_not_share_evenly(capsys):
    """Five rows in micro-batches of two: the update of the five alone."""
    found = []
    for micro in (None, 2):
        task = kpt.SFTTask.from_preset(LLAMA, sequence_length=64)
        task.compile(optimizer="sgd", micro_batch_size=micro)
        history = task.fit(random_rows(5), batch_size=5, verbose=2).history
        shown = "1 rows of padding a batch: 5 rows are filled up to 6"
        assert (shown in capsys.readouterr().out) == (micro is not None)
        found.append((history, weights(task)))
        # Of rows of padding there is no answer.
        assert len(task.log_probs(random_rows(5), batch_size=3)) == 5
    (one, ours), (many, theirs) = found
    for key in ("loss", "grad_norm", "num_tokens"):
        np.testing.assert_allclose(many[key], one[key], rtol=1e-5)
    for key, value in ours.items():
        np.testing.assert_allclose(theirs[key], value, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("paired", [True, False])
def test_a_coupled_loss_does_not_see_them(paired):
    """AOT sorts over the batch: five pairs in micro-batches of two."""
    rows = load_json("dpo.json")["datasets"]["llama3"][:5]
    found = []
    for micro in (None, 2):
        task = kpt.DPOTask.from_preset(
            LLAMA, sequence_length=64, reference=f"{LLAMA}_ref"
        )
        loss = kpt.losses.AOTLoss(paired=paired)
        task.compile("sgd", loss, micro_batch_size=micro)
        history = task.fit(rows, batch_size=5, verbose=0).history
        found.append((history, weights(task)))
    (one, ours), (many, theirs) = found
    for key in one:
        if not key.startswith("time/"):
            np.testing.assert_allclose(
                many[key], one[key], rtol=1e-5, atol=1e-6, err_msg=key
            )
    for key, value in ours.items():
        np.testing.assert_allclose(theirs[key], value, atol=1e-6, err_msg=key)


def test_what_is_kept_of_a_teacher_is_of_its_own_row(tmp_path):
    """Batches of three with a row of padding each are asked about seven."""
    found = []
    for micro in (None, 2):
        task = kpt.DistillTask.from_preset(
            LLAMA, sequence_length=64, teacher=f"{LLAMA}_ref"
        )
        task.compile(
            "sgd",
            top_k=4,
            teacher_cache=tmp_path / str(micro),
            micro_batch_size=micro,
        )
        rows = random_rows(7, seed=3)
        history = task.fit(rows, batch_size=3, shuffle=False, verbose=0)
        found.append((history.history["loss"], weights(task)))
    (one, ours), (many, theirs) = found
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for key, value in ours.items():
        np.testing.assert_allclose(theirs[key], value, atol=1e-6, err_msg=key)


def test_what_is_kept_of_a_reference_is_of_its_own_row(devices, tmp_path):
    """Rows of padding are among those that the reference reads."""
    rows = load_json("dpo.json")["datasets"]["llama3"][:7]
    found = []
    for count in (1, 4):
        task = kpt.DPOTask.from_preset(
            LLAMA, sequence_length=64, reference=f"{LLAMA}_ref"
        )
        task.compile("sgd", reference_cache=tmp_path / str(count))
        # As if over so many: batches of three are filled up to four.
        devices(count)
        history = task.fit(rows, batch_size=3, shuffle=False, verbose=0)
        found.append((history.history["loss"], weights(task)))
        devices(1)
    (one, ours), (many, theirs) = found
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for key, value in ours.items():
        np.testing.assert_allclose(theirs[key], value, atol=1e-6, err_msg=key)
