"""Losses of preference pairs without a reference policy."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.losses.f_divergences import bounded_exp
from keras_posttrain.losses.loss import check
from keras_posttrain.losses.pair_loss import (
    PAIR_METRICS,
    PairLoss,
    PairValues,
    check_smoothing,
    chosen_mask,
    smoothed_sigmoid,
)
from keras_posttrain.losses.pairs import PairTokens
from keras_posttrain.losses.preference import hinge_loss, ipo_loss


def nll_term(coefficient, logps, weights):
    """Returns `(terms, metrics)` of the mean cross-entropy of tokens."""
    total = -reductions.token_sum(logps, weights)
    metric = ("mean", total, weights.sum())
    return {"nll": coefficient * total}, {"nll_loss": metric}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenSFTLoss(PairLoss):
    """Cross-entropy of the chosen completions, the rejected ones ignored.

    The mean of `sft_loss` over all their tokens in the full batch. TRL's
    `"sft"` averages within a micro-batch; iterative RPO averages the means of
    completions. Add it to a preference loss with `SumLoss`. The reported
    rewards are `beta` times log-probabilities.

    Reference:
        - [Pang et al., 2024](https://arxiv.org/abs/2404.19733).

    Example:

    ```python
    loss = kpt.losses.ChosenSFTLoss()
    loss(pair_batch, pair_outputs)[0]  # 0.5
    task.compile(loss=loss)
    ```
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


def cpo_loss(chosen_logps, rejected_logps, beta=0.1, label_smoothing=0.0):
    """Computes the preference term of CPO of each pair.

    `-log sigmoid(beta * (chosen_logps - rejected_logps))`, smoothed as in
    `dpo_loss`.

    Args:
        chosen_logps: float array of any shape, such as `(pairs,)`: sums over
            tokens of log-probabilities of the chosen completions, in nats.
        rejected_logps: float array of the same shape, of the rejected ones.
        beta: float, the factor from log-probabilities to rewards.
        label_smoothing: float, the assumed share of swapped labels.

    Returns:
        A float array of the same shape.

    Reference:
        - [Xu et al., 2024](https://arxiv.org/abs/2401.08417).

    Example:

    ```python
    kpt.losses.cpo_loss(-1.0, -3.0, beta=0.5)  # 0.3133
    ```
    """
    margins = beta * chosen_logps - beta * rejected_logps
    return smoothed_sigmoid(margins, label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOLoss(PairLoss):
    """Contrastive preference optimisation: DPO with a uniform reference.

    `cpo_loss` of each pair, averaged over pairs, plus `nll_coef` times the
    cross-entropy, averaged over the chosen tokens of the full batch. The
    paper uses `beta` 0.1.

    Args:
        nll_coef: float, the weight of the cross-entropy (TRL's `cpo_alpha`).
        label_smoothing: float, 0 or more and below 0.5, as in `DPOLoss`.
        beta: see `PairLoss`.

    Example:

    ```python
    loss = kpt.losses.CPOLoss(beta=0.1, nll_coef=1.0)
    loss(pair_batch, pair_outputs)[0]  # 1.0981
    task.compile(loss=loss)
    ```
    """

    nll_coef: float = 1.0
    label_smoothing: float = 0.0

    metric_names = (*PAIR_METRICS, "nll_loss")

    # Whether log-probabilities are averaged over tokens instead of summed.
    averages = False

    def __post_init__(self):
        super().__post_init__()
        check(self, "nll_coef", self.nll_coef >= 0, "0 or more")
        check_smoothing(self)

    def values(self, tokens, logps, batch, outputs):
        reduce = tokens.means if self.averages else tokens.sums
        return PairValues(*reduce(logps), *tokens.lengths, tokens.pairs.mask)

    function = staticmethod(cpo_loss)

    def normalizers(self, batch):
        nll = {"nll": chosen_mask(PairTokens(batch)).sum()}
        return super().normalizers(batch) | (nll if self.nll_coef else {})

    def more_terms(self, tokens, values, batch, outputs):
        logps = tokens.read(outputs["per_token_logps"])
        terms, metrics = nll_term(self.nll_coef, logps, chosen_mask(tokens))
        return (terms if self.nll_coef else {}), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOHingeLoss(CPOLoss):
    """`CPOLoss` with `hinge_loss` of rewards; `label_smoothing` must be 0.

    Example:

    ```python
    loss = kpt.losses.CPOHingeLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 1.3
    task.compile(loss=loss)
    ```
    """

    def __post_init__(self):
        super().__post_init__()
        check(self, "label_smoothing", self.label_smoothing == 0, "0")

    def pair_losses(self, values):
        chosen, rejected = self.rewards(values)
        return hinge_loss(chosen, rejected, beta=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOIPOLoss(CPOLoss):
    """`CPOLoss` with `ipo_loss` of means; `label_smoothing` must be 0.

    Example:

    ```python
    loss = kpt.losses.CPOIPOLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 16.5
    task.compile(loss=loss)
    ```
    """

    averages = True

    def __post_init__(self):
        super().__post_init__()
        check(self, "label_smoothing", self.label_smoothing == 0, "0")

    function = staticmethod(ipo_loss)


def simpo_reward(logps, beta, alpha):
    """Computes the reward of `simpo_loss` from mean log-probabilities."""
    if not alpha:
        return beta * logps
    return beta / alpha * (1 - bounded_exp(-alpha * logps))


def simpo_loss(
    chosen_logps,
    rejected_logps,
    beta=2.0,
    gamma=0.5,
    alpha=0.0,
    label_smoothing=0.0,
):
    """Computes the SimPO loss of each pair.

    `-log sigmoid(reward(chosen) - reward(rejected) - gamma)`, smoothed as in
    `dpo_loss`, with the reward `beta * logps`, or for AlphaPO
    `beta * (1 - exp(-alpha * logps)) / alpha`.

    Args:
        chosen_logps, rejected_logps: as in `cpo_loss`, but means over tokens
            instead of sums.
        gamma: float, the target margin.
        alpha: float, AlphaPO's exponent, 0 for SimPO.
        beta, label_smoothing: see `cpo_loss`.

    Returns:
        A float array of the same shape.

    References:
        - [Meng et al., 2024](https://arxiv.org/abs/2405.14734).
        - [Gupta et al., 2025](https://arxiv.org/abs/2501.03884), AlphaPO.

    Example:

    ```python
    kpt.losses.simpo_loss(-0.5, -1.5, beta=2.0, gamma=0.5)  # 0.2014
    ```
    """
    chosen = simpo_reward(chosen_logps, beta, alpha)
    rejected = simpo_reward(rejected_logps, beta, alpha)
    return smoothed_sigmoid(chosen - rejected - gamma, label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimPOLoss(CPOLoss):
    """Simple preference optimisation: mean log-probabilities and a margin.

    `simpo_loss` of the means over each completion's tokens. The paper uses
    `beta` from 2 to 2.5, `gamma` from 0.3 to 1.6 and no cross-entropy.

    Args:
        gamma: float, the target margin (TRL's `simpo_gamma`).
        alpha: float, AlphaPO's exponent, 0 for SimPO. AlphaPO's best is
            0.25.
        beta, nll_coef, label_smoothing: see `CPOLoss`.

    Example:

    ```python
    loss = kpt.losses.SimPOLoss(beta=2.0, gamma=0.5)
    loss(pair_batch, pair_outputs)[0]  # 0.2014
    task.compile(loss=loss)
    ```
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
        return (
            simpo_reward(values.chosen_logps, self.beta, self.alpha),
            simpo_reward(values.rejected_logps, self.beta, self.alpha),
        )

    function = staticmethod(simpo_loss)


def log_odds_ratio(chosen_logps, rejected_logps):
    """Computes `log(odds(chosen) / odds(rejected))` of each pair.

    `odds(p) = p / (1 - p)` of the mean probability of a completion's token.
    """

    def log_odds(logps):
        # The odds of a completion of probability 1 would be infinite.
        logps = jnp.minimum(logps, -1e-7)
        return logps - jnp.log(-jnp.expm1(logps))

    return log_odds(chosen_logps) - log_odds(rejected_logps)


def orpo_loss(chosen_logps, rejected_logps, beta=0.1):
    """Computes the odds-ratio term of ORPO of each pair.

    `-beta log sigmoid(log(odds(chosen) / odds(rejected)))` with
    `odds(p) = p / (1 - p)` of the mean probability of a completion's token.

    Args:
        chosen_logps, rejected_logps: see `simpo_loss`.
        beta: float, the weight of the term (the paper's lambda).

    Returns:
        A float array of the same shape.

    Reference:
        - [Hong et al., 2024](https://arxiv.org/abs/2403.07691).

    Example:

    ```python
    kpt.losses.orpo_loss(np.log(0.5), np.log(0.25), beta=1.0)  # log(4 / 3)
    ```
    """
    odds = log_odds_ratio(chosen_logps, rejected_logps)
    return -beta * jax.nn.log_sigmoid(odds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOLoss(PairLoss):
    """Odds ratio preference optimisation: SFT plus an odds-ratio term.

    `orpo_loss` of each pair, averaged over pairs, plus the cross-entropy of
    the chosen sequences, averaged over tokens. The paper uses `beta` (its
    lambda) from 0.1 to 0.25.

    Args:
        include_prompt: bool, whether the cross-entropy includes the prompt,
            as in the authors' code and in TRL, or only the completion, as in
            the paper. Needs `positions` in the batch.
        beta: see `PairLoss`.

    Example:

    ```python
    loss = kpt.losses.ORPOLoss(beta=0.1)
    loss(pair_batch, pair_outputs)[0]  # 0.5171
    task.compile(loss=loss)
    ```
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

    function = staticmethod(orpo_loss)

    def normalizers(self, batch):
        nll = self._trained(batch, PairTokens(batch)).sum()
        return {**super().normalizers(batch), "nll": nll}

    def more_terms(self, tokens, values, batch, outputs):
        logps = jnp.asarray(outputs["per_token_logps"])
        trained = self._trained(batch, tokens)
        terms, metrics = nll_term(1.0, logps, trained)
        odds = log_odds_ratio(values.chosen_logps, values.rejected_logps)
        mean = tokens.pairs.metric
        metrics["log_odds_ratio"] = mean(jax.nn.log_sigmoid(odds))
        metrics["log_odds_chosen"] = mean(odds)
        return terms, metrics

    def _trained(self, batch, tokens):
        """Computes the weights of tokens in the cross-entropy."""
        if not self.include_prompt:
            return chosen_mask(tokens)
        if "positions" not in batch:
            raise ValueError(
                "`ORPOLoss(include_prompt=True)` needs `positions` of shape "
                "(rows, length), the position of each token in its sequence. "
                f"Received: batch with {sorted(batch)}"
            )
        one = tokens.pairs.mask
        chosen = tokens.pairs.put(one, jnp.zeros_like(one))
        if "prefix_segments" in batch:
            # The prompt may be a separate sequence that others continue.
            prefix = jnp.asarray(batch["prefix_segments"]) * (chosen != 0)
            ids = jnp.arange(1, chosen.shape[1] + 1)
            shared = (prefix[:, None, :] == ids[None, :, None]).any(axis=2)
            chosen = jnp.maximum(chosen, shared.astype("float32"))
        has_logp = (jnp.asarray(batch["positions"]) > 0).astype("float32")
        return has_logp * reductions.spread(chosen, tokens.segment_ids)
