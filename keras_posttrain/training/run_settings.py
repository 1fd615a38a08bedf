"""The settings of one call of `fit`."""

import dataclasses

from keras_posttrain.distribution import processes
from keras_posttrain.training import callbacks as callback_lib
from keras_posttrain.training import checks


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The arguments of `fit` that every run has, checked.

    `verbose` is 0 in every process but the first, `silent` in all or none.
    """

    epochs: int
    seed: int
    callbacks: list
    verbose: object
    skip_steps: frozenset
    max_staleness: int = 0
    micro_batch_size: int | None = None
    compile_ahead: object = "auto"
    silent: bool = False

    @classmethod
    def of(
        cls,
        policy,
        packing,
        *,
        trainable,
        callbacks,
        verbose,
        skip_steps,
        **given,
    ):
        """Checks and completes what a user passed to `fit`.

        `trainable` is the task's attribute.
        """
        checks.trainable(trainable)
        checks.callbacks(callbacks)
        callbacks = callback_lib.as_list(callbacks)
        processes.need_distribution()
        given["epochs"] = checks.positive_int("epochs", given["epochs"])
        given["seed"] = checks.seed(given["seed"])
        checks.verbosity(verbose)
        checks.compile_ahead(given.get("compile_ahead", "auto"))
        checks.may_train(policy, packing, callbacks)
        return cls(
            callbacks=callbacks,
            verbose=verbose if processes.is_first() else 0,
            silent=verbose == 0,
            skip_steps=checks.steps_to_skip(skip_steps),
            **given,
        )

    def show(self, report):
        """Prints a report, or nothing if `verbose` is 0."""
        callback_lib.show(report, self.verbose)

    def ordered_callbacks(self):
        """Returns all callbacks of the run in the order of their calls."""
        return callback_lib.ordered(self.callbacks, self.verbose)

    def agreement(self, fingerprint, data, step, callbacks):
        """Returns settings that all processes of the run must share."""
        return {
            **fingerprint,
            **{f"data {name}": value for name, value in data.items()},
            "seed": self.seed,
            "epochs": self.epochs,
            "skip_steps": sorted(self.skip_steps),
            "step": step,
            "callbacks": callback_lib.names(callbacks),
            "micro_batch_size": self.micro_batch_size,
        }
