"""One pass of a student and its teachers over rows, and the loss between."""

import jax
import jax.numpy as jnp

from keras_posttrain.losses import DistillationLoss, SumLoss, reductions
from keras_posttrain.losses.features import FeatureLoss
from keras_posttrain.models.divergence_head import TopTeacher
from keras_posttrain.models.feature_maps import capture_of

# Of a batch, what a teacher reads in place of the student's tokens.
TEACHER_TOKENS = {
    "token_ids": "teacher_token_ids",
    "segment_ids": "teacher_segment_ids",
    "positions": "teacher_positions",
}


def parts(loss):
    """`(prefix of its normalizers, weight, loss)` of what is summed up."""
    if not isinstance(loss, SumLoss):
        return [("", 1.0, loss)]
    return [
        (f"{place}/", weight, part)
        for place, (part, weight) in enumerate(zip(loss.losses, loss.weights))
    ]


def row_terms(task, state, rows, normalizers, key, differentiable=True):
    """Loss and metrics of some rows, within `using_weights`.

    Args:
        task: `DistillTask`.
        state: dict, with the arrays of the `teachers`.
        rows: dict of arrays, some rows of the whole batch.
        normalizers: dict of scalars, those of the whole batch.
        key: JAX key of the seed and the step, or `None` for no dropout.
        differentiable: bool.

    Returns:
        `(loss, metrics)`, as `steps.row_terms` does.
    """
    student_capture = capture_of(task.feature_maps, 0)
    teacher_capture = capture_of(task.feature_maps, 1)
    hidden = task.policy.hidden_states(rows, key, capture=student_capture)
    if not differentiable:
        hidden = jax.lax.stop_gradient(hidden)
    teachers = given_teachers(task, state, rows, teacher_capture)
    maps = iter(task.feature_maps)
    total, metrics = 0.0, {}
    for prefix, weight, loss in parts(task.objective):
        shares = {
            name.removeprefix(prefix): weight * reductions.ratio(1.0, value)
            for name, value in normalizers.items()
            if name.startswith(prefix)
        }
        if isinstance(loss, DistillationLoss):
            value, outputs = _divergences(
                task, loss, rows, hidden, teachers, shares
            )
            own = loss.total(rows, outputs)[1]
        else:
            if isinstance(loss, FeatureLoss):
                outputs = next(maps).features(student_capture, teacher_capture)
            else:
                outputs = task.policy.token_outputs(
                    rows,
                    loss.logps_mask(rows),
                    needs=loss.needs,
                    hidden=hidden,
                    differentiable=differentiable,
                )
            terms, own = loss.total(rows, outputs)
            value = sum(terms[name] * shares[name] for name in terms)
        total, metrics = total + value, own | metrics
    return total, metrics


def _divergences(task, loss, rows, hidden, teachers, shares):
    mask = rows["completion_mask"].astype("float32")
    taught = mask * rows.get("teacher_mask", 1.0)
    scale = loss.alpha
    if loss.squared_temperature:
        scale *= loss.temperature**2
    by_logp = None
    if loss.alpha < 1.0:
        by_logp = -(1.0 - loss.alpha) * shares["hard_loss"] * mask
    return task.policy.divergence_sum(
        rows,
        (scale * shares["divergence"] * taught, by_logp),
        teachers,
        token_weights(rows),
        loss.divergence,
        temperature=loss.temperature,
        tail=loss.tail,
        hidden=hidden,
        # Tokens that no teacher speaks of count in the metrics as well.
        mask=mask != 0,
        needs=loss.needs,
    )


def token_weights(rows):
    """What each teacher counts for each token, `(teachers, rows, length)`;
    `None` where there is one teacher."""
    if "teacher_weights" not in rows:
        return None
    by_sequence = jnp.moveaxis(rows["teacher_weights"], -1, 0)
    return jax.vmap(reductions.spread, (0, None))(
        by_sequence, rows["segment_ids"]
    )


def given_teachers(task, state, rows, capture=None):
    """What the teachers say of rows, for the head: a tuple."""
    if "teacher_ids" in rows:
        k = rows["teacher_ids"].shape[-1]
        return (
            TopTeacher(
                ids=rows["teacher_ids"].reshape(-1, k),
                logps=rows["teacher_logps"].reshape(-1, k),
            ),
        )
    view, source = teacher_view(rows)
    given = []
    for teacher, values in zip(task.teachers, state["teachers"]):
        with teacher.using(values, state["trainable"], state["frozen"]):
            hidden = teacher.policy.hidden_states(view, capture=capture)
            given.append(teacher.policy.teacher(view, source, hidden))
    return tuple(given)


def teacher_view(rows):
    """`(batch, source)`: the tokens that teachers read, and the columns that
    predict the student's tokens there (`None` where they read the same)."""
    if "teacher_token_ids" not in rows:
        return rows, None
    view = {ours: rows[theirs] for ours, theirs in TEACHER_TOKENS.items()}
    return view, rows["teacher_source"]
