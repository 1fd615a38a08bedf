"""Student and teachers chunk by chunk, against full distributions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_posttrain.losses.divergence import (
    forward_kl_loss,
    jsd_loss,
    reverse_kl_loss,
    uld_loss,
    with_tail,
)
from keras_posttrain.models.divergence_head import (
    FullTeacher,
    TopTeacher,
    divergence_sum,
)
from keras_posttrain.models.head import Head, select_tokens
from keras_posttrain.models.token_divergence import COMPANIONS

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 13, 8, 29
TEACHER_WIDTH, TEACHER_LENGTH, OTHER_VOCABULARY, K = 5, 17, 23, 4
SLOTS = ROWS * LENGTH
NEEDS = ("divergences", "per_token_logps", "agrees")
PLAIN = Head(transposed=False)
CAPPED = Head(transposed=True, soft_cap=2.5)


def draw(seed, *shape, dtype="float32"):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, dtype)


def kernel_of(head, seed, width=WIDTH, vocabulary=VOCABULARY):
    shape = (width, vocabulary)
    return draw(seed, *(shape[::-1] if head.transposed else shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """The compared tensors, and the settings."""

    head: Head = PLAIN
    teachers: tuple = ("full",)
    divergence: object = forward_kl_loss
    temperature: float = 1.0
    tail: bool = True
    hard: bool = True

    def arrays(self):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype("int32")
        mask = rng.random((ROWS, LENGTH)) < 0.6
        teachers = tuple(
            a_teacher(kind, seed, self.temperature)
            for seed, kind in enumerate(self.teachers)
        )
        shares = draw(8, len(teachers), SLOTS) ** 2
        weights = (draw(9, SLOTS), draw(10, SLOTS) if self.hard else None)
        hidden = draw(11, SLOTS, WIDTH)
        kernel = kernel_of(self.head, 12)
        return hidden, kernel, (ids, mask, teachers, shares, weights)


def a_teacher(kind, seed, temperature):
    rng = np.random.default_rng(100 + seed)
    if kind == "top":
        logits = rng.normal(size=(SLOTS, VOCABULARY)) * 2 / temperature
        logps = jax.nn.log_softmax(jnp.asarray(logits, "float32"))
        return TopTeacher(*jax.lax.top_k(logps, K)[::-1])
    transposed = kind in ("capped", "other vocabulary")
    head = Head(transposed, soft_cap=3.0 if kind == "capped" else None)
    size = OTHER_VOCABULARY if kind == "other vocabulary" else VOCABULARY
    source = rng.integers(0, ROWS * TEACHER_LENGTH, SLOTS)
    return FullTeacher(
        head,
        draw(200 + seed, ROWS * TEACHER_LENGTH, TEACHER_WIDTH),
        kernel_of(head, 300 + seed, TEACHER_WIDTH, size),
        jnp.asarray(source, "int32"),
    )


def whole_logits(head, hidden, kernel):
    logits = hidden @ (kernel.T if head.transposed else kernel)
    if head.soft_cap is not None:
        logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
    return logits


@functools.cache
def wanted(case):
    """Loss, values and gradients by the definition."""
    return both(whole, case)


def whole(case, hidden, kernel, arrays):
    """The definition, on all logits at once."""
    ids, mask, teachers, shares, weights = arrays
    source = np.maximum(np.arange(SLOTS) - 1, 0)
    used = (mask & (np.arange(LENGTH) > 0)).reshape(-1)
    logits = whole_logits(case.head, hidden[source], kernel)
    student = jax.nn.log_softmax(logits / case.temperature)
    targets = ids.reshape(-1, 1)
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, 1)[:, 0]
    best = jnp.argmax(logits, -1)
    divergences, agrees, total = 0.0, 0.0, sum(shares)
    for teacher, share in zip(teachers, shares):
        if isinstance(teacher, TopTeacher):
            ours = jnp.take_along_axis(student, teacher.ids, axis=-1)
            theirs = teacher.logps
            if case.tail:
                ours, theirs = with_tail(ours), with_tail(theirs)
            their_best = teacher.ids[:, 0]
        else:
            theirs = whole_logits(
                teacher.head, teacher.hidden[teacher.source], teacher.kernel
            )
            their_best = jnp.argmax(theirs, -1)
            ours = student
            theirs = jax.nn.log_softmax(theirs / case.temperature)
        divergences += share * case.divergence(ours, theirs)
        agrees += share / total * (best == their_best)
    values = {
        "divergences": divergences,
        "per_token_logps": logps,
        "agrees": agrees,
    }
    values = {k: jnp.where(used, v, 0.0) for k, v in values.items()}
    loss = jnp.sum(weights[0] * values["divergences"])
    if weights[1] is not None:
        loss += jnp.sum(weights[1] * values["per_token_logps"])
    return loss, values


def chunked(case, hidden, kernel, arrays, needs=NEEDS):
    if "other vocabulary" in case.teachers and needs == NEEDS:
        needs = NEEDS[:2]
    ids, mask, teachers, shares, weights = arrays
    tokens = select_tokens(jnp.asarray(ids), jnp.asarray(mask))
    in_order = [w if w is None else w[tokens.index] for w in weights]
    return divergence_sum(
        case.head,
        hidden,
        kernel,
        tokens,
        tuple(in_order),
        teachers,
        tuple(share[tokens.index] for share in shares),
        case.divergence,
        case.temperature,
        case.tail,
        needs,
    )


def gradients_of(path, case):
    """Loss, values, and the gradients of hidden states and kernel."""
    function = functools.partial(path, case)
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))


def both(path, case):
    return gradients_of(path, case)(*case.arrays())


def assert_same(got, want, atol=3e-6):
    (loss, values), gradients = got
    (whole_loss, whole_values), whole_gradients = want
    np.testing.assert_allclose(loss, whole_loss, rtol=3e-5, atol=1e-5)
    for name in whole_values:
        if name not in values:
            continue
        assert values[name].dtype == "float32"
        np.testing.assert_allclose(
            values[name],
            whole_values[name],
            rtol=3e-5,
            atol=atol,
            err_msg=name,
        )
    for name, a, b in zip(("hidden", "kernel"), gradients, whole_gradients):
        np.testing.assert_allclose(
            a, b, rtol=5e-5, atol=5 * atol, err_msg=f"gradient of the {name}"
        )


CASES = {
    "full": Case(),
    "temperature, no hard labels": Case(temperature=1.7, hard=False),
    "tied, capped": Case(head=CAPPED, temperature=2.0),
    "jensen-shannon": Case(divergence=jsd_loss),
    "reverse": Case(divergence=reverse_kl_loss, temperature=2.0),
    "top, temperature, capped": Case(
        head=CAPPED, teachers=("top",), temperature=2.0
    ),
    "top without a tail": Case(teachers=("top",), tail=False),
    "all kinds": Case(teachers=("full", "top", "capped"), temperature=1.5),
    "other vocabulary": Case(
        teachers=("other vocabulary",),
        divergence=uld_loss,
        temperature=2.0,
    ),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def cut(case, size, trainable=True, tile=None):
    head = dataclasses.replace(
        case.head, chunk_size=size, trainable=trainable, tile=tile
    )
    return dataclasses.replace(case, head=head)


@by_case
def test_chunks_give_what_whole_distributions_do(case):
    """In chunks of 16, each compared in two blocks of 8 on a CPU; products
    with tiles of the vocabulary, which overlap."""
    want = wanted(case)
    assert all((np.abs(g) > 1e-3).any() for g in want[1])
    assert_same(both(chunked, cut(case, 16, tile=8)), want)


@pytest.mark.parametrize("size", [1, 20, None])
def test_any_chunk_will_do(size):
    """Chunks that are no whole number of blocks are cut down, as 20 to 16;
    those of less than one are taken as they are."""
    case = CASES["tied, capped"]
    assert_same(both(chunked, cut(case, size)), wanted(case))


def test_a_frozen_head_has_the_same_hidden_gradient():
    case = CASES["tied, capped"]
    values, (by_hidden, by_kernel) = wanted(case)
    got = both(chunked, cut(case, 16, trainable=False))
    assert_same(got, (values, (by_hidden, 0 * by_kernel)))


def test_the_losss_own_cotangent_scales_the_gradient():
    case = CASES["tied, capped"]
    _, gradients = wanted(case)

    def tripled(*args):
        loss, values = chunked(*args)
        return 3 * loss, values

    _, got = both(tripled, case)
    for a, b in zip(got, gradients):
        np.testing.assert_allclose(a, 3 * b, rtol=1e-4, atol=5e-5)


def test_without_gradients_the_values_are_the_same():
    """The forward pass alone takes another way through the code."""
    case = CASES["all kinds"]
    (want, values), _ = wanted(case)
    got, found = jax.jit(functools.partial(chunked, case))(*case.arrays())
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-5)
    for name in NEEDS:
        np.testing.assert_allclose(
            found[name], values[name], rtol=3e-5, atol=3e-6
        )


def test_only_what_is_asked_for_is_given():
    case = CASES["full"]
    values = jax.eval_shape(
        functools.partial(chunked, case, needs=()), *case.arrays()
    )[1]
    assert set(values) == {"divergences"}


def test_the_teachers_own_log_probabilities():
    """Of two teachers, their mean by weight; at temperature 1, whatever the
    loss's."""
    case = Case(teachers=("full", "capped"), temperature=2.0)
    hidden, kernel, arrays = case.arrays()
    ids, mask, teachers, shares, _ = arrays
    _, values = jax.jit(functools.partial(chunked, case, needs=COMPANIONS))(
        hidden, kernel, arrays
    )
    want = 0.0
    for teacher, share in zip(teachers, shares):
        logits = whole_logits(
            teacher.head, teacher.hidden[teacher.source], teacher.kernel
        )
        logps = jax.nn.log_softmax(logits)
        logps = jnp.take_along_axis(logps, ids.reshape(-1, 1), 1)[:, 0]
        want += share / sum(shares) * logps
    used = (mask & (np.arange(LENGTH) > 0)).reshape(-1)
    np.testing.assert_allclose(
        values["teacher_per_token_logps"],
        np.where(used, want, 0.0),
        rtol=3e-5,
        atol=3e-6,
    )


@pytest.mark.parametrize(
    "kind, message",
    [("top", "may not be among"), ("other vocabulary", "29 .* and 23")],
)
def test_a_teacher_that_cannot_score_tokens_says_so(kind, message):
    case = Case(teachers=(kind,), divergence=uld_loss)
    hidden, kernel, arrays = case.arrays()
    with pytest.raises(ValueError, match=message):
        chunked(case, hidden, kernel, arrays, needs=COMPANIONS)


def test_a_student_like_its_teacher_has_no_gradient():
    case = Case(hard=False, temperature=2.0)
    hidden, kernel, (ids, mask, _, shares, weights) = case.arrays()
    source = jnp.maximum(jnp.arange(SLOTS, dtype="int32") - 1, 0)
    same = FullTeacher(case.head, hidden, kernel, source)
    function = gradients_of(chunked, case)
    arrays = (ids, mask, (same,), shares, weights)
    (loss, values), gradients = function(hidden, kernel, arrays)
    assert abs(loss) < 1e-6
    assert all(np.abs(g).max() < 1e-6 for g in gradients)
    used = (mask & (np.arange(LENGTH) > 0)).reshape(-1)
    np.testing.assert_allclose(values["agrees"], used, rtol=1e-6)


@pytest.mark.parametrize("kind", ["full", "top"])
def test_gradients_are_finite_at_the_edges(kind):
    """Logits in the tens of thousands: one-hot on both sides, and next to
    nothing is left for a tail."""
    divergence = {"full": reverse_kl_loss, "top": forward_kl_loss}[kind]
    case = Case(teachers=(kind,), divergence=divergence, temperature=2.0)
    hidden, kernel, arrays = case.arrays()
    ids, mask, (teacher,), shares, weights = arrays
    if kind == "top":
        sure = jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf)
        sharp = jnp.broadcast_to(sure, (SLOTS, K)).astype("float32")
        teacher = dataclasses.replace(teacher, logps=sharp)
    else:
        teacher = dataclasses.replace(teacher, hidden=teacher.hidden * 1e4)
    arrays = (ids, mask, (teacher,), shares, weights)
    function = gradients_of(chunked, case)
    for scale in (1.0, 1e4):
        found = function(hidden * scale, kernel, arrays)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("kind", ["full", "top"])
def test_what_is_not_compared_is_not_looked_at(kind):
    """NaN where no token is asked for, or where the teacher has no weight,
    reaches no sum and no gradient."""
    case = cut(Case(teachers=(kind, "capped")), 5)
    hidden, kernel, arrays = case.arrays()
    ids, mask, teachers, shares, weights = arrays
    mask[0, :2], mask[-1, -1] = False, False
    untaught = np.zeros((ROWS, LENGTH), bool)
    untaught[1] = True
    untaught = untaught.reshape(-1)
    shares = jnp.where(untaught, shares.at[0].set(0.0), shares)
    used = (mask & (np.arange(LENGTH) > 0)).reshape(-1)
    read = np.zeros(SLOTS, bool)
    read[np.flatnonzero(used) - 1] = True
    spoilt_hidden = jnp.where(read[:, None], hidden, jnp.nan)
    first = teachers[0]
    silent = untaught | ~used
    if kind == "top":
        logps = jnp.where(silent[:, None], jnp.nan, first.logps)
        spoilt = dataclasses.replace(first, logps=logps)
    else:
        at = jnp.arange(SLOTS, dtype="int32")
        first = FullTeacher(
            first.head, draw(5, SLOTS, TEACHER_WIDTH), first.kernel, at
        )
        theirs = jnp.where(silent[:, None], jnp.nan, first.hidden)
        spoilt = dataclasses.replace(first, hidden=theirs)
    function = gradients_of(chunked, case)
    rest = (shares, weights)
    want = function(hidden, kernel, (ids, mask, (first, teachers[1]), *rest))
    got = function(
        spoilt_hidden, kernel, (ids, mask, (spoilt, teachers[1]), *rest)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def test_no_token_gives_nothing():
    case = CASES["tied, capped"]
    hidden, kernel, (ids, mask, *rest) = case.arrays()
    function = gradients_of(chunked, case)
    found = function(hidden, kernel, (ids, np.zeros_like(mask), *rest))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(found))


def test_bfloat16_stays_within_its_rounding():
    """Products are summed in float32, so that the values are those of the
    rounded arrays; gradients are rounded to 2**-8 of the largest twice."""
    case = cut(CASES["tied, capped"], 8)
    hidden, kernel, (ids, mask, (teacher,), *rest) = case.arrays()
    hidden, kernel = hidden.astype("bfloat16"), kernel.astype("bfloat16")
    half = dataclasses.replace(
        teacher,
        hidden=teacher.hidden.astype("bfloat16"),
        kernel=teacher.kernel.astype("bfloat16"),
    )
    exact = dataclasses.replace(
        half,
        hidden=half.hidden.astype("float32"),
        kernel=half.kernel.astype("float32"),
    )
    functions = [gradients_of(path, case) for path in (chunked, whole)]
    got = functions[0](hidden, kernel, (ids, mask, (half,), *rest))
    want = functions[1](
        hidden.astype("float32"),
        kernel.astype("float32"),
        (ids, mask, (exact,), *rest),
    )
    for name in NEEDS:
        np.testing.assert_allclose(
            got[0][1][name], want[0][1][name], atol=3e-5
        )
    for a, b in zip(got[1], want[1]):
        assert a.dtype == "bfloat16"
        error = np.abs(a.astype("float32") - b).max()
        assert error <= 2**-6 * np.abs(b).max()


def test_jit_equals_no_jit_and_ranks_are_strict(strict_ranks):
    case = cut(Case(temperature=2.0), 5)
    hidden, kernel, (ids, mask, *rest) = case.arrays()
    mask = mask & (np.cumsum(mask).reshape(mask.shape) <= 5)
    arrays = (ids, mask, *rest)
    jitted = jax.jit(functools.partial(chunked, case))(hidden, kernel, arrays)
    with jax.disable_jit():
        loss, values = chunked(case, hidden, kernel, arrays)
    np.testing.assert_allclose(loss, jitted[0], rtol=1e-5)
    for name in NEEDS:
        np.testing.assert_allclose(
            values[name], jitted[1][name], rtol=3e-5, atol=3e-6
        )
    case = cut(CASES["all kinds"], 16)
    jax.eval_shape(gradients_of(chunked, case), *case.arrays())


@pytest.mark.parametrize("kind", ["full", "top"])
def test_memory_does_not_grow_with_length_times_vocabulary(kind):
    """Twice the tokens take twice what hidden states take, and no logits
    more: 1,024 tokens of 4,000 are 16 MB, student and teacher each."""
    size, k, width = 4000, 4, 16

    def temporaries(length):
        def loss(hidden, kernel, ids, theirs):
            tokens = select_tokens(ids, jnp.ones((1, length), bool))
            head = Head(transposed=True, chunk_size=64)
            weights = (jnp.ones(length), jnp.ones(length))
            if kind == "top":
                teacher = TopTeacher(*theirs)
            else:
                teacher = FullTeacher(head, *theirs)
            return divergence_sum(
                head, hidden, kernel, tokens, weights, (teacher,),
                (jnp.ones(length),), forward_kl_loss, 2.0, True, NEEDS,
            )  # fmt: skip

        def shaped(*shape, dtype="float32"):
            return jax.ShapeDtypeStruct(shape, dtype)

        theirs = (
            shaped(length, width),
            shaped(size, width),
            shaped(length, dtype="int32"),
        )
        if kind == "top":
            theirs = (shaped(length, k, dtype="int32"), shaped(length, k))
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        program = jax.jit(gradient).lower(
            shaped(length, width),
            shaped(size, width),
            shaped(1, length, dtype="int32"),
            theirs,
        )
        return program.compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(2048)
    assert long - short < 2**20 < 1024 * size * 4 / 8
    assert long < 2048 * size * 4


def test_one_product_a_chunk_for_each_side():
    """A chunk is projected once by the student and once by the teacher, also
    where its gradient is formed: counted as the compiled loop runs."""
    calls = {"student": 0, "teacher": 0}

    class Counting(Head):
        def logits(self, hidden, kernel):
            side = "student" if hidden.shape[-1] == WIDTH else "teacher"

            def count():
                calls[side] += 1

            jax.debug.callback(count)
            return super().logits(hidden, kernel)

    case = Case(temperature=2.0)
    hidden, kernel, (ids, mask, (teacher,), *rest) = case.arrays()
    case = dataclasses.replace(
        case, head=Counting(transposed=False, chunk_size=4)
    )
    teacher = dataclasses.replace(teacher, head=Counting(transposed=False))
    function = gradients_of(chunked, case)
    found = function(hidden, kernel, (ids, mask, (teacher,), *rest))
    jax.block_until_ready(found)
    jax.effects_barrier()
    count = int((mask & (np.arange(LENGTH) > 0)).sum())
    chunks = -(-count // 4)
    assert calls == {"student": chunks, "teacher": chunks}
