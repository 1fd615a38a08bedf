"""Rotary embeddings of decoder layers, on a CPU.

XLA computes the sines and cosines of positions where they are used, for each
element of queries and keys. Those of a token are the same for all its heads:
here a table has them once.
"""

import contextlib

import jax.numpy as jnp
import keras_hub
import numpy as np

from keras_posttrain.models import sharding
from keras_posttrain.models.linear import replaced_calls, sublayers


@contextlib.contextmanager
def with_tables(layers):
    """Lets KerasHub's rotary embeddings in `layers` read tables inside.

    Elsewhere than on a CPU nothing changes.

    Args:
        layers: iterable of layers.
    """
    kind, found = keras_hub.layers.RotaryEmbedding, {}
    if sharding.platform() == "cpu":
        parts = [part for layer in layers for part in sublayers(layer)]
        found = {id(part): part for part in parts if isinstance(part, kind)}
    calls = [(x, _by_table(x.call)) for x in found.values()]
    with replaced_calls(calls):
        yield


def _by_table(call):
    def by_table(inputs, *args, **kwargs):
        if inputs.ndim != 4:
            return call(inputs, *args, **kwargs)
        *tokens, _, size = inputs.shape
        # The first half of a result is the first half of inputs times cosines
        # less the second one times sines; the second half is the first one
        # times sines plus the second one times cosines.
        basis = np.arange(size) < size // 2
        basis = jnp.broadcast_to(basis, (*tokens, 1, size))
        table = call(basis.astype(inputs.dtype), *args, **kwargs)
        # XLA does not move a product to where its result is used.
        cosines, sines = np.eye(size).reshape(2, -1, size)
        twice = np.concatenate([cosines, cosines, sines, sines]).T
        table = table.reshape(-1, size) @ twice.astype(table.dtype)
        table = table.reshape(*tokens, 1, 2, size)
        first, second = jnp.split(inputs, 2, axis=-1)
        turned = jnp.stack([-second, first], axis=-2).reshape(inputs.shape)
        return inputs * table[..., 0, :] + turned * table[..., 1, :]

    return by_table
