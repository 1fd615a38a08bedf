"""What losses of preference pairs share."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import pairs, reductions
from keras_posttrain.losses.f_divergences import ReverseKL
from keras_posttrain.losses.loss import Loss
from keras_posttrain.losses.policy_loss import check

PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "entropy",
    "mean_token_accuracy",
)
# Rewards that differ by less, of the log-probabilities they are made of, are
# equal: a few units in float32's last place.
ROUNDING = 1e-6


def smoothed_sigmoid(margins, label_smoothing=0.0):
    """`-log sigmoid` of margins, with labels that may be the wrong way.

    Args:
        margins: float array of any shape.
        label_smoothing: float, the share of pairs that are held to be
            swapped.

    Returns:
        A float array of the same shape.
    """
    losses = -(1 - label_smoothing) * jax.nn.log_sigmoid(margins)
    if label_smoothing:
        losses -= label_smoothing * jax.nn.log_sigmoid(-margins)
    return losses


def check_smoothing(loss, above_zero=False):
    value = loss.label_smoothing
    sound = 0 < value < 0.5 if above_zero else 0 <= value < 0.5
    wanted = "above 0" if above_zero else "0 or more"
    check(loss, "label_smoothing", sound, f"{wanted} and below 0.5")


@dataclasses.dataclass(frozen=True)
class PairValues:
    """What a loss knows of each pair: arrays of shape `(pairs,)`.

    Attributes:
        chosen_logps, rejected_logps: log-probabilities of the completions,
            sums over their tokens (means where the loss says so).
        chosen_ratios, rejected_ratios: `log(policy / reference)` of them,
            `None` without a reference.
        chosen_lengths, rejected_lengths: how many tokens they have.
        mask: 1 where there is a pair.
    """

    chosen_logps: jax.Array
    rejected_logps: jax.Array
    chosen_lengths: jax.Array
    rejected_lengths: jax.Array
    mask: jax.Array
    chosen_ratios: jax.Array | None = None
    rejected_ratios: jax.Array | None = None

    def averaged(self, chosen, rejected):
        """Both divided by the tokens of their completions."""
        return (
            reductions.ratio(chosen, self.chosen_lengths),
            reductions.ratio(rejected, self.rejected_lengths),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLoss(Loss):
    """A mean over preference pairs; the base of one of your own.

    A subclass defines `pair_losses`, and `values` where it reads more than
    log-probabilities. The sequences of a batch, read row by row, are chosen,
    rejected, chosen, rejected: neighbours in a row, or in two rows of one
    sequence each. Slots where `sequence_mask` is 0 are passed over.

    Args:
        beta: float above 0, what log-probabilities are multiplied with to
            be rewards.

    Call arguments:
        batch: dict of arrays: `completion_mask` and `segment_ids` of shape
            `(rows, length)`, `sequence_mask` of shape
            `(rows, num_sequences)`, and `ref_per_token_logps` of shape
            `(rows, length)` where the loss has a reference.
        outputs: dict of arrays of shape `(rows, length)`:
            `per_token_logps`, and `ref_per_token_logps` where the batch has
            none. With `entropies` and `correct`, the entropy of the
            completions and the accuracy on the chosen ones are reported.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars.

    Example:

    ```python
    class SquaredLoss(kpt.losses.PairLoss):
        def pair_losses(self, values):
            margins = values.chosen_logps - values.rejected_logps
            return (margins - 1 / self.beta) ** 2
    ```
    """

    beta: float = 0.1

    metric_names = PAIR_METRICS

    def __post_init__(self):
        check(self, "beta", self.beta > 0, "above 0")

    @property
    def needs(self):
        return ("per_token_logps", "correct", "entropies")

    def pair_losses(self, values):
        """The loss of each pair, `(pairs,)`, of `PairValues`."""
        raise NotImplementedError

    def rewards(self, values):
        """`(chosen, rejected)`, the rewards that are reported."""
        return (
            self.beta * values.chosen_logps,
            self.beta * values.rejected_logps,
        )

    def values(self, tokens, logps, batch, outputs):
        """`PairValues` of `PairTokens`.

        Args:
            tokens: `PairTokens`.
            logps: float array of shape `(rows, length)`, 0 outside the
                completions.
            batch, outputs: as the loss is called with.
        """
        return PairValues(
            *tokens.sums(logps), *tokens.lengths, tokens.pairs.mask
        )

    def pair_weights(self, tokens, logps, outputs):
        """The weight of each pair, `(pairs,)`, or `None` for 1."""
        return None

    def more_terms(self, tokens, values, batch, outputs):
        """`(terms, metrics)` beside the mean over pairs."""
        return {}, {}

    def normalizers(self, batch):
        return {"pairs": pairs.Pairs.of(batch).count()}

    def total(self, batch, outputs):
        tokens = pairs.PairTokens(batch)
        logps = tokens.read(outputs["per_token_logps"])
        values = self.values(tokens, logps, batch, outputs)
        losses = self.pair_losses(values)
        weights = self.pair_weights(tokens, logps, outputs)
        if weights is not None:
            losses = losses * weights
        terms, metrics = self.more_terms(tokens, values, batch, outputs)
        chosen, rejected = self.rewards(values)
        mean = tokens.pairs.metric
        # Where the policy is the reference still, nothing but rounding is.
        size = abs(values.chosen_logps) + abs(values.rejected_logps)
        ahead = chosen - rejected > ROUNDING * self.beta * size
        metrics |= {
            "rewards/chosen": mean(chosen),
            "rewards/rejected": mean(rejected),
            "rewards/accuracies": mean(ahead.astype("float32")),
            "rewards/margins": mean(chosen - rejected),
            "logps/chosen": mean(values.chosen_logps),
            "logps/rejected": mean(values.rejected_logps),
        }
        metrics |= pairs.token_metrics(
            outputs, tokens.mask, chosen_mask(tokens)
        )
        return {"pairs": tokens.pairs.sum(losses), **terms}, metrics


def chosen_mask(tokens):
    """The completion mask, 0 in the rejected ones, of `PairTokens`."""
    one = tokens.pairs.mask
    is_chosen = tokens.pairs.put(one, jnp.zeros_like(one))
    return tokens.mask * reductions.spread(is_chosen, tokens.segment_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLoss(PairLoss):
    """A pair loss that goes by the ratios of the policy to a reference.

    Args:
        beta: float above 0, the strength of the pull to the reference.
        ld_alpha: float from 0 to 1, or `None`: the weight of the tokens by
            which the longer completion of a pair exceeds the shorter one
            (LD-DPO), in the rewards as well. `None` is 1.
        use_weighting: bool, whether each pair weighs as much as its two
            completions are probable under the policy (WPO).

    References:
        - [Liu et al., 2024](https://arxiv.org/abs/2409.06411), LD-DPO.
        - [Zhou et al., 2024](https://arxiv.org/abs/2406.11827), WPO.
    """

    ld_alpha: float | None = None
    use_weighting: bool = False

    def __post_init__(self):
        super().__post_init__()
        sound = self.ld_alpha is None or 0 <= self.ld_alpha <= 1
        check(self, "ld_alpha", sound, "from 0 to 1, or None")

    @property
    def needs(self):
        more = ("collision_entropies",) if self.use_weighting else ()
        return (*super().needs, "ref_per_token_logps", *more)

    def rewards(self, values):
        return (
            self.beta * values.chosen_ratios,
            self.beta * values.rejected_ratios,
        )

    def values(self, tokens, logps, batch, outputs):
        reference = tokens.read(pairs.reference_logps(batch, outputs))
        weights = None
        if self.ld_alpha is not None:
            weights = tokens.beyond_shared(self.ld_alpha)
        chosen, rejected = tokens.sums(logps, weights)
        chosen_ratio, rejected_ratio = tokens.sums(logps - reference, weights)
        return PairValues(
            chosen,
            rejected,
            *tokens.lengths,
            tokens.pairs.mask,
            chosen_ratio,
            rejected_ratio,
        )

    def pair_weights(self, tokens, logps, outputs):
        if not self.use_weighting:
            return None
        aligned = logps + tokens.read(outputs["collision_entropies"])
        chosen, rejected = tokens.means(jax.lax.stop_gradient(aligned))
        return jnp.exp(chosen + rejected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginLoss(ReferenceLoss):
    """A reference loss that goes by how far the chosen is ahead.

    Args:
        divergence: `ReverseKL()`, `ForwardKL()`, `JensenShannon()`,
            `AlphaDivergence(alpha)`, or another function of log-ratios that
            gives scores of the same shape: what the policy is kept near the
            reference by. `None` is the reverse KL.
        beta, ld_alpha, use_weighting: see `ReferenceLoss`.
    """

    divergence: object = None

    def __post_init__(self):
        super().__post_init__()
        known = self.divergence is None or callable(self.divergence)
        wanted = "None or a function of log-ratios, such as ForwardKL()"
        check(self, "divergence", known, wanted)

    def margins(self, values):
        """`beta` times the difference of scores, `(pairs,)`."""
        score = self.divergence or ReverseKL()
        return self.beta * (
            score(values.chosen_ratios) - score(values.rejected_ratios)
        )
