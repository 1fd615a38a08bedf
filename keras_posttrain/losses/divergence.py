"""Divergences of a student's distribution from a teacher's.

All functions take log-probabilities of the same outcomes, the last axis of
both arrays.

With `p` the teacher's and `q` the student's probabilities, each divergence is
a sum over outcomes of a term that is 0 where `q = p` and never negative. The
Kullback-Leibler terms include `q - p`, which sums to 0 over full
distributions. Therefore the minimum is at `q = p` even if outcomes are left
out, as with a teacher's top-k tokens, and the gradient of equal distributions
is exactly 0, without the rounding of a difference of two sums.

The gradient with respect to the student is written out next to each term,
since automatic differentiation evaluates `0 * inf` where a probability is 0.
The teacher is a constant.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

# The lower bound of log-probabilities, -inf included, so that an infinite
# divergence becomes a large number. Finite log-probabilities reach it only at
# temperatures of about 0.001.
LOG_FLOOR = -1e5
# A smaller difference of 1 and a float32 sum of probabilities is rounding.
TAIL_FLOOR = 1e-6
# Probabilities count as equal if their relative difference is smaller than
# this, the effect of rounded logits.
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
    """Computes the product, 0 where a probability is 0 for any value."""
    return jnp.where(probabilities == 0, 0.0, probabilities * values)


def _mixture_log_ratio(own, other, kept, share):
    """Computes `log(own / (kept * own + share * other))`.

    `kept` and `share` sum to 1; both are given, since 1 minus the other has
    no digits of a small one. Accurate to float32's relative precision for
    shares close to 0 and 1 as well, and exactly 0 for equal probabilities.
    Finite where `own` is 0.
    """
    divisor = jnp.maximum(own, TINY)
    excess = share * ((other - own) / divisor)
    result = -jnp.log1p(excess)
    if share > 0.5:
        # 1 + excess cancels here; the equal sum below does not.
        left = jnp.maximum(kept + share * (other / divisor), TINY)
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
    of_teacher = _mixture_log_ratio(p, q, beta, 1 - beta)
    of_student = _mixture_log_ratio(q, p, 1 - beta, beta)
    if scaled:
        of_teacher, of_student = of_teacher / (1 - beta), of_student / beta
    else:
        of_teacher, of_student = beta * of_teacher, (1 - beta) * of_student
    slopes = _expected(q, of_student)
    return _expected(p, of_teacher) + slopes, slopes


def _skew_forward_terms(student, teacher, skew):
    p, q = jnp.exp(teacher), jnp.exp(student)
    mixture = jnp.maximum(skew * p + (1 - skew) * q, TINY)
    values = _expected(p, _mixture_log_ratio(p, q, skew, 1 - skew))
    values += (1 - skew) * (q - p)
    return values, (1 - skew) ** 2 * (q - p) * (q / mixture)


def _skew_reverse_terms(student, teacher, skew):
    p, q = jnp.exp(teacher), jnp.exp(student)
    mixture = jnp.maximum(skew * q + (1 - skew) * p, TINY)
    ratio = _expected(q, _mixture_log_ratio(q, p, skew, 1 - skew))
    away = (1 - skew) * (p - q)
    return ratio + away, ratio + skew * away * (q / mixture)


def _total_variation_terms(student, teacher):
    p, q = jnp.exp(teacher), jnp.exp(student)
    # The gradient does not decay near equality. Between equal models,
    # rounding would determine its sign.
    near = jnp.abs(q - p) <= ROUNDING * p
    side = jnp.where(near, 0.0, jnp.sign(q - p))
    return 0.5 * jnp.abs(q - p), 0.5 * side * q


def _sorted_terms(student, teacher):
    size = max(student.shape[-1], teacher.shape[-1])
    q, q_sorted = _ascending(student, size)
    _, p_sorted = _ascending(teacher, size)
    distances = jnp.abs(q_sorted - p_sorted)
    # As in the total variation, rounding must not determine the sign.
    near = distances <= ROUNDING * p_sorted
    side = jnp.where(near, 0.0, jnp.sign(q_sorted - p_sorted))
    # Search each outcome's rank instead of sorting indices along with the
    # values. Equal outcomes all get the first one's rank.
    find = jnp.vectorize(jnp.searchsorted, signature="(n),(m)->(m)")
    slopes = q * jnp.take_along_axis(side, find(q_sorted, q), axis=-1)
    return distances, slopes


def _ascending(logps, size):
    """Returns the probabilities, unsorted and sorted with leading zeros."""
    values = jnp.exp(logps)
    # Non-negative floats have the order of their bits, and on CPUs integers
    # are sorted several times as fast.
    bits = jnp.sort(jax.lax.bitcast_convert_type(values, "int32"), axis=-1)
    ordered = jax.lax.bitcast_convert_type(bits, "float32")
    fill = [(0, 0)] * (values.ndim - 1) + [(size - values.shape[-1], 0)]
    return values, jnp.pad(ordered, fill)


def forward_kl_loss(student_logps, teacher_logps):
    """Computes `KL(teacher || student)`, the sum of `p * log(p / q)`.

    Args:
        student_logps: float array of shape `(..., outcomes)`,
            log-probabilities in nats; may be -inf.
        teacher_logps: float array of the same shape.

    Returns:
        A float32 array of shape `(...)`, in nats. Differentiable in the
        student, with a finite gradient everywhere.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        - [Hinton et al., 2015](https://arxiv.org/abs/1503.02531).

    Example:

    ```python
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    kpt.losses.forward_kl_loss(student, teacher)  # 0.1308
    ```
    """
    return _divergence(_forward_kl_terms, student_logps, teacher_logps)


def reverse_kl_loss(student_logps, teacher_logps):
    """Computes `KL(student || teacher)`, the sum of `q * log(q / p)`.

    Args:
        student_logps, teacher_logps: as in `forward_kl_loss`.

    Returns:
        A float32 array of shape `(...)`, in nats.

    Reference:
        - [Gu et al., 2024](https://arxiv.org/abs/2306.08543), MiniLLM.

    Example:

    ```python
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    kpt.losses.reverse_kl_loss(student, teacher)  # 0.1438
    ```
    """
    return _divergence(_reverse_kl_terms, student_logps, teacher_logps)


def jsd_loss(student_logps, teacher_logps, beta=0.5, scaled=False):
    """Computes the generalised Jensen-Shannon divergence.

    `beta * KL(teacher || M) + (1 - beta) * KL(student || M)` with
    `M = beta * teacher + (1 - beta) * student`.

    Args:
        student_logps, teacher_logps: as in `forward_kl_loss`.
        beta: float from 0 to 1. At both ends the divergence is 0.
        scaled: bool, whether to divide by `beta * (1 - beta)`. The limits
            are then `KL(teacher || student)` at 0 and
            `KL(student || teacher)` at 1.

    Returns:
        A float32 array of shape `(...)`, at most
        `-beta log(beta) - (1 - beta) log(1 - beta)` unless scaled.

    Reference:
        - [Agarwal et al., 2024](https://arxiv.org/abs/2306.13649).

    Example:

    ```python
    kpt.losses.jsd_loss(np.log([0.5, 0.5]), np.log([0.75, 0.25]))  # 0.0338
    ```
    """
    beta = float(beta)
    # Below TINY, float32 cannot distinguish the divergence from its limit.
    if scaled and beta < TINY:
        return forward_kl_loss(student_logps, teacher_logps)
    if scaled and beta == 1:
        return reverse_kl_loss(student_logps, teacher_logps)
    terms = functools.partial(
        _jensen_shannon_terms, beta=beta, scaled=bool(scaled)
    )
    return _divergence(terms, student_logps, teacher_logps)


def skew_kl_loss(student_logps, teacher_logps, skew=0.1, reverse=False):
    """Computes the KL divergence to a mixture of both distributions.

    `KL(teacher || skew * teacher + (1 - skew) * student)`, or with `reverse`
    `KL(student || skew * student + (1 - skew) * teacher)`. At most
    `-log(skew)`, so that no single outcome dominates the sum.

    Args:
        student_logps, teacher_logps: as in `forward_kl_loss`.
        skew: float, 0 or more and below 1. At 0 it is the KL divergence.
        reverse: bool, whether to start from the student.

    Returns:
        A float32 array of shape `(...)`, in nats.

    Reference:
        - [Ko et al., 2024](https://arxiv.org/abs/2402.03898).

    Example:

    ```python
    kpt.losses.skew_kl_loss(np.log([0.5, 0.5]), np.log([0.75, 0.25]))  # 0.1070
    ```
    """
    skew = float(skew)
    if skew < TINY:
        plain = reverse_kl_loss if reverse else forward_kl_loss
        return plain(student_logps, teacher_logps)
    terms = functools.partial(
        _skew_reverse_terms if reverse else _skew_forward_terms, skew=skew
    )
    return _divergence(terms, student_logps, teacher_logps)


def total_variation_loss(student_logps, teacher_logps):
    """Computes half the sum of `|p - q|`, from 0 to 1.

    Outcomes whose log-probabilities differ only by rounding have no
    gradient.

    Args:
        student_logps, teacher_logps: as in `forward_kl_loss`.

    Returns:
        A float32 array of shape `(...)`.

    Reference:
        - [Wen et al., 2023](https://arxiv.org/abs/2307.15190), f-DISTILL.

    Example:

    ```python
    kpt.losses.total_variation_loss(
        np.log([0.5, 0.5]), np.log([0.75, 0.25])
    )  # 0.25
    ```
    """
    return _divergence(_total_variation_terms, student_logps, teacher_logps)


def uld_loss(student_logps, teacher_logps):
    """Computes the sum of `|p - q|` of probabilities in descending order.

    It compares the shapes of two distributions, not which outcomes are
    probable, and therefore works across different vocabularies. The shorter
    one is padded with zeros.

    Args:
        student_logps: float array of shape `(..., outcomes)`.
        teacher_logps: float array of shape `(..., other_outcomes)`.

    Returns:
        A float32 array of shape `(...)`, from 0 to 2.

    Reference:
        - [Boizard et al., 2024](https://arxiv.org/abs/2402.12030).

    Example:

    ```python
    kpt.losses.uld_loss(np.log([0.5, 0.5]), np.log([0.25, 0.7, 0.05]))  # 0.5
    ```
    """
    student = jnp.asarray(student_logps).astype("float32")
    teacher = jnp.asarray(teacher_logps).astype("float32")
    return _over_outcomes(
        _sorted_terms, student, jax.lax.stop_gradient(teacher)
    )


def with_tail(logps):
    """Appends one outcome that stands for all outcomes left out.

    `logps` are log-probabilities `(..., k)` of some outcomes. The last of the
    `k + 1` is the log of 1 minus the sum of the others' probabilities, at
    least `log(TAIL_FLOOR)`. The gradient at this bound is 0.
    """
    logps = jnp.asarray(logps).astype("float32")
    inside = jnp.sum(jnp.exp(logps), axis=-1, keepdims=True)
    valid = 1 - inside > TAIL_FLOOR
    # The branch that is not selected must not be differentiated at log(0).
    tail = jnp.log1p(-jnp.where(valid, inside, 0.0))
    tail = jnp.where(valid, tail, math.log(TAIL_FLOOR))
    return jnp.concatenate([logps, tail], axis=-1)
