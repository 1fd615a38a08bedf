"""How far a student's distribution is from a teacher's: functions of the
log-probabilities of the same outcomes, the last axis of both arrays.

With `p` the teacher's and `q` the student's probabilities, each divergence is
a sum over outcomes of a term that is 0 where `q = p` and never negative: the
Kullback-Leibler ones have `q - p` added, which sums to 0 over whole
distributions. So they are least at `q = p` also where outcomes are left out,
as with a teacher's most probable ones alone, and the gradient of equal
distributions is 0, not what rounding leaves of two sums.

The gradient by the student is written out beside each term, since the rules
of differentiation meet `0 * inf` where a probability is 0. The teacher counts
as a constant.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

# Log-probabilities count as at least this much, -inf too, so that what is
# infinite by its definition becomes a large number. Only a temperature of
# 0.001 or so takes finite ones that far down.
LOG_FLOOR = -1e5
# Less than this is rounding in 1 less a float32 sum of probabilities.
TAIL_FLOOR = 1e-6
# Probabilities that differ by less of themselves are equal: it is the rounding
# of the logits that they are made of.
ROUNDING = 1e-5
TINY = float(np.finfo("float32").tiny)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _over_outcomes(terms, student_logps, teacher_logps):
    return terms(student_logps, teacher_logps)[0].sum(axis=-1)


@_over_outcomes.defjvp
def _(terms, primals, tangents):
    values, slopes = terms(*primals)
    return values.sum(axis=-1), (slopes * tangents[0]).sum(axis=-1)


def _divergence(terms, student_logps, teacher_logps):
    """Sums `terms(student, teacher) -> (values, slopes)` over outcomes;
    `slopes` are derivatives by the student's log-probabilities."""
    student = jnp.asarray(student_logps).astype("float32")
    teacher = jnp.asarray(teacher_logps).astype("float32")
    if student.shape != teacher.shape:
        raise ValueError(
            "A divergence compares log-probabilities of the same outcomes, "
            "so student and teacher must have the same vocabulary. Received: "
            f"student_logps.shape={student.shape}, "
            f"teacher_logps.shape={teacher.shape}. Use `ULDLoss` for models "
            "with different vocabularies."
        )
    return _over_outcomes(terms, student, jax.lax.stop_gradient(teacher))


def _expected(probabilities, values):
    """Their product, 0 where a probability is 0, whatever the value."""
    return jnp.where(probabilities == 0, 0.0, probabilities * values)


def _mixture_log_ratio(own, other, share):
    """`log(own / ((1 - share) * own + share * other))` of probabilities.

    Exact to float32's relative precision for shares next to 0 and 1 as well,
    and 0 where both are equal. Where `own` is 0, some number.
    """
    divisor = jnp.maximum(own, TINY)
    excess = share * ((other - own) / divisor)
    result = -jnp.log1p(excess)
    if share > 0.5:
        # Little is left of 1 + excess: made of what does not cancel instead.
        left = jnp.maximum((1 - share) + share * (other / divisor), TINY)
        result = jnp.where(excess < -0.5, -jnp.log(left), result)
    return result


def _forward_kl_terms(student, teacher):
    p, q = jnp.exp(teacher), jnp.exp(student)
    ratio = teacher - jnp.maximum(student, LOG_FLOOR)
    return _expected(p, ratio) + (q - p), q - p


def _reverse_kl_terms(student, teacher):
    p, q = jnp.exp(teacher), jnp.exp(student)
    slopes = _expected(q, student - jnp.maximum(teacher, LOG_FLOOR))
    return slopes + (p - q), slopes


def _jensen_shannon_terms(student, teacher, beta, scaled):
    p, q = jnp.exp(teacher), jnp.exp(student)
    of_teacher = _mixture_log_ratio(p, q, 1 - beta)
    of_student = _mixture_log_ratio(q, p, beta)
    if scaled:
        of_teacher, of_student = of_teacher / (1 - beta), of_student / beta
    else:
        of_teacher, of_student = beta * of_teacher, (1 - beta) * of_student
    slopes = _expected(q, of_student)
    return _expected(p, of_teacher) + slopes, slopes


def _skew_forward_terms(student, teacher, skew):
    p, q = jnp.exp(teacher), jnp.exp(student)
    mixture = jnp.maximum(skew * p + (1 - skew) * q, TINY)
    values = _expected(p, _mixture_log_ratio(p, q, 1 - skew))
    values += (1 - skew) * (q - p)
    return values, (1 - skew) ** 2 * (q - p) * (q / mixture)


def _skew_reverse_terms(student, teacher, skew):
    p, q = jnp.exp(teacher), jnp.exp(student)
    mixture = jnp.maximum(skew * q + (1 - skew) * p, TINY)
    ratio = _expected(q, _mixture_log_ratio(q, p, 1 - skew))
    away = (1 - skew) * (p - q)
    return ratio + away, ratio + skew * away * (q / mixture)


def _total_variation_terms(student, teacher):
    p, q = jnp.exp(teacher), jnp.exp(student)
    # Every outcome pulls with its whole weight, however near: between equal
    # models rounding would choose the way.
    near = jnp.abs(q - p) <= ROUNDING * p
    side = jnp.where(near, 0.0, jnp.sign(q - p))
    return 0.5 * jnp.abs(q - p), 0.5 * side * q


def _sorted_terms(student, teacher):
    size = max(student.shape[-1], teacher.shape[-1])
    q, q_sorted = _ascending(student, size)
    _, p_sorted = _ascending(teacher, size)
    distances = jnp.abs(q_sorted - p_sorted)
    # As in the total variation, rounding is not to choose a way.
    near = distances <= ROUNDING * p_sorted
    side = jnp.where(near, 0.0, jnp.sign(q_sorted - p_sorted))
    # Each outcome finds its own place again, rather than being sorted with
    # its number: of equal ones, all take the first one's.
    find = jnp.vectorize(jnp.searchsorted, signature="(n),(m)->(m)")
    slopes = q * jnp.take_along_axis(side, find(q_sorted, q), axis=-1)
    return distances, slopes


def _ascending(logps, size):
    """Probabilities as they come, and sorted behind zeros up to `size`."""
    values = jnp.exp(logps)
    # Floats of 0 or more are in the order of their bits, and on CPUs whole
    # numbers are sorted several times as fast.
    bits = jnp.sort(jax.lax.bitcast_convert_type(values, "int32"), axis=-1)
    ordered = jax.lax.bitcast_convert_type(bits, "float32")
    fill = [(0, 0)] * (values.ndim - 1) + [(size - values.shape[-1], 0)]
    return values, jnp.pad(ordered, fill)


def forward_kl(student_logps, teacher_logps):
    """`KL(teacher || student)`: the sum of `p * log(p / q)`.

    Args:
        student_logps: float array of shape `(..., outcomes)`,
            log-probabilities in nats; -inf where there is none.
        teacher_logps: float array of the same shape.

    Returns:
        A float32 array of shape `(...)`, in nats. Differentiable in the
        student, with a finite gradient everywhere.

    Raises:
        ValueError: if the shapes differ.
    """
    return _divergence(_forward_kl_terms, student_logps, teacher_logps)


def reverse_kl(student_logps, teacher_logps):
    """`KL(student || teacher)`: the sum of `q * log(q / p)`.

    Arguments, result and errors as in `forward_kl`.
    """
    return _divergence(_reverse_kl_terms, student_logps, teacher_logps)


def jensen_shannon(student_logps, teacher_logps, beta=0.5, scaled=False):
    """`beta * KL(teacher || M) + (1 - beta) * KL(student || M)`.

    `M = beta * teacher + (1 - beta) * student`.

    Args:
        student_logps, teacher_logps: as in `forward_kl`.
        beta: float from 0 to 1. At both ends the divergence is 0.
        scaled: bool, whether it is divided by `beta * (1 - beta)`: then it
            is `KL(teacher || student)` at 0, and `KL(student || teacher)`
            at 1.

    Returns:
        A float32 array of shape `(...)`, at most
        `-beta log(beta) - (1 - beta) log(1 - beta)` unless scaled.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        - [Agarwal et al., 2024](https://arxiv.org/abs/2306.13649).
    """
    beta = float(beta)
    # Nearer to 0 than TINY, float32 cannot tell the two apart.
    if scaled and beta < TINY:
        return forward_kl(student_logps, teacher_logps)
    if scaled and beta == 1:
        return reverse_kl(student_logps, teacher_logps)
    terms = functools.partial(
        _jensen_shannon_terms, beta=beta, scaled=bool(scaled)
    )
    return _divergence(terms, student_logps, teacher_logps)


def skew_kl(student_logps, teacher_logps, skew=0.1, reverse=False):
    """The KL divergence from a mixture with the distribution it starts at.

    `KL(teacher || skew * teacher + (1 - skew) * student)`, or with `reverse`
    `KL(student || skew * student + (1 - skew) * teacher)`. At most
    `-log(skew)`, so that no single outcome rules the sum.

    Args:
        student_logps, teacher_logps: as in `forward_kl`.
        skew: float, 0 or more and below 1. At 0 it is the KL divergence.
        reverse: bool.

    Returns:
        A float32 array of shape `(...)`, in nats.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        - [Ko et al., 2024](https://arxiv.org/abs/2402.03898).
    """
    skew = float(skew)
    if skew < TINY:
        plain = reverse_kl if reverse else forward_kl
        return plain(student_logps, teacher_logps)
    terms = functools.partial(
        _skew_reverse_terms if reverse else _skew_forward_terms, skew=skew
    )
    return _divergence(terms, student_logps, teacher_logps)


def total_variation(student_logps, teacher_logps):
    """Half the sum of `|p - q|`, from 0 to 1.

    Arguments, result and errors as in `forward_kl`. Outcomes whose
    log-probabilities are equal but for rounding have no gradient.
    """
    return _divergence(_total_variation_terms, student_logps, teacher_logps)


def sorted_distance(student_logps, teacher_logps):
    """The sum of `|p - q|` of probabilities in descending order.

    It asks how peaked two distributions are, never which outcomes are
    probable, and so compares vocabularies that have nothing in common. The
    shorter one is filled up with zeros.

    Args:
        student_logps: float array of shape `(..., outcomes)`.
        teacher_logps: float array of shape `(..., other_outcomes)`.

    Returns:
        A float32 array of shape `(...)`, from 0 to 2.

    Reference:
        - [Boizard et al., 2024](https://arxiv.org/abs/2402.12030).
    """
    student = jnp.asarray(student_logps).astype("float32")
    teacher = jnp.asarray(teacher_logps).astype("float32")
    return _over_outcomes(
        _sorted_terms, student, jax.lax.stop_gradient(teacher)
    )


def with_tail(logps):
    """Adds one outcome: all those that are left out.

    Args:
        logps: float array of shape `(..., k)`, log-probabilities of some
            outcomes of a distribution.

    Returns:
        A float32 array of shape `(..., k + 1)`; the last is the log of 1
        less the sum of the others' probabilities, or of `TAIL_FLOOR` where
        less is left. There the gradient by it is 0.
    """
    logps = jnp.asarray(logps).astype("float32")
    inside = jnp.sum(jnp.exp(logps), axis=-1, keepdims=True)
    sound = 1 - inside > TAIL_FLOOR
    # What is not taken must not be differentiated at log(0) either.
    tail = jnp.log1p(-jnp.where(sound, inside, 0.0))
    tail = jnp.where(sound, tail, math.log(TAIL_FLOOR))
    return jnp.concatenate([logps, tail], axis=-1)
