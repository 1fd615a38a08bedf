"""How arrays that belong to a variable lie beside it on a mesh."""

import keras


def layout_of(variable):
    """Where Keras's distribution puts a variable.

    Args:
        variable: `keras.Variable`.

    Returns:
        A `keras.distribution.TensorLayout`; `None` without a distribution.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    return distribution.get_variable_layout(variable)


def factor_layouts(pair):
    """Layouts of the LoRA factors of a layer, after its kernel's.

    `A`'s rows are split as the kernel's inputs and `B`'s columns as its
    outputs, so that the products need no array moved that the layer's own
    does not move. An axis of a matrix is made of several of the kernel's: it
    is split where one of these is.

    Args:
        pair: `models/lora.py:Pair`.

    Returns:
        `(layout of A, layout of B)`, both `None` without a distribution.
    """
    layout = layout_of(pair.layer.kernel)
    if layout is None:
        return None, None
    # The axes of the kernel in the order of the matrix, inputs first.
    axes = [None] * len(pair.to_kernel)
    for axis, place in zip(layout.axes, pair.to_kernel):
        axes[place] = axis
    count = len(pair.in_shape)
    into = next(filter(None, axes[:count]), None)
    out = next(filter(None, axes[count:]), None)
    mesh = layout.device_mesh
    return (
        keras.distribution.TensorLayout((into, None), mesh),
        keras.distribution.TensorLayout((None, out), mesh),
    )
