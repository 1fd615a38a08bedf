"""From prompts to batches: completions, rewards, advantages, arrays."""

import dataclasses

import jax
import numpy as np

from keras_posttrain.data.batches.layout import Group
from keras_posttrain.distribution import processes
from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.rl.sampling import (
    Sampler,
    length_metrics,
    request_seed,
    zero_spread,
)
from keras_posttrain.training import step as steps

LOGPS_INPUTS = (
    "token_ids",
    "segment_ids",
    "positions",
    "completion_mask",
    "predicted_by",
    "prefix_segments",
)
RESERVED = (
    "step",
    "prompt",
    "completion",
    "reward",
    "advantage",
    "finish_reason",
)


@dataclasses.dataclass
class Drawn:
    """What was sampled for one rollout; nothing where there is no prompt.

    Attributes:
        step: int, steps of the run before its first one.
        prompts: list of `Prompt`s that its steps are for.
        taken: int, prompts of the epoch that were taken for it and before.
        sample: `Sampler`.
        completions: list of lists of the engine's completions, one a prompt
            that was sampled from.
        groups: list of `Group`s to train on, once judged.
        sampled: list of all `Group`s, those left out among them.
        metrics: dict of floats.
    """

    step: int
    prompts: list = dataclasses.field(default_factory=list)
    taken: int = 0
    sample: Sampler | None = None
    completions: list = dataclasses.field(default_factory=list)
    groups: list = dataclasses.field(default_factory=list)
    sampled: list = dataclasses.field(default_factory=list)
    metrics: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Collected:
    """What one rollout gives.

    Attributes:
        batches: list of dicts of arrays, one an optimizer step.
        metrics: dict of floats.
        table: dict of lists, what `CompletionsLog` writes down.
    """

    batches: list
    metrics: dict
    table: dict


class Collector:
    """One rollout: prompts to batches that are complete.

    Args:
        task: `RolloutTask`, in `fit`.
        layout: `BatchLayout` of a minibatch.
    """

    def __init__(self, task, layout):
        self.task, self.layout = task, layout
        self._programs = {}

    def draw(self, prompts, step):
        """What is sampled first: a `Drawn`, to be judged."""
        task = self.task
        many, temperature = task.num_generations, task.temperature
        sample = Sampler(task, many, temperature, step)
        completions = sample.drawn(prompts, request_seed(task._seed, step))
        return Drawn(step, prompts, task.order.taken, sample, completions)

    def build(self, drawn):
        """A `Collected` of what was sampled and judged."""
        groups = drawn.groups
        rewards = np.concatenate([g.rewards for g in groups])
        completions = [c for g in groups for c in g.completions]
        batches = self.layout.minibatches(list(map(self._sequences, groups)))
        advantages = self._fill(batches, completions, rewards)
        metrics = self._metrics(drawn.sampled)
        metrics |= drawn.sample.seconds | drawn.metrics
        table = self._table(groups, rewards, advantages)
        return Collected([b.arrays for b in batches], metrics, table)

    # Sampling

    def judge(self, drawn):
        """Judges what was sampled, and samples in place of what is equal."""
        task, wanted = self.task, len(drawn.prompts)
        groups = drawn.sample.judged(drawn.prompts, drawn.completions)
        drawn.sampled = drawn.groups = groups
        if not task.max_resamples:
            return drawn
        useful, equal, attempt = [], [], 0
        while True:
            for group in groups:
                idle = zero_spread(group, task.reward_weights)
                (equal if idle else useful).append(group)
            attempt += 1
            prompts = []
            if attempt <= task.max_resamples:
                prompts = task.order.take(wanted - len(useful))
            if not prompts:
                break
            seed = request_seed(task._seed, drawn.step, attempt)
            groups = drawn.sample(prompts, seed)
            drawn.sampled = drawn.sampled + groups
        drawn.taken = task.order.taken
        # Where the bound was reached, groups that teach nothing fill up.
        drawn.groups = (useful + equal)[:wanted]
        return drawn

    # Arrays

    def _sequences(self, group):
        completions, masks = [], []
        for completion in group.completions:
            ids = np.array(completion.token_ids, np.int32)
            cut = completion.finish_reason == "length"
            masked = cut and self.task.mask_truncated_completions
            completions.append(ids)
            masks.append(np.full(len(ids), not masked, np.float32))
        prompt = np.array(group.prompt.token_ids, np.int32)
        return Group.of_completions(
            prompt, completions, masks, group.prompt.row
        )

    def _fill(self, batches, completions, rewards):
        """Adds what the loss needs beside tokens; returns advantages."""
        self._put_logps(batches, completions)
        return self._put_advantages(batches, rewards)

    def _put_logps(self, batches, completions):
        task = self.task
        engine = [c.per_token_logps for c in completions]
        for batch in batches:
            if all(x is not None for x in engine):
                batch.put_tokens("rollout_per_token_logps", engine)
            if task.old_log_probs == "rollout":
                batch.put_tokens("old_per_token_logps", engine)
            elif len(batches) * task.num_iterations > 1 or task.kl_in_reward:
                batch.arrays |= self.old_outputs(batch.arrays)
            if task.reference is not None:
                logps = self.logps(batch.arrays, reference=True)
                batch.arrays["ref_per_token_logps"] = logps

    def old_outputs(self, batch):
        """What the policy that sampled says of a batch: a dict of arrays."""
        return {"old_per_token_logps": self.logps(batch)}

    def _put_advantages(self, batches, rewards):
        task, settings = self.task, {}
        if task.kl_in_reward:
            settings["kl"] = self._kl(batches)
        advantages = task.advantages(
            rewards, task.num_generations, task.reward_weights, **settings
        )
        for batch in batches:
            batch.put_sequences("advantages", advantages)
        return np.asarray(advantages)

    def _kl(self, batches):
        sums = {}
        for batch in batches:
            old = batch.arrays["old_per_token_logps"]
            gap = old - batch.arrays["ref_per_token_logps"]
            sums |= batch.sequence_sums(gap * batch.arrays["completion_mask"])
        return np.array([sums[i] for i in range(len(sums))])

    def logps(self, batch, reference=False):
        """Log-probabilities of a batch's completions, `(rows, length)`.

        Args:
            batch: dict of arrays.
            reference: bool, those of the reference, not of the policy.

        Returns:
            A float32 array.
        """
        task = self.task
        if reference not in self._programs:
            self._programs[reference] = jax.jit(
                self._policy_logps if not reference else self._ref_logps
            )
        names = {*LOGPS_INPUTS} & set(batch)
        values = (
            task.reference.values if reference else [],
            [v.value for v in task.trainable_variables],
            [v.value for v in task.non_trainable_variables],
            task.to_device({name: batch[name] for name in names}),
        )
        return processes.fetch(self._programs[reference](*values))

    def _policy_logps(self, values, trainable, frozen, batch):
        with self.task.using_weights(trainable, frozen):
            return self._forward(self.task.policy, batch)

    def _ref_logps(self, values, trainable, frozen, batch):
        reference = self.task.reference
        with reference.using(values, trainable, frozen):
            return self._forward(reference.policy, batch)

    def _forward(self, policy, batch):
        task = self.task

        def rows_logps(rows):
            return policy.token_outputs(
                rows,
                task.objective.logps_mask(rows),
                temperature=task.temperature,
                differentiable=False,
            )["per_token_logps"]

        count = task._micro_batches(batch)
        if count == 1:
            return rows_logps(batch)
        out = jax.lax.map(rows_logps, steps.split_rows(batch, count))
        return out.reshape(batch["token_ids"].shape)

    # What is shown

    def _metrics(self, groups):
        task = self.task
        metrics = advantage_lib.reward_metrics(
            np.concatenate([g.rewards for g in groups]),
            task.num_generations,
            task.reward_weights,
            task.reward_names,
        )
        metrics |= length_metrics(groups)
        if task.max_resamples:
            metrics["dynamic_sampling/num_prompts"] = float(len(groups))
        return metrics

    def _table(self, groups, rewards, advantages):
        task = self.task
        many = task.num_generations
        total = advantage_lib.total_rewards(rewards, many, task.reward_weights)
        table = {
            "step": [task.step] * len(rewards),
            "prompt": [g.prompt.prompt for g in groups for _ in range(many)],
            "completion": [text for g in groups for text in g.texts],
        }
        for name, values in zip(task.reward_names, rewards.T):
            name = f"rewards/{name}" if name in RESERVED else name
            table[name] = values.tolist()
        return table | {
            "reward": total.reshape(-1).tolist(),
            "advantage": advantages.tolist(),
            "finish_reason": [
                c.finish_reason for g in groups for c in g.completions
            ],
        }
