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

from keras_posttrain.models import token_divergence
from keras_posttrain.models.head import Head
from keras_posttrain.models.sharding import Split


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
        split: the kernel's `models/sharding.py:Split`, or `None`.
    """

    head: Head
    hidden: jax.Array
    kernel: jax.Array
    source: jax.Array
    split: Split | None = None

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
    FullTeacher, ["hidden", "kernel", "source"], ["head", "split"]
)
jax.tree_util.register_dataclass(TopTeacher, ["ids", "logps"], [])


def without_kernels(teachers):
    """Teachers as trees of rows alone, to be cut by rows.

    Args:
        teachers: sequence of `FullTeacher` and `TopTeacher`.

    Returns:
        `(teachers, kernels, splits)`: a tuple, and the kernels of the
        `FullTeacher`s and how each is split, lists.
    """
    full = [t for t in teachers if isinstance(t, FullTeacher)]
    rest = tuple(
        dataclasses.replace(t, kernel=None)
        if isinstance(t, FullTeacher)
        else t
        for t in teachers
    )
    return rest, [t.kernel for t in full], [t.split for t in full]


def with_kernels(teachers, kernels):
    """The teachers of some rows, complete again.

    Args:
        teachers: what `without_kernels` gave, or some rows of it.
        kernels: list of arrays.

    Returns:
        A tuple.
    """
    kernels, found = iter(kernels), []
    for teacher in teachers:
        if isinstance(teacher, FullTeacher):
            # Indices are those of all rows; in these, counted from the first.
            teacher = dataclasses.replace(
                teacher,
                kernel=next(kernels),
                source=teacher.source % teacher.hidden.shape[0],
            )
        found.append(teacher)
    return tuple(found)


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
        needs: names of `models/comparison.py:COMPANIONS` wanted beside
            `divergences`.

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
    names = [
        "divergences",
        *(n for n in token_divergence.COMPANIONS if n in needs),
    ]
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
        values, d_logits = token_divergence.by_block(
            functools.partial(
                token_divergence.compare,
                head.soft_cap,
                settings,
                names,
                gradients,
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
    block = token_divergence.BLOCK
    return size - size % block if size > block else size


def _vocabulary(head, kernel):
    return kernel.shape[0 if head.transposed else 1]
