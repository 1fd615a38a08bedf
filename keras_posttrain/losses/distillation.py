"""Losses that distill a teacher's distributions into a student."""

import dataclasses
import math

from keras_posttrain.losses import divergence, reductions
from keras_posttrain.losses.loss import Loss, check, check_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationLoss(Loss):
    """Base class of losses of a divergence from a teacher's distribution.

    Public for custom losses. A subclass defines `divergence`, a function of
    the log-probabilities of the same outcomes. It is called inside the loop
    that projects a chunk of tokens on the vocabulary, with the student's and
    the teacher's distribution of each token, both at `temperature`; only its
    result, one number per token, reaches the loss. The loss is

    `alpha * temperature**2 * mean(divergence)
    + (1 - alpha) * mean(-log p(token))`

    with both means over the tokens of the full batch, weighted by
    `completion_mask`. The second term is the cross-entropy of the hard
    labels at temperature 1.

    TRL 1.16 has no `alpha` and no factor of `temperature**2`
    (`squared_temperature=False`), and its `GKDTrainer` leaves the
    temperature out of its loss. Tunix 0.1.7 has both factors, with
    `temperature=2.0` and `alpha=0.5`, and averages over every
    position, padding and prompt included.

    Args:
        temperature: float above 0, the divisor of both sides' logits in the
            divergence. The paper of Hinton et al. tries 1 to 20.
        alpha: float from 0 to 1, the weight of the divergence; the weight
            of the hard labels is `1 - alpha`.
        squared_temperature: bool, whether to multiply the divergence by
            `temperature**2`, which keeps the scale of its gradient close to
            that of the hard labels.
        tail: bool, whether one additional outcome stands for all others on
            both sides if only the teacher's top-k tokens are known.

    Call arguments:
        batch: dict of arrays of shape `(rows, length)`: `completion_mask`,
            and optionally `teacher_mask`, 0 for tokens for which the teacher
            has no distribution and 1 for others.
        outputs: dict of arrays of shape `(rows, length)`: `divergences`,
            without `alpha` and the factor of the temperature;
            `per_token_logps`, at temperature 1; and `agrees`, 1 where the
            student's most probable token is the teacher's. Without `agrees`
            the agreement is not reported.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict of float32 scalars:
        `divergence`, `hard_loss` and `agreement`, means over tokens.

    Raises:
        ValueError: if a setting is out of its range.

    Reference:
        - [Hinton et al., 2015](https://arxiv.org/abs/1503.02531).

    Example:

    ```python
    class JeffreysLoss(kpt.losses.DistillationLoss):
        def divergence(self, student_logps, teacher_logps):
            ratios = teacher_logps - student_logps
            surplus = jnp.exp(teacher_logps) - jnp.exp(student_logps)
            return (surplus * ratios).sum(axis=-1)

    loss = JeffreysLoss(temperature=2.0, alpha=0.5)
    ```
    """

    temperature: float = 1.0
    alpha: float = 1.0
    squared_temperature: bool = True
    tail: bool = True

    metric_names = ("divergence", "hard_loss", "agreement")

    def __post_init__(self):
        check_types(self)
        sound = math.isfinite(self.temperature) and self.temperature > 0
        check(self, "temperature", sound, "a finite number above 0")
        sound = 0 <= self.alpha <= 1
        check(self, "alpha", sound, "from 0 (hard labels alone) to 1")

    @property
    def same_vocabulary(self):
        """True if `divergence` needs the same outcomes on both sides."""
        return True

    @property
    def needs(self):
        return ("divergences", "per_token_logps", "agrees")

    def divergence(self, student_logps, teacher_logps):
        """Computes the divergence of each token.

        Args:
            student_logps: float32 array of shape `(..., outcomes)`: the log
                of the probabilities of the full vocabulary at
                `temperature`, or of the teacher's top-k tokens (and one
                outcome for all others, with `tail`).
            teacher_logps: float32 array of the same shape.

        Returns:
            A float32 array of shape `(...)`, differentiable in the student,
            with a finite gradient at -inf as well.
        """
        raise NotImplementedError

    def normalizers(self, batch):
        counts = {"divergence": distilled_mask(batch).sum()}
        if self.alpha != 1:
            mask = batch["completion_mask"].astype("float32")
            counts["hard_loss"] = mask.sum()
        return counts

    def total(self, batch, outputs):
        mask = batch["completion_mask"].astype("float32")
        distilled = distilled_mask(batch)
        total = reductions.token_sum(outputs["divergences"], distilled)
        squared = self.temperature**2 if self.squared_temperature else 1.0
        terms = {"divergence": self.alpha * squared * total}
        metrics = {"divergence": ("mean", total, distilled.sum())}
        if self.alpha != 1 or "per_token_logps" in outputs:
            logps = outputs["per_token_logps"]
            hard = -reductions.token_sum(logps, mask)
            metrics["hard_loss"] = ("mean", hard, mask.sum())
            if self.alpha != 1:
                terms["hard_loss"] = (1.0 - self.alpha) * hard
        if "agreement" in self.metric_names and "agrees" in outputs:
            seen = (distilled != 0).astype("float32")
            agrees = reductions.token_sum(outputs["agrees"], seen)
            metrics["agreement"] = ("mean", agrees, seen.sum())
        return terms, metrics


def distilled_mask(batch):
    """Returns the weights of tokens with a teacher, `(rows, length)`."""
    mask = batch["completion_mask"].astype("float32")
    if "teacher_mask" not in batch:
        return mask
    return mask * batch["teacher_mask"].astype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardKLLoss(DistillationLoss):
    """`forward_kl_loss`: the student covers all modes of the teacher.

    The classical distillation loss; with `alpha=0` on the teacher's own
    samples it becomes sequence-level distillation. TRL's generalised
    Jensen-Shannon divergence with `beta=0` is this; so is Tunix's logit
    strategy, whose settings are `temperature=2.0, alpha=0.5`. For the
    arguments see `DistillationLoss`.

    Example:

    ```python
    loss = kpt.losses.ForwardKLLoss(temperature=2.0)
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    loss.divergence(student, teacher)  # 0.1308
    task.compile(loss=loss)
    ```
    """

    def divergence(self, student_logps, teacher_logps):
        return divergence.forward_kl_loss(student_logps, teacher_logps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReverseKLLoss(DistillationLoss):
    """`reverse_kl_loss`: the student avoids what the teacher finds improbable.

    Meant for the student's own samples, as in MiniLLM, which uses its policy
    gradient, and on-policy distillation. TRL's `DistillationTrainer` uses it,
    at temperature 1 and only on samples. For the arguments see
    `DistillationLoss`.

    Example:

    ```python
    loss = kpt.losses.ReverseKLLoss()
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    loss.divergence(student, teacher)  # 0.1438
    task.compile(loss=loss)
    ```
    """

    def divergence(self, student_logps, teacher_logps):
        return divergence.reverse_kl_loss(student_logps, teacher_logps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JSDLoss(DistillationLoss):
    """The generalised Jensen-Shannon divergence of GKD, `jsd_loss`.

    It is bounded and symmetric at `beta=0.5`. Close to 0 it approaches the
    forward KL and close to 1 the reverse KL, both times `beta * (1 - beta)`:
    it decays towards both ends, where its gradient is 0.

    TRL and the paper's code use the KL divergences at 0 and 1, which makes a
    jump: `kl_at_ends=True`. `scaled=True` divides by `beta * (1 - beta)`,
    which is continuous between the two KL divergences.

    Args:
        beta: float between 0 and 1; the ends only with `kl_at_ends` or
            `scaled`. The paper tries 0.1, 0.5 and 0.9; TRL's default is 0.5.
        scaled: bool, whether to divide by `beta * (1 - beta)`.
        kl_at_ends: bool, whether to use the KL divergences at 0 and 1.
        temperature, alpha, squared_temperature, tail: see `DistillationLoss`.
            The paper trains at temperature 1.

    Example:

    ```python
    loss = kpt.losses.JSDLoss(beta=0.5)
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    loss.divergence(student, teacher)  # 0.0338
    task.compile(loss=loss)
    ```
    """

    beta: float = 0.5
    scaled: bool = False
    kl_at_ends: bool = False

    def __post_init__(self):
        super().__post_init__()
        check(self, "beta", 0 <= self.beta <= 1, "from 0 to 1")
        if self.beta in (0, 1) and not (self.scaled or self.kl_at_ends):
            limit = "ReverseKLLoss" if self.beta else "ForwardKLLoss"
            raise ValueError(
                "The generalised Jensen-Shannon divergence is 0 at `beta` 0 "
                "and 1 for every student. Received: "
                f"beta={self.beta!r}. Use `{limit}()`, or "
                "`kl_at_ends=True`, which uses that at this end, or "
                "`scaled=True`, which runs from the forward KL at 0 to the "
                "reverse KL at 1 without a jump."
            )

    def divergence(self, student_logps, teacher_logps):
        # At the ends these are the KL divergences, for both settings.
        scaled = self.scaled or self.beta in (0, 1)
        return divergence.jsd_loss(
            student_logps, teacher_logps, self.beta, scaled
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkewKLLoss(DistillationLoss):
    """The skewed KL divergence of DistiLLM, `skew_kl_loss`.

    It is bounded, with bounded gradients where the student's probability of
    the teacher's tokens is close to 0.

    Args:
        skew: float, 0 or more and below 1. The paper uses 0.1. At 0 it is
            the KL divergence itself.
        reverse: bool, see `skew_kl_loss`.
        temperature, alpha, squared_temperature, tail: see `DistillationLoss`.

    Example:

    ```python
    loss = kpt.losses.SkewKLLoss(skew=0.1)
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    loss.divergence(student, teacher)  # 0.107
    task.compile(loss=loss)
    ```
    """

    skew: float = 0.1
    reverse: bool = False

    def __post_init__(self):
        super().__post_init__()
        check(self, "skew", 0 <= self.skew < 1, "0 or more and below 1")

    def divergence(self, student_logps, teacher_logps):
        return divergence.skew_kl_loss(
            student_logps, teacher_logps, self.skew, self.reverse
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TotalVariationLoss(DistillationLoss):
    """Half the sum of absolute differences, `total_variation_loss`.

    Symmetric and from 0 to 1. Its gradient does not decay as the student
    approaches the teacher, so it needs a learning rate that decays. For the
    arguments see `DistillationLoss`.

    Example:

    ```python
    loss = kpt.losses.TotalVariationLoss()
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    loss.divergence(student, teacher)  # 0.25
    task.compile(loss=loss)
    ```
    """

    def divergence(self, student_logps, teacher_logps):
        return divergence.total_variation_loss(student_logps, teacher_logps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ULDLoss(DistillationLoss):
    """Universal logit distillation, for a teacher with another tokenizer.

    `uld_loss`: the Wasserstein distance with equal distances between all
    tokens. It ignores the identity of tokens, which only the hard labels
    supply: use `alpha` below 1. The paper adds 1.5 times this to the
    cross-entropy, at temperature 1: `alpha=0.6` up to a factor.

    TRL's `GOLDTrainer` compares the distributions shifted by one token. This
    loss, as the paper, compares the two that predict the token. For the
    arguments see `DistillationLoss`.

    Example:

    ```python
    loss = kpt.losses.ULDLoss()
    student, teacher = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    loss.divergence(student, teacher)  # 0.5
    task.compile(loss=loss)
    ```
    """

    metric_names = ("divergence", "hard_loss")

    @property
    def same_vocabulary(self):
        return False

    @property
    def needs(self):
        return ("divergences", "per_token_logps")

    def divergence(self, student_logps, teacher_logps):
        return divergence.uld_loss(student_logps, teacher_logps)
