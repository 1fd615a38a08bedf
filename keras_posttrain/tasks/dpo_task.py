import dataclasses
import gc

from keras_posttrain.losses import DPOLoss
from keras_posttrain.tasks.preference_task import PreferenceTask
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import keras_words
from keras_posttrain.training import preference_checks as checks
from keras_posttrain.training.callbacks import moves_reference, show
from keras_posttrain.training.frozen import (
    Untracked,
    make_reference,
    model_of,
)
from keras_posttrain.training.frozen_cache import (
    FrozenCache,
    completion_logps,
    completions_by_key,
)
from keras_posttrain.training.weights import ModelWeights


class DPOTask(PreferenceTask):
    """Preference tuning: direct preference optimisation and related losses.

    The loss is an object: `compile(loss=...)` takes `DPOLoss`, the default,
    or any other loss of pairs of `kpt.losses` (`IPOLoss`, `SimPOLoss`,
    `ORPOLoss`, ... and `SumLoss`es of them), or one of labelled completions
    (`KTOLoss`, `APOZeroUnpairedLoss`), which determines the rows:
    `{"prompt", "chosen", "rejected"}` or `{"chosen", "rejected"}`, whose
    common beginning is the prompt, or `{"prompt", "completion", "label"}`,
    each side a string or a list of messages; or tokenised as
    `{"prompt_ids", "chosen_ids", "rejected_ids"}` (`prompt_ids` may be left
    out) or `{"prompt_ids", "completion_ids", "label"}`. A pair with
    equal sides is dropped and reported. Prompts may have `images`, as in
    `kpt.SFTTask`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        reference: a preset, a KerasHub `CausalLM` or a task of another
            model, such as `from_preset(..., quantize="int8",
            trainable=False)` makes, or `None` for the policy at the start of
            training: the model with the adapter off if the adapter was 0,
            else a frozen copy of the trained weights.
            Not used by reference-free losses such as `SimPOLoss`.
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
    takes_images = True

    def __init__(self, causal_lm, tokenizer=None, *, reference=None, **kwargs):
        super().__init__(causal_lm, tokenizer, **kwargs)
        self._given_reference = Untracked(model_of(reference))
        # Set by `compile` and `fit`: a `FrozenPolicy`, a directory, and the
        # `FrozenCache` in it.
        self.reference = self.reference_cache = self.cached = None

    def default_loss(self):
        return DPOLoss()

    @keras_words.explained
    def compile(
        self, optimizer="auto", loss="auto", *, reference_cache=None, **kwargs
    ):
        """Configures the task for training.

        Args:
            optimizer: as in `kpt.SFTTask.compile`; `"auto"` is AdamW with a
                learning rate of 1e-5 with an adapter and 1e-6 without.
            loss: `"auto"` for `kpt.losses.DPOLoss()`, or a loss of pairs or
                of labelled completions.
            reference_cache: str or path of a directory, or `None`. The
                reference's log-probabilities of all rows, including
                `validation_data`, are computed once before the first step
                and kept there for all runs with this reference, at 4 bytes
                per token. The cache saves the reference's forward pass in
                every step, and the memory of a separate reference: a preset,
                or the copy needed to train all weights. A model that you
                hold yourself stays in memory. It does not change results.
            micro_batch_size: int or `None`, pairs (labelled completions)
                that pass through the model at once; rows with `packing`.
                The result is that of the full batch, also for losses that
                couple its rows (`AOTLoss`, `KTOLoss`), at the cost of one
                more forward pass.
            max_grad_norm, run_eagerly: as in `kpt.SFTTask.compile`.
        """
        loss = self.default_loss() if loss == "auto" else loss
        checks.preference_loss(loss)
        checks.reference_cache(reference_cache, loss)
        self.reference, self.cached, self.companions = None, None, {}
        self.reference_cache = reference_cache
        super().compile(optimizer, loss, **kwargs)

    # The reference

    @property
    def compares(self):
        """Bool, whether the loss compares with a reference."""
        return "ref_per_token_logps" in self.objective.needs

    def companion_models(self):
        if not self.compares:
            return {}
        model = self.reference or self._given_reference.value
        return {"reference": [model]}

    def begin_run(self, datasets, batch_size, callbacks):
        if self.labelled:
            checks.both_labels(self.objective, datasets[0])
        if not self.compares:
            return
        moves = moves_reference(callbacks)
        checks.reference_stays(self.reference_cache, moves)
        if self.reference is None and self.cached is None:
            self._make_reference(moves)
            if self._verbose and self.reference.num_bytes:
                size = self.reference.num_bytes / 2**20
                show(f"reference: {size:,.1f} MiB", self._verbose)
        if self.cached is None:
            checks.reference_packs(self.reference, self.packs)
            return
        for examples in datasets:
            self._fill_cache(examples, batch_size)
        self._release_reference()

    def _make_reference(self, moves=False):
        reference = make_reference(
            self._given_reference.value,
            self.policy,
            ModelWeights.of(self),
            moves,
        )
        if self.reference_cache is not None and self.cached is None:
            header = {
                "kind": "log-probabilities of a reference",
                **reference.identity(),
            }
            self.cached = FrozenCache(
                self.reference_cache, header, reference.kind
            )
        self._set_reference(reference)

    def _set_reference(self, reference):
        self.reference, self.companions = reference, {}
        # Batches hold the log-probabilities of a cached reference.
        if reference is not None and self.cached is None:
            self.companions = {"reference": (reference,)}
        self._renew_step()

    def make_batches(self, examples, batch_size, **kwargs):
        if self.cached is not None:
            self._fill_cache(examples, batch_size)
        return super().make_batches(examples, batch_size, **kwargs)

    def _fill_cache(self, examples, batch_size):
        missing = self.cached.missing(completions_by_key(examples))
        if missing:
            if self.reference is None:
                checks.reference_is_back(self.cached, missing)
                self._make_reference()
            size = min(batch_size, self.micro_batch_size or batch_size)
            compute = completion_logps(
                self.reference,
                ModelWeights.of(self),
                lambda rows: Task.make_batches(
                    self, rows, size, shuffle=False
                ),
            )
            self.cached.fill(
                missing,
                length=lambda item: item.stop,
                compute=compute,
                message=f"reference: computes {len(missing):,} completions, "
                "which are kept in",
                verbose=self._verbose,
            )

    def _layout(self, batch_size):
        layout = super()._layout(batch_size)
        if self.cached is None:
            return layout
        extras = dataclasses.replace(
            layout.extras, reference_cache=self.cached.rows
        )
        return dataclasses.replace(layout, extras=extras)

    def _release_reference(self):
        """Frees the reference once batches hold its log-probabilities."""
        if self.cached is not None and self.reference is not None:
            if self.reference.num_bytes:
                self._set_reference(None)
                # Models hold cycles, which wait for the garbage collector.
                gc.collect()

    @keras_words.explained
    def evaluate(self, dataset=None, batch_size=8, **kwargs):
        """Computes the loss and metrics of rows, as means over all rows.

        Before training the reference is the policy itself, unless the task
        has another. A batch is of `batch_size` pairs (labelled completions).

        Args:
            dataset, **kwargs: see `kpt.SFTTask.evaluate`.

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
                self.cached = None
                self._set_reference(None)

    def fingerprint(self):
        kind = None if self.reference is None else self.reference.kind
        if self.cached is not None:
            kind = self.cached.label
        return super().fingerprint() | {"reference": kind}
