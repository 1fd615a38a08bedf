"""Qwen 3.5's decoder layers, whose linear attention has a state.

KerasHub's layers of linear attention take one sequence a row, and their
programs compile for a minute. Here they mix tokens as `recurrence.py` says;
their weights stay where they are.
"""

import functools

import jax
import jax.numpy as jnp
import keras_hub

from keras_posttrain.models.attention import add_hook_of_qwen3_5
from keras_posttrain.models.delta_rule import normalized
from keras_posttrain.models.experts import compute_chosen_experts
from keras_posttrain.models.recurrence import PackedRows, current_rows

# The `layer_type` of a layer that has no attention.
LINEAR = "linear_attention"
BACKBONES = (
    keras_hub.models.Qwen3_5Backbone,
    keras_hub.models.Qwen3_5MoeBackbone,
)


def is_text(backbone):
    """Returns whether a backbone is a Qwen 3.5 without other inputs."""
    return type(backbone) in BACKBONES and backbone.text_only_model


def prepare(backbone):
    """Makes the layers of a text model follow the scopes, once."""
    for layer in backbone.transformer_layers:
        if hasattr(layer, "kpt_prepared"):
            continue
        layer.kpt_prepared = True
        compute_chosen_experts(layer)
        if layer.layer_type == LINEAR:
            mixer = layer._linear_attn
            mixer.call = functools.partial(_call, mixer, mixer.call)
        else:
            add_hook_of_qwen3_5(layer._self_attention_layer)


def _call(
    layer,
    plain_call,
    hidden_states,
    attention_mask=None,
    cache=None,
    cache_update_index=None,
    training=None,
):
    """Computes a layer of linear attention; the arguments are KerasHub's."""
    rows = current_rows()
    if rows is None:
        if cache is not None:
            return plain_call(
                hidden_states,
                attention_mask=attention_mask,
                cache=cache,
                cache_update_index=cache_update_index,
                training=training,
            )
        shape = hidden_states.shape[:2]
        rows = PackedRows(jnp.ones(shape, "int32"))
        if attention_mask is not None:
            mask = attention_mask[..., None].astype(hidden_states.dtype)
            hidden_states = hidden_states * mask
    x = hidden_states
    inputs, gate = layer.in_proj_qkv(x), layer.in_proj_z(x)
    # Before they are added: on a CPU a sum over an axis of size 1 is slow.
    inputs, beta, step = (
        y.reshape(-1, y.shape[-1])
        for y in (inputs, layer.in_proj_b(x), layer.in_proj_a(x))
    )
    beta = jax.nn.sigmoid(beta.astype("float32"))
    step = step.astype("float32") + _float32(layer.dt_bias)
    decay = -jnp.exp(_float32(layer.A_log)) * jax.nn.softplus(step)
    out = rows(
        inputs,
        jnp.asarray(layer.conv1d_weight),
        functools.partial(_split, layer),
        decay,
        beta,
    )
    gate = jax.nn.silu(gate.reshape(out.shape).astype("float32"))
    out = (layer.norm(out.astype(x.dtype)) * gate).astype(x.dtype)
    return layer.out_proj(out.reshape(*x.shape[:-1], -1))


def _float32(variable):
    return jnp.asarray(variable, "float32")


def _split(layer, mixed):
    """Returns the queries, keys and values of a convolution's outputs.

    Heads of values are more; several in succession share a key.
    """
    mixed = jax.nn.silu(mixed.astype("float32"))
    ends = layer.key_dim, 2 * layer.key_dim
    query, key, value = jnp.split(mixed, ends, axis=-1)
    heads = (*mixed.shape[:-1], layer.num_k_heads, layer.head_k_dim)
    group = layer.num_v_heads // layer.num_k_heads
    query, key = (
        jnp.repeat(normalized(x.reshape(heads)), group, axis=-2)
        for x in (query, key)
    )
    value = value.reshape(
        *mixed.shape[:-1], layer.num_v_heads, layer.head_v_dim
    )
    return query * layer.head_k_dim**-0.5, key, value
