"""Gemma 4's decoder layers: what they take besides hidden states.

A layer may use the keys and values of an earlier one, and is given features
of each token that are its own: a row of a second embedding, and a projection
of the first. KerasHub's backbone passes them on inside one large call.
`Policy` runs the layers one by one, and this file passes them on there.
"""

import functools

import jax.numpy as jnp
import keras

from keras_posttrain.models.attention import add_hook_of_gemma4
from keras_posttrain.models.experts import Expert, chosen_experts


def prepare(backbone):
    """Makes the layers of a text model follow the attention hook, once.

    KerasHub's decoder layers multiply with kernels of their sublayers. They
    are called here, so that adapters, codes and layouts have their effect.
    Outside of the scopes of `attention.py` the results are KerasHub's.
    """
    for layer in backbone.transformer_layers:
        if not hasattr(layer, "kpt_prepared"):
            layer.kpt_prepared = True
            donor = layer.kv_shared_layer_index
            shared = donor if layer.is_kv_shared_layer else None
            add_hook_of_gemma4(layer.attention, shared)
            layer.call = functools.partial(_decode, layer)


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

    Returns `(x, pair)`. Under the hook the pair are keys and values,
    otherwise it is KerasHub's array of both.
    """
    out, pair = attend(
        layer,
        layer.pre_attention_norm(x),
        (padding_mask, vision_mask),
        (cache, cache_update_index, cache_update_mask),
        shared_kv=shared_kv,
        positions=positions,
    )
    x = x + out
    x = x + layer.post_ffw_norm(_feed_forward(layer, x))
    if per_layer_input is not None:
        x = x + of_own_input(layer, x, per_layer_input)
    return x * jnp.asarray(layer.layer_scalar, x.dtype), pair


def attend(layer, x, masks, cached, **more):
    """Computes the attention of a decoder layer, normalized.

    Args:
        x: float array of shape `(tokens, 1, hidden)`, normalized.
        masks: the arguments `padding_mask` and `vision_mask` of the layer.
        cached: its arguments of the cache: `cache`, `cache_update_index` and
            `cache_update_mask`.
        **more: arguments of the attention layer.

    Returns:
        `(outputs, pair)`, the pair as of the decoder layer.
    """
    cache, index, update_mask = cached
    mask = layer._compute_attention_mask(x, *masks, cache, index)
    out, pair = layer.attention(
        x,
        attention_mask=mask,
        cache=cache,
        cache_update_index=index,
        cache_update_mask=update_mask,
        **more,
    )
    return layer.post_attention_norm(out), pair


def of_own_input(layer, x, own):
    """Computes what a decoder layer makes of the features that it is given.

    Args:
        x: float array of shape `(tokens, 1, hidden)`.
        own: float array of shape `(tokens, 1, size)`, those features.

    Returns:
        A float array of the shape of `x`.
    """
    gate = gelu(layer.per_layer_input_gate(x))
    out = layer.per_layer_up_proj(gate * own.astype(x.dtype))
    return layer.post_per_layer_input_norm(out)


def _feed_forward(layer, x):
    out = layer.pre_ffw_norm(x)
    out = layer.gating_ffw_2(out) * gelu(layer.gating_ffw(out))
    out = layer.ffw_linear(out)
    if layer.enable_moe_block:
        out = layer.post_ffw_norm_dense(out)
        out = out + layer.post_ffw_norm_moe_path(_mixture(layer, x))
    return out


def _mixture(layer, x):
    """Computes the experts of each token, which are added to the MLP."""
    router, flat = layer.moe_router, x.reshape(-1, x.shape[-1])
    scale = router.per_dim_scale * x.shape[-1] ** -0.5
    logits = router.proj(router.rms_norm(flat) * jnp.asarray(scale, x.dtype))
    expert = Expert(router.num_experts_per_token, True, _tanh_gelu)
    out = chosen_experts(
        expert, layer.pre_ffw_norm_moe(flat), logits, layer.moe_expert_bank
    )
    return out.reshape(x.shape)


_tanh_gelu = functools.partial(keras.activations.gelu, approximate=True)


def gelu(x):
    """Computes the activation in float32, as torch does."""
    return _tanh_gelu(x.astype("float32")).astype(x.dtype)


class PerLayerInputs(keras.layers.Layer):
    """Computes the features of tokens that each decoder layer has for itself.

    Its weights are those of the backbone.

    Call arguments:
        x: float array of shape `(tokens, 1, hidden)`, the scaled embeddings.
        own: float array of shape `(tokens, 1, layers * size)`, the rows of
            the second embedding.

    Returns:
        A float array of shape `(tokens, 1, layers, size)`.
    """

    def __init__(self, backbone, **kwargs):
        super().__init__(dtype=backbone.dtype_policy, **kwargs)
        self.projection = backbone.per_layer_model_projection
        self.norm = backbone.per_layer_projection_norm
        self.size = backbone.hidden_size_per_layer_input
        self.built = True

    def call(self, x, own):
        made = self.projection(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        made = self.norm(made.reshape(*made.shape[:-1], -1, self.size))
        own = own * jnp.asarray(self.size**0.5, own.dtype)
        return (made + own.reshape(made.shape)) * jnp.asarray(
            2**-0.5, made.dtype
        )


def run_layers(layers, x, inputs, run):
    """Runs decoder layers, with what they share and what each one has.

    Args:
        layers: list of decoder layers, from the first.
        x: float array of shape `(tokens, 1, hidden)`.
        inputs: result of `PerLayerInputs`, or `None`.
        run: function of a layer, hidden states and keyword arguments that
            returns what the layer does.
    """
    shared = [x for x in layers if x.is_kv_shared_layer]
    donors = {layer.kv_shared_layer_index for layer in shared}
    stored = {}
    for i, layer in enumerate(layers):
        more = {}
        if inputs is not None:
            more["per_layer_input"] = inputs[:, :, i]
        if layer.is_kv_shared_layer:
            more["shared_kv"] = stored[layer.kv_shared_layer_index]
        x, pair = run(layer, x, **more)
        if i in donors:
            stored[i] = pair
    return x
