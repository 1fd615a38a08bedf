import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.loss import Loss, check, check_types
from keras_posttrain.losses.pairs import Pairs


def bradley_terry_loss(
    chosen_scores, rejected_scores, margins=None, center=0.0
):
    """Computes the Bradley-Terry loss of each pair of scores.

    `-log sigmoid(c - r - margin) + center * (c + r)**2` of the scores `c` and
    `r` of the chosen and the rejected completion.

    Args:
        chosen_scores: float array of any shape, such as `(pairs,)`.
        rejected_scores: float array of the same shape.
        margins: float array of the same shape, the wanted differences, or
            `None` for 0.
        center: float, the weight of the squared sum of the scores.

    Returns:
        A float array of the same shape.

    References:
        - [Touvron et al., 2023](https://arxiv.org/abs/2307.09288), margins.
        - [Eisenstein et al., 2023](https://arxiv.org/abs/2312.09244),
          centering.

    Example:

    ```python
    kpt.losses.bradley_terry_loss(2.0, 1.0, margins=1.0)  # log(2)
    ```
    """
    ahead = chosen_scores - rejected_scores
    if margins is not None:
        ahead = ahead - margins
    losses = -jax.nn.log_sigmoid(ahead)
    if center:
        losses = losses + center * (chosen_scores + rejected_scores) ** 2
    return losses


@dataclasses.dataclass(frozen=True)
class BradleyTerryLoss(Loss):
    """The loss of a reward model on preference pairs.

    `bradley_terry_loss` of each pair, averaged over pairs.

    Args:
        center: float, the weight of `(chosen + rejected)**2`, which moves
            the mean of the scores to 0. The paper uses 0.01.

    Call arguments:
        batch: dict of arrays of shape `(rows, num_sequences)`:
            `sequence_mask`; and optionally `margins`, at the chosen
            completions, the wanted differences of scores. Chosen and
            rejected are neighbours, as in `PairLoss`.
        outputs: dict with `scores` of shape `(rows, num_sequences)`.

    Example:

    ```python
    loss = kpt.losses.BradleyTerryLoss()
    batch = {"sequence_mask": np.ones((2, 1))}
    value, metrics = loss(batch, {"scores": np.array([[0.5], [0.5]])})
    # value is log(2)
    ```
    """

    center: float = 0.0

    metric_names = (
        "accuracy",
        "margin",
        "min_reward",
        "mean_reward",
        "max_reward",
    )

    def __post_init__(self):
        check_types(self)
        check(self, "center", self.center >= 0, "0 or more")

    @property
    def needs(self):
        return ("scores",)

    def logps_mask(self, batch):
        """Selects no tokens: the loss reads no log-probabilities."""
        return jnp.zeros(batch["token_ids"].shape, bool)

    def normalizers(self, batch):
        return {"pairs": Pairs.of(batch).count()}

    def total(self, batch, outputs):
        pairs = Pairs.of(batch)
        scores = jnp.asarray(outputs["scores"]).astype("float32")
        used = jnp.asarray(batch["sequence_mask"]) != 0
        chosen, rejected = pairs.take(jnp.where(used, scores, 0.0))
        ahead = chosen - rejected
        margins = None
        if "margins" in batch:
            margins = jnp.asarray(batch["margins"]).astype("float32")
            margins = pairs.take(margins)[0]
        losses = bradley_terry_loss(chosen, rejected, margins, self.center)
        metrics = {
            "accuracy": pairs.metric((ahead > 0).astype("float32")),
            "margin": pairs.metric(ahead),
            "mean_reward": pairs.metric((chosen + rejected) / 2),
            "min_reward": ("min", jnp.min(jnp.where(used, scores, jnp.inf))),
            "max_reward": ("max", jnp.max(jnp.where(used, scores, -jnp.inf))),
        }
        return {"pairs": pairs.sum(losses)}, metrics
