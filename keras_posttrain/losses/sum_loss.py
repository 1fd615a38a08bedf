import dataclasses
import math

from keras_posttrain.losses.loss import Loss


@dataclasses.dataclass(frozen=True)
class SumLoss(Loss):
    """A weighted sum of losses over the same batch.

    Each loss is divided by its own normalizers. A metric that several losses
    report is that of the first of them.

    Mixed preference optimisation (MPO) is

    ```python
    kpt.losses.SumLoss(
        [
            kpt.losses.DPOLoss(beta=0.1),
            kpt.losses.BCOPairLoss(beta=0.1),
            kpt.losses.ChosenSFTLoss(),
        ],
        weights=[0.8, 0.2, 1.0],
    )
    ```

    Args:
        losses: list of losses.
        weights: list of as many floats, or `None` for ones.

    Reference:
        - [Wang et al., 2024](https://arxiv.org/abs/2411.10442), MPO and its
          weights.
    """

    losses: tuple
    weights: tuple | None = None

    def __post_init__(self):
        is_list = isinstance(self.losses, (list, tuple))
        losses = tuple(self.losses) if is_list else ()
        if not losses or not all(isinstance(x, Loss) for x in losses):
            raise ValueError(
                "`losses` of SumLoss must be a list of one or more losses, "
                "such as [DPOLoss(), ChosenSFTLoss()]. Received: "
                f"losses={self.losses!r}"
            )
        weights = (
            (1.0,) * len(losses) if self.weights is None else self.weights
        )
        weights = tuple(weights)
        numbers = all(hasattr(x, "__float__") for x in weights)
        if not (
            numbers
            and len(weights) == len(losses)
            and all(map(math.isfinite, weights))
        ):
            raise ValueError(
                "`weights` of SumLoss must be a list of finite numbers, one "
                f"for each of the {len(losses)} losses. Received: "
                f"weights={self.weights!r}"
            )
        # Lists would make the settings unhashable.
        object.__setattr__(self, "losses", losses)
        object.__setattr__(self, "weights", weights)

    @property
    def metric_names(self):
        names = (name for loss in self.losses for name in loss.metric_names)
        return tuple(dict.fromkeys(names))

    @property
    def needs(self):
        names = (name for loss in self.losses for name in loss.needs)
        return tuple(dict.fromkeys(names))

    @property
    def batch_coupled(self):
        return any(loss.batch_coupled for loss in self.losses)

    @property
    def by_sequence(self):
        return any(loss.by_sequence for loss in self.losses)

    def logps_mask(self, batch):
        mask = self.losses[0].logps_mask(batch)
        for loss in self.losses[1:]:
            mask = mask | loss.logps_mask(batch)
        return mask

    def normalizers(self, batch):
        return {
            f"{place}/{name}": value
            for place, loss in enumerate(self.losses)
            for name, value in loss.normalizers(batch).items()
        }

    def total(self, batch, outputs):
        terms, metrics = {}, {}
        for place, (loss, weight) in enumerate(zip(self.losses, self.weights)):
            own_terms, own_metrics = loss.total(batch, outputs)
            for name, value in own_terms.items():
                terms[f"{place}/{name}"] = weight * value
            metrics = own_metrics | metrics
        return terms, metrics
