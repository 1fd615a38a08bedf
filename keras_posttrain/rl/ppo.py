"""From rewards and values to the batches of PPO."""

import dataclasses

import jax
import numpy as np

from keras_posttrain.distribution import processes
from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.losses import (
    generalized_advantages,
    importance,
    token_rewards,
    whiten,
)
from keras_posttrain.rl.collector import LOGPS_INPUTS, Collector
from keras_posttrain.training import step as steps


@dataclasses.dataclass(frozen=True)
class TokenAdvantages:
    """Rewards and values to advantages, of a whole rollout at once.

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
        """Advantages and returns of tokens.

        Args:
            batches: list of dicts of arrays, with `rewards` and
                `old_values`, all of a rollout.
            kl: list of as many float arrays of shape `(rows, length)`, or
                of `None`.

        Returns:
            `(advantages, returns)`, lists of arrays `(rows, length)`.
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
    """One rollout, with the values of the model that sampled it.

    Args:
        task: `PPOTask`, in `fit`.
        layout: `BatchLayout` of a minibatch.
    """

    def _fill(self, batches, completions, rewards):
        task = self.task
        total = advantage_lib.total_rewards(
            rewards, task.num_generations, task.reward_weights
        ).reshape(-1)
        for batch in batches:
            _check_shapes(batch.arrays)
            for i, place in batch.places.items():
                if np.isnan(total[i]):
                    # Not judged: there is nothing to learn from it.
                    batch.arrays["completion_mask"][place.tokens] = 0.0
            batch.put_sequences("rewards", np.nan_to_num(total))
        return super()._fill(batches, completions, rewards)

    def _put_logps(self, batches, completions):
        super()._put_logps(batches, completions)
        for batch in batches:
            if "old_values" not in batch.arrays:
                old = self.old_outputs(batch.arrays)
                batch.arrays = {**old, **batch.arrays}

    def old_outputs(self, batch):
        if "old" not in self._programs:
            self._programs["old"] = jax.jit(self._old_outputs)
        task = self.task
        names = {*LOGPS_INPUTS} & set(batch)
        found = self._programs["old"](
            [v.value for v in task.trainable_variables],
            [v.value for v in task.non_trainable_variables],
            task.to_device({name: batch[name] for name in names}),
        )
        found = processes.fetch(found)
        return {
            "old_per_token_logps": found["per_token_logps"],
            "old_values": found["values"],
        }

    def _old_outputs(self, trainable, frozen, batch):
        task, needs = self.task, ("per_token_logps", "values")

        def of_rows(rows):
            mask = task.objective.logps_mask(rows)
            with task.using_weights(trainable, frozen):
                return task.token_outputs(
                    rows, mask, needs, differentiable=False
                )

        count = task._micro_batches(batch)
        if count == 1:
            return of_rows(batch)
        found = jax.lax.map(of_rows, steps.split_rows(batch, count))
        shape = batch["token_ids"].shape
        return jax.tree.map(lambda x: x.reshape(shape), found)

    def _put_advantages(self, batches, rewards):
        task, arrays = self.task, [batch.arrays for batch in batches]
        kl = [None] * len(arrays)
        if task.kl_in_reward:
            kl = [
                importance.kl_estimate(
                    x["old_per_token_logps"], x["ref_per_token_logps"], "k1"
                )
                for x in arrays
            ]
        advantages, returns = task.advantages(arrays, kl)
        means = {}
        for batch, a, r in zip(batches, advantages, returns):
            batch.arrays |= {"advantages": a, "returns": r}
            count = batch.sequence_sums(batch.arrays["completion_mask"])
            for i, total in batch.sequence_sums(a).items():
                means[i] = total / max(count[i], 1.0)
        self._of_rollout = _rollout_metrics(arrays, kl)
        return np.array([means[i] for i in range(len(means))])

    def _metrics(self, groups):
        metrics = super()._metrics(groups) | self._of_rollout
        if self.task.num_generations == 1:
            # A group of one is always equal.
            del metrics["frac_reward_zero_std"]
        return metrics


def _rollout_metrics(arrays, kl):
    """How far the policy has moved, and how well values foretell."""

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
        # A number a token could not be told from one a sequence.
        raise ValueError(
            "A packed row must hold more tokens than sequences. Received: "
            f"rows of {arrays['token_ids'].shape[1]} tokens and as many "
            "sequences. Use another number for `packing`."
        )
