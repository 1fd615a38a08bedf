import dataclasses

import jax.numpy as jnp

from keras_posttrain.losses import reductions


@dataclasses.dataclass(frozen=True)
class Loss:
    """What every loss is: its settings, and pure functions of arrays.

    A loss never sees a model, a tokenizer or a config. The trainer asks for
    `needs`, computes `normalizers` once for the whole batch, adds the
    `total`s of the micro-batches and divides once, so that the result does
    not depend on how a batch is cut. Called on a whole batch, a loss does
    the same by itself.

    Subclasses define `total`, and where they differ from the defaults
    `needs`, `normalizers`, `logps_mask`, `metric_names`, `batch_coupled`.

    Call arguments:
        batch: dict of arrays with a leading `rows` axis. `completion_mask`
            of shape `(rows, length)` is always there. Rows of padding, in
            which it and `sequence_mask` are 0, must not count.
        outputs: dict of arrays by the names in `needs`, such as
            `per_token_logps` of shape `(rows, length)`.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars.
    """

    metric_names = ()

    @property
    def needs(self):
        return ("per_token_logps",)

    @property
    def batch_coupled(self):
        return False

    def logps_mask(self, batch):
        """Which tokens are projected on the vocabulary, `(rows, length)`."""
        return batch["completion_mask"] != 0

    def normalizers(self, batch):
        """What each term of `total` is divided by, from masks alone."""
        raise NotImplementedError

    def total(self, batch, outputs):
        """`({term: sum over these rows}, {metric: (reduction, …)})`."""
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
    """A loss that is a weighted mean over tokens of a function of each
    token's own log-probability.

    The head uses `token_loss` to form the gradient while a chunk of logits
    is at hand, so that the vocabulary is projected only once.
    """

    metric_names = ("mean_token_accuracy", "entropy")

    @property
    def needs(self):
        return ("per_token_logps", "correct", "entropies")

    def token_loss(self, logps):
        """The loss of tokens with log-probabilities `logps`, elementwise."""
        raise NotImplementedError

    def normalizers(self, batch):
        return {"loss": batch["completion_mask"].astype("float32").sum()}

    def total(self, batch, outputs):
        mask = batch["completion_mask"]
        # Masked before the loss as well: its derivative at what is no number
        # would be none either, and 0 times that does not vanish.
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
