"""The forward pass of a student and its teachers, and the loss between."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.distribution import processes
from keras_posttrain.losses import DistillationLoss, SumLoss, reductions
from keras_posttrain.losses.features import FeatureLoss
from keras_posttrain.models import quantized, sharding
from keras_posttrain.models.divergence_head import TopTeacher
from keras_posttrain.models.feature_maps import capture_of
from keras_posttrain.rl.collector import LOGPS_INPUTS

# Arrays of a batch that a teacher reads instead of the student's tokens.
TEACHER_TOKENS = {
    "token_ids": "teacher_token_ids",
    "segment_ids": "teacher_segment_ids",
    "positions": "teacher_positions",
}
# Arrays of a batch that the program of the teachers' log-probabilities reads.
TEACHER_INPUTS = (
    *LOGPS_INPUTS,
    *TEACHER_TOKENS.values(),
    "teacher_source",
    "teacher_mask",
    "teacher_weights",
)


def parts(loss):
    """Lists `(prefix of its normalizers, weight, loss)` of a loss's parts."""
    if not isinstance(loss, SumLoss):
        return [("", 1.0, loss)]
    return [
        (f"{place}/", weight, part)
        for place, (part, weight) in enumerate(zip(loss.losses, loss.weights))
    ]


def kept_temperature(loss):
    """Returns the temperature of a teacher's cached log-probabilities."""
    found = [x for _, _, x in parts(loss) if isinstance(x, DistillationLoss)]
    return found[0].temperature if found else 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class DistillTerms:
    """The loss of some rows: one pass of a student and of its teachers.

    Args:
        loss: `kpt.losses.Loss`, or a `SumLoss` of divergences, feature
            losses and losses of tokens.
        teachers: tuple of `FrozenPolicy`s; none where the rows hold a
            teacher's most probable tokens.
        feature_maps: `FeatureMap`s, one a feature loss.
    """

    loss: object
    policy: object
    teachers: tuple = ()
    feature_maps: tuple = ()

    def __call__(self, state, rows, normalizers, key, differentiable=True):
        """Returns loss and metrics of some rows, as `LossTerms.__call__`."""
        student_capture = capture_of(self.feature_maps, 0)
        teacher_capture = capture_of(self.feature_maps, 1)
        hidden = self.policy.hidden_states(rows, key, capture=student_capture)
        if not differentiable:
            hidden = jax.lax.stop_gradient(hidden)
        teachers = self._teachers(state, rows, teacher_capture)
        maps, (_, source) = iter(self.feature_maps), teacher_view(rows)
        total, metrics = 0.0, {}
        for prefix, weight, loss in parts(self.loss):
            shares = {
                name.removeprefix(prefix): weight
                * reductions.ratio(1.0, value)
                for name, value in normalizers.items()
                if name.startswith(prefix)
            }
            if isinstance(loss, DistillationLoss):
                value, outputs = _divergences(
                    self.policy, loss, rows, hidden, teachers, shares
                )
                own = loss.total(rows, outputs)[1]
            else:
                if isinstance(loss, FeatureLoss):
                    outputs = next(maps).features(
                        student_capture, teacher_capture, source
                    )
                else:
                    outputs = self.policy.token_outputs(
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

    def _teachers(self, state, rows, capture):
        """Returns the teachers' distributions for the head, a tuple."""
        if "teacher_ids" in rows:
            k = rows["teacher_ids"].shape[-1]
            return (
                TopTeacher(
                    ids=rows["teacher_ids"].reshape(-1, k),
                    logps=rows["teacher_logps"].reshape(-1, k),
                ),
            )
        view, source = teacher_view(rows)
        found = []
        for teacher, values in zip(self.teachers, state["teachers"]):
            with teacher.using(values, state["trainable"], state["frozen"]):
                hidden = teacher.policy.hidden_states(view, capture=capture)
                found.append(teacher.policy.teacher(view, source, hidden))
        return tuple(found)


def _divergences(policy, loss, rows, hidden, teachers, shares):
    mask = rows["completion_mask"].astype("float32")
    supervised = mask * rows.get("teacher_mask", 1.0)
    scale = loss.alpha
    if loss.squared_temperature:
        scale *= loss.temperature**2
    by_logp = None
    if loss.alpha < 1.0:
        by_logp = -(1.0 - loss.alpha) * shares["hard_loss"] * mask
    return policy.divergence_sum(
        rows,
        (scale * shares["divergence"] * supervised, by_logp),
        teachers,
        token_weights(rows),
        loss.divergence,
        temperature=loss.temperature,
        tail=loss.tail,
        hidden=hidden,
        # Tokens without a teacher count in the metrics as well.
        mask=mask != 0,
        needs=loss.needs,
    )


def token_weights(rows):
    """Returns teacher weights, `(teachers, rows, length)`; `None` for one."""
    if "teacher_weights" not in rows:
        return None
    by_sequence = jnp.moveaxis(rows["teacher_weights"], -1, 0)
    return jax.vmap(reductions.spread, (0, None))(
        by_sequence, rows["segment_ids"]
    )


def teacher_view(rows):
    """`(batch, source)`: the tokens that teachers read, and the columns that
    predict the student's tokens there (`None` where they read the same)."""
    if "teacher_token_ids" not in rows:
        return rows, None
    view = {ours: rows[theirs] for ours, theirs in TEACHER_TOKENS.items()}
    return view, rows["teacher_source"]


class TeacherPass:
    """Log-probabilities of complete batches by the companions of a step."""

    def __init__(self, step, temperature):
        self.step, self.temperature = step, temperature
        teachers = sum(step.companions.values(), ())
        options = quantized.compiler_options(*(x.causal_lm for x in teachers))
        self._program = jax.jit(
            self._logps,
            out_shardings=sharding.of_results(),
            compiler_options=options,
        )

    def __call__(self, batch):
        """Computes the weighted mean of teachers, float32 `(rows, length)`."""
        state = self.step.weights.state()
        state = {**state, **self.step.held(state["frozen"])}
        batch = {k: batch[k] for k in TEACHER_INPUTS if k in batch}
        found = self._program(state, processes.put_rows(batch))
        return processes.fetch(found)

    def _logps(self, state, batch):
        return self.step.micro_batches.map(
            lambda rows: self._of_rows(state, rows), batch
        )

    def _of_rows(self, state, rows):
        view, source = teacher_view(rows)
        if source is None:
            mask = rows["completion_mask"] != 0
        else:
            mask = view["segment_ids"] > 0
        found = []
        teachers = self.step.companions["teachers"]
        for teacher, values in zip(teachers, state["teachers"]):
            logps = teacher.logps(
                values,
                state["trainable"],
                state["frozen"],
                view,
                mask,
                self.temperature,
            )
            if source is not None:
                # The column after the one that predicts it.
                logps = jnp.take_along_axis(logps, source + 1, axis=1)
            found.append(logps)
        weights = token_weights(rows)
        if weights is None:
            return found[0]
        return jnp.sum(jnp.stack(found) * weights, axis=0)
