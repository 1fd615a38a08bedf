"""Reads and sets on built KerasHub layers what constructors cannot say."""

import keras
from keras import ops

from keras_posttrain.models.hf.config import Settings
from keras_posttrain.models.hf.families import attribute
from keras_posttrain.models.hf.rope import RotaryEmbedding, parameters_of


def gelu_pytorch_tanh(x):
    """GELU by the tanh formula, under Hugging Face's name."""
    return ops.gelu(x, approximate=True)


def gelu(x):
    """GELU by the error function."""
    return ops.gelu(x, approximate=False)


ACTIVATIONS = {
    "silu": keras.activations.silu,
    "relu": keras.activations.relu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_pytorch_tanh,
}


def norms_of(causal_lm, family):
    """The norms of the decoder layers by name, and the last one.

    Returns:
        A dict from Hugging Face module names to KerasHub layers.
    """
    found = {}
    for i, layer in enumerate(causal_lm.backbone.transformer_layers):
        for name, path in family.modules.items():
            if name.endswith("norm"):
                found[f"model.layers.{i}.{name}"] = attribute(layer, path)
    found["model.norm"] = causal_lm.backbone.layer_norm
    return found


def read_settings(causal_lm, family):
    """What the built layers compute with.

    Args:
        causal_lm: a built KerasHub `CausalLM`.
        family: its `Family`.

    Returns:
        The `Settings` that reproduce the model.

    Raises:
        ValueError: if its norms or layers differ in what Hugging Face has one
            number for.
    """
    backbone = causal_lm.backbone
    head_dim = getattr(backbone, "head_dim", None)
    scale = 2 if backbone.__class__.__name__ == "GemmaBackbone" else 1
    layers = backbone.transformer_layers
    attentions = [getattr(layer, family.attention) for layer in layers]
    norms = norms_of(causal_lm, family)
    return Settings(
        sizes={
            "vocab_size": backbone.vocabulary_size,
            "num_hidden_layers": backbone.num_layers,
            "num_attention_heads": backbone.num_query_heads,
            "num_key_value_heads": backbone.num_key_value_heads,
            "head_dim": (
                head_dim or backbone.hidden_dim // backbone.num_query_heads
            ),
            "hidden_size": backbone.hidden_dim,
            "intermediate_size": backbone.intermediate_dim // scale,
        },
        epsilon=_one("epsilon", {k: v.epsilon for k, v in norms.items()}),
        activation=_one(
            "activation", {x.name: _activation(x, family) for x in layers}
        ),
        rope=tuple(
            parameters_of(getattr(a, family.rotary)) for a in attentions
        ),
        windows=tuple(window_of(layer, family) for layer in layers),
        query_scalar=_one(
            "query scale",
            {
                layer.name: _query_scalar(attention, family)
                for layer, attention in zip(layers, attentions, strict=True)
            },
        ),
        attention_soft_cap=_one(
            "attention soft cap",
            {
                layer.name: getattr(attention, "logit_soft_cap", None)
                for layer, attention in zip(layers, attentions, strict=True)
            },
        ),
        final_soft_cap=backbone.token_embedding.logit_soft_cap,
        tied=backbone.token_embedding.tie_weights,
    )


def _one(what, values):
    """The value that all share."""
    if len(set(values.values())) > 1:
        raise ValueError(
            f"A Hugging Face config has one {what} for all layers, and this "
            "model has several; `keras_posttrain.models.hf.loading.repair` "
            f"sets what KerasHub left at its own default. Received: {values}"
        )
    return next(iter(values.values()))


def apply_settings(causal_lm, family, settings):
    """Makes the built layers compute what the settings say.

    Args:
        causal_lm: a built KerasHub `CausalLM`.
        family: its `Family`.
        settings: the `Settings` it should have.

    Returns:
        A list of str, a line for each thing that the constructor had left
        otherwise.
    """
    notes = set_epsilon(causal_lm, family, settings.epsilon)
    notes += set_tied(causal_lm, settings.tied)
    changed = {}
    layers = causal_lm.backbone.transformer_layers
    for i, layer in enumerate(layers):
        attention = getattr(layer, family.attention)
        if not family.is_gemma:
            if _activation(layer, family) != settings.activation:
                layer.activation = ACTIVATIONS[settings.activation]
                changed["hidden_act", settings.activation] = True
        elif set_query_scalar(attention, settings.query_scalar):
            changed["query_pre_attn_scalar", settings.query_scalar] = True
        if set_rope(attention, family, settings.rope[i]):
            changed["rope", str(settings.rope[i])] = True
        if set_window(layer, family, settings.windows[i]):
            changed["sliding_window", str(settings.windows)] = True
    return notes + [f"{what} set to {value}" for what, value in changed]


def set_epsilon(causal_lm, family, epsilon):
    """Gives every norm, those of queries and keys too, one epsilon."""
    norms = norms_of(causal_lm, family).values()
    wrong = [norm for norm in norms if norm.epsilon != epsilon]
    for norm in wrong:
        norm.epsilon = epsilon
    if not wrong:
        return []
    return [f"rms_norm_eps set to {epsilon} in {len(wrong)} norms"]


def _activation(layer, family):
    if family.is_gemma:
        return "gelu_pytorch_tanh"
    return getattr(layer.activation, "__name__", str(layer.activation))


def _query_scalar(attention, family):
    """The number whose square root divides the scores."""
    if not family.is_gemma:
        return attention_head_dim(attention, family)
    if attention.query_head_dim_normalize:
        return attention.head_dim
    return attention.hidden_dim // attention.num_query_heads


def set_query_scalar(attention, scalar):
    """Divides the scores of a Gemma attention layer by `scalar ** 0.5`.

    Once the layer is built, its `head_dim` is read for this scale alone, on
    the plain path and under the seam (sizes come from the arrays).

    Returns:
        bool, whether that was a change.
    """
    normalize = attention.query_head_dim_normalize
    if normalize and attention.head_dim == scalar:
        return False
    if not normalize and (
        attention.hidden_dim // attention.num_query_heads == scalar
    ):
        return False
    attention.query_head_dim_normalize = True
    attention.head_dim = scalar
    return True


def set_rope(attention, family, parameters):
    """Puts our rotary layer in place of one with other parameters.

    Returns:
        bool, whether that was a change.
    """
    old = getattr(attention, family.rotary)
    if parameters_of(old) == parameters:
        return False
    head_dim = attention_head_dim(attention, family)
    new = RotaryEmbedding(
        head_dim, parameters, dtype=attention.dtype_policy, name=old.name
    )
    with _unlocked(attention):
        attention._tracker.untrack(old)
        setattr(attention, family.rotary, new)
    return True


def attention_head_dim(attention, family):
    """The features of a head, by the kernel of the query."""
    path = family.modules["self_attn.q_proj"].split(".")[-1]
    return getattr(attention, path).kernel.shape[-1]


class _unlocked:
    """Lets a built layer take a layer or a variable more.

    Keras locks the lists of what a built layer tracks; opening them takes the
    private tracker, as Keras's own layers do for LoRA and quantization.
    """

    def __init__(self, layer):
        self.tracker = layer._tracker

    def __enter__(self):
        self.was_locked = self.tracker.locked
        self.tracker.unlock()

    def __exit__(self, *error):
        if self.was_locked:
            self.tracker.lock()


def set_tied(causal_lm, tied):
    """Ties or unties the head, also where the constructor has no choice.

    Returns:
        A list of str, empty or one line.
    """
    backbone = causal_lm.backbone
    embedding = backbone.token_embedding
    if embedding.tie_weights == tied:
        return []
    embedding.tie_weights = tied
    if tied:
        del embedding.reverse_embeddings
    else:
        with _unlocked(embedding):
            embedding.reverse_embeddings = embedding.add_weight(
                shape=(embedding.output_dim, embedding.input_dim),
                initializer=embedding.embeddings_initializer,
                name="reverse_embeddings",
                trainable=True,
            )
    if hasattr(backbone, "tie_word_embeddings"):
        backbone.tie_word_embeddings = tied
    return [f"tie_word_embeddings set to {tied}"]


def window_of(layer, family):
    """The window of a decoder layer's attention, or `None`."""
    attention = getattr(layer, family.attention)
    if family.windows == "mistral":
        return layer.sliding_window
    if family.windows == "qwen3":
        return attention.sliding_window_size or None
    if not getattr(attention, "use_sliding_window_attention", False):
        return None
    return attention.sliding_window_size


def set_window(layer, family, window):
    """Limits a decoder layer to the last `window` tokens; `None`: to none.

    Returns:
        bool, whether that was a change.
    """
    was = window_of(layer, family)
    attention = getattr(layer, family.attention)
    if was != window:
        if family.windows == "mistral":
            layer.sliding_window = attention._sliding_window = window
        elif family.windows == "qwen3":
            attention.sliding_window_size = window
        else:
            attention.use_sliding_window_attention = window is not None
            if window is not None:
                attention.sliding_window_size = window
    masked = False
    if family.windows in ("qwen", "qwen3"):
        masked = _window_the_mask(layer, window)
    return was != window or masked


def _window_the_mask(layer, window):
    """Applies the window of a Qwen layer on the plain path.

    KerasHub's Qwen layers apply it in the attention, but not on the branch
    that JAX always takes (`ops.dot_product_attention`), so it goes in the
    mask that the decoder layer makes.
    """
    name = "_compute_self_attention_mask"
    mask_function = vars(layer).get(name)
    if window is None:
        if mask_function is not None:
            delattr(layer, name)
        return mask_function is not None
    if mask_function is not None and mask_function.window == window:
        return False
    setattr(layer, name, _WindowedMask(layer, window))
    return True


class _WindowedMask:
    """A decoder layer's own mask, cut to a sliding window."""

    def __init__(self, layer, window):
        # Through the class, since the instance's attribute is this object.
        self.full = type(layer)._compute_self_attention_mask.__get__(layer)
        self.window = window

    def __call__(self, **kwargs):
        mask = self.full(**kwargs)
        start = kwargs["self_attention_cache_update_index"]
        queries = ops.arange(mask.shape[-2]) + (0 if start is None else start)
        keys = ops.arange(mask.shape[-1])
        near = queries[:, None] - keys[None, :] < self.window
        return ops.minimum(mask, ops.cast(near, mask.dtype))
