import dataclasses
import inspect
import typing

import jax.numpy as jnp
import numpy as np

from keras_posttrain.losses import reductions


@dataclasses.dataclass(frozen=True)
class Loss:
    """Base class of all losses: settings over pure functions of arrays.

    A loss never sees a model, a tokenizer or a config. The trainer asks for
    `needs`, computes `normalizers` once for the full batch, adds the
    `total`s of the micro-batches and divides once, so that the result does
    not depend on how a batch is split. Calling a loss on a full batch does
    the same.

    Subclasses define `normalizers` and `total`, and override `needs`,
    `logps_mask`, `metric_names`, `batch_coupled` and `by_sequence` where the
    defaults do not apply.

    Call arguments:
        batch: dict of arrays with a leading `rows` axis. `completion_mask`
            of shape `(rows, length)` is always present. Padding rows, in
            which it and `sequence_mask` are 0, must not count.
        outputs: dict of arrays by the names in `needs`, such as
            `per_token_logps` of shape `(rows, length)`.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars.

    Example:

    ```python
    class LogpLoss(kpt.losses.Loss):
        def normalizers(self, batch):
            return {"loss": batch["completion_mask"].sum()}

        def total(self, batch, outputs):
            logps = batch["completion_mask"] * outputs["per_token_logps"]
            return {"loss": -logps.sum()}, {}

    LogpLoss()(pair_batch, pair_outputs)[0]  # 1.0
    ```
    """

    metric_names = ()

    @property
    def needs(self):
        return ("per_token_logps",)

    @property
    def batch_coupled(self):
        return False

    @property
    def by_sequence(self):
        """Whether the loss computes one value for each sequence, such as a
        ratio. It then needs all loss tokens of a trajectory in one segment.
        """
        return False

    def logps_mask(self, batch):
        """Selects the tokens to project on the vocabulary.

        Returns a bool array of shape `(rows, length)`.
        """
        return batch["completion_mask"] != 0

    def normalizers(self, batch):
        """Computes the divisor of each term of `total` from masks alone.

        Returns a dict of float32 scalars by the names of the terms.
        """
        raise NotImplementedError

    def total(self, batch, outputs):
        """Sums the loss and collects metrics over the given rows.

        Returns:
            `(terms, metrics)`: a dict of float32 scalars, sums that are not
            yet divided, and a dict of metrics in the form that
            `reductions.metric_value` reads, such as
            `("mean", numerator, denominator)`.
        """
        raise NotImplementedError

    def __call__(self, batch, outputs):
        terms, metrics = self.total(batch, outputs)
        normalizers = self.normalizers(batch)
        loss = sum(
            reductions.ratio(terms[name], normalizers[name]) for name in terms
        )
        values = {
            name: reductions.metric_value(metric)
            for name, metric in metrics.items()
        }
        return loss, values


class TokenLoss(Loss):
    """Base class of losses of each token's own log-probability.

    The loss is the mean of `token_loss` over tokens, weighted by
    `completion_mask`. The language-model head uses `token_loss` to form the
    gradient while a chunk of logits is in memory, so that the vocabulary is
    projected only once.

    Example:

    ```python
    class FocalLoss(kpt.losses.TokenLoss):
        def token_loss(self, logps):
            return -((1 - jnp.exp(logps)) ** 2) * logps

    FocalLoss()(pair_batch, pair_outputs)[0]  # 0.4917
    task.compile(loss=FocalLoss())
    ```
    """

    metric_names = ("mean_token_accuracy", "entropy")

    @property
    def needs(self):
        return ("per_token_logps", "correct", "entropies")

    def token_loss(self, logps):
        """Computes the loss of each token from its log-probability.

        The function is elementwise, for arrays of any shape.
        """
        raise NotImplementedError

    def normalizers(self, batch):
        return {"loss": batch["completion_mask"].astype("float32").sum()}

    def total(self, batch, outputs):
        mask = batch["completion_mask"]
        # The log-probabilities are masked before the loss as well: the
        # derivative at NaN is NaN, and 0 times NaN is not 0.
        logps = jnp.where(mask != 0, outputs["per_token_logps"], 0.0)
        losses = self.token_loss(logps)
        trained = (mask != 0).astype("float32")
        count = trained.sum()
        metrics = {
            name: ("mean", reductions.token_sum(outputs[key], trained), count)
            for name, key in (
                ("mean_token_accuracy", "correct"),
                ("entropy", "entropies"),
            )
            if key in outputs
        }
        return {"loss": reductions.token_sum(losses, mask)}, metrics


def settings_of(loss, function, num_arrays):
    """Returns the settings that a function takes behind its arrays, a dict."""
    names = list(inspect.signature(function).parameters)[num_arrays:]
    return {name: getattr(loss, name) for name in names}


def check_types(settings):
    """Raises a `ValueError` for settings of a dataclass that are no numbers.

    They are its fields of the types `float`, `int` and `bool`.
    """
    for field in dataclasses.fields(settings):
        kinds = typing.get_args(field.type) or (field.type,)
        value = getattr(settings, field.name)
        if value is None and type(None) in kinds:
            continue
        is_bool = isinstance(value, (bool, np.bool_))
        if float in kinds or int in kinds:
            valid = hasattr(value, "__float__") and not is_bool
            check(settings, field.name, valid, "a number")
        elif bool in kinds:
            check(settings, field.name, is_bool, "True or False")


def check(loss, name, valid, wanted):
    """Raises a `ValueError` that names a setting of a loss, if not `valid`."""
    if not valid:
        raise ValueError(
            f"`{name}` of {type(loss).__name__} must be {wanted}. Received: "
            f"{name}={getattr(loss, name)!r}"
        )
