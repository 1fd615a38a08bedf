import os
import pathlib
import signal
import threading

import jax
import keras
import numpy as np

from keras_posttrain.callbacks.metrics_log import make_directory

# What Keras callbacks count between epochs, by attribute.
COUNTERS = ("wait", "best", "best_epoch", "stopped_epoch", "cooldown_counter")


class Checkpoint(keras.callbacks.Callback):
    """Saves a run, and goes on where it stopped.

    The same script run again with the same directory continues as if it had
    never stopped: weights (of an adapter alone, where there is one),
    optimizer, step, random state, place in the data and running means are
    restored. Saving is asynchronous and atomic; a checkpoint that a crash
    left damaged is passed over for the one before. SIGTERM saves, then ends
    the process as it would have ended.

    Args:
        directory: str or path, made where missing.
        every: int, steps between two checkpoints. The end of training is
            saved too.
        keep: int, how many checkpoints stay.

    Raises:
        ValueError: at the start of training, for a directory that cannot be
            written to or that holds a run of another model, adapter shape,
            optimizer or data.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.Checkpoint("run/", every=100)])
    ```
    """

    reads_step_logs = True

    def __init__(self, directory, every=500, keep=2):
        super().__init__()
        for name, value in (("every", every), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` must be a positive int. "
                    f"Received: {name}={value!r}"
                )
        self.directory = pathlib.Path(directory).absolute() / "checkpoints"
        self.every, self.keep = every, keep
        self._manager = None

    def on_train_begin(self, logs=None):
        make_directory(self.directory)
        self._manager = _manager(self.directory, self.keep)
        self._saved = None
        self._terminated = False
        self._epoch = 0
        self._restore()
        self._last = self.model.step
        self._old_handler = None
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        # What follows an epoch's last step (validation, other callbacks)
        # belongs to that epoch: such a step is saved after them.
        if not self._model.at_epoch_end():
            self._save_if_due()

    def on_epoch_end(self, epoch, logs=None):
        self._epoch = epoch + 1
        self._save_if_due(force=self._model.stop_training)

    def on_train_end(self, logs=None):
        if self._saved != self._model.step:
            self._save()
        self._close()

    def _save_if_due(self, force=False):
        step, last = self._model.step, self._last
        due = step // self.every > last // self.every
        if due or force or self._terminated:
            self._save()
        if self._terminated:
            self._close()
            signal.raise_signal(signal.SIGTERM)

    def _on_sigterm(self, number, frame):
        self._terminated = True

    def _close(self):
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None
        if self._manager is not None:
            manager, self._manager = self._manager, None
            self._checked(manager.wait_until_finished)
            manager.close()

    def _checked(self, function, *args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (OSError, ValueError, RuntimeError) as e:
            good = _complete_steps(self.directory)
            last = f"step {good[-1]}" if good else "none"
            raise OSError(
                f"A checkpoint could not be written to "
                f"{str(self.directory)!r}; the last good one is {last}. Make "
                "room and run the script again to go on from it. "
                f"({type(e).__name__}: {str(e)[:500]})"
            ) from e

    def _save(self):
        import orbax.checkpoint as ocp

        task = self.model
        for callback in task.fit_callbacks:
            if hasattr(callback, "flush"):
                callback.flush()
        arrays, meta = task.training_state()
        if jax.default_backend() == "cpu":
            # An array on the CPU is written from where it lies, and the next
            # step is given that memory.
            arrays = jax.tree.map(_own, arrays)
        meta["epoch"] = self._epoch
        meta["stopped"] = bool(task.stop_training)
        meta["callbacks"] = _counters(task.fit_callbacks)
        self._checked(
            self._manager.save,
            task.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                meta=ocp.args.JsonSave(meta),
            ),
            force=True,
        )
        self._saved = self._last = task.step

    def _restore(self):
        import orbax.checkpoint as ocp

        task = self.model
        expected, _ = task.training_state()
        failures = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                meta = self._manager.restore(
                    step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
                )["meta"]
            except Exception as e:  # noqa: BLE001 - whatever a damage raises
                failures.append((step, e))
                continue
            task.check_training_state(meta, self.directory)
            try:
                arrays = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(
                            jax.tree.map(_abstract, expected)
                        )
                    ),
                )["state"]
            except Exception as e:  # noqa: BLE001
                failures.append((step, e))
                continue
            task.restore_training_state(arrays, meta)
            _set_counters(task.fit_callbacks, meta["callbacks"])
            self._epoch = meta["epoch"]
            self._saved = step
            break
        self._report(failures)

    def _report(self, failures):
        if not failures:
            return
        if self._saved is None:
            step, error = failures[0]
            raise ValueError(
                f"No checkpoint in {str(self.directory)!r} can be read "
                f"(step {step}: {type(error).__name__}: {str(error)[:300]}). "
                "Remove the directory to start anew."
            )
        for step, error in failures:
            print(
                f"Checkpoint of step {step} is damaged "
                f"({type(error).__name__}); going on from step {self._saved}.",
                flush=True,
            )
            self._manager.delete(step)


def _manager(directory, keep):
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
        ),
    )


def _complete_steps(directory):
    names = os.listdir(directory) if directory.exists() else []
    return sorted(int(n) for n in names if n.isdigit())


def _own(array):
    return np.array(array) if array.is_fully_addressable else array


def _abstract(array):
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=array.sharding
    )


def _counters(callbacks):
    """The counters of callbacks such as EarlyStopping, by place and class."""
    found = {}
    for i, callback in enumerate(callbacks):
        values = {
            k: float(getattr(callback, k))
            for k in COUNTERS
            if isinstance(getattr(callback, k, None), (int, float, np.number))
        }
        if values:
            found[f"{i}/{type(callback).__name__}"] = values
    return found


def _set_counters(callbacks, counters):
    for i, callback in enumerate(callbacks):
        values = counters.get(f"{i}/{type(callback).__name__}", {})
        for name, value in values.items():
            kind = type(getattr(callback, name, value) or value)
            setattr(callback, name, kind(value) if kind is int else value)
