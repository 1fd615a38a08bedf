import dataclasses
import math
import numbers
import os

import keras_hub
import numpy as np

from keras_posttrain.losses import Loss, PPOLoss, SumLoss, ValueLoss
from keras_posttrain.models import presets
from keras_posttrain.models.policy import PACKABLE_MODELS
from keras_posttrain.models.value_head import ValueHead
from keras_posttrain.rl import checks as rl_checks
from keras_posttrain.rl.ppo import PPOCollector, TokenAdvantages
from keras_posttrain.tasks.rollout_task import RolloutTask
from keras_posttrain.training import checks, keras_words
from keras_posttrain.training.frozen import Untracked


class PPOTask(RolloutTask):
    """Reinforcement learning from rewards with a value model.

    Proximal policy optimisation: a value model estimates the expected return
    from each token of a completion, and the advantage of a token is
    generalized advantage estimation over those values. Advantages are per
    token, so that one completion per prompt is enough.

    The reward of a completion is given to its last token; each token pays
    `kl_coef` times the log-ratio of the policy to the reference. Completions
    that no reward function scored are dropped.

    Rows are `{"prompt"}`, a string or a list of messages, or
    `{"prompt_ids"}`; all other columns reach the rewards. Prompts may have
    images, as in `kpt.GRPOTask`, without a separate `value_model`.

    `kpt.callbacks.Checkpoint` saves the value model; `export`,
    `save_adapter` and `save_to_preset` write the policy alone. Rewards that
    are all equal still train the value model, and with it a backbone that it
    shares with the policy.

    Args:
        reference: as in `kpt.GRPOTask`; used with `kl_coef`.
        causal_lm, tokenizer, **kwargs: as there.

    References:
        - [Schulman et al., 2017](https://arxiv.org/abs/1707.06347).
        - [Ouyang et al., 2022](https://arxiv.org/abs/2203.02155), with a
          language model and the KL divergence in the reward.

    Example:

    ```python
    def correct(completions, answer, **columns):
        return [float(a in c) for c, a in zip(completions, answer)]

    task = kpt.PPOTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=32))
    task.compile(
        optimizer=keras.optimizers.AdamW(1e-5),
        rewards=[correct],
        max_completion_length=64,
        num_minibatches=2,
    )
    task.fit(
        [{"prompt": "2 + 2 =", "answer": "4"}] * 2,
        batch_size=2,
        callbacks=[kpt.callbacks.Checkpoint("run/")],
    )
    ```
    """

    collector = PPOCollector

    def __init__(self, causal_lm, tokenizer=None, *, reference=None, **kwargs):
        super().__init__(causal_lm, tokenizer, reference=reference, **kwargs)
        # Set by the first `compile`.
        self.value_model = None

    def default_loss(self):
        return PPOLoss()

    @keras_words.explained
    def compile(
        self,
        optimizer="auto",
        loss="auto",
        *,
        rewards=None,
        value_loss="auto",
        value_model=None,
        kl_coef=0.05,
        kl_in="reward",
        gamma=1.0,
        gae_lambda=0.95,
        whiten_advantages=True,
        num_generations=1,
        num_iterations=4,
        **kwargs,
    ):
        """Configures the task for training.

        Args:
            optimizer: as in `kpt.RolloutTask.compile`. It also trains the
                value model.
            loss: `"auto"` for `kpt.losses.PPOLoss()`, or another
                `kpt.losses.PolicyLoss` of ratios of tokens.
            rewards: as in `kpt.RolloutTask.compile`; with an `episode` they
                may be left out.
            value_loss: `"auto"` for `kpt.losses.ValueLoss()`, whose
                `coefficient` is its weight.
            value_model: `None` for a head on the policy's backbone, or a
                preset or a KerasHub `CausalLM` with the same tokens for a
                separate backbone. It is trained with an adapter if the task
                has one, else in full. A task keeps its value model; later
                calls of `compile` must pass the same.
            kl_coef: float, the weight of the KL divergence from the
                reference; 0 for none, and no reference.
            kl_in: `"reward"`, or `"loss"` to add the divergence to the loss
                as `beta` and `kl_estimator` of the loss do.
            gamma: float in [0, 1], the discount of a token.
            gae_lambda: float in [0, 1]: 0 is one-step TD, 1 is Monte Carlo.
            whiten_advantages: bool, whether advantages are scaled to mean 0
                and variance 1 over all tokens of a rollout.
            num_generations: int, completions per prompt.
            num_iterations: int, optimization epochs per rollout.
            **kwargs: see `kpt.RolloutTask.compile`, except `advantages` and
                `max_resamples`, which compare the completions of a prompt.
        """
        for name in ("advantages", "max_resamples"):
            if name in kwargs:
                raise ValueError(
                    f"`{name}` compares the completions of a prompt; here "
                    "the value model says what they are compared with. Leave "
                    f"it out. Received: {name}={kwargs[name]!r}"
                )
        loss = self.default_loss() if loss == "auto" else loss
        rl_checks.policy_loss(loss)
        value_loss = ValueLoss() if value_loss == "auto" else value_loss
        _check_value_loss(value_loss)
        _check_kl(loss, kl_coef, kl_in)
        _check_share("gamma", gamma)
        _check_share("gae_lambda", gae_lambda)
        checks.flag("whiten_advantages", whiten_advantages)
        if self.value_model is not None:
            _check_same(value_model, self._value_source.value)
        _check_value_model(value_model, self.causal_lm)
        in_reward = kl_in == "reward"
        if kl_coef and not in_reward:
            loss = dataclasses.replace(loss, beta=kl_coef)
        self._value_loss = value_loss
        if self.value_model is None:
            self._value_source = Untracked(value_model)
        super().compile(
            optimizer,
            loss,
            rewards=rewards,
            advantages=TokenAdvantages(
                beta=float(kl_coef) if in_reward else 0.0,
                gamma=float(gamma),
                gae_lambda=float(gae_lambda),
                whitened=bool(whiten_advantages),
            ),
            num_generations=num_generations,
            num_iterations=num_iterations,
            **kwargs,
        )

    def combined_loss(self, loss):
        if self.value_model is None:
            self._make_value_model(self._value_source.value)
        return SumLoss([loss, self._value_loss])

    def _make_value_model(self, source):
        model, backbone = source, self.causal_lm.backbone
        # A separate model reads text alone.
        self.takes_images = source is None
        if isinstance(source, (str, os.PathLike)):
            model = presets.load_companion(
                source,
                backbone.dtype_policy,
                is_trained=self.adapter is None,
            )
        if model is not None:
            backbone = model.backbone
            theirs = backbone.vocabulary_size
            ours = self.causal_lm.backbone.vocabulary_size
            if ours != theirs:
                raise ValueError(
                    "The value model must read the tokens of the policy. "
                    f"Received: a value model with vocabulary_size={theirs}, "
                    f"a policy with vocabulary_size={ours}."
                )
        self.value_model = ValueHead(
            backbone.hidden_dim,
            model,
            lora=self.adapter.lora if self.adapter else None,
            sequence_length=self.sequence_length,
            # Only one of two models can take the memory that is free.
            remat="full" if self.policy.remat == "auto" else self.policy.remat,
            chooser=self.policy.chooser,
        )

    # Training

    def _layout(self, prompts, batch_size, packing, share_prefix, *args):
        own = self.value_model.policy
        if (packing or share_prefix) and own is not None and not own.packable:
            raise ValueError(
                f"{type(own.backbone).__name__}, the value model, has no "
                "attention that keeps packed sequences apart. Use "
                f"packing=False, or as the value model {PACKABLE_MODELS}."
            )
        return super()._layout(
            prompts, batch_size, packing, share_prefix, *args
        )

    def token_outputs(self, batch, mask, needs, *, dropout_key=None, **kwargs):
        hidden = self.policy.hidden_states(batch, dropout_key)
        outputs = super().token_outputs(
            batch, mask, needs, hidden=hidden, **kwargs
        )
        if "values" in needs:
            outputs["values"] = self.value_model.values(
                batch, hidden, dropout_key
            )
        return outputs

    def make_step(self, weights=None):
        # The value model is also trained on steps without advantages.
        return dataclasses.replace(super().make_step(weights), has_signal=None)

    def example_batch(self, batch_size, **kwargs):
        if self.value_model.causal_lm is not None:
            raise ValueError(
                "PPO is planned with a value head on the policy's own "
                "backbone. Received: a separate `value_model`. Plan "
                "value_model=None, and an SFTTask of the value model's "
                "preset: they add up."
            )
        return super().example_batch(batch_size, **kwargs)

    def example_advantages(self, batch, count, logps):
        names = ("old_per_token_logps", "old_values", "advantages", "returns")
        for name in names:
            batch.put_tokens(name, logps)
        batch.put_sequences("rewards", np.ones(count, "float32"))


def _check_value_model(source, causal_lm):
    known = (str, os.PathLike, keras_hub.models.CausalLM)
    if source is not None and not isinstance(source, known):
        raise ValueError(
            "`value_model` must be None, a preset or a KerasHub "
            f"`CausalLM`. Received: value_model={source!r}"
        )
    if source is causal_lm:
        raise ValueError(
            "`value_model` must be another model than the policy. Leave "
            "it out for a value head on the policy's own backbone."
        )


def _check_same(source, known):
    same = source is known
    if isinstance(source, (str, os.PathLike)):
        same = isinstance(known, (str, os.PathLike))
        same = same and os.fspath(source) == os.fspath(known)
    if not same:
        raise ValueError(
            "A task keeps the value model of its first `compile`, which "
            f"was value_model={known!r}. Make a new task for another. "
            f"Received: value_model={source!r}"
        )


def _check_value_loss(loss):
    if not isinstance(loss, Loss) or "values" not in loss.needs:
        raise ValueError(
            "`value_loss` must be 'auto' or a loss of values such as "
            "`kpt.losses.ValueLoss(clip=0.2)`. "
            f"Received: value_loss={loss!r}"
        )


def _check_kl(loss, kl_coef, kl_in):
    if kl_in not in ("reward", "loss"):
        raise ValueError(
            f"`kl_in` must be 'reward' or 'loss'. Received: kl_in={kl_in!r}"
        )
    is_number = isinstance(kl_coef, numbers.Real) and kl_coef is not True
    if not (is_number and 0 <= kl_coef < math.inf):
        raise ValueError(
            "`kl_coef` must be a finite number of at least 0. "
            f"Received: kl_coef={kl_coef!r}"
        )
    if loss.beta and kl_coef:
        raise ValueError(
            "The KL divergence has one weight, `kl_coef`; with kl_in='loss' "
            "it becomes the loss's `beta`. Leave one of the two out. "
            f"Received: kl_coef={kl_coef}, a loss with beta={loss.beta}"
        )


def _check_share(name, value):
    is_number = isinstance(value, numbers.Real)
    if not (is_number and 0 <= value <= 1):
        raise ValueError(
            f"`{name}` must be a number from 0 to 1. "
            f"Received: {name}={value!r}"
        )
