"""Losses that distill a teacher's hidden states and attention weights."""

import dataclasses

import jax
import jax.numpy as jnp

from keras_posttrain.losses import reductions
from keras_posttrain.losses.loss import Loss, check

METRICS = ("mse", "cosine")
# Vectors with a smaller squared norm have no direction.
SMALLEST_SQUARE = 1e-12


def squared_error(student, teacher):
    """Sums the squared differences over the last axis, in float32."""
    return jnp.sum(jnp.square(student - teacher), axis=-1)


def cosine_distance(student, teacher):
    """Computes 1 minus the cosine of the angle between vectors, in float32.

    The vectors are along the last axis. Where either is 0 the result is 1,
    without a gradient.
    """

    def direction(vectors):
        square = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
        valid = square > SMALLEST_SQUARE
        scale = jax.lax.rsqrt(jnp.where(valid, square, 1.0))
        return vectors * jnp.where(valid, scale, 0.0)

    return 1 - jnp.sum(direction(student) * direction(teacher), axis=-1)


@dataclasses.dataclass(frozen=True)
class FeatureLoss(Loss):
    """Base class of the losses of hidden states and attention weights."""

    layers: str | tuple = "auto"
    metric: str = "mse"
    matching: str = "projection"

    def __post_init__(self):
        check(self, "metric", self.metric in METRICS, f"one of {METRICS}")
        valid = self.matching in self._matchings
        check(self, "matching", valid, f"one of {self._matchings}")
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
        valid = layers and all(
            len(pair) == 2 and all(isinstance(x, int) for x in pair)
            for pair in layers
        )
        check(self, "layers", valid, wanted)
        # Lists would make the settings unhashable.
        object.__setattr__(self, "layers", layers)

    @property
    def needs(self):
        return (self._student, self._teacher)

    def logps_mask(self, batch):
        """Selects no tokens: the loss reads no log-probabilities."""
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
            # NaN outside the mask must not reach a gradient.
            return jnp.where(seen, jnp.asarray(array).astype("float32"), 0.0)

        values = self._distances(
            read(student), jax.lax.stop_gradient(read(teacher))
        )
        total = reductions.token_sum(values, mask)
        metrics = {self.metric_names[0]: ("mean", total, mask.sum())}
        return {self._term: total}, metrics

    def _mask(self, batch):
        mask = batch["completion_mask"].astype("float32")
        if "teacher_mask" not in batch:
            return mask
        return mask * batch["teacher_mask"].astype("float32")


def hidden_state_loss(student_features, teacher_features, metric="mse"):
    """Computes the distance of hidden states of each token.

    The mean over layers of `mean((s - t)**2)`, or of `1 - cos(s, t)`.

    Args:
        student_features: float array of shape `(..., layers, dim)`, such as
            `(rows, length, layers, dim)`.
        teacher_features: float array of the same shape.
        metric: `"mse"` or `"cosine"`.

    Returns:
        A float32 array of shape `(...)`, without the last two axes.

    References:
        - [Romero et al., 2015](https://arxiv.org/abs/1412.6550), FitNets.
        - [Jiao et al., 2020](https://arxiv.org/abs/1909.10351), TinyBERT.

    Example:

    ```python
    kpt.losses.hidden_state_loss(np.array([[1.0, 2.0]]), np.zeros((1, 2)))
    # (1 + 4) / 2
    ```
    """
    if metric == "cosine":
        distances = cosine_distance(student_features, teacher_features)
    else:
        squares = squared_error(student_features, teacher_features)
        distances = squares / student_features.shape[-1]
    return distances.mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class HiddenStateLoss(FeatureLoss):
    """The distance of the student's hidden states from the teacher's.

    `hidden_state_loss`, averaged over the tokens that carry loss. It does
    not supervise predictions, so add it to a loss that does:

    ```python
    kpt.losses.SumLoss(
        [kpt.losses.ForwardKLLoss(), kpt.losses.HiddenStateLoss()],
        weights=[1.0, 0.1],
    )
    ```

    Where the teacher has a longer prompt, its states of the same tokens are
    taken. It must have the student's tokenizer.

    Tunix 0.1.7 projects over all axes, batch and time included; here there is
    one linear map per pair of layers, shared by all tokens.

    Args:
        layers: `"auto"`, every layer of the student spread evenly over the
            teacher's (TinyBERT's map), or a list of pairs
            `(student layer, teacher layer)`, counted from 0, or from -1 for
            the last. The outputs of the layers are compared.
        metric: see `hidden_state_loss`.
        matching: how the student's hidden size becomes the teacher's:
            `"projection"`, a linear map that is trained as well but not
            exported (FitNets, TinyBERT); `"pooling"`, the mean of
            neighbours down to the smaller size, without weights; or
            `"none"`, if both are equal.

    Call arguments:
        batch: dict of arrays of shape `(rows, length)`: `completion_mask`,
            and optionally `teacher_mask`, 0 for tokens that have no
            counterpart in the teacher.
        outputs: dict of arrays of shape `(rows, length, layers, dim)`:
            `student_features` and `teacher_features`, already of the same
            size.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict with
        `hidden_state_loss`, the same.

    Raises:
        ValueError: if a setting is none of the above.

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
        return hidden_state_loss(student, teacher, self.metric)


def attention_loss(student_attentions, teacher_attentions, metric="mse"):
    """Computes the distance of attention weights of each token.

    The mean over layers and heads of `sum((s - t)**2)` over keys, or of
    `1 - cos(s, t)`.

    Args:
        student_attentions: float array of shape
            `(rows, length, layers, heads * length)`, by query; the last axis
            holds the weights of all keys, head after head.
        teacher_attentions: float array of the same shape.
        metric: `"mse"` or `"cosine"`.

    Returns:
        A float32 array of shape `(rows, length)`.

    References:
        - [Zagoruyko & Komodakis, 2017](https://arxiv.org/abs/1612.03928).
        - [Jiao et al., 2020](https://arxiv.org/abs/1909.10351), TinyBERT.

    Example:

    ```python
    student = np.array([[[[1.0, 0.0]], [[0.5, 0.5]]]])
    teacher = np.array([[[[1.0, 0.0]], [[0.9, 0.1]]]])
    kpt.losses.attention_loss(student, teacher)  # [[0.0, 0.32]]
    ```
    """
    length = student_attentions.shape[1]
    by_head = (*student_attentions.shape[:-1], -1, length)
    distance = cosine_distance if metric == "cosine" else squared_error
    distances = distance(
        student_attentions.reshape(by_head),
        teacher_attentions.reshape(by_head),
    )
    return distances.mean(axis=-1).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class AttentionLoss(FeatureLoss):
    """The distance of the student's attention weights from the teacher's.

    `attention_loss`, averaged over the tokens that carry loss. Add it to
    another loss, like `HiddenStateLoss`.

    Both models must read the same tokens: rows have no prompts of the
    teacher's own.

    Zagoruyko and Komodakis compare activation maps of images. TinyBERT
    compares attention weights, with equal numbers of heads on both sides.

    Args:
        layers: as in `HiddenStateLoss`.
        metric: `"mse"`, the sum of the squared differences over keys (a mean
            would decrease with the length), or `"cosine"`.
        matching: how heads are compared: `"pooling"`, the mean over heads on
            both sides, or `"projection"`, a linear map from the student's
            heads to the teacher's that is trained as well but not exported.

    Call arguments:
        batch: as in `HiddenStateLoss`.
        outputs: dict of the `student_attentions` and `teacher_attentions` of
            `attention_loss`.

    Returns:
        `(loss, metrics)`: a float32 scalar, and a dict with
        `attention_loss`, the same.

    Raises:
        ValueError: if a setting is none of the above.

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
        return attention_loss(student, teacher, self.metric)
