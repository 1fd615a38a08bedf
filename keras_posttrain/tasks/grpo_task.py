from keras_posttrain.losses import GRPOLoss
from keras_posttrain.tasks.rollout_task import RolloutTask


class GRPOTask(RolloutTask):
    """Reinforcement learning from rewards, without a value model.

    For each prompt several completions are sampled and judged; those that
    earn more than their group become more probable, those that earn less
    become less so. The loss is an object: `compile(loss=...)` takes
    `GRPOLoss`, the default with `beta=0`, so that no reference is needed, or
    `DrGRPOLoss`, `DAPOLoss`, `GSPOLoss`, `CISPOLoss`, `ReinforceLoss` and
    the others of `kpt.losses`; `advantages="auto"` goes with it.

    Rows are `{"prompt"}`, a string or a list of messages, or
    `{"prompt_ids"}`; all other columns reach the rewards.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        reference: a preset or a KerasHub `CausalLM`, or `None` for the
            policy when training began: the model with the adapter off where
            the adapter was 0, else a frozen copy of what is trained. Only a
            loss with `beta` asks for one.
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
