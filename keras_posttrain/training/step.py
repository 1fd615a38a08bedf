"""The jitted steps: one batch to gradients, metrics and new state."""

import threading

import jax
import jax.numpy as jnp
import keras

from keras_posttrain.losses import TokenLoss, reductions

# What every training step reports beside the metrics of its loss.
STEP_METRICS = ("loss", "grad_norm", "learning_rate", "num_tokens", "skipped")

POLICY_OUTPUTS = (
    "per_token_logps",
    "correct",
    "entropies",
    "collision_entropies",
)


# Held while a program of a task's model is made: what scopes turn on or off,
# such as an adapter, is the model's, and several threads may make programs.
TRACING = threading.RLock()


def split_rows(batch, count):
    """Cuts every array of a batch into `count` micro-batches of rows."""
    return jax.tree.map(
        lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch
    )


def row_terms(task, batch, normalizers, key, differentiable=True):
    """Loss and metrics of some rows of a batch.

    Args:
        task: `Task`, its weights given by the surrounding scope.
        batch: dict of arrays, some rows of the whole batch.
        normalizers: dict of scalars, those of the whole batch.
        key: JAX key of the seed and the step, or `None` for no dropout.
        differentiable: bool.

    Returns:
        `(loss, metrics)`: these rows' share of the batch's loss, and the
        metrics as `Loss.total` reports them.
    """
    loss = task.objective
    if isinstance(loss, TokenLoss):
        scale = reductions.ratio(1.0, normalizers["loss"])
        weights = batch["completion_mask"].astype("float32") * scale
        total, outputs = task.policy.token_loss_sum(
            batch,
            weights,
            loss.token_loss,
            needs=loss.needs,
            dropout_key=key,
        )
        _, metrics = loss.total(batch, outputs)
        return total, metrics
    outputs = task.token_outputs(
        batch,
        loss.logps_mask(batch),
        loss.needs,
        dropout_key=key,
        differentiable=differentiable,
    )
    terms, metrics = loss.total(batch, outputs)
    shares = [reductions.ratio(terms[k], normalizers[k]) for k in terms]
    return sum(shares), metrics


def over_micro_batches(function, batch, count):
    """`function(rows) -> (sums, metrics)`, added up over micro-batches."""
    if count == 1:
        return function(batch)
    kinds = {}

    def body(total, rows):
        sums, metrics = function(rows)
        kinds.update({name: metric[0] for name, metric in metrics.items()})
        values = {name: metric[1:] for name, metric in metrics.items()}
        return jax.tree.map(jnp.add, total, sums), values

    rows = split_rows(batch, count)
    first = jax.tree.map(lambda x: x[0], rows)
    shapes = jax.eval_shape(lambda x: function(x)[0], first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, "float32"), shapes)
    total, values = jax.lax.scan(body, zeros, rows)
    metrics = reductions.merge_metrics(
        {name: (kind, *values[name]) for name, kind in kinds.items()}
    )
    return total, metrics


def global_norm(gradients):
    """The L2 norm of all gradients together, in float32."""
    squares = [jnp.sum(jnp.square(g.astype("float32"))) for g in gradients]
    return jnp.sqrt(sum(squares))


def clip(gradients, norm, max_norm):
    """Gradients times `min(1, max_norm / (norm + 1e-6))`, as torch does."""
    if max_norm is None:
        return gradients
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return [g * factor.astype(g.dtype) for g in gradients]


def apply_optimizer(optimizer, masters, state, gradients, keep):
    """New weights and optimizer state, or the old ones where not `keep`.

    Args:
        optimizer: built `keras.optimizers.Optimizer`.
        masters: list of indices into `optimizer.variables`, or `None`: the
            float32 copy of each trainable variable that is kept in less.
        state: dict with `trainable` and `optimizer`, lists of arrays.
        gradients: list of arrays.
        keep: bool scalar.

    Returns:
        `state` with both lists renewed.
    """
    old, variables = state["trainable"], state["optimizer"]
    sources = [
        value if at is None else variables[at]
        for value, at in zip(old, masters)
    ]
    gradients = [g.astype(s.dtype) for g, s in zip(gradients, sources)]
    new, renewed = optimizer.stateless_apply(variables, gradients, sources)
    # The old values are being read for the update anyway, so that choosing
    # between them and the new ones costs nothing.
    new = [
        jnp.where(keep, n.astype(o.dtype), o)
        for n, o in zip(new, old, strict=True)
    ]
    renewed = [jnp.where(keep, n, o) for n, o in zip(renewed, variables)]
    return {**state, "trainable": new, "optimizer": renewed}


def update_metrics(trackers, values, logs, weights):
    """Adds one step to the running means of an epoch.

    Args:
        trackers: list of `keras.metrics.Mean`.
        values: list of arrays, those of the trackers' variables.
        logs: dict of scalars by tracker name; a tracker that has none there
            stays as it is.
        weights: dict of scalars by tracker name, 1 by default. A value that
            is not finite has no weight.

    Returns:
        The new list of arrays.
    """
    variables = [v for t in trackers for v in t.variables]
    mapping = list(zip(variables, values))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        for tracker in trackers:
            if tracker.name not in logs:
                continue  # a step of one's own need not report all
            value = jnp.asarray(logs[tracker.name], "float32")
            weight = jnp.asarray(weights.get(tracker.name, 1.0), "float32")
            finite = jnp.isfinite(value)
            tracker.update_state(
                jnp.where(finite, value, 0.0),
                sample_weight=jnp.where(finite, weight, 0.0),
            )
        renewed = [scope.get_current_value(v) for v in variables]
    return [n if n is not None else o for n, o in zip(renewed, values)]


def bits(x):
    """The bits of an array as uint32, for a checksum."""
    kinds = {1: "uint8", 2: "uint16", 4: "uint32"}
    kind = kinds.get(x.dtype.itemsize)
    if kind is None or x.dtype == bool:
        return x.astype("float32").view("uint32")
    return jax.lax.bitcast_convert_type(x, kind).astype("uint32")
