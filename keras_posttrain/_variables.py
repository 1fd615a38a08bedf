"""Variables that have a shape, a dtype and a layout, but no value yet."""

import contextlib

import jax
import keras


@contextlib.contextmanager
def without_values():
    """Defers the initialization of variables that are made inside.

    Keras defers it in a stateless scope only, which makes no optimizer,
    knows no layouts and initializes such a variable at the next chance.
    Therefore the method that calls a variable's initializer is replaced
    here; a test pins it.

    Yields:
        A list, to which each variable made inside is appended. Each must be
        given a value before it is used.
    """
    initialize, made = keras.Variable._initialize_with_initializer, []

    def defer(variable, initializer):
        variable._initialize_layout()
        # While a model is built, its layers are traced with what the
        # initializers would return.
        variable._value, variable._initializer = None, initializer
        made.append(variable)

    keras.Variable._initialize_with_initializer = defer
    try:
        yield made
    finally:
        keras.Variable._initialize_with_initializer = initialize


@contextlib.contextmanager
def shapes_only():
    """Makes variables that have a shape and a dtype, and use no memory.

    A task that is made inside can be compiled and planned, inside or
    afterwards, but neither trained nor sampled from: its variables' values
    are `jax.ShapeDtypeStruct`s. A directory that has only a `config.json`
    is enough.

    Example:

    ```python
    with kpt.distribution.shapes_only():
        task = kpt.SFTTask.from_preset("llama3_8b_en", load_weights=False)
    task.compile()
    print(task.plan("v5e:4x4", batch_size=16))
    ```
    """
    with without_values() as made:
        try:
            yield
        finally:
            for variable in made:
                variable._value = jax.ShapeDtypeStruct(
                    variable.shape, variable.dtype
                )
                variable._initializer = None
