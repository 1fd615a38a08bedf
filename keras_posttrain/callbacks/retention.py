"""Which checkpoints are kept."""

import contextlib
import logging
import math
import warnings

from keras_posttrain.callbacks import checks
from keras_posttrain.callbacks.intervals import Interval


class Retention:
    """The newest checkpoints, some of all times, and the best one.

    The arguments are those of `Checkpoint`.
    """

    def __init__(self, keep, keep_every, monitor, mode):
        self.keep = checks.positive("keep", keep)
        self.interval = None
        if keep_every is not None:
            self.interval = Interval(keep_every, name="keep_every")
        if monitor is not None and not isinstance(monitor, str):
            raise ValueError(
                '`monitor` must be the name of a metric, such as "val_loss". '
                f"Received: monitor={monitor!r}"
            )
        if mode not in (("min", "max") if monitor else (None,)):
            raise ValueError(
                "`mode` must be 'min' or 'max' with `monitor`, and is not for "
                f"use without. Received: monitor={monitor!r}, mode={mode!r}"
            )
        self.monitor, self.mode = monitor, mode
        self._has_warned = False

    def policy(self):
        """Returns Orbax's policy."""
        # Imported late, as only runs with checkpoints need it.
        from orbax.checkpoint import checkpoint_managers as ocp

        policies = [ocp.LatestN(self.keep)]
        if self.interval is not None and self.interval.steps is not None:
            steps = self.interval.steps
            policies.append(ocp.EveryNSteps(steps, exact_interval=False))
        elif self.interval is not None:
            policies.append(ocp.EveryNSeconds(self.interval.seconds))
        if self.monitor is not None:
            best = ocp.BestN(
                get_metric_fn=self.value,
                reverse=self.mode == "min",
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        return ocp.AnyPreservationPolicy(policies)

    def value(self, metrics):
        """Returns what checkpoints are compared by."""
        return metrics[self.monitor]

    def metrics(self, logs, epoch_ended):
        """Returns what is stored with a checkpoint, to compare it by.

        Args:
            logs: dict of scalars by name, those at its step.
            epoch_ended: bool, whether they hold all there are.
        """
        if self.monitor is None:
            return None
        if self.monitor not in logs:
            if epoch_ended and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"No checkpoint is kept for monitor={self.monitor!r}: it "
                    f"is not logged. Logged are {sorted(logs)}.",
                    stacklevel=2,
                )
            return None
        value = float(logs[self.monitor])
        return {self.monitor: value} if math.isfinite(value) else None

    @contextlib.contextmanager
    def saving(self):
        """A scope in which Orbax saves.

        It would log a warning for each checkpoint without a metric.
        """

        def is_shown(record):
            return "tracked_metric" not in record.getMessage()

        logger = logging.getLogger("absl")
        logger.addFilter(is_shown)
        try:
            yield
        finally:
            logger.removeFilter(is_shown)

    def best_step(self, manager):
        """Returns the name of the best step's folder, or `None`."""
        step = manager.best_step() if self.monitor is not None else None
        return None if step is None else str(step)
