import contextlib
import dataclasses
import functools

from keras_posttrain import optimizers
from keras_posttrain.data.batches.distillation import (
    distillation_layout,
    fit_teacher_rows,
    with_lookup,
)
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.distillation import prepare_distillation
from keras_posttrain.data.rows.prompts import PromptOrder, prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.distill import checks as distill_checks
from keras_posttrain.distill.collector import DistillCollector
from keras_posttrain.distill.prompts import (
    StudentPrompts,
    contexts_of,
    prompts_of_rows,
    teacher_prompts,
)
from keras_posttrain.distill.step import DistillTerms, TeacherPass, parts
from keras_posttrain.distill.teacher_cache import (
    cached_tokens,
    served_top_tokens,
    spans_by_key,
    teacher_cache,
    top_tokens,
)
from keras_posttrain.distill.teachers import TeacherSources
from keras_posttrain.distribution import processes
from keras_posttrain.losses import (
    DistillationLoss,
    ForwardKLLoss,
    PolicyLoss,
    ReverseKLLoss,
)
from keras_posttrain.losses.features import FeatureLoss
from keras_posttrain.models.feature_maps import FeatureMap, capture_of
from keras_posttrain.models.policy import Policy
from keras_posttrain.rl import checks as rl_checks
from keras_posttrain.rl.collector import ForwardPass
from keras_posttrain.rl.loop import RolloutRun
from keras_posttrain.rl.sampling import Scoring
from keras_posttrain.tasks.rollout_task import has_advantage
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import callbacks as callback_lib
from keras_posttrain.training import checks, padding
from keras_posttrain.training.weights import ModelWeights


class DistillTask(Task):
    """Distillation: trains a student on the distributions of a teacher.

    The loss says how they are compared. `compile(loss=...)` takes a
    divergence of their distributions (`ForwardKLLoss`, the default,
    `ReverseKLLoss`, `JSDLoss`, `SkewKLLoss`, `TotalVariationLoss`), over the
    whole vocabulary; `ULDLoss`, where they have different tokenizers;
    `HiddenStateLoss` and `AttentionLoss`, of what happens inside; or a
    `SumLoss` of these.

    Offline the student learns on given rows, those of `kpt.SFTTask`. A
    column `teacher_prompt` (`teacher_prompt_ids`) beside `prompt` and
    `completion` is what the teacher reads in place of the prompt: what a long
    prompt does can so be moved into the weights.

    With `compile(on_policy=True)` rows are prompts alone, as in
    `kpt.GRPOTask`, and the student learns on what it samples itself. There a
    policy loss is taken too: a token's advantage is then the teacher's
    log-probability of it less the student's.

    The vocabulary is projected in chunks of tokens, for the student as for
    the teacher: no `(tokens, vocabulary)` array exists. The teacher's weights
    are an argument of the step; they are neither copied nor in the
    checkpoint.

    Args:
        causal_lm: a KerasHub `CausalLM`, the student.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        teacher: a preset, a KerasHub `CausalLM`, an engine of
            `kpt.rollout` that serves the teacher, or `None` for the student
            when training began; or a list or dict of these but engines.
        teacher_tokenizer: `kpt.Tokenizer` of a teacher with other tokens,
            for `ULDLoss`. A preset brings its own.
        teacher_length: int or `None`, tokens that the teacher may read of a
            row; by default `sequence_length`.
        **kwargs: see `from_preset`.

    References:
        - [Hinton et al., 2015](https://arxiv.org/abs/1503.02531).
        - [Agarwal et al., 2023](https://arxiv.org/abs/2306.13649), on the
          student's own samples.

    Example:

    ```python
    task = kpt.DistillTask.from_preset(
        "qwen3_0.6b_en", teacher="qwen3_8b_en", lora=kpt.LoRA(rank=32)
    )
    task.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=kpt.losses.ForwardKLLoss(temperature=2.0, alpha=0.5),
    )
    task.fit([{"prompt": "2 + 2 =", "completion": " 4"}], batch_size=1)
    ```
    """

    shown_metrics = (
        "loss",
        "divergence",
        "agreement",
        "hard_loss",
        "completions/mean_length",
        "grad_norm",
    )

    def __init__(
        self,
        causal_lm,
        tokenizer=None,
        *,
        teacher=None,
        teacher_tokenizer=None,
        teacher_length=None,
        **kwargs,
    ):
        given = TeacherSources(teacher, causal_lm, teacher_tokenizer)
        super().__init__(causal_lm, tokenizer, **kwargs)
        if teacher_length is not None:
            checks.positive_int("teacher_length", teacher_length)
        self.teacher_length = teacher_length or self.sequence_length
        self.given, self.feature_maps, self._feature_losses = given, (), ()
        # Set by `compile` and `fit`.
        self.on_policy, self.teachers, self.rollout = 0.0, (), None
        self.teacher_cache = self.cached = self.teacher_tokenizer = None
        self.teacher_column = self.teacher_weights = self.top_k = None
        self._began = self._packs = False

    def default_loss(self):
        return ReverseKLLoss() if self.on_policy else ForwardKLLoss()

    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        teacher_weights=None,
        teacher_column=None,
        top_k=None,
        teacher_cache=None,
        on_policy=False,
        rollout="auto",
        num_generations=1,
        max_completion_length=256,
        temperature=1.0,
        stop_token_ids="auto",
        num_minibatches=1,
        num_iterations=1,
        old_log_probs="trainer",
        mask_truncated_completions=False,
        micro_batch_size=None,
        max_grad_norm=1.0,
        run_eagerly=False,
    ):
        """Sets what training needs.

        Args:
            optimizer: as in `kpt.SFTTask.compile`.
            loss: `"auto"` for `kpt.losses.ForwardKLLoss()`, on the student's
                own samples `ReverseKLLoss()`; or a loss, see the class.
            teacher_weights: list of floats (dict by name) or `None`: what
                each of several teachers counts for, everywhere. By default
                all count the same, and together 1.
            teacher_column: str or `None`, the column that names the one
                teacher of a row.
            top_k: int, how many of the teacher's most probable tokens are
                kept, where they are written down or served.
            teacher_cache: path or `None`: a directory in which the teacher's
                `top_k` log-probabilities of each row are written once, and
                read back from then on: this run and later ones on the same
                rows train without the teacher in memory, and do not run it
                again. It is loaded before the first step, to be recognised,
                and let go of, but for a `CausalLM` that you hold. Offline
                only.
            on_policy: bool, whether the student learns on its own samples;
                or a float, the share of each batch's rows that are sampled,
                the others being as they are given.
            rollout, num_generations, max_completion_length, temperature,
                stop_token_ids, num_minibatches, num_iterations,
                old_log_probs, mask_truncated_completions: of the samples,
                as in `kpt.GRPOTask.compile`.
            micro_batch_size, max_grad_norm, run_eagerly: as in
                `kpt.SFTTask.compile`.

        Raises:
            ValueError: for a loss that the teacher cannot serve, vocabularies
                that differ, layers that are not there, and settings that do
                not go together.
        """
        on_policy = distill_checks.share("on_policy", on_policy)
        self.on_policy = on_policy
        loss = self.default_loss() if loss == "auto" else loss
        distill_checks.loss(loss, on_policy)
        given = self.given
        distill_checks.teacher_settings(
            given, teacher_weights, teacher_column, top_k, teacher_cache
        )
        teacher_weights = distill_checks.weights(
            teacher_weights, teacher_column, given.names
        )
        self._set_sampling(
            rollout,
            num_generations=num_generations,
            max_completion_length=max_completion_length,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            num_minibatches=num_minibatches,
            num_iterations=num_iterations,
            old_log_probs=old_log_probs,
            mask_truncated_completions=mask_truncated_completions,
        )
        vocabulary = self.causal_lm.backbone.vocabulary_size
        self.teacher_tokenizer = self._other_tokenizer(loss, vocabulary)
        distill_checks.combination(
            loss,
            given,
            top_k,
            teacher_cache,
            on_policy=on_policy,
            other=self.teacher_tokenizer is not None,
            vocabulary=vocabulary,
        )
        self._make_feature_maps(loss)
        self.teacher_column, self.top_k = teacher_column, top_k
        self.teacher_cache = teacher_cache
        self.teacher_weights = teacher_weights
        self.teachers, self.cached, self._began = (), None, False
        super().compile(
            optimizer,
            loss,
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            run_eagerly=run_eagerly,
        )

    def _set_sampling(self, rollout, **settings):
        if not self.on_policy:
            distill_checks.unused({"rollout": rollout, **settings})
            self.rollout = self.sampling = None
            self.temperature = 1.0
            return
        sampling = rl_checks.sampling(
            tokenizer=self.tokenizer,
            vocabulary_size=self.causal_lm.backbone.vocabulary_size,
            **settings,
        )
        rl_checks.room(
            self.sequence_length,
            self.max_length,
            sampling.max_completion_length,
        )
        many = sampling.num_generations
        if self.on_policy < 1.0 and many > 1:
            raise ValueError(
                "Rows that are given have one completion, so with a "
                "share of them `num_generations` must be 1. Received: "
                f"on_policy={self.on_policy}, num_generations={many}"
            )
        self.rollout, self.sampling = rl_checks.engine(rollout), sampling
        self.temperature = sampling.temperature

    def _other_tokenizer(self, loss, vocabulary):
        """The tokenizer of a teacher with other tokens, or `None`."""
        given = self.given
        for name, size in zip(given.names, given.vocabulary_sizes):
            tokenizer = given.tokenizer(name)
            why = distill_checks.other_tokens(
                vocabulary, self.tokenizer, size, tokenizer
            )
            if why:
                distill_checks.universal(loss, name, why)
                return distill_checks.known_tokenizer(tokenizer, name)
        return None

    def _make_feature_maps(self, loss):
        losses = [part for _, _, part in parts(loss)]
        losses = tuple(x for x in losses if isinstance(x, FeatureLoss))
        if self.feature_maps:
            known = self._feature_losses
            if losses != known:
                raise ValueError(
                    "A task keeps the feature losses of its first `compile`, "
                    f"whose maps it has trained: {list(known)!r}. Make a new "
                    f"task for others. Received: {list(losses)!r}"
                )
            return
        self._feature_losses = losses
        if not losses:
            return
        model = self.given.models()[0]
        teacher = self.policy if model is None else Policy(model)
        self.feature_maps = [
            FeatureMap(x, self.policy, teacher, name=f"feature_map_{i}")
            for i, x in enumerate(losses)
        ]
        for side, policy in enumerate((self.policy, teacher)):
            capture_of(self.feature_maps, side).check(policy)

    # The teachers

    @property
    def by_policy_loss(self):
        """Whether the student follows the teacher by a policy gradient."""
        return isinstance(self.objective, PolicyLoss)

    def companion_models(self):
        return {"teachers": list(self.teachers) or self.given.models()}

    def set_companions(self, companions):
        self.teachers, self.cached = companions["teachers"], None

    @property
    def needs_all_layers(self):
        return bool(self.feature_maps)

    def frozen_models(self):
        return {f"teacher_{i}": x for i, x in enumerate(self.teachers)}

    def make_step(self, weights=None):
        step = dataclasses.replace(
            super().make_step(weights), companions={"teachers": self.teachers}
        )
        if self.by_policy_loss:
            return dataclasses.replace(step, has_signal=has_advantage)
        terms = DistillTerms(
            self.objective, self.policy, self.teachers, self.feature_maps
        )
        return dataclasses.replace(step, terms=terms)

    def _make_teachers(self):
        """Makes the teachers that run in this process, once for a run."""
        if self.teachers or self.given.engine is not None:
            return
        self.teachers = self.given.freeze(
            self.policy,
            ModelWeights.of(self),
            same_tokens=self.teacher_tokenizer is None,
        )
        self._renew_step()

    def _make_teachers_of_the_step(self):
        # A cache replaces them.
        if self.teacher_cache is None:
            self._make_teachers()
            for teacher in self.teachers:
                teacher.check(self.teacher_length, self._packs)

    def _release_teachers(self):
        self.given.release()
        if self.teachers:
            self.teachers = ()
            self._renew_step()

    @contextlib.contextmanager
    def _served(self):
        """A scope in which the teacher's engine, if there is one, is ready."""
        engine = self.given.engine
        if engine is None:
            yield
            return
        engine.start()
        try:
            yield
        finally:
            engine.stop()

    # Rows

    def prepare(self, dataset, name="dataset", train_on="auto", **overrides):
        settings = self.row_settings(name, **overrides)
        if train_on == "all":
            # For `log_probs`, which asks no teacher.
            return prepare_sft(dataset, settings, train_on)
        by_column = self.teacher_column is not None
        return prepare_distillation(
            dataset,
            settings,
            train_on=train_on,
            teacher_column=self.teacher_column,
            teacher_names=self.given.names if by_column else None,
            teacher_tokenizer=self.teacher_tokenizer,
            teacher_length=self.teacher_length,
            teacher_vocabulary_size=self.given.vocabulary_sizes[0],
        )

    def begin_run(self, datasets, batch_size, callbacks):
        self._make_teachers_of_the_step()
        if self.teacher_cache is not None:
            for examples in datasets:
                self._fill_cache(examples, batch_size)
            self._release_teachers()

    def make_batches(self, examples, batch_size, *, packing=False, **kwargs):
        if is_stream(examples):
            # The lengths of rows that are yet to come are not known.
            longest = self.sequence_length
            layout = self._layout(batch_size, packing, longest)
            self._refuse_stream(examples)
        else:
            lookup = None
            if self.teacher_cache is not None:
                self._fill_cache(examples, batch_size)
                self._release_teachers()
                lookup = cached_tokens(self.cached)
            longest = max(len(x.token_ids) for x in examples)
            layout = self._layout(batch_size, packing, longest)
            layout = fit_teacher_rows(with_lookup(layout, lookup), examples)
        return self.row_batches(examples, batch_size, layout=layout, **kwargs)

    def _layout(self, num_sequences, packing, longest):
        """The layout of batches of so many sequences."""
        several = self.teacher_column is not None
        return distillation_layout(
            batch_size=num_sequences,
            sequence_length=self.sequence_length,
            teacher_length=self.teacher_length,
            token_budget=rl_checks.token_budget(
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

    def filled_rows(self, batch_size, packing=False):
        return None if packing else batch_size, 1

    # The cache

    @property
    def kept_temperature(self):
        """The temperature of a teacher's log-probabilities that are kept."""
        losses = [part for _, _, part in parts(self.objective)]
        found = [x for x in losses if isinstance(x, DistillationLoss)]
        return found[0].temperature if found else 1.0

    def _refuse_stream(self, examples):
        if self.teacher_cache is not None and is_stream(examples):
            raise ValueError(
                "A teacher's answers to all rows are cached before the first "
                "step. Received: a Grain `IterDataset` with "
                f"teacher_cache={str(self.teacher_cache)!r}. Use a Grain "
                "`MapDataset`, a list of dicts or a file."
            )

    def _fill_cache(self, examples, batch_size):
        """Computes what the cache lacks of some examples."""
        self._refuse_stream(examples)
        engine, temperature = self.given.engine, self.kept_temperature
        if self.cached is None:
            self._make_teachers()
            self.cached = teacher_cache(
                self.teacher_cache,
                self.teachers[0] if self.teachers else None,
                engine,
                temperature,
                self.top_k,
            )
        missing = self.cached.missing(spans_by_key(examples))
        if not missing:
            return
        self._refuse_new_rows(len(missing))
        self._make_teachers()
        if engine is not None:
            compute = functools.partial(
                served_top_tokens,
                engine,
                top_k=self.top_k,
                temperature=temperature,
            )
        else:
            compute = top_tokens(
                self.teachers[0],
                ModelWeights.of(self),
                lambda rows, longest: self.row_batches(
                    rows, batch_size, sequence_length=longest, shuffle=False
                ),
                self.top_k,
                temperature,
            )
        self.cached.fill(
            missing,
            length=lambda span: span.stop,
            compute=compute,
            message=f"teacher: reads {len(missing):,} rows, which are kept in",
            verbose=self._verbose,
        )

    def _refuse_new_rows(self, count):
        is_student = self.cached.kind == "copy" and not self.teachers
        if is_student:
            raise ValueError(
                "The teacher is the student when training began, which is "
                "no longer there to be asked about rows that it has not "
                f"read. Received: {count} rows that are not in "
                f"{str(self.teacher_cache)!r}. Pass them to `fit` as "
                "`validation_data`, or evaluate them before training."
            )

    # Training

    def fit(self, dataset, batch_size=8, epochs=1, *, packing=False, **kwargs):
        """Trains on rows, or on prompts with `on_policy`.

        Args:
            dataset: list of dicts, Hugging Face `Dataset`, Grain
                `MapDataset`, or the path of a `.jsonl` or `.parquet` file.
            batch_size: int, rows of one optimizer step; with `on_policy`
                prompts of one rollout.
            epochs: int.
            packing: `False`, `True` to put several sequences of a batch in a
                row of `sequence_length` tokens, or an int, the tokens of
                such a row. It changes no result.
            **kwargs: see `kpt.SFTTask.fit`, with `on_policy` those of
                `kpt.GRPOTask.fit`. `validation_data` has completions in
                either case.

        Returns:
            A Keras `History` of the means over each epoch.
        """
        self._assert_compile_called("fit")
        if kwargs.get("share_prefix"):
            raise ValueError(
                "`share_prefix` is for groups of many completions a prompt; "
                "here use packing=True."
            )
        kwargs.pop("share_prefix", None)
        if not self.on_policy and kwargs.pop("max_staleness", 0):
            raise ValueError(
                "`max_staleness` is for the student's own samples: here rows "
                "are given, and nothing is sampled. Leave it out, or "
                "`compile` with on_policy=True."
            )
        self._began, self._packs = True, bool(packing)
        fit = self._fit_samples if self.on_policy else super().fit
        with self._served():
            return fit(dataset, batch_size, epochs, packing=packing, **kwargs)

    def _fit_samples(
        self,
        dataset,
        batch_size,
        epochs,
        *,
        shuffle=True,
        seed=0,
        packing=False,
        validation_data=None,
        callbacks=None,
        verbose="auto",
        skip_steps=(),
        max_staleness=0,
    ):
        """`fit` on the student's own samples."""
        callbacks = callback_lib.as_list(callbacks)
        processes.need_distribution()
        verbose = verbose if processes.is_first() else 0
        checks.positive_int("epochs", epochs)
        checks.may_train(self.policy, packing, callbacks)
        rl_checks.staleness(max_staleness)
        prompts, self.data_report = self._student_prompts(dataset)
        callback_lib.show(self.data_report, verbose)
        sampling = self.sampling
        sequences = rl_checks.minibatches(
            batch_size, sampling.num_generations, sampling.num_minibatches
        )
        callback_lib.show(self._padding(sequences, packing), verbose)
        longest = max(len(p.token_ids) for p in prompts.prompts)
        longest += sampling.max_completion_length
        layout = self._layout(sequences, packing, longest)
        validate = None
        if validation_data is not None:
            held_out, report = self.prepare(validation_data, "validation_data")
            callback_lib.show(report, verbose)
            held_out = self.make_batches(held_out, batch_size, shuffle=False)
            validate = functools.partial(self.evaluate, held_out)
        optimizers.refresh_masters(self.optimizer, self.trainable_variables)
        loss, corrected = self.objective, self.objective
        if max_staleness:
            corrected = rl_checks.corrected(loss, sampling.old_log_probs)
        if corrected is not loss:
            self._set_objective(corrected)
        self._make_teachers_of_the_step()
        order = PromptOrder(
            prompts.prompts, batch_size=batch_size, shuffle=shuffle, seed=seed
        )
        follows = self.by_policy_loss
        self.run = RolloutRun(
            self,
            step=self._step,
            saved=self.saved_variables(),
            state=self.run_state,
            engine=self.rollout,
            order=order,
            collector=functools.partial(
                DistillCollector,
                prompts=prompts,
                share=self.on_policy,
                engine=self.given.engine,
                top_k=self.top_k,
                kept_temperature=self.kept_temperature,
                by_policy_loss=follows,
                teacher_pass=TeacherPass(self._step, self.temperature),
                sampling=sampling,
                scoring=Scoring(),
                tokenizer=self.tokenizer,
                layout=layout,
                forward=ForwardPass(self._step),
                order=order,
                seed=seed,
            ),
            validate=validate,
            callbacks=callbacks,
            epochs=epochs,
            seed=seed,
            skip_steps=skip_steps,
            max_staleness=max_staleness,
            verbose=verbose,
            settings={"micro_batch_size": self.micro_batch_size},
        )
        try:
            return self.run.fit()
        finally:
            if corrected is not loss:
                self._set_objective(loss)

    def _student_prompts(self, dataset, name="dataset"):
        """`(StudentPrompts, report)` of prompts, or of rows to sample from."""
        completion = self.sampling.max_completion_length
        most, why = rl_checks.room(
            self.sequence_length, self.max_length, completion
        )
        if self.on_policy < 1.0:
            examples, report = self.prepare(dataset, name)
            return (
                prompts_of_rows(examples, self.tokenizer, most, why, name),
                report,
            )
        prompts, report = self._prompts(dataset, name, most, why)
        column, rows = teacher_prompts(prompts)
        if column is not None:
            # None may be left out: each goes with a prompt.
            rows, _ = self._prompts(
                rows,
                f"{name}, column {column!r}",
                self.teacher_length - completion,
                f"teacher_length={self.teacher_length} less "
                f"max_completion_length={completion}",
                truncation="error",
            )
        contexts = contexts_of(
            prompts, rows, self.teacher_column, self.given.names, name
        )
        return StudentPrompts(prompts, contexts=contexts), report

    def _prompts(self, dataset, name, most, why, **overrides):
        return prepare_prompts(
            dataset,
            self.row_settings(name, **overrides),
            max_prompt_length=most,
            limit=why,
        )

    @property
    def last_rollout(self):
        """Dict of lists: the samples of the last rollout, or `None`."""
        return getattr(self.run, "last_rollout", None)

    def evaluate(self, dataset=None, batch_size=8, **kwargs):
        """The loss and metrics of rows, as means over all their tokens.

        Args:
            dataset: rows with completions, as in `fit`.
            batch_size: int, rows at once.
            **kwargs: see `kpt.SFTTask.evaluate`.

        Returns:
            A dict of floats: `loss` and the loss's metrics.
        """
        self._assert_compile_called("evaluate")
        distill_checks.may_evaluate(self.objective)
        self._verbose = kwargs.get("verbose", 0)
        self._make_teachers_of_the_step()
        try:
            return super().evaluate(dataset, batch_size, **kwargs)
        finally:
            if not self._began:
                # The student may change before training begins.
                self.teachers, self.cached = (), None
                self._renew_step()

    def example_batch(self, batch_size, **kwargs):
        distill_checks.plannable(
            self.given,
            on_policy=self.on_policy,
            cache=self.teacher_cache,
            other=self.teacher_tokenizer is not None,
        )
        return super().example_batch(batch_size, **kwargs)

    def fingerprint(self):
        found = super().fingerprint()
        if self.on_policy:
            found |= Scoring().fingerprint() | self.sampling.fingerprint()
        return found | {
            "on_policy": self.on_policy,
            "top_k": self.top_k,
            "teacher_weights": self.teacher_weights,
            "teacher_column": self.teacher_column,
            "teachers": [[t.kind, t.digest] for t in self.teachers],
            "teacher_cache": self.cached and self.cached.rows.header,
        }
