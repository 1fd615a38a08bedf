"""The callbacks of a run, in the order in which they are called."""

import keras

from keras_posttrain import _console
from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.callbacks.divergence import Divergence
from keras_posttrain.callbacks.evaluate import Evaluate
from keras_posttrain.callbacks.garbage import Garbage
from keras_posttrain.callbacks.process_group import ProcessGroup
from keras_posttrain.callbacks.progress import Progress
from keras_posttrain.distribution import processes


def as_list(callbacks):
    """Returns the list of callbacks for what a user passed to `fit`."""
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return list(callbacks or [])


def ordered(callbacks, verbose):
    """Adds the run's own callbacks and sorts all.

    Evaluations come first: they add to the logs that the others read.
    Checkpoints come last: they save what the others count.
    """
    own = [Divergence(), Garbage()]
    if processes.count() > 1:
        own.append(ProcessGroup())
    if verbose and not any(isinstance(c, Progress) for c in callbacks):
        own.append(Progress(verbose))
    return sorted(
        own + list(callbacks),
        key=lambda c: isinstance(c, Checkpoint) - isinstance(c, Evaluate),
    )


def names(callbacks):
    """Returns the names of callbacks that all processes of a run share."""
    # Only the first process shows a progress bar.
    shared = [c for c in callbacks if not isinstance(c, Progress)]
    return [type(c).__name__ for c in shared]


def close(callbacks):
    """Closes callbacks: Keras ends none of them when training raises."""
    for callback in callbacks:
        if hasattr(callback, "close"):
            callback.close()


def moves_reference(callbacks):
    """Returns whether a callback updates the reference."""
    return any(hasattr(c, "moves_reference") for c in callbacks)


def read_logs(callbacks):
    """Returns whether a user's callback reads the logs of each batch."""
    base = keras.callbacks.Callback
    for callback in callbacks:
        for name in ("on_train_batch_end", "on_batch_end"):
            # LambdaCallback sets its methods on the object.
            if name in vars(callback):
                return True
            owner = next(c for c in type(callback).__mro__ if name in vars(c))
            own = vars(owner).get("reads_step_logs", False)
            if owner is not base and not own:
                return True
    return False


def show(report, verbose):
    """Prints a report once, in the first process."""
    if verbose and report is not None and processes.is_first():
        _console.say(report)
