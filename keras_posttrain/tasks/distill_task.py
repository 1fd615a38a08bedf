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
from keras_posttrain.data.rows.examples import summary_of
from keras_posttrain.data.rows.prompts import (
    PromptOrder,
    prepare_columns,
    prepare_prompts,
)
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.streams import check_epochs
from keras_posttrain.distill import checks as distill_checks
from keras_posttrain.distill.collector import DistillCollector
from keras_posttrain.distill.prompts import (
    StudentPrompts,
    contexts_of,
    prompts_of_rows,
    teacher_prompts,
)
from keras_posttrain.distill.step import (
    DistillTerms,
    TeacherPass,
    kept_temperature,
)
from keras_posttrain.distill.teacher_cache import (
    cached_tokens,
    served_top_tokens,
    spans_by_key,
    teacher_cache,
    top_tokens,
)
from keras_posttrain.distill.teachers import TeacherSources
from keras_posttrain.losses import (
    ForwardKLLoss,
    PolicyLoss,
    ReverseKLLoss,
)
from keras_posttrain.models import presets
from keras_posttrain.models.feature_maps import feature_maps
from keras_posttrain.models.policy import Policy
from keras_posttrain.planning import suggestion
from keras_posttrain.rl import checks as rl_checks
from keras_posttrain.rl.collector import ForwardPass
from keras_posttrain.rl.loop import RolloutRun
from keras_posttrain.rl.sampling import Scoring
from keras_posttrain.rollout import NativeRollout
from keras_posttrain.tasks.rollout_task import has_advantage
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import checks, huge_pages, keras_words, padding
from keras_posttrain.training.run_settings import RunSettings
from keras_posttrain.training.weights import ModelWeights


class DistillTask(Task):
    """Distillation: trains a student on the distributions of a teacher.

    `compile(loss=...)` takes a divergence of their distributions over the
    full vocabulary (`ForwardKLLoss`, the default, `ReverseKLLoss`, `JSDLoss`,
    `SkewKLLoss`, `TotalVariationLoss`); `ULDLoss` for models with different
    tokenizers; `HiddenStateLoss` and `AttentionLoss` for intermediate
    features; or a `SumLoss` of these.

    Offline the student is trained on the rows of `kpt.SFTTask`. In addition
    to `prompt` and `completion` a column `teacher_prompt`
    (`teacher_prompt_ids`) replaces the prompt for the teacher, which distills
    the effect of a long prompt into the weights.

    With `compile(on_policy=True)` rows are prompts, as in `kpt.GRPOTask`, and
    the student is trained on its own samples. The loss can then also be a
    policy loss: the advantage of a token is the teacher's log-probability
    minus the student's.

    The vocabulary is projected in chunks of tokens, for the student and the
    teacher: no `(tokens, vocabulary)` array exists. The teacher's weights are
    an argument of the step; they are neither copied nor checkpointed.

    Args:
        causal_lm: a KerasHub `CausalLM`, the student.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        teacher: a preset, a KerasHub `CausalLM`, a task of the teacher
            (`from_preset(..., quantize="int8", trainable=False)` makes a
            small one), an engine of `kpt.rollout` that serves the teacher,
            or `None` for the student at the start of training; or a list or
            dict of these, without engines.
        teacher_tokenizer: `kpt.Tokenizer` of a teacher with other tokens,
            for `ULDLoss`. A preset brings its own.
        teacher_length: int or `None`, the maximum length of the teacher's
            rows in tokens; by default `sequence_length`.
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
        teacher_tokenizer = presets.as_tokenizer(
            teacher_tokenizer, "teacher_tokenizer"
        )
        given = TeacherSources(teacher, causal_lm, teacher_tokenizer)
        super().__init__(causal_lm, tokenizer, **kwargs)
        if teacher_length is not None:
            checks.positive_int("teacher_length", teacher_length)
        self.teacher_length = teacher_length or self.sequence_length
        self.given, self.feature_maps, self._feature_losses = given, (), ()
        # Set by `compile` and `fit`.
        self.on_policy, self.rollout, self.sampling = 0.0, None, None
        self.episode = None
        self.teacher_cache = self.cached = self.teacher_tokenizer = None
        self.teacher_column = self.teacher_weights = self.top_k = None
        self._began = self._packs = False
        # The engine of `rollout="auto"` and the passes of a run, with their
        # compiled programs.
        self._own_rollout = NativeRollout()
        self._forward = self._teacher_pass = None

    def default_loss(self):
        return ReverseKLLoss() if self.on_policy else ForwardKLLoss()

    @keras_words.explained
    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        router_loss=None,
        teacher_weights=None,
        teacher_column=None,
        top_k=None,
        teacher_cache=None,
        on_policy=False,
        episode=None,
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
        """Configures the task for training.

        Args:
            optimizer: as in `kpt.SFTTask.compile`.
            loss: `"auto"` for `kpt.losses.ForwardKLLoss()`, on the student's
                own samples `ReverseKLLoss()`; or a loss, see the class.
            router_loss: as in `kpt.Task.compile`, of the student.
            teacher_weights: list of floats (dict by name) or `None`, the
                weight of each of several teachers. By default all have the
                same weight, and the weights sum to 1.
            teacher_column: str or `None`, the column that names the one
                teacher of a row.
            top_k: int, the number of the teacher's most probable tokens that
                a cache or an engine provides for each token.
            teacher_cache: path or `None`, a directory in which the teacher's
                `top_k` log-probabilities of each row are written once. This
                run and later ones on the same rows read them and train
                without the teacher in memory. The teacher is loaded before
                the first step, to verify that it is the cached one, and then
                freed, except a `CausalLM` that you hold. Offline only.
            on_policy: bool, whether the student is trained on its own
                samples; or a float, the share of sampled rows in each batch,
                next to rows used as given.
            episode: as in `kpt.GRPOTask.compile`, for the student's own
                samples; what it returns is not used.
            rollout, num_generations, max_completion_length, temperature,
                stop_token_ids, num_minibatches, num_iterations,
                old_log_probs, mask_truncated_completions: of the samples,
                as in `kpt.GRPOTask.compile`.
            micro_batch_size, max_grad_norm, run_eagerly: as in
                `kpt.SFTTask.compile`.

        Raises:
            ValueError: for a loss that the teacher cannot serve, vocabularies
                that differ, missing layers, and incompatible settings.
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
        vocabulary = self.causal_lm.backbone.vocabulary_size
        self.rollout, self.sampling = distill_checks.samples(
            on_policy,
            rollout,
            self._own_rollout,
            sequence_length=self.sequence_length,
            max_length=self.max_length,
            tokenizer=self.tokenizer,
            vocabulary_size=vocabulary,
            num_generations=num_generations,
            max_completion_length=max_completion_length,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            num_minibatches=num_minibatches,
            num_iterations=num_iterations,
            old_log_probs=old_log_probs,
            mask_truncated_completions=mask_truncated_completions,
        )
        self.episode = distill_checks.episode(
            episode, self.tokenizer, on_policy, given
        )
        self.temperature = self.sampling.temperature if on_policy else 1.0
        self.teacher_tokenizer = distill_checks.other_tokenizer(
            given, loss, self.tokenizer, vocabulary
        )
        distill_checks.combination(
            loss,
            given,
            top_k,
            teacher_cache,
            on_policy=on_policy,
            other=self.teacher_tokenizer is not None,
            vocabulary=vocabulary,
        )
        losses = distill_checks.feature_losses(loss)
        if self.feature_maps:
            distill_checks.same_losses(losses, self._feature_losses)
        elif losses:
            teacher = given.models()[0]
            self.feature_maps = feature_maps(
                losses,
                self.policy,
                self.policy if teacher is None else Policy(teacher),
            )
            self._feature_losses = losses
        self.teacher_column, self.top_k = teacher_column, top_k
        self.teacher_cache = teacher_cache
        self.teacher_weights = teacher_weights
        self.companions, self.cached, self._began = {}, None, False
        super().compile(
            optimizer,
            loss,
            router_loss=router_loss,
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            run_eagerly=run_eagerly,
        )

    # The teachers

    @property
    def teachers(self):
        """Tuple of the `FrozenPolicy`s that run in this process."""
        return self.companions.get("teachers", ())

    @property
    def needs_all_layers(self):
        return bool(self.feature_maps)

    def companion_models(self):
        return {"teachers": list(self.teachers) or self.given.models()}

    def make_step(self, weights=None):
        step = super().make_step(weights)
        if isinstance(self.objective, PolicyLoss):
            return dataclasses.replace(step, has_signal=has_advantage)
        terms = DistillTerms(
            self.objective, self.policy, self.teachers, self.feature_maps
        )
        return dataclasses.replace(step, terms=terms)

    def _renew_step(self):
        super()._renew_step()
        self._forward = self._teacher_pass = None

    def _make_teachers(self, of_step=False):
        """Creates the teachers that run in this process, once per run.

        With `of_step` only those that the step reads: with a cache, none.
        """
        if of_step and self.teacher_cache is not None:
            return
        if not self.teachers and self.given.engine is None:
            teachers = self.given.freeze(
                self.policy,
                ModelWeights.of(self),
                same_tokens=self.teacher_tokenizer is None,
            )
            self.companions = {"teachers": teachers}
            self._renew_step()
        if of_step:
            for teacher in self.teachers:
                teacher.check(self.teacher_length, self._packs)

    def _release_teachers(self):
        self.given.release()
        if self.teachers:
            self.companions = {}
            self._renew_step()

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
        self._make_teachers(of_step=True)
        if self.teacher_cache is not None:
            for examples in datasets:
                self._fill_cache(examples, batch_size)
            self._release_teachers()

    def make_batches(self, examples, batch_size, *, packing=False, **kwargs):
        if is_stream(examples):
            # The lengths of rows that are yet to come are not known.
            longest = self.sequence_length
            layout = self._layout(batch_size, packing, longest)
            distill_checks.cacheable(examples, self.teacher_cache)
        else:
            lookup = None
            if self.teacher_cache is not None:
                self._fill_cache(examples, batch_size)
                self._release_teachers()
                lookup = cached_tokens(self.cached)
            longest = int(summary_of(examples)["tokens"].max())
            layout = self._layout(batch_size, packing, longest)
            layout = fit_teacher_rows(with_lookup(layout, lookup), examples)
        return super().make_batches(
            examples, batch_size, layout=layout, **kwargs
        )

    def _layout(self, num_sequences, packing, longest):
        """Returns the layout of batches of so many sequences."""
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
            pad_id=padding.token_id(
                self.tokenizer, self.causal_lm.backbone.vocabulary_size
            ),
            teacher_weights=self.teacher_weights,
            num_teachers=len(self.given) if several else 1,
        )

    def filled_rows(self, batch_size, packing=False):
        return None if packing else batch_size, 1

    def _fill_cache(self, examples, batch_size):
        """Computes what the cache lacks of some examples."""
        distill_checks.cacheable(examples, self.teacher_cache)
        temperature = kept_temperature(self.objective)
        engine = self.given.engine
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
        if self.cached.kind == "copy" and not self.teachers:
            distill_checks.refuse_new_rows(len(missing), self.teacher_cache)
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
                lambda rows, longest: Task.make_batches(
                    self,
                    rows,
                    batch_size,
                    sequence_length=longest,
                    shuffle=False,
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

    # Training

    @keras_words.explained
    def fit(
        self,
        dataset,
        batch_size=8,
        epochs=1,
        *,
        packing=False,
        max_staleness=0,
        **kwargs,
    ):
        """Trains on rows, or on prompts with `on_policy`.

        Args:
            dataset: as in `kpt.SFTTask.fit`.
            batch_size: int, rows of one optimizer step; with `on_policy`
                prompts of one rollout.
            packing: `False`, `True` to put several sequences of a batch in a
                row of `sequence_length` tokens, or an int, the tokens of
                such a row. It changes no result.
            max_staleness: int, with `on_policy` as in `kpt.GRPOTask.fit`.
            epochs, **kwargs: see `kpt.SFTTask.fit`; `compile_ahead` is for
                given rows alone. `validation_data` has completions in either
                case.

        Returns:
            A Keras `History` of the means over each epoch.
        """
        self._assert_compile_called("fit")
        if self.on_policy:
            if "compile_ahead" in kwargs:
                raise ValueError(
                    "`compile_ahead` is for given rows. With `on_policy` use "
                    "compile(rollout=kpt.rollout.NativeRollout("
                    "compile_ahead=...)). Received: "
                    f"compile_ahead={kwargs['compile_ahead']!r}"
                )
            kwargs["max_staleness"] = max_staleness
        elif max_staleness:
            raise ValueError(
                "`max_staleness` is for the student's own samples: here rows "
                "are given, and nothing is sampled. Leave it out, or "
                "`compile` with on_policy=True."
            )
        checks.packing(packing)
        self._began, self._packs = True, bool(packing)
        fit = self._fit_samples if self.on_policy else super().fit
        with self.given.ready():
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
        batch_size = checks.positive_int("batch_size", batch_size)
        seed = checks.seed(seed)
        rl_checks.staleness(max_staleness, self.rollout)
        checks.flag("shuffle", shuffle)
        settings = RunSettings.of(
            self.policy,
            packing,
            epochs=epochs,
            seed=seed,
            max_staleness=max_staleness,
            micro_batch_size=self.micro_batch_size,
            trainable=self.trainable,
            callbacks=callbacks,
            verbose=verbose,
            skip_steps=skip_steps,
        )
        prompts, self.data_report = self._student_prompts(dataset)
        settings.show(self.data_report)
        sampling, players = self.sampling, 1
        longest = int(summary_of(prompts.prompts)["tokens"].max())
        longest += sampling.max_completion_length
        episodes = None
        if self.episode is not None:
            longest = self.sequence_length
            episodes = rl_checks.episodes(
                self.episode,
                prompts.prompts,
                sampling,
                self.tokenizer,
                [self.sequence_length, self.max_length],
                self.chat_template_kwargs,
                self.truncation,
            )
            players = len(episodes.trained)
        sequences = rl_checks.minibatches(
            batch_size,
            sampling.num_generations * players,
            sampling.num_minibatches,
        )
        filled = self.filled_rows(sequences, packing)
        settings.show(padding.describe(self.micro_batch_size, *filled))
        huge_pages.advise(self.causal_lm, settings)
        layout = dataclasses.replace(
            self._layout(sequences, packing, longest),
            by_sequence=self.objective.by_sequence,
        )
        validate = None
        if validation_data is not None:
            held_out, report = self.prepare(validation_data, "validation_data")
            check_epochs(held_out, epochs)
            settings.show(report)
            held_out = self.make_batches(held_out, batch_size, shuffle=False)
            validate = functools.partial(self.evaluate, held_out)
        optimizers.refresh_masters(self.optimizer, self.trainable_variables)
        with rl_checks.loss_of_run(
            self.objective,
            max_staleness,
            sampling.old_log_probs,
            self._set_objective,
        ):
            self._make_teachers(of_step=True)
            order = PromptOrder(
                prompts.prompts,
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
            )
            follows = isinstance(self.objective, PolicyLoss)
            if self._forward is None:
                self._forward = ForwardPass(self._step)
                self._teacher_pass = TeacherPass(self._step, self.temperature)
            self.run = RolloutRun(
                self,
                step=self._step,
                frozen={
                    f"teacher_{i}": x for i, x in enumerate(self.teachers)
                },
                state=self.run_state,
                engine=self.rollout,
                order=order,
                collector=functools.partial(
                    DistillCollector,
                    episodes=episodes,
                    prompts=prompts,
                    share=self.on_policy,
                    engine=self.given.engine,
                    top_k=self.top_k,
                    kept_temperature=kept_temperature(self.objective),
                    by_policy_loss=follows,
                    teacher_pass=self._teacher_pass,
                    sampling=sampling,
                    scoring=Scoring(),
                    tokenizer=self.tokenizer,
                    layout=layout,
                    forward=self._forward.begin(),
                    order=order,
                    seed=seed,
                ),
                settings=settings,
                validate=validate,
            )
            return self.run.fit()

    def _student_prompts(self, dataset, name="dataset"):
        """`(StudentPrompts, report)` of prompts, or of rows to sample from."""
        if self.episode is not None:
            prompts, report = prepare_columns(dataset, self.row_settings(name))
            prompts = list(prompts)
            self.episode.players(prompts[0].columns)
            return StudentPrompts(prompts), report
        completion = self.sampling.max_completion_length
        most, why = rl_checks.room(
            self.sequence_length, self.max_length, completion
        )
        if self.on_policy < 1.0:
            examples, report = self.prepare(dataset, name)
            return (
                prompts_of_rows(
                    list(examples), self.tokenizer, most, why, name
                ),
                report,
            )
        prompts, report = prepare_prompts(
            dataset,
            self.row_settings(name),
            max_prompt_length=most,
            limit=why,
        )
        if is_stream(prompts):
            prompts = list(prompts)
        column, rows = teacher_prompts(prompts)
        if column is None and self.teacher_column is None:
            return StudentPrompts(prompts), report
        prompts = list(prompts)
        if column is not None:
            # None may be left out: each goes with a prompt.
            rows, _ = prepare_prompts(
                rows,
                self.row_settings(
                    f"{name}, column {column!r}", truncation="error"
                ),
                max_prompt_length=self.teacher_length - completion,
                limit=f"teacher_length={self.teacher_length} less "
                f"max_completion_length={completion}",
            )
        contexts = contexts_of(
            prompts, rows, self.teacher_column, self.given.names, name
        )
        return StudentPrompts(prompts, contexts=contexts), report

    @property
    def last_rollout(self):
        """Dict of lists: the samples of the last rollout, or `None`."""
        return getattr(self.run, "last_rollout", None)

    @keras_words.explained
    def evaluate(self, dataset=None, batch_size=8, **kwargs):
        """Computes the loss and metrics of rows, as means over all tokens.

        Args:
            dataset: rows with completions, as in `fit`.
            batch_size, **kwargs: see `kpt.SFTTask.evaluate`.

        Returns:
            A dict of floats: `loss` and the loss's metrics.
        """
        self._assert_compile_called("evaluate")
        distill_checks.may_evaluate(self.objective)
        self._verbose = kwargs.get("verbose", 0)
        self._make_teachers(of_step=True)
        try:
            return super().evaluate(dataset, batch_size, **kwargs)
        finally:
            if not self._began:
                # The student may change before training begins.
                self.companions, self.cached = {}, None
                self._renew_step()

    def suggest(self, dataset, *, memory=None):
        if self.on_policy < 1.0:
            return super().suggest(dataset, memory=memory)
        checks.memory(memory)
        return suggestion.of_prompts(self, dataset, memory)

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
        if self.episode is not None:
            found["episode"] = self.episode.fingerprint()
        return found | {
            "on_policy": self.on_policy,
            "top_k": self.top_k,
            "teacher_weights": self.teacher_weights,
            "teacher_column": self.teacher_column,
            "teachers": [[t.kind, t.digest] for t in self.teachers],
            "teacher_cache": self.cached and self.cached.rows.header,
        }
