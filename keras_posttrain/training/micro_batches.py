"""Micro-batches: the rows that pass through the model at once."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.models import sharding
from keras_posttrain.training import padding


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Cuts batches into micro-batches of `size` examples; `None` is all.

    `rows_together` computes from a batch how many neighbouring rows are one
    example, which is never split.
    """

    size: int | None = None
    rows_together: object = lambda batch: 1

    def count(self, batch):
        """Counts the micro-batches of a batch."""
        if self.size is None:
            return 1
        rows = padding.micro_rows(self.size, self.rows_together(batch))
        return max(batch["token_ids"].shape[0] // rows, 1)

    def map(self, function, batch):
        """Concatenates `function(rows)`, a pytree of arrays, over rows."""
        count = self.count(batch)
        if count == 1:
            return function(batch)
        found = jax.lax.map(function, split_rows(batch, count))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    def sum(self, function, batch, separable=True):
        """Adds up `function(rows) -> (sums, metrics)` over micro-batches.

        Each slice of a mesh adds up its own rows of all micro-batches, and
        then sums are added up over slices. A single micro-batch is divided so
        only if `separable`: if its value is that of its parts.
        """
        count, kinds = self.count(batch), {}

        def one(rows):
            sums, metrics = function(rows)
            kinds.update({name: metric[0] for name, metric in metrics.items()})
            values = {name: metric[1:] for name, metric in metrics.items()}
            return sums, values

        def every(batch):
            if count == 1:
                sums, values = one(batch)
                return sums, jax.tree.map(lambda x: x[None], values)
            rows = split_rows(batch, count)
            first = jax.tree.map(lambda x: x[0], rows)
            shapes = jax.eval_shape(lambda x: function(x)[0], first)
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, "float32"), shapes
            )

            def body(total, rows):
                sums, values = one(rows)
                return jax.tree.map(jnp.add, total, sums), values

            return jax.lax.scan(body, zeros, rows)

        whole = count * self.rows_together(batch)
        if sharding.slices_of(batch, whole) > 1 and (count > 1 or separable):
            total, values = sharding.over_slices(every, batch)
        elif count == 1:
            return function(batch)
        else:
            total, values = every(batch)
        metrics = reductions.merge_metrics(
            {name: (kind, *values[name]) for name, kind in kinds.items()}
        )
        return total, metrics


def split_rows(batch, count):
    """Cuts every array of a batch into `count` micro-batches of rows."""
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch
    )
