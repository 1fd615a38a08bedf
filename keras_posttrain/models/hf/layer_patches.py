"""Reads and changes settings of built KerasHub layers.

These settings are not all arguments of the constructors.
"""

import contextlib
import re

import keras
from keras import ops

from keras_posttrain import _variables
from keras_posttrain.models import gemma3n as gemma3n_layers
from keras_posttrain.models import gemma4 as gemma4_layers
from keras_posttrain.models.hf import gemma3n, gemma4, qwen3_5
from keras_posttrain.models.hf.blocks import (
    HeadsNorm,
    at_path,
    multipliers_of,
    set_blocks,
)
from keras_posttrain.models.hf.config import Settings
from keras_posttrain.models.hf.families import attribute, is_linear, is_norm
from keras_posttrain.models.hf.rope import RotaryEmbedding, parameters_of
from keras_posttrain.models.linear import MatrixAxes


def gelu_pytorch_tanh(x):
    """Computes GELU by the tanh approximation, under Hugging Face's name."""
    return ops.gelu(x, approximate=True)


def gelu(x):
    """Computes GELU by the error function."""
    return ops.gelu(x, approximate=False)


ACTIVATIONS = {
    "silu": keras.activations.silu,
    "relu": keras.activations.relu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_pytorch_tanh,
}


def norms_of(causal_lm, family):
    """Returns the decoder's norms by Hugging Face name, the final one too."""
    found = {}
    for i, layer in enumerate(causal_lm.backbone.transformer_layers):
        for name, path in family.modules_of(layer).items():
            if is_norm(name):
                found[f"model.layers.{i}.{name}"] = attribute(layer, path)
    found["model.norm"] = causal_lm.backbone.layer_norm
    if hasattr(causal_lm.backbone, "per_layer_projection_norm"):
        found["model.per_layer_projection_norm"] = (
            causal_lm.backbone.per_layer_projection_norm
        )
    return found


def read_settings(causal_lm, family):
    """Reads the `Settings` that the built layers compute with.

    If layers differ in a setting that Hugging Face stores once for all of
    them, it raises a `ValueError`.
    """
    backbone = causal_lm.backbone
    head_dim = getattr(backbone, "head_dim", None)
    scale = 2 if backbone.__class__.__name__ == "GemmaBackbone" else 1
    layers = backbone.transformer_layers
    attentions = attentions_of(backbone, family)
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
            **(
                {"intermediate_size": backbone.intermediate_dim // scale}
                if family.has_width
                else {}
            ),
        },
        epsilon=_one("epsilon", {k: v.epsilon for k, v in norms.items()}),
        activation=_one(
            "activation", {x.name: _activation(x, family) for x in layers}
        ),
        rope=tuple(rope_of(attention, family) for attention in attentions),
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
        biases=_one(
            "set of biases",
            {layer.name: _biases(layer, family) for layer in layers},
        ),
        experts=_experts(layers, family),
        multipliers=multipliers_of(causal_lm),
        gemma4=gemma4.read_layers(backbone) if family.is_gemma4 else None,
        gemma3n=gemma3n.read_layers(backbone) if family.is_gemma3n else None,
        linear=qwen3_5.read_layers(backbone) if family.is_qwen3_5 else None,
    )


def attention_of(layer, family):
    """Returns the attention layer of a decoder layer, `None` without one."""
    return getattr(layer, family.layers.attention, None)


def attentions_of(backbone, family):
    """Returns the attention layer of each decoder layer.

    For one without it is that of another layer: in a config they share what
    it says of attention.
    """
    layers = backbone.transformer_layers
    found = [attention_of(layer, family) for layer in layers]
    some = next(filter(None, found))
    return [attention or some for attention in found]


def _linear_layers(layer, family):
    return {
        name: attribute(layer, path)
        for name, path in family.modules_of(layer).items()
        if is_linear(name)
    }


def _biases(layer, family):
    """Returns the modules of a decoder layer that have a bias."""
    found = _linear_layers(layer, family)
    return tuple(k for k, linear in found.items() if linear.bias is not None)


def _experts(layers, family):
    """Returns `Settings.experts` of the decoder layers, or `None`."""
    if family.experts is None:
        return None
    banks = [family.experts.bank(layer) for layer in layers]
    is_dense = [bank is None for bank in banks]
    if all(is_dense) and family.experts.switch:
        return None
    if all(is_dense):
        raise ValueError(
            "A mixture must have experts in one layer at least, or it cannot "
            f"be exported. Received: {len(layers)} layers without experts"
        )
    first = is_dense.index(False)
    bank, block = banks[first], attribute(layers[first], family.experts.block)
    if family.is_gemma4:
        top_k = layers[first].moe_router.num_experts_per_token
        width = bank.expert_intermediate_dim
    else:
        top_k, width = block.top_k, bank.intermediate_dim
    found = {
        "dense_layers": tuple(i for i, dense in enumerate(is_dense) if dense),
        "count": bank.num_experts,
        "top_k": top_k,
        "width": width,
        "alpha": getattr(bank, "alpha", None),
        "limit": getattr(bank, "limit", None),
        "shared_width": getattr(
            block,
            "intermediate_dim_shared",
            getattr(block, "shared_expert_intermediate_size", None),
        ),
        "is_normalized": getattr(block, "norm_top_k_prob", True),
    }
    named = {*family.experts.fields, "width", "dense_layers"}
    return {name: value for name, value in found.items() if name in named}


def _one(what, values):
    """Returns the value that all layers share."""
    if len(set(values.values())) > 1:
        raise ValueError(
            f"A Hugging Face config has one {what} for all layers, and this "
            "model has several; `keras_posttrain.models.hf.loading.repair` "
            f"corrects those left at KerasHub's default. Received: {values}"
        )
    return next(iter(values.values()))


def apply_settings(causal_lm, family, settings):
    """Makes the built layers follow the settings; returns notes on changes."""
    set_heads_norms(causal_lm, family)
    if family.is_gemma3n:
        set_hidden_states(causal_lm.backbone, settings.gemma3n)
    set_paths(causal_lm.backbone, family)
    notes = set_epsilon(causal_lm, family, settings.epsilon)
    notes += set_tied(causal_lm, settings.tied)
    notes += set_biases(causal_lm, family, settings.biases)
    set_blocks(causal_lm, family, settings.multipliers)
    changed = {}
    layers = causal_lm.backbone.transformer_layers
    for i, layer in enumerate(layers):
        attention = attention_of(layer, family)
        if attention is None:
            continue
        if not family.is_gemma:
            if _activation(layer, family) != settings.activation:
                layer.activation = ACTIVATIONS[settings.activation]
                changed["hidden_act", settings.activation] = True
        elif not family.is_gemma4 and set_query_scalar(
            attention, settings.query_scalar
        ):
            changed["query_pre_attn_scalar", settings.query_scalar] = True
        if set_rope(attention, family, settings.rope[i]):
            changed["rope", str(settings.rope[i])] = True
        if set_window(layer, family, settings.windows[i]):
            changed["sliding_window", str(settings.windows)] = True
        for name in ("alpha", "limit"):
            if set_constant(layer, family, settings.experts, name):
                changed[f"swiglu_{name}", settings.experts[name]] = True
    return notes + [f"{what} set to {value}" for what, value in changed]


def set_constant(layer, family, experts, name):
    """Sets a constant of the experts' activation; true if it changed."""
    if experts is None or name not in experts:
        return False
    bank = family.experts.bank(layer)
    is_new = getattr(bank, name) != experts[name]
    setattr(bank, name, experts[name])
    return is_new


def set_paths(backbone, family):
    """Gives the variables of experts paths that depend on the model alone.

    KerasHub numbers the names of these blocks by how many the process has
    made, and checkpoints and optimizers know variables by their paths. Keras
    has no public way to rename a variable.
    """
    if family.experts is None or family.is_gemma4:
        return
    for layer in backbone.transformer_layers:
        block = getattr(layer, family.experts.block)
        name = re.sub(r"_\d+$", "", block.name)
        for variable in block.variables:
            parts = variable.path.split("/")
            parts = [name if part == block.name else part for part in parts]
            variable._path = "/".join(parts)


def set_heads_norms(causal_lm, family):
    """Replaces the norms of queries and keys by those of all heads."""
    if not family.heads_norms:
        return
    heads = {"q_norm": "q_proj", "k_norm": "k_proj"}
    for layer in causal_lm.backbone.transformer_layers:
        attention = attention_of(layer, family)
        for norm, projection in heads.items():
            name = family.modules[f"self_attn.{norm}"].rpartition(".")[2]
            path = family.modules[f"self_attn.{projection}"]
            old, kernel = getattr(attention, name), attribute(layer, path)
            new = HeadsNorm(
                old.epsilon, dtype=attention.dtype_policy, name=old.name
            )
            with at_path(attention.path):
                new.build((None, None, *kernel.kernel.shape[1:]))
            with _unlocked_tracker(attention) as tracker:
                tracker.untrack(old)
                setattr(attention, name, new)


def set_hidden_states(backbone, own):
    """Makes a backbone of Gemma 4 one of Gemma 3n.

    Args:
        own: `Settings.gemma3n`.
    """
    hidden, norm = (None, None, backbone.hidden_dim), backbone.layer_norm
    gemma4_layers.prepare(backbone)
    for i, layer in enumerate(backbone.transformer_layers):
        parts = _parts_of_gemma3n(layer, own, is_first=i == 0)
        with at_path(layer.path):
            _attach(layer, parts, hidden)
        with _unlocked_tracker(layer) as tracker:
            # Gemma 3n has no such factor.
            tracker.untrack(layer.layer_scalar)
            layer.layer_scalar = None
        gemma3n_layers.prepare(layer, own["sparsity"][i])
    join = gemma3n_layers.Projections(
        own["states"], True, name="join_states", dtype=norm.dtype_policy
    )
    # Its path is not that of a norm, whose variables are not split.
    _attach(norm, {"join": join}, hidden)
    gemma3n_layers.join_states(norm)
    if backbone.vocab_size_per_layer_input < backbone.vocabulary_size:
        gemma3n_layers.look_up_known(backbone.per_layer_token_embedding)


def _parts_of_gemma3n(layer, own, is_first):
    """Returns what a decoder layer has of Gemma 3n, by attribute."""
    more, norm = {"dtype": layer.dtype_policy}, layer.pre_attention_norm

    def new_norm(name):
        return type(norm)(epsilon=norm.epsilon, name=name, **more)

    return {
        "altup": gemma3n_layers.AltUp(
            own["states"], own["active"], own["is_scaled"],
            new_norm("router_norm"), name="altup", **more,
        ),
        "laurel": gemma3n_layers.Laurel(
            own["rank"], new_norm("post_laurel_norm"), name="laurel", **more
        ),
        "make_states": gemma3n_layers.Projections(
            own["states"], False, name="make_states", **more
        ) if is_first else None,
    }  # fmt: skip


def _attach(layer, parts, input_shape):
    """Builds layers inside a built one, by attribute."""
    for part in filter(None, parts.values()):
        part.build(input_shape)
    with _unlocked_tracker(layer):
        for name, part in parts.items():
            setattr(layer, name, part)


def set_biases(causal_lm, family, biases):
    """Gives linear layers a bias of zeros; returns a list of notes."""
    added = {}
    for layer in causal_lm.backbone.transformer_layers:
        for name, linear in _linear_layers(layer, family).items():
            if name in biases and linear.bias is None:
                _add_bias(linear)
                added[name] = True
    return [f"bias added to {', '.join(added)}"] if added else []


def _add_bias(layer):
    # The bias gets the path that it would have had.
    parent = layer.path.rpartition("/")[0]
    with at_path(parent), _unlocked_tracker(layer):
        layer.bias = layer.add_weight(
            name="bias",
            shape=MatrixAxes(layer).out_shape,
            initializer="zeros",
            trainable=True,
        )


def set_epsilon(causal_lm, family, epsilon):
    """Sets the epsilon of all norms, including those of queries and keys."""
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
    if family.experts is not None:
        return "silu"
    return getattr(layer.activation, "__name__", str(layer.activation))


def _query_scalar(attention, family):
    """Returns the number whose square root divides the scores."""
    if family.is_gemma4:
        return 1
    if not family.is_gemma:
        return attention_head_dim(attention, family)
    if attention.query_head_dim_normalize:
        return attention.head_dim
    return attention.hidden_dim // attention.num_query_heads


def set_query_scalar(attention, scalar):
    """Makes a Gemma attention layer divide scores by `scalar ** 0.5`.

    After the layer is built, its `head_dim` is used only for this scale, also
    under `attention_scope`; sizes are taken from the arrays. Returns whether
    the layer was changed.
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


def rope_of(attention, family):
    """Returns the `rope_parameters` of an attention layer."""
    found = parameters_of(getattr(attention, family.layers.rotary))
    if family.is_qwen3_5 and attention.rotary_dim != attention.head_dim:
        partial = attention.partial_rotary_factor
        return {**found, "partial_rotary_factor": float(partial)}
    if not family.is_gemma4 or attention.rotary_dim == attention.head_dim:
        return found
    partial, size = attention.rope_partial_rotary_factor, attention.head_dim
    if int(partial * size // 2) != attention.rotary_dim // 2:
        # KerasHub turns one pair at least.
        partial = attention.rotary_dim / size
    return {
        "rope_type": "proportional",
        "rope_theta": found["rope_theta"],
        "partial_rotary_factor": float(partial),
        "factor": found.get("factor", 1.0),
    }


def set_rope(attention, family, parameters):
    """Replaces the rotary layer if its parameters differ; true if it did."""
    old = getattr(attention, family.layers.rotary)
    # KerasHub rounds yarn's factor to the dtype of the activations.
    is_exact = isinstance(old, RotaryEmbedding) or (
        parameters["rope_type"] != "yarn"
    )
    if is_exact and rope_of(attention, family) == parameters:
        return False
    head_dim = attention_head_dim(attention, family)
    new = RotaryEmbedding(
        head_dim, parameters, dtype=attention.dtype_policy, name=old.name
    )
    with _unlocked_tracker(attention) as tracker:
        tracker.untrack(old)
        setattr(attention, family.layers.rotary, new)
    if family.is_gemma4 or family.is_qwen3_5:
        # KerasHub passes the features on that this layer is to rotate.
        attention.rotary_dim = attention.head_dim
    return True


def attention_head_dim(attention, family):
    """Returns the features of a head, from the query's kernel."""
    if family.is_qwen3_5:
        # The kernel also has a gate for each of them.
        return attention.head_dim
    path = family.modules["self_attn.q_proj"].split(".")[-1]
    return getattr(attention, path).kernel.shape[-1]


@contextlib.contextmanager
def _unlocked_tracker(layer):
    """Allows a built layer to get another layer or variable.

    Keras locks the tracker of a built layer and has no public way to unlock
    it. Keras's own layers use the private one too, for LoRA and quantization.
    """
    tracker = layer._tracker
    was_locked = tracker.locked
    tracker.unlock()
    try:
        yield tracker
    finally:
        if was_locked:
            tracker.lock()


def set_tied(causal_lm, tied):
    """Ties or unties the head, even if the constructor cannot.

    Returns a list of notes on the change, empty or of one line.
    """
    backbone = causal_lm.backbone
    embedding = backbone.token_embedding
    if embedding.tie_weights == tied:
        return []
    embedding.tie_weights = tied
    if tied:
        _variables.remove(embedding, "reverse_embeddings")
    else:
        with _unlocked_tracker(embedding):
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
    """Returns the attention window of a decoder layer, or `None`."""
    attention = attention_of(layer, family)
    if family.layers.windows == "mistral":
        return layer.sliding_window
    if family.layers.windows == "qwen3":
        return attention.sliding_window_size or None
    if family.layers.windows == "gpt_oss":
        return attention.sliding_window
    if not getattr(attention, "use_sliding_window_attention", False):
        return None
    return attention.sliding_window_size


def set_window(layer, family, window):
    """Sets a layer's window (`None`: no limit); returns whether it changed."""
    old = window_of(layer, family)
    attention = attention_of(layer, family)
    if old != window:
        if family.layers.windows == "mistral":
            layer.sliding_window = attention._sliding_window = window
        elif family.layers.windows == "qwen3":
            attention.sliding_window_size = window
        elif family.layers.windows == "gpt_oss":
            attention.sliding_window = window
        else:
            attention.use_sliding_window_attention = window is not None
            if window is not None:
                attention.sliding_window_size = window
    masked = False
    if family.layers.windows in ("qwen", "qwen3", "gpt_oss"):
        masked = _set_mask_window(layer, window)
    return old != window or masked


def windows_of(backbone, family):
    """Returns the windows that the layers of a KerasHub backbone must have.

    KerasHub 0.32 windows the 2nd, 4th, ... layer of gpt-oss, transformers the
    1st, 3rd, ... layer.
    """
    if family.layers.windows == "gpt_oss":
        size = backbone.sliding_window
        return [None if i % 2 else size for i in range(backbone.num_layers)]
    return [window_of(x, family) for x in backbone.transformer_layers]


def _set_mask_window(layer, window):
    """Applies the window of a layer in its attention mask.

    KerasHub's Qwen layers apply the window in the attention, but not in the
    branch that JAX always uses (`ops.dot_product_attention`). Those of gpt-oss
    let a token attend to one token too many. It is therefore applied to the
    mask that the decoder layer computes. Returns whether the layer was
    changed.
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
    """A decoder layer's attention mask, limited to a sliding window."""

    def __init__(self, layer, window):
        # The method is taken from the class, since the instance's attribute
        # is this object.
        self.full = type(layer)._compute_self_attention_mask.__get__(layer)
        self.window = window

    def __call__(self, **kwargs):
        mask = self.full(**kwargs)
        start = kwargs["self_attention_cache_update_index"]
        queries = ops.arange(mask.shape[-2]) + (0 if start is None else start)
        keys = ops.arange(mask.shape[-1])
        near = queries[:, None] - keys[None, :] < self.window
        return ops.minimum(mask, ops.cast(near, mask.dtype))
