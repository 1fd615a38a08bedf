import contextlib
import itertools

import jax
import keras
import numpy as np

from keras_posttrain import _console, _remote, optimizers
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.examples import Example
from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.data.rows.store import StoredExamples
from keras_posttrain.data.rows.streams import check_epochs
from keras_posttrain.distribution import processes, shapes_only
from keras_posttrain.losses import Loss, RouterLoss, TokenLoss
from keras_posttrain.models import (
    device_transfer,
    gpu_attention,
    guards,
    presets,
    quantized,
    sharding,
)
from keras_posttrain.models.hf import export, loading
from keras_posttrain.models.hf.adapter_files import read_config
from keras_posttrain.models.hf.rope import set_sequence_length
from keras_posttrain.models.linear import flatten_linear_layers
from keras_posttrain.models.lora import (
    Adapter,
    adapter_of,
    handed_over,
    lora_from_config,
)
from keras_posttrain.models.policy import Policy
from keras_posttrain.models.vision import freeze_tower, image_reader
from keras_posttrain.planning import decode_plan, suggestion, train_plan
from keras_posttrain.rollout import NativeRollout
from keras_posttrain.training import callbacks as callback_lib
from keras_posttrain.training import (
    checks,
    huge_pages,
    keras_fit,
    keras_words,
    padding,
    recomputation,
    run_state,
)
from keras_posttrain.training.frozen_cache import run_rows
from keras_posttrain.training.generation import (
    complete,
    complete_rows,
)
from keras_posttrain.training.micro_batches import MicroBatches
from keras_posttrain.training.routing import Routing
from keras_posttrain.training.row_metrics import RowMetrics
from keras_posttrain.training.run_settings import RunSettings
from keras_posttrain.training.step import (
    POLICY_OUTPUTS,
    STEP_METRICS,
    LossTerms,
    TrainStep,
    compile_step,
)
from keras_posttrain.training.weights import ModelWeights


@keras_words.without_methods
class Task(keras.Model):
    """Base class of tasks: a causal language model and its training.

    It holds the model, the tokenizer and the adapter, and keeps what
    `keras.Model` offers (`compile`, `fit`, `evaluate`, callbacks, history,
    distribution) around a custom training step. Use a subclass such as
    `kpt.SFTTask`.

    A subclass overrides `default_loss` and `prepare`, and where its batches
    differ `make_batches` and `example_batch`. A custom training step
    overrides `train_step`; checkpoints and resuming stay.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, a tokenizer of `transformers` or of
            KerasHub, the path of a directory with tokenizer files, a preset,
            or `None` where all rows are tokenised.
        lora: `kpt.LoRA`, or `None` to train all weights.
        reference: `None`; only tasks whose loss compares with a reference
            take one.
        sequence_length: int, tokens a row may hold.
        truncation: `"error"`, `"drop"` or `"cut"`, the treatment of longer
            rows.
        chat_template: str or `None`, a Jinja2 template instead of the
            preset's own.
        chat_template_kwargs: dict of variables for the template, such as
            `{"enable_thinking": False}`, in training and in `generate`.
        remat: what decoder layers keep for the backward pass, where the
            rest is computed again. From the most memory to the least:
            `"none"` keeps everything; `"attention"` keeps the outputs of
            linear layers, of experts and of attention, and computes again
            what is cheap (norms, rotations, activations) and the scores of
            attention; `"selective"` keeps the outputs of attention, queries,
            keys and values; `"outputs"` keeps the outputs of attention;
            `"full"` keeps the inputs of the layers alone. Each but `"none"`
            also keeps those inputs, and over a mesh's model axis the sums
            over devices, about as much again. `"auto"` keeps the most that
            the free memory holds when a step is compiled, so that a resumed
            run may round differently; on a CPU, where the others save little,
            it is `"none"`, and several processes on accelerators are refused.
            A token of
            Llama-3-8B in bfloat16 takes 8 KiB a layer with `"full"`, 16 with
            `"outputs"`, 28 with `"selective"` and 92 with `"attention"`.
        chunk_size: int or `None`, tokens whose logits exist at once. By
            default 256 to 1,024 on a CPU, and on accelerators as many as
            a 32nd of the memory holds.
        attention: what computes attention on CUDA GPUs, in decoder layers
            of models that can be packed. `"cudnn"` is cuDNN's kernel, for
            rows of one sequence each; `"pallas"` JAX's Pallas kernel, for
            packed rows too; `"blocks"` is XLA, in blocks of scores. `"auto"`
            takes for each layer the first of them that can compute it, and
            says which. The kernels need compute capability 8.0, 16-bit
            numbers and layers without soft caps, sinks or images, rows
            without shared prompts, and heads of up to 128 numbers (cuDNN,
            and 256 by capability 9.0) or of 32, 64 or 128 (Pallas);
            sliding windows shorter than a row need cuDNN. Other devices
            refuse `"cudnn"` and `"pallas"`. The built-in engine, which packs
            prompts, takes `"auto"` for these. No GPU has run the kernels
            yet.

    Example:

    ```python
    class DynamicSFTTask(kpt.SFTTask):
        def default_loss(self):
            return kpt.losses.DFTLoss()

    task = DynamicSFTTask.from_preset("qwen3_0.6b_en")
    task.compile()
    isinstance(task, kpt.Task)  # True
    ```
    """

    # The learning rates of `optimizer="auto"`: with an adapter, and without.
    auto_learning_rates = (2e-4, 2e-5)
    # Why a step with a finite gradient may change nothing, for messages.
    skipped_because = "no token carried loss"
    # The metrics that progress shows, in this order; `None` for all.
    shown_metrics = None
    # Whether several completions of a row can share its prompt.
    can_share_prefix = False
    # Whether rows may have images, for a model with a vision tower.
    takes_images = False
    # Whether the step reads layers by their number: a plan then compiles all.
    needs_all_layers = False

    @keras_words.explained
    def __init__(
        self,
        causal_lm,
        tokenizer=None,
        *,
        lora=None,
        reference=None,
        sequence_length=1024,
        truncation="error",
        chat_template=None,
        chat_template_kwargs=None,
        remat="none",
        chunk_size=None,
        attention="auto",
        name=None,
    ):
        checks.task_arguments(
            lora, sequence_length, truncation, remat, chunk_size
        )
        gpu_attention.check_choice(attention)
        if reference is not None:
            raise ValueError(
                f"{type(self).__name__} compares with no reference model; "
                "leave `reference` out. "
                f"Received: reference={reference!r}"
            )
        guards.check_kind(causal_lm)
        loading.repair(causal_lm)
        guards.check_model(causal_lm, sequence_length)
        tokenizer = presets.as_tokenizer(tokenizer)
        set_sequence_length(causal_lm, sequence_length)
        super().__init__(name=name)
        self.causal_lm = causal_lm
        self.tokenizer = tokenizer
        if chat_template is not None:
            checks.need_tokenizer(tokenizer, "chat_template")
            self.tokenizer = tokenizer.with_chat_template(chat_template)
        self.sequence_length = sequence_length
        self.truncation = truncation
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.preset = None
        # Divides the logits: that of the samples in a task that samples.
        self.temperature = 1.0
        flatten_linear_layers(causal_lm.backbone)
        freeze_tower(causal_lm)
        self.adapter = adapter_of(causal_lm, lora)
        self.policy = Policy(
            causal_lm,
            self.adapter,
            remat,
            chunk_size,
            choose_remat=recomputation.choose,
            chooser=gpu_attention.Chooser(attention),
        )
        checks.expert_axis(self.policy)
        checks.context_axis(self.policy)
        self._engine = NativeRollout()
        self._engine.set_model(self)
        self.run_state = run_state.RunState()
        # Set by `compile`, `fit` and `evaluate`.
        self.objective = self.data_report = self.run = self._step = None
        self.router_loss = None
        # By role, tuples of the `FrozenPolicy`s that the step reads.
        self.companions = {}
        self._evaluating, self._verbose = False, 0
        # The `kpt.Loop` that is open.
        self.loop = None
        self._log_probs = self._compiled_train_step = None
        # Whether `evaluate` compares completions with those of rows.
        self.takes_metrics = False
        self.built = True

    @classmethod
    @keras_words.explained
    def from_preset(
        cls,
        preset,
        *,
        tokenizer=None,
        lora=None,
        reference=None,
        sequence_length=1024,
        dtype=None,
        truncation="error",
        chat_template=None,
        remat="none",
        load_weights=True,
        quantize=None,
        trainable=True,
        vision=False,
        attention="auto",
        **kwargs,
    ):
        """Creates a task from a preset.

        Args:
            preset: what KerasHub's `from_preset` takes: a preset name, an
                `hf://` or `kaggle://` handle, or a directory (or its
                address, such as `"gs://bucket/model"`) of
                KerasHub's or Hugging Face's format. A Hugging Face
                directory's own config and tokenizer are honoured.
            tokenizer: as in the class, or `None` for the preset's own.
            dtype: `"float32"`, `"bfloat16"` or `"mixed_bfloat16"`. Trained
                weights that are kept in bfloat16 have float32 masters.
            load_weights: bool, `False` for random weights.
            quantize: `"int8"`, `"int4"`, `"nf4"` or `kpt.Quantization`: the
                decoder's linear layers are stored in eight or four bits, and
                `lora` is trained on them. Those of a Hugging Face directory
                are rounded as they are read, those of other presets after
                all have been read. `None` leaves weights as they are stored:
                floats, or the codes of a checkpoint in GPTQ, AWQ,
                bitsandbytes or compressed-tensors, or of a preset that Keras
                has quantized. `"none"` makes floats of these too.
            trainable: bool, `False` for a task that samples and evaluates
                only, or serves as a teacher or a reference: weights may be
                quantized without `lora`.
            vision: bool, `True` to load a Hugging Face directory of a
                multimodal Gemma 3 or 4 with its vision tower, for rows with
                images. The tower stays frozen. Images of Gemma 4 keep their
                shape, and have at most as many tokens as its processor's
                `max_soft_tokens`; sound and videos are not read. A KerasHub
                preset has its own tower in any case.
            lora, reference, sequence_length, truncation, chat_template,
                remat, attention, **kwargs: see the class.

        Raises:
            ValueError: where the preset is unknown, or its model cannot be
                built faithfully; the message names the field.
        """
        checks.task_arguments(lora, sequence_length, truncation, remat)
        gpu_attention.check_choice(attention)
        guards.check_dtype(dtype)
        tokenizer = presets.as_tokenizer(tokenizer)
        causal_lm = presets.load_causal_lm(
            preset,
            dtype=dtype,
            load_weights=load_weights,
            quantization=quantized.as_quantization(quantize),
            is_trained=trainable and lora is None,
            vision=vision,
        )
        task = cls(
            causal_lm,
            tokenizer or presets.load_tokenizer(preset),
            lora=lora,
            reference=reference,
            sequence_length=sequence_length,
            truncation=truncation,
            chat_template=chat_template,
            remat=remat,
            attention=attention,
            **kwargs,
        )
        task.preset = str(preset)
        if not trainable:
            # Keras would thaw the base of an adapter for True.
            task.trainable = False
        return task

    @classmethod
    @keras_words.explained
    def from_task(cls, task, *, adapter="auto", lora=None, **kwargs):
        """Creates a task for the next stage, on the model of another task.

        The two share the model and the tokenizer: nothing is copied and
        nothing is written. What the new task saves and exports is the model
        as it was trained by both.

        Args:
            task: a `kpt.Task`.
            adapter: str, what becomes of the adapter of `task`:
                `"continue"` trains it further; `"merge"` adds it to the
                weights for good; `"stack"` keeps it, frozen, below the
                adapter of `lora`, and `save_adapter` then writes both as
                one. `"auto"` is `"stack"` with `lora` and else `"continue"`.
                After `"merge"` and `"stack"` the earlier task refuses to be
                used.
            lora: `kpt.LoRA` of a new adapter, or `None`: without an adapter
                to continue, all weights are trained.
            **kwargs: see the class. `sequence_length`, `truncation`,
                `chat_template_kwargs`, `remat`, `chunk_size` and `attention`
                are those of `task` by default.

        Returns:
            The new task.

        Raises:
            ValueError: if `adapter` and `lora` do not go together.

        Example:

        ```python
        sft = kpt.SFTTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=16))
        sft.compile()
        sft.fit([{"prompt": "2 + 2 =", "completion": " 4"}], batch_size=1)
        dpo = kpt.DPOTask.from_task(sft)
        ```
        """
        checks.task(task)
        checks.own_adapter(task.policy)
        settings = {
            "sequence_length": task.sequence_length,
            "truncation": task.truncation,
            "chat_template_kwargs": task.chat_template_kwargs,
            "remat": task.policy.remat,
            "chunk_size": task.policy.chunk_size,
            "attention": task.policy.chooser.wanted,
        }
        checks.lora(lora)
        model, settings = task.causal_lm, settings | kwargs
        with handed_over(model, task.adapter, adapter, lora) as lora:
            new = cls(model, task.tokenizer, lora=lora, **settings)
        new.preset = task.preset
        return new

    @property
    def max_length(self):
        """Int or `None`, the context length in the model's config."""
        return guards.max_length(self.causal_lm)

    @property
    def step(self):
        """Int, the number of optimizer steps done."""
        return self.run_state.step

    @step.setter
    def step(self, value):
        self.run_state.step = value

    @property
    def step_logs(self):
        """Dict of scalars, the metrics of the last step."""
        return self.run_state.logs

    def default_loss(self):
        """Returns the loss that `compile(loss="auto")` uses."""
        raise NotImplementedError

    def prepare(self, dataset, name="dataset", **overrides):
        """Turns rows into examples, and returns `(examples, report)`.

        Args:
            dataset: what the user passed.
            name: str, the argument's name, for messages.
            **overrides: settings of the task to replace, such as
                `truncation`.
        """
        raise NotImplementedError

    @keras_words.explained
    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        router_loss=None,
        micro_batch_size=None,
        max_grad_norm=1.0,
        run_eagerly=False,
    ):
        """Configures the task for training.

        Args:
            optimizer: `"auto"` (AdamW, learning rate 2e-4 with an adapter
                and 2e-5 without), a Keras optimizer, or an Optax
                transformation. A schedule counts optimizer steps. Weight
                decay skips norms and biases unless
                `exclude_from_weight_decay` was called; an Optax
                transformation is used unchanged (see `kpt.decay_mask`).
            loss: `"auto"` or a `kpt.losses.Loss`.
            router_loss: `kpt.losses.RouterLoss` to add to the loss of a
                mixture of experts in training, or `None`, whatever the
                config of the checkpoint says. `evaluate` leaves it out.
            micro_batch_size: int or `None`, the rows that pass through the
                model at once, rounded up to a multiple of the number of
                devices. Gradients are accumulated over the micro-batches of
                a batch; the result is that of the full batch.
            max_grad_norm: float or `None`, the global norm that gradients
                are clipped to.
            run_eagerly: bool, for debugging.
        """
        checks.no_loop(self.loop, "compile")
        loss = self.default_loss() if loss == "auto" else loss
        keras_words.check_overrides(self, Task)
        checks.placed(self.causal_lm)
        checks.compile_arguments(loss, Loss, micro_batch_size, max_grad_norm)
        checks.router_loss(router_loss, self.policy)
        checks.flag("run_eagerly", run_eagerly)
        kind = quantized.quantization_of(self.causal_lm)
        is_trained = self.trainable and self.adapter is None
        quantized.check_trained(
            is_trained and kind is not None, f"a model with {kind}"
        )
        rate = self.auto_learning_rates[self.adapter is None]
        optimizer = optimizers.get(optimizer, learning_rate=rate)
        optimizers.check(optimizer)
        super().compile(
            optimizer=optimizer,
            loss=None,
            run_eagerly=run_eagerly,
            auto_scale_loss=False,
        )
        self.router_loss = router_loss
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        # As they are now: callbacks may change the learning rate.
        self._optimizer_settings = optimizers.settings(optimizer)
        with contextlib.ExitStack() as stack:
            if optimizers.holds_shapes(self.trainable_variables):
                stack.enter_context(shapes_only())
            self._masters = (
                []
                if not self.trainable
                else optimizers.build(optimizer, self.trainable_variables)
            )
        self._set_objective(loss)

    def _set_objective(self, loss):
        self.objective = loss
        names = [*STEP_METRICS, *loss.metric_names]
        if self.policy.has_experts:
            names += RouterLoss.metric_names
        self._train_trackers = [keras.metrics.Mean(name=n) for n in names]
        names = ["loss", *loss.metric_names]
        self._test_trackers = [keras.metrics.Mean(name=n) for n in names]
        self._renew_step()

    # Training

    @keras_words.explained
    def fit(
        self,
        dataset,
        batch_size=8,
        epochs=1,
        *,
        shuffle=True,
        seed=0,
        packing=False,
        validation_data=None,
        callbacks=None,
        verbose="auto",
        skip_steps=(),
        compile_ahead="auto",
    ):
        """Trains on rows.

        Args:
            dataset: rows: a list of dicts, a dict of columns, a pandas,
                Polars or PyArrow table, a Hugging Face `Dataset` or
                `IterableDataset`, a Grain `MapDataset`, `IterDataset` or
                `DataLoader`, a `tf.data.Dataset`, a torch dataset, a
                `keras.utils.PyDataset`, any iterable of dicts or a function
                that returns one, or the path (or paths, or a pattern such as
                `"data/*.jsonl"`, or addresses such as `"gs://bucket/a.jsonl"`)
                of `.jsonl`, `.json`, `.csv` or `.parquet` files.
                `kpt.data.mix` makes one of several. Of several processes all
                get the same rows.
            batch_size: int, rows of one optimizer step; packed rows where
                `packing`.
            epochs: int.
            shuffle: bool; the order is sampled again for every epoch. Of
                rows that can only be read in their order (a stream), windows
                of 2,048 are shuffled.
            seed: int, of the order and of dropout.
            packing: bool, put several sequences in a row. They do not see
                each other.
            validation_data: a dataset, evaluated after every epoch.
            callbacks: list of callbacks. `kpt.callbacks.Checkpoint` makes
                the run resume where it stopped.
            verbose: `"auto"`, 0 (silent), 1 (progress bar) or 2 (a line an
                epoch).
            skip_steps: ints, steps whose batches are left out, counted as
                `step` in the metrics log. The steps after them keep their
                numbers and their batches.
            compile_ahead: bool, whether the programs for all lengths that
                batches of the run have are compiled after the first step, in
                several threads, so that none of its later steps waits for
                one. `"auto"` does so in runs of 200 steps and more. Streams,
                packed rows, KTO's pairs and teachers' own rows are compiled
                as they come.

        Returns:
            A Keras `History` of the means over each epoch.

        Raises:
            ValueError: for rows, arguments or callbacks that cannot be
                trained on, before anything is compiled.
        """
        self._assert_compile_called("fit")
        checks.no_loop(self.loop, "fit")
        batch_size = checks.positive_int("batch_size", batch_size)
        checks.flag("shuffle", shuffle)
        settings = RunSettings.of(
            self.policy,
            packing,
            epochs=epochs,
            seed=seed,
            trainable=self.trainable,
            callbacks=callbacks,
            verbose=verbose,
            skip_steps=skip_steps,
            micro_batch_size=self.micro_batch_size,
            compile_ahead=compile_ahead,
        )
        with processes.shared_rows(), _console.silenced(settings.verbose == 0):
            examples, self.data_report = self.prepare(dataset)
        held_out = []
        if validation_data is not None:
            with (
                processes.shared_rows(),
                _console.silenced(settings.verbose == 0),
            ):
                held_out, report = self.prepare(
                    validation_data, "validation_data"
                )
            check_epochs(held_out, epochs)
            if not is_stream(held_out):
                settings.show(report)
        streamed = is_stream(examples)
        check_epochs(examples, epochs)
        # What is computed of a run's rows ahead of it may take long.
        processes.need_even_rows()
        if not streamed:
            settings.show(self.data_report)
        filled = self.filled_rows(batch_size, packing)
        settings.show(padding.describe(self.micro_batch_size, *filled))
        huge_pages.advise(self.causal_lm, settings)
        optimizers.refresh_masters(self.optimizer, self.trainable_variables)
        self._verbose = settings.verbose
        self.begin_run([examples, held_out], batch_size, settings.callbacks)
        validation = None
        if validation_data is not None:
            validation = self.make_batches(held_out, batch_size, shuffle=False)
        data = self.make_batches(
            examples,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            packing=packing,
            skip_steps=skip_steps,
            epochs=epochs,
        )
        self.run = keras_fit.RowRun(
            self,
            step=self._step,
            state=self.run_state,
            data=data,
            settings=settings,
            validation=validation,
        )
        try:
            return self.run.fit()
        finally:
            data.close()
            if streamed:
                settings.show(self.data_report)

    def begin_run(self, datasets, batch_size, callbacks):
        """Prepares a run before its batches are made.

        `datasets` are the examples to train on and those to evaluate, as
        `prepare` returned them.
        """

    def make_batches(self, examples, batch_size, **kwargs):
        """Makes a `BatchAdapter` of the examples that `prepare` returned.

        `kwargs` are other arguments of `BatchAdapter`.
        """
        micro = self.micro_batch_size if self.compiled else None
        return BatchAdapter(
            examples,
            batch_size=batch_size,
            pad_id=padding.token_id(
                self.tokenizer, self.causal_lm.backbone.vocabulary_size
            ),
            **{
                "sequence_length": self.sequence_length,
                "row_multiple": padding.row_multiple(micro, batch_size),
                **kwargs,
            },
        )

    @keras_words.explained
    def evaluate(
        self,
        dataset=None,
        batch_size=8,
        *,
        num_samples=0,
        max_tokens=256,
        metrics=None,
        verbose="auto",
        **kwargs,
    ):
        """Computes the loss and metrics of rows, as means over all tokens.

        Args:
            dataset: as in `fit`.
            batch_size: int, rows at once.
            num_samples: int, the number of rows, from the first on, that are
                also completed, greedily, from the tokens before their first
                token with loss.
            max_tokens: int, the maximum number of new tokens of such a
                completion.
            metrics: list of `kpt.metrics`, such as `kpt.metrics.BLEU()`, and
                of functions, see `kpt.metrics.Metric`; for `kpt.SFTTask`.
                Those of text complete every row as `num_samples` does, and
                compare with the row's own completion, or with the best of it
                and of the texts in the row's column `references`, a list.
            verbose: 0 prints nothing; `"auto"` the report of the data if
                rows are dropped or cut; 1 always the report, and a progress
                bar.

        Returns:
            A dict of floats: `loss`, the metrics of the loss and, for a loss
            of tokens, `perplexity`. Of each of `metrics` there are `name`,
            `name/stderr`, `name/n` and `name/failed`; with metrics of text
            `max_tokens_reached`, the number of completions that were cut.
            With `num_samples` also `samples`, a list of dicts with `prompt`,
            `completion` and `reference`, the row's completion.
        """
        self._assert_compile_called("evaluate")
        checks.placed(self.causal_lm)
        checks.own_adapter(self.policy)
        # `fit` calls with Keras's own arguments.
        of_keras = keras_words.of_evaluation(self, kwargs)
        dataset = kwargs.pop("x", dataset)
        checks.not_negative("num_samples", num_samples)
        checks.positive_int("max_tokens", max_tokens)
        if metrics:
            checks.may_have_metrics(self)
            metrics = RowMetrics(metrics, self.tokenizer, dataset)
            dataset = metrics.rows
        examples, report, count = [], None, num_samples
        if not isinstance(dataset, BatchAdapter):
            with _console.silenced(verbose == 0 or not processes.is_first()):
                examples, report = self.prepare(dataset)
            if not is_stream(examples):
                show_report(report, verbose)
            checks.positive_int("batch_size", batch_size)
            if metrics and metrics.of_text:
                count = len(examples)
            filled = self.filled_rows(batch_size)
            note = padding.describe(self.micro_batch_size, *filled)
            callback_lib.show(note, verbose not in (0, "auto"))
            dataset = self.make_batches(examples, batch_size, shuffle=False)
        dataset.keep_rows(processes.own_rows())
        dataset.share_rows(processes.row_share())
        hidden = verbose == "auto" or not processes.is_first()
        self._evaluating = True
        try:
            with keras_fit.epochs_may_end():
                logs = super().evaluate(
                    x=dataset,
                    verbose=0 if hidden else verbose,
                    return_dict=True,
                    **of_keras,
                )
        finally:
            # Keras does so only where nothing was raised.
            self.jax_state_sync()
            self._evaluating = False
        if is_stream(examples):
            show_report(report, verbose)
        if isinstance(self.objective, TokenLoss):
            logs = {**logs, "perplexity": float(np.exp(logs["loss"]))}
        samples, tokens = [], []
        with _console.silenced(verbose == 0):
            if count:
                checks.need_tokenizer(self.tokenizer, "num_samples")
                samples = complete_rows(
                    self._engine,
                    self.tokenizer,
                    itertools.islice(iter(examples), count),
                    max_tokens,
                )
            if metrics and metrics.of_tokens:
                logps = self.log_probs(examples, batch_size)
                tokens = list(zip(examples, logps, strict=True))
        if metrics:
            samples_ = metrics.with_references(samples, examples)
            logs |= metrics.results(samples_, tokens)
        if num_samples:
            names = ("prompt", "completion", "reference")
            logs["samples"] = [
                {name: sample[name] for name in names}
                for sample in samples[:num_samples]
            ]
        return logs

    # The training step

    def train_step(self, state, batch):
        """Computes one optimizer step: override it for a custom step.

        A pure function, which `fit` compiles.

        Args:
            state: dict of lists of arrays: `trainable`, `frozen`,
                `optimizer`, `metrics`, in the order of the task's variables;
                `step` and `seed`, int32 scalars; and the arrays of a
                reference or of teachers.
            batch: dict of arrays with a leading `rows` axis.

        Returns:
            `(logs, state)`: a dict of scalars, and the state with
            `trainable`, `optimizer` and `metrics` replaced.
        """
        gradients, logs = self.loss_and_gradients(state, batch)
        return self.apply_gradients(state, gradients, logs)

    def loss_and_gradients(self, state, batch):
        """Computes the gradients of a batch's loss.

        Args:
            state, batch: as in `train_step`.

        Returns:
            `(gradients, logs)`: a list of arrays like `state["trainable"]`,
            float32 where there are micro-batches, and a dict of scalars:
            `loss`, `num_tokens`, `loss_weight` (what the loss was divided
            by) and the metrics of the loss.
        """
        return self._step.loss_and_gradients(state, batch)

    def apply_gradients(self, state, gradients, logs):
        """Clips gradients, applies the optimizer and records the step.

        A step whose gradient is not finite, or whose batch has no token with
        loss or no advantage, changes nothing and counts as `skipped`.

        Args:
            state: as in `train_step`.
            gradients, logs: as `loss_and_gradients` returns them.

        Returns:
            `(logs, state)`, as `train_step` does.
        """
        return self._step.apply_gradients(state, gradients, logs)

    def test_step(self, state, batch):
        """Computes loss and metrics of a batch, without gradients or dropout.

        Takes what `train_step` does, and returns `(logs, state)` with
        `metrics` replaced.
        """
        return self._step.evaluate(state, batch)

    def token_outputs(self, batch, mask, needs, **settings):
        """Computes the model outputs that a loss reads.

        Args:
            batch: dict of arrays.
            mask: bool array of shape `(rows, length)`, the tokens that are
                projected on the vocabulary.
            needs: names as in `Loss.needs`. Those that the task does not
                compute are in the batch.
            **settings: `dropout_key`, `differentiable` and `hidden` of
                `Policy.token_outputs`.

        Returns:
            A dict of float32 arrays of shape `(rows, length)`.
        """
        return self.policy.token_outputs(
            batch,
            mask,
            needs=[n for n in needs if n in POLICY_OUTPUTS],
            temperature=self.temperature,
            **settings,
        )

    def using_weights(self, trainable, frozen):
        """Opens a scope in which the task's variables have these values.

        `trainable` and `frozen` are lists of arrays, as in a step's `state`.
        """
        return ModelWeights.of(self).scope(trainable, frozen)

    def call(self, batch):
        """Computes log-probabilities of a batch's tokens, `(rows, length)`."""
        mask = batch["segment_ids"] > 0
        return self.policy.token_outputs(batch, mask)["per_token_logps"]

    def fingerprint(self):
        """Returns the settings that must match for a run to be resumed.

        They are a dict fit for JSON, to which a subclass adds its own.
        """
        weights = ModelWeights.of(self)
        return run_state.fingerprint(
            type(self).__name__,
            self.policy,
            weights,
            self.run_state.frozen_digest(weights),
            self.optimizer,
            loss=repr(self.objective),
            router_loss=self.router_loss and repr(self.router_loss),
            max_grad_norm=self.max_grad_norm,
            **{
                f"optimizer's {name}": value
                for name, value in self._optimizer_settings.items()
            },
        )

    # The parts of the step and the run

    def make_step(self, weights=None):
        """Builds the `TrainStep` from the task's current parts.

        `weights` are `ModelWeights`, by default those of the task.
        """
        loss, routing = self.objective, Routing()
        if self.policy.has_experts:
            routing = Routing(self.policy, self.router_loss or routing.loss)
        return TrainStep(
            weights=weights or ModelWeights.of(self),
            loss=loss,
            terms=LossTerms(loss, self.policy, self.token_outputs),
            token_outputs=self.token_outputs,
            optimizer=self.optimizer,
            masters=self._masters,
            train_trackers=self._train_trackers,
            test_trackers=self._test_trackers,
            micro_batches=MicroBatches(
                self.micro_batch_size, self.rows_together
            ),
            max_grad_norm=self.max_grad_norm,
            dropout=bool(self.adapter and self.adapter.lora.dropout),
            companions=self.companions,
            routing=routing,
        )

    def _renew_step(self):
        """Rebuilds the step after one of its parts has changed."""
        self._step = self.make_step() if self.compiled else None
        self._compiled_train_step = self._log_probs = None
        self.train_function = self.test_function = None

    @property
    def compiled_train_step(self):
        """Function, `train_step` as `fit` runs it; see `training/step.py`."""
        if self._compiled_train_step is None:
            others = sum(self.companions.values(), ())
            models = [self.causal_lm, *(x.causal_lm for x in others)]
            self._compiled_train_step = compile_step(
                self.train_step,
                keras_fit.state_shardings(self),
                self.run_eagerly,
                options=quantized.compiler_options(*models),
            )
        return self._compiled_train_step

    def rows_together(self, batch):
        """Counts the neighbouring rows that form one example, never split."""
        return 1

    def filled_rows(self, batch_size, packing=False):
        """Counts the rows that a full batch of `batch_size` fills.

        Returns:
            `(rows, rows of an example)`; rows are `None` where that depends
            on the lengths of sequences.
        """
        return batch_size, 1

    # Methods that Keras calls

    @property
    def metrics(self):
        if self.objective is None:
            return []
        return (
            self._test_trackers if self._evaluating else self._train_trackers
        )

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            program = self.compiled_train_step
            self.train_function = self.run.train_function(program)

    def make_test_function(self, force=False):
        if self.test_function is None or force:
            self.test_function = keras_fit.test_function(self, self._step)

    def _get_metrics_result_or_logs(self, logs):
        # Keras compares names to guess whether `logs` are its metrics. A mean
        # of nothing (a learning rate that Optax does not report) is not 0.
        del logs
        return {t.name: t.result() for t in self.metrics if float(t.count)}

    def reset_metrics(self):
        # Running means continue in the middle of an epoch.
        if self.run_state.keep_metrics and not self._evaluating:
            self.run_state.keep_metrics = False
            return
        super().reset_metrics()

    def get_weights(self):
        """Gathers all weights in every process, for `EarlyStopping`."""
        values = processes.fetch([v.value for v in self.weights])
        return [np.array(x) for x in values]

    # Using the model

    def row_settings(self, name, **overrides):
        """Makes the `RowSettings` of a dataset.

        `name` is the argument that the rows were passed as.
        """
        settings = {
            "tokenizer": self.tokenizer,
            "sequence_length": self.sequence_length,
            "vocabulary_size": self.causal_lm.backbone.vocabulary_size,
            "truncation": self.truncation,
            "chat_template_kwargs": self.chat_template_kwargs,
            "name": name,
            "images": image_reader(self.causal_lm, self.tokenizer)
            if self.takes_images
            else None,
        }
        return RowSettings(**settings | overrides)

    @keras_words.explained
    def log_probs(self, rows, batch_size=8):
        """Computes the log-probability of every token given those before it.

        Args:
            rows: rows of any type that the task trains on.
            batch_size: int, rows at once.

        Returns:
            A list of float32 arrays, one a row and as long as its tokens;
            the first entry, which nothing predicts, is 0.
        """
        if self._log_probs is None:

            def run(trainable, frozen, batch):
                with self.using_weights(trainable, frozen):
                    mask = batch["segment_ids"] > 0
                    return self.policy.token_outputs(
                        batch, mask, differentiable=False
                    )

            self._log_probs = jax.jit(run, out_shardings=sharding.of_results())
        return [
            found["per_token_logps"][: len(example.token_ids)]
            for example, found in self._run_rows(
                self._log_probs, rows, batch_size
            )
        ]

    def _run_rows(self, program, rows, batch_size):
        """Runs a program on rows, of which none may be dropped or cut.

        `program` computes from the trainable and the frozen weights and a
        batch a dict of arrays, `(rows, ...)`. Returns an iterable of
        `(Example, dict of its arrays)`.
        """
        checks.placed(self.causal_lm)
        checks.own_adapter(self.policy)
        # Those that `evaluate` has prepared are taken as they are.
        prepared = isinstance(rows, (list, StoredExamples)) and len(rows)
        if prepared and isinstance(rows[0], Example):
            examples = rows
        else:
            examples, _ = self.prepare(
                rows, "rows", train_on="all", truncation="error"
            )
            examples = list(examples)
        checks.positive_int("batch_size", batch_size)
        batches = Task.make_batches(self, examples, batch_size, shuffle=False)
        weights = ModelWeights.of(self).values()
        found = run_rows(lambda batch: program(*weights, batch), batches)
        return zip(examples, found, strict=True)

    @keras_words.explained
    def generate(
        self,
        prompts,
        *,
        max_tokens=256,
        temperature=1.0,
        top_k=None,
        top_p=None,
        min_p=None,
        num_generations=1,
        stop_token_ids="auto",
        seed=None,
        return_token_ids=False,
        on_text=None,
        verbose=0,
    ):
        """Completes prompts with the built-in engine, `NativeRollout`.

        Args:
            prompts: a str, a list of messages, `{"prompt_ids": [...]}`, or a
                list of these. Of a model with a vision tower also
                `{"messages": [...], "images": [...]}`, messages up to where
                the model answers, with images as in `kpt.SFTTask`.
            max_tokens: int, the maximum number of new tokens.
            temperature: float; 0 is greedy decoding.
            top_k: int or `None`, sample among the `top_k` most probable
                tokens.
            top_p: float or `None`, nucleus sampling: among the fewest tokens
                whose total probability reaches `top_p`.
            min_p: float or `None`, sample among tokens that have at least
                `min_p` times the highest probability.
            num_generations: int, samples of each prompt.
            stop_token_ids: ints that end a completion; `"auto"` is the
                tokenizer's set; `None` is none.
            seed: int or `None`, for repeatable samples: they depend on the
                seed, the prompt and the weights, not on other prompts.
            return_token_ids: bool, lists of ids instead of text.
            on_text: `f(index, text)` or `None`, called with each new text of
                a completion; `index` counts completions.
            verbose: 0, or 1 for a progress bar.

        Returns:
            A list with the completion of each prompt, or with a list of
            completions if `num_generations` is more than 1. A single prompt
            that is not in a list returns its entry alone.

        Raises:
            ValueError: if a prompt or an argument cannot be served, before
                anything is computed.

        Example:

        ```python
        task.generate("Once upon a time", on_text=lambda i, t: print(t))
        ```
        """
        checks.placed(self.causal_lm)
        checks.own_adapter(self.policy)
        if seed is not None:
            checks.seed(seed)
        with _console.silenced(not verbose):
            return complete(
                self._engine,
                self.row_settings(
                    "prompts",
                    images=image_reader(self.causal_lm, self.tokenizer),
                ),
                prompts,
                num_generations=num_generations,
                stop_token_ids=stop_token_ids,
                seed=seed,
                return_token_ids=return_token_ids,
                on_text=on_text,
                verbose=verbose,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
            )

    # Planning

    def suggest(self, dataset, *, memory=None):
        """Suggests settings for a dataset, each with its reason and source.

        The sequence length follows from the lengths of the rows, packing
        from how full batches would be, the micro-batch and rematerialisation
        from an estimate of the memory, and the batch size from the number of
        rows. The learning rate is that of `optimizer="auto"`, for
        `kpt.SFTTask` by the width of the model, and depends on the scale of
        an adapter. Nothing is compiled and the task is not changed; it need
        not be compiled, except for a loss whose rows differ.

        Args:
            dataset: as in `fit`. Of a stream, the first 4,096 rows are read.
            memory: float or `None`, the bytes of a device, weights included;
                `None` for what is there.

        Returns:
            A `Suggestion`; `print` shows it. Its `compile` and `fit` are
            dicts of arguments, and its `task` those for making the task,
            such as `sequence_length`. What cannot be known is left out.

        Raises:
            ValueError: for rows that cannot be trained on, and for an
                iterator that could not be read again.

        Example:

        ```python
        s = task.suggest(rows)
        print(s)
        task.compile(**s.compile)
        task.fit(rows, **s.fit)
        ```
        """
        checks.memory(memory)
        return suggestion.of_rows(self, dataset, memory)

    @keras_words.explained
    def plan(
        self,
        topology,
        strategy=None,
        *,
        batch_size=8,
        sequence_length=None,
        micro_batch_size="compiled",
        remat=None,
        prompt_length=None,
        packing=False,
        share_prefix=False,
        exact=False,
    ):
        """Plans a training step for hardware that is not present.

        The step that `fit` would run is compiled by the compiler for that
        hardware. Nothing is allocated and the task is not changed; it may
        hold shapes only (`kpt.distribution.shapes_only`).

        Args:
            topology: str, `"<chip>:<grid>"` such as `"v5e:4x4"`,
                `"v5p:2x2x4"` or `"v6e:2x4"`, or `"cpu:8"` for devices of
                this host. `"v5e:16x16 x 4"` are four slices, which the
                data-center network joins; `"cpu:4 x 2"` counts as two. For
                TPUs the package `libtpu` must be installed.
            strategy: function from a list `devices` to a distribution:
                `kpt.distribution.fsdp`, or one with arguments,
                `functools.partial(kpt.distribution.fsdp_tensor_parallel,
                model=4)`. `None` is FSDP, and on several slices
                `kpt.distribution.hybrid`.
            batch_size: int, as in `fit`. All rows have the maximum length.
            sequence_length: int, or `None` for that of the task.
            micro_batch_size: int, or `None` for that of `compile`.
            remat: as for the class, or `None` for that of the task. With
                `"auto"` the step is first compiled with `"full"`, and then
                with what the free memory holds.
            prompt_length: int, tokens of a prompt in tasks on completions,
                or `None` for half of a row, or in tasks that sample for the
                row without the longest completion.
            packing, share_prefix: as in `fit`.
            exact: bool, whether all layers are compiled. By default one and
                two layers are compiled (or one and two periods of a pattern
                such as Gemma's) and the numbers are extrapolated linearly:
                exact for FLOPs and communication, off by a few percent for
                memory when a chip is nearly full; the plan then says so.

        Returns:
            A `kpt.distribution.Plan`; `print` shows it.

        Raises:
            ValueError: if the topology is unknown, the layout does not fit
                it, or `fit` would raise. A step that exceeds the memory is
                not an error; its plan says so.

        Example:

        ```python
        with kpt.distribution.shapes_only():
            task = kpt.SFTTask.from_preset(
                "llama3_8b_en", load_weights=False, dtype="bfloat16"
            )
        task.compile()
        print(task.plan("v5e:4x4", batch_size=16, remat="full"))
        ```
        """
        self._assert_compile_called("plan")
        settings = {
            "sequence_length": self.sequence_length
            if sequence_length is None
            else sequence_length,
            "micro_batch_size": self.micro_batch_size
            if micro_batch_size == "compiled"
            else micro_batch_size,
            "remat": self.policy.remat if remat is None else remat,
        }
        return train_plan.make_plan(
            self,
            topology,
            strategy,
            batch_size=batch_size,
            prompt_length=prompt_length,
            packing=packing,
            share_prefix=share_prefix,
            exact=exact,
            **settings,
        )

    def plan_decode(
        self,
        topology,
        strategy=None,
        *,
        num_slots=128,
        num_tokens=1024,
        exact=False,
    ):
        """Plans sampling for hardware that is not present.

        The plan is for one call of the built-in engine's program, 32 tokens
        for each slot, next to the weights and the optimizer's state.

        Args:
            topology, strategy, exact: as in `plan`.
            num_slots: int, sequences sampled at once, on all chips.
            num_tokens: int, the token capacity of each slot.

        Returns a `kpt.distribution.Plan` and raises as `plan` does.
        """
        self._assert_compile_called("plan_decode")
        return decode_plan.make_plan(
            self, topology, strategy, num_slots, num_tokens, exact
        )

    def example_batch(
        self, batch_size, prompt_length=None, packing=False, share_prefix=False
    ):
        """Builds a batch of the longest rows that `fit` may see, for `plan`.

        Args:
            batch_size, packing, share_prefix: as in `fit`.
            prompt_length: int or `None`, as in `plan`.

        Returns:
            Dict of numpy arrays.

        Raises:
            ValueError: for a step that cannot be planned.
        """
        ids = np.ones(self.sequence_length, "int32")
        examples = [
            Example(ids, ids.astype("float32"), i) for i in range(batch_size)
        ]
        batches = self.make_batches(
            examples, batch_size, packing=packing, shuffle=False
        )
        return next(iter(batches.get_jax_iterator()))

    def companion_models(self):
        """Returns the models that the step compares with, for `plan`.

        They are a dict by role (`"reference"`, `"teachers"`) of lists of
        presets, KerasHub `CausalLM`s, `None` for the policy, and the
        `FrozenPolicy`s of a run that has begun.
        """
        return {}

    # Saving

    def save_adapter(self, path):
        """Writes the adapter in PEFT's format; it loads in PEFT and vLLM."""
        checks.path("path", path)
        checks.need_adapter(self.adapter, "save_adapter")
        checks.own_adapter(self.policy)
        with _remote.written(path, device_transfer.on_first) as path:
            self.adapter.save(path, base_name=self.preset)

    def load_adapter(self, path):
        """Loads the weights of a PEFT adapter directory.

        An uncompiled task without an adapter gets one with the settings of
        the file.
        """
        checks.path("path", path)
        with _remote.read(path) as path:
            if self.adapter is None:
                if self.compiled:
                    raise ValueError(
                        "This task was compiled to train all weights. Load "
                        "the adapter before `compile`, or make the task with "
                        "`lora=kpt.LoRA(...)`."
                    )
                lora = lora_from_config(read_config(path), path)
                adapter = Adapter(self.causal_lm, lora)
                try:
                    adapter.load(path)
                except ValueError:
                    adapter.detach(self.causal_lm)
                    raise
                self.adapter = adapter
                self.policy = Policy(
                    self.causal_lm,
                    adapter,
                    self.policy.remat,
                    self.policy.chunk_size,
                    choose_remat=recomputation.choose,
                    chooser=self.policy.chooser,
                )
                return
            self.adapter.load(path)

    def merge_adapter(self):
        """Adds the adapter to the weights, until `unmerge_adapter`.

        A merged task cannot be trained. Unmerging restores the weights bit
        for bit.
        """
        checks.need_adapter(self.adapter, "merge_adapter")
        checks.own_adapter(self.policy)
        quantized.check_not_quantized(self.causal_lm, "`merge_adapter`")
        self.adapter.merge()
        self._renew_step()

    def unmerge_adapter(self):
        """Reverts `merge_adapter`."""
        checks.need_adapter(self.adapter, "unmerge_adapter")
        checks.own_adapter(self.policy)
        self.adapter.unmerge()
        self._renew_step()

    def export(self, path, *, dtype=None, max_shard_bytes=5 * 2**30):
        """Exports a Hugging Face checkpoint with the adapter merged.

        Args:
            path: str, path or address of a new directory or an earlier
                export.
            dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `None` for the
                dtype of the weights.
            max_shard_bytes: int, the maximum size of a safetensors file.
        """
        checks.path("path", path)
        checks.positive_int("max_shard_bytes", max_shard_bytes)
        checks.own_adapter(self.policy)
        values = self.adapter.merged_values() if self.adapter else None
        with _remote.written(
            path, device_transfer.on_first, read=["config.json"]
        ) as path:
            export.export(
                self.causal_lm,
                path,
                dtype=dtype,
                max_shard_bytes=max_shard_bytes,
                values=values,
                tokenizer=self.tokenizer,
            )

    def save_to_preset(self, path):
        """Writes a KerasHub preset, adapter merged, to a new directory."""
        checks.path("path", path)
        checks.own_adapter(self.policy)
        with _remote.written(path, device_transfer.on_first) as path:
            presets.save_to_preset(
                self.causal_lm, path, self.adapter, self.tokenizer
            )


def show_report(report, verbose):
    """Prints a report, with `verbose="auto"` if rows are missing."""
    if verbose == "auto":
        verbose = bool(report.dropped or report.cut)
    callback_lib.show(report, verbose)
