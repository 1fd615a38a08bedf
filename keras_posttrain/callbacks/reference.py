import numbers

import keras


class UpdateReference(keras.callbacks.Callback):
    """Moves the reference policy towards the policy (TR-DPO).

    Every `every` steps the reference becomes `mixup` times the policy plus
    `1 - mixup` times itself. TRL's `sync_ref_model` does this every 512 steps
    with 0.6. The reference is then a copy that takes memory.

    Args:
        every: int, steps between two updates.
        mixup: float above 0 and at most 1, the weight of the policy.

    Reference:
        - [Gorbatovski et al., 2024](https://arxiv.org/abs/2404.09656).

    Example:

    ```python
    task.compile(
        loss=kpt.losses.GRPOLoss(beta=0.04),
        rewards=[correct],
        num_generations=4,
        max_completion_length=8,
    )
    task.fit(prompts, callbacks=[kpt.callbacks.UpdateReference(every=100)])
    ```
    """

    # Makes the task keep a copy of the reference from the start.
    moves_reference = True
    reads_step_logs = True

    def __init__(self, every=512, mixup=0.6):
        super().__init__()
        is_int = isinstance(every, numbers.Integral)
        if isinstance(every, bool) or not is_int or every < 1:
            raise ValueError(
                f"`every` must be a positive int. Received: every={every!r}"
            )
        if not isinstance(mixup, numbers.Real) or not 0 < mixup <= 1:
            raise ValueError(
                "`mixup` must be above 0 and at most 1. "
                f"Received: mixup={mixup!r}"
            )
        self.every, self.mixup = every, mixup

    def on_train_begin(self, logs=None):
        if getattr(self._model, "reference", None) is None:
            raise ValueError(
                "There is no reference to update: the loss has no KL term. "
                "Use a loss with `beta`, or leave `UpdateReference` out."
            )

    def on_train_batch_end(self, batch, logs=None):
        if self._model.step % self.every == 0:
            # Keras's own loop empties the variables while it runs.
            self._model.jax_state_sync()
            self._model.reference.update(self.mixup)
