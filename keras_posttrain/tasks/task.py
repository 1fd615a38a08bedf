import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.callbacks.progress import Progress
from keras_posttrain.data.pipeline import BatchAdapter
from keras_posttrain.losses import Loss, reductions
from keras_posttrain.models import guards, huggingface, loading, presets
from keras_posttrain.models.linear import flatten_linear_layers
from keras_posttrain.models.lora import Adapter, lora_from_config, read_peft
from keras_posttrain.models.policy import Policy
from keras_posttrain.tasks import checks
from keras_posttrain.tasks import step as steps
from keras_posttrain.tasks.generation import Generator


class Task(keras.Model):
    """A causal language model with something to train it for.

    The base of every task: it holds the model, the tokenizer and the
    adapter, and keeps what `keras.Model` offers (`compile`, `fit`,
    `evaluate`, callbacks, history, distribution) around a training step of
    its own. Use a subclass such as `kpt.SFTTask`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        lora: `kpt.LoRA`, or `None` to train all weights.
        reference: `None`; only tasks whose loss compares with a reference
            take one.
        sequence_length: int, tokens a row may hold.
        truncation: `"error"`, `"drop"` or `"cut"`: what becomes of a row
            that is longer.
        chat_template: str or `None`, a Jinja2 template instead of the
            preset's own.
        remat: `"none"`, or `"full"` to keep only the inputs of decoder
            layers for the backward pass.
        chunk_size: int or `None`, tokens whose logits exist at once.
    """

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
        remat="none",
        chunk_size=None,
        name=None,
    ):
        checks.task_arguments(lora, sequence_length, truncation, remat)
        if reference is not None:
            raise ValueError(
                f"{type(self).__name__} compares with no reference model; "
                "leave `reference` out. "
                f"Received: reference={reference!r}"
            )
        guards.check_model(causal_lm, sequence_length)
        loading.repair(causal_lm)
        super().__init__(name=name)
        self.causal_lm = causal_lm
        self.tokenizer = tokenizer
        if chat_template is not None:
            self._need_tokenizer("chat_template")
            self.tokenizer = tokenizer.with_chat_template(chat_template)
        self.sequence_length = sequence_length
        self.truncation = truncation
        self.remat, self.chunk_size = remat, chunk_size
        flatten_linear_layers(causal_lm.backbone)
        self.adapter = Adapter(causal_lm, lora) if lora else None
        self._make_policy()
        self._generator = Generator(self)
        self.data_report = None
        self.data = None
        self.objective = None
        self.step = 0
        self.step_logs = {}
        self._seed = 0
        self._digest = None
        self._keep_metrics = False
        self._evaluating = False
        self._log_probs = None
        self.built = True

    @classmethod
    def from_preset(
        cls,
        preset,
        *,
        lora=None,
        reference=None,
        sequence_length=1024,
        dtype=None,
        truncation="error",
        chat_template=None,
        remat="none",
        load_weights=True,
        **kwargs,
    ):
        """Loads a model and makes a task of it.

        Args:
            preset: what KerasHub's `from_preset` takes: a preset name, an
                `hf://` or `kaggle://` handle, or a local directory of
                KerasHub's or Hugging Face's format. A Hugging Face
                directory's own config and tokenizer are honoured.
            dtype: `"float32"`, `"bfloat16"` or `"mixed_bfloat16"`. Trained
                weights that are kept in bfloat16 have float32 masters.
            load_weights: bool, `False` for random weights.
            lora, reference, sequence_length, truncation, chat_template,
                remat, **kwargs: see the class.

        Returns:
            The task.

        Raises:
            ValueError: where the preset is unknown, or its model cannot be
                built faithfully; the message names the field.
        """
        checks.task_arguments(lora, sequence_length, truncation, remat)
        causal_lm = presets.load_causal_lm(
            preset, dtype=dtype, load_weights=load_weights
        )
        task = cls(
            causal_lm,
            presets.load_tokenizer(preset),
            lora=lora,
            reference=reference,
            sequence_length=sequence_length,
            truncation=truncation,
            chat_template=chat_template,
            remat=remat,
            **kwargs,
        )
        task.preset = str(preset)
        return task

    preset = None

    # Setting up

    def _make_policy(self):
        self.policy = Policy(
            self.causal_lm,
            adapter=self.adapter,
            remat=self.remat,
            chunk_size=self.chunk_size,
        )

    def default_loss(self):
        """The loss that `compile(loss="auto")` stands for."""
        raise NotImplementedError

    def prepare(self, dataset, name="dataset"):
        """Rows to examples: `(examples, report)`."""
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
                at once. Gradients are added up over a batch's micro-batches;
                the result is that of the whole batch.
            max_grad_norm: float or `None`: gradients whose global norm is
                larger are scaled down to it.
            run_eagerly: bool, for debugging.
        """
        loss = self.default_loss() if loss == "auto" else loss
        checks.compile_arguments(loss, Loss, micro_batch_size, max_grad_norm)
        rate = 2e-4 if self.adapter is not None else 2e-5
        optimizer = optimizers.get(optimizer, learning_rate=rate)
        optimizers.check(optimizer)
        super().compile(
            optimizer=optimizer, loss=None, run_eagerly=run_eagerly
        )
        self.objective = loss
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self._masters = optimizers.build(optimizer, self.trainable_variables)
        names = list(steps.STEP_METRICS) + list(loss.metric_names)
        self._train_trackers = [keras.metrics.Mean(name=n) for n in names]
        names = ["loss"] + list(loss.metric_names)
        self._test_trackers = [keras.metrics.Mean(name=n) for n in names]

    @property
    def metrics(self):
        if self.objective is None:
            return []
        return (
            self._test_trackers if self._evaluating else self._train_trackers
        )

    # The steps

    def train_step(self, state, batch):
        """One optimizer step, a pure function: the door for one's own step.

        Args:
            state: dict of lists of arrays: `trainable`, `frozen`,
                `optimizer`, `metrics`, in the order of the task's variables;
                and `step` and `seed`, int32 scalars.
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
                return steps.row_terms(self, rows, normalizers, key)

        def sums(rows):
            (loss, metrics), gradients = jax.value_and_grad(
                share, has_aux=True
            )(state["trainable"], rows)
            return (loss, gradients), metrics

        (loss, gradients), metrics = steps.over_micro_batches(
            sums, batch, self._micro_batches(batch)
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
        loss, changes nothing and counts as `skipped`.

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
        keep = jnp.isfinite(norm) & (weight > 0)
        logs["grad_norm"] = norm
        logs["learning_rate"] = self._learning_rate(state)
        logs["skipped"] = 1.0 - keep.astype("float32")
        gradients = steps.clip(gradients, norm, self.max_grad_norm)
        state = steps.apply_optimizer(
            self.optimizer, self._masters, state, gradients, keep
        )
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
                return steps.row_terms(
                    self, rows, normalizers, None, differentiable=False
                )

        loss, metrics = steps.over_micro_batches(
            share, batch, self._micro_batches(batch)
        )
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

    def using_weights(self, trainable, frozen):
        """A scope in which the task's variables have these values."""
        mapping = list(zip(self.trainable_variables, trainable))
        mapping += list(zip(self.non_trainable_variables, frozen))
        return keras.StatelessScope(state_mapping=mapping)

    def _dropout_key(self, state):
        if self.adapter is None or not self.adapter.lora.dropout:
            return None
        return jax.random.fold_in(jax.random.key(state["seed"]), state["step"])

    def _micro_batches(self, batch):
        if self.micro_batch_size is None:
            return 1
        rows = batch["token_ids"].shape[0]
        return max(rows // self.micro_batch_size, 1)

    def _learning_rate(self, state):
        mapping = list(zip(self.optimizer.variables, state["optimizer"]))
        with keras.StatelessScope(state_mapping=mapping):
            return jnp.asarray(self.optimizer.learning_rate, "float32")

    # What Keras's loop calls

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return

        def run(changing, frozen, batch):
            logs, state = self.train_step(
                {**changing, "frozen": frozen}, batch
            )
            names = ("trainable", "optimizer", "metrics")
            return logs, {k: state[k] for k in names}

        shardings = None
        if keras.distribution.distribution() is not None:
            trainable, _, optimizer, metrics = self._get_state_sharding_spec()
            new = dict(
                trainable=trainable, optimizer=optimizer, metrics=metrics
            )
            shardings = (None, new)
        # The frozen weights are an argument that is not donated: they are
        # neither copied nor constants of the program.
        if not self.run_eagerly:
            run = jax.jit(run, donate_argnums=0, out_shardings=shardings)
        self.compiled_train_step = run

        def train_function(state, iterator):
            trainable, frozen, optimizer, metrics = state
            try:
                batch = next(iterator)
            except StopIteration:
                self._hand_back(state)
                if self._consumed or not self._resumed:
                    raise
                # A stream was stopped behind the last batch of an epoch: it
                # has none left, but Keras wants one step in each.
                self._resumed = False
                return {}, state
            self._consumed += 1
            self.step = self._step_base + self.data.step_of(self._consumed)
            changing = {
                "trainable": trainable,
                "optimizer": optimizer,
                "metrics": metrics,
                "step": np.int32(self.step),
                "seed": np.int32(self._seed),
            }
            logs, new = run(changing, frozen, batch)
            self.step_logs = logs
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

    def make_test_function(self, force=False):
        if self.test_function is not None and not force:
            return

        def run(metrics, trainable, frozen, batch):
            state = dict(trainable=trainable, frozen=frozen, metrics=metrics)
            _, state = self.test_step(state, batch)
            return state["metrics"]

        if not self.run_eagerly:
            run = jax.jit(run, donate_argnums=0)

        def test_function(state, iterator):
            trainable, frozen, metrics = state
            batch = next(iterator)
            metrics = run(metrics, trainable, frozen, batch)
            return {}, (trainable, frozen, metrics)

        self.test_function = test_function

    def _get_metrics_result_or_logs(self, logs):
        # Keras compares names to guess whether `logs` are its own metrics. A
        # mean of nothing (a learning rate that Optax does not tell) is no 0.
        del logs
        return {
            t.name: t.result() if float(t.count.value) else float("nan")
            for t in self.metrics
        }

    def _hand_back(self, state):
        """Lets Keras put back the variables that it has emptied."""
        names = ("trainable", "non_trainable", "optimizer", "metrics")
        self._jax_state = {
            f"{name}_variables": values for name, values in zip(names, state)
        }

    # Resuming

    def at_epoch_end(self):
        """Whether the step just done was the last of its epoch."""
        size = self.data.num_batches
        if not size:
            return False
        done = self.data.state_after(self._consumed)["step"]
        left = range(done + 1, -(-done // size) * size + 1)
        return all(step in self._skip_steps for step in left)

    def training_state(self):
        """What a checkpoint holds: `(arrays, meta)`, meta fit for JSON."""
        arrays = {
            "trainable": self.trainable_variables,
            "optimizer": self.optimizer.variables,
            "metrics": self._train_trackers_variables(),
        }
        arrays = {
            name: {str(i): v.value for i, v in enumerate(variables)}
            for name, variables in arrays.items()
        }
        meta = {
            "step": self.step,
            "seed": self._seed,
            "data": self.data.state_after(self._consumed),
            "run": self.fingerprint(),
        }
        return arrays, meta

    def _train_trackers_variables(self):
        return [v for t in self._train_trackers for v in t.variables]

    def fingerprint(self):
        """What must be the same for a run to be the same run."""
        lora = self.adapter.lora if self.adapter else None
        shapes = [list(v.shape) for v in self.trainable_variables]
        # As JSON gives it back: tuples are lists.
        return json.loads(
            json.dumps(
                {
                    "task": type(self).__name__,
                    "model": type(self.causal_lm).__name__,
                    "config": guards.architecture(self.causal_lm),
                    "lora": dataclasses.asdict(lora) if lora else None,
                    "trainable shapes (checksum)": hashlib.sha256(
                        repr(shapes).encode()
                    ).hexdigest()[:16],
                    "frozen weights (checksum)": self._frozen_digest(),
                    "optimizer": type(self.optimizer).__name__,
                    "optimizer_variables": len(self.optimizer.variables),
                    "loss": repr(self.objective),
                    "max_grad_norm": self.max_grad_norm,
                }
            )
        )

    def _frozen_digest(self):
        """A checksum of the frozen weights, which no checkpoint holds."""
        if self._digest is None:

            def digest(values):
                total = jnp.uint32(0)
                for i, x in enumerate(values):
                    bits = steps.bits(x)
                    place = jnp.arange(bits.size, dtype="uint32") * 2 + i
                    total += jnp.sum(bits.reshape(-1) * (place + 1))
                return total

            values = [v.value for v in self.non_trainable_variables]
            self._digest = int(jax.jit(digest)(values)) if values else 0
        return self._digest

    def check_training_state(self, meta, directory):
        """Refuses the checkpoint of another run, naming both."""
        ours, theirs = self.fingerprint(), meta["run"]
        differing = [k for k in ours if ours[k] != theirs.get(k)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"{str(directory)!r} holds a run whose {key} differs from "
                f"this task's. There: {theirs.get(key)!r}. "
                f"Here: {ours[key]!r}. Use another directory, or the "
                "settings of that run."
            )
        if meta["seed"] != self._seed:
            raise ValueError(
                f"{str(directory)!r} holds a run with seed={meta['seed']}. "
                f"Received: seed={self._seed}. Use that seed, or another "
                "directory."
            )

    def restore_training_state(self, arrays, meta):
        """Puts the task where `training_state` was taken."""
        self.data.set_state(meta["data"])
        groups = {
            "trainable": self.trainable_variables,
            "optimizer": self.optimizer.variables,
            "metrics": self._train_trackers_variables(),
        }
        for name, variables in groups.items():
            for i, variable in enumerate(variables):
                variable.assign(arrays[name][str(i)])
        self.step = meta["step"]
        self._step_base = meta["step"] - meta["data"]["step"]
        self._consumed, self._resumed = 0, True
        # Running means go on in the middle of an epoch.
        self._keep_metrics = meta["in_epoch"]
        self._initial_epoch = meta["epoch"]
        if meta["stopped"]:
            self._initial_epoch = self._epochs

    def reset_metrics(self):
        if self._keep_metrics and not self._evaluating:
            self._keep_metrics = False
            return
        super().reset_metrics()

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
        checks.fit_arguments(self, batch_size, epochs, packing, callbacks)
        examples, report = self.prepare(dataset)
        validation = None
        if validation_data is not None:
            held_out, _ = self.prepare(validation_data, "validation_data")
            validation = self._batches(held_out, batch_size, shuffle=False)
        self.data_report = report
        if verbose:
            print(report, flush=True)
        self.data = self._batches(
            examples,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            packing=packing,
            skip_steps=skip_steps,
        )
        self._seed = seed
        self._consumed, self._step_base = 0, self.step
        self._skip_steps = frozenset(skip_steps)
        self._resumed, self._epochs = False, epochs
        self._initial_epoch, self._digest = None, None
        self._logs_are_read = checks.reads_logs(callbacks)
        if verbose:
            callbacks.insert(0, Progress(verbose))
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
            # Keras ends no callback when training raises.
            for callback in callbacks:
                if hasattr(callback, "close"):
                    callback.close()

    def _batches(self, examples, batch_size, **kwargs):
        pad = self.tokenizer.pad_token_id if self.tokenizer else 0
        return BatchAdapter(
            examples,
            batch_size=batch_size,
            sequence_length=self.sequence_length,
            pad_id=pad,
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
            A dict of floats: `loss`, `perplexity` and the loss's metrics;
            where rows were completed also `samples`, a list of dicts with
            `prompt`, `completion` and `reference`, the row's own.
        """
        self._assert_compile_called("evaluate")
        # `fit` calls with Keras's own arguments.
        dataset = kwargs.pop("x", dataset)
        examples = []
        if not isinstance(dataset, BatchAdapter):
            examples, _ = self.prepare(dataset)
            checks.divides(self, batch_size)
            dataset = self._batches(examples, batch_size, shuffle=False)
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
                    verbose=verbose,
                    callbacks=callbacks,
                    return_dict=True,
                    **kwargs,
                )
        finally:
            self._evaluating = False
        logs = {**logs, "perplexity": float(np.exp(logs["loss"]))}
        if num_samples:
            logs["samples"] = self._generator.samples(
                examples, num_samples, max_tokens
            )
        return logs

    # Using the model

    def log_probs(self, rows, batch_size=8):
        """The log-probability of every token given those before it.

        Args:
            rows: rows of any type that the task trains on.
            batch_size: int, rows at once.

        Returns:
            A list of float32 arrays, one a row and as long as its tokens;
            the first entry, which nothing predicts, is 0.
        """
        examples, _ = self.prepare(rows, "rows", train_on="all")
        checks.divides(self, batch_size)
        batches = self._batches(examples, batch_size, shuffle=False)
        if self._log_probs is None:

            def run(trainable, frozen, batch):
                with self.using_weights(trainable, frozen):
                    mask = batch["segment_ids"] > 0
                    outputs = self.policy.token_outputs(
                        batch, mask, differentiable=False
                    )
                return outputs["per_token_logps"]

            self._log_probs = jax.jit(run)
        state = (
            [v.value for v in self.trainable_variables],
            [v.value for v in self.non_trainable_variables],
        )
        out = []
        for batch in batches.get_jax_iterator():
            values = np.asarray(self._log_probs(*state, batch))
            lengths = (batch["segment_ids"] > 0).sum(axis=1)
            out += [v[:n] for v, n in zip(values, lengths) if n]
        return out

    def generate(
        self,
        prompts,
        *,
        max_tokens=256,
        temperature=1.0,
        top_k=None,
        top_p=None,
        stop_token_ids="auto",
        seed=None,
        return_token_ids=False,
    ):
        """Completes prompts.

        Args:
            prompts: a str, a list of messages, `{"prompt_ids": [...]}`, or a
                list of these.
            max_tokens: int, the most new tokens.
            temperature: float, 0 for the most probable token always.
            top_k: int or `None`, sample among this many tokens.
            top_p: float or `None`, sample among the fewest tokens that have
                this much probability together.
            stop_token_ids: ints that end a completion; `"auto"` is the
                tokenizer's set; `None` is none.
            seed: int or `None`, for repeatable samples.
            return_token_ids: bool, lists of ids instead of text.

        Returns:
            The completion of each prompt, without the prompt; one, not a
            list, for one prompt.
        """
        return self._generator(
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token_ids=stop_token_ids,
            seed=seed,
            return_token_ids=return_token_ids,
        )

    # Saving

    def _need_adapter(self, method):
        if self.adapter is None:
            raise ValueError(
                f"`{method}` needs an adapter; make the task with "
                "`lora=kpt.LoRA(...)`, or use `export` for whole weights."
            )

    def _need_tokenizer(self, what):
        if self.tokenizer is None:
            raise ValueError(
                f"`{what}` needs a tokenizer, and this task has none. Pass "
                "`tokenizer=`, or make the task with `from_preset`."
            )

    def save_adapter(self, path):
        """Writes the adapter in PEFT's format; it loads in PEFT and vLLM."""
        self._need_adapter("save_adapter")
        self.adapter.save(path, base_name=self.preset)

    def load_adapter(self, path):
        """Takes the weights of a PEFT adapter.

        A task without an adapter gets one of the file's settings, as long as
        it is not compiled.

        Args:
            path: str or path of a PEFT adapter directory.
        """
        if self.adapter is None:
            if self.compiled:
                raise ValueError(
                    "This task was compiled to train all weights. Load the "
                    "adapter before `compile`, or make the task with "
                    "`lora=kpt.LoRA(...)`."
                )
            config, _ = read_peft(path)
            lora = lora_from_config(config, path)
            self.adapter = Adapter(self.causal_lm, lora)
            self._make_policy()
        self.adapter.load(path)

    def merge_adapter(self):
        """Adds the adapter to the weights; training is refused until
        `unmerge_adapter`, which restores them bit for bit."""
        self._need_adapter("merge_adapter")
        self.adapter.merge()

    def unmerge_adapter(self):
        """Takes back `merge_adapter`."""
        self._need_adapter("unmerge_adapter")
        self.adapter.unmerge()

    def export(self, path, *, dtype=None, max_shard_bytes=5 * 2**30):
        """Writes a Hugging Face directory, the adapter merged in.

        Args:
            path: str or path, new or an earlier export.
            dtype: `None` for that of the weights, or `"float32"`,
                `"bfloat16"`, `"float16"`.
            max_shard_bytes: int, the most bytes in a safetensors file.
        """
        values = self.adapter.merged_values() if self.adapter else None
        huggingface.export(
            self.causal_lm,
            path,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            values=values,
            tokenizer=self.tokenizer,
        )

    def save_to_preset(self, path):
        """Writes a KerasHub preset, the adapter merged in.

        Args:
            path: str or path of a new directory.
        """
        presets.save_to_preset(
            self.causal_lm, path, self.adapter, self.tokenizer
        )

    def load_weights(self, *args, **kwargs):
        checks.refuse_keras_weights("load_weights")

    def save_weights(self, *args, **kwargs):
        checks.refuse_keras_weights("save_weights")

    def call(self, batch):
        """Log-probabilities of a batch's tokens, `(rows, length)`."""
        mask = batch["segment_ids"] > 0
        return self.policy.token_outputs(batch, mask)["per_token_logps"]
