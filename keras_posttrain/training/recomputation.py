"""The memory and the operations of each choice of `remat`, by formula."""

import dataclasses
import math

import jax.numpy as jnp

from keras_posttrain.distribution import processes
from keras_posttrain.models import experts, sharding
from keras_posttrain.models.linear import MatrixAxes
from keras_posttrain.models.rematerialisation import (
    ATTENDED,
    CHOICES,
    KEPT,
    PRODUCT,
    linear_layers,
)
from keras_posttrain.rollout.memory import free_bytes

# Of the free memory that `remat="auto"` takes; the rest is for what a layer
# needs while it runs.
SHARE = 0.6


# With "none", the bytes kept over those of "attention", as a multiple of the
# inputs of all products: norms and activations keep several float32 arrays.
# Llama-3-8B compiled for v5p:2x2x4 has 4.4.
EVERYTHING = 4.5


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a choice of `remat` costs for each token, in all layers.

    Attributes:
        kept: float, bytes that are kept for the backward pass, next to the
            layers' inputs.
        recomputed: float, operations of the matrix products that run again,
            without those of attention.
        attends_again: bool, whether attention's forward pass runs again.
    """

    kept: float = 0.0
    recomputed: float = 0.0
    attends_again: bool = False


def costs(policy):
    """Returns a dict from each of `CHOICES` to its `Cost`.

    They are those of the layers' matrix products: kept statistics of
    attention are a few bytes a head. Those of "none" are an estimate.
    """
    found = dict.fromkeys(CHOICES, Cost())
    itemsize = jnp.dtype(policy.backbone.compute_dtype).itemsize
    for layer in policy.layers:
        products = _products(layer, policy.backbone)
        attended = [p.inputs for p in products if p.attends]
        for choice, cost in found.items():
            names = KEPT.get(choice, KEPT["attention"])
            kept = sum(p.outputs for p in products if p.name in names)
            kept += sum(attended) if ATTENDED in names else 0
            if choice == "none":
                kept += EVERYTHING * sum(p.inputs for p in products)
            # Nothing reads the output of the last one again.
            again = [p for p in products[:-1] if p.name not in names]
            found[choice] = Cost(
                cost.kept + itemsize * kept,
                cost.recomputed + sum(p.flops for p in again),
                ATTENDED not in names,
            )
    return found


@dataclasses.dataclass(frozen=True)
class _Product:
    """A matrix product of a layer, with its numbers for each token."""

    name: str
    inputs: float
    outputs: float
    # Whether its inputs are the outputs of attention.
    attends: bool = False

    @property
    def flops(self):
        return 2.0 * self.inputs * self.outputs


def _products(layer, backbone):
    """Lists the products of a decoder layer, the feed-forward's at the end."""
    found, last = [], []
    for part, name in linear_layers(layer):
        axes, kind = MatrixAxes(part), part.name.removesuffix("_dense")
        sizes = axes.in_size, axes.out_size
        attends = kind in ("attention_output", "out_proj")
        is_last = kind in ("feedforward_output", "ffw_linear")
        (last if is_last else found).append(_Product(name, *sizes, attends))
    count = experts.num_choices(backbone)
    for kernel in experts.kernels_of(layer):
        _, inputs, outputs = kernel.shape
        last += [_Product(PRODUCT, inputs, outputs)] * count
    return found + last


def choose(policy, tokens):
    """Returns what `remat="auto"` is for tokens of a device, by free memory.

    Gradients and the logits of a chunk are taken off first. On a CPU it is
    "none": programs that XLA makes for CPUs need hardly less memory with
    another choice (7 % with "full" for 8 layers of 1,024 features and 8 rows
    of 512 tokens) and more time.

    Raises:
        ValueError: with several processes, which could choose differently
            and would then run different programs.
    """
    if sharding.platform() == "cpu":
        return "none"
    if processes.count() > 1:
        raise ValueError(
            "remat='auto' is for one process: the free memory of several "
            "differs. Pass the choice that `task.plan(..., remat='auto')` "
            f"shows. Received: remat='auto' and {processes.count()} processes"
        )
    free = free_bytes()
    vocabulary = policy.backbone.vocabulary_size
    room = SHARE * free - 8 * vocabulary * policy.head().chunk(
        vocabulary, tokens
    )
    weights = policy.adapter or policy.causal_lm
    room -= sum(4.0 * math.prod(v.shape) for v in weights.trainable_variables)
    return within(costs(policy), tokens, room)


def within(costs, tokens, room):
    """Returns the choice that keeps the most in so many bytes."""
    for choice in reversed(CHOICES):
        if costs[choice].kept * tokens <= room:
            return choice
    return CHOICES[0]
