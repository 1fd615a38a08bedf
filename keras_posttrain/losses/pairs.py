"""Preference pairs of a batch: their positions and reductions."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The positions of the pairs of a batch, in the order of `PairLoss`.

    A slot is used where `sequence_mask` is not 0.

    Attributes:
        index: int array of shape `(pairs, 2)`: the slots of the chosen and
            of the rejected in the flattened `(rows, num_sequences)`; out of
            bounds after the last pair.
        mask: float array of shape `(pairs,)`, 1 where there is a pair.
        slots: tuple, `(rows, num_sequences)`.
    """

    index: jax.Array
    mask: jax.Array
    slots: tuple

    @classmethod
    def of(cls, batch):
        """Finds the pairs of a batch by its `sequence_mask`."""
        used = jnp.asarray(batch["sequence_mask"]) != 0
        flat = used.reshape(-1)
        size = flat.size
        if not isinstance(flat, jax.core.Tracer) and int(flat.sum()) % 2:
            raise ValueError(
                "A batch of preference pairs must hold an even number of "
                "sequences, each chosen one followed by its rejected one. "
                f"Received: {int(flat.sum())} sequences in `sequence_mask` "
                f"of shape {used.shape}. A row or a micro-batch must not "
                "split a pair."
            )
        place = jnp.where(flat, jnp.cumsum(flat) - 1, size)
        index = jnp.full(size, size, "int32")
        index = index.at[place].set(
            jnp.arange(size, dtype="int32"), mode="drop"
        )
        index = index[: size // 2 * 2].reshape(-1, 2)
        mask = (index[:, 1] < size).astype("float32")
        return cls(index, mask, used.shape)

    def take(self, values):
        """Gathers `(chosen, rejected)`, each `(pairs,)`, 0 without a pair.

        `values` are of shape `(rows, num_sequences)`.
        """
        found = (
            values.reshape(-1).at[self.index].get(mode="fill", fill_value=0)
        )
        found = jnp.where(self.mask[:, None] != 0, found, 0)
        return found[:, 0], found[:, 1]

    def put(self, chosen, rejected):
        """Scatters two `(pairs,)` to `(rows, num_sequences)`, 0 elsewhere."""
        flat = jnp.zeros(self.slots[0] * self.slots[1], chosen.dtype)
        values = jnp.stack([chosen, rejected], axis=1)
        return flat.at[self.index].set(values, mode="drop").reshape(self.slots)

    def sum(self, values):
        """Sums `(pairs,)` values over the existing pairs."""
        return jnp.sum(jnp.where(self.mask != 0, values, 0.0))

    def count(self):
        return self.mask.sum()

    def metric(self, values):
        """Returns the metric of the mean of `(pairs,)` values."""
        return ("mean", self.sum(values), self.count())


class PairTokens:
    """The tokens of a batch of pairs that a loss reads, in float32.

    Values outside the completions never reach a gradient.
    """

    def __init__(self, batch):
        self.pairs = Pairs.of(batch)
        self.mask = jnp.asarray(batch["completion_mask"]).astype("float32")
        self.segment_ids = jnp.asarray(batch["segment_ids"])
        self.num_sequences = self.pairs.slots[1]
        self.lengths = self.sums(jnp.ones_like(self.mask))

    def read(self, values):
        values = jnp.asarray(values).astype("float32")
        return jnp.where(self.mask != 0, values, 0.0)

    def sums(self, values, weights=None):
        """Computes `(chosen, rejected)`, sums over completions' tokens.

        `weights` are those of the tokens, in addition to the mask.
        """
        values = values * self.mask
        if weights is not None:
            values = values * weights
        per_sequence = reductions.segment_sum(
            values, self.segment_ids, self.num_sequences
        )
        return self.pairs.take(per_sequence)

    def means(self, values):
        """Computes `(chosen, rejected)`, means over completions' tokens."""
        return tuple(map(reductions.ratio, self.sums(values), self.lengths))

    def beyond_shared(self, alpha):
        """Computes the token weights of LD-DPO, `(rows, length)`.

        The weight is `alpha` for tokens beyond the length of the shorter
        completion of a pair, and 1 for others.
        """
        trained = (self.mask != 0).astype("float32")
        counts = self.pairs.take(
            reductions.segment_sum(
                trained, self.segment_ids, self.num_sequences
            )
        )
        shared = jnp.minimum(*counts)
        shared = reductions.spread(
            self.pairs.put(shared, shared), self.segment_ids
        )
        place = reductions.segment_places(
            trained, self.segment_ids, self.num_sequences
        )
        return jnp.where(place <= shared, 1.0, alpha)


def token_metrics(outputs, entropy_mask, accuracy_mask):
    """Returns `entropy` and `mean_token_accuracy` if outputs have them."""
    metrics = {}
    for name, key, mask in (
        ("entropy", "entropies", entropy_mask),
        ("mean_token_accuracy", "correct", accuracy_mask),
    ):
        if key in outputs:
            trained = (mask != 0).astype("float32")
            total = reductions.token_sum(jnp.asarray(outputs[key]), trained)
            metrics[name] = ("mean", total, trained.sum())
    return metrics


def reference_logps(batch, outputs):
    """Finds `ref_per_token_logps` in outputs or batch, without gradient."""
    found = outputs.get(
        "ref_per_token_logps", batch.get("ref_per_token_logps")
    )
    if found is None:
        raise ValueError(
            "There are no `ref_per_token_logps`, the log-probabilities under "
            "the reference policy, of shape (rows, length). Give them in the "
            "batch or the outputs, or use a loss without a reference, such "
            f"as `SimPOLoss`. Received: batch with {sorted(batch)}, outputs "
            f"with {sorted(outputs)}"
        )
    return jax.lax.stop_gradient(jnp.asarray(found))
