"""The student's own samples, as its teacher sees them."""

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.data.batches.distillation import with_lookup
from keras_posttrain.distill import step as distill_step
from keras_posttrain.distill.teacher_cache import (
    heard,
    placed,
    served_top_tokens,
)
from keras_posttrain.distribution import processes
from keras_posttrain.rl.collector import LOGPS_INPUTS, Collected, Collector
from keras_posttrain.rl.sampling import length_metrics
from keras_posttrain.training import step as steps

# What the program of the teachers' log-probabilities reads of a batch.
TEACHER_INPUTS = (
    *LOGPS_INPUTS,
    *distill_step.TEACHER_TOKENS.values(),
    "teacher_source",
    "teacher_mask",
    "teacher_weights",
)


class DistillCollector(Collector):
    """One rollout: prompts to batches that the teacher has looked at.

    Args:
        task: `DistillTask`, in `fit`.
        layout: `BatchLayout` of a minibatch.
    """

    def draw(self, prompts, step):
        own, _ = self._split(prompts, step)
        drawn = super().draw(own, step)
        drawn.prompts = prompts
        return drawn

    def judge(self, drawn):
        own, _ = self._split(drawn.prompts, drawn.step)
        drawn.groups = drawn.sample.judged(own, drawn.completions)
        return drawn

    def build(self, drawn):
        task, groups = self.task, drawn.groups
        _, given = self._split(drawn.prompts, drawn.step)
        taught = [
            task.taught(group.prompt, completion)
            for group in groups
            for completion in group.completions
        ]
        completions = [c for g in groups for c in g.completions]
        taught += [task.stored[prompt.row] for prompt in given]
        metrics = drawn.sample.seconds | drawn.metrics
        if groups:
            metrics |= length_metrics(groups)
        layout = self.layout
        if task.given.engine is not None and not task.by_policy_loss:
            layout = with_lookup(layout, self._served(taught))
        batches = layout.minibatches(taught, equal_lengths=False)
        if task.by_policy_loss:
            self._put_logps(batches, completions)
            metrics |= self._follow(batches, taught)
        arrays = [batch.arrays for batch in batches]
        return Collected(arrays, metrics, self._table(groups))

    def _split(self, prompts, step):
        """Those that are sampled from, and those taken as they are given."""
        task = self.task
        count = round(task.on_policy * len(prompts))
        if count == len(prompts):
            return prompts, []
        rng = np.random.default_rng([task._seed % 2**32, step])
        chosen = set(rng.permutation(len(prompts))[:count].tolist())
        own = [p for i, p in enumerate(prompts) if i in chosen]
        return own, [p for i, p in enumerate(prompts) if i not in chosen]

    def _served(self, taught):
        """What a served teacher says of sequences, as a `lookup`."""
        task = self.task
        answers = served_top_tokens(
            task.given.engine,
            [heard(x) for x in taught],
            task.top_k,
            task.kept_temperature,
        )
        found = {id(x): a for x, a in zip(taught, answers, strict=True)}
        return lambda example: placed(example, found[id(example)])

    # The policy gradient

    def _follow(self, batches, taught):
        """Adds advantages, teacher less student; returns metrics."""
        gaps, count = 0.0, 0.0
        for batch in batches:
            known = ("old_per_token_logps", "rollout_per_token_logps")
            name = next((n for n in known if n in batch.arrays), None)
            # An engine need not say how probable its samples were.
            old = batch.arrays[name] if name else self.logps(batch.arrays)
            mask = batch.arrays["completion_mask"] != 0
            theirs = self._teacher_logps(batch, taught)
            gap = np.where(mask, theirs - old, 0.0)
            batch.arrays["advantages"] = gap.astype(np.float32)
            gaps, count = gaps + gap.sum(), count + mask.sum()
        # The mean of log p(student) - log p(teacher) of what was sampled.
        return {"reverse_kl": float(-gaps / max(count, 1))}

    def _teacher_logps(self, batch, taught):
        """The teachers' log-probabilities of a batch's completions."""
        task = self.task
        if task.given.engine is not None:
            return self._served_logps(batch, taught)
        if "teachers" not in self._programs:
            self._programs["teachers"] = jax.jit(self._of_teachers)
        names = {*TEACHER_INPUTS} & set(batch.arrays)
        state = {
            "trainable": [v.value for v in task.trainable_variables],
            "frozen": [v.value for v in task.non_trainable_variables],
            "teachers": [teacher.values for teacher in task.teachers],
        }
        given = task.to_device({name: batch.arrays[name] for name in names})
        return processes.fetch(self._programs["teachers"](state, given))

    def _served_logps(self, batch, taught):
        """Those of a served teacher, at the samples' temperature."""
        numbers = list(batch.places)
        sequences = [heard(taught[i]) for i in numbers]
        scores = self.task.given.engine.score(
            [list(ids) for ids, _ in sequences],
            temperature=self.task.temperature,
        )
        values = {
            i: s.per_token_logps[start:]
            for i, s, (_, start) in zip(numbers, scores, sequences)
        }
        name = "teacher_per_token_logps"
        batch.put_tokens(name, values)
        return batch.arrays.pop(name)

    def _of_teachers(self, state, batch):
        task = self.task

        def of_rows(rows):
            view, source = distill_step.teacher_view(rows)
            if source is None:
                mask = rows["completion_mask"] != 0
            else:
                mask = view["segment_ids"] > 0
            found = []
            for teacher, values in zip(task.teachers, state["teachers"]):
                with teacher.using(
                    values, state["trainable"], state["frozen"]
                ):
                    logps = teacher.policy.token_outputs(
                        view,
                        mask,
                        temperature=task.temperature,
                        differentiable=False,
                    )["per_token_logps"]
                if source is not None:
                    # The column after the one that predicts it.
                    logps = jnp.take_along_axis(logps, source + 1, axis=1)
                found.append(logps)
            weights = distill_step.token_weights(rows)
            if weights is None:
                return found[0]
            return jnp.sum(jnp.stack(found) * weights, axis=0)

        count = task._micro_batches(batch)
        if count == 1:
            return of_rows(batch)
        out = jax.lax.map(of_rows, steps.split_rows(batch, count))
        return out.reshape(batch["token_ids"].shape)

    def _table(self, groups):
        many = [(g, i) for g in groups for i in range(len(g.completions))]
        return {
            "step": [self.task.step] * len(many),
            "prompt": [g.prompt.prompt for g, _ in many],
            "completion": [g.texts[i] for g, i in many],
            "finish_reason": [g.completions[i].finish_reason for g, i in many],
        }
