"""Collects on-policy batches for distillation."""

import numpy as np

from keras_posttrain.data.batches.distillation import with_lookup
from keras_posttrain.data.batches.layout import Group
from keras_posttrain.distill.teacher_cache import (
    aligned,
    served_top_tokens,
    teacher_span,
)
from keras_posttrain.rl.collector import (
    METRICS,
    Collection,
    Collector,
    with_empty,
)
from keras_posttrain.rl.trajectory import LENGTH_METRICS, length_metrics
from keras_posttrain.training import keras_fit


class DistillCollector(Collector):
    """Turns prompts into batches with the teacher outputs that a loss reads.

    Args:
        prompts: `StudentPrompts`.
        share: float, the share of each rollout's prompts that are sampled
            from; the other rows are used as given.
        engine: `Rollout` that serves the teacher, or `None`.
        top_k: int or `None`, tokens that are asked of the engine.
        kept_temperature: float, of the engine's log-probabilities.
        teacher_pass: `TeacherPass` for a policy gradient, else `None`.
        generate, open_session, **kwargs: as in `Collector`.
    """

    def __init__(
        self,
        generate,
        open_session=None,
        *,
        prompts,
        share,
        engine=None,
        top_k=None,
        kept_temperature=1.0,
        by_policy_loss=False,
        teacher_pass=None,
        **kwargs,
    ):
        super().__init__(generate, open_session, **kwargs)
        self.prompts, self.share = prompts, share
        self.engine, self.top_k = engine, top_k
        self.kept_temperature = kept_temperature
        self.by_policy_loss = by_policy_loss
        self.teacher_pass = teacher_pass

    @property
    def metric_names(self):
        own = ("reverse_kl",) if self.by_policy_loss else ()
        if self.episodes:
            own += self.episodes.metric_names
        return (*METRICS, *LENGTH_METRICS, *own)

    @property
    def validation_names(self):
        return keras_fit.metric_names(self.forward.step)

    def sample(self, prompts, step):
        own, _ = self._split(prompts, step)
        round = super().sample(own, step)
        round.prompts = prompts
        return round

    def score(self, round):
        own, _ = self._split(round.prompts, round.step)
        round.groups = round.sampler.score(own, round.completions, round.step)
        return round

    def build(self, round):
        groups = round.groups
        _, given = self._split(round.prompts, round.step)
        # The segments of a trajectory are one unit.
        units = [
            self.prompts.examples(group.prompt, trajectory)
            for group in groups
            for trajectory in group.trajectories
        ]
        units += [[self.prompts.stored[prompt.row]] for prompt in given]
        examples = [example for unit in units for example in unit]
        metrics = round.sampler.seconds | round.metrics
        if self.episodes:
            metrics |= round.sampler.results()
        if groups:
            metrics |= length_metrics(groups)
        batches = self._batches_of(units, examples)
        if self.by_policy_loss:
            trajectories = [t for g in groups for t in g.trajectories]
            self._put_logps(batches, trajectories)
            metrics |= self._put_log_ratios(batches, examples)
        arrays = [batch.arrays for batch in batches]
        table = _table(round.step, groups)
        # Without a policy loss sequences have no arrays of sampled tokens.
        laid_out = batches if self.by_policy_loss else []
        return Collection(arrays, metrics, table, groups, laid_out)

    def _batches_of(self, units, examples):
        """Returns the batches of a rollout, one for each optimizer step."""
        layout = self.layout
        if self.engine is not None and not self.by_policy_loss:
            layout = with_lookup(layout, self._served(examples))
        groups = [Group(unit, None, [0] * len(unit)) for unit in units if unit]
        batches = layout.minibatches(groups, equal_lengths=False)
        return with_empty(batches, layout, len(units))

    def _split(self, prompts, step):
        """Splits prompts into those to sample from and those used as given."""
        count = round(self.share * len(prompts))
        if count == len(prompts):
            return prompts, []
        rng = np.random.default_rng([self.seed % 2**32, step])
        chosen = set(rng.permutation(len(prompts))[:count].tolist())
        own = [p for i, p in enumerate(prompts) if i in chosen]
        return own, [p for i, p in enumerate(prompts) if i not in chosen]

    def _served(self, examples):
        """Returns a served teacher's most probable tokens, as a `lookup`."""
        answers = served_top_tokens(
            self.engine,
            [teacher_span(x) for x in examples],
            self.top_k,
            self.kept_temperature,
        )
        found = {id(x): a for x, a in zip(examples, answers, strict=True)}
        none = np.zeros((0, self.top_k))

        def lookup(example):
            if id(example) in found:
                return aligned(example, found[id(example)])
            # Of a batch without loss.
            return {"ids": none, "logps": none}

        return lookup

    # The policy gradient

    def _put_log_ratios(self, batches, examples):
        """Adds advantages, teacher minus student; returns metrics."""
        gaps, count = 0.0, 0.0
        known = ["old_per_token_logps"]
        if not self.episodes:
            # Time decides which turns of episodes an engine computes
            # together, and so how it rounds.
            known.append("rollout_per_token_logps")
        for batch in batches:
            name = next((n for n in known if n in batch.arrays), None)
            if name:
                old = batch.arrays[name]
            else:
                found = self.forward.policy(batch.arrays)
                old = found["per_token_logps"]
            mask = batch.arrays["completion_mask"] != 0
            theirs = self._teacher_logps(batch, examples)
            gap = np.where(mask, theirs - old, 0.0)
            batch.arrays["advantages"] = gap.astype(np.float32)
            gaps, count = gaps + gap.sum(), count + mask.sum()
        # The mean of log p(student) - log p(teacher) over sampled tokens.
        return {"reverse_kl": float(-gaps / max(count, 1))}

    def _teacher_logps(self, batch, examples):
        """Returns the teachers' log-probabilities of a batch's completions."""
        if self.engine is None:
            return self.teacher_pass(batch.arrays)
        numbers = list(batch.places)
        spans = [teacher_span(examples[i]) for i in numbers]
        scores = self.engine.score(
            [list(span.token_ids) for span in spans],
            temperature=self.sampling.temperature,
        )
        values = {
            i: score.per_token_logps[span.start :]
            for i, score, span in zip(numbers, scores, spans)
        }
        name = "teacher_per_token_logps"
        batch.put_tokens(name, values)
        return batch.arrays.pop(name)


def _table(step, groups):
    many = [(g, i) for g in groups for i in range(len(g.trajectories))]
    return {
        "step": [step] * len(many),
        "prompt": [g.prompt.prompt for g, _ in many],
        "completion": [g.texts[i] for g, i in many],
        "finish_reason": [g.trajectories[i].ended for g, i in many],
    }
