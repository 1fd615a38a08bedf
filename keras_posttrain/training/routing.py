"""The part of a mixture's routers in a training step: losses and metrics."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.router import RouterLoss, RoutingSums
from keras_posttrain.models.policy import token_counts


@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
    """Adds the routers' losses and metrics to a step.

    Args:
        policy: `Policy` with experts, or `None` to add nothing.
        loss: `kpt.losses.RouterLoss`.
    """

    policy: object = None
    loss: RouterLoss = RouterLoss(balance=0.0)

    def of_batch(self, step, state, batch, key):
        """Returns the `BatchRouting` of a batch.

        What experts get of the full batch has to be known before gradients
        of its parts can be computed. Where there are several micro-batches
        it takes a forward pass. The arguments are those of
        `batch_coupled.loss_and_gradients`.
        """
        if self.policy is None:
            return BatchRouting()
        tokens, counts = jnp.sum(token_counts(batch)), None
        if self.loss.balance and step.micro_batches.count(batch) > 1:

            def of_rows(rows):
                with (
                    step.weights.scope(state["trainable"], state["frozen"]),
                    self.policy.recorded_routing() as layers,
                ):
                    self.policy.hidden_states(rows, key)
                return stacked(layers).counts[None]

            counts = step.micro_batches.map(of_rows, batch).sum(axis=0)
        return BatchRouting(self.policy, self.loss, tokens, counts)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchRouting:
    """The routers' part in the loss of a batch.

    Args:
        policy, loss: as in `Routing`.
        tokens: float32 scalar, the number of tokens of the batch.
        counts: float32 array of shape `(layers, experts)`, the tokens of the
            batch that chose an expert; `None` where all rows are computed at
            once.
    """

    policy: object = None
    loss: RouterLoss | None = None
    tokens: jax.Array | None = None
    counts: jax.Array | None = None

    @contextlib.contextmanager
    def recorded(self):
        """Records the routing of forward passes inside, for `add`."""
        if self.policy is None:
            yield []
            return
        with self.policy.recorded_routing() as layers:
            yield layers

    def add(self, loss, metrics, layers):
        """Returns loss and metrics with the part of what was recorded.

        `layers` is the list of `recorded`, of a forward pass of some rows.
        """
        if not layers:
            return loss, metrics
        sums = stacked(layers)
        counts = sums.counts if self.counts is None else self.counts
        more, own = self.loss.total(sums, counts, self.tokens)
        return loss + more, {**metrics, **own}


def stacked(layers):
    """Returns the `RoutingSums` of a list of those of single layers."""
    sums = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return RoutingSums(*sums[:-1], tokens=layers[0].tokens)
