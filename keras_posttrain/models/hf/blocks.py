"""Decoder layers that compute what those of KerasHub do not.

OLMo 2 and 3 normalize what a block adds and not what it reads, and the heads
of queries and keys together. Granite has constant factors.
"""

import contextlib
import functools

import keras
from keras import ops


def multipliers_of(causal_lm):
    """Returns `Settings.multipliers` of a model, or `None`."""
    return vars(causal_lm).get("kpt_multipliers")


def set_blocks(causal_lm, family, multipliers):
    """Replaces the `call` of decoder layers where the family needs it.

    With `multipliers` the embeddings are multiplied, the scores of attention,
    and what each block adds to the residual stream; logits are divided.

    Args:
        causal_lm: a KerasHub `CausalLM` on the layers of Mistral or Qwen 3.
        family: `Family`.
        multipliers: `Settings.multipliers`.
    """
    factor, backbone = 1.0, causal_lm.backbone
    if multipliers is not None:
        # Keras's `__setattr__` would wrap and track the dict.
        vars(causal_lm)["kpt_multipliers"] = multipliers
        factor, embedding = multipliers["residual"], backbone.token_embedding
        embedding.call = functools.partial(
            _embed,
            embedding.call,
            multipliers["embedding"],
            multipliers["logits"],
        )
    for layer in backbone.transformer_layers:
        if multipliers is not None:
            attention = getattr(layer, family.layers.attention)
            attention._inv_norm_factor = multipliers["scores"]
        if multipliers is not None or family.post_norms:
            layer.call = functools.partial(
                _decode, layer, factor, family.post_norms
            )


@contextlib.contextmanager
def at_path(path):
    """Makes new variables have paths that begin with that of a layer."""
    with contextlib.ExitStack() as stack:
        for name in path.split("/"):
            stack.enter_context(keras.name_scope(name))
        yield


class HeadsNorm(keras.layers.Layer):
    """Divides all features of all heads by their root mean square.

    Args:
        epsilon: float, added to the mean square.

    Call arguments:
        x: float tensor of shape `(batch, length, heads, head_dim)`.
    """

    def __init__(self, epsilon, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, input_shape):
        self.scale = self.add_weight(
            name="scale",
            shape=(input_shape[-2] * input_shape[-1],),
            initializer="ones",
            dtype=self.variable_dtype,
        )
        self.built = True

    def call(self, x):
        y = ops.cast(x, "float32")
        square = ops.mean(ops.square(y), axis=(-2, -1), keepdims=True)
        y = y * ops.rsqrt(square + self.epsilon)
        scale = ops.reshape(self.scale, x.shape[-2:])
        return ops.cast(y * scale, x.dtype)


def _embed(plain_call, factor, divisor, inputs, reverse=False):
    outputs = plain_call(inputs, reverse=reverse)
    return outputs / divisor if reverse else outputs * factor


def _decode(
    layer,
    factor,
    post_norms,
    decoder_sequence,
    decoder_padding_mask=None,
    decoder_attention_mask=None,
    self_attention_cache=None,
    self_attention_cache_update_index=None,
    training=None,
):
    """Computes a decoder layer of Mistral or Qwen 3.

    With `post_norms` the norms are those of the blocks' outputs.
    """
    norms = layer._self_attention_layernorm, layer._feedforward_layernorm
    before, after = (lambda norm, x: norm(x)), (lambda norm, x: x)
    if post_norms:
        before, after = after, before
    mask = layer._compute_self_attention_mask(
        decoder_sequence=decoder_sequence,
        decoder_padding_mask=decoder_padding_mask,
        decoder_attention_mask=decoder_attention_mask,
        self_attention_cache=self_attention_cache,
        self_attention_cache_update_index=self_attention_cache_update_index,
    )
    x = layer._self_attention_layer(
        hidden_states=before(norms[0], decoder_sequence),
        attention_mask=mask,
        cache=self_attention_cache,
        cache_update_index=self_attention_cache_update_index,
    )
    cache = None
    if self_attention_cache is not None:
        x, cache = x
    hidden = decoder_sequence + after(norms[0], x) * factor
    x = before(norms[1], hidden)
    gate = layer._feedforward_gate_dense(x)
    # In float32, as KerasHub and torch compute it.
    gate = layer.activation(gate.astype("float32")).astype(gate.dtype)
    x = layer._feedforward_intermediate_dense(x) * gate
    x = layer._feedforward_output_dense(x)
    hidden = hidden + after(norms[1], x) * factor
    return hidden if cache is None else (hidden, cache)
