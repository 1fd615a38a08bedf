"""Losses of a student that learns what is inside a teacher."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.losses.loss import Loss
from keras_posttrain.losses.policy_loss import check

METRICS = ("mse", "cosine")
# Vectors with a smaller square of their length have no direction.
SMALLEST_SQUARE = 1e-12


def squared_error(student, teacher):
    """The sum of the squared differences over the last axis.

    Args:
        student, teacher: float arrays of the same shape `(..., dim)`.

    Returns:
        A float32 array of shape `(...)`.
    """
    return jnp.sum(jnp.square(student - teacher), axis=-1)


def cosine_distance(student, teacher):
    """1 less the cosine of the angle between vectors.

    Args:
        student, teacher: float arrays of the same shape `(..., dim)`.

    Returns:
        A float32 array of shape `(...)`, from 0 to 2; 1 without a gradient
        where either vector is 0.
    """

    def direction(vectors):
        square = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
        sound = square > SMALLEST_SQUARE
        scale = jax.lax.rsqrt(jnp.where(sound, square, 1.0))
        return vectors * jnp.where(sound, scale, 0.0)

    return 1 - jnp.sum(direction(student) * direction(teacher), axis=-1)


@dataclasses.dataclass(frozen=True)
class FeatureLoss(Loss):
    """What the losses of hidden states and of attention weights share."""

    layers: str | tuple = "auto"
    metric: str = "mse"
    matching: str = "projection"

    def __post_init__(self):
        check(self, "metric", self.metric in METRICS, f"one of {METRICS}")
        sound = self.matching in self._matchings
        check(self, "matching", sound, f"one of {self._matchings}")
        if self.layers == "auto":
            return
        wanted = (
            '"auto" or a list of one or more pairs (student layer, teacher '
            "layer), counted from 0, or from -1 for the last, such as "
            "[(0, 1), (3, 5)]"
        )
        try:
            layers = tuple(tuple(pair) for pair in self.layers)
        except TypeError:
            layers = ()
        sound = layers and all(
            len(pair) == 2 and all(isinstance(x, int) for x in pair)
            for pair in layers
        )
        check(self, "layers", sound, wanted)
        # Lists would make the settings unhashable.
        object.__setattr__(self, "layers", layers)

    @property
    def needs(self):
        return (self._student, self._teacher)

    def logps_mask(self, batch):
        """No token is projected on the vocabulary."""
        return jnp.zeros(batch["completion_mask"].shape, bool)

    def normalizers(self, batch):
        return {self._term: self._mask(batch).sum()}

    def total(self, batch, outputs):
        mask = self._mask(batch)
        student, teacher = (outputs[name] for name in self.needs)
        if student.shape != teacher.shape or student.ndim != 4:
            raise ValueError(
                f"`{self._student}` and `{self._teacher}` must have the same "
                "shape (rows, length, layers, dim). Received: "
                f"{self._student}.shape={student.shape}, "
                f"{self._teacher}.shape={teacher.shape}."
            )
        seen = (mask != 0)[:, :, None, None]

        def read(array):
            # What is no number outside the mask must not reach a gradient.
            return jnp.where(seen, jnp.asarray(array).astype("float32"), 0.0)

        values = self._distances(
            read(student), jax.lax.stop_gradient(read(teacher))
        )
        total = reductions.token_sum(values.mean(axis=-1), mask)
        metrics = {self.metric_names[0]: ("mean", total, mask.sum())}
        return {self._term: total}, metrics

    def _mask(self, batch):
        mask = batch["completion_mask"].astype("float32")
        if "teacher_mask" not in batch:
            return mask
        return mask * batch["teacher_mask"].astype("float32")


@dataclasses.dataclass(frozen=True)
class HiddenStateLoss(FeatureLoss):
    """The distance of the student's hidden states from the teacher's.

    The mean over layers and over the tokens that carry loss. It says nothing
    of what is to be predicted, so it is added to a loss that does:

    ```python
    kpt.losses.SumLoss(
        [kpt.losses.ForwardKLLoss(), kpt.losses.HiddenStateLoss()],
        weights=[1.0, 0.1],
    )
    ```

    Tunix 0.1.7's projection is over all axes, batch and time among them; here
    it is one linear map per pair of layers, for every token.

    Args:
        layers: `"auto"`, every layer of the student spread evenly over the
            teacher's (TinyBERT's map), or a list of pairs
            `(student layer, teacher layer)`, counted from 0, or from -1 for
            the last. What is compared is a layer's output.
        metric: `"mse"`, the mean squared difference, or `"cosine"`, 1 less
            the cosine of the angle.
        matching: how the student's hidden size becomes the teacher's:
            `"projection"`, a linear map that is trained along and not
            exported (FitNets, TinyBERT); `"pooling"`, the mean of
            neighbours down to the smaller size, with nothing to train; or
            `"none"`, where both are equal.

    Call arguments:
        batch: dict of arrays of shape `(rows, length)`: `completion_mask`,
            and `teacher_mask` where some tokens have no counterpart in the
            teacher.
        outputs: dict of arrays of shape `(rows, length, layers, dim)`:
            `student_features` and `teacher_features`, of the same size by
            then.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict with
        `hidden_state_loss`, the same.

    Raises:
        ValueError: if a setting is none of the above.

    Reference:
        - [Romero et al., 2015](https://arxiv.org/abs/1412.6550), FitNets.
        - [Jiao et al., 2020](https://arxiv.org/abs/1909.10351), TinyBERT.

    Example:

    ```python
    loss = kpt.losses.HiddenStateLoss(metric="mse")
    batch = {"completion_mask": np.array([[0.0, 1.0]])}
    student = np.array([[[[9.0, 9.0]], [[1.0, 2.0]]]])
    outputs = {
        "student_features": student,
        "teacher_features": np.zeros_like(student),
    }
    value, metrics = loss(batch, outputs)  # value is (1 + 4) / 2
    ```
    """

    metric_names = ("hidden_state_loss",)
    _matchings = ("projection", "pooling", "none")
    _student, _teacher = "student_features", "teacher_features"
    _term = "hidden_state"

    def _distances(self, student, teacher):
        if self.metric == "cosine":
            return cosine_distance(student, teacher)
        return squared_error(student, teacher) / student.shape[-1]


@dataclasses.dataclass(frozen=True)
class AttentionLoss(FeatureLoss):
    """The distance of the student's attention weights from the teacher's.

    Of each token that carries loss, what it attends to is compared: the sum
    over the tokens before it of the squared differences, or the angle. The
    mean over heads, layers and tokens; to be added to another loss, as
    `HiddenStateLoss` is.

    Zagoruyko and Komodakis compare maps of activations in images; the
    weights of attention itself are TinyBERT's, which has as many heads on
    both sides.

    Args:
        layers: as in `HiddenStateLoss`.
        metric: `"mse"`, the sum of the squared differences over keys (a mean
            would fade with the length), or `"cosine"`.
        matching: how heads are compared: `"pooling"`, the mean over heads on
            both sides, or `"projection"`, a linear map from the student's
            heads to the teacher's that is trained along and not exported.

    Call arguments:
        batch: as in `HiddenStateLoss`.
        outputs: dict of arrays of shape
            `(rows, length, layers, heads * length)`: `student_attentions`
            and `teacher_attentions`, by query; the last axis holds the
            weights of all keys, head after head.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict with
        `attention_loss`, the same.

    Raises:
        ValueError: if a setting is none of the above.

    Reference:
        - [Zagoruyko & Komodakis, 2017](https://arxiv.org/abs/1612.03928).
        - [Jiao et al., 2020](https://arxiv.org/abs/1909.10351), TinyBERT.

    Example:

    ```python
    loss = kpt.losses.AttentionLoss()
    batch = {"completion_mask": np.array([[0.0, 1.0]])}
    outputs = {
        "student_attentions": np.array([[[[1.0, 0.0]], [[0.5, 0.5]]]]),
        "teacher_attentions": np.array([[[[1.0, 0.0]], [[0.9, 0.1]]]]),
    }
    value, metrics = loss(batch, outputs)  # value is 2 * 0.4^2 = 0.32
    ```
    """

    matching: str = "pooling"

    metric_names = ("attention_loss",)
    _matchings = ("pooling", "projection")
    _student, _teacher = "student_attentions", "teacher_attentions"
    _term = "attention"

    def _distances(self, student, teacher):
        length = student.shape[1]
        if student.shape[-1] % length:
            raise ValueError(
                f"The last axis of `{self._student}` and `{self._teacher}` "
                "must hold the weights of all keys for each head, heads * "
                f"length of them. Received: shape={student.shape}."
            )
        by_head = (*student.shape[:-1], -1, length)
        metric = cosine_distance if self.metric == "cosine" else squared_error
        distances = metric(student.reshape(by_head), teacher.reshape(by_head))
        return distances.mean(axis=-1)
