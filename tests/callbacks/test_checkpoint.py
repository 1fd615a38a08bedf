"""An interrupted and resumed run equals an uninterrupted one bit for bit."""

import functools
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types

import grain
import keras
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.callbacks import intervals
from keras_posttrain.data.batches import pipeline
from tests.callbacks.train_script import fit, make_task
from tests.support import (
    REFERENCE,
    in_ci,
    one_layer,
    random_rows,
    read_log,
    starts_again,
    weights,
)

ROOT = pathlib.Path(__file__).parents[2]
KINDS = {
    "lora-packed": {"packing": True, "epochs": 4},
    "full-packed": {"lora": False, "packing": True, "epochs": 4},
    "lora-unpacked": {},
    "full-stream": {"lora": False, "stream": True},
    "lora-packed-stream": {"packing": True, "stream": True, "epochs": 4},
}
# Keras's LearningRateScheduler reads a variable in a way that NumPy will drop.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
)


TASKS = {
    lora: starts_again(functools.partial(make_task, lora))
    for lora in (True, False)
}
CACHE = None


def fresh_task(lora=True):
    """Returns a task in its first state, without compiling it again."""
    return TASKS[lora]()


class Interrupted(Exception):
    pass


class At(keras.callbacks.Callback):
    """Calls a function at a step."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action = step, action

    def on_train_batch_end(self, batch, logs=None):
        if self._model.step == self.step:
            self.action(self._model)


def stop(task):
    task.stop_training = True


def interrupt(task):
    raise Interrupted


def log_of(directory):
    lines = read_log(directory)
    for line in lines:
        del line["tokens_per_second"]
    return lines


def epochs_of(directory):
    paths = sorted(pathlib.Path(directory).glob("epoch-*.json"))
    return {p.name: json.loads(p.read_text()) for p in paths}


def assert_same_run(directory, final, straight):
    """Checks that logs, epoch means and weights are exactly equal."""
    expected_directory, expected = straight
    assert log_of(directory) == log_of(expected_directory)
    assert epochs_of(directory) == epochs_of(expected_directory)
    assert set(final) == set(expected)
    for name in expected:
        np.testing.assert_array_equal(final[name], expected[name], name)


def steps_saved(directory):
    names = os.listdir(pathlib.Path(directory) / "checkpoints")
    # A kill may leave incomplete files as well.
    return sorted(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """`straight(kind)`: `(directory, final weights)` without interruption."""
    runs = {}

    def run(kind, **settings):
        settings = {k: v for k, v in settings.items() if v}
        key = (kind, *sorted(settings.items()))
        if key not in runs:
            directory = tmp_path_factory.mktemp("straight")
            settings = KINDS[kind] | settings
            task = fresh_task(settings.get("lora", True))
            fit(task, directory, **settings)
            runs[key] = (directory, weights(task))
        return runs[key]

    return run


# In one process


# Of each kind and of each way at least one; the contract of tasks
# (`tests/tasks/contract.py`) interrupts runs of every task.
INTERRUPTED = {
    ("lora-packed", interrupt),
    ("lora-packed-stream", stop),
}


@pytest.mark.parametrize(
    "kind, how",
    [
        pytest.param(
            kind,
            how,
            id=f"{kind}-{how.__name__}",
            marks=[] if (kind, how) in INTERRUPTED else pytest.mark.full,
        )
        for kind in sorted(KINDS)
        for how in (stop, interrupt)
    ],
)
def test_an_interrupted_run_is_resumed(kind, how, straight, tmp_path):
    """Stopped in an epoch, then at the end of one, then run through."""
    settings = KINDS[kind] | {"every": 2}
    size = 4 if settings.get("packing") else 6
    for step in (3, 2 * size, None):
        task = fresh_task(settings.get("lora", True))
        if step is None:
            settings["every"] = 100
        try:
            fit(task, tmp_path, callbacks=[At(step, how)], **settings)
        except Interrupted:
            assert step
    assert_same_run(tmp_path, weights(task), straight(kind))


@pytest.mark.parametrize(
    "every",
    [4, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 5, 100))],
)
def test_every_distance_between_checkpoints(every, straight, tmp_path):
    for step in (1, 7, 12, 13, None):
        task = fresh_task()
        try:
            fit(task, tmp_path, callbacks=[At(step, interrupt)], every=every)
        except Interrupted:
            pass
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))


def test_a_stream_stopped_behind_an_epochs_last_batch(straight, tmp_path):
    """The end of its epochs is not known, and no epoch is repeated."""
    settings = KINDS["full-stream"] | {"every": 11}

    class Stop(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            raise Interrupted

    for callbacks in ([At(6, stop)], [Stop()], []):
        task = fresh_task(lora=False)
        try:
            fit(task, tmp_path, callbacks=callbacks, **settings)
        except Interrupted:
            pass
    assert_same_run(tmp_path, weights(task), straight("full-stream"))


def test_the_same_task_resumes_after_an_interruption(straight, tmp_path):
    task = fresh_task()
    with pytest.raises(Interrupted):
        fit(task, tmp_path, callbacks=[At(5, interrupt)], every=4)
    fit(task, tmp_path)
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))


def test_a_complete_run_is_not_done_again(straight, tmp_path):
    fit(fresh_task(), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    task = fresh_task()

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise AssertionError("a step was taken")

    fit(task, tmp_path, callbacks=[Fail()])
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))
    assert task.step == 18


@pytest.mark.parametrize("best", in_ci(True, of=[False, True]))
def test_a_run_resumes_with_more_epochs(best, straight, tmp_path):
    """Also after EarlyStopping has restored its best weights at the end."""
    fit(fresh_task(), tmp_path, epochs=2, best=best)
    task = fresh_task()
    fit(task, tmp_path, best=best)
    expected = straight("lora-unpacked", best=best)
    assert_same_run(tmp_path, weights(task), expected)


# Only the first epoch counts as an improvement.
WORSE = {"min_delta": 100.0}


def test_the_best_weights_of_early_stopping_are_kept(tmp_path):
    """They come from before the interruption and are restored at the end."""
    run = {"best": True, **WORSE}
    task = fresh_task()
    fit(task, tmp_path / "straight", **run)
    straight = tmp_path / "straight", weights(task)
    first = fresh_task()
    fit(first, tmp_path / "first", epochs=1)
    for name, value in weights(first).items():
        np.testing.assert_array_equal(value, straight[1][name])
    for step in (14, None, None):
        task = fresh_task()
        try:
            callbacks = [At(step, interrupt)]
            fit(task, tmp_path / "again", callbacks, every=7, **run)
        except Interrupted:
            continue
        assert_same_run(tmp_path / "again", weights(task), straight)


def test_a_run_that_stopped_early_stays_stopped(tmp_path):
    def run():
        task = fresh_task()
        fit(task, tmp_path, epochs=6, patience=1, **WORSE)
        assert task.step == 12
        return weights(task), (tmp_path / "metrics.jsonl").read_text()

    (first, log), (again, same_log) = run(), run()
    assert log == same_log
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])


def test_what_patience_has_counted_is_kept(tmp_path):
    """One epoch without improvement before and one after the interruption."""
    for step in (14, None):
        task = fresh_task()
        try:
            callbacks = [At(step, interrupt)]
            run = {"epochs": 6, "patience": 2, **WORSE}
            fit(task, tmp_path, callbacks, every=7, **run)
        except Interrupted:
            pass
    assert task.step == 18


def test_a_step_on_a_plateau_is_kept(tmp_path):
    """ReduceLROnPlateau's counters and its learning rate are restored."""
    straight = None
    for name, steps in (("straight", [None]), ("again", [8, 14, None])):
        for step in steps:
            task = fresh_task()
            plateau = keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", patience=1, factor=0.5, min_delta=100.0
            )
            try:
                callbacks = [At(step, interrupt), plateau]
                every = 2 if step else 100
                fit(task, tmp_path / name, callbacks, every=every)
            except Interrupted:
                pass
        straight = straight or (tmp_path / name, weights(task))
    assert_same_run(tmp_path / "again", weights(task), straight)


def test_skipped_steps_stay_skipped(tmp_path):
    rows = random_rows(12, seed=5)
    runs = {}
    for name, steps in (("straight", [None]), ("again", [2, 4, None])):
        for step in steps:
            task = fresh_task()
            directory = tmp_path / name
            callbacks = [
                kpt.callbacks.Checkpoint(directory, every=step or 100),
                kpt.callbacks.MetricsLog(directory),
                At(step, interrupt),
            ]
            try:
                task.fit(
                    rows,
                    batch_size=4,
                    epochs=3,
                    skip_steps=(3, 5),
                    callbacks=callbacks,
                    verbose=0,
                )
            except Interrupted:
                pass
        runs[name] = weights(task), log_of(directory)
    assert [line["step"] for line in runs["again"][1]] == [1, 2, 4, 6, 7, 8, 9]
    assert runs["again"][1] == runs["straight"][1]
    for key, value in runs["straight"][0].items():
        np.testing.assert_array_equal(value, runs["again"][0][key])


def test_a_run_resumes_without_the_batches_of_a_spike(tmp_path):
    """It resumes before the spike; later steps keep their batches."""
    fit(fresh_task(), tmp_path, every=4, keep=10)
    before = log_of(tmp_path)
    for step in steps_saved(tmp_path):
        if step > 8:
            shutil.rmtree(tmp_path / "checkpoints" / str(step))
    task = fresh_task()
    task.fit(
        random_rows(22, seed=5),
        batch_size=4,
        epochs=3,
        seed=3,
        skip_steps=(9, 10),
        verbose=0,
        callbacks=[
            kpt.callbacks.MetricsLog(tmp_path),
            kpt.callbacks.Checkpoint(tmp_path),
        ],
    )
    after = log_of(tmp_path)
    assert after[:8] == before[:8]
    assert [line["step"] for line in after] == [*range(1, 9), *range(11, 19)]


def test_keep_and_every_are_respected(tmp_path):
    fit(fresh_task(), tmp_path / "a", every=5, keep=3)
    # Step 18 is the end.
    assert steps_saved(tmp_path / "a") == [10, 15, 18]
    fit(fresh_task(), tmp_path / "b", every=4, keep=1, epochs=1)
    assert steps_saved(tmp_path / "b") == [6]


@pytest.mark.parametrize(
    "every, seconds", [("5s", 5.0), ("0.0015h", 5.4), ("0.09 min", 5.4)]
)
def test_times_have_units(every, seconds):
    assert intervals.Interval(every).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "every", in_ci("0.09 min", of=["5s", "0.0015h", "0.09 min"])
)
def test_checkpoints_at_intervals_of_time(every, tmp_path, monkeypatch):
    """A step takes a second of this clock."""
    task = fresh_task()
    clock = types.SimpleNamespace(monotonic=lambda: 100.0 + task.step)
    monkeypatch.setattr(intervals, "time", clock)
    fit(task, tmp_path, every=every, keep=10)
    apart = 5 if every == "5s" else 6
    expected = [*range(apart, 18, apart), 18]
    assert steps_saved(tmp_path) == expected


@pytest.mark.parametrize("every", ["10", "0s", "-1min", "5 days", "min"])
def test_times_that_are_none_are_refused(every, tmp_path):
    with pytest.raises(ValueError, match=f'"10min".* Received: .*{every}'):
        kpt.callbacks.Checkpoint(tmp_path, every=every)


def test_an_adapters_checkpoint_holds_the_adapter_alone(tmp_path):
    task = fresh_task()
    fit(task, tmp_path, epochs=1, every=100)
    arrays, _ = task.run.training_state()
    held = sum(x.nbytes for group in arrays.values() for x in group.values())
    saved = tmp_path / "checkpoints" / "6"
    tree = json.loads((saved / "state" / "_METADATA").read_text())
    shapes = {
        tuple(key["key"] for key in entry["key_metadata"]): tuple(
            entry["value_metadata"].get("write_shape", ())
        )
        for entry in tree["tree_metadata"].values()
    }
    # Each trainable array once, and nothing of the base. The files' own size
    # says little: how often Orbax writes a part depends on the disk.
    assert shapes.pop(("best",)) == ()
    assert shapes == {
        (group, i): x.shape
        for group, values in arrays.items()
        for i, x in values.items()
    }
    assert held < sum(v.value.nbytes for v in task.variables) / 5


def test_two_fits_in_one_script(tmp_path):
    """Each has its own directory; the script is killed in either."""

    def script(directory, interrupted=None):
        task = fresh_task()
        for i, seed in enumerate((5, 6)):
            callbacks = [
                kpt.callbacks.MetricsLog(directory),
                kpt.callbacks.Checkpoint(directory / f"run{i}", every=2),
            ]
            if interrupted == i + 1:
                callbacks.append(At(4 * i + 2, interrupt))
            task.fit(
                random_rows(16, seed=seed),
                batch_size=4,
                callbacks=callbacks,
                verbose=0,
            )
        return weights(task), log_of(directory)

    final, log = script(tmp_path / "straight")
    assert [line["step"] for line in log] == list(range(1, 9))
    for i in (1, 2):
        with pytest.raises(Interrupted):
            script(tmp_path / f"again{i}", interrupted=i)
        again, again_log = script(tmp_path / f"again{i}")
        assert again_log == log
        for key, value in final.items():
            np.testing.assert_array_equal(value, again[key])


def test_generating_while_training_does_not_make_it_another_run(tmp_path):
    class Sample(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.generate(
                {"prompt_ids": [5, 6]},
                max_tokens=2,
                stop_token_ids=None,
                return_token_ids=True,
            )

    fit(fresh_task(), tmp_path, [Sample()], epochs=1)
    task = fresh_task()
    fit(task, tmp_path, [Sample()], epochs=2)
    assert task.step == 12


# Refusals


def refused(directory, task, *parts, **settings):
    before = weights(task)
    with pytest.raises(ValueError) as error:
        fit(task, directory, **settings)
    for part in (str(directory), *parts):
        assert part in str(error.value)
    assert task.compiled_train_step._cache_size() == 0
    for name, value in before.items():
        np.testing.assert_array_equal(value, weights(task)[name])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    fit(fresh_task(), directory, epochs=1)
    return directory


def test_another_model_is_refused(saved):
    task = make_task(family="qwen3")
    refused(saved, task, "Llama3CausalLM", "Qwen3CausalLM")


def test_other_frozen_weights_are_refused(saved):
    refused(saved, make_task(family="llama3_ref"), "frozen", "weights")


def test_another_rank_is_refused(saved):
    task = make_task(lora=kpt.LoRA(rank=2, dropout=0.2))
    refused(saved, task, "lora", "'rank': 4", "'rank': 2")


def test_an_adapters_run_is_not_one_of_full_weights(saved):
    refused(saved, make_task(lora=False), "lora", "'rank': 4", "None")


def test_another_optimizer_is_refused(saved):
    task = make_task()
    task.compile(optimizer=keras.optimizers.SGD(0.1))
    refused(saved, task, "optimizer", "Adam", "SGD")


def test_another_loss_is_refused(saved):
    task = make_task(loss=kpt.losses.DFTLoss())
    refused(saved, task, "loss", "SFTLoss", "DFTLoss")


def test_other_data_is_refused(saved):
    task = make_task()
    with pytest.raises(ValueError, match="same data.*num_examples=22.*=5"):
        task.fit(
            random_rows(5),
            batch_size=4,
            seed=3,
            callbacks=[kpt.callbacks.Checkpoint(saved)],
            verbose=0,
        )
    refused_packing = "packing=False.*packing=True"
    with pytest.raises(ValueError, match=refused_packing):
        fit(task, saved, packing=True)


def test_another_stream_is_refused(tmp_path, monkeypatch):
    """Behind its first window too; the run resumes on its own stream."""
    monkeypatch.setattr(pipeline, "WINDOW", 6)
    task = fresh_task()
    fit(task, tmp_path, callbacks=[At(3, stop)], stream=True)
    rows = grain.MapDataset.source(random_rows(22, seed=6))
    task = fresh_task()
    with pytest.raises(ValueError, match="same data.*their tokens='"):
        task.fit(
            rows.to_iter_dataset(),
            batch_size=4,
            seed=3,
            epochs=3,
            callbacks=[kpt.callbacks.Checkpoint(tmp_path)],
            verbose=0,
        )
    assert task.step == 3
    fit(fresh_task(), tmp_path, stream=True)
    assert steps_saved(tmp_path)[-1] == 18


def test_another_seed_is_refused(saved):
    task = make_task()
    with pytest.raises(ValueError, match="seed=3.*Received: seed=4"):
        task.fit(
            random_rows(22, seed=5),
            batch_size=4,
            seed=4,
            callbacks=[kpt.callbacks.Checkpoint(saved)],
            verbose=0,
        )


@pytest.mark.full
def test_a_list_of_targets_is_the_same_run(tmp_path):
    lora = kpt.LoRA(rank=2, targets=["q_proj", "v_proj"])
    fit(make_task(lora=lora), tmp_path, epochs=1)
    task = make_task(lora=lora)
    fit(task, tmp_path, epochs=2)
    assert task.step == 12


@pytest.mark.parametrize("name", ["every", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, None])
def test_bad_arguments_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}`.*positive.*{name}="):
        kpt.callbacks.Checkpoint(tmp_path, **{name: value})


def test_an_unwritable_directory_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "run"
    task = make_task()
    with pytest.raises(ValueError, match="writable; nothing was.*file/run"):
        task.fit(
            random_rows(4),
            callbacks=[kpt.callbacks.Checkpoint(directory)],
            verbose=0,
        )
    assert task.compiled_train_step._cache_size() == 0
    with pytest.raises(ValueError, match="writable; nothing was.*file/run"):
        kpt.callbacks.MetricsLog(directory)


# Damage


def truncate(step):
    for path in sorted((step / "state").rglob("*")):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_data(step):
    for path in (step / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-40])


def flip(step):
    for path in (step / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


def blank(step):
    """Zeros in the numbers of arrays alone, as after a loss of power."""
    largest = max(
        (step / "state").rglob("d/*"), key=lambda p: p.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[1000:1100] = bytes(100)
    largest.write_bytes(content)


def remove_state(step):
    shutil.rmtree(step / "state")


def remove_meta(step):
    shutil.rmtree(step / "meta")


def empty_meta(step):
    (step / "meta" / "metadata").write_text("")


def remove_all(step):
    for path in step.rglob("*"):
        if path.is_file():
            path.unlink()


DAMAGES = [
    truncate,
    cut_data,
    flip,
    blank,
    remove_state,
    remove_meta,
    empty_meta,
    remove_all,
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was interrupted after it had saved steps 6 and 8."""
    directory = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted):
        fit(fresh_task(), directory, [At(9, interrupt)], every=2)
    assert steps_saved(directory) == [6, 8]
    return directory


# TensorStore continues reading after Orbax has raised an error, and coroutines
# of Orbax are dropped, whenever the garbage collector finds them.
@pytest.mark.filterwarnings("ignore:coroutine 'Store:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(damage, straight, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints" / "8")
    task = fresh_task()
    with pytest.warns(match="step 8 is damaged .* resuming from step 6"):
        fit(task, tmp_path)
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [truncate, remove_meta])
def test_damage_everywhere_is_an_error(damage, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    for step in (6, 8):
        damage(tmp_path / "checkpoints" / str(step))
    with pytest.raises(ValueError) as error:
        fit(fresh_task(), tmp_path, every=2)
    for part in ("No checkpoint", str(tmp_path), "Remove the directory"):
        assert part in str(error.value)
    # Nothing was deleted.
    assert steps_saved(tmp_path) == [6, 8]


# Local checkpoints


LOCAL = {"every": 100, "local_every": 2}


def local_files(directory):
    return sorted((directory / "local").rglob("*.safetensors"))


def local_warnings(warned):
    texts = [str(w.message) for w in warned]
    return [text for text in texts if text.startswith("The local checkpoint")]


def interrupted_with_local_files(directory, **settings):
    """A run that has saved steps 6 and 8 on its machine alone."""
    with pytest.raises(Interrupted):
        fit(fresh_task(), directory, [At(9, interrupt)], **LOCAL, **settings)
    assert steps_saved(directory) == []
    names = [path.name.split(".")[0] for path in local_files(directory)]
    assert names == ["step-6", "step-8"]


def test_a_run_resumes_from_a_local_checkpoint(straight, tmp_path, capsys):
    """With the best weights of an epoch; none is left at the end."""
    interrupted_with_local_files(tmp_path, best=True)
    task = fresh_task()
    fit(task, tmp_path, best=True, **LOCAL)
    assert "the local checkpoint of step 8." in capsys.readouterr().out
    assert steps_saved(tmp_path) == [8, 18]
    assert list((tmp_path / "local").iterdir()) == []
    expected = straight("lora-unpacked", best=True)
    assert_same_run(tmp_path, weights(task), expected)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_damaged_local_checkpoint_is_skipped(
    all_of_them, straight, tmp_path
):
    """One with a flipped byte; or all, of which one was cut off."""
    interrupted_with_local_files(tmp_path)
    before, newest = local_files(tmp_path)
    content = bytearray(newest.read_bytes())
    content[-1000] ^= 1
    newest.write_bytes(content)
    if all_of_them:
        before.write_bytes(before.read_bytes()[:-40])
    task = fresh_task()
    with pytest.warns(UserWarning) as warned:
        fit(task, tmp_path, **LOCAL)
    texts = local_warnings(warned)
    first = "The local checkpoint of step 8 cannot be used (Checksum: that "
    assert texts[0].startswith(first)
    end = "training starts from the beginning."
    end = end if all_of_them else "resuming from step 6."
    assert all(text.endswith(f"; {end}") for text in texts)
    assert len(texts) == 1 + all_of_them
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))


def test_a_full_local_disk_is_a_warning(straight, tmp_path):
    """The last complete one stays, and those after it are written again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    seen = []

    def written(task):
        """The local files, once none is being written."""
        [saver] = (
            x
            for x in task.run.callbacks
            if isinstance(x, kpt.callbacks.Checkpoint)
        )
        saver._local.wait()
        return local_files(tmp_path)

    def fill(task):
        size = written(task)[-1].stat().st_size
        assert (tmp_path / "metrics.jsonl").stat().st_size < size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))

    def make_room(task):
        seen.extend(path.name for path in written(task))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    callbacks = [At(3, fill), At(7, make_room), At(12, interrupt)]
    try:
        # Those of steps 4 and 6 are not written.
        with pytest.warns(UserWarning) as warned, pytest.raises(Interrupted):
            fit(fresh_task(), tmp_path, callbacks, **LOCAL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    [text] = local_warnings(warned)
    for part in (
        "The local checkpoint of step 4 could not be written to",
        str(tmp_path / "local"),
        "File too large",
        "that of step 2 is complete. Training continues",
    ):
        assert part in text, text
    assert [name.split(".")[0] for name in seen] == ["step-2"]
    task = fresh_task()
    fit(task, tmp_path, **LOCAL)
    assert steps_saved(tmp_path) == [10, 18]
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))


def test_a_local_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "local").write_text("")
    with pytest.raises(ValueError, match="must be writable; nothing.*local"):
        fit(fresh_task(), tmp_path, **LOCAL)


# SIGTERM


def test_the_sigterm_handler_is_restored(tmp_path):
    def mine(number, frame):
        pass

    old = signal.signal(signal.SIGTERM, mine)
    try:
        fit(fresh_task(), tmp_path, epochs=1)
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(Interrupted):
            fit(fresh_task(), tmp_path, [At(8, interrupt)], epochs=2)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, old)


class Terminated(Exception):
    pass


# A signal at each of the steps, and each of the signals.
SIGNALLED = {
    (2, signal.SIGINT),
    (6, signal.SIGTERM),
    (18, signal.SIGINT),
}


@pytest.mark.parametrize(
    "step, number",
    [
        pytest.param(*x, marks=[] if x in SIGNALLED else pytest.mark.full)
        for x in itertools.product((2, 6, 18), (signal.SIGTERM, signal.SIGINT))
    ],
)
def test_a_signal_saves_then_ends_as_before(step, number, straight, tmp_path):
    """Within an epoch, at the end of one, and at the end of the run."""

    def end(number, frame):
        raise Terminated

    def terminate(task):
        signal.raise_signal(number)

    old = signal.signal(signal.SIGTERM, end)
    ends = {signal.SIGTERM: Terminated, signal.SIGINT: KeyboardInterrupt}
    try:
        with pytest.raises(ends[number]):
            fit(fresh_task(), tmp_path, [At(step, terminate)], every=100)
        assert signal.getsignal(signal.SIGTERM) is end
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, old)
    assert steps_saved(tmp_path) == [step]
    task = fresh_task()
    fit(task, tmp_path, every=100)
    assert_same_run(tmp_path, weights(task), straight("lora-unpacked"))


# Fresh processes


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    global CACHE
    CACHE = tmp_path_factory.mktemp("cache")


def start(directory, **settings):
    directory.mkdir(exist_ok=True)
    # A process that is killed leaves no model behind.
    model = str(one_layer(REFERENCE / "models/llama3"))
    settings = {"directory": str(directory), "model": model, **settings}
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "tests/callbacks/train_script.py"),
            json.dumps(settings),
        ],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            # A kill can leave an incomplete compiled program in the cache.
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def kill_when(process, condition, delay=0.0, number=signal.SIGKILL):
    """Sends a signal when a condition holds; `True` if it was in time."""
    end = time.monotonic() + 300
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            break
        time.sleep(0.005)
    time.sleep(delay)
    in_time = process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    if in_time and process.returncode > 0:
        raise AssertionError(output)
    return process.returncode == -number


def lines_in(directory):
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def final_of(directory):
    with np.load(directory / "final.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def straight_process(tmp_path_factory):
    runs = {}

    def run(kind):
        if kind not in runs:
            directory = tmp_path_factory.mktemp("process")
            finish(start(directory, **KINDS[kind]))
            runs[kind] = directory, final_of(directory)
        return runs[kind]

    return run


def killed_runs(kind, kills, seed, directory, straight_process):
    """The last kill leaves nothing but local checkpoints of its steps."""
    rng = random.Random(seed)
    done = 0
    while done < kills:
        # Of 16 or 18 steps; saved steps are not repeated.
        ahead = lines_in(directory) + rng.randint(0, 5)
        run = KINDS[kind] | {"every": rng.randint(1, 3), "pause": 0.05}
        if done == kills - 1:
            # Complete when the second step after it is logged.
            ahead = lines_in(directory) + rng.randint(2, 5)
            run |= {"every": 100, "local_every": 1}
        process = start(directory, **run)
        killed = kill_when(
            process,
            lambda ahead=ahead: lines_in(directory) >= ahead + 1,
            delay=rng.uniform(0, 0.15),
        )
        done += killed
        if not killed:
            # The run was complete, so it starts again.
            assert_same_run(
                directory, final_of(directory), straight_process(kind)
            )
            shutil.rmtree(directory)
    output = finish(start(directory, every=4, local_every=1, **KINDS[kind]))
    assert "Resuming from the local checkpoint of step" in output
    assert_same_run(directory, final_of(directory), straight_process(kind))


# One process killed by the system is in CI, and resumed from what it left on
# its machine; what is killed does not depend on how its rows are laid out.
# `tests/tasks/test_killed.py` has one that resumes from a checkpoint.
KILLS = [
    ("full-stream", 1),
    *(pytest.param(x, 2, marks=pytest.mark.full) for x in sorted(KINDS)),
]


@pytest.mark.parametrize("kind, kills", KILLS)
def test_killed_at_random_steps(kind, kills, straight_process, tmp_path):
    killed_runs(kind, kills, kind, tmp_path / "run", straight_process)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_killed_at_more_random_steps(kind, seed, straight_process, tmp_path):
    killed_runs(kind, 3, seed, tmp_path / "run", straight_process)


@pytest.mark.full
def test_killed_before_the_first_checkpoint_and_in_validation(
    straight_process, tmp_path
):
    run = KINDS["lora-unpacked"]
    process = start(tmp_path, every=100, pause=0.1, **run)
    assert kill_when(process, lambda: lines_in(tmp_path) >= 2)
    assert steps_saved(tmp_path) == []
    process = start(tmp_path, every=1, pause=0.2, **run)
    assert kill_when(process, (tmp_path / "validating").exists)
    # The epoch's last step is not saved before its end.
    assert steps_saved(tmp_path)[-1] == 5
    finish(start(tmp_path, every=1, **run))
    straight = straight_process("lora-unpacked")
    assert_same_run(tmp_path, final_of(tmp_path), straight)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    def interrupt_twice(task):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(fresh_task(), tmp_path, [At(2, interrupt_twice)], every=100)
    assert steps_saved(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_signals_stay_ignored(tmp_path):
    """Ctrl-C in a shell does not reach the processes in its background."""

    def interrupt_once(task):
        signal.raise_signal(signal.SIGINT)

    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fit(fresh_task(), tmp_path, [At(2, interrupt_once)], epochs=1)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_process_has_saved(number, straight_process, tmp_path):
    run = KINDS["lora-unpacked"]
    process = start(tmp_path, every=100, pause=0.1, **run)
    assert kill_when(process, lambda: lines_in(tmp_path) >= 3, number=number)
    (step,) = steps_saved(tmp_path)
    assert 3 <= step <= 6
    assert lines_in(tmp_path) == step
    finish(start(tmp_path, every=100, **run))
    straight = straight_process("lora-unpacked")
    assert_same_run(tmp_path, final_of(tmp_path), straight)


@pytest.mark.full
def test_a_full_disk_spares_the_last_checkpoint(straight_process, tmp_path):
    run = KINDS["lora-unpacked"] | {"every": 2, "keep": 1}
    process = start(tmp_path, pause=0.1, **run)
    assert kill_when(process, lambda: lines_in(tmp_path) >= 5)
    good = steps_saved(tmp_path)[-1]
    output = finish(start(tmp_path, file_limit=8192, **run), code=1)
    for part in (
        "OSError: A checkpoint could not be written",
        str(tmp_path),
        f"the last good one is step {good}",
        "Make room and run the script again",
    ):
        assert part in output
    assert good in steps_saved(tmp_path)
    finish(start(tmp_path, **run))
    straight = straight_process("lora-unpacked")
    assert_same_run(tmp_path, final_of(tmp_path), straight)
