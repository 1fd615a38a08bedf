"""Products of rows sorted by expert with the kernel of each expert."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.models import sharding

# Rows of a block at least and at most. Each expert's rows are padded to whole
# blocks, on average by half of one.
BLOCKS = (8, 128)
# Rows of a tile of the kernel of TPUs at least and at most, and the most of
# the other sides of a tile.
TILES = (128, 512)
SIDE = 1024


@dataclasses.dataclass
class Slots:
    """Where the choices of tokens are after sorting them by expert.

    Attributes:
        of_choice: int array of shape `(tokens, choices)`, the slot of each
            choice. It is out of range for one of no expert.
        token: int array of shape `(slots,)`, the token in each slot, out of
            range for slots that are not used.
        sizes: int array of shape `(experts,)`, the slots of each expert, of
            which the first ones are used.
        starts: int array of shape `(experts,)`, the first slot of each.
        block: int; `sizes` and `starts` are multiples of it.
    """

    of_choice: jax.Array
    token: jax.Array
    sizes: jax.Array
    starts: jax.Array
    block: int


jax.tree_util.register_dataclass(
    Slots, ["of_choice", "token", "sizes", "starts"], ["block"]
)


def block_size(choices, experts):
    """Returns the rows of a block for the loops of a CPU.

    It is about a quarter of the choices that an expert gets on average, so
    that an eighth is added to them on average.
    """
    low, high = BLOCKS
    block = low
    while block < high and 2 * block * 4 * experts <= choices:
        block *= 2
    return block


def sort_by_expert(experts, count, block=1):
    """Sorts choices by expert; those of one expert stay in their order.

    Args:
        experts: int array of shape `(tokens, choices)`; `count` stands for
            no expert.
        count: int, the number of experts.
        block: int, pads the slots of each expert to a multiple of it.

    Returns:
        `Slots`, as many as the choices can need.
    """
    tokens, choices = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    used = jnp.bincount(flat, length=count + 1)[:count].astype("int32")
    sizes = -(-used // block) * block
    starts = jnp.cumsum(sizes) - sizes
    # From the place in the sorted order to the slot.
    shift = starts - (jnp.cumsum(used) - used)
    total = flat.size + min(count, flat.size) * (block - 1)
    total = total // block * block
    shift = jnp.append(shift, total)
    slot = jnp.arange(flat.size, dtype="int32") + shift[flat[order]]
    token = jnp.full(total, tokens, "int32")
    token = token.at[slot].set(
        (order // choices).astype("int32"), mode="drop", unique_indices=True
    )
    of_choice = jnp.zeros(flat.size, "int32")
    of_choice = of_choice.at[order].set(slot, unique_indices=True)
    return Slots(
        of_choice.reshape(tokens, choices), token, sizes, starts, block
    )


def _rows(x, index):
    """Returns rows of `x`, 0 where the index is out of range."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x, slots):
    """Copies the rows of tokens to their slots; other slots are 0.

    The gradient gathers rows, which is faster than the scatter that JAX
    derives.
    """
    return _rows(x, slots.token)


def _dispatch_forward(x, slots):
    return dispatch(x, slots), slots


def _dispatch_backward(slots, gradient):
    total = 0.0
    for choice in range(slots.of_choice.shape[1]):
        rows = _rows(gradient, slots.of_choice[:, choice])
        total = total + rows.astype("float32")
    return total.astype(gradient.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(rows, weights, slots):
    """Adds up the rows of each token's choices, weighted.

    Args:
        rows: float array of shape `(slots, features)`.
        weights: float32 array of shape `(tokens, choices)`.
        slots: `Slots`.

    Returns:
        A float32 array of shape `(tokens, features)`.
    """
    total = 0.0
    for choice in range(weights.shape[1]):
        row = _rows(rows, slots.of_choice[:, choice]).astype("float32")
        total = total + weights[:, choice, None] * row
    return total


def _combine_forward(rows, weights, slots):
    return combine(rows, weights, slots), (rows, weights, slots)


def _combine_backward(kept, gradient):
    rows, weights, slots = kept
    of_slot = jnp.zeros(slots.token.shape, "float32")
    of_slot = of_slot.at[slots.of_choice.reshape(-1)].set(
        weights.reshape(-1), mode="drop"
    )
    to_rows = of_slot[:, None] * _rows(gradient, slots.token)
    to_weights = jnp.stack(
        [
            jnp.sum(
                gradient
                * _rows(rows, slots.of_choice[:, choice]).astype("float32"),
                axis=-1,
            )
            for choice in range(weights.shape[1])
        ],
        axis=-1,
    )
    return to_rows.astype(rows.dtype), to_weights, None


combine.defvjp(_combine_forward, _combine_backward)


def add_bias(rows, bias, slots):
    """Adds to each row the bias of its expert; slots of no expert keep theirs.

    Args:
        rows: float array of shape `(slots, features)`.
        bias: array of shape `(experts, features)`.
        slots: `Slots`.

    Returns:
        An array with the shape and dtype of `rows`.
    """
    places = jnp.arange(rows.shape[0])
    # The last one that begins there: those without a slot come before it.
    expert = jnp.searchsorted(slots.starts, places, side="right") - 1
    is_used = slots.token < slots.of_choice.shape[0]
    expert = jnp.where(is_used, expert, bias.shape[0])
    # In float32, so that its gradient adds up many rows in float32.
    return rows + _rows(bias.astype("float32"), expert).astype(rows.dtype)


def grouped_matmul(rows, kernel, slots):
    """Multiplies the rows of each expert by its kernel.

    Slots of no expert have any value in the result.

    Args:
        rows: float array of shape `(slots, in)`.
        kernel: array of shape `(experts, in, out)`.
        slots: `Slots`. With blocks of one row the product is JAX's
            `ragged_dot`, for which TPUs have a kernel. Otherwise it is a
            loop over the blocks that are used, for CPUs.

    Returns:
        An array of shape `(slots, out)` with the dtype of `rows`.
    """
    kernel = kernel.astype(rows.dtype)
    if slots.block > 1:
        return _block_matmul(rows, kernel, slots)
    if sharding.platform() == "tpu":
        return _tpu_matmul(rows, kernel, slots.sizes)
    return jax.lax.ragged_dot(rows, kernel, slots.sizes)


@jax.custom_vjp
def _tpu_matmul(rows, kernel, sizes):
    return jax.lax.ragged_dot(rows, kernel, sizes)


def _tpu_matmul_forward(rows, kernel, sizes):
    return _tpu_matmul(rows, kernel, sizes), (rows, kernel, sizes)


def _tpu_matmul_backward(kept, gradient):
    rows, kernel, sizes = kept
    transposed = jnp.swapaxes(kernel, 1, 2)
    to_rows = jax.lax.ragged_dot(gradient, transposed, sizes)
    to_kernel = tpu_kernel_gradient(rows, gradient, sizes, kernel.dtype)
    return to_rows, to_kernel, None


_tpu_matmul.defvjp(_tpu_matmul_forward, _tpu_matmul_backward)


def tpu_kernel_gradient(rows, gradient, sizes, dtype, interpret=False):
    """Computes the gradient of the kernels of a product of sorted rows.

    That of `ragged_dot` multiplies all rows for each expert, for which JAX
    has the kernels of MegaBlocks
    ([Gale et al., 2022](https://arxiv.org/abs/2211.15841)).
    """
    low, tile = TILES
    padding = -rows.shape[0] % low
    rows, gradient = (
        jnp.pad(x, ((0, padding), (0, 0))) for x in (rows, gradient)
    )
    while rows.shape[0] % tile:
        tile //= 2
    sides = (min(SIDE, rows.shape[1]), min(SIDE, gradient.shape[1]))
    # Takes a second to import.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    return tgmm(
        rows.T,
        gradient,
        sizes,
        dtype,
        (tile, *sides),
        interpret=interpret,
    )


def _over_experts(slots, each, init):
    """Runs `each(expert, first, last, carry)` on experts that have blocks."""
    order = jnp.argsort(slots.sizes == 0, stable=True).astype("int32")

    def step(i, carry):
        expert = order[i]
        first = slots.starts[expert] // slots.block
        last = first + slots.sizes[expert] // slots.block
        return each(expert, first, last, carry)

    used = jnp.sum(slots.sizes > 0, dtype="int32")
    return jax.lax.fori_loop(jnp.int32(0), used, step, init)


def _multiply(rows, kernel, slots, transposed):
    """Computes `_block_matmul`, or that with each kernel transposed."""
    block = slots.block
    out = kernel.shape[1 if transposed else 2]
    axes = (((1,), (1 if transposed else 0,)), ((), ()))

    def each(expert, first, last, carry):
        own = jax.lax.dynamic_index_in_dim(kernel, expert, 0, keepdims=False)

        def one(i, out):
            part = jax.lax.dynamic_slice_in_dim(rows, i * block, block)
            part = jax.lax.dot_general(
                part, own, axes, preferred_element_type="float32"
            )
            return jax.lax.dynamic_update_slice_in_dim(
                out, part.astype(out.dtype), i * block, 0
            )

        return jax.lax.fori_loop(first, last, one, carry)

    init = jnp.zeros((rows.shape[0], out), rows.dtype)
    return _over_experts(slots, each, init)


@jax.custom_vjp
def _block_matmul(rows, kernel, slots):
    return _multiply(rows, kernel, slots, False)


def _block_matmul_forward(rows, kernel, slots):
    return _block_matmul(rows, kernel, slots), (rows, kernel, slots)


def _block_matmul_backward(kept, gradient):
    rows, kernel, slots = kept
    to_rows = _multiply(gradient, kernel, slots, True)
    return to_rows, _kernel_gradient(rows, gradient, kernel, slots), None


def _kernel_gradient(rows, gradient, kernel, slots):
    block = slots.block

    def each(expert, first, last, carry):
        def one(i, total):
            left, right = (
                jax.lax.dynamic_slice_in_dim(x, i * block, block)
                for x in (rows, gradient)
            )
            return total + jax.lax.dot_general(
                left,
                right,
                (((0,), (0,)), ((), ())),
                preferred_element_type="float32",
            )

        total = jnp.zeros(kernel.shape[1:], "float32")
        total = jax.lax.fori_loop(first, last, one, total)
        return jax.lax.dynamic_update_index_in_dim(
            carry, total.astype(carry.dtype), expert, 0
        )

    return _over_experts(slots, each, jnp.zeros(kernel.shape, kernel.dtype))


_block_matmul.defvjp(_block_matmul_forward, _block_matmul_backward)
