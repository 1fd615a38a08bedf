from keras_posttrain.data.rows.sft import prepare_sft
from keras_posttrain.losses import SFTLoss
from keras_posttrain.planning import suggestion
from keras_posttrain.tasks.task import Task
from keras_posttrain.training import checks, keras_words


class SFTTask(Task):
    """Supervised fine-tuning on text, chats, or prompts and completions.

    Rows are `{"text"}`, `{"messages"}`, `{"prompt", "completion"}`,
    `{"prompt_ids", "completion_ids"}` or `{"token_ids", "completion_mask"}`,
    each with an optional `weight`. By default the tokens that carry loss are
    the assistant's turns of a chat, the completion after a prompt, and all
    tokens of a text; the token that ends a turn is among them.

    Of a model with a vision tower (`from_preset(..., vision=True)`), rows of
    messages may have a column `images`, Pillow images or uint8 arrays of
    shape `(height, width, 3)`: one for each part `{"type": "image"}` of the
    messages' contents, or before the text of the first user message.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        train_on: `"auto"`, or `"completion"`, `"assistant"` or `"all"` to
            say which tokens carry loss.
        **kwargs: see `from_preset`.

    Example:

    ```python
    task = kpt.SFTTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=16))
    task.compile(optimizer=keras.optimizers.AdamW(2e-4))
    task.fit(
        [{"prompt": "2 + 2 =", "completion": " 4"}], batch_size=1, epochs=3
    )
    task.generate("2 + 2 =", temperature=0)
    ```
    """

    takes_images = True

    def __init__(
        self, causal_lm, tokenizer=None, *, train_on="auto", **kwargs
    ):
        if train_on not in ("auto", "completion", "assistant", "all"):
            raise ValueError(
                "`train_on` must be 'auto', 'completion', 'assistant' or "
                f"'all'. Received: train_on={train_on!r}"
            )
        super().__init__(causal_lm, tokenizer, **kwargs)
        self.train_on, self.takes_metrics = train_on, True

    def default_loss(self):
        return SFTLoss()

    @keras_words.explained
    def compile(self, optimizer="auto", loss="auto", **kwargs):
        """Configures the task for training.

        Args:
            optimizer, **kwargs: as in `kpt.Task.compile`.
            loss: `"auto"` for `kpt.losses.SFTLoss()`, or another loss of
                single completions.
        """
        loss = self.default_loss() if loss == "auto" else loss
        checks.loss_of_completions(loss)
        super().compile(optimizer, loss, **kwargs)

    def suggest(self, dataset, *, memory=None):
        checks.memory(memory)
        rate = suggestion.rate_by_width(self.policy)
        return suggestion.of_rows(self, dataset, memory, rate)

    def prepare(self, dataset, name="dataset", train_on=None, **overrides):
        settings = self.row_settings(name, **overrides)
        return prepare_sft(dataset, settings, train_on or self.train_on)
