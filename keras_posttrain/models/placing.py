"""The layouts that variables would have on another mesh."""

import contextlib
import copy

import jax
import keras

from keras_posttrain.models import quantized


@contextlib.contextmanager
def using(distribution):
    """Sets Keras's distribution, which each thread has its own of."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def for_policies(distribution, policies):
    """Copies a distribution so that it lays out variables of other meshes.

    Distributions return the layout that a variable has. The copy returns the
    one that a new variable would get, for LoRA factors and quantized kernels
    too.

    Args:
        distribution: Keras distribution.
        policies: list of `Policy`s that have the variables.
    """
    meshes, layouts = [distribution.device_mesh], {}
    meshes.append(getattr(distribution, "expert_mesh", None))
    copied = copy.copy(distribution)

    def get_variable_layout(variable):
        own = layouts.get(id(variable), getattr(variable, "_layout", None))
        if own is not None and any(own.device_mesh is m for m in meshes):
            return own
        return distribution.get_variable_layout(shape_alone(variable))

    copied.get_variable_layout = get_variable_layout
    with using(copied):
        # Their layouts follow from those of the kernels.
        for policy in policies:
            adapter = policy.adapter
            for each in adapter.stack if adapter is not None else ():
                for pair, *factors in zip(each.pairs, each.a, each.b):
                    layouts.update(
                        zip(map(id, factors), pair.factor_layouts())
                    )
            for kernel in quantized.kernels(policy.causal_lm):
                layouts.update(
                    zip(map(id, kernel.variables), kernel.layouts())
                )
    return copied


def shape_alone(variable, layout=None):
    """Copies a variable's path, shape and dtype, without its value."""
    twin = object.__new__(type(variable))
    vars(twin).update(vars(variable))
    twin._value = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
    twin._layout, twin._initializer = layout, None
    return twin
