"""`DPOTask` with its reference's log-probabilities kept on disk."""

import gc

import jax
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from tests.tasks.test_dpo import OTHER, PAIRS, losses, make, refused


def shards(cache):
    return {
        path.name: path.stat().st_mtime_ns for path in cache.glob("rows-*")
    }


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.seen = (self._model.reference, live_bytes())


@pytest.mark.parametrize(
    "given", [False, pytest.param(True, marks=pytest.mark.full)]
)
def test_a_cached_reference_takes_no_memory(given, tmp_path, capsys):
    before = live_bytes()
    task = make(None, OTHER if given else None)
    task.compile(keras.optimizers.SGD(0.1), reference_cache=tmp_path)
    watch = Watch()
    task.fit(
        PAIRS[:4],
        batch_size=4,
        validation_data=PAIRS[4:],
        callbacks=[watch],
        verbose=2,
    )
    reference, taken = watch.seen[0], watch.seen[1] - before
    assert reference is None and task.reference is None
    # With a reference it would be twice as much.
    own = sum(v.value.nbytes for v in task.trainable_variables)
    assert own < taken < 1.1 * own
    assert task.cached.computed == 12
    out = capsys.readouterr().out
    assert "computes 8 completions" in out and "computes 4" in out
    # What was read is the policy at the start, also now.
    assert task.evaluate(PAIRS)["rewards/margins"] != 0
    new = [{**PAIRS[0], "chosen_ids": [5, 6, 7]}]
    if given:
        # It is read again for rows that are new.
        task.evaluate(new)
        assert task.cached.computed == 13 and task.reference is None
    else:
        refused(
            lambda: task.evaluate(new),
            "the policy when training began",
            "Received: 1 completions",
        )


def test_evaluate_before_training_fills_the_cache(tmp_path):
    task = make(kpt.LoRA(rank=4))
    task.compile(keras.optimizers.SGD(0.1), reference_cache=tmp_path)
    assert abs(task.evaluate(PAIRS)["loss"] - np.log(2)) < 1e-6
    written = shards(tmp_path)
    task.fit(PAIRS, batch_size=6, verbose=0)
    assert task.cached.computed == 0 and shards(tmp_path) == written
    task.fit(PAIRS, batch_size=6, verbose=0)
    assert task.evaluate(PAIRS)["rewards/margins"] > 0


def test_a_killed_filling_is_resumed(tmp_path, monkeypatch):
    from keras_posttrain.data.batches.row_cache import RowCache
    from keras_posttrain.training import frozen_cache

    monkeypatch.setattr(frozen_cache, "SHARD", 4)
    write, written = RowCache.write, []

    def killed_in_the_third(self, rows):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(rows)
        write(self, rows)

    for function in (killed_in_the_third, write):
        monkeypatch.setattr(RowCache, "write", function)
        task = make(kpt.LoRA(rank=4))
        task.compile(keras.optimizers.SGD(0.1), reference_cache=tmp_path)
        if function is write:
            task.fit(PAIRS, batch_size=3, verbose=0)
        else:
            with pytest.raises(KeyboardInterrupt):
                task.fit(PAIRS, batch_size=3, verbose=0)
            assert len(shards(tmp_path)) == 2
    assert task.cached.computed == 4 and len(shards(tmp_path)) == 3


def test_what_a_cache_refuses(tmp_path):
    refuse = tmp_path / "refuse"
    for loss, part in (
        (losses.SimPOLoss(), "compares with no reference"),
        (losses.KTOLoss(), "APOZeroUnpairedLoss"),
    ):
        task = make(kpt.LoRA(rank=4))
        refused(
            lambda loss=loss, task=task: task.compile(
                loss=loss, reference_cache=refuse
            ),
            part,
            "reference_cache",
        )
    refused(lambda: task.compile(reference_cache=3), "reference_cache=3")
    task.compile(reference_cache=refuse)
    follow = kpt.callbacks.UpdateReference(every=1)
    refused(
        lambda: task.fit(PAIRS, verbose=0, callbacks=[follow]),
        "A reference that is updated",
        str(refuse),
    )
    assert not refuse.exists()
    # Another reference's directory, and another run's checkpoint.
    task.compile(keras.optimizers.SGD(0.1), reference_cache=tmp_path / "x")
    run = kpt.callbacks.Checkpoint(tmp_path / "run")
    task.fit(PAIRS, verbose=0, callbacks=[run])
    other = make(kpt.LoRA(rank=4), OTHER)
    other.compile(keras.optimizers.SGD(0.1), reference_cache=tmp_path / "x")
    refused(
        lambda: other.fit(PAIRS, verbose=0),
        "another weights (checksum). There: ",
        "Use another directory, or delete it.",
    )
    other.compile(keras.optimizers.SGD(0.1), reference_cache=tmp_path / "y")
    run = kpt.callbacks.Checkpoint(tmp_path / "run")
    refused(
        lambda: other.fit(PAIRS, verbose=0, callbacks=[run]),
        "whose reference differs",
    )
