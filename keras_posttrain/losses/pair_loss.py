"""Base classes of losses of preference pairs."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import pairs, reductions
from keras_posttrain.losses.f_divergences import ReverseKL
from keras_posttrain.losses.loss import Loss, check, check_types, settings_of

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
# Rewards count as equal if they differ by less than this share of the
# log-probabilities they are computed from: a few units in float32's last
# place.
ROUNDING = 1e-6


def smoothed_sigmoid(margins, label_smoothing):
    """Computes `-log sigmoid(margins)`, smoothed as in `dpo_loss`."""
    losses = -(1 - label_smoothing) * jax.nn.log_sigmoid(margins)
    if label_smoothing:
        losses -= label_smoothing * jax.nn.log_sigmoid(-margins)
    return losses


def check_smoothing(loss, above_zero=False):
    value = loss.label_smoothing
    valid = 0 < value < 0.5 if above_zero else 0 <= value < 0.5
    wanted = "above 0" if above_zero else "0 or more"
    check(loss, "label_smoothing", valid, f"{wanted} and below 0.5")


@dataclasses.dataclass(frozen=True)
class PairValues:
    """The inputs of a loss for each pair: arrays of shape `(pairs,)`.

    Attributes:
        chosen_logps, rejected_logps: log-probabilities of the completions,
            sums over their tokens (means for some losses).
        chosen_ratios, rejected_ratios: `log(policy / reference)` of the
            completions, `None` without a reference.
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
        """Divides both arrays by the lengths of the completions."""
        return (
            reductions.ratio(chosen, self.chosen_lengths),
            reductions.ratio(rejected, self.rejected_lengths),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLoss(Loss):
    """Base class of losses of preference pairs, public for custom ones.

    The loss is the mean of `pair_losses` over the pairs of the batch. A
    subclass defines `pair_losses`, or `function`, and overrides `values` if
    it reads more than log-probabilities.

    The sequences of a batch, read row by row, are chosen, rejected, chosen,
    rejected: neighbours in a row, or in two rows of one sequence each. Slots
    where `sequence_mask` is 0 are skipped.

    Args:
        beta: float above 0, the factor from log-probabilities to rewards.

    Call arguments:
        batch: dict of arrays: `completion_mask` and `segment_ids` of shape
            `(rows, length)`, `sequence_mask` of shape
            `(rows, num_sequences)`, and `ref_per_token_logps` of shape
            `(rows, length)` if the loss has a reference.
        outputs: dict of arrays of shape `(rows, length)`:
            `per_token_logps`, and `ref_per_token_logps` if the batch has
            none. With `entropies` and `correct`, the entropy of the
            completions and the accuracy on the chosen ones are reported.

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
    # The pure function of the loss, a `staticmethod`: it takes the chosen and
    # the rejected log-ratios (without a reference log-probabilities), and
    # settings by their names.
    function = None
    # Whether the loss reads log-ratios to a reference policy. Only then may
    # a subclass declare the settings below as fields; see `ReferenceLoss`.
    has_reference = False
    ld_alpha = None
    use_weighting = False

    def __post_init__(self):
        check_types(self)
        check(self, "beta", self.beta > 0, "above 0")
        valid = self.ld_alpha is None or 0 <= self.ld_alpha <= 1
        check(self, "ld_alpha", valid, "from 0 to 1, or None")

    @property
    def needs(self):
        reference = ("ref_per_token_logps",) * self.has_reference
        weighting = ("collision_entropies",) * self.use_weighting
        return (
            "per_token_logps",
            "correct",
            "entropies",
            *reference,
            *weighting,
        )

    def pair_losses(self, values):
        """Computes the loss of each pair, `(pairs,)`, from `PairValues`."""
        if self.function is None:
            raise NotImplementedError
        logps = values.chosen_logps, values.rejected_logps
        ratios = values.chosen_ratios, values.rejected_ratios
        pair = ratios if self.has_reference else logps
        return self.function(*pair, **settings_of(self, self.function, 2))

    def rewards(self, values):
        """Computes `(chosen, rejected)`, the rewards to report."""
        if self.has_reference:
            return (
                self.beta * values.chosen_ratios,
                self.beta * values.rejected_ratios,
            )
        return (
            self.beta * values.chosen_logps,
            self.beta * values.rejected_logps,
        )

    def values(self, tokens, logps, batch, outputs):
        """Reduces the tokens of each completion to `PairValues`.

        `logps` are of shape `(rows, length)`, 0 outside the completions.
        """
        if not self.has_reference:
            return PairValues(
                *tokens.sums(logps), *tokens.lengths, tokens.pairs.mask
            )
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
        """Computes the weight of each pair, `(pairs,)`, or `None` for 1."""
        if not self.use_weighting:
            return None
        aligned = logps + tokens.read(outputs["collision_entropies"])
        chosen, rejected = tokens.means(jax.lax.stop_gradient(aligned))
        return jnp.exp(chosen + rejected)

    def more_terms(self, tokens, values, batch, outputs):
        """Computes `(terms, metrics)` in addition to the mean over pairs."""
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
        # While the policy equals the reference, margins are only rounding.
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
    """Returns the completion mask of `PairTokens`, 0 in rejected ones."""
    one = tokens.pairs.mask
    is_chosen = tokens.pairs.put(one, jnp.zeros_like(one))
    return tokens.mask * reductions.spread(is_chosen, tokens.segment_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLoss(PairLoss):
    """Base class of pair losses with a reference policy.

    `pair_losses` finds `chosen_ratios` and `rejected_ratios` in its
    `PairValues`. Public for custom losses.

    Args:
        beta: float above 0, the strength of the regularisation towards the
            reference.
        ld_alpha: float from 0 to 1, or `None`: the weight of the tokens by
            which the longer completion of a pair exceeds the shorter one
            (LD-DPO), in the rewards as well. `None` is 1.
        use_weighting: bool, whether to weight each pair by the probability
            of its two completions under the policy (WPO).

    References:
        - [Liu et al., 2024](https://arxiv.org/abs/2409.06411), LD-DPO.
        - [Zhou et al., 2024](https://arxiv.org/abs/2406.11827), WPO.

    Example:

    ```python
    class ExponentialPairLoss(kpt.losses.ReferenceLoss):
        def pair_losses(self, values):
            margins = values.chosen_ratios - values.rejected_ratios
            return jnp.exp(-self.beta * margins)

    ExponentialPairLoss(beta=0.5)(pair_batch, pair_outputs)[0]  # exp(-1)
    task.compile(loss=ExponentialPairLoss(beta=0.5))
    ```
    """

    ld_alpha: float | None = None
    use_weighting: bool = False

    has_reference = True


def preference_margins(chosen_ratios, rejected_ratios, beta, divergence=None):
    """Computes `beta * (score(chosen) - score(rejected))` of each pair.

    The scores are those of a `divergence`, as in `MarginLoss`.

    Example:

    ```python
    kpt.losses.preference_margins(3.0, 1.0, beta=0.5)  # 1.0
    forward = kpt.losses.ForwardKL()
    kpt.losses.preference_margins(1.0, 0.0, 0.5, forward)  # 0.3161
    ```
    """
    score = divergence or ReverseKL()
    return beta * (score(chosen_ratios) - score(rejected_ratios))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginLoss(PairLoss):
    """Base class of reference losses of the margin between two scores.

    Public for custom losses, which compute their loss from `margins`.

    Args:
        divergence: the f-divergence that keeps the policy close to the
            reference: `ReverseKL()`, `ForwardKL()`, `JensenShannon()`,
            `AlphaDivergence(alpha)`, or another function from log-ratios to
            scores of the same shape. `None` is the reverse KL.
        beta, ld_alpha, use_weighting: see `ReferenceLoss`.

    Example:

    ```python
    class SquaredHingeLoss(kpt.losses.MarginLoss):
        def pair_losses(self, values):
            return jax.nn.relu(1 - self.margins(values)) ** 2

    SquaredHingeLoss(beta=0.1)(pair_batch, pair_outputs)[0]  # 0.64
    task.compile(loss=SquaredHingeLoss(beta=0.1))
    ```
    """

    ld_alpha: float | None = None
    use_weighting: bool = False
    divergence: object = None

    has_reference = True

    def __post_init__(self):
        super().__post_init__()
        known = self.divergence is None or callable(self.divergence)
        wanted = "None or a function of log-ratios, such as ForwardKL()"
        check(self, "divergence", known, wanted)

    def margins(self, values):
        """Computes `preference_margins` of `PairValues`, `(pairs,)`."""
        return preference_margins(
            values.chosen_ratios,
            values.rejected_ratios,
            self.beta,
            self.divergence,
        )
