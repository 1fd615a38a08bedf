"""Losses that couple the whole batch, over micro-batches: two passes."""

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.training import step as steps

# Of what a model gives, what can have a gradient.
DIFFERENTIABLE = ("per_token_logps", "entropies", "scores", "values")


def loss_and_gradients(task, state, batch, key, count):
    """The exact gradient of a loss that is no sum over rows.

    The first pass is forward only, a micro-batch at a time, and keeps what
    the loss reads: a few numbers a token. The loss is computed once, on all
    of them. The second pass takes its derivatives back through the model, a
    micro-batch at a time.

    Args:
        task: `Task`.
        state: dict with `trainable` and `frozen`, lists of arrays.
        batch: dict of arrays, the whole batch.
        key: JAX key of the seed and the step, or `None` for no dropout.
        count: int, how many micro-batches.

    Returns:
        `(loss, gradients, metrics)`: a scalar, float32 arrays like
        `state["trainable"]`, and metrics as `Loss.total` reports them.
    """
    outputs = _outputs(task, state, batch, key, count)
    names = _differentiated(task.objective, batch, outputs)

    def value(chosen):
        return _loss(task.objective, batch, {**outputs, **chosen})

    (loss, metrics), cotangents = jax.value_and_grad(value, has_aux=True)(
        {name: outputs[name] for name in names}
    )

    def pulled(trainable, rows, cotangents):
        with task.using_weights(trainable, state["frozen"]):
            mask = task.objective.logps_mask(rows)
            found = task.token_outputs(rows, mask, names, dropout_key=key)
        return sum(jnp.sum(found[n] * cotangents[n]) for n in names)

    def add(total, part):
        gradients = jax.grad(pulled)(state["trainable"], *part)
        return jax.tree.map(jnp.add, total, gradients), None

    zeros = [jnp.zeros(x.shape, "float32") for x in state["trainable"]]
    if names:
        parts = steps.split_rows((batch, cotangents), count)
        zeros, _ = jax.lax.scan(add, zeros, parts)
    return loss, zeros, metrics


def loss_alone(task, state, batch, count):
    """`(loss, metrics)` without gradients or dropout, as above."""
    outputs = _outputs(task, state, batch, None, count)
    return _loss(task.objective, batch, outputs)


def _outputs(task, state, batch, key, count):
    """All that the loss reads, of all rows."""

    def of_rows(rows):
        with task.using_weights(state["trainable"], state["frozen"]):
            return task.token_outputs(
                rows,
                task.objective.logps_mask(rows),
                task.objective.needs,
                dropout_key=key,
                differentiable=False,
            )

    found = jax.lax.map(of_rows, steps.split_rows(batch, count))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


def _loss(loss, batch, outputs):
    terms, metrics = loss.total(batch, outputs)
    normalizers = loss.normalizers(batch)
    shares = [reductions.ratio(terms[k], normalizers[k]) for k in terms]
    return sum(shares), metrics


def _differentiated(loss, batch, outputs):
    """The outputs that the loss has a derivative by.

    Entropies are most often only reported, and their gradient costs another
    product with the head: so it is asked for only where it is not 0.
    """
    found = []

    def watched(name):
        @jax.custom_vjp
        def identity(x):
            return x

        def backward(_, cotangent):
            found.append(name)
            return (cotangent,)

        # It is called only where a derivative arrives.
        identity.defvjp(lambda x: (x, None), backward)
        return identity

    def value(outputs):
        seen = {name: watched(name)(x) for name, x in outputs.items()}
        return _loss(loss, batch, seen)[0]

    jax.eval_shape(jax.grad(value), outputs)
    return [n for n in DIFFERENTIABLE if n in found and n in outputs]
