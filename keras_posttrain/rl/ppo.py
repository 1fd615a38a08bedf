"""Collects the batches of PPO: values, advantages and returns of tokens."""

import dataclasses

import jax
import numpy as np

from keras_posttrain.losses import (
    generalized_advantages,
    importance,
    reductions,
    token_rewards,
    whiten,
)
from keras_posttrain.rl.collector import (
    Collector,
    token_values,
    turn_rewards,
)


@dataclasses.dataclass(frozen=True)
class TokenAdvantages:
    """Turns rewards and values of a whole rollout into advantages.

    Args:
        beta: float, the weight of the KL divergence in the reward.
        gamma, gae_lambda: see `kpt.losses.generalized_advantages`.
        whitened: bool, whether to give them mean 0 and variance 1.
    """

    beta: float
    gamma: float
    gae_lambda: float
    whitened: bool

    def __call__(self, batches, kl, chains=None):
        """Returns lists of advantages and returns, `(rows, length)` a batch.

        Args:
            batches: list of dicts of arrays with `old_values` and `rewards`,
                of sequences or of tokens: all of a rollout.
            kl: list of an array `(rows, length)` or `None` for each.
            chains: list of `Batch.chains()` of each, where trajectories have
                several segments: the next value after the last token of a
                segment is then that of the first one of the next.
        """
        chains = [None] * len(batches) if chains is None else chains
        pairs = [self._of_batch(*args) for args in zip(batches, kl, chains)]
        advantages, returns = zip(*jax.tree.map(np.asarray, pairs))
        if not self.whitened:
            return advantages, returns
        flat = [x.reshape(-1) for x in advantages]
        masks = [batch["completion_mask"].reshape(-1) for batch in batches]
        white = np.asarray(whiten(np.concatenate(flat), np.concatenate(masks)))
        parts = np.split(white, np.cumsum([len(x) for x in flat])[:-1])
        return [
            part.reshape(x.shape) for part, x in zip(parts, advantages)
        ], returns

    def _of_batch(self, batch, kl, chains):
        if chains is not None:
            return self._of_chains(batch, kl, chains)
        mask, ids = batch["completion_mask"], batch["segment_ids"]
        rewards = token_rewards(batch["rewards"], mask, ids, kl, self.beta)
        return generalized_advantages(
            rewards,
            batch["old_values"],
            mask,
            ids,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )

    def _of_chains(self, batch, kl, chains):
        """Computes them with a row for each chain, and puts them back."""
        used, shape = chains >= 0, batch["completion_mask"].shape

        def gather(values):
            return np.asarray(values).reshape(-1)[np.where(used, chains, 0)]

        rewards = batch["rewards"]
        if rewards.shape == shape:
            rewards = gather(rewards)
        else:
            # All segments have the reward of their trajectory.
            rewards = gather(reductions.spread(rewards, batch["segment_ids"]))
            rewards = rewards[:, :1]
        rows = {
            "rewards": rewards,
            "completion_mask": used.astype(np.float32),
            "segment_ids": np.ones(used.shape, np.int32),
            "old_values": gather(batch["old_values"]),
        }
        found = []
        kl = None if kl is None else gather(kl)
        for values in self._of_batch(rows, kl, None):
            whole = np.zeros(shape, np.float32)
            whole.reshape(-1)[chains[used]] = np.asarray(values)[used]
            found.append(whole)
        return tuple(found)


class PPOCollector(Collector):
    """Turns prompts into batches with values, advantages and returns.

    `scoring.advantages` is a `TokenAdvantages`.
    """

    @property
    def metric_names(self):
        return (*super().metric_names, "value/explained_variance", "kl")

    def _fill(self, batches, trajectories, rewards):
        many = self.sampling.num_generations
        total = self.scoring.total(rewards, many).reshape(-1)
        in_batch = [x for x, t in zip(total, trajectories) if t.segments]
        for batch in batches:
            _check_shapes(batch.arrays)
            for unit, places in batch.unit_parts().items():
                for place in places if np.isnan(in_batch[unit]) else ():
                    # A completion without a reward gives no training signal.
                    batch.arrays["completion_mask"][place.tokens] = 0.0
            if self.episodes:
                batch.put_tokens(
                    "rewards", self._token_rewards(trajectories, rewards)
                )
            else:
                batch.put_units("rewards", np.nan_to_num(in_batch))
        return super()._fill(batches, trajectories, rewards)

    def _put_logps(self, batches, trajectories):
        super()._put_logps(batches, trajectories)
        for batch in batches:
            if "old_values" not in batch.arrays:
                old = self._old_outputs(batch.arrays)
                batch.arrays = {**old, **batch.arrays}

    def _old_outputs(self, batch):
        found = self.forward.policy(batch, ("per_token_logps", "values"))
        return {
            "old_per_token_logps": found["per_token_logps"],
            "old_values": found["values"],
        }

    def _token_rewards(self, trajectories, rewards):
        """Returns the rewards of turns at their last tokens, an array for
        each segment."""
        turns = turn_rewards(trajectories, rewards, self.scoring)
        turns = [np.array(x or (), np.float32) for x in turns]
        values = token_values(trajectories, turns)
        segments = [s for t in trajectories for s in t.segments]
        # A turn is in one piece.
        return [
            np.where(s.turns != np.append(s.turns[1:], -1), x, 0.0)
            for s, x in zip(segments, values)
        ]

    def _put_advantages(self, batches, trajectories, rewards):
        arrays = [batch.arrays for batch in batches]
        kl = [None] * len(arrays)
        if self.scoring.kl_in_reward:
            kl = [
                importance.kl_estimate(
                    x["old_per_token_logps"], x["ref_per_token_logps"], "k1"
                )
                for x in arrays
            ]
        advantages, returns = self.scoring.advantages(
            arrays, kl, [batch.chains() for batch in batches]
        )
        means = {}
        for batch, a, r in zip(batches, advantages, returns):
            batch.arrays |= {"advantages": a, "returns": r}
            count = batch.unit_sums(batch.arrays["completion_mask"])
            for unit, total in batch.unit_sums(a).items():
                means[unit] = total / max(count[unit], 1.0)
        self._value_metrics = _value_metrics(arrays, kl)
        unit = iter(range(len(means)))
        return np.array(
            [means[next(unit)] if t.segments else 0.0 for t in trajectories]
        )

    def _metrics(self, groups):
        metrics = super()._metrics(groups) | self._value_metrics
        if self.sampling.num_generations == 1:
            # The rewards of a group of one are always equal.
            del metrics["frac_reward_zero_std"]
        return metrics

    def _advantage_metrics(self, groups, advantages):
        # Nothing is compared in groups.
        return {}


def _value_metrics(arrays, kl):
    """Returns the KL divergence and the explained variance of the values."""

    def tokens(values):
        pairs = zip(values, arrays)
        return np.concatenate(
            [np.asarray(x)[b["completion_mask"] != 0] for x, b in pairs]
        ).astype("float64")

    returns = tokens([b["returns"] for b in arrays])
    errors = returns - tokens([b["old_values"] for b in arrays])
    metrics = {}
    spread = returns.var() if len(returns) else 0.0
    if spread > 0:
        metrics["value/explained_variance"] = float(1 - errors.var() / spread)
    if kl[0] is not None and len(returns):
        metrics["kl"] = float(tokens(kl).mean())
    return metrics


def _check_shapes(arrays):
    if arrays["sequence_mask"].shape == arrays["token_ids"].shape:
        # Per-token and per-sequence arrays would be ambiguous.
        raise ValueError(
            "A packed row must hold more tokens than sequences. Received: "
            f"rows of {arrays['token_ids'].shape[1]} tokens and as many "
            "sequences. Use another number for `packing`."
        )
