"""Losses of unpaired completions with desirable or undesirable labels."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import pairs, reductions
from keras_posttrain.losses.loss import Loss, check, check_types

# The values of `roles`.
LABELLED, MISMATCHED = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledLoss(Loss):
    """Base class of losses of labelled completions, public for custom ones.

    The loss is the weighted sum of `sequence_losses` divided by the number
    of labelled completions. A subclass defines `sequence_losses`.

    Args:
        beta: float above 0, the factor from log-ratios to rewards.
        desirable_weight: float, the weight of desirable completions.
        undesirable_weight: float, the weight of undesirable completions.

    Call arguments:
        batch: dict of arrays: `completion_mask` and `segment_ids` of shape
            `(rows, length)`; of shape `(rows, num_sequences)`
            `sequence_mask`, `labels` (not 0 for a desirable completion), and
            `roles` if there are other completions than labelled ones (role
            0); `ref_per_token_logps` of shape `(rows, length)`.
        outputs: dict of arrays of shape `(rows, length)`:
            `per_token_logps`, and `ref_per_token_logps` if the batch has
            none.

    Example:

    ```python
    class LogisticLoss(kpt.losses.LabelledLoss):
        def sequence_losses(self, good, log_ratios, baseline):
            signs = jnp.where(good, 1.0, -1.0)
            return -jax.nn.log_sigmoid(self.beta * signs * log_ratios)

    LogisticLoss(beta=0.5)(label_batch, pair_outputs)[0]  # 0.4741
    task.compile(loss=LogisticLoss(beta=0.5))
    ```
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
        check_types(self)
        check(self, "beta", self.beta > 0, "above 0")
        for name in ("desirable_weight", "undesirable_weight"):
            check(self, name, getattr(self, name) >= 0, "0 or more")

    @property
    def needs(self):
        return ("per_token_logps", "entropies", "ref_per_token_logps")

    def sequence_losses(self, good, log_ratios, baseline):
        """Computes the loss of each completion, `(rows, num_sequences)`.

        `good`, bools from the labels, and `log_ratios` are of that shape;
        `baseline` is a scalar.
        """
        raise NotImplementedError

    def baseline(self, batch, log_ratios):
        """Computes `(baseline, metrics)`, the origin of log-ratios."""
        return 0.0, {}

    def normalizers(self, batch):
        return {"sequences": _with_role(batch, LABELLED).sum()}

    def total(self, batch, outputs):
        if "labels" not in batch:
            raise ValueError(
                f"{type(self).__name__} needs `labels` of shape (rows, "
                "num_sequences), not 0 for a desirable completion. Received: "
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
    """Marks the sequences that have a role with 1, `(rows, num_sequences)`."""
    used = jnp.asarray(batch["sequence_mask"]) != 0
    roles = jnp.asarray(batch.get("roles", jnp.zeros(used.shape, "int32")))
    return (used & (roles == role)).astype("float32")


def kto_loss(log_ratios, labels, baseline, beta=0.1):
    """Computes the KTO loss of each completion.

    `1 - sigmoid(beta * (log_ratio - baseline))` for a desirable completion,
    `1 - sigmoid(beta * (baseline - log_ratio))` for an undesirable one.

    Args:
        log_ratios: float array of any shape, such as
            `(rows, num_sequences)`: `log(policy / reference)` of each
            completion, in nats.
        labels: bool or int array of the same shape, not 0 for a desirable
            completion.
        baseline: float scalar, an estimate of the KL divergence of the
            policy from the reference.
        beta: float, the factor from log-ratios to rewards.

    Returns:
        A float array of the same shape.

    Reference:
        - [Ethayarajh et al., 2024](https://arxiv.org/abs/2402.01306).

    Example:

    ```python
    log_ratios, labels = np.array([3.0, 3.0]), np.array([1, 0])
    kpt.losses.kto_loss(log_ratios, labels, baseline=1.0, beta=0.5)
    # [0.2689, 0.7311]
    ```
    """
    distance = beta * (log_ratios - baseline)
    return jax.nn.sigmoid(jnp.where(labels != 0, -distance, distance))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOLoss(LabelledLoss):
    """Kahneman-Tversky optimisation of labelled completions.

    `kto_loss` of each completion. The baseline estimates the KL divergence
    from the reference: the mean log-ratio of completions under mismatched
    prompts, at least 0, without a gradient. The loss is `batch_coupled`.

    The batch holds the mismatched completions as sequences of role 1
    (`roles`, of shape `(rows, num_sequences)`), with a `completion_mask` like
    any other; their labels are not read. TRL shifts completions to the next
    prompt of a micro-batch instead.

    The paper uses `beta` 0.1, and weights that balance the labels:
    `desirable_weight * n_desirable` from 1 to 4/3 times
    `undesirable_weight * n_undesirable` (equation 8).

    Args:
        beta, desirable_weight, undesirable_weight: see `LabelledLoss`.

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
        return kto_loss(log_ratios, good, baseline, self.beta)


def apo_zero_unpaired_loss(log_ratios, labels, beta=0.1):
    """Computes the APO-zero loss of each completion, without pairs.

    `sigmoid(-beta * log_ratio)` for a desirable completion,
    `sigmoid(beta * log_ratio)` for an undesirable one.

    Args:
        log_ratios, labels, beta: as in `kto_loss`.

    Returns:
        A float array of the same shape.

    Reference:
        - [D'Oosterlinck et al., 2024](https://arxiv.org/abs/2408.06266).

    Example:

    ```python
    log_ratios, labels = np.array([2.0, 2.0]), np.array([1, 0])
    kpt.losses.apo_zero_unpaired_loss(log_ratios, labels, beta=0.5)
    # [0.2689, 0.7311]
    ```
    """
    rewards = beta * log_ratios
    return jax.nn.sigmoid(jnp.where(labels != 0, -rewards, rewards))


@dataclasses.dataclass(frozen=True, kw_only=True)
class APOZeroUnpairedLoss(LabelledLoss):
    """`apo_zero_unpaired_loss`: KTO without a baseline.

    For desirable completions that are better than the policy's own. For the
    arguments see `LabelledLoss`.

    Example:

    ```python
    loss = kpt.losses.APOZeroUnpairedLoss(beta=0.1)
    loss(label_batch, pair_outputs)[0]  # 0.475
    task.compile(loss=loss)
    ```
    """

    def sequence_losses(self, good, log_ratios, baseline):
        return apo_zero_unpaired_loss(log_ratios, good, self.beta)
