import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from keras_posttrain.losses.loss import Loss


@dataclasses.dataclass(frozen=True, repr=False)
class FunctionLoss(Loss):
    """A loss that is any function of a batch and the policy's outputs.

    The function is part of the compiled step: it is differentiated with the
    one forward pass that computes the outputs.

    Args:
        function: function `(batch, outputs) -> (loss, metrics)` of JAX
            arrays. The arguments are those of `Loss`; `loss` is a float32
            scalar and `metrics` a dict of scalars. Rows in which
            `completion_mask` is 0 are padding and must not count.
        needs: names of the `outputs`: `"per_token_logps"`, `"entropies"`,
            `"collision_entropies"` or `"correct"`, each of shape
            `(rows, length)`.
        is_sum: bool. `False` for a loss of the batch as a whole, such as a
            mean: with `micro_batch_size` it is exact, by a second forward
            pass. `True` for a sum over rows, which is never divided: its
            loss and metrics are added up over micro-batches, and over the
            calls of `kpt.Loop.forward_backward`.
        metric_names: names of the metrics that `fit` keeps a mean of.

    Example:

    ```python
    def loss(batch, outputs):
        mask, logps = batch["completion_mask"], outputs["per_token_logps"]
        return -(mask * logps).sum() / mask.sum(), {"logps": logps.max()}

    kpt.losses.FunctionLoss(loss)
    ```
    """

    function: Callable
    needs: tuple = ("per_token_logps",)
    is_sum: bool = False
    metric_names: tuple = ()

    def __post_init__(self):
        if not callable(self.function):
            raise ValueError(
                "`function` of FunctionLoss must be a function of a batch "
                "and outputs that returns `(loss, metrics)`. Received: "
                f"function={self.function!r}"
            )
        for name in ("needs", "metric_names"):
            names = getattr(self, name)
            if isinstance(names, str) or not all(
                isinstance(x, str) for x in names
            ):
                raise ValueError(
                    f"`{name}` of FunctionLoss must be a tuple of names. "
                    f"Received: {name}={names!r}"
                )
            object.__setattr__(self, name, tuple(names))

    def __repr__(self):
        # Equal in every process, as a run that is resumed compares it.
        name = getattr(self.function, "__qualname__", "function")
        return f"FunctionLoss({name}, needs={self.needs})"

    @property
    def batch_coupled(self):
        return not self.is_sum

    def normalizers(self, batch):
        return {"loss": jnp.ones((), "float32")}

    def total(self, batch, outputs):
        found = self.function(batch, outputs)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise ValueError(
                "The function of a FunctionLoss must return a tuple "
                f"`(loss, metrics)`. Received: {type(found).__name__}"
            )
        loss, metrics = found
        loss = jnp.asarray(loss, "float32")
        if loss.shape or not isinstance(metrics, dict):
            raise ValueError(
                "The function of a FunctionLoss must return a scalar and a "
                f"dict. Received: a loss of shape {loss.shape}, metrics of "
                f"type {type(metrics).__name__}"
            )
        sums = {k: ("sum", jnp.asarray(v)) for k, v in metrics.items()}
        return {"loss": loss}, sums
