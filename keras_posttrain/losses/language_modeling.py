import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.loss import TokenLoss


def cross_entropy(logps):
    """Minus the log-probability of each token.

    Args:
        logps: float array of any shape, the log-probabilities of tokens.

    Returns:
        A float array of the same shape.
    """
    return -logps


def dynamic_fine_tuning(logps):
    """Cross-entropy weighted by the token's own probability, held constant.

    Args:
        logps: float array of any shape, the log-probabilities of tokens.

    Returns:
        A float array of the same shape.

    Reference:
        - [Wu et al., 2025](https://arxiv.org/abs/2508.05629), equation 9.
    """
    return -jax.lax.stop_gradient(jnp.exp(logps)) * logps


@dataclasses.dataclass(frozen=True)
class SFTLoss(TokenLoss):
    """Cross-entropy of the tokens that carry loss, averaged over the batch.

    The mean is over all tokens of the whole batch, weighted by
    `completion_mask`: a long answer counts for more than a short one, and
    cutting the batch into micro-batches or packing it changes nothing.

    Example:

    ```python
    loss = kpt.losses.SFTLoss()
    batch = {"completion_mask": np.array([[0.0, 1.0, 1.0]])}
    outputs = {"per_token_logps": np.log([[1.0, 0.5, 0.25]])}
    value, metrics = loss(batch, outputs)  # value is log(8) / 2
    ```
    """

    def token_loss(self, logps):
        return cross_entropy(logps)


@dataclasses.dataclass(frozen=True)
class DFTLoss(TokenLoss):
    """Dynamic fine-tuning: cross-entropy scaled by the token's probability.

    Tokens that the model finds improbable weigh less, which makes the
    update that of a policy gradient with a bounded reward. The mean is taken
    as in `SFTLoss`.

    Reference:
        - [Wu et al., 2025](https://arxiv.org/abs/2508.05629).
    """

    def token_loss(self, logps):
        return dynamic_fine_tuning(logps)
