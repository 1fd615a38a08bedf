"""Divergences of a student from its teachers, in chunks of tokens.

Each chunk is projected on the vocabulary by the student and its teachers and
compared. Logits never exist for all tokens at once, forward or backward. The
gradient with respect to the student's logits is computed in the same pass,
so that a student needs three matrix products with the vocabulary, as many as
a likelihood does, and a teacher one.
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
    """A teacher with its distribution over its full vocabulary.

    Args:
        head: `Head` of the teacher; its temperature is not used.
        hidden: float array of shape `(rows * teacher_length, dim)`.
        kernel: the teacher's kernel, in the dtype of `hidden`.
        source: int32 array of shape `(rows * length,)`: for each token of
            the student, the flat index of the teacher's hidden state that
            predicts it.
    """

    head: Head
    hidden: jax.Array
    kernel: jax.Array
    source: jax.Array
    split: Split | None = None

    def rows(self, index, used):
        """Returns the logits for the tokens of `index`."""
        h = jnp.where(used[:, None], self.hidden[self.source[index]], 0)
        head = dataclasses.replace(self.head, temperature=1.0)
        return head.logits_in_tiles(h, self.kernel)


@dataclasses.dataclass(frozen=True)
class TopTeacher:
    """A teacher of which only the top-k tokens are known.

    For each token of the student, `ids` (int32) are the teacher's most
    probable tokens at that position and `logps` (float32) their
    log-probabilities at the loss's temperature, `(rows * length, k)`.
    """

    ids: jax.Array
    logps: jax.Array

    def rows(self, index, used):
        """Returns ids and log-probabilities for the tokens of `index`."""
        del used
        return self.ids[index], self.logps[index]


jax.tree_util.register_dataclass(
    FullTeacher, ["hidden", "kernel", "source"], ["head", "split"]
)
jax.tree_util.register_dataclass(TopTeacher, ["ids", "logps"], [])


def without_kernels(teachers):
    """Separates teachers from their kernels, to be split by rows.

    Returns the teachers, whose arrays all have a leading `rows` axis, and
    for the `FullTeacher`s the lists of kernels and of their `Split`s.
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
    """Gives teachers their kernels back; undoes `without_kernels`."""
    kernels, found = iter(kernels), []
    for teacher in teachers:
        if isinstance(teacher, FullTeacher):
            # The indices count from the first row of the batch: they are
            # reduced to count from the first of these rows.
            teacher = dataclasses.replace(
                teacher,
                kernel=next(kernels),
                source=teacher.source % teacher.hidden.shape[0],
            )
        found.append(teacher)
    return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 7, 8, 9, 10))
def divergence_sum(
    head, hidden, kernel, tokens, weights, teachers, teacher_weights,
    divergence, temperature=1.0, tail=True, needs=(),
):  # fmt: skip
    """Sums weighted divergences from teachers and log-probabilities.

    `sum_t by_divergence_t * D_t + by_logp_t * logp_t`, where `D_t` is
    `sum_i teacher_weights[i, t] * divergence(student_t, teacher_i_t)`.

    Args:
        head, hidden, kernel, tokens: of the student, as in
            `models/head.py:token_values`; the head's temperature is not
            used.
        weights: pair of float32 arrays of shape `(slots,)`, `by_divergence`
            and `by_logp`, in the order of `tokens`; `by_logp` may be `None`.
        teachers: sequence of `FullTeacher` and `TopTeacher`.
        teacher_weights: float32 array of shape `(teachers, slots)`.
        divergence: function from float32 log-probabilities of the student
            and of the teacher, both `(tokens, outcomes)`, to `(tokens,)`;
            differentiable in the first argument.
        temperature: float, divides the logits of both before they are
            compared. Log-probabilities of tokens are at temperature 1.
        tail: bool; in addition to a teacher's top tokens, the rest of the
            vocabulary is one more outcome.
        needs: names out of `COMPANIONS` to return with `divergences`.

    Returns:
        `(sum, values)`; the sum has gradients with respect to `hidden` and,
        if `head.trainable`, to `kernel`. `values` is a dict of float32 arrays
        of shape `(rows * length,)` without gradients, 0 for tokens that were
        not selected. `agrees` is 1 where the most probable tokens of teacher
        and student are the same. With several teachers, it and
        `teacher_per_token_logps` are means weighted by `teacher_weights`.
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
    # The backward pass returns gradients in the dtypes of these arrays.
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
    """Loops over the chunks once: `(sum, values, gradients)`."""
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
    # Unused slots write to one more element at the end, removed below.
    carry = {name: jnp.zeros(slots + 1, "float32") for name in names}
    carry["sum"] = jnp.zeros((), "float32")
    if gradients:
        carry["d_hidden"] = jnp.zeros(hidden.shape, "float32")
    if gradients and head.trainable:
        carry["d_kernel"] = jnp.zeros(kernel.shape, "float32")

    def body(start, size, carry):
        index, source, targets, weights, shares = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size),
            by_slot,
        )
        used = start + jnp.arange(size) < tokens.count
        weights, shares = jax.tree.map(
            lambda x: jnp.where(used, x, 0.0), (weights, shares)
        )
        # Unused slots get h = 0, so that the hidden state of another token,
        # which may be NaN, has no effect.
        h = jnp.where(used[:, None], hidden[source], 0)
        logits = head.logits_in_tiles(h, kernel)
        theirs = [teacher.rows(index, used) for teacher in teachers]
        rows = (logits, theirs, targets, weights, shares)
        values, d_logits = token_divergence.map_blocks(
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
        by_hidden, by_kernel = head.gradients(
            lambda tile: tile.take(d_logits, axis=1),
            h,
            kernel,
            carry.get("d_kernel"),
        )
        new["d_hidden"] = carry["d_hidden"].at[source].add(by_hidden)
        if head.trainable:
            new["d_kernel"] = by_kernel
        return new

    with jax.named_scope("head"):
        carry = head.over_chunks(kernel, size, tokens.count, body, carry)
    values = {name: carry.pop(name)[:slots] for name in names}
    return carry.pop("sum"), values, carry


def _check(head, kernel, teachers, needs):
    """Raises an error if a teacher cannot provide the values needed."""
    ours = head.vocabulary_size(kernel)
    for teacher in teachers:
        if isinstance(teacher, TopTeacher):
            if "teacher_per_token_logps" in needs:
                raise ValueError(
                    "The tokens of a batch may not be among a teacher's most "
                    "probable ones. Use a teacher with its full "
                    "distribution. Received: "
                    f"needs={needs}, top-{teacher.ids.shape[1]} of a teacher"
                )
            continue
        theirs = teacher.head.vocabulary_size(teacher.kernel)
        named = {"agrees", "teacher_per_token_logps"} & set(needs)
        if named and ours != theirs:
            raise ValueError(
                f"{sorted(named)} compare single tokens, which requires one "
                "vocabulary. Use a loss that does not need them. Received: "
                f"vocabularies of {ours} (student) and {theirs} (teacher) "
                "tokens"
            )


def _chunk(head, kernel, teachers, slots):
    """Returns the chunk size that fits the largest vocabulary."""
    pairs = [(head, kernel)]
    pairs += [
        (t.head, t.kernel) for t in teachers if isinstance(t, FullTeacher)
    ]
    sizes = [h.chunk(h.vocabulary_size(k), slots) for h, k in pairs]
    size = min(sizes)
    block = token_divergence.BLOCK
    return size - size % block if size > block else size
