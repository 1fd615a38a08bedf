"""The mesh axis that each axis of a variable is split over.

A new model family needs a line of `AXES` with the meaning of its variables'
axes. Variables without a line are split by size alone, which is correct but
may send more bytes.
"""

import re

# Split by columns, so that each device looks up its share of every row, and
# has its share of the gradient.
LOOKED_UP = r"token_embedding/embeddings"
# The meaning of a variable's axes, by the end of its path.
AXES = {
    LOOKED_UP: "vocabulary hidden",
    r"token_embedding/reverse_embeddings": "hidden vocabulary",
    # Gemma's kernels have their heads first.
    r"decoder_block_\d+/attention/(query|key|value)/kernel": (
        "heads hidden head_dim"
    ),
    r"self_attention/(query|key|value)/kernel": "hidden heads head_dim",
    r"self_attention/(query|key|value)/bias": "heads head_dim",
    r"(self_)?attention/attention_output/kernel": "heads head_dim hidden",
    r"(ffw_gating|ffw_gating_2)/kernel": "hidden width",
    r"feedforward_(gate|intermediate)_dense/kernel": "hidden width",
    r"(ffw_linear|feedforward_output_dense)/kernel": "width hidden",
    # Mixtures; the router has "sparse_" in its name.
    r"experts/expert_feedforward_(gate|intermediate)_dense": (
        "experts hidden width"
    ),
    r"experts/expert_feedforward_output_dense": "experts width hidden",
    r"sparse_feedforward_gate_dense/kernel": "hidden experts",
    # gpt-oss.
    r"experts/gate_up_proj": "experts hidden width",
    r"experts/down_proj": "experts width hidden",
    r"experts/(gate_up|down)_proj_bias": "experts width",
    r"router_dense/kernel": "hidden experts",
    # Qwen 3.5's linear attention, and its router.
    r"linear_attn/in_proj_(qkv|z)/kernel": "hidden width",
    r"linear_attn/in_proj_(a|b)/kernel": "hidden heads",
    r"linear_attn/out_proj/kernel": "width hidden",
    # Of each channel its taps.
    r"linear_attn/conv1d_kernel": "width head_dim",
    r"router_gate/kernel": "hidden experts",
    # Gemma 4's embedding for each layer, and its experts.
    r"per_layer_token_embedding/embeddings": "vocabulary hidden",
    r"(per_layer_input_gate|per_layer_model_projection)/kernel": (
        "hidden width"
    ),
    r"per_layer_up_proj/kernel": "width hidden",
    # Gemma 3n's hidden states and its path of low rank. Those are mixed on
    # each device.
    r"(make|join)_states/projection_\d+/kernel": "hidden hidden",
    r"altup/modality_router/kernel": "hidden head_dim",
    r"altup/(prediction|correction)_coefs/kernel": "head_dim head_dim",
    r"laurel/linear_left/kernel": "hidden width",
    r"laurel/linear_right/kernel": "width hidden",
    r"moe_expert_bank/(gate|up)_proj": "experts hidden width",
    r"moe_expert_bank/down_proj": "experts width hidden",
    r"moe_router/proj/kernel": "hidden experts",
}
# The order in which the model axis is assigned. The devices along it hold
# experts, heads or a share of a width; splitting the others only saves memory.
MODEL_ORDER = (
    "experts", "heads", "width", "vocabulary", "hidden", "head_dim",
)  # fmt: skip
ONLY_FOR_MEMORY = {"hidden", "head_dim"}
# A larger tensor (in bytes) must not be replicated.
LARGE = 2**20


def meanings(path, rank):
    """Looks up the meaning of a variable's axes by its path and their number.

    Returns:
        A tuple of str, or `None` for an unknown variable.
    """
    for pattern, names in AXES.items():
        axes = tuple(names.split())
        if re.search(rf"(^|/){pattern}$", path) and len(axes) == rank:
            return axes
    return None


def is_replicated(path, shape):
    """Returns `True` for norms, biases, scalars and the like."""
    if len(shape) < 2:
        return True
    return re.search(r"(norm|normalization)[^/]*/\w+$", path) is not None


def spread(path, shape, model=1, data=1):
    """Assigns mesh axes to the axes of a variable.

    The model axis splits the first axis in `MODEL_ORDER` whose size it
    divides. The data axis splits the longest of the remaining axes whose size
    it divides; for an embedding, the hidden axis comes before the vocabulary.

    Args:
        path: str, the path of a `keras.Variable`.
        shape: tuple of ints.
        model, data: int, devices along the mesh axes that weights are split
            over; 1 for not at all.

    Returns:
        A tuple as long as `shape` of `"model"`, `"data"` and `None`.
    """
    axes = [None] * len(shape)
    names = meanings(path, len(shape))
    # Those of all experts are matrices.
    is_bias = path.endswith("/bias")
    if is_replicated(path, shape) and not (is_bias and names):
        return tuple(axes)

    def by_size(i):
        return -shape[i], i

    def by_meaning(i):
        return MODEL_ORDER.index(names[i])

    order = sorted(range(len(shape)), key=by_meaning if names else by_size)
    if is_bias and names:
        # Split like the output of its kernel, or not at all.
        order = [i for i in order if names[i] == "heads"]
    if model > 1:
        _take(axes, shape, order, "model", model)
    if data > 1 and not is_bias:
        order = sorted(range(len(shape)), key=by_size)
        if names == ("vocabulary", "hidden"):
            order = [1, 0]
        _take(axes, shape, order, "data", data)
    return tuple(axes)


def _take(axes, shape, order, name, size):
    for i in order:
        if axes[i] is None and shape[i] % size == 0:
            axes[i] = name
            return


def check(path, shape, num_bytes, axes, model=1, data=1):
    """Raises an error if a variable of many bytes would be replicated.

    `axes` are those that `spread` returned for the same arguments.
    """
    if num_bytes <= LARGE or len(shape) < 2:
        return
    for name, size in (("model", model), ("data", data)):
        if size > 1 and name not in axes:
            raise ValueError(
                "Every large weight must have an axis that can be split over "
                "the mesh, or every device would hold a copy. Received: "
                f"{path!r} of shape {tuple(shape)} ({num_bytes} bytes) and a "
                f"{name} axis of {size} devices. Use a {name} axis whose "
                "size divides one of these."
            )
