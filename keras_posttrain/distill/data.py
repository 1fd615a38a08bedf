"""Rows, prompts and samples of a distillation, as its batches."""

import numpy as np

from keras_posttrain.data.batches.distillation import (
    distillation_layout,
    fit_teacher_rows,
    with_lookup,
)
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.distillation import prepare_distillation
from keras_posttrain.data.rows.distillation_columns import teacher_index
from keras_posttrain.data.rows.distillation_example import (
    DistillationExample,
    teacher_view,
)
from keras_posttrain.data.rows.prompts import Prompt, prepare_prompts
from keras_posttrain.distill import step
from keras_posttrain.distill.teacher_cache import TeacherCache, first_learned
from keras_posttrain.losses import DistillationLoss
from keras_posttrain.rl import checks
from keras_posttrain.training import padding

# The column of a prompt that the teacher reads in place of the student's.
TEACHER_PROMPTS = {
    "teacher_prompt": "prompt",
    "teacher_prompt_ids": "prompt_ids",
}


class DistillData:
    """The part of `DistillTask` that makes batches."""

    # Of the rows of an on-policy run: those that are taken as they are given,
    # and what the teacher reads before a sample, by row.
    stored = contexts = None
    _cache = None
    _shows = True

    # Rows

    def prepare(self, dataset, name="dataset", train_on="auto", **overrides):
        if train_on == "all":
            # For `log_probs`, which asks no teacher.
            return super().prepare(
                dataset, name, train_on=train_on, **overrides
            )
        by_column = self.teacher_column is not None
        names = self.given.names
        return prepare_distillation(
            dataset,
            self.row_settings(name, **overrides),
            train_on=train_on,
            teacher_column=self.teacher_column,
            teacher_names=names if by_column else None,
            teacher_tokenizer=self.teacher_tokenizer,
            teacher_length=self.teacher_length,
            teacher_vocabulary_size=self.given.vocabulary_sizes[0],
        )

    def _batches(self, examples, batch_size, *, packing=False, **kwargs):
        lookup = None
        if self.teacher_cache is not None:
            lookup = self._kept(examples, batch_size)
        layout = self._row_layout(batch_size, packing, examples, lookup)
        return self.plain_batches(
            examples, batch_size, layout=layout, **kwargs
        )

    def _row_layout(self, batch_size, packing, examples, lookup=None):
        if is_stream(examples):
            # Of rows that are yet to come the length is not known.
            return self._sized(batch_size, packing, self.sequence_length)
        longest = max(len(x.token_ids) for x in examples)
        layout = self._sized(batch_size, packing, longest)
        return fit_teacher_rows(with_lookup(layout, lookup), examples)

    def _sized(self, num_sequences, packing, longest):
        """The layout of batches of so many sequences."""
        several = self.teacher_column is not None
        return distillation_layout(
            batch_size=num_sequences,
            sequence_length=self.sequence_length,
            teacher_length=self.teacher_length,
            token_budget=checks.token_budget(
                packing, self.sequence_length, longest
            ),
            row_multiple=padding.row_multiple(
                self.micro_batch_size,
                *self.filled_rows(num_sequences, packing),
            ),
            pad_id=self.tokenizer.pad_token_id if self.tokenizer else 0,
            teacher_weights=self.teacher_weights,
            num_teachers=len(self.given) if several else 1,
        )

    # What is written down

    @property
    def kept_temperature(self):
        """The temperature of a teacher's log-probabilities that are kept."""
        losses = [part for _, _, part in step.parts(self.objective)]
        found = [x for x in losses if isinstance(x, DistillationLoss)]
        return found[0].temperature if found else 1.0

    def _kept(self, examples, batch_size):
        """A `lookup` in the cache, which has all of the examples then."""
        if is_stream(examples):
            raise ValueError(
                "What a teacher says is written down before the first step, "
                "of all rows. Received: a Grain `IterDataset` with "
                f"teacher_cache={str(self.teacher_cache)!r}. Use a Grain "
                "`MapDataset`, a list of dicts or a file."
            )
        if self._cache is None:
            self.make_teachers()
            self._cache = TeacherCache(
                self, self.teacher_cache, self.kept_temperature, self.top_k
            )
        lacking = self._cache.lacks(examples)
        if lacking:
            self._refuse_new_rows(len(lacking))
            self.make_teachers()
            self._cache.fill(lacking, batch_size, self._shows)
        # From here on no teacher has to be in memory.
        self.teachers = ()
        self.given.release()
        return self._cache.lookup

    def _refuse_new_rows(self, count):
        is_student = self._cache.kind == "copy" and not self.teachers
        if is_student:
            raise ValueError(
                "The teacher is the student when training began, which is "
                "no longer there to be asked about rows that it has not "
                f"read. Received: {count} rows that are not in "
                f"{str(self.teacher_cache)!r}. Pass them to `fit` as "
                "`validation_data`, or evaluate them before training."
            )

    # Prompts and samples

    def prepare_prompts(self, dataset, name="dataset"):
        length, limit = checks.room(self, self.max_completion_length)
        if self.on_policy < 1.0:
            return self._prompts_of_rows(dataset, name, length, limit)
        prompts, report = self._prompts(dataset, name, length, limit)
        self.stored = {}
        self.contexts = self._contexts(prompts, name)
        return prompts, report

    def _prompts(self, dataset, name, length, limit, truncation=None):
        return prepare_prompts(
            dataset,
            self.row_settings(name, truncation=truncation or self.truncation),
            max_prompt_length=length,
            limit=limit,
        )

    def _prompts_of_rows(self, dataset, name, length, limit):
        """Prompts of rows with completions, some of which stay as they are."""
        examples, report = self.prepare(dataset, name)
        self.stored = {x.row: x for x in examples}
        self.contexts, prompts = {}, []
        for x in examples:
            start = first_learned(x)
            if start > length:
                raise ValueError(
                    "A prompt must leave room for a completion. Received: "
                    f"row {x.row} of `{name}` with a prompt of {start} "
                    f"tokens; it may have {length} ({limit})."
                )
            ids = tuple(x.token_ids[:start].tolist())
            text = self.tokenizer.decode(ids) if self.tokenizer else list(ids)
            prompts.append(Prompt(ids, text, {}, x.row))
            if isinstance(x, DistillationExample):
                before = None
                if x.teacher_ids is not None:
                    if x.teacher_source[start] < 0:
                        raise ValueError(
                            "To sample from a row, the teacher's prompt must "
                            "end where its completion begins. Received: row "
                            f"{x.row} of `{name}`, whose first token with "
                            "loss reaches over that place. End both prompts "
                            "with a space or a new line, or pass tokenised "
                            "rows."
                        )
                    before = x.teacher_ids[: x.teacher_source[start] + 1]
                self.contexts[x.row] = before, x.teacher_index
        return prompts, report

    def _contexts(self, prompts, name):
        """What the teacher reads in place of each prompt, and which one."""
        found, given = {p.row: (None, None) for p in prompts}, prompts[0]
        column = next((c for c in TEACHER_PROMPTS if c in given.columns), None)
        if column is not None:
            rows = [
                {TEACHER_PROMPTS[column]: p.columns[column]} for p in prompts
            ]
            most = self.teacher_length - self.max_completion_length
            # None may be left out: each goes with a prompt.
            before, _ = self._prompts(
                rows,
                f"{name}, column {column!r}",
                most,
                f"teacher_length={self.teacher_length} less "
                f"max_completion_length={self.max_completion_length}",
                truncation="error",
            )
            for p, b in zip(prompts, before, strict=True):
                found[p.row] = np.array(b.token_ids, np.int32), None
        if self.teacher_column is not None:
            names = self.given.names
            for p in prompts:
                where = f"row {p.row} of `{name}`"
                index = teacher_index(
                    p.columns, self.teacher_column, names, where
                )
                found[p.row] = found[p.row][0], index
        return found

    def taught(self, prompt, completion):
        """A sample as a `DistillationExample`.

        Args:
            prompt: `Prompt`.
            completion: the engine's `Completion`.
        """
        new = np.array(completion.token_ids, np.int32)
        ids = np.concatenate([np.array(prompt.token_ids, np.int32), new])
        cut = completion.finish_reason == "length"
        masked = cut and self.mask_truncated_completions
        mask = np.zeros(len(ids), np.float32)
        mask[len(ids) - len(new) :] = 0.0 if masked else 1.0
        before, index = self.contexts.get(prompt.row, (None, None))
        theirs = source = None
        if before is not None:
            theirs, source = teacher_view(before, new, len(ids))
        return DistillationExample(
            ids, mask, prompt.row, theirs, source, index
        )

    def _layout(self, prompts, batch_size, packing, share):
        """The layout of a minibatch of samples."""
        longest = max(len(p.token_ids) for p in prompts)
        return self._sized(
            self._sequences(batch_size),
            packing,
            longest + self.max_completion_length,
        )

    def prepare_held_out(self, dataset):
        return self.prepare(dataset, "validation_data")

    def _validate(self, held_out, callbacks, settings):
        del settings  # nothing is sampled
        callbacks.on_test_begin()
        batches = self._batches(held_out, self.order.batch_size, shuffle=False)
        logs = self.evaluate(batches)
        callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}
