"""The loop of reinforcement learning: sample, judge, train, and again."""

import dataclasses

import keras

from keras_posttrain.data.rows.prompts import Prompt
from keras_posttrain.distribution import processes
from keras_posttrain.rl import checks as rollout_checks
from keras_posttrain.rl.async_sampler import Ahead
from keras_posttrain.rl.evaluation import evaluate_prompts
from keras_posttrain.tasks.rollout_run import RolloutRun, show
from keras_posttrain.training import checks


class RolloutTask(RolloutRun):
    """A task that trains on what the policy itself has sampled.

    The base of `kpt.GRPOTask`. Rows are `{"prompt"}`, a string or a list of
    messages, or `{"prompt_ids"}`; all other columns reach the rewards.

    A step none of whose completions has an advantage, because all of each
    group earned the same, teaches nothing: it changes no weight, by no
    momentum, decay or KL term, and counts as `skipped`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised;
            rewards are given ids then in place of text.
        reference: a preset or a KerasHub `CausalLM`, or `None` for the
            policy when training began. Only a loss with a KL term asks for
            one.
        **kwargs: see `kpt.Task`.
    """

    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        rewards,
        reward_weights=None,
        advantages="auto",
        rollout="auto",
        num_generations=8,
        max_completion_length=256,
        temperature=1.0,
        top_k=None,
        top_p=None,
        min_p=None,
        stop_token_ids="auto",
        num_minibatches=1,
        num_iterations=1,
        old_log_probs="trainer",
        mask_truncated_completions=False,
        max_resamples=0,
        reward_timeout=None,
        on_reward_error="raise",
        micro_batch_size=None,
        max_grad_norm=1.0,
        run_eagerly=False,
    ):
        """Sets what training needs.

        Args:
            optimizer: as in `kpt.Task.compile`; `"auto"` is AdamW with a
                learning rate of 1e-5 with an adapter and 1e-6 without.
            loss: `"auto"` or a `kpt.losses.PolicyLoss`.
            rewards: list of functions, see `kpt.rewards.Reward`.
            reward_weights: list of floats, one a reward; 1 by default.
            advantages: `"auto"` for what the loss is meant for, an object
                such as `kpt.losses.GroupAdvantages()`, or a function.
            rollout: `"auto"` for `kpt.rollout.NativeRollout()`, or an
                engine.
            num_generations: int, completions a prompt.
            max_completion_length: int, in tokens.
            temperature: float, of the samples and of the log-probabilities
                that are trained.
            top_k, top_p, min_p: refused; the trained distribution would not
                be the sampled one.
            stop_token_ids: ints that end a completion; `"auto"` is the
                tokenizer's set; `None` is none.
            num_minibatches: int, optimizer steps that a rollout is cut into.
            num_iterations: int, how often a rollout is gone through.
            old_log_probs: `"trainer"`, computed again before the first
                update where a rollout has several, or `"rollout"`, as the
                engine reports them.
            mask_truncated_completions: bool, whether completions that were
                cut by length carry no loss.
            max_resamples: int, how often groups whose completions all earn
                the same are replaced by groups of further prompts (dynamic
                sampling); 0 for never. Where the bound is reached, or the
                epoch has no more prompts, such groups fill the rest.
            reward_timeout: float or `None`, seconds that a call of a reward
                may take.
            on_reward_error: `"raise"`, or `"skip"` to count what failed as
                not judged.
            micro_batch_size: int or `None`: completions, packed rows where
                `packing`, that pass through the model at once.
            max_grad_norm, run_eagerly: as in `kpt.Task.compile`.
        """
        loss = self.default_loss() if loss == "auto" else loss
        rollout_checks.policy_loss(loss)
        if getattr(loss, "max_completion_length", 0) is None:
            loss = dataclasses.replace(
                loss, max_completion_length=max_completion_length
            )
        rollout_checks.not_negative("max_resamples", max_resamples)
        rollout_checks.whole_distribution(top_k, top_p, min_p)
        self._set_sampling(
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
        names = rollout_checks.reward_settings(
            rewards, reward_timeout, on_reward_error
        )
        reward_weights = rollout_checks.weights(reward_weights, names)
        advantages = rollout_checks.advantages(
            advantages, loss, num_generations
        )
        super().compile(
            optimizer,
            self.whole_loss(loss),
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            run_eagerly=run_eagerly,
        )
        self.rewards, self.reward_names = tuple(rewards), tuple(names)
        self.reward_weights = reward_weights
        self.advantages = advantages
        self.kl_in_reward = rollout_checks.takes_kl(advantages)
        self.max_resamples = max_resamples
        self.reward_timeout = reward_timeout
        self.on_reward_error = on_reward_error
        self.reference = None

    def whole_loss(self, loss):
        """What is minimised, where that is more than the policy's loss."""
        return loss

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
        share_prefix=False,
        validation_data=None,
        validation_generations=1,
        validation_temperature="auto",
        callbacks=None,
        verbose="auto",
        skip_steps=(),
        max_staleness=0,
    ):
        """Samples from prompts and trains on what was sampled.

        Args:
            dataset: list of dicts, Hugging Face `Dataset`, Grain
                `MapDataset`, or the path of a `.jsonl` or `.parquet` file.
            batch_size: int, prompts of one rollout.
            epochs: int.
            shuffle: bool; the order is drawn anew for every epoch.
            seed: int, of the order, the samples and dropout.
            packing: `False`, `True` to put several completions, each with
                its prompt, in a row of `sequence_length` tokens, or an int,
                the tokens of such a row. It changes no result.
            share_prefix: bool, pack and hold a prompt once for all its
                completions in a row: less work where prompts are long. It
                changes no result either.
            validation_data: a dataset of prompts, evaluated after every
                epoch.
            validation_generations, validation_temperature: as
                `num_generations` and `temperature` in `evaluate`.
            callbacks: list of callbacks. `kpt.callbacks.Checkpoint` makes
                the run go on where it stopped, between two rollouts.
            verbose: `"auto"`, 0 (silent), 1 (progress bar) or 2 (a line an
                epoch).
            skip_steps: ints, steps that are left out, counted as `step` in
                the metrics log: the rollouts that they belong to, with all
                their steps.
            max_staleness: int, how many rollouts old the weights may be that
                drew a token when it is trained on. At 0 sampling, judging
                and training take turns, and a run is the same whenever it
                is run. Above, up to so many rollouts of an epoch are sampled
                and judged while earlier ones are trained on: rewards are
                called from several threads at once, a sample that is being
                drawn when the weights change goes on with the new ones, the
                loss gets an `ImportanceCorrection` where it has none, and
                two runs are not the same. A run that goes on from a
                checkpoint samples anew what was not trained on yet.

        Returns:
            A Keras `History` of the means over each epoch.

        Raises:
            ValueError: for rows, arguments or callbacks that cannot be
                trained on, before anything is sampled.
        """
        self._assert_compile_called("fit")
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        callbacks = list(callbacks or [])
        processes.need_distribution()
        verbose = verbose if processes.is_first() else 0
        checks.positive_int("epochs", epochs)
        checks.may_train(self, packing or share_prefix, callbacks)
        order = {"shuffle": shuffle, "seed": seed}
        self._begin(dataset, batch_size, order, packing, share_prefix, verbose)
        rollout_checks.staleness(max_staleness)
        held_out = None
        if validation_data is not None:
            held_out, report = self.prepare_held_out(validation_data)
            show(report, verbose)
        rollout_checks.evaluation(
            self, validation_generations, validation_temperature
        )
        self._skip_steps, self._epochs = frozenset(skip_steps), epochs
        callbacks = self._callback_list(callbacks, epochs, verbose)
        validation = {
            "num_generations": validation_generations,
            "temperature": validation_temperature,
        }
        logs, self._running = {}, True
        try:
            with self._overlapping(max_staleness):
                callbacks.on_train_begin()
                self.rollout.sync_weights()
                if max_staleness:
                    self.ahead = Ahead(self, max_staleness)
                for epoch in range(self._initial_epoch or 0, epochs):
                    self.reset_metrics()
                    callbacks.on_epoch_begin(epoch)
                    while drawn := self._next_or_saved():
                        batches = self.collect(drawn)
                        for i, batch in enumerate(batches):
                            callbacks.on_train_batch_begin(i)
                            logs = self.update(batch)
                            if i + 1 == len(batches):
                                logs |= self.sync()
                            self._record(logs)
                            callbacks.on_train_batch_end(i, logs)
                        if self.stop_training:
                            break
                    logs = self._epoch_logs()
                    if held_out is not None:
                        logs |= self._validate(held_out, callbacks, validation)
                    callbacks.on_epoch_end(epoch, logs)
                    if self.stop_training:
                        break
                    self.order.next_epoch()
            callbacks.on_train_end(logs)
        except BaseException:
            self.rollout.stop()
            raise
        finally:
            self._running = False
            for callback in self.fit_callbacks:
                if hasattr(callback, "close"):
                    callback.close()
        return self.history

    def evaluate(
        self,
        dataset,
        batch_size=8,
        *,
        num_generations=1,
        temperature="auto",
        correct_reward=1.0,
        answer=None,
        seed=0,
        verbose=0,
    ):
        """Samples from prompts and judges what was sampled.

        Args:
            dataset: as in `fit`.
            batch_size: int, prompts at once.
            num_generations: int, completions a prompt.
            temperature: float, or `"auto"` for 0 with one completion a
                prompt and that of training with several.
            correct_reward: float: a completion whose rewards, weighted and
                added up, are at least this is right.
            answer: function of a completion's text that gives what is voted
                on, or `None` for the text itself.
            seed: int, of the samples.
            verbose: bool, whether the report of the data is shown.

        Returns:
            A dict of floats: `reward` and the other metrics of rewards and
            lengths; `pass@1`, the share of completions that are right; and
            with `k` completions a prompt `pass@k`, the share of prompts of
            which one is right, and `maj@k`, of which the most frequent
            answer is.
        """
        self._assert_compile_called("evaluate")
        checks.positive_int("batch_size", batch_size)
        temperature = rollout_checks.evaluation(
            self, num_generations, temperature, answer
        )
        prompts = dataset
        if not _are_prepared(dataset):
            prompts, report = self.prepare_prompts(dataset)
            show(report, verbose or bool(report.dropped or report.cut))
        with self.sampling():
            return evaluate_prompts(
                self,
                prompts,
                batch_size=batch_size,
                num_generations=num_generations,
                temperature=temperature,
                correct_reward=correct_reward,
                answer=answer,
                seed=seed,
            )


def _are_prepared(dataset):
    """`fit` evaluates prompts that it has prepared already."""
    is_list = isinstance(dataset, list) and bool(dataset)
    return is_list and isinstance(dataset[0], Prompt)
