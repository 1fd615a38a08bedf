"""Normalization layers of decoder layers, on a CPU.

Decoder layers take tokens of shape `(tokens, 1, hidden)`. XLA's library for a
CPU takes 20 to 60 times as long for a sum of products over an array with an
axis of size 1: for 4,096 tokens of 256 features 13 ms and not 0.4, in the
gradient of each norm's scale (jax 0.10.2, two cores).
"""

import contextlib

from keras_posttrain.models import sharding
from keras_posttrain.models.linear import replaced_calls, sublayers


@contextlib.contextmanager
def without_axes_of_one(layers):
    """Lets KerasHub's norms in `layers` compute on `(tokens, hidden)` inside.

    Those of queries and keys compute on `(tokens, heads, head_dim)`, and on
    `(tokens, head_dim)` where there is one head. Elsewhere than on a CPU
    nothing changes.

    Args:
        layers: iterable of layers; they may be norms themselves.
    """
    norms = {}
    if sharding.platform() == "cpu":
        parts = [part for layer in layers for part in sublayers(layer)]
        norms = {id(part): part for part in parts if _is_norm(part)}
    calls = [(x, _on_fewer_axes(x.call)) for x in norms.values()]
    with replaced_calls(calls):
        yield


def _is_norm(layer):
    """Returns whether a layer is a norm of KerasHub with its own `call`."""
    kind = type(layer)
    is_norm = "norm" in kind.__name__.lower() and "call" not in vars(layer)
    return is_norm and kind.__module__.startswith("keras_hub.")


def _on_fewer_axes(call):
    def on_fewer_axes(x, *args, **kwargs):
        if args or kwargs:
            return call(x, *args, **kwargs)
        sizes = [size for size in x.shape[:-1] if size != 1] or [1]
        return call(x.reshape(*sizes, x.shape[-1])).reshape(x.shape)

    return on_fewer_axes
