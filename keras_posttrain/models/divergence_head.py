"""The projection on the vocabulary, of a student and its teachers at once.

A chunk of tokens is projected by each, compared, and forgotten: the logits
of neither exist at full length, forward or backward. The gradient by the
student's logits is formed while the chunk is at hand, so that the student
pays the three products a likelihood costs, and a teacher one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from keras_posttrain.losses.divergence import with_tail
from keras_posttrain.models.head import Head

# On a CPU so many tokens at a time are compared, in its cache.
BLOCK = 8

# What is computed beside the divergence, where asked for.
COMPANIONS = ("per_token_logps", "agrees", "teacher_per_token_logps")


@dataclasses.dataclass(frozen=True)
class FullTeacher:
    """A teacher whose distribution over its whole vocabulary is at hand.

    Args:
        head: `Head` of the teacher; its temperature is not read.
        hidden: float array of shape `(rows * teacher_length, dim)`.
        kernel: the teacher's kernel, in the dtype of `hidden`.
        source: int32 array of shape `(rows * length,)`: for each of the
            student's tokens, the flat index of the teacher's hidden state
            that predicts it.
    """

    head: Head
    hidden: jax.Array
    kernel: jax.Array
    source: jax.Array

    def rows(self, index, used):
        """The logits in the places of `index`."""
        h = jnp.where(used[:, None], self.hidden[self.source[index]], 0)
        head = dataclasses.replace(self.head, temperature=1.0)
        return head.logits(h, self.kernel)[0]


@dataclasses.dataclass(frozen=True)
class TopTeacher:
    """A teacher of which only the most probable tokens are known.

    Args:
        ids: int32 array of shape `(rows * length, k)`: for each of the
            student's tokens, those most probable in its place.
        logps: float32 array of that shape: their log-probabilities, at the
            temperature of the loss.
    """

    ids: jax.Array
    logps: jax.Array

    def rows(self, index, used):
        """The ids and log-probabilities in the places of `index`."""
        del used
        return self.ids[index], self.logps[index]


jax.tree_util.register_dataclass(
    FullTeacher, ["hidden", "kernel", "source"], ["head"]
)
jax.tree_util.register_dataclass(TopTeacher, ["ids", "logps"], [])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 7, 8, 9, 10))
def divergence_sum(
    head,
    hidden,
    kernel,
    tokens,
    weights,
    teachers,
    teacher_weights,
    divergence,
    temperature=1.0,
    tail=True,
    needs=(),
):
    """The weighted sum of divergences from teachers and of likelihoods.

    `sum_t by_divergence_t * D_t + by_logp_t * logp_t`, where `D_t` is
    `sum_i teacher_weights[i, t] * divergence(student_t, teacher_i_t)`.

    Args:
        head, hidden, kernel, tokens: the student's, as in
            `models/head.py:token_values`; the head's temperature is not
            read.
        weights: pair of float32 arrays of shape `(slots,)`, `by_divergence`
            and `by_logp`, in the order of `tokens`; `by_logp` may be `None`.
        teachers: sequence of `FullTeacher` and `TopTeacher`.
        teacher_weights: float32 array of shape `(teachers, slots)`, in the
            order of `tokens`.
        divergence: function of float32 log-probabilities of the student and
            of the teacher, `(tokens, outcomes)` each, that gives
            `(tokens,)`; differentiable in the first.
        temperature: float, divides the logits of both before they are
            compared. Log-probabilities of tokens are those of temperature 1.
        tail: bool; beside a teacher's top tokens, the rest of the vocabulary
            is one more outcome.
        needs: names of `COMPANIONS` wanted beside `divergences`.

    Returns:
        `(sum, values)`; the sum has gradients by `hidden` and, where
        `head.trainable`, by `kernel`. `values` is a dict of float32 arrays
        of shape `(rows * length,)` without gradients, 0 where no token was
        asked for: `divergences`, `per_token_logps`, `agrees` (1 where the
        teacher's most probable token is the student's as well) and
        `teacher_per_token_logps`; of several teachers the last two are
        means by `teacher_weights`.
    """
    total, values, _ = _sweep(
        head, hidden, kernel, tokens, weights, teachers, teacher_weights,
        (divergence, temperature, tail, needs), gradients=False,
    )  # fmt: skip
    return total, values


def _forward(
    head, hidden, kernel, tokens, weights, teachers, teacher_weights,
    *settings,
):  # fmt: skip
    total, values, gradients = _sweep(
        head, hidden, kernel, tokens, weights, teachers, teacher_weights,
        settings, gradients=True,
    )  # fmt: skip
    # The arrays themselves tell the backward pass the dtypes it must give.
    gradients["d_hidden"] = gradients["d_hidden"].astype(hidden.dtype)
    if not head.trainable:
        gradients["d_kernel"] = jnp.zeros(kernel.shape, "float32")
    gradients["d_kernel"] = gradients["d_kernel"].astype(kernel.dtype)
    return (total, values), gradients


def _backward(
    head, divergence, temperature, tail, needs, gradients, cotangents
):
    scale = cotangents[0]
    by_hidden, by_kernel = gradients["d_hidden"], gradients["d_kernel"]
    return (
        (by_hidden * scale).astype(by_hidden.dtype),
        (by_kernel * scale).astype(by_kernel.dtype),
        *[None] * 4,
    )


divergence_sum.defvjp(_forward, _backward)


def _sweep(
    head, hidden, kernel, tokens, weights, teachers, teacher_weights,
    settings, *, gradients,
):  # fmt: skip
    """One loop over the chunks: `(sum, values, gradients)`."""
    needs = settings[-1]
    _check(head, kernel, teachers, needs)
    head = dataclasses.replace(head, temperature=1.0)
    slots = tokens.index.shape[0]
    size = _chunk(head, kernel, teachers, slots)
    pad = -slots % size
    by_slot = jax.tree.map(
        lambda x: jnp.pad(x, (0, pad)),
        (tokens.index, tokens.source, tokens.targets, weights,
         tuple(teacher_weights)),
    )  # fmt: skip
    names = ["divergences", *(n for n in COMPANIONS if n in needs)]
    # Slots without a token write to a place behind the last, cut off below.
    carry = {name: jnp.zeros(slots + 1, "float32") for name in names}
    carry["sum"] = jnp.zeros((), "float32")
    if gradients:
        carry["d_hidden"] = jnp.zeros(hidden.shape, "float32")
    if gradients and head.trainable:
        carry["d_kernel"] = jnp.zeros(kernel.shape, "float32")

    def body(i, carry):
        index, source, targets, weights, shares = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size),
            by_slot,
        )
        used = i * size + jnp.arange(size) < tokens.count
        weights, shares = jax.tree.map(
            lambda x: jnp.where(used, x, 0.0), (weights, shares)
        )
        # Behind the last token h is 0: what another token's hidden state
        # may hold (even a NaN) has no way in.
        h = jnp.where(used[:, None], hidden[source], 0)
        logits, _ = head.logits(h, kernel)
        theirs = [teacher.rows(index, used) for teacher in teachers]
        rows = (logits, theirs, targets, weights, shares)
        values, d_logits = _by_block(
            functools.partial(
                _compare, head.soft_cap, settings, names, gradients
            ),
            rows,
        )
        out = jnp.where(used, index, slots)
        new = {name: carry[name].at[out].set(values[name]) for name in names}
        new["sum"] = carry["sum"] + jnp.sum(values["sum"])
        if not gradients:
            return new
        by_hidden = head.hidden_gradient(d_logits, kernel)
        new["d_hidden"] = carry["d_hidden"].at[source].add(by_hidden)
        if head.trainable:
            by_kernel = head.kernel_gradient(d_logits, h)
            new["d_kernel"] = carry["d_kernel"] + by_kernel
        return new

    steps = (tokens.count + size - 1) // size
    carry = jax.lax.fori_loop(0, steps, body, carry)
    values = {name: carry.pop(name)[:slots] for name in names}
    return carry.pop("sum"), values, carry


def _check(head, kernel, teachers, needs):
    """Raises where a teacher cannot say what is asked of it."""
    ours = _vocabulary(head, kernel)
    for teacher in teachers:
        if isinstance(teacher, TopTeacher):
            if "teacher_per_token_logps" in needs:
                raise ValueError(
                    "Among a teacher's most probable tokens those of the "
                    "batch need not be. Use a teacher whose whole "
                    "distribution is at hand. Received: "
                    f"needs={needs}, top-{teacher.ids.shape[1]} of a teacher"
                )
            continue
        theirs = _vocabulary(teacher.head, teacher.kernel)
        named = {"agrees", "teacher_per_token_logps"} & set(needs)
        if named and ours != theirs:
            raise ValueError(
                f"{sorted(named)} compare single tokens, which takes one "
                "vocabulary. Use a loss that does not need them. Received: "
                f"vocabularies of {ours} (student) and {theirs} (teacher) "
                "tokens"
            )


def _chunk(head, kernel, teachers, slots):
    """Tokens a chunk: as many as the largest vocabulary lets, in blocks."""
    sizes = [head.chunk(_vocabulary(head, kernel), slots)]
    for teacher in teachers:
        if isinstance(teacher, FullTeacher):
            size = _vocabulary(teacher.head, teacher.kernel)
            sizes.append(head.chunk(size, slots))
    size = min(sizes)
    return max(size - size % BLOCK, 1) if size > BLOCK else size


def _vocabulary(head, kernel):
    return kernel.shape[0 if head.transposed else 1]


class _Normalised:
    """Logits of a chunk, and what normalises them at a temperature.

    All is measured from the top: near certainty, differences of large
    logits would leave nothing but their rounding.
    """

    def __init__(self, logits, temperature):
        self.logits, self.temperature = logits, temperature
        self.top = jnp.max(logits, axis=-1, keepdims=True)
        self.log_total = self._log_total(temperature)

    def _scaled(self, logits, temperature):
        below = logits - self.top
        return below if temperature == 1.0 else below / temperature

    def _log_total(self, temperature):
        weights = jnp.exp(self._scaled(self.logits, temperature))
        return jnp.log(jnp.sum(weights, axis=-1, keepdims=True))

    @functools.cached_property
    def log_total_at_1(self):
        if self.temperature == 1.0:
            return self.log_total
        return self._log_total(1.0)

    def logps(self, logits=None):
        """At the temperature; of all, or of some of the logits."""
        logits = self.logits if logits is None else logits
        return self._scaled(logits, self.temperature) - self.log_total

    def logps_at_1(self, logits=None):
        logits = self.logits if logits is None else logits
        return logits - self.top - self.log_total_at_1

    def of(self, targets):
        """Log-probability of each token's target, at temperature 1."""
        chosen = _at(self.logits, targets[:, None])
        return self.logps_at_1(chosen)[:, 0]


def _by_block(function, rows):
    """`function` of a few rows at a time, on a CPU.

    Some ten passes over the logits of a chunk then run in its cache.
    """
    size, block = rows[0].shape[0], BLOCK
    if jax.default_backend() != "cpu" or size % block or size == block:
        return function(rows)
    cut = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), rows)
    found = jax.lax.map(function, cut)
    return jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), found)


def _compare(soft_cap, settings, names, gradients, rows):
    """Values of some tokens, and d(sum) / d(logits before the cap)."""
    logits, theirs, targets, weights, shares = rows
    divergence, temperature, tail, needs = settings
    student = _Normalised(logits, temperature)
    found, parts = [], []
    for rows_of_one, share in zip(theirs, shares):
        compare = _compare_full
        if isinstance(rows_of_one, tuple):
            compare = _compare_top
        ids, chosen, function, of_one = compare(
            student, rows_of_one, targets, settings
        )
        if not gradients:
            found.append({**of_one, "divergences": function(chosen)})
            continue
        value, pull = jax.vjp(function, chosen)
        found.append({**of_one, "divergences": value})
        cotangent = weights[0] * share
        (part,) = pull(cotangent)
        # A token that the teacher says nothing of may hold anything.
        part = jnp.where(cotangent[:, None] != 0, part, 0.0)
        parts.append((ids, part))
    values = _values(student, found, shares, names, targets, weights)
    if not gradients:
        return values, None
    gradient = _gradient(student, parts, targets, weights[1])
    if soft_cap is not None:
        gradient = gradient * (1 - (logits / soft_cap) ** 2)
    return values, gradient


def _compare_full(student, logits, targets, settings):
    divergence, temperature, _, needs = settings
    teacher = _Normalised(logits, temperature)
    found = {}
    if "agrees" in needs:
        # One pass, where the index of a maximum is a loop of its own.
        at_best = jnp.where(logits >= teacher.top, student.logits, -jnp.inf)
        agrees = jnp.max(at_best, axis=-1) >= student.top[:, 0]
        found["agrees"] = agrees.astype("float32")
    if "teacher_per_token_logps" in needs:
        found["teacher_per_token_logps"] = teacher.of(targets)

    def function(chosen):
        return divergence(chosen, teacher.logps())

    return None, student.logps(), function, found


def _compare_top(student, rows, targets, settings):
    divergence, _, tail, needs = settings
    ids, logps = rows
    found = {}
    if "agrees" in needs:
        best = _at(ids, jnp.argmax(logps, axis=-1)[:, None])
        agrees = _at(student.logits, best) >= student.top
        found["agrees"] = agrees[:, 0].astype("float32")

    def function(chosen):
        if tail:
            return divergence(with_tail(chosen), with_tail(logps))
        return divergence(chosen, logps)

    return ids, student.logps(_at(student.logits, ids)), function, found


def _gradient(student, parts, targets, by_logp):
    """d(sum) / d(logits).

    Args:
        student: `_Normalised`.
        parts: list of `(ids, by_logps)`, cotangents of the log-probabilities
            at the temperature: of all, where `ids` is `None`, or of those of
            `ids`.
        targets: int32 array of shape `(tokens,)`.
        by_logp: float32 array of shape `(tokens,)` or `None`, the cotangent
            of the targets' log-probabilities.
    """
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for _, part in parts)
    gradient = -jnp.exp(student.logps()) * total
    for ids, part in parts:
        if ids is None:
            gradient = gradient + part
    gradient = gradient / student.temperature
    if by_logp is not None:
        columns = jax.lax.broadcasted_iota("int32", gradient.shape, 1)
        hit = (columns == targets[:, None]).astype("float32")
        surplus = hit - jnp.exp(student.logps_at_1())
        gradient = gradient + by_logp[:, None] * surplus
    rows = jnp.arange(gradient.shape[0])[:, None]
    for ids, part in parts:
        if ids is not None:
            gradient = gradient.at[rows, ids].add(part / student.temperature)
    return gradient


def _at(values, ids):
    return jnp.take_along_axis(values, ids, axis=-1)


def _values(student, found, shares, names, targets, weights):
    """The values of some tokens, and their parts of the sum."""

    def weighted(name):
        return sum(
            jnp.where(share != 0, share * of_one[name], 0.0)
            for of_one, share in zip(found, shares)
        )

    values = {"divergences": weighted("divergences")}
    whole = sum(shares)
    for name in ("agrees", "teacher_per_token_logps"):
        if name in names:
            mean = weighted(name) / jnp.where(whole == 0, 1.0, whole)
            values[name] = jnp.where(whole == 0, 0.0, mean)
    by_divergence, by_logp = weights
    total = jnp.where(
        by_divergence != 0, by_divergence * values["divergences"], 0.0
    )
    if by_logp is not None or "per_token_logps" in names:
        values["per_token_logps"] = student.of(targets)
    if by_logp is not None:
        total = total + by_logp * values["per_token_logps"]
    return {**values, "sum": total}
