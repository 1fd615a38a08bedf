import dataclasses
import gc

import jax

from keras_posttrain.losses import DPOLoss
from keras_posttrain.tasks.preference_task import PreferenceTask
from keras_posttrain.training import preference_checks as checks
from keras_posttrain.training import step as steps
from keras_posttrain.training.frozen import Reference
from keras_posttrain.training.reference_cache import ReferenceCache, logps_of


class DPOTask(PreferenceTask):
    """Preference tuning: direct preference optimisation and its kin.

    The loss is an object: `compile(loss=...)` takes `DPOLoss`, the default,
    or any other loss of pairs of `kpt.losses` (`IPOLoss`, `SimPOLoss`,
    `ORPOLoss`, ... and `SumLoss`es of them), or one of labelled completions
    (`KTOLoss`, `APOZeroUnpairedLoss`). Rows are what it asks for:
    `{"prompt", "chosen", "rejected"}` or `{"chosen", "rejected"}`, whose
    common beginning is the prompt, or `{"prompt", "completion", "label"}`,
    each side a string or a list of messages; or tokenised as
    `{"prompt_ids", "chosen_ids", "rejected_ids"}` (`prompt_ids` may be left
    out) or `{"prompt_ids", "completion_ids", "label"}`. A pair whose sides
    are equal says nothing: it is left out and counted.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        reference: a preset or a KerasHub `CausalLM`, or `None` for the
            policy when training began: the model with the adapter off where
            the adapter was 0, else a frozen copy of what is trained. Losses
            without a reference, such as `SimPOLoss`, make none.
        **kwargs: see `from_preset`.

    References:
        - [Rafailov et al., 2023](https://arxiv.org/abs/2305.18290).

    Example:

    ```python
    task = kpt.DPOTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=16))
    task.compile(
        optimizer=keras.optimizers.AdamW(1e-5),
        loss=kpt.losses.DPOLoss(beta=0.1),
    )
    task.fit(
        [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}],
        batch_size=1,
    )
    task.generate("2 + 2 =", temperature=0)
    ```
    """

    auto_learning_rates = (1e-5, 1e-6)
    # Set by `compile` and `fit`.
    reference = reference_cache = cached = None
    _verbose = 0

    def __init__(self, causal_lm, tokenizer=None, *, reference=None, **kwargs):
        super().__init__(causal_lm, tokenizer, **kwargs)
        # Behind a function it is no sublayer.
        self._given_reference = lambda: reference

    def default_loss(self):
        return DPOLoss()

    def compile(
        self, optimizer="auto", loss="auto", *, reference_cache=None, **kwargs
    ):
        """Sets what training needs.

        Args:
            optimizer: as in `kpt.SFTTask.compile`; `"auto"` is AdamW with a
                learning rate of 1e-5 with an adapter and 1e-6 without.
            loss: `"auto"` for `kpt.losses.DPOLoss()`, or a loss of pairs or
                of labelled completions.
            reference_cache: str or path of a directory, or `None`. What the
                reference makes of the rows, those of `validation_data` too,
                is computed once, before the first step, and kept there for
                all runs with this reference: 4 bytes a token. It saves the
                reference's forward pass in every step, and the memory of a
                reference that has its own: a preset, or the copy that
                training all weights needs. A model that you hold yourself
                stays in memory. It changes no result.
            micro_batch_size: int or `None`: pairs (labelled completions)
                that pass through the model at once; rows where `packing`.
                The result is that of the whole batch, also of losses that
                couple it (`AOTLoss`, `KTOLoss`), at the cost of one more
                forward pass.
            max_grad_norm, run_eagerly: as in `kpt.SFTTask.compile`.
        """
        loss = self.default_loss() if loss == "auto" else loss
        checks.preference_loss(loss)
        checks.reference_cache(reference_cache, loss)
        super().compile(optimizer, loss, **kwargs)
        self.reference = self.cached = None
        self.reference_cache = reference_cache

    # The reference

    @property
    def compares(self):
        """Whether the loss compares with a reference."""
        return "ref_per_token_logps" in self.objective.needs

    def _begin_run(self, examples, callbacks, verbose):
        if self.labelled:
            checks.both_labels(self.objective, examples)
        if not self.compares:
            return
        moves = any(hasattr(c, "moves_reference") for c in callbacks)
        checks.reference_stays(self.reference_cache, moves)
        self._verbose = verbose
        if self.reference is None and self.cached is None:
            self._make_reference(moves)
            if verbose and self.reference.num_bytes:
                size = self.reference.num_bytes / 2**20
                print(f"reference: {size:,.1f} MiB", flush=True)
        if self.cached is None:
            checks.reference_packs(self.reference, self.packs)

    def _make_reference(self, moves=False):
        self.reference = Reference(self, self._given_reference(), moves=moves)
        if self.reference_cache is not None and self.cached is None:
            self.cached = ReferenceCache(self.reference_cache, self.reference)
        # Programs know what kind of reference they read.
        self.train_function = self.test_function = None

    def _batches(self, examples, batch_size, **kwargs):
        if self.cached is not None:
            self._fill_cache(examples, batch_size)
        return super()._batches(examples, batch_size, **kwargs)

    def _fill_cache(self, examples, batch_size):
        lacking = self.cached.lacks(examples)
        if not lacking:
            return
        if self.reference is None:
            checks.reference_is_back(self.cached, lacking)
            self._make_reference()
        size = min(batch_size, self.micro_batch_size or batch_size)
        self.cached.fill(self, self.reference, lacking, size, self._verbose)

    def _layout(self, batch_size):
        layout = super()._layout(batch_size)
        if self.cached is None:
            return layout
        extras = dataclasses.replace(
            layout.extras, reference_cache=self.cached.rows
        )
        return dataclasses.replace(layout, extras=extras)

    def make_train_function(self, force=False):
        # Called when all batches are known, and before the first step.
        self._release_reference()
        super().make_train_function(force)

    def _release_reference(self):
        """Frees the memory of a reference that is in the batches."""
        if self.cached is not None and self.reference is not None:
            if self.reference.num_bytes:
                self.reference = None
                # Models are cycles, which would wait for their collection.
                gc.collect()

    def evaluate(self, dataset=None, batch_size=8, **kwargs):
        """The loss and metrics of rows, as means over all of them.

        Before training the reference is the policy itself, unless one was
        given.

        Args:
            dataset: as in `fit`.
            batch_size: int, pairs (labelled completions) at once.
            **kwargs: see `kpt.SFTTask.evaluate`.

        Returns:
            A dict of floats: `loss` and the loss's metrics.
        """
        self._assert_compile_called("evaluate")
        made = self.reference is not None or self.cached is not None
        passing = self.compares and not made
        if passing:
            self._make_reference()
        try:
            return super().evaluate(dataset, batch_size, **kwargs)
        finally:
            self._release_reference()
            if passing:
                self.reference = self.cached = self.test_function = None

    # The steps

    def held(self, frozen):
        held = super().held(frozen)
        if self.reference is not None:
            held["reference"] = self.reference.values
        return held

    def loss_and_gradients(self, state, batch):
        batch = self.with_reference(state, batch)
        return super().loss_and_gradients(state, batch)

    def test_step(self, state, batch):
        return super().test_step(state, self.with_reference(state, batch))

    def with_reference(self, state, batch):
        """The batch with `ref_per_token_logps`, where the loss reads them."""
        reference = self.reference
        if not self.compares or "ref_per_token_logps" in batch:
            return batch

        def of_rows(rows):
            return logps_of(reference, state, rows)

        count = self._micro_batches(batch)
        if count == 1:
            logps = of_rows(batch)
        else:
            logps = jax.lax.map(of_rows, steps.split_rows(batch, count))
            logps = logps.reshape(batch["token_ids"].shape)
        return {**batch, "ref_per_token_logps": logps}

    # The state of a run

    def training_state(self):
        arrays, meta = super().training_state()
        if self.reference is not None:
            arrays["reference"] = self.reference.state()
        return arrays, meta

    def restore_training_state(self, arrays, meta):
        super().restore_training_state(arrays, meta)
        if self.reference is not None:
            self.reference.set_state(arrays["reference"])

    def fingerprint(self):
        kind = None if self.reference is None else self.reference.kind
        if self.cached is not None:
            kind = self.cached.label
        return super().fingerprint() | {"reference": kind}
