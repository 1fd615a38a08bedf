"""Collects the batches of PPO: values, advantages and returns of tokens."""

import dataclasses

import jax
import numpy as np

from keras_posttrain.losses import (
    generalized_advantages,
    importance,
    token_rewards,
    whiten,
)
from keras_posttrain.rl.collector import Collector


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

    def __call__(self, batches, kl):
        """Returns lists of advantages and returns, `(rows, length)` a batch.

        `batches`, with `rewards` and `old_values`, are all of a rollout; `kl`
        has an array `(rows, length)` or `None` for each.
        """
        pairs = [self._of_batch(*pair) for pair in zip(batches, kl)]
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

    def _of_batch(self, batch, kl):
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
        for batch in batches:
            _check_shapes(batch.arrays)
            for i, place in batch.places.items():
                if np.isnan(total[i]):
                    # A completion without a reward gives no training signal.
                    batch.arrays["completion_mask"][place.tokens] = 0.0
            batch.put_sequences("rewards", np.nan_to_num(total))
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

    def _put_advantages(self, batches, rewards):
        arrays = [batch.arrays for batch in batches]
        kl = [None] * len(arrays)
        if self.scoring.kl_in_reward:
            kl = [
                importance.kl_estimate(
                    x["old_per_token_logps"], x["ref_per_token_logps"], "k1"
                )
                for x in arrays
            ]
        advantages, returns = self.scoring.advantages(arrays, kl)
        means = {}
        for batch, a, r in zip(batches, advantages, returns):
            batch.arrays |= {"advantages": a, "returns": r}
            count = batch.sequence_sums(batch.arrays["completion_mask"])
            for i, total in batch.sequence_sums(a).items():
                means[i] = total / max(count[i], 1.0)
        self._value_metrics = _value_metrics(arrays, kl)
        return np.array([means[i] for i in range(len(means))])

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
