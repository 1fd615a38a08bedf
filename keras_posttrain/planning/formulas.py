"""Lower bounds of a step's computation and communication, by formula."""

import collections
import math

import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.distribution import layouts
from keras_posttrain.distribution.collective_bytes import Weight, ideal_bytes
from keras_posttrain.distribution.mesh import (
    CONTEXT,
    EXPERT,
    ROWS,
    SLICE,
    slice_of,
)
from keras_posttrain.models import (
    block_attention,
    expert_parallel,
    sharding,
    tensor_parallel,
)
from keras_posttrain.models.experts import (
    chosen_share,
    is_recorded,
    num_choices,
)
from keras_posttrain.training import recomputation

# Iterations of the loop over rounds of rows that are sent to experts.
EXPERT_TRIPS = {expert_parallel.LOOP: expert_parallel.EVEN_ROUNDS}


def loop_trips(length):
    """Returns the iterations of loops by their names, for rows of `length`.

    A row is one document, the longest that it can be.
    """
    trips = block_attention.most_trips(length)
    return EXPERT_TRIPS | {block_attention.LOOP: trips}


def model_flops(planned, batch):
    """Counts the operations of a step on all chips by formula.

    Six for each token and each weight of a matrix that is trained, four for
    one that is frozen (nothing needs its gradient), and 12 * length * width
    for each token and attention layer ([Chowdhery et al., 2022](
    https://arxiv.org/abs/2204.02311), appendix B); the forward pass of a
    reference or a teacher a third of that. Weights that are only looked up
    are left out, and of experts those count that a token passes through.
    """
    trained = {id(v) for v in planned.step.weights.trainable}
    tokens = int((np.asarray(batch["segment_ids"]) > 0).sum())
    squares = token_pairs(batch)
    policy = planned.policy
    _, both, width = _token_flops(policy, planned.weights_of(), trained)
    found = both * tokens + 12 * width * squares
    for model in planned.companions:
        weights = planned.weights_of(model)
        forward, _, width = _token_flops(model.policy, weights, set())
        found += forward * tokens + 4 * width * squares
    return found


def token_pairs(batch):
    """Counts pairs of a token and one that sees it or that it sees.

    They are the squares of the sequences' lengths. Of sequences that share a
    prefix, its square counts once.
    """
    lengths = [np.bincount(x, minlength=2)[1:] for x in batch["segment_ids"]]
    squares = sum(float((x.astype("float64") ** 2).sum()) for x in lengths)
    # A segment that continues others is the rest of a longer square.
    for x, prefixes in zip(lengths, batch.get("prefix_segments", ())):
        ends = [0]
        for length, prefix in zip(x, prefixes):
            squares += 2.0 * float(length) * ends[prefix]
            ends.append(ends[prefix] + int(length))
    return squares


def forward_flops(planned):
    """Counts the operations of a token's forward pass, without attention."""
    lookups = _lookups(planned.policy)
    return sum(
        2.0 * math.prod(v.shape)
        for v in planned.weights_of()
        if len(v.shape) > 1 and id(v) not in lookups
    )


def ideal(planned, batch):
    """Counts the bytes that the layout has to send, as fields of a `Plan`.

    They are those of `ideal_bytes`. The model is passed forward and backward,
    companions forward.
    """
    _, sizes = mesh_sizes()
    trained = {id(v) for v in planned.step.weights.trainable}
    models = [(planned.policy, planned.weights_of(), trained, 2)]
    for model in planned.companions:
        weights = planned.weights_of(model)
        models.append((model.policy, weights, set(), 1))
    fields = {"ideal": collections.Counter()}
    fields["ideal_dcn"] = collections.Counter()
    for policy, variables, trained, passes in models:
        dtype = policy.backbone.compute_dtype
        every = ideal_bytes(
            [_weight(v, dtype, id(v) in trained) for v in variables],
            sizes,
            micro_batches=planned.step.micro_batches.count(batch),
            num_layers=len(policy.layers),
            activation_bytes=layer_input_bytes(planned, policy, batch),
            expert_bytes=expert_bytes(planned, policy, batch, passes),
            context_bytes=context_bytes(planned, policy, batch, passes),
            passes=passes,
            slices=_slices_along(),
        )
        for found, more in zip(fields.values(), every):
            found.update(more)
    return {name: dict(found) for name, found in fields.items()}


def _slices_along():
    """Returns the number of slices along each axis of the mesh."""
    mesh = keras.distribution.distribution().device_mesh.backend_mesh
    found = {}
    for i, name in enumerate(mesh.axis_names):
        line = np.moveaxis(mesh.devices, i, 0).reshape(mesh.shape[name], -1)
        found[name] = len({slice_of(device) for device in line[:, 0]})
        if name == SLICE:
            # Also of devices that do not report it.
            found[name] = mesh.shape[name]
    return found


def layer_input_bytes(planned, policy, batch):
    """Counts a device's bytes of a decoder layer's input in a micro-batch.

    `policy` is the task's or a companion's.
    """
    shards, _ = mesh_sizes()
    tokens = batch["token_ids"].size / shards
    tokens /= planned.step.micro_batches.count(batch)
    itemsize = jnp.dtype(policy.backbone.compute_dtype).itemsize
    return tokens * policy.state_dim * itemsize


def kept_layer_inputs(planned, batch):
    """Counts a device's bytes of all decoder layers' inputs."""
    policy = planned.policy
    each = layer_input_bytes(planned, policy, batch)
    return len(policy.layers) * each / _model_shards(planned, batch)


def _model_shards(planned, batch):
    tokens = batch["token_ids"].size
    tokens //= planned.step.micro_batches.count(batch)
    return tensor_parallel.shards(planned.policy, tokens)


def kept_by_remat(planned, batch):
    """Counts what each choice of `remat` keeps and computes again.

    Returns:
        A dict from each of `rematerialisation.CHOICES` to a pair of floats:
        a device's bytes kept next to the layers' inputs, and operations on
        all chips.
    """
    shards, _ = mesh_sizes()
    tokens = batch["token_ids"].size
    micro_batches = planned.step.micro_batches.count(batch)
    on_device = tokens / shards / micro_batches
    on_device /= _model_shards(planned, batch)
    *_, width = _token_flops(planned.policy, planned.weights_of(), set())
    # A token sees half of the pairs.
    attention = 2 * width * token_pairs(batch)
    return {
        choice: (
            cost.kept * on_device,
            cost.recomputed * tokens + attention * cost.attends_again,
        )
        for choice, cost in recomputation.costs(planned.policy).items()
    }


def expert_bytes(planned, policy, batch, passes):
    """Counts a device's bytes of rows sent to experts, in a micro-batch.

    A choice of an expert is a row. Choices that are distributed evenly stay
    on their device as often as on any other one.
    """
    shards, sizes = mesh_sizes()
    holders = sizes.get(EXPERT, 1)
    tokens = int((np.asarray(batch["segment_ids"]) > 0).sum()) / shards
    tokens /= planned.step.micro_batches.count(batch)
    backbone = policy.backbone
    row = backbone.hidden_dim * jnp.dtype(backbone.compute_dtype).itemsize
    each = tokens * num_choices(backbone) * row * (holders - 1) / holders
    times = expert_parallel.SENT_FORWARD
    times += expert_parallel.SENT_BACKWARD * (passes - 1)
    return each * times * sum(map(is_recorded, policy.layers))


def context_bytes(planned, policy, batch, passes):
    """Counts a device's bytes of keys and values, in a micro-batch.

    They are those of other devices' tokens of the same rows.
    """
    _, sizes = mesh_sizes()
    shards = sizes.get(CONTEXT, 1)
    if shards == 1:
        return 0.0
    width = 0
    for layer in policy.layers:
        for v in layer.variables:
            if v.path.endswith(("key/kernel", "value/kernel")):
                names = layouts.meanings(v.path, len(v.shape))
                width += math.prod(
                    n for n, x in zip(v.shape, names) if x != "hidden"
                )
    tokens = batch["token_ids"].size / sizes[ROWS]
    tokens /= planned.step.micro_batches.count(batch)
    itemsize = jnp.dtype(policy.backbone.compute_dtype).itemsize
    # The gradients are sent in the backward pass.
    times = passes + (passes > 1)
    return times * tokens * width * itemsize * (shards - 1) / shards


def mesh_sizes():
    """Returns the devices that rows are split over, and along each axis."""
    distribution = keras.distribution.distribution()
    sizes = dict(distribution.device_mesh.backend_mesh.shape)
    for name in ("expert_mesh", "context_mesh"):
        mesh = getattr(distribution, name, None)
        if mesh is not None:
            sizes |= mesh.backend_mesh.shape
    return sharding.axes()[2], sizes


def _weight(variable, dtype, trainable):
    sizes = [jnp.dtype(d).itemsize for d in (variable.dtype, dtype)]
    # Of a quantized kernel, codes are sent.
    sizes.append(getattr(variable, "itemsize", sizes[0]))
    split = sharding.split_of(variable)
    shape = tuple(variable.shape)
    return Weight(shape, min(sizes), split.axes, trainable, split.rows)


def _lookups(policy):
    """Returns the ids of embeddings that are only looked up."""
    embedding = policy.backbone.token_embedding
    found = [] if embedding.tie_weights else [embedding]
    more = getattr(policy.backbone, "per_layer_token_embedding", None)
    if more is not None:
        found.append(more)
    return {id(each.embeddings) for each in found}


def _token_flops(policy, variables, trained):
    """Counts the operations of a token; attention's depend on its length.

    Returns:
        `(forward, forward and backward, width of the attention layers)`.
    """
    lookups, share = _lookups(policy), chosen_share(policy.backbone)
    forward = both = width = 0.0
    for v in variables:
        names = layouts.meanings(v.path, len(v.shape)) or ()
        size = math.prod(v.shape)
        if len(v.shape) < 2 or id(v) in lookups:
            continue
        if names[:1] == ("experts",):
            size *= share
        if v.path.endswith("attention_output/kernel"):
            # Those of queries may also compute gates.
            width += math.prod(
                n for n, x in zip(v.shape, names) if x != "hidden"
            )
        forward += 2 * size
        both += (6 if id(v) in trained else 4) * size
    return forward, both, width
