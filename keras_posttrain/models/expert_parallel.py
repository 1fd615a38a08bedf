"""Experts on several devices, to which tokens are sent.

Each device has some of the experts and the tokens of its own rows. A choice,
one token for one of its experts, is a row that is sent to the expert's device;
the expert's output is sent back. Both are all-to-all communication.

The shapes of a program are fixed, but how many rows go to a device depends on
the tokens, and in the worst case all do. So that none is dropped and memory
stays that of an even distribution, rows are sent in rounds: in each of them
every device sends at most `ROUND` of an even share to every other one, until
all have been sent. The number of rounds is that of the fullest queue of all
devices, two if choices are about even. The backward pass sends the rows again
and does not keep them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from keras_posttrain.models.grouped_matmul import (
    Slots,
    combine,
    dispatch,
    sort_by_expert,
)

# The share of an even queue that is sent in a round: a bit more than a half,
# since queues are never quite even.
ROUND = 17 / 32
# The name of the loop over rounds, and its iterations if choices are even.
LOOP, EVEN_ROUNDS = "expert_rounds", 2
# Rows are sent once and outputs back in the forward pass. In the backward pass
# rows are sent again, gradients of outputs are sent, those of rows come back.
SENT_FORWARD, SENT_BACKWARD = 2, 3


def round_size(choices, shards):
    """Returns the most rows that a device sends to another one in a round.

    Args:
        choices: int, the choices of a device's tokens.
        shards: int, the devices that experts are split over.
    """
    return 8 * math.ceil(choices * ROUND / shards / 8)


@dataclasses.dataclass
class Queues:
    """A device's choices, sorted by the device that they are sent to.

    Attributes:
        slots: `Slots` of the choices, with devices in the place of experts.
        to: int array of shape `(tokens, choices)`, the device of each choice.
        experts: int array of shape `(slots,)`, which of its device's experts
            each is for.
        rounds: int scalar, the rounds until all devices have sent theirs.
        size: int, the most rows from a device to another one in a round.
    """

    slots: Slots
    to: jax.Array
    experts: jax.Array
    rounds: jax.Array
    size: int


jax.tree_util.register_dataclass(
    Queues, ["slots", "to", "experts", "rounds"], ["size"]
)


def compute_elsewhere(compute, x, weights, experts, kernels, axes):
    """Computes a device's tokens on the devices that have their experts.

    To be called on each device, in `jax.shard_map`.

    Args:
        compute: function of rows `(rows, hidden)`, float32 weights and the
            indices of experts, both `(rows, 1)`, and `kernels`. It returns
            the weighted outputs, float32 `(rows, hidden)`. Rows whose index
            is out of range are 0.
        x: float array of shape `(tokens, hidden)`.
        weights: float32 array of shape `(tokens, choices)`.
        experts: int array of that shape, out of range for tokens that are
            not used.
        kernels: pytree of arrays whose first axis is the device's experts.
        axes: names of the mesh's axes; over the last one experts are split.

    Returns:
        A float32 array of shape `(tokens, hidden)`.
    """
    own = jax.tree.leaves(kernels)[0].shape[0]
    queues = _queues(experts, own, axes)
    # In the order of the queues, as the experts' indices.
    ordered = _in_queues(weights, queues.slots)
    compute = functools.partial(_round, compute, axes[-1])
    return _all_rounds(compute, x, ordered, kernels, queues)


def _queues(experts, own, axes):
    shards = jax.lax.axis_size(axes[-1])
    is_used = (experts >= 0) & (experts < own * shards)
    to = jnp.where(is_used, experts // own, shards)
    slots = sort_by_expert(to, shards)
    size = round_size(experts.size, shards)
    rounds = jnp.int32(1)
    # A token chooses each expert at most once.
    if size < experts.shape[0] * min(own, experts.shape[1]):
        fullest = jax.lax.pmax(jnp.max(slots.sizes), axes)
        rounds = (fullest + size - 1) // size
    return Queues(slots, to, _in_queues(experts % own, slots), rounds, size)


def _in_queues(values, slots):
    """Returns values of choices `(tokens, choices)` in the queues' order."""
    found = jnp.zeros(slots.token.shape, values.dtype)
    at = slots.of_choice.reshape(-1)
    return found.at[at].set(values.reshape(-1), mode="drop")


def _round(compute, axis, number, queues, x, ordered, kernels):
    """Returns what the choices that are sent in a round add to each token."""
    slots, size = queues.slots, queues.size
    shards, first = len(slots.sizes), number * size
    # The places in the queues of the rows that are sent, by device.
    places = first + jnp.arange(size)
    at = slots.starts[:, None] + places
    none = slots.token.size
    at = jnp.where(places < slots.sizes[:, None], at, none).reshape(-1)
    # And the choices' places among these rows.
    to = jnp.minimum(queues.to, shards - 1)
    place = slots.of_choice - slots.starts[to] - first
    is_sent = (queues.to < shards) & (place >= 0) & (place < size)
    sent = Slots(
        jnp.where(is_sent, to * size + place, shards * size),
        _take(slots.token, at, fill=x.shape[0]),
        jnp.full(shards, size, "int32"),
        size * jnp.arange(shards, dtype="int32"),
        1,
    )

    def exchange(rows):
        return jax.lax.all_to_all(rows, axis, 0, 0, tiled=True)

    own = jax.tree.leaves(kernels)[0].shape[0]
    out = compute(
        exchange(dispatch(x, sent)),
        exchange(_take(ordered, at))[:, None],
        exchange(_take(queues.experts, at, fill=own))[:, None],
        kernels,
    )
    back = exchange(out.astype(x.dtype))
    return combine(back, jnp.ones(queues.to.shape, "float32"), sent)


def _take(values, index, fill=0):
    return jnp.take(values, index, mode="fill", fill_value=fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(one, x, ordered, kernels, queues):
    def add(number, total):
        return total + one(number, queues, x, ordered, kernels)

    with jax.named_scope(LOOP):
        return jax.lax.fori_loop(
            jnp.int32(0), queues.rounds, add, jnp.zeros(x.shape, "float32")
        )


def _forward(one, x, ordered, kernels, queues):
    # Gradients of frozen kernels must not be computed.
    given = (x, ordered, kernels)
    is_read = jax.tree.map(lambda x: () if x.perturbed else None, given)
    given, queues = jax.tree.map(lambda x: x.value, (given, queues))
    return _all_rounds(one, *given, queues), (is_read, given, queues)


def _backward(one, kept, gradient):
    is_read, given, queues = kept
    leaves, structure = jax.tree.flatten(given)
    is_read = structure.flatten_up_to(is_read)
    read = [i for i, mark in enumerate(is_read) if mark is not None]
    if isinstance(gradient, SymbolicZero):
        gradient = jnp.zeros(gradient.shape, gradient.dtype)

    def add(number, totals):
        def of_read(*values):
            every = list(leaves)
            for i, value in zip(read, values):
                every[i] = value
            return one(number, queues, *structure.unflatten(every))

        _, pull = jax.vjp(of_read, *(leaves[i] for i in read))
        return [
            total + part.astype(total.dtype)
            for total, part in zip(totals, pull(gradient))
        ]

    # Each token has rows in several rounds.
    dtypes = [leaves[i].dtype if i > 1 else "float32" for i in read]
    totals = [jnp.zeros(leaves[i].shape, d) for i, d in zip(read, dtypes)]
    with jax.named_scope(LOOP):
        totals = jax.lax.fori_loop(jnp.int32(0), queues.rounds, add, totals)
    found = [None] * len(leaves)
    for i, total in zip(read, totals):
        found[i] = total.astype(leaves[i].dtype)
    return (*structure.unflatten(found), None)


_all_rounds.defvjp(_forward, _backward, symbolic_zeros=True)
