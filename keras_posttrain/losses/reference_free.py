"""Preference losses of pairs that need no reference policy."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.losses.f_divergences import bounded_exp
from keras_posttrain.losses.pair_loss import (
    PAIR_METRICS,
    PairLoss,
    PairValues,
    check_smoothing,
    chosen_mask,
    smoothed_sigmoid,
)
from keras_posttrain.losses.pairs import PairTokens
from keras_posttrain.losses.policy_loss import check


def nll_term(coefficient, logps, weights):
    """`(terms, metrics)` of cross-entropy, the mean over weighted tokens."""
    total = -reductions.token_sum(logps, weights)
    metric = ("mean", total, weights.sum())
    return {"nll": coefficient * total}, {"nll_loss": metric}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenSFTLoss(PairLoss):
    """Cross-entropy of the chosen completions, the rejected ones ignored.

    The mean over all their tokens in the whole batch, as TRL's `"sft"` has
    it within a micro-batch; iterative RPO takes the mean over completions of
    their means. To be added to a preference loss with `SumLoss`. The rewards
    that are reported are `beta` times log-probabilities.

    Reference:
        - [Pang et al., 2024](https://arxiv.org/abs/2404.19733).
    """

    metric_names = (*PAIR_METRICS, "nll_loss")

    def normalizers(self, batch):
        return {"nll": chosen_mask(PairTokens(batch)).sum()}

    def total(self, batch, outputs):
        terms, metrics = super().total(batch, outputs)
        return {"nll": terms["nll"]}, metrics

    def pair_losses(self, values):
        return jnp.zeros_like(values.mask)

    def more_terms(self, tokens, values, batch, outputs):
        logps = tokens.read(outputs["per_token_logps"])
        return nll_term(1.0, logps, chosen_mask(tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOLoss(PairLoss):
    """Contrastive preference optimisation: DPO against a uniform reference,
    plus the cross-entropy of the chosen completions.

    The cross-entropy is the mean over the chosen tokens of the whole batch.
    The paper takes `beta` 0.1.

    Args:
        nll_coef: float, the weight of the cross-entropy (TRL's `cpo_alpha`).
        label_smoothing: float from 0, below 0.5, as in `DPOLoss`.
        beta: see `PairLoss`.

    Reference:
        - [Xu et al., 2024](https://arxiv.org/abs/2401.08417).
    """

    nll_coef: float = 1.0
    label_smoothing: float = 0.0

    metric_names = (*PAIR_METRICS, "nll_loss")

    # Whether log-probabilities are means over tokens, not sums.
    averages = False

    def __post_init__(self):
        super().__post_init__()
        check(self, "nll_coef", self.nll_coef >= 0, "0 or more")
        check_smoothing(self)

    def values(self, tokens, logps, batch, outputs):
        reduce = tokens.means if self.averages else tokens.sums
        return PairValues(*reduce(logps), *tokens.lengths, tokens.pairs.mask)

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return smoothed_sigmoid(chosen - rejected, self.label_smoothing)

    def normalizers(self, batch):
        nll = {"nll": chosen_mask(PairTokens(batch)).sum()}
        return super().normalizers(batch) | (nll if self.nll_coef else {})

    def more_terms(self, tokens, values, batch, outputs):
        logps = tokens.read(outputs["per_token_logps"])
        terms, metrics = nll_term(self.nll_coef, logps, chosen_mask(tokens))
        return (terms if self.nll_coef else {}), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOHingeLoss(CPOLoss):
    """`CPOLoss` with the hinge, `max(0, 1 - beta * (chosen - rejected))`.

    Args:
        beta, nll_coef: see `CPOLoss`; `label_smoothing` must be 0.

    Reference:
        - [Xu et al., 2024](https://arxiv.org/abs/2401.08417).
    """

    def __post_init__(self):
        super().__post_init__()
        check(self, "label_smoothing", self.label_smoothing == 0, "0")

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return jax.nn.relu(1 - (chosen - rejected))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOIPOLoss(CPOLoss):
    """`CPOLoss` with IPO's squared distance, of means over tokens.

    Args:
        beta, nll_coef: see `CPOLoss`; `label_smoothing` must be 0.

    Reference:
        - [Azar et al., 2023](https://arxiv.org/abs/2310.12036), equation 17.
    """

    averages = True

    def __post_init__(self):
        super().__post_init__()
        check(self, "label_smoothing", self.label_smoothing == 0, "0")

    def pair_losses(self, values):
        margins = values.chosen_logps - values.rejected_logps
        return (margins - 0.5 / self.beta) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimPOLoss(CPOLoss):
    """Simple preference optimisation: mean log-probabilities, and a margin.

    `-log sigmoid(beta * (chosen - rejected) - gamma)` of the means over each
    completion's tokens. The paper takes `beta` from 2 to 2.5 and `gamma`
    from 0.3 to 1.6, and no cross-entropy.

    Args:
        gamma: float, the margin (TRL's `simpo_gamma`).
        alpha: float: AlphaPO's reward is `(1 - p**-alpha) / alpha` of the
            mean probability `p`; 0 is its logarithm. AlphaPO's best is 0.25.
        beta, nll_coef, label_smoothing: see `CPOLoss`.

    References:
        - [Meng et al., 2024](https://arxiv.org/abs/2405.14734).
        - [Gupta et al., 2025](https://arxiv.org/abs/2501.03884), AlphaPO.
    """

    beta: float = 2.0
    nll_coef: float = 0.0
    gamma: float = 0.5
    alpha: float = 0.0

    averages = True

    def __post_init__(self):
        super().__post_init__()
        check(self, "gamma", self.gamma >= 0, "0 or more")

    def rewards(self, values):
        if not self.alpha:
            return super().rewards(values)
        scale = self.beta / self.alpha
        return tuple(
            scale * (1 - bounded_exp(-self.alpha * logps))
            for logps in (values.chosen_logps, values.rejected_logps)
        )

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        margins = chosen - rejected - self.gamma
        return smoothed_sigmoid(margins, self.label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOLoss(PairLoss):
    """Odds ratio preference optimisation: SFT, and odds of the chosen.

    The cross-entropy of the chosen sequence, plus `beta` times
    `-log sigmoid` of the log odds ratio of the mean token probabilities.
    The paper takes `beta` (its lambda) 0.1 to 0.25.

    Args:
        include_prompt: bool, whether the cross-entropy is over the prompt
            too, as in the authors' code and in TRL, or over the completion
            alone, as the paper writes. Needs `positions` in the batch.
        beta: see `PairLoss`.

    Reference:
        - [Hong et al., 2024](https://arxiv.org/abs/2403.07691).
    """

    include_prompt: bool = True

    metric_names = (
        *PAIR_METRICS,
        "nll_loss",
        "log_odds_ratio",
        "log_odds_chosen",
    )

    def logps_mask(self, batch):
        mask = super().logps_mask(batch)
        if self.include_prompt:
            mask = mask | (self._trained(batch, PairTokens(batch)) != 0)
        return mask

    def values(self, tokens, logps, batch, outputs):
        means = tokens.means(logps)
        return PairValues(*means, *tokens.lengths, tokens.pairs.mask)

    def pair_losses(self, values):
        return -self.beta * jax.nn.log_sigmoid(log_odds_ratio(values))

    def normalizers(self, batch):
        nll = self._trained(batch, PairTokens(batch)).sum()
        return {**super().normalizers(batch), "nll": nll}

    def more_terms(self, tokens, values, batch, outputs):
        logps = jnp.asarray(outputs["per_token_logps"])
        trained = self._trained(batch, tokens)
        terms, metrics = nll_term(1.0, logps, trained)
        odds = log_odds_ratio(values)
        mean = tokens.pairs.metric
        metrics["log_odds_ratio"] = mean(jax.nn.log_sigmoid(odds))
        metrics["log_odds_chosen"] = mean(odds)
        return terms, metrics

    def _trained(self, batch, tokens):
        """The weights of tokens in the cross-entropy, `(rows, length)`."""
        if not self.include_prompt:
            return chosen_mask(tokens)
        if "positions" not in batch:
            raise ValueError(
                "`ORPOLoss(include_prompt=True)` needs `positions` of shape "
                "(rows, length), the place of each token in its sequence. "
                f"Received: batch with {sorted(batch)}"
            )
        one = tokens.pairs.mask
        chosen = tokens.pairs.put(one, jnp.zeros_like(one))
        if "prefix_segments" in batch:
            # The prompt may be a sequence of its own that others continue.
            prefix = jnp.asarray(batch["prefix_segments"]) * (chosen != 0)
            ids = jnp.arange(1, chosen.shape[1] + 1)
            shared = (prefix[:, None, :] == ids[None, :, None]).any(axis=2)
            chosen = jnp.maximum(chosen, shared.astype("float32"))
        has_logp = (jnp.asarray(batch["positions"]) > 0).astype("float32")
        return has_logp * reductions.spread(chosen, tokens.segment_ids)


def log_odds_ratio(values):
    """`log(odds of the chosen / odds of the rejected)`, `(pairs,)`."""

    def log_odds(logps):
        # A certain completion (p = 1) would have infinite odds.
        logps = jnp.minimum(logps, -1e-7)
        return logps - jnp.log(-jnp.expm1(logps))

    return log_odds(values.chosen_logps) - log_odds(values.rejected_logps)
