import tempfile

import jax

from keras_posttrain import _remote
from keras_posttrain.losses import BradleyTerryLoss
from keras_posttrain.models import (
    device_transfer,
    guards,
    score_head,
    sharding,
)
from keras_posttrain.models.hf import directories
from keras_posttrain.tasks.preference_task import PreferenceTask
from keras_posttrain.training import checks, keras_words


class RewardTask(PreferenceTask):
    """A reward model: a score for each sequence, trained on pairs.

    The score is a linear map of the last token's final hidden state; it is
    trained with the adapter, or with all weights. Rows are
    `{"prompt", "chosen", "rejected"}` or `{"chosen", "rejected"}`, strings
    or lists of messages, or tokenised as `{"chosen_ids", "rejected_ids"}`,
    with `prompt_ids` or without; a number `margin` is the
    target difference of the two scores.

    `save_adapter` writes the head next to the adapter, as PEFT does for
    sequence classification; `export` writes a model for sequence
    classification; `from_preset` and `load_adapter` read them. A trained
    task is a reward: `kpt.rewards.ModelReward(task)`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        **kwargs: see `from_preset`.

    References:
        - [Ouyang et al., 2022](https://arxiv.org/abs/2203.02155).

    Example:

    ```python
    task = kpt.RewardTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=16))
    task.compile(optimizer=keras.optimizers.AdamW(1e-4))
    task.fit(
        [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}],
        batch_size=1,
    )
    task.score([{"prompt": "2 + 2 =", "completion": " 4"}])
    ```
    """

    auto_learning_rates = (1e-4, 1e-5)
    shares_prompt = False

    def __init__(self, causal_lm, tokenizer=None, **kwargs):
        guards.refuse_tower(causal_lm, "RewardTask")
        super().__init__(causal_lm, tokenizer, **kwargs)
        backbone = causal_lm.backbone
        self.score_head = score_head.ScoreHead(backbone.hidden_dim)
        if not backbone.token_embedding.tie_weights:
            # Nothing reads it, and weight decay would still move it.
            backbone.token_embedding.reverse_embeddings.trainable = False
        self._scores = None

    @classmethod
    @keras_words.explained
    def from_preset(cls, preset, *, load_weights=True, **kwargs):
        task = super().from_preset(preset, load_weights=load_weights, **kwargs)
        directory = directories.resolve(preset)
        if load_weights and directory is not None:
            tensor = score_head.read_score(directory)
            if tensor is not None:
                task.score_head.take(tensor, directory)
        return task

    def default_loss(self):
        return BradleyTerryLoss()

    @keras_words.explained
    def compile(self, optimizer="auto", loss="auto", **kwargs):
        """Configures the task for training.

        Args:
            optimizer: as in `kpt.SFTTask.compile`; `"auto"` is AdamW with a
                learning rate of 1e-4 with an adapter and 1e-5 without.
            loss: `"auto"` for `kpt.losses.BradleyTerryLoss()`, or another
                loss that only needs `scores`.
            micro_batch_size: int or `None`, pairs that pass through the
                model at once; rows with `packing`.
            max_grad_norm, run_eagerly: as in `kpt.SFTTask.compile`.
        """
        loss = self.default_loss() if loss == "auto" else loss
        if set(getattr(loss, "needs", ())) != {"scores"}:
            raise ValueError(
                "`loss` must be a loss of scores, such as "
                "`kpt.losses.BradleyTerryLoss()`. Received: "
                f"loss={loss!r}. For losses of log-probabilities use "
                "`kpt.DPOTask`."
            )
        super().compile(optimizer, loss, **kwargs)

    def token_outputs(
        self, batch, mask, needs, *, dropout_key=None, differentiable=True
    ):
        hidden = self.policy.hidden_states(batch, dropout_key)
        slots = batch["sequence_mask"].shape[1]
        scores = self.score_head(
            hidden, batch["segment_ids"], num_sequences=slots
        )
        return {"scores": scores}

    def score(self, rows, batch_size=8):
        """Scores sequences.

        Args:
            rows: list of `{"prompt", "completion"}`, `{"messages"}` or
                `{"text"}`, or tokenised rows.
            batch_size: int, rows at once.

        Returns:
            A list of floats, one per row.
        """
        if self._scores is None:

            def run(trainable, frozen, batch):
                with self.using_weights(trainable, frozen):
                    return self.token_outputs(batch, None, ("scores",))

            self._scores = jax.jit(run, out_shardings=sharding.of_results())
        found = self._run_rows(self._scores, rows, batch_size)
        return [float(row["scores"][0]) for _, row in found]

    def _renew_step(self):
        super()._renew_step()
        self._scores = None

    # Saving

    def save_adapter(self, path):
        """Writes the adapter and the head in PEFT's format."""
        with _remote.written(path, device_transfer.on_first) as path:
            super().save_adapter(path)
            tensor = self.score_head.tensor()
            device_transfer.on_first(
                lambda: score_head.add_to_adapter(path, tensor)
            )

    def load_adapter(self, path):
        """Loads a PEFT adapter directory, and its head if present."""
        checks.path("path", path)
        with _remote.read(path) as path:
            with tempfile.TemporaryDirectory() as without:
                tensor = score_head.split_adapter(path, without)
                super().load_adapter(without)
            if tensor is not None:
                self.score_head.take(tensor, path)

    def export(self, path, **kwargs):
        """Exports a sequence classification model, as `kpt.SFTTask.export`."""
        checks.path("path", path)
        with _remote.written(
            path, device_transfer.on_first, read=["config.json"]
        ) as path:
            super().export(path, **kwargs)
            tensor = self.score_head.tensor()
            device_transfer.on_first(
                lambda: score_head.add_to_export(path, tensor)
            )

    def save_to_preset(self, path):
        raise ValueError(
            "A KerasHub preset of a `CausalLM` has no place for the head "
            "that scores. Use `export`, or `save_adapter`."
        )
