"""Constant factors inside a model, as Granite has them."""

import functools


def multipliers_of(causal_lm):
    """Returns `Settings.multipliers` of a model, or `None`."""
    return vars(causal_lm).get("kpt_multipliers")


def set_multipliers(causal_lm, family, multipliers):
    """Makes KerasHub's layers compute with constant factors.

    The embeddings are multiplied, the scores of attention, and what each
    block adds to the residual stream; logits are divided. KerasHub's layers
    have no such factors, so the `call` of the embedding and of each decoder
    layer is replaced.

    Args:
        causal_lm: a KerasHub `CausalLM` on Mistral's layers.
        family: `Family`.
        multipliers: `Settings.multipliers`.
    """
    if multipliers is None:
        return
    # Keras's `__setattr__` would wrap and track the dict.
    vars(causal_lm)["kpt_multipliers"] = multipliers
    backbone = causal_lm.backbone
    embedding = backbone.token_embedding
    embedding.call = functools.partial(
        _embed, embedding.call, multipliers["embedding"], multipliers["logits"]
    )
    for layer in backbone.transformer_layers:
        attention = getattr(layer, family.layers.attention)
        attention._inv_norm_factor = multipliers["scores"]
        layer.call = functools.partial(_decode, layer, multipliers["residual"])


def _embed(plain_call, factor, divisor, inputs, reverse=False):
    outputs = plain_call(inputs, reverse=reverse)
    return outputs / divisor if reverse else outputs * factor


def _decode(
    layer,
    factor,
    decoder_sequence,
    decoder_padding_mask=None,
    decoder_attention_mask=None,
    self_attention_cache=None,
    self_attention_cache_update_index=None,
    training=None,
):
    """Computes a decoder layer of Mistral with scaled residuals."""
    mask = layer._compute_self_attention_mask(
        decoder_sequence=decoder_sequence,
        decoder_padding_mask=decoder_padding_mask,
        decoder_attention_mask=decoder_attention_mask,
        self_attention_cache=self_attention_cache,
        self_attention_cache_update_index=self_attention_cache_update_index,
    )
    x = layer._self_attention_layer(
        hidden_states=layer._self_attention_layernorm(decoder_sequence),
        attention_mask=mask,
        cache=self_attention_cache,
        cache_update_index=self_attention_cache_update_index,
    )
    cache = None
    if self_attention_cache is not None:
        x, cache = x
    hidden = decoder_sequence + x * factor
    x = layer._feedforward_layernorm(hidden)
    gate = layer._feedforward_gate_dense(x)
    # In float32, as KerasHub and torch compute it.
    gate = layer.activation(gate.astype("float32")).astype(gate.dtype)
    x = layer._feedforward_intermediate_dense(x) * gate
    hidden = hidden + layer._feedforward_output_dense(x) * factor
    return hidden if cache is None else (hidden, cache)
