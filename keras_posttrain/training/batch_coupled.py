"""Gradients of losses that couple a batch, in two passes."""

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions

# Of a model's outputs, those that can have a gradient.
DIFFERENTIABLE = ("per_token_logps", "entropies", "scores", "values")


def loss_and_gradients(step, state, batch, key, routing):
    """Computes the exact gradient of a loss that is not a sum over rows.

    The first pass is forward only, a micro-batch at a time, and keeps what
    the loss reads: a few numbers per token. The loss is computed once, on all
    of them. The second pass takes its derivatives back through the model, a
    micro-batch at a time. `key` is as in `LossTerms.__call__`, `routing` the
    `BatchRouting`.

    Returns:
        `(loss, gradients, metrics)`: a scalar, float32 arrays like
        `state["trainable"]`, and metrics as `Loss.total` reports them.
    """
    outputs = _outputs(step, state, batch, key)
    names = _differentiated(step.loss, batch, outputs)

    def value(chosen):
        return _loss(step.loss, batch, {**outputs, **chosen})

    (loss, metrics), cotangents = jax.value_and_grad(value, has_aux=True)(
        {name: outputs[name] for name in names}
    )

    def pulled_back(trainable, rows):
        with (
            step.weights.scope(trainable, state["frozen"]),
            routing.recorded() as layers,
        ):
            mask = step.loss.logps_mask(rows)
            found = step.token_outputs(rows, mask, names, dropout_key=key)
        more, own = routing.add(jnp.zeros((), "float32"), {}, layers)
        products = (jnp.sum(found[n] * rows["cotangents"][n]) for n in names)
        return sum(products) + more, (more, own)

    def sums(rows):
        gradients, (more, own) = jax.grad(pulled_back, has_aux=True)(
            state["trainable"], rows
        )
        return (more, gradients), own

    if not names:
        zeros = [jnp.zeros(x.shape, "float32") for x in state["trainable"]]
        return loss, zeros, metrics
    (more, gradients), own = step.micro_batches.sum(
        sums, {**batch, "cotangents": cotangents}
    )
    return loss + more, gradients, {**metrics, **own}


def loss_alone(step, state, batch):
    """Computes `(loss, metrics)` without gradients or dropout."""
    outputs = _outputs(step, state, batch, None)
    return _loss(step.loss, batch, outputs)


def _outputs(step, state, batch, key):
    """Computes the outputs that the loss reads, for all rows."""

    def of_rows(rows):
        with step.weights.scope(state["trainable"], state["frozen"]):
            return step.token_outputs(
                rows,
                step.loss.logps_mask(rows),
                step.loss.needs,
                dropout_key=key,
                differentiable=False,
            )

    return step.micro_batches.map(of_rows, batch)


def _loss(loss, batch, outputs):
    terms, metrics = loss.total(batch, outputs)
    normalizers = loss.normalizers(batch)
    shares = [reductions.ratio(terms[k], normalizers[k]) for k in terms]
    return sum(shares), metrics


def _differentiated(loss, batch, outputs):
    """Lists the outputs that the loss has a derivative by.

    Entropies are most often only reported, and their gradient costs another
    product with the head: it is computed only where it is not 0.
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
