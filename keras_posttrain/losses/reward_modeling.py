import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.loss import Loss
from keras_posttrain.losses.pairs import Pairs
from keras_posttrain.losses.policy_loss import check


@dataclasses.dataclass(frozen=True)
class BradleyTerryLoss(Loss):
    """The loss of a reward model: the chosen is to score above the rejected.

    `-log sigmoid(chosen - rejected - margin)`, the mean over pairs.

    Args:
        center: float, the weight of `(chosen + rejected)**2`, which draws
            the scores to a mean of 0. 0 leaves them free; the paper takes
            0.01.

    Call arguments:
        batch: dict of arrays of shape `(rows, num_sequences)`:
            `sequence_mask`; and, at the chosen completion, `margins`, by
            how much it is to be ahead, where rows have one. Chosen and
            rejected are neighbours, as in `PairLoss`.
        outputs: dict with `scores` of shape `(rows, num_sequences)`.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars.

    References:
        - [Touvron et al., 2023](https://arxiv.org/abs/2307.09288), margins.
        - [Eisenstein et al., 2023](https://arxiv.org/abs/2312.09244),
          centering.

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
        check(self, "center", self.center >= 0, "0 or more")

    @property
    def needs(self):
        return ("scores",)

    def logps_mask(self, batch):
        """No token is projected on the vocabulary."""
        return jnp.zeros(batch["token_ids"].shape, bool)

    def normalizers(self, batch):
        return {"pairs": Pairs.of(batch).count()}

    def total(self, batch, outputs):
        pairs = Pairs.of(batch)
        scores = jnp.asarray(outputs["scores"]).astype("float32")
        used = jnp.asarray(batch["sequence_mask"]) != 0
        chosen, rejected = pairs.take(jnp.where(used, scores, 0.0))
        ahead = chosen - rejected
        losses = ahead
        if "margins" in batch:
            margins = jnp.asarray(batch["margins"]).astype("float32")
            losses = ahead - pairs.take(margins)[0]
        losses = -jax.nn.log_sigmoid(losses)
        if self.center:
            losses = losses + self.center * (chosen + rejected) ** 2
        metrics = {
            "accuracy": pairs.metric((ahead > 0).astype("float32")),
            "margin": pairs.metric(ahead),
            "mean_reward": pairs.metric((chosen + rejected) / 2),
            "min_reward": ("min", jnp.min(jnp.where(used, scores, jnp.inf))),
            "max_reward": ("max", jnp.max(jnp.where(used, scores, -jnp.inf))),
        }
        return {"pairs": pairs.sum(losses)}, metrics
