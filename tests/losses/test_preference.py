"""Preference losses by hand, and what every one of them must keep however a
batch is laid out."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses import reductions
from keras_posttrain.losses.pairs import Pairs

losses = kpt.losses
pytestmark = pytest.mark.usefixtures("strict_ranks")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

REFERENCE = [
    losses.DPOLoss(),
    losses.DPOLoss(label_smoothing=0.2, ld_alpha=0.3, use_weighting=True),
    losses.DPOLoss(length_normalized=True, beta=0.7),
    losses.DPOLoss(divergence=losses.ForwardKL()),
    losses.DPOLoss(divergence=losses.JensenShannon()),
    losses.DPOLoss(divergence=losses.AlphaDivergence(0.3)),
    losses.IPOLoss(beta=0.5),
    losses.HingeLoss(),
    losses.RobustDPOLoss(),
    losses.ExoPairLoss(label_smoothing=0.1),
    losses.NCAPairLoss(),
    losses.BCOPairLoss(),
    losses.SPPOHardLoss(),
    losses.AOTLoss(label_smoothing=0.1),
    losses.AOTLoss(paired=False),
    losses.APOZeroLoss(),
    losses.APODownLoss(),
    losses.DiscoPOPLoss(),
]
PAIRED = [
    *REFERENCE,
    losses.ChosenSFTLoss(),
    losses.CPOLoss(label_smoothing=0.1),
    losses.CPOHingeLoss(beta=1.0),
    losses.CPOIPOLoss(nll_coef=0.5),
    losses.SimPOLoss(),
    losses.SimPOLoss(alpha=0.25, nll_coef=1.0),
    losses.ORPOLoss(),
    losses.ORPOLoss(include_prompt=False, beta=1.0),
    losses.SumLoss(
        [losses.DPOLoss(), losses.AOTLoss(), losses.ChosenSFTLoss()],
        weights=[0.8, 0.2, 1.0],
    ),
]
UNPAIRED = [
    losses.KTOLoss(desirable_weight=1.3),
    losses.APOZeroUnpairedLoss(undesirable_weight=0.5),
]
LOSSES = [*PAIRED, *UNPAIRED, losses.BradleyTerryLoss(center=0.1)]


def name_of(loss):
    changed = [
        f"{field.name}={getattr(loss, field.name)}"
        for field in dataclasses.fields(loss)
        if field.name != "losses"
        and getattr(loss, field.name) != field.default
    ]
    return " ".join([type(loss).__name__, *changed])


by_loss = pytest.mark.parametrize("loss", LOSSES, ids=name_of)

PER_TOKEN = (
    "ref_per_token_logps",
    "per_token_logps",
    "correct",
    "entropies",
    "collision_entropies",
)
PER_SEQUENCE = ("labels", "roles", "margins", "scores")
OUTPUTS = (*PER_TOKEN[1:], "scores")


def sequences(pairs=4, seed=0):
    """Random sequences: a prompt of 2 tokens and 0 to 5 of a completion;
    of the second half, those of odd place have the role 1."""
    rng = np.random.default_rng(seed)
    found = []
    for place in range(2 * pairs):
        count = 2 + (0 if place == 1 else int(rng.integers(1, 6)))
        logps = -rng.uniform(0.05, 2.5, count)
        found.append(
            {
                "per_token_logps": logps,
                "ref_per_token_logps": logps + rng.normal(0, 0.3, count),
                "correct": rng.integers(0, 2, count),
                "entropies": rng.uniform(0, 3, count),
                "collision_entropies": rng.uniform(0, 2, count),
                "completion_mask": np.arange(count) >= 2,
                "labels": place % 3 == 0,
                "roles": int(place >= pairs and place % 2),
                "margins": rng.uniform(0, 1),
                "scores": rng.normal(),
            }
        )
    return found


def lay_out(rows, length, slots, fill=0.0):
    """`(batch, outputs)` of lists of sequences, one list a row.

    What no token or sequence defines is `fill`; `None` is an unused slot.
    """
    shape = (len(rows), length)
    arrays = {name: np.full(shape, fill, "float32") for name in PER_TOKEN}
    arrays |= {
        name: np.full((len(rows), slots), fill, "float32")
        for name in PER_SEQUENCE
    }
    arrays["completion_mask"] = np.zeros(shape, "float32")
    arrays["segment_ids"] = np.zeros(shape, "int32")
    arrays["positions"] = np.zeros(shape, "int32")
    arrays["sequence_mask"] = np.zeros((len(rows), slots), "float32")
    for row, held in enumerate(rows):
        start = 0
        for slot, sequence in enumerate(held):
            if sequence is None:
                continue
            end = start + len(sequence["completion_mask"])
            for name in (*PER_TOKEN, "completion_mask"):
                arrays[name][row, start:end] = sequence[name]
            for name in PER_SEQUENCE:
                arrays[name][row, slot] = sequence[name]
            arrays["segment_ids"][row, start:end] = slot + 1
            arrays["positions"][row, start:end] = np.arange(end - start)
            arrays["sequence_mask"][row, slot] = 1
            start = end
    outputs = {name: arrays.pop(name) for name in OUTPUTS}
    return arrays, outputs


def flat(held, fill=0.0):
    """One sequence a row."""
    return lay_out([[s] for s in held], length=8, slots=1, fill=fill)


@functools.cache
def compiled(loss):
    def value(trained, batch, outputs):
        return loss(batch, {**outputs, **trained})

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def evaluate(loss, batch, outputs):
    """`(value, metrics, gradients)` by log-probabilities and scores."""
    outputs = dict(outputs)
    trained = {k: outputs.pop(k) for k in ("per_token_logps", "scores")}
    (found, metrics), gradients = compiled(loss)(trained, batch, outputs)
    return found, metrics, gradients


def gradients_by_sequence(gradients, batch):
    """A list of the gradients of each used slot, in reading order."""
    found = []
    for row, slot in np.argwhere(batch["sequence_mask"]):
        mine = batch["segment_ids"][row] == slot + 1
        found.append(gradients["per_token_logps"][row][mine])
        found.append(gradients["scores"][row, slot])
    return found


def assert_same(got, want, batch, other):
    np.testing.assert_allclose(got[0], want[0], **CLOSE)
    assert set(got[1]) == set(want[1])
    for name, value in want[1].items():
        np.testing.assert_allclose(got[1][name], value, err_msg=name, **CLOSE)
    pairs = zip(
        gradients_by_sequence(got[2], batch),
        gradients_by_sequence(want[2], other),
        strict=True,
    )
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, **CLOSE)


# By hand


def vector_d():
    """Two pairs with beta = 0.1.

    Log-probabilities of the chosen -10, -20 (reference -12, -19) over 5 and
    10 tokens, of the rejected -15, -18 (reference -14, -20) over 6 and 8:
    log-ratios (2, -1) and (-1, 2), margins 3 and -3.
    """
    policy, reference = (-10, -15, -20, -18), (-12, -14, -19, -20)
    held = []
    for count, logp, ref in zip((5, 6, 10, 8), policy, reference):
        sequence = {name: np.zeros(count + 1) for name in PER_TOKEN}
        sequence["per_token_logps"][1:] = logp / count
        sequence["ref_per_token_logps"][1:] = ref / count
        sequence["completion_mask"] = np.arange(count + 1) >= 1
        held.append({**sequence, **dict.fromkeys(PER_SEQUENCE, 0.0)})
    return lay_out([[s] for s in held], length=11, slots=1)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def softplus(x):
    """`-log sigmoid(-x)`."""
    return math.log1p(math.exp(x))


BY_HAND = {
    # (log(1 + exp(-0.3)) + log(1 + exp(0.3))) / 2
    losses.DPOLoss(): (softplus(-0.3) + softplus(0.3)) / 2,
    # 0.8 of that each way round and 0.2 of the other: the same by symmetry.
    losses.DPOLoss(label_smoothing=0.2): (softplus(-0.3) + softplus(0.3)) / 2,
    # 2/5 + 1/6 = 17/30 and -1/10 - 2/8 = -7/20, times 0.1
    losses.DPOLoss(length_normalized=True): (
        softplus(-0.1 * 17 / 30) + softplus(0.1 * 7 / 20)
    )
    / 2,
    # Scores -exp(-r): margins e - exp(-2) and its negative.
    losses.DPOLoss(divergence=losses.ForwardKL()): (
        softplus(-0.1 * (math.e - math.exp(-2)))
        + softplus(0.1 * (math.e - math.exp(-2)))
    )
    / 2,
    # Scores log sigmoid(r): margins softplus(1) - softplus(-2), negated.
    losses.DPOLoss(divergence=losses.JensenShannon()): (
        softplus(-0.1 * (softplus(1) - softplus(-2)))
        + softplus(0.1 * (softplus(1) - softplus(-2)))
    )
    / 2,
    # Scores -2 exp(-r / 2): margins 2 (exp(1/2) - exp(-1)), negated.
    losses.DPOLoss(divergence=losses.AlphaDivergence(0.5)): (
        softplus(-0.2 * (math.exp(0.5) - math.exp(-1)))
        + softplus(0.2 * (math.exp(0.5) - math.exp(-1)))
    )
    / 2,
    # The tokens beyond 5 of 6 and beyond 8 of 10 left out: log-ratios 2
    # and -5/6, and -8/10 and 2.
    losses.DPOLoss(ld_alpha=0.0): (
        softplus(-0.1 * (2 + 5 / 6)) + softplus(0.1 * 2.8)
    )
    / 2,
    losses.IPOLoss(): ((17 / 30 - 5) ** 2 + (-7 / 20 - 5) ** 2) / 2,
    losses.HingeLoss(): (0.7 + 1.3) / 2,
    # Smoothing swaps the pairs, and divides by 1 - 2 * 0.1: nothing moves.
    losses.RobustDPOLoss(): (softplus(-0.3) + softplus(0.3)) / 2,
    losses.ExoPairLoss(label_smoothing=0.1): sum(
        sigmoid(z) * (-softplus(-z) - math.log(0.9))
        + sigmoid(-z) * (-softplus(z) - math.log(0.1))
        for z in (0.3, -0.3)
    )
    / 2,
    losses.NCAPairLoss(): sum(
        softplus(-a) + softplus(a) / 2 + softplus(b) / 2
        for a, b in ((0.2, -0.1), (-0.1, 0.2))
    )
    / 2,
    losses.BCOPairLoss(): sum(
        softplus(-a) + softplus(b) for a, b in ((0.2, -0.1), (-0.1, 0.2))
    )
    / 2,
    losses.SPPOHardLoss(): ((9 + 16) + (36 + 49)) / 2,
    # Margins of the policy 5, -2 and of the reference 2, 1, sorted: -2 - 1
    # and 5 - 2.
    losses.AOTLoss(): (softplus(0.3) + softplus(-0.3)) / 2,
    # Log-ratios sorted are -1, 2 on either side.
    losses.AOTLoss(paired=False): math.log(2),
    losses.APOZeroLoss(): (
        sigmoid(-0.2) + sigmoid(-0.1) + sigmoid(0.1) + sigmoid(0.2)
    )
    / 2,
    losses.APODownLoss(): (
        sigmoid(0.2) + sigmoid(-0.3) + sigmoid(-0.1) + sigmoid(0.3)
    )
    / 2,
    losses.DiscoPOPLoss(): sum(
        sigmoid(-z / 0.05) * softplus(-z) + sigmoid(z / 0.05) * math.exp(-z)
        for z in (0.3, -0.3)
    )
    / 2,
    losses.ChosenSFTLoss(): 30 / 15,
    # Sums -10, -15 and -20, -18: margins 5 and -2, and 30 / 15 of NLL.
    losses.CPOLoss(): (softplus(-0.5) + softplus(0.2)) / 2 + 2,
    losses.CPOHingeLoss(nll_coef=0.0): (0.5 + 1.2) / 2,
    # Means -2, -2.5 and -2, -2.25.
    losses.CPOIPOLoss(nll_coef=0.0): (4.5**2 + 4.75**2) / 2,
    losses.SimPOLoss(): (softplus(-0.5) + softplus(0.0)) / 2,
    # (1 - p**-1) of means: margins exp(2.5) - exp(2) and exp(2.25) - exp(2)
    losses.SimPOLoss(alpha=1.0, beta=0.1): (
        softplus(0.5 - 0.1 * (math.exp(2.5) - math.exp(2)))
        + softplus(0.5 - 0.1 * (math.exp(2.25) - math.exp(2)))
    )
    / 2,
    # log(p / (1 - p)) of p = exp(-2), exp(-2.5), exp(-2.25)
    losses.ORPOLoss(include_prompt=False): 2
    + 0.1
    * sum(
        softplus(-0.5 * n - math.log1p(-math.exp(-2 - 0.5 * n)) + log_rest)
        for n, log_rest in (
            (1.0, math.log1p(-math.exp(-2))),
            (0.5, math.log1p(-math.exp(-2))),
        )
    )
    / 2,
    losses.SumLoss([losses.HingeLoss(), losses.SPPOHardLoss()], [2, 0.1]): 7.5,
}


@pytest.mark.parametrize("loss", BY_HAND, ids=name_of)
def test_two_pairs_by_hand(loss):
    """The arithmetic is next to each value, on `vector_d`."""
    batch, outputs = vector_d()
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, BY_HAND[loss], rtol=1e-5)
    assert set(metrics) == set(loss.metric_names)


def test_the_metrics_of_two_pairs():
    """Rewards 0.1 * (2, -1) and 0.1 * (-1, 2): the first pair is right."""
    batch, outputs = vector_d()
    outputs["correct"][2, 1:5] = 1
    outputs["entropies"][:] = 1.5
    _, metrics = losses.DPOLoss()(batch, outputs)
    want = {
        "rewards/chosen": 0.05,
        "rewards/rejected": 0.05,
        "rewards/accuracies": 0.5,
        "rewards/margins": 0.0,
        "logps/chosen": -15.0,
        "logps/rejected": -16.5,
        "entropy": 1.5,
        "mean_token_accuracy": 4 / 15,
    }
    assert set(metrics) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, atol=1e-6)


def test_weighting_is_the_probability_of_both_completions():
    """Mean aligned log-probabilities are means plus collision entropies:
    of 0.5 a token, (-1.5 - 2) and (-1.5 - 1.75) weigh the two pairs."""
    batch, outputs = vector_d()
    outputs["collision_entropies"][:] = 0.5
    loss = losses.DPOLoss(use_weighting=True)
    assert "collision_entropies" in loss.needs
    want = softplus(-0.3) * math.exp(-3.5) + softplus(0.3) * math.exp(-3.25)
    value, _, gradients = evaluate(loss, batch, outputs)
    np.testing.assert_allclose(value, want / 2, rtol=1e-5)
    # The weight itself is held constant: -0.1 sigmoid(-0.3) / 2 of it.
    np.testing.assert_allclose(
        gradients["per_token_logps"][0, 1],
        -0.05 * sigmoid(-0.3) * math.exp(-3.5),
        rtol=1e-5,
    )


def test_orpo_trains_the_chosen_prompt_too():
    """Log-probability -1 of each of 2 prompt tokens but the first, and -2 of
    both chosen tokens: (1 + 4) / 3. The rejected prompt is not projected."""
    held = sequences(1)[:2]
    for sequence in held:
        sequence["per_token_logps"] = np.array([-9.0, -1, -2, -2])
        sequence["completion_mask"] = np.array([0, 0, 1, 1])
        for name in PER_TOKEN[2:] + ("ref_per_token_logps",):
            sequence[name] = np.zeros(4)
    batch, outputs = flat(held)
    loss = losses.ORPOLoss()
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(metrics["nll_loss"], 5 / 3, rtol=1e-6)
    np.testing.assert_allclose(value, 5 / 3 + 0.1 * math.log(2), rtol=1e-6)
    want = [[0, 1, 1, 1], [0, 0, 1, 1]]
    np.testing.assert_array_equal(loss.logps_mask(batch)[:, :4], want)
    # A prompt that both share, as a segment of its own, is the chosen's.
    shared = {
        "segment_ids": np.array([[1, 1, 2, 2, 3, 3]]),
        "positions": np.array([[0, 1, 2, 3, 2, 3]]),
        "completion_mask": np.array([[0.0, 0, 1, 1, 1, 1]]),
        "sequence_mask": np.array([[0.0, 1, 1]]),
        "prefix_segments": np.array([[0, 1, 1]]),
    }
    logps = np.array([[0.0, -1, -2, -2, -2, -2]])
    value, _ = loss(shared, {"per_token_logps": logps})
    np.testing.assert_allclose(value, 5 / 3 + 0.1 * math.log(2), rtol=1e-6)


def test_a_certain_completion_has_finite_odds():
    batch, outputs = vector_d()
    outputs["per_token_logps"][0] = 0.0
    value, _, gradients = evaluate(
        losses.ORPOLoss(include_prompt=False), batch, outputs
    )
    assert np.isfinite(value)
    assert np.isfinite(gradients["per_token_logps"]).all()


def labelled(log_ratios, labels, roles):
    count = len(log_ratios)
    logps = np.zeros((count, 2))
    logps[:, 1] = log_ratios
    batch = {
        "segment_ids": np.ones((count, 2), "int32"),
        "sequence_mask": np.ones((count, 1)),
        "completion_mask": np.tile([0.0, 1.0], (count, 1)),
        "labels": np.array(labels)[:, None],
        "roles": np.array(roles)[:, None],
        "ref_per_token_logps": np.zeros((count, 2)),
    }
    return batch, {"per_token_logps": logps}


def test_kto_by_hand():
    """Log-ratios 2 and -1 of good ones, -1 and 2 of bad ones, baseline
    (0.5 + 1.5 - 0.5) / 3 = 0.5 of the mismatched, beta 0.1: good ones cost
    sigmoid(-0.15), sigmoid(0.15), bad ones the same."""
    batch, outputs = labelled(
        [2, -1, -1, 2, 0.5, 1.5, -0.5],
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1],
    )
    value, metrics = losses.KTOLoss()(batch, outputs)
    np.testing.assert_allclose(value, 0.5, rtol=1e-6)
    weighted = losses.KTOLoss(desirable_weight=3.0)
    one = sigmoid(-0.15) + sigmoid(0.15)
    np.testing.assert_allclose(
        weighted(batch, outputs)[0], (3 * one + one) / 4, rtol=1e-6
    )
    want = {
        "rewards/chosen": 0.05,
        "rewards/rejected": 0.05,
        "rewards/margins": 0.0,
        "logps/chosen": 0.5,
        "logps/rejected": 0.5,
        "kl": 0.5,
    }
    for name, number in want.items():
        np.testing.assert_allclose(metrics[name], number, atol=1e-7)
    low, outputs = labelled([2, -1, -5], [1, 0, 0], [0, 0, 1])
    value, metrics = losses.KTOLoss()(low, outputs)
    assert metrics["kl"] == 0, "at least 0"
    want = (sigmoid(-0.2) + sigmoid(-0.1)) / 2
    np.testing.assert_allclose(value, want, rtol=1e-6)
    unpaired, _ = losses.APOZeroUnpairedLoss()(low, outputs)
    np.testing.assert_allclose(unpaired, want, rtol=1e-6)


def test_ktos_baseline_has_no_gradient():
    batch, outputs = labelled([2, -1, 1.5], [1, 0, 0], [0, 0, 1])

    def value(logps):
        return losses.KTOLoss()(batch, {"per_token_logps": logps})[0]

    gradient = jax.grad(value)(jnp.asarray(outputs["per_token_logps"]))
    np.testing.assert_array_equal(gradient[2], [0, 0])
    slope = 0.05 * sigmoid(0.05) * sigmoid(-0.05)
    np.testing.assert_allclose(gradient[0, 1], -slope, rtol=1e-5)


def test_one_label_alone_has_no_margin():
    batch, outputs = labelled([2, -1], [1, 1], [0, 0])
    _, metrics = losses.APOZeroUnpairedLoss()(batch, outputs)
    assert metrics["rewards/margins"] == 0
    assert metrics["rewards/rejected"] == 0


def test_bradley_terry_by_hand():
    """Scores 1.5, 0.2 over 0.5, 0.9: margins 1 and -0.7."""
    scores = np.array([[1.5], [0.5], [0.2], [0.9]])
    batch = {"sequence_mask": np.ones((4, 1))}
    value, metrics = losses.BradleyTerryLoss()(batch, {"scores": scores})
    want = (softplus(-1) + softplus(0.7)) / 2
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert set(metrics) == set(losses.BradleyTerryLoss.metric_names)
    want = {
        "accuracy": 0.5,
        "margin": 0.15,
        "min_reward": 0.2,
        "mean_reward": 0.775,
        "max_reward": 1.5,
    }
    for name, number in want.items():
        np.testing.assert_allclose(metrics[name], number, rtol=1e-5)
    batch["margins"] = np.array([[0.5], [9.0], [0.5], [9.0]])
    value, _ = losses.BradleyTerryLoss(center=0.01)(batch, {"scores": scores})
    want = (softplus(-0.5) + softplus(1.2)) / 2
    want += 0.01 * (2.0**2 + 1.1**2) / 2
    np.testing.assert_allclose(value, want, rtol=1e-6)


@pytest.mark.parametrize("loss", REFERENCE, ids=name_of)
def test_at_the_start_the_margin_is_zero(loss):
    """With the policy as its own reference, every margin is 0: log 2."""
    batch, outputs = flat(sequences())
    batch["ref_per_token_logps"] = outputs["per_token_logps"]
    value, metrics, gradients = evaluate(loss, batch, outputs)
    assert metrics["rewards/margins"] == 0
    assert metrics["rewards/accuracies"] == 0
    assert np.abs(gradients["per_token_logps"]).max() > 0
    sigmoids = (losses.DPOLoss, losses.RobustDPOLoss, losses.AOTLoss)
    if isinstance(loss, sigmoids) and not loss.use_weighting:
        np.testing.assert_allclose(value, np.log(2), rtol=1e-6)


def test_far_from_the_reference_nothing_overflows():
    batch, outputs = flat(sequences())
    for sign in (1, -1):
        shift = np.tile([[sign * 200.0], [-sign * 200.0]], (4, 1))
        far = {**batch}
        shift = shift.astype("float32")
        far["ref_per_token_logps"] = batch["ref_per_token_logps"] + shift
        for loss in REFERENCE:
            value, _, gradients = evaluate(loss, far, outputs)
            assert np.isfinite(value), loss
            assert np.isfinite(gradients["per_token_logps"]).all(), loss


# The layout of a batch


def test_pairs_are_neighbours_in_reading_order():
    """Slots in use, read row by row, two by two; others are passed over."""
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]], "float32")
    pairs = Pairs.of({"sequence_mask": mask})
    values = np.arange(12.0).reshape(4, 3)
    chosen, rejected = pairs.take(jnp.asarray(values))
    np.testing.assert_array_equal(chosen[:3], [0, 4, 9])
    np.testing.assert_array_equal(rejected[:3], [1, 5, 10])
    np.testing.assert_array_equal(pairs.mask, [1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(pairs.put(chosen, rejected), values * mask)


@by_loss
def test_packed_equals_unpacked(loss):
    held = sequences()
    batch, outputs = flat(held)
    want = evaluate(loss, batch, outputs)
    assert np.isfinite(want[0])
    packed = lay_out([held[:4], [None, *held[4:6]], held[6:]], 30, 4)
    assert_same(evaluate(loss, *packed), want, packed[0], batch)


@by_loss
def test_what_is_not_used_stays_out(loss):
    """Rows without a sequence, padding and prompts may hold NaN."""
    held = sequences()
    batch, outputs = flat(held)
    want = evaluate(loss, batch, outputs)
    rows = [[s] for s in held]
    rows = [*rows[:2], [None], [None], *rows[2:], [None], [None]]
    spoilt = lay_out(rows, 8, 1, fill=np.nan)
    got = evaluate(loss, *spoilt)
    assert_same(got, want, spoilt[0], batch)
    assert all(np.isfinite(g).all() for g in got[2].values())
    if getattr(loss, "include_prompt", False):
        return
    inside = (batch["completion_mask"] != 0) | (batch["positions"] < 0)
    for arrays in (batch, outputs):
        for name in set(arrays) & set(PER_TOKEN):
            arrays[name] = np.where(inside, arrays[name], np.nan)
    got = evaluate(loss, batch, outputs)
    assert_same(got, want, batch, batch)


@by_loss
@pytest.mark.parametrize("emptied", ["completion_mask", "sequence_mask"])
def test_empty_masks_give_finite_numbers(loss, emptied):
    batch, outputs = flat(sequences())
    batch[emptied] = np.zeros_like(batch[emptied])
    value, metrics, gradients = evaluate(loss, batch, outputs)
    assert np.isfinite([value, *metrics.values()]).all()
    assert all(np.isfinite(g).all() for g in gradients.values())
    if emptied == "sequence_mask":
        assert value == 0
        assert not any(np.abs(g).any() for g in gradients.values())


@pytest.mark.parametrize(
    "loss", [x for x in LOSSES if not x.batch_coupled], ids=name_of
)
def test_rows_add_up_to_the_batch(loss):
    """`total`s of micro-batches, divided once by the counts of the batch."""
    batch, outputs = flat(sequences())
    want, want_metrics, _ = evaluate(loss, batch, outputs)
    normalizers = loss.normalizers(batch)

    def part(rows):
        return loss.total(
            {k: v[rows] for k, v in batch.items()},
            {k: v[rows] for k, v in outputs.items()},
        )

    parts = [part(rows) for rows in (slice(0, 4), slice(4, 8))]
    assert set(parts[0][0]) == set(normalizers)
    got = sum(
        reductions.ratio(terms[name], normalizers[name])
        for terms, _ in parts
        for name in terms
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    stacked = jax.tree.map(
        lambda *values: (
            values[0] if isinstance(values[0], str) else jnp.stack(values)
        ),
        *(metrics for _, metrics in parts),
    )
    for name, metric in reductions.merge_metrics(stacked).items():
        value = reductions.metric_value(metric)
        np.testing.assert_allclose(
            value, want_metrics[name], err_msg=name, **CLOSE
        )


@by_loss
def test_jit_equals_no_jit(loss):
    batch, outputs = flat(sequences())
    want, want_metrics, _ = evaluate(loss, batch, outputs)
    value, metrics = loss(batch, outputs)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert set(metrics) == set(loss.metric_names)
    for name, number in metrics.items():
        np.testing.assert_allclose(number, want_metrics[name], **CLOSE)


def test_which_losses_couple_the_batch():
    coupled = {type(loss).__name__ for loss in LOSSES if loss.batch_coupled}
    assert coupled == {"AOTLoss", "KTOLoss", "SumLoss"}
    assert not losses.SumLoss([losses.DPOLoss()]).batch_coupled


def test_a_sum_asks_for_what_its_parts_need():
    sum_loss = losses.SumLoss(
        [losses.ORPOLoss(), losses.DPOLoss(use_weighting=True)]
    )
    assert set(sum_loss.needs) == {
        "per_token_logps",
        "correct",
        "entropies",
        "ref_per_token_logps",
        "collision_entropies",
    }
    batch, _ = flat(sequences())
    np.testing.assert_array_equal(
        sum_loss.logps_mask(batch), losses.ORPOLoss().logps_mask(batch)
    )
    assert hash(sum_loss) == hash(dataclasses.replace(sum_loss))


# Errors


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: losses.DPOLoss(beta=0), "`beta` of DPOLoss must be above 0"),
        (lambda: losses.KTOLoss(beta=float("nan")), "Received: beta=nan"),
        (lambda: losses.DPOLoss(label_smoothing=0.5), "below 0.5"),
        (lambda: losses.ExoPairLoss(label_smoothing=0), "must be above 0"),
        (lambda: losses.DPOLoss(ld_alpha=1.5), "from 0 to 1, or None"),
        (lambda: losses.DPOLoss(divergence="js"), "such as ForwardKL()"),
        (
            lambda: losses.DPOLoss(
                length_normalized=True, divergence=losses.ForwardKL()
            ),
            "defined up to a constant",
        ),
        (lambda: losses.AlphaDivergence(1.0), "between 0 and 1"),
        (lambda: losses.AOTLoss(use_weighting=True), "no one pair"),
        (lambda: losses.DiscoPOPLoss(tau=0), "`tau`"),
        (lambda: losses.CPOLoss(nll_coef=-1), "`nll_coef`"),
        (lambda: losses.CPOHingeLoss(label_smoothing=0.1), "must be 0"),
        (lambda: losses.SimPOLoss(gamma=-1), "`gamma`"),
        (lambda: losses.KTOLoss(desirable_weight=-1), "desirable_weight"),
        (lambda: losses.BradleyTerryLoss(center=-1), "`center`"),
        (lambda: losses.SumLoss([]), "one or more losses"),
        (lambda: losses.SumLoss([losses.DPOLoss], [1]), "list of one or more"),
        (
            lambda: losses.SumLoss([losses.DPOLoss()], [1, 2]),
            "one for each of the 1 losses",
        ),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
    assert "Received: " in str(error.value)


def test_bad_batches():
    batch, outputs = flat(sequences())
    for loss, missing, message in (
        (losses.DPOLoss(), "ref_per_token_logps", "the reference policy"),
        (losses.KTOLoss(), "labels", "not 0 for a desirable completion"),
        (losses.KTOLoss(), "roles", "APOZeroUnpairedLoss"),
        (losses.ORPOLoss(), "positions", "position of each token"),
    ):
        less = {k: v for k, v in batch.items() if k != missing}
        with pytest.raises(ValueError, match=message):
            loss(less, outputs)
    batch["sequence_mask"][3] = 0
    with pytest.raises(ValueError, match="Received: 7 sequences"):
        losses.DPOLoss()(batch, outputs)
