"""Losses of preference pairs with a reference policy."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.f_divergences import bounded_exp
from keras_posttrain.losses.loss import check
from keras_posttrain.losses.pair_loss import (
    MarginLoss,
    ReferenceLoss,
    check_smoothing,
    preference_margins,
    smoothed_sigmoid,
)


def dpo_loss(
    chosen_ratios,
    rejected_ratios,
    beta=0.1,
    label_smoothing=0.0,
    divergence=None,
):
    """Computes the DPO loss of each pair.

    `-(1 - s) log sigmoid(m) - s log sigmoid(-m)` with the margin
    `m = beta * (chosen_ratios - rejected_ratios)`, the smoothing `s`, and
    the scores of a `divergence` in place of log-ratios if there is one.

    Args:
        chosen_ratios: float array of any shape, such as `(pairs,)`:
            `log(policy / reference)` of the chosen completions, in nats.
        rejected_ratios: float array of the same shape, of the rejected ones.
        beta: float, the strength of the regularisation.
        label_smoothing: float, the assumed share of swapped labels.
        divergence: function of log-ratios or `None`, see `MarginLoss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Rafailov et al., 2023](https://arxiv.org/abs/2305.18290).

    Example:

    ```python
    kpt.losses.dpo_loss(3.0, 1.0, beta=0.5)  # 0.3133
    ```
    """
    margins = preference_margins(
        chosen_ratios, rejected_ratios, beta, divergence
    )
    return smoothed_sigmoid(margins, label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOLoss(MarginLoss):
    """Direct preference optimisation.

    `dpo_loss` of the log-ratios of the policy to the reference, summed over
    each completion's tokens; log 2 if the two policies are equal.

    The paper uses `beta` 0.1 (0.5 for summaries). `label_smoothing` is
    conservative DPO's; TRL 1.16 accepts it but ignores it.

    Args:
        label_smoothing: float, 0 or more and below 0.5: the assumed share
            of pairs with swapped labels.
        length_normalized: bool, whether to divide log-ratios by the lengths
            of their completions (TRL's `"sigmoid_norm"`). Not with a
            `divergence`: scores are defined up to a constant, which would
            no longer cancel.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`.

    References:
        - [Rafailov et al., 2023](https://arxiv.org/abs/2305.18290).
        - [Mitchell, 2023](https://ericmitchell.ai/cdpo.pdf), smoothing.
        - [Wang et al., 2023](https://arxiv.org/abs/2309.16240), divergences.

    Example:

    ```python
    loss = kpt.losses.DPOLoss(beta=0.1)
    batch = {
        "segment_ids": np.array([[1, 1, 1], [1, 1, 1]]),
        "sequence_mask": np.ones((2, 1)),
        "completion_mask": np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]),
        "ref_per_token_logps": np.full((2, 3), -1.0),
    }
    outputs = {"per_token_logps": np.full((2, 3), -1.0)}
    value, metrics = loss(batch, outputs)  # value is log(2)
    ```
    """

    label_smoothing: float = 0.0
    length_normalized: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self)
        valid = not (self.length_normalized and self.divergence is not None)
        check(
            self,
            "length_normalized",
            valid,
            "False with a `divergence`, whose scores are defined up to a "
            "constant that lengths would not cancel",
        )

    def pair_losses(self, values):
        chosen, rejected = values.chosen_ratios, values.rejected_ratios
        if self.length_normalized:
            chosen, rejected = values.averaged(chosen, rejected)
        return dpo_loss(
            chosen,
            rejected,
            self.beta,
            self.label_smoothing,
            self.divergence,
        )


def ipo_loss(chosen_ratios, rejected_ratios, beta=0.1):
    """Computes the IPO loss of each pair.

    `(chosen_ratios - rejected_ratios - 1 / (2 beta))**2`.

    Args:
        chosen_ratios, rejected_ratios, beta: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Azar et al., 2023](https://arxiv.org/abs/2310.12036), equation 17.

    Example:

    ```python
    kpt.losses.ipo_loss(3.0, 1.0, beta=0.5)  # 1.0
    ```
    """
    return (chosen_ratios - rejected_ratios - 0.5 / beta) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPOLoss(ReferenceLoss):
    """Identity preference optimisation: a squared distance from a margin.

    `ipo_loss` of log-ratios averaged over each completion's tokens, as the
    authors' code and TRL compute it; the paper's formula has the sums. The
    reported rewards are those of the sums. The paper's experiments use
    `beta` (its tau) from 0.1 to 1. For the arguments see `ReferenceLoss`.

    Example:

    ```python
    loss = kpt.losses.IPOLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 16.0
    task.compile(loss=loss)
    ```
    """

    def pair_losses(self, values):
        chosen, rejected = values.averaged(
            values.chosen_ratios, values.rejected_ratios
        )
        return ipo_loss(chosen, rejected, self.beta)


def hinge_loss(chosen_ratios, rejected_ratios, beta=0.1, divergence=None):
    """Computes the hinge loss of each pair.

    `max(0, 1 - beta * (chosen_ratios - rejected_ratios))`.

    Args:
        chosen_ratios, rejected_ratios, beta, divergence: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Zhao et al., 2023](https://arxiv.org/abs/2305.10425), SLiC-HF.

    Example:

    ```python
    kpt.losses.hinge_loss(3.0, 1.0, beta=0.1)  # 0.8
    ```
    """
    margins = preference_margins(
        chosen_ratios, rejected_ratios, beta, divergence
    )
    return jax.nn.relu(1 - margins)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HingeLoss(MarginLoss):
    """The hinge loss of DPO's margin, `hinge_loss`.

    SLiC's calibration loss with DPO's rewards, as normalised by RSO
    ([Liu et al., 2023](https://arxiv.org/abs/2309.06657)). For the arguments
    see `MarginLoss`.

    Example:

    ```python
    loss = kpt.losses.HingeLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 0.8
    task.compile(loss=loss)
    ```
    """

    function = staticmethod(hinge_loss)


def robust_dpo_loss(
    chosen_ratios,
    rejected_ratios,
    beta=0.1,
    label_smoothing=0.1,
    divergence=None,
):
    """Computes the robust DPO loss of each pair.

    `(-(1 - s) log sigmoid(m) + s log sigmoid(-m)) / (1 - 2 s)` with the
    margin `m` of `dpo_loss` and the share `s` of swapped labels.

    Args:
        chosen_ratios, rejected_ratios, beta, divergence: see `dpo_loss`.
        label_smoothing: float, the share of swapped labels.

    Returns:
        A float array of the same shape.

    Reference:
        - [Chowdhury et al., 2024](https://arxiv.org/abs/2403.00409).

    Example:

    ```python
    kpt.losses.robust_dpo_loss(3.0, 1.0, beta=0.5)  # 0.1883
    ```
    """
    margins = preference_margins(
        chosen_ratios, rejected_ratios, beta, divergence
    )
    right = -(1 - label_smoothing) * jax.nn.log_sigmoid(margins)
    wrong = -label_smoothing * jax.nn.log_sigmoid(-margins)
    return (right - wrong) / (1 - 2 * label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobustDPOLoss(MarginLoss):
    """DPO that is unbiased under randomly swapped labels, `robust_dpo_loss`.

    Args:
        label_smoothing: float, 0 or more and below 0.5: the share of pairs
            with swapped labels. The paper tries 0.1 to 0.4.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`.

    Example:

    ```python
    loss = kpt.losses.RobustDPOLoss(beta=0.1, label_smoothing=0.1)
    loss(pair_batch, pair_outputs)[0]  # 0.5731
    task.compile(loss=loss)
    ```
    """

    label_smoothing: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self)

    function = staticmethod(robust_dpo_loss)


def exo_pair_loss(
    chosen_ratios,
    rejected_ratios,
    beta=0.1,
    label_smoothing=1e-3,
    divergence=None,
):
    """Computes the EXO loss of each pair.

    `p log(p / (1 - s)) + (1 - p) log((1 - p) / s)` with `p = sigmoid(m)` of
    the margin `m` of `dpo_loss`: the reverse KL to the smoothed labels.

    Args:
        chosen_ratios, rejected_ratios, beta, divergence: see `dpo_loss`.
        label_smoothing: float above 0, the probability of the rejected
            completion under the smoothed label.

    Returns:
        A float array of the same shape.

    Reference:
        - [Ji et al., 2024](https://arxiv.org/abs/2402.00856), equation 16.

    Example:

    ```python
    kpt.losses.exo_pair_loss(3.0, 1.0, beta=0.5)  # 1.2764
    ```
    """
    margins = preference_margins(
        chosen_ratios, rejected_ratios, beta, divergence
    )
    losses = 0.0
    for sign, share in ((1, 1 - label_smoothing), (-1, label_smoothing)):
        logps = jax.nn.log_sigmoid(sign * margins)
        losses += jnp.exp(logps) * (logps - jnp.log(share))
    return losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExoPairLoss(MarginLoss):
    """Efficient exact optimisation, `exo_pair_loss`.

    Args:
        label_smoothing: float above 0 and below 0.5, the probability of
            the rejected completion under the smoothed label. The paper's is
            0.001.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`.

    Example:

    ```python
    loss = kpt.losses.ExoPairLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 2.422
    task.compile(loss=loss)
    ```
    """

    label_smoothing: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self, above_zero=True)

    function = staticmethod(exo_pair_loss)


def nca_pair_loss(chosen_ratios, rejected_ratios, beta=0.1):
    """Computes the pairwise NCA loss of each pair.

    `-log sigmoid(c) - log sigmoid(-c) / 2 - log sigmoid(-r) / 2` with the
    rewards `c = beta * chosen_ratios` and `r = beta * rejected_ratios`.

    Args:
        chosen_ratios, rejected_ratios, beta: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Chen et al., 2024](https://arxiv.org/abs/2402.05369), table 2.

    Example:

    ```python
    kpt.losses.nca_pair_loss(3.0, 1.0, beta=1.0)  # 2.2300
    ```
    """
    chosen, rejected = beta * chosen_ratios, beta * rejected_ratios
    return -(
        jax.nn.log_sigmoid(chosen)
        + 0.5 * jax.nn.log_sigmoid(-chosen)
        + 0.5 * jax.nn.log_sigmoid(-rejected)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NCAPairLoss(ReferenceLoss):
    """Noise-contrastive alignment of pairs, `nca_pair_loss`.

    Unlike DPO, it also maintains the likelihood of the chosen completion. The
    paper's `beta` is 0.01. For the arguments see `ReferenceLoss`.

    Example:

    ```python
    loss = kpt.losses.NCAPairLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 1.3388
    task.compile(loss=loss)
    ```
    """

    function = staticmethod(nca_pair_loss)


def bco_pair_loss(chosen_ratios, rejected_ratios, beta=0.1):
    """Computes the pairwise BCO loss of each pair.

    `-log sigmoid(c) - log sigmoid(-r)` with the rewards
    `c = beta * chosen_ratios` and `r = beta * rejected_ratios`.

    Args:
        chosen_ratios, rejected_ratios, beta: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Jung et al., 2024](https://arxiv.org/abs/2404.04656).

    Example:

    ```python
    kpt.losses.bco_pair_loss(3.0, 1.0, beta=1.0)  # 1.3618
    ```
    """
    chosen, rejected = beta * chosen_ratios, beta * rejected_ratios
    return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BCOPairLoss(ReferenceLoss):
    """Binary classifier optimisation of pairs, `bco_pair_loss`.

    As in TRL, the rewards are not shifted. The paper subtracts their running
    mean; this loss has no state. The paper's `beta` is 0.01. For the
    arguments see `ReferenceLoss`.

    Example:

    ```python
    loss = kpt.losses.BCOPairLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 1.2888
    task.compile(loss=loss)
    ```
    """

    function = staticmethod(bco_pair_loss)


def sppo_hard_loss(chosen_ratios, rejected_ratios, beta=0.1):
    """Computes the SPPO loss of each pair, with hard labels.

    `(chosen_ratios - 1 / (2 beta))**2 + (rejected_ratios + 1 / (2 beta))**2`.

    Args:
        chosen_ratios, rejected_ratios, beta: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [Wu et al., 2024](https://arxiv.org/abs/2405.00675), equation 4.7.

    Example:

    ```python
    kpt.losses.sppo_hard_loss(3.0, 1.0, beta=0.5)  # 8.0
    ```
    """
    target = 0.5 / beta
    winner = (chosen_ratios - target) ** 2
    return winner + (rejected_ratios + target) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SPPOHardLoss(ReferenceLoss):
    """Self-play preference optimisation with hard labels, `sppo_hard_loss`.

    The paper estimates the probability that one completion is preferred;
    with hard labels it is 1 and 0. The paper's `beta` (1 / eta) is 0.001. For
    the arguments see `ReferenceLoss`.

    Example:

    ```python
    loss = kpt.losses.SPPOHardLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 32.0
    task.compile(loss=loss)
    ```
    """

    function = staticmethod(sppo_hard_loss)


def aot_loss(better, worse, mask, beta=0.1, label_smoothing=0.0):
    """Computes the AOT loss of each rank of two sorted sides.

    `-log sigmoid(beta * (sort(better) - sort(worse)))`, smoothed as in
    `dpo_loss`. A pair gets the loss of the rank that equals its place among
    the pairs, so that only the sum over pairs has a meaning.

    Args:
        better: float array of shape `(pairs,)`, such as the log-ratios of
            the chosen completions.
        worse: float array of the same shape, such as the log-ratios of the
            rejected completions.
        mask: float array of the same shape, 1 where there is a pair.
        beta: float, the strength of the regularisation.
        label_smoothing: float, the assumed share of swapped labels.

    Returns:
        A float array of shape `(pairs,)`, 0 where `mask` is 0.

    Reference:
        - [Melnyk et al., 2024](https://arxiv.org/abs/2406.05882).

    Example:

    ```python
    kpt.losses.aot_loss(
        np.array([3.0, 1.0]), np.array([0.0, 2.0]), np.ones(2), beta=1.0
    )  # [0.3133, 0.3133]: ranks 1 - 0 and 3 - 2
    ```
    """
    # Unused slots are sorted behind the last pair and have no rank.
    have = jnp.arange(better.size) < mask.sum()
    better, worse = (
        jnp.where(have, jnp.sort(jnp.where(mask != 0, side, jnp.inf)), 0.0)
        for side in (better, worse)
    )
    losses = smoothed_sigmoid(beta * (better - worse), label_smoothing)
    # Ranks are at the front, but pairs may occupy any of the slots.
    place = jnp.maximum(jnp.cumsum(mask).astype("int32") - 1, 0)
    return jnp.where(mask != 0, losses[place], 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AOTLoss(ReferenceLoss):
    """Alignment by optimal transport of distributions of rewards.

    `aot_loss` of two sides that are sorted over the full batch, so that the
    better side dominates at every quantile. The loss is `batch_coupled`.

    Args:
        paired: bool. `True` compares the margins of the policy with those of
            the reference; `False` the log-ratios of chosen completions with
            those of rejected ones.
        label_smoothing: float, 0 or more and below 0.5, as in `DPOLoss`.
        beta, ld_alpha: see `ReferenceLoss`. The paper's `beta` is 0.01.
            `use_weighting` has no meaning among sorted values.

    Example:

    ```python
    loss = kpt.losses.AOTLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 0.5981
    task.compile(loss=loss)
    ```
    """

    paired: bool = True
    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self)
        wanted = "False: a rank belongs to no one pair"
        check(self, "use_weighting", not self.use_weighting, wanted)

    @property
    def batch_coupled(self):
        return True

    def pair_losses(self, values):
        better, worse = values.chosen_ratios, values.rejected_ratios
        if self.paired:
            better = values.chosen_logps - values.rejected_logps
            margins = values.chosen_ratios - values.rejected_ratios
            worse = better - margins
        return aot_loss(
            better, worse, values.mask, self.beta, self.label_smoothing
        )


def apo_zero_loss(chosen_ratios, rejected_ratios, beta=0.1):
    """Computes the APO-zero loss of each pair.

    `sigmoid(-beta * chosen_ratios) + sigmoid(beta * rejected_ratios)`: chosen
    completions become more probable, rejected ones less.

    Args:
        chosen_ratios, rejected_ratios, beta: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [D'Oosterlinck et al., 2024](https://arxiv.org/abs/2408.06266).

    Example:

    ```python
    kpt.losses.apo_zero_loss(3.0, 1.0, beta=1.0)  # 0.7785
    ```
    """
    chosen, rejected = beta * chosen_ratios, beta * rejected_ratios
    return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class APOZeroLoss(ReferenceLoss):
    """Anchored preference optimisation, `apo_zero_loss`.

    For chosen completions that are better than the policy's own. The paper's
    `beta` is 0.1. For the arguments see `ReferenceLoss`.

    Example:

    ```python
    loss = kpt.losses.APOZeroLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 0.95
    task.compile(loss=loss)
    ```
    """

    function = staticmethod(apo_zero_loss)


def apo_down_loss(chosen_ratios, rejected_ratios, beta=0.1):
    """Computes the APO-down loss of each pair.

    `sigmoid(c) + sigmoid(r - c)` with the rewards `c = beta * chosen_ratios`
    and `r = beta * rejected_ratios`: both completions become less probable,
    rejected ones more so.

    Args:
        chosen_ratios, rejected_ratios, beta: see `dpo_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [D'Oosterlinck et al., 2024](https://arxiv.org/abs/2408.06266).

    Example:

    ```python
    kpt.losses.apo_down_loss(3.0, 1.0, beta=1.0)  # 1.0718
    ```
    """
    chosen, rejected = beta * chosen_ratios, beta * rejected_ratios
    return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class APODownLoss(ReferenceLoss):
    """Anchored preference optimisation, `apo_down_loss`.

    For chosen completions that are worse than the policy's own. The paper's
    `beta` is 0.1. For the arguments see `ReferenceLoss`.

    Example:

    ```python
    loss = kpt.losses.APODownLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 0.9751
    task.compile(loss=loss)
    ```
    """

    function = staticmethod(apo_down_loss)


def discopop_loss(
    chosen_ratios, rejected_ratios, beta=0.1, tau=0.05, divergence=None
):
    """Computes the DiscoPOP loss of each pair.

    `(1 - g) * -log sigmoid(m) + g * exp(-m)` with the margin `m` of
    `dpo_loss` and the gate `g = sigmoid(m / tau)`.

    Args:
        chosen_ratios, rejected_ratios, beta, divergence: see `dpo_loss`.
        tau: float above 0, the width of the transition.

    Returns:
        A float array of the same shape.

    Reference:
        - [Lu et al., 2024](https://arxiv.org/abs/2406.08414), equation 5.

    Example:

    ```python
    kpt.losses.discopop_loss(3.0, 1.0, beta=0.5)  # 0.3679
    ```
    """
    margins = preference_margins(
        chosen_ratios, rejected_ratios, beta, divergence
    )
    mixed = jax.nn.sigmoid(margins / tau)
    logistic = -(1 - mixed) * jax.nn.log_sigmoid(margins)
    return logistic + mixed * bounded_exp(-margins)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoPOPLoss(MarginLoss):
    """The log-ratio modulated loss `discopop_loss`, found by a language model.

    Args:
        tau: float above 0, the width of the transition. The paper's is 0.05.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`. The
            paper's `beta` is 0.05.

    Example:

    ```python
    loss = kpt.losses.DiscoPOPLoss(beta=0.05)
    loss(pair_batch, pair_outputs)[0]  # 0.8738
    task.compile(loss=loss)
    ```
    """

    tau: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        check(self, "tau", self.tau > 0, "above 0")

    function = staticmethod(discopop_loss)
