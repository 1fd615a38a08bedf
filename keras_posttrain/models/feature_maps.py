"""Maps from the features of a student and its teacher to one shape."""

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.losses import AttentionLoss
from keras_posttrain.models.activation_capture import ActivationCapture


class FeatureMap(keras.layers.Layer):
    """Brings the layers that a feature loss compares to one shape.

    With `matching="projection"` the map is a learned kernel for each pair of
    layers, initialized by `seed`; other settings have no weights.
    """

    def __init__(self, loss, student, teacher, *, seed=0, name=None):
        super().__init__(name=name, dtype="float32")
        self.of_attention = isinstance(loss, AttentionLoss)
        counts = [len(p.backbone.transformer_layers) for p in
                  (student, teacher)]  # fmt: skip
        self.pairs = layer_pairs(loss, *counts)
        self.matching = loss.matching
        sizes = [self._size(policy) for policy in (student, teacher)]
        self.sizes = sizes
        if self.matching == "none" and sizes[0] != sizes[1]:
            raise ValueError(
                "matching='none' compares features directly, so they must "
                f"have one size. Received: a student with {sizes[0]}, a "
                f"teacher with {sizes[1]}. Use matching='projection' or "
                "'pooling'."
            )
        self.kernels = []
        if self.matching == "projection":
            self.kernels = [
                self.add_weight(
                    name=f"kernel_{i}",
                    shape=sizes,
                    initializer=keras.initializers.GlorotUniform(seed + i),
                )
                for i in range(len(self.pairs))
            ]
        self.built = True

    def _size(self, policy):
        backbone = policy.backbone
        if not self.of_attention:
            return backbone.hidden_dim
        for name in ("num_query_heads", "num_heads"):
            if hasattr(backbone, name):
                return getattr(backbone, name)
        raise ValueError(
            f"The number of heads of {type(backbone).__name__} is not known. "
            "Use a `HiddenStateLoss`."
        )

    def layers_of(self, side):
        """Returns the layers read of one side: 0 student, 1 teacher."""
        return tuple(dict.fromkeys(pair[side] for pair in self.pairs))

    def features(self, student, teacher, source=None):
        """Maps the captured activations of both models to one shape.

        Args:
            student, teacher: `ActivationCapture`s.
            source: int32 array of shape `(rows, length)`, the column of the
                teacher's row that predicts each of the student's tokens; or
                `None` where both read the same tokens.

        Returns:
            A dict of two float32 arrays of shape
            `(rows, length, layers, features)`: `student_features` and
            `teacher_features`, or `student_attentions` and
            `teacher_attentions`.
        """
        name = "attentions" if self.of_attention else "features"
        if self.of_attention and source is not None:
            raise ValueError(
                "Attention weights are compared key by key, which takes a "
                "teacher that reads the student's tokens and no others. Use "
                "a `HiddenStateLoss`, or rows without a prompt of the "
                "teacher's own."
            )
        read = [self._attention, self._hidden][not self.of_attention]
        mine, theirs = zip(
            *(
                read(i, student, teacher, pair)
                for i, pair in enumerate(self.pairs)
            )
        )
        theirs = jax.lax.stop_gradient(jnp.stack(theirs, axis=2))
        if source is not None:
            # The same token is in the column after.
            theirs = jnp.take_along_axis(
                theirs, source[:, :, None, None] + 1, axis=1, mode="clip"
            )
        return {
            f"student_{name}": jnp.stack(mine, axis=2),
            f"teacher_{name}": theirs,
        }

    def _hidden(self, i, student, teacher, pair):
        x = student.hidden[pair[0]].astype("float32")
        y = teacher.hidden[pair[1]].astype("float32")
        if self.kernels:
            x = x @ self.kernels[i].value
        elif self.matching == "pooling":
            size = min(self.sizes)
            x, y = (
                x @ pooling(self.sizes[0], size),
                y @ pooling(self.sizes[1], size),
            )
        return x, y

    def _attention(self, i, student, teacher, pair):
        x = student.attentions[pair[0]].astype("float32")
        y = teacher.attentions[pair[1]].astype("float32")
        if self.kernels:
            x = jnp.einsum("rhqk,hg->rgqk", x, self.kernels[i].value)
        elif self.matching == "pooling":
            x, y = (z.mean(axis=1, keepdims=True) for z in (x, y))
        rows, heads, queries, keys = x.shape
        return tuple(
            z.transpose(0, 2, 1, 3).reshape(rows, queries, heads * keys)
            for z in (x, y)
        )


def feature_maps(losses, student, teacher):
    """Makes the `FeatureMap` of each feature loss."""
    maps = [
        FeatureMap(loss, student, teacher, name=f"feature_map_{i}")
        for i, loss in enumerate(losses)
    ]
    for side, policy in enumerate((student, teacher)):
        capture_of(maps, side).check(policy)
    return maps


def capture_of(maps, side):
    """Returns a side's `ActivationCapture`: 0 student, 1 teacher."""
    if not maps:
        return None
    hidden = {x for m in maps if not m.of_attention for x in m.layers_of(side)}
    attention = {x for m in maps if m.of_attention for x in m.layers_of(side)}
    return ActivationCapture(
        hidden_layers=tuple(sorted(hidden)),
        attention_layers=tuple(sorted(attention)),
    )


def layer_pairs(loss, student_layers, teacher_layers):
    """Returns the pairs `(student layer, teacher layer)` to compare.

    `layers="auto"` spreads all layers of the student evenly over the
    teacher's and pairs the last ones.
    """
    if loss.layers == "auto":
        step = teacher_layers / student_layers
        return tuple(
            (i, max(round((i + 1) * step) - 1, 0))
            for i in range(student_layers)
        )
    pairs = []
    for pair in loss.layers:
        for layer, count, who in zip(
            pair, (student_layers, teacher_layers), ("student", "teacher")
        ):
            if not -count <= layer < count:
                raise ValueError(
                    f"`layers` names a layer that the {who} does not have: "
                    f"it has {count}, 0 to {count - 1} (or -1 for the last). "
                    f"Received: {tuple(pair)} in layers={loss.layers!r}"
                )
        pairs.append((pair[0] % student_layers, pair[1] % teacher_layers))
    return tuple(pairs)


def pooling(size, pooled):
    """Returns the matrix of adaptive average pooling to `pooled` features."""
    matrix = np.zeros((size, pooled), np.float32)
    for i in range(pooled):
        start, stop = i * size // pooled, -(-(i + 1) * size // pooled)
        matrix[start:stop, i] = 1.0 / (stop - start)
    return matrix
