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

    def sum(self, function, batch):
        """Adds up `function(rows) -> (sums, metrics)` over micro-batches.

        Each slice of a mesh adds up its own rows of all micro-batches. Only
        then are sums added up over slices.
        """
        count = self.count(batch)
        if count == 1:
            return function(batch)
        kinds = {}

        def body(total, rows):
            sums, metrics = function(rows)
            kinds.update({name: metric[0] for name, metric in metrics.items()})
            values = {name: metric[1:] for name, metric in metrics.items()}
            return jax.tree.map(jnp.add, total, sums), values

        def every(batch):
            rows = split_rows(batch, count)
            first = jax.tree.map(lambda x: x[0], rows)
            shapes = jax.eval_shape(lambda x: function(x)[0], first)
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, "float32"), shapes
            )
            return jax.lax.scan(body, zeros, rows)

        whole = count * self.rows_together(batch)
        total, values = sharding.over_slices(every, batch, whole)
        metrics = reductions.merge_metrics(
            {name: (kind, *values[name]) for name, kind in kinds.items()}
        )
        return total, metrics


def split_rows(batch, count):
    """Cuts every array of a batch into `count` micro-batches of rows."""
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch
    )
