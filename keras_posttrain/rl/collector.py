"""Collects rollouts: turns prompts into complete batches."""

import dataclasses

import jax
import numpy as np

from keras_posttrain._spans import span
from keras_posttrain.data.batches.assembly import IMAGE_ARRAYS
from keras_posttrain.data.batches.layout import Group
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.distribution import processes
from keras_posttrain.losses import RoleAdvantages, TurnAdvantages
from keras_posttrain.losses import advantages as advantage_lib
from keras_posttrain.models import quantized, sharding
from keras_posttrain.rl.episode_sampler import EpisodeSampler
from keras_posttrain.rl.sampling import Sampler, request_seed
from keras_posttrain.rl.trajectory import LENGTH_METRICS, length_metrics

LOGPS_INPUTS = (
    "token_ids",
    "segment_ids",
    "positions",
    "completion_mask",
    "predicted_by",
    "prefix_segments",
    "routed_experts",
    *IMAGE_ARRAYS,
)
# Metrics of every rollout, some only with `max_staleness`.
METRICS = (
    "time/rollout",
    "time/reward",
    "time/train",
    "time/sync",
    "time/wait",
    "staleness/mean",
    "staleness/max",
)
RESERVED = (
    "step",
    "prompt",
    "completion",
    "reward",
    "advantage",
    "finish_reason",
    "row",
    "player",
    "tokens",
    "turn_rewards",
    "error",
)


@dataclasses.dataclass
class Round:
    """One rollout on its way: sampled, then scored.

    Attributes:
        step: int, steps of the run before its first one.
        prompts: list of `Prompt`s that its steps are for; empty at the end
            of an epoch.
        taken: int, prompts of the epoch that were taken for it and before.
        completions: the engine's, one list a prompt that was sampled from.
        groups: list of `Group`s to train on, once scored.
        sampled: list of all `Group`s, including those that were replaced.
    """

    step: int
    prompts: list = dataclasses.field(default_factory=list)
    taken: int = 0
    sampler: Sampler | EpisodeSampler | None = None
    completions: list = dataclasses.field(default_factory=list)
    groups: list = dataclasses.field(default_factory=list)
    sampled: list = dataclasses.field(default_factory=list)
    metrics: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Collection:
    """The batches of a rollout, one an optimizer step, and its metrics.

    `table` holds the columns that `CompletionsLog` writes. `groups` are the
    `Group`s whose trajectories its rows are, in order, and `laid_out` the
    `Batch`es with these trajectories' segments.
    """

    batches: list
    metrics: dict
    table: dict
    groups: list = dataclasses.field(default_factory=list)
    laid_out: list = dataclasses.field(default_factory=list)


class ForwardPass:
    """Outputs of the policy and of the reference for complete batches.

    Its compiled programs serve several runs, each of which calls `begin`.
    `temperature` divides the reference's logits, and `policy_model` is the
    `Policy` that is trained.
    """

    def __init__(
        self, step, reference=None, temperature=1.0, policy_model=None
    ):
        self.step, self.reference = step, reference
        self.temperature, self.policy_model = temperature, policy_model
        self._programs = {}
        self.begin()

    def begin(self):
        """Forgets the calls of an earlier run."""
        # By program, the weights and the names of the inputs.
        self._calls = {}
        return self

    def policy(self, batch, needs=("per_token_logps",)):
        """Computes outputs of the policy with its current weights.

        Returns the float32 arrays `(rows, length)` that `needs` names.
        """
        step = self.step

        def program(weights, batch):
            def of_rows(rows):
                mask = step.loss.logps_mask(rows)
                with step.weights.scope(*weights):
                    return step.token_outputs(
                        rows, mask, needs, differentiable=False
                    )

            return step.micro_batches.map(of_rows, batch)

        return self._run(needs, program, step.weights.values, batch)

    def reference_logps(self, batch):
        """Returns the reference's log-probabilities, `(rows, length)`.

        Its tokens choose their experts themselves.
        """
        step, reference = self.step, self.reference
        batch = {k: x for k, x in batch.items() if k != "routed_experts"}

        def program(weights, batch):
            def of_rows(rows):
                mask = step.loss.logps_mask(rows)
                return reference.logps(*weights, rows, mask, self.temperature)

            return step.micro_batches.map(of_rows, batch)

        def weights():
            return reference.values, *step.weights.values()

        return self._run("reference", program, weights, batch)

    def _run(self, name, program, weights, batch):
        if name not in self._programs:
            models = [each.causal_lm for each in [self.reference] if each]
            options = quantized.compiler_options(*models)
            self._programs[name] = jax.jit(
                program,
                out_shardings=sharding.of_results(),
                compiler_options=options,
            )
        batch = {k: batch[k] for k in LOGPS_INPUTS if k in batch}
        self._calls[name] = weights, list(batch)
        with span("log-probs", str(name)):
            found = self._programs[name](weights(), processes.put_rows(batch))
            return processes.fetch(found)

    def lowered(self, batches):
        """Yields the `jax.stages.Lowered` of what was computed, for others.

        `batches` is a list of batches of other shapes.
        """
        for name, (weights, inputs) in self._calls.items():
            for batch in batches:
                batch = processes.put_rows({k: batch[k] for k in inputs})
                yield self._programs[name].lower(weights(), batch)


class Collector:
    """Turns prompts into the batches of a rollout.

    `generate` is a function of a list of `Request`s to completions, and
    `layout` the `BatchLayout` of the batch of one step. `order` is
    a `PromptOrder` or a `PromptStream`. With `episodes`, `Episodes`, these are
    run in the session that `open_session` opens.
    """

    def __init__(
        self,
        generate,
        open_session=None,
        *,
        episodes=None,
        sampling,
        scoring,
        tokenizer,
        layout,
        forward,
        order,
        seed,
    ):
        self.generate, self.tokenizer = generate, tokenizer
        self.open_session, self.episodes = open_session, episodes
        # Of `RoleAdvantages`: a baseline for each role.
        self.baselines = {}
        self.sampling, self.scoring = sampling, scoring
        self.layout, self.forward = layout, forward
        self.order, self.seed = order, seed

    @property
    def metric_names(self):
        """Tuple of the names of a rollout's metrics."""
        resamples = ("dynamic_sampling/num_prompts",)
        return (
            *METRICS,
            *LENGTH_METRICS,
            *advantage_lib.reward_metric_names(self.scoring.names),
            *(resamples if self.scoring.max_resamples else ()),
            *(self.episodes.metric_names if self.episodes else ()),
        )

    @property
    def validation_names(self):
        """Tuple of the names of the metrics of an evaluation."""
        rewards = advantage_lib.reward_metric_names(self.scoring.names)
        episodes = self.episodes.metric_names if self.episodes else ()
        return (*rewards, *LENGTH_METRICS, *episodes, "pass@1")

    def num_steps(self, num_prompts):
        """Returns optimizer steps of a rollout of so many prompts."""
        completions = num_prompts * self.sampling.num_generations
        if self.episodes:
            completions *= len(self.episodes.trained)
        batches = -(-completions // self.layout.num_sequences)
        return batches * self.sampling.num_iterations

    def sampler(self):
        """Returns a new `Sampler`, or `EpisodeSampler`."""
        settings = self.sampling, self.scoring
        if self.episodes:
            return EpisodeSampler(self.open_session, self.episodes, *settings)
        return Sampler(self.generate, *settings, self.tokenizer)

    def sample(self, prompts, step):
        """Samples a `Round` from prompts, after `step` steps of the run."""
        sampler = self.sampler()
        taken = self.order.taken
        completions = sampler.sample(prompts, request_seed(self.seed, step))
        return Round(step, prompts, taken, sampler, completions)

    def score(self, round):
        """Scores completions and resamples groups whose rewards are equal."""
        scoring, wanted = self.scoring, len(round.prompts)
        groups = round.sampler.score(
            round.prompts, round.completions, round.step
        )
        round.sampled = round.groups = groups
        if not scoring.max_resamples:
            return round
        useful, equal, attempt = [], [], 0
        while True:
            for group in groups:
                idle = has_equal_rewards(group, scoring.weights)
                (equal if idle else useful).append(group)
            attempt += 1
            prompts = []
            if attempt <= scoring.max_resamples:
                prompts = self.order.take(wanted - len(useful))
            if not prompts:
                break
            seed = request_seed(self.seed, round.step, attempt)
            groups = round.sampler(prompts, seed, round.step)
            round.sampled = round.sampled + groups
        round.taken = self.order.taken
        # Where the bound was reached, groups without advantages fill up.
        round.groups = (useful + equal)[:wanted]
        return round

    def build(self, round):
        """Builds the batches of a scored `Round`: a `Collection`."""
        groups = round.groups
        rewards = np.concatenate([g.rewards for g in groups])
        trajectories = [t for g in groups for t in g.trajectories]
        batches = self._batches(groups)
        advantages = self._fill(batches, trajectories, rewards)
        metrics = self._metrics(round.sampled)
        metrics |= self._advantage_metrics(groups, advantages)
        metrics |= round.sampler.seconds | round.metrics
        if self.episodes:
            metrics |= round.sampler.results()
        table = self._table(round.step, groups, rewards, advantages)
        arrays = [b.arrays for b in batches]
        return Collection(arrays, metrics, table, groups, batches)

    def _batches(self, groups):
        """Returns the batches of a rollout, one for each optimizer step.

        Trajectories without tokens are left out.
        """
        found = [sequences(group) for group in groups]
        found = [group for group in found if group.sequences]
        batches = self.layout.minibatches(found) if found else []
        count = sum(len(g.trajectories) for g in groups)
        return with_empty(batches, self.layout, count)

    def _fill(self, batches, trajectories, rewards):
        """Adds the other inputs of the loss and returns advantages."""
        self._put_logps(batches, trajectories)
        return self._put_advantages(batches, trajectories, rewards)

    def _put_logps(self, batches, trajectories):
        source, forward = self.sampling.old_log_probs, self.forward
        engine = [s.per_token_logps for t in trajectories for s in t.segments]
        if self.sampling.routing_replay:
            self._put_routing(batches, trajectories)
        for batch in batches:
            batch.put_tokens("rollout_per_token_logps", engine)
            several = len(batches) * self.sampling.num_iterations > 1
            if source == "rollout":
                batch.put_tokens("old_per_token_logps", engine)
            elif several or self.scoring.kl_in_reward:
                batch.arrays |= self._old_outputs(batch.arrays)
            if forward.reference is not None:
                logps = forward.reference_logps(batch.arrays)
                batch.arrays["ref_per_token_logps"] = logps

    def _put_routing(self, batches, trajectories):
        """Adds the experts that the engine's tokens chose."""
        chosen = [s.routed_experts for t in trajectories for s in t.segments]
        for batch in batches:
            batch.put_all_tokens(
                "routed_experts",
                chosen,
                self.forward.policy_model.choices_shape,
                np.int16,
                -1,
            )

    def _old_outputs(self, batch):
        """Returns outputs of the policy that sampled, for a batch: a dict."""
        found = self.forward.policy(batch)
        return {"old_per_token_logps": found["per_token_logps"]}

    def _put_advantages(self, batches, trajectories, rewards):
        scoring, settings = self.scoring, {}
        many = self.sampling.num_generations
        if isinstance(scoring.advantages, RoleAdvantages):
            advantages, self.baselines = scoring.advantages(
                scoring.total(rewards, many).reshape(-1),
                [t.player for t in trajectories],
                self.baselines,
            )
        elif isinstance(scoring.advantages, TurnAdvantages):
            turns = scoring.advantages(
                turn_rewards(trajectories, rewards, scoring), many
            )
            of_tokens = token_values(trajectories, turns)
            for batch in batches:
                batch.put_tokens("advantages", of_tokens)
            return np.array([x.mean() if len(x) else 0.0 for x in turns])
        else:
            if scoring.kl_in_reward:
                settings["kl"] = _kl(batches)
            advantages = scoring.advantages(
                rewards, many, scoring.weights, **settings
            )
        in_batch = [a for a, t in zip(advantages, trajectories) if t.segments]
        for batch in batches:
            batch.put_units("advantages", in_batch)
        return np.asarray(advantages)

    def _metrics(self, groups):
        metrics = advantage_lib.reward_metrics(
            np.concatenate([g.rewards for g in groups]),
            self.sampling.num_generations,
            self.scoring.weights,
            self.scoring.names,
        )
        metrics |= length_metrics(groups)
        if self.scoring.max_resamples:
            metrics["dynamic_sampling/num_prompts"] = float(len(groups))
        return metrics

    def _advantage_metrics(self, groups, advantages):
        if not self.scoring.kl_in_reward:
            return {}
        # What is compared has the KL term, which is known only now.
        equal = without_advantages(groups, advantages)
        return {"frac_reward_zero_std": equal}

    def _table(self, step, groups, rewards, advantages):
        many = self.sampling.num_generations
        total = self.scoring.total(rewards, many)
        table = {
            "step": [step] * len(rewards),
            "prompt": [g.prompt.prompt for g in groups for _ in range(many)],
            "completion": [text for g in groups for text in g.texts],
        }
        for name, values in zip(self.scoring.names, rewards.T):
            name = f"rewards/{name}" if name in RESERVED else name
            table[name] = values.tolist()
        found = [t for g in groups for t in g.trajectories]
        table |= {
            "reward": total.reshape(-1).tolist(),
            "advantage": advantages.tolist(),
            "finish_reason": [t.ended for t in found],
        }
        if self.episodes:
            table |= {
                "row": [t.row for t in found],
                "player": [t.player for t in found],
                "tokens": [len(t) for t in found],
                "turn_rewards": [t.turn_rewards for t in found],
                "error": [t.error for t in found],
            }
        return table


def with_empty(batches, layout, count):
    """Adds batches without loss, for steps that no trajectory has tokens for.

    Such a step is skipped. `count` is the number of all trajectories.
    """
    steps = -(-count // layout.num_sequences)
    nothing = Example(np.zeros(2, np.int32), np.zeros(2, np.float32), 0)
    missing = [layout([nothing]) for _ in range(steps - len(batches))]
    empty = [dataclasses.replace(x, parts={}, units={}) for x in missing]
    return [*batches, *empty]


def sequences(group):
    """Returns the segments of a group's trajectories as a batch's `Group`."""
    found = [
        (unit, Example(s.token_ids, s.mask, t.row, group.prompt.images))
        for unit, t in enumerate(group.trajectories)
        for s in t.segments
    ]
    examples = [example for _, example in found]
    if group.prompt.token_ids:
        return Group(examples, len(group.prompt.token_ids))
    # Of episodes: what they share is found.
    return Group(examples, None, [unit for unit, _ in found])


def turn_rewards(trajectories, rewards, scoring):
    """Returns the rewards of each trajectory's turns, lists of floats.

    `None` for a trajectory without a reward. What functions gave is earned by
    the last turn; what the episode itself gave is in its turns already.
    """
    total = scoring.total(rewards, 1)[:, 0]
    weights = np.ones(rewards.shape[1])
    if scoring.weights is not None:
        weights = scoring.weights
    own = np.nan_to_num(rewards[:, 0] * weights[0])
    is_own = len(scoring.names) > len(scoring.rewards)
    found = []
    for i, t in enumerate(trajectories):
        if not t.turn_rewards or np.isnan(total[i]):
            found.append(None)
            continue
        turns = [float(x) for x in t.turn_rewards]
        turns[-1] += float(total[i] - (own[i] if is_own else 0.0))
        found.append(turns)
    return found


def token_values(trajectories, turns):
    """Returns the value of each token's turn, an array for each segment."""
    found = []
    for t, values in zip(trajectories, turns):
        padded = np.append(values, np.float32(0.0))
        if len(padded) == 1:
            padded = np.zeros(len(t.turn_rewards) + 1, np.float32)
        found += [padded[segment.turns] for segment in t.segments]
    return found


def has_equal_rewards(group, weights):
    """Returns whether all completions of a group have the same reward."""
    many = len(group.trajectories)
    total = advantage_lib.total_rewards(group.rewards, many, weights)
    return bool(advantage_lib.constant(total, 1)[0, 0])


def without_advantages(groups, advantages):
    """Returns the share of scored groups all of whose advantages are 0."""
    scored = [not np.isnan(group.rewards).all() for group in groups]
    idle = ~np.any(advantages.reshape(len(groups), -1), axis=1)
    return float(np.mean(idle & scored))


def _kl(batches):
    """Sums the policy's log-ratio to the reference over completions."""
    sums = {}
    for batch in batches:
        old = batch.arrays["old_per_token_logps"]
        gap = old - batch.arrays["ref_per_token_logps"]
        sums |= batch.unit_sums(gap * batch.arrays["completion_mask"])
    return np.array([sums[i] for i in range(len(sums))])
