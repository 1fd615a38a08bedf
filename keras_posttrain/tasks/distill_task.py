import contextlib

from keras_posttrain.distill import checks as distill_checks
from keras_posttrain.distill import step
from keras_posttrain.distill.collector import DistillCollector
from keras_posttrain.distill.data import DistillData
from keras_posttrain.distill.teachers import GivenTeachers, Teacher
from keras_posttrain.losses import ForwardKLLoss, PolicyLoss, ReverseKLLoss
from keras_posttrain.losses.features import FeatureLoss
from keras_posttrain.models.feature_maps import FeatureMap, capture_of
from keras_posttrain.models.policy import Policy
from keras_posttrain.tasks.rollout_task import RolloutTask
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import checks


class DistillTask(DistillData, RolloutTask):
    """Distillation: a student learns what a teacher can do.

    The loss says how they are compared. `compile(loss=...)` takes a
    divergence of their distributions (`ForwardKLLoss`, the default,
    `ReverseKLLoss`, `JSDLoss`, `SkewKLLoss`, `TotalVariationLoss`), over the
    whole vocabulary; `ULDLoss`, where they have different tokenizers;
    `HiddenStateLoss` and `AttentionLoss`, of what goes on inside; or a
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

    auto_learning_rates = (2e-4, 2e-5)
    shown_metrics = (
        "loss",
        "divergence",
        "agreement",
        "hard_loss",
        "completions/mean_length",
        "grad_norm",
    )
    collector = DistillCollector
    # Set by `compile`.
    on_policy = 0.0
    teachers = ()
    feature_maps = ()
    _began = _packs = False
    top_k = teacher_cache = teacher_column = None
    teacher_weights = teacher_tokenizer = None

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
        given = GivenTeachers(teacher, causal_lm, teacher_tokenizer)
        super().__init__(causal_lm, tokenizer, **kwargs)
        if teacher_length is not None:
            checks.positive_int("teacher_length", teacher_length)
        self.teacher_length = teacher_length or self.sequence_length
        # Behind a function its models are no sublayers.
        self._given_teachers = lambda: given

    @property
    def given(self):
        """`GivenTeachers`: those that the user named."""
        return self._given_teachers()

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
        self.on_policy = distill_checks.share("on_policy", on_policy)
        loss = self.default_loss() if loss == "auto" else loss
        distill_checks.loss(loss, self.on_policy)
        distill_checks.teacher_settings(
            self.given, teacher_weights, teacher_column, top_k, teacher_cache
        )
        teacher_weights = distill_checks.weights(
            teacher_weights, teacher_column, self.given.names
        )
        self._compile_samples(
            loss,
            rollout=rollout,
            num_generations=num_generations,
            max_completion_length=max_completion_length,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            num_minibatches=num_minibatches,
            num_iterations=num_iterations,
            old_log_probs=old_log_probs,
            mask_truncated_completions=mask_truncated_completions,
        )
        self.teacher_tokenizer = self._other_tokenizer(loss)
        distill_checks.combination(
            self, loss, self.given, top_k, teacher_cache
        )
        self._make_feature_maps(loss)
        Task.compile(
            self,
            optimizer,
            loss,
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            run_eagerly=run_eagerly,
        )
        self.teacher_column, self.top_k = teacher_column, top_k
        self.teacher_cache = teacher_cache
        self.teacher_weights = teacher_weights
        self.teachers, self.reference, self._cache = (), None, None
        self._began = False

    def _compile_samples(self, loss, **settings):
        self.rewards, self.reward_names = (), ()
        self.reward_weights, self.advantages = None, None
        self.max_resamples, self.reward_timeout = 0, None
        self.on_reward_error = "raise"
        if self.on_policy:
            self._set_sampling(**settings)
            many = self.num_generations
            if self.on_policy < 1.0 and many > 1:
                raise ValueError(
                    "Rows that are given have one completion, so with a "
                    "share of them `num_generations` must be 1. Received: "
                    f"on_policy={self.on_policy}, num_generations={many}"
                )
        else:
            distill_checks.unused(settings)
            self.rollout, self.temperature = None, 1.0

    def _other_tokenizer(self, loss):
        """The tokenizer of a teacher with other tokens, or `None`."""
        given = self.given
        for name, size in zip(given.names, given.vocabulary_sizes):
            tokenizer = given.tokenizer(name)
            why = distill_checks.other_tokens(self, size, tokenizer)
            if why:
                distill_checks.universal(loss, name, why)
                return distill_checks.known_tokenizer(tokenizer, name)
        return None

    def _make_feature_maps(self, loss):
        losses = [part for _, _, part in step.parts(loss)]
        losses = [x for x in losses if isinstance(x, FeatureLoss)]
        if self.feature_maps:
            known = self._feature_losses()
            if losses != known:
                raise ValueError(
                    "A task keeps the feature losses of its first `compile`, "
                    f"whose maps it has learned: {known!r}. Make a new task "
                    f"for others. Received: {losses!r}"
                )
            return
        self._feature_losses = lambda: losses
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
        """Whether the teacher is followed by a policy gradient."""
        return isinstance(self.objective, PolicyLoss)

    def make_teachers(self):
        """Teachers that run in the step, once for a run."""
        if self.teachers or self.given.engine is not None:
            return
        other = self.teacher_tokenizer is not None
        self.teachers = tuple(
            Teacher(self, model, other_vocabulary=other)
            for model in self.given.models()
        )
        for teacher in self.teachers:
            teacher.check(self.teacher_length, packing=False)
        self.train_function = self.test_function = None

    def _make_teachers_of_the_step(self):
        # What is written down needs none.
        if self.teacher_cache is None:
            self.make_teachers()
            for teacher in self.teachers:
                teacher.check(self.teacher_length, self._packs)

    def held(self, frozen):
        held = super().held(frozen)
        return {**held, "teachers": [t.values for t in self.teachers]}

    # Training

    @property
    def _kind(self):
        """Whose run this is: of a task that samples, or of one on rows."""
        return RolloutTask if self.on_policy else Task

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
        if not self.on_policy and kwargs.pop("max_staleness", 0):
            raise ValueError(
                "`max_staleness` is for the student's own samples: here rows "
                "are given, and nothing is sampled. Leave it out, or "
                "`compile` with on_policy=True."
            )
        self._began, self._packs = True, bool(packing)
        self._shows = bool(kwargs.get("verbose", True))
        with self._served():
            return self._kind.fit(
                self, dataset, batch_size, epochs, packing=packing, **kwargs
            )

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
        distill_checks.may_evaluate(self)
        self._shows = bool(kwargs.get("verbose"))
        self._make_teachers_of_the_step()
        try:
            return Task.evaluate(self, dataset, batch_size, **kwargs)
        finally:
            if not self._began:
                # The student when training begins may be another yet.
                self.teachers, self._cache = (), None
                self.test_function = None

    @contextlib.contextmanager
    def _served(self):
        """The teacher's engine made ready, where there is one."""
        engine = self.given.engine
        if engine is None:
            yield
            return
        engine.start()
        try:
            yield
        finally:
            engine.stop()

    def _begin_run(self, examples, callbacks, verbose):
        self._make_teachers_of_the_step()

    def _begin(self, *args):
        super()._begin(*args)
        self._make_teachers_of_the_step()

    # The steps

    def row_terms(self, state, rows, normalizers, key, differentiable=True):
        if self.by_policy_loss:
            return super().row_terms(
                state, rows, normalizers, key, differentiable
            )
        return step.row_terms(
            self, state, rows, normalizers, key, differentiable
        )

    def loss_and_gradients(self, state, batch):
        kind = RolloutTask if self.by_policy_loss else Task
        return kind.loss_and_gradients(self, state, batch)

    # The state of a run

    def at_epoch_end(self):
        return self._kind.at_epoch_end(self)

    def data_state(self):
        return self._kind.data_state(self)

    def reset_metrics(self):
        self._kind.reset_metrics(self)

    def training_state(self):
        arrays, meta = self._kind.training_state(self)
        for i, teacher in enumerate(self.teachers):
            arrays[f"teacher_{i}"] = teacher.state()
        return arrays, meta

    def restore_training_state(self, arrays, meta):
        self._kind.restore_training_state(self, arrays, meta)
        for i, teacher in enumerate(self.teachers):
            teacher.set_state(arrays[f"teacher_{i}"])

    def fingerprint(self):
        kind = self._kind.fingerprint(self)
        return kind | {
            "on_policy": self.on_policy,
            "top_k": self.top_k,
            "teacher_weights": self.teacher_weights,
            "teacher_column": self.teacher_column,
            "teachers": [[t.kind, t.digest] for t in self.teachers],
            "teacher_cache": self._cache and self._cache.rows.header,
        }
