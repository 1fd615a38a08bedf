"""Runs of two processes that lose what was on the machine of one of them."""

import shutil
import warnings

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import keras_posttrain as kpt
from keras_posttrain.callbacks import part_exchange
from keras_posttrain.callbacks.checkpoint_files import abstract, meta_checksum
from keras_posttrain.callbacks.local_checkpoints import LocalCheckpoints
from keras_posttrain.distribution import processes
from tests.distribution.runs import make, mesh
from tests.support import random_rows, read_log


class Lost(Exception):
    pass


class At(keras.callbacks.Callback):
    """Calls a function at a step, and notes the step that training begins at.

    Raises an error at a step, in all processes.
    """

    def __init__(self, step=None, action=None, error_at=None):
        super().__init__()
        self.step, self.action, self.error_at = step, action, error_at
        self.begins_at = None

    def on_epoch_begin(self, epoch, logs=None):
        self.begins_at = self._model.step

    def on_train_batch_end(self, batch, logs=None):
        if self._model.step == self.step:
            self.action()
        if self._model.step == self.error_at:
            raise Lost


def run(directory, watch, **settings):
    """Trains six steps in a new task; its variables and what was warned of."""
    made, _ = make("sft", "llama3-short", "full")
    saver = kpt.callbacks.Checkpoint(directory, **settings)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            made.fit(
                random_rows(48, seed=1),
                batch_size=8,
                callbacks=[kpt.callbacks.MetricsLog(directory), watch, saver],
                verbose=0,
            )
        except Lost:
            assert watch.error_at is not None
        else:
            assert watch.error_at is None and made.step == 6
    texts = [str(w.message) for w in warned]
    texts = [x for x in texts if x.startswith("The local checkpoint")]
    assert bool(texts) <= processes.is_first(), texts
    return made.trainable_variables, processes.from_first(texts)


def replace(process, folder):
    """The folder of a process is empty, as on a new machine."""
    if processes.index() == process:
        shutil.rmtree(folder)
    processes.exchange(None)


def steps_in(folder):
    return sorted(int(p.name[5]) for p in folder.rglob("*.safetensors"))


def check_same(one, other, directory):
    for v, w in zip(one, other, strict=True):
        pairs = zip(v.value.addressable_shards, w.value.addressable_shards)
        for x, y in pairs:
            assert (np.asarray(x.data) == np.asarray(y.data)).all(), v.path
    logs = [read_log(directory / name) for name in ("run", "straight")]
    for line in sum(logs, []):
        del line["tokens_per_second"]
    assert logs[0] == logs[1]


def slices(directory):
    """Each slice has all parts: that of the other process may be replaced.

    The step after it is not written in process 1.
    """
    own = directory / f"host{processes.index()}"
    settings = {"every": 100, "local_directory": own, "local_every": 1}

    def block():
        if processes.index() == 1:
            [folder] = own.iterdir()
            shutil.rmtree(folder)
            folder.write_text("")

    run(directory / "run", At(error_at=4), **settings)
    assert steps_in(own) == [2, 3]
    replace(1, own)
    watch = At(4, block)
    weights, [text] = run(directory / "run", watch, **settings)
    assert watch.begins_at == 3, watch.begins_at
    for part in ("step 4 could not be", " in process 1 (", "of step 3 is com"):
        assert part in text, text
    return weights


def shards(directory):
    """All parts are there where hosts swap, and not where one is replaced."""
    own = [directory / f"host{i}" for i in range(2)]
    own = own if processes.is_first() else own[::-1]
    settings = {"every": 4, "local_every": 1, "local_directory": own[0]}
    run(directory / "run", At(error_at=4), **settings)
    settings["local_directory"] = own[1]
    watch = At(error_at=6)
    _, texts = run(directory / "run", watch, **settings)
    assert watch.begins_at == 3 and not texts, (watch.begins_at, texts)
    # The checkpoint of step 4 in the directory of the run is complete.
    assert steps_in(own[1]) == [5]
    replace(1, own[1])
    watch = At()
    weights, [text] = run(directory / "run", watch, **settings)
    assert watch.begins_at == 4, watch.begins_at
    start, end = text.split(" parts that the devices of this run need are on ")
    assert start.startswith("The local checkpoint of step 5 cannot be used (")
    assert end == "no machine); resuming from step 4.", text
    return weights


def check(directory):
    # Parts are sent in several pieces.
    part_exchange.CHUNK = 2**14
    for layout, lose in (("2x4x1", slices), ("8x1", shards)):
        keras.distribution.set_distribution(mesh(layout))
        folder = directory / lose.__name__
        straight, _ = run(folder / "straight", At(), every=100)
        check_same(lose(folder), straight, folder)
        # What was local is in `directory`.
        assert not [*folder.glob("host*/*/*")]
    check_damaged(directory)
    check_refused(directory)


def check_damaged(directory):
    """All have the same; that of one process is damaged."""
    (directory / "damaged").mkdir(exist_ok=True)
    local = LocalCheckpoints(directory / f"host{processes.index()}", 1)
    local.begin(directory / "damaged")
    sharding = NamedSharding(jax.make_mesh((8,), "data"), PartitionSpec())
    array = jax.make_array_from_callback(
        (99,), sharding, lambda _: np.arange(99.0)
    )
    meta = {"step": 1}
    local.save(1, [array], meta | {"checksum": meta_checksum(meta)})
    local.close(None)
    if processes.index() == 1:
        [path] = (directory / "host1").rglob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    [key] = local.find()
    arrays, error = local.read_arrays(key, [abstract(array)])
    assert arrays is None and error.startswith("Checksum: that of [0]"), error


def check_refused(directory):
    """Intervals that differ, and a folder that one cannot write to."""
    if processes.is_first():
        (directory / "file").write_text("")
    here = processes.index()
    cases = [
        (directory / "host", 2 + here, "local_every=...)=2 in process 0"),
        (directory / ("host", "file")[here], 2, "must be writable"),
    ]
    for folder, every, text in cases:
        settings = {"local_directory": folder, "local_every": every}
        try:
            run(directory / "refused", At(), **settings)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError("nothing was raised")
