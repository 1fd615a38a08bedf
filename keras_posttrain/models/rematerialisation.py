"""What a decoder layer keeps for the backward pass, and what it recomputes.

A choice is a set of names. Results of a layer get a name where they are
computed, and `jax.checkpoint` keeps those whose names are in the set.
"""

import contextlib

import jax
from jax.ad_checkpoint import checkpoint_name

from keras_posttrain.models import gpu_attention, sharding
from keras_posttrain.models.linear import (
    is_linear,
    replaced_calls,
    sublayers,
)

# The outputs of attention and, where a kernel has them, its statistics; those
# of the delta rule.
ATTENDED = "kpt_attended"
# Queries, keys and values, before they are normalized and rotated.
PROJECTED = "kpt_projected"
# The outputs of all other linear layers, of routers and of experts.
PRODUCT = "kpt_product"
# What each choice keeps next to the layers' inputs, the least first. "none"
# keeps everything.
KEPT = {
    "full": (),
    "outputs": (ATTENDED,),
    "selective": (ATTENDED, PROJECTED),
    "attention": (ATTENDED, PROJECTED, PRODUCT),
}
# From the least to the most memory.
CHOICES = (*KEPT, "none")


def saveable(choice):
    """Returns the policy of `jax.checkpoint` for a choice.

    Sums over devices are kept in each, so that recomputing a layer does not
    repeat their communication; they take as much memory as the layer's input.
    Gathered weights are kept in none: those of all layers would be the
    complete model on every device.
    """
    policies = jax.checkpoint_policies
    if choice == "none":
        return policies.save_anything_except_these_names(sharding.GATHERED)
    named = policies.save_only_these_names(sharding.SUMMED, *KEPT[choice])
    if ATTENDED not in KEPT[choice]:
        return named

    def is_kept(primitive, *values, **parameters):
        return named(primitive, *values, **parameters) or (
            gpu_attention.computes(primitive, parameters)
        )

    return is_kept


def linear_layers(layer):
    """Yields pairs of a linear layer inside `layer` and its outputs' name."""
    for part in sublayers(layer):
        if is_linear(part):
            name = part.name.removesuffix("_dense")
            projects = name in ("query", "key", "value")
            projects |= name.startswith("in_proj_")
            yield part, PROJECTED if projects else PRODUCT


@contextlib.contextmanager
def named_outputs(layer, choice):
    """Gives the outputs of linear layers in `layer` their names inside."""
    summed = sharding.layers_with_summed_outputs(layer)
    pairs = [(part, sharding.SUMMED) for part in summed]
    if KEPT.get(choice):
        pairs += linear_layers(layer)
    # One after the other: an output may have two names.
    with contextlib.ExitStack() as stack:
        for part, name in pairs:
            call = _named(part.call, name)
            stack.enter_context(replaced_calls([(part, call)]))
        yield


def _named(call, name):
    def named(*args, **kwargs):
        return checkpoint_name(call(*args, **kwargs), name)

    return named
