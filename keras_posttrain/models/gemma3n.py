"""Gemma 3n's decoder layers, on those of Gemma 4.

Attention, shared keys and values, and the features that each layer has of a
token are those of Gemma 4. Gemma 3n also has

- several hidden states of a token, of which a layer computes one and updates
  the others by it ([Baykal et al., 2023](https://arxiv.org/abs/2301.13310));
- a path of low rank next to the attention;
- MLPs of which a part of the features is 0.

The first layer makes the hidden states, and the final norm joins them, so that
KerasHub's own calls are those of Gemma 3n too.
"""

import functools

import jax.numpy as jnp
import keras

from keras_posttrain.models import gemma4


class AltUp(keras.layers.Layer):
    """Predicts the hidden states after a decoder layer, and corrects them.

    Args:
        count: int, the hidden states of a token.
        active: int, the number of the one that decoder layers compute.
        is_scaled: bool, whether the active state is scaled where it gates
            the features of a layer's own, see `gemma4.of_own_input`.
        norm: norm layer, not built, of the router's inputs.
    """

    def __init__(self, count, active, is_scaled, norm, **kwargs):
        super().__init__(**kwargs)
        self.count, self.active = count, active
        self.is_scaled = is_scaled
        self.router_norm = norm
        sizes = {
            "modality_router": count,
            "prediction_coefs": count**2,
            "correction_coefs": count,
        }
        for name, size in sizes.items():
            setattr(self, name, _linear(name, size, self.dtype_policy))

    def build(self, input_shape):
        self.router_norm.build(input_shape)
        self.modality_router.build(input_shape)
        inputs = (*input_shape[:-1], self.count)
        self.prediction_coefs.build(inputs)
        self.correction_coefs.build(inputs)
        self.correct_output_scale = self.add_weight(
            name="correct_output_scale",
            shape=input_shape[-1:],
            initializer="zeros",
        )
        self.built = True

    def predict(self, states):
        """Mixes hidden states, `(tokens, 1, states, hidden)`."""
        coefs = self.prediction_coefs(
            self._routed(states[..., self.active, :])
        )
        coefs = coefs.reshape(*coefs.shape[:-1], self.count, self.count)
        return jnp.einsum("btmn,btnh->btmh", coefs, states) + states

    def correct(self, states, computed):
        """Updates predicted states by the one that was computed.

        Args:
            states: float array of shape `(tokens, 1, states, hidden)`.
            computed: float array of shape `(tokens, 1, hidden)`.
        """
        coefs = self.correction_coefs(self._routed(computed)) + 1
        change = computed - states[..., self.active, :]
        return states + change[..., None, :] * coefs[..., None]

    def scaled(self, x):
        """Returns the active state as `gemma4.of_own_input` takes it."""
        if not self.is_scaled:
            return x
        return x * jnp.asarray(self.correct_output_scale, x.dtype)

    def _routed(self, x):
        routed = self.router_norm(x) * jnp.asarray(1 / x.shape[-1], x.dtype)
        routed = self.modality_router(routed).astype("float32")
        return jnp.tanh(routed).astype(x.dtype)


class Laurel(keras.layers.Layer):
    """Adds a product of low rank to its inputs, normalized.

    Args:
        rank: int.
        norm: a norm that is not built.

    Call arguments:
        x: float array of shape `(tokens, 1, hidden)`.
    """

    def __init__(self, rank, norm, **kwargs):
        super().__init__(**kwargs)
        self.rank, self.post_laurel_norm = rank, norm
        self.linear_left = _linear("linear_left", rank, self.dtype_policy)

    def build(self, input_shape):
        hidden = input_shape[-1]
        self.linear_right = _linear("linear_right", hidden, self.dtype_policy)
        self.linear_left.build(input_shape)
        self.linear_right.build((*input_shape[:-1], self.rank))
        self.post_laurel_norm.build(input_shape)
        self.built = True

    def call(self, x):
        return x + self.post_laurel_norm(
            self.linear_right(self.linear_left(x))
        )


class Projections(keras.layers.Layer):
    """A linear layer for each hidden state of a token but the first.

    The results are scaled to the size of the first state.

    Args:
        count: int, the hidden states of a token.
        is_last: bool, whether the states are joined or made.

    Call arguments:
        x: float array of shape `(tokens, 1, hidden)`, the embeddings, or of
            shape `(tokens, 1, states, hidden)` if they are joined.

    Returns:
        A float array of the other of these shapes.
    """

    def __init__(self, count, is_last, **kwargs):
        super().__init__(**kwargs)
        self.count, self.is_last = count, is_last

    def build(self, input_shape):
        self.projections = [
            _linear(f"projection_{i}", input_shape[-1], self.dtype_policy)
            for i in range(self.count - 1)
        ]
        for projection in self.projections:
            projection.build(input_shape)
        self.built = True

    def call(self, x):
        states = [x] * self.count
        if self.is_last:
            states = [x[..., i, :] for i in range(self.count)]
        size = _size(states[0])
        for i, projection in enumerate(self.projections, 1):
            made = projection(states[i])
            states[i] = made * size / _size(made, 1e-5)
        if self.is_last:
            return jnp.mean(jnp.stack(states), axis=0)
        return jnp.stack(states, axis=-2)


def prepare(layer, sparsity):
    """Makes a decoder layer of Gemma 4 one of Gemma 3n.

    The layer must have `altup`, `laurel` and `make_states`, which is `None`
    in all layers but the first.

    Args:
        sparsity: float from 0 to 1, the part of the MLP's features that is 0.
    """
    layer.sparsity = sparsity
    layer.call = functools.partial(_decode, layer)


def join_states(norm):
    """Makes the final norm join hidden states by its `join`, first."""
    plain_call = norm.call
    norm.call = lambda x: plain_call(norm.join(x))


def joins_states(norm):
    """Returns whether a final norm joins hidden states."""
    return hasattr(norm, "join")


def count_states(backbone):
    """Returns the hidden states of a token, 1 in other families."""
    norm = getattr(backbone, "layer_norm", None)
    return norm.join.count if joins_states(norm) else 1


def look_up_known(embedding):
    """Makes ids beyond an embedding have its first row."""
    plain_call, rows = embedding.call, embedding.input_dim
    embedding.call = lambda ids: plain_call(known(ids, rows))


def known(ids, rows):
    """Returns ids, 0 in the place of those that are not below `rows`."""
    return jnp.where(ids < rows, ids, 0)


def _decode(
    layer,
    x,
    padding_mask=None,
    vision_mask=None,
    cache=None,
    cache_update_index=0,
    cache_update_mask=None,
    per_layer_input=None,
    shared_kv=None,
    positions=None,
):
    """Computes a decoder layer; the arguments are those of KerasHub's.

    `x` has the shape `(tokens, 1, states, hidden)`, in the first layer
    `(tokens, 1, hidden)`. Returns `(x, pair)` as `gemma4.py` does.
    """
    if layer.make_states is not None:
        x = layer.make_states(x)
    altup = layer.altup
    states = altup.predict(x)
    active = states[..., altup.active, :]
    normalized = layer.pre_attention_norm(active)
    out, pair = gemma4.attend(
        layer,
        normalized,
        (padding_mask, vision_mask),
        (cache, cache_update_index, cache_update_mask),
        shared_kv=shared_kv,
        positions=positions,
    )
    out = active + out + layer.laurel(normalized)
    out = out / jnp.asarray(2**0.5, out.dtype)
    out = out + layer.post_ffw_norm(_feed_forward(layer, out))
    states = altup.correct(states, out)
    own = gemma4.of_own_input(
        layer, altup.scaled(states[..., altup.active, :]), per_layer_input
    )
    return states.at[..., 1:, :].add(own[..., None, :]), pair


def _feed_forward(layer, x):
    x = layer.pre_ffw_norm(x)
    gate = gemma4.gelu(_largest(layer.gating_ffw(x), layer.sparsity))
    return layer.ffw_linear(layer.gating_ffw_2(x) * gate)


def _largest(x, sparsity):
    """Keeps the largest features, as far as they are normally distributed.

    What they exceed the bound by is kept. `sparsity` is the part that is 0.
    """
    if sparsity == 0:
        return x
    # Nothing else needs it, so that the package's import does without.
    import statistics

    y = x.astype("float32")
    mean = jnp.mean(y, axis=-1, keepdims=True)
    bound = statistics.NormalDist().inv_cdf(sparsity) * _size(y - mean)
    return jnp.maximum(y - mean - bound, 0).astype(x.dtype)


def _size(x, least=0.0):
    """Computes the root mean square, whose gradient at 0 is 0.

    `least` is that of its square.
    """
    square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    least = max(least, float(jnp.finfo(square.dtype).tiny))
    return jnp.sqrt(jnp.maximum(square, jnp.asarray(least, square.dtype)))


def _linear(name, size, dtype):
    return keras.layers.Dense(size, use_bias=False, name=name, dtype=dtype)
