import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.loss import TokenLoss


def sft_loss(logps):
    """Computes the cross-entropy of each token, `-log p`.

    Args:
        logps: float array of any shape, such as `(rows, length)`:
            log-probabilities of tokens, in nats.

    Returns:
        A float array of the same shape.

    Example:

    ```python
    kpt.losses.sft_loss(np.log([0.5, 0.25]))  # [log(2), log(4)]
    ```
    """
    return -logps


def dft_loss(logps):
    """Computes `-p log p` of each token, with no gradient through `p`.

    Args:
        logps: see `sft_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Wu et al., 2025](https://arxiv.org/abs/2508.05629), equation 9.

    Example:

    ```python
    kpt.losses.dft_loss(np.log([0.5, 0.25]))  # [log(2) / 2, log(4) / 4]
    ```
    """
    return -jax.lax.stop_gradient(jnp.exp(logps)) * logps


@dataclasses.dataclass(frozen=True)
class SFTLoss(TokenLoss):
    """Cross-entropy of the tokens that carry loss, averaged over the batch.

    `sft_loss` of each token, averaged over all tokens of the full batch with
    the weights of `completion_mask`: a long answer has more weight than a
    short one, and micro-batches or packing do not change the result.

    Example:

    ```python
    loss = kpt.losses.SFTLoss()
    batch = {"completion_mask": np.array([[0.0, 1.0, 1.0]])}
    outputs = {"per_token_logps": np.log([[1.0, 0.5, 0.25]])}
    value, metrics = loss(batch, outputs)  # value is log(8) / 2
    ```
    """

    def token_loss(self, logps):
        return sft_loss(logps)


@dataclasses.dataclass(frozen=True)
class DFTLoss(TokenLoss):
    """Dynamic fine-tuning: cross-entropy scaled by the token's probability.

    `dft_loss` of each token, averaged as in `SFTLoss`. Improbable tokens get
    a smaller weight, which makes the update that of a policy gradient with a
    bounded reward.

    Example:

    ```python
    loss = kpt.losses.DFTLoss()
    batch = {"completion_mask": np.array([[0.0, 1.0, 1.0]])}
    outputs = {"per_token_logps": np.log([[1.0, 0.5, 0.25]])}
    loss(batch, outputs)[0]  # 0.3466
    ```
    """

    def token_loss(self, logps):
        return dft_loss(logps)
