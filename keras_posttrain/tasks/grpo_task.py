from keras_posttrain.losses import GRPOLoss
from keras_posttrain.tasks.rollout_task import RolloutTask


class GRPOTask(RolloutTask):
    """Reinforcement learning from rewards, without a value model.

    For each prompt several completions are sampled and scored. Completions
    with a reward above the mean of their group become more probable, the
    others less probable. The loss is an object: `compile(loss=...)` takes
    `GRPOLoss` (the default, with `beta=0`, so that no reference is needed),
    `DrGRPOLoss`, `DAPOLoss`, `GSPOLoss`, `CISPOLoss`, `ReinforceLoss` or
    another policy loss of `kpt.losses`; `advantages="auto"` follows the loss.

    Rows are `{"prompt"}`, a string or a list of messages, or
    `{"prompt_ids"}`; all other columns reach the rewards. Of a model with a
    vision tower (`from_preset(..., vision=True)`), prompts of messages may
    have `images`, as in `kpt.SFTTask`; rewards get the column too. With
    `fit(share_prefix=True)` the images of a prompt are computed once for all
    its completions in a row.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised;
            rewards then receive ids instead of text.
        reference: as in `kpt.DPOTask`; used by losses with `beta`.
        **kwargs: see `from_preset`.

    References:
        - [Shao et al., 2024](https://arxiv.org/abs/2402.03300).

    Example:

    ```python
    def correct(completions, answer, **columns):
        return [float(a in c) for c, a in zip(completions, answer)]

    task = kpt.GRPOTask.from_preset("qwen3_0.6b_en", lora=kpt.LoRA(rank=32))
    task.compile(
        optimizer=keras.optimizers.AdamW(1e-5),
        loss=kpt.losses.GRPOLoss(beta=0.0),
        rewards=[correct],
        num_generations=8,
        max_completion_length=64,
    )
    task.fit(
        [{"prompt": "2 + 2 =", "answer": "4"}],
        batch_size=1,
        callbacks=[kpt.callbacks.CompletionsLog("run/")],
    )
    task.generate("2 + 2 =", temperature=0)
    ```
    """

    def default_loss(self):
        return GRPOLoss(beta=0.0)
