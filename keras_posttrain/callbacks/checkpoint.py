import signal
import threading
import warnings

import jax
import keras
import numpy as np

from keras_posttrain import _console, _remote
from keras_posttrain._spans import span
from keras_posttrain.callbacks import callback_state, checks
from keras_posttrain.callbacks.checkpoint_files import (
    abstract,
    check_sums,
    checksums,
    contents,
    detached,
    handlers,
    meta_checksum,
    waiting,
)
from keras_posttrain.callbacks.directories import (
    Folder,
    advice,
    lock,
    make_directory,
    shared_path,
    unlock,
)
from keras_posttrain.callbacks.divergence import Divergence
from keras_posttrain.callbacks.evaluate import Evaluate
from keras_posttrain.callbacks.intervals import Interval
from keras_posttrain.callbacks.local_checkpoints import LocalCheckpoints
from keras_posttrain.callbacks.retention import Retention
from keras_posttrain.distribution import processes

# The folder with a folder for each step.
NAME = "checkpoints"


class Checkpoint(keras.callbacks.Callback):
    """Saves the state of a run, and resumes the run bit for bit.

    If the same script runs again with the same directory, training resumes
    where it stopped: weights (with an adapter, only its weights), optimizer,
    step, random state, position in the data, running means and the counters
    of `EarlyStopping` and `ReduceLROnPlateau` are restored. A run that a
    callback stopped at the end of an epoch stays stopped; a run that was
    stopped within an epoch resumes.

    Saving is asynchronous and atomic. A checkpoint that a crash damaged is
    skipped, and the one before it is used. On SIGTERM, and on Ctrl-C, a
    checkpoint is saved before the process ends (Ctrl-C raises
    `KeyboardInterrupt`): after the current step, or at once while a rollout
    is sampled or scored. A second Ctrl-C ends at once.

    Where all steps since the last checkpoint were skipped because their
    gradients were not finite, none is saved: the good ones are kept.

    Several processes save together, each the shards of its own devices; they
    need one directory that all of them can reach. SIGTERM to one of them
    saves and ends all. If a rollout engine or a reward fails, the steps
    before it are saved too.

    With `local_directory`, each process also writes the parts of the state
    that its own devices hold to its own machine; no array is sent. The run
    then resumes from the newest step of which the machines together have all
    parts, or from the newest checkpoint in `directory`. What a lost or
    replaced machine had is sent by one whose devices hold the same parts
    (`data_parallel`, `hybrid`, other replicas); where none does, or the
    devices of the run are others, a warning names the step and the checkpoint
    that is used. From the first one on, the machines together have one
    complete step, and at most one that is being written. A local write that
    fails is a warning. When training ends, local files are deleted if a
    checkpoint in `directory` is as new. They are used by their own run alone,
    whose random name is in `directory` (`checkpoints/run_id`): those of a run
    whose `directory` was deleted are never used, and remain.

    Args:
        directory: str or path, created if missing; or an address, such as
            `"gs://bucket/run"` or `"s3://bucket/run"`. Checkpoints are then
            written to this machine's temporary folder first, which needs room
            for those that are kept, and a run that resumes reads them from
            the address. Of several processes each writes its part to `gs://`
            at once; other addresses are for one process. Of two runs at one
            address, the one that began first ends at its next checkpoint.
        every: int, steps between two checkpoints; or str, the time between
            them, such as `"10min"` (units are `s`, `min` and `h`). The end
            of training is saved too.
        keep: int, number of the newest checkpoints to keep.
        keep_every: as `every`, or `None`: also keep a checkpoint from each
            such interval.
        monitor: name of a metric, such as `"val_loss"` or `"reward"`, or
            `None`: also keep the checkpoint at which it was best. One at
            which it was not logged, or not finite, is not compared.
        mode: `"min"` or `"max"`, what is best; needed with `monitor`.
        from_step: int or `None`: return to the newest checkpoint that is not
            after this step, and delete the later ones. With `fit`'s
            `skip_steps`, a loss spike can be left out this way. The same
            script with the same `from_step` then resumes where it stopped.
        override: names of settings of the optimizer, such as
            `["learning_rate"]`, that may differ from those of the saved run:
            the run continues with those of `compile`, and prints the change.
        local_directory: str, path or `None`: a folder on the disk (SSD) or in
            the memory (such as `"/dev/shm/run"`) of each machine. It may
            differ between processes, and two processes may share it.
        local_every: as `every`, between two local checkpoints; needed with
            `local_directory`, and the same in all processes.

    Attributes:
        location: str, the path or address of the folder with a folder for
            each step.
        best: the folder of the checkpoint at which `monitor` was best, a
            `pathlib.Path` or address, or `None`. `Loop.load_state` reads it,
            and `from_step` with its name, a step, goes back to it.

    Raises:
        ValueError: at the start of training, if a directory cannot be
            written to, or `directory` contains a run of another model,
            adapter shape, optimizer or data.
        RuntimeError: another run has begun to write to the same address.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.Checkpoint("run/", every=100)])
    ```
    """

    reads_step_logs = True

    def __init__(
        self,
        directory,
        every=500,
        keep=2,
        from_step=None,
        override=(),
        *,
        keep_every=None,
        monitor=None,
        mode=None,
        local_directory=None,
        local_every=None,
    ):
        super().__init__()
        if isinstance(override, str) or not all(
            isinstance(name, str) for name in override
        ):
            raise ValueError(
                "`override` must be a list of names of the optimizer's "
                'settings, such as ["learning_rate"]. '
                f"Received: override={override!r}"
            )
        self.override = tuple(override)
        self._interval = Interval(every)
        checks.positive("from_step", from_step or 1)
        # What is in it is locked.
        self._folder = Folder(directory, is_locked=False)
        self.directory = self._folder.path.absolute() / NAME
        self.location = str(self.directory)
        if self._folder.is_remote:
            self.location = f"{self._folder.name}/{NAME}"
        self.every, self.keep, self.from_step = every, keep, from_step
        self._retention = Retention(keep, keep_every, monitor, mode)
        self._local = LocalCheckpoints.of(local_directory, local_every)
        self.local_directory, self.local_every = local_directory, local_every
        self.best = None
        self._manager, self._old_handlers = None, {}
        self._is_locked = self._terminated = False
        # At an address: it is noticed if another run begins there.
        self._owner = self._other_run = None

    def on_train_begin(self, logs=None):
        self._open()
        self._begin_local()
        # The run's name is there before local checkpoints have it.
        self._folder.push()
        self._manager = _manager(
            self.directory, self._retention, self._folder.push
        )
        self._saved = None
        self._terminated = self._stopped_in_epoch = False
        self._signal = signal.SIGTERM
        self._calls = 0
        self._epoch = 0
        self._scalars = []
        self._restore()
        self._interval.begin(self.model.step)
        in_main = threading.current_thread() is threading.main_thread()
        # With several processes, JAX handles the signal.
        if in_main and processes.count() == 1:
            signals = [signal.SIGTERM]
            # A shell has the processes in its background ignore Ctrl-C.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signals.append(signal.SIGINT)
            for number in signals:
                old = signal.signal(number, self._on_signal)
                self._old_handlers[number] = old

    def _open(self):
        """Makes the directory, or copies what is at an address."""
        self._other_run = None
        if self._folder.is_remote:
            processes.exchange_results(self._own)
        if self._folder.is_remote and processes.count() > 1:
            self.directory = shared_path(self._folder.name) / NAME
            self.directory.mkdir(parents=True, exist_ok=True)
            return
        self._folder.begin(NAME)
        make_directory(self.directory)
        lock(self.directory)
        self._is_locked = True

    def _own(self):
        if processes.is_first():
            self._owner = _remote.Owner(self._folder.name)
            self._owner.take()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        # A resumed epoch has begun before: a scheduler has set its learning
        # rate already.
        for variable, value in self._scalars:
            variable.assign(value)
        self._scalars = []

    def on_train_batch_end(self, batch, logs=None):
        self._stopped_in_epoch = self._model.stop_training
        self._calls += 1
        if processes.is_preempted(self._calls):
            self._terminated = True
        # Validation and other callbacks at the end of an epoch belong to it,
        # so its last step is saved after them.
        if not self._model.run.at_rest:
            return
        is_due, is_local_due = self._is_due(), self._is_local_due()
        if (is_due or is_local_due) and not self._is_epoch_over():
            self._save(is_due=is_due, is_local_due=is_local_due)
            self._end_if_terminated()

    def on_epoch_end(self, epoch, logs=None):
        # A run that was stopped within the epoch is saved already.
        if self._stopped_in_epoch and self._saved == self._model.step:
            return
        self._epoch = epoch + 1
        is_last = self._epoch == self.params["epochs"]
        # Before `on_train_end`, where EarlyStopping restores its best
        # weights: a run with more epochs resumes from the last ones.
        is_due, is_local_due = self._is_due(), self._is_local_due()
        if is_due or is_local_due or is_last:
            self._save(logs or {}, is_due or is_last, is_local_due)
        self._end_if_terminated()

    def on_train_end(self, logs=None):
        self.close()
        self._end_if_terminated()

    def save_before_error(self):
        """Saves a run that an error between two steps is about to end."""
        # Several processes cannot save, as the others may not call this.
        if processes.count() > 1 or self._manager is None or self._other_run:
            return
        if self._model.step > (self._saved or 0):
            self._save()
            # What ends now may take longer than the process is given.
            self._checked(self._manager.wait_until_finished)

    def close(self):
        """Waits for the last checkpoint and restores the signal handlers."""
        self._restore_handlers()
        manager, self._manager = self._manager, None
        stored = None
        try:
            if manager is not None:
                stored = self._finish(manager)
        finally:
            is_copied = self._release()
            if manager is not None:
                self._close_local(stored if is_copied else None)
        if not is_copied and not self._other_run:
            raise OSError(
                f"Checkpoints could not be copied to {self.location!r}. They "
                f"are in {str(self.directory)!r}: copy them, and run the "
                "script again to resume from them."
            )
        if self._terminated and processes.count() == 1:
            # A run that a signal has interrupted ends by it.
            self._end()

    def _finish(self, manager):
        """Waits for the last checkpoint, and returns its step."""
        try:
            self._checked(manager.wait_until_finished)
            step = self._retention.best_step(manager)
        finally:
            manager.close()
        if step is None:
            self.best = None
        elif self._folder.is_remote:
            self.best = f"{self.location}/{step}"
        else:
            self.best = self.directory / step
        return self._saved

    def _release(self):
        """Unlocks the directory; returns whether all is at its address."""
        if self._is_locked:
            self._is_locked = False
            unlock(self.directory)
        return self._folder.end()

    def _is_due(self):
        if self._terminated or self._model.stop_training:
            return True
        return self._is_over(self._interval)

    def _is_local_due(self):
        return self._local is not None and self._is_over(self._local.interval)

    def _is_over(self, interval):
        """Returns whether an interval is over, with steps that are good."""
        if not interval.is_over(self._model.step):
            return False
        guards = [
            callback
            for callback in self.model.run.callbacks
            if isinstance(callback, Divergence)
        ]
        return not any(guard.lost_since(interval.step) for guard in guards)

    def _is_epoch_over(self):
        if self._model.run.at_epoch_end():
            return True
        # A stream shows only by its next position that a batch was the last.
        _, meta = self.model.run.training_state()
        return meta["data"]["position"]["epoch"] > self._epoch

    def _end_if_terminated(self):
        if self._terminated:
            self.close()
            if processes.count() == 1:
                return
            # Closed first: that processes now end is not an error.
            for callback in self.model.run.callbacks:
                if hasattr(callback, "close"):
                    callback.close()
            processes.leave()
            self._end()

    def _end(self):
        """Ends the process by SIGTERM, or raises `KeyboardInterrupt`."""
        self._terminated = False
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    def _restore_handlers(self):
        handlers, self._old_handlers = self._old_handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number, frame):
        if self._terminated and number == signal.SIGINT:
            self._terminated = False
            self._restore_handlers()
            raise KeyboardInterrupt
        self._terminated, self._signal = True, signal.Signals(number)
        if getattr(self.model.run, "is_waiting", False):
            # The steps before the rollout are complete.
            raise KeyboardInterrupt

    def _checked(self, function, *args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (OSError, ValueError, RuntimeError) as e:
            if processes.may_be_lost(e):
                raise
            good = _complete_steps(self.directory)
            last = f"step {good[-1]}" if good else "none"
            raise OSError(
                f"A checkpoint could not be written to "
                f"{self.location!r}; the last good one is {last}. "
                f"{advice(e, self.location)} and run the script again to "
                "resume from it. "
                f"({type(e).__name__}: {str(e)[:500]})"
            ) from e

    def _save(self, epoch_logs=None, is_due=True, is_local_due=False):
        """Saves the present step.

        `epoch_logs` are those of the end of an epoch, if it is one; `is_due`
        and `is_local_due` say where it is saved.
        """
        step = self.model.step
        is_due = is_due and self._saved != step
        is_local_due = is_local_due and self._local.saved != step
        if not is_due and not is_local_due:
            return
        self._check_owner()
        arrays, meta = self._state(in_epoch=epoch_logs is None)
        metrics = self._retention.metrics(
            self._logs(epoch_logs), epoch_ended=epoch_logs is not None
        )
        with span("checkpoint"):
            arrays = detached(arrays)
            meta["sums"] = checksums(arrays)
            meta["checksum"] = meta_checksum(meta)
            if is_local_due:
                self._local.save(step, arrays, meta)
            if is_due:
                self._store(step, arrays, meta, metrics)

    def _check_owner(self):
        """Raises an error if another run has begun at the same address."""
        if not self._folder.is_remote:
            return
        text = None
        if processes.is_first():
            try:
                self._owner.check()
            except _remote.OtherRun as error:
                text = str(error)
            except Exception:  # noqa: BLE001 - whatever the store raises
                # Storage that fails does so when the files are copied.
                pass
        self._other_run = processes.from_first(text)
        if self._other_run:
            raise _remote.OtherRun(self._other_run)

    def _state(self, in_epoch):
        """Returns the arrays and the metadata of the present step."""
        task, run = self.model, self.model.run
        for callback in run.callbacks:
            if hasattr(callback, "flush"):
                callback.flush()
        arrays, meta = run.training_state()
        arrays["best"] = callback_state.best_weights(run.callbacks, task)
        meta["epoch"], meta["in_epoch"] = self._epoch, in_epoch
        stopped = task.stop_training and not self._stopped_in_epoch
        meta["stopped"] = bool(stopped)
        meta["callbacks"] = callback_state.counters(run.callbacks)
        meta["best"] = list(arrays["best"])
        meta["from_step"] = self.from_step
        return arrays, meta

    def _store(self, step, arrays, meta, metrics):
        """Starts to write a state to `directory`."""
        with self._retention.saving():
            self._checked(
                self._manager.save,
                step,
                args=contents(arrays, meta),
                metrics=metrics,
                force=True,
            )
        self._saved = step
        self._interval.begin(step)

    def _logs(self, epoch_logs):
        """Returns logs without evaluations of an earlier step."""
        old = tuple(
            f"{callback.name}/"
            for callback in self.model.run.callbacks
            if isinstance(callback, Evaluate)
            and callback.evaluated_at != self.model.step
        )
        logs = self.model.step_logs if epoch_logs is None else epoch_logs
        return {k: v for k, v in logs.items() if not k.startswith(old)}

    def _restore(self):
        run = self.model.run
        expected, _ = run.training_state()
        failures, later = [], []
        candidates = self._candidates()
        for step, local in candidates:
            meta, error = self._read_meta(step, local)
            if error is not None:
                failures.append((step, local, error))
                continue
            if self._is_before_branch(step, meta):
                later.append((step, local))
                continue
            changed = run.check(meta, self.location, self.override)
            arrays, error = self._read_arrays(step, local, expected, meta)
            if error is None:
                error = _different(arrays, meta)
            if error is not None:
                failures.append((step, local, error))
                continue
            self._resume(step, arrays, meta)
            self._override(changed)
            self._say_if_finished()
            break
        else:
            local = None
        self._delete_later(later, [step for step, _ in candidates])
        self._delete_damaged([(s, e) for s, key, e in failures if not key])
        if self._local is not None:
            self._warn_of_lost([(s, e) for s, key, e in failures if key])
            self._local.keep_only(local, self.model.step)
        if local is not None:
            if processes.is_first():
                _console.say(
                    "Resuming from the local checkpoint of step "
                    f"{self._saved}."
                )
            # What only the machines of the run have may be lost with one.
            self._store(self._saved, detached(arrays), meta, metrics=None)

    def _candidates(self):
        """Returns the steps that are saved, the newest first.

        Returns:
            A list of `(step, local)`; `local` is `None` for a checkpoint in
            `directory`, which comes first of two of one step, and the key of
            a local one.
        """
        steps = processes.from_first(sorted(self._manager.all_steps()))
        local = [] if self._local is None else self._local.find()
        found = [(step, None) for step in reversed(steps)]
        found += [(key[0], key) for key in local]
        return sorted(found, key=lambda x: x[0], reverse=True)

    def _read_meta(self, step, local):
        """Returns `(meta, None)` or `(None, error)`, in all processes."""
        if local is not None:
            return self._local.read_meta(local)
        # Imported late, as only runs with checkpoints need it.
        import orbax.checkpoint as ocp

        # The manager would wait for all processes after reading, even if one
        # fails; its handlers do not.
        meta, error = self._try(
            ocp.JsonCheckpointHandler(),
            self.directory / str(step) / "meta",
            ocp.args.JsonRestore(),
        )
        if error is None and meta.get("checksum") != meta_checksum(meta):
            error = "Checksum: that of its metadata differs"
        return meta, error

    def _read_arrays(self, step, local, expected, meta):
        """Returns `(arrays, None)` or `(None, error)`, in all processes."""
        wanted = jax.tree.map(abstract, expected)
        best = wanted["trainable"]
        if local is not None:
            # Each process has written the whole of the best weights.
            best = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), best
            )
        wanted["best"] = {name: best for name in meta["best"]}
        if local is not None:
            return self._local.read_arrays(local, wanted)
        # Imported late, as only runs with checkpoints need it.
        import orbax.checkpoint as ocp

        return self._try(
            ocp.StandardCheckpointHandler(),
            self.directory / str(step) / "state",
            ocp.args.StandardRestore(wanted),
        )

    def _resume(self, step, arrays, meta):
        """Continues from a state that was read."""
        task, run = self.model, self.model.run
        run.restore(arrays, meta)
        callback_state.set_counters(run.callbacks, meta["callbacks"])
        callback_state.set_best_weights(run.callbacks, task, arrays["best"])
        if meta["in_epoch"]:
            self._scalars = [
                (v, np.array(v.value))
                for v in task.optimizer.variables
                if not v.shape
            ]
        self._epoch = meta["epoch"]
        self._saved = step

    def _say_if_finished(self):
        epochs = self.params["epochs"]
        done = self.model.run.state.initial_epoch
        if done >= epochs and processes.is_first():
            _console.say(
                f"The run in {self.location!r} is finished, at step "
                f"{self._saved}: nothing is trained. To train further, use "
                f"more epochs than {epochs}, or another directory."
            )

    def _override(self, changed):
        """Applies settings of the optimizer that differ from the saved ones.

        All but the learning rate are no variables, and are in effect already.
        """
        optimizer = self.model.optimizer
        for name, (old, new) in changed.items():
            if name == "learning_rate" and not isinstance(new, (dict, str)):
                optimizer.learning_rate = new
                self._scalars = [
                    pair
                    for pair in self._scalars
                    if pair[0] is not optimizer._learning_rate
                ]
            if processes.is_first():
                _console.say(
                    f"Resuming from step {self._saved} with the optimizer's "
                    f"{name} {new!r} instead of {old!r}."
                )

    def _try(self, handler, folder, args):
        """Returns `(item, None)`, or `(None, error)` if any process fails."""
        item = error = None
        try:
            item = handler.restore(folder, args=args)
        except Exception as e:  # noqa: BLE001 - damage can raise any error
            error = f"{type(e).__name__}: {str(e)[:300]}"
        errors = [e for e in processes.exchange(error) if e is not None]
        return (None, errors[0]) if errors else (item, None)

    def _is_before_branch(self, step, meta):
        """Returns `True` for a checkpoint after `from_step` of the old run."""
        if self.from_step is None or step <= self.from_step:
            return False
        return meta["from_step"] != self.from_step

    def _delete_later(self, later, steps):
        if later and self._saved is None:
            raise ValueError(
                f"No checkpoint in {self.location!r} is from step "
                f"{self.from_step} or before; the steps of those found are "
                f"{sorted(set(steps))}. Received: from_step={self.from_step}"
            )
        for step, local in later:
            if local is None:
                self._manager.delete(step)
        if later and processes.is_first():
            _console.say(
                f"Resuming from step {self._saved}; removed the checkpoints "
                f"of steps {sorted({step for step, _ in later})}."
            )

    def _delete_damaged(self, failures):
        if not failures:
            return
        if self._saved is None:
            step, error = failures[0]
            raise ValueError(
                f"No checkpoint in {self.location!r} can be read "
                f"(step {step}: {error}). Remove the directory to start again."
            )
        for step, error in failures:
            if processes.is_first():
                # Also where `verbose` is 0: steps are lost.
                warnings.warn(
                    f"Checkpoint of step {step} is damaged "
                    f"({error.split(':')[0]}); resuming from step "
                    f"{self._saved}.",
                    stacklevel=2,
                )
            self._manager.delete(step)

    def _begin_local(self):
        # Also where this process has none and another one has.
        if processes.count() > 1:
            name = "Checkpoint(local_every=...)"
            processes.check_equal({name: self.local_every})
        if self._local is not None:
            self._local.begin(self.directory)

    def _close_local(self, stored):
        if self._local is not None:
            self._local.close(stored)

    def _warn_of_lost(self, failures):
        if not processes.is_first():
            return
        after = "training starts from the beginning"
        if self._saved is not None:
            after = f"resuming from step {self._saved}"
        for step, error in failures:
            # Also where `verbose` is 0: steps are lost.
            warnings.warn(
                f"The local checkpoint of step {step} cannot be used "
                f"({error}); {after}.",
                stacklevel=2,
            )


def _manager(directory, retention, after_save):
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    class Manager(ocp.CheckpointManager):
        def reached_preemption(self, step):
            # JAX agrees on one step per call, and Orbax's calls could agree
            # on a step that the run has passed.
            return False

    return Manager(
        directory,
        handler_registry=handlers(),
        options=ocp.CheckpointManagerOptions(
            preservation_policy=retention.policy(),
            best_fn=retention.value if retention.monitor else None,
            best_mode=retention.mode or "max",
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=after_save
            ),
            cleanup_tmp_directories=True,
            # Made before.
            create=False,
            multiprocessing_options=waiting(),
        ),
    )


def _different(arrays, meta):
    """Returns what differs from the arrays that were written, or `None`."""
    try:
        check_sums(arrays, meta)
    except ValueError as e:
        return f"Checksum: {e}"
    return None


def _complete_steps(directory):
    paths = directory.iterdir() if directory.exists() else []
    return sorted(int(p.name) for p in paths if p.name.isdigit())
