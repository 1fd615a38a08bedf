"""The same rows give the same update of `SFTTask`, in every family.

`tests/tasks/contract.py` runs all tasks through more settings, on one model.
"""

import functools

import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.support import (
    FAMILIES,
    REFERENCE,
    in_ci,
    one_layer,
    random_rows,
    weights,
)

MODEL = one_layer(REFERENCE / "models/llama3")
ROWS = random_rows(8, seed=1)
# Of their layers one is as good as two.
ALIKE = ("llama", "mistral", "qwen2", "qwen3")


def one_step(
    family=None,
    rows=ROWS,
    *,
    packing=False,
    batch_size=8,
    lora=None,
    micro_batch_size=None,
    steps=1,
    loss="auto",
    **kwargs,
):
    """SGD steps, so that rounding noise stays what it is.

    Of a family, or of a Llama of one layer.
    """
    preset = MODEL
    if family:
        preset = REFERENCE / "models" / FAMILIES[family]
    if family in ALIKE:
        preset = one_layer(preset)
    task = kpt.SFTTask.from_preset(
        preset,
        sequence_length=64,
        lora=lora,
        **kwargs,
    )
    if lora:
        # B is zero at the start, and then half of the gradients are.
        rng = np.random.default_rng(0)
        for b in task.adapter.b:
            b.assign(rng.normal(0, 0.05, b.shape).astype("float32"))
    before = weights(task)
    task.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=loss,
        micro_batch_size=micro_batch_size,
        max_grad_norm=None,
    )
    history = task.fit(
        rows,
        batch_size=batch_size,
        epochs=steps,
        shuffle=False,
        packing=packing,
        verbose=0,
    )
    after = weights(task)
    update = {k: after[k] - before[k] for k in after}
    return history.history, update, task


WAYS = {
    # In 128 chunks of logits at most: all sequences are in one batch.
    "packed": {"packing": True, "batch_size": 4, "chunk_size": 7},
    "packed, micro-batches": {
        "packing": True,
        "batch_size": 4,
        "micro_batch_size": 2,
    },
    "micro-batches, remat": {"micro_batch_size": 4, "remat": "full"},
}
# In CI each family has all at once.
TOGETHER = {k: v for way in WAYS.values() for k, v in way.items()}
TOGETHER |= {"micro_batch_size": 2}
# Every family packs; of micro-batches and rematerialisation a family has
# one. Windows, caps and tied heads are in both.
IN_PAIRS = [
    *((family, "packed") for family in sorted(FAMILIES)),
    ("gemma2", "micro-batches, remat"),
    ("gemma3", "packed, micro-batches"),
    ("llama", "micro-batches, remat"),
    ("mistral", "packed, micro-batches"),
    ("qwen2", "micro-batches, remat"),
    ("qwen3", "packed, micro-batches"),
]


@functools.cache
def plain_step(family):
    return one_step(family)


def assert_same(left, right, rtol=2e-5):
    (history, update, _), (other_history, other_update, _) = left, right
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(
            history[name], other_history[name], rtol=1e-5
        )
    assert set(update) == set(other_update)
    # A weight of size 1 is stored to 1e-7, whatever the update.
    atol = 2e-7 + rtol * max(np.abs(x).max() for x in update.values())
    for key, value in update.items():
        np.testing.assert_allclose(
            value, other_update[key], rtol=0, atol=atol, err_msg=key
        )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_invariant(family):
    plain, found = plain_step(family), one_step(family, **TOGETHER)
    # All sequences fit in the rows of one batch, so the step is the same.
    assert found[2].step == 1
    assert_same(plain, found)


@pytest.mark.full
@pytest.mark.parametrize(
    "family, way", sorted(IN_PAIRS), ids=lambda x: x.replace(", ", "-")
)
def test_every_family_is_invariant_in_every_way(family, way):
    plain, found = plain_step(family), one_step(family, **WAYS[way])
    assert found[2].step == 1
    assert_same(plain, found)


@pytest.mark.parametrize("family", in_ci(None, of=[None, "gemma2", "llama"]))
def test_dropout_is_invariant(family):
    lora = kpt.LoRA(rank=4, dropout=0.3)
    plain = one_step(family, lora=lora)
    together = {"remat": "full", "micro_batch_size": 2}
    together |= {"packing": True, "batch_size": 4}
    assert_same(plain, one_step(family, lora=lora, **together))
    none = one_step(family, lora=kpt.LoRA(rank=4))
    assert abs(none[0]["loss"][0] - plain[0]["loss"][0]) > 1e-4


def test_dft_is_invariant():
    loss = kpt.losses.DFTLoss()
    plain = one_step(loss=loss)
    together = {"micro_batch_size": 2, "packing": True, "batch_size": 4}
    assert_same(plain, one_step(loss=loss, **together))


def test_a_loss_of_unknown_gradient_takes_the_general_path():
    class Squared(kpt.losses.Loss):
        def normalizers(self, batch):
            return {"loss": batch["completion_mask"].sum()}

        def total(self, batch, outputs):
            logps = outputs["per_token_logps"]
            terms = (batch["completion_mask"] * logps**2).sum()
            return {"loss": terms}, {}

    class SquaredTokens(kpt.losses.TokenLoss):
        def token_loss(self, logps):
            return logps**2

    general = one_step(loss=Squared(), micro_batch_size=4)
    fused = one_step(loss=SquaredTokens())
    for key, value in fused[1].items():
        np.testing.assert_allclose(value, general[1][key], atol=1e-4)
    np.testing.assert_allclose(general[0]["loss"], fused[0]["loss"], rtol=1e-5)


def test_partial_batches_and_padding_carry_nothing():
    """3 rows alone, and 3 rows in a batch of 8: the same step."""
    alone = one_step(rows=ROWS[:3], batch_size=3)
    padded = one_step(rows=ROWS[:3], batch_size=8)
    assert_same(alone, padded)


def test_row_weights_scale_each_rows_part():
    """Twice the weight is the row twice; weight 0 is no row."""
    doubled = [dict(ROWS[0], weight=2.0), ROWS[1]]
    twice = [ROWS[0], ROWS[0], ROWS[1]]
    left = one_step(rows=doubled, batch_size=2)
    right = one_step(rows=twice, batch_size=3)
    np.testing.assert_allclose(left[0]["loss"], right[0]["loss"], rtol=1e-6)
    for key, value in left[1].items():
        np.testing.assert_allclose(value, right[1][key], atol=1e-6)


def test_a_masked_batch_changes_nothing_and_says_so(capsys, tmp_path):
    task = kpt.SFTTask.from_preset(MODEL, sequence_length=64)
    rows = [dict(r, weight=0.0) for r in ROWS[:2]] + ROWS[2:4]
    task.compile(optimizer=keras.optimizers.Adam(1e-2))
    log = kpt.callbacks.MetricsLog(tmp_path)

    class Watch(keras.callbacks.Callback):
        seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(weights(self.model))

    start = weights(task)
    task.fit(
        rows, batch_size=2, shuffle=False, verbose=1, callbacks=[log, Watch()]
    )
    for key, value in start.items():
        np.testing.assert_array_equal(value, Watch.seen[0][key])
    assert any((start[k] != Watch.seen[1][k]).any() for k in start)
    assert int(task.optimizer.iterations.value) == 1
    assert "step 1 changed nothing" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    task = kpt.SFTTask.from_preset(MODEL, sequence_length=64)

    class Poisoned(kpt.losses.TokenLoss):
        def token_loss(self, logps):
            # Infinite at a log-probability below -12, finite elsewhere.
            return -logps + (1.0 / (logps > -1e9) - 1.0) * 0

    class Broken(kpt.losses.TokenLoss):
        def token_loss(self, logps):
            return logps * float("nan")

    start = weights(task)
    for loss, changes in ((Broken(), False), (Poisoned(), True)):
        task.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        history = task.fit(ROWS, batch_size=8, verbose=0).history
        assert history["skipped"] == [0.0 if changes else 1.0]
        moved = any((start[k] != v).any() for k, v in weights(task).items())
        assert moved == changes


def test_one_compilation_per_shape():
    rows = random_rows(24, low=6, high=60, seed=3)
    rows += random_rows(5, low=66, high=120, seed=4)
    task = kpt.SFTTask.from_preset(MODEL, sequence_length=128)
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    task.fit(rows, batch_size=4, epochs=3, verbose=0)
    shapes = {64, 128}
    assert task.compiled_train_step._cache_size() <= len(shapes)
    task.fit(rows, batch_size=4, epochs=1, verbose=0)
    assert task.compiled_train_step._cache_size() <= len(shapes)
