"""Scores of log-ratios for f-divergences from the reference policy."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.loss import check_types

# exp(80) is 5e34: the largest power of e that float32 holds with room.
EXPONENT_BOUND = 80.0


def bounded_exp(exponents):
    """Computes `exp` of exponents clipped to `EXPONENT_BOUND`."""
    return jnp.exp(jnp.minimum(exponents, EXPONENT_BOUND))


@dataclasses.dataclass(frozen=True)
class ReverseKL:
    """`KL(policy || reference)`: the score is the log-ratio itself.

    DPO's regularisation.

    Call arguments:
        log_ratios: float array, `log(policy / reference)`.

    Returns:
        A float array of the same shape: `f'(policy / reference)` minus a
        constant.

    Reference:
        - [Wang et al., 2023](https://arxiv.org/abs/2309.16240), table 1.

    Example:

    ```python
    divergence = kpt.losses.ReverseKL()
    divergence(np.log([1.0, 4.0]))  # [0.0, 1.3863]
    loss = kpt.losses.DPOLoss(divergence=divergence)
    loss(pair_batch, pair_outputs)[0]  # 0.5981
    ```
    """

    def __call__(self, log_ratios):
        return log_ratios


@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """`KL(reference || policy)`: the score is `-reference / policy`.

    Call arguments, returns and reference as in `ReverseKL`.

    Example:

    ```python
    divergence = kpt.losses.ForwardKL()
    divergence(np.log([1.0, 4.0]))  # [-1.0, -0.25]
    loss = kpt.losses.DPOLoss(divergence=divergence)
    loss(pair_batch, pair_outputs)[0]  # 0.5825
    ```
    """

    def __call__(self, log_ratios):
        return -bounded_exp(-log_ratios)


@dataclasses.dataclass(frozen=True)
class JensenShannon:
    """The Jensen-Shannon divergence: `log(2 u / (1 + u))` of the ratio `u`.

    Call arguments, returns and reference as in `ReverseKL`.

    Example:

    ```python
    divergence = kpt.losses.JensenShannon()
    divergence(np.log([1.0, 4.0]))  # [-0.6931, -0.2231]
    loss = kpt.losses.DPOLoss(divergence=divergence)
    loss(pair_batch, pair_outputs)[0]  # 0.6444
    ```
    """

    def __call__(self, log_ratios):
        return jax.nn.log_sigmoid(log_ratios)


@dataclasses.dataclass(frozen=True)
class AlphaDivergence:
    """The alpha-divergence: `(1 - u**-alpha) / alpha` of the ratio `u`.

    Between the reverse KL (`alpha` to 0) and the forward KL (`alpha` to 1),
    as the paper has it. TRL 1.16 computes the paper's divergence of
    `1 - alpha`; the two agree at 0.5. Called as `ReverseKL` is, whose
    reference is this paper.

    Args:
        alpha: float between 0 and 1. The paper tries 0.3, 0.5 and 0.7.

    Example:

    ```python
    divergence = kpt.losses.AlphaDivergence(alpha=0.5)
    divergence(np.log([1.0, 4.0]))  # [-2.0, -1.0]
    loss = kpt.losses.DPOLoss(divergence=divergence)
    loss(pair_batch, pair_outputs)[0]  # 0.5943
    ```
    """

    alpha: float = 0.5

    def __post_init__(self):
        check_types(self)
        if not 0 < self.alpha < 1:
            raise ValueError(
                "`alpha` of AlphaDivergence must be between 0 and 1; the "
                "limits are `ReverseKL()` and `ForwardKL()`. Received: "
                f"alpha={self.alpha!r}"
            )

    def __call__(self, log_ratios):
        return -bounded_exp(-self.alpha * log_ratios) / self.alpha
