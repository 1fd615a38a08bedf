"""A training loop of the user's own, from the pieces that `fit` runs."""

import contextlib
import pathlib
import random

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import _remote, optimizers
from keras_posttrain.callbacks import checkpoint_files
from keras_posttrain.callbacks.checks import positive
from keras_posttrain.callbacks.directories import check_name
from keras_posttrain.distribution import processes
from keras_posttrain.losses import FunctionLoss, Loss
from keras_posttrain.models import device_transfer, quantized, sharding
from keras_posttrain.rollout import NativeRollout
from keras_posttrain.tasks.rollout_task import RolloutTask
from keras_posttrain.tasks.sft_task import SFTTask
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import checks, keras_fit, padding, run_state
from keras_posttrain.training.datum import Datum, check_data, make_batch
from keras_posttrain.training.step import compile_step, counters
from keras_posttrain.training.weights import ModelWeights

TOKENS = {"token_ids", "segment_ids", "positions", "completion_mask"}


class ForwardBackward:
    """The metrics of one call of `Loop.forward_backward`.

    Attributes:
        metrics: dict of scalars, JAX arrays that are computed when they are
            read: `loss`, `num_tokens` and the metrics of the loss.
    """

    def __init__(self, compute):
        self._compute, self._logs = compute, None

    @property
    def metrics(self):
        if self._logs is None:
            self._compute()
        hidden = ("loss_weight", "has_signal")
        return {k: v for k, v in self._logs.items() if k not in hidden}


class Loop:
    """A loop of your own over the steps that `fit` compiles.

    For training that `fit` does not offer: `sample`, compute a reward as you
    like, add up gradients by `forward_backward`, and update the weights by
    `optim_step`. These are the primitives of Tinker
    (https://tinker-docs.thinkingmachines.ai), on one's own devices. Programs,
    memory and sharding are those of `fit`; the task may be used as usual
    afterwards.

    With one `forward_backward` before each `optim_step` the weights are those
    of `fit` on the same batches, bit for bit: both run as one program, and
    the metrics are those of that program if they are read after the step.
    With several, their gradients are added up and divided once by what all
    of them are normalized by, as if their data were one batch. That takes a
    loss with one normalizer: losses that couple a batch, and router losses,
    refuse a second call.

    What `fit` computes between sampling and a step is yours here:

    - `rewards`, `episode`, `advantages` and the KL divergence in the reward
      of a task that samples are not used. A loss with a `beta` reads
      `ref_per_token_logps` of each `kpt.Datum`.
    - `kpt.PPOTask` reads `advantages`, `returns`, `old_values` (`values`) and
      `old_per_token_logps` of each `kpt.Datum`, see
      `kpt.losses.generalized_advantages`. Its loss has two normalizers, so a
      step takes one call.
    - `kpt.DistillTask`, `kpt.DPOTask` and `kpt.RewardTask` take rows. To
      distil from samples, pass them as rows with their `token_ids` and
      `completion_mask`. A policy loss of distillation is not supported.
    - A Loop runs in one process.

    Args:
        task: a compiled task. Its optimizer, clipping, micro-batches,
            adapter and reference are used.
        engine: `kpt.rollout.Rollout` that `sample` uses, or `None` for the
            built-in engine.
        packing: bool, whether sequences share rows.
        share_prefix: bool, whether neighbours with the same prompt store it
            once. For lists of `kpt.Datum`.
        seed: int, of dropout.

    Example:

    ```python
    def reward(token_ids):
        return float("4" in task.tokenizer.decode(token_ids))

    with kpt.Loop(task) as loop:
        for step in range(2):
            request = kpt.rollout.Request(
                ids, num_generations=8, max_tokens=8, seed=step
            )
            [samples] = loop.sample([request])
            rewards = np.array([reward(s.token_ids) for s in samples])
            data = [
                kpt.Datum(ids, s.token_ids, advantages=r - rewards.mean())
                for s, r in zip(samples, rewards)
            ]
            loop.forward_backward(data)
            print(loop.optim_step()["grad_norm"])
    ```
    """

    def __init__(
        self, task, *, engine=None, packing=False, share_prefix=False, seed=0
    ):
        if not isinstance(task, Task):
            raise ValueError(
                f"`task` must be a task of this library. Received: {task!r}"
            )
        task._assert_compile_called("Loop")
        if processes.count() > 1:
            raise ValueError(
                "A Loop runs in one process, on all of its devices. "
                f"Received: {processes.count()} processes. Train by `fit`."
            )
        checks.flag("packing", packing)
        checks.flag("share_prefix", share_prefix)
        checks.not_negative("seed", seed)
        checks.may_train(task.policy, packing or share_prefix)
        self.task, self.engine = task, engine or NativeRollout()
        self.packing, self.share_prefix = packing, share_prefix
        self.seed = seed
        self._is_open = self._is_sent = False
        self._programs = {}
        self._begin_step()

    def __enter__(self):
        task = self.task
        if task.loop is not None:
            raise ValueError(
                "A task has one Loop at a time. Leave the other one first."
            )
        optimizers.refresh_masters(task.optimizer, task.trainable_variables)
        task.run_state.begin(self.seed)
        task.reset_metrics()
        self.engine.set_model(task)
        self.engine.start()
        task.loop, self._is_open = self, True
        return self

    def __exit__(self, *error):
        self._is_open = self._is_sent = False
        self.task.loop = None
        self.engine.stop()
        if error[0] is None:
            # As `fit` ends: with `use_ema` weights become their averages.
            self.task.optimizer.finalize_variable_values(
                self.task.trainable_variables
            )
        self._begin_step()

    @property
    def step(self):
        """Int, optimizer steps done."""
        return self.task.run_state.step

    # The primitives

    def forward_backward(self, data, loss=None):
        """Adds the gradients of a loss to those of the next `optim_step`.

        Args:
            data: list of `kpt.Datum`; or rows, as for `fit`, of a task that
                trains on rows; or a batch, a dict of arrays as
                `Task.train_step` gets.
            loss: `kpt.losses.Loss`, or `None` for the task's. A step is
                compiled for each loss that differs: make a `FunctionLoss`
                of one function, not of a new `lambda` in each step.

        Returns:
            A `ForwardBackward`, whose `metrics` are those of these data.

        Raises:
            ValueError: for data that cannot be trained on, or where calls
                cannot be added up.
        """
        self._check_open("forward_backward")
        if loss is not None and not isinstance(loss, Loss):
            raise ValueError(
                "`loss` must be a `kpt.losses.Loss`, such as "
                "`kpt.losses.FunctionLoss(f)`, or None. "
                f"Received: loss={loss!r}"
            )
        batch = self._batch(data, loss)
        if self._calls:
            self._check_adds_up(batch, loss)
            if self._pending is not None:
                self._add_up()
        batch = self._numbered(batch)
        self._calls, self._loss = self._calls + 1, loss
        found = ForwardBackward(self._add_up)
        self._pending = (batch, loss, found)
        return found

    def optim_step(self, learning_rate=None):
        """Updates the weights by the gradients since the last step.

        Args:
            learning_rate: float of this step and of those after it, or
                `None` to leave it, or the optimizer's schedule, as it is.

        Returns:
            A dict of scalars, JAX arrays: `loss`, `grad_norm`,
            `learning_rate`, `num_tokens`, `skipped` (1 where gradients were
            not finite, or no token had loss: nothing was changed) and, after
            one call of `forward_backward`, the metrics of the loss.
        """
        self._check_open("optim_step")
        if not self._calls:
            raise ValueError(
                "There are no gradients to step by. Call "
                "`forward_backward(data)` first."
            )
        if learning_rate is not None:
            self._set_learning_rate(learning_rate)
        if self._sums is None:
            batch, loss, result = self._pending
            logs = self._run(("step", loss), self._train_step(loss), batch)
            names = ("grad_norm", "learning_rate", "skipped")
            result._logs = {k: v for k, v in logs.items() if k not in names}
        else:
            if self._pending is not None:
                self._add_up()
            logs = self._run("apply", self._apply, self._divided())
        state = self.task.run_state
        state.step += 1
        state.logs = logs
        self._is_sent = False
        self._begin_step()
        return logs

    def sample(self, requests, **kwargs):
        """Samples from the weights of the last `optim_step`.

        Args:
            requests: list of `kpt.rollout.Request`.
            **kwargs: other arguments of `kpt.rollout.Rollout.generate`.

        Returns:
            A list of lists of `kpt.rollout.Completion`, one for each request.
        """
        self._check_open("sample")
        if not self._is_sent:
            self.engine.sync_weights()
            self._is_sent = True
        return self.engine.generate(requests, **kwargs)

    def log_probs(self, data):
        """Computes log-probabilities under the present weights.

        Args:
            data: list of `kpt.Datum`, or rows.

        Returns:
            A list of float32 arrays: of a `Datum` those of its completion's
            tokens, of a row as `Task.log_probs`.
        """
        self._check_open("log_probs")
        if not _is_data(data):
            return self.task.log_probs(data)
        return self._token_arrays("per_token_logps", data, self._logps)

    def values(self, data):
        """Computes the values of a `kpt.PPOTask` under the present weights.

        Args:
            data: list of `kpt.Datum`.

        Returns:
            A list of float32 arrays, of each `Datum` the value before each
            of its completion's tokens: `old_values` of PPO's losses.

        Raises:
            ValueError: for a task without a value model.
        """
        self._check_open("values")
        if getattr(self.task, "value_model", None) is None:
            raise ValueError(
                f"{type(self.task).__name__} has no value model, as a "
                "`kpt.PPOTask` has."
            )
        if not _is_data(data):
            raise ValueError(
                "`data` must be a list of `kpt.Datum`. "
                f"Received: {data!r:.200}"
            )
        return self._token_arrays("values", data, self._values)

    def save_state(self, directory):
        """Saves weights, optimizer, step and random state, to resume from.

        Args:
            directory: str, path or address of the folder to write, as
                `kpt.callbacks.Checkpoint` writes one for each of its steps.
        """
        self._check_open("save_state")
        check_name(directory)
        if self._calls:
            raise ValueError(
                "Gradients are not saved. Call `optim_step` before "
                "`save_state`."
            )
        kind, keys, place, has_gauss, gauss = np.random.get_state()
        meta = {
            "step": self.step,
            "seed": self.seed,
            "run": self.task.fingerprint(),
            "random": random.getstate(),
            "np_random": [kind, keys.tolist(), place, has_gauss, gauss],
        }
        arrays = self._saved().arrays()
        with _remote.written(directory, device_transfer.on_first) as path:
            checkpoint_files.write(pathlib.Path(path), arrays, meta)

    def load_state(self, directory):
        """Continues from a state that `save_state` or `Checkpoint` wrote.

        Args:
            directory: str, path or address, such as
                `"run/checkpoints/500"`.

        Raises:
            ValueError: for a folder of another model, adapter, loss or
                optimizer, or that cannot be read.
        """
        self._check_open("load_state")
        check_name(directory)
        with _remote.read(directory) as path:
            self._load_state(pathlib.Path(path))

    def _load_state(self, path):
        if not isinstance(self.task, RolloutTask):
            # Its reference or teachers, which a first call would make.
            self.task.begin_run([[], []], 1, ())
        saved = self._saved()
        meta = checkpoint_files.read_meta(path)
        ours = self.task.fingerprint()
        run_state.check(meta, ours, meta["seed"], path)
        saved.assign(checkpoint_files.read_arrays(path, saved.arrays(), meta))
        if "random" in meta:
            version, keys, gauss = meta["random"]
            random.setstate((version, tuple(keys), gauss))
            np.random.set_state(meta["np_random"])
        self.task.run_state.step = meta["step"]
        self.seed = self.task.run_state.seed = meta["seed"]
        self._is_sent = False
        self._begin_step()

    # Batches

    def _batch(self, data, loss):
        """Returns a dict of arrays."""
        if isinstance(data, dict) and set(data) >= TOKENS:
            return data
        if _is_data(data):
            if not isinstance(self.task, (SFTTask, RolloutTask)):
                raise ValueError(
                    f"{type(self.task).__name__} compares or reads more than "
                    "a Datum has. Pass rows, as to `fit`."
                )
            used = self.task.objective if loss is None else loss
            return self._data_batch(data, used.by_sequence).arrays
        if isinstance(self.task, RolloutTask):
            raise ValueError(
                f"{type(self.task).__name__} trains on samples. Pass a list "
                f"of `kpt.Datum`. Received: {type(data).__name__}."
            )
        return self._row_batch(data)

    def _data_batch(self, data, by_sequence=False):
        task = self.task
        vocabulary_size = task.causal_lm.backbone.vocabulary_size
        check_data(data, task.sequence_length, vocabulary_size)
        return make_batch(
            data,
            self.packing,
            self.share_prefix,
            sequence_length=task.sequence_length,
            row_multiple=padding.row_multiple(task.micro_batch_size),
            pad_id=padding.token_id(task.tokenizer, vocabulary_size),
            by_sequence=by_sequence,
        )

    def _row_batch(self, rows):
        task = self.task
        examples, _ = task.prepare(rows, "data")
        examples = list(examples)
        if not examples:
            raise ValueError("`data` has no row that can be trained on.")
        task.begin_run([examples, []], len(examples), ())
        batches = list(
            task.make_batches(
                examples, len(examples), shuffle=False, packing=self.packing
            ).get_numpy_iterator()
        )
        return batches[0]

    def _numbered(self, batch):
        """Numbers the sequences after those of earlier calls of the step.

        Dropout masks depend on the number: they are those of one batch.
        """
        if "sequence_ids" not in batch:
            return batch
        first, ids = self._num_sequences, batch["sequence_ids"]
        self._num_sequences += int(np.max(ids)) + 1
        return batch | {"sequence_ids": ids + first} if first else batch

    # Steps

    def _begin_step(self):
        """Forgets gradients."""
        self._calls, self._loss = 0, None
        self._num_sequences = 0
        # The sums of calls, and the last call as long as it was not run.
        self._sums = self._pending = None

    def _train_step(self, loss):
        """Returns a function `(state, batch) -> (logs, state)`."""
        if loss is None:
            return self.task.train_step
        step = self._step_of(loss)

        def train_step(state, batch):
            return step.apply_gradients(
                state, *step.loss_and_gradients(state, batch)
            )

        return train_step

    def _step_of(self, loss):
        """Returns the `TrainStep` with a loss."""
        task = self.task
        if loss is None:
            return task._step
        before, task.objective = task.objective, loss
        try:
            return task.make_step()
        finally:
            task.objective = before

    def _run(self, name, function, batch):
        """Runs a compiled step on the task's arrays; returns its logs."""
        task = self.task
        if name not in self._programs:
            self._programs[name] = compile_step(
                function,
                keras_fit.state_shardings(task),
                task.run_eagerly,
                options=quantized.compiler_options(task.causal_lm),
            )
        groups = self._saved().variables()
        changing = {k: [v.value for v in group] for k, group in groups.items()}
        changing |= counters(self.step + 1, self.seed)
        if name != "apply":
            batch = processes.put_rows(batch)
        with self._names_extras():
            logs, new = self._programs[name](changing, self._held(), batch)
        for part, variables in groups.items():
            for variable, value in zip(variables, new[part]):
                variable.assign(value)
        return logs

    def _held(self):
        frozen = [v.value for v in self.task.non_trainable_variables]
        return self.task._step.held(frozen)

    def _add_up(self):
        """Computes the gradients of the pending call and adds them."""
        batch, loss, result = self._pending
        name, step = ("gradients", loss), self._step_of(loss)
        if name not in self._programs:
            function = step.loss_and_gradients
            if loss is None:
                function = self.task.loss_and_gradients
            self._programs[name] = jax.jit(function)
        weights = ModelWeights.of(self.task).state()
        state = weights | self._held() | counters(self.step + 1, self.seed)
        with self._names_extras():
            gradients, logs = self._programs[name](
                state, processes.put_rows(batch)
            )
        weight = logs["loss_weight"]
        if self._is_sum():
            weight = jnp.ones((), "float32")
        if "add" not in self._programs:
            self._programs["add"] = jax.jit(_add, donate_argnums=0)
        counted = {
            "loss": logs["loss"] * weight,
            "num_tokens": logs["num_tokens"],
            "loss_weight": logs["loss_weight"],
            "has_signal": logs.get("has_signal", True),
        }
        scaled = gradients, counted
        if self._sums is None:
            zeros = [jnp.zeros(g.shape, "float32") for g in gradients]
            self._sums = (zeros, jax.tree.map(jnp.zeros_like, counted))
        self._sums = self._programs["add"](self._sums, scaled, weight)
        result._logs, self._pending = logs, None

    def _is_sum(self):
        """Returns whether the loss is a sum, which is never divided."""
        used = self.task.objective if self._loss is None else self._loss
        return isinstance(used, FunctionLoss) and used.is_sum

    def _divided(self):
        """Returns gradients and logs of all calls."""
        gradients, counted = self._sums
        weight = counted["loss_weight"]
        divisor = jnp.where((weight == 0) | self._is_sum(), 1.0, weight)
        logs = {**counted, "loss": counted["loss"] / divisor}
        return {"gradients": [g / divisor for g in gradients], "logs": logs}

    def _apply(self, state, batch):
        return self.task.apply_gradients(
            state, batch["gradients"], batch["logs"]
        )

    def _check_adds_up(self, batch, loss):
        """Raises a `ValueError` where a second call cannot be added."""
        used = self.task.objective if loss is None else loss
        reason = None
        if used.batch_coupled:
            reason = f"{type(used).__name__} couples the sequences of a batch"
        elif self.task.router_loss is not None:
            reason = "the balance of routers is that of a whole batch"
        elif len(jax.eval_shape(used.normalizers, batch)) > 1:
            reason = f"{type(used).__name__} has several normalizers"
        elif self._loss != loss:
            reason = "the calls before it had another loss"
        if reason is not None:
            raise ValueError(
                "A second `forward_backward` before `optim_step` cannot be "
                f"added up: {reason}. Pass all data at once; "
                "`micro_batch_size` in `compile` bounds the memory."
            )

    # The task

    def _saved(self):
        step = self.task._step
        models = [x for each in step.companions.values() for x in each]
        return run_state.Saved.of(
            step, {f"{x.role}_{i}": x for i, x in enumerate(models)}
        )

    def _token_arrays(self, name, data, function):
        """Returns what a function computes of the tokens of completions."""
        batch = self._data_batch(data)
        if name not in self._programs:
            self._programs[name] = jax.jit(
                function, out_shardings=sharding.of_results()
            )
        weights = ModelWeights.of(self.task).values()
        arrays = processes.put_rows(batch.arrays)
        found = self._programs[name](*weights, arrays)
        batch.arrays[name] = np.asarray(found)
        return [
            batch.tokens(name, i)[len(datum.prompt_ids) :].astype("float32")
            for i, datum in enumerate(data)
        ]

    def _values(self, trainable, frozen, batch):
        with self.task.using_weights(trainable, frozen):
            mask = batch["segment_ids"] > 0
            return self.task.token_outputs(batch, mask, ("values",))["values"]

    def _logps(self, trainable, frozen, batch):
        with self.task.using_weights(trainable, frozen):
            found = self.task.policy.token_outputs(
                batch,
                batch["segment_ids"] > 0,
                temperature=self.task.temperature,
                differentiable=False,
            )
        return found["per_token_logps"]

    def _set_learning_rate(self, value):
        optimizer = self.task.optimizer
        value = positive("learning_rate", value, float)
        rate = getattr(optimizer, "_learning_rate", None)
        if not isinstance(rate, keras.Variable):
            raise ValueError(
                "`learning_rate` cannot be set: the optimizer's follows "
                f"{type(rate).__name__}. Give the optimizer a number, or "
                f"leave it out here. Received: learning_rate={value}"
            )
        optimizer.learning_rate = value

    def _check_open(self, method):
        if not self._is_open:
            raise ValueError(
                f"`{method}` is for the body of `with kpt.Loop(task) as "
                "loop:`, which gives the task back when it ends."
            )

    @contextlib.contextmanager
    def _names_extras(self):
        """Says which input of a loss is missing."""
        try:
            yield
        except KeyError as error:
            raise ValueError(
                f"The loss reads {error} of the batch, which the data lack. "
                f"Pass it to each `kpt.Datum`, such as {error.args[0]}=..., "
                "or choose another loss."
            ) from error


def _is_data(data):
    if not isinstance(data, (list, tuple)) or not data:
        return False
    found = [isinstance(x, Datum) for x in data]
    if any(found) and not all(found):
        at = found.index(not found[0])
        raise ValueError(
            "`data` must be a list of `kpt.Datum` alone, or of rows. "
            f"Received: {type(data[0]).__name__} at 0 and "
            f"{type(data[at]).__name__} at {at}."
        )
    return found[0]


def _add(total, found, weight):
    """Adds gradients, times a weight, and counts."""
    (gradients, counted), (more, new) = total, found
    gradients = [
        a + b.astype("float32") * weight for a, b in zip(gradients, more)
    ]
    summed = {k: counted[k] + new[k] for k in counted if k != "has_signal"}
    signal = jnp.logical_or(counted["has_signal"], new["has_signal"])
    return gradients, summed | {"has_signal": signal}
