"""Policy-gradient losses: reference cases, values by hand, and what every
one of them must keep however a batch is laid out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses import corrections, importance, reductions
from keras_posttrain.losses.policy_gradient import ppo_loss
from tests.support import load_json

losses = kpt.losses
pytestmark = pytest.mark.usefixtures("strict_ranks")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

REFERENCE = load_json("grpo_arrays.json")
ARRAYS = {k: np.array(v, "float32") for k, v in REFERENCE["inputs"].items()}

# Every loss with a KL term and an entropy bonus, then what goes with all.
SHARED = {"beta": 0.1, "entropy_coef": 0.01}
LOSSES = [
    losses.GRPOLoss(**SHARED),
    losses.GRPOLoss(delta=1.3, kl_estimator="k1", **SHARED),
    losses.GRPOLoss(
        importance_sampling_level="sequence",
        epsilon=0.05,
        kl_estimator="k3_corrected",
        **SHARED,
    ),
    losses.DrGRPOLoss(max_completion_length=12, **SHARED),
    losses.DAPOLoss(kl_estimator="k2", **SHARED),
    losses.BNPOLoss(masks=[losses.TopEntropyMask(0.4)], **SHARED),
    losses.PPOLoss(masks=[losses.OffPolicyMask(0.02)], **SHARED),
    losses.GSPOLoss(epsilon=0.05, **SHARED),
    losses.GSPOTokenLoss(epsilon=0.05, **SHARED),
    losses.LUSPOLoss(epsilon=0.05, **SHARED),
    losses.CISPOLoss(max_ratio=1.1, **SHARED),
    losses.SAPOLoss(**SHARED),
    losses.VESPOLoss(correction=losses.ImportanceCorrection(), **SHARED),
    losses.ReinforceLoss(**SHARED),
    losses.ReinforceLoss(epsilon=0.2, **SHARED),
    losses.GRPOLoss(
        correction=losses.ImportanceCorrection("sequence_mask", max_ratio=1.2)
    ),
]


def name_of(loss):
    defaults = type(loss)()
    changed = [
        f"{field.name}={getattr(loss, field.name)}"
        for field in dataclasses.fields(loss)
        if getattr(loss, field.name) != getattr(defaults, field.name)
        and field.name not in SHARED
    ]
    return " ".join([type(loss).__name__, *changed])


by_loss = pytest.mark.parametrize("loss", LOSSES, ids=name_of)


def evaluate(loss, batch, outputs):
    """`(value, metrics, gradient by the log-probabilities)`."""

    def value(logps):
        return loss(batch, {**outputs, "per_token_logps": logps})

    run = jax.value_and_grad(value, has_aux=True)
    (found, metrics), gradient = run(jnp.asarray(outputs["per_token_logps"]))
    return found, metrics, gradient


def assert_same_metrics(got, want):
    assert set(got) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, err_msg=name, **CLOSE)


# The reference


def reference_loss(settings, clipped_reinforce=False):
    low, high = settings["epsilon_low"], settings["epsilon_high"]
    if clipped_reinforce:
        return losses.ReinforceLoss(epsilon=low, epsilon_high=high)
    masks = []
    if settings["top_entropy_quantile"] < 1:
        masks.append(losses.TopEntropyMask(settings["top_entropy_quantile"]))
    if settings["off_policy_mask_threshold"] is not None:
        threshold = settings["off_policy_mask_threshold"]
        masks.append(losses.OffPolicyMask(threshold))
    engine = settings.get("vllm_importance_sampling")
    corrected = settings["use_bias_correction_kl"]
    options = {
        "beta": settings["beta"],
        "kl_estimator": "k3_corrected" if corrected else "k3",
        "entropy_coef": settings["entropy_coef"],
        "masks": masks,
        "correction": engine
        and losses.ImportanceCorrection(
            engine["mode"], engine["clip_max"], engine["clip_min"]
        ),
    }
    kind = settings["loss_type"]
    clip = {"epsilon": low, "epsilon_high": high, "delta": settings["delta"]}
    if kind == "luspo":
        return losses.LUSPOLoss(**clip, **options)
    if kind == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        shape = {f"{n}itive": settings[f"vespo_{n}"] for n in names[:2]}
        shape |= {f"{n}ative": settings[f"vespo_{n}"] for n in names[2:]}
        return losses.VESPOLoss(**shape, **options)
    options["importance_sampling_level"] = settings[
        "importance_sampling_level"
    ]
    if kind == "cispo":
        return losses.CISPOLoss(max_ratio=high, **options)
    if kind == "sapo":
        return losses.SAPOLoss(
            positive_temperature=settings["sapo_temperature_pos"],
            negative_temperature=settings["sapo_temperature_neg"],
            **options,
        )
    if kind == "dr_grpo":
        options["max_completion_length"] = settings["max_completion_length"]
    classes = {
        "grpo": losses.GRPOLoss,
        "bnpo": losses.BNPOLoss,
        "dapo": losses.DAPOLoss,
        "dr_grpo": losses.DrGRPOLoss,
    }
    return classes[kind](**clip, **options)


def reference_batch(settings):
    mask = ARRAYS["completion_mask"].copy()
    if settings.get("use_tool_mask"):
        mask *= ARRAYS["tool_mask"]
    mask[settings.get("zeroed_mask_rows", [])] = 0
    batch = {
        "segment_ids": np.ones(mask.shape, "int32"),
        "sequence_mask": np.ones((len(mask), 1), "float32"),
        "completion_mask": mask,
        "advantages": ARRAYS["advantages"][:, None],
        "ref_per_token_logps": ARRAYS["ref_per_token_logps"],
    }
    if settings.get("old_logps", "given") == "given":
        batch["old_per_token_logps"] = ARRAYS["old_per_token_logps"]
    engine = settings.get("vllm_importance_sampling")
    if engine:
        rollout = ARRAYS["sampling_per_token_logps"].copy()
        for row, column in engine.get("missing_sampling_logps", []):
            rollout[row, column] = np.nan
        batch["rollout_per_token_logps"] = rollout
    return batch


@pytest.mark.parametrize(
    "case",
    REFERENCE["cases"] + REFERENCE["rloo_cases"],
    ids=lambda case: case["name"],
)
def test_reference(case):
    """Loss, gradient and every metric. Where the reference accumulates
    gradients it divides by the number of micro-batches; a loss here is that
    of the rows it is given."""
    settings, want = case["settings"], case["expected"]
    loss = reference_loss(settings, case["name"].startswith("rloo"))
    outputs = {
        "per_token_logps": ARRAYS["per_token_logps"],
        "entropies": ARRAYS["entropies"],
    }
    found = evaluate(loss, reference_batch(settings), outputs)
    value, metrics, gradient = found
    parts = settings.get("gradient_accumulation_steps", 1)
    np.testing.assert_allclose(value, want["loss"] * parts, **CLOSE)
    wanted = np.array(want["grad_wrt_per_token_logps"]) * parts
    np.testing.assert_allclose(gradient, wanted, **CLOSE)
    for name, number in want["metrics"].items():
        np.testing.assert_allclose(
            metrics[name], number, err_msg=name, **CLOSE
        )


# By hand


def rows_of(mask, advantages, ratios, logps=-1.0):
    """A batch whose sequences have `ratios` to the old policy."""
    mask = np.array(mask, "float32")
    logps = np.full(mask.shape, logps, "float32")
    batch = {
        "segment_ids": np.ones(mask.shape, "int32"),
        "sequence_mask": np.ones((len(mask), 1), "float32"),
        "completion_mask": mask,
        "advantages": np.array(advantages, "float32"),
        "old_per_token_logps": logps - np.log(np.array(ratios, "float32")),
    }
    return batch, {"per_token_logps": logps}


@pytest.mark.parametrize(
    "high, delta, positive, negative",
    [
        (None, None, [0.5, 1, 1.2, 1.2, 1.2], [0.8, 1, 1.25, 1.5, 4]),
        (0.28, None, [0.5, 1, 1.25, 1.28, 1.28], [0.8, 1, 1.25, 1.5, 4]),
        (0.28, 3, [0.5, 1, 1.25, 1.28, 1.28], [0.8, 1, 1.25, 1.5, 3]),
    ],
)
def test_the_clipped_objective_of_single_tokens(
    high, delta, positive, negative
):
    """A = 1: -min(r, 1 + high); A = -1: max(r, 0.8), at most delta. Where
    the clip holds there is no gradient, elsewhere it is -A r."""
    ratios = np.array([0.5, 1, 1.25, 1.5, 4], "float32")
    logs = jnp.log(ratios)

    def value(logs, advantage):
        advantages = jnp.full_like(logs, advantage)
        return ppo_loss(logs, advantages, 0.2, high, delta)

    slope = jax.grad(lambda *x: value(*x).sum())
    for advantage, want in ((1.0, -np.array(positive)), (-1.0, negative)):
        got = value(logs, advantage)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        free = np.isclose(np.abs(want), ratios)
        np.testing.assert_allclose(
            slope(logs, advantage),
            np.where(free, -advantage * ratios, 0.0),
            rtol=1e-6,
        )


# Two completions, of 3 tokens and of 2, A = 1 and -1.
HAND = rows_of(
    [[1, 1, 1], [1, 1, 0]], [[1.0], [-1.0]], [[1.5, 1, 0.5], [0.5, 1.5, 1]]
)


@pytest.mark.parametrize(
    "loss, want",
    [
        (losses.GRPOLoss(beta=0), 0.125),
        (losses.GRPOLoss(beta=0, epsilon_high=0.28), 0.111667),
        (losses.BNPOLoss(), -0.08),
        (losses.DAPOLoss(), -0.096),
        (losses.DrGRPOLoss(max_completion_length=8), -0.025),
        (
            losses.GRPOLoss(beta=0, importance_sampling_level="sequence"),
            -0.021267,
        ),
        (losses.LUSPOLoss(epsilon=0.2, epsilon_high=0.2), -0.496815),
        (losses.CISPOLoss(), 0.2),
        (losses.SAPOLoss(negative_temperature=1.0), 0.0),
        (losses.VESPOLoss(), 0.436266),
    ],
    ids=lambda value: getattr(type(value), "__name__", value),
)
def test_two_completions(loss, want):
    """Ratios (1.5, 1, .5) with A = 1 and (.5, 1.5) with A = -1.

    Clipped, epsilon .2: -(1.2 + 1 + .5) = -2.7 and .8 + 1.5 = 2.3. GRPO:
    (-2.7 / 3 + 2.3 / 2) / 2 = .125; BNPO (-2.7 + 2.3) / 5 = -.08; Dr. GRPO
    with 8: -.4 / 16 = -.025; .28 above: -2.78. Sequences: .75**(1/3) =
    .90856 and .75**(1/2) = .86603: GRPO (-.90856 + .86603) / 2, LUSPO
    (-3 * .90856 + 2 * .86603) / 2. CISPO, all logps -1: (3 - 2) / 5 for the
    ratios' sums. VESPO: w = .75 for both, phi = .75**2 e**.75 = 1.190813 and
    .75**3 e**.5 = .695554: (3 * 1.190813 - 2 * .695554) / 5. SAPO's gates
    are symmetric about r = 1, so that with one temperature both completions
    have a mean gate of 2: (-2 + 2) / 2.
    """
    value, _ = loss(*HAND)
    np.testing.assert_allclose(value, want, atol=1e-6)


def test_the_dual_clip_of_two_completions():
    """delta = 1.4 cuts the 1.5 of A = -1: (-2.7 / 3 + 2.2 / 2) / 2 = .1."""
    value, metrics = losses.GRPOLoss(beta=0, delta=1.4)(*HAND)
    np.testing.assert_allclose(value, 0.1, atol=1e-6)
    # One of five tokens each: .5 under A = -1, 1.5 under A = 1.
    np.testing.assert_allclose(metrics["clip_ratio/low_mean"], 0.2)
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], 0.2)
    np.testing.assert_allclose(metrics["clip_ratio/region_mean"], 0.4)
    np.testing.assert_allclose(metrics["clip_ratio/low_min"], 0.0)
    np.testing.assert_allclose(metrics["clip_ratio/high_max"], 1 / 3)


@pytest.mark.parametrize(
    "loss, want",
    [
        (losses.PPOLoss(), 0.36),
        (losses.GRPOLoss(beta=0), 0.325),
        (losses.DrGRPOLoss(max_completion_length=3), 0.3),
        (losses.LUSPOLoss(), 0.9),
    ],
    ids=lambda value: getattr(type(value), "__name__", value),
)
def test_what_sums_are_divided_by_and_advantages_of_tokens(loss, want):
    """On-policy a token's loss is minus its advantage: (.1, .2) and (.4, .5,
    .6). All tokens: 1.8 / 5; means of sequences: (.15 + .5) / 2; 3 a
    sequence: 1.8 / 6; sums: (.3 + 1.5) / 2."""
    advantages = -np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    batch, outputs = rows_of([[1, 1, 0], [1, 1, 1]], advantages, np.ones(3))
    np.testing.assert_allclose(loss(batch, outputs)[0], want, rtol=1e-6)


def test_one_row_of_two_sequences_is_no_mean_over_its_tokens():
    """A = 1.5 on 3 tokens and 3 on one: -(1.5 + 3) / 2 = -2.25, where the
    mean over the row's tokens would be -(4.5 + 3) / 4."""
    batch = {
        "segment_ids": np.array([[1, 1, 1, 2, 0]]),
        "sequence_mask": np.array([[1.0, 1.0, 0.0]]),
        "completion_mask": np.array([[1.0, 1.0, 1.0, 1.0, 0.0]]),
        "advantages": np.array([[1.5, 3.0, np.nan]]),
    }
    outputs = {"per_token_logps": np.full((1, 5), -2.0)}
    for loss in (losses.GRPOLoss(beta=0), losses.GSPOTokenLoss()):
        np.testing.assert_allclose(loss(batch, outputs)[0], -2.25)


def test_reinforce_by_hand():
    """A = 2 on logps -1, -1 and A = -1 on -1: (-2 * -2 + -1) / 2 = 1.5; the
    gradient of a token is -A / 2."""
    batch, outputs = rows_of([[1, 1], [1, 0]], [[2.0], [-1.0]], np.ones(2))
    found = evaluate(losses.ReinforceLoss(), batch, outputs)
    np.testing.assert_allclose(found[0], 1.5)
    np.testing.assert_allclose(found[2], [[-1, -1], [0.5, 0]])


def test_kl_estimates():
    """k1 is the difference, k2 half its square, k3 e^d - d - 1."""
    arrays = load_json("tunix_literals.json")["kl"]
    logps, ref = (np.array(arrays[k])[0, 0] for k in ("logps", "ref"))
    want = {
        "k1": [0.38486493, 0.7469206, 0.3495195, 0.5621129],
        "k2": [0.07406051, 0.27894518, 0.06108194, 0.15798548],
        "k3": [0.0654075, 0.220744, 0.0545462, 0.1321163],
    }
    for estimator, values in want.items():
        got = importance.kl_estimate(logps, ref, estimator)
        np.testing.assert_allclose(got, values, rtol=1e-5)


def test_the_gradients_that_kl_estimates_have_in_the_mean():
    """Over all outcomes, weighted by their probability: k1's is 0, k2's and
    the corrected k3's is that of KL(policy || reference), k3's that of
    KL(reference || policy)."""
    logits = jnp.array([0.3, -0.5, 1.1])
    ref = jax.nn.log_softmax(jnp.array([0.9, 0.2, -0.4]))
    constant = jax.lax.stop_gradient

    def mean(logits, estimator):
        logps = jax.nn.log_softmax(logits)
        values = importance.kl_estimate(logps, ref, estimator)
        if estimator == "k3_corrected":
            values = values * jnp.exp(logps - constant(logps))
        return jnp.sum(constant(jnp.exp(logps)) * values)

    def divergence(p, q):
        return jnp.sum(jnp.exp(p) * (p - q))

    def forward(x):
        return divergence(ref, jax.nn.log_softmax(x))

    def reverse(x):
        return divergence(jax.nn.log_softmax(x), ref)

    want = {
        "k1": jnp.zeros(3),
        "k2": jax.grad(reverse)(logits),
        "k3": jax.grad(forward)(logits),
        "k3_corrected": jax.grad(reverse)(logits),
    }
    for estimator, gradient in want.items():
        got = jax.grad(mean)(logits, estimator)
        np.testing.assert_allclose(got, gradient, atol=1e-6)
        if estimator in ("k1", "k3", "k3_corrected"):
            value = mean(logits, estimator)
            np.testing.assert_allclose(value, reverse(logits), rtol=1e-5)


def test_the_kl_term_is_added_after_masks_and_correction():
    """A = 0 leaves the KL term alone: e^.5 - .5 - 1 on each token of one
    sequence, whatever the mask and the weight."""
    batch, outputs = rows_of([[1, 1]], [[0.0]], [[1.0, 1.0]])
    batch["ref_per_token_logps"] = outputs["per_token_logps"] + 0.5
    batch["rollout_per_token_logps"] = outputs["per_token_logps"] - 1
    outputs["entropies"] = np.array([[1.0, 2.0]])
    loss = losses.GRPOLoss(
        beta=0.1,
        masks=[losses.TopEntropyMask(0.1)],
        correction=losses.ImportanceCorrection("token_mask"),
    )
    value, metrics = loss(batch, outputs)
    k3 = np.exp(0.5) - 1.5
    np.testing.assert_allclose(value, 0.1 * k3, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"], k3, rtol=1e-6)
    np.testing.assert_allclose(metrics["mask_ratio/top_entropy"], 0.5)


# Masks and corrections


@pytest.mark.parametrize(
    "quantile, kept", [(0.2, 3), (0.5, 6), (1.0, 12), (1e-6, 1)]
)
def test_the_most_uncertain_tokens_of_the_batch_are_kept(quantile, kept):
    """12 tokens with entropies 0.0, 0.1 ... 1.1, and two without loss that
    are larger: the threshold at 0.8 is 0.8 * 11 = 8.8 places up, .88, and
    leaves .9, 1.0 and 1.1."""
    entropies = np.array([[*range(6), 50], [*range(6, 12), 90]]) / 10
    mask = np.ones((2, 7))
    mask[:, -1] = 0
    batch, outputs = rows_of(mask, [[1.0], [1.0]], np.ones(7))
    tokens = importance.PolicyTokens.of(
        batch, {**outputs, "entropies": entropies}
    )
    keep = losses.TopEntropyMask(quantile).keep(tokens) & (mask != 0)
    want = np.sort(entropies[mask != 0])[-kept:]
    np.testing.assert_allclose(np.sort(entropies[keep]), want)


def test_sequences_that_went_off_policy_are_left_out():
    """Falls of .5, 0 and .5 nats with A = 1, -1, -1: only the last has a
    negative advantage and a fall above .1."""
    batch, outputs = rows_of(
        np.ones((3, 2)), [[1.0], [-1.0], [-1.0]], np.ones((3, 2))
    )
    batch["rollout_per_token_logps"] = outputs["per_token_logps"] + np.array(
        [[0.2, 0.8], [0.5, -0.5], [1.0, 0.0]], "float32"
    )
    tokens = importance.PolicyTokens.of(batch, outputs)
    keep = losses.OffPolicyMask(0.1).keep(tokens)
    np.testing.assert_array_equal(keep, [[True] * 2, [True] * 2, [False] * 2])
    loss = losses.GRPOLoss(beta=0, masks=[losses.OffPolicyMask(0.1)])
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, (-1 + 1 + 0) / 3, atol=1e-7)
    np.testing.assert_allclose(metrics["mask_ratio/off_policy"], 1 / 3)


@pytest.mark.parametrize(
    "mode, low, want",
    [
        ("token_truncate", None, [2.0, 0.5, 1.0]),
        ("token_truncate", 0.8, [2.0, 0.8, 1.0]),
        ("token_mask", None, [0.0, 0.5, 1.0]),
        ("token_mask", 0.8, [0.0, 0.0, 1.0]),
        ("sequence_truncate", None, [1.5] * 3),
        ("sequence_mask", None, [1.5] * 3),
        ("sequence_truncate", 1.0, [1.5] * 3),
    ],
)
def test_corrections(mode, low, want):
    """Ratios of old policy to engine 3, .5 and, not reported, 1; bounds 2
    and `low`; their product is 1.5. The loss of A = 1 on-policy is minus
    the mean weight."""
    batch, outputs = rows_of([[1, 1, 1, 0]], [[1.0]], np.ones(4))
    ratios = np.array([[3.0, 0.5, np.nan, 7.0]], "float32")
    batch["rollout_per_token_logps"] = outputs["per_token_logps"] - np.log(
        ratios
    )
    correction = losses.ImportanceCorrection(mode, min_ratio=low)
    loss = losses.BNPOLoss(correction=correction)
    value, metrics, gradient = evaluate(loss, batch, outputs)
    np.testing.assert_allclose(value, -np.mean(want), rtol=1e-6)
    np.testing.assert_allclose(gradient[0, :3], -np.array(want) / 3, rtol=1e-6)
    prefix = "sampling/importance_sampling_ratio/"
    np.testing.assert_allclose(metrics[prefix + "min"], min(want), rtol=1e-6)
    np.testing.assert_allclose(metrics[prefix + "max"], max(want), rtol=1e-6)
    np.testing.assert_allclose(
        metrics[prefix + "mean"], np.mean(want), rtol=1e-6
    )
    # |log 3|, |log .5|, the third has none; (3 + .5 + 1)^2 / (3 * (9 + .25
    # + 1)).
    prefix = "sampling/sampling_logp_difference/"
    np.testing.assert_allclose(metrics[prefix + "max"], np.log(3), rtol=1e-6)
    np.testing.assert_allclose(
        metrics[prefix + "mean"], np.log(6) / 2, rtol=1e-6
    )
    share = 1.0 if mode.startswith("sequence") else 4.5**2 / 30.75
    np.testing.assert_allclose(
        metrics["sampling/effective_sample_size"], share, rtol=1e-6
    )


def test_small_differences_add_up_over_a_sequence():
    """.012 nats over 100 tokens: e^1.2 = 3.32 for the sequence, 1.012 for a
    token. A mask at 3 takes the sequence away; a token's is untouched."""
    batch, outputs = rows_of(np.ones((1, 100)), [[1.0]], np.ones(100))
    batch["rollout_per_token_logps"] = outputs["per_token_logps"] - 0.012
    tokens = importance.PolicyTokens.of(batch, outputs)
    for mode, want in (
        ("sequence_mask", 0.0),
        ("sequence_truncate", 3.0),
        ("token_mask", np.exp(0.012)),
    ):
        correction = losses.ImportanceCorrection(mode, max_ratio=3.0)
        got = correction.weights(tokens)
        np.testing.assert_allclose(got, np.full((1, 100), want), rtol=1e-5)
    wide = losses.ImportanceCorrection("sequence_mask", max_ratio=None)
    np.testing.assert_allclose(wide.weights(tokens)[0, 0], 3.320117, rtol=1e-5)


@pytest.mark.parametrize("mode", corrections.CORRECTION_MODES)
def test_vespo_takes_the_correction_into_its_ratio(mode):
    """Token ratios to the engine 1.25 and 1.6, within all bounds: their
    product, 2, times the policy's own, 1, is w for A = 1: phi = 2**2 e**-3.
    The loss is phi (logps of -1), and nothing else is multiplied by it."""
    batch, outputs = rows_of([[1, 1]], [[1.0]], [[1.0, 1.0]])
    batch["rollout_per_token_logps"] = outputs["per_token_logps"] - np.log(
        np.array([[1.25, 1.6]], "float32")
    )
    correction = losses.ImportanceCorrection(mode, max_ratio=3.0)
    value, _ = losses.VESPOLoss(correction=correction)(batch, outputs)
    np.testing.assert_allclose(value, 4 * np.exp(-3), rtol=1e-5)


# What holds for every loss


def example(sequences=6, seed=0):
    """Sequences of unequal length, one a row: a prompt and a completion with
    a tool's text in it, one completion empty."""
    rng = np.random.default_rng(seed)
    length = 9
    mask = np.zeros((sequences, length), "float32")
    segment_ids = np.zeros((sequences, length), "int32")
    for row in range(sequences):
        end = rng.integers(5, length + 1)
        segment_ids[row, :end] = 1
        mask[row, 2:end] = rng.random(end - 2) < 0.8
    mask[3] = 0
    logps = rng.uniform(-3, -0.1, mask.shape)
    shifts = {
        "old_per_token_logps": 0.3,
        "ref_per_token_logps": 0.5,
        "rollout_per_token_logps": 0.35,
    }
    arrays = {
        name: logps + scale * rng.normal(size=mask.shape)
        for name, scale in shifts.items()
    }
    batch = {
        "segment_ids": segment_ids,
        "sequence_mask": np.ones((sequences, 1), "float32"),
        "completion_mask": mask,
        "advantages": rng.normal(size=(sequences, 1)).astype("float32"),
        **{k: v.astype("float32") for k, v in arrays.items()},
    }
    outputs = {
        "per_token_logps": logps.astype("float32"),
        "entropies": rng.uniform(0, 3, mask.shape).astype("float32"),
    }
    return batch, outputs


def pack(arrays, segment_ids, slots=4):
    """Two rows become one, with one slot unused."""
    packed = {}
    for name, values in arrays.items():
        if name in ("sequence_mask", "advantages"):
            filler = 0.0 if name == "sequence_mask" else np.nan
            new = np.full((len(values) // 2, slots), filler, "float32")
            new[:, :2] = values.reshape(-1, 2)
            packed[name] = new
            continue
        rows = []
        for pair in np.split(np.arange(len(values)), len(values) // 2):
            kept = [values[i][segment_ids[i] > 0] for i in pair]
            if name == "segment_ids":
                kept = [k * (place + 1) for place, k in enumerate(kept)]
            rows.append(np.concatenate(kept))
        new = np.zeros((len(rows), 20), values.dtype)
        for row, kept in zip(new, rows):
            row[: len(kept)] = kept
        packed[name] = new
    return packed


@by_loss
def test_packed_equals_unpacked(loss):
    batch, outputs = example()
    segment_ids = batch["segment_ids"]
    value, metrics, gradient = evaluate(loss, batch, outputs)
    got = evaluate(loss, pack(batch, segment_ids), pack(outputs, segment_ids))
    np.testing.assert_allclose(got[0], value, **CLOSE)
    assert_same_metrics(got[1], metrics)
    want = pack({"gradient": np.array(gradient)}, segment_ids)["gradient"]
    np.testing.assert_allclose(got[2], want, **CLOSE)


@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if not loss.batch_coupled], ids=name_of
)
def test_micro_batches_add_up_to_the_batch(loss):
    """Totals and metrics of parts, divided by the counts of the whole."""
    batch, outputs = example()
    want, want_metrics = loss(batch, outputs)
    normalizers = loss.normalizers(batch)
    parts = [
        loss.total(
            {k: v[rows] for k, v in batch.items()},
            {k: v[rows] for k, v in outputs.items()},
        )
        for rows in (slice(0, 3), slice(3, 6))
    ]
    value = sum(
        part[name] / normalizers[name] for part, _ in parts for name in part
    )
    np.testing.assert_allclose(value, want, **CLOSE)
    stacked = {
        name: (kind, *map(jnp.stack, zip(*(p[name][1:] for _, p in parts))))
        for name, (kind, *_) in parts[0][1].items()
    }
    merged = reductions.merge_metrics(stacked)
    got = {k: reductions.metric_value(v) for k, v in merged.items()}
    assert_same_metrics(got, want_metrics)


@by_loss
def test_masked_equals_sliced(loss):
    """A row without a sequence and columns without loss change nothing."""
    batch, outputs = example()
    batch["completion_mask"][:, 7:] = 0
    batch["completion_mask"][5] = 0
    batch["sequence_mask"][5] = 0
    value, metrics = loss(batch, outputs)
    short = {
        k: v[:5] if v.shape[1] == 1 else v[:5, :7] for k, v in batch.items()
    }
    got = loss(short, {k: v[:5, :7] for k, v in outputs.items()})
    np.testing.assert_allclose(got[0], value, **CLOSE)
    assert_same_metrics(got[1], metrics)


@by_loss
def test_what_is_no_number_stays_out_under_a_zero_mask(loss):
    batch, outputs = example()
    off = batch["completion_mask"] == 0
    bad = np.resize([np.nan, np.inf, -np.inf], off.shape)
    want = evaluate(loss, batch, outputs)
    for arrays in (batch, outputs):
        for name, values in arrays.items():
            if name.endswith("logps") or name == "entropies":
                arrays[name] = np.where(off, bad, values)
    got = evaluate(loss, batch, outputs)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[2], want[2])
    assert_same_metrics(got[1], want[1])


@by_loss
def test_an_empty_mask_gives_no_gradient(loss):
    """The completions are empty: what loss remains (the clipped value of a
    sequence that is nothing) moves no token, and all metrics are finite."""
    batch, outputs = example()
    batch["completion_mask"] *= 0
    value, metrics, gradient = evaluate(loss, batch, outputs)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
    assert all(np.isfinite(v) for v in metrics.values()), metrics
    batch["sequence_mask"] *= 0
    value, metrics, gradient = evaluate(loss, batch, outputs)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))
    assert all(np.isfinite(v) for v in metrics.values()), metrics


@by_loss
def test_jit_equals_no_jit_and_metrics_have_the_names_announced(loss):
    batch, outputs = example()
    value, metrics = loss(batch, outputs)
    jitted, jitted_metrics = jax.jit(loss)(batch, outputs)
    np.testing.assert_allclose(jitted, value, **CLOSE)
    assert_same_metrics(jitted_metrics, metrics)
    assert set(metrics) == set(loss.metric_names)
    assert len(loss.metric_names) == len(set(loss.metric_names))
    assert value.dtype == "float32"


@by_loss
def test_on_policy_the_ratio_is_one_and_the_divergence_zero(loss):
    """Old, reference and engine all the policy itself; every clip, gate and
    weight is then 1, so that the gradient is REINFORCE's: minus advantage
    times the weight of a token."""
    loss = dataclasses.replace(loss, entropy_coef=0.0, masks=())
    batch, outputs = example()
    for name in ("old", "ref", "rollout"):
        batch[f"{name}_per_token_logps"] = outputs["per_token_logps"]
    _, metrics, gradient = evaluate(loss, batch, outputs)
    assert metrics.get("kl", 0) == 0
    for name, number in metrics.items():
        if "clip" in name or "difference" in name:
            assert number == 0, name
        if "importance" in name or "effective" in name or "phi" in name:
            np.testing.assert_allclose(number, 1, rtol=1e-6, err_msg=name)
    tokens = importance.PolicyTokens.of(batch, outputs)
    want = -tokens.advantages * loss.token_weights(tokens)
    if loss.kl_estimator == "k1":
        # Its gradient is 0 only in the mean over samples.
        want = want + loss.beta * loss.token_weights(tokens)
    if isinstance(loss, losses.ReinforceLoss) and loss.epsilon:
        # The one ratio of a completion: each token moves all of it.
        want = -tokens.advantages * tokens.mask
    np.testing.assert_allclose(gradient, want / loss.count(batch), **CLOSE)
    del batch["old_per_token_logps"]
    same = evaluate(loss, batch, outputs)
    np.testing.assert_array_equal(same[2], gradient)


@by_loss
def test_far_from_the_old_policy_all_stays_finite(loss):
    batch, outputs = example()
    batch["old_per_token_logps"] = outputs["per_token_logps"] - 300
    batch["ref_per_token_logps"] = outputs["per_token_logps"] + 300
    for sign in (1, -1):
        batch["old_per_token_logps"] *= sign
        batch["ref_per_token_logps"] *= sign
        found = evaluate(loss, batch, outputs)
        assert np.isfinite(found[0])
        assert np.isfinite(found[2]).all()


def test_gspo_token_is_gspo_with_one_advantage_a_completion():
    batch, outputs = example()
    for epsilon in (0.02, 0.3):
        settings = {"epsilon": epsilon, "epsilon_high": None}
        want = evaluate(losses.GSPOLoss(**settings), batch, outputs)
        got = evaluate(losses.GSPOTokenLoss(**settings), batch, outputs)
        np.testing.assert_allclose(got[0], want[0], **CLOSE)
        np.testing.assert_allclose(got[2], want[2], **CLOSE)
        assert_same_metrics(got[1], want[1])


def test_clipped_reinforce_has_the_gradient_of_the_plain_one_on_policy():
    batch, outputs = example()
    del batch["old_per_token_logps"]
    plain = evaluate(losses.ReinforceLoss(), batch, outputs)
    clipped = evaluate(losses.ReinforceLoss(epsilon=0.2), batch, outputs)
    np.testing.assert_allclose(clipped[2], plain[2], **CLOSE)


def test_the_entropy_bonus_is_the_same_for_every_loss():
    """Its gradient by an entropy is -coef / tokens, whatever the loss; of
    the tokens that a `TopEntropyMask` keeps, as in TRL."""
    batch, outputs = example()
    tokens = importance.PolicyTokens.of(batch, outputs)
    kinds = set()
    for loss in LOSSES:
        loss = dataclasses.replace(loss, entropy_coef=0.05)
        mask = batch["completion_mask"]
        for part in loss.masks:
            kinds.add(type(part))
            if isinstance(part, losses.TopEntropyMask):
                mask = mask * part.keep(tokens)

        def value(entropies, loss=loss):
            arrays = {**outputs, "entropies": entropies}
            return loss(batch, arrays)[0]

        gradient = jax.grad(value)(outputs["entropies"])
        np.testing.assert_allclose(
            gradient, -0.05 * mask / mask.sum(), rtol=1e-6
        )
    assert kinds == {losses.TopEntropyMask, losses.OffPolicyMask}


def test_the_entropy_bonus_is_that_of_the_tokens_kept():
    """Entropies 1, 2, 3, 4 and a quantile of .5: the threshold is 2.5, and
    the bonus (3 + 4) / 2. On-policy with A = 1 the surrogate is -1 on two of
    four tokens: -1/2 - 0.1 * 3.5."""
    batch, outputs = rows_of([[1, 1, 1, 1]], [[1.0]], np.ones(4))
    outputs["entropies"] = np.array([[1.0, 2.0, 3.0, 4.0]], "float32")
    loss = losses.BNPOLoss(
        masks=[losses.TopEntropyMask(0.5)], entropy_coef=0.1
    )
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, -0.5 - 0.35, rtol=1e-6)
    np.testing.assert_allclose(metrics["entropy"], 2.5)


def test_defaults_are_the_papers():
    assert losses.GRPOLoss().beta == 0.04
    assert (losses.DAPOLoss().epsilon, losses.DAPOLoss().epsilon_high) == (
        0.2,
        0.28,
    )
    gspo = losses.GSPOLoss()
    assert (gspo.epsilon, gspo.epsilon_high) == (3e-4, 4e-4)
    luspo = losses.LUSPOLoss()
    assert (luspo.epsilon, luspo.epsilon_high) == (2e-3, 2.5e-3)
    without = [kind for kind in LOSSES if type(kind)().beta == 0]
    assert len(without) == len(LOSSES) - 4
    assert losses.ImportanceCorrection().mode == "token_truncate"


def test_what_a_loss_asks_for_goes_by_its_settings():
    names = ("per_token_logps", "entropies")
    assert losses.GRPOLoss(beta=0).needs == names
    assert losses.GRPOLoss().needs == (*names, "ref_per_token_logps")
    assert not losses.GRPOLoss().batch_coupled
    assert losses.GRPOLoss(masks=[losses.TopEntropyMask()]).batch_coupled
    assert hash(losses.GRPOLoss(masks=[losses.TopEntropyMask()]))


# Reductions


def test_spread_gives_tokens_the_value_of_their_sequence():
    segment_ids = np.array([[1, 1, 2, 0], [2, 1, 1, 1]])
    values = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")
    got = reductions.spread(values, segment_ids)
    np.testing.assert_array_equal(got, [[1, 1, 2, 0], [4, 3, 3, 3]])
    values[0, 1] = np.nan
    got = reductions.spread(values, np.array([[1, 0], [1, 2]]))
    np.testing.assert_array_equal(got, [[1, 0], [3, 4]])


def test_the_effective_share_of_parts_is_that_of_the_whole():
    """Weights 1, 1 and 4: 6**2 / (3 * 18) = 2 / 3."""

    def metric(weights):
        weights = jnp.array(weights, "float32")
        count = jnp.float32(len(weights))
        return weights.sum(), (weights**2).sum(), count

    parts = jax.tree.map(lambda *x: jnp.stack(x), metric([1, 1]), metric([4]))
    merged = reductions.merge_metrics({"ess": ("effective_share", *parts)})
    got = reductions.metric_value(merged["ess"])
    np.testing.assert_allclose(got, 2 / 3, rtol=1e-6)
    nothing = ("effective_share", *(jnp.zeros(()),) * 3)
    assert reductions.metric_value(nothing) == 0


def test_the_least_and_the_largest_of_nothing_are_zero():
    assert reductions.metric_value(("min", jnp.float32(jnp.inf))) == 0
    assert reductions.metric_value(("max", jnp.float32(-jnp.inf))) == 0
    assert reductions.metric_value(("max", jnp.float32(jnp.inf))) == jnp.inf


# Errors


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: losses.GRPOLoss(epsilon=0), "`epsilon` of GRPOLoss must be"),
        (lambda: losses.DAPOLoss(epsilon_high=-1), "epsilon_high=-1"),
        (lambda: losses.GRPOLoss(delta=0.9), "more than 1, or None"),
        (lambda: losses.GRPOLoss(beta=-1), "beta=-1"),
        (lambda: losses.GRPOLoss(kl_estimator="k4"), "'k3_corrected'"),
        (lambda: losses.PPOLoss(entropy_coef=-0.1), "entropy_coef=-0.1"),
        (
            lambda: losses.SAPOLoss(importance_sampling_level="row"),
            '"token" or "sequence"',
        ),
        (lambda: losses.CISPOLoss(max_ratio=0.2), "must be more than 1"),
        (lambda: losses.SAPOLoss(negative_temperature=0), "more than 0"),
        (lambda: losses.VESPOLoss(k_negative=-1), "k_negative=-1"),
        (lambda: losses.ReinforceLoss(epsilon_high=0.2), "go with an"),
        (lambda: losses.DrGRPOLoss(max_completion_length=0), "Received"),
        (lambda: losses.TopEntropyMask(0), "quantile=0"),
        (lambda: losses.OffPolicyMask(-1), "threshold=-1"),
        (lambda: losses.ImportanceCorrection("both"), "token_truncate"),
        (lambda: losses.ImportanceCorrection(max_ratio=0.9), "max_ratio=0.9"),
    ],
)
def test_settings_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_sequence_losses_have_no_ratios_of_tokens():
    for kind in (losses.LUSPOLoss, losses.GSPOLoss):
        with pytest.raises(TypeError, match="importance_sampling_level"):
            kind(importance_sampling_level="token")


def test_what_is_missing_in_a_batch_is_named():
    batch, outputs = example()
    for name in ("ref", "rollout"):
        del batch[f"{name}_per_token_logps"]
    with pytest.raises(ValueError, match=r"`ref_per_token_logps`.*beta=0.04"):
        losses.GRPOLoss()(batch, outputs)
    correction = losses.ImportanceCorrection()
    with pytest.raises(ValueError, match="`rollout_per_token_logps`"):
        losses.DAPOLoss(correction=correction)(batch, outputs)
    with pytest.raises(ValueError, match="max_completion_length=None"):
        losses.DrGRPOLoss()(batch, outputs)
    batch["advantages"] = np.zeros(6)
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        losses.DAPOLoss()(batch, outputs)
