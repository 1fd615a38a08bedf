"""Preference losses of pairs, against a reference policy."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses.f_divergences import bounded_exp
from keras_posttrain.losses.pair_loss import (
    MarginLoss,
    ReferenceLoss,
    check_smoothing,
    smoothed_sigmoid,
)
from keras_posttrain.losses.policy_loss import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOLoss(MarginLoss):
    """Direct preference optimisation.

    `-log sigmoid(beta * (chosen - rejected))` of the log-ratios of the
    policy to the reference, summed over each completion's tokens; log 2
    where the two policies are the same.

    The paper takes `beta` 0.1 (0.5 for summaries). `label_smoothing` is
    conservative DPO's, which TRL 1.16 takes and leaves unused.

    Args:
        label_smoothing: float from 0, below 0.5: the share of pairs that are
            held to be labelled the wrong way round.
        length_normalized: bool, whether log-ratios are divided by the tokens
            of their completions (TRL's `"sigmoid_norm"`). Not with a
            `divergence`: scores are defined up to a constant, and that would
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
        sound = not (self.length_normalized and self.divergence is not None)
        check(
            self,
            "length_normalized",
            sound,
            "False with a `divergence`, whose scores are defined up to a "
            "constant that lengths would not cancel",
        )

    def pair_losses(self, values):
        margins = self.margins(values)
        if self.length_normalized:
            chosen, rejected = values.averaged(
                values.chosen_ratios, values.rejected_ratios
            )
            margins = self.beta * (chosen - rejected)
        return smoothed_sigmoid(margins, self.label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPOLoss(ReferenceLoss):
    """Identity preference optimisation: a squared distance from a margin.

    `(chosen - rejected - 1 / (2 beta))**2` of log-ratios for each token, as
    the authors and TRL compute it; the paper's formula has the sums. The
    rewards that are reported are those of the sums. The paper's experiments
    take `beta` (its tau) from 0.1 to 1.

    Args:
        beta, ld_alpha, use_weighting: see `ReferenceLoss`.

    Reference:
        - [Azar et al., 2023](https://arxiv.org/abs/2310.12036), equation 17.
    """

    def pair_losses(self, values):
        chosen, rejected = values.averaged(
            values.chosen_ratios, values.rejected_ratios
        )
        return (chosen - rejected - 0.5 / self.beta) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class HingeLoss(MarginLoss):
    """The hinge of the margin, `max(0, 1 - beta * (chosen - rejected))`.

    SLiC's calibration loss with DPO's rewards, as RSO normalises it.

    Args:
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`.

    References:
        - [Zhao et al., 2023](https://arxiv.org/abs/2305.10425), SLiC-HF.
        - [Liu et al., 2023](https://arxiv.org/abs/2309.06657), RSO.
    """

    def pair_losses(self, values):
        return jax.nn.relu(1 - self.margins(values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobustDPOLoss(MarginLoss):
    """DPO that stays unbiased where some labels are the wrong way round.

    Args:
        label_smoothing: float from 0, below 0.5: the share of pairs whose
            label is wrong. The paper tries 0.1 to 0.4.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`.

    Reference:
        - [Chowdhury et al., 2024](https://arxiv.org/abs/2403.00409).
    """

    label_smoothing: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self)

    def pair_losses(self, values):
        margins, share = self.margins(values), self.label_smoothing
        right = -(1 - share) * jax.nn.log_sigmoid(margins)
        wrong = -share * jax.nn.log_sigmoid(-margins)
        return (right - wrong) / (1 - 2 * share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExoPairLoss(MarginLoss):
    """Efficient exact optimisation: the reverse KL to the smoothed labels.

    Args:
        label_smoothing: float above 0 and below 0.5, the probability that
            the label gives to the rejected completion. The paper's is 0.001.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`.

    Reference:
        - [Ji et al., 2024](https://arxiv.org/abs/2402.00856), equation 16.
    """

    label_smoothing: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self, above_zero=True)

    def pair_losses(self, values):
        margins = self.margins(values)
        losses = 0.0
        for sign, share in (
            (1, 1 - self.label_smoothing),
            (-1, self.label_smoothing),
        ):
            logps = jax.nn.log_sigmoid(sign * margins)
            losses += jnp.exp(logps) * (logps - jnp.log(share))
        return losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class NCAPairLoss(ReferenceLoss):
    """Noise-contrastive alignment of pairs: the rewards themselves count.

    Unlike DPO it holds up the chosen completion's own likelihood.

    Args:
        beta, ld_alpha, use_weighting: see `ReferenceLoss`. The paper's
            `beta` is 0.01.

    Reference:
        - [Chen et al., 2024](https://arxiv.org/abs/2402.05369), table 2.
    """

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return -(
            jax.nn.log_sigmoid(chosen)
            + 0.5 * jax.nn.log_sigmoid(-chosen)
            + 0.5 * jax.nn.log_sigmoid(-rejected)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BCOPairLoss(ReferenceLoss):
    """Binary classifier optimisation of pairs: chosen yes, rejected no.

    As in TRL, the rewards are not shifted: the paper subtracts a running
    mean of them, which is 0 here, so that the loss keeps no state.

    Args:
        beta, ld_alpha, use_weighting: see `ReferenceLoss`. The paper's
            `beta` is 0.01.

    Reference:
        - [Jung et al., 2024](https://arxiv.org/abs/2404.04656).
    """

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SPPOHardLoss(ReferenceLoss):
    """Self-play preference optimisation with certain winners and losers.

    Log-ratios are drawn to `1 / (2 beta)` and to its negative. The paper
    estimates how likely one beats the other; here it is 1 and 0.

    Args:
        beta, ld_alpha, use_weighting: see `ReferenceLoss`. The paper's
            `beta` (1 / eta) is 0.001.

    Reference:
        - [Wu et al., 2024](https://arxiv.org/abs/2405.00675), equation 4.7.
    """

    def pair_losses(self, values):
        target = 0.5 / self.beta
        winner = (values.chosen_ratios - target) ** 2
        return winner + (values.rejected_ratios + target) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AOTLoss(ReferenceLoss):
    """Alignment by optimal transport: distributions of rewards, not pairs.

    Each side is sorted over the whole batch, and the loss goes by the
    differences of equal ranks: the better side is to dominate at every
    quantile. It couples the batch, which is never cut for it.

    Args:
        paired: bool. `True` compares the margins of the policy with those of
            the reference; `False` the log-ratios of chosen completions with
            those of rejected ones.
        label_smoothing: float from 0, below 0.5, as in `DPOLoss`.
        beta, ld_alpha: see `ReferenceLoss`. The paper's `beta` is 0.01.
            `use_weighting` has no meaning among sorted values.

    Reference:
        - [Melnyk et al., 2024](https://arxiv.org/abs/2406.05882).
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
        # What is no pair is sorted behind the last and has no rank.
        have = jnp.arange(better.size) < values.mask.sum()
        better, worse = (
            jnp.where(
                have, jnp.sort(jnp.where(values.mask != 0, side, jnp.inf)), 0.0
            )
            for side in (better, worse)
        )
        losses = smoothed_sigmoid(
            self.beta * (better - worse), self.label_smoothing
        )
        # Pairs may stand anywhere among the slots; ranks are at the front.
        return _at_pairs(losses, values.mask)


def _at_pairs(ranked, mask):
    """Hands the first values out to the slots of `mask`, in order."""
    place = jnp.maximum(jnp.cumsum(mask).astype("int32") - 1, 0)
    return jnp.where(mask != 0, ranked[place], 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class APOZeroLoss(ReferenceLoss):
    """Anchored preference optimisation, for chosen completions that are
    better than the policy's own: theirs go up, the rejected ones' down.

    Args:
        beta, ld_alpha, use_weighting: see `ReferenceLoss`. The paper's
            `beta` is 0.1.

    Reference:
        - [D'Oosterlinck et al., 2024](https://arxiv.org/abs/2408.06266).
    """

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class APODownLoss(ReferenceLoss):
    """Anchored preference optimisation, for chosen completions that are
    worse than the policy's own: both go down, the rejected ones further.

    Args:
        beta, ld_alpha, use_weighting: see `ReferenceLoss`. The paper's
            `beta` is 0.1.

    Reference:
        - [D'Oosterlinck et al., 2024](https://arxiv.org/abs/2408.06266).
    """

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscoPOPLoss(MarginLoss):
    """The log-ratio modulated loss that a language model discovered.

    With the margin `z`, `(1 - m) * -log sigmoid(z) + m * exp(-z)`, where
    `m = sigmoid(z / tau)`.

    Args:
        tau: float above 0, the width of the change from one to the other.
            The paper's is 0.05.
        beta, ld_alpha, use_weighting, divergence: see `MarginLoss`. The
            paper's `beta` is 0.05.

    Reference:
        - [Lu et al., 2024](https://arxiv.org/abs/2406.08414), equation 5.
    """

    tau: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        check(self, "tau", self.tau > 0, "above 0")

    def pair_losses(self, values):
        margins = self.margins(values)
        mixed = jax.nn.sigmoid(margins / self.tau)
        logistic = -(1 - mixed) * jax.nn.log_sigmoid(margins)
        return logistic + mixed * bounded_exp(-margins)
