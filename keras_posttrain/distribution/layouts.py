"""Which axis of each variable goes over which axis of the mesh.

A new model family is known by what the axes of its variables mean: a line of
`AXES`. What no line knows is spread by size alone, which is right, if not
always the fewest bytes to send.
"""

import re

# Rows are looked up in it: split by columns, each device has its share of
# every row, and of the gradient too.
LOOKED_UP = r"token_embedding/embeddings"
# What the axes of a variable mean, by the end of its path.
AXES = {
    LOOKED_UP: ("vocabulary", "hidden"),
    r"token_embedding/reverse_embeddings": ("hidden", "vocabulary"),
    # Gemma's kernels have their heads first.
    r"decoder_block_\d+/attention/(query|key|value)/kernel": (
        "heads", "hidden", "head_dim",
    ),
    r"self_attention/(query|key|value)/kernel": (
        "hidden", "heads", "head_dim",
    ),
    r"self_attention/(query|key|value)/bias": ("heads", "head_dim"),
    r"(self_)?attention/attention_output/kernel": (
        "heads", "head_dim", "hidden",
    ),
    r"(ffw_gating|ffw_gating_2)/kernel": ("hidden", "width"),
    r"feedforward_(gate|intermediate)_dense/kernel": ("hidden", "width"),
    r"(ffw_linear|feedforward_output_dense)/kernel": ("width", "hidden"),
    # Mixtures; the router has "sparse_" in its name.
    r"experts/expert_feedforward_(gate|intermediate)_dense": (
        "experts", "hidden", "width",
    ),
    r"experts/expert_feedforward_output_dense": (
        "experts", "width", "hidden",
    ),
    r"sparse_feedforward_gate_dense/kernel": ("hidden", "experts"),
}  # fmt: skip
# What the model axis takes first. The devices along it hold whole experts or
# heads, or a share of a width; the rest only saves memory.
MODEL_ORDER = (
    "experts", "heads", "width", "vocabulary", "hidden", "head_dim",
)  # fmt: skip
ONLY_FOR_MEMORY = {"hidden", "head_dim"}
# A larger tensor (in bytes) must not lie whole on every device.
LARGE = 2**20


def meanings(path, rank):
    """What the axes of a variable mean.

    Args:
        path: str, the path of a `keras.Variable`.
        rank: int, the number of its axes.

    Returns:
        A tuple of str, or `None` for a variable that is not known.
    """
    for pattern, axes in AXES.items():
        if re.search(rf"(^|/){pattern}$", path) and len(axes) == rank:
            return axes
    return None


def is_replicated(path, shape):
    """Whether a variable is a norm, a bias or a scalar, or the like."""
    if len(shape) < 2:
        return True
    return re.search(r"(norm|normalization)[^/]*/\w+$", path) is not None


def spread(path, shape, model=1, data=1):
    """The axis of the mesh that each axis of a variable goes over.

    The model axis takes the first of `MODEL_ORDER` that divides, the data
    axis the longest of the others that does, and of an embedding the hidden
    one before the vocabulary.

    Args:
        path: str, the path of a `keras.Variable`.
        shape: tuple of ints.
        model, data: int, devices along the mesh's two axes over which
            weights are split; 1 for not at all.

    Returns:
        A tuple as long as `shape` of `"model"`, `"data"` and `None`.
    """
    axes = [None] * len(shape)
    names = meanings(path, len(shape))
    is_bias = path.endswith("bias")
    if is_replicated(path, shape) and not (is_bias and names):
        return tuple(axes)

    def by_size(i):
        return -shape[i], i

    def by_meaning(i):
        return MODEL_ORDER.index(names[i])

    order = sorted(range(len(shape)), key=by_meaning if names else by_size)
    if is_bias and names:
        # As the output of its kernel, or not at all.
        order = [i for i in order if names[i] == "heads"]
    if model > 1:
        _take(axes, shape, order, "model", model)
    if data > 1 and not is_bias:
        order = sorted(range(len(shape)), key=by_size)
        if names == AXES[LOOKED_UP]:
            order = [1, 0]
        _take(axes, shape, order, "data", data)
    return tuple(axes)


def _take(axes, shape, order, name, size):
    for i in order:
        if axes[i] is None and shape[i] % size == 0:
            axes[i] = name
            return


def check(path, shape, num_bytes, axes, model=1, data=1):
    """Raises where a large variable would lie whole along an axis.

    Args:
        path, shape, model, data: as in `spread`.
        num_bytes: int, of the whole variable.
        axes: what `spread` gave.
    """
    if num_bytes <= LARGE or len(shape) < 2:
        return
    for name, size in (("model", model), ("data", data)):
        if size > 1 and name not in axes:
            raise ValueError(
                "Every large weight must have an axis that divides over the "
                f"mesh, or it would lie whole on every device. Received: "
                f"{path!r} of shape {tuple(shape)} ({num_bytes} bytes) and a "
                f"{name} axis of {size} devices. Use a {name} axis whose "
                "size divides one of these."
            )
