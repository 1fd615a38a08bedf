import dataclasses

import numpy as np

from keras_posttrain.data.batches.preference import preference_layout
from keras_posttrain.data.rows.preference import prepare_preferences
from keras_posttrain.data.rows.preference_encoder import Preference
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import keras_words, padding
from keras_posttrain.training import preference_checks as checks


class PreferenceTask(Task):
    """Base class of tasks on pairs or on labelled completions."""

    # Whether a pair without a prompt column must have a common beginning.
    shares_prompt = True
    can_share_prefix = True

    def __init__(self, causal_lm, tokenizer=None, **kwargs):
        super().__init__(causal_lm, tokenizer, **kwargs)
        # Set by `fit`.
        self.share_prefix = self.packs = False

    @property
    def labelled(self):
        """Bool, whether the loss needs labelled completions, not pairs."""
        return checks.labelled(self.objective)

    def prepare(self, dataset, name="dataset", train_on=None, **overrides):
        settings = self.row_settings(name, **overrides)
        if train_on is not None:
            # Rows with one completion, for `log_probs`.
            return prepare_sft(dataset, settings, train_on)
        return prepare_preferences(
            dataset,
            settings,
            labelled=self.labelled,
            share_prompt=self.shares_prompt,
        )

    @keras_words.explained
    def fit(
        self,
        dataset,
        batch_size=8,
        epochs=1,
        *,
        packing=False,
        share_prefix=False,
        **kwargs,
    ):
        """Trains on rows.

        Args:
            dataset: as in `kpt.SFTTask.fit`.
            batch_size: int, pairs (labelled completions) of one optimizer
                step.
            epochs, **kwargs: see `kpt.SFTTask.fit`.
            packing: `True` to put several pairs of a batch in a row that has
                room for `sequence_length` tokens and for any one pair, or an
                int for rows of that many tokens. It does not change results.
                The lengths of a stream are not known: its rows must have
                room for two completions of `sequence_length` tokens.
            share_prefix: bool, whether the prompt of a pair is computed once
                for both completions. It does not change results.

        Returns:
            A Keras `History` of the means over each epoch.
        """
        checks.layout_arguments(self.policy, packing, share_prefix)
        self.share_prefix = share_prefix
        self.packs = share_prefix or bool(packing)
        return super().fit(
            dataset, batch_size, epochs, packing=packing, **kwargs
        )

    def make_batches(self, examples, batch_size, *, packing=False, **kwargs):
        checks.strangers(self.objective, batch_size)
        if self.share_prefix:
            examples = checks.prompts(examples)
        layout = self._layout(batch_size)
        if packing:
            layout = checks.packed(layout, packing, examples)
        multiple = padding.row_multiple(
            self.micro_batch_size, *self.filled_rows(batch_size, packing)
        )
        layout = dataclasses.replace(layout, row_multiple=multiple)
        return super().make_batches(
            examples, batch_size, layout=layout, **kwargs
        )

    def _layout(self, batch_size):
        return preference_layout(
            batch_size=batch_size,
            sequence_length=self.sequence_length,
            labelled=self.labelled,
            mismatched=checks.mismatched(self.objective),
            share_prefix=self.share_prefix,
            pad_id=padding.token_id(
                self.tokenizer, self.causal_lm.backbone.vocabulary_size
            ),
        )

    def example_batch(
        self, batch_size, prompt_length=None, packing=False, share_prefix=False
    ):
        checks.layout_arguments(self.policy, packing, share_prefix)
        self.share_prefix = share_prefix
        self.packs = share_prefix or bool(packing)
        length = self.sequence_length
        before = length // 2 if prompt_length is None else prompt_length
        sides = 1 if self.labelled else 2
        prompt = np.ones(before, "int32")
        completion = np.ones(length - before, "int32")
        examples = [
            Preference(
                prompt,
                [completion] * sides,
                [completion.astype("float32")] * sides,
                i,
                # Losses of labelled completions want both kinds.
                label=i % 2 == 0 if self.labelled else None,
            )
            for i in range(batch_size)
        ]
        batches = self.make_batches(
            examples, batch_size, packing=packing, shuffle=False
        )
        return next(iter(batches.get_jax_iterator()))

    def rows_together(self, batch):
        # Where a row is a sequence, several make a pair.
        rows, most = batch["sequence_mask"].shape
        return self._layout(rows).together if most == 1 else 1

    def filled_rows(self, batch_size, packing=False):
        if packing:
            return None, 1
        if self.share_prefix:
            return batch_size, 1
        together = self._layout(batch_size).together
        return batch_size * together, together
