"""A run of rollouts: what one is made of, and each of its parts."""

import contextlib
import dataclasses
import random
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import optimizers
from keras_posttrain.callbacks.checkpoint import Checkpoint
from keras_posttrain.callbacks.process_group import Together
from keras_posttrain.callbacks.progress import Progress
from keras_posttrain.data.rows.prompts import PromptOrder, prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.distribution import processes
from keras_posttrain.losses import reductions
from keras_posttrain.rewards.reward import name as reward_name
from keras_posttrain.rewards.run import check_rewards
from keras_posttrain.rl import checks
from keras_posttrain.rl.batches import rollout_layout
from keras_posttrain.rl.collector import Collector, Drawn
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import padding
from keras_posttrain.training.frozen import Reference
from keras_posttrain.training.means import Means


class RolloutRun(Task):
    """The parts of the loop of `RolloutTask`, and a run's state."""

    auto_learning_rates = (1e-5, 1e-6)
    # Of all metrics, those in the progress bar.
    shown_metrics = (
        "loss",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "entropy",
        "kl",
        "grad_norm",
        "pass@1",
    )
    skipped_because = (
        "their gradient was not finite or the completions of each prompt "
        "earned the same"
    )
    # Set by `compile` and `fit`.
    rewards = rollout = reference = order = last_rollout = None
    ahead, max_staleness = None, 0
    kl_in_reward = False
    collector = Collector
    _means = None
    _running = False

    def __init__(self, causal_lm, tokenizer=None, *, reference=None, **kwargs):
        super().__init__(causal_lm, tokenizer, **kwargs)
        # Behind a function it is no sublayer.
        self._given_reference = lambda: reference

    # The data

    def prepare(self, dataset, name="dataset", train_on="auto", **overrides):
        """Rows with a completion, for `log_probs`."""
        settings = self.row_settings(name, **overrides)
        return prepare_sft(dataset, settings, train_on)

    def prepare_prompts(self, dataset, name="dataset"):
        """Rows to prompts: `(prompts, report)`."""
        length, limit = checks.room(self, self.max_completion_length)
        prompts, report = prepare_prompts(
            dataset,
            self.row_settings(name),
            max_prompt_length=length,
            limit=limit,
        )
        check_rewards(self.rewards, list(prompts[0].columns), f"`{name}`")
        return prompts, report

    def prepare_held_out(self, dataset):
        """`validation_data` of `fit`, and its report."""
        return self.prepare_prompts(dataset, "validation_data")

    # Before the first rollout

    def _set_sampling(
        self,
        *,
        rollout,
        num_generations,
        max_completion_length,
        temperature,
        stop_token_ids,
        num_minibatches,
        num_iterations,
        old_log_probs,
        mask_truncated_completions,
    ):
        """What `compile` says of the samples, checked and kept."""
        checks.counts(
            num_generations=num_generations,
            max_completion_length=max_completion_length,
            num_minibatches=num_minibatches,
            num_iterations=num_iterations,
        )
        checks.sampling(temperature)
        checks.old_log_probs(old_log_probs)
        checks.room(self, max_completion_length)
        self.rollout = checks.engine(rollout)
        self.num_generations = num_generations
        self.max_completion_length = max_completion_length
        self.temperature = float(temperature)
        self.stop_token_ids = checks.stop_token_ids(
            stop_token_ids,
            self.tokenizer,
            self.causal_lm.backbone.vocabulary_size,
        )
        self.num_minibatches = num_minibatches
        self.num_iterations = num_iterations
        self.old_log_probs = old_log_probs
        self.mask_truncated_completions = bool(mask_truncated_completions)

    def _begin(self, dataset, batch_size, order, packing, share, verbose):
        """Everything of a run that is known before its first rollout."""
        prompts, self.data_report = self.prepare_prompts(dataset)
        show(self.data_report, verbose)
        layout = self._layout(prompts, batch_size, packing, share)
        filled = self._sequences(batch_size), packing or share
        show(self._padding(*filled), verbose)
        optimizers.refresh_masters(self.optimizer, self.trainable_variables)
        self.order = self.data = PromptOrder(
            prompts, batch_size=batch_size, **order
        )
        self._collector = self.collector(self, layout)
        self.data.epoch_size = self._epoch_size(len(prompts), batch_size)
        self._seed, self._step_base = order["seed"], self.step
        self._initial_epoch = self._digest = None
        self._consumed, self._resumed = 0, False
        self._means, self.at_rest = Means(), True
        self.stop_training, self.last_rollout = False, None

    def _layout(self, prompts, batch_size, packing, share):
        longest = max(len(p.token_ids) for p in prompts)
        sequences = self._sequences(batch_size)
        return rollout_layout(
            num_sequences=sequences,
            sequence_length=self.sequence_length,
            token_budget=checks.token_budget(
                packing or share,
                self.sequence_length,
                longest + self.max_completion_length,
            ),
            share_prefix=share,
            num_generations=self.num_generations,
            row_multiple=padding.row_multiple(
                self.micro_batch_size,
                *self.filled_rows(sequences, packing or share),
            ),
            pad_id=self.tokenizer.pad_token_id if self.tokenizer else 0,
        )

    def _sequences(self, batch_size):
        """Completions of an optimizer step."""
        return checks.minibatches(
            batch_size, self.num_generations, self.num_minibatches
        )

    def filled_rows(self, batch_size, packing=False):
        return None if packing else batch_size, 1

    def _num_steps(self, num_prompts):
        """Optimizer steps of a rollout of so many prompts."""
        completions = num_prompts * self.num_generations
        sequences = self._collector.layout.num_sequences
        return -(-completions // sequences) * self.num_iterations

    def _epoch_size(self, num_prompts, batch_size):
        """Steps of an epoch; `None` where it depends on rewards."""
        if self.max_resamples:
            return None
        whole, rest = divmod(num_prompts, batch_size)
        return whole * self._num_steps(batch_size) + self._num_steps(rest)

    def _callback_list(self, callbacks, epochs, verbose):
        if verbose:
            callbacks = [Progress(verbose), *callbacks]
        if processes.count() > 1:
            callbacks = [Together(), *callbacks]
        # What others count at the end of an epoch is in the checkpoint.
        callbacks = sorted(callbacks, key=lambda c: isinstance(c, Checkpoint))
        self.fit_callbacks = callbacks
        compares = "ref_per_token_logps" in self.objective.needs
        if (compares or self.kl_in_reward) and self.reference is None:
            self.reference = Reference(
                self,
                self._given_reference(),
                moves=any(hasattr(c, "moves_reference") for c in callbacks),
            )
            if verbose and self.reference.num_bytes:
                size = self.reference.num_bytes / 2**20
                print(f"reference: {size:,.1f} MiB", flush=True)
        return keras.callbacks.CallbackList(
            [self.rollout, *callbacks],
            add_history=True,
            model=self,
            epochs=epochs,
            steps=self.data.epoch_size,
            verbose=0,
        )

    # The parts of a rollout

    @contextlib.contextmanager
    def _overlapping(self, max_staleness):
        """A run whose rollouts may be begun before their turn."""
        loss, corrected = self.objective, self.objective
        if max_staleness:
            corrected = checks.corrected(loss, self.old_log_probs)
        if corrected is not loss:
            self._set_objective(corrected)
        self.max_staleness = max_staleness
        self.rollout.overlaps = max_staleness > 0
        try:
            yield
        finally:
            ahead, self.ahead = self.ahead, None
            if ahead is not None:
                ahead.close()
            self.rollout.overlaps = False
            if corrected is not loss:
                self._set_objective(loss)

    def next_rollout(self):
        """The next rollout, sampled and judged: a `Drawn`, or `None` at the
        end of the epoch."""
        if self.ahead is not None:
            drawn = self.ahead.next()
        else:
            drawn = self.judge(self.draw(self.step))
        self.step = drawn.step
        self.order.use(drawn.taken)
        return drawn if drawn.prompts else None

    def _next_or_saved(self):
        """The next rollout; one that fails costs no step before it."""
        states = random.getstate(), np.random.get_state()
        try:
            return self.next_rollout()
        except Exception:
            # What its rewards have drawn they draw again.
            random.setstate(states[0])
            np.random.set_state(states[1])
            for callback in self.fit_callbacks:
                if hasattr(callback, "save_before_error"):
                    callback.save_before_error()
            raise

    def draw(self, step):
        """Samples for the next prompts.

        Args:
            step: int, steps of the run before.

        Returns:
            A `Drawn`, without prompts at the end of the epoch.
        """
        while prompts := self.order.take(self.order.batch_size):
            steps = self.steps_of(prompts)
            if self._skip_steps.isdisjoint(range(step + 1, step + steps + 1)):
                return self._collector.draw(prompts, step)
            step += steps
        return Drawn(step, taken=self.order.taken)

    def judge(self, drawn):
        """Judges what was sampled."""
        return self._collector.judge(drawn) if drawn.prompts else drawn

    def generate_samples(self, requests):
        """The engine's completions of requests, a list of lists."""
        engine = self.rollout if self.ahead is None else self.ahead
        return engine.generate(requests)

    def steps_of(self, prompts):
        """Optimizer steps of a rollout of these prompts."""
        return self._num_steps(len(prompts))

    def collect(self, drawn):
        """Puts together what was sampled.

        Args:
            drawn: `Drawn`, judged.

        Returns:
            List of batches, one for each optimizer step.
        """
        collected = self._collector.build(drawn)
        self.at_rest = False
        self.last_rollout = collected.table
        self._rollout_metrics = collected.metrics
        return collected.batches * self.num_iterations

    def update(self, batch):
        """One optimizer step; a dict of floats, its metrics."""
        start = time.perf_counter()
        self.make_train_function()
        groups = {
            "trainable": self.trainable_variables,
            "optimizer": self.optimizer.variables,
            "metrics": self._train_trackers_variables(),
        }
        state = {k: [v.value for v in group] for k, group in groups.items()}
        state["step"] = np.int32(self.step + 1)
        state["seed"] = np.int32(self._seed)
        frozen = [v.value for v in self.non_trainable_variables]
        logs, new = self.compiled_train_step(
            state, self.held(frozen), self.to_device(batch)
        )
        for name, variables in groups.items():
            for variable, value in zip(variables, new[name]):
                variable.assign(value)
        # One transfer, which waits for the step.
        logs = {k: float(v) for k, v in jax.device_get(logs).items()}
        self.step += 1
        rollout, self._rollout_metrics = (
            self._rollout_metrics,
            {
                # Seconds are told once, with the rollout's first step.
                k: v
                for k, v in self._rollout_metrics.items()
                if not k.startswith("time/")
            },
        )
        return logs | rollout | {"time/train": time.perf_counter() - start}

    def to_device(self, batch):
        """A batch with its rows spread over the mesh, where there is one."""
        return processes.put_rows(batch)

    def sync(self):
        """Gives the engine the new weights: the rollout is done with."""
        start = time.perf_counter()
        if self.ahead is None:
            self.rollout.sync_weights()
        else:
            self.ahead.sync()
        self.at_rest = True
        seconds = time.perf_counter() - start
        return {"time/sync": seconds, **self.rollout.metrics()}

    def _record(self, logs):
        self.step_logs = logs
        own = {t.name for t in self._train_trackers}
        self._means.add({k: v for k, v in logs.items() if k not in own})

    def _epoch_logs(self):
        return self._get_metrics_result_or_logs({}) | self._means.results()

    def _validate(self, prompts, callbacks, settings):
        callbacks.on_test_begin()
        logs = self.evaluate(
            prompts, self.order.batch_size, seed=self._seed, **settings
        )
        callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}

    @contextlib.contextmanager
    def sampling(self):
        """The engine made ready, where it is not by a run of `fit`."""
        if self._running:
            yield
            return
        self.rollout.set_model(self)
        self.rollout.start()
        try:
            self.rollout.sync_weights()
            yield
        finally:
            self.rollout.stop()

    def note_skipped_rewards(self, name, entry, step):
        """Says that rewards were left out."""
        print(
            f"Step {step + 1}: {entry['skipped']} rewards of {name!r} "
            f"were left out. {entry['error']}",
            flush=True,
        )

    # The step

    def loss_and_gradients(self, state, batch):
        gradients, logs = super().loss_and_gradients(state, batch)
        advantages = batch["advantages"]
        if advantages.shape == batch["sequence_mask"].shape:
            advantages = reductions.spread(advantages, batch["segment_ids"])
        # With no advantage there is nothing to learn: neither momentum nor
        # the KL term, whose gradient may be rounding alone, moves a weight.
        used = (batch["completion_mask"] != 0) & (advantages != 0)
        return gradients, {**logs, "teaches": jnp.any(used)}

    # The state of a run

    def at_epoch_end(self):
        return self.order.left == 0

    def data_state(self):
        return {"step": self.step - self._step_base, **self.order.state()}

    def reset_metrics(self):
        if not self._keep_metrics:
            self._means = Means()
        super().reset_metrics()

    def training_state(self):
        arrays, meta = super().training_state()
        if self.reference is not None:
            arrays["reference"] = self.reference.state()
        kind, keys, place, has_gauss, gauss = np.random.get_state()
        meta["random"] = random.getstate()
        meta["np_random"] = [kind, keys.tolist(), place, has_gauss, gauss]
        meta["means"] = self._means.sums
        return arrays, meta

    def restore_training_state(self, arrays, meta):
        super().restore_training_state(arrays, meta)
        if self.reference is not None:
            self.reference.set_state(arrays["reference"])
        version, keys, gauss = meta["random"]
        random.setstate((version, tuple(keys), gauss))
        np.random.set_state(meta["np_random"])
        self._means = Means(meta["means"])

    def fingerprint(self):
        # First: the loss of runs that overlap is another too.
        return (
            {"max_staleness": self.max_staleness}
            | super().fingerprint()
            | {
                "rewards": list(self.reward_names),
                "reward_weights": None
                if self.reward_weights is None
                else self.reward_weights.tolist(),
                "advantages": _settings_of(self.advantages),
                "num_generations": self.num_generations,
                "max_completion_length": self.max_completion_length,
                "temperature": self.temperature,
                "stop_token_ids": sorted(self.stop_token_ids),
                "num_minibatches": self.num_minibatches,
                "num_iterations": self.num_iterations,
                "old_log_probs": self.old_log_probs,
                "mask_truncated_completions": self.mask_truncated_completions,
                "max_resamples": self.max_resamples,
            }
        )


def _settings_of(function):
    """What a function is in any process: its settings, or its name."""
    is_settings = dataclasses.is_dataclass(function)
    return repr(function) if is_settings else reward_name(function)


def show(report, verbose):
    if verbose and report is not None and processes.is_first():
        print(report, flush=True)
