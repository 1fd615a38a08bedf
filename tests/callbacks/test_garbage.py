"""Full collections of garbage do not look at what a long run keeps."""

import gc
import weakref

import keras
import pytest

import keras_posttrain as kpt
from keras_posttrain.callbacks import garbage
from tests.support import REFERENCE, random_rows

ROWS = random_rows(12, seed=3)
PROMPTS = [{"prompt_ids": [3 + i, 40, 7]} for i in range(6)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Runs of three steps are long, and nothing is spared before them."""
    monkeypatch.setattr(garbage, "AFTER", 3)
    gc.unfreeze()
    yield
    gc.freeze()


def score(completions):
    return [float(len(c)) for c in completions]


def fit(cls, callback, epochs=2):
    is_sft = cls is kpt.SFTTask
    task = cls.from_preset(
        REFERENCE / "models" / "llama3",
        sequence_length=64,
        lora=kpt.LoRA(rank=2),
    )
    settings = {}
    if not is_sft:
        settings = {"rewards": [score], "num_generations": 2}
        settings |= {"max_completion_length": 4}
    task.compile(keras.optimizers.SGD(1e-2), **settings)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=callback)
    task.fit(
        ROWS if is_sft else PROMPTS,
        batch_size=6 if is_sft else 3,
        epochs=epochs,
        callbacks=[callback],
        verbose=0,
    )


@pytest.mark.parametrize("cls", [kpt.SFTTask, kpt.GRPOTask])
def test_what_a_long_run_keeps_is_not_looked_at(cls):
    frozen, looked_at = [], []

    def read(batch, logs):
        frozen.append(gc.get_freeze_count())
        looked_at.append(len(gc.get_objects(generation=2)))

    fit(cls, read)
    assert frozen[:2] == [0, 0] and min(frozen[2:]) > 100_000
    assert looked_at[-1] < 0.1 * looked_at[0]
    assert gc.get_freeze_count() == 0


def test_a_short_run_changes_nothing():
    frozen = []

    def read(batch, logs):
        frozen.append(gc.get_freeze_count())

    fit(kpt.SFTTask, read, epochs=1)
    assert frozen == [0, 0]


def test_garbage_of_later_steps_is_collected():
    class Node:
        pass

    made, alive = [], []

    def make(batch, logs):
        gc.collect()
        alive.append([ref() is not None for ref in made])
        node = Node()
        node.itself = node
        made.append(weakref.ref(node))

    fit(kpt.SFTTask, make, epochs=3)
    assert alive == [[False] * i for i in range(6)]


def test_a_run_that_fails_gives_it_back():
    def stop(batch, logs):
        if gc.get_freeze_count():
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fit(kpt.SFTTask, stop)
    assert gc.get_freeze_count() == 0


def test_what_a_script_froze_stays_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    fit(kpt.SFTTask, lambda batch, logs: None)
    # Objects that nothing refers to any more are freed all the same.
    assert gc.get_freeze_count() > 0.9 * before
    gc.unfreeze()
