"""Preference losses of single completions, labelled good or bad."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import pairs, reductions
from keras_posttrain.losses.loss import Loss
from keras_posttrain.losses.policy_loss import check

# The values of `roles`.
LABELLED, MISMATCHED = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledLoss(Loss):
    """A mean over completions with a label; the base of one of your own.

    A subclass defines `sequence_losses`.

    Args:
        beta: float above 0, what log-ratios to the reference are multiplied
            with to be rewards.
        desirable_weight: float, the weight of the good completions.
        undesirable_weight: float, that of the bad ones.

    Call arguments:
        batch: dict of arrays: `completion_mask` and `segment_ids` of shape
            `(rows, length)`; of shape `(rows, num_sequences)`
            `sequence_mask`, `labels` (not 0 for a good completion), and
            `roles` where there are other completions than labelled ones
            (role 0); `ref_per_token_logps` of shape `(rows, length)`.
        outputs: dict of arrays of shape `(rows, length)`:
            `per_token_logps`, and `ref_per_token_logps` where the batch has
            none.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    metric_names = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "entropy",
    )

    def __post_init__(self):
        check(self, "beta", self.beta > 0, "above 0")
        for name in ("desirable_weight", "undesirable_weight"):
            check(self, name, getattr(self, name) >= 0, "0 or more")

    @property
    def needs(self):
        return ("per_token_logps", "entropies", "ref_per_token_logps")

    def sequence_losses(self, good, log_ratios, baseline):
        """The loss of each completion.

        Args:
            good: bool array of shape `(rows, num_sequences)`.
            log_ratios: float array of the same shape.
            baseline: float scalar.

        Returns:
            A float array of shape `(rows, num_sequences)`.
        """
        raise NotImplementedError

    def baseline(self, batch, log_ratios):
        """`(baseline, metrics)`: what log-ratios are measured from."""
        return 0.0, {}

    def normalizers(self, batch):
        return {"sequences": _with_role(batch, LABELLED).sum()}

    def total(self, batch, outputs):
        if "labels" not in batch:
            raise ValueError(
                f"{type(self).__name__} needs `labels` of shape (rows, "
                "num_sequences), not 0 for a good completion. Received: "
                f"batch with {sorted(batch)}"
            )
        mask = jnp.asarray(batch["completion_mask"]).astype("float32")
        segment_ids = jnp.asarray(batch["segment_ids"])
        counted = _with_role(batch, LABELLED)

        def summed(per_token):
            kept = jnp.where(mask != 0, jnp.asarray(per_token), 0.0)
            return reductions.segment_sum(
                kept.astype("float32") * mask, segment_ids, counted.shape[1]
            )

        logps = summed(outputs["per_token_logps"])
        log_ratios = logps - summed(pairs.reference_logps(batch, outputs))
        good = jnp.asarray(batch["labels"]) != 0
        baseline, metrics = self.baseline(batch, log_ratios)
        losses = self.sequence_losses(good, log_ratios, baseline)
        losses = losses * jnp.where(
            good, self.desirable_weight, self.undesirable_weight
        )
        total = jnp.sum(jnp.where(counted != 0, losses, 0.0))
        metrics |= self._metrics(good, counted, logps, log_ratios)
        token_mask = mask * reductions.spread(counted, segment_ids)
        metrics |= pairs.token_metrics(
            {k: v for k, v in outputs.items() if k == "entropies"},
            token_mask,
            token_mask,
        )
        return {"sequences": total}, metrics

    def _metrics(self, good, counted, logps, log_ratios):
        metrics = {}
        sides = (("chosen", good), ("rejected", ~good))
        for name, values in (
            ("rewards", self.beta * log_ratios),
            ("logps", logps),
        ):
            for side, where in sides:
                where = where & (counted != 0)
                total = jnp.sum(jnp.where(where, values, 0.0))
                count = where.astype("float32").sum()
                metrics[f"{name}/{side}"] = ("mean", total, count)
        chosen, rejected = (
            metrics[f"rewards/{side}"][1:] for side, _ in sides
        )
        metrics["rewards/margins"] = ("difference", *chosen, *rejected)
        return metrics


def _with_role(batch, role):
    """`(rows, num_sequences)`, 1 for the sequences that have the role."""
    used = jnp.asarray(batch["sequence_mask"]) != 0
    roles = jnp.asarray(batch.get("roles", jnp.zeros(used.shape, "int32")))
    return (used & (roles == role)).astype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOLoss(LabelledLoss):
    """Kahneman-Tversky optimisation: good or bad, measured from a baseline.

    `1 - sigmoid(beta * (log_ratio - z))` for a good completion and
    `1 - sigmoid(beta * (z - log_ratio))` for a bad one. The baseline `z`
    estimates the KL divergence from the reference: the mean log-ratio of
    completions under prompts that they do not belong to, at least 0, without
    a gradient. It couples the batch, which is never cut for it.

    The batch holds those completions as sequences of role 1 (`roles`, of
    shape `(rows, num_sequences)`), with a `completion_mask` as any other;
    their labels are not read. TRL makes them by passing completions on to
    the next prompt of a micro-batch.

    The paper takes `beta` 0.1, and weights such that good and bad completions
    count for about the same: `desirable_weight * good` from 1 to 4/3 times
    `undesirable_weight * bad` (equation 8).

    Args:
        beta, desirable_weight, undesirable_weight: see `LabelledLoss`.

    Reference:
        - [Ethayarajh et al., 2024](https://arxiv.org/abs/2402.01306).

    Example:

    ```python
    loss = kpt.losses.KTOLoss(beta=0.1)
    batch = {
        "segment_ids": np.array([[1, 1], [1, 1]]),
        "sequence_mask": np.ones((2, 1)),
        "completion_mask": np.array([[0.0, 1.0], [0.0, 1.0]]),
        "labels": np.array([[1], [0]]),
        "roles": np.array([[0], [1]]),
        "ref_per_token_logps": np.array([[0.0, -2.0], [0.0, -2.0]]),
    }
    outputs = {"per_token_logps": np.array([[0.0, -2.0], [0.0, -2.0]])}
    value, metrics = loss(batch, outputs)  # value is 0.5
    ```
    """

    metric_names = (*LabelledLoss.metric_names, "kl")

    @property
    def batch_coupled(self):
        return True

    def baseline(self, batch, log_ratios):
        if "roles" not in batch:
            raise ValueError(
                "KTOLoss needs completions under prompts that they do not "
                "belong to, as sequences of role 1 in `roles` of shape "
                "(rows, num_sequences). Give them, or use "
                "`APOZeroUnpairedLoss`, which has no baseline. Received: "
                f"batch with {sorted(batch)}"
            )
        mismatched = _with_role(batch, MISMATCHED)
        total = jnp.sum(jnp.where(mismatched != 0, log_ratios, 0.0))
        mean = reductions.ratio(total, mismatched.sum())
        baseline = jax.lax.stop_gradient(jnp.maximum(mean, 0.0))
        return baseline, {"kl": ("max", baseline)}

    def sequence_losses(self, good, log_ratios, baseline):
        distance = self.beta * (log_ratios - baseline)
        return jax.nn.sigmoid(jnp.where(good, -distance, distance))


@dataclasses.dataclass(frozen=True, kw_only=True)
class APOZeroUnpairedLoss(LabelledLoss):
    """`APOZeroLoss` for completions without a partner: KTO without its
    baseline.

    For good completions that are better than the policy's own.

    Args:
        beta, desirable_weight, undesirable_weight: see `LabelledLoss`.

    Reference:
        - [D'Oosterlinck et al., 2024](https://arxiv.org/abs/2408.06266).
    """

    def sequence_losses(self, good, log_ratios, baseline):
        reward = self.beta * log_ratios
        return jax.nn.sigmoid(jnp.where(good, -reward, reward))
