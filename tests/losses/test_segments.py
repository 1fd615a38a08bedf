"""A trajectory weighs the same in one, two or three segments, in any layout:
losses, metrics, gradients and advantages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_posttrain as kpt
from keras_posttrain.data.batches.layout import BatchLayout, Group
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.losses import importance, reductions
from keras_posttrain.rl.ppo import TokenAdvantages

losses = kpt.losses
KL = {"beta": 0.1, "entropy_coef": 0.01}
LOSSES = [
    losses.GRPOLoss(**KL, correction=losses.ImportanceCorrection()),
    losses.DrGRPOLoss(max_completion_length=9, **KL),
    losses.DAPOLoss(**KL),
    losses.SAPOLoss(**KL),
    losses.ReinforceLoss(**KL),
    losses.SumLoss([losses.PPOLoss(**KL), losses.ValueLoss()]),
]
# Sampled tokens of turns. Two tokens of a tool come before each.
TURNS = [[3, 1, 4], [2], [5, 1, 2, 6], [1, 1, 1], [4, 2]]
ARRAYS = (
    "per_token_logps", "old_per_token_logps", "ref_per_token_logps",
    "rollout_per_token_logps", "entropies", "values", "old_values", "returns",
)  # fmt: skip


def trajectories(cut):
    """A group of trajectories, each in `cut` segments at most.

    A segment begins with all tokens before it, without loss.
    """
    sequences, units, first = [], [], None
    for unit, turns in enumerate(TURNS):
        rng = np.random.default_rng(unit)
        # The fourth forks from the first behind its first turn.
        ids, ends = np.array([5, 6, 7]) if unit != 3 else first[:8], []
        for count in turns:
            ids = np.concatenate([ids, rng.integers(3, 500, 2 + count)])
            ends.append(len(ids))
        first = ids if first is None else first
        mask = np.zeros(len(ids))
        for count, end in zip(turns, ends):
            mask[end - count : end] = 1.0
        last = 0
        for some in np.array_split(ends, min(cut, len(ends))):
            own = mask[: some[-1]].copy()
            own[:last] = 0.0
            last = some[-1]
            sequences.append(
                Example(ids[:last].astype("int32"), own.astype("f4"), unit)
            )
            units.append(unit)
    return Group(sequences, None, units)


def random_values(group):
    """Arrays for the tokens of each sequence: equal in equal trajectories."""
    found = {name: [] for name in ARRAYS}
    for x, unit in zip(group.sequences, group.units):
        rng = np.random.default_rng(unit)
        values = rng.normal(-1, 0.3, (len(ARRAYS), 64)).astype("float32")
        for name, array in zip(ARRAYS, values):
            found[name].append(array[: len(x.token_ids)])
    return found


LAYOUTS = {
    "rows": BatchLayout(5, 64),
    "packed": BatchLayout(5, 64, token_budget=64),
    "shared": BatchLayout(
        5, 64, token_budget=64, max_sequences=16, share_prefix=True
    ),
    "shared, cut": BatchLayout(
        5, 36, token_budget=36, max_sequences=16, share_prefix=True
    ),
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)
by_cut = pytest.mark.parametrize("cut", [1, 2, 3])


def make_batch(cut, layout):
    group = trajectories(cut)
    batch = LAYOUTS[layout]([group])
    for name, values in random_values(group).items():
        batch.put_tokens(name, values)
    batch.put_units("advantages", np.array([1.0, -0.5, 2.0, 0.3, -1.2]))
    return batch


def by_unit(batch, array):
    """The values of the loss tokens of each unit, in order."""
    mask, array = batch.arrays["completion_mask"] > 0, np.asarray(array)
    return np.concatenate(
        [
            array[place.tokens][mask[place.tokens]]
            for _, places in sorted(batch.unit_parts().items())
            for place in places
        ]
    )


def evaluate(loss, batch, micro_rows=None):
    """Loss, metrics and gradients, as the trainer adds micro-batches up."""
    arrays = {k: jnp.asarray(v) for k, v in batch.arrays.items()}
    names = ("per_token_logps", "entropies", "values")
    outputs = {name: arrays.pop(name) for name in names}
    normalizers = loss.normalizers(arrays)
    count = len(arrays["token_ids"])
    micro_rows = micro_rows or count

    def total(outputs):
        found, metrics = 0.0, []
        for first in range(0, count, micro_rows):
            rows = slice(first, first + micro_rows)
            terms, more = loss.total(
                *(
                    {k: v[rows] for k, v in x.items()}
                    for x in (arrays, outputs)
                )
            )
            metrics.append(more)
            found += sum(
                reductions.ratio(terms[k], normalizers[k]) for k in terms
            )
        return found, metrics

    run = jax.value_and_grad(total, has_aux=True)
    (value, metrics), gradients = run(outputs)
    metrics = reductions.merge_metrics(
        {
            name: (x[0], *map(jnp.stack, zip(*(m[name][1:] for m in metrics))))
            for name, x in metrics[0].items()
        }
    )
    metrics = {k: reductions.metric_value(m) for k, m in metrics.items()}
    return (
        value,
        metrics,
        {
            k: by_unit(batch, gradients[k])
            for k in ("per_token_logps", "values")
        },
    )


# Minimum and maximum over segments.
OF_SEGMENTS = ("clip_ratio/low_min", "clip_ratio/high_max")


# Layouts, cuts and micro-batches, and of them a part with each pair of two.
PRODUCT = list(itertools.product(LAYOUTS, (1, 2, 3), (None, 1)))
IN_PAIRS = [
    ("rows", 1, 1),
    ("rows", 2, None),
    ("rows", 3, 1),
    ("packed", 1, None),
    ("packed", 2, 1),
    ("packed", 3, None),
    ("shared", 1, 1),
    ("shared", 2, None),
    ("shared", 3, 1),
    ("shared, cut", 1, None),
    ("shared, cut", 2, 1),
    ("shared, cut", 3, None),
]


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(IN_PAIRS, id="pairs"),
        pytest.param(PRODUCT, id="all", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: type(x).__name__)
def test_a_trajectory_weighs_the_same(loss, ways):
    value, metrics, gradients = evaluate(loss, make_batch(1, "rows"))
    assert np.abs(gradients["per_token_logps"]).max() > 1e-2
    for layout, cut, micro_rows in ways:
        batch = make_batch(cut, layout)
        assert batch.arrays["completion_mask"].sum() == 33
        found, more, slopes = evaluate(loss, batch, micro_rows)
        close = {"rtol": 1e-6, "atol": 1e-6}
        np.testing.assert_allclose(found, value, **close)
        for name in metrics.keys() - set(OF_SEGMENTS):
            np.testing.assert_allclose(
                more[name], metrics[name], err_msg=name, **close
            )
        for name, slope in slopes.items():
            np.testing.assert_allclose(
                slope, gradients[name], rtol=1e-6, atol=1e-7
            )


def test_grpo_averages_over_trajectories_by_hand():
    """On-policy with one advantage each: minus their mean, wherever."""
    batch = make_batch(3, "packed")
    assert batch.arrays["sequence_mask"].sum() == pytest.approx(5)
    del batch.arrays["old_per_token_logps"]
    names = ("per_token_logps", "entropies")
    outputs = {name: batch.arrays.pop(name) for name in names}
    value, _ = losses.GRPOLoss(beta=0.0)(batch.arrays, outputs)
    mean = np.mean([1.0, -0.5, 2.0, 0.3, -1.2])
    assert float(value) == pytest.approx(-mean, abs=1e-6)


@by_cut
def test_means_over_sequences_are_over_trajectories(cut):
    batch = make_batch(cut, "rows")
    outputs = {"per_token_logps": batch.arrays.pop("per_token_logps")}
    tokens = importance.PolicyTokens.of(batch.arrays, outputs)
    mean = tokens.sequence_metric(tokens.sequence_mean(tokens.logps))
    want = [
        np.mean(random_values(trajectories(1))["per_token_logps"][i][at])
        for i, x in enumerate(trajectories(1).sequences)
        for at in [np.flatnonzero(x.completion_mask)]
    ]
    found = reductions.metric_value(mean)
    assert float(found) == pytest.approx(np.mean(want), rel=1e-6)


def chain(rewards, values, gamma, gae_lambda):
    """Advantages by the definition, in float64."""
    advantages, after = np.zeros(len(values)), 0.0
    following = [*values[1:], 0.0]
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following[t] - values[t]
        advantages[t] = after = delta + gamma * gae_lambda * after
    return advantages


@pytest.mark.parametrize("of_turns", [False, True])
@by_cut
@by_layout
def test_advantages_run_over_segments(layout, cut, of_turns):
    """Rewards of trajectories, or of turns at their last tokens."""
    batch = make_batch(cut, layout)
    group = trajectories(cut)
    rewards = np.array([1.0, -1.0, 0.5, 2.0, 0.25])
    if of_turns:
        # At the ends of turns the next token has no loss, or there is none.
        ends = [
            x.completion_mask * (np.append(x.completion_mask[1:], 0) == 0)
            for x in group.sequences
        ]
        given = [r * rewards[u] for r, u in zip(ends, group.units)]
        batch.put_tokens("rewards", given)
    else:
        batch.put_units("rewards", rewards)
    kl = batch.arrays["old_per_token_logps"]
    settings = TokenAdvantages(0.1, 0.9, 0.8, False)
    [found], [returns] = settings([batch.arrays], [kl], [batch.chains()])
    assert not np.asarray(found)[batch.arrays["completion_mask"] == 0].any()
    whole = random_values(trajectories(1))
    want, values = [], []
    for unit, x in enumerate(trajectories(1).sequences):
        at = np.flatnonzero(x.completion_mask)
        value = whole["old_values"][unit][at].astype("float64")
        reward = -0.1 * whole["old_per_token_logps"][unit][at]
        is_end = np.append(np.diff(at) > 1, True)
        if not of_turns:
            is_end[:-1] = False
        reward = reward + rewards[unit] * is_end
        want.append(chain(reward, value, 0.9, 0.8))
        values.append(value)
    want, values = map(np.concatenate, (want, values))
    np.testing.assert_allclose(by_unit(batch, found), want, atol=2e-6)
    np.testing.assert_allclose(
        by_unit(batch, returns), want + values, atol=2e-6
    )
