"""Divergences from a teacher: reference cases, values by hand, derivatives
compared with float64, and finite results at the ends of the range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses import divergence
from tests.support import load_json

losses = kpt.losses
pytestmark = pytest.mark.usefixtures("strict_ranks")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

REFERENCE = load_json("distill.json")
ARRAYS = {k: np.array(v, "float32") for k, v in REFERENCE["inputs"].items()}
LITERALS = load_json("tunix_literals.json")["logit_distill"]

LOSSES = {
    "forward": losses.ForwardKLLoss(),
    "reverse": losses.ReverseKLLoss(),
    "jsd": losses.JSDLoss(),
    "jsd 0.1": losses.JSDLoss(beta=0.1),
    "jsd 0.9": losses.JSDLoss(beta=0.9),
    "jsd 1e-7": losses.JSDLoss(beta=1e-7),
    "jsd 1 - 1e-7": losses.JSDLoss(beta=1 - 1e-7),
    "scaled 1e-6": losses.JSDLoss(beta=1e-6, scaled=True),
    "scaled 0.3": losses.JSDLoss(beta=0.3, scaled=True),
    "scaled 1 - 1e-6": losses.JSDLoss(beta=1 - 1e-6, scaled=True),
    "skew": losses.SkewKLLoss(),
    "skew 0.7": losses.SkewKLLoss(skew=0.7),
    "skew 1e-6": losses.SkewKLLoss(skew=1e-6),
    "skew reverse": losses.SkewKLLoss(reverse=True),
    "skew reverse 1e-6": losses.SkewKLLoss(skew=1e-6, reverse=True),
    "variation": losses.TotalVariationLoss(),
    "uld": losses.ULDLoss(),
}
by_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def exact(loss, student, teacher):
    """The divergence of float64 logits, by its definition."""

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    p, q = softmax(teacher), softmax(student)
    match loss:
        case losses.ForwardKLLoss():
            return kl(p, q)
        case losses.ReverseKLLoss():
            return kl(q, p)
        case losses.JSDLoss(beta=b, scaled=scaled):
            m = b * p + (1 - b) * q
            value = b * kl(p, m) + (1 - b) * kl(q, m)
            return value / (b * (1 - b)) if scaled else value
        case losses.SkewKLLoss(skew=a, reverse=False):
            return kl(p, a * p + (1 - a) * q)
        case losses.SkewKLLoss(skew=a):
            return kl(q, a * q + (1 - a) * p)
        case losses.TotalVariationLoss():
            return np.abs(p - q).sum(-1) / 2
        case losses.ULDLoss():
            return np.abs(np.sort(p) - np.sort(q)).sum(-1)


def slope(function, x, step=1e-4):
    """Central differences of a function of rows, by their last axis."""
    gradient = np.zeros_like(x)
    for i in range(x.shape[-1]):
        moved = np.zeros(x.shape[-1])
        moved[i] = step
        gradient[:, i] = (function(x + moved) - function(x - moved)) / step / 2
    return gradient


@functools.cache
def compiled(loss):
    def total(student, teacher):
        values = loss.divergence(
            jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
        )
        return values.sum(), values

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def value_and_gradient(loss, student, teacher):
    """Of each row of logits."""
    (_, values), gradient = compiled(loss)(student, teacher)
    return np.array(values), np.array(gradient)


# The reference


def reference_run(loss, reduction):
    """Loss and gradient by the student's logits, on the file's arrays."""
    mask = (ARRAYS["labels"] != -100).astype("float32")
    teacher = jax.nn.log_softmax(ARRAYS["teacher_logits"] / loss.temperature)
    count = mask.sum()
    divisor = {"batchmean": count, "sum": 1.0, "num_items_7": 7.0}[reduction]

    def value(logits):
        student = jax.nn.log_softmax(logits / loss.temperature)
        outputs = {"divergences": loss.divergence(student, teacher)}
        mean, _ = loss({"completion_mask": mask}, outputs)
        return mean * count / divisor

    return jax.value_and_grad(value)(ARRAYS["student_logits"])


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda c: c["name"])
def test_jsd_is_trls(case):
    settings, want = case["settings"], case["expected"]
    loss = losses.JSDLoss(
        beta=settings["beta"],
        temperature=settings["temperature"],
        squared_temperature=False,
        kl_at_ends=True,
    )
    value, gradient = reference_run(loss, settings["reduction"])
    np.testing.assert_allclose(value, want["loss"], **CLOSE)
    if want["grad_wrt_student_logits"] is not None:
        np.testing.assert_allclose(
            gradient, want["grad_wrt_student_logits"], **CLOSE
        )


@pytest.mark.parametrize("beta", [0, 1])
def test_ends_are_those_of_the_kl_losses(beta):
    kinds = (losses.ForwardKLLoss, losses.ReverseKLLoss)
    want = reference_run(kinds[beta](), "sum")
    for loss in (
        losses.JSDLoss(beta=beta, kl_at_ends=True),
        losses.JSDLoss(beta=float(beta), scaled=True),
        losses.SkewKLLoss(skew=0, reverse=bool(beta)),
    ):
        got = reference_run(loss, "sum")
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("alpha", LITERALS["loss"])
def test_alpha_and_temperature_are_tunixs(alpha):
    """alpha T^2 KL(teacher || student) at T + (1 - alpha) cross-entropy."""
    student, teacher = (
        np.array(LITERALS[name], "float32") for name in ("student", "teacher")
    )
    loss = losses.ForwardKLLoss(alpha=float(alpha), temperature=LITERALS["T"])
    student_logps, teacher_logps = (
        jax.nn.log_softmax(x / loss.temperature) for x in (student, teacher)
    )
    labels = np.array(LITERALS["labels"])
    outputs = {
        "divergences": loss.divergence(student_logps, teacher_logps),
        "per_token_logps": jax.nn.log_softmax(student)[np.arange(4), labels],
    }
    outputs = {name: value[None] for name, value in outputs.items()}
    value, _ = loss({"completion_mask": np.ones((1, 4))}, outputs)
    np.testing.assert_allclose(value, LITERALS["loss"][alpha], **CLOSE)


# Values and derivatives


def test_by_hand():
    """Student (.7, .2, .1), teacher (.5, .3, .2), natural logarithms.

    Forward: .5 log(5/7) + .3 log(3/2) + .2 log 2 = .092033. Reverse:
    .7 log(7/5) + .2 log(2/3) + .1 log(1/2) = .085123. With the mean
    (.6, .25, .15) of both: .5 log(5/6) + .3 log(6/5) + .2 log(4/3) = .021074
    and .7 log(7/6) + .2 log(4/5) + .1 log(2/3) = .022730 (to rounding), half
    of the sum is .021901. Half of .2 + .1 + .1 is .2. Skewed by .1, the
    mixture is (.68, .21, .11): .5 log(50/68) + .3 log(30/21) + .2 log(20/11).
    """
    student, teacher = np.log([[0.7, 0.2, 0.1]]), np.log([[0.5, 0.3, 0.2]])
    skewed = 0.5 * np.log(50 / 68) + 0.3 * np.log(30 / 21)
    skewed += 0.2 * np.log(20 / 11)
    for name, want in {
        "forward": 0.092033,
        "reverse": 0.085123,
        "jsd": 0.021901,
        "jsd 0.1": 0.008185,
        "jsd 0.9": 0.007695,
        "variation": 0.2,
        "uld": 0.4,
        "skew": skewed,
    }.items():
        got = LOSSES[name].divergence(student, teacher)
        np.testing.assert_allclose(got, [want], atol=1e-6, err_msg=name)


@by_loss
def test_value_and_gradient_are_those_of_float64(loss):
    """Logits from nearly equal to nearly certain, e^-100 and less."""
    rng = np.random.default_rng(0)
    spreads = np.repeat([0.01, 1.0, 5.0, 20.0], 36)[:, None]
    if isinstance(loss, losses.TotalVariationLoss | losses.ULDLoss):
        spreads[:36] = 0.5  # a step must not lead past a kink
    logits = (rng.normal(0, 1, (2, 144, 9)) * spreads).astype("float32")
    value, gradient = value_and_gradient(loss, *logits)
    student, teacher = logits.astype("float64")
    want = exact(loss, student, teacher)
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=3e-6)
    want = slope(lambda x: exact(loss, x, teacher), student)
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-5)


@by_loss
def test_equal_distributions_are_at_rest(loss):
    logits = np.random.default_rng(0).normal(0, 5, (144, 9)).astype("float32")
    logits[:, 7] = -np.inf
    logps = jax.nn.log_softmax(logits)
    value, by_logps = jax.vjp(lambda x: loss.divergence(x, logps), logps)
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_array_equal(by_logps(jnp.ones(144))[0], 0)
    # Equal but for the rounding of two ways to add up.
    value, gradient = value_and_gradient(loss, logits, logits + np.float32(3))
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=2e-6)


@by_loss
def test_ends_are_finite(loss):
    """One-hot sides, impossible tokens, and no token in common."""
    hot, flat, none = [0, -np.inf, -np.inf], [0.0, 0, 0], [-np.inf, 0, 0]
    steep, other = [0, -300, 50], [40, 0, -2e4]
    kinds = np.array([hot, flat, none, steep, other, [0, 0, -np.inf]])
    kinds = np.concatenate([kinds, kinds * 100])  # a temperature of 0.01
    fill = [(0, 0), (0, 6)]
    kinds = np.pad(kinds, fill, constant_values=-np.inf).astype("float32")
    student, teacher = np.repeat(kinds, 12, 0), np.tile(kinds, (12, 1))
    value, gradient = value_and_gradient(loss, student, teacher)
    assert np.isfinite(gradient).all()
    assert np.isfinite(value).all() and (value >= -1e-6).all()
    np.testing.assert_array_equal(value[::13], 0)
    np.testing.assert_allclose(gradient[::13], 0, atol=1e-6)
    if loss.same_vocabulary:
        # The first and the third have no token in common.
        assert value[2] >= value.max() * (1 - 1e-5) or value[2] > 1e4


def test_certain_teacher_is_cross_entropy():
    """Of a one-hot teacher the forward KL is -log q, gradient q - onehot."""
    student = np.array([[1.0, 2.0, -1.0]], "float32")
    teacher = np.array([[-np.inf, 0.0, -np.inf]], "float32")
    loss = losses.ForwardKLLoss()
    value, gradient = value_and_gradient(loss, student, teacher)
    logps = np.array(jax.nn.log_softmax(student))
    np.testing.assert_allclose(value, -logps[:, 1], rtol=1e-6)
    np.testing.assert_allclose(
        gradient, np.exp(logps) - [[0.0, 1.0, 0.0]], rtol=1e-5
    )


def test_bounds():
    """Nothing in common: log 2 at most for Jensen-Shannon, -log(skew) for
    the skewed KL, 1 for the total variation."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 8, (2, 144, 9)).astype("float32")
    logits[0, 0, :4] = logits[1, 0, 4:] = -np.inf
    for name, bound in {
        "jsd": np.log(2),
        "jsd 0.1": -0.1 * np.log(0.1) - 0.9 * np.log(0.9),
        "skew": -np.log(0.1),
        "skew reverse": -np.log(0.1),
        "variation": 1.0,
    }.items():
        value, _ = value_and_gradient(LOSSES[name], *logits)
        assert (value >= 0).all() and (value <= bound + 1e-6).all(), name
        np.testing.assert_allclose(value[0], bound, rtol=1e-6, err_msg=name)


def test_scaled_jsd_has_no_jump():
    """From the forward KL at 0 to the reverse KL at 1, step by step; at 0.5
    it is four times the Jensen-Shannon divergence."""
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 1, (2, 1, 9)).astype("float32")

    sides = [jax.nn.log_softmax(x) for x in (student, teacher)]

    def value(**settings):
        return losses.JSDLoss(**settings).divergence(*sides)[0]

    betas = [0, 1e-37, 1e-20, 1e-9, 1e-3, *np.linspace(0.02, 1, 20)]
    values = np.array([value(beta=b, scaled=True) for b in betas])
    np.testing.assert_allclose(values[1:4], values[0], rtol=1e-5)
    np.testing.assert_allclose(values[4], values[0], rtol=2e-2)
    assert np.abs(np.diff(values)).max() < 0.05 * values.mean()
    ends = [losses.ForwardKLLoss(), losses.ReverseKLLoss()]
    ends = [loss.divergence(*sides)[0] for loss in ends]
    np.testing.assert_array_equal(values[[0, -1]], ends)
    np.testing.assert_allclose(
        value(beta=0.5, scaled=True), 4 * value(beta=0.5), rtol=1e-6
    )


def test_what_is_left_out_counts_once():
    """(.5, .3 | .2) against (.1, .1 | .8): three outcomes.

    .5 log 5 + .3 log 3 + .2 log(1/4) = .857044. Where only one token is left
    out, the rest is that token, and gradients are those of all.
    """
    teacher, student = np.log([[0.5, 0.3]]), np.log([[0.1, 0.1]])
    tails = divergence.with_tail(student), divergence.with_tail(teacher)
    np.testing.assert_allclose(np.exp(tails[0]), [[0.1, 0.1, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(
        losses.ForwardKLLoss().divergence(*tails),
        [0.5 * np.log(5) + 0.3 * np.log(3) + 0.2 * np.log(0.25)],
        rtol=1e-6,
    )
    logits = np.random.default_rng(0).normal(0, 1, (2, 4, 6)).astype("float32")

    class MostLoss(losses.JSDLoss):
        def divergence(self, *sides):
            sides = (divergence.with_tail(x[..., :-1]) for x in sides)
            return super().divergence(*sides)

    got = value_and_gradient(MostLoss(), *logits)
    want = value_and_gradient(losses.JSDLoss(), *logits)
    for one, other in zip(got, want):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd", "skew"])
def test_no_rest_is_no_trouble(name):
    """Probabilities that sum to 1, or by rounding to more."""
    sides = np.log([[[0.75, 0.25]], [[0.5, 0.5]], [[1.0, 1e-30]]])
    sides = np.concatenate([sides, sides[:1] + 1e-7, [[[0.0, -np.inf]]]])

    def total(student, teacher):
        tails = divergence.with_tail(student), divergence.with_tail(teacher)
        return LOSSES[name].divergence(*tails).sum()

    sides = sides[:, 0].astype("float32")
    student, teacher = np.repeat(sides, 5, 0), np.tile(sides, (5, 1))
    result = jax.jit(jax.value_and_grad(total))(student, teacher)
    assert all(np.isfinite(x).all() for x in result)


def test_the_rest_has_a_least_probability():
    """One millionth, without a gradient; above it, 1 minus the sum."""
    inside = np.array([[0.75, 0.25], [0.75, 0.2499995], [0.75, 0.24999]])
    logps = np.log(inside).astype("float32")
    tail, by_logps = jax.vjp(lambda x: divergence.with_tail(x)[:, -1], logps)
    np.testing.assert_allclose(np.exp(tail[:2]), 1e-6, rtol=1e-5)
    np.testing.assert_allclose(np.exp(tail[2]), 1e-5, rtol=2e-2)
    (gradient,) = by_logps(jnp.ones(3))
    np.testing.assert_array_equal(gradient[:2], 0)
    np.testing.assert_allclose(gradient[2], -inside[2] / 1e-5, rtol=2e-2)


def test_an_impossible_token_costs_a_bound():
    """(1/2, 1/2) against (1, 0) and (1, e^-35000): half of the distances,
    the first one cut off at 1e5 nats."""
    even = np.log([[0.5, 0.5]] * 2)
    steep = np.array([[0.0, -np.inf], [0.0, -35_000.0]])
    want = np.array([50_000, 17_500]) - np.log(2)
    for name, sides in {
        "forward": (steep, even),
        "reverse": (even, steep),
    }.items():
        got = LOSSES[name].divergence(*sides)
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("share", [1e-30, 1e-17, 0.25])
def test_the_smallest_shares_have_their_bounds(share):
    """No token in common: -log(skew); scaled, -log(beta) / (1 - beta) and
    -log(1 - beta) / beta are added. Unscaled, the ends are 0."""
    sides = np.array([[0.0, -np.inf]]), np.array([[-np.inf, 0.0]])
    of_own, of_other = -np.log(share), -np.log1p(-share) / share
    for reverse in (False, True):
        got = losses.skew_kl_loss(*sides, skew=share, reverse=reverse)
        np.testing.assert_allclose(got, [of_own], rtol=1e-6)
    got = losses.jsd_loss(*sides, beta=share, scaled=True)
    want = of_own / (1 - share) + of_other
    np.testing.assert_allclose(got, [want], rtol=1e-6)
    for beta in (0, 1):
        got = losses.jsd_loss(*sides, beta=beta)
        np.testing.assert_array_equal(got, [0])


def test_probabilities_of_zero_make_no_nan_on_the_way():
    """`jax_debug_nans` stops at each: e^-200 is 0 for one side or both."""
    student, teacher = jnp.array([[[0, -200, -200.0]], [[-200, 0, -200.0]]])
    kinds = ("forward", "reverse", "jsd", "scaled 0.3", "skew", "skew reverse")
    with jax.debug_nans(True):
        for name in kinds:
            function = LOSSES[name].divergence
            run = jax.value_and_grad(lambda x, f=function: f(x, teacher).sum())
            assert all(np.isfinite(x).all() for x in run(student)), name
        # The three outcomes have all of the probability.
        rest = jax.grad(lambda x: divergence.with_tail(x)[0, -1])(student)
        np.testing.assert_array_equal(rest, 0)


@pytest.mark.parametrize("name, factor", [("variation", 0.5), ("uld", 1.0)])
def test_what_counts_as_rounding(name, factor):
    """Relative differences of 1e-4 have a gradient, those of 2e-6 none."""
    teacher = np.log(np.array([[0.4, 0.3, 0.2, 0.1]] * 2))
    signs = np.array([1, -1, 1, -1])
    student = teacher + np.array([[1e-4], [2e-6]]) * signs
    gradient = jax.grad(lambda x: LOSSES[name].divergence(x, teacher).sum())
    got = gradient(jnp.asarray(student, "float32"))
    want = factor * np.exp(teacher) * signs * [[1], [0]]
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_equal_top_tokens_are_at_rest_without_a_tail():
    """Of two outcomes of many, the student is to have the teacher's
    probabilities, no less and no more."""
    teacher = np.log(np.array([[0.4, 0.3]], "float32"))
    for name in ("forward", "reverse", "jsd", "skew", "skew reverse"):
        function = LOSSES[name].divergence
        run = jax.value_and_grad(lambda x, f=function: f(x, teacher).sum())
        value, gradient = run(teacher)
        assert value == 0 and (gradient == 0).all(), name
        for factor in (0.9, 1.1):
            value, gradient = run(teacher + np.float32(np.log(factor)))
            assert value > 0 and (gradient * (factor - 1) > 0).all(), name


# Vocabularies that differ


def test_uld_sorts_and_fills_up():
    """(.6, .3, .1) and (.2, .1, .3, .4): in order .6 .3 .1 0 and
    .4 .3 .2 .1, distance .2 + 0 + .1 + .1 = .4."""
    loss = losses.ULDLoss()
    student = np.log([[0.3, 0.6, 0.1]])
    teacher = np.log([[0.2, 0.1, 0.3, 0.4]])
    for sides in ((student, teacher), (teacher, student)):
        value = loss.divergence(*sides)
        np.testing.assert_allclose(value, [0.4], atol=1e-6)
    gradient = jax.grad(lambda x: loss.divergence(x, teacher).sum())
    # The largest is to shrink, the smallest to grow; what fits stays.
    np.testing.assert_allclose(
        gradient(jnp.asarray(student)), [[0.0, 0.6, -0.1]], atol=1e-6
    )
    assert not loss.same_vocabulary and "agrees" not in loss.needs


@pytest.mark.parametrize(
    "loss", [x for x in LOSSES.values() if x.same_vocabulary]
)
def test_other_vocabularies_are_refused(loss):
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\).*ULDLoss"):
        loss.divergence(np.zeros((2, 3)), np.zeros((2, 4)))


# The loss of a batch


def example(rows=4, length=6, seed=0, teacher_mask=True):
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    batch = {"completion_mask": rng.integers(0, 3, shape) / 2}
    if teacher_mask:
        batch["teacher_mask"] = rng.integers(0, 2, shape)
    outputs = {
        "divergences": rng.uniform(0, 2, shape),
        "per_token_logps": -rng.uniform(0, 5, shape),
        "agrees": rng.integers(0, 2, shape),
    }

    def narrow(arrays):
        return {k: v.astype("float32") for k, v in arrays.items()}

    return narrow(batch), narrow(outputs)


def test_loss_by_hand():
    """Weights 1 and 2 on two tokens, one of them without a teacher.

    Divergence: (1 * 0.5) / 1, times alpha T^2 = 0.25 * 4. Hard labels:
    (1 * 3 + 2 * 6) / 3 = 5, times 0.75. In all 0.5 + 3.75. The last token has
    no weight.
    """
    loss = losses.ForwardKLLoss(temperature=2.0, alpha=0.25)
    batch = {
        "completion_mask": np.array([[0.0, 1.0, 2.0, 0.0]], "float32"),
        "teacher_mask": np.array([[1.0, 1.0, 0.0, 1.0]], "float32"),
    }
    outputs = {
        "divergences": np.array([[np.nan, 0.5, 7.0, np.inf]], "float32"),
        "per_token_logps": np.array([[0.0, -3.0, -6.0, np.nan]], "float32"),
        "agrees": np.array([[1.0, 1.0, 0.0, 0.0]], "float32"),
    }
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, 4.25, rtol=1e-6)
    want = {"divergence": 0.5, "hard_loss": 5.0, "agreement": 1.0}
    assert set(metrics) == set(loss.metric_names)
    for name, number in want.items():
        np.testing.assert_allclose(metrics[name], number, rtol=1e-6)
    plain = losses.ForwardKLLoss(
        temperature=2.0, alpha=0.25, squared_temperature=False
    )
    np.testing.assert_allclose(
        plain(batch, outputs)[0], 0.25 * 0.5 + 3.75, rtol=1e-6
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_micro_batches_and_jit_change_nothing(alpha):
    loss = losses.JSDLoss(alpha=alpha, temperature=1.5)
    batch, outputs = example()
    want, metrics = loss(batch, outputs)
    jitted, _ = jax.jit(loss)(batch, outputs)
    np.testing.assert_allclose(jitted, want, rtol=1e-6)
    normalizers = loss.normalizers(batch)
    assert ("hard_loss" in normalizers) == (alpha != 1)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4)):
        part, found = ({k: v[rows] for k, v in x.items()}
                       for x in (batch, outputs))  # fmt: skip
        terms, _ = loss.total(part, found)
        assert set(terms) == set(normalizers)
        total += sum(terms[name] / normalizers[name] for name in terms)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    mixed = alpha * 1.5**2 * metrics["divergence"]
    mixed += (1 - alpha) * metrics["hard_loss"]
    np.testing.assert_allclose(want, mixed, rtol=1e-6)


def test_nothing_to_learn_is_zero():
    loss = losses.ForwardKLLoss(alpha=0.5)
    batch, outputs = example()
    batch["completion_mask"][:] = 0
    outputs["divergences"][:] = np.nan

    def value(divergences, logps):
        found = {"divergences": divergences, "per_token_logps": logps}
        return loss(batch, found)[0]

    run = jax.value_and_grad(value, argnums=(0, 1))
    result = run(outputs["divergences"], outputs["per_token_logps"])
    for array in jax.tree.leaves(result):
        np.testing.assert_array_equal(array, 0)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: losses.ForwardKLLoss(temperature=0),
            "above 0.*temperature=0",
        ),
        (lambda: losses.ULDLoss(temperature=-1.0), "temperature=-1.0"),
        (
            lambda: losses.ULDLoss(temperature=np.inf),
            "finite.*temperature=inf",
        ),
        (lambda: losses.ReverseKLLoss(alpha=1.5), "from 0 .*alpha=1.5"),
        (lambda: losses.JSDLoss(alpha=-0.1), "`alpha` of JSDLoss"),
        (lambda: losses.JSDLoss(alpha=float("nan")), "alpha=nan"),
        (lambda: losses.JSDLoss(beta=1.1), "from 0 to 1.*beta=1.1"),
        (lambda: losses.JSDLoss(beta=-0.1, scaled=True), "beta=-0.1"),
        (lambda: losses.JSDLoss(beta=0), "beta=0.*`ForwardKLLoss.*kl_at_ends"),
        (lambda: losses.JSDLoss(beta=1.0), "beta=1.0.*`ReverseKLLoss.*scaled"),
        (lambda: losses.SkewKLLoss(skew=1.0), "below 1.*skew=1.0"),
        (lambda: losses.SkewKLLoss(skew=-0.5), "skew=-0.5"),
        (lambda: losses.HiddenStateLoss(metric="l1"), "'mse'.*metric='l1'"),
        (lambda: losses.HiddenStateLoss(matching="crop"), "matching='crop'"),
        (lambda: losses.AttentionLoss(matching="none"), "matching='none'"),
        (lambda: losses.HiddenStateLoss(layers="all"), "pairs.*layers='all'"),
        (lambda: losses.HiddenStateLoss(layers=[0, 1]), "pairs.*layers="),
        (lambda: losses.AttentionLoss(layers=[]), r"layers=\[\]"),
        (lambda: losses.AttentionLoss(layers=[(0, 1.5)]), r"\(0, 1.5\)"),
        (lambda: losses.HiddenStateLoss(layers=[(0, 1, 2)]), "pairs"),
    ],
)
def test_settings_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Features


def feature_outputs(loss, student, teacher):
    arrays = (np.asarray(x, "float32") for x in (student, teacher))
    return dict(zip(loss.needs, arrays))


def test_hidden_states_by_hand():
    """Two layers, two dimensions; the second token alone has weight.

    Mean squared differences (1 + 9) / 2 and (0 + 4) / 2, mean 3.5. Angles:
    (1, 0) and (0, 3) are at right angles, (2, 2) and (1, 1) at none: cosine
    distances 1 and 0, mean 0.5.
    """
    batch = {"completion_mask": np.array([[0.0, 1.0]], "float32")}
    nothing = [[np.nan, np.inf]] * 2
    student = [[nothing, [[1, 0], [2, 3]]]]
    teacher = [[nothing, [[0, 3], [2, 1]]]]
    loss = losses.HiddenStateLoss()
    value, metrics = loss(batch, feature_outputs(loss, student, teacher))
    np.testing.assert_allclose(value, 3.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["hidden_state_loss"], 3.5, rtol=1e-6)
    loss = losses.HiddenStateLoss(metric="cosine")
    student[0][1][1], teacher[0][1][1] = [2, 2], [1, 1]
    value, _ = loss(batch, feature_outputs(loss, student, teacher))
    np.testing.assert_allclose(value, 0.5, atol=1e-6)
    assert not loss.logps_mask(batch).any()


def test_attention_by_hand():
    """Two heads over two keys, of one token and layer.

    Squared differences (.1, .1) of the first head: .02; (.5, .5) of the
    second: .5. Mean over heads .26.
    """
    loss = losses.AttentionLoss()
    batch = {"completion_mask": np.array([[0.0, 1.0]], "float32")}
    first = [[1.0, 0.0, 1.0, 0.0]]
    student = [[first, [[0.4, 0.6, 0.5, 0.5]]]]
    teacher = [[first, [[0.5, 0.5, 1.0, 0.0]]]]
    outputs = feature_outputs(loss, student, teacher)
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, 0.26, rtol=1e-6)
    np.testing.assert_allclose(metrics["attention_loss"], 0.26, rtol=1e-6)
    turned, _ = losses.AttentionLoss(metric="cosine")(batch, outputs)
    cosines = [1 / np.sqrt(2 * (0.16 + 0.36)), 1 / np.sqrt(2)]
    np.testing.assert_allclose(turned, 1 - np.mean(cosines), rtol=1e-5)


def test_features_are_weighted():
    """Squared distances 2 and 4 with weights 1 and 3, and a third token that
    has no counterpart: (1 * 2 + 3 * 4) / 4."""
    loss = losses.HiddenStateLoss()
    batch = {
        "completion_mask": np.array([[1.0, 3.0, 5.0]], "float32"),
        "teacher_mask": np.array([[1.0, 1.0, 0.0]], "float32"),
    }
    student = np.sqrt([2.0, 4.0, 9.0]).reshape(1, 3, 1, 1)
    outputs = feature_outputs(loss, student, np.zeros((1, 3, 1, 1)))
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, 3.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["hidden_state_loss"], 3.5, rtol=1e-6)
    assert loss.normalizers(batch) == {"hidden_state": 4}


def test_short_vectors_have_a_direction_down_to_a_millionth():
    student = np.array([[2e-6, 0.0], [5e-7, 0.0]], "float32")
    teacher = np.array([[3.0, 0.0], [3.0, 0.0]], "float32")
    got = losses.hidden_state_loss(
        student[:, None], teacher[:, None], "cosine"
    )
    np.testing.assert_allclose(got, [0, 1], atol=1e-6)


@pytest.mark.parametrize("metric", ["mse", "cosine"])
@pytest.mark.parametrize(
    "kind", [losses.HiddenStateLoss, losses.AttentionLoss]
)
def test_features_at_the_ends(kind, metric):
    """Zero vectors, equal ones, and no number where there is no weight; the
    teacher is a constant."""
    loss = kind(metric=metric)
    rng = np.random.default_rng(0)
    student = rng.normal(0, 1, (2, 4, 3, 8)).astype("float32")
    student[0, 1] = 0
    teacher = student.copy()
    teacher[0, 2] = 0
    student[1, 3] = teacher[1, 2] = np.nan
    batch = {
        "completion_mask": np.array([[0, 1, 1, 1], [0, 1, 1, 0]], "float32"),
        "teacher_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 1]], "float32"),
    }

    def value(*sides):
        return loss(batch, dict(zip(loss.needs, sides)))[0]

    run = jax.jit(jax.grad(value, (0, 1)))
    by_student, by_teacher = run(student, teacher)
    assert np.isfinite(by_student).all()
    np.testing.assert_array_equal(by_teacher, 0)
    np.testing.assert_array_equal(by_student[1, 2:], 0)
    np.testing.assert_allclose(by_student[0, 1], 0, atol=1e-7)
    np.testing.assert_allclose(by_student[0, 3], 0, atol=1e-6)


def test_features_of_unequal_shape_are_refused():
    batch = {"completion_mask": np.ones((1, 2), "float32")}
    loss = losses.HiddenStateLoss()
    shapes = np.zeros((1, 2, 1, 4)), np.zeros((1, 2, 1, 6))
    with pytest.raises(ValueError, match="student_features.*4.*6"):
        loss(batch, feature_outputs(loss, *shapes))
    shapes = np.zeros((1, 2, 4)), np.zeros((1, 2, 4))
    with pytest.raises(ValueError, match=r"\(rows, length, layers, dim\)"):
        loss(batch, feature_outputs(loss, *shapes))
    loss = losses.AttentionLoss()
    shapes = np.zeros((1, 2, 1, 5)), np.zeros((1, 2, 1, 5))
    with pytest.raises(ValueError, match="heads.*5"):
        loss(batch, feature_outputs(loss, *shapes))


def test_features_add_to_a_divergence():
    """Each with its own counts, weights 1 and 0.1; settings stay hashable."""
    parts = losses.JSDLoss(), losses.HiddenStateLoss(layers=[[0, 1], (-1, 2)])
    assert parts[1].layers == ((0, 1), (-1, 2))
    loss = losses.SumLoss(parts, weights=[1.0, 0.1])
    hash(loss)
    batch, outputs = example()
    rng = np.random.default_rng(0)
    features = rng.normal(0, 1, (2, 4, 6, 2, 5))
    outputs |= feature_outputs(parts[1], *features)
    got, metrics = loss(batch, outputs)
    want = [part(batch, outputs)[0] for part in parts]
    np.testing.assert_allclose(got, want[0] + 0.1 * want[1], rtol=1e-6)
    assert {"divergence", "hidden_state_loss"} <= set(metrics)
    np.testing.assert_array_equal(
        loss.logps_mask(batch), batch["completion_mask"] != 0
    )
