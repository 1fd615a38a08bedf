"""The base class of tasks that train on their own samples."""

import dataclasses
import functools

import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain import _console, optimizers
from keras_posttrain.data.batches.layout import Group
from keras_posttrain.data.batches.prompt_stream import prompt_order
from keras_posttrain.data.rows.datasets import is_stream
from keras_posttrain.data.rows.examples import summary_of
from keras_posttrain.data.rows.prompt_encoder import Prompt
from keras_posttrain.data.rows.prompts import prepare_columns, prepare_prompts
from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.data.rows.streams import check_epochs
from keras_posttrain.distribution import processes
from keras_posttrain.losses import reductions
from keras_posttrain.planning import suggestion
from keras_posttrain.rl import checks as rl_checks
from keras_posttrain.rl import play
from keras_posttrain.rl.batches import rollout_layout
from keras_posttrain.rl.collector import Collector, ForwardPass
from keras_posttrain.rl.episode_sampler import EpisodeSampler, session_of
from keras_posttrain.rl.evaluation import evaluate_prompts
from keras_posttrain.rl.loop import RolloutRun
from keras_posttrain.rl.opponents import make_opponents
from keras_posttrain.rl.sampling import Sampler
from keras_posttrain.rollout import NativeRollout
from keras_posttrain.rollout.rollout import ready_engine
from keras_posttrain.tasks.task import Task, show_report
from keras_posttrain.training import callbacks as callback_lib
from keras_posttrain.training import checks, huge_pages, keras_words, padding
from keras_posttrain.training.frozen import (
    Untracked,
    frozen_policy,
    make_reference,
    model_of,
)
from keras_posttrain.training.run_settings import RunSettings
from keras_posttrain.training.weights import ModelWeights


class RolloutTask(Task):
    """Base class of tasks that train on samples of the policy.

    `kpt.GRPOTask`, where rows and arguments are explained, and `kpt.PPOTask`
    are such tasks.

    A step with all-zero advantages, because the rewards of each group are
    equal, is skipped: momentum, weight decay, the KL term and the loss of
    routers change no weight either. It counts as `skipped`.

    Example:

    ```python
    class CISPOTask(kpt.RolloutTask):
        def default_loss(self):
            return kpt.losses.CISPOLoss()

    task = CISPOTask.from_preset("qwen3_0.6b_en")
    task.compile(rewards=[correct], num_generations=4)
    isinstance(task.objective, kpt.losses.CISPOLoss)  # True
    ```
    """

    auto_learning_rates = (1e-5, 1e-6)
    shown_metrics = (
        "reward",
        "loss",
        "pass@1",
        "reward_std",
        "frac_reward_zero_std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "entropy",
        "kl",
        "grad_norm",
    )
    skipped_because = "the completions of each prompt earned the same"
    can_share_prefix = takes_images = True
    # Builds the batches of a rollout.
    collector = Collector

    def __init__(self, causal_lm, tokenizer=None, *, reference=None, **kwargs):
        super().__init__(causal_lm, tokenizer, **kwargs)
        self._given_reference = Untracked(model_of(reference))
        # Set by `compile` and `fit`.
        self.rollout = self.sampling = self.scoring = self.reference = None
        self.episode = None
        # The engine of `rollout="auto"` and the `ForwardPass`, with their
        # compiled programs.
        self._own_rollout = NativeRollout()
        self._forward = None

    @keras_words.explained
    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        router_loss=None,
        rewards=None,
        episode=None,
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
        routing_replay=False,
        max_resamples=0,
        reward_timeout=None,
        on_reward_error="raise",
        micro_batch_size=None,
        max_grad_norm=1.0,
        run_eagerly=False,
    ):
        """Configures the task for training.

        Args:
            optimizer: as in `kpt.Task.compile`; `"auto"` is AdamW with a
                learning rate of 1e-5 with an adapter and 1e-6 without.
            loss: `"auto"` or a `kpt.losses.PolicyLoss`.
            router_loss: as in `kpt.Task.compile`.
            rewards: list of functions, see `kpt.rewards.Reward`, and of
                models such as a trained `kpt.RewardTask`; or one of these.
                With an `episode` they may be left out.
            episode: `None` to sample one completion of each prompt; or an
                async function of chats and of the row's columns, which
                samples as many turns as it wants and returns the reward; or
                an object such as `kpt.episodes.Tools([...])`. See
                `kpt.episodes.Episode`. Rewards then score messages and ids of
                all turns, and may have a parameter `trajectories`.
            reward_weights: list of floats, one per reward; 1 by default.
            advantages: `"auto"` for the advantages that suit the loss, an
                object such as `kpt.losses.GroupAdvantages()`, or a function.
            rollout: `"auto"` for `kpt.rollout.NativeRollout()`, or an
                engine.
            num_generations: int, completions per prompt.
            max_completion_length: int, in tokens.
            temperature: float, of the samples and of the log-probabilities
                that are trained.
            top_k, top_p, min_p: not supported, because the trained
                distribution would differ from the sampled one.
            stop_token_ids: ints that end a completion; `"auto"` is the
                tokenizer's set; `None` is none.
            num_minibatches: int, optimizer steps per pass over a rollout.
            num_iterations: int, optimization epochs per rollout.
            old_log_probs: `"trainer"`, recomputed before the first update if
                a rollout has several, or `"rollout"`, as the engine reports
                them.
            mask_truncated_completions: bool, whether completions that reached
                `max_completion_length` are excluded from the loss.
            routing_replay: bool, whether tokens are trained with the experts
                that they chose when they were sampled
                ([Ma et al., 2025](https://arxiv.org/abs/2510.11370)). In
                bfloat16 routers of engine and trainer may differ, which
                changes log-probabilities much. The router's gradient is that
                of the weights of these experts. A reference chooses for
                itself. For mixtures of experts with the built-in engine,
                without `episode` and with `max_staleness=0`.
            max_resamples: int, how often zero-variance groups are replaced by
                groups of further prompts (dynamic sampling); 0 for never.
                When the bound is reached, or the epoch has no more prompts,
                zero-variance groups fill the rest of the batch.
            reward_timeout: float or `None`, the time limit of a reward call
                in seconds. For functions that may hang in compiled code or
                use up the memory see `kpt.rewards.Isolated`.
            on_reward_error: `"raise"`, or `"skip"` to treat the completions
                of a failed call as not scored.
            micro_batch_size: int or `None`, completions (packed rows with
                `packing`) that pass through the model at once.
            max_grad_norm, run_eagerly: as in `kpt.Task.compile`.
        """
        loss = self.default_loss() if loss == "auto" else loss
        rl_checks.policy_loss(loss)
        if getattr(loss, "max_completion_length", 0) is None:
            loss = dataclasses.replace(
                loss, max_completion_length=max_completion_length
            )
        rl_checks.whole_distribution(top_k, top_p, min_p)
        episode = rl_checks.episode(episode, self.tokenizer)
        sampling = rl_checks.sampling(
            tokenizer=self.tokenizer,
            vocabulary_size=self.causal_lm.backbone.vocabulary_size,
            num_generations=num_generations,
            max_completion_length=max_completion_length,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            num_minibatches=num_minibatches,
            num_iterations=num_iterations,
            old_log_probs=old_log_probs,
            mask_truncated_completions=mask_truncated_completions,
            routing_replay=routing_replay,
        )
        rl_checks.room(
            self.sequence_length, self.max_length, max_completion_length
        )
        scoring = rl_checks.scoring(
            rewards,
            reward_weights,
            advantages,
            loss,
            num_generations,
            episode,
            max_resamples=max_resamples,
            timeout=reward_timeout,
            on_error=on_reward_error,
        )
        self.rollout = rl_checks.engine(rollout, self._own_rollout)
        rl_checks.routing_replay(
            routing_replay, self.rollout, self.policy, episode
        )
        self.sampling, self.scoring = sampling, scoring
        self.episode = episode
        self.temperature, self.reference = sampling.temperature, None
        super().compile(
            optimizer,
            self.combined_loss(loss),
            router_loss=router_loss,
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            run_eagerly=run_eagerly,
        )

    def combined_loss(self, loss):
        """Returns the loss to minimise for a policy loss."""
        return loss

    # The data

    def prepare(self, dataset, name="dataset", train_on="auto", **overrides):
        """Turns rows with a completion into examples, for `log_probs`."""
        settings = self.row_settings(name, **overrides)
        return prepare_sft(dataset, settings, train_on)

    def prepare_prompts(self, dataset, name="dataset"):
        """Turns rows into prompts: returns `(prompts, report)`.

        The prompts of a stream are a stream, which is read from its start.
        """
        settings = self.row_settings(name)
        if self.episode is not None:
            prompts, report = prepare_columns(dataset, settings)
        else:
            most, why = rl_checks.room(
                self.sequence_length,
                self.max_length,
                self.sampling.max_completion_length,
            )
            prompts, report = prepare_prompts(
                dataset, settings, max_prompt_length=most, limit=why
            )
        first = next(iter(prompts), None)
        if first is not None:
            rl_checks.row_columns(
                self.episode, self.scoring.rewards, first.columns, name
            )
        return prompts, report

    def _episodes(self, prompts, temperature=None):
        """Returns the `Episodes` of a run on rows, or `None`."""
        if self.episode is None:
            return None
        sampling = self.sampling
        if temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=temperature)
        return rl_checks.episodes(
            self.episode,
            prompts,
            sampling,
            self.tokenizer,
            [self.sequence_length, self.max_length],
            self.chat_template_kwargs,
            self.truncation,
        )

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
        share_prefix=False,
        validation_data=None,
        validation_generations=1,
        validation_temperature="auto",
        callbacks=None,
        verbose="auto",
        skip_steps=(),
        max_staleness=0,
    ):
        """Trains on completions that the policy samples.

        Args:
            dataset: as in `kpt.SFTTask.fit`.
            batch_size: int, prompts per rollout.
            epochs, shuffle, seed: as in `kpt.SFTTask.fit`; the seed is also
                that of the samples.
            packing: `True` to put several completions, each with its prompt,
                in a row of `sequence_length` tokens, or an int for rows of
                that many tokens. It does not change results.
            share_prefix: bool, whether to pack and to compute a prompt once
                for all its completions in a row, which saves work on long
                prompts. It does not change results.
            validation_data: a dataset of prompts, evaluated after every
                epoch.
            validation_generations, validation_temperature: as
                `num_generations` and `temperature` in `evaluate`.
            callbacks, verbose: as in `kpt.SFTTask.fit`. A checkpoint is made
                between two rollouts.
            skip_steps: ints, steps to leave out, counted as `step` in the
                metrics log. All steps of their rollouts are left out.
            max_staleness: int, the maximum age, in rollouts, of the weights
                that sampled a token when the token is trained on. With 0,
                sampling, scoring and training alternate, and runs are
                reproducible. With `k` more than 0, up to `k` rollouts of an
                epoch are sampled and scored while earlier ones are trained
                on: rewards are called from several threads, a completion in
                progress continues with the new weights when they change, a
                loss without an `ImportanceCorrection` gets one, and runs are
                not reproducible. A run resumed from a checkpoint samples
                again the rollouts that were not trained on. With several
                processes the engine needs devices of its own
                (`kpt.distribution.split`) or vLLM's servers; rollouts are
                then scored in turn and finished with the weights that began
                them, and runs that are not resumed are reproducible.

        Returns:
            A Keras `History` of the means over each epoch.

        Raises:
            ValueError: for rows, arguments or callbacks that cannot be
                trained on, before anything is sampled.
        """
        self._assert_compile_called("fit")
        checks.no_loop(self.loop, "fit")
        batch_size = checks.positive_int("batch_size", batch_size)
        seed = checks.seed(seed)
        rl_checks.staleness(max_staleness, self.rollout, self.scoring.rewards)
        rl_checks.replay_in_turn(self.sampling.routing_replay, max_staleness)
        checks.flag("shuffle", shuffle)
        checks.packing(packing)
        checks.flag("share_prefix", share_prefix)
        packs = packing or share_prefix
        settings = RunSettings.of(
            self.policy,
            packs,
            epochs=epochs,
            seed=seed,
            trainable=self.trainable,
            callbacks=callbacks,
            verbose=verbose,
            skip_steps=skip_steps,
            max_staleness=max_staleness,
            micro_batch_size=self.micro_batch_size,
        )
        with processes.shared_rows(), _console.silenced(settings.verbose == 0):
            prompts, self.data_report = self.prepare_prompts(dataset)
        streamed = is_stream(prompts)
        check_epochs(prompts, epochs)
        if not streamed:
            settings.show(self.data_report)
        episodes = self._episodes(prompts)
        layout = self._layout(
            prompts, batch_size, packing, share_prefix, episodes
        )
        filled = self.filled_rows(layout.num_sequences, packs)
        settings.show(padding.describe(self.micro_batch_size, *filled))
        huge_pages.advise(self.causal_lm, settings)
        held_out = None
        if validation_data is not None:
            with (
                processes.shared_rows(),
                _console.silenced(settings.verbose == 0),
            ):
                held_out, report = self.prepare_prompts(
                    validation_data, "validation_data"
                )
            held_out = list(held_out)
            settings.show(report)
        rl_checks.evaluation(
            self.temperature,
            validation_generations,
            validation_temperature,
            names=("validation_generations", "validation_temperature"),
        )
        validate = functools.partial(
            self.evaluate,
            held_out,
            batch_size,
            num_generations=validation_generations,
            temperature=validation_temperature,
            seed=seed,
        )
        optimizers.refresh_masters(self.optimizer, self.trainable_variables)
        with rl_checks.loss_of_run(
            self.objective,
            max_staleness,
            self.sampling.old_log_probs,
            self._set_objective,
        ):
            self._make_reference(settings)
            order = prompt_order(
                prompts,
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
                epochs=epochs,
                share=processes.row_share(),
            )
            engines, opponents = make_opponents(
                self.episode, self.rollout, self, self._copy
            )
            if episodes is not None:
                episodes = dataclasses.replace(episodes, engines=engines)
            if self._forward is None:
                self._forward = ForwardPass(
                    self._step, self.reference, self.temperature, self.policy
                )
            self.run = RolloutRun(
                self,
                step=self._step,
                frozen={"reference": self.reference} if self.reference else {},
                state=self.run_state,
                engine=self.rollout,
                order=order,
                collector=functools.partial(
                    self.collector,
                    episodes=episodes,
                    sampling=self.sampling,
                    scoring=self.scoring,
                    tokenizer=self.tokenizer,
                    layout=layout,
                    forward=self._forward.begin(),
                    order=order,
                    seed=seed,
                ),
                settings=settings,
                validate=None if held_out is None else validate,
                opponents=opponents,
            )
            try:
                return self.run.fit()
            finally:
                if streamed:
                    order.close()
                    settings.show(self.data_report)

    def _layout(
        self, prompts, batch_size, packing, share_prefix, episodes=None
    ):
        """Returns the layout of the batch of one step."""
        sampling, players = self.sampling, 1
        longest = self.sequence_length - sampling.max_completion_length
        if episodes is not None:
            players = len(episodes.trained)
        elif not is_stream(prompts):
            longest = int(summary_of(prompts)["tokens"].max())
        sequences = rl_checks.minibatches(
            batch_size,
            sampling.num_generations * players,
            sampling.num_minibatches,
        )
        packs = packing or share_prefix
        return rollout_layout(
            num_sequences=sequences,
            sequence_length=self.sequence_length,
            token_budget=rl_checks.token_budget(
                packs,
                self.sequence_length,
                longest + sampling.max_completion_length,
            ),
            share_prefix=share_prefix,
            by_sequence=self.objective.by_sequence,
            num_generations=sampling.num_generations,
            row_multiple=padding.row_multiple(
                self.micro_batch_size, *self.filled_rows(sequences, packs)
            ),
            pad_id=padding.token_id(
                self.tokenizer, self.causal_lm.backbone.vocabulary_size
            ),
        )

    def filled_rows(self, batch_size, packing=False):
        return None if packing else batch_size, 1

    def _copy(self):
        """Returns a copy of what is trained, for an opponent."""
        weights = ModelWeights.of(self)
        return frozen_policy(self.policy, weights, moves=True)

    def _make_reference(self, settings):
        compares = "ref_per_token_logps" in self.objective.needs
        if not (compares or self.scoring.kl_in_reward) or self.reference:
            return
        self.reference = make_reference(
            self._given_reference.value,
            self.policy,
            ModelWeights.of(self),
            callback_lib.moves_reference(settings.callbacks),
        )
        self._forward = None
        if size := self.reference.num_bytes:
            settings.show(f"reference: {size / 2**20:,.1f} MiB")

    def make_step(self, weights=None):
        step = super().make_step(weights)
        return dataclasses.replace(step, has_signal=has_advantage)

    def _renew_step(self):
        super()._renew_step()
        self._forward = None

    def fingerprint(self):
        return (
            super().fingerprint()
            | self.scoring.fingerprint()
            | self.sampling.fingerprint()
            | ({"episode": self.episode.fingerprint()} if self.episode else {})
        )

    @property
    def last_rollout(self):
        """Dict of lists: the completions of the last rollout, or `None`."""
        return self.run.last_rollout if self.run else None

    @keras_words.explained
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
        metrics=None,
        verbose="auto",
    ):
        """Samples completions and scores them.

        Args:
            dataset: as in `fit`.
            batch_size: int, prompts at once.
            num_generations: int, completions per prompt.
            temperature: float, or `"auto"` for 0 with one completion per
                prompt and the temperature of training with several.
            correct_reward: float, the weighted sum of rewards from which a
                completion counts as correct.
            answer: function from the text of a completion to the answer that
                `maj@k` votes on, or `None` for the text itself.
            seed: int, of the samples.
            metrics: must be `None`: `kpt.metrics` compare with completions,
                which prompts do not have. Pass a function as a reward, or
                evaluate `kpt.SFTTask.from_task(task)`.
            verbose: 0 prints nothing; `"auto"` the report of the data if
                prompts are dropped or cut; 1 always the report, and a
                progress bar.

        Returns:
            A dict of floats: `reward` and the other metrics of rewards and
            lengths; `pass@1`, the fraction of correct completions; and with
            `n` completions per prompt `pass@k` for `k` of 2, 4, ... and `n`,
            the probability that one of `k` completions is correct
            (`kpt.metrics.pass_at_k`), and `maj@n`, the fraction of prompts
            whose most frequent answer is correct. `pass@k/stderr` is the
            standard error over prompts, of two or more.
        """
        self._assert_compile_called("evaluate")
        if metrics:
            checks.may_have_metrics(self)
        checks.placed(self.causal_lm)
        checks.positive_int("batch_size", batch_size)
        seed = checks.seed(seed)
        checks.finite("correct_reward", correct_reward)
        temperature = rl_checks.evaluation(
            self.temperature, num_generations, temperature, answer
        )
        prompts = dataset
        if not _are_prepared(dataset):
            with _console.silenced(verbose == 0):
                prompts, report = self.prepare_prompts(dataset)
            prompts = list(prompts)
            show_report(report, verbose)
        sampling = dataclasses.replace(
            self.sampling,
            num_generations=num_generations,
            temperature=temperature,
            routing_replay=False,
        )
        running = self.run is not None and self.run.is_running
        generate = self.run.generate if running else self.rollout.generate
        bar = None
        if not running and verbose not in (0, "auto") and processes.is_first():
            bar = keras.utils.Progbar(
                len(prompts) * num_generations, unit_name="sample"
            )
            generate = functools.partial(generate, progress=bar.add)
        if self.episode is not None:
            open_session = functools.partial(
                session_of, self.rollout, bar and bar.add
            )
            sampler = EpisodeSampler(
                self.run.open_session if running else open_session,
                self._episodes(prompts, temperature),
                sampling,
                self.scoring,
            )
        else:
            sampler = Sampler(generate, sampling, self.scoring, self.tokenizer)
        with (
            _console.silenced(verbose == 0),
            ready_engine(self.rollout, self, running),
        ):
            return evaluate_prompts(
                sampler,
                prompts,
                batch_size=batch_size,
                correct_reward=correct_reward,
                answer=answer,
                seed=seed,
                step=self.step,
            )

    def play(
        self, episode=None, *, human=None, seed=0, temperature=None, **columns
    ):
        """Runs one episode and prints it.

        Args:
            episode: as in `compile`; that of `compile` by default.
            human: string, a player whose turns are typed in the terminal, or
                `None`. The others are played by the policy.
            seed: int, of the samples.
            temperature: float; that of training by default.
            **columns: the row.

        Returns:
            A `kpt.episodes.Trajectory`, or with several players a dict of
            them by player.
        """
        self._assert_compile_called("play")
        checks.placed(self.causal_lm)
        compiled = self.episode
        given = compiled if episode is None else episode
        if given is None:
            raise ValueError(
                "`play` needs an episode. Received: episode=None, and none "
                "in `compile`."
            )
        self.episode = rl_checks.episode(given, self.tokenizer)
        try:
            prompts = [Prompt((), columns.get("prompt"), columns, 0)]
            episodes = self._episodes(prompts, temperature)
        finally:
            self.episode = compiled
        with ready_engine(self.rollout, self):
            found = play.play(
                episodes, self.rollout, columns, checks.seed(seed), human
            )
        return found if len(found) > 1 else next(iter(found.values()))

    # Planning

    def suggest(self, dataset, *, memory=None):
        checks.memory(memory)
        return suggestion.of_prompts(self, dataset, memory)

    def example_batch(
        self, batch_size, prompt_length=None, packing=False, share_prefix=False
    ):
        sampling = self.sampling
        completion = sampling.max_completion_length
        if prompt_length is None:
            prompt_length = self.sequence_length - completion
        prompt = np.ones(prompt_length, "int32")
        prompts = [
            Prompt((1,) * prompt_length, None, {}, i)
            for i in range(batch_size)
        ]
        layout = self._layout(prompts, batch_size, packing, share_prefix)
        ids, ones = (
            np.ones(completion, "int32"),
            np.ones(completion, "float32"),
        )
        many = sampling.num_generations
        batches = layout.minibatches(
            [
                Group.of_completions(prompt, [ids] * many, [ones] * many, i)
                for i in range(batch_size)
            ]
        )
        count = batch_size * many
        logps, batch = [0 * ones] * count, batches[0]
        kl_in_reward = self.scoring.kl_in_reward
        batch.put_tokens("rollout_per_token_logps", logps)
        several = len(batches) * sampling.num_iterations > 1
        if sampling.old_log_probs == "rollout" or several or kl_in_reward:
            batch.put_tokens("old_per_token_logps", logps)
        if "ref_per_token_logps" in self.objective.needs or kl_in_reward:
            batch.put_tokens("ref_per_token_logps", logps)
        self.example_advantages(batch, count, logps)
        return batch.arrays

    def example_advantages(self, batch, count, logps):
        """Adds advantages to the batch of `example_batch`.

        `batch` is a `data/batches/assembly.py:Batch` of `count` sequences;
        `logps` has a float array for each, 0 for each token.
        """
        del logps
        batch.put_sequences("advantages", np.ones(count, "float32"))


def has_advantage(batch):
    """Computes whether any token with loss has an advantage, a bool scalar.

    Otherwise the step is skipped: neither momentum nor the KL term, whose
    gradient may be rounding alone, may change a weight.
    """
    advantages = batch["advantages"]
    if advantages.shape == batch["sequence_mask"].shape:
        advantages = reductions.spread(advantages, batch["segment_ids"])
    return jnp.any((batch["completion_mask"] != 0) & (advantages != 0))


def _are_prepared(dataset):
    """Returns whether `fit` has prepared the prompts already."""
    is_list = isinstance(dataset, list) and bool(dataset)
    return is_list and isinstance(dataset[0], Prompt)
