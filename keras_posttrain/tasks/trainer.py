"""The training step, and Keras's loop around it."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.callbacks.process_group import ProcessGroup
from keras_posttrain.callbacks.progress import Progress
from keras_posttrain.data.batches.pipeline import BatchAdapter
from keras_posttrain.distribution import processes, shapes_only
from keras_posttrain.losses import Loss, TokenLoss, reductions
from keras_posttrain.training import batch_coupled, checks, padding
from keras_posttrain.training import step as steps
from keras_posttrain.training.run_state import Resumable


class Trainer(Resumable):
    """`compile`, `fit` and `evaluate` of a task, by a step of our own.

    Reading order is that of a run: `compile`, `fit`, the function that Keras
    calls for each batch, and the pure step inside it.
    """

    # Set by `compile` and `fit`.
    objective = None
    data = None
    data_report = None
    step = 0
    # Logits are divided by it: that of the samples, in a task that samples.
    temperature = 1.0
    # Why a step may change nothing, for the progress bar's last line.
    skipped_because = "their gradient was not finite or no token carried loss"
    # Of `optimizer="auto"`: with an adapter, and without.
    auto_learning_rates = (2e-4, 2e-5)
    _seed = 0
    _digest = None
    _keep_metrics = False
    _evaluating = False
    # Ids of variables that a plan of fewer layers leaves out.
    left_out = frozenset()

    def default_loss(self):
        """The loss that `compile(loss="auto")` stands for."""
        raise NotImplementedError

    def prepare(self, dataset, name="dataset", **overrides):
        """Rows to examples.

        Args:
            dataset: what the user passed.
            name: str, the argument's name, for messages.
            **overrides: settings of the task to replace, such as
                `truncation`.

        Returns:
            `(examples, report)`.
        """
        raise NotImplementedError

    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        micro_batch_size=None,
        max_grad_norm=1.0,
        run_eagerly=False,
    ):
        """Sets what training needs.

        Args:
            optimizer: `"auto"` (AdamW, learning rate 2e-4 with an adapter
                and 2e-5 without), a Keras optimizer, or an Optax
                transformation. A schedule counts optimizer steps. Weight
                decay passes norms and biases by unless
                `exclude_from_weight_decay` was called; an Optax
                transformation is taken as it is (see `kpt.decay_mask`).
            loss: `"auto"` or a `kpt.losses.Loss`.
            micro_batch_size: int or `None`: rows that pass through the model
                at once, over several devices the next multiple of their
                number. Gradients are added up over a batch's micro-batches;
                the result is that of the whole batch.
            max_grad_norm: float or `None`: gradients whose global norm is
                larger are scaled down to it.
            run_eagerly: bool, for debugging.
        """
        loss = self.default_loss() if loss == "auto" else loss
        checks.compile_arguments(loss, Loss, micro_batch_size, max_grad_norm)
        rate = self.auto_learning_rates[self.adapter is None]
        optimizer = optimizers.get(optimizer, learning_rate=rate)
        optimizers.check(optimizer)
        super().compile(
            optimizer=optimizer,
            loss=None,
            run_eagerly=run_eagerly,
            auto_scale_loss=False,
        )
        self._set_objective(loss)
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        with contextlib.ExitStack() as stack:
            if optimizers.holds_shapes(self.trainable_variables):
                stack.enter_context(shapes_only())
            self._masters = optimizers.build(
                optimizer, self.trainable_variables
            )

    def _set_objective(self, loss):
        self.objective = loss
        names = list(steps.STEP_METRICS) + list(loss.metric_names)
        self._train_trackers = [keras.metrics.Mean(name=n) for n in names]
        names = ["loss"] + list(loss.metric_names)
        self._test_trackers = [keras.metrics.Mean(name=n) for n in names]
        self.train_function = self.test_function = None

    @property
    def trainable_variables(self):
        return self._without(super().trainable_variables)

    @property
    def non_trainable_variables(self):
        return self._without(super().non_trainable_variables)

    def _without(self, variables):
        if not self.left_out:
            return variables
        return [v for v in variables if id(v) not in self.left_out]

    @property
    def metrics(self):
        if self.objective is None:
            return []
        return (
            self._test_trackers if self._evaluating else self._train_trackers
        )

    # Training

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
    ):
        """Trains on rows.

        Args:
            dataset: list of dicts, Hugging Face `Dataset`, Grain
                `MapDataset` or `IterDataset`, or the path of a `.jsonl` or
                `.parquet` file.
            batch_size: int, rows of one optimizer step; packed rows where
                `packing`.
            epochs: int.
            shuffle: bool; the order is drawn anew for every epoch.
            seed: int, of the order and of dropout.
            packing: bool, put several sequences in a row. They do not see
                each other.
            validation_data: a dataset, evaluated after every epoch.
            callbacks: list of callbacks. `kpt.callbacks.Checkpoint` makes
                the run go on where it stopped.
            verbose: `"auto"`, 0 (silent), 1 (progress bar) or 2 (a line an
                epoch).
            skip_steps: ints, steps whose batches are left out, counted as
                `step` in the metrics log. The steps after them keep their
                numbers and their batches.

        Returns:
            A Keras `History` of the means over each epoch.

        Raises:
            ValueError: for rows, arguments or callbacks that cannot be
                trained on, before anything is compiled.
        """
        self._assert_compile_called("fit")
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        callbacks = list(callbacks or [])
        processes.need_distribution()
        verbose = verbose if processes.is_first() else 0
        checks.fit_arguments(self, batch_size, epochs, packing, callbacks)
        examples, report = self.prepare(dataset)
        validation = None
        if validation_data is not None:
            held_out, shown = self.prepare(validation_data, "validation_data")
            _show(shown, verbose)
        self.data_report = report
        streamed = self.data_report.rows == 0
        if not streamed:
            _show(report, verbose)
        _show(self._padding(batch_size, packing), verbose)
        optimizers.refresh_masters(self.optimizer, self.trainable_variables)
        self._begin_run(examples, callbacks, verbose)
        if validation_data is not None:
            validation = self._batches(held_out, batch_size, shuffle=False)
        self.data = self._batches(
            examples,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            packing=packing,
            skip_steps=skip_steps,
        )
        self.data.keep_rows(processes.own_rows())
        self._seed = seed
        self._consumed, self._step_base = 0, self.step
        self._skip_steps = frozenset(skip_steps)
        self._resumed, self._epochs = False, epochs
        self._initial_epoch, self._digest = None, None
        self._logs_are_read = checks.reads_logs(callbacks)
        if verbose:
            callbacks.insert(0, Progress(verbose))
        if processes.count() > 1:
            callbacks.insert(0, ProcessGroup())
        # What others count at the end of an epoch is in the checkpoint.
        callbacks.sort(key=lambda c: isinstance(c, Checkpoint))
        self.fit_callbacks = callbacks
        try:
            with checks.epochs_may_end():
                return super().fit(
                    x=self.data,
                    epochs=epochs,
                    verbose=0,
                    callbacks=callbacks,
                    validation_data=validation,
                )
        finally:
            if streamed:
                _show(report, verbose)
            # Keras ends no callback when training raises.
            for callback in callbacks:
                if hasattr(callback, "close"):
                    callback.close()

    def _begin_run(self, examples, callbacks, verbose):
        """What a task does before its first step."""

    def _batches(self, examples, batch_size, **kwargs):
        return self.plain_batches(examples, batch_size, **kwargs)

    def plain_batches(self, examples, batch_size, **kwargs):
        """Batches of `Example`s: a `BatchAdapter`, whose arguments it takes.

        Args:
            examples: list of `Example`s.
            batch_size: int.
            **kwargs: see `BatchAdapter`.
        """
        kwargs.setdefault("sequence_length", self.sequence_length)
        micro = self.micro_batch_size if self.compiled else None
        multiple = padding.row_multiple(micro, batch_size)
        kwargs.setdefault("row_multiple", multiple)
        return BatchAdapter(
            examples,
            batch_size=batch_size,
            pad_id=self.tokenizer.pad_token_id if self.tokenizer else 0,
            **kwargs,
        )

    def evaluate(
        self,
        dataset=None,
        batch_size=8,
        *,
        num_samples=0,
        max_tokens=256,
        verbose=0,
        **kwargs,
    ):
        """The loss and metrics of rows, as means over all their tokens.

        Args:
            dataset: as in `fit`.
            batch_size: int, rows at once.
            num_samples: int, how many of the first rows are completed too:
                greedily, from what precedes their first token with loss.
            max_tokens: int, the most new tokens of such a completion.
            verbose: as in Keras.

        Returns:
            A dict of floats: `loss`, the loss's metrics and, of a loss of
            tokens, `perplexity`; where rows were completed also `samples`, a
            list of dicts with `prompt`, `completion` and `reference`, the
            row's own.
        """
        self._assert_compile_called("evaluate")
        # `fit` calls with Keras's own arguments.
        dataset = kwargs.pop("x", dataset)
        examples = []
        if not isinstance(dataset, BatchAdapter):
            examples, report = self.prepare(dataset)
            _show(report, verbose or bool(report.dropped or report.cut))
            checks.positive_int("batch_size", batch_size)
            _show(self._padding(batch_size), verbose)
            dataset = self._batches(examples, batch_size, shuffle=False)
        dataset.keep_rows(processes.own_rows())
        callbacks = kwargs.pop("callbacks", None)
        kwargs = {
            k: v
            for k, v in kwargs.items()
            if k in ("_use_cached_eval_dataset", "steps")
        }
        self._evaluating = True
        try:
            with checks.epochs_may_end():
                logs = super().evaluate(
                    x=dataset,
                    verbose=verbose if processes.is_first() else 0,
                    callbacks=callbacks,
                    return_dict=True,
                    **kwargs,
                )
        finally:
            # Keras does so only where nothing was raised.
            self.jax_state_sync()
            self._evaluating = False
        if isinstance(self.objective, TokenLoss):
            logs = {**logs, "perplexity": float(np.exp(logs["loss"]))}
        if num_samples:
            logs["samples"] = self._generator.samples(
                examples, num_samples, max_tokens
            )
        return logs

    # What Keras's loop calls

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return

        shardings = None
        if keras.distribution.distribution() is not None:
            trainable, _, optimizer, metrics = self._get_state_sharding_spec()
            shardings = dict(
                trainable=trainable, optimizer=optimizer, metrics=metrics
            )
        self.compiled_train_step = run = self.step_program(shardings)

        def train_function(state, iterator):
            trainable, frozen, optimizer, metrics = state
            # Whatever raises from here on, the weights are not lost.
            self._hand_back(state)
            try:
                batch = next(iterator)
            except StopIteration:
                if self._consumed or not self._resumed:
                    raise
                # A stream was stopped behind the last batch of an epoch: it
                # has none left, but Keras wants one step in each.
                self._resumed = False
                return {}, state
            consumed = self._consumed + 1
            step = self._step_base + self.data.step_of(consumed)
            changing = {
                "trainable": trainable,
                "optimizer": optimizer,
                "metrics": metrics,
                "step": np.int32(step),
                "seed": np.int32(self._seed),
            }
            logs, new = run(changing, self.held(frozen), batch)
            self._consumed, self.step, self.step_logs = consumed, step, logs
            state = (
                new["trainable"],
                frozen,
                new["optimizer"],
                new["metrics"],
            )
            # Keras turns logs into numbers at once, which waits for the
            # device: they are handed out only where somebody reads them.
            return (logs if self._logs_are_read else {}), state

        self.train_function = train_function

    def step_program(self, shardings=None):
        """`train_step` as `fit` runs it.

        Args:
            shardings: dict of lists of `jax.sharding.Sharding` by the names
                of what a step changes, or `None` without a distribution.

        Returns:
            A function of `(changing, held, batch)`, jitted unless
            `run_eagerly`: the parts of the `state` of `train_step` that a
            step changes, with `step` and `seed`, and those that it reads.
            It gives `(logs, changed)`.
        """

        def run(changing, held, batch):
            logs, state = self.train_step({**changing, **held}, batch)
            names = ("trainable", "optimizer", "metrics")
            return logs, {k: state[k] for k in names}

        if self.run_eagerly:
            return run
        out = None if shardings is None else (None, shardings)
        # What is held is an argument that is not donated: it is neither
        # copied nor a constant of the program.
        return jax.jit(run, donate_argnums=0, out_shardings=out)

    def make_test_function(self, force=False):
        if self.test_function is not None and not force:
            return

        def run(metrics, trainable, held, batch):
            state = dict(trainable=trainable, metrics=metrics, **held)
            _, state = self.test_step(state, batch)
            return state["metrics"]

        if not self.run_eagerly:
            run = jax.jit(run, donate_argnums=0)

        def test_function(state, iterator):
            trainable, frozen, metrics = state
            self._hand_back((trainable, frozen, None, metrics))
            batch = next(iterator)
            metrics = run(metrics, trainable, self.held(frozen), batch)
            return {}, (trainable, frozen, metrics)

        self.test_function = test_function

    def _get_metrics_result_or_logs(self, logs):
        # Keras compares names to guess whether `logs` are its own metrics. A
        # mean of nothing (a learning rate that Optax does not tell) is no 0.
        del logs
        return {t.name: t.result() for t in self.metrics if float(t.count)}

    def _hand_back(self, state):
        """Lets Keras put back the variables that it has emptied."""
        names = ("trainable", "non_trainable", "optimizer", "metrics")
        self._jax_state = {
            f"{name}_variables": values for name, values in zip(names, state)
        }

    def held(self, frozen):
        """What a step reads and never changes: a part of its `state`."""
        return {"frozen": frozen}

    # The steps

    def train_step(self, state, batch):
        """One optimizer step, a pure function: the door for one's own step.

        Args:
            state: dict of lists of arrays: `trainable`, `frozen`,
                `optimizer`, `metrics`, in the order of the task's variables;
                `step` and `seed`, int32 scalars; and what else is `held`.
            batch: dict of arrays with a leading `rows` axis.

        Returns:
            `(logs, state)`: a dict of scalars, and the state with
            `trainable`, `optimizer` and `metrics` renewed.
        """
        gradients, logs = self.loss_and_gradients(state, batch)
        return self.apply_gradients(state, gradients, logs)

    def loss_and_gradients(self, state, batch):
        """Gradients of the batch's loss, added up over its micro-batches.

        Args:
            state, batch: as in `train_step`.

        Returns:
            `(gradients, logs)`: a list of arrays like `state["trainable"]`,
            float32 where there are micro-batches, and a dict of scalars:
            `loss`, `num_tokens`, `loss_weight` (what the loss was divided
            by) and the metrics of the loss.
        """
        normalizers = self.objective.normalizers(batch)
        key = self._dropout_key(state)

        def share(trainable, rows):
            with self.using_weights(trainable, state["frozen"]):
                now = {**state, "trainable": trainable}
                return self.row_terms(now, rows, normalizers, key)

        def sums(rows):
            (loss, metrics), gradients = jax.value_and_grad(
                share, has_aux=True
            )(state["trainable"], rows)
            return (loss, gradients), metrics

        count = self._micro_batches(batch)
        if count > 1 and self.objective.batch_coupled:
            loss, gradients, metrics = batch_coupled.loss_and_gradients(
                self, state, batch, key, count
            )
        else:
            (loss, gradients), metrics = steps.over_micro_batches(
                sums, batch, count
            )
        return gradients, {
            "loss": loss,
            "num_tokens": jnp.sum(batch["segment_ids"] > 0).astype("float32"),
            "loss_weight": sum(normalizers.values()),
            **{k: reductions.metric_value(m) for k, m in metrics.items()},
        }

    def apply_gradients(self, state, gradients, logs):
        """Clips, applies the optimizer and records the step.

        A step whose gradient is not finite, or whose batch has no token with
        loss, or that `teaches` nothing by the logs, changes nothing and
        counts as `skipped`.

        Args:
            state: as in `train_step`.
            gradients: list of arrays like `state["trainable"]`.
            logs: dict of scalars as `loss_and_gradients` gives it.

        Returns:
            `(logs, state)`, as `train_step` does.
        """
        logs = dict(logs)
        weight = logs.pop("loss_weight", 1.0)
        norm = steps.global_norm(gradients)
        keep = jnp.isfinite(norm) & (weight > 0) & logs.pop("teaches", True)
        logs["grad_norm"] = norm
        before = state
        logs["skipped"] = 1.0 - keep.astype("float32")
        gradients = steps.clip(gradients, norm, self.max_grad_norm)
        state = steps.apply_optimizer(
            self.optimizer, self._masters, state, gradients, keep
        )
        late = getattr(self.optimizer, "rate_is_of_last_update", False)
        logs["learning_rate"] = self._learning_rate(state if late else before)
        weights = dict.fromkeys(self.objective.metric_names, weight)
        metrics = steps.update_metrics(
            self._train_trackers,
            state["metrics"],
            logs,
            {**weights, "loss": weight},
        )
        return logs, {**state, "metrics": metrics}

    def test_step(self, state, batch):
        """Loss and metrics of a batch, without gradients or dropout."""
        normalizers = self.objective.normalizers(batch)

        def share(rows):
            with self.using_weights(state["trainable"], state["frozen"]):
                return self.row_terms(
                    state, rows, normalizers, None, differentiable=False
                )

        count = self._micro_batches(batch)
        if count > 1 and self.objective.batch_coupled:
            loss, metrics = batch_coupled.loss_alone(self, state, batch, count)
        else:
            loss, metrics = steps.over_micro_batches(share, batch, count)
        logs = {k: reductions.metric_value(m) for k, m in metrics.items()}
        logs["loss"] = loss
        weight = sum(normalizers.values())
        values = steps.update_metrics(
            self._test_trackers,
            state["metrics"],
            logs,
            dict.fromkeys(logs, weight),
        )
        return logs, {**state, "metrics": values}

    def row_terms(self, state, rows, normalizers, key, differentiable=True):
        """Loss and metrics of some rows, within `using_weights`.

        Args:
            state: as in `train_step`.
            rows: dict of arrays, some rows of the whole batch.
            normalizers, key, differentiable: as in `steps.row_terms`.

        Returns:
            `(loss, metrics)`, as `steps.row_terms` does.
        """
        del state
        return steps.row_terms(self, rows, normalizers, key, differentiable)

    def token_outputs(self, batch, mask, needs, **settings):
        """What a loss reads beside the batch.

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
            needs=[n for n in needs if n in steps.POLICY_OUTPUTS],
            temperature=self.temperature,
            **settings,
        )

    @contextlib.contextmanager
    def using_weights(self, trainable, frozen):
        """A scope in which the task's variables have these values.

        One thread at a time is in it.
        """
        mapping = list(zip(self.trainable_variables, trainable))
        mapping += list(zip(self.non_trainable_variables, frozen))
        with steps.TRACING, keras.StatelessScope(state_mapping=mapping):
            yield

    def _dropout_key(self, state):
        if self.adapter is None or not self.adapter.lora.dropout:
            return None
        return jax.random.fold_in(jax.random.key(state["seed"]), state["step"])

    def _micro_batches(self, batch):
        if self.micro_batch_size is None:
            return 1
        size = padding.micro_rows(
            self.micro_batch_size, self.rows_together(batch)
        )
        return max(batch["token_ids"].shape[0] // size, 1)

    def rows_together(self, batch):
        """Rows of a batch that are one example: neighbours, never split."""
        return 1

    def filled_rows(self, batch_size, packing=False):
        """How many rows a whole batch fills, and how many an example has.

        Args:
            batch_size: int.
            packing: as in `fit`.

        Returns:
            `(rows, together)`; rows are `None` where that depends on the
            lengths of sequences.
        """
        return batch_size, 1

    def _padding(self, batch_size, packing=False):
        filled, together = self.filled_rows(batch_size, packing)
        return padding.describe(self.micro_batch_size, filled, together)

    def _learning_rate(self, state):
        mapping = list(zip(self.optimizer.variables, state["optimizer"]))
        with keras.StatelessScope(state_mapping=mapping):
            return jnp.asarray(self.optimizer.learning_rate, "float32")


def _show(report, verbose):
    if verbose and report is not None and processes.is_first():
        print(report, flush=True)
