"""The losses of single tokens, by hand, and the sums they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.losses import language_modeling, reductions

LOSSES = [kpt.losses.SFTLoss(), kpt.losses.DFTLoss()]
pytestmark = pytest.mark.usefixtures("strict_ranks")

by_loss = pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: type(loss).__name__
)


def example(rows=3, length=7, seed=0):
    """Random log-probabilities under a random mask."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (rows, length)).astype("float32")
    mask[:, 0] = 0
    outputs = {
        "per_token_logps": np.log(rng.uniform(0.05, 1, (rows, length))),
        "correct": rng.integers(0, 2, (rows, length)),
        "entropies": rng.uniform(0, 3, (rows, length)),
    }
    return {"completion_mask": mask}, {
        k: v.astype("float32") for k, v in outputs.items()
    }


def value_and_gradient(loss, batch, logps):
    def value(logps):
        return loss(batch, {"per_token_logps": logps})[0]

    return jax.value_and_grad(value)(jnp.asarray(logps))


def test_sft_is_the_mean_over_the_batchs_tokens():
    """Probabilities 1/2, 1/4 in one row and 1/8 in the other.

    (log 2 + log 4 + log 8) / 3 = 6 log 2 / 3 = 2 log 2. A mean of the rows'
    means would be (1.5 log 2 + 3 log 2) / 2 = 2.25 log 2. Each token's
    gradient is -1/3.
    """
    mask = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    logps = np.log([[1.0, 0.5, 0.25], [1.0, 0.125, 0.9]]).astype("float32")
    batch = {"completion_mask": mask}
    value, gradient = value_and_gradient(kpt.losses.SFTLoss(), batch, logps)
    np.testing.assert_allclose(value, 2 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gradient, -mask / 3, rtol=1e-6)


def test_sft_weights_tokens():
    """Weights 2 and 1 on probabilities 1/2 and 1/4.

    (2 log 2 + log 4) / (2 + 1) = 4/3 log 2. A token of weight 0.5 alone has
    its own cross-entropy: 0.5 log 4 / 0.5.
    """
    loss = kpt.losses.SFTLoss()
    logps = np.log([[1.0, 0.5, 0.25]]).astype("float32")
    for mask, want in (([0, 2, 1], 4 / 3), ([0, 0, 0.5], 2)):
        batch = {"completion_mask": np.array([mask], "float32")}
        value, _ = loss(batch, {"per_token_logps": logps})
        np.testing.assert_allclose(value, want * np.log(2), rtol=1e-6)


def test_dft_on_a_fair_coin_is_half_the_cross_entropy():
    """Two equal logits: p = 1/2, CE = log 2, DFT = p CE = log(2) / 2.

    d CE / d logits = p - onehot = (-1/2, 1/2); p counts as a constant, so
    DFT's is p times that: (-1/4, 1/4).
    """
    batch = {"completion_mask": np.array([[0.0, 1.0]])}

    def value(logits):
        logps = jnp.stack([jnp.zeros(()), jax.nn.log_softmax(logits)[0]])
        outputs = {"per_token_logps": logps[None]}
        return kpt.losses.DFTLoss()(batch, outputs)[0]

    got, gradient = jax.value_and_grad(value)(jnp.zeros(2))
    np.testing.assert_allclose(got, np.log(2) / 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.25, 0.25], rtol=1e-6)


def test_dft_by_hand():
    """p = 1/2, 1/4: (1/2 log 2 + 1/4 log 4) / 2 = log(2) / 2; d/d logp is
    -p / 2: -1/4 and -1/8."""
    batch = {"completion_mask": np.array([[0.0, 1.0, 1.0]])}
    logps = np.log([[1.0, 0.5, 0.25]]).astype("float32")
    value, gradient = value_and_gradient(kpt.losses.DFTLoss(), batch, logps)
    np.testing.assert_allclose(value, np.log(2) / 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -0.25, -0.125]], rtol=1e-6)


def test_the_pure_functions():
    logps = np.log(np.array([0.5, 0.25], "float32"))
    np.testing.assert_allclose(
        language_modeling.sft_loss(logps), [np.log(2), np.log(4)]
    )
    np.testing.assert_allclose(
        language_modeling.dft_loss(logps),
        [np.log(2) / 2, np.log(4) / 4],
        rtol=1e-6,
    )


def test_metrics_are_means_over_trained_tokens_whatever_their_weight():
    """Three tokens, two of them right; entropies 1, 2 and 6."""
    batch = {"completion_mask": np.array([[0.0, 3.0, 0.5], [0.0, 1.0, 0.0]])}
    outputs = {
        "per_token_logps": np.full((2, 3), -1.0, "float32"),
        "correct": np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
        "entropies": np.array([[9.0, 1.0, 2.0], [9.0, 6.0, 9.0]]),
    }
    value, metrics = kpt.losses.SFTLoss()(batch, outputs)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    assert set(metrics) == set(kpt.losses.SFTLoss.metric_names)
    np.testing.assert_allclose(metrics["mean_token_accuracy"], 2 / 3)
    np.testing.assert_allclose(metrics["entropy"], 3.0)


@by_loss
def test_masked_equals_sliced(loss):
    batch, outputs = example()
    batch["completion_mask"][:, 5:] = 0
    batch["completion_mask"][2] = 0
    whole, metrics = loss(batch, outputs)
    cut = {k: v[:2, :5] for k, v in outputs.items()}
    mask = batch["completion_mask"][:2, :5]
    part, part_metrics = loss({"completion_mask": mask}, cut)
    np.testing.assert_allclose(whole, part, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, part_metrics[name], rtol=1e-6)


@by_loss
def test_an_empty_mask_gives_zero_and_finite_gradients(loss):
    batch, outputs = example()
    batch["completion_mask"] *= 0
    value, metrics = loss(batch, outputs)
    assert value == 0
    assert {k: float(v) for k, v in metrics.items()} == {
        "mean_token_accuracy": 0.0,
        "entropy": 0.0,
    }
    logps = outputs["per_token_logps"]
    _, gradient = value_and_gradient(loss, batch, logps)
    np.testing.assert_array_equal(gradient, np.zeros_like(logps))


@by_loss
@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_what_is_no_number_stays_out_under_a_zero_mask(loss, bad):
    batch, outputs = example()
    mask = batch["completion_mask"]
    want, metrics = loss(batch, outputs)
    logps = outputs["per_token_logps"]
    _, gradient = value_and_gradient(loss, batch, logps)
    spoilt = {k: np.where(mask == 0, bad, v) for k, v in outputs.items()}
    got, spoilt_metrics = loss(batch, spoilt)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        list(spoilt_metrics.values()), list(metrics.values())
    )
    _, got = value_and_gradient(loss, batch, spoilt["per_token_logps"])
    np.testing.assert_array_equal(got, gradient)


@by_loss
def test_jit_equals_no_jit(loss):
    batch, outputs = example()
    plain, metrics = loss(batch, outputs)
    jitted, jitted_metrics = jax.jit(loss)(batch, outputs)
    np.testing.assert_allclose(plain, jitted, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, jitted_metrics[name], rtol=1e-6)


@by_loss
def test_micro_batches_add_up_to_the_batch(loss):
    """`total`s of parts, divided once by the batch's own count."""
    batch, outputs = example(rows=4)
    want, want_metrics = loss(batch, outputs)
    normalizer = loss.normalizers(batch)["loss"]
    parts = [
        loss.total(
            {k: v[rows] for k, v in batch.items()},
            {k: v[rows] for k, v in outputs.items()},
        )
        for rows in (slice(0, 1), slice(1, 4))
    ]
    total = sum(terms["loss"] for terms, _ in parts)
    merged = merged_metrics(parts[0][1], parts[1][1])
    np.testing.assert_allclose(total / normalizer, want, rtol=1e-6)
    for name, value in want_metrics.items():
        got = reductions.metric_value(merged[name])
        np.testing.assert_allclose(got, value, rtol=1e-6)


def merged_metrics(left, right):
    stacked = {
        name: (kind, *map(jnp.stack, zip(values, right[name][1:])))
        for name, (kind, *values) in left.items()
    }
    return reductions.merge_metrics(stacked)


@by_loss
def test_the_loss_says_which_tokens_it_wants(loss):
    mask = np.array([[0.0, 0.5, 1.0, 0.0]])
    found = loss.logps_mask({"completion_mask": mask})
    np.testing.assert_array_equal(found, [[False, True, True, False]])
    assert not loss.batch_coupled
    assert "per_token_logps" in loss.needs


def test_losses_are_compared_by_their_settings():
    assert kpt.losses.SFTLoss() == kpt.losses.SFTLoss()
    assert kpt.losses.SFTLoss() != kpt.losses.DFTLoss()
    assert repr(kpt.losses.DFTLoss()) == "DFTLoss()"


# Reductions


def test_segment_sum_adds_up_each_sequence():
    """Row 0 holds sequences of 2 and 3 tokens and a pad, row 1 one of 4:
    1 + 2, 3 + 4 + 5; 1 + 1 + 1 + 1. A slot without a sequence has 0."""
    values = np.array([[1, 2, 3, 4, 5, 9], [1, 1, 1, 1, 9, 9]], "float32")
    segment_ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    got = reductions.segment_sum(values, segment_ids, 3)
    np.testing.assert_array_equal(got, [[3, 12, 0], [4, 0, 0]])


def test_segment_sum_leaves_padding_out_and_has_a_gradient():
    segment_ids = np.array([[1, 2, 2, 0]])
    values = jnp.array([[1.0, 2.0, 3.0, jnp.nan]])

    def value(values):
        sums = reductions.segment_sum(values, segment_ids, 2)
        return jnp.sum(sums * jnp.array([[1.0, 10.0]]))

    got, gradient = jax.value_and_grad(value)(values)
    assert got == 51
    np.testing.assert_array_equal(gradient, [[1, 10, 10, 0]])


def test_token_sum_weights_and_stays_in_float32():
    """0.5 * 2 + 2 * 3 = 7; 4,096 ones and a quarter in bfloat16 add up."""
    values = np.array([[1.0, 2.0, 3.0]])
    got = reductions.token_sum(values, np.array([[0.0, 0.5, 2.0]]))
    assert got == 7 and got.dtype == "float32"
    ones = jnp.full((1, 4096), 1.25, "bfloat16")
    assert reductions.token_sum(ones, jnp.ones((1, 4096))) == 5120


def test_ratio_by_zero_is_zero_with_a_finite_gradient():
    assert reductions.ratio(jnp.float32(3), jnp.float32(0)) == 0
    assert reductions.ratio(jnp.float32(3), jnp.float32(2)) == 1.5
    gradient = jax.grad(reductions.ratio, argnums=(0, 1))
    assert gradient(jnp.float32(3), jnp.float32(0)) == (0, 0)


def test_metrics_merge_by_their_kind():
    """A mean by counts: (6 + 1) / (2 + 5) = 1; of the means 3 and 1/5 it
    would be 1.6."""
    left = {
        "mean": ("mean", jnp.float32(6), jnp.float32(2)),
        "sum": ("sum", jnp.float32(1)),
        "low": ("min", jnp.float32(-1)),
        "high": ("max", jnp.float32(4)),
    }
    right = {
        "mean": ("mean", jnp.float32(1), jnp.float32(5)),
        "sum": ("sum", jnp.float32(2)),
        "low": ("min", jnp.float32(-3)),
        "high": ("max", jnp.float32(2)),
    }
    merged = merged_metrics(left, right)
    got = {k: float(reductions.metric_value(v)) for k, v in merged.items()}
    assert got == {"mean": 1.0, "sum": 3.0, "low": -3.0, "high": 4.0}
    empty = ("mean", jnp.float32(0), jnp.float32(0))
    assert reductions.metric_value(empty) == 0
